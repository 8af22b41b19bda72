//! How a run ended, where its own process could not write it: it was killed, or another rank ended the job.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx_base::env::Env;
use phalanx_base::files::{Dir, ask_lock, try_lock};
use phalanx_base::process::ProcessName;
use serde_json::{Value, json};

use crate::args::{mlflow, store};
use crate::delivery::{STORE, lock_of, state_of};
use crate::tensorboard::TENSORBOARD;
use crate::{
    Delivery, EVENTS_FILE, Error, ErrorKind, FINISH_WAIT, METRICS_FILE, Result, TensorBoard,
    Tracker, Wandb, upload,
};

/// The file that a training locks while it runs.
const LOCK_FILE: &str = ".lock";

/// The reason of a run's failure, if no process saw its end.
const UNSEEN: &str = "its process ended without a message: it was killed, or its host went down";

/// How long a run is quiet whose process is not known to have ended, before that is taken for its end.
const QUIET: Duration = Duration::from_secs(60);

/// Clocks that were read one after another may differ by as much.
const CLOCK_S: f64 = 1.0;

/// The trackers' names.
const WANDB: &str = "wandb";
const MLFLOW: &str = "mlflow";

/// How long to wait for a process that is ending to let go of a tracker.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// What each tracker gets, also where another one has used up the time.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// How a run ended that has not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By an error.
    Failed,
    /// Somebody has stopped it.
    Stopped,
}

/// The last attempt in `events.jsonl`.
#[derive(Default)]
struct Last {
    start: Option<Value>,
    finish: Option<Value>,
    /// Where the last complete line ends.
    end: u64,
}

/// Writes into `events.jsonl` of the run in `dir` that it has ended as `ending` says, with the reason `error`: after the
/// run's own record, if that says less. Nothing is written to a run that has finished, or whose last attempt began
/// before `since`: this is not that run's end. Returns whether this is the end of the run, which has not finished.
///
/// The training's process must have ended.
///
/// # Errors
///
/// `System`, naming the file.
pub fn record_end(dir: &Path, since: SystemTime, ending: Ending, error: &str) -> Result<bool> {
    let dir = Dir::open(dir)?;
    let Some(last) = last_attempt(&dir)? else {
        return Ok(false);
    };
    let began = last.start.as_ref().and_then(|start| start["time"].as_f64());
    if began.is_none_or(|began| began + CLOCK_S < seconds(since)) {
        return Ok(false);
    }
    let said = last.finish.as_ref().map(|finish| &finish["status"]);
    if said.is_some_and(|status| status == "finished") {
        return Ok(false);
    }
    let is_same = || {
        let finish = last.finish.as_ref();
        ending == Ending::Failed && finish.is_some_and(|finish| finish["error"] == error)
    };
    if said.is_some_and(|status| status != "failed") || is_same() {
        return Ok(true);
    }
    append(&dir, &last, seconds(SystemTime::now()), ending, error)?;
    Ok(true)
}

/// Writes into `events.jsonl` of the run in `dir`, its file for TensorBoard and its offline run of wandb, that it has failed,
/// if its process has ended without saying how. Nothing is written while it may run: while somebody has its lock or the lock
/// cannot be asked, and where its process cannot be seen, until nothing was written for a minute.
///
/// # Errors
///
/// `System`, naming the file.
pub fn record_unseen_end(dir: &Path, env: &Env) -> Result<()> {
    let run = Dir::open(dir)?;
    let Some(last) = last_attempt(&run)?.filter(|last| last.finish.is_none()) else {
        return Ok(());
    };
    if last.start.is_none() || may_run(&run)? {
        return Ok(());
    }
    let at = written(&run).map_or(0.0, seconds);
    append(&run, &last, at, Ending::Failed, UNSEEN)?;
    // A server is asked by `--upload` only.
    let mut files = used(dir)
        .into_iter()
        .filter(|name| ![MLFLOW, STORE].contains(name));
    files.try_for_each(|name| upload(dir, tracker(dir, name, env)?))
}

/// Whether the training in `dir` may still run. It has ended if no process has its lock, and its process, which the lock names,
/// is seen to have ended. Where it cannot be seen, as from another host, it has ended if no process has the lock and nothing was
/// written for a minute; where the lock cannot be asked, it may run.
pub(crate) fn may_run(dir: &Dir) -> Result<bool> {
    let lock = dir.open_read(LOCK_FILE)?;
    let asked = lock.as_ref().map_or(Some(true), ask_lock);
    let name = lock.and_then(|file| serde_json::from_reader(file.take(4096)).ok());
    let quiet = written(dir).map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
    let is_running = name.and_then(|name: ProcessName| name.is_running());
    Ok(is_possible(asked, is_running, quiet))
}

/// [`may_run`], where its lock is `free` and its process `is_running`, as far as that is known.
fn is_possible(free: Option<bool>, is_running: Option<bool>, quiet: Option<Duration>) -> bool {
    match (free, is_running) {
        (Some(false), _) | (None, None) => true,
        (_, Some(is_running)) => is_running,
        (Some(true), None) => quiet.is_some_and(|quiet| quiet < QUIET),
    }
}

/// When the run in `dir` was written last.
fn written(dir: &Dir) -> Option<SystemTime> {
    let of = |name| {
        let file = dir.open_read(name).ok()??;
        file.metadata().ok()?.modified().ok()
    };
    [EVENTS_FILE, METRICS_FILE].into_iter().filter_map(of).max()
}

/// Hands the rest of the run in `dir` to the trackers that it was handed to by its own process. *Blocks* for at most
/// [`FINISH_WAIT`] and a second for each further tracker, longer for those that [ask for it](Tracker::patience).
///
/// Returns how much each of them did not get, and why.
pub fn deliver_rest(dir: &Path, env: &Env) -> Vec<Error> {
    let until = Instant::now() + FINISH_WAIT;
    let mut errors = Vec::new();
    for name in used(dir) {
        let deliver = || {
            let tracker = tracker(dir, name, env)?;
            free(dir, name);
            let left = until.saturating_duration_since(Instant::now());
            Delivery::start(dir, tracker)?.finish(left.max(LEAST_WAIT))
        };
        errors.extend(deliver().err());
    }
    errors
}

/// The trackers that have begun with the run, by what they left in its folder.
fn used(dir: &Path) -> Vec<&'static str> {
    let Ok(dir) = Dir::open(dir) else {
        return Vec::new();
    };
    let mut names = vec![TENSORBOARD, WANDB, MLFLOW, STORE];
    names.retain(|name| dir.has(&lock_of(name)));
    names
}

/// The tracker `name` of the run in `dir`, as its own process had it.
fn tracker(dir: &Path, name: &str, env: &Env) -> Result<Box<dyn Tracker + Send>> {
    let state = || Ok::<_, Error>(state_of(&Dir::open(dir)?, name));
    match name {
        WANDB => Ok(Box::new(Wandb::new(env))),
        // Without an address, the environment has it.
        MLFLOW => mlflow(state()?["uri"].as_str().filter(|uri| !uri.is_empty()), env),
        STORE => store(state()?["url"].as_str().unwrap_or_default()),
        _ => Ok(Box::new(TensorBoard::default())),
    }
}

/// Waits a moment for a process that is ending to let go of the tracker `name`.
fn free(dir: &Path, name: &str) {
    let until = Instant::now() + LOCK_WAIT;
    let is_held = || {
        let dir = Dir::open(dir).ok()?;
        let file: File = dir.open_read(&lock_of(name)).ok()??;
        Some(!try_lock(&file))
    };
    while is_held() == Some(true) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn append(dir: &Dir, last: &Last, time: f64, ending: Ending, error: &str) -> Result<()> {
    let start = last.start.as_ref().unwrap_or(&Value::Null);
    let began = start["time"].as_f64().unwrap_or(time);
    let elapsed = start["elapsed_s"].as_f64().unwrap_or(0.0) + (time - began).max(0.0);
    let status = match ending {
        Ending::Failed => "failed",
        Ending::Stopped => "stopped",
    };
    let event = json!({
        "kind": "finish", "time": time, "elapsed_s": elapsed, "status": status, "error": error,
    });
    let written = || -> std::io::Result<()> {
        let mut file = dir
            .append_file(EVENTS_FILE)
            .map_err(std::io::Error::other)?;
        // A line that the process was killed in.
        file.set_len(last.end)?;
        file.write_all(format!("{event}\n").as_bytes())
    };
    written().map_err(|e| failed(dir, e))
}

/// Reads which attempt was the last one in `events.jsonl`, and how it ended; none, where there is no such file.
fn last_attempt(dir: &Dir) -> Result<Option<Last>> {
    let Some(file) = dir.open_read(EVENTS_FILE)? else {
        return Ok(None);
    };
    let mut last = Last::default();
    let mut file = BufReader::with_capacity(1 << 18, file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = file
            .read_until(b'\n', &mut line)
            .map_err(|e| failed(dir, e))?;
        if read == 0 || line.last() != Some(&b'\n') {
            return Ok(Some(last));
        }
        last.end += read as u64;
        // Histograms are long, and no ends.
        if line.len() > 1 << 16 {
            continue;
        }
        let Ok(event) = serde_json::from_slice::<Value>(&line) else {
            continue;
        };
        match event["kind"].as_str() {
            Some("start") => (last.start, last.finish) = (Some(event), None),
            Some("finish") => last.finish = Some(event),
            _ => {}
        }
    }
}

fn failed(dir: &Dir, e: std::io::Error) -> Error {
    let what = format!("cannot write {}", dir.path().join(EVENTS_FILE).display());
    Error::new(ErrorKind::System, what).caused_by(e)
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A run whose `events.jsonl` has these lines.
    fn run(events: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("folder");
        fs::write(dir.path().join(EVENTS_FILE), events).expect("written");
        dir
    }

    fn lines(dir: &Path) -> Vec<Value> {
        let text = fs::read_to_string(dir.join(EVENTS_FILE)).expect("read");
        assert!(text.ends_with('\n'));
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }

    fn at(time: f64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs_f64(time)
    }

    const START: &str = r#"{"kind":"start","time":1000.0,"elapsed_s":2.0}"#;

    #[test]
    fn a_run_without_an_end_gets_one_after_its_last_whole_line() {
        let dir = run(&format!("{START}\n{{\"kind\":\"system\",\"ti"));
        let record = || record_end(dir.path(), at(999.0), Ending::Failed, "rank 1 was killed");
        assert!(record().expect("written"));
        let all = lines(dir.path());
        assert_eq!(all.len(), 2);
        assert_eq!(
            [&all[1]["status"], &all[1]["error"]],
            ["failed", "rank 1 was killed"]
        );
        let (time, elapsed) = (all[1]["time"].as_f64().expect("time"), &all[1]["elapsed_s"]);
        assert_eq!(*elapsed, 2.0 + (time - 1000.0));
        // Said already.
        assert!(record().expect("nothing to write"));
        assert_eq!(lines(dir.path()).len(), 2);
    }

    #[test]
    fn what_the_launcher_knows_counts_more_than_what_the_run_failed_by() {
        for (own, ending, is_end, lines_after) in [
            (r#""failed","error":"lost rank 1""#, Ending::Failed, true, 3),
            (
                r#""failed","error":"lost rank 1""#,
                Ending::Stopped,
                true,
                3,
            ),
            (r#""failed""#, Ending::Failed, true, 3),
            (r#""stopped""#, Ending::Failed, true, 2),
            (r#""finished""#, Ending::Failed, false, 2),
        ] {
            let own = format!("{{\"kind\":\"finish\",\"time\":1001.0,\"status\":{own}}}");
            let dir = run(&format!("{START}\n{own}\n"));
            let ended = record_end(dir.path(), at(1000.5), ending, "rank 1 was killed");
            assert_eq!(ended.expect("read"), is_end, "{own}");
            assert_eq!(lines(dir.path()).len(), lines_after, "{own}");
        }
    }

    #[test]
    fn the_run_of_another_job_stays_as_it_is() {
        let dir = run(&format!("{START}\n"));
        let record = |dir: &Path| record_end(dir, at(1002.0), Ending::Failed, "why").expect("read");
        assert!(!record(dir.path()));
        assert_eq!(lines(dir.path()).len(), 1);
        // One that has logged nothing.
        let empty = tempfile::tempdir().expect("folder");
        assert!(!record(empty.path()) && !empty.path().join(EVENTS_FILE).exists());
    }

    fn age(dir: &Path, seconds: u64) {
        let events = File::options().append(true).open(dir.join(EVENTS_FILE));
        let then = SystemTime::now() - Duration::from_secs(seconds);
        events.expect("file").set_modified(then).expect("set");
    }

    #[test]
    fn only_a_run_that_nobody_holds_is_said_to_have_failed() {
        let dir = run(&format!("{START}\n"));
        age(dir.path(), 61);
        let lock = fs::File::create(dir.path().join(LOCK_FILE)).expect("file");
        assert!(try_lock(&lock));
        record_unseen_end(dir.path(), &Env::new()).expect("read");
        assert_eq!(lines(dir.path()).len(), 1);
        drop(lock);
        for _ in 0..2 {
            record_unseen_end(dir.path(), &Env::new()).expect("written");
            let all = lines(dir.path());
            assert_eq!((all.len(), &all[1]["error"]), (2, &json!(UNSEEN)));
        }
    }

    #[test]
    fn a_run_whose_process_is_not_known_to_have_ended_must_be_quiet_for_a_minute() {
        let own = ProcessName::own();
        let mut ended = own.clone();
        ended.started += 1;
        let mut elsewhere = own.clone();
        "another kernel".clone_into(&mut elsewhere.machine);
        let text = |name: &ProcessName| serde_json::to_string(name).expect("JSON");
        for (lock, writes_early, writes_late) in [
            (Some(text(&own)), false, false),
            (Some(text(&ended)), true, true),
            (Some(text(&elsewhere)), false, true),
            // Of an older version.
            (Some("1234\n".to_owned()), false, true),
            (Some(String::new()), false, true),
            (None, false, true),
        ] {
            for (seconds, writes) in [(0, writes_early), (59, writes_early), (70, writes_late)] {
                let dir = run(&format!("{START}\n{{\"kind\":\"sys"));
                if let Some(lock) = &lock {
                    fs::write(dir.path().join(LOCK_FILE), lock).expect("written");
                }
                age(dir.path(), seconds);
                let before = fs::read(dir.path().join(EVENTS_FILE)).expect("read");
                record_unseen_end(dir.path(), &Env::new()).expect("read");
                let after = fs::read(dir.path().join(EVENTS_FILE)).expect("read");
                assert_eq!(before != after, writes, "{lock:?} after {seconds} s");
            }
        }
        // Where the lock cannot be asked.
        let hour = Some(Duration::from_secs(3600));
        assert!(is_possible(None, None, hour) && is_possible(None, Some(true), hour));
        assert!(!is_possible(None, Some(false), Some(Duration::ZERO)));
        // A clock that is behind the file's.
        let dir = run(&format!("{START}\n"));
        let events = File::options()
            .append(true)
            .open(dir.path().join(EVENTS_FILE));
        let later = SystemTime::now() + Duration::from_secs(600);
        events.expect("file").set_modified(later).expect("set");
        record_unseen_end(dir.path(), &Env::new()).expect("read");
        assert_eq!(lines(dir.path()).len(), 1);
    }
}
