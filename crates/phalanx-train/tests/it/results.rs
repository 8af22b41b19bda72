//! What a run says of itself belongs to its weights: the best ones, evaluations, losses, names.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use phalanx_checkpoint as checkpoint;
use phalanx_data::metrics::Confusion;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Scope, Seed};
use phalanx_train::{EarlyStopping, ErrorKind, Evaluation, Job, Measure, Result};
use serde_json::Value;

use crate::again::{best, json, metrics, start_on};
use crate::trainer::{answers, data, loss, plane, ranks_in, targets};

const BEST: &str = "best.safetensors";

/// Four steps an epoch, a checkpoint after every third and after each epoch.
const ARGS: [&str; 8] = [
    "--global-batch-size",
    "10",
    "--keep",
    "99",
    "--save-every",
    "3",
    "--log-interval",
    "1",
];

/// A training whose evaluation after so many steps gives this loss, and accuracy of one class; the loss that it ends with.
fn measured(job: &Job<'_>, losses: &[(u64, f64)], patience: usize) -> Result<f64> {
    let train = data(40);
    let builder = job.trainer(&train, plane, Sgd::new).best("loss");
    let mut trainer = builder
        .early_stopping(EarlyStopping::new(patience))
        .start()?;
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        trainer.check_weights()?;
        let taken = trainer.steps_taken();
        if let Some((_, loss)) = losses.iter().find(|(step, _)| *step == taken) {
            trainer.record(Evaluation::new(*loss, Confusion::new(0)))?;
        }
    }
    Ok(trainer.finish()?.loss)
}

fn go(dir: &Path, world: usize, more: &[&str], losses: &[(u64, f64)]) -> Result<f64> {
    let args = [&ARGS, more].concat();
    start_on(world, dir, &args, |job| measured(job, losses, 9))
}

/// As [`go`], with a checkpoint in the middle of epoch 2.
fn go_with_middle(dir: &Path, more: &[&str], losses: &[(u64, f64)]) {
    let first = [more, &["--stop-after", "6"]].concat();
    let stopped = go(dir, 1, &first, losses).expect_err("stopped");
    assert_eq!(stopped.kind(), ErrorKind::Stopped);
    let rest = [more, &["--resume", "auto"]].concat();
    go(dir, 2, &rest, losses).expect("trained");
}

fn checkpoint(run: &Path, name: &str) -> String {
    let path = run.join("checkpoints").join(name);
    path.display().to_string()
}

/// The files of earlier best weights among the checkpoints with this ending.
fn kept(run: &Path, end: &str) -> Vec<std::path::PathBuf> {
    let all = fs::read_dir(run.join("checkpoints")).expect("folder");
    let all = all.map(|entry| entry.expect("entry").path());
    let name = |path: &Path| {
        path.file_name()
            .expect("name")
            .to_string_lossy()
            .into_owned()
    };
    all.filter(|path| name(path).starts_with("best-") && name(path).ends_with(end))
        .collect()
}

/// The weights of the PyTorch file.
fn pth(path: &Path) -> Vec<f32> {
    let mut scope = Scope::new(Seed(7));
    plane(&mut scope);
    let mut params = scope.build().expect("parameters");
    checkpoint::load_params(path, &mut params).expect("weights");
    params.flat().to_vec()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("folder");
    for entry in fs::read_dir(from).expect("folder") {
        let path = entry.expect("entry").path();
        let to = to.join(path.file_name().expect("name"));
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(fs::copy(&path, &to).expect("copied")),
        }
    }
}

#[test]
fn the_best_weights_are_those_of_the_branch_wherever_a_run_was_killed() {
    let dir = tempfile::tempdir().expect("folder");
    let first = [(4, 3.0), (8, 1.0), (12, 2.0)];
    go_with_middle(dir.path(), &["--epochs", "3"], &first);
    let run = dir.path().join("run");
    let second = best(&run, BEST);
    assert_eq!(second.0, "2");
    let [weights] = &kept(&run, ".safetensors")[..] else {
        panic!("of epoch 1 only");
    };
    let name = weights
        .strip_prefix(&run)
        .expect("below")
        .display()
        .to_string();
    let one = best(&run, &name);
    assert_eq!(one.0, "1");
    assert_ne!(one.1, second.1);
    // What lies there where a process is killed in the course of saving, and what somebody has removed.
    for state in 0..5 {
        let there = tempfile::tempdir().expect("folder");
        copy(dir.path(), there.path());
        let run = there.path().join("run");
        let kept = run.join(&name);
        match state {
            0 => {}
            1 => fs::remove_file(run.join("best.pth")).expect("removed"),
            2 => ["best.pth", BEST]
                .iter()
                .for_each(|file| fs::remove_file(run.join(file)).expect("removed")),
            _ => {
                fs::remove_file(run.join("best.pth")).expect("removed");
                fs::copy(&kept, run.join(BEST)).expect("copied");
                if state == 4 {
                    fs::remove_file(&kept).expect("removed");
                }
            }
        }
        // In the middle of epoch 2.
        let from = checkpoint(&run, "step-000000006.json");
        let worse = [(8, 5.0), (12, 4.0)];
        for from in [&from, "auto"] {
            let more = ["--epochs", "3", "--lr", "0.3", "--resume", from];
            let ended = go(there.path(), 1, &more, &worse).expect("trained");
            assert_eq!(ended, 4.0);
            assert_eq!(best(&run, BEST), one, "{state}");
            assert_eq!(pth(&run.join("best.pth")), one.1, "{state}");
        }
        if state < 2 {
            assert_eq!(best(&run, "aside-best.safetensors"), second);
            assert_eq!(run.join("aside-best.pth").exists(), state == 0);
            // Back to the branch that was left.
            let from = checkpoint(&run, "aside-step-000000008.json");
            let more = ["--epochs", "3", "--resume", &from];
            go(there.path(), 2, &more, &[(12, 9.0)]).expect("trained");
            assert_eq!(best(&run, BEST), second, "{state}");
        }
    }
}

#[test]
fn earlier_best_weights_stay_as_long_as_a_checkpoint_goes_on_with_them() {
    let dir = tempfile::tempdir().expect("folder");
    let falling: Vec<(u64, f64)> = (1..=6).map(|i| (4 * i, 1.0 / i as f64)).collect();
    let args = ["--epochs", "6", "--keep", "2"];
    go(dir.path(), 1, &args, &falling).expect("trained");
    let run = dir.path().join("run");
    // Of the last two checkpoints, after 23 and 24 steps, one goes on with the best before.
    assert_eq!(kept(&run, ".safetensors").len(), 1);
    assert_eq!(kept(&run, ".pth").len(), 1);
    let again = [&args[..], &["--overwrite", "--max-steps", "2"]].concat();
    go(dir.path(), 1, &again, &falling).expect("trained");
    assert!(kept(&run, "").is_empty());
}

#[test]
fn weights_that_are_not_there_are_not_said_to_be_saved() {
    for is_there in [true, false] {
        let dir = tempfile::tempdir().expect("folder");
        let go = |more: &[&str], losses: &[(u64, f64)]| {
            let args = [&ARGS, more].concat();
            start_on(1, dir.path(), &args, |job| measured(job, losses, 1)).expect("trained");
        };
        go_with_middle(dir.path(), &["--epochs", "2"], &[(4, 3.0), (8, 1.0)]);
        let run = dir.path().join("run");
        if !is_there {
            let all = [kept(&run, ".safetensors"), kept(&run, ".pth")].concat();
            all.iter()
                .for_each(|path| fs::remove_file(path).expect("removed"));
        }
        let from = checkpoint(&run, "step-000000006.json");
        go(&["--epochs", "3", "--resume", &from], &[(8, 5.0)]);
        assert_eq!(run.join(BEST).exists(), is_there);
        let events = fs::read_to_string(run.join("events.jsonl")).expect("events");
        let words = match is_there {
            true => "the best was test_loss 3.0000 in epoch 1, saved as best.safetensors",
            false => {
                "the best was test_loss 3.0000 in epoch 1, whose weights are not in the run's folder"
            }
        };
        assert!(events.contains(words), "{events}");
    }
}

/// What a run says of its results, without times.
fn results(dir: &Path) -> (Vec<Value>, Vec<Value>, (String, Vec<f32>)) {
    let run = dir.join("run");
    let summary = json(&run.join("summary.json"));
    let names = [
        "weights_sha256",
        "metrics_sha256",
        "test_loss",
        "accuracies",
        "stopped_early",
    ];
    let summary = names.map(|name| summary[name].clone()).to_vec();
    let names = [
        "step",
        "epoch",
        "loss",
        "train_loss",
        "test_loss",
        "weights_sha256",
    ];
    let records = metrics(&run).into_iter();
    let records = records.map(|record| names.iter().map(|name| record[*name].clone()).collect());
    (summary, records.collect(), best(&run, BEST))
}

#[test]
fn a_run_that_was_cut_and_goes_on_has_the_results_of_one_that_was_not() {
    let deterministic = [
        "--deterministic",
        "shards",
        "--shards",
        "4",
        "--epochs",
        "5",
    ];
    // The evaluations of the cuts, after 6 and 11 steps, would be the best ones.
    let losses = [
        (4, 3.0),
        (6, 0.5),
        (8, 4.0),
        (11, 0.25),
        (12, 2.0),
        (16, 6.0),
        (20, 5.0),
    ];
    for patience in [9, 2] {
        let go = |dir: &Path, world: usize, more: &[&str]| {
            let args = [&ARGS, &deterministic[..], more].concat();
            start_on(world, dir, &args, |job| measured(job, &losses, patience)).expect("trained")
        };
        let whole = tempfile::tempdir().expect("folder");
        let want = go(whole.path(), 1, &[]);
        let dir = tempfile::tempdir().expect("folder");
        for (world, max) in [(2, "6"), (1, "6"), (3, "11")] {
            go(dir.path(), world, &["--resume", "auto", "--max-steps", max]);
        }
        assert_eq!(best(&dir.path().join("run"), BEST).0, "3");
        for _ in 0..2 {
            assert_eq!(go(dir.path(), 2, &["--resume", "auto"]), want);
            assert_eq!(results(dir.path()), results(whole.path()), "{patience}");
        }
    }
}

#[test]
fn weights_that_were_not_evaluated_have_no_results() {
    let dir = tempfile::tempdir().expect("folder");
    let losses = [(4, 3.0), (8, 1.0), (12, 2.0)];
    let run = dir.path().join("run");
    let is_none = || {
        let summary = json(&run.join("summary.json"));
        ["test_loss", "accuracy"]
            .iter()
            .all(|name| summary[*name].is_null())
    };
    let stopped = go(
        dir.path(),
        2,
        &["--epochs", "3", "--stop-after", "6"],
        &losses,
    );
    assert_eq!(stopped.expect_err("stopped").kind(), ErrorKind::Stopped);
    // Within epoch 2 that is enough; the second time the run is complete.
    for _ in 0..2 {
        let ended = go(
            dir.path(),
            2,
            &["--epochs", "1", "--resume", "auto"],
            &losses,
        );
        assert!(ended.expect("ended").is_nan() && is_none());
    }
    let ended = go(
        dir.path(),
        1,
        &["--epochs", "3", "--resume", "auto"],
        &losses,
    );
    assert_eq!(ended.expect("trained"), 2.0);
    assert_eq!(json(&run.join("summary.json"))["test_loss"], 2.0);
    // A program that does not evaluate the last epoch, or the cut.
    for more in [
        &["--epochs", "3"][..],
        &["--epochs", "3", "--max-steps", "10"],
    ] {
        let args = [more, &["--overwrite"]].concat();
        let ended = go(dir.path(), 1, &args, &losses[..2]);
        assert!(ended.expect("trained").is_nan() && is_none());
        assert_eq!(best(&run, BEST).0, "2");
    }
}

#[test]
fn a_checkpoint_is_as_long_after_many_losses() {
    let length = |epochs: &str| {
        let dir = tempfile::tempdir().expect("folder");
        go(dir.path(), 1, &["--epochs", epochs, "--keep", "1"], &[]).expect("trained");
        let all = fs::read_dir(dir.path().join("run/checkpoints")).expect("folder");
        let all = all.map(|entry| entry.expect("entry").path());
        let manifest = all.filter(|path| path.extension().is_some_and(|end| end == "json"));
        let lengths = manifest.map(|path| fs::metadata(path).expect("file").len());
        lengths.max().expect("a checkpoint")
    };
    let [short, long] = ["2", "50"].map(length);
    // Numbers of steps have more digits.
    assert!(long < short + 20, "{short} and {long} bytes");
}

#[test]
fn the_loss_of_a_step_is_the_mean_over_all_ranks() {
    for (world, more) in [
        (1, &[][..]),
        (2, &[]),
        (3, &[]),
        (3, &["--accumulate", "2"]),
        (2, &["--exchange", "reduce-scatter"]),
        (3, &["--exchange", "at-step"]),
        (3, &["--gradient-type", "bf16"]),
        (4, &["--sampler", "torch"]),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        // Of each step and rank the samples and their mean loss.
        let own = Mutex::new(Vec::new());
        let train = data(37);
        let args = [&["--global-batch-size", "12", "--log-interval", "1"], more].concat();
        let ended = ranks_in(dir.path(), world, &args, |job| {
            let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
            for _ in trainer.epochs() {
                for batch in trainer.batches(&train)? {
                    let mut samples = 0;
                    let mean = trainer.step(&batch, |model, batch| {
                        samples += batch.samples();
                        loss(model, &batch)
                    })?;
                    let (rank, step) = (job.context().rank(), trainer.steps_taken());
                    let mut own = own.lock().expect("no panic");
                    own.push((step, rank, samples as f64, mean));
                }
            }
            trainer.finish().map(drop)
        });
        ended.into_iter().for_each(|rank| rank.expect("trained"));
        let mut own = own.into_inner().expect("no panic");
        own.sort_by_key(|of| (of.0, of.1));
        let want = own.chunk_by(|a, b| a.0 == b.0).map(|ranks| {
            let of = |f: fn(&(u64, usize, f64, f64)) -> f64| ranks.iter().map(f).sum::<f64>();
            of(|rank| rank.2 * rank.3) / of(|rank| rank.2)
        });
        let records = metrics(&dir.path().join("run"));
        let losses = records.iter().filter_map(|record| record["loss"].as_f64());
        let (want, losses): (Vec<f64>, Vec<f64>) = (want.collect(), losses.collect());
        assert_eq!(want.len(), losses.len());
        for (want, loss) in want.iter().zip(&losses) {
            assert!(
                (want - loss).abs() <= 1e-15 * want,
                "{world} {more:?}: {want} {loss}"
            );
        }
    }
}

#[test]
fn a_name_of_the_trainers_own_is_refused_for_numbers_of_the_program() {
    let dir = tempfile::tempdir().expect("folder");
    let train = data(20);
    let args = [&ARGS[..], &["--eval-every", "1"]].concat();
    start_on(2, dir.path(), &args, |job| {
        let builder = job.trainer(&train, plane, Sgd::new).clip_grad_norm(1.0);
        let mut trainer = builder.start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
                trainer.log(&[("tested", 1.0), ("learning_rate", 2.0)])?;
            }
            trainer.evaluate(&train, |model, batch| {
                let sum = answers(model, &batch)?
                    .mse_loss(&targets(&batch), phalanx_nn::Reduction::Sum)?;
                Ok(Measure::of_loss(sum).with_value("error", 1.0))
            })?;
            let mut wrong = Evaluation::new(1.0, Confusion::new(0));
            wrong.values.insert("loss".to_owned(), 2.0);
            let error = trainer.record(wrong).expect_err("it has one");
            assert_eq!(error.kind(), ErrorKind::Usage);
        }
        let more = [
            "suggested_lr",
            "ranks",
            "redone_s",
            "mfu",
            "accuracy",
            "test_error",
            "lr",
        ];
        let records = match job.context().is_main() {
            true => metrics(&dir.path().join("run")),
            false => Vec::new(),
        };
        let names = records
            .iter()
            .flat_map(|record| record.as_object().expect("an object").keys());
        let mut all: Vec<&str> = names.map(|name| &**name).chain(more).collect();
        all.retain(|name| !["tested", "learning_rate"].contains(name));
        for name in all {
            let error = trainer.log(&[("own", 1.0), (name, 1.0)]).expect_err(name);
            assert_eq!(error.kind(), ErrorKind::Usage, "{name}");
        }
        trainer.add_to_summary("test_loss", 7.0);
        trainer.add_to_summary("own", 7.0);
        trainer.finish().map(drop)
    })
    .expect("trained");
    assert!(
        metrics(&dir.path().join("run"))
            .iter()
            .all(|record| record.get("own").is_none())
    );
    let summary = json(&dir.path().join("run/summary.json"));
    assert_eq!(summary["own"], 7.0);
    assert_ne!(summary["test_loss"], 7.0);
}
