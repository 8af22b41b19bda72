//! A training program of a user's own (`recipes/spirals.rs`, which `phalanx new` writes): the
//! command line that `phalanx::main` gives it, run as a person runs it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::programs::example;
use crate::support::{LIMIT, ended, phalanx, signal};

fn spirals(args: &[&str], dir: &Path) -> Command {
    program("spirals", args, dir)
}

/// The example `name` with `args` in `dir`, as `phalanx` of the other tests is run.
pub fn program(name: &str, args: &[&str], dir: &Path) -> Command {
    let mut command = as_phalanx(example(name), dir);
    command.args(args);
    command
}

/// A program in `dir`, with the environment and pipes of `phalanx` in the other tests.
pub fn as_phalanx(program: impl AsRef<OsStr>, dir: &Path) -> Command {
    let like = phalanx(&[], dir);
    let mut command = Command::new(program);
    command.current_dir(dir);
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn run(mut command: Command) -> (i32, String, String) {
    ended(command.spawn().expect("it starts"))
}

pub fn succeed(command: Command) -> String {
    let (code, out, err) = run(command);
    assert_eq!(code, 0, "{out}{err}");
    out + &err
}

fn summary(run: &Path) -> Value {
    let text = std::fs::read_to_string(run.join("summary.json")).expect("a summary");
    serde_json::from_str(&text).expect("JSON")
}

/// The three hashes that a run ends with.
fn hashes(run: &Path) -> [String; 3] {
    let summary = summary(run);
    ["weights_sha256", "optimizer_sha256", "metrics_sha256"]
        .map(|name| summary[name].as_str().expect("a hash").to_owned())
}

const SHARDS: [&str; 8] = [
    "--deterministic",
    "shards",
    "--global-batch-size",
    "60",
    "--epochs",
    "4",
    "--points",
    "900",
];

#[test]
fn it_trains_the_same_weights_alone_and_under_every_launcher() {
    let dir = tempfile::tempdir().expect("folder");
    let at = |name: &str| dir.path().join(name);
    let more: [(&str, &[&str]); 4] = [
        ("alone", &[]),
        ("two", &["--nproc-per-node", "2"]),
        ("three", &["--nproc_per_node=3", "--transport", "tcp"]),
        (
            "threads",
            &["--nproc-per-node", "2", "--transport", "thread"],
        ),
    ];
    for (name, more) in more {
        let args = [&SHARDS[..], more, &["--output-dir", name]].concat();
        let text = succeed(spirals(&args, dir.path()));
        assert!(text.contains("epoch 4: test loss"), "{text}");
    }
    let mut launched = phalanx(&["launch", "--nproc-per-node", "2", "--"], dir.path());
    launched.arg(example("spirals")).args(SHARDS);
    succeed({
        launched.args(["--output-dir", "launched"]);
        launched
    });
    let alone = hashes(&at("alone"));
    for name in ["two", "three", "threads", "launched"] {
        assert_eq!(hashes(&at(name)), alone, "{name}");
    }
    let summary = summary(&at("alone"));
    // A third would be chance.
    assert!(
        summary["accuracy"].as_f64().expect("one") > 0.5,
        "{summary}"
    );
    assert_eq!(summary["recipe"], "spirals");
}

/// Kills the program and its ranks at once when the first checkpoint is there.
fn kill_when_saved(child: &Child, run: &Path) {
    let began = Instant::now();
    let saved = || {
        let entries = std::fs::read_dir(run.join("checkpoints"));
        let mut entries = entries.into_iter().flatten().flatten();
        entries.any(|entry| entry.path().extension().is_some_and(|end| end == "json"))
    };
    while !saved() {
        assert!(began.elapsed() < LIMIT, "no checkpoint");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    signal(child.id(), "KILL");
}

#[test]
fn after_kill_9_it_resumes_to_the_same_weights() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [
        "--nproc-per-node",
        "2",
        "--points",
        "15000",
        "--epochs",
        "3",
    ];
    let saving = ["--save-every", "20", "--output-dir", "killed"];
    let killed = dir.path().join("killed");
    let child = spirals(&[&args[..], &saving].concat(), dir.path()).spawn();
    let child = child.expect("it starts");
    kill_when_saved(&child, &killed);
    ended(child);
    let again = [&args[..], &saving, &["--resume", "auto"]].concat();
    let text = succeed(spirals(&again, dir.path()));
    assert!(text.contains("resumed  after "), "{text}");
    let whole = [&args[..], &["--output-dir", "whole"]].concat();
    succeed(spirals(&whole, dir.path()));
    assert_eq!(hashes(&killed), hashes(&dir.path().join("whole")));
}

#[test]
fn a_stop_ends_it_where_it_is_and_nothing_after_runs() {
    let dir = tempfile::tempdir().expect("folder");
    let args = [
        "--stop-after",
        "3",
        "--output-dir",
        "stopped",
        "--nproc-per-node",
        "2",
    ];
    let text = succeed(spirals(&args, dir.path()));
    assert!(text.contains("stopped as asked after 3 steps"), "{text}");
    assert!(!text.contains("test loss"), "{text}");
    assert!(!dir.path().join("stopped/summary.json").exists());
}

#[test]
fn its_mistakes_are_told_as_those_of_train() {
    let dir = tempfile::tempdir().expect("folder");
    for (args, why) in [
        (&["--bogus"][..], "unexpected argument '--bogus'"),
        (&["--width", "much"], "invalid value 'much' for '--width"),
        (&["--epochs", "0"], "--epochs must be at least 1"),
        (&["--lr", "-1"], "--lr must be a number from 0 up"),
        (
            &["--resume", "auto"],
            "--resume auto looks for checkpoints in the --output-dir",
        ),
        (&["--points", "0"], "the training set has no samples"),
        (
            &["--deterministic", "shards"],
            "needs a --global-batch-size",
        ),
    ] {
        let (code, out, err) = run(spirals(args, dir.path()));
        assert_eq!(code, 2, "{args:?}: {out}{err}");
        assert!(err.contains(why), "{args:?}: {err}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("folder").collect();
    assert!(left.is_empty(), "{left:?}");
    let help = succeed(spirals(&["--help"], dir.path()));
    for text in [
        "--width <WIDTH>",
        "--epochs",
        "[default: 20]",
        "--nproc-per-node",
    ] {
        assert!(help.contains(text), "{text}: {help}");
    }
}

/// As under a platform that appends its own flags.
#[test]
fn it_ignores_flags_that_it_does_not_have_and_names_them_once() {
    let dir = tempfile::tempdir().expect("folder");
    let short = ["--epochs", "1", "--points", "300", "--nproc_per_node", "2"];
    let appended = "--data_url /none --train_url=out --rank 0 --world_size 1 --init_method tcp://h:1 --num_gpus -1";
    let appended: Vec<&str> = appended.split(' ').collect();
    let with = |more: &[&str]| spirals(&[&short[..], more, &appended].concat(), dir.path());
    let mut command = with(&[]);
    command.envs([("VC_TASK_INDEX", "0"), ("VC_WORKER_NUM", "1")]);
    let text = succeed(command);
    let ignored = "warning: flags are ignored (--allow-unknown): \
                   --data-url, --rank, --world-size, --init-method, --num-gpus\n";
    assert_eq!(text.matches(ignored).count(), 1, "{text}");
    assert_eq!(summary(&dir.path().join("out"))["world_size"], 2);
    // Under a launcher each rank gets them.
    let mut launched = phalanx(&["launch", "--nproc-per-node", "2", "--"], dir.path());
    launched.arg(example("spirals")).args(&short[..4]);
    launched
        .args(&appended)
        .args(["--allow-unknown", "--overwrite"]);
    let text = succeed(launched);
    assert_eq!(text.matches(ignored).count(), 1, "{text}");
    assert_eq!(summary(&dir.path().join("out"))["world_size"], 2);
    // A folder that is typed stays. Nothing numbers the nodes but these flags.
    let own = [
        "--allow_unknown",
        "--output_dir",
        "own",
        "--init_method=env://",
    ];
    let text = succeed(spirals(
        &[&short[..], &appended[..2], &appended[2..7], &own].concat(),
        dir.path(),
    ));
    assert!(
        text.contains("(--allow-unknown): --data-url, --train-url\n"),
        "{text}"
    );
    assert!(dir.path().join("own/summary.json").exists());
    for (more, why) in [
        (
            &["--allow-unknown", "--widht", "3"][..],
            "unexpected argument '--widht'",
        ),
        (&[], "unexpected argument '--data_url'"),
    ] {
        let (code, _, err) = run(with(more));
        assert!(code == 2 && err.contains(why), "{err}");
    }
}

#[test]
fn new_writes_this_very_program() {
    let dir = tempfile::tempdir().expect("folder");
    let new = |name: &str| run(phalanx(&["new", name], dir.path()));
    let (code, _, err) = new("my-net");
    assert_eq!(code, 0, "{err}");
    let project = dir.path().join("my-net");
    let read = |file: &str| std::fs::read_to_string(project.join(file)).expect(file);
    let recipe = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../recipes/spirals.rs");
    assert_eq!(
        read("src/main.rs"),
        std::fs::read_to_string(recipe).expect("recipe")
    );
    let manifest = read("Cargo.toml");
    assert!(manifest.contains("name = \"my-net\"") && manifest.contains("\nphalanx = { path = "));
    assert!(manifest.contains("\n# phalanx = { git = \""), "{manifest}");
    assert!(
        err.contains("it builds on this machine only") && err.contains("cargo test --release"),
        "{err}"
    );
    assert!(read("tests/train.rs").contains("CARGO_BIN_EXE_my-net"));
    let (code, _, err) = run(phalanx(
        &["new", "other", "--git", "https://a.org/x"],
        dir.path(),
    ));
    let manifest = std::fs::read_to_string(dir.path().join("other/Cargo.toml"));
    let manifest = manifest.expect("a manifest");
    assert!(
        manifest.contains("\nphalanx = { git = \"https://a.org/x\" }\n"),
        "{manifest}"
    );
    assert!(
        code == 0 && !manifest.contains("path") && !err.contains("this machine"),
        "{err}"
    );
    for (name, why) in [
        ("my-net", "my-net exists already"),
        ("3x", "\"3x\" cannot be a package's name"),
        ("none/x", "cannot write into none/x"),
    ] {
        let (code, _, err) = new(name);
        assert_ne!(code, 0, "{name}");
        assert!(err.contains(why), "{err}");
    }
}

/// Also where its launcher read a pipe.
#[test]
fn its_ranks_have_the_words_that_its_launcher_has_read() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let flags = ["--epochs", "2", "--points", "300", "--lr", "0.07"];
    let two = ["--nproc-per-node", "2"];
    succeed(spirals(
        &[&flags[..], &two, &["--output-dir", "typed"]].concat(),
        dir,
    ));
    let mut command = spirals(
        &[&two[..], &["--config=/dev/stdin", "--output-dir", "piped"]].concat(),
        dir,
    );
    let mut child = command.stdin(Stdio::piped()).spawn().expect("it starts");
    let mut pipe = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut pipe, b"--epochs 2\n--points 300\n--lr 0.07\n")
        .expect("written");
    drop(pipe);
    let (code, out, err) = ended(child);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(hashes(&dir.join("piped")), hashes(&dir.join("typed")));
}
