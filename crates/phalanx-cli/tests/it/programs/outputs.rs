//! Outputs that cannot be written, and names that are no text.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::process::Output;

use super::*;

/// What cannot be written: a full disk.
fn full() -> File {
    File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full")
}

fn with_full_stderr(args: &str, dir: &Path) -> Output {
    let args: Vec<&str> = args.split_whitespace().collect();
    let mut command = phalanx(&args, dir);
    wait(command.stderr(full()).spawn().expect("phalanx starts"))
}

#[test]
fn a_standard_error_that_cannot_be_written_ends_no_training() {
    let dir = tempfile::tempdir().expect("folder");
    let train = "train mnist --data synthetic:64 --epochs 1 --threads 1 --log-batches 0";
    let train =
        |ranks: &str, out: &str| format!("{train} --nproc-per-node {ranks} --output-dir {out}");
    for (args, code) in [
        (train("1", "one"), 0),
        (train("2", "two"), 0),
        ("launch --nproc-per-node 2 -- sh -xc true".into(), 0),
        ("export one/mnist_cnn.pt --to a.safetensors".into(), 0),
        ("predict a.safetensors --data synthetic --limit 2".into(), 0),
        ("launch --nproc-per-node 2 -- sh -c exit".into(), 0),
    ] {
        let output = with_full_stderr(&args, dir.path());
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{args}\n{said}");
    }
    for left in ["one/summary.json", "two/summary.json"] {
        assert!(dir.path().join(left).is_file(), "{left}");
    }
    // What fails anyway keeps its code, restarted or not.
    let fails = "launch --nproc-per-node 2 --max-restarts 1 -- sh -c false";
    assert_eq!(with_full_stderr(fails, dir.path()).status.code(), Some(1));
}

#[test]
fn a_standard_output_that_cannot_be_written_is_an_error() {
    let dir = tempfile::tempdir().expect("folder");
    for args in ["download mnist --to got", "plan --nnodes 2"] {
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = phalanx(&args, dir.path());
        let output = wait(command.stdout(full()).spawn().expect("phalanx starts"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.starts_with("error: standard output could not be written"),
            "{said}"
        );
    }
}

#[test]
fn paths_may_be_no_utf8() {
    let dir = tempfile::tempdir().expect("folder");
    let odd = OsStr::from_bytes(b"od\xffd");
    let inner = dir.path().join(odd);
    std::fs::create_dir(&inner).expect("folder");
    for args in [
        "train linear --iterations 2 --nproc-per-node 2",
        "train mnist --data synthetic:640 --epochs 1 --threads 1 --log-batches 0 --nproc-per-node 2",
    ] {
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = phalanx(&args, &inner);
        let out = inner.join("out").join(args[1]);
        command.arg("--output-dir").arg(&out);
        if args[1] == "mnist" {
            for flag in ["profile", "log-samples"] {
                command.arg(format!("--{flag}")).arg(inner.join(flag));
            }
        }
        let output = wait(command.spawn().expect("phalanx starts"));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(out.join("summary.json").is_file(), "{}", args[1]);
    }
    for name in ["profile.0.json", "profile.1.json", "log-samples.1.jsonl"] {
        assert!(inner.join(name).is_file(), "{name}");
    }
}

/// Epoch and step of each record of a sample log, and how many lines are no records.
fn logged(path: &Path) -> (Vec<(u64, u64)>, usize) {
    let (mut steps, mut others) = (Vec::new(), 0);
    for line in std::fs::read_to_string(path).expect("a log").lines() {
        match serde_json::from_str::<Value>(line) {
            Ok(record) => steps.push((
                record["epoch"].as_u64().expect("epoch"),
                record["step"].as_u64().expect("step"),
            )),
            Err(_) => others += 1,
        }
    }
    (steps, others)
}

#[test]
fn a_resumed_run_profiles_its_own_steps_and_logs_each_once() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let train = |more: &str| {
        let args = "train mnist --data synthetic:640 --batch-size 64 --epochs 1 --threads 1 --log-batches 0 \
                    --output-dir run --profile profile --log-samples log --keep 9";
        let args: Vec<&str> = args.split_whitespace().chain(more.split(' ')).collect();
        succeed(&args, dir).1
    };
    let log = dir.join("log.0.jsonl");
    std::fs::write(&log, "mine, without an end").expect("written");
    let none = "--profile: the run has no step after the second to profile";
    let said = train("--save-every 2 --stop-after 2");
    assert!(said.contains(none), "{said}");
    assert_eq!(logged(&log), (vec![(1, 0), (1, 1)], 1));
    assert!(!dir.join("profile.0.json").exists());
    // The third step of the run, not of the training.
    let said = train("--stop-after 4 --resume run/checkpoints/step-000000002.json");
    assert!(!said.contains(none), "{said}");
    assert!(dir.join("profile.0.json").is_file());
    // Steps 3 to 6 are taken a second time.
    train("--resume run/checkpoints/step-000000002.json");
    assert_eq!(logged(&log), ((0..10).map(|step| (1, step)).collect(), 1));
}

/// A resumed run keeps the predictions of the epochs before, and has each once.
#[test]
fn predictions_of_a_resumed_run_are_those_of_one_that_was_not_stopped() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let train = |more: &str| {
        let args = "train mnist --data synthetic:640 --batch-size 64 --epochs 2 --threads 1 --save-every 5 --keep 9 \
                    --output-dir";
        let args: Vec<&str> = args.split_whitespace().chain(more.split(' ')).collect();
        succeed(&args, dir)
    };
    let predictions = |run: &str| {
        let path = dir.join(run).join("predictions.jsonl");
        std::fs::read_to_string(path).expect("predictions")
    };
    train("whole");
    train("run --stop-after 14");
    let whole = predictions("whole");
    assert_eq!(whole.matches("{\"epoch\":1,").count(), 32);
    assert_eq!(whole.matches("{\"epoch\":2,").count(), 32);
    let first: String = whole.split_inclusive('\n').take(32).collect();
    assert_eq!(predictions("run"), first);
    train("run --resume auto");
    assert_eq!(predictions("run"), whole);
    // Both epochs are made again.
    train("run --resume run/checkpoints/step-000000005.json");
    assert_eq!(predictions("run"), whole);
}

/// Somebody else's folder, with links into a home.
#[test]
fn links_in_somebody_elses_folder_lead_nowhere() {
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
    let dir = tempfile::tempdir().expect("folder");
    let at = |name: &str| dir.path().join(name);
    // All may pass, as to other folders of a machine.
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("mode");
    std::fs::create_dir_all(at("home/inner")).expect("folder");
    std::fs::create_dir(at("run")).expect("folder");
    let files = [
        ".lock",
        "metrics.jsonl",
        "summary.json",
        "mnist_cnn.safetensors",
        "mnist_cnn.pt",
        "best.pth",
        "predictions.jsonl",
        "predictions.png",
        "report.html",
    ];
    let folders = ["checkpoints", "flight"];
    let is_root = std::fs::metadata(dir.path())
        .is_ok_and(|about| std::os::unix::fs::MetadataExt::uid(&about) == 0);
    for name in files {
        std::fs::write(at("home").join(name), "precious").expect("written");
        symlink(at("home").join(name), at("run").join(name)).expect("link");
    }
    std::fs::write(at("home/inner/rank-0.json"), "precious").expect("written");
    for name in folders {
        symlink(at("home/inner"), at("run").join(name)).expect("link");
    }
    if is_root {
        for name in files.iter().chain(&folders) {
            lchown(at("run").join(name), Some(4711), None).expect("owner");
        }
        chown(at("run"), Some(4711), None).expect("owner");
    } else {
        eprintln!("SKIPPED in part: only root can give a folder away");
        std::fs::set_permissions(at("run"), PermissionsExt::from_mode(0o777)).expect("mode");
    }
    let train =
        "train mnist --data synthetic:128 --epochs 1 --threads 1 --save-every 1 --output-dir run";
    let train: Vec<&str> = train.split(' ').collect();
    let intact = || {
        for name in files {
            let text = std::fs::read_to_string(at("home").join(name));
            assert_eq!(text.expect("text"), "precious", "{name}");
        }
        let inner = std::fs::read_dir(at("home/inner")).expect("folder");
        assert_eq!(inner.count(), 1);
    };
    let (code, _, err) = run(&train, dir.path());
    assert_eq!(code, 2, "{err}");
    let why = if is_root {
        "run belongs to another user (uid 4711)"
    } else {
        "run can be written by all users"
    };
    assert!(
        err.contains(why) && err.contains("--allow-shared-folder"),
        "{err}"
    );
    intact();
    // One who trusts that user: links are still not followed.
    let trusting = [&train[..], &["--allow-shared-folder", "--overwrite"]].concat();
    for name in [".lock", "flight", "checkpoints"] {
        let (code, _, err) = run(&trusting, dir.path());
        assert_eq!(code, 2, "{err}");
        let why = format!("run/{name} is a symbolic link, which is not followed here");
        assert!(err.contains(&why), "no {why:?} in {err}");
        intact();
        std::fs::remove_file(at("run").join(name)).expect("removed");
    }
    succeed(&trusting, dir.path());
    intact();
    for name in [
        "metrics.jsonl",
        "summary.json",
        "mnist_cnn.pt",
        "predictions.jsonl",
        "predictions.png",
        "report.html",
    ] {
        let about = std::fs::symlink_metadata(at("run").join(name)).expect("there");
        assert!(about.is_file(), "{name}");
    }
}
