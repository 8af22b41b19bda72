//! `train gpt` on generated text.

use super::*;

pub const TINY: [&str; 22] = [
    "train",
    "gpt",
    "--data",
    "synthetic:6000",
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "16",
    "--context",
    "16",
    "--dropout",
    "0.1",
    "--epochs",
    "2",
    "--global-batch-size",
    "32",
    "--threads",
    "1",
    "--sample",
    "40",
];
pub const SHARDS: [&str; 6] = [
    "--deterministic",
    "shards",
    "--shards",
    "4",
    "--output-dir",
    "out",
];

pub fn digests(dir: &Path) -> [String; 3] {
    let summary = json(&dir.join("out/summary.json"));
    ["weights_sha256", "optimizer_sha256", "metrics_sha256"]
        .map(|key| summary[key].as_str().expect("a digest").to_owned())
}

#[test]
fn prints_losses_and_a_sample_that_do_not_depend_on_the_ranks() {
    let runs = ["1", "2", "4"].map(|world| {
        let dir = tempfile::tempdir().expect("folder");
        let ranks = ["--nproc-per-node", world];
        let (out, _) = succeed(&[&TINY[..], &SHARDS, &ranks].concat(), dir.path());
        (out, digests(dir.path()))
    });
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
    let (losses, sample) = runs[0].0.split_once("sample:\n").expect("a sample");
    let lines = "epoch #: train loss #.####\n\
                 epoch #: test loss #.####, accuracy #.####, bits_per_character #.####\n";
    assert_eq!(shape(losses), lines.repeat(2));
    assert_eq!(sample.chars().count(), 41);
}

#[test]
fn a_resumed_training_ends_with_the_same_weights() {
    let (whole, parts) = (tempfile::tempdir(), tempfile::tempdir());
    let (whole, parts) = (whole.expect("folder"), parts.expect("folder"));
    let (out, _) = succeed(&[&TINY[..], &SHARDS].concat(), whole.path());
    let stop = [&TINY[..], &SHARDS, &["--stop-after", "12"]].concat();
    succeed(&stop, parts.path());
    let more = ["--resume", "auto", "--nproc-per-node", "2"];
    let (resumed, _) = succeed(&[&TINY[..], &SHARDS, &more].concat(), parts.path());
    assert_eq!(digests(whole.path()), digests(parts.path()));
    let sample = |out: &str| out.split_once("sample:\n").expect("a sample").1.to_owned();
    assert_eq!(sample(&out), sample(&resumed));
}

#[test]
fn compare_has_an_accuracy() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [&["compare", "--output-dir", "both"], &TINY[1..]].concat();
    let (out, _) = succeed(&args, dir.path());
    assert!(out.contains("Training result comparison: gpt"), "{out}");
    assert!(out.contains("\nSequences/s "), "{out}");
    let both = json(&dir.path().join("both/comparison.json"));
    assert!(both["runs"][1]["accuracy"].as_f64().expect("a number") > 0.0);
}

#[test]
fn wrong_flags_and_files_are_one_error() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::write(dir.path().join("short.txt"), "short").expect("written");
    for (more, words) in [
        (
            &["--heads", "3"][..],
            "--width 128 is not divisible by --heads 3",
        ),
        (&["--dropout", "1"], "--dropout must lie in 0..1"),
        (&["--context", "0"], "--context must be at least 1"),
        (&["--data", "none.txt"], "no text file none.txt"),
        (&["--data", "short.txt"], "short.txt has 5 characters"),
        (
            &["--data", "synthetic:0"],
            "--data synthetic:0: the number must be from 1 to",
        ),
    ] {
        let args = [&["train", "gpt", "--nproc-per-node", "2"], more].concat();
        let (code, _, text) = run(&args, dir.path());
        assert_ne!(code, 0, "{text}");
        assert_eq!(text.matches("error:").count(), 1, "{text}");
        assert!(text.contains(words), "{text}");
    }
}
