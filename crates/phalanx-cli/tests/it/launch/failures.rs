//! One rank fails: everybody ends, and the last words name the cause.

use std::process::Command;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use crate::launch::harness::{Family, one_folder};
use crate::support::{SOON, at_once};

/// Runs `script` on `ranks` ranks.
fn ranks(family: &Family, ranks: &str, script: &str) -> crate::launch::harness::Done {
    family.run(&["launch", "--nproc-per-node", ranks, "sh", "-c", script])
}

#[test]
fn a_killed_rank_ends_everything() {
    let family = Family::new();
    // Ranks that do not listen to SIGTERM, and have children.
    let script =
        "trap '' TERM; echo dying words of $RANK >&2; echo pid $$; while :; do sleep 50; done";
    let mut running = family.start(&["launch", "--nproc-per-node", "3", "sh", "-c", script]);
    let lines = running.lines(3);
    let pid: i32 = lines
        .iter()
        .find_map(|line| line.strip_prefix("[rank 1] pid "))
        .unwrap()
        .parse()
        .unwrap();
    let killed_at = Instant::now();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let done = running.wait();
    let took = killed_at.elapsed();
    assert!(took < SOON, "{took:?}");
    assert_eq!(family.alive(), Vec::<String>::new());
    assert_eq!(done.code(), 3, "{done:#?}");
    let last = done.last_error();
    assert!(
        last.starts_with(&format!("error: rank 1 (pid {pid}, host ")),
        "{last}"
    );
    assert!(
        last.lines()
            .next()
            .unwrap()
            .ends_with(") was killed by SIGKILL"),
        "{last}"
    );
    assert!(
        last.contains("\n  so      ranks 0 and 2 were stopped within "),
        "{last}"
    );
    assert!(last.contains("\n  stderr  dying words of 1\n"), "{last}");
}

/// What one of our programs does that has lost a peer.
pub const REPORTS_3: &str = "echo '{\"phalanx_exit_code\":3}' >$TORCHELASTIC_ERROR_FILE; exit 3";

#[test]
fn ends_and_exit_codes() {
    let family = Family::new();
    for (end, code, words) in [
        ("exit 1", 1, "exited with code 1"),
        ("exit 2", 2, "exited with code 2"),
        // Only ours mean that a peer was lost or a deadline passed.
        ("exit 3", 1, "exited with code 3"),
        ("exit 4", 1, "exited with code 4"),
        (REPORTS_3, 3, "exited with code 3 (it lost a peer)"),
        ("exit 7", 1, "exited with code 7"),
        ("exit 130", 130, "exited with code 130 (128 + SIGINT)"),
        ("kill -SEGV $$", 3, "was killed by SIGSEGV"),
        ("kill -ABRT $$", 3, "was killed by SIGABRT"),
        ("kill -TERM $$", 3, "was killed by SIGTERM"),
    ] {
        let script = format!("if [ $RANK = 1 ]; then {end}; fi; exec sleep 50");
        let done = ranks(&family, "2", &script);
        assert_eq!(done.code(), code, "{end}: {done:#?}");
        let first = done.last_error().lines().next().unwrap();
        assert!(
            first.starts_with("error: rank 1 (pid ") && first.ends_with(words),
            "{end}: {first}"
        );
        assert!(done.took < SOON, "{end}: {:?}", done.took);
    }
}

#[test]
fn all_well_is_silent() {
    let family = Family::new();
    let done = ranks(&family, "4", "exit 0");
    assert_eq!(
        (done.code(), done.out.as_str(), done.err.as_str()),
        (0, "", "")
    );
}

#[test]
fn the_cause_is_told_and_not_its_echo() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    // Ranks 0 and 2 notice that rank 1 is gone before the launcher sees it.
    for (end, code, words) in [("kill -9 $$", 3, "SIGKILL"), ("exit 1", 1, "code 1")] {
        // Rank 1 ends as soon as the others, which hold the pipe, have ended.
        let pipe = pipe.display();
        let script = format!(
            "if [ $RANK = 1 ]; then while read x; do :; done <{pipe}; {end}; fi; exec 3>{pipe}; exit 3"
        );
        let done = ranks(&family, "3", &script);
        assert_eq!(done.code(), code, "{done:#?}");
        let last = done.last_error();
        assert!(
            last.starts_with("error: rank 1 ") && last.contains(words),
            "{last}"
        );
    }

    // Nothing but echoes: the first is all there is.
    let script = format!("[ $RANK = 1 ] && sleep 20; {REPORTS_3}");
    let done = ranks(&family, "2", &script);
    assert_eq!(done.code(), 3);
    assert!(done.last_error().starts_with("error: rank 0 "), "{done:#?}");
}

#[test]
fn a_polite_rank_may_say_goodbye() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 1 ] && { until [ -e $0/ready ]; do sleep 0.02; done; exit 5; }; \
                  trap 'echo goodbye; exit 0' TERM; touch $0/ready; sleep 50 & wait";
    let patient = ["launch", "--stop-grace-s", "90", "--nproc-per-node", "2"];
    let folder = dir.path().to_str().unwrap();
    let done = family.run(&[&patient[..], &["sh", "-c", script, folder]].concat());
    assert_eq!(done.code(), 1);
    assert!(done.out.contains("[rank 0] goodbye\n"), "{done:#?}");
    assert!(done.took < SOON, "nobody waited for the grace: {done:#?}");
}

#[test]
fn the_grace_can_be_set() {
    let family = Family::new();
    // Longer than the default of 1.5 s allows.
    let dir = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 1 ] && { until [ -e $0/ready ]; do sleep 0.02; done; exit 5; }; \
                  trap 'sleep 2.5; echo saved; exit 0' TERM; touch $0/ready; sleep 50 & wait";
    let patient = ["launch", "--stop-grace-s", "60", "--nproc-per-node", "2"];
    let folder = dir.path().to_str().unwrap();
    let done = family.run(&[&patient[..], &["sh", "-c", script, folder]].concat());
    assert_eq!(done.code(), 1);
    assert!(done.out.contains("[rank 0] saved\n"), "{done:#?}");
    assert!(done.took < SOON, "{done:#?}");
}

#[test]
fn the_ranks_own_error_text_is_repeated_last() {
    let family = Family::new();
    let script = "if [ $RANK = 0 ]; then exec sleep 50; fi; \
                  echo noise >&2; echo 'error: no data in d' >&2; echo '  expected x' >&2; exit 2";
    let done = ranks(&family, "2", script);
    assert_eq!(done.code(), 2);
    let last = &done.err[done.err.rfind("error: rank 1").unwrap()..];
    assert!(
        last.ends_with("  stderr  error: no data in d\n            expected x\n"),
        "{last}"
    );
}

#[test]
fn an_error_file_says_more_than_stderr() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let outer = dir.path().join("outer.json");
    let json = r#"{"message": {"message": "ValueError: boom", "extraInfo": {"timestamp": "1"}}}"#;
    let script = format!("echo '{json}' > $TORCHELASTIC_ERROR_FILE; echo noise >&2; exit 1");
    let mut command = family.command(&["launch", "sh", "-c", &script]);
    command.env("TORCHELASTIC_ERROR_FILE", &outer);
    let done = crate::launch::harness::Running::new(command).wait();
    assert!(
        done.last_error()
            .ends_with("\n  said    ValueError: boom\n"),
        "{done:#?}"
    );
    // and is handed up, as torchrun does
    assert_eq!(std::fs::read_to_string(&outer).unwrap().trim(), json);
}

#[test]
fn a_program_that_cannot_run_is_one_clear_failure() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broken");
    std::fs::write(&path, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let done = family.run(&["launch", path.to_str().unwrap()]);
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(
        done.err.contains("cannot start") && done.err.contains("broken"),
        "{done:#?}"
    );
}

#[test]
fn restarts_begin_anew_and_are_counted() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let script = "echo $RANK attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS port $MASTER_PORT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && exit 9; exec sleep 50";
    let logs = dir.path().to_str().unwrap();
    let args = [
        "launch",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--log-dir",
        logs,
        "--rdzv-id",
        "r",
    ];
    let done = family.run(&[&args[..], &["sh", "-c", script]].concat());
    assert_eq!(done.code(), 0, "{done:#?}");
    assert!(
        done.out.contains("[rank 1] 1 attempt 2 of 3 port "),
        "{done:#?}"
    );
    assert!(
        done.err.contains("restart 1 of 3: rank 1 (pid "),
        "{done:#?}"
    );
    assert!(done.err.contains("restart 2 of 3: "), "{done:#?}");
    assert!(
        one_folder(dir.path())
            .join("attempt_2/1/stdout.log")
            .exists()
    );
    // The system may give the port of the first attempt to the third.
    let port = |attempt: usize| {
        let words = format!("attempt {attempt} of 3 port ");
        let ports = done.out.lines().filter_map(|l| l.split_once(&words));
        let ports: std::collections::BTreeSet<&str> = ports.map(|(_, port)| port).collect();
        assert_eq!(ports.len(), 1, "{done:#?}");
        ports.first().map(|port| (*port).to_owned())
    };
    assert_ne!(port(0), port(1), "{done:#?}");
    assert_ne!(port(1), port(2), "{done:#?}");

    let done = family.run(&["launch", "--max-restarts", "1", "sh", "-c", "exit 9"]);
    assert_eq!(done.code(), 1);
    assert!(
        done.last_error().contains("exited with code 9"),
        "{done:#?}"
    );
}

/// Each attempt would only say the same.
#[test]
fn a_usage_error_of_a_rank_is_told_once_and_not_tried_again() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let exe = env!("CARGO_BIN_EXE_phalanx");
    let mistake = format!("{exe} train resnet18 --data-url no-such-folder");
    let logs = dir.path().join("logs");
    let logs = ["--log-dir", logs.to_str().unwrap()];
    for (more, script, told) in [
        (&[][..], format!("exec {mistake}"), 1),
        (&logs, format!("exec {mistake}"), 1),
        // By itself, and in the report on the shell, which says nothing.
        (&[], format!("{mistake}; exit $?"), 2),
    ] {
        let launch = ["launch", "--nproc-per-node", "2", "--max-restarts", "4"];
        let alone = "[ $RANK = 0 ] || exec sleep 50; ";
        let script = format!("{alone}{script}");
        let done = family.run(&[&launch[..], more, &["sh", "-c", &script]].concat());
        assert_eq!(done.code(), 2, "{done:#?}");
        assert!(!done.err.contains("restart "), "{done:#?}");
        let count = done.err.matches("no data folder no-such-folder").count();
        assert_eq!(count, told, "{done:#?}");
    }
    let log = one_folder(&dir.path().join("logs")).join("attempt_0/0/stderr.log");
    let log = std::fs::read_to_string(log).unwrap();
    assert!(
        log.starts_with("error: no data folder no-such-folder\n"),
        "{log}"
    );
    // A code that only looks like it is any failure.
    let done = family.run(&["launch", "--max-restarts", "1", "sh", "-c", "exit 2"]);
    assert!(done.err.contains("restart 1 of 1: "), "{done:#?}");
}

/// Long: ten seconds after the first rank has ended.
#[test]
fn ranks_left_long_after_the_first_has_ended_are_looked_at() {
    let cases = [
        a_rank_that_ends_long_before_the_others_is_mentioned,
        a_rank_stopped_after_all_others_have_ended_is_the_end,
    ];
    at_once(&cases, |case| case());
}

fn a_rank_that_ends_long_before_the_others_is_mentioned() {
    let family = Family::new();
    let done = ranks(&family, "3", "[ $RANK = 1 ] || sleep 13");
    assert_eq!(done.code(), 0, "{done:#?}");
    assert_eq!(
        done.err,
        "rank 1 ended 10 s ago with code 0; ranks 0 and 2 are still running and may be waiting for it\n"
    );
}

#[test]
fn output_that_cannot_be_written_is_reported_once_and_fails_the_job() {
    let family = Family::new();
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "seq", "1", "1000"]);
    command.stdout(full);
    let output = command.output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert_eq!(err.matches("warning: ").count(), 1, "{err}");
    let last = err.lines().last().unwrap();
    assert!(
        last.starts_with("error: all ranks succeeded, but standard output cannot be written"),
        "{err}"
    );
}

/// Nobody else would notice: the others' last collective is over.
fn a_rank_stopped_after_all_others_have_ended_is_the_end() {
    let family = Family::new();
    let done = ranks(&family, "2", "[ $RANK = 0 ] && exit 0; kill -STOP $$");
    assert_eq!(done.code(), 4, "{done:#?}");
    let last = done.last_error();
    assert!(
        last.starts_with("error: rank 1 (pid ")
            && last.contains("is stopped by a signal, and all other ranks have ended well"),
        "{last}"
    );
    assert!(done.took < 2 * SOON, "{done:#?}");
}

/// This host's `phalanx` in namespaces of its own, where a shell has run `prepare`; `None`: they are not allowed here.
fn in_namespaces(kinds: &[&str], prepare: &str, args: &str) -> Option<Command> {
    let unshare = |line: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]).args(kinds);
        command.args(["sh", "-c", line]);
        command
    };
    let tried = unshare(prepare).status();
    if !tried.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no namespaces here");
        return None;
    }
    let phalanx = env!("CARGO_BIN_EXE_phalanx");
    Some(unshare(&format!("{prepare}; exec '{phalanx}' {args}")))
}

const ALL_REDUCE: &str =
    "bench all-reduce --nproc-per-node 2 --bytes 64 --iters 3 --init-timeout 20";

#[test]
fn a_host_without_a_loopback_interface_is_refused_with_the_fix() {
    let Some(command) = in_namespaces(&["--net"], "true", ALL_REDUCE) else {
        return;
    };
    let done = Family::new().run_as(command);
    assert_eq!(done.code(), 1, "{done:#?}");
    assert!(done.err.contains("ip link set lo up"), "{done:#?}");
}

#[test]
fn a_host_without_proc_is_told_what_is_missing() {
    let hide = "mount -t tmpfs none /proc";
    let Some(command) = in_namespaces(&["--mount"], hide, ALL_REDUCE) else {
        return;
    };
    let done = Family::new().run_as(command);
    assert_eq!(done.code(), 1, "{done:#?}");
    let last = done.last_error();
    assert!(
        last.contains("/proc/self/exe") && last.contains("mount -t proc"),
        "{done:#?}"
    );
}

/// The store's address is not to blame.
#[test]
fn too_few_open_files_for_the_store_is_said_without_a_wrong_fix() {
    let mut command = Command::new("sh");
    let phalanx = env!("CARGO_BIN_EXE_phalanx");
    command.args(["-c", &format!("ulimit -n 6; exec '{phalanx}' {ALL_REDUCE}")]);
    let done = Family::new().run_as(command);
    assert_eq!(done.code(), 1, "{done:#?}");
    let last = done.last_error();
    assert!(last.contains("`ulimit -n` shows it"), "{done:#?}");
    assert!(!last.contains("--node-rank"), "{done:#?}");
}
