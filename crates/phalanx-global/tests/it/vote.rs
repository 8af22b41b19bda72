//! The ranks' vote on a step: a gradient that is not finite on one rank of any mesh keeps all from the step.

use std::sync::Barrier;

use phalanx_checkpoint::state::Folder;
use phalanx_global::{CheckpointInfo, ErrorKind, GlobalGrads, GlobalParams, Parallel, Placement};
use phalanx_global::{Global, GlobalStep, Sbp};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::{Adam, Optimizer, clip_factor};
use phalanx_nn::{GradSink, Reduction, Result, Scope, Seed, StepKey, Tape, Threads, Value};

use crate::common::{Over, number, on_mesh};

const B: Sbp = Sbp::broadcast();
const S0: Sbp = Sbp::split(0);

/// A mesh, the layout of the parameters, and the layout of a batch.
type Kind = (&'static [usize], Parallel, Vec<Sbp>);

fn kinds() -> [Kind; 5] {
    let tensor = || {
        Parallel::new()
            .column("tensor", &["up"])
            .row("tensor", &["down"])
    };
    [
        (&[3], Parallel::new(), vec![S0]),
        (&[3], Parallel::new().fully_sharded("data"), vec![S0]),
        (&[1, 2], tensor(), vec![S0, B]),
        (&[2, 2], tensor(), vec![S0, B]),
        (&[2, 2], tensor().fully_sharded("data"), vec![S0, B]),
    ]
}

struct Training {
    up: Linear,
    down: Linear,
    weights: GlobalParams,
    grads: GlobalGrads,
    adam: Adam,
    tape: Tape,
}

impl Training {
    fn new(placement: &Placement, parallel: &Parallel) -> Training {
        let mut scope = Scope::new(Seed(1));
        let up = Linear::new(scope.enter("up"), 6, 8);
        let down = Linear::new(scope.enter("down"), 8, 4);
        let weights = parallel.build(placement, &scope.build().unwrap()).unwrap();
        Training {
            up,
            down,
            grads: weights.grads(),
            adam: Adam::new(weights.local(), 1e-2),
            weights,
            tape: Tape::new(Threads(1)),
        }
    }

    fn loss<'s>(&self, step: &'s GlobalStep<'s>, i: u64, rows: &[Sbp]) -> Result<Global<'s>> {
        let values = |n: usize, of: usize| -> Vec<f32> {
            (0..n).map(|k| number(&[i as usize, of, k])).collect()
        };
        let x = step.input(&values(36, 0), &[6, 6], rows)?;
        let y = step.input(&values(24, 1), &[6, 4], rows)?;
        let made = self.down.forward(self.up.forward(x)?.gelu()?)?;
        made.mse_loss(&y, Reduction::Mean)
    }

    /// Gradients of step `i`, of which this rank spoils those of `bad` before they are added up.
    fn gradients(&mut self, i: u64, rows: &[Sbp], bad: Option<(usize, f32)>) {
        self.grads.set_accumulate(true);
        self.grads.zero();
        let mut tape = std::mem::replace(&mut self.tape, Tape::new(Threads(1)));
        let mut grads = std::mem::replace(&mut self.grads, self.weights.grads());
        let step = self.weights.step(&mut tape, StepKey::new(0, i));
        let loss = self.loss(&step, i, rows).unwrap();
        loss.backward(&mut grads).unwrap();
        drop(step);
        if let Some((param, value)) = bad {
            let id = self.weights.local().ids().nth(param).unwrap();
            *grads.slot(id).last_mut().unwrap() = value;
            grads.ready(id).unwrap();
        }
        grads.sum(&self.weights).unwrap();
        (self.tape, self.grads) = (tape, grads);
    }

    /// What the ranks say to step `i`, after the update if they agree to it.
    fn step(&mut self, i: u64, rows: &[Sbp], bad: Option<(usize, f32)>, clip: bool) -> String {
        self.gradients(i, rows, bad);
        let (commit, factor) = match clip {
            true => {
                let (commit, norm) = self.grads.commit_with_norm(&self.weights).unwrap();
                if commit.is_yes() {
                    assert_eq!(norm, self.grads.norm().unwrap());
                }
                (commit, clip_factor(norm, 0.1))
            }
            false => (self.grads.commit(&self.weights).unwrap(), 1.0),
        };
        if commit.is_yes() {
            let local = self.weights.local_mut();
            self.adam.step_scaled(local, &self.grads, factor).unwrap();
        }
        commit.to_string()
    }

    fn bits(&self) -> Vec<u32> {
        let state = self.adam.state();
        let state = state.iter().flat_map(|(_, values)| *values);
        let all = self.weights.local().flat().iter().chain(state);
        all.map(|v| v.to_bits()).collect()
    }
}

/// The oracle is the same training without that step.
#[test]
fn a_gradient_that_is_not_finite_on_one_rank_keeps_all_from_the_step() {
    for (kind, (mesh, parallel, rows)) in kinds().iter().enumerate() {
        let world: usize = mesh.iter().product();
        on_mesh(Over::Thread, mesh, |placement| {
            let own = placement.group().rank();
            for clip in [false, true] {
                let mut without = Training::new(placement, parallel);
                for i in [0, 1, 3] {
                    assert_eq!(without.step(i, rows, None, clip), "");
                }
                assert_eq!(without.grads.skipped_steps(), 0);
                for bad in 0..world {
                    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
                    for (param, value) in values.into_iter().enumerate() {
                        let mut training = Training::new(placement, parallel);
                        for i in 0..4 {
                            let name = &training.weights.local().infos()[param].name;
                            let expected = match i {
                                2 => format!("rank {bad}: the gradient of {name} is not finite"),
                                _ => String::new(),
                            };
                            let spoil = (own == bad && i == 2).then_some((param, value));
                            let said = training.step(i, rows, spoil, clip);
                            assert_eq!(said, expected, "kind {kind}, {clip}");
                        }
                        assert_eq!(training.grads.skipped_steps(), 1);
                        assert!(
                            training.bits() == without.bits(),
                            "kind {kind}, {clip}, {bad}"
                        );
                    }
                }
            }
        });
    }
}

/// One layer whose gradient is `x` of each row, and the loss, which is finite for any.
fn linear<'s>(layer: &Linear, step: &'s GlobalStep<'s>, x: &[f32; 2]) -> Result<Global<'s>> {
    let x = step.input(x, &[2, 1], &[S0])?;
    layer.forward(x)?.sum(&[], false)
}

#[test]
fn the_rank_of_an_infinite_gradient_is_named_where_it_is_known() {
    let both = "rank 0: the gradient of one.weight is not finite; rank 1: the gradient of one.weight is not finite";
    let sharded = || Parallel::new().fully_sharded("data");
    for (name, parallel, large, expected) in [
        (
            "own",
            Parallel::new(),
            [1.0, f32::INFINITY],
            "rank 1: the gradient of one.weight is not finite",
        ),
        ("the sum's", Parallel::new(), [3e38, 3e38], both),
        // Each rank has a row of the weight, reduced and scattered.
        ("a gathered weight's", sharded(), [1.0, f32::INFINITY], both),
        ("a gathered weight's sum", sharded(), [3e38, 3e38], both),
    ] {
        on_mesh(Over::Thread, &[2], |placement| {
            let mut scope = Scope::new(Seed(1));
            let layer = Linear::new(scope.enter("one"), 1, 2);
            let weights = parallel.build(placement, &scope.build().unwrap()).unwrap();
            let (mut grads, mut tape) = (weights.grads(), Tape::new(Threads(1)));
            for (i, x, expected) in [(0, [1.0; 2], ""), (1, large, expected), (2, [1.0; 2], "")] {
                let step = weights.step(&mut tape, StepKey::new(0, i));
                linear(&layer, &step, &x)
                    .unwrap()
                    .backward(&mut grads)
                    .unwrap();
                drop(step);
                let said = grads.commit(&weights).unwrap().to_string();
                assert_eq!(said, expected, "{name}, step {i}");
            }
            assert_eq!(grads.skipped_steps(), 1);
        });
    }
}

/// The others may have taken the step when they notice, but nothing of it is saved.
#[test]
fn a_rank_that_is_lost_after_its_vote_leaves_the_checkpoint_before() {
    let (mesh, parallel, rows) = &kinds()[4];
    let at = |step: u64| {
        let mut info = CheckpointInfo::default();
        info.place.step = step;
        info
    };
    for all_have_voted in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path(), 1);
        let voted = Barrier::new(4);
        on_mesh(Over::Thread, mesh, |placement| {
            let mut training = Training::new(placement, parallel);
            assert_eq!(training.step(0, rows, None, true), "");
            let saved = training.weights.save(&folder, &training.adam, &at(1));
            assert_eq!(saved.unwrap().not_finite, None);
            training.gradients(1, rows, None);
            let commit = training.grads.commit(&training.weights);
            if all_have_voted {
                assert!(commit.as_ref().unwrap().is_yes());
                voted.wait();
            }
            if placement.group().rank() == 2 {
                return;
            }
            match commit {
                Ok(commit) => {
                    assert!(commit.is_yes());
                    let local = training.weights.local_mut();
                    training.adam.step(local, &training.grads).unwrap();
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Comm, "{error}"),
            }
            let error = training.weights.save(&folder, &training.adam, &at(2));
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Comm, "{error}");
        });
        // The same training, up to the checkpoint.
        on_mesh(Over::Thread, mesh, |placement| {
            let mut expected = Training::new(placement, parallel);
            assert_eq!(expected.step(0, rows, None, true), "");
            let mut found = Training::new(placement, parallel);
            let loaded = found.weights.load_newest(&folder, &mut found.adam);
            let loaded = loaded.unwrap().unwrap();
            assert_eq!(loaded.manifest.place.step, 1);
            assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
            assert!(found.bits() == expected.bits());
        });
    }
}

/// Weights that are not finite are saved, but a finite checkpoint is preferred.
#[test]
fn the_ranks_agree_on_a_checkpoint_that_is_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::new(dir.path(), 1);
    let at = |step: u64| {
        let mut info = CheckpointInfo::default();
        info.place.step = step;
        info
    };
    let (mesh, parallel, rows) = &kinds()[4];
    on_mesh(Over::Thread, mesh, |placement| {
        let mut training = Training::new(placement, parallel);
        training.step(0, rows, None, false);
        let saved = training
            .weights
            .save(&folder, &training.adam, &at(1))
            .unwrap();
        assert_eq!(saved.not_finite, None);
        let finite = training.bits();
        // The last rank's part of one parameter.
        let id = training.weights.local().ids().nth(2).unwrap();
        if placement.group().rank() == 3 {
            training.weights.local_mut().get_mut(id).fill(f32::NAN);
        }
        let saved = training
            .weights
            .save(&folder, &training.adam, &at(2))
            .unwrap();
        assert_eq!(saved.not_finite.as_deref(), Some("down.weight"));
        let loaded = training
            .weights
            .load_newest(&folder, &mut training.adam)
            .unwrap()
            .unwrap();
        assert_eq!(loaded.manifest.place.step, 1);
        let warning = format!(
            "passed over a checkpoint: {} has infinite or NaN weights (first in down.weight)",
            saved.path.display()
        );
        assert_eq!(loaded.warnings, [warning]);
        assert!(training.bits() == finite);
        // By name it is loaded.
        let loaded = training
            .weights
            .load(&saved.path, &mut training.adam)
            .unwrap();
        assert_eq!((loaded.manifest.place.step, loaded.warnings.len()), (2, 1));
        assert_eq!(
            training.weights.local().get(id)[0].is_nan(),
            placement.group().rank() == 3
        );
    });
}
