//! Trainings that go on without ranks that are lost, and with ranks that are started in their place.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::Duration;

use serde_json::Value;

use crate::own_program::program;
use crate::support::{
    Job, SOON, ended, eventually, find_process, free_port, phalanx, process_of, run, signal,
    succeed,
};

/// Samples of the drawn training set.
const SAMPLES: u64 = 240;
const EPOCHS: usize = 6;

/// The words of a training whose result does not depend on the ranks, in the folder `run`.
fn words(run: &str, ranks: usize, more: &str) -> Vec<String> {
    let line = format!(
        "train mnist --data synthetic:{SAMPLES} --global-batch-size 24 --epochs {EPOCHS} --threads 1 --log-interval 1 \
         --deterministic shards --test-batch-size 50 --output-dir {run} --nproc-per-node {ranks} {more}"
    );
    line.split_whitespace().map(str::to_owned).collect()
}

fn start(dir: &Path, ranks: usize, more: &str) -> Job {
    let words = words(
        "run",
        ranks,
        &format!("--elastic --log-samples seen {more}"),
    );
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Job::start(&mut phalanx(&words, dir))
}

/// The same by the launcher of one of several nodes, with their `flags`. A busy machine is silent for long: no node is lost by
/// that unless they say so.
fn start_node(dir: &Path, ranks: usize, port: u16, flags: &str) -> Job {
    let silence = match flags.contains("--lost-after") {
        true => "",
        false => "--lost-after 20",
    };
    let more = format!(
        "{flags} {silence} --master-addr 127.0.0.1 --master-port {port} --token-file token --save-every 50"
    );
    start(dir, ranks, &more)
}

/// Waits until a launcher listens.
fn wait_for_store(port: u16) {
    eventually("node 0 listens", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
}

/// A folder with a token.
fn folder_of_nodes() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    succeed(&["token", "--out", "token"], dir.path());
    dir
}

/// Waits until the run's log has `text` `times` times.
fn wait_for_log(dir: &Path, text: &str, times: usize) {
    eventually("the log says so", || {
        let log = std::fs::read_to_string(dir.join("run/events.jsonl"));
        log.unwrap_or_default().matches(text).count() >= times
    });
}

fn records(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// The records of all sample logs.
fn logged(dir: &Path) -> Vec<Value> {
    let entries = std::fs::read_dir(dir).expect("a folder").flatten();
    let logs = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("seen."));
    logs.flat_map(|entry| records(&entry.path())).collect()
}

/// Waits until the training has logged this step of this epoch (from 1 and 0).
fn wait_for_step(dir: &Path, epoch: u64, step: u64) {
    eventually("the training comes so far", || {
        let at = |record: &Value| (record["epoch"].as_u64(), record["step"].as_u64());
        logged(dir)
            .iter()
            .any(|record| at(record) >= (Some(epoch), Some(step)))
    });
}

/// Waits until the job has as many processes in its group as these events say.
fn wait_for_ranks(dir: &Path, changes: usize, ranks: u64) {
    eventually("the ranks have formed a new group", || {
        let events = records(&dir.join("run/events.jsonl"));
        let mut changed: Vec<&Value> = events.iter().filter(|e| e["kind"] == "ranks").collect();
        let last = changed.pop();
        changed.len() + 1 >= changes && last.is_some_and(|change| change["after"] == ranks)
    });
}

/// That each epoch has trained on each sample once: of a step that was begun several times, the last generation counts.
fn check_samples(dir: &Path, samples: u64) {
    let mut steps: BTreeMap<(u64, u64), BTreeMap<u64, Vec<u64>>> = BTreeMap::new();
    for record in logged(dir) {
        let number = |name: &str| record[name].as_u64();
        let step = (
            number("epoch").expect("an epoch"),
            number("step").expect("a step"),
        );
        let samples = record["samples"].as_array().expect("samples");
        let generation = number("generation").unwrap_or(0);
        let seen = steps
            .entry(step)
            .or_default()
            .entry(generation)
            .or_default();
        seen.extend(samples.iter().filter_map(Value::as_u64));
    }
    let mut epochs: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for ((epoch, _), generations) in steps {
        let (_, last) = generations.into_iter().next_back().expect("a generation");
        epochs.entry(epoch).or_default().extend(last);
    }
    assert_eq!(epochs.len(), EPOCHS);
    let all: Vec<u64> = (0..samples).collect();
    for (epoch, mut seen) in epochs {
        seen.sort_unstable();
        assert_eq!(seen, all, "epoch {epoch}");
    }
}

/// The hashes that a run ends with, and its ranks.
fn result(run: &Path) -> (Vec<Value>, Value) {
    let text = std::fs::read_to_string(run.join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let hashes = [
        "weights_sha256",
        "optimizer_sha256",
        "metrics_sha256",
        "initial_sha256",
    ];
    (
        hashes.map(|name| summary[name].clone()).into(),
        summary["world_size"].clone(),
    )
}

/// The hashes of a run that nothing happens to, with `more` words.
fn undisturbed(dir: &Path, more: &str) -> Vec<Value> {
    let words = words("undisturbed", 1, more);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (code, out, err) = run(&words, dir);
    assert_eq!(code, 0, "{out}{err}");
    result(&dir.join("undisturbed")).0
}

/// The hashes and the metrics of one that all tests compare with.
fn usual() -> &'static (Vec<Value>, Vec<Value>) {
    static USUAL: OnceLock<(Vec<Value>, Vec<Value>)> = OnceLock::new();
    USUAL.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let hashes = undisturbed(dir.path(), "");
        (
            hashes,
            records(&dir.path().join("undisturbed/metrics.jsonl")),
        )
    })
}

/// That the run in `dir` has ended as one that nothing happened to, with `ranks` ranks, and that its metrics have each step
/// once.
fn check_result(dir: &Path, ranks: usize) {
    let (hashes, world) = result(&dir.join("run"));
    assert_eq!(hashes, usual().0);
    assert_eq!(world, ranks);
    check_samples(dir, SAMPLES);
    let losses = |all: &[Value]| -> Vec<(u64, Value, Value)> {
        let mut all: Vec<_> = (all.iter())
            .map(|r| {
                (
                    r["step"].as_u64().expect("a step"),
                    r["loss"].clone(),
                    r["train_loss"].clone(),
                )
            })
            .collect();
        all.sort_by_key(|(step, loss, _)| (*step, loss.is_null()));
        all
    };
    let metrics = records(&dir.join("run/metrics.jsonl"));
    assert_eq!(losses(&metrics), losses(&usual().1));
}

#[test]
fn the_ranks_that_are_left_go_on_and_the_result_is_the_same() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "");
    wait_for_step(dir, 1, 3);
    // The one that reports and saves.
    let first = process_of(0, dir);
    signal(first, "KILL");
    wait_for_ranks(dir, 1, 2);
    wait_for_step(dir, 3, 1);
    signal(process_of(2, dir), "KILL");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    let lost = format!("rank 0 (pid {first}, host ");
    assert!(err.contains(&lost), "{err}");
    assert!(
        err.contains("was killed by SIGKILL; the others continue without it"),
        "{err}"
    );
    assert!(err.contains("world size 3 -> 2"), "{err}");
    assert!(err.contains("world size 2 -> 1"), "{err}");
    check_result(dir, 1);
}

/// The samples of shards, in a program of one's own.
#[test]
fn a_stream_goes_on_without_a_lost_rank_and_with_one_that_joins() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let train = |folder: &str, more: &str| {
        let line = format!(
            "--epochs {EPOCHS} --global-batch-size 16 --threads 1 --deterministic shards --output-dir {folder} {more}"
        );
        program("stream", &line.split_whitespace().collect::<Vec<_>>(), dir)
    };
    let (code, out, err) = ended(train("undisturbed", "").spawn().expect("it starts"));
    assert_eq!(code, 0, "{out}{err}");
    let more = "--nproc-per-node 3 --elastic --max-restarts 1 --log-samples seen";
    let job = Job::start(&mut train("run", more));
    wait_for_step(dir, 1, 3);
    signal(process_of(1, dir), "KILL");
    wait_for_ranks(dir, 2, 3);
    signal(process_of(2, dir), "KILL");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains("world size 2 -> 3"), "{err}");
    let (hashes, world) = result(&dir.join("run"));
    assert_eq!(hashes, result(&dir.join("undisturbed")).0);
    assert_eq!(world, 2);
    check_samples(dir, 8 * 512);
}

#[test]
fn lost_ranks_are_started_again_and_join_the_others() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--max-restarts 4 --save-every 3");
    wait_for_step(dir, 1, 2);
    // In the end all of the first ranks are gone.
    for (change, rank) in [(2, 1), (4, 0), (6, 2)] {
        signal(process_of(rank, dir), "KILL");
        wait_for_ranks(dir, change, 3);
    }
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    assert!(
        err.contains("was killed by SIGKILL; restart 3 of 4"),
        "{err}"
    );
    assert!(err.contains("world size 2 -> 3"), "{err}");
    check_result(dir, 3);
    // All are among those whose time and memory are shown.
    let events = records(&dir.join("run/events.jsonl"));
    let last = events.iter().rfind(|e| e["kind"] == "system");
    let ranks = last.and_then(|e| e["ranks"].as_array()).expect("ranks");
    let numbers: Vec<&Value> = ranks.iter().map(|rank| &rank["rank"]).collect();
    assert_eq!(numbers, [0, 1, 2]);
    let lacks_time = |rank: &&Value| rank["train_s"].as_f64() <= Some(0.0);
    assert_eq!(ranks.iter().find(lacks_time), None);
}

/// A process that joins does before it what the others did as three ranks: the data of `linear` are named by these.
/// Reads the configuration as it was: the file is gone, is another one, or was a pipe.
#[test]
fn a_rank_that_is_started_again_has_the_words_of_its_launcher() {
    let alone = tempfile::tempdir().expect("a temporary folder");
    let want = undisturbed(alone.path(), "--lr 0.02 --momentum 0.5");
    for (then, more) in [
        (None, "--elastic"),
        (
            Some("--lr 3\n--momentum 0\n--no-such-flag 1\n"),
            "--elastic",
        ),
        (Some("--lr 3\n"), "--save-every 3"),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let dir = dir.path();
        let config = dir.join("c");
        let text = "--lr 0.02\n--momentum 0.5\n";
        std::fs::write(&config, text).expect("written");
        let more = format!(
            "{more} --max-restarts 1 --log-samples seen --config {}",
            config.display()
        );
        let all = words("run", 2, &more);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let job = Job::start(&mut phalanx(&all, dir));
        wait_for_step(dir, 1, 4);
        match then {
            None => std::fs::remove_file(&config),
            Some(text) => std::fs::write(&config, text),
        }
        .expect("changed");
        signal(process_of(1, dir), "KILL");
        let (code, out, err) = ended(job);
        assert_eq!(code, 0, "{out}{err}");
        assert!(err.contains("restart 1 of 1"), "{err}");
        // All ranks of a new attempt have not drawn the weights.
        assert_eq!(result(&dir.join("run")).0[..3], want[..3], "{more}");
    }
}

/// The launcher reads it, its ranks cannot.
#[test]
fn a_configuration_may_be_a_pipe() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let words = words("run", 2, "--config /dev/stdin");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut job = phalanx(&words, dir)
        .stdin(Stdio::piped())
        .spawn()
        .expect("phalanx starts");
    let mut pipe = job.stdin.take().expect("a pipe");
    pipe.write_all(b"--lr 0.02\n--momentum 0.5\n")
        .expect("written");
    drop(pipe);
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    let want = undisturbed(dir, "--lr 0.02 --momentum 0.5");
    assert_eq!(result(&dir.join("run")).0, want);
}

#[test]
fn a_newcomer_trains_the_same_model() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let line = "train linear --epochs 1000000 --iterations 50 --threads 1 --nproc-per-node 3 --elastic --max-restarts 1 \
                --log-samples seen --output-dir run";
    let words: Vec<&str> = line.split_whitespace().collect();
    let job = phalanx(&words, dir).spawn().expect("phalanx starts");
    wait_for_step(dir, 2, 1);
    signal(process_of(1, dir), "KILL");
    wait_for_ranks(dir, 2, 3);
    // The weights of all ranks are compared after each epoch.
    let metrics = dir.join("run/metrics.jsonl");
    let last = || {
        records(&metrics)
            .last()
            .and_then(|r| r["epoch"].as_u64())
            .unwrap_or(0)
    };
    let joined_in = last();
    eventually("two more epochs", || last() > joined_in + 2);
    signal(job.id(), "INT");
    let (code, out, err) = ended(job);
    assert_eq!(code, 130, "{out}{err}");
}

/// The words of a training whose ranks have parts of the optimizer's state, in the folder `run`.
fn with_parts(run: &str, ranks: usize, more: &str) -> Vec<String> {
    let line = format!(
        "train mnist --data synthetic:{SAMPLES} --global-batch-size 24 --epochs {EPOCHS} --threads 1 --log-interval 1 \
         --test-batch-size 50 --lr 0.01 --output-dir {run} --nproc-per-node {ranks} {more}"
    );
    line.split_whitespace().map(str::to_owned).collect()
}

fn start_with_parts(dir: &Path, more: &str) -> Job {
    let more = format!("--elastic --exchange reduce-scatter --log-samples seen {more}");
    let words = with_parts("run", 4, &more);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Job::start(&mut phalanx(&words, dir))
}

/// The losses of the steps and epochs of a run, by step and whether it is an epoch's.
fn losses(run: &Path) -> BTreeMap<(u64, bool), f64> {
    let all = records(&run.join("metrics.jsonl"));
    let losses = all.iter().map(|r| {
        let loss = r.get("loss").or(r.get("test_loss"));
        let step = r["step"].as_u64().expect("a step");
        let loss = loss.and_then(Value::as_f64).expect("a loss");
        ((step, r.get("loss").is_none()), loss)
    });
    losses.collect()
}

/// That the run in `dir` has the losses of the one that `words` start, up to rounding, which grows after the step `near`.
fn check_losses(dir: &Path, words: &[String], near: u64) {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (code, out, err) = run(&words, dir);
    assert_eq!(code, 0, "{out}{err}");
    let (got, want) = (losses(&dir.join("run")), losses(&dir.join("undisturbed")));
    assert!(got.keys().eq(want.keys()), "{got:?} {want:?}");
    for (step, loss) in got {
        let most = if step.0 <= near { 1e-3 } else { 0.1 };
        assert!((loss - want[&step]).abs() < most, "{step:?}: {loss}");
    }
}

#[test]
fn ranks_with_parts_of_the_state_are_lost_and_started_again() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start_with_parts(dir, "--max-restarts 2 --save-every 3");
    wait_for_step(dir, 1, 2);
    for (change, rank) in [(2, 1), (4, 0)] {
        signal(process_of(rank, dir), "KILL");
        wait_for_ranks(dir, change, 4);
    }
    // No process takes its place.
    signal(process_of(3, dir), "KILL");
    wait_for_ranks(dir, 5, 3);
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    check_samples(dir, SAMPLES);
    check_losses(dir, &with_parts("undisturbed", 1, ""), 30);
}

#[test]
fn the_loss_of_a_part_and_its_copy_ends_the_job() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start_with_parts(dir, "--epochs 1000000");
    wait_for_step(dir, 1, 3);
    let lost = [1, 2].map(|rank| process_of(rank, dir));
    // So that no group is formed between the two.
    lost.iter().for_each(|rank| signal(*rank, "STOP"));
    lost.iter().for_each(|rank| signal(*rank, "KILL"));
    let (code, out, err) = ended(job);
    assert_eq!(code, 3, "{out}{err}");
    for words in [
        "rank 1 had it and rank 2 the copy, and both were lost",
        "start the training again, from its last checkpoint",
    ] {
        assert!(err.contains(words), "{err}");
    }
}

/// A training on a mesh of two ranks for each copy of the model, in the folder `run`.
fn on_mesh(run: &str, more: &str) -> Vec<String> {
    let line = format!(
        "train gpt --data synthetic:4000 --context 16 --layers 1 --heads 2 --width 16 --sample 0 --epochs 3 \
         --global-batch-size 8 --threads 1 --log-interval 1 --save-every 5 --output-dir {run} {more}"
    );
    line.split_whitespace().map(str::to_owned).collect()
}

fn start_on_mesh(dir: &Path, copies: usize, more: &str) -> Job {
    let ranks = 2 * copies;
    let more = format!(
        "--mesh data={copies},tensor=2 --nproc-per-node {ranks} --elastic --log-samples seen {more}"
    );
    let words = on_mesh("run", &more);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Job::start(&mut phalanx(&words, dir))
}

#[test]
fn the_copies_of_a_mesh_that_are_whole_go_on() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start_on_mesh(dir, 3, "");
    wait_for_step(dir, 1, 3);
    // The one that reports and saves goes, and then the one that does so next leaves.
    signal(process_of(0, dir), "KILL");
    wait_for_ranks(dir, 1, 4);
    wait_for_step(dir, 2, 2);
    signal(process_of(3, dir), "KILL");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    for words in [
        "world size 6 -> 4",
        "world size 4 -> 2",
        "this rank leaves the training",
    ] {
        assert!(err.contains(words), "{err}");
    }
    let words = on_mesh("undisturbed", "--mesh tensor=2 --nproc-per-node 2");
    check_losses(dir, &words, u64::MAX);
}

#[test]
fn a_mesh_of_which_no_copy_is_whole_ends_the_job() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start_on_mesh(dir, 2, "--epochs 1000000");
    wait_for_step(dir, 1, 3);
    signal(process_of(3, dir), "KILL");
    wait_for_ranks(dir, 1, 2);
    signal(process_of(1, dir), "KILL");
    let (code, out, err) = ended(job);
    assert_eq!(code, 3, "{out}{err}");
    assert!(err.contains("every model replica has lost a rank"), "{err}");
}

#[test]
fn a_stopped_rank_is_taken_out_and_the_result_is_the_same() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--evict-after 2");
    wait_for_step(dir, 1, 3);
    let stopped = process_of(1, dir);
    signal(stopped, "STOP");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    let name = format!("rank 1 (pid {stopped}, host ");
    let why = ") is stopped (SIGSTOP or a debugger) and has kept others waiting in ";
    assert!(err.contains(&name) && err.contains(why), "{err}");
    assert!(
        err.contains(" for 2 s: killed (--evict-after 2)\n"),
        "{err}"
    );
    assert!(
        err.contains(") was killed by --evict-after; the others continue without it\n"),
        "{err}"
    );
    assert!(err.contains("world size 3 -> 2"), "{err}");
    check_result(dir, 2);
}

/// The one that reports and saves; another process takes its place.
#[test]
fn a_stopped_rank_0_is_taken_out_and_started_again() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--evict-after 2 --max-restarts 1 --save-every 3");
    wait_for_step(dir, 2, 1);
    signal(process_of(0, dir), "STOP");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(
        err.matches(": killed (--evict-after 2)\n").count(),
        1,
        "{err}"
    );
    assert!(
        err.contains(") was killed by --evict-after; restart 1 of 1\n"),
        "{err}"
    );
    // Unless the training has ended before the new process had started.
    let is_in = err.contains("world size 2 -> 3");
    check_result(dir, if is_in { 3 } else { 2 });
}

#[test]
fn a_stopped_rank_does_not_keep_the_others_from_a_new_group() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--evict-after 2");
    wait_for_step(dir, 1, 3);
    let (killed, stopped) = (process_of(1, dir), process_of(2, dir));
    signal(stopped, "STOP");
    signal(killed, "KILL");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    let name = format!("rank 2 (pid {stopped}, host ");
    let why = ") is stopped (SIGSTOP or a debugger) and has kept others waiting in the new group for 2 s: killed";
    assert!(err.contains(&name) && err.contains(why), "{err}");
    assert!(err.contains("world size 3 -> 1"), "{err}");
    check_result(dir, 1);
}

/// Its own code is here a write into a pipe that nobody reads.
#[test]
fn a_rank_that_hangs_in_its_own_code_is_taken_out() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let log = dir.join("seen.1.jsonl");
    let made = Command::new("mkfifo").arg(&log).status();
    assert!(made.expect("mkfifo").success());
    let mut options = File::options();
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let options = options.read(true).write(true).custom_flags(flags);
    let mut pipe = options.open(&log).expect("a pipe");
    let size = rustix::pipe::fcntl_setpipe_size(&pipe, 4096).expect("a small pipe");
    let filled = size - 2048;
    pipe.write_all(&vec![b'\n'; filled]).expect("room");
    let job = start(dir, 3, "--evict-after 2");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains(") is in "), "{err}");
    let why = ", where others are waiting, for 2 s: killed (--evict-after 2)\n";
    assert!(
        err.contains(" and has not reached ") && err.contains(why),
        "{err}"
    );
    assert!(err.contains("rank 1 (pid "), "{err}");
    let mut written = vec![0; size];
    // All of it at once.
    let count = pipe.read(&mut written).expect("what was written");
    std::fs::remove_file(&log).expect("removed");
    std::fs::write(&log, &written[filled..count]).expect("written");
    check_result(dir, 2);
}

#[test]
fn a_short_stop_and_one_of_all_ranks_take_nobody_out() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--evict-after 3 --timeout 60");
    wait_for_step(dir, 1, 3);
    let ranks = [0, 1, 2].map(|rank| process_of(rank, dir));
    let all = |name: &str| ranks.iter().for_each(|rank| signal(*rank, name));
    // The launcher runs.
    all("STOP");
    std::thread::sleep(Duration::from_secs(5));
    all("CONT");
    wait_for_step(dir, 2, 1);
    signal(ranks[1], "STOP");
    std::thread::sleep(Duration::from_millis(700));
    // With the launcher, as when a host is suspended.
    signal(job.id(), "STOP");
    all("STOP");
    std::thread::sleep(Duration::from_secs(4));
    signal(job.id(), "CONT");
    all("CONT");
    let (code, out, err) = ended(job);
    assert_eq!(code, 0, "{out}{err}");
    assert!(!err.contains("killed (--evict-after"), "{err}");
    check_result(dir, 3);
}

#[test]
fn inspect_tells_which_ranks_were_lost_and_joined() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let job = start(dir, 3, "--epochs 1000000 --max-restarts 1");
    wait_for_step(dir, 1, 2);
    let (first, third) = (process_of(1, dir), process_of(2, dir));
    signal(first, "KILL");
    wait_for_ranks(dir, 2, 3);
    let joined = process_of(1, dir);
    signal(third, "KILL");
    wait_for_ranks(dir, 3, 2);
    signal(job.id(), "USR2");
    let newest = dir.join("run/flight/rank-3.json");
    eventually("the recorders are written", || newest.exists());
    let inspect = |more: &[&str]| succeed(&[&["inspect", "run"][..], more].concat(), dir).0;
    let text = inspect(&[]);
    let lost = |rank: usize, pid: u32, generation: usize| {
        let who = format!(" UTC  rank {rank} (pid {pid}, host ");
        let how = format!(") was lost in generation {generation}: was killed by SIGKILL; epoch ");
        text.lines()
            .position(|line| line.contains(&who) && line.contains(&how))
    };
    let line = |what: &str| text.lines().position(|line| line.contains(what));
    let joins = line(&format!("rank 3 (pid {joined}, host "));
    let formed =
        line(" UTC  generation 3 was formed of ranks 0 and 3, which the group numbers from 0");
    assert!(text.starts_with("generation 3: "), "{text}");
    assert!(
        text.contains(") joined generation 2 in place of rank 1\n"),
        "{text}"
    );
    let order = [lost(1, first, 0), joins, lost(2, third, 2), formed];
    assert!(order.is_sorted() && order[0].is_some(), "{order:?}\n{text}");
    // The newest generation only.
    assert!(line("rank 0          rank 3").is_some(), "{text}");
    let story: Value = serde_json::from_str(&inspect(&["--json"])).expect("JSON");
    assert_eq!(story["members"], serde_json::json!([0, 3]));
    assert_eq!(story["missing"], serde_json::json!([]));
    assert!(
        story["notes"].as_array().is_some_and(Vec::is_empty),
        "{story}"
    );
    signal(job.id(), "INT");
    let (code, out, err) = ended(job);
    assert_eq!(code, 130, "{out}{err}");
}

#[test]
fn the_loss_of_all_ranks_ends_the_job() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let job = start(dir.path(), 2, "--epochs 1000000");
    wait_for_step(dir.path(), 1, 1);
    for rank in [0, 1] {
        signal(process_of(rank, dir.path()), "KILL");
    }
    let (code, out, err) = ended(job);
    assert_eq!(code, 3, "{out}{err}");
    assert!(err.contains("was killed by SIGKILL"), "{err}");
}

#[test]
fn ranks_that_have_not_begun_to_train_cannot_go_on_without_one() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut job = start(dir.path(), 3, "--epochs 1000000 --max-restarts 0");
    eventually("a rank runs", || find_process(1, dir.path()).is_some());
    if let Some(rank) = find_process(1, dir.path()) {
        signal(rank, "KILL");
    }
    // Unless the group had formed already, on a fast machine: the others go on then.
    let events = dir.path().join("run/events.jsonl");
    let mut over = false;
    eventually("the job ends, or goes on without the rank", || {
        over = job.try_wait().expect("a child").is_some();
        over || records(&events).iter().any(|e| e["after"] == 2)
    });
    if !over {
        signal(job.id(), "INT");
    }
    let (code, out, err) = ended(job);
    assert!(code != 0, "{out}{err}");
    assert!(err.contains("rank 1"), "{err}");
}

/// While fewer than two are there, the ranks of the others wait.
#[test]
fn nodes_come_and_go_and_the_result_is_the_same() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let node = |ranks| start_node(dir, ranks, port, "--nnodes 2:3");
    let first = node(2);
    wait_for_store(port);
    let leaves = node(1);
    wait_for_step(dir, 1, 2);
    signal(leaves.id(), "TERM");
    let (code, out, err) = ended(leaves);
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains("SIGTERM: rank 2 leaves after a step"), "{err}");
    wait_for_log(dir, "waiting: 1 of at least 2 nodes are present", 1);
    let killed = node(1);
    wait_for_log(dir, "going on with 3 ranks", 1);
    wait_for_ranks(dir, 2, 3);
    signal(killed.id(), "KILL");
    ended(killed);
    wait_for_log(dir, "waiting: 1 of at least 2 nodes are present", 2);
    let last = node(2);
    let (code, out, err) = ended(last);
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains("joining the job as node 3 (host "), "{err}");
    let (code, out, err) = ended(first);
    assert_eq!(code, 0, "{out}{err}");
    let said = "has left after SIGTERM; the ranks of the other nodes continue";
    assert!(err.contains(said), "{said}: {err}");
    // The others go on as soon as one of the two ranks of the last node has joined; the other one joins when it can.
    let goes_on = |ranks| err.contains(&format!("elastic  going on with {ranks} ranks after "));
    assert!(goes_on(3), "{err}");
    assert!(err.contains("equal on all 4 ranks"), "{err}");
    // The second one's guard says why, or the host of the store has seen its connection end.
    let losses = err.matches("the ranks of the other nodes continue").count();
    assert_eq!(losses, 2, "{err}");
    check_result(dir, 4);
}

#[test]
fn ranks_that_wait_for_nodes_can_be_stopped_and_resumed() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let node = || start_node(dir, 1, port, "--nnodes 2:3 --resume auto");
    for is_first in [true, false] {
        let first = node();
        wait_for_store(port);
        let other = node();
        if !is_first {
            for job in [first, other] {
                let (code, out, err) = ended(job);
                assert_eq!(code, 0, "{out}{err}");
            }
            break;
        }
        wait_for_step(dir, 1, 2);
        signal(other.id(), "KILL");
        ended(other);
        wait_for_log(dir, "waiting: 1 of at least 2 nodes are present", 1);
        signal(first.id(), "INT");
        let (code, out, err) = ended(first);
        assert_eq!(code, 130, "{out}{err}");
        assert!(err.contains("continue with --resume auto"), "{err}");
    }
    // One that is resumed does not know its initial weights.
    let (hashes, world) = result(&dir.join("run"));
    assert_eq!((&hashes[..3], world), (&usual().0[..3], 2.into()));
}

/// There is nobody to whom it could hand over.
#[test]
fn sigterm_to_the_node_with_the_last_rank_ends_the_job() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let node = |ranks| start_node(dir, ranks, port, "--nnodes 2:3 --epochs 1000000");
    let first = node(1);
    wait_for_store(port);
    let last = node(1);
    wait_for_step(dir, 1, 2);
    signal(process_of(0, dir), "KILL");
    wait_for_ranks(dir, 1, 1);
    signal(last.id(), "TERM");
    for job in [first, last] {
        let (code, out, err) = ended(job);
        assert_eq!(code, 130, "{out}{err}");
    }
}

/// Of a fixed number of nodes too, with ranks of the first one lost besides.
#[test]
fn the_ranks_of_a_lost_node_are_done_without() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let nodes: Vec<Job> = (0..3)
        .map(|rank| start_node(dir, 1, port, &format!("--nnodes 3 --node-rank {rank}")))
        .collect();
    wait_for_step(dir, 1, 2);
    signal(nodes[1].id(), "KILL");
    wait_for_ranks(dir, 1, 2);
    // Its launcher hosts the store, and stays.
    signal(process_of(0, dir), "KILL");
    for (node, job) in nodes.into_iter().enumerate() {
        let (code, out, err) = ended(job);
        if node != 1 {
            assert_eq!(code, 0, "{node}: {out}{err}");
        }
    }
    check_result(dir, 1);
}

/// The launchers that have the store are killed one after the other.
#[test]
fn the_store_moves_when_its_launcher_is_killed() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let nodes =
        (0..3).map(|rank| start_node(dir, 1, port, &format!("--nnodes 3 --node-rank {rank}")));
    let nodes: Vec<Job> = nodes.collect();
    for (node, step) in [(0, 2), (1, 4)] {
        wait_for_step(dir, step, 2);
        signal(nodes[node].id(), "KILL");
        wait_for_ranks(dir, node + 1, 2 - node as u64);
    }
    for (node, job) in nodes.into_iter().enumerate() {
        let (code, out, err) = ended(job);
        if node == 2 {
            assert_eq!(code, 0, "{out}{err}");
            for host in [1, 2] {
                let said = format!("rendezvous store moved to node {host} (host ");
                assert!(err.contains(&said), "{err}");
            }
            let said = "the connection of its launcher was closed, and it gave no reason; the ranks of the other nodes continue";
            assert!(err.contains(said), "{err}");
        }
    }
    check_result(dir, 1);
}

/// One node leaves while the launcher with the store is killed or leaves, too: before it, after it, and during the election, in
/// which the leaving one may be elected.
#[test]
fn a_node_that_leaves_while_the_store_moves_harms_no_other() {
    for (host_gets, leaver, is_first, pause) in [
        ("KILL", 1, true, 0),
        ("KILL", 1, false, 0),
        ("KILL", 2, false, 60),
        ("KILL", 1, false, 250),
        ("TERM", 1, true, 0),
    ] {
        let (dir, port) = (folder_of_nodes(), free_port());
        let dir = dir.path();
        let node = |rank| start_node(dir, 1, port, &format!("--nnodes 3 --node-rank {rank}"));
        let mut nodes: Vec<Job> = (0..3).map(node).collect();
        wait_for_step(dir, 1, 2);
        let mut signals = [(0, host_gets), (leaver, "TERM")];
        if is_first {
            signals.reverse();
        }
        for (node, name) in signals {
            signal(nodes[node].id(), name);
            std::thread::sleep(Duration::from_millis(pause));
        }
        let case = format!("{host_gets} {leaver} {is_first} {pause}");
        let ends: Vec<_> = nodes.drain(..).map(ended).collect();
        for (node, (code, out, err)) in ends.iter().enumerate() {
            if node > 0 || host_gets == "TERM" {
                assert_eq!(*code, 0, "{case}: node {node}: {out}{err}");
            }
            let leaves = node == leaver || node == 0 && host_gets == "TERM";
            if leaves {
                let said = "has left after SIGTERM; the other nodes continue";
                assert!(err.contains(said), "{case}: node {node}: {err}");
            }
        }
        check_result(dir, 1);
    }
}

#[test]
fn nodes_find_the_store_where_it_has_moved() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    // The ranks wait before the training is over.
    let node = || start_node(dir, 1, port, "--nnodes 2:3 --epochs 10");
    let first = node();
    wait_for_store(port);
    let other = node();
    wait_for_step(dir, 1, 2);
    signal(first.id(), "TERM");
    let (code, out, err) = ended(first);
    assert_eq!(code, 0, "{out}{err}");
    assert!(
        err.contains("has left after SIGTERM; the other nodes continue"),
        "{err}"
    );
    wait_for_log(dir, "waiting: 1 of at least 2 nodes are present", 1);
    // Without the others it would start a job of its own.
    let again = node();
    let (code, out, err) = ended(other);
    assert_eq!(code, 0, "{out}{err}");
    let (code, out, err) = ended(again);
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains("rendezvous store moved to "), "{err}");
    let (hashes, world) = result(&dir.join("run"));
    assert_eq!((hashes, world), (undisturbed(dir, "--epochs 10"), 2.into()));
}

#[test]
fn a_node_that_waits_for_a_place_finds_the_store_where_it_has_moved() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let node = || start_node(dir, 1, port, "--nnodes 1:2 --epochs 10");
    let first = node();
    wait_for_store(port);
    let other = node();
    eventually("the second node runs", || find_process(1, dir).is_some());
    wait_for_step(dir, 1, 2);
    // The training goes on when the third node is there.
    let stopped = process_of(1, dir);
    signal(stopped, "STOP");
    let mut third = node();
    let (sender, lines) = channel();
    let stderr = BufReader::new(third.stderr.take().expect("a pipe"));
    let reader = std::thread::spawn(move || {
        let mut lines = stderr.lines().map_while(Result::ok);
        lines.try_for_each(|line| sender.send(line).ok());
    });
    let hears = |what: &str| {
        let mut all = String::new();
        while let Ok(line) = lines.recv_timeout(2 * SOON) {
            if line.contains(what) {
                return;
            }
            all = all + &line + "\n";
        }
        panic!("never said: {what}\n{all}");
    };
    hears("standing by");
    signal(first.id(), "KILL");
    ended(first);
    hears("rendezvous store moved to ");
    hears("joining the job as node 2 (host ");
    eventually("its rank runs", || find_process(2, dir).is_some());
    signal(stopped, "CONT");
    for job in [other, third] {
        let (code, out, err) = ended(job);
        assert_eq!(code, 0, "{out}{err}");
    }
    drop(lines);
    reader.join().expect("it reads to the end");
    let (hashes, world) = result(&dir.join("run"));
    assert_eq!((hashes, world), (undisturbed(dir, "--epochs 10"), 2.into()));
}

/// For longer than a launcher may be silent: the others go on with the run's folder, and this host must not write into it when
/// it goes on.
#[test]
fn a_stopped_host_with_the_store_and_rank_0_loses_both() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let nodes = (0..3).map(|rank| {
        start_node(
            dir,
            1,
            port,
            &format!("--nnodes 3 --lost-after 2 --node-rank {rank}"),
        )
    });
    let mut nodes: Vec<Job> = nodes.collect();
    wait_for_step(dir, 1, 2);
    let (launcher, rank) = (nodes[0].id(), process_of(0, dir));
    signal(launcher, "STOP");
    signal(rank, "STOP");
    wait_for_ranks(dir, 1, 2);
    signal(rank, "CONT");
    signal(launcher, "CONT");
    let (code, out, err) = ended(nodes.remove(0));
    assert_eq!(code, 3, "{out}{err}");
    assert!(
        err.contains("this node reaches no majority of the ranks"),
        "{err}"
    );
    for job in nodes {
        let (code, out, err) = ended(job);
        assert_eq!(code, 0, "{out}{err}");
    }
    check_result(dir, 2);
}

/// The next rank trains on without a folder, until something must be saved.
#[test]
fn a_new_rank_0_that_cannot_write_leaves_the_results_to_another() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let hosts = ["first", "second", "third"].map(|name| dir.join(name));
    for host in &hosts {
        std::fs::create_dir(host).expect("a folder");
        std::fs::copy(dir.join("token"), host.join("token")).expect("copied");
    }
    std::fs::write(hosts[1].join("run"), "in the way").expect("written");
    let [first, second, third] = [0, 1, 2].map(|rank| {
        let flags = format!("--nnodes 3 --node-rank {rank}");
        start_node(&hosts[rank], 1, port, &flags)
    });
    wait_for_step(&hosts[0], 1, 2);
    signal(first.id(), "KILL");
    ended(first);
    let (code, out, err) = ended(second);
    assert_eq!(code, 0, "{out}{err}");
    for said in [
        "warning: nothing is written into run from now on, and no checkpoint is saved: run is a file, not a folder",
        "this rank leaves the training, as it cannot save its result: run is a file, not a folder",
        "exited with code 3 (it lost a peer); the others continue without it",
    ] {
        assert!(err.contains(said), "{err}");
    }
    let (code, out, err) = ended(third);
    assert_eq!(code, 0, "{out}{err}");
    let (hashes, world) = result(&hosts[2].join("run"));
    assert_eq!((hashes, world), (usual().0.clone(), 1.into()));
    assert!(hosts[2].join("run/mnist_cnn.safetensors").is_file());
}

/// A launcher that joins with a mistake of its own is refused, and the training goes on.
#[test]
fn only_the_newcomer_that_differs_is_refused() {
    let (dir, port) = (folder_of_nodes(), free_port());
    let dir = dir.path();
    let node = |program: &str, more: &str| {
        let line = format!(
            "train {program} --threads 1 --nproc-per-node 1 --nnodes 1:2 --lost-after 20 --init-timeout 60 \
             --master-addr 127.0.0.1 --master-port {port} --token-file token {more}"
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        Job::start(&mut phalanx(&words, dir))
    };
    let line =
        "mnist --data synthetic:4800 --global-batch-size 48 --log-interval 1 --output-dir run";
    let job = node(line, "--epochs 1000000 --lr 0.01");
    wait_for_log(dir, "\"attempt\"", 1);
    let steps = || records(&dir.join("run/metrics.jsonl")).len();
    eventually("a step", || steps() > 0);
    for (program, more, want) in [
        (
            line,
            "--epochs 1000000 --lr 0.02",
            "has \"--lr 0.01\" where this rank",
        ),
        (line, "--epochs 7 --lr 0.01", "has \"--epochs 7\""),
        (
            line,
            "--epochs 1000000 --lr 0.01 --precision bf16",
            "has \"--precision bf16\"",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --bucket-cap-mb 1",
            "has \"no --bucket-cap-mb\"",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --resume auto",
            "has \"--resume auto\"",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --save-every 3",
            "has \"--save-every 3\"",
        ),
        (
            "linear --output-dir other",
            "--epochs 1",
            "another job is at",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --nnodes 1:3",
            "was started with --nnodes 1:2",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --max-restarts 1",
            "was started with --max-restarts 0",
        ),
        (
            line,
            "--epochs 1000000 --lr 0.01 --log-samples no/such/seen",
            "no/such",
        ),
    ] {
        let before = steps();
        let (code, out, err) = ended(node(program, more));
        assert!([1, 2].contains(&code), "{more}: {code}: {out}{err}");
        assert!(err.contains(want), "{more}: {err}");
        eventually("the training goes on", || steps() > before);
    }
    let right = node(line, "--epochs 1000000 --lr 0.01");
    wait_for_ranks(dir, 1, 2);
    signal(job.id(), "INT");
    for (job, name) in [(job, "the first node"), (right, "the second one")] {
        let (code, out, err) = ended(job);
        assert_eq!(code, 130, "{name}: {out}{err}");
    }
}

/// A rank that is started again finds its data gone: the others continue without it.
#[test]
fn a_rank_that_cannot_start_again_is_done_without() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let dir = dir.path();
    let text = "To be, or not to be, that is the question.\n".repeat(400);
    std::fs::write(dir.join("text"), text).expect("written");
    let line = "train gpt --data text --layers 1 --heads 1 --context 16 --batch-size 2 --epochs 100000 \
                --threads 1 --nproc-per-node 3 --elastic --max-restarts 3 --log-interval 1 --output-dir run";
    let words: Vec<&str> = line.split_whitespace().collect();
    let job = Job::start(&mut phalanx(&words, dir));
    let steps = || records(&dir.join("run/metrics.jsonl")).len();
    eventually("a step", || steps() > 2);
    std::fs::rename(dir.join("text"), dir.join("moved")).expect("moved");
    signal(process_of(2, dir), "KILL");
    wait_for_ranks(dir, 1, 2);
    let before = steps();
    eventually("the others go on", || steps() > before + 600);
    signal(job.id(), "INT");
    let (code, out, err) = ended(job);
    assert_eq!(code, 130, "{out}{err}");
    assert!(err.contains("restart 1 of 3"), "{err}");
    assert!(err.contains("cannot join") && err.contains("text"), "{err}");
    assert!(err.contains("the others continue without it"), "{err}");
}

#[test]
fn an_error_of_the_program_ends_the_job_at_once() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let job = start(dir.path(), 2, "--lr 1e30 --max-restarts 0");
    let (code, out, err) = ended(job);
    assert_eq!(code, 1, "{out}{err}");
    assert!(err.contains("the loss became"), "{err}");
}

#[test]
fn what_cannot_go_on_without_a_rank_is_refused_before_it_begins() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (more, want) in [
        ("--fully-sharded", "leave out --fully-sharded"),
        ("--max-restarts 1", "leave out --max-restarts"),
    ] {
        let more = format!("--mesh data=2 --nproc-per-node 2 --elastic {more}");
        let words = on_mesh("a", &more);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (code, out, err) = run(&words, dir.path());
        assert_eq!(code, 2, "{more}: {out}{err}");
        assert!(err.contains(want), "{more}: {err}");
    }
    for (more, want) in [
        (
            "--sampler torch",
            "--elastic divides every batch among the ranks that are left",
        ),
        (
            "--transport thread",
            "--elastic and --max-restarts are for ranks that are processes",
        ),
        (
            "--evict-after 0.5",
            "--evict-after must be at least 1 second",
        ),
        (
            "--evict-after 60",
            "--evict-after 60 is not less than --timeout 60",
        ),
        (
            "--nnodes 1:2 --node-rank 0 --master-addr 127.0.0.1 --timeout 1.5",
            "--lost-after 2 is not less than --timeout 1.5",
        ),
    ] {
        let line = format!(
            "train mnist --data synthetic:64 --epochs 1 --nproc-per-node 2 --elastic --output-dir a {more}"
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        let (code, out, err) = run(&words, dir.path());
        assert_eq!(code, 2, "{more}: {out}{err}");
        assert!(err.contains(want), "{more}: {err}");
    }
}

#[test]
fn ranks_are_taken_out_of_elastic_jobs_only() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for line in [
        "train mnist --data synthetic:64 --evict-after 5",
        "launch --evict-after 5 -- true",
    ] {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (code, out, err) = run(&words, dir.path());
        assert_eq!(code, 2, "{line}: {out}{err}");
        assert!(err.contains("add --elastic"), "{line}: {err}");
    }
}
