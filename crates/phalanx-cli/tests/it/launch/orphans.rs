//! The launcher is killed with SIGKILL, at any moment: nothing may be left.

use std::thread;
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};

use crate::launch::harness::{Done, Family, Running, one_folder};
use crate::support::eventually;

#[test]
fn a_killed_launcher_takes_ranks_and_their_children_along() {
    let family = Family::new();
    // Children in the background and in the foreground, deaf to SIGTERM.
    let script = "trap '' TERM HUP; (trap '' TERM; sleep 60) & (sleep 61; true) & echo ready; sleep 62; true";
    let mut running = family.start(&["launch", "--nproc-per-node", "3", "sh", "-c", script]);
    running.lines(3);
    // One that is becoming another program shows nothing for a moment.
    eventually("all are there", || family.alive().len() >= 9);
    running.signal(Signal::KILL);
    family.assert_gone_soon();
    assert_eq!(running.wait().code(), -1);
}

#[test]
fn at_whatever_moment_the_launcher_is_killed() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    for step in 0..30u64 {
        let script = "echo x >$TORCHELASTIC_ERROR_FILE; sleep 60 & sleep 61; true";
        let launch = ["launch", "--nproc-per-node", "4", "sh", "-c", script];
        let mut command = family.command(&launch);
        command.env("TMPDIR", dir.path());
        let running = Running::new(command);
        // The ranks start within the first 20 ms or so.
        thread::sleep(Duration::from_micros(700 * step));
        running.signal(Signal::KILL);
        drop(running);
        family.assert_gone_soon();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
        assert!(left.is_empty(), "after {step} steps: {left:?}");
    }
}

#[test]
fn a_killed_guard_leaves_the_ranks_tied_to_the_launcher() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let script = "echo ready; exec sleep 60";
    let mut command = family.command(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    command.env("TMPDIR", dir.path());
    let mut running = Running::new(command);
    running.lines(2);
    let mut guard = None;
    eventually("the guard shows its name", || {
        let mut alive = family.alive().into_iter();
        guard = alive.find(|text| text.trim_end().ends_with(" guard"));
        guard.is_some()
    });
    let pid: i32 = guard.unwrap().split(' ').next().unwrap().parse().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    thread::sleep(Duration::from_millis(50));
    eventually("the job goes on without its guard", || {
        family.alive().len() >= 3
    });
    running.signal(Signal::KILL);
    family.assert_gone_soon();
    drop(running);
    // Nobody has removed the private folder. The next launcher does, unless the folder is just being made.
    let left = one_folder(dir.path());
    let long_ago = SystemTime::now() - Duration::from_secs(120);
    let folder = std::fs::File::open(&left).unwrap();
    folder.set_modified(long_ago).unwrap();
    drop(folder);
    let live = dir.path().join("phalanx-run-live");
    std::fs::create_dir(&live).unwrap();
    let live = std::fs::File::open(&live).unwrap();
    live.set_modified(long_ago).unwrap();
    live.try_lock().unwrap();
    let mut next = family.command(&["launch", "--nproc-per-node", "1", "true"]);
    next.env("TMPDIR", dir.path());
    assert_eq!(Running::new(next).wait().code(), 0);
    assert!(one_folder(dir.path()).ends_with("phalanx-run-live"));
}

/// Ranks that `mpirun` starts on one host meet by a file. It is removed when all have joined; that of a rank 0 which was
/// killed before is replaced by the next job of the same name.
#[test]
fn ranks_without_a_launcher_leave_no_address_file_behind() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let rank = |rank: &str| {
        let args = [
            "train",
            "linear",
            "--epochs",
            "1000000",
            "--output-dir",
            "out",
        ];
        let mut command = family.command(&args);
        command.current_dir(&dir).env("TMPDIR", dir.path());
        command.env("PMIX_NAMESPACE", "job");
        for name in ["RANK", "LOCAL_RANK"] {
            command.env(format!("OMPI_COMM_WORLD_{name}"), rank);
        }
        for name in ["SIZE", "LOCAL_SIZE"] {
            command.env(format!("OMPI_COMM_WORLD_{name}"), "2");
        }
        Running::new(command)
    };
    let files = || {
        let names = std::fs::read_dir(dir.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name());
        let names = names.filter(|name| name.to_string_lossy().starts_with("phalanx-"));
        names.count()
    };
    let lonely = rank("0");
    eventually("rank 0 has written the file", || files() == 1);
    lonely.signal(Signal::KILL);
    lonely.wait();
    assert_eq!(files(), 1);
    let (mut a, b) = (rank("0"), rank("1"));
    while !a.line().contains("/500 loss:") {}
    assert_eq!(files(), 0);
    b.signal(Signal::KILL);
    b.wait();
    let a = a.wait();
    assert_eq!(a.code(), 3, "{a:#?}");
    assert_eq!(files(), 0);
}

#[test]
fn a_rank_that_ends_takes_its_group_along() {
    let family = Family::new();
    let script = "sleep 60 >/dev/null 2>&1 & exit 0";
    let done = family.run(&["launch", "--nproc-per-node", "2", "sh", "-c", script]);
    assert_eq!(done.code(), 0, "{done:#?}");
    assert_eq!(family.alive(), Vec::<String>::new());
}

#[test]
fn no_zombies_are_left_to_init() {
    let family = Family::new();
    // The shell dies first, its child is killed as an orphan.
    let script = "sleep 60 & echo child $!; sleep 61; true";
    let mut running = family.start(&["launch", "sh", "-c", script]);
    let line = running.line();
    let child = line.strip_prefix("child ").unwrap();
    running.signal(Signal::TERM);
    assert_eq!(running.wait().code(), 130);
    assert!(
        !std::path::Path::new(&format!("/proc/{child}")).exists(),
        "reaped, not only dead"
    );
}

/// Each rank starts a process in a session of its own, deaf to SIGTERM, which starts another
/// one; then it ends with the given code.
const OWN_SESSIONS: &str = r#"
setsid sh -c 'trap "" TERM; setsid sleep 60 & touch "$1"; sleep 61; true' sh "$0/$RANK" >/dev/null 2>&1 &
until [ -e "$0/$RANK" ]; do sleep 0.01; done
exit $1"#;

fn run_with_own_sessions(family: &Family, code: &str) -> Done {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let launch = ["launch", "--nproc-per-node", "2", "--", "sh", "-c"];
    family.run(&[&launch[..], &[OWN_SESSIONS, folder, code]].concat())
}

#[test]
fn what_is_in_a_session_of_its_own_ends_with_a_job_that_fails() {
    let family = Family::new();
    let done = run_with_own_sessions(&family, "5");
    assert_eq!(done.code(), 1, "{done:#?}");
    assert_eq!(family.alive(), Vec::<String>::new());
}

/// As under torchrun: a daemon that somebody wanted.
#[test]
fn what_is_in_a_session_of_its_own_outlives_a_job_that_ends_well() {
    let family = Family::new();
    let done = run_with_own_sessions(&family, "0");
    assert_eq!(done.code(), 0, "{done:#?}");
    eventually("all are there", || family.alive().len() == 6);
    family.kill();
    family.assert_gone_soon();
}

#[test]
fn what_is_in_a_session_of_its_own_may_save_when_the_job_is_interrupted() {
    let family = Family::new();
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved");
    let script = r#"
        setsid sh -c 'trap "sleep 0.2; touch $1; exit" TERM; echo ready; while :; do sleep 0.05; done' sh "$0" &
        sleep 60; true"#;
    let path = saved.to_str().unwrap();
    let mut running = family.start(&["launch", "--no-prefix", "sh", "-c", script, path]);
    assert_eq!(running.line(), "ready");
    running.signal(Signal::TERM);
    let done = running.wait();
    assert_eq!(done.code(), 130, "{done:#?}");
    assert!(saved.exists());
    assert_eq!(family.alive(), Vec::<String>::new());
}

/// `exec` makes the launcher the parent of what a shell has started before.
#[test]
fn what_was_there_before_the_launcher_is_none_of_its_business() {
    let family = Family::new();
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", "sleep 60 >/dev/null 2>&1 & exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_phalanx"))
        .args(["launch", "sh", "-c", "exit 5"]);
    let done = family.run_as(command);
    assert_eq!(done.code(), 1, "{done:#?}");
    let alive = family.kill();
    assert!(
        alive.len() == 1 && alive[0].contains("sleep 60"),
        "{alive:#?}"
    );
    family.assert_gone_soon();
}
