//! `phalanx train` as a person runs it: whole processes, real output.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    LIMIT, SOON, at_once, ended, finish, free_port, phalanx, run, signal, succeed, text,
};
use phalanx_checkpoint::load_params;
use phalanx_nn::models::MnistCnn;
use phalanx_nn::{Family, Params, Scope, Seed};
use serde_json::Value;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn summary(dir: &Path) -> Value {
    let text = std::fs::read_to_string(dir.join("summary.json")).expect("summary.json");
    serde_json::from_str(&text).expect("JSON")
}

/// Processes whose environment holds `marker`, as (pid, RANK).
fn marked(marker: &str) -> Vec<(u32, Option<usize>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(environ) = std::fs::read(entry.path().join("environ")) else {
            continue;
        };
        let mut variables = environ.split(|&b| b == 0).map(String::from_utf8_lossy);
        if !variables.any(|v| v == marker) {
            continue;
        }
        // A zombie has an empty environment, so everything here is alive.
        let rank = environ
            .split(|&b| b == 0)
            .find_map(|v| v.strip_prefix(b"RANK="))
            .and_then(|v| String::from_utf8_lossy(v).parse().ok());
        found.push((pid, rank));
    }
    found
}

/// Starts a training that would run for hours, and waits until it trains.
/// Gives the process, its marker and the pid of `rank`.
fn start_endless(
    dir: &Path,
    name: &str,
    extra: &[&str],
    rank: usize,
) -> (std::process::Child, String, u32) {
    let marker = format!("PHALANX_TEST={name}-{}", std::process::id());
    let mut args = vec![
        "train",
        "mnist",
        "--nproc-per-node",
        "3",
        "--epochs",
        "100000",
        "--data",
        "synthetic:960",
        "--batch-size",
        "8",
        "--log-interval",
        "1",
        "--threads",
        "1",
        "--output-dir",
        "out",
    ];
    args.extend(extra);
    let mut command = phalanx(&args, dir);
    let (key, value) = marker.split_once('=').expect("marker");
    let child = command.env(key, value).spawn().expect("phalanx starts");
    let metrics = dir.join("out/metrics.jsonl");
    let began = Instant::now();
    while std::fs::read_to_string(&metrics).map_or(0, |t| t.lines().count()) < 3 {
        assert!(began.elapsed() < LIMIT, "training did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The shim becomes the rank by exec, so there is one process a rank.
    let pid = marked(&marker)
        .into_iter()
        .find_map(|(pid, r)| (r == Some(rank)).then_some(pid))
        .expect("the rank runs");
    (child, marker, pid)
}

/// Requires that every process of the run ends soon after `since`.
/// (`tools/ci/random_faults.py` holds us to the two seconds that are promised.)
fn all_gone(marker: &str, since: Instant) {
    while !marked(marker).is_empty() {
        assert!(
            since.elapsed() < SOON,
            "left after {:?}: {:?}",
            since.elapsed(),
            marked(marker)
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn shared_memory_names() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir("/dev/shm")
        .map(|dir| {
            let names = dir.flatten().map(|e| e.file_name());
            // Others' come and go.
            let ours = |name: &std::ffi::OsString| name.to_string_lossy().contains("phalanx");
            names.filter(ours).collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

/// What rank 0 and rank 1 of the OneFlow document's program print. The document
/// shows the lines of steps 50 and 500, with `cuda:0` and `cuda:1`; those in
/// between only have its form.
const LINEAR: [(&str, &str); 2] = [
    ("0.00025336415274068713", "4.547473508864641e-12"),
    ("0.004111831542104483", "6.184563972055912e-11"),
];

/// Golden test G1: the OneFlow document's own numbers, and
/// every line of its transcript.
fn check_g1(transport: &str) {
    let dir = folder();
    let args = ["train", "linear", "--nproc-per-node", "2", "--transport"];
    let (out, _) = succeed(&[&args[..], &[transport]].concat(), dir.path());
    for (rank, (at_50, at_500)) in LINEAR.into_iter().enumerate() {
        let prefix = format!("[rank {rank}] ");
        let lines = out.lines().filter_map(|l| l.strip_prefix(&prefix));
        let lines: Vec<&str> = lines.collect();
        let mut expected: Vec<String> = (1..=10).map(|i| format!("{}/500 loss:", 50 * i)).collect();
        expected[0].push_str(at_50);
        expected[9].push_str(at_500);
        for (line, between) in expected.iter_mut().zip(&lines).take(9).skip(1) {
            // A loss as Python prints it.
            let loss = between.strip_prefix(line.as_str()).unwrap_or_default();
            assert!(loss.parse::<f64>().is_ok_and(|l| l > 0.0), "{out}");
            line.push_str(loss);
        }
        expected.extend([
            String::new(),
            "w:tensor([[2.0000],".to_owned(),
            format!("        [3.0000]], device='cpu:{rank}', dtype=oneflow.float32,"),
            "       grad_fn=<accumulate_grad>)".to_owned(),
        ]);
        assert_eq!(lines, expected, "{out}");
    }
    assert_eq!(out.lines().count(), 2 * 14, "{out}");
}

#[test]
fn unknown_instruction_sets_are_refused_with_the_choices() {
    let dir = folder();
    for ranks in ["1", "2"] {
        let args = ["train", "linear", "--nproc-per-node", ranks];
        let output = finish(phalanx(&args, dir.path()).env("PHALANX_ISA", "sse9"));
        let err = text(&output.stderr);
        assert!(!output.status.success(), "{err}");
        let said = "PHALANX_ISA=\"sse9\" is not an instruction set of this processor: use scalar";
        assert!(err.contains(said), "{err}");
    }
}

#[test]
fn linear_prints_the_documents_numbers_over_threads() {
    check_g1("thread");
}

#[test]
fn linear_prints_the_documents_numbers_over_shared_memory() {
    check_g1("shm");
}

#[test]
fn linear_prints_the_documents_numbers_over_tcp() {
    check_g1("tcp");
}

#[test]
fn mnist_trains_reports_and_saves() {
    let dir = folder();
    let (out, err) = succeed(
        &[
            "train",
            "mnist",
            "--nproc_per_node",
            "2",
            "--epochs",
            "2",
            "--data",
            "synthetic:1500",
            "--log-interval",
            "5",
            "--output-dir",
            "out",
            "--exchange",
            "all-reduce",
            "--profile",
            "profile",
        ],
        dir.path(),
    );
    // Operations and layers of both passes, for each rank; rank 0 shows the table.
    assert_eq!(err.matches("Chrome trace of 10 steps").count(), 1, "{err}");
    for rank in 0..2 {
        let file = dir.path().join(format!("profile.{rank}.json"));
        let trace: Value =
            serde_json::from_str(&std::fs::read_to_string(file).expect("profile")).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        check_lanes(events);
        for pass in ["forward", "backward"] {
            let of = |e: &&serde_json::Value| {
                e["name"] == "Conv2d" && e["args"]["layer"] == "conv1" && e["args"]["pass"] == pass
            };
            assert_eq!(events.iter().filter(of).count(), 10, "{pass}");
        }
    }
    assert!(
        out.contains("Train Epoch: 1 [0/1500 (0%)]\tloss=2."),
        "{out}"
    );
    assert!(
        out.contains("Train Epoch: 2 [1280/1500 (83%)]\tloss="),
        "{out}"
    );
    assert_eq!(out.matches("accuracy=").count(), 2, "{out}");
    assert!(
        !out.contains("[rank"),
        "only rank 0 prints, so nothing needs a name: {out}"
    );
    for what in [
        "2 ranks on 1 host over shared memory",
        "1,199,882 parameters in 8 tensors",
        "equal on all 2 ranks",
    ] {
        assert!(err.contains(what), "no \"{what}\" in\n{err}");
    }
    let summary = summary(&dir.path().join("out"));
    assert!(
        summary["accuracy"].as_f64().expect("accuracy") > 0.5,
        "{summary}"
    );
    assert_eq!(summary["weights_sha256"].as_str().map(str::len), Some(64));
    for file in [
        "metrics.jsonl",
        "mnist_cnn.pt",
        "mnist_cnn.safetensors",
        "mnist_cnn_accuracies.json",
    ] {
        assert!(dir.path().join("out").join(file).exists(), "{file}");
    }
    for line in std::fs::read_to_string(dir.path().join("out/metrics.jsonl"))
        .expect("metrics")
        .lines()
    {
        let entry: Value = serde_json::from_str(line).expect("each line is JSON");
        assert!(entry["step"].is_u64(), "{line}");
    }
}

/// Each step's operations lie in its forward and backward passes, and these before its optimizer. The first bucket's
/// all-reduce starts before backward ends, in one step at least: on a busy machine the communication thread may get no
/// core in time.
fn check_lanes(events: &[Value]) {
    let all = |name: &str| -> Vec<(f64, f64)> {
        let is_it = |e: &&Value| e["name"].as_str().is_some_and(|n| n.starts_with(name));
        let number = |e: &Value, key: &str| e[key].as_f64().expect("a number");
        let found = events.iter().filter(is_it);
        found
            .map(|e| (number(e, "ts"), number(e, "ts") + number(e, "dur")))
            .collect()
    };
    let (forward, optimizer) = (all("forward"), all("optimizer"));
    let (backward, reduced) = (all("backward"), all("all_reduce bucket 0"));
    let convolutions = all("Conv2d");
    assert_eq!(
        [&forward, &optimizer, &backward, &reduced].map(Vec::len),
        [10; 4]
    );
    for i in 0..10 {
        let (begin, end) = (forward[i].0, optimizer[i].1);
        assert!(forward[i].1 <= backward[i].0 && backward[i].1 <= optimizer[i].0);
        assert!(i == 0 || optimizer[i - 1].1 <= begin);
        let of_step = convolutions
            .iter()
            .filter(|of| begin <= of.0 && of.1 <= end);
        assert_eq!(
            of_step.count(),
            4,
            "both passes of two convolutions in step {i}"
        );
        let in_forward = convolutions
            .iter()
            .filter(|of| begin <= of.0 && of.1 <= forward[i].1);
        assert_eq!(in_forward.count(), 2, "step {i}");
    }
    let mut steps = backward.iter().zip(&reduced);
    assert!(
        steps.any(|((_, end), (begin, _))| begin < end),
        "backwards {backward:?} µs, all-reduces {reduced:?} µs"
    );
}

#[test]
fn weights_depend_on_neither_transport_nor_luck() {
    let hash = |transport: &str| {
        let dir = folder();
        succeed(
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "3",
                "--epochs",
                "1",
                "--data",
                "synthetic:500",
                "--batch-size",
                "16",
                "--transport",
                transport,
                "--output-dir",
                "out",
            ],
            dir.path(),
        );
        summary(&dir.path().join("out"))["weights_sha256"]
            .as_str()
            .expect("hash")
            .to_owned()
    };
    let thread = hash("thread");
    assert_eq!(thread, hash("shm"));
    assert_eq!(thread, hash("tcp"));
}

/// A small training whose batches are uneven, but for its number of ranks.
const SMALL: [&str; 14] = [
    "train",
    "mnist",
    "--epochs",
    "2",
    "--data",
    "synthetic:308",
    "--global-batch-size",
    "96",
    "--test-batch-size",
    "16",
    "--log-interval",
    "1",
    "--output-dir",
    "out",
];

/// Trains the MNIST CNN on `world` ranks; its three digests.
fn digests(dir: &Path, world: &str, more: &[&str]) -> [String; 3] {
    let mut args = SMALL.to_vec();
    args.extend(["--nproc-per-node", world]);
    args.extend(more);
    if !more.contains(&"--resume") {
        args.push("--overwrite"); // what the world before left
    }
    succeed(&args, dir);
    let summary = summary(&dir.join("out"));
    ["weights_sha256", "optimizer_sha256", "metrics_sha256"]
        .map(|key| summary[key].as_str().expect("a digest").to_owned())
}

/// Whole gradients on every rank, parts of them under backward, or parts in the optimizer's step: the same
/// weights, optimizer state and metrics, and a checkpoint of one goes on as any other.
#[test]
fn the_exchange_changes_no_bit_also_where_a_checkpoint_is_gone_on_with() {
    let ways = ["auto", "all-reduce", "reduce-scatter", "at-step"];
    let alone = |way: &&str| digests(folder().path(), "2", &["--exchange", way]);
    let digests_of: Vec<[String; 3]> = ways.iter().map(alone).collect();
    assert!(digests_of.iter().all(|d| *d == digests_of[0]));

    for [first, then] in [["at-step", "all-reduce"], ["reduce-scatter", "at-step"]] {
        let dir = folder();
        let stopped = [
            "--nproc-per-node",
            "2",
            "--stop-after",
            "3",
            "--exchange",
            first,
        ];
        succeed(&[&SMALL[..], &stopped].concat(), dir.path());
        let gone_on = ["--resume", "auto", "--exchange", then];
        assert_eq!(
            digests(dir.path(), "2", &gone_on),
            digests_of[0],
            "{first}, {then}"
        );
    }
}

#[test]
fn an_exchange_that_leaves_parts_goes_with_nothing_that_needs_whole_gradients() {
    let fails = |more: &[&str]| {
        let dir = folder();
        let args = [
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "2",
                "--global-batch-size",
                "64",
            ][..],
            more,
        ]
        .concat();
        let (code, _, err) = run(&args, dir.path());
        assert_eq!(code, 2, "{err}");
        assert!(
            err.contains("needs every rank to have whole gradients"),
            "{err}"
        );
        err
    };
    let err = fails(&["--exchange", "at-step", "--gradient-type", "bf16"]);
    assert!(err.contains("--gradient-type"), "{err}");
    let err = fails(&["--exchange", "reduce-scatter", "--deterministic", "shards"]);
    assert!(err.contains("--deterministic shards"), "{err}");
}

/// Two epochs with dropout, augmentation and a short last batch: weights, optimizer state and
/// metrics to the last bit.
#[test]
fn sharded_training_does_not_depend_on_the_number_of_ranks() {
    let dir = folder();
    let shards = |world: &str, more: &[&str]| {
        let more = [&["--deterministic", "shards", "--shift", "2"], more].concat();
        digests(dir.path(), world, &more)
    };
    let one = shards("1", &[]);
    assert_ne!(one[0], one[1]);
    for (world, transport, cap, threads) in [
        ("1", "thread", "1", "2"),
        ("2", "shm", "0.001", "1"),
        ("3", "tcp", "4", "2"),
        ("4", "thread", "100", "1"),
        ("8", "shm", "1", "1"),
    ] {
        let more = [
            "--transport",
            transport,
            "--bucket-cap-mb",
            cap,
            "--threads",
            threads,
        ];
        assert_eq!(shards(world, &more), one, "{world} ranks, {more:?}");
    }
    // The digests do tell: ranks instead of shards give other bits, and so do digits that are not shifted.
    assert_ne!(digests(dir.path(), "2", &["--shift", "2"])[0], one[0]);
    let unshifted = digests(dir.path(), "1", &["--deterministic", "shards"]);
    assert_ne!(unshifted[0], one[0]);
}

/// bf16 rounds what lies between the layers: shards must not be rounded, or added up, in another way where other ranks have
/// them.
#[test]
fn sharded_training_in_bf16_does_not_depend_on_the_number_of_ranks() {
    let dir = folder();
    let shards = |world: &str, precision: &str| {
        let more = ["--deterministic", "shards", "--precision", precision];
        digests(dir.path(), world, &more)
    };
    let one = shards("1", "bf16");
    for world in ["2", "3"] {
        assert_eq!(shards(world, "bf16"), one, "{world} ranks");
    }
    // The digests do tell.
    assert_ne!(shards("1", "fp32")[0], one[0]);
}

/// Weights and optimizer; metrics differ, since rank 0 logs its own loss.
#[test]
fn ranks_equal_one_rank_that_accumulates() {
    let dir = folder();
    let four = digests(dir.path(), "4", &["--transport", "thread"]);
    let one = digests(dir.path(), "1", &["--accumulate", "4"]);
    assert_eq!(four[..2], one[..2]);
}

#[test]
fn compressed_gradients_save_bytes_and_learn_as_well() {
    let dir = folder();
    let run = |kind: &str| {
        let train =
            "train mnist --nproc-per-node 2 --transport tcp --epochs 2 --data synthetic:1500";
        let train: Vec<&str> = train.split(' ').collect();
        let own = ["--gradient-type", kind, "--output-dir", kind];
        succeed(&[&train[..], &own].concat(), dir.path());
        let summary = summary(&dir.path().join(kind));
        let number = |key: &str| summary[key].as_f64().expect("a number");
        (number("accuracy"), number("sent_bytes"))
    };
    let full = run("f32");
    for (kind, share) in [("bf16", 0.55), ("f16", 0.55)] {
        let half = run(kind);
        assert!(
            half.1 < share * full.1,
            "{kind} sent {} of {} bytes",
            half.1,
            full.1
        );
        // 250 pictures are tested.
        assert!(
            half.0 > full.0 - 0.05,
            "{kind}: accuracy {} for {}",
            half.0,
            full.0
        );
    }
}

/// The weights that a run of the MNIST CNN saved.
fn saved_weights(dir: &Path) -> Params {
    let mut scope = Scope::new(Seed(0));
    MnistCnn::new(&mut scope);
    let mut params = scope.build().expect("parameters");
    load_params(&dir.join("mnist_cnn.safetensors"), &mut params).expect("saved weights");
    params
}

/// Ten steps: later, rounding alone moves the accuracy of an unfinished
/// training by points. Ranks differ from one process in the order of additions only.
#[test]
fn same_global_batch_trains_alike_on_1_and_4_ranks() {
    let dir = folder();
    let weights = |world: &str| {
        succeed(
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                world,
                "--transport",
                "thread",
                "--epochs",
                "1",
                "--data",
                "synthetic:640",
                "--global-batch-size",
                "64",
                "--output-dir",
                world,
            ],
            dir.path(),
        );
        saved_weights(&dir.path().join(world))
    };
    let (one, four) = (weights("1"), weights("4"));
    for (id, info) in one.ids().zip(one.infos()) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let (a, b) = (one.get(id), four.get(id));
        let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let size = norm(&mut a.iter().map(|a| f64::from(*a)));
        // 1.2e-5 at most when this was written.
        assert!(
            apart < 1e-4 * size,
            "{}: {apart} of {size} after ten steps",
            info.name
        );
    }
}

#[test]
fn killed_rank_ends_everything_and_is_named() {
    let dir = folder();
    let before = shared_memory_names();
    let (child, marker, pid) = start_endless(dir.path(), "killed", &[], 1);
    let killed = Instant::now();
    signal(pid, "KILL");
    all_gone(&marker, killed);
    let output = child.wait_with_output().expect("output");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    let report = &err[err
        .rfind("error: ")
        .unwrap_or_else(|| panic!("no error in {err}"))..];
    assert!(
        report.contains("rank 1")
            && report.contains("SIGKILL")
            && report.contains(&pid.to_string()),
        "{err}"
    );
    assert_eq!(shared_memory_names(), before);
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .expect("folder")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(left, ["out"], "temporary files left");
}

#[test]
fn killed_rank_is_named_over_tcp_too() {
    let dir = folder();
    let (child, marker, pid) = start_endless(dir.path(), "killed-tcp", &["--transport", "tcp"], 2);
    let killed = Instant::now();
    signal(pid, "KILL");
    all_gone(&marker, killed);
    let output = child.wait_with_output().expect("output");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(
        err[err.rfind("error: ").unwrap_or(0)..].contains("rank 2"),
        "{err}"
    );
}

#[test]
fn stopped_rank_is_named_when_the_deadline_passes() {
    // In the optimizer's step it may have been stopped before it had voted for it, or after.
    let at_step = ["votes on the step", "bucket 0 of 1"];
    let cases = [("all-reduce", ["bucket"; 2]), ("at-step", at_step)];
    at_once(&cases, |(exchange, missing)| {
        let dir = folder();
        let more = ["--timeout", "2", "--exchange", exchange];
        let (child, marker, pid) =
            start_endless(dir.path(), &format!("stopped-{exchange}"), &more, 1);
        signal(pid, "STOP");
        let stopped = Instant::now();
        let output = child.wait_with_output().expect("output");
        assert!(stopped.elapsed() < SOON, "{:?}", stopped.elapsed());
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{err}");
        assert!(missing.iter().any(|words| err.contains(words)), "{err}");
        let report = &err[err.rfind("\nerror: ").unwrap_or(0)..];
        assert!(
            report.contains(&format!("rank 1 (pid {pid}) is stopped")),
            "{err}"
        );
        assert!(marked(&marker).is_empty(), "{:?}", marked(&marker));
    });
}

#[test]
fn interrupt_ends_everything() {
    let dir = folder();
    let (child, marker, _) = start_endless(dir.path(), "interrupt", &[], 0);
    let sent = Instant::now();
    signal(child.id(), "INT");
    all_gone(&marker, sent);
    let output = child.wait_with_output().expect("output");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
}

#[test]
fn killed_launcher_leaves_no_orphan() {
    let dir = folder();
    let (mut child, marker, _) = start_endless(dir.path(), "launcher", &[], 0);
    let killed = Instant::now();
    signal(child.id(), "KILL");
    child.wait().expect("reaped");
    all_gone(&marker, killed);
}

#[test]
fn rank_that_never_arrives_is_named_within_the_deadline() {
    let dir = folder();
    let began = Instant::now();
    let output = finish(
        phalanx(&["train", "linear", "--init-timeout", "2"], dir.path())
            .env("RANK", "0")
            .env("WORLD_SIZE", "3")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", free_port().to_string())
            .env("PHALANX_TOKEN", "ab".repeat(32)),
    );
    let err = text(&output.stderr);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("ranks 1, 2"), "{err}");
    assert!(err.contains("WORLD_SIZE=3 counts ranks here"), "{err}");
}

#[test]
fn mistakes_are_named_with_the_way_out() {
    let dir = folder();
    for (args, code, words) in [
        (&["train", "minst"][..], 2, &["minst", "mnist"][..]),
        (
            &["train", "mnist", "--epoch", "1"],
            2,
            &["--epoch", "--epochs"],
        ),
        (
            &["train", "mnist", "--batch-size", "0"],
            2,
            &["--batch-size", "at least 1"],
        ),
        (&["train", "mnist", "--lr", "fast"], 2, &["--lr", "fast"]),
        (
            &["train", "mnist", "--find-lr", "--save-every", "5"],
            2,
            &["--find-lr saves no checkpoints; remove --save-every"],
        ),
        (
            &["train", "mnist", "--find-lr", "--max-steps", "9"],
            2,
            &["--find-lr needs at least 20 steps, and --max-steps is 9"],
        ),
        (
            &["train", "mnist", "--find-lr", "--elastic"],
            2,
            &["--elastic cannot be used with --find-lr; remove one of them"],
        ),
        (
            &["train", "mnist", "--lr", "-1"],
            2,
            &["--lr must be a number from 0 up"],
        ),
        (
            &["train", "linear", "--nproc-per-node", "100000"],
            2,
            &["--nproc-per-node can be at most 1024"],
        ),
        (
            &["train", "mnist", "--data", "synthetic:18446744073709551615"],
            2,
            &["--data synthetic:18446744073709551615: the number must be from 1 to"],
        ),
        (
            &["train", "mnist", "--data", "synthetic:0"],
            2,
            &["--data synthetic:0: the number must be from 1 to"],
        ),
        (
            &["train", "resnet18", "--data", "synthetic:x"],
            2,
            &["--data synthetic:x: the number must be from 1 to"],
        ),
        (
            &["train", "mnist", "--data", "pictures"],
            2,
            &["pictures", "train-images-idx3-ubyte", "--data synthetic"],
        ),
        (
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "4",
                "--global-batch-size",
                "3",
            ],
            2,
            &["--global-batch-size 3", "4"],
        ),
        (
            &["train", "mnist", "--deterministic", "shards"],
            2,
            &[
                "needs a --global-batch-size",
                "grows with the number of ranks",
            ],
        ),
        (
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "9",
                "--deterministic",
                "shards",
                "--global-batch-size",
                "64",
            ],
            2,
            &["9 ranks cannot share 8 shards; use --shards 16"],
        ),
        (
            &[
                "train",
                "resnet18",
                "--deterministic",
                "shards",
                "--global-batch-size",
                "64",
                "--lr-scaling",
                "world",
            ],
            2,
            &["--lr-scaling makes weights depend on the number of ranks"],
        ),
        (
            &["train", "mnist", "--accumulate", "2", "--sampler", "torch"],
            2,
            &["--sampler torch goes with neither --accumulate"],
        ),
        (
            &[
                "train",
                "mnist",
                "--deterministic",
                "shards",
                "--global-batch-size",
                "64",
                "--gradient-type",
                "f16",
            ],
            2,
            &["leave out --gradient-type"],
        ),
        (
            &["train", "mnist", "--accumulate", "0"],
            2,
            &["--accumulate", "at least 1"],
        ),
        (
            &["train", "mnist", "--accumulate", "9", "--batch-size", "8"],
            2,
            &["--accumulate 9 leaves", "use at most 8"],
        ),
        (
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "3",
                "--accumulate",
                "4",
                "--global-batch-size",
                "10",
            ],
            2,
            &["--accumulate 4 leaves", "use at most 3"],
        ),
        (
            &["train", "mnist", "--shards", "4"],
            2,
            &["--shards is for --deterministic shards"],
        ),
        (
            &["train", "mnist", "--gradient-type", "powersgd"],
            2,
            &["--gradient-type", "one of  f32, bf16, f16"],
        ),
        (
            &["train", "mnist", "--keep", "4"],
            2,
            &["--keep is for resumable checkpoints", "--save-every"],
        ),
        (
            &["train", "linear", "--keep", "4"],
            2,
            &["--keep is for resumable checkpoints"],
        ),
        (
            &[
                "train",
                "mnist",
                "--deterministic",
                "ranks",
                "--algorithm",
                "fastest",
            ],
            2,
            &["--algorithm fastest", "--deterministic ranks"],
        ),
        (
            &[
                "compare",
                "mnist",
                "--deterministic",
                "ranks",
                "--algorithm",
                "fastest",
            ],
            2,
            &["--algorithm fastest", "--deterministic ranks"],
        ),
        (
            &["train", "mnist", "--data", ""],
            2,
            &["the data folder's name is empty", "--to data/mnist "],
        ),
        (
            &["train", "mnist", "--resume", "", "--output-dir", "x"],
            2,
            &["--resume needs a value"],
        ),
        (
            &["train", "mnist", "--init", ""],
            2,
            &["--init needs a value"],
        ),
        (
            &["train", "resnet18", "--data", ""],
            2,
            &["the data folder's name is empty", "--to data/cifar10 "],
        ),
        (
            &["train", "mnist", "--data", "my digits"],
            2,
            &["phalanx download mnist --to 'my digits' "],
        ),
        (
            &["train", "mobilenetv2", "--data", "it's"],
            2,
            &["phalanx download cifar10 --to \"it's\" "],
        ),
        (
            &["train", "mnist", "--data", "d", "--download", "nonsense"],
            2,
            &["--download \"nonsense\" is not a web address"],
        ),
        (
            &["download", "mnist", "--from", "nonsense"],
            2,
            &["--from \"nonsense\" is not a web address", "https://"],
        ),
        (
            &["download", "mnist", "--to", "/dev/null/x"],
            2,
            &["/dev/null is a file, not a folder"],
        ),
        // Nobody listens there.
        (
            &[
                "download",
                "cifar10",
                "--to",
                "new/folder",
                "--from",
                "http://localhost:1/\u{e4}",
            ],
            1,
            &["no source gave cifar-10-python.tar.gz"],
        ),
        (
            &[
                "predict",
                "none.pt",
                "--data",
                "synthetic",
                "--output",
                "no/x",
            ],
            2,
            &["--output no/x: there is no folder no"],
        ),
        (
            &["predict", "none.pt", "--data", "synthetic", "--output", "."],
            2,
            &["--output .: it is a folder"],
        ),
        (
            &["export", "none.pt", "--to", "no/x.pt"],
            2,
            &["--to no/x.pt: there is no folder no"],
        ),
        (
            &["launch", "./my tool.py"],
            2,
            &["cannot read ./my tool.py"],
        ),
        (
            &["train", "mnist", "--epochs", "-1"],
            2,
            &["--epochs cannot be \"-1\"", "from 0 up"],
        ),
        (
            &[
                "train",
                "mnist",
                "--nproc-per-node",
                "2",
                "--data",
                "pictures",
            ],
            2,
            &["pictures"],
        ),
    ] {
        let (got, out, err) = run(args, dir.path());
        assert_eq!(got, code, "{args:?}\n{out}\n{err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: no \"{word}\" in\n{err}");
        }
        assert_eq!(
            err.matches("error: ").count(),
            1,
            "one error is enough: {err}"
        );
        assert!(!err.contains("panicked"), "{err}");
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("folder").count(),
        0,
        "a mistake leaves no files"
    );
}

/// However the ranks are started, and without a word of flight recorders.
#[test]
fn an_output_folder_that_cannot_be_is_a_mistake() {
    let dir = folder();
    std::fs::write(dir.path().join("afile"), "").expect("written");
    let phalanx_path = env!("CARGO_BIN_EXE_phalanx");
    for (output, said) in [
        ("afile", "afile is a file, not a folder"),
        ("afile/x", "afile is a file, not a folder"),
        ("/dev/null", "/dev/null is a file, not a folder"),
        ("/proc/x", "cannot create folder /proc/x"),
        ("/proc", "cannot write into /proc"),
    ] {
        for start in [
            "train linear".to_owned(),
            "train mnist --data synthetic:64".to_owned(),
            "train mnist --data synthetic:64 --nproc-per-node 2".to_owned(),
            "compare mnist --data synthetic:64".to_owned(),
            format!("launch --nproc-per-node 2 -- {phalanx_path} train linear"),
        ] {
            let mut args: Vec<&str> = start.split(' ').collect();
            let at = match start.starts_with("compare") {
                true => 1,
                false => args.len(),
            };
            args.splice(at..at, ["--output-dir", output]);
            let (code, _, err) = run(&args, dir.path());
            assert_eq!(code, 2, "{args:?}: {err}");
            assert!(err.contains(&format!("error: {said}")), "{args:?}: {err}");
            assert!(err.contains("another folder with --output-dir"), "{err}");
            assert!(!err.contains("flight"), "{args:?}: {err}");
        }
    }
    let left = std::fs::read_dir(dir.path()).expect("folder").count();
    assert_eq!(left, 1, "a mistake leaves no files");
}

/// What is not the default is on the screen and in the summary.
#[test]
fn how_gradients_are_exchanged_is_reported() {
    let train = "train mnist --epochs 1 --data synthetic:128 --threads 1 --output-dir out";
    for (flags, told, gradient_type, deterministic) in [
        ("", None, "f32", "ranks"),
        (
            "--algorithm fastest",
            Some("exchange deterministic off"),
            "f32",
            "off",
        ),
        (
            "--gradient-type bf16 --deterministic off",
            Some("exchange gradients travel as bf16, deterministic off"),
            "bf16",
            "off",
        ),
        (
            "--deterministic shards --global-batch-size 64 --algorithm fastest",
            Some("exchange deterministic shards"),
            "f32",
            "shards",
        ),
    ] {
        let dir = folder();
        let args: Vec<&str> = train.split(' ').chain(flags.split_whitespace()).collect();
        let (_, err) = succeed(&args, dir.path());
        let line = err.lines().find(|line| line.starts_with("exchange "));
        assert_eq!(line, told, "{flags}: {err}");
        let summary = summary(&dir.path().join("out"));
        assert_eq!(summary["gradient_type"], gradient_type, "{flags}");
        assert_eq!(summary["deterministic"], deterministic, "{flags}");
    }
}

/// A level that means nothing is said to be none, once, and ends nothing.
#[test]
fn a_log_level_that_means_nothing_is_told_once() {
    for (level, warned) in [("nonsense", 1), ("Debug", 0), ("off", 0), ("", 0)] {
        for (ranks, launched) in [("1", false), ("2", false), ("2", true)] {
            let dir = folder();
            let phalanx_path = env!("CARGO_BIN_EXE_phalanx");
            let train = "train linear --iterations 50";
            let line = match launched {
                true => format!("launch --nproc-per-node {ranks} -- {phalanx_path} {train}"),
                false => format!("{train} --nproc-per-node {ranks}"),
            };
            let args: Vec<&str> = line.split(' ').collect();
            let output = finish(phalanx(&args, dir.path()).env("PHALANX_LOG", level));
            let err = text(&output.stderr);
            assert!(output.status.success(), "{err}");
            let told = format!("PHALANX_LOG cannot be \"{level}\"");
            assert_eq!(err.matches(&told).count(), warned, "{line}: {err}");
        }
    }
}

/// Runs two ranks that are started with different arguments.
fn unlike(dir: &Path, rank_0: &str, rank_1: &str) -> (i32, String) {
    let phalanx = env!("CARGO_BIN_EXE_phalanx");
    let common = "--data synthetic:64 --epochs 1 --threads 1 --output-dir out";
    let script = format!(
        "if [ $RANK = 0 ]; then exec {phalanx} train mnist {common} {rank_0}; \
         else exec {phalanx} train mnist {common} {rank_1}; fi"
    );
    let (code, _, err) = run(
        &["launch", "--nproc-per-node", "2", "--", "sh", "-c", &script],
        dir,
    );
    (code, err)
}

#[test]
fn different_arguments_or_data_are_named() {
    for (a, b, words) in [
        ("--lr 0.1", "--lr 0.2", ["--lr 0.1", "--lr 0.2"]),
        ("--seed 1", "--seed 2", ["--seed 1", "--seed 2"]),
        (
            "--bucket-cap-mb 1",
            "",
            ["--bucket-cap-mb 1", "no --bucket-cap-mb"],
        ),
        // Each of these decides whether a rank takes part in a collective.
        (
            "--deterministic shards --global-batch-size 16 --log-interval 1",
            "--deterministic shards --global-batch-size 16 --log-interval 2",
            ["--log-interval 1", "--log-interval 2"],
        ),
        ("--save-every 1", "", ["--save-every 1", "no --save-every"]),
        (
            "--save-every 1 --resume auto",
            "--save-every 1",
            ["--resume auto", "no --resume"],
        ),
        ("--document", "", ["--document on", "--document off"]),
    ] {
        let dir = folder();
        let (code, err) = unlike(dir.path(), a, b);
        assert_eq!(code, 2, "{a} against {b}: {err}");
        for word in words {
            assert!(
                err.contains(word),
                "{a} against {b}: no \"{word}\" in {err}"
            );
        }
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    for world in ["1", "2"] {
        let dir = folder();
        let full = std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("/dev/full");
        let output = finish(
            phalanx(&["train", "linear", "--nproc-per-node", world], dir.path())
                .stdout(Stdio::from(full)),
        );
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{world} ranks: {err}");
        assert!(
            err.contains("standard output") && err.contains("No space left"),
            "{err}"
        );
    }
}

#[test]
fn an_earlier_runs_results_do_not_survive_beside_new_metrics() {
    let dir = folder();
    let out = dir.path().join("out");
    std::fs::create_dir(&out).expect("folder");
    for name in ["summary.json", ".summary.json.Ab12Cd.tmp", "notes.txt"] {
        std::fs::write(out.join(name), "old").expect("written");
    }
    let (code, _, _) = run(
        &[
            "train",
            "mnist",
            "--lr",
            "1e30",
            "--overwrite",
            "--data",
            "synthetic:512",
            "--output-dir",
            "out",
        ],
        dir.path(),
    );
    assert_eq!(code, 1);
    let mut left: Vec<String> = std::fs::read_dir(&out)
        .expect("folder")
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    left.sort();
    // Its name has the time and the process.
    left.retain(|name| !name.starts_with("events.out.tfevents."));
    assert_eq!(
        left,
        [
            ".tracker-tensorboard.lock",
            "events.jsonl",
            "flight",
            "metrics.jsonl",
            "notes.txt",
            "report.html",
            "run.json"
        ],
        "only what is not ours stays, and what tells why this one failed"
    );
    let events = std::fs::read_to_string(out.join("events.jsonl")).expect("events");
    let last: Value = serde_json::from_str(events.lines().last().expect("an event")).expect("JSON");
    assert_eq!(last["status"], "failed");
    let error = last["error"].as_str().expect("a text");
    assert!(error.contains("the loss became"), "{error}");
}

#[test]
fn interrupt_of_a_single_rank_has_the_contracts_code() {
    let dir = folder();
    let mut child = phalanx(
        &[
            "train",
            "mnist",
            "--epochs",
            "100000",
            "--data",
            "synthetic:64",
            "--log-interval",
            "1",
            "--output-dir",
            "out",
        ],
        dir.path(),
    )
    .spawn()
    .expect("phalanx starts");
    let began = Instant::now();
    while !dir.path().join("out/metrics.jsonl").exists() {
        assert!(began.elapsed() < LIMIT, "training did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(child.id(), "INT");
    let status = child.wait().expect("ends");
    assert_eq!(status.code(), Some(130));
}

#[test]
fn diverged_training_is_an_error() {
    let dir = folder();
    let (code, _, err) = run(
        &[
            "train",
            "mnist",
            "--nproc-per-node",
            "2",
            "--lr",
            "1e30",
            "--data",
            "synthetic:512",
            "--output-dir",
            "out",
        ],
        dir.path(),
    );
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains("the loss became") && err.contains("--lr"),
        "{err}"
    );
}

#[test]
fn a_folder_takes_one_training_at_a_time() {
    let dir = folder();
    let (child, marker, rank) = start_endless(dir.path(), "one-a-folder", &[], 0);
    let args = [
        "train",
        "linear",
        "--iterations",
        "2",
        "--output-dir",
        "out",
    ];
    let (code, _, err) = run(&args, dir.path());
    let before = std::fs::read_to_string(dir.path().join("out/metrics.jsonl"));
    signal(child.id(), "KILL");
    crate::support::wait(child);
    all_gone(&marker, Instant::now());
    assert_eq!(code, 2, "{err}");
    let who = format!("error: another training (process {rank}) writes into out");
    assert!(err.contains(&who), "{err}");
    let before = before.expect("metrics");
    assert!(before.contains("\"loss\""), "{before}");
    // A run that was killed holds no lock. It may have left its best weights.
    succeed(&[&args[..], &["--overwrite"]].concat(), dir.path());
    assert_eq!(summary(&dir.path().join("out"))["recipe"], "linear");
}

/// Few digits to train on and many to test on, of noise.
fn digits(dir: &Path, tested: u32) {
    let data = dir.join("digits");
    std::fs::create_dir(&data).expect("a folder");
    let header =
        |numbers: &[u32]| -> Vec<u8> { numbers.iter().flat_map(|n| n.to_be_bytes()).collect() };
    for (set, samples) in [("train", 64), ("t10k", tested)] {
        let mut images = header(&[2051, samples, 28, 28]);
        images.extend((0..samples * 28 * 28).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8));
        let mut labels = header(&[2049, samples]);
        labels.extend((0..samples).map(|i| (i % 10) as u8));
        std::fs::write(data.join(format!("{set}-images-idx3-ubyte")), images).expect("written");
        std::fs::write(data.join(format!("{set}-labels-idx1-ubyte")), labels).expect("written");
    }
}

/// A training in which rank 0 alone tests, for longer than a collective may take.
fn tested_by_rank_0(
    dir: &Path,
    tested: u32,
    timeout: &str,
    more: &[&str],
) -> std::process::Command {
    digits(dir, tested);
    let args = "train mnist --data digits --nproc-per-node 2 --epochs 1 --batch-size 8 --threads 1 \
                --document --output-dir out --timeout";
    let mut command = phalanx(&[], dir);
    command
        .args(args.split_whitespace())
        .arg(timeout)
        .args(more);
    command
}

#[test]
fn a_rank_may_be_busy_longer_than_a_collective_may_take() {
    for (timeout, tested, more) in [
        ("1", 12_000, "shm"),
        ("3", 25_000, "tcp"),
        ("1", 12_000, "thread"),
    ] {
        let dir = folder();
        let more = ["--transport", more];
        let mut command = tested_by_rank_0(dir.path(), tested, timeout, &more);
        let (code, _, err) = crate::support::ended(command.spawn().expect("phalanx starts"));
        assert_eq!(code, 0, "{more:?}: {err}");
        let tested = summary(&dir.path().join("out"))["test_s"].as_f64();
        let limit: f64 = timeout.parse().expect("a number");
        assert!(
            tested > Some(limit),
            "too quick to show anything: {tested:?}"
        );
    }
}

/// Whatever it was busy with, and however long that may take.
#[test]
fn a_rank_that_is_stopped_while_it_is_busy_ends_the_job() {
    at_once(&["shm", "tcp"], |transport| {
        let dir = folder();
        let mut command = tested_by_rank_0(dir.path(), 100_000, "3", &["--transport", transport]);
        let marker = format!("PHALANX_TEST=busy-{transport}-{}", std::process::id());
        let (key, value) = marker.split_once('=').expect("marker");
        let child = command.env(key, value).spawn().expect("phalanx starts");
        // The recorders of a living job say what its ranks are doing.
        let recorder = dir.path().join("out/flight/rank-0.json");
        crate::support::eventually("rank 0 evaluates", || {
            signal_if_answered(child.id());
            let text = std::fs::read_to_string(&recorder).unwrap_or_default();
            text.contains("\"evaluating\"")
        });
        let rank = |(pid, rank): (u32, Option<usize>)| (rank == Some(0)).then_some(pid);
        let rank = marked(&marker).into_iter().find_map(rank).expect("rank 0");
        signal(rank, "STOP");
        let stopped = Instant::now();
        let (code, _, err) = crate::support::ended(child);
        assert_eq!(code, 4, "{err}");
        assert!(stopped.elapsed() < SOON, "{:?}", stopped.elapsed());
        assert!(
            err.contains(&format!("rank 0 (pid {rank}) is stopped")),
            "{err}"
        );
        assert!(err.contains("was in evaluating for"), "{err}");
        all_gone(&marker, Instant::now());
    });
}

/// Asks a launcher for its ranks' recorders, as soon as that would not kill it.
fn signal_if_answered(pid: u32) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    if caught.is_some_and(|mask| mask >> (signal_hook::consts::SIGUSR2 - 1) & 1 == 1) {
        signal(pid, "USR2");
    }
}

/// Nothing is lost any more: ranks that are done wait for a slow disk longer than for a peer.
#[test]
fn files_at_the_end_may_take_longer_than_a_collective() {
    let dir = folder();
    // A disk that takes three seconds.
    let slow = dir.path().join("profile.0.json");
    let made = std::process::Command::new("mkfifo").arg(&slow).status();
    assert!(made.expect("mkfifo").success());
    let reader = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3));
        std::fs::read_to_string(slow).expect("read")
    });
    let args = "train mnist --nproc-per-node 2 --epochs 1 --data synthetic:96 --batch-size 8 --threads 1 \
                --timeout 1 --profile profile --output-dir out";
    let args: Vec<&str> = args.split_whitespace().collect();
    let (_, err) = succeed(&args, dir.path());
    assert!(err.contains("equal on all 2 ranks"), "{err}");
    assert!(reader.join().expect("no panic").contains("traceEvents"));
    assert_eq!(summary(&dir.path().join("out"))["world_size"], 2);
}

#[test]
fn damaged_data_are_a_mistake_that_leaves_a_good_runs_folder_alone() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("dd")).expect("a folder");
    // Headers of as many images and labels as there should be, and nothing after them.
    for (name, header) in [
        ("train-images-idx3-ubyte", &[0u32, 60_000, 28, 28][..]),
        ("train-labels-idx1-ubyte", &[0, 60_000]),
        ("t10k-images-idx3-ubyte", &[0, 10_000, 28, 28]),
        ("t10k-labels-idx1-ubyte", &[0, 10_000]),
    ] {
        let dimensions = header.len() as u32 - 1;
        let bytes: Vec<u8> = std::iter::once(0x0800 + dimensions)
            .chain(header[1..].iter().copied())
            .flat_map(u32::to_be_bytes)
            .collect();
        std::fs::write(dir.path().join("dd").join(name), bytes).expect("written");
    }
    for ranks in ["1", "2"] {
        let args = ["train", "mnist", "--data", "dd", "--output-dir", "out"];
        let more = ["--nproc-per-node", ranks, "--overwrite"];
        let (code, _, err) = run(&[&args[..], &more].concat(), dir.path());
        assert_eq!(code, 2, "{err}");
        let told = "try     phalanx download mnist --to dd --force";
        assert!(err.contains(told), "{err}");
        assert_eq!(err.matches("error: ").count(), 1, "{err}");
        assert!(!err.contains("inspect"), "{err}");
        assert!(!dir.path().join("out/flight").exists(), "{err}");
    }
}

#[test]
fn half_of_what_a_launcher_says_is_refused() {
    let dir = folder();
    let args = ["train", "linear", "--iterations", "1", "--output-dir", "o"];
    let with = |names: &[&str], more: &[&str]| {
        let mut command = phalanx(&[&args[..], more].concat(), dir.path());
        command.envs(names.iter().map(|name| (*name, "4")));
        let output = finish(&mut command);
        (output.status.code(), text(&output.stderr))
    };
    for beside in ["LOCAL_RANK", "MASTER_ADDR"] {
        let (code, err) = with(&["WORLD_SIZE", beside], &[]);
        assert_eq!(code, Some(2), "{err}");
        let told = format!("WORLD_SIZE=4 and {beside} but not RANK");
        assert!(err.contains(&told), "{err}");
    }
    // Left behind by some tool, or the number of ranks was typed.
    for (names, more) in [
        (&["WORLD_SIZE"][..], &[][..]),
        (&["LOCAL_RANK", "MASTER_ADDR"], &["--overwrite"]),
        (
            &["WORLD_SIZE", "MASTER_ADDR"],
            &["--overwrite", "--nproc-per-node", "2"],
        ),
    ] {
        let (code, err) = with(names, more);
        assert_eq!(code, Some(0), "{err}");
    }
}

/// A training of a moment, for what comes before it.
const SHORT: [&str; 6] = ["train", "linear", "--iterations", "1", "--output-dir", "o"];

/// The variables of each engine for node `node` of two on this host.
fn node_variables(engine: &str, node: usize) -> Vec<(&'static str, String)> {
    let set = |names: &[(&'static str, &str)]| -> Vec<_> {
        let text = |value: &str| value.replace("NODE", &node.to_string());
        names
            .iter()
            .map(|(name, value)| (*name, text(value)))
            .collect()
    };
    match engine {
        "Kubeflow" => set(&[
            ("PET_NNODES", "2"),
            ("PET_NODE_RANK", "NODE"),
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_MASTER_ADDR", "localhost"),
            ("JOB_COMPLETION_INDEX", "NODE"),
        ]),
        "SkyPilot" => set(&[
            ("SKYPILOT_NUM_NODES", "2"),
            ("SKYPILOT_NODE_RANK", "NODE"),
            ("SKYPILOT_NODE_IPS", "127.0.0.1\n127.0.0.1"),
        ]),
        "ModelArts" => set(&[
            ("VC_WORKER_NUM", "2"),
            ("VC_TASK_INDEX", "NODE"),
            ("VC_WORKER_HOSTS", "127.0.0.1,localhost"),
            ("MA_NUM_HOSTS", "2"),
            ("MA_NUM_GPUS", "0"),
        ]),
        // One task a node.
        "Slurm" => set(&[
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_NNODES", "2"),
            ("SLURM_PROCID", "NODE"),
            ("SLURM_NODEID", "NODE"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "localhost"),
        ]),
        "Indexed Job" => set(&[
            ("JOB_COMPLETION_INDEX", "NODE"),
            ("MASTER_ADDR", "127.0.0.1"),
        ]),
        "PyTorchJob" => set(&[
            ("RANK", "NODE"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
        ]),
        _ => set(&[]),
    }
}

#[test]
fn a_training_on_several_nodes_is_that_of_one_with_all_ranks() {
    let dir = folder();
    let token = dir.path().join("token");
    succeed(
        &["token", "--out", token.to_str().expect("a path")],
        dir.path(),
    );
    let train = |out: &str, more: &[&str]| {
        let size = [
            "--data",
            "synthetic:256",
            "--epochs",
            "1",
            "--output-dir",
            out,
        ];
        phalanx(&[&["train", "mnist"], &size[..], more].concat(), dir.path())
    };
    let sha = |out: &str| summary(&dir.path().join(out))["weights_sha256"].clone();
    let one = finish(&mut train("one", &["--nproc-per-node", "4"]));
    assert!(one.status.success(), "{}", text(&one.stderr));
    for (engine, more) in [
        (
            "typed",
            &["--nnodes", "2", "--master-addr", "127.0.0.1"][..],
        ),
        ("Kubeflow", &[]),
        ("SkyPilot", &[]),
        ("ModelArts", &[]),
        ("Slurm", &[]),
        ("Indexed Job", &["--nnodes", "2"]),
        ("PyTorchJob", &["--nnodes", "2"]),
        ("PyTorchJob", &["launch"]),
        ("SkyPilot", &["launch"]),
    ] {
        let port = free_port().to_string();
        let nodes: Vec<_> = ["0", "1"]
            .map(|node| {
                let number = node.parse().expect("a number");
                let mut flags = vec!["--master-port", &port];
                if engine == "typed" {
                    flags.extend(["--node-rank", node]);
                }
                if engine != "Kubeflow" {
                    flags.extend(["--nproc-per-node", "2"]);
                }
                if engine == "ModelArts" {
                    // As its boot command gets them; the numbers are those of nodes.
                    flags.extend(["--rank", node, "--world_size", "2"]);
                    flags.extend(["--init_method=tcp://127.0.0.1:1", "--num_gpus", "-1"]);
                    flags.extend(["--train_url", "/none", "--data_url=/none"]);
                }
                let mut command = match more {
                    ["launch"] => {
                        let mut command = phalanx(&["launch"], dir.path());
                        let program = train(engine, &["--overwrite"]);
                        command.args(flags).arg("--").arg(program.get_program());
                        command.args(program.get_args());
                        command
                    }
                    _ => {
                        let mut command = train(engine, more);
                        command.args(flags);
                        command
                    }
                };
                command
                    .env("PHALANX_TOKEN_FILE", &token)
                    .envs(node_variables(engine, number));
                std::thread::spawn(move || finish(&mut command))
            })
            .into_iter()
            .map(|node| node.join().expect("a node"))
            .collect();
        for (node, output) in nodes.iter().enumerate() {
            let err = text(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{engine} {node}: {err}");
            let says_place = err.contains(&format!("node {node} of 2 ("));
            // Flags and PET_*, which stand for them, are no engine.
            let is_engine = !["typed", "Kubeflow"].contains(&engine);
            assert_eq!(says_place, is_engine, "{engine} {node}: {err}");
            let ignored =
                "--rank, --world-size, --init-method, --num-gpus, --train-url, --data-url";
            let ignored = format!("flags are ignored (--allow-unknown): {ignored}\n");
            let times = usize::from(engine == "ModelArts" && node == 0);
            assert_eq!(
                err.matches(&ignored).count(),
                times,
                "{engine} {node}: {err}"
            );
        }
        let told = text(&nodes[0].stderr);
        assert!(told.contains("4 ranks"), "{engine}: {told}");
        assert_eq!(sha(engine), sha("one"), "{engine}");
    }
}

/// The boot command, with what ModelArts appends to it.
#[test]
fn the_modelarts_recipe_leaves_typed_folders_alone() {
    let dir = folder();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/cluster/modelarts.sh");
    let program = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let path = std::env::var("PATH").expect("a PATH");
    let path = format!("{}:{path}", program.parent().expect("a folder").display());
    let run = |typed: &str, variables: &[(&str, &str)]| {
        let mut command = std::process::Command::new("sh");
        for (name, value) in phalanx(&[], dir.path()).get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let line = format!("mnist --data synthetic:128 --epochs 1 {typed} --num_gpus=8");
        command.arg(&recipe).args(line.split_whitespace());
        command
            .env("PATH", &path)
            .envs([("VC_TASK_INDEX", "0"), ("VC_WORKER_NUM", "1")]);
        command
            .current_dir(dir.path())
            .envs(variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = finish(&mut command);
        (output.status.code(), text(&output.stderr))
    };
    for (typed, variables, written) in [
        ("--train_url a", &[][..], Some("a")),
        ("--train_url none", &[("RUN", "b")], Some("b")),
        (
            "--output_dir c --train_url none",
            &[("RUN", "none")],
            Some("c"),
        ),
        (
            "--output-dir=d",
            &[("RUN", "none"), ("RANKS", "1")],
            Some("d"),
        ),
        ("--train_url obs://bucket/x", &[], None),
    ] {
        let (code, err) = run(typed, variables);
        let Some(written) = written else {
            assert!(
                code == Some(2) && err.contains("--resume auto looks for"),
                "{err}"
            );
            continue;
        };
        assert_eq!(code, Some(0), "{typed}: {err}");
        let ranks = if typed.ends_with("=d") { 1 } else { 2 };
        assert_eq!(summary(&dir.path().join(written))["world_size"], ranks);
    }
    assert!(!dir.path().join("none").exists() && !dir.path().join("obs:").exists());
}

#[test]
fn flags_about_nodes_that_contradict_are_refused() {
    let dir = folder();
    for (more, variables, words) in [
        (
            &["--node-rank", "1"][..],
            &[][..],
            "--node-rank 1 is outside",
        ),
        (
            &["--master-addr", "h"],
            &[],
            "--master-addr requires --nnodes",
        ),
        (&["--nnodes", "2"], &[], "requires --node-rank"),
        (
            &["--nnodes", "2", "--node-rank", "0"],
            &[],
            "requires --master-addr",
        ),
        (
            &[
                "--nnodes",
                "2",
                "--node-rank",
                "0",
                "--master-addr",
                "127.0.0.1",
            ],
            &[],
            "phalanx token --out job.token",
        ),
        (
            &["--nnodes", "2", "--world-size", "2"],
            &[],
            "--nnodes 2 cannot be combined",
        ),
        (
            &["--nnodes", "2"],
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")],
            "--nnodes contradicts",
        ),
        (
            &[
                "--nnodes",
                "2",
                "--node-rank",
                "0",
                "--master-addr",
                "h",
                "--transport",
                "thread",
            ],
            &[],
            "--transport thread runs all ranks in one process",
        ),
    ] {
        let mut command = phalanx(&[&SHORT[..], more].concat(), dir.path());
        let output = finish(command.envs(variables.iter().copied()));
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {err}");
        assert!(err.contains(words), "{more:?}: {err}");
        assert!(!dir.path().join("o").exists(), "{err}");
    }
}

#[test]
fn a_training_on_one_of_several_nodes_is_refused_unless_it_is_meant() {
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let several: [(Variables<'_>, &str); 5] = [
        (
            &[("PET_NNODES", "2"), ("PET_NODE_RANK", "0")],
            "requires --master-addr",
        ),
        (
            &[("SKYPILOT_NUM_NODES", "2"), ("SKYPILOT_NODE_RANK", "0")],
            "--nnodes \"$SKYPILOT_NUM_NODES\"",
        ),
        (
            &[("VC_WORKER_NUM", "2"), ("VC_TASK_INDEX", "0")],
            "--nnodes \"$VC_WORKER_NUM\"",
        ),
        (&[("JOB_COMPLETION_INDEX", "1")], "--nnodes PODS"),
        (
            &[("SLURM_JOB_NUM_NODES", "2"), ("SLURM_PROCID", "0")],
            "srun phalanx train",
        ),
    ];
    let dir = folder();
    for (variables, instead) in several {
        let run = |more: &[&str]| {
            let mut command = phalanx(&[&SHORT[..], more].concat(), dir.path());
            let output = finish(command.envs(variables.iter().copied()));
            (output.status.code(), text(&output.stderr))
        };
        // The number of ranks here says nothing of the other nodes.
        for more in [&[][..], &["--nproc-per-node", "2"]] {
            let (code, err) = run(more);
            assert_eq!(code, Some(2), "{err}");
            let (name, value) = variables[0];
            for words in [format!("{name}={value}"), instead.to_owned()] {
                assert!(err.contains(&words), "{words}: {err}");
            }
            assert!(!dir.path().join("o").exists(), "{err}");
        }
        let (code, err) = run(&["--world-size", "1"]);
        assert_eq!(code, Some(0), "{err}");
        std::fs::remove_dir_all(dir.path().join("o")).expect("the run's folder");
    }
    // One node says so, too; PET_NPROC_PER_NODE counts as under `launch`.
    for variables in [
        &[
            ("PET_NNODES", "1"),
            ("JOB_COMPLETION_INDEX", "0"),
            ("PET_NPROC_PER_NODE", "2"),
        ][..],
        &[("SKYPILOT_NUM_NODES", "1"), ("SKYPILOT_NODE_RANK", "0")],
        &[("VC_WORKER_NUM", "1"), ("VC_TASK_INDEX", "0")],
        &[
            ("SLURM_JOB_NUM_NODES", "1"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_PROCID", "0"),
        ],
    ] {
        let mut command = phalanx(&[&SHORT[..], &["--overwrite"]].concat(), dir.path());
        let output = finish(command.envs(variables.iter().copied()));
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{variables:?}: {err}");
        let ranks = if variables[0].0 == "PET_NNODES" { 2 } else { 1 };
        assert_eq!(
            summary(&dir.path().join("o"))["world_size"],
            ranks,
            "{variables:?}"
        );
    }
}

#[test]
fn the_number_of_ranks_is_never_dropped() {
    let dir = folder();
    let launch = [
        "launch",
        "--nproc-per-node",
        "2",
        env!("CARGO_BIN_EXE_phalanx"),
    ];
    let with = |more: &[&str]| run(&[&launch[..], &SHORT, more].concat(), dir.path());
    let (code, _, err) = with(&["--nproc-per-node", "4"]);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("--nproc-per-node 4 contradicts"), "{err}");
    let (code, _, err) = with(&["--nproc-per-node", "2"]);
    assert_eq!(code, 0, "{err}");
    // Two nodes with two tasks on each, and the user wants four ranks on each.
    let mut command = phalanx(
        &[&SHORT[..], &["--nproc-per-node", "4"]].concat(),
        dir.path(),
    );
    command.envs([
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "3"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_NNODES", "2"),
        ("SLURM_JOB_NODELIST", "a[1-2]"),
    ]);
    let output = finish(&mut command);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("srun --ntasks-per-node=4"), "{err}");
}

/// `phalanx` as `mpirun` starts it, as one of `here` ranks on this host of 2.
fn as_mpirun(rank: usize, here: usize, dir: &Path) -> Command {
    let mut command = phalanx(&SHORT, dir);
    let local = (rank % here).to_string();
    command
        .env("OMPI_COMM_WORLD_SIZE", "2")
        .env("OMPI_COMM_WORLD_RANK", rank.to_string())
        .env("OMPI_COMM_WORLD_LOCAL_SIZE", here.to_string())
        .env("OMPI_COMM_WORLD_LOCAL_RANK", local)
        .env("PMIX_NAMESPACE", dir);
    command
}

/// Ranks with other processors or another build train; what follows is said once, before the first step.
#[test]
fn hosts_that_differ_are_named_before_the_first_step() {
    let dir = folder();
    let build = dir.path().join("phalanx");
    std::fs::copy(env!("CARGO_BIN_EXE_phalanx"), &build).expect("a copy");
    let mut appended = std::fs::File::options().append(true).open(&build);
    std::io::Write::write_all(appended.as_mut().expect("the copy"), b"another build")
        .expect("room");
    drop(appended);
    succeed(&["token", "--out", "token"], dir.path());
    for (has_launchers, isa, program, wanted) in [
        (true, "auto", None, [false, false]),
        (true, "scalar", None, [true, false]),
        (false, "scalar", Some(&build), [true, true]),
        (true, "auto", Some(&build), [false, true]),
    ] {
        let port = free_port().to_string();
        let nodes = ["0", "1"].map(|node| {
            let is_other = node == "1";
            let mut command = as_mpirun(is_other.into(), 2, dir.path());
            command.arg("--overwrite");
            if has_launchers {
                let place = ["--nnodes", "2", "--node-rank", node, "--master-addr"];
                let more = ["127.0.0.1", "--master-port", &port, "--token-file", "token"];
                command = phalanx(
                    &[&SHORT[..], &["--overwrite"], &place, &more].concat(),
                    dir.path(),
                );
            }
            if let (Some(program), true) = (program, is_other) {
                let mut other = Command::new(program);
                other.args(command.get_args()).current_dir(dir.path());
                let set = command.get_envs();
                other.envs(set.filter_map(|(name, value)| Some((name, value?))));
                other.stdout(Stdio::piped()).stderr(Stdio::piped());
                command = other;
            }
            command.args(["--precision", "bf16"]);
            command.env("PHALANX_ISA", if is_other { isa } else { "auto" });
            command.spawn().expect("phalanx starts")
        });
        let [first, second] = nodes.map(ended);
        assert_eq!((first.0, second.0), (0, 0), "{first:?} {second:?}");
        let said = first.2;
        let lines = [
            "warning: the processors differ: ",
            "warning: the program files differ: ",
            "warning: the processors multiply bf16 in different ways: ",
        ];
        let in_two_ways = wanted[0] && Family::here() != Family::Other;
        for (begin, is_wanted) in lines.into_iter().zip([wanted[0], wanted[1], in_two_ways]) {
            let found: Vec<&str> = said.lines().filter(|line| line.contains(begin)).collect();
            assert_eq!(found.len(), usize::from(is_wanted), "{begin}: {said}");
            let host = format!("host {}", phalanx_base::host_name());
            for part in found.iter().flat_map(|_| ["(rank 0, ", "(rank 1, ", &host]) {
                assert!(found[0].contains(part), "{part}: {said}");
            }
        }
        assert!(!second.2.contains("warning"), "{second:?}");
    }
}

#[test]
fn ranks_that_mpirun_starts_on_one_host_need_no_token() {
    let dir = folder();
    let second = as_mpirun(1, 2, dir.path()).spawn().expect("phalanx starts");
    // One of them behind a shell.
    let first = as_mpirun(0, 2, dir.path());
    let args: Vec<_> = first.get_args().map(OsStr::to_owned).collect();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "\"$0\" \"$@\"; exit $?"])
        .arg(first.get_program())
        .args(args);
    shell.envs(
        first
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    shell
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let output = finish(&mut shell);
    let (code, _, err) = ended(second);
    let all = text(&output.stdout) + &text(&output.stderr) + &err;
    assert_eq!((output.status.code(), code), (Some(0), 0), "{all}");
    assert_eq!(summary(&dir.path().join("o"))["world_size"], 2, "{all}");
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .expect("the folder")
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("phalanx-"))
        .flat_map(|entry| std::fs::read_dir(entry.path()).expect("its folder"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_limit_of_the_address_space_is_named() {
    let dir = folder();
    // One activation of such a batch takes 177 MB, the next one 302 MB.
    let small = "ulimit -v 200000; exec \"$0\" train mnist --data synthetic:8192 --batch-size 2048 --nproc-per-node \"$1\"";
    for ranks in ["1", "2"] {
        let mut shell = Command::new("sh");
        shell.args(["-c", small, env!("CARGO_BIN_EXE_phalanx"), ranks]);
        shell.current_dir(dir.path());
        shell.stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = finish(&mut shell);
        let err = text(&output.stderr);
        assert!(!output.status.success(), "{err}");
        assert!(
            err.contains("`ulimit -v` allows each process 195.3 MiB"),
            "{err}"
        );
    }
}

#[test]
fn the_host_of_rank_0_is_never_guessed() {
    let dir = folder();
    // No mpirun has started it, whether there is an MPI library or not.
    let mpi = as_mpirun(1, 1, dir.path());
    // Hydra's variables without its socket.
    let mut pmi = phalanx(&SHORT, dir.path());
    pmi.env("PMI_SIZE", "2").env("PMI_RANK", "1");
    for (mut command, want) in [
        (mpi, "Open MPI does not carry the job's token"),
        (pmi, "does not say on which host rank 0 runs"),
    ] {
        let (code, _, err) = ended(command.spawn().expect("phalanx starts"));
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(want), "{err}");
        assert!(err.contains("MASTER_ADDR"), "{err}");
    }
}
