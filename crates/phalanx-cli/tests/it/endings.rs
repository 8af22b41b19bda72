//! However a training ends, its folder, its report and its trackers say so.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{ended, eventually, phalanx, process_of, run, signal, succeed};

/// A training that does not end by itself.
fn start(dir: &Path, more: &str) -> Child {
    let line = format!(
        "train mnist --nproc-per-node 2 --threads 1 --data synthetic:2000 --epochs 1000 --log-interval 1 \
         --wandb --output-dir a {more}"
    );
    let words: Vec<&str> = line.split_whitespace().collect();
    let child = phalanx(&words, dir).spawn().expect("phalanx starts");
    let metrics = dir.join("a/metrics.jsonl");
    eventually("a third step", || {
        std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 2)
    });
    child
}

/// The last event of the run, once it is an end.
fn end_of(dir: &Path) -> Value {
    let mut end = Value::Null;
    eventually("the end is written", || {
        let text = std::fs::read_to_string(dir.join("a/events.jsonl")).expect("events");
        end = serde_json::from_str(text.lines().last().unwrap_or_default()).unwrap_or_default();
        end["kind"] == "finish"
    });
    end
}

/// That the run ended as `status` with this error, and everything that shows it says so.
fn check(dir: &Path, status: &str, error: &str) {
    let end = end_of(dir);
    assert_eq!(end["status"], status, "{end}");
    let said = end["error"].as_str().unwrap_or_default();
    assert!(said.contains(error), "{end}");
    let since = end["elapsed_s"].as_f64().expect("a time");
    assert!(since > 0.0 && since < 600.0, "{end}");
    let json = serde_json::to_string(said).expect("text");
    let page = dir.join("a/report.html");
    eventually("the report", || {
        let page = std::fs::read_to_string(&page).unwrap_or_default();
        page.contains(&format!("\"status\":\"{status}\"")) && page.contains(&json)
    });
    // One file below one folder.
    let runs = std::fs::read_dir(dir.join("a/wandb")).expect("wandb's folder");
    let runs: Vec<_> = runs.flatten().map(|run| run.path()).collect();
    assert_eq!(runs.len(), 1);
    // Without a reason there is its exit code only, which a unit test reads.
    eventually("wandb's record", || {
        // The launcher's guard may just be writing it anew.
        let files = std::fs::read_dir(&runs[0]).expect("a run").flatten();
        let mut files = files.map(|file| file.path());
        let file = files.find(|path| path.extension().is_some_and(|e| e == "wandb"));
        let bytes = std::fs::read(file.unwrap_or_default()).unwrap_or_default();
        // A record goes on after the head of the next block.
        let blocks = bytes.chunks(32 << 10).enumerate();
        let parts =
            blocks.map(|(at, block)| block.get(if at > 0 { 7 } else { 0 }..).unwrap_or_default());
        let text = parts.collect::<Vec<_>>().concat();
        let has = |wanted: &[u8]| text.windows(wanted.len()).any(|part| part == wanted);
        said.is_empty() || has(json.as_bytes())
    });
}

#[test]
fn a_killed_rank_is_named_by_the_run_too() {
    for rank in [0, 1] {
        let dir = tempfile::tempdir().expect("folder");
        let job = start(dir.path(), "");
        signal(process_of(rank, dir.path()), "KILL");
        let (code, _, err) = ended(job);
        assert_eq!(code, 3, "{err}");
        assert!(err.contains("  report  a/report.html"), "{err}");
        let headline = err.lines().find_map(|line| line.strip_prefix("error: "));
        let headline = headline.expect("an error");
        assert!(headline.starts_with(&format!("rank {rank} (pid ")), "{err}");
        check(dir.path(), "failed", headline);
    }
}

#[test]
fn a_loss_that_became_nan_is_said_in_the_terminals_words() {
    let dir = tempfile::tempdir().expect("folder");
    let line = "train mnist --nproc-per-node 2 --threads 1 --data synthetic:2000 --epochs 1 --lr 1e20 --wandb \
                --output-dir a";
    let words: Vec<&str> = line.split_whitespace().collect();
    let (code, _, err) = run(&words, dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("\n  report  a/report.html\n"), "{err}");
    // The cause is not found between the ranks.
    assert!(!err.contains("inspect"), "{err}");
    let mut lines = err.lines();
    let headline = lines.find_map(|line| line.strip_prefix("error: "));
    let said = lines.find_map(|line| line.strip_prefix("  said    "));
    let sentence = format!("{}: {}", headline.expect("an error"), said.expect("why"));
    assert!(sentence.contains("the loss became NaN"), "{sentence}");
    check(dir.path(), "failed", &sentence);
    // One rank without a launcher.
    let alone = tempfile::tempdir().expect("folder");
    let (code, _, err) = run(
        &[&words[..], &["--nproc-per-node", "1"]].concat(),
        alone.path(),
    );
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("\n  report  a/report.html\n"), "{err}");
    let headline = err.lines().find_map(|line| line.strip_prefix("error: "));
    check(alone.path(), "failed", headline.expect("an error"));
}

#[test]
fn a_signal_stops_the_run_with_and_without_checkpoints() {
    for (more, error) in [
        ("", "interrupted by SIGTERM"),
        ("--nproc-per-node 1", "interrupted by SIGTERM"),
        ("--save-every 100000", ""),
        ("--nproc-per-node 1 --save-every 100000", ""),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        let job = start(dir.path(), more);
        signal(job.id(), "TERM");
        let (code, _, err) = ended(job);
        assert_eq!(code, 130, "{err}");
        check(dir.path(), "stopped", error);
        let told = err
            .lines()
            .filter(|line| line.trim_start().starts_with("report "));
        assert_eq!(
            told.map(str::trim_start).collect::<Vec<_>>(),
            [match error {
                "" => "report   a/report.html",
                _ => "report  a/report.html",
            }],
            "{err}"
        );
    }
}

/// It cannot save, so the grace of those that can is not for it.
#[test]
fn a_stopped_rank_is_not_waited_for_after_the_end() {
    for (asks, code) in [(false, 4), (true, 130)] {
        let dir = tempfile::tempdir().expect("folder");
        let job = start(dir.path(), "--save-every 100000 --timeout 3");
        signal(process_of(1, dir.path()), "STOP");
        let began = Instant::now();
        if asks {
            signal(job.id(), "TERM");
        }
        let (ended, _, err) = ended(job);
        assert_eq!(ended, code, "{err}");
        // Rank 0 waits for 3 s; the grace is 30 s.
        assert!(began.elapsed() < Duration::from_secs(20), "{err}");
    }
}

#[test]
fn a_killed_launcher_leaves_a_run_that_has_failed() {
    let dir = tempfile::tempdir().expect("folder");
    let mut job = start(dir.path(), "");
    job.kill().expect("killed");
    job.wait().expect("ended");
    check(dir.path(), "failed", "the launcher was killed");
}

#[test]
fn the_end_that_nobody_saw_is_written_by_the_report() {
    let dir = tempfile::tempdir().expect("folder");
    // One rank without a launcher.
    let mut job = start(dir.path(), "--nproc-per-node 1");
    let (out, _) = succeed(&["report", "a"], dir.path());
    assert_eq!(out, "a/report.html\n");
    let events = || std::fs::read_to_string(dir.path().join("a/events.jsonl")).expect("events");
    assert!(!events().contains("\"finish\""), "it runs");
    job.kill().expect("killed");
    job.wait().expect("ended");
    succeed(&["report", "a"], dir.path());
    check(dir.path(), "failed", "its process ended without a message");
    let once = events();
    succeed(&["report", "a"], dir.path());
    assert_eq!(events(), once);
}
