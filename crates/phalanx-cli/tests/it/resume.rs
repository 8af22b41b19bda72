//! Stopping a training and going on with it, as a person does it: whole
//! processes, real files.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{LIMIT, ended, free_port, phalanx, signal};
use phalanx_checkpoint as checkpoint;
use phalanx_nn::models::MnistCnn;
use phalanx_nn::{Params, Scope, Seed};
use serde_json::Value;

/// Samples of the drawn training set, and of a step.
const SAMPLES: usize = 640;
const BATCH: usize = 64;
const EPOCHS: usize = 2;

/// `train mnist` in `dir` with output folder `run`.
fn train(dir: &Path, run: &str, more: &[&str]) -> Command {
    let args = ["train", "mnist", "--output-dir", run, "--log-interval", "1"];
    let mut command = phalanx(&args, dir);
    command
        .args(["--data", &format!("synthetic:{SAMPLES}")])
        .args(["--global-batch-size", &BATCH.to_string()])
        .args(["--threads", "1", "--test-batch-size", "50"])
        .args(more);
    command
}

/// Exit code, and standard output with standard error after it.
fn finish(child: Child) -> (i32, String) {
    let (code, out, err) = ended(child);
    (code, out + &err)
}

fn run(mut command: Command) -> (i32, String) {
    finish(command.spawn().expect("phalanx starts"))
}

fn succeed(command: Command) -> String {
    let (code, text) = run(command);
    assert_eq!(code, 0, "{text}");
    text
}

/// The three hashes that a run ends with.
fn hashes(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    ["weights_sha256", "optimizer_sha256", "metrics_sha256"]
        .map(|name| summary[name].as_str().expect("a hash").to_owned())
        .into()
}

fn records(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// How often each sample was trained on, by epoch, in all sample logs.
fn seen(dir: &Path) -> BTreeMap<u64, Vec<u64>> {
    let mut seen: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).expect("folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("seen.") {
            continue;
        }
        for record in records(&entry.path()) {
            let samples = record["samples"].as_array().expect("samples");
            let epoch = seen.entry(record["epoch"].as_u64().expect("epoch"));
            epoch
                .or_default()
                .extend(samples.iter().filter_map(Value::as_u64));
        }
    }
    seen.values_mut()
        .for_each(|samples| samples.sort_unstable());
    seen
}

/// Stops after `first` and again after `second` steps, at another number of
/// ranks each time; compares with a run that was left alone.
fn stopped_twice(more: &[&str], first: &str, second: &str, same_bits: bool) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let go = |run: &str, extra: &[&str]| {
        let args = [more, &["--epochs", "2"], extra].concat();
        succeed(train(dir, run, &args))
    };
    let logged = |extra: &[&str]| go("stopped", &[&["--log-samples", "seen"], extra].concat());
    let text = logged(&["--nproc-per-node", "2", "--stop-after", first]);
    assert!(text.contains("continue with --resume auto"), "{text}");
    assert!(!dir.join("stopped/summary.json").exists());
    let text = logged(&[
        "--nproc-per-node",
        "3",
        "--resume",
        "auto",
        "--stop-after",
        second,
    ]);
    assert!(text.contains("resumed  after"), "{text}");
    logged(&["--resume", "stopped"]);

    let seen = seen(dir);
    let all: Vec<u64> = (0..SAMPLES as u64).collect();
    assert_eq!(seen.len(), EPOCHS);
    for (epoch, samples) in &seen {
        assert_eq!(*samples, all, "epoch {epoch}");
    }
    // One record a step and one an epoch, none twice.
    let metrics = records(&dir.join("stopped/metrics.jsonl"));
    assert_eq!(metrics.len(), EPOCHS * (SAMPLES / BATCH + 1));
    let accuracies = std::fs::read_to_string(dir.join("stopped/mnist_cnn_accuracies.json"));
    let accuracies: Vec<f64> = serde_json::from_str(&accuracies.expect("file")).expect("JSON");
    assert_eq!(accuracies.len(), EPOCHS);
    if same_bits {
        go("alone", &[]);
        assert_eq!(hashes(&dir.join("alone")), hashes(&dir.join("stopped")));
        let other = records(&dir.join("alone/metrics.jsonl"));
        for (a, b) in metrics.iter().zip(&other) {
            for name in [
                "epoch",
                "step",
                "loss",
                "lr",
                "train_loss",
                "test_loss",
                "accuracy",
            ] {
                assert_eq!(a[name], b[name], "{name}");
            }
        }
    }
}

/// Where to stop, and how many steps later again: as given, or, where
/// `PHALANX_STOPS` says how often, at as many random steps (1 to 18 of 20).
fn stops(first: u64, second: u64) -> Vec<(String, String)> {
    let rounds = std::env::var("PHALANX_STOPS").map_or(0, |n| n.parse().expect("a number"));
    if rounds == 0 {
        return vec![(first.to_string(), second.to_string())];
    }
    let started = std::time::SystemTime::UNIX_EPOCH.elapsed();
    let mut random = started.expect("a clock").as_nanos() as u64 | 1;
    let mut below = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    let pairs = (0..rounds).map(|_| {
        let first = 1 + below(18);
        let pair = (first, 1 + below(19 - first));
        println!("stopping after {} steps, and {} later", pair.0, pair.1);
        (pair.0.to_string(), pair.1.to_string())
    });
    pairs.collect()
}

#[test]
fn no_sample_is_lost_or_repeated_on_2_then_3_then_1_ranks() {
    // In the middle of the first epoch, then of the second.
    for (first, second) in stops(7, 6) {
        stopped_twice(&[], &first, &second, false);
    }
}

#[test]
fn under_deterministic_shards_not_a_bit_is_lost_either() {
    let shards = ["--deterministic", "shards", "--shards", "4"];
    for (first, second) in stops(3, 9) {
        stopped_twice(&shards, &first, &second, true);
    }
}

#[test]
fn a_stop_at_the_end_of_an_epoch_is_no_different() {
    let shards = [
        "--deterministic",
        "shards",
        "--shards",
        "4",
        "--transport",
        "thread",
    ];
    stopped_twice(&shards, "10", "1", true);
}

/// Starts a long training on two ranks and waits until it has taken a step.
fn running(dir: &Path) -> Child {
    let args = [
        "--epochs",
        "1000",
        "--nproc-per-node",
        "2",
        "--log-samples",
        "seen",
        "--save-every",
        "1000000",
    ];
    started(train(dir, "out", &args), dir)
}

/// Starts it and waits until it has measured something.
fn started(mut command: Command, dir: &Path) -> Child {
    let child = command.spawn().expect("phalanx starts");
    let began = Instant::now();
    // Not parsed: a line that is just being written may be seen in part.
    let measured = || std::fs::read_to_string(dir.join("out/metrics.jsonl"));
    while !measured().is_ok_and(|text| text.contains('\n')) {
        assert!(began.elapsed() < LIMIT, "no step was taken");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// After a signal: all ranks stopped after the same step, which was saved.
fn stopped_together(dir: &Path, text: &str) {
    assert!(text.contains("stopped as asked by SIG"), "{text}");
    let steps: Vec<usize> = (0..2)
        .map(|rank| records(&dir.join(format!("seen.{rank}.jsonl"))).len())
        .collect();
    assert_eq!(steps[0], steps[1]);
    let manifest = dir.join(format!("out/checkpoints/step-{:09}.json", steps[0]));
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(manifest).expect("saved")).expect("JSON");
    assert_eq!(manifest["place"]["step"], steps[0]);
    let more = ["--epochs", "1000", "--resume", "auto", "--stop-after", "1"];
    let text = succeed(train(dir, "out", &more));
    assert!(
        text.contains(&format!("stopped as asked after {} steps", steps[0] + 1)),
        "{text}"
    );
}

#[test]
fn sigusr1_saves_at_the_same_step_on_all_ranks_and_ends_well() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let child = running(dir.path());
    signal(child.id(), "USR1");
    let (code, text) = finish(child);
    assert_eq!(code, 0, "{text}");
    stopped_together(dir.path(), &text);
}

#[test]
fn sigterm_does_the_same_before_it_interrupts() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let child = running(dir.path());
    signal(child.id(), "TERM");
    let (code, text) = finish(child);
    assert_eq!(code, 130, "{text}");
    stopped_together(dir.path(), &text);
}

#[test]
fn a_training_that_is_another_is_not_gone_on_with() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    // Nothing there yet: auto starts from the beginning.
    let text = succeed(train(
        dir,
        "out",
        &["--resume", "auto", "--stop-after", "2"],
    ));
    assert!(!text.contains("resumed"), "{text}");
    let refused = |more: &[&str], reason: &str| {
        let (code, text) = run(train(dir, "out", &[more, &["--stop-after", "1"]].concat()));
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(reason), "{text}");
    };
    refused(
        &["--resume", "auto", "--seed", "2"],
        "continues a training whose --seed is 1; this run has 2",
    );
    refused(
        &["--resume", "auto", "--sampler", "torch"],
        "whose --sampler is exact; this run has torch",
    );
    refused(
        &["--resume", "elsewhere"],
        "there is no checkpoint in elsewhere",
    );
    let mut other = train(dir, "out", &[]);
    other.args(["--global-batch-size", "32", "--resume", "auto"]);
    let (code, text) = run(other);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("--global-batch-size 64"), "{text}");
    refused(&["--save-every", "0"], "--save-every must be at least 1");
    refused(&["--keep", "0"], "--keep must be at least 1");
    // A mistake is no crash, on several ranks neither.
    let two = ["--nproc-per-node", "2", "--resume", "auto"];
    for (more, fact) in [
        (["--seed", "2"], "--seed is 1; this run has 2"),
        (
            ["--gradient-type", "bf16"],
            "--gradient-type is f32; this run has bf16",
        ),
    ] {
        let more = [&two[..], &more].concat();
        let (code, text) = run(train(dir, "out", &more));
        assert_eq!(code, 2, "{text}");
        let error = format!("error: --resume auto continues a training whose {fact}");
        assert_eq!(text.matches(&error).count(), 1, "{text}");
        for noise in ["inspect", "while", "exited", "stopped within"] {
            assert!(!text.contains(noise), "{noise}: {text}");
        }
        assert!(!dir.join("out/flight").exists(), "{text}");
    }
    // All that was there still is, and a manifest may be named itself.
    let manifest = "out/checkpoints/step-000000002.json";
    let text = succeed(train(
        dir,
        "out",
        &["--resume", manifest, "--stop-after", "1"],
    ));
    assert!(text.contains("resumed  after 2 of 30 steps"), "{text}");
}

/// As checkpoints were before 2026-11-22.
fn without_fact(manifest: &Path, fact: &str) {
    use sha2::Digest;
    let text = std::fs::read_to_string(manifest).expect("a manifest");
    let line = text.lines().find(|line| line.contains(fact));
    let text = text.replace(&format!("{}\n", line.expect("the fact")), "");
    let signed = text.rsplit('"').nth(1).expect("a hash");
    let (before, after) = text.rsplit_once(signed).expect("a hash");
    let with = |hash: &str| [before, hash, after].concat();
    let hash = hex::encode(sha2::Sha256::digest(with(&"0".repeat(64))));
    std::fs::write(manifest, with(&hash)).expect("written");
}

#[test]
fn an_older_checkpoint_that_does_not_say_how_gradients_travelled_is_gone_on_with() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let go =
        |run: &str, more: &[&str]| succeed(train(dir, run, &[&["--epochs", "1"], more].concat()));
    go("alone", &[]);
    go("out", &["--stop-after", "4"]);
    without_fact(
        &dir.join("out/checkpoints/step-000000004.json"),
        "\"--gradient-type\"",
    );
    for (more, said) in [
        (
            &["--gradient-type", "bf16"][..],
            "continues a training whose --gradient-type is f32; this run has bf16",
        ),
        (
            &["--deterministic", "shards"],
            "continues a training without --shards; this run has 8",
        ),
    ] {
        let more = [&["--epochs", "1", "--resume", "auto"], more].concat();
        let (code, text) = run(train(dir, "out", &more));
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(said), "{text}");
    }
    let text = go("out", &["--resume", "auto"]);
    assert!(text.contains("resumed  after 4 of 10 steps"), "{text}");
    assert_eq!(hashes(&dir.join("alone")), hashes(&dir.join("out")));
    // Only the steps of this run.
    assert!(text.contains("  6 of 10 steps  "), "{text}");
}

/// `train linear` on so many ranks in `dir`, with output folder `run`.
fn linear(dir: &Path, run: &str, ranks: &str, more: &[&str]) -> Command {
    let args = ["train", "linear", "--output-dir", run, "--nproc-per-node"];
    phalanx(&[&args[..], &[ranks], more].concat(), dir)
}

#[test]
fn the_linear_program_goes_on_too_and_prints_what_is_left() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    // What rank 0 prints: the document's own numbers.
    let said = |text: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|l| l.strip_prefix("[rank 0] "));
        // Not its remarks on standard error.
        let result =
            |l: &&str| l.contains(" loss:") || l.contains("[2.0000]") || l.contains("[3.0000]");
        lines.filter(result).map(str::to_owned).collect()
    };
    let alone = said(&succeed(linear(dir, "alone", "2", &[])));
    assert_eq!(alone[0], "50/500 loss:0.00025336415274068713");
    let first = succeed(linear(dir, "out", "2", &["--stop-after", "100"]));
    assert!(
        first.contains("stopped as asked after 100 steps"),
        "{first}"
    );
    let more = ["--resume", "auto", "--stop-after", "37"];
    succeed(linear(dir, "out", "2", &more));
    assert!(!dir.join("out/summary.json").exists());
    // Damage to the newest is passed over.
    let newest = dir.join("out/checkpoints/step-000000137.safetensors");
    let whole = std::fs::read(&newest).expect("saved");
    std::fs::write(&newest, &whole[..whole.len() - 1]).expect("cut");
    let (code, text) = run(linear(dir, "out", "3", &["--resume", "auto"]));
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("samples of 2 ranks; this run has"), "{text}");
    let rest = succeed(linear(dir, "out", "2", &["--resume", "auto"]));
    assert!(rest.contains("passed over a damaged checkpoint"), "{rest}");
    assert!(rest.contains("resumed  after 100 of 500 steps"), "{rest}");
    assert_eq!([&said(&first)[..2], &said(&rest)].concat(), alone);
    let end = |run: &str| {
        let text = std::fs::read_to_string(dir.join(run).join("summary.json"));
        let summary: Value = serde_json::from_str(&text.expect("summary")).expect("JSON");
        (
            summary["weights_sha256"].clone(),
            summary["optimizer_sha256"].clone(),
        )
    };
    assert_eq!(end("alone"), end("out"));
    let steps = |run: &str| -> Vec<Value> {
        let metrics = records(&dir.join(run).join("metrics.jsonl"));
        metrics.into_iter().map(|r| r["step"].clone()).collect()
    };
    assert_eq!(steps("alone"), steps("out"));
    // As many steps again; and nothing is left to do but to show it.
    let more = ["--resume", "auto", "--epochs", "2"];
    let text = succeed(linear(dir, "out", "2", &more));
    assert!(text.contains("[rank 1] 500/500 loss:"), "{text}");
    let text = succeed(linear(dir, "out", "2", &more));
    assert!(text.contains("--epochs 3 continues it"), "{text}");
    let weight = [
        "w:tensor([[2.0000],",
        "        [3.0000]], device='cpu:0', dtype=oneflow.float32,",
    ];
    assert_eq!(said(&text), weight);
}

/// The steps of the checkpoints in `dir/run`, without those set aside.
fn steps_saved(dir: &Path, run: &str) -> Vec<u64> {
    let there = std::fs::read_dir(dir.join(run).join("checkpoints")).expect("folder");
    let mut steps: Vec<u64> = there
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let step = name.strip_prefix("step-")?.strip_suffix(".json")?;
            step.parse().ok()
        })
        .collect();
    steps.sort_unstable();
    steps
}

#[test]
fn whoever_goes_back_leaves_the_other_branch_and_its_summary_behind() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let more = ["--iterations", "40", "--save-every", "20", "--keep", "2"];
    // The disk may be too slow for the 20th: so it is a stop's, which waits.
    let half = [&more[..], &["--stop-after", "20"]].concat();
    succeed(linear(dir, "out", "1", &half));
    succeed(linear(
        dir,
        "out",
        "1",
        &[&more[..], &["--resume", "auto"]].concat(),
    ));
    assert_eq!(steps_saved(dir, "out"), [20, 40]);
    assert!(dir.join("out/summary.json").exists());
    // Without --output-dir it goes on in the folder of the checkpoint.
    let back = |from: &str| {
        let args = ["train", "linear", "--resume", from, "--stop-after", "3"];
        succeed(phalanx(&[&args[..], &more[..4]].concat(), dir))
    };
    let text = back("out/checkpoints/step-000000020.json");
    assert!(
        text.contains("renamed 1 checkpoint, newer than the checkpoint resumed"),
        "{text}"
    );
    assert_eq!(steps_saved(dir, "out"), [20, 23]);
    assert!(!dir.join("out/summary.json").exists());
    let text = succeed(linear(
        dir,
        "out",
        "1",
        &[&more[..], &["--resume", "auto"]].concat(),
    ));
    assert!(text.contains("resumed  after 23 of 40"), "{text}");
    assert!(dir.join("out/summary.json").exists());
    // Nothing left to do: it stays complete, and what was set aside can be gone on with.
    let finished = std::fs::read(dir.join("out/summary.json")).expect("summary");
    let text = back("out/checkpoints/aside-step-000000040.json");
    assert!(text.contains("resumed  after 40 of 40"), "{text}");
    assert!(!finished.is_empty() && dir.join("out/summary.json").exists());
    // Of a folder that it does not come from, nothing is this run's.
    let elsewhere = ["--resume", "out", "--stop-after", "1", "--epochs", "2"];
    let elsewhere = [&elsewhere[..], &more[..2]].concat();
    succeed(linear(
        dir,
        "other",
        "1",
        &["--stop-after", "60", "--iterations", "70"],
    ));
    let text = succeed(linear(dir, "other", "1", &elsewhere));
    assert!(
        text.contains("renamed 1 checkpoint, newer than the checkpoint resumed"),
        "{text}"
    );
    assert_eq!(steps_saved(dir, "other"), [41]);
}

#[test]
fn a_run_goes_on_in_its_own_folder_however_that_is_called() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    succeed(linear(dir, "out", "1", &["--stop-after", "1"]));
    let file = "step-000000001.json";
    let mut steps = 1;
    for (from, resume) in [
        ("out", "."),
        ("out/checkpoints", ".."),
        ("out/checkpoints", "."),
        ("out", "checkpoints"),
        ("out/checkpoints", file),
    ] {
        let args = ["train", "linear", "--resume", resume, "--stop-after", "1"];
        let from = dir.join(from);
        succeed(phalanx(&args, &from));
        steps = if resume == file { 2 } else { steps + 1 };
        assert_eq!(steps_saved(dir, "out").last(), Some(&steps), "{resume}");
        assert!(!from.join("runs").exists(), "{resume}");
        if resume == "checkpoints" {
            // Kept until the last round, which goes back to it.
            succeed(linear(
                dir,
                "out",
                "1",
                &["--stop-after", "1", "--overwrite"],
            ));
        }
    }
}

#[test]
fn resnet18_goes_on_in_another_folder_than_its_default() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let go = |more: &[&str]| {
        let args = ["train", "resnet18", "--epochs", "1"];
        let mut command = phalanx(&args, dir);
        command.args(["--data_url", "synthetic:8", "--batch-size", "2"]);
        succeed({
            command.args(["--stop-after", "1"]).args(more);
            command
        })
    };
    go(&["--output-dir", "deep"]);
    let text = go(&["--resume", "deep"]);
    assert!(text.contains("resumed  after 1 of 4 steps"), "{text}");
    assert_eq!(steps_saved(dir, "deep"), [1, 2]);
    assert!(!dir.join("output_dir").exists());
    // Its own folder needs no name.
    go(&[]);
    let text = go(&["--resume", "auto"]);
    assert!(text.contains("resumed  after 1 of 4 steps"), "{text}");
    assert_eq!(steps_saved(dir, "output_dir"), [1, 2]);
}

#[test]
fn the_linear_program_saves_before_sigterm_ends_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let endless = ["--epochs", "1000000000", "--save-every", "999999999"];
    let child = started(linear(dir, "out", "2", &endless), dir);
    signal(child.id(), "TERM");
    let (code, text) = finish(child);
    assert_eq!(code, 130, "{text}");
    let after = text
        .split("stopped as asked by SIGTERM or Ctrl-C after ")
        .nth(1);
    let after = after.unwrap_or_else(|| panic!("{text}")).split(' ').next();
    let steps: u64 = after.and_then(|n| n.parse().ok()).expect("a number");
    let manifest = format!("out/checkpoints/step-{steps:09}.json");
    let more = ["--resume", &manifest, "--stop-after", "1"];
    let more = [&endless[..], &more].concat();
    let text = succeed(linear(dir, "out", "2", &more));
    let next = format!("stopped as asked after {} steps", steps + 1);
    assert!(text.contains(&next), "{text}");
}

/// The number of steps after which the training says that it stopped.
fn stopped_after(text: &str) -> u64 {
    let steps = text.split_once("stopped as asked by SIG");
    let steps = steps.and_then(|(_, rest)| rest.split_once(" after "));
    let steps = steps.and_then(|(_, rest)| rest.split_once(" step"));
    let steps = steps.and_then(|(steps, _)| steps.replace(',', "").parse().ok());
    steps.unwrap_or_else(|| panic!("no number of steps: {text}"))
}

/// Whoever trains and then exports must not export what is half trained, and hears
/// once that it is saved.
#[test]
fn sigterm_ends_alike_on_any_number_of_ranks() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (ranks, transport) in [("1", "auto"), ("2", "thread"), ("2", "auto")] {
        let dir = dir.path().join(format!("{ranks}-{transport}"));
        std::fs::create_dir(&dir).expect("folder");
        let endless = ["--epochs", "1000000000", "--save-every", "999999999"];
        let mut command = linear(&dir, "out", ranks, &endless);
        command.args(["--transport", transport]);
        let child = started(command, &dir);
        signal(child.id(), "TERM");
        let (code, text) = finish(child);
        assert_eq!(code, 130, "{ranks} {transport}: {text}");
        let told = text.matches("stopped as asked by SIGTERM").count();
        assert_eq!(told, 1, "{ranks} {transport}: {text}");
        assert!(!text.contains("error"), "{ranks} {transport}: {text}");
        assert!(!text.contains("inspect"), "{ranks} {transport}: {text}");
        assert_eq!(steps_saved(&dir, "out").last(), Some(&stopped_after(&text)));
        assert!(!dir.join("out/summary.json").exists());
    }
}

/// A launcher passes them on as SIGTERM; one process must not end without saving either.
#[test]
fn other_interrupts_of_one_process_save_too() {
    for name in ["INT", "HUP", "QUIT"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = dir.path();
        crate::support::heed_signals();
        let endless = ["--epochs", "1000000000", "--save-every", "999999999"];
        let child = started(linear(dir, "out", "1", &endless), dir);
        signal(child.id(), name);
        let (code, text) = finish(child);
        assert_eq!(code, 130, "{name}: {text}");
        let last = steps_saved(dir, "out").pop();
        assert_eq!(last, Some(stopped_after(&text)), "{name}: {text}");
    }
}

/// torchrun ends its ranks with the signal that it got itself.
#[test]
fn interrupts_of_ranks_that_no_launcher_of_ours_started_save_too() {
    for name in ["INT", "HUP"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = dir.path();
        crate::support::heed_signals();
        let meet = format!("tcp://127.0.0.1:{}", free_port());
        let rank = |rank: &str| {
            let mut command = linear(dir, "out", "1", &["--world-size", "2", "--rank", rank]);
            command.args(["--init-method", &meet, "--epochs", "1000000000"]);
            command.args(["--save-every", "999999999"]);
            command.env("PHALANX_TOKEN", "5a".repeat(32));
            command
        };
        let second = rank("1").spawn().expect("phalanx starts");
        let first = started(rank("0"), dir);
        for child in [&first, &second] {
            signal(child.id(), name);
            signal(child.id(), name); // once to the process, once to its group
        }
        let [text, _] = [first, second].map(|child| {
            let (code, text) = finish(child);
            assert_eq!(code, 130, "{name}: {text}");
            text
        });
        let last = steps_saved(dir, "out").pop();
        assert_eq!(last, Some(stopped_after(&text)), "{name}: {text}");
    }
}

/// Whoever stops several ranks learns that nothing was saved, as with one.
#[test]
fn a_stop_whose_checkpoint_cannot_be_saved_is_an_error_on_any_number_of_ranks() {
    for ranks in ["1", "2"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = dir.path();
        // One epoch, so that nothing is saved before the signal.
        let long = ["--iterations", "3000000", "--save-every", "999999999"];
        let child = started(linear(dir, "out", ranks, &long), dir);
        let _ = std::fs::remove_dir_all(dir.join("out/checkpoints"));
        std::fs::write(dir.join("out/checkpoints"), "in the way").expect("written");
        signal(child.id(), "TERM");
        let (code, text) = finish(child);
        assert_eq!(code, 2, "{ranks} ranks: {text}");
        assert!(
            text.contains("out/checkpoints is a file"),
            "{ranks} ranks: {text}"
        );
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_silent_death() {
    for ranks in ["1", "2"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = dir.path();
        let plain = train(
            dir,
            "out",
            &["--save-every", "2", "--nproc-per-node", ranks],
        );
        let mut limited = phalanx(&[], dir);
        let program = limited.get_program().to_owned();
        limited = Command::new("sh");
        limited
            .args(["-c", "ulimit -f 2000 && exec \"$0\" \"$@\""])
            .arg(program);
        limited.args(plain.get_args()).current_dir(dir);
        limited
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .stdin(Stdio::null());
        let (code, text) = run(limited);
        assert_eq!(code, 1, "{ranks} ranks: {text}");
        assert!(
            text.contains("would exceed the size limit"),
            "{ranks} ranks: {text}"
        );
    }
}

#[test]
fn an_earlier_run_is_replaced_only_when_asked_for() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let go = |more: &[&str]| linear(dir, "out", "1", &[&["--iterations", "6"], more].concat());
    succeed(go(&["--save-every", "3"]));
    let saved = steps_saved(dir, "out");
    let (code, text) = finish(go(&["--save-every", "3"]).spawn().expect("phalanx starts"));
    assert_eq!(code, 2, "{text}");
    assert!(
        text.contains("holds an earlier run: checkpoints/step-000000006.json"),
        "{text}"
    );
    assert!(text.contains("--resume auto --output-dir out"), "{text}");
    assert_eq!(steps_saved(dir, "out"), saved);
    assert!(dir.join("out/summary.json").exists());
    succeed(go(&["--save-every", "4", "--overwrite"]));
    assert_eq!(steps_saved(dir, "out"), [4, 6]);
}

/// What a launcher starts again is the same run.
#[test]
fn ranks_that_are_started_again_go_on_from_their_last_checkpoint() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let steps = ["--iterations", "9", "--save-every", "2"];
    succeed(linear(
        dir,
        "out",
        "1",
        &[&steps[..], &["--stop-after", "4"]].concat(),
    ));
    let mut again = linear(dir, "out", "1", &steps);
    again.env("TORCHELASTIC_RESTART_COUNT", "1");
    let text = succeed(again);
    assert!(text.contains("resumed  after 4 of 9 steps"), "{text}");
}

/// Processes of `dir` that are this rank.
fn rank_in(dir: &Path, rank: usize) -> Vec<u32> {
    let wanted = format!("RANK={rank}");
    let is_it = |pid: &u32| {
        let of = |name: &str| format!("/proc/{pid}/{name}");
        let environ = std::fs::read(of("environ")).unwrap_or_default();
        environ
            .split(|byte| *byte == 0)
            .any(|v| v == wanted.as_bytes())
            && std::fs::read_link(of("cwd")).is_ok_and(|cwd| cwd == dir)
    };
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_it).collect()
}

/// The manifests in `folder`.
fn manifests(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("checkpoints")).into_iter();
    let names = entries.flatten().flatten().map(|e| e.file_name());
    let mut names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    names.retain(|name| name.ends_with(".json"));
    names.sort();
    names
}

/// Runs a training that the launcher starts again once, without an --output-dir: rank 1 is killed when `folder`, or the
/// one folder in it, has two checkpoints. Gives what was printed.
fn killed_once(dir: &Path, folder: &str, inner: &[&str], training: &str) -> String {
    let mut command = phalanx(
        &[
            "launch",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--",
        ],
        dir,
    );
    let training = training.split_whitespace();
    command
        .args(inner)
        .arg(env!("CARGO_BIN_EXE_phalanx"))
        .arg("train");
    let child = command.args(training).spawn().expect("phalanx starts");
    let at = |folder: &str| {
        let at = dir.join(folder);
        match std::fs::read_dir(&at)
            .into_iter()
            .flatten()
            .flatten()
            .next()
        {
            Some(entry) if folder == "runs" => entry.path(),
            _ => at,
        }
    };
    crate::support::eventually("two checkpoints", || manifests(&at(folder)).len() >= 2);
    for pid in rank_in(dir, 1) {
        signal(pid, "KILL");
    }
    let (code, text) = finish(child);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("restart 1 of 1"), "{text}");
    text
}

const KILLED: &str = "--epochs 1 --save-every 2 --threads 1 --seed 3";

/// What issue 16 begins with: the second attempt removed the checkpoints of the first, or began in another folder.
#[test]
fn a_restart_without_an_output_folder_goes_on_in_that_of_the_first_attempt() {
    // A folder of that name that nobody can take for another's.
    let real = |dir: &tempfile::TempDir| dir.path().canonicalize().expect("a path");
    let resnet = format!(
        "resnet18 --custom_data true --train-samples 64 --test-samples 8 --batch-size 4 {KILLED}"
    );
    let mnist = format!("mnist --data synthetic:640 --batch-size 8 {KILLED}");
    let shell = ["sh", "-c", "\"$0\" \"$@\""];
    for (training, folder, inner) in [
        (&resnet, "output_dir", &[][..]),
        (&mnist, "runs", &[][..]),
        // The launcher is not the training's parent.
        (&mnist, "runs", &shell[..]),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = real(&dir);
        let text = killed_once(&dir, folder, inner, training);
        assert!(text.contains("resumed  after "), "{training}: {text}");
        if folder == "runs" {
            let runs = std::fs::read_dir(dir.join("runs")).expect("runs").count();
            assert_eq!(runs, 1, "{text}");
        }
    }
}

/// The same under torchrun, which says less: ranks in one attempt after another, the first of which ends early.
fn attempt(dir: &Path, restarts: u32, id: &str, training: &[&str]) -> (i32, String) {
    let mut command = phalanx(&["train"], dir);
    command.args(training);
    command.env("PHALANX_TOKEN", "5a".repeat(32));
    for (name, value) in [
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &free_port().to_string()),
        ("TORCHELASTIC_RESTART_COUNT", &restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", id),
    ] {
        command.env(name, value);
    }
    run(command)
}

#[test]
fn attempts_under_another_launcher_share_a_folder_and_other_jobs_do_not() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let linear = ["linear", "--iterations", "9", "--save-every", "2"];
    let part = [&linear[..], &["--stop-after", "4"]].concat();
    let runs = || {
        let runs = std::fs::read_dir(dir.join("runs")).into_iter();
        runs.flatten().flatten().count()
    };
    let go = |restarts, id, training: &[&str]| {
        let (code, text) = attempt(dir, restarts, id, training);
        assert_eq!(code, 0, "{text}");
        text
    };
    go(0, "first", &part);
    go(0, "other", &part);
    assert_eq!(runs(), 2);
    for id in ["first", "other"] {
        let text = go(1, id, &part);
        assert!(text.contains("resumed  after 4 of 9 steps"), "{text}");
        assert_eq!(runs(), 2);
    }
    // Whose first attempt never got as far as that.
    let text = go(1, "third", &part);
    assert!(!text.contains("resumed"), "{text}");
    assert_eq!(runs(), 3);
    let text = go(2, "third", &part);
    assert!(text.contains("resumed  after 4 of 9 steps"), "{text}");
    // Another training in the same attempt has a folder of its own.
    let text = go(2, "third", &[&part[..], &["--lr", "0.1"]].concat());
    assert!(!text.contains("resumed"), "{text}");
    assert_eq!(runs(), 4);
}

#[test]
fn a_restart_removes_nothing_whatever_was_typed() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let steps = [
        "linear",
        "--iterations",
        "20",
        "--save-every",
        "2",
        "--output-dir",
    ];
    let go = |restarts, id, out: &str, more: &[&str]| {
        let training = [&steps[..], &[out], more].concat();
        let (code, text) = attempt(dir, restarts, id, &training);
        assert_eq!(code, 0, "{text}");
        text
    };
    let stop = |n| ["--stop-after", n];
    go(0, "old", "out", &[]);
    // It is to be replaced once, not by every attempt.
    let overwrite = ["--overwrite"];
    go(0, "new", "out", &[&overwrite[..], &stop("4")].concat());
    assert_eq!(manifests(&dir.join("out")), manifest_names(&[2, 4]));
    let text = go(1, "new", "out", &[&overwrite[..], &stop("4")].concat());
    assert!(text.contains("resumed  after 4 of 20 steps"), "{text}");
    // It begins where it was told to, and goes on where it got.
    let from = ["--resume", "out/checkpoints/step-000000006.json"];
    let branch = ["linear", "--iterations", "20", "--save-every", "1"];
    let branch = [&branch[..], &from[..], &stop("3")].concat();
    let (code, text) = attempt(dir, 0, "branch", &branch);
    assert_eq!(code, 0, "{text}");
    assert!(!dir.join(from[1]).exists(), "the oldest goes");
    let (code, text) = attempt(dir, 1, "branch", &branch);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("resumed  after 9 of 20 steps"), "{text}");
    // Also where it has saved nothing of its own yet.
    let text = go(1, "early", "elsewhere", &["--resume", "out"]);
    assert!(text.contains("resumed  after 12 of 20 steps"), "{text}");
}

fn manifest_names(steps: &[u64]) -> Vec<String> {
    steps
        .iter()
        .map(|step| format!("step-{step:09}.json"))
        .collect()
}

/// An earlier run is in the way of every attempt, and a restart does not take it for its own.
#[test]
fn a_refused_folder_is_refused_again() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let linear = [
        "linear",
        "--iterations",
        "4",
        "--save-every",
        "2",
        "--output-dir",
        "out",
    ];
    succeed(phalanx_data(dir, &linear));
    for restarts in 0..2 {
        let (code, text) = attempt(dir, restarts, "job", &linear);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("holds an earlier run"), "{text}");
    }
    // A mistake leaves no folder behind.
    let wrong = ["mnist", "--data", "nowhere"];
    let (code, text) = attempt(dir, 0, "job", &wrong);
    assert_eq!(code, 2, "{text}");
    assert!(!dir.join("runs").exists(), "{text}");
}

fn phalanx_data(dir: &Path, training: &[&str]) -> Command {
    let mut command = phalanx(&["train"], dir);
    command.args(training);
    command
}

/// Without checkpoints there is nothing to go on from, but the log of the attempt before is kept.
#[test]
fn a_restart_from_the_first_step_keeps_the_log_before() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let linear = ["linear", "--iterations", "100", "--output-dir", "out"];
    let (code, text) = attempt(dir, 0, "job", &linear);
    assert_eq!(code, 0, "{text}");
    let before = std::fs::read_to_string(dir.join("out/metrics.jsonl")).expect("a log");
    let (code, text) = attempt(
        dir,
        1,
        "job",
        &[&linear[..], &["--save-every", "50"]].concat(),
    );
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("restart 1 finds no checkpoint in out/checkpoints"),
        "{text}"
    );
    let kept = std::fs::read_to_string(dir.join("out/metrics-1.jsonl")).expect("a log");
    assert_eq!(kept, before);
}

#[test]
fn sigusr2_to_one_process_says_why_it_shows_nothing() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let endless = ["--epochs", "1000000000", "--save-every", "999999999"];
    let child = started(linear(dir, "out", "1", &endless), dir);
    signal(child.id(), "USR2");
    std::thread::sleep(Duration::from_millis(300));
    signal(child.id(), "TERM");
    let (code, text) = finish(child);
    assert_eq!(code, 130, "{text}");
    assert_eq!(
        text.matches("SIGUSR2 has no effect here").count(),
        1,
        "{text}"
    );
}

#[test]
fn sigusr1_before_the_first_step_stops_after_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let meet = format!("tcp://127.0.0.1:{}", free_port());
    // A rank that waits for its peer has taken no step.
    let rank = |rank: &str| {
        let place = ["--world-size", "2", "--rank", rank, "--init-method", &meet];
        let mut command = linear(dir, "out", "1", &place);
        command.args(["--save-every", "9"]);
        command.env("PHALANX_TOKEN", "5a".repeat(32));
        command.spawn().expect("phalanx starts")
    };
    let first = rank("0");
    let began = Instant::now();
    let status = format!("/proc/{}/status", first.id());
    let listens = || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.is_some_and(|mask| mask >> (signal_hook::consts::SIGUSR1 - 1) & 1 == 1)
    };
    while !listens() {
        assert!(began.elapsed() < LIMIT, "it would be killed");
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(first.id(), "USR1");
    let second = rank("1");
    let (code, text) = finish(first);
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("stopped as asked by SIGUSR1 after 1 step;"),
        "{text}"
    );
    let (code, text) = finish(second);
    assert_eq!(code, 0, "{text}");
    assert_eq!(steps_saved(dir, "out"), [1]);
}

#[test]
fn best_weights_that_cannot_be_saved_end_the_training_or_are_warned_of() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    succeed(train(dir, "out", &["--epochs", "1", "--stop-after", "3"]));
    // A folder that is not empty: no file takes its place.
    std::fs::create_dir_all(dir.join("out/best.safetensors/full")).expect("folder");
    for (policy, expected) in [("stop", 1), ("warn", 0)] {
        let args = ["--resume", "auto", "--epochs", "1", "--save-errors", policy];
        let (code, text) = run(train(dir, "out", &args));
        assert_eq!(code, expected, "{text}");
        assert!(text.contains("out/best.safetensors"), "{text}");
        let warned = text.contains("warning: the best weights were not saved");
        assert_eq!(warned, policy == "warn", "{text}");
        let summary = dir.join("out/summary.json");
        assert_eq!(summary.exists(), policy == "warn");
    }
}

/// Of the last epoch they are what the training is for.
#[test]
fn an_epochs_weights_that_cannot_be_saved_are_warned_of_but_for_the_last() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let go = |out: &str, more: &[&str]| {
        let mut command = phalanx(&["train", "resnet18"], dir);
        command.args(["--epochs", "2", "--data_url", "synthetic:4"]);
        command.args(["--batch-size", "2", "--output-dir", out]);
        command.args(more);
        run(command)
    };
    let (code, text) = go("begun", &["--stop-after", "1"]);
    assert_eq!(code, 0, "{text}");
    for (policy, epoch, expected) in [("stop", 1, 1), ("warn", 1, 0), ("warn", 2, 1)] {
        let out = format!("{policy}-{epoch}");
        let copied = Command::new("cp")
            .args(["-r", "begun", &out])
            .current_dir(dir)
            .status();
        assert!(copied.expect("cp").success());
        // A folder that is not empty: no file takes its place.
        let file = format!("{out}/epoch_{epoch}.safetensors");
        std::fs::create_dir_all(dir.join(&file).join("full")).expect("folder");
        let (code, text) = go(&out, &["--resume", "auto", "--save-errors", policy]);
        assert_eq!(code, expected, "{text}");
        assert!(text.contains(&file), "{text}");
        let warned = text.contains("warning: epoch 1's weights were not saved");
        assert_eq!(warned, expected == 0, "{text}");
        let other = dir.join(&out).join("epoch_2.pth");
        assert_eq!(other.exists(), expected == 0);
    }
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let args = ["--epochs", "4", "--save-every", "1000", "--keep", "3"];
    succeed(train(dir, "out", &args));
    // One after each epoch; the first has gone.
    let steps = SAMPLES / BATCH;
    let mut expected: Vec<String> = (2..=4)
        .flat_map(|epoch| ["json", "safetensors"].map(|e| format!("step-{:09}.{e}", epoch * steps)))
        .collect();
    expected.sort();
    // Besides the best weights with which one of them goes on, in two formats.
    let there = std::fs::read_dir(dir.join("out/checkpoints")).expect("folder");
    let mut there: Vec<String> = there
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    there.sort();
    let (earlier, there): (Vec<String>, _) = there
        .into_iter()
        .partition(|name| name.starts_with("best-"));
    assert!(earlier.len() <= 4, "{earlier:?}");
    assert_eq!(there, expected);
    // The best epoch's weights are those of the metrics' line with the highest accuracy, the first of equals.
    let metrics = records(&dir.join("out/metrics.jsonl"));
    let tested: Vec<&Value> = metrics
        .iter()
        .filter(|r| !r["accuracy"].is_null())
        .collect();
    assert_eq!(tested.len(), 4);
    let accuracy = |r: &Value| r["accuracy"].as_f64().expect("a number");
    let best = tested.iter().skip(1).fold(tested[0], |best, r| {
        if accuracy(r) > accuracy(best) {
            r
        } else {
            best
        }
    });
    for file in ["best.safetensors", "best.pth"] {
        let mut params = model();
        let path = dir.join("out").join(file);
        let loaded = checkpoint::load_params(&path, &mut params).expect("loads");
        assert_eq!(
            checkpoint::weights_sha256(&params),
            best["weights_sha256"].as_str().expect("a hash"),
            "{file}"
        );
        if file == "best.safetensors" {
            assert_eq!(loaded.metadata["epoch"], best["epoch"].to_string());
        }
    }
}

/// The network of `train mnist`.
fn model() -> Params {
    let mut scope = Scope::new(Seed(1));
    MnistCnn::new(&mut scope);
    scope.build().expect("a model")
}

#[test]
fn a_disk_too_small_ends_the_training_or_is_warned_of() {
    let (one_rank, mesh) = (
        &["mnist", "--data", "synthetic:640"][..],
        &[
            "gpt",
            "--data",
            "synthetic:6000",
            "--context",
            "16",
            "--nproc-per-node",
            "2",
            "--mesh",
            "data=2",
            "--fully-sharded",
        ][..],
    );
    for (name, program, policy, code) in [
        ("one-stop", one_rank, "stop", 1),
        ("one-warn", one_rank, "warn", 0),
        ("mesh-stop", mesh, "stop", 1),
        ("mesh-warn", mesh, "warn", 0),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let folder = dir.path().join(name).join("checkpoints");
        std::fs::create_dir_all(&folder).expect("folder");
        let more = ["--threads", "1", "--epochs", "1", "--save-every", "3"];
        let mut inner = phalanx(&[&["train"], program, &more].concat(), dir.path());
        inner.args(["--output-dir", name, "--save-errors", policy]);
        // In a mount namespace of its own, which ends with the command.
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c"])
            .arg("mount -t tmpfs -o size=1m none \"$0\" && echo mounted && \"$@\"; code=$?; echo left $(ls -A \"$0\"); exit $code")
            .arg(&folder)
            .arg(inner.get_program())
            .args(inner.get_args())
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let Ok(child) = command.spawn() else {
            eprintln!("skipped: there is no unshare");
            return;
        };
        let (got, text) = finish(child);
        if !text.contains("mounted") {
            eprintln!("skipped: a small disk cannot be mounted here (it needs root)");
            return;
        }
        assert_eq!(got, code, "{text}");
        assert!(
            text.contains("checkpoints/step-000000003.safetensors: the disk is full"),
            "{text}"
        );
        // Neither half a checkpoint nor a temporary file.
        assert!(text.lines().any(|line| line == "left"), "{text}");
        if name == "mesh-stop" {
            assert!(text.contains("error: rank 0 (pid "), "{text}");
        }
        let summary = dir.path().join(name).join("summary.json");
        assert_eq!(summary.exists(), policy == "warn");
    }
}

/// The lines that say which settings are others than the checkpoint's.
fn changes(text: &str) -> Vec<&str> {
    let told = "changed since the checkpoint: ";
    text.lines()
        .filter_map(|line| line.strip_prefix(told))
        .collect()
}

#[test]
fn settings_that_have_changed_since_the_checkpoint_are_reported() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let base = ["--resume", "auto", "--stop-after", "1"];
    let go = |more: &[&str]| succeed(train(dir, "out", &[&base[..], more].concat()));
    let rate = ["--lr", "0.01"];
    assert!(changes(&go(&rate)).is_empty());
    assert!(changes(&go(&rate)).is_empty());
    // Whoever forgets it trains with the default.
    let two = ["--nproc-per-node", "2"];
    let text = go(&two);
    assert_eq!(changes(&text), ["--lr 0.01 -> 0.05"], "{text}");
    let text = go(&[
        "--lr",
        "5",
        "--precision",
        "bf16",
        "--dropout",
        "0,0",
        "--cosine",
        "--shift",
        "3",
        "--momentum",
        "0.5",
        "--epochs",
        "1",
    ]);
    let all = [
        "--cosine off -> on",
        "--dropout 0.25,0.5 -> 0,0",
        "--epochs 3 -> 1",
        "--lr 0.05 -> 5",
        "--momentum 0.9 -> 0.5",
        "--precision fp32 -> bf16",
        "--shift 0 -> 3",
    ];
    assert_eq!(changes(&text), all, "{text}");
    // Where the optimizer is another, that is a mistake.
    for ranks in [&[][..], &two] {
        let more = [&base[..], &["--momentum", "0", "--lr", "5"], ranks].concat();
        let (code, text) = run(train(dir, "out", &more));
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("--momentum 0.5, "), "{text}");
        assert!(
            text.contains("this run has ") && text.contains("--momentum 0,"),
            "{text}"
        );
        assert!(!text.contains("exited"), "{text}");
        assert!(!dir.join("out/flight").exists(), "{text}");
    }
}

#[test]
fn the_linear_program_tells_changed_settings_too() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let base = ["--resume", "auto", "--stop-after", "1"];
    succeed(linear(dir, "out", "1", &base));
    let more = ["--lr", "0.001", "--iterations", "9"];
    let text = succeed(linear(dir, "out", "1", &[&base[..], &more].concat()));
    assert_eq!(
        changes(&text),
        ["--iterations 500 -> 9", "--lr 0.01 -> 0.001"],
        "{text}"
    );
}

#[test]
fn a_checkpoint_that_does_not_say_its_settings_is_gone_on_with() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    succeed(train(dir, "out", &["--stop-after", "2"]));
    let manifest = dir.join("out/checkpoints/step-000000002.json");
    for flag in ["--lr", "--momentum", "--cosine"] {
        without_fact(&manifest, &format!("\"{flag}\""));
    }
    let more = ["--resume", "auto", "--stop-after", "1", "--lr", "0.01"];
    let text = succeed(train(dir, "out", &more));
    assert!(text.contains("resumed  after 2 of 30 steps"), "{text}");
    assert!(changes(&text).is_empty(), "{text}");
}

#[test]
fn a_checkpoints_weights_and_those_of_a_file_exclude_each_other() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let one = ["--data", "synthetic:64", "--epochs", "1"];
    succeed(train(dir, "first", &one));
    // Also what is started again and again by the same script.
    let auto = ["--resume", "auto", "--init", "first", "--stop-after", "1"];
    let text = succeed(train(dir, "out", &auto));
    assert!(text.contains("weights  from first"), "{text}");
    let text = succeed(train(dir, "out", &auto));
    assert!(
        text.contains("--init first was for the run's start"),
        "{text}"
    );
    let (code, text) = run(train(dir, "on", &["--resume", "out", "--init", "first"]));
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("--init has no effect"), "{text}");
}

#[test]
fn what_cannot_be_gone_on_with_is_a_mistake_with_a_way_out() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    succeed(train(dir, "out", &["--stop-after", "2"]));
    let manifest = dir.join("out/checkpoints/step-000000002.json");
    std::fs::write(&manifest, "{").expect("written");
    std::fs::write(dir.join("weights.pt"), "of somebody").expect("written");
    for ranks in ["1", "2"] {
        for (resume, told) in [
            ("auto", "no checkpoint in out/checkpoints is complete"),
            ("auto", "begin anew in another --output-dir"),
            ("weights.pt", "--init weights.pt starts a new training"),
        ] {
            let more = ["--resume", resume, "--nproc-per-node", ranks];
            let (code, text) = run(train(dir, "out", &more));
            assert_eq!(code, 2, "{text}");
            assert!(text.contains(told), "{told}: {text}");
            assert!(!text.contains("exited"), "{text}");
            assert!(!dir.join("out/flight").exists(), "{text}");
        }
    }
}

#[test]
fn a_flag_of_another_optimizer_is_named() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    succeed(train(dir, "out", &["--stop-after", "2"]));
    let more = ["--resume", "auto", "--epochs", "3", "--momentum", "0"];
    let (code, text) = run(train(dir, "out", &more));
    assert_eq!(code, 2, "{text}");
    let what =
        "--resume auto continues a training with --momentum 0.9; this run has --momentum 0: ";
    assert!(text.contains(what), "{text}");
    assert!(!text.contains("--epochs"), "{text}");
}

#[test]
fn the_folder_of_a_training_that_runs_is_not_replaced() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let mut first = train(dir, "out", &["--epochs", "1000"]);
    let first = crate::support::Job::start(&mut first);
    crate::support::eventually("it trains", || dir.join("out/metrics.jsonl").exists());
    let began = Instant::now();
    let (code, text) = run(train(dir, "out", &["--overwrite"]));
    assert_eq!(code, 2, "{text}");
    let what = format!("another training (process {}) writes into out", first.id());
    assert!(text.contains(&what), "{text}");
    assert!(began.elapsed() < Duration::from_secs(9), "it waited");
    signal(first.id(), "KILL");
    let _ = ended(first);
    succeed(train(dir, "out", &["--overwrite", "--epochs", "1"]));
}
