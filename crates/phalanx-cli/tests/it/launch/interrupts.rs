//! Ctrl-C and its relatives.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::launch::harness::{Family, LIMIT, Running};
use crate::support::{SOON, at_once, eventually};

const STUBBORN: &str = "trap '' TERM INT HUP; echo ready; while :; do sleep 50; done";
const POLITE: &str = "trap 'echo got TERM; exit 0' TERM; trap 'echo got INT' INT; echo ready; while :; do sleep 0.02; done";

#[test]
fn an_interrupt_ends_stubborn_ranks() {
    let family = Family::new();
    let mut running = family.start(&["launch", "--nproc-per-node", "2", "sh", "-c", STUBBORN]);
    running.lines(2);
    let start = Instant::now();
    running.signal(Signal::INT);
    let done = running.wait();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_eq!(done.code(), 130, "{done:#?}");
    assert_eq!(family.alive(), Vec::<String>::new());
    let last = done.last_error();
    assert!(
        last.starts_with(
            "error: interrupted by SIGINT\n  so      ranks 0 and 1 were stopped within "
        ),
        "{last}"
    );
}

#[test]
fn every_kind_of_interrupt_reaches_the_ranks_once_as_sigterm() {
    let family = Family::new();
    for (signal, name) in [
        (Signal::INT, "SIGINT"),
        (Signal::TERM, "SIGTERM"),
        (Signal::HUP, "SIGHUP"),
        (Signal::QUIT, "SIGQUIT"),
    ] {
        // As a terminal does it: to the whole foreground process group.
        let patient = ["launch", "--stop-grace-s", "60", "--nproc-per-node", "2"];
        let mut command = family.command(&[&patient[..], &["sh", "-c", POLITE]].concat());
        command.process_group(0);
        let mut running = Running::new(command);
        running.lines(2);
        kill_process_group(running.pid(), signal).unwrap();
        let done = running.wait();
        assert_eq!(done.code(), 130, "{name}: {done:#?}");
        assert!(
            done.last_error()
                .starts_with(&format!("error: interrupted by {name}\n")),
            "{done:#?}"
        );
        let said: Vec<&str> = done
            .sorted()
            .into_iter()
            .filter(|l| !l.ends_with("ready"))
            .collect();
        assert_eq!(said, ["[rank 0] got TERM", "[rank 1] got TERM"], "{name}");
    }
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let family = Family::new();
    let script = "trap 'echo told' TERM; echo ready; while :; do sleep 0.02; done";
    let mut running = family.start(&["launch", "--stop-grace-s", "90", "sh", "-c", script]);
    running.line();
    running.signal(Signal::INT);
    // The first was taken; a second one at once would be its twin.
    assert_eq!(running.line(), "told");
    thread::sleep(Duration::from_millis(400));
    assert!(!family.alive().is_empty());
    let start = Instant::now();
    running.signal(Signal::INT);
    let done = running.wait();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_eq!(done.code(), 130);
}

#[test]
fn an_interrupt_sent_twice_at_once_still_leaves_the_grace() {
    let family = Family::new();
    let script =
        "trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut running = family.start(&["launch", "--stop-grace-s", "60", "sh", "-c", script]);
    running.line();
    // As GNU timeout, which sends one to the process and one to its group. This test may be
    // held up between the two, so the launcher sees both only when it is continued.
    for signal in [Signal::STOP, Signal::TERM, Signal::INT, Signal::CONT] {
        running.signal(signal);
    }
    let done = running.wait();
    assert_eq!(done.code(), 130);
    assert_eq!(done.out, "ready\nsaved\n");
}

#[test]
fn nohup_is_respected() {
    let family = Family::new();
    let exe = env!("CARGO_BIN_EXE_phalanx");
    let script =
        format!("trap '' HUP; exec {exe} launch sh -c 'echo ready; sleep 0.3; echo finished'");
    let mut command = family.command(&[]);
    let envs: Vec<_> = command
        .get_envs()
        .filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned())))
        .collect();
    command = std::process::Command::new("sh");
    command
        .args(["-c", &script])
        .envs(envs)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut running = Running::new(command);
    assert_eq!(running.line(), "ready");
    running.signal(Signal::HUP);
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
    assert!(done.out.ends_with("finished\n"));
}

/// State in `/proc` of all processes of the family but its guard.
fn states(family: &Family) -> Vec<char> {
    let pid_of = |line: &String| line.split(' ').next().unwrap().to_owned();
    family
        .alive()
        .iter()
        .filter(|line| !line.contains(" guard"))
        .filter_map(|line| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid_of(line))).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        })
        .collect()
}

fn wait_for_states(family: &Family, what: &str, all: impl Fn(&[char]) -> bool) {
    let until = Instant::now() + LIMIT;
    loop {
        let states = states(family);
        if all(&states) {
            return;
        }
        assert!(Instant::now() < until, "{what}: {states:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_ctrl_z_stops_the_ranks_too_and_a_continue_continues_all() {
    let family = Family::new();
    let script = "echo ready; exec sleep 4";
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    command.process_group(0); // as a shell's job, whoever started this test
    let mut running = Running::new(command);
    running.lines(2);
    running.signal(Signal::TSTP);
    wait_for_states(&family, "stopped", |states| {
        states.len() == 3 && states.iter().all(|s| *s == 'T')
    });
    // Stopped is stopped: nobody ends meanwhile.
    thread::sleep(Duration::from_millis(4200));
    assert_eq!(states(&family), ['T', 'T', 'T']);
    running.signal(Signal::CONT);
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
}

/// The first program of a session has no shell above it that could continue it.
#[test]
fn a_ctrl_z_that_nobody_could_undo_is_ignored() {
    let family = Family::new();
    let script = "echo ready; exec sleep 3";
    let launch = family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    let mut first = Command::new("setsid");
    first.arg(launch.get_program()).args(launch.get_args());
    let mut running = family.start_as(first);
    running.lines(2);
    running.signal(Signal::TSTP);
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
    assert!(done.err.contains("Ctrl-Z is ignored"), "{done:#?}");
}

/// Who answers SIGTERM itself may have something to save.
#[test]
fn who_handles_sigterm_has_time_for_it() {
    let cases = [
        a_rank_that_handles_sigterm_has_time_for_it,
        who_handles_sigterm_behind_a_shell_has_time_for_it_too,
        ranks_that_ask_for_more_time_to_save_get_it,
    ];
    at_once(&cases, |case| case());
}

fn a_rank_that_handles_sigterm_has_time_for_it() {
    let family = Family::new();
    // Longer than the 1.5 s that others have.
    let script =
        "trap 'sleep 3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut running = family.start(&["launch", "sh", "-c", script]);
    running.line();
    running.signal(Signal::TERM);
    let done = running.wait();
    assert_eq!(done.code(), 130, "{done:#?}");
    assert_eq!(done.out, "ready\nsaved\n");
}

/// The shell in front dies of SIGTERM at once, and says nothing of whom it started; where its
/// output goes to, neither.
fn who_handles_sigterm_behind_a_shell_has_time_for_it_too() {
    let dir = tempfile::tempdir().unwrap();
    let family = Family::new();
    let script =
        "trap 'sleep 3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let log = dir.path().join("log");
    let script = format!(
        "sh -c \"{script}\" >{} 2>/dev/null; echo after",
        log.display()
    );
    let running = family.start(&["launch", "sh", "-c", &script]);
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let until = Instant::now() + LIMIT;
    while said() != "ready\n" {
        assert!(Instant::now() < until, "{}", said());
        thread::sleep(Duration::from_millis(10));
    }
    running.signal(Signal::TERM);
    let done = running.wait();
    assert_eq!(done.code(), 130, "{done:#?}");
    assert_eq!((&*done.out, &*said()), ("", "ready\nsaved\n"));
    assert_eq!(family.alive(), Vec::<String>::new());
}

/// All ranks save and end with it: the report names the one that was told to.
#[test]
fn a_rank_that_was_sent_sigterm_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let family = Family::new();
    for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::INT, "SIGINT")] {
        let _ = std::fs::remove_dir_all(&out);
        let launch = ["launch", "--nproc-per-node", "3"];
        let train = [env!("CARGO_BIN_EXE_phalanx"), "train", "mnist"];
        let size = ["--epochs", "100000", "--data", "synthetic:960"];
        let step = ["--threads", "1", "--batch-size", "8", "--log-interval", "1"];
        let save = ["--save-every", "1000000", "--output-dir"];
        let all = [
            &launch[..],
            &train,
            &size,
            &step,
            &save,
            &[out.to_str().unwrap()],
        ];
        let running = family.start(&all.concat());
        let metrics = out.join("metrics.jsonl");
        let steps = || std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count());
        eventually("it trains", || steps() > 2);
        let pid = family.pid_of_rank(2);
        kill_process(pid, signal).unwrap();
        let done = running.wait();
        assert_eq!(done.code(), 130, "{done:#?}");
        let first = done.last_error().lines().next().unwrap();
        let pid = pid.as_raw_nonzero();
        assert!(
            first.starts_with(&format!("error: rank 2 (pid {pid}, host "))
                && first.ends_with(&format!(") was sent {name}")),
            "{done:#?}"
        );
        assert!(!done.err.contains("exited with code 130"), "{done:#?}");
    }
}

/// Longer than the usual 30 s, and they need it: here they are stopped meanwhile.
fn ranks_that_ask_for_more_time_to_save_get_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let family = Family::new();
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "--"]);
    command.arg(env!("CARGO_BIN_EXE_phalanx"));
    command.args("train linear --epochs 1000000000 --save-every 999999999".split(' '));
    command.args(["--stop-grace-s", "200", "--output-dir", "out"]);
    command.current_dir(dir.path());
    let running = Running::new(command);
    let steps = || std::fs::read_to_string(dir.path().join("out/metrics.jsonl"));
    eventually("it trains", || steps().is_ok_and(|text| !text.is_empty()));
    let ranks = || -> Vec<Pid> {
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_rank = |pid: &i32| {
            let of = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let parent = format!(" {} ", running.pid().as_raw_nonzero());
            let is_child = String::from_utf8_lossy(&of("stat"))
                .rsplit_once(") ")
                .is_some_and(|(_, rest)| rest[1..].starts_with(&parent));
            is_child && of("environ").windows(6).any(|part| part == b"\0RANK=")
        };
        pids.filter(is_rank).filter_map(Pid::from_raw).collect()
    };
    let ranks = ranks();
    assert_eq!(ranks.len(), 2);
    let all = |signal| {
        for rank in &ranks {
            kill_process(*rank, signal).unwrap();
        }
    };
    all(Signal::STOP);
    running.signal(Signal::TERM);
    thread::sleep(Duration::from_secs(33));
    all(Signal::CONT);
    let done = running.wait();
    assert_eq!(done.code(), 130, "{done:#?}");
    let saved = std::fs::read_dir(dir.path().join("out/checkpoints")).expect("checkpoints");
    assert!(saved.count() > 0, "{done:#?}");
}

/// A request for a checkpoint kills nobody.
#[test]
fn sigusr1_reaches_only_ranks_that_have_a_handler() {
    let dir = tempfile::tempdir().unwrap();
    let family = Family::new();
    let script = format!(
        "if [ $RANK = 0 ]; then trap 'echo told; exit 0' USR1; fi; echo ready; \
         i=0; while [ ! -e {}/end ]; do sleep 0.05; i=$((i+1)); [ $i -gt 2000 ] && exit 5; done; echo well",
        dir.path().display()
    );
    let mut running = family.start(&["launch", "--nproc-per-node", "2", "sh", "-c", &script]);
    running.lines(2);
    running.signal(Signal::USR1);
    assert_eq!(running.line(), "[rank 0] told");
    std::fs::write(dir.path().join("end"), "").unwrap();
    let done = running.wait();
    assert_eq!(done.code(), 0, "{done:#?}");
    assert!(done.out.ends_with("[rank 1] well\n"), "{done:#?}");
}

#[test]
fn sigusr1_that_reaches_nobody_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let family = Family::new();
    let script = format!(
        "echo ready >&2; i=0; while [ ! -e {}/end ]; do sleep 0.05; i=$((i+1)); [ $i -gt 2000 ] && exit 5; done; exit 0",
        dir.path().display()
    );
    let mut child = family
        .command(&["launch", "sh", "-c", &script])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut until = |what: &str| lines.by_ref().flatten().find(|line| line.contains(what));
    let ready = until("ready");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    kill_process(pid.unwrap(), Signal::USR1).unwrap();
    let told = until("SIGUSR1 is not forwarded");
    std::fs::write(dir.path().join("end"), "").unwrap();
    let ended = child.wait().unwrap();
    assert!(ready.is_some() && told.is_some(), "{ready:?} {told:?}");
    assert!(ended.success(), "{ended:?}");
}
