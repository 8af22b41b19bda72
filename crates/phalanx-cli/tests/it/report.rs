//! `report.html` at the end of a run, and `phalanx report`.

use std::path::Path;

use crate::support::{run, succeed};
use serde_json::{Value, json};

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The runs inside the page.
fn runs(page: &Path) -> Vec<Value> {
    let page = read(page);
    let (_, after) = page.split_once("application/json\">").expect("the data");
    let (json, _) = after.split_once("</script>").expect("its end");
    serde_json::from_str(json).expect("JSON")
}

/// Steps and values of each named number of the log.
fn logged(metrics: &str, name: &str) -> (Vec<Value>, Vec<Value>) {
    let records = metrics
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"));
    let having = records.filter(|record: &Value| record[name].is_number());
    having
        .map(|record| (record["step"].clone(), record[name].clone()))
        .unzip()
}

#[track_caller]
fn equal(ours: &Value, logged: &[Value]) {
    let ours: Vec<f64> = ours
        .as_array()
        .expect("numbers")
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    let logged: Vec<f64> = logged.iter().filter_map(Value::as_f64).collect();
    assert_eq!(ours, logged);
}

#[test]
fn a_run_ends_with_a_page_of_its_numbers_and_runs_are_compared() {
    let dir = tempfile::tempdir().expect("folder");
    let at = |name: &str| dir.path().join(name);
    let train =
        "train mnist --data synthetic:640 --epochs 2 --threads 1 --log-interval 3 --output-dir";
    let train = |more: &str| succeed(&words(&format!("{train} {more}")), dir.path());
    train("a --nproc-per-node 2");
    let of_run = runs(&at("a/report.html"));
    assert_eq!(of_run.len(), 1);
    let a = &of_run[0];
    assert_eq!(a["name"], "a");
    let metrics = read(&at("a/metrics.jsonl"));
    for name in [
        "loss",
        "lr",
        "exposed_comm_ms",
        "train_loss",
        "test_loss",
        "accuracy",
        "elapsed_s",
    ] {
        let (steps, values) = logged(&metrics, name);
        assert!(values.len() >= 2, "{name}");
        equal(&a["curves"][name]["x"], &steps);
        equal(&a["curves"][name]["y"], &values);
    }
    let summary: Value = serde_json::from_str(&read(&at("a/summary.json"))).expect("JSON");
    assert_eq!(a["summary"], summary);
    let predictions = read(&at("a/predictions.jsonl"));
    let rows: Vec<Value> = predictions
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    assert_eq!(a["predictions"], Value::from(rows.clone()));
    // 32 images of 28 x 28 pixels a row, the same in both epochs.
    let of_epoch = |epoch: u64| rows.iter().filter(move |row| row["epoch"] == epoch);
    let images: Vec<_> = of_epoch(1).map(|row| &row["image"]).collect();
    assert!(
        of_epoch(2)
            .map(|row| &row["image"])
            .eq(images.iter().copied())
    );
    assert_eq!(rows.len(), 2 * images.len());
    let pictures = &a["pictures"];
    assert_eq!(pictures["width"], 32 * 28);
    assert_eq!(pictures["height"], images.len().div_ceil(32) * 28);
    let source = pictures["src"].as_str().expect("an address");
    assert!(
        source.starts_with("data:image/png;base64,iVBORw0KGgo"),
        "{source:.60}"
    );

    // The command writes the same page.
    let written = read(&at("a/report.html"));
    std::fs::remove_file(at("a/report.html")).expect("removed");
    let (out, _) = succeed(&["report", "a"], dir.path());
    assert_eq!(out, "a/report.html\n");
    assert_eq!(read(&at("a/report.html")), written);

    train("b --lr 0.01 --log-batches 0");
    let b = &runs(&at("b/report.html"))[0];
    assert_eq!(
        (b["predictions"].as_array().map(Vec::len), &b["pictures"]),
        (Some(0), &Value::Null)
    );
    let (out, _) = succeed(&["report", "a", "b"], dir.path());
    assert_eq!(out, "report.html\n");
    let both = runs(&at("report.html"));
    assert_eq!((&both[0], &both[1], both.len()), (a, b, 2));
    assert_eq!(both[1]["curves"]["lr"]["y"][0], 0.01);
    let (out, _) = succeed(&["report", "b", "--output", "c.html"], dir.path());
    assert_eq!(out, "c.html\n");
    assert_eq!(&runs(&at("c.html"))[0], b);

    // Another run in the folder takes the page and the pictures away with the rest.
    train("a --overwrite --log-batches 0");
    assert!(!at("a/predictions.png").exists());
    assert_eq!(runs(&at("a/report.html"))[0]["pictures"], Value::Null);
}

#[test]
fn tags_and_notes_are_kept_changed_and_shown() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let labels = |name: &str| {
        let about: Value = serde_json::from_str(&read(&dir.join(name))).expect("JSON");
        (about["tags"].clone(), about["note"].clone())
    };
    let shown = |page: &str| {
        let of = |run: &Value| (run["about"]["tags"].clone(), run["about"]["note"].clone());
        runs(&dir.join(page)).iter().map(of).collect::<Vec<_>>()
    };
    let train =
        "train mnist --data synthetic:256 --batch-size 64 --threads 1 --log-batches 0 --output-dir";
    let train = |more: &[&str]| succeed(&[&words(train), more].concat(), dir);
    let first = [
        "a",
        "--epochs=1",
        "--save-every=2",
        "--tag",
        "base",
        "--tag=kind=x = y",
        "--note",
        "two\nlines",
    ];
    train(&first);
    let is = (json!({"base": null, "kind": "x = y"}), json!("two\nlines"));
    assert_eq!(labels("a/run.json"), is);
    assert_eq!(shown("a/report.html"), [is]);
    // A resumed run keeps them and gets more.
    train(&[
        "a",
        "--epochs=2",
        "--resume=auto",
        "--tag",
        "kind=z",
        "--tag",
        "late",
    ]);
    let is = (
        json!({"base": null, "kind": "z", "late": null}),
        json!("two\nlines"),
    );
    assert_eq!(labels("a/run.json"), is);
    // Afterwards, of several runs; nothing else changes.
    train(&["b", "--epochs=1"]);
    assert_eq!(labels("b/run.json"), (json!({}), Value::Null));
    let before: Value = serde_json::from_str(&read(&dir.join("a/run.json"))).expect("JSON");
    succeed(&words("report a b --tag late=no --note new"), dir);
    let a = (
        json!({"base": null, "kind": "z", "late": "no"}),
        json!("new"),
    );
    let b = (json!({"late": "no"}), json!("new"));
    assert_eq!(shown("report.html"), [a.clone(), b.clone()]);
    assert_eq!(shown("a/report.html"), [a]);
    assert_eq!(shown("b/report.html"), [b]);
    let mut after: Value = serde_json::from_str(&read(&dir.join("a/run.json"))).expect("JSON");
    for name in ["tags", "note"] {
        after[name] = before[name].clone();
    }
    assert_eq!(after, before);
    succeed(&["report", "b", "--note", ""], dir);
    assert_eq!(shown("b/report.html")[0].1, "");

    std::fs::create_dir_all(dir.join("empty")).expect("folder");
    let long = format!("--tag={}", "a".repeat(251));
    for (args, why) in [
        (&["train", "mnist", "--tag", ""][..], "--tag"),
        (&["train", "mnist", "--tag", "=x"], "--tag"),
        (&["train", "mnist", "--tag", "a\nb"], "control characters"),
        (&["train", "mnist", &long], "at most 250 characters"),
        (&["train", "mnist", "--note", "a\u{7}"], "--note"),
        (&["report", "a", "--tag", "=x"], "--tag"),
        (&["report", "empty", "--tag", "x"], "empty has no run.json"),
        (&["report", "gone", "--tag", "x"], "no folder gone"),
    ] {
        let (code, _, err) = run(args, dir);
        assert!(code == 2 && err.contains(why), "{args:?}: {code} {err}");
        assert!(!dir.join("runs").exists());
    }
}

#[test]
fn a_page_that_cannot_be_written_is_a_warning() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(dir.path().join("run/report.html/x")).expect("folder");
    let (_, err) = succeed(
        &words("train linear --iterations 20 --output-dir run"),
        dir.path(),
    );
    assert!(
        err.contains("warning: no report.html: cannot write run/report.html"),
        "{err}"
    );
    assert!(dir.path().join("run/summary.json").exists());
    // Without an evaluation.
    let (out, _) = succeed(&words("report run --output page.html"), dir.path());
    assert_eq!(out, "page.html\n");
    let runs = runs(&dir.path().join("page.html"));
    assert_eq!(runs[0]["summary"]["accuracy"], Value::Null);
    assert_eq!(runs[0]["summary"]["epochs"], 1);
}

#[test]
fn pictures_that_cannot_be_written_are_a_warning() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(dir.path().join("run/predictions.png/x")).expect("folder");
    let train = "train mnist --data synthetic:128 --epochs 1 --threads 1 --output-dir run";
    let (_, err) = succeed(&words(train), dir.path());
    let why = "warning: no predictions.png: cannot write run/predictions.png";
    assert!(err.contains(why), "{err}");
    let run = &runs(&dir.path().join("run/report.html"))[0];
    assert_eq!(run["predictions"].as_array().map(Vec::len), Some(21));
    assert_eq!(run["pictures"], Value::Null);
}

#[test]
fn a_folder_without_a_run_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(dir.path().join("empty")).expect("folder");
    for (line, why) in [
        (
            "report empty",
            "empty has neither run.json nor metrics.jsonl nor summary.json",
        ),
        ("report gone", "no folder gone"),
        ("report", "RUN"),
        (
            "report empty --output gone/x.html",
            "there is no folder gone",
        ),
    ] {
        let (code, out, err) = run(&words(line), dir.path());
        assert_eq!((code, &*out), (2, ""), "{line}: {err}");
        assert!(err.contains(why), "{line}: {err}");
    }
}
