//! `phalanx compare`: the same training with one worker and with several.

use super::*;

const TRAINING: [&str; 13] = [
    "mnist",
    "--data",
    "synthetic:240",
    "--epochs",
    "1",
    "--global-batch-size",
    "24",
    "--test-batch-size",
    "20",
    "--threads",
    "1",
    "--log-interval",
    "5",
];

fn compare<'a>(options: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [&["compare"], options, &TRAINING[..], more].concat()
}

#[test]
fn runs_are_real_and_become_the_documents_table() {
    let dir = tempfile::tempdir().expect("folder");
    let args = compare(
        &["--workers", "1,3", "--output-dir", "both"],
        &["--deterministic", "shards", "--shards", "4"],
    );
    let (out, err) = succeed(&args, dir.path());
    let at = out
        .find("Training result comparison: mnist")
        .expect("the title");
    let rows: Vec<Vec<&str>> = (out[at..].lines().skip(2))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0], ["Resource", "Type", "1", "worker", "3", "workers"]);
    let names: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(
        names,
        ["Resource", "Duration", "Accuracy", "Images/s", "Speed-up"]
    );
    assert_eq!(rows[1][2], "seconds");
    assert!(err.contains("run 1 of 2: 1 worker\n"), "{err}");
    assert!(err.contains("run 2 of 2: 3 workers\n"), "{err}");
    // Each run's progress is shown.
    assert_eq!(err.matches("epoch 1/1 took").count(), 2, "{err}");

    let both = json(&dir.path().join("both/comparison.json"));
    assert_eq!(both["recipe"], "mnist");
    assert_eq!(both["arguments"][1], "synthetic:240");
    for (i, workers) in [1, 3].into_iter().enumerate() {
        let run = &both["runs"][i];
        let folder = format!("both/workers-{workers}");
        let summary = json(&dir.path().join(&folder).join("summary.json"));
        assert_eq!(summary["world_size"], workers);
        assert_eq!(run["workers"], workers);
        assert_eq!(run["output_dir"], folder);
        assert_eq!(run["accuracy"], summary["accuracy"]);
        assert_eq!(run["duration_s"], summary["total_s"]);
        let shown = summary["accuracy"].as_f64().expect("accuracy") * 100.0;
        assert_eq!(rows[2][1 + 2 * i], format!("{shown:.2}"));
    }
    // It was the same training: by shards, to the last bit.
    let hash = |workers: usize| {
        let folder = dir.path().join(format!("both/workers-{workers}"));
        json(&folder.join("summary.json"))["weights_sha256"].clone()
    };
    assert_eq!(hash(1), hash(3));
}

#[test]
fn what_cannot_be_compared_is_refused_before_anything_runs() {
    let dir = tempfile::tempdir().expect("folder");
    let workers = ["--workers", "1,2"];
    for (args, reason) in [
        (compare(&["--workers", "2"], &[]), "at least two numbers"),
        (compare(&["--workers", "2,2"], &[]), "names 2 twice"),
        (
            compare(&["--workers", "0,2"], &[]),
            "--workers must be at least 1",
        ),
        (
            compare(&workers, &["--nproc-per-node", "2"]),
            "--nproc-per-node",
        ),
        (
            compare(&workers, &["--transport", "thread"]),
            "--transport thread",
        ),
        (
            compare(&workers, &["--output-dir", "x"]),
            "before the recipe",
        ),
        (compare(&workers, &["--resume", "x"]), "leave out --resume"),
        (
            compare(&["--workers", "1,25"], &[]),
            "leaves some of the 25 ranks",
        ),
        (
            compare(&workers, &["--epoch", "2"]),
            "did you mean \"--epochs\"?",
        ),
        (vec!["compare", "minst"], "did you mean \"mnist\"?"),
        (vec!["compare"], "missing"),
    ] {
        let (code, out, err) = run(&args, dir.path());
        assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
        assert!(err.contains(reason), "{args:?}: {err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("folder").count(), 0);
}

#[test]
fn a_training_without_accuracy_is_not_compared() {
    let dir = tempfile::tempdir().expect("folder");
    let (code, _, err) = run(&["compare", "linear", "--iterations", "1"], dir.path());
    assert_eq!(code, 2, "{err}");
    let told = "the training measures no accuracy to compare; choose another recipe";
    assert!(err.contains(told), "{err}");
}

#[test]
fn a_run_that_fails_is_named_and_the_finished_ones_are_kept() {
    let dir = tempfile::tempdir().expect("folder");
    // In the place of the second run's folder is a file.
    std::fs::create_dir(dir.path().join("both")).expect("made");
    std::fs::write(dir.path().join("both/workers-2"), "mine").expect("written");
    let args = compare(&["--workers", "1,2", "--output-dir", "both"], &[]);
    let (code, out, err) = run(&args, dir.path());
    assert!(code > 0, "{out}\n{err}");
    assert!(
        err.contains("run 2 of 2 of the comparison, with 2 workers"),
        "{err}"
    );
    assert!(err.contains("finished runs in both"), "{err}");
    assert!(dir.path().join("both/workers-1/summary.json").is_file());
    assert!(!dir.path().join("both/comparison.json").exists());
    assert!(!out.contains("comparison:"), "{out}");
}
