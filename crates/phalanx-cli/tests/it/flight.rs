//! The flight recorder from end to end: ranks of a training are stopped or
//! killed, and a person reads what happened.

use std::path::Path;
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use crate::support::{LIMIT, ended, finish, phalanx, signal};

/// A training that would run for hours, on three ranks.
struct Job {
    dir: tempfile::TempDir,
    child: Child,
    /// Of the ranks, by rank.
    pids: Vec<u32>,
}

impl Job {
    fn start(name: &str, transport: &str, timeout: &str) -> Job {
        let dir = tempfile::tempdir().unwrap();
        let marker = format!("flight-{name}-{}", std::process::id());
        let mut command = phalanx(&[], dir.path());
        command
            .args(["train", "mnist", "--nproc-per-node", "3", "--threads", "1"])
            .args(["--epochs", "100000", "--data", "synthetic:960"])
            .args(["--batch-size", "8", "--log-interval", "1"])
            .args(["--output-dir", "out", "--transport", transport])
            .args(["--timeout", timeout])
            .env("PHALANX_TEST", &marker)
            .env("PHALANX_LATE_AFTER_S", "2");
        let child = command.spawn().unwrap();
        let metrics = dir.path().join("out/metrics.jsonl");
        let began = Instant::now();
        while std::fs::read_to_string(&metrics).map_or(0, |t| t.lines().count()) < 5 {
            assert!(began.elapsed() < LIMIT, "training did not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        let pids = (0..3).map(|rank| pid_of(&marker, rank)).collect();
        Job { dir, child, pids }
    }

    /// Exit code and stderr.
    fn end(self) -> (i32, String, tempfile::TempDir) {
        let (code, _, err) = ended(self.child);
        (code, err, self.dir)
    }
}

fn pid_of(marker: &str, rank: usize) -> u32 {
    let has = |environ: &[u8], want: &str| environ.split(|b| *b == 0).any(|v| v == want.as_bytes());
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .find_map(|entry| {
            let pid = entry.file_name().to_string_lossy().parse().ok()?;
            let environ = std::fs::read(entry.path().join("environ")).ok()?;
            (has(&environ, &format!("PHALANX_TEST={marker}"))
                && has(&environ, &format!("RANK={rank}")))
            .then_some(pid)
        })
        .expect("the rank runs")
}

fn inspect(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = finish(phalanx(&["inspect"], dir).args(args));
    (
        status.code().unwrap_or(-1),
        String::from_utf8_lossy(&stdout).into_owned(),
        String::from_utf8_lossy(&stderr).into_owned(),
    )
}

/// The line that begins so, without its beginning.
fn line<'a>(text: &'a str, begin: &str) -> &'a str {
    text.lines()
        .find_map(|line| line.trim_start_matches("[rank 1] ").strip_prefix(begin))
        .unwrap_or_else(|| panic!("no line {begin:?} in\n{text}"))
}

fn a_stopped_rank_is_named(transport: &str) {
    let job = Job::start(&format!("stop-{transport}"), transport, "6");
    let stopped = job.pids[2];
    signal(stopped, "STOP");
    let (code, err, dir) = job.end();
    assert_eq!(code, 4, "{err}");
    // While it still waits, once: from the lowest rank.
    let late = line(&err, "waiting ");
    let (seconds, late) = late.split_once(" s: ").unwrap_or_else(|| panic!("{err}"));
    assert!(seconds.parse::<u64>().is_ok_and(|s| s >= 2), "{err}");
    let name = format!("rank 2 (pid {stopped}) ");
    let verb = late.strip_prefix(&name).unwrap_or_else(|| panic!("{late}"));
    assert!(
        verb.starts_with("has not reached ") || verb.starts_with("does not continue in "),
        "{late}"
    );
    let doing = line(&err, "  rank 2 ");
    assert!(
        doing.starts_with("is stopped (SIGSTOP or a debugger)"),
        "{doing}"
    );
    let waits = line(&err, "  ranks 0, 1 wait");
    assert!(
        waits.is_empty() || waits.starts_with("; deadline in "),
        "{waits}"
    );
    // Once in two seconds, three times that later for the second time.
    let said = |line: &&str| line.contains("waiting ") && line.contains(" s: rank 2 ");
    assert!((1..=2).contains(&err.lines().filter(said).count()), "{err}");
    // In the error and in the report.
    assert!(err.contains("timed out after "), "{err}");
    let first = err.lines().rfind(|line| line.starts_with("error: "));
    let headline = first.unwrap_or_else(|| panic!("{err}"));
    assert!(
        headline.starts_with(&format!("error: rank 2 (pid {stopped}, host "))
            && headline.contains(") is stopped by a signal or a debugger; rank "),
        "{err}"
    );
    let of_error = format!("rank 2 (pid {stopped}) is stopped (SIGSTOP or a debugger)");
    assert!(err.contains(&of_error), "{err}");
    let what = line(&err, "  while   ");
    assert!(what.starts_with("ranks 0 and 1 wait in "), "{what}");
    let halted = "; rank 2 is stopped (SIGSTOP or a debugger)";
    assert!(what.contains(halted), "{what}");
    assert_eq!(
        err.matches("timed out after").count(),
        1,
        "told once: {err}"
    );
    assert_eq!(line(&err, "  inspect phalanx inspect "), "out");

    let (code, out, _) = inspect(dir.path(), &["out"]);
    assert_eq!(code, 0);
    let sentence = out.lines().next().unwrap();
    assert!(
        sentence.starts_with("generation 0: ranks 0 and 1 wait in "),
        "{out}"
    );
    assert!(sentence.contains(halted), "{out}");
    assert!(sentence.contains("(epoch "), "{out}");
    assert!(out.contains("first failure, on rank "), "{out}");
    assert!(out.contains("came last, of "), "{out}");

    // One dump missing, one cut off, one hostile.
    let flight = dir.path().join("out/flight");
    std::fs::remove_file(flight.join("rank-2.json")).unwrap();
    let whole = std::fs::read(flight.join("rank-1.json")).unwrap();
    std::fs::write(flight.join("rank-1.json"), &whole[..whole.len() / 2]).unwrap();
    let (code, out, _) = inspect(dir.path(), &["out"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("ranks 0 and 1 wait in "), "{out}");
    assert!(out.contains("; rank 2 left no dump"), "{out}");
    assert!(
        out.contains("rank-1.json was cut off; its newest "),
        "{out}"
    );
    std::fs::write(flight.join("rank-1.json"), b"{\"format\": 7}").unwrap();
    let (code, out, _) = inspect(dir.path(), &["out", "--json"]);
    assert_eq!(code, 0, "{out}");
    let story: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(story["missing"], serde_json::json!([1, 2]));
    assert_eq!(story["waiting"], serde_json::json!([0]));
    let notes = story["notes"].to_string();
    assert!(
        notes.contains("rank-1.json: is not a flight recorder dump"),
        "{notes}"
    );
}

#[test]
fn a_stopped_rank_is_named_over_shared_memory() {
    a_stopped_rank_is_named("shm");
}

#[test]
fn a_stopped_rank_is_named_over_tcp() {
    a_stopped_rank_is_named("tcp");
}

#[test]
fn a_killed_rank_leaves_its_last_operation() {
    let job = Job::start("kill", "shm", "30");
    let killed = job.pids[1];
    signal(killed, "KILL");
    let (code, err, dir) = job.end();
    assert_eq!(code, 3, "{err}");
    let report = &err[err.rfind("\nerror: ").map_or(0, |at| at + 1)..];
    assert!(
        report.starts_with(&format!("error: rank 1 (pid {killed}, host ")),
        "{err}"
    );
    assert!(
        report.contains(") was killed by SIGKILL\n  while   epoch "),
        "{err}"
    );
    let what = line(report, "  while   ");
    assert!(what.contains(" step "), "{what}");
    assert!(
        what.contains(" was in flight") || what.contains("last completed "),
        "{what}"
    );
    let so = report.find("\n  so ").expect("so");
    assert!(report.find("\n  while ").unwrap() < so, "{report}");
    assert_eq!(line(report, "  inspect phalanx inspect "), "out");
    let (code, out, _) = inspect(dir.path(), &["out/flight"]);
    assert_eq!(code, 0);
    assert!(out.contains("rank 1 was killed by SIGKILL"), "{out}");
    assert!(out.lines().count() > 3, "a table: {out}");
}

#[test]
fn a_living_job_shows_its_recorders_on_sigusr2() {
    let job = Job::start("usr2", "shm", "30");
    signal(job.child.id(), "USR2");
    let file = job.dir.path().join("out/flight/rank-2.json");
    let began = Instant::now();
    while !file.exists() {
        assert!(began.elapsed() < LIMIT, "nothing was written");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, out, err) = inspect(job.dir.path(), &["out"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.starts_with("generation 0: "), "{out}");
    signal(job.child.id(), "INT");
    let (code, err, _) = job.end();
    assert_eq!(code, 130, "{err}");
    assert!(
        err.contains("flight recorders: phalanx inspect out\n"),
        "{err}"
    );
}

#[test]
fn nothing_to_inspect_is_an_error_that_says_what_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (code, _, err) = inspect(dir.path(), &["."]);
    assert_eq!(code, 2);
    assert!(
        err.starts_with("error: no flight recorder dump could be read\n"),
        "{err}"
    );
    assert!(err.contains("rank-N.json"), "{err}");
    std::fs::write(dir.path().join("rank-0.json"), b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let (code, _, err) = inspect(dir.path(), &["."]);
    assert_eq!(code, 2);
    assert!(
        err.contains("rank-0.json: is not a flight recorder dump"),
        "{err}"
    );
    let (code, _, err) = inspect(dir.path(), &["nowhere"]);
    assert_eq!(code, 2);
    assert!(err.contains("nowhere"), "{err}");
    let (code, out, _) = inspect(dir.path(), &["--help"]);
    assert_eq!(code, 0);
    assert!(out.contains("Example:"), "{out}");
}
