//! Parts of epochs (`--eval-every`), `--max-steps`, early stopping and a program's own state: the same training wherever it
//! was stopped and resumed, on whichever number of ranks.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Mutex;

use phalanx_checkpoint as checkpoint;
use phalanx_data::metrics::Confusion;
use phalanx_nn::optim::schedule::{OneCycle, Plateau, Schedule};
use phalanx_nn::optim::{Ema, Sgd};
use phalanx_nn::{Params, Scope, Seed};
use phalanx_train::{EarlyStopping, Error, ErrorKind, Evaluation, Files, Job, Measure, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::again::{best, json, metrics, start_on};
use crate::trainer::{answers, data, loss, plane, ranks, ranks_with, settings};

/// What the program counts itself.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
struct Own {
    steps: u64,
    /// A running mean of the loss.
    mean: f64,
    rounds: Vec<usize>,
}

/// How a training ended.
#[derive(Debug, Clone, PartialEq)]
struct End {
    steps: u64,
    lr: f64,
    own: Own,
    last: f64,
}

/// Losses of the evaluations, one after the other.
const LOSSES: [f64; 8] = [5.0, 4.0, 3.0, 3.5, 3.25, 2.5, 2.75, 2.6];

/// A training that evaluates after each part of an epoch, and after the third evaluation sets another learning rate; with
/// `falls` the learning rate falls with each evaluation that is no better instead. Every fourth update is refused.
fn program(job: &Job<'_>, patience: usize, falls: bool) -> Result<End> {
    let train = data(36);
    let builder = job.trainer(&train, plane, |params, lr| {
        Sgd::new(params, lr).momentum(0.9)
    });
    let plateau = Plateau {
        factor: 0.5,
        patience: 0,
        ..Plateau::default()
    };
    let mut trainer = builder
        .clip_grad_norm(0.7)
        .before_update(|update| Ok(update.step % 4 != 3))
        .early_stopping(EarlyStopping::new(patience))
        .schedule(|lr, _| match falls {
            true => Schedule::warm_up(3, Schedule::reduce_on_plateau(lr, plateau)?),
            false => Ok(Schedule::constant(lr)),
        })
        .start()?;
    let mut own: Own = trainer.state()?.unwrap_or_default();
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
            // The gradient's norm is that of all ranks, as the loss of a rank is not.
            let norm = trainer.grad_norm().expect("clipped");
            own.steps += 1;
            own.mean = 0.9 * own.mean + 0.1 * norm;
            trainer.set_state(&own)?;
        }
        trainer.check_weights()?;
        let number = own.rounds.len();
        trainer.record(Evaluation::new(LOSSES[number], Confusion::new(0)))?;
        own.rounds.push(epoch);
        trainer.set_state(&own)?;
        if number == 2 && !falls {
            trainer.set_lr(0.03125)?;
        }
    }
    let (steps, lr) = (trainer.steps_taken(), trainer.lr());
    let last = trainer.finish()?.loss;
    Ok(End {
        steps,
        lr,
        own,
        last,
    })
}

/// Six steps an epoch, evaluated after 2, 4 and 6 of them; shards make the bits the same for every number of ranks.
const ARGS: [&str; 12] = [
    "--global-batch-size",
    "6",
    "--epochs",
    "9",
    "--eval-every",
    "2",
    "--deterministic",
    "shards",
    "--shards",
    "6",
    "--log-interval",
    "1",
];

/// What the folder says of the training: weights, metrics, best weights, steps.
fn left(dir: &Path) -> (Vec<Value>, Vec<Value>, (String, Vec<f32>)) {
    let run = dir.join("run");
    let summary = json(&run.join("summary.json"));
    let names = [
        "weights_sha256",
        "metrics_sha256",
        "optimizer_sha256",
        "skipped_steps",
        "stopped_early",
        "planned_steps",
        "test_loss",
    ];
    let summary = names.iter().map(|name| summary[name].clone());
    let records = metrics(&run)
        .into_iter()
        .filter(|r| r.get("start").is_none());
    (
        summary.collect(),
        records.collect(),
        best(&run, "best.safetensors"),
    )
}

/// Runs the training `program` with `args`, whole, and stopped after each of its steps and resumed on other ranks.
fn check(args: &[&str], steps: u64, program: impl Fn(&Job<'_>) -> Result<End> + Sync) -> End {
    let whole = tempfile::tempdir().expect("folder");
    let want = start_on(1, whole.path(), args, &program).expect("trained");
    assert_eq!(want.steps, steps);
    let files = left(whole.path());
    for stop in 1..=steps {
        let dir = tempfile::tempdir().expect("folder");
        let stop_after = stop.to_string();
        let first = [args, &["--save-every", "3", "--stop-after", &stop_after]].concat();
        let [a, b] = [[1, 3], [2, 1], [3, 2]][stop as usize % 3];
        let first = start_on(a, dir.path(), &first, &program);
        match &first {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Stopped, "{}", error.chain()),
            Ok(_) => assert_eq!(stop, steps),
        }
        let resume = [args, &["--save-every", "3", "--resume", "auto"]].concat();
        let end = start_on(b, dir.path(), &resume, &program).expect("trained");
        assert_eq!(end, want, "after step {stop}");
        assert_eq!(left(dir.path()), files, "after step {stop}");
        let changed = std::fs::metadata(dir.path().join("run/summary.json")).expect("there");
        let again = start_on(2, dir.path(), &resume, &program).expect("complete");
        assert_eq!(again, want, "the second start, after step {stop}");
        let now = std::fs::metadata(dir.path().join("run/summary.json")).expect("there");
        assert_eq!(
            now.modified().expect("time"),
            changed.modified().expect("time"),
            "written again"
        );
    }
    want
}

#[test]
fn a_training_is_stopped_early_at_the_same_step_wherever_it_was_resumed() {
    // In the middle of the second epoch.
    let end = check(&ARGS, 10, |job| program(job, 2, false));
    assert_eq!((end.own.steps, end.lr, end.last), (10, 0.03125, 3.25));
    assert_eq!(end.own.rounds, [1, 1, 1, 2, 2]);
    let dir = tempfile::tempdir().expect("folder");
    let args = [&ARGS[..], &["--save-every", "3", "--resume", "auto"]].concat();
    let start = |args: &[&str]| start_on(2, dir.path(), args, |job| program(job, 2, false));
    assert_eq!(start(&args).expect("trained"), end);
    let files = left(dir.path());
    let longer = [&args[..], &["--epochs", "20"]].concat();
    assert_eq!(start(&longer).expect("complete"), end, "with more epochs");
    assert_eq!(left(dir.path()), files);
}

#[test]
fn a_training_is_cut_at_the_same_step_wherever_it_was_resumed() {
    let args = [&ARGS[..], &["--max-steps", "9"]].concat();
    let end = check(&args, 9, |job| program(job, 9, true));
    assert_eq!(end.own.rounds, [1, 1, 1, 2, 2]);
    // Twice no better.
    assert_eq!(end.lr, 0.1 * 0.5 * 0.5);
}

#[test]
fn a_training_goes_on_where_it_was_cut_or_stopped_early() {
    let whole = tempfile::tempdir().expect("folder");
    let args = [&ARGS[..], &["--max-steps", "15", "--save-every", "99"]].concat();
    let want = start_on(2, whole.path(), &args, |job| program(job, 9, false)).expect("trained");
    let dir = tempfile::tempdir().expect("folder");
    // 9 steps end in the middle of a part, which is evaluated then; so that the numbers of evaluations agree, 10 do not.
    let first = [&ARGS[..], &["--max-steps", "10", "--save-every", "99"]].concat();
    start_on(3, dir.path(), &first, |job| program(job, 9, false)).expect("trained");
    let more = [&args[..], &["--resume", "auto"]].concat();
    let end = start_on(1, dir.path(), &more, |job| program(job, 9, false)).expect("trained");
    assert_eq!(end, want);
    assert_eq!(left(dir.path()).0[0], left(whole.path()).0[0]);
    // With more patience than it was stopped with.
    let dir = tempfile::tempdir().expect("folder");
    start_on(3, dir.path(), &args, |job| program(job, 2, false)).expect("trained");
    let end = start_on(1, dir.path(), &more, |job| program(job, 9, false)).expect("trained");
    assert_eq!(end, want);
    assert_eq!(left(dir.path()).0[0], left(whole.path()).0[0]);
}

#[test]
fn limits_take_the_first_samples() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--limit-train", "12", "--global-batch-size", "4"];
    let args = [&args[..], &["--limit-test", "5", "--max-steps", "7"]].concat();
    let mut settings = settings(dir.path(), &args);
    settings.epochs = None;
    for rank in ranks_with(&settings, 2, |job| {
        let (train, test) = (data(36), data(30));
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        let mut seen = vec![Vec::new()];
        for epoch in trainer.epochs() {
            seen.resize(epoch, Vec::new());
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    seen[epoch - 1].extend_from_slice(batch.indices());
                    loss(model, &batch)
                })?;
            }
        }
        let tested = trainer.evaluate(&test, |_, batch| {
            let sum = batch.indices().iter().sum::<u64>();
            Ok(Measure::of_sum(sum as f64))
        })?;
        trainer.finish()?;
        Ok((seen, tested.loss))
    }) {
        let (seen, tested) = rank.expect("trained");
        assert_eq!(tested, 2.0);
        assert_eq!(seen.len(), 3, "epochs that 7 steps of 3 take");
        let counts: Vec<usize> = seen.iter().map(Vec::len).collect();
        assert_eq!(counts, [6, 6, 2]);
        assert!(seen.concat().iter().all(|index| *index < 12));
    }
}

#[test]
fn predictions_are_in_the_order_of_the_data() {
    let samples = data(23);
    let (weights, want) = {
        let one =
            ranks(1, &[], |job| {
                let mut trainer = job
                    .trainer(&samples, plane, Sgd::new)
                    .evaluate_only()
                    .start()?;
                let rows = trainer.predict(&samples, |model, batch| {
                    Ok(answers(model, &batch)?.to_vec())
                })?;
                let params = trainer.params();
                let all: Vec<f32> = params.ids().flat_map(|id| params.export(id)).collect();
                Ok((all, rows))
            });
        one.into_iter().next().expect("one").expect("predicted")
    };
    let [a, b] = [f64::from(weights[0]), f64::from(weights[1])];
    for ((x, _), row) in samples.iter().zip(&want) {
        let bias = f64::from(weights[2]);
        let exact = a * f64::from(x[0]) + b * f64::from(x[1]) + bias;
        assert!((exact - f64::from(*row)).abs() < 1e-6, "{exact} {row}");
    }
    for world in [2, 3, 5] {
        for rank in ranks(world, &["--test-batch-size", "3"], |job| {
            let mut trainer = job
                .trainer(&samples, plane, Sgd::new)
                .evaluate_only()
                .start()?;
            trainer.predict(
                &samples,
                |model, batch| Ok(answers(model, &batch)?.to_vec()),
            )
        }) {
            assert_eq!(rank.expect("predicted"), want, "{world} ranks");
        }
    }
    // More than ranks exchange at once.
    let many = data(10_001);
    for rank in ranks(2, &["--test-batch-size", "500"], |job| {
        let mut trainer = job
            .trainer(&many, plane, Sgd::new)
            .evaluate_only()
            .start()?;
        trainer.predict(&many, |_, batch| Ok(batch.indices().to_vec()))
    }) {
        assert!(rank.expect("predicted").into_iter().eq(0..10_001));
    }
    let short = ranks(2, &[], |job| {
        let mut trainer = job
            .trainer(&samples, plane, Sgd::new)
            .evaluate_only()
            .start()?;
        trainer.predict(&samples, |_, _| Ok(vec![1]))
    });
    let first = short.into_iter().find_map(|rank| {
        let error = rank.expect_err("too few");
        (error.kind() == ErrorKind::Usage).then(|| error.to_string())
    });
    assert!(first.is_some_and(|text| text.contains("predict: 1 rows for a batch of")));
}

#[test]
fn settings_of_the_loop_are_checked() {
    let dir = tempfile::tempdir().expect("folder");
    for flag in [
        "--max-steps",
        "--eval-every",
        "--limit-train",
        "--limit-test",
    ] {
        let error = settings(dir.path(), &[flag, "0"])
            .validate(1)
            .expect_err("0");
        assert!(error.to_string().contains(flag), "{error}");
    }
    let wrong = ranks(1, &[], |job| {
        let train = data(8);
        let mut trainer = job.trainer(&train, plane, Sgd::new).best("mae").start()?;
        trainer.set_lr(f64::NAN)
    });
    let error = wrong[0].as_ref().expect_err("no order");
    assert!(
        error.to_string().contains("say mae:min or mae:max"),
        "{error}"
    );
}

/// The decay of the averages.
const DECAY: f64 = 0.75;

/// The weights at the end of a training, the answers of their averages to three points, and the weights after each step.
type Averaged = (Vec<f32>, Vec<f32>, Vec<Vec<f32>>);

/// A training with averages of the weights.
fn averaged(job: &Job<'_>) -> Result<Averaged> {
    let train = data(36);
    let builder = job.trainer(&train, plane, |params, lr| {
        Ema::new(params, Sgd::new(params, lr), DECAY)
    });
    let mut trainer = builder.start()?;
    let all =
        |params: &Params| -> Vec<f32> { params.ids().flat_map(|id| params.export(id)).collect() };
    let mut weights: Vec<Vec<f32>> = trainer.state()?.unwrap_or_default();
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
            weights.push(all(trainer.params()));
            trainer.set_state(&weights)?;
        }
        trainer.evaluate(&data(7), |model, batch| {
            let sum = answers(model, &batch)?.sum(&[], false)?;
            Ok(Measure::of_loss(sum))
        })?;
    }
    // Of (0, 0), (1, 0) and (0, 1), so the weights follow.
    let seen = trainer.infer(|model, step| {
        let corners = step.input(&[0.0, 0.0, 1.0, 0.0, 0.0, 1.0], &[3, 2])?;
        Ok(model.forward(corners)?.to_vec())
    })?;
    let own = all(trainer.params());
    trainer.finish()?;
    Ok((own, seen, weights))
}

/// Of the weights in the file.
fn digest(dir: &Path) -> String {
    let mut scope = Scope::new(Seed(7));
    plane(&mut scope);
    let mut params = scope.build().expect("parameters");
    let path = dir.join("run/test.safetensors");
    checkpoint::load_params(&path, &mut params).expect("weights");
    let digest = checkpoint::weights_digest(&params);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn evaluations_and_files_have_the_averages_of_the_weights() {
    let args = [&ARGS[..2], &["--epochs", "2", "--eval-every", "4"]].concat();
    let whole = tempfile::tempdir().expect("folder");
    let (own, seen, weights) = start_on(1, whole.path(), &args, averaged).expect("trained");
    // In f64.
    let mut average: Vec<f64> = weights[0].iter().map(|w| f64::from(*w)).collect();
    for weights in &weights[1..] {
        for (average, w) in average.iter_mut().zip(weights) {
            *average = DECAY * *average + (1.0 - DECAY) * f64::from(*w);
        }
    }
    let near = |a: f64, b: f32| (a - f64::from(b)).abs() < 1e-6;
    let answers = [average[2], average[2] + average[0], average[2] + average[1]];
    assert!(answers.iter().zip(&seen).all(|(a, b)| near(*a, *b)));
    assert!(!near(average[0], own[0]), "the weights are others");
    let file = |dir: &Path, name: &str| {
        let mut scope = Scope::new(Seed(7));
        plane(&mut scope);
        let mut params = scope.build().expect("parameters");
        checkpoint::load_params(&dir.join("run").join(name), &mut params).expect("weights");
        params
            .ids()
            .flat_map(|id| params.export(id))
            .collect::<Vec<f32>>()
    };
    let saved = file(whole.path(), "test.safetensors");
    let summary = json(&whole.path().join("run/summary.json"));
    let digests = ["averages_sha256", "weights_sha256"].map(|name| summary[name].as_str());
    assert_eq!(digests[0], Some(&*digest(whole.path())));
    assert_ne!(digests[0], digests[1]);
    assert!(average.iter().zip(&saved).all(|(a, b)| near(*a, *b)));
    assert_eq!(weights[weights.len() - 1], own);
    let losses = |dir: &Path| json(&dir.join("run/summary.json"))["test_loss"].clone();
    let shards = ["--deterministic", "shards", "--shards", "6"];
    let args = [&args[..], &shards].concat();
    let shards = tempfile::tempdir().expect("folder");
    let want = start_on(1, shards.path(), &args, averaged).expect("trained");
    for stop in [1, 3, 4, 6, 7, 11] {
        let dir = tempfile::tempdir().expect("folder");
        let stop_after = stop.to_string();
        let first = [&args[..], &["--stop-after", &stop_after]].concat();
        start_on(2, dir.path(), &first, averaged).expect_err("stopped");
        let resume = [&args[..], &["--resume", "auto"]].concat();
        let end = start_on(3, dir.path(), &resume, averaged).expect("trained");
        assert_eq!(end, want, "after step {stop}");
        assert_eq!(losses(dir.path()), losses(shards.path()));
        for name in ["test.safetensors", "best.safetensors"] {
            assert_eq!(file(dir.path(), name), file(shards.path(), name), "{name}");
        }
    }
    let error = start_on(
        2,
        whole.path(),
        &["--overwrite", "--exchange", "at-step"],
        averaged,
    );
    let error = error.expect_err("parts").to_string();
    assert!(
        error.starts_with("Ema needs every rank to have whole gradients"),
        "{error}"
    );
}

#[test]
fn a_program_is_told_of_each_checkpoint_on_the_disk() {
    let dir = tempfile::tempdir().expect("folder");
    let told = Mutex::new(Vec::new());
    let args = [
        &ARGS[..2],
        &["--epochs", "1", "--save-every", "2", "--keep", "9"],
    ]
    .concat();
    let train = |fails: bool| {
        start_on(
            2,
            dir.path(),
            &[&args[..], &["--overwrite"]].concat(),
            |job| {
                let train = data(36);
                let builder = job.trainer(&train, plane, Sgd::new).after_saving(|path| {
                    // Complete, and read as any other.
                    let text = std::fs::read_to_string(path).expect("a file");
                    let place: Value = serde_json::from_str(&text).expect("JSON");
                    told.lock()
                        .expect("alone")
                        .push((job.rank(), place["place"]["step"].clone()));
                    match fails {
                        true => Err(Error::new(ErrorKind::Failed, "the upload failed")),
                        false => Ok(()),
                    }
                });
                let mut trainer = builder.unit_of("numbers", 2).start()?;
                for _epoch in trainer.epochs() {
                    for batch in trainer.batches(&train)? {
                        trainer.step(&batch, |model, batch| loss(model, &batch))?;
                    }
                }
                trainer.finish().map(drop)
            },
        )
    };
    train(false).expect("trained");
    let told = std::mem::take(&mut *told.lock().expect("alone"));
    // A save that is due while another one runs waits for it.
    assert!(
        told.len() > 1 && told.iter().all(|(rank, _)| *rank == 0),
        "{told:?}"
    );
    assert_eq!(told[told.len() - 1].1, 6);
    assert_eq!(
        json(&dir.path().join("run/summary.json"))["unit"],
        "numbers"
    );
    let error = train(true).expect_err("the hook's");
    assert!(error.to_string().contains("the upload failed"), "{error}");
}

#[test]
fn the_operation_with_the_first_nan_is_named() {
    for (args, words) in [
        (&["--anomaly"][..], "the result of Log, of shape"),
        (&[], "--anomaly, which names the operation"),
    ] {
        let failed = ranks(2, args, |job| {
            let train = data(36);
            let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    // Some answers are negative.
                    answers(model, &batch)?.log()?.mean(&[], false)
                })?;
            }
            Ok(())
        });
        let own = failed.into_iter().filter_map(Result::err);
        let own: Vec<Error> = own.filter(|e| e.kind() == ErrorKind::Failed).collect();
        let text = own.first().expect("a rank's own").render();
        let is_nan = text.contains("NaN");
        assert!(text.contains(words) && is_nan, "{text}");
    }
}

/// The digest of the weights and the learning rates of all steps.
fn ended(dir: &Path) -> (Value, Vec<Value>) {
    let run = dir.join("run");
    let rates = metrics(&run)
        .into_iter()
        .filter(|r| r.get("loss").is_some());
    let weights = json(&run.join("summary.json"))["weights_sha256"].clone();
    (weights, rates.map(|r| r["lr"].clone()).collect())
}

#[test]
fn the_evaluation_of_a_cut_does_not_count_when_the_training_goes_on() {
    let train = |dir: &Path, max: &str| {
        let args = [&ARGS[..2], &["--eval-every", "3", "--log-interval", "1"]].concat();
        let args = [&args[..], &["--save-every", "99", "--resume", "auto"]].concat();
        let args = [&args[..], &["--max-steps", max]].concat();
        start_on(2, dir, &args, |job| {
            let train = data(36);
            let plateau = Plateau {
                patience: 1,
                ..Plateau::default()
            };
            let builder = job.trainer(&train, plane, Sgd::new);
            let builder = builder.schedule(|lr, _| Schedule::reduce_on_plateau(lr, plateau));
            let mut trainer = builder.start()?;
            for _epoch in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    trainer.step(&batch, |model, batch| loss(model, &batch))?;
                }
                trainer.evaluate(&train, |_, batch| {
                    Ok(Measure::of_sum(batch.samples() as f64))
                })?;
            }
            trainer.finish().map(drop)
        })
        .expect("trained");
    };
    let [whole, cut] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
    train(whole.path(), "12");
    train(cut.path(), "7");
    train(cut.path(), "12");
    let (weights, rates) = ended(whole.path());
    // Twice no better after 9 steps.
    let fell = rates.iter().position(|lr| *lr != rates[0]);
    assert_eq!((rates.len(), fell), (12, Some(9)));
    assert_eq!(ended(cut.path()), (weights, rates));
}

#[test]
fn a_learning_rate_that_was_set_leaves_the_schedule_its_momentum() {
    let train = |dir: &Path, args: &[&str]| {
        let args = [&ARGS[..2], &["--log-interval", "1"], args].concat();
        start_on(2, dir, &args, |job| {
            let train = data(36);
            let builder = job.trainer(&train, plane, Sgd::new);
            let builder =
                builder.schedule(|lr, steps| Schedule::one_cycle(OneCycle::new(lr, steps)));
            let mut trainer = builder.start()?;
            for _epoch in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    trainer.step(&batch, |model, batch| loss(model, &batch))?;
                    if trainer.steps_taken() == 4 {
                        trainer.set_lr(0.0625)?;
                    }
                }
            }
            trainer.finish().map(drop)
        })
    };
    let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().expect("folder"));
    train(whole.path(), &[]).expect("trained");
    train(stopped.path(), &["--stop-after", "7"]).expect_err("stopped");
    train(stopped.path(), &["--resume", "auto"]).expect("trained");
    let want = ended(whole.path());
    assert_eq!(want.1[3..5], [want.1[3].clone(), 0.0625.into()]);
    assert_ne!(want.1[3], 0.0625);
    assert_eq!(ended(stopped.path()), want);
}

#[test]
fn a_loop_over_batches_that_is_left_takes_as_many_steps_as_it_may() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [&ARGS[..2], &["--epochs", "10", "--max-steps", "12"]].concat();
    let epochs = start_on(2, dir.path(), &args, |job| {
        let train = data(36);
        let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
        let mut epochs = Vec::new();
        for epoch in trainer.epochs() {
            epochs.push(epoch);
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
                if batch.index() == 1 {
                    break;
                }
            }
        }
        for wrong in [f64::NAN, f64::INFINITY] {
            let error = trainer.set_state(&vec![wrong]).expect_err("no JSON");
            assert_eq!(error.kind(), ErrorKind::Usage);
        }
        trainer.finish()?;
        Ok(epochs)
    });
    assert_eq!(epochs.expect("trained"), [1, 2, 3, 4, 5, 6]);
    let summary = json(&dir.path().join("run/summary.json"));
    assert_eq!(
        (summary["steps"].as_u64(), summary["planned_steps"].as_u64()),
        (Some(12), Some(12))
    );
}

/// Two epochs of six steps, written down without a trainer: SGD with momentum on all samples of a step; what a step's norm
/// leaves out changes nothing. Gives the weights, and the norms of all steps.
fn by_hand(steps: &[Vec<u64>], largest: f64) -> (Vec<f64>, Vec<f64>) {
    let samples = data(36);
    let mut scope = Scope::new(Seed(1));
    plane(&mut scope);
    let params = scope.build().expect("parameters");
    let mut w: Vec<f64> = params
        .ids()
        .flat_map(|id| params.export(id))
        .map(f64::from)
        .collect();
    let (mut velocity, mut norms) = (vec![0.0; 3], Vec::new());
    for step in steps {
        let mut grad = [0.0; 3];
        for index in step {
            let (x, y) = samples[*index as usize];
            let x = [f64::from(x[0]), f64::from(x[1]), 1.0];
            let error = x.iter().zip(&w).map(|(x, w)| x * w).sum::<f64>() - f64::from(y);
            for (grad, x) in grad.iter_mut().zip(x) {
                *grad += 2.0 * error * x / step.len() as f64;
            }
        }
        let norm = grad.iter().map(|g| g * g).sum::<f64>().sqrt();
        norms.push(norm);
        if norm > largest {
            continue;
        }
        for ((w, velocity), grad) in w.iter_mut().zip(&mut velocity).zip(grad) {
            *velocity = 0.9 * *velocity + grad;
            *w -= 0.1 * *velocity;
        }
    }
    (w, norms)
}

#[test]
fn an_update_is_refused_by_the_norm_of_its_gradients() {
    const LARGEST: f64 = 0.9;
    let ways: [&[&str]; 4] = [
        &["--exchange", "all-reduce"],
        &["--exchange", "reduce-scatter"],
        &["--exchange", "at-step"],
        &["--deterministic", "shards", "--shards", "6"],
    ];
    for (world, args) in ways.iter().flat_map(|args| [1, 2, 3].map(|n| (n, *args))) {
        // Of each step, the samples of all ranks, and what the hook was asked.
        let steps: Mutex<Vec<Vec<u64>>> = Mutex::new(vec![Vec::new(); 12]);
        let args = [&ARGS[..2], &["--epochs", "2"], args].concat();
        let dir = tempfile::tempdir().expect("folder");
        let (weights, norms, skipped) = start_on(world, dir.path(), &args, |job| {
            let train = data(36);
            let asked = RefCell::new(Vec::new());
            let builder = job.trainer(&train, plane, |params, lr| {
                Sgd::new(params, lr).momentum(0.9)
            });
            let builder = builder.before_update(|update| {
                assert_eq!((update.group, update.lr), ("", 0.1));
                assert_eq!(update.epoch as u64, (update.step - 1) / 6 + 1);
                let mut asked = asked.borrow_mut();
                asked.push(update.grad_norm);
                assert_eq!(asked.len() as u64, update.step);
                // The last rank decides for all.
                Ok(job.context().rank() + 1 < world || update.grad_norm <= LARGEST)
            });
            let mut trainer = builder.start()?;
            for _epoch in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    let at = trainer.steps_taken() as usize;
                    trainer.step(&batch, |model, batch| {
                        let mut steps = steps.lock().expect("no panic");
                        steps[at].extend_from_slice(batch.indices());
                        loss(model, &batch)
                    })?;
                    assert_eq!(trainer.grad_norm(), asked.borrow().last().copied());
                }
                trainer.check_weights()?;
            }
            let params = trainer.params();
            let weights: Vec<f32> = params.ids().flat_map(|id| params.export(id)).collect();
            trainer.finish()?;
            let asked = asked.take();
            Ok((weights, asked))
        })
        .map(|(weights, asked)| {
            let summary = json(&dir.path().join("run/summary.json"));
            (weights, asked, summary["skipped_steps"].clone())
        })
        .expect("trained");
        let (want, want_norms) = by_hand(&steps.into_inner().expect("no panic"), LARGEST);
        let what = format!("{world} ranks, {args:?}: {want_norms:?}");
        let refused = want_norms.iter().filter(|norm| **norm > LARGEST).count();
        assert!((2..10).contains(&refused), "{what}");
        assert_eq!(skipped, refused, "{what}");
        let near = |a: &f64, b: f64| (a - b).abs() < 1e-5;
        assert!(
            want.iter()
                .zip(&weights)
                .all(|(a, b)| near(a, f64::from(*b))),
            "{what}"
        );
        assert!(
            want_norms.iter().zip(&norms).all(|(a, b)| near(a, *b)),
            "{what}"
        );
        assert_eq!(norms.len(), 12);
    }
}

#[test]
fn a_learning_rate_is_found_on_any_number_of_ranks() {
    let program = |job: &Job<'_>| {
        let train = data(36);
        let files = Files {
            each_epoch: true,
            ..Files::default()
        };
        let mut trainer = job.trainer(&train, plane, Sgd::new).files(files).start()?;
        for _epoch in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
            }
            trainer.check_weights()?;
            trainer.record(Evaluation::new(1.0, Confusion::new(0)))?;
        }
        Err::<(), _>(Error::usage("it ends in a step"))
    };
    // Epochs do not matter, nor do parts of them.
    let found = [1, 3].map(|world| {
        let dir = tempfile::tempdir().expect("folder");
        let args = [&ARGS[..], &["--find-lr", "--max-steps", "80"]].concat();
        let error = start_on(world, dir.path(), &args, program).expect_err("stopped");
        assert_eq!(error.kind(), ErrorKind::Stopped, "{}", error.chain());
        let run = dir.path().join("run");
        let names = std::fs::read_dir(&run).expect("folder").flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        let is_weights = |name: &std::ffi::OsString| name.to_string_lossy().contains("safetensors");
        assert!(!names.iter().any(is_weights), "{names:?}");
        let report = std::fs::read_to_string(run.join("report.html")).expect("a report");
        assert!(report.contains("suggested_lr"));
        let mut records = metrics(&run);
        records.retain(|r| r.get("lr").is_some() || r.get("suggested_lr").is_some());
        let timeless = |mut record: Value| {
            let fields = record.as_object_mut().expect("a record");
            fields.retain(|name, _| {
                ["step", "epoch", "loss", "lr", "suggested_lr"].contains(&&**name)
            });
            record
        };
        records.into_iter().map(timeless).collect::<Vec<_>>()
    });
    assert_eq!(found[0], found[1]);
    let (last, steps) = found[0].split_last().expect("records");
    // The loss of a plane diverges above a rate of 2 by the largest curvature, which is below 4.
    assert!((60..80).contains(&steps.len()), "{}", steps.len());
    assert_eq!(steps[0]["lr"], 1e-7);
    let suggested = last["suggested_lr"].as_f64().expect("a suggestion");
    assert!((1e-3..2.0).contains(&suggested), "{suggested}");
}
