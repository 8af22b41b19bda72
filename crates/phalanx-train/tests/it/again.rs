//! A training that is started again: what its folder has then, beside the same training that was never stopped.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_base::files::Dir;
use phalanx_checkpoint as checkpoint;
use phalanx_data::metrics::Confusion;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Seed};
use phalanx_report::Run;
use phalanx_track::{Follow, Record};
use phalanx_train::{ErrorKind, Evaluation, Job, Measure, Result, Trainer, prepare_run};
use serde_json::Value;

use crate::trainer::{answers, data, loss, plane, ranks_with, settings, targets};

/// Starts `program` on two ranks as `phalanx::main` does; what rank 0 gives, or the rank that failed.
fn start<R: Send>(
    dir: &Path,
    args: &[&str],
    program: impl Fn(&Job<'_>) -> Result<R> + Sync,
) -> Result<R> {
    start_on(2, dir, args, program)
}

/// The same on `world` ranks.
pub(crate) fn start_on<R: Send>(
    world: usize,
    dir: &Path,
    args: &[&str],
    program: impl Fn(&Job<'_>) -> Result<R> + Sync,
) -> Result<R> {
    let mut settings = settings(dir, args);
    let (output_dir, saving) = (&mut settings.output_dir, &mut settings.saving);
    let _prepared = prepare_run(Some(true), output_dir, saving, "test")?;
    // One that fails takes the others with it.
    let mut ranks = ranks_with(&settings, world, program);
    let is_lost = |rank: &Result<R>| {
        rank.as_ref()
            .is_err_and(|e| e.kind() == ErrorKind::PeerLost)
    };
    let own = ranks.iter().position(|rank| !is_lost(rank));
    ranks.swap_remove(own.unwrap_or(0))
}

fn measure(trainer: &mut Trainer<'_, Linear>) -> Result<Evaluation> {
    trainer.evaluate(&data(11), |model, batch| {
        let targets = targets(&batch);
        let sum = answers(model, &batch)?.mse_loss(&targets, Reduction::Sum)?;
        Ok(Measure::of_loss(sum).with_value("twice", 2.0 * f64::from(targets[0])))
    })
}

/// The beginning of a PNG file of one pixel.
fn png() -> Vec<u8> {
    let head = [&b"\x89PNG\r\n\x1a\n"[..], &[0, 0, 0, 13], b"IHDR"];
    [&head.concat()[..], &[0, 0, 0, 1, 0, 0, 0, 1, 8, 0, 0, 0, 0]].concat()
}

/// Two epochs of four steps. It logs at its start, in the loop before and after each step, and after each epoch.
fn logging(job: &Job<'_>) -> Result<Evaluation> {
    let train = data(40);
    let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
    trainer.log(&[("start", 1.0)])?;
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.log(&[("before", batch.index() as f64)])?;
            let mean = trainer.step(&batch, |model, batch| loss(model, &batch))?;
            trainer.log(&[("after", mean)])?;
            trainer.log_text("at", &format!("{epoch}/{}", batch.index()));
            if batch.index() == 1 {
                measure(&mut trainer)?;
            }
        }
        let tested = measure(&mut trainer)?;
        trainer.log(&[("error", tested.loss.sqrt())])?;
        trainer.log_text("epoch", &format!("{epoch}"));
        trainer.log_image("picture", &png())?;
        trainer.log_table("table", &[BTreeMap::from([("epoch", epoch)])])?;
    }
    trainer.finish()
}

const LOGGING: [&str; 4] = ["--global-batch-size", "10", "--log-interval", "1"];

pub(crate) fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// Numbers of time are left out.
fn plain(mut record: Value) -> Value {
    for name in record.as_object().expect("an object").clone().keys() {
        if name == "mfu" || ["_s", "_ms"].iter().any(|end| name.ends_with(end)) {
            record.as_object_mut().expect("an object").remove(name);
        }
    }
    record
}

pub(crate) fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let records = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    records.map(plain).collect()
}

/// Images, tables and texts of the report: kind, name, step, content.
fn logged(run: &Path) -> Vec<Value> {
    let run = Run::read_in(&Dir::open(run).expect("folder")).expect("a run");
    let run = serde_json::to_value(&run).expect("JSON");
    run["logged"].as_array().expect("a list").clone()
}

/// What trackers are given of the training: numbers, images, tables and texts in their order, without times.
fn followed(run: &Path) -> Vec<Value> {
    let mut follow = Follow::open(run);
    let polls = std::iter::repeat_with(|| follow.poll().expect("read"));
    let records = polls.take_while(|records| !records.is_empty()).flatten();
    let of = |record: Record| match record {
        Record::Metrics(record) if record.get("start").is_none() => Some(plain(record)),
        Record::Event(mut event) if event["epoch"].is_u64() && event["kind"] != "start" => {
            event["time"] = Value::Null;
            Some(plain(event))
        }
        _ => None,
    };
    records.filter_map(of).collect()
}

#[test]
fn what_a_program_logs_is_there_once_wherever_the_training_was_resumed() {
    let whole = tempfile::tempdir().expect("folder");
    let never = start(whole.path(), &LOGGING, logging).expect("trained");
    let whole = whole.path().join("run");
    let expected = metrics(&whole);
    let of = |name: &str| expected.iter().filter(|r| r.get(name).is_some()).count();
    let counts = ["loss", "before", "after", "error", "test_loss", "start"].map(of);
    assert_eq!(counts, [8, 8, 8, 2, 4, 1]);
    // What is logged in the loop has the step of its loss, and after it that of the evaluation.
    let steps = |name: &str| -> Vec<&Value> {
        let having = expected.iter().filter(|r| r.get(name).is_some());
        having.map(|r| &r["step"]).collect()
    };
    assert_eq!(steps("loss"), [0, 1, 2, 3, 4, 5, 6, 7]);
    for name in ["before", "after"] {
        assert_eq!(steps(name), steps("loss"), "{name}");
    }
    assert_eq!(steps("error"), [4, 8]);
    assert_eq!(steps("train_loss"), [4, 8]);
    assert_eq!(steps("test_loss"), [1, 4, 5, 8]);
    // Not the value that is logged at each start.
    let lasting = |records: Vec<Value>| -> Vec<Value> {
        let others = records.into_iter().filter(|r| r.get("start").is_none());
        others.collect()
    };
    let expected = lasting(expected);
    // Killed later, and resumed from this checkpoint. The first is always saved in time, as are those of epochs.
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let saving = [&LOGGING[..], &["--save-every", "1", "--keep", "99"]].concat();
    start(dir.path(), &saving, logging).expect("trained");
    let mut resumed = Vec::new();
    for step in (1..=8).rev() {
        let checkpoint = run.join(format!("checkpoints/step-{step:09}.json"));
        let path = checkpoint.display().to_string();
        if !checkpoint.exists() {
            continue;
        }
        if step == 8 {
            // As after a kill before the summary.
            std::fs::remove_file(run.join("summary.json")).expect("removed");
        }
        let again = [&saving[..], &["--resume", &path]].concat();
        let tested = start(dir.path(), &again, logging).expect("resumed");
        assert_eq!(tested.loss, never.loss);
        assert_eq!(lasting(metrics(&run)), expected, "from step {step}");
        assert_eq!(logged(&run), logged(&whole), "from step {step}");
        assert_eq!(followed(&run), followed(&whole), "from step {step}");
        resumed.push(step);
    }
    assert!(
        [1, 4, 8].iter().all(|step| resumed.contains(step)),
        "{resumed:?}"
    );
}

/// Epochs that are left early take fewer steps than they have.
fn leaving(job: &Job<'_>) -> Result<Evaluation> {
    let train = data(40);
    let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
    for _ in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            if batch.index() == 2 {
                break;
            }
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        let tested = measure(&mut trainer)?;
        trainer.log(&[("error", tested.loss)])?;
    }
    trainer.finish()
}

#[test]
fn an_epoch_that_is_left_early_has_its_evaluation_and_is_resumed() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let args = ["--global-batch-size", "10", "--log-interval", "1"];
    let go = |more: &[&str]| {
        start(dir.path(), &[&args[..], more].concat(), leaving).expect("trained");
    };
    go(&["--epochs", "3"]);
    let expected = metrics(&run);
    assert_eq!(expected.len(), 3 * (2 + 1 + 1), "{expected:?}");
    go(&["--overwrite", "--save-every", "100"]);
    go(&["--resume", "auto", "--epochs", "3"]);
    assert_eq!(metrics(&run), expected);
}

/// Every file of the folder, by its path, but flight recorders.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir).expect("folder").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy().into_owned();
        match path.is_dir() {
            true if name == "flight" => {}
            true => {
                let inner = crate::again::files(&path).into_iter();
                files.extend(inner.map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
            }
            false => drop(files.insert(name, std::fs::read(&path).expect("a file"))),
        }
    }
    files
}

fn same(a: &Evaluation, b: &Evaluation) -> bool {
    let bits = |e: &Evaluation| (e.loss.to_bits(), e.values.clone(), e.confusion.clone());
    bits(a) == bits(b)
}

#[test]
fn a_finished_run_that_is_started_again_keeps_every_file_and_gives_its_result() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let args = [&LOGGING[..], &["--resume", "auto"]].concat();
    let first = start(dir.path(), &args, logging).expect("trained");
    assert!(first.values.contains_key("twice"));
    let before = files(&run);
    for _ in 0..2 {
        let again = start(dir.path(), &args, logging).expect("complete");
        assert!(same(&again, &first), "{again:?}");
        let after = files(&run);
        assert!(before == after, "{:?}", after.keys());
    }
    // As older versions have left it: the checkpoint does not know the evaluation.
    let manifest = run.join("checkpoints/step-000000008.json");
    let mut old = json(&manifest);
    let progress = old["progress"].as_object_mut().expect("an object");
    progress.remove("last").expect("the evaluation");
    std::fs::write(&manifest, old.to_string()).expect("written");
    let again = start(dir.path(), &args, logging).expect("complete");
    assert_eq!(again.loss, first.loss);
    // More epochs are trained.
    let more = [&args[..], &["--epochs", "3"]].concat();
    start(dir.path(), &more, logging).expect("continued");
    assert_eq!(json(&run.join("summary.json"))["epochs"], 3);
    assert_eq!(
        metrics(&run)
            .iter()
            .filter(|r| r.get("error").is_some())
            .count(),
        3
    );
}

#[test]
fn a_run_that_was_killed_before_its_summary_is_completed() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let args = [&LOGGING[..], &["--resume", "auto"]].concat();
    let first = start(dir.path(), &args, logging).expect("trained");
    let before = json(&run.join("summary.json"));
    std::fs::remove_file(run.join("summary.json")).expect("removed");
    let again = start(dir.path(), &args, logging).expect("completed");
    assert!(same(&again, &first), "{again:?}");
    let after = json(&run.join("summary.json"));
    for name in [
        "test_loss",
        "test_twice",
        "weights_sha256",
        "metrics_sha256",
    ] {
        assert_eq!(after[name], before[name], "{name}");
    }
}

/// Ends after the first of its epochs.
fn early(job: &Job<'_>) -> Result<usize> {
    let train = data(40);
    let mut trainer = job.trainer(&train, plane, Sgd::new).start()?;
    if let Some(_epoch) = trainer.epochs().next() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        measure(&mut trainer)?;
    }
    let taken = trainer.steps_taken();
    trainer.finish()?;
    Ok(taken as usize)
}

#[test]
fn a_program_that_ended_early_is_complete_until_more_epochs_are_asked_for() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--global-batch-size", "10", "--resume", "auto", "--epochs"];
    let go = |epochs| start(dir.path(), &[&args[..], &[epochs]].concat(), early).expect("run");
    assert_eq!(
        [go("5"), go("5"), go("4"), go("6"), go("6")],
        [4, 4, 4, 8, 8]
    );
}

#[test]
fn results_without_checkpoints_are_not_replaced_by_a_resume() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let refused = |args: &[&str], words: &[&str], not: &[&str]| {
        let before = files(&run);
        let error = start(dir.path(), args, early).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.render();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert!(!not.iter().any(|word| text.contains(word)), "{text}");
        assert!(before == files(&run), "{text}");
    };
    start(dir.path(), &[], early).expect("trained");
    refused(
        &[],
        &["holds an earlier run", "--overwrite"],
        &["--resume auto"],
    );
    let auto = ["--resume", "auto"];
    let words = ["holds an earlier run", "finds no checkpoint", "--overwrite"];
    refused(&auto, &words, &[]);
    // Killed before it had ended: its best weights would go.
    std::fs::remove_file(run.join("summary.json")).expect("removed");
    refused(&auto, &words, &[]);
    // A run that was to save checkpoints, and was killed before the first.
    let mut about = json(&run.join("run.json"));
    about["typed"] = vec!["--resume"].into();
    std::fs::write(run.join("run.json"), about.to_string()).expect("written");
    start(dir.path(), &auto, early).expect("started again");
    // Another run's results neither.
    let other = tempfile::tempdir().expect("folder");
    start(other.path(), &["--save-every", "1"], early).expect("trained");
    let from = other.path().join("run").display().to_string();
    refused(
        &["--resume", &from, "--epochs", "9"],
        &["holds an earlier run: summary.json"],
        &[],
    );
}

/// A teacher and a student, in the folders of these names.
fn two(job: &Job<'_>, names: [Option<&str>; 2]) -> Result<Vec<u64>> {
    let train = data(40);
    let mut taken = Vec::new();
    for name in names {
        let builder = job.trainer(&train, plane, Sgd::new);
        let mut trainer = match name {
            Some(name) => builder.folder(name),
            None => builder,
        }
        .start()?;
        for _ in trainer.epochs() {
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| loss(model, &batch))?;
            }
            measure(&mut trainer)?;
        }
        taken.push(trainer.steps_taken());
        trainer.finish()?;
    }
    Ok(taken)
}

#[test]
fn a_second_trainer_without_a_folder_of_its_own_is_refused() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let args = ["--global-batch-size", "10"];
    let go = |more: &[&str], names| {
        start(dir.path(), &[&args[..], more].concat(), |job| {
            two(job, names)
        })
    };
    let alone = [None, None];
    let error = go(&["--save-every", "2"], alone).expect_err("the same folder");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.render().contains(".folder(\"NAME\")"),
        "{}",
        error.render()
    );
    let kept = files(&run);
    for name in ["summary.json", "test.safetensors", "metrics.jsonl"] {
        assert!(kept.contains_key(name), "{name}");
    }
    // Also when it is started again.
    go(&["--resume", "auto"], alone).expect_err("the same folder");
    assert!(kept == files(&run));
}

#[test]
fn trainers_with_folders_of_their_own_are_started_again_each_for_itself() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let args = ["--global-batch-size", "10"];
    let go = |more: &[&str], names| {
        start(dir.path(), &[&args[..], more].concat(), |job| {
            two(job, names)
        })
    };
    let named = [Some("teacher"), Some("student")];
    let trained = go(&["--save-every", "2"], named).expect("trained");
    assert_eq!(trained, [8, 8]);
    let before = files(&run);
    for name in [
        "teacher/summary.json",
        "student/summary.json",
        "student/test.safetensors",
    ] {
        assert!(before.contains_key(name), "{name}");
    }
    let error = go(&[], named).expect_err("it holds a run");
    let words = ["teacher holds an earlier run", "--resume auto --output-dir"];
    let text = error.render();
    assert!(
        words.iter().all(|word| text.contains(word)) && !text.contains("run/teacher\n"),
        "{text}"
    );
    assert_eq!(go(&["--resume", "auto"], named).expect("complete"), [8, 8]);
    assert!(before == files(&run));
    // Only what the second one has lost is trained again.
    std::fs::remove_dir_all(run.join("student")).expect("removed");
    assert_eq!(go(&["--resume", "auto"], named).expect("resumed"), [8, 8]);
    let after = files(&run);
    let teacher = |files: &BTreeMap<String, Vec<u8>>| -> Vec<(String, Vec<u8>)> {
        let of = files
            .iter()
            .filter(|(name, _)| name.starts_with("teacher/"));
        of.map(|(name, bytes)| (name.clone(), bytes.clone()))
            .collect()
    };
    assert!(teacher(&before) == teacher(&after));
    assert!(after.contains_key("student/summary.json"));
    for wrong in ["", "..", "a/b", "checkpoints"] {
        let error = go(&["--overwrite"], [Some(wrong), None]).expect_err(wrong);
        assert_eq!(error.kind(), ErrorKind::Usage, "{}", error.render());
    }
    let from = run.display().to_string();
    let error = go(&["--resume", &from], named).expect_err("of which?");
    assert!(
        error.render().contains("--resume auto"),
        "{}",
        error.render()
    );
}

/// Evaluations of these losses; the weights after each epoch.
fn scored(job: &Job<'_>, best: &str, losses: &[f64]) -> Result<Vec<Vec<f32>>> {
    let train = data(40);
    let mut trainer = job.trainer(&train, plane, Sgd::new).best(best).start()?;
    let mut weights = Vec::new();
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&train)? {
            trainer.step(&batch, |model, batch| loss(model, &batch))?;
        }
        trainer.check_weights()?;
        let mut evaluation = Evaluation::new(losses[epoch - 1], Confusion::new(0));
        evaluation.values.insert("up".to_owned(), losses[epoch - 1]);
        trainer.record(evaluation)?;
        weights.push(trainer.params().flat().to_vec());
    }
    trainer.finish()?;
    Ok(weights)
}

/// The epoch of the best weights in `run`, by its file, and the weights.
pub(crate) fn best(run: &Path, name: &str) -> (String, Vec<f32>) {
    let mut scope = Scope::new(Seed(7));
    plane(&mut scope);
    let mut params = scope.build().expect("parameters");
    let path = run.join(name);
    let loaded = checkpoint::load_params(&path, &mut params).expect("weights");
    (loaded.metadata["epoch"].clone(), params.flat().to_vec())
}

const BEST: &str = "best.safetensors";

#[test]
fn the_best_weights_are_those_of_the_epoch_that_a_measure_names() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let go = |by: &str, losses: &[f64]| {
        let args = ["--epochs", "3", "--overwrite"];
        start(dir.path(), &args, |job| scored(job, by, losses))
    };
    for (by, epoch) in [("loss", 2), ("up:max", 1), ("up:min", 2)] {
        let weights = go(by, &[3.0, 1.0, 2.0]).expect("trained");
        let (of, there) = best(&run, BEST);
        assert_eq!(of, epoch.to_string(), "{by}");
        assert_eq!(there, weights[epoch - 1], "{by}");
        assert!(run.join("best.pth").exists());
    }
    let error = go("mae:min", &[1.0, 2.0]).expect_err("no mae");
    assert!(
        error.chain().contains("it has test_loss, up"),
        "{}",
        error.chain()
    );
}

#[test]
fn the_best_weights_are_never_those_of_a_branch_that_was_left() {
    let dir = tempfile::tempdir().expect("folder");
    let run = dir.path().join("run");
    let go = |more: &[&str], losses: &[f64]| {
        let args = [
            &["--epochs", "3", "--global-batch-size", "10", "--keep", "9"][..],
            more,
        ];
        start(dir.path(), &args.concat(), |job| {
            scored(job, "loss", losses)
        })
        .expect("trained")
    };
    let first = go(&["--save-every", "99"], &[3.0, 1.0, 2.0]);
    assert_eq!(best(&run, BEST), ("2".to_owned(), first[1].clone()));
    let from = |step: u64| {
        run.join(format!("checkpoints/step-{step:09}.json"))
            .display()
            .to_string()
    };
    // From the end of epoch 1, which is the best of the new branch.
    go(&["--resume", &from(4)], &[3.0, 5.0, 4.0]);
    assert_eq!(best(&run, BEST), ("1".to_owned(), first[0].clone()));
    assert_eq!(
        best(&run, "aside-best.safetensors"),
        ("2".to_owned(), first[1].clone())
    );
    // From the end of epoch 2, in the same branch: nothing is better.
    go(&["--resume", &from(8)], &[3.0, 5.0, 3.0]);
    assert_eq!(best(&run, BEST), ("1".to_owned(), first[0].clone()));
    let last = go(&["--resume", &from(8), "--lr", "0.2"], &[3.0, 5.0, 0.5]);
    assert_eq!(best(&run, BEST), ("3".to_owned(), last[0].clone()));
    // What is better than epoch 1 is left again.
    go(&["--resume", &from(8)], &[3.0, 5.0, 3.5]);
    assert_eq!(best(&run, BEST), ("1".to_owned(), first[0].clone()));
    assert!(run.join("best.pth").exists());
}

#[test]
fn a_flag_that_changes_the_model_is_named_by_a_resume() {
    let dir = tempfile::tempdir().expect("folder");
    let train = data(40);
    let go = |width: usize, more: &[&str]| {
        start(dir.path(), more, |job| {
            let model = |scope: &mut Scope| Linear::new(scope.enter("plane"), 2, width);
            let builder = job.trainer(&train, model, Sgd::new);
            let mut trainer = builder
                .hyperparameters(vec![format!("--width {width}")])
                .start()?;
            for batch in trainer.batches(&train)? {
                trainer.step(&batch, |model, batch| {
                    let targets = targets(&batch).repeat(width);
                    answers(model, &batch)?.mse_loss(&targets, Reduction::Mean)
                })?;
            }
            trainer.finish().map(drop)
        })
    };
    go(1, &["--save-every", "99"]).expect("trained");
    let error = go(2, &["--resume", "auto"]).expect_err("another model");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.render().contains("--width 1 -> 2"),
        "{}",
        error.render()
    );
}
