//! `phalanx doctor`: what it finds is compared with what other programs say of this machine.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{ended, free_port, phalanx, text};

/// Runs it with `--json`: exit code, report, standard error.
#[track_caller]
fn report(command: &mut Command) -> (i32, Value, String) {
    let (code, out, err) = ended(command.spawn().expect("phalanx starts"));
    let report = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}\n{out}\n{err}"));
    (code, report, err)
}

#[track_caller]
fn check<'a>(checks: &'a Value, name: &str) -> (&'a str, &'a str) {
    let found = checks.as_array().expect("checks").iter();
    let check = found.clone().find(|check| check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("no {name} in {checks:#}"));
    let of = |field: &str| check[field].as_str().expect("text");
    if of("status") != "ok" {
        assert!(!of("fix").is_empty(), "{check:#}");
    }
    (of("status"), of("found"))
}

fn said_by(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect(program);
    text(&output.stdout).trim().to_owned()
}

#[test]
fn one_host_alone() {
    let dir = tempfile::tempdir().expect("folder");
    let mut command = phalanx(&["doctor", "--json"], dir.path());
    let (code, report, err) = report(command.env_remove("OMP_NUM_THREADS"));
    assert_eq!((code, &*err), (0, ""), "{report:#}");
    assert_eq!(
        (&report["format"], &report["ranks"]),
        (&1.into(), &1.into())
    );
    let host = &report["hosts"][0];
    assert_eq!(host["name"], said_by("uname", &["-n"]));
    let checks = &host["checks"];
    assert_eq!(check(checks, "engine").1, "none: one rank, alone");
    let cores = said_by("nproc", &[]);
    assert_eq!(check(checks, "cores").1.split(' ').next(), Some(&*cores));
    let threads = format!("{cores} ({cores} core");
    assert!(
        check(checks, "threads").1.starts_with(&threads),
        "{checks:#}"
    );
    assert_eq!(check(checks, "shared_memory").0, "ok");
    assert_eq!(check(checks, "tmpdir").0, "ok");
    for name in [
        "instructions",
        "gpu",
        "memory",
        "open_files",
        "disk",
        "clock",
        "host_name",
    ] {
        check(checks, name);
    }
    assert_eq!(report["job"], Value::Array(Vec::new()));

    // As text: one line a check.
    let (code, out, _) = ended(phalanx(&["doctor"], dir.path()).spawn().expect("starts"));
    assert_eq!(code, 0, "{out}");
    assert!(out.starts_with("Host "), "{out}");
    assert!(out.contains("no problems, "), "{out}");
    let lines = out.lines().filter(|line| line.starts_with("  ok  "));
    assert!(lines.count() > 8, "{out}");
}

#[test]
fn two_ranks_over_each_transport() {
    let dir = tempfile::tempdir().expect("folder");
    for (transport, kind) in [("auto", "shm"), ("tcp", "tcp")] {
        let args = "doctor --nproc-per-node 2 --threads 1 --json --transport";
        let args: Vec<&str> = args.split(' ').chain([transport]).collect();
        let (code, report, err) = report(&mut phalanx(&args, dir.path()));
        assert_eq!((code, &*err), (0, ""), "{report:#}");
        let hosts = report["hosts"].as_array().expect("hosts");
        assert_eq!(
            (hosts.len(), &hosts[0]["ranks"]),
            (1, &serde_json::json!([0, 1]))
        );
        let checks = &hosts[0]["checks"];
        // On one core it adds that they share it.
        let threads = check(checks, "threads").1;
        assert!(
            threads.starts_with("1 for each rank (--threads)"),
            "{threads}"
        );
        let engine = check(checks, "engine").1;
        assert!(
            engine.starts_with("phalanx: rank 0 of 2, 0 of 2 on this host"),
            "{engine}"
        );
        let job = &report["job"];
        for name in ["ranks", "program", "settings", "all_reduce"] {
            assert_eq!(check(job, name).0, "ok", "{report:#}");
        }
        assert!(
            check(job, "transport")
                .1
                .starts_with(&format!("1 pair over {kind}"))
        );
        let pairs = report["pairs"].as_array().expect("pairs");
        assert_eq!(pairs.len(), 1);
        assert_eq!(pairs[0]["transport"], kind);
        let number = |field: &str| pairs[0][field].as_f64().expect("a number");
        assert!(
            number("latency_us") > 0.0 && number("latency_us") < 1e6,
            "{report:#}"
        );
        assert!(
            number("gb_per_s") > 1e-3 && number("gb_per_s") < 1e3,
            "{report:#}"
        );
    }
}

#[test]
fn a_forbidden_single_copy_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    let args = ["doctor", "--nproc-per-node", "2", "--json"];
    let status = |value: &str| {
        let mut command = phalanx(&args, dir.path());
        let (_, report, _) = report(command.env("PHALANX_SINGLE_COPY", value));
        check(&report["job"], "single_copy").0.to_owned()
    };
    assert_eq!(status("0"), "warning");
    // Where the system forbids it, too, it is right to warn.
    let scope = said_by("cat", &["/proc/sys/kernel/yama/ptrace_scope"]);
    if matches!(&*scope, "" | "0" | "1") {
        assert_eq!(status("1"), "ok");
    }
}

#[test]
fn a_low_limit_of_open_files_is_a_problem() {
    let dir = tempfile::tempdir().expect("folder");
    for (limit, expected, code) in [("20", "problem", 1), ("40", "warning", 0), ("64", "ok", 0)] {
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -n \"$1\"; exec \"$0\" doctor --json"])
            .args([env!("CARGO_BIN_EXE_phalanx"), limit])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (ended, report, err) = report(&mut command);
        let (status, found) = check(&report["hosts"][0]["checks"], "open_files");
        assert_eq!((status, ended), (expected, code), "{report:#}");
        assert!(found.starts_with(&format!("{limit} ")), "{found}");
        assert_eq!(err, "");
        assert_eq!(report["problems"], i64::from(code));
    }
}

#[test]
fn a_data_folder_is_listed_and_a_missing_one_is_a_problem() {
    let dir = tempfile::tempdir().expect("folder");
    std::fs::create_dir(dir.path().join("d")).expect("folder");
    std::fs::write(dir.path().join("d/a"), [0; 5]).expect("file");
    std::fs::write(dir.path().join("d/b"), [0; 2]).expect("file");
    let run = |data: &str| {
        let args = ["doctor", "--json", "--data", data];
        report(&mut phalanx(&args, dir.path()))
    };
    let (code, report, _) = run("d");
    let (status, found) = check(&report["hosts"][0]["checks"], "data");
    assert_eq!((status, code), ("ok", 0));
    assert!(found.ends_with(": 2 files, 7 B"), "{found}");
    let (code, report, _) = run("no");
    let (status, found) = check(&report["hosts"][0]["checks"], "data");
    assert_eq!((status, code), ("problem", 1));
    assert!(found.contains("no: No such file"), "{found}");
}

#[test]
fn threads_come_from_the_environment_but_not_from_a_launchers_default() {
    let dir = tempfile::tempdir().expect("folder");
    let threads = |command: &mut Command| {
        let (_, report, _) = report(command);
        check(&report["hosts"][0]["checks"], "threads").1.to_owned()
    };
    let mut alone = phalanx(&["doctor", "--json"], dir.path());
    let found = threads(alone.env("OMP_NUM_THREADS", "3"));
    assert!(found.starts_with("3 (OMP_NUM_THREADS)"), "{found}");
    let mut alone = phalanx(&["doctor", "--json"], dir.path());
    let found = threads(
        alone
            .env("OMP_NUM_THREADS", "3")
            .env("SLURM_CPUS_PER_TASK", "1"),
    );
    assert_eq!(found, "1 (1 core of SLURM_CPUS_PER_TASK, 1 rank)");
    let own = env!("CARGO_BIN_EXE_phalanx");
    let args = [
        "launch",
        "--nproc-per-node",
        "2",
        "--no-prefix",
        "--",
        own,
        "doctor",
        "--json",
    ];
    let mut launched = phalanx(&args, dir.path());
    let found = threads(launched.env_remove("OMP_NUM_THREADS"));
    let cores = said_by("nproc", &[]);
    assert!(found.contains(&format!("({cores} core")), "{found}");
}

/// The report of a host whose ranks wait in vain; the exit code is that of any other command.
#[test]
fn ranks_that_do_not_meet() {
    let dir = tempfile::tempdir().expect("folder");
    let meeting = format!("tcp://127.0.0.1:{}", free_port());
    let flags = "--rank 1 --world-size 2 --init-timeout 1.5 --init-method";
    let flags: Vec<&str> = flags.split(' ').chain([&*meeting]).collect();
    let command = |words: &[&str]| {
        let mut command = phalanx(&[words, &flags[..]].concat(), dir.path());
        command.env("PHALANX_TOKEN", "5a".repeat(32));
        command
    };
    let (other, _, why) = ended(command(&["bench", "barrier"]).spawn().expect("starts"));
    assert!(other == 3 || other == 4, "{other}: {why}");
    let (code, report, err) = report(&mut command(&["doctor", "--json"]));
    assert_eq!(code, other, "{err}");
    let (status, found) = check(&report["job"], "meeting");
    assert_eq!(status, "problem");
    assert!(found.contains(&meeting["tcp://".len()..]), "{found}");
    check(&report["hosts"][0]["checks"], "open_files");
}
