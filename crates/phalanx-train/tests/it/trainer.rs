//! What a `Trainer` computes beside the same training written down in f64, and what it refuses.

use std::path::Path;
use std::sync::{Arc, Mutex};

use clap::Parser;
use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Params, Reduction, Scope, Tensor};
use phalanx_train::{
    ErrorKind, Evaluation, Job, Measure, MicroBatch, RankContext, Result, Settings,
};

#[derive(Parser)]
#[command(args_override_self = true)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
}

pub(crate) fn settings(dir: &Path, args: &[&str]) -> Settings {
    let dir = dir.join("run").display().to_string();
    let typed = ["test", "--lr", "0.1", "--epochs", "2", "--output-dir", &dir];
    Cli::parse_from(typed.iter().chain(args)).settings
}

/// Runs `rank` on `world` ranks; what each gives, in their order.
pub(crate) fn ranks<R: Send>(
    world: usize,
    args: &[&str],
    rank: impl Fn(&Job<'_>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let dir = tempfile::tempdir().expect("folder");
    ranks_in(dir.path(), world, args, rank)
}

/// The same in the folder `dir`, where the run's is `run`.
pub(crate) fn ranks_in<R: Send>(
    dir: &Path,
    world: usize,
    args: &[&str],
    rank: impl Fn(&Job<'_>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    ranks_with(&settings(dir, args), world, rank)
}

pub(crate) fn ranks_with<R: Send>(
    settings: &Settings,
    world: usize,
    rank: impl Fn(&Job<'_>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    std::thread::scope(|scope| {
        let one = |group: ProcessGroup| {
            let rank = &rank;
            scope.spawn(move || {
                let ctx = RankContext::new(group, 1);
                let job = Job::new("test", &ctx, settings);
                let outcome = rank(&job);
                if let Err(error) = &outcome {
                    ctx.group().abort(&error.to_string());
                }
                outcome
            })
        };
        let groups = ProcessGroup::threads(world, GroupOptions::default());
        let started: Vec<_> = groups.into_iter().map(one).collect();
        let joined = started
            .into_iter()
            .map(|rank| rank.join().expect("no panic"));
        joined.collect()
    })
}

pub(crate) type Sample = ([f32; 2], f32);

/// Points of a plane, not quite.
pub(crate) fn data(count: usize) -> Arc<Vec<Sample>> {
    let sample = |i: usize| {
        let x = [(i * 7 % 13) as f32 / 13.0 - 0.4, (i * 5 % 11) as f32 / 11.0];
        (x, 2.0 * x[0] - x[1] + 0.5 + (i % 3) as f32 * 0.1)
    };
    Arc::new((0..count).map(sample).collect())
}

pub(crate) fn plane(scope: &mut Scope) -> Linear {
    Linear::new(scope.enter("plane"), 2, 1)
}

/// The model's answers, as a list.
pub(crate) fn answers<'s>(
    model: &Linear,
    batch: &MicroBatch<'s, Vec<Sample>>,
) -> Result<Tensor<'s>> {
    let x: Vec<f32> = batch.iter().flat_map(|(x, _)| *x).collect();
    let x = batch.input(&x, &[batch.samples(), 2])?;
    model.forward(x)
}

pub(crate) fn targets(batch: &MicroBatch<'_, Vec<Sample>>) -> Vec<f32> {
    batch.iter().map(|(_, y)| *y).collect()
}

pub(crate) fn loss<'s>(model: &Linear, batch: &MicroBatch<'s, Vec<Sample>>) -> Result<Tensor<'s>> {
    let targets = targets(batch);
    answers(model, batch)?.mse_loss(&targets, Reduction::Mean)
}

/// Weights and bias.
fn weights(params: &Params) -> [f64; 3] {
    let all: Vec<f32> = params.ids().flat_map(|id| params.export(id)).collect();
    std::array::from_fn(|i| f64::from(all[i]))
}

/// Trains on `world` ranks and in f64 with the samples of all ranks; the largest difference of
/// the weights after any step, and how far the weights came.
fn difference(world: usize, args: &[&str], clip: Option<f64>) -> (f64, f64) {
    let train = data(37);
    // Samples of each step over all ranks.
    let steps: Mutex<Vec<Vec<u64>>> = Mutex::default();
    let trained = ranks(world, args, |job| {
        let builder = job.trainer(&train, plane, Sgd::new);
        let builder = match clip {
            Some(limit) => builder.clip_grad_norm(limit),
            None => builder,
        };
        let mut trainer = builder.start()?;
        let mut seen = vec![weights(trainer.params())];
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let mut steps = steps.lock().expect("no panic");
                    let at = seen.len() - 1;
                    if steps.len() <= at {
                        steps.resize(at + 1, Vec::new());
                    }
                    steps[at].extend_from_slice(batch.indices());
                    drop(steps);
                    loss(model, &batch)
                })?;
                seen.push(weights(trainer.params()));
            }
        }
        trainer.finish()?;
        Ok(seen)
    });
    let trained: Vec<_> = trained
        .into_iter()
        .map(|seen| seen.expect("trained"))
        .collect();
    let steps = steps.into_inner().expect("no panic");
    let mut at = trained[0][0];
    let mut most = 0.0f64;
    for (i, indices) in steps.iter().enumerate() {
        let mut gradient = [0.0; 3];
        for &index in indices {
            let (x, y) = train[index as usize];
            let x = x.map(f64::from);
            let error = at[0] * x[0] + at[1] * x[1] + at[2] - f64::from(y);
            for (g, factor) in gradient.iter_mut().zip([x[0], x[1], 1.0]) {
                *g += 2.0 * error * factor / indices.len() as f64;
            }
        }
        let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        let scale = clip.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0));
        for (w, g) in at.iter_mut().zip(gradient) {
            *w -= 0.1 * scale * g;
        }
        for seen in &trained {
            for (w, expected) in seen[i + 1].iter().zip(at) {
                most = most.max((w - expected).abs());
            }
        }
    }
    let all: usize = steps.iter().map(Vec::len).sum();
    assert_eq!(all, 2 * train.len(), "each sample once an epoch");
    let moved = (0..3).map(|i| (at[i] - trained[0][0][i]).abs()).sum();
    (most, moved)
}

#[test]
fn a_training_is_the_one_in_f64() {
    for (world, args, clip) in [
        (1, &["--batch-size", "5"][..], None),
        (2, &["--batch-size", "5"], None),
        (
            3,
            &["--global-batch-size", "8", "--exchange", "reduce-scatter"],
            None,
        ),
        (2, &["--global-batch-size", "10", "--accumulate", "2"], None),
        (
            2,
            &["--global-batch-size", "9", "--deterministic", "shards"],
            None,
        ),
        (1, &["--batch-size", "5"], Some(0.05)),
        (
            2,
            &["--batch-size", "5", "--exchange", "at-step"],
            Some(0.05),
        ),
    ] {
        let (most, moved) = difference(world, args, clip);
        assert!(most < 1e-5, "{world} ranks, {args:?}, {clip:?}: {most}");
        assert!(moved > 0.02, "{world} ranks, {args:?}, {clip:?}: {moved}");
    }
}

#[test]
fn an_evaluation_counts_each_sample_once() {
    let (train, test) = (data(20), data(11));
    let evaluated = ranks(3, &["--test-batch-size", "2"], |job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        let mut all = Vec::new();
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
            }
            let evaluation = trainer.evaluate(&test, |model, batch| {
                let targets = targets(&batch);
                let sum = targets.iter().map(|y| f64::from(*y)).sum();
                let loss = answers(model, &batch)?.mse_loss(&targets, Reduction::Sum)?;
                Ok(Measure::of_loss(loss).with_value("target", sum))
            })?;
            all.push((weights(trainer.params()), evaluation));
        }
        let last = trainer.finish()?;
        assert_eq!(last.loss, all[1].1.loss);
        Ok(all)
    });
    for rank in evaluated {
        for (w, evaluation) in rank.expect("evaluated") {
            let Evaluation { loss, values, .. } = evaluation;
            let n = test.len() as f64;
            let error = |(x, y): &Sample| {
                let x = x.map(f64::from);
                (w[0] * x[0] + w[1] * x[1] + w[2] - f64::from(*y)).powi(2)
            };
            let expected = test.iter().map(error).sum::<f64>() / n;
            assert!((loss - expected).abs() < 1e-6, "{loss} is not {expected}");
            let target = test.iter().map(|(_, y)| f64::from(*y)).sum::<f64>() / n;
            assert!((values["target"] - target).abs() < 1e-6);
        }
    }
}

#[test]
fn a_loop_may_be_left_early_and_batches_may_be_passed_over() {
    let train = data(40);
    let trained = ranks(2, &["--batch-size", "5"], |job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        let mut epochs = 0;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                match batch.index() {
                    // Not trained on.
                    0 => continue,
                    3 => break,
                    _ => trainer.step(&batch, |model, batch| loss(model, &batch))?,
                };
            }
            epochs += 1;
        }
        assert_eq!(epochs, 2);
        let taken = trainer.steps_taken();
        trainer.finish()?;
        Ok(taken)
    });
    for taken in trained {
        assert_eq!(taken.expect("trained"), 4);
    }
}

#[test]
fn mistakes_of_the_program_are_usage_errors() {
    let (train, other) = (data(10), data(9));
    let wrong = |what: &str, rank: &(dyn Fn(&Job<'_>) -> Result<()> + Sync)| {
        let error = ranks(1, &[], rank).remove(0).expect_err(what);
        (error.kind(), error.to_string())
    };
    let (kind, text) = wrong("another set", &|job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        trainer.batches(&other).map(drop)
    });
    assert_eq!(kind, ErrorKind::Usage);
    assert!(
        text.contains("made for 10 samples, this data set has 9"),
        "{text}"
    );
    let (kind, text) = wrong("a batch twice", &|job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        let mut batches = trainer.batches(&train)?;
        let first = batches.next().expect("a batch");
        trainer.step(&first, |model, batch| loss(model, &batch))?;
        trainer
            .step(&first, |model, batch| loss(model, &batch))
            .map(drop)
    });
    assert_eq!(kind, ErrorKind::Usage);
    assert!(text.contains("epoch 1, step 1"), "{text}");
    let (_, text) = wrong("no finish", &|job| {
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        drop(trainer);
        job.check_finished()
    });
    assert!(text.contains("without Trainer::finish"), "{text}");
}

#[test]
fn a_program_may_only_evaluate() {
    let test = data(6);
    let evaluated = ranks(2, &[], |job| {
        let trainer = job.trainer(&test, plane, Sgd::new);
        let mut trainer = trainer.evaluate_only().start()?;
        let evaluation = trainer.evaluate(&test, |model, batch| {
            let sum = answers(model, &batch)?.mse_loss(&targets(&batch), Reduction::Sum)?;
            Ok(Measure::of_loss(sum))
        })?;
        assert!(trainer.epochs().is_empty());
        let error = trainer.batches(&test).err().expect("it only evaluates");
        assert_eq!(error.kind(), ErrorKind::Usage);
        drop(trainer);
        job.check_finished()?;
        let left = job.settings().output_dir.as_ref().expect("a folder");
        assert!(!left.exists(), "nothing is written");
        Ok(evaluation.loss)
    });
    let losses: Vec<f64> = evaluated
        .into_iter()
        .map(|loss| loss.expect("one"))
        .collect();
    assert!(
        losses[0].is_finite() && losses[0] == losses[1],
        "{losses:?}"
    );
}

/// Steps of the checkpoints in the run's folder of `dir`, and those whose weights are not finite.
fn checkpoints(dir: &Path) -> (Vec<u64>, Vec<u64>) {
    let (mut all, mut not_finite) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(dir.join("run/checkpoints")).expect("checkpoints") {
        let path = entry.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        if let Some(step) = name.strip_prefix("step-")
            && let Some(step) = step.strip_suffix(".json")
        {
            let step = step.parse().expect("a step");
            let text = std::fs::read_to_string(&path).expect("a manifest");
            let manifest: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            all.push(step);
            not_finite.extend((!manifest["not_finite"].is_null()).then_some(step));
        }
    }
    all.sort_unstable();
    (all, not_finite)
}

/// A learning rate that is an infinity as an f32 makes weights infinite without an infinite gradient before.
#[test]
fn a_training_goes_on_from_its_last_finite_checkpoint() {
    let train = data(37);
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
    // The steps that were taken.
    let run = |dir: &Path, args: &[&str], factor: f64| {
        let args = [
            &[
                "--global-batch-size",
                "6",
                "--save-every",
                "1",
                "--keep",
                "1",
            ],
            args,
        ];
        let mut outcomes = ranks_in(dir, 2, &args.concat(), |job| {
            let sgd = |params: &Params, lr: f64| Sgd::new(params, lr * factor);
            let (mut trainer, mut steps) = (job.trainer(&train, plane, sgd).start()?, 0);
            for _ in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    trainer.step(&batch, |model, batch| loss(model, &batch))?;
                    steps += 1;
                }
            }
            trainer.finish()?;
            Ok(steps)
        });
        assert_eq!(outcomes.len(), 2);
        // Not that of a rank which only says that it has lost the other.
        let cause = |outcome: &Result<i32>| matches!(outcome, Err(e) if e.to_string().contains("the loss became"));
        let at = outcomes.iter().position(cause).unwrap_or(0);
        outcomes.swap_remove(at)
    };
    let hash = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("run/summary.json")).expect("a summary");
        let summary: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        summary["weights_sha256"].to_string()
    };
    assert_eq!(run(whole.path(), &[], 1.0).expect("trained"), 14);
    let stopped = run(parts.path(), &["--stop-after", "3"], 1.0).expect_err("stopped");
    assert_eq!(stopped.kind(), ErrorKind::Stopped);
    assert_eq!(checkpoints(parts.path()), (vec![3], vec![]));
    // Twice: it begins at the finite one each time.
    for _ in 0..2 {
        let error = run(parts.path(), &["--resume", "auto"], 1e40);
        let error = error.expect_err("no number").to_string();
        assert!(error.contains("the loss became"), "{error}");
        assert_eq!(checkpoints(parts.path()), (vec![3, 4], vec![4]));
    }
    let rest = run(parts.path(), &["--resume", "auto"], 1.0);
    assert_eq!(rest.expect("trained"), 11);
    assert_eq!(hash(parts.path()), hash(whole.path()));
    let (all, not_finite) = checkpoints(parts.path());
    assert_eq!((all.len(), not_finite.len()), (1, 0));
    // Once more, when nothing is left to do.
    let rest = run(parts.path(), &["--resume", "auto"], 1.0);
    assert_eq!(rest.expect("nothing to train"), 0);
    assert_eq!(checkpoints(parts.path()).0, all);
}
