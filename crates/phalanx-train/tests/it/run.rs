//! Runs of programs that train without a trainer.

use phalanx_data::metrics::Confusion;
use phalanx_report::Run as Read;
use phalanx_train::{About, EarlyStopping, ErrorKind, Evaluation, Job, Result};
use serde_json::Value;

use crate::trainer::ranks_in;

/// Three steps an epoch; the second evaluation is the best.
fn program(job: &Job<'_>) -> Result<Vec<bool>> {
    let mut run = job.run(About {
        model: "a stone".to_owned(),
        data: "pebbles".to_owned(),
        steps: 3,
        settings: [("momentum".to_owned(), "0.9".to_owned())].into(),
        best: Some("f1:max".to_owned()),
        early_stopping: Some(EarlyStopping::new(2)),
    })?;
    let mut bests = Vec::new();
    for epoch in 1..=job.settings().epochs() {
        for step in 0..3 {
            run.step(1.0 / (epoch * 3 + step) as f64, 0.1)?;
        }
        run.log(&[("own", epoch as f64)])?;
        let mut confusion = Confusion::new(2);
        confusion.add_scores(&[0.1, 0.9, 0.7, 0.3], &[1, 1])?;
        let mut evaluation = Evaluation::new(0.25, confusion);
        let f1 = [0.5, 0.7, 0.6, 0.7, 0.9][epoch - 1];
        evaluation.values.insert("f1".to_owned(), f1);
        bests.push(run.evaluated(evaluation)?);
        if run.is_over() {
            break;
        }
    }
    run.add_to_summary("answer", 42);
    run.finish()?;
    Ok(bests)
}

fn lines(dir: &std::path::Path, file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("run").join(file)).expect("a file");
    let lines = text.lines().map(serde_json::from_str);
    lines.map(|line| line.expect("JSON")).collect()
}

#[test]
fn its_folder_is_that_of_a_trainer() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["--epochs", "5", "--log-interval", "1"];
    for bests in ranks_in(dir.path(), 2, &args, program) {
        assert_eq!(bests.expect("finished"), [true, true, false, false]);
    }
    let metrics = lines(dir.path(), "metrics.jsonl");
    let of = |name: &str| -> Vec<f64> { metrics.iter().filter_map(|r| r[name].as_f64()).collect() };
    assert_eq!(of("loss").len(), 12, "{metrics:?}");
    assert_eq!(of("own"), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(of("test_f1"), [0.5, 0.7, 0.6, 0.7]);
    let mean = [3.0, 4.0, 5.0].map(|n: f64| 1.0 / n).iter().sum::<f64>() / 3.0;
    assert!((of("train_loss")[0] - mean).abs() < 1e-12);
    let summary = &lines_of_summary(dir.path());
    for (name, want) in [
        ("steps", 12.into()),
        ("stopped_early", 12.into()),
        ("accuracy", 0.5.into()),
        ("test_f1", 0.7.into()),
        ("answer", 42.into()),
        ("world_size", 2.into()),
    ] as [(&str, Value); 6]
    {
        assert_eq!(summary[name], want, "{name}");
    }
    let events = lines(dir.path(), "events.jsonl");
    let ended = events.iter().find(|event| event["kind"] == "finish");
    assert_eq!(ended.expect("it has ended")["status"], "finished");
    // The reader of runs, and the report.
    Read::read(&dir.path().join("run")).expect("a run");
    let report = std::fs::read_to_string(dir.path().join("run/report.html")).expect("a report");
    for text in ["a stone", "pebbles", "momentum"] {
        assert!(report.contains(text), "{text}");
    }
    let spent = ["train_s", "test_s", "total_s"].map(|name| summary[name].as_f64());
    let [train, test, total] = spent.map(|seconds| seconds.expect("a time"));
    assert!(train >= 0.0 && test >= 0.0 && train + test <= total);
    // A second one does not overwrite it unasked, and then leaves the program's own files.
    std::fs::write(dir.path().join("run/model.bin"), "weights").expect("a file");
    for again in ranks_in(dir.path(), 1, &args, program) {
        assert_eq!(again.expect_err("refused").kind(), ErrorKind::Usage);
    }
    let over = [&args[..], &["--overwrite"]].concat();
    for again in ranks_in(dir.path(), 2, &over, program) {
        again.expect("it was asked for");
    }
    assert!(dir.path().join("run/model.bin").exists());
    assert_eq!(lines(dir.path(), "metrics.jsonl").len(), metrics.len());
}

#[test]
fn one_that_ends_with_an_error_has_failed_and_is_replaced() {
    let dir = tempfile::tempdir().expect("folder");
    let broken = |job: &Job<'_>| -> Result<()> {
        let mut run = job.run(About::default())?;
        run.step(1.0, 0.1)?;
        Err(phalanx_train::Error::usage("it broke"))
    };
    let ended = ranks_in(dir.path(), 1, &[], broken);
    assert_eq!(ended.len(), 1);
    let events = lines(dir.path(), "events.jsonl");
    let end = events.iter().find(|event| event["kind"] == "finish");
    assert_eq!(end.expect("it has ended")["status"], "failed");
    assert!(!dir.path().join("run/summary.json").exists());
    for again in ranks_in(dir.path(), 1, &["--epochs", "5"], program) {
        again.expect("nothing is lost");
    }
}

fn lines_of_summary(dir: &std::path::Path) -> Value {
    let text = std::fs::read_to_string(dir.join("run/summary.json")).expect("a summary");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn what_it_cannot_do_is_refused() {
    let dir = tempfile::tempdir().expect("folder");
    for args in [&["--save-every", "2"][..], &["--stop-after", "1"]] {
        for refused in ranks_in(dir.path(), 1, args, program) {
            let error = refused.expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        }
    }
    // Two runs, or a run and a training, would write into one folder.
    let twice = ranks_in(dir.path(), 1, &[], |job| {
        program(job)?;
        program(job)
    });
    let error = twice.into_iter().next().expect("one").expect_err("refused");
    assert!(
        error.to_string().contains("an earlier trainer or run"),
        "{error}"
    );
}
