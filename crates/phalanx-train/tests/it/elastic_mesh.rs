//! Trainings on a mesh whose ranks are lost at chosen points, on ranks that are threads: the copies of the model that are whole
//! are trained on, and the result is that of a training that nothing happened to.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_global::{Global, Parallel};
use phalanx_member::Elastic;
use phalanx_member::Log;
use phalanx_nn::layers::{Act, Linear};
use phalanx_nn::optim::Adam;
use phalanx_nn::{Scope, Value as _};
use phalanx_train::{
    Error, ErrorKind, Job, Measure, Mesh, MicroBatch, OnMesh, RankContext, Result,
};

use crate::elastic::{
    Point::{self, Evaluation, Step},
    metrics,
};
use crate::trainer::{Sample, data, settings};

const TENSOR: usize = 2;
/// Losses and weights of float additions in another order.
const TOLERANCE: f64 = 1e-4;

struct Net {
    up: Linear,
    down: Linear,
}

fn net(scope: &mut Scope<'_>) -> Net {
    Net {
        up: Linear::new(scope.enter("up"), 2, 6),
        down: Linear::new(scope.enter("down"), 6, 1),
    }
}

fn answers<'s>(net: &Net, batch: &MicroBatch<'s, Vec<Sample>, OnMesh>) -> Result<Global<'s>> {
    let x: Vec<f32> = batch.data().iter().flat_map(|(x, _)| *x).collect();
    let x = batch.input(&x, &[batch.samples(), 2])?;
    let hidden = x.linear(net.up.weight, net.up.bias, Act::Relu)?;
    net.down.forward(hidden)
}

/// The squares of what the answers are wrong by.
fn wrong<'s>(net: &Net, batch: &MicroBatch<'s, Vec<Sample>, OnMesh>) -> Result<Global<'s>> {
    let y: Vec<f32> = batch.data().iter().map(|(_, y)| -y).collect();
    let y = batch.input(&y, &[batch.samples(), 1])?;
    let wrong = answers(net, batch)?.add(y)?;
    wrong.share().mul(wrong)
}

/// Trains on a mesh of `data` times two ranks, of which each `(rank, point)` of `losses` is lost there. The weights, from
/// rank 0, and why the other ranks ended without them.
fn train(
    dir: &Path,
    args: &[&str],
    data: usize,
    losses: &[(usize, Point)],
) -> Vec<std::result::Result<Option<Vec<f32>>, String>> {
    let (settings, world) = (settings(dir, args), data * TENSOR);
    std::thread::scope(|scope| {
        let one = |group: ProcessGroup| {
            let settings = &settings;
            scope.spawn(move || {
                let (number, mut log) = (group.rank(), Log::new(group.store()));
                let mut ctx = RankContext::new(group, 1);
                ctx.elastic = Some(Elastic {
                    first_world: world,
                    patience: Duration::from_secs(120),
                });
                let own = losses.iter().find(|(rank, _)| *rank == number);
                let (is_lost, point) = (AtomicBool::new(false), own.map(|(_, point)| *point));
                let here = |at: Point| match point == Some(at) {
                    true => {
                        is_lost.store(true, SeqCst);
                        Err(Error::new(ErrorKind::Failed, "this rank is lost"))
                    }
                    false => Ok(()),
                };
                let outcome = run(&Job::new("test", &ctx, settings), data, here);
                // The links end with the last handle.
                drop(ctx);
                if is_lost.load(SeqCst) {
                    log.lose(number, "it is a test").expect("a store");
                }
                outcome.map_err(|error| error.chain())
            })
        };
        let groups = ProcessGroup::threads(world, GroupOptions::default());
        let ranks: Vec<_> = groups.into_iter().map(one).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

fn run(job: &Job<'_>, on: usize, here: impl Fn(Point) -> Result<()>) -> Result<Option<Vec<f32>>> {
    let (samples, test) = (data(37), data(11));
    let mesh = Mesh {
        tensor: TENSOR,
        ..Mesh::data_parallel(on)
    };
    let parallel = Parallel::new()
        .column("tensor", &["up"])
        .row("tensor", &["down"]);
    let builder = job.trainer(&samples, net, Adam::new);
    let mut trainer = builder.clip_grad_norm(10.0).on(mesh, parallel).start()?;
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&samples)? {
            let at = Step(epoch, batch.index());
            trainer.step(&batch, |net, batch| {
                here(at)?;
                wrong(net, &batch)?.mean(&[], false)
            })?;
        }
        trainer.evaluate(&test, |net, batch| {
            here(Evaluation(epoch))?;
            Ok(match batch.own_rows(wrong(net, &batch)?)? {
                Some(own) => Measure::of_loss(own.sum(&[], false)?),
                None => Measure::empty(),
            })
        })?;
    }
    let full = trainer.full_params()?;
    let weights = full.map(|full| full.ids().flat_map(|id| full.export(id)).collect());
    trainer.finish()?;
    Ok(weights)
}

fn assert_close(got: f64, want: f64, what: &str) {
    assert!(
        (got - want).abs() < TOLERANCE,
        "{what}: {got} instead of {want}"
    );
}

/// That the training in `dir` has the losses and the weights of the one in `alone`.
fn check(dir: &Path, alone: &Path, weights: &[f32], want: &[f32], what: &str) {
    assert_eq!(weights.len(), want.len());
    for (got, want) in weights.iter().zip(want) {
        assert_close(f64::from(*got), f64::from(*want), what);
    }
    let (got, want) = (metrics(dir), metrics(alone));
    assert_eq!(got.len(), want.len(), "{what}");
    for ((step, loss, test), (at, want_loss, want_test)) in got.into_iter().zip(want) {
        assert_eq!(step, at, "{what}");
        for (got, want) in [(loss, want_loss), (test, want_test)] {
            let [got, want] = [got, want].map(|value| value.as_f64().unwrap_or(-1.0));
            assert_close(got, want, what);
        }
    }
}

const ARGS: [&str; 4] = ["--global-batch-size", "8", "--save-every", "2"];

#[test]
fn wherever_ranks_of_a_mesh_are_lost_the_whole_copies_go_on() {
    let alone = tempfile::tempdir().expect("a folder");
    let want = train(alone.path(), &ARGS, 1, &[]).swap_remove(0);
    let want = want.expect("it ends").expect("rank 0");
    let points = [
        Step(1, 0),
        Step(1, 2),
        Evaluation(1),
        Step(2, 4),
        Evaluation(2),
    ];
    let mut cases: Vec<(usize, Vec<(usize, Point)>)> = Vec::new();
    for point in points {
        cases.extend((0..4).map(|rank| (2, vec![(rank, point)])));
    }
    for point in [Step(1, 4), Evaluation(1)] {
        cases.push((2, vec![(2, point), (3, point)]));
        // One after the other, in two copies.
        cases.push((3, vec![(1, point), (4, Evaluation(2))]));
    }
    for (copies, losses) in cases {
        let what = format!("{losses:?} of {copies} copies");
        let dir = tempfile::tempdir().expect("a folder");
        let got = train(dir.path(), &ARGS, copies, &losses);
        let lost = |rank: usize| losses.iter().any(|(lost, _)| *lost == rank);
        let mut whole = (0..copies).filter(|copy| !lost(copy * 2) && !lost(copy * 2 + 1));
        let first = whole.next().expect("a whole copy") * 2;
        for (rank, outcome) in got.into_iter().enumerate() {
            match outcome {
                Ok(weights) if rank == first => {
                    let weights = weights.expect("it is rank 0 now");
                    check(dir.path(), alone.path(), &weights, &want, &what);
                }
                Ok(weights) => {
                    assert!(
                        weights.is_none() && !lost(rank) && !lost(rank ^ 1),
                        "{what}"
                    );
                }
                Err(why) if why.contains("this rank is lost") => assert!(lost(rank), "{what}"),
                Err(why) => {
                    assert!(lost(rank ^ 1), "rank {rank}, {what}: {why}");
                    assert!(why.contains("this rank leaves the training"), "{why}");
                }
            }
        }
    }
}

#[test]
fn a_mesh_without_a_whole_copy_ends() {
    let dir = tempfile::tempdir().expect("a folder");
    let losses = [(0, Step(1, 1)), (3, Step(1, 1))];
    let got = train(dir.path(), &ARGS, 2, &losses);
    let why = |rank: usize| got[rank].as_ref().expect_err("it ends").as_str();
    // One of them may have left before the other's copy was broken.
    let leaves = |why: &&str| why.contains("this rank leaves the training");
    let others: Vec<&str> = [1, 2].map(why).into_iter().filter(|w| !leaves(w)).collect();
    assert!(!others.is_empty());
    for why in others {
        assert!(why.contains("every model replica has lost a rank"), "{why}");
    }
}

#[test]
fn what_lies_on_one_rank_only_is_refused() {
    for (mesh, parallel, words) in [
        (
            Mesh {
                fully_sharded: true,
                ..Mesh::data_parallel(2)
            },
            Parallel::new(),
            "leave out --fully-sharded",
        ),
        (
            Mesh::data_parallel(2),
            Parallel::new()
                .column("data", &["up"])
                .row("data", &["down"]),
            "up.weight is split over them",
        ),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let settings = settings(dir.path(), &[]);
        let mesh = &mesh;
        let parallel = &parallel;
        let settings = &settings;
        std::thread::scope(|scope| {
            for group in ProcessGroup::threads(2, GroupOptions::default()) {
                scope.spawn(move || {
                    let mut ctx = RankContext::new(group, 1);
                    ctx.elastic = Some(Elastic {
                        first_world: 2,
                        patience: Duration::from_secs(120),
                    });
                    let job = Job::new("test", &ctx, settings);
                    let builder = job.trainer(&data(8), net, Adam::new);
                    let refused = builder.on(*mesh, parallel.clone()).start().map(drop);
                    let error = refused.expect_err("refused");
                    assert_eq!(error.kind(), ErrorKind::Usage);
                    assert!(error.chain().contains(words), "{}", error.chain());
                });
            }
        });
    }
}
