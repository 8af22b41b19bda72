//! Reads the files of a run's folder as they grow.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use phalanx_base::files::Dir;
use phalanx_report::Resumption;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, ErrorKind, Result};

/// The run: settings, model, ranks.
pub const RUN_FILE: &str = "run.json";
/// Numbers, by step and by epoch.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// What else happens.
pub const EVENTS_FILE: &str = "events.jsonl";
/// The results of a complete run.
pub const SUMMARY_FILE: &str = "summary.json";

/// What one poll reads of a growing file.
const READ_BYTES: u64 = 256 << 10;

/// A line that is longer is left out.
const LONGEST_LINE: u64 = 16 << 20;

/// Limit for `run.json` and `summary.json`.
pub(crate) const LARGEST_FILE: u64 = 64 << 20;

/// Events that an attempt writes again for the steps that it takes again.
const LOGGED: [&str; 5] = ["watch", "image", "table", "text", "rows"];

/// The start of an attempt is shorter.
const LONGEST_START: usize = 1 << 12;

/// This many bytes before a position show whether a file still has what was read of it.
const TAIL_BYTES: u64 = 256;

/// Something that a run has logged.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// `run.json`, when it is new or replaced.
    Run(Value),
    /// A line of `metrics.jsonl`.
    Metrics(Value),
    /// A line of `events.jsonl`.
    Event(Value),
    /// `summary.json`, when it is new or replaced; after the records of the other files that were written before it.
    Summary(Value),
}

/// How far a run's folder has been read. It can be kept as JSON, and is of use for as long as the folder has the
/// same run: another one is read from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Position {
    /// The run's `id`.
    id: Option<String>,
    run: Option<Stamp>,
    summary: Option<Stamp>,
    metrics: Lines,
    events: Lines,
    /// The last steps that were read: of records of a step, of an epoch, of the program's own.
    steps: [Mark; 3],
    /// `time` of the last event that was read.
    time: Option<f64>,
}

impl Position {
    /// The beginning of the run `id`.
    pub(crate) fn beginning(id: Option<&str>) -> Position {
        Position {
            id: id.map(str::to_owned),
            ..Position::default()
        }
    }

    /// The run's `id`.
    pub(crate) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }
}

/// A version of a file that is replaced as a whole: inode, size, and when it was written.
type Stamp = (u64, u64, i64, i64);

/// A place in a file of lines.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Lines {
    offset: u64,
    /// CRC-32 of up to [`TAIL_BYTES`] before it.
    tail: u32,
    /// It is inside a line that is too long.
    is_inside: bool,
}

/// The highest step of a kind of records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Mark {
    step: u64,
    /// Records that were given of it.
    given: u64,
    /// Records of it that the file has had so far: fewer, where the file is read again.
    seen: u64,
}

impl Mark {
    /// Whether the next record of the file, of step `step`, was not given yet.
    fn is_new(&mut self, step: u64) -> bool {
        if step < self.step {
            return false;
        }
        if step > self.step {
            *self = Mark {
                step,
                ..Mark::default()
            };
        }
        self.seen += 1;
        let is_new = self.seen > self.given;
        self.given = self.given.max(self.seen);
        is_new
    }
}

/// Reads the files of a run's folder as they grow.
///
/// A folder, or a file in it, that does not exist yet is empty. Below the folder no symbolic link is followed.
///
/// ```
/// # fn main() -> phalanx_track::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # std::fs::write(dir.path().join("metrics.jsonl"), "{\"step\":0,\"loss\":1.5}\n{\"step\":").unwrap();
/// # let run = dir.path();
/// use phalanx_track::{Follow, Record};
///
/// let mut follow = Follow::open(run);
/// for record in follow.poll()? {
///     if let Record::Metrics(metrics) = record {
///         assert_eq!(metrics["loss"], 1.5);
///     }
/// }
/// let position = follow.position().clone();
/// assert!(Follow::open_at(run, position).poll()?.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Follow {
    path: PathBuf,
    position: Position,
    /// Where `events.jsonl` had the starts of attempts at the first poll.
    starts: Option<Vec<(u64, Option<Resumption>)>>,
    has_more: bool,
}

/// The id of the run whose `run.json` is `text`; none if that is damaged.
pub(crate) fn id_of(text: &[u8]) -> Option<String> {
    let run: Value = serde_json::from_slice(text).ok()?;
    run["id"].as_str().map(str::to_owned)
}

impl Follow {
    /// Follows the run in the folder `dir` from its beginning.
    pub fn open(dir: &Path) -> Follow {
        Follow::open_at(dir, Position::default())
    }

    /// Follows the run in the folder `dir` from where another `Follow` was.
    pub fn open_at(dir: &Path, position: Position) -> Follow {
        Follow {
            path: dir.to_owned(),
            position,
            starts: None,
            has_more: false,
        }
    }

    /// How far it has read: after the records of the last [`poll`](Self::poll).
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Whether the last [`poll`](Self::poll) left some lines for the next one.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// The next records; none, if nothing was added. At most half a MiB of `metrics.jsonl` and `events.jsonl` is
    /// read (except for a longer line), so the next call may have more at once.
    ///
    /// Records of both files are given in the order of their steps. Each record is given once. A resumed run cuts
    /// `metrics.jsonl` and takes some steps again: their records are given for steps, epochs and records of the
    /// program that were not given before; and what `events.jsonl` had of these steps at the first call, such as
    /// images and histograms, is left out. Lines that are not JSON, and those above 16 MiB, are left out. A last line
    /// without a line feed is left for later.
    ///
    /// # Errors
    ///
    /// `System`, where a file cannot be read; `Usage` for a link or anything else that is no regular file.
    pub fn poll(&mut self) -> Result<Vec<Record>> {
        loop {
            let records = self.read()?;
            if !records.is_empty() || !self.has_more {
                return Ok(records);
            }
        }
    }

    /// Reads the next part of the files.
    fn read(&mut self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        self.has_more = false;
        // Opened each time: another folder may be there under the same name.
        if !self.path.is_dir() {
            return Ok(records);
        }
        let dir = Dir::open(&self.path)?;
        let mut at = self.position.clone();
        if let Some((stamp, run)) = replaced(&dir, RUN_FILE, at.run)? {
            let id = run["id"].as_str().map(str::to_owned);
            if at.id.is_some() && at.id != id {
                at = Position::default();
                self.starts = None;
            }
            (at.id, at.run) = (id, Some(stamp));
            records.push(Record::Run(run));
        }
        let starts = match &mut self.starts {
            Some(starts) => starts,
            none => none.insert(starts(&dir)?),
        };
        // Before the lines: those that were written before it are given before it.
        let summary = replaced(&dir, SUMMARY_FILE, at.summary)?;
        let mut metrics = lines(&dir, METRICS_FILE, &mut at.metrics)?;
        let mut events = lines(&dir, EVENTS_FILE, &mut at.events)?;
        if metrics.is_again {
            at.steps.iter_mut().for_each(|mark| mark.seen = 0);
        }
        let given = if events.is_again { at.time } else { None };
        let (mut of_metrics, mut of_events) = (0, 0);
        // Up to where one of them has to be read on: what comes next there may come before the other's.
        loop {
            let next = match (metrics.lines.front(), events.lines.front()) {
                (Some(_), None) if !events.has_more => true,
                (None, Some(_)) if !metrics.has_more => false,
                (None, _) | (_, None) => break,
                (Some((metric, _)), Some((event, end))) => {
                    of_metrics = step_of(metric).unwrap_or(of_metrics);
                    let is_again = is_taken_again(starts, event, *end);
                    let of_event = step_of(event).filter(|_| !is_again);
                    let of_event = of_event.unwrap_or(of_events);
                    of_metrics < of_event || of_metrics == of_event && event["kind"] != "start"
                }
            };
            let (file, lines) = match next {
                true => (&mut at.metrics, &mut metrics.lines),
                false => (&mut at.events, &mut events.lines),
            };
            let Some((record, end)) = lines.pop_front() else {
                break;
            };
            (file.offset, file.is_inside) = (end, false);
            if next {
                let is_new = match record["step"].as_u64() {
                    Some(step) => at.steps[kind(&record)].is_new(step),
                    None => true,
                };
                records.extend(is_new.then_some(Record::Metrics(record)));
                continue;
            }
            let is_again = is_taken_again(starts, &record, end);
            if is_again && LOGGED.iter().any(|kind| record["kind"] == *kind) {
                continue;
            }
            of_events = step_of(&record).filter(|_| !is_again).unwrap_or(of_events);
            let now = record["time"].as_f64();
            if now.is_some() && now <= given {
                continue;
            }
            at.time = now.or(at.time);
            records.push(Record::Event(record));
        }
        metrics.end(&dir, METRICS_FILE, &mut at.metrics)?;
        events.end(&dir, EVENTS_FILE, &mut at.events)?;
        self.has_more = metrics.has_more || events.has_more;
        if let Some((stamp, summary)) = summary.filter(|_| !self.has_more) {
            at.summary = Some(stamp);
            records.push(Record::Summary(summary));
        }
        self.position = at;
        Ok(records)
    }
}

/// Where the starts of attempts end in `events.jsonl`, and where each of them continues; from the beginning if nowhere.
fn starts(dir: &Dir) -> Result<Vec<(u64, Option<Resumption>)>> {
    let mut starts = Vec::new();
    let Some(file) = dir.open_read(EVENTS_FILE)? else {
        return Ok(starts);
    };
    let mut file = BufReader::with_capacity(READ_BYTES as usize, file);
    let (mut line, mut end) = (Vec::new(), 0);
    loop {
        line.clear();
        let read = (&mut file).take(LONGEST_LINE).read_until(b'\n', &mut line);
        match read.map_err(|e| cannot_read(dir, EVENTS_FILE, e))? as u64 {
            0 => return Ok(starts),
            read => end += read,
        }
        // All others, of which some are long, need not be read.
        if !line.starts_with(b"{") || line.len() > LONGEST_START {
            continue;
        }
        let Ok(event) = serde_json::from_slice::<Value>(&line) else {
            continue;
        };
        if event["kind"] == "start" {
            let step = event["resumed_at"].as_f64();
            let epoch = event["epoch"].as_f64();
            starts.push((end, step.map(|step| Resumption { step, epoch })));
        }
    }
}

/// Whether an attempt that starts after `event`, which ends at `end` of `events.jsonl`, takes its step again.
fn is_taken_again(starts: &[(u64, Option<Resumption>)], event: &Value, end: u64) -> bool {
    let Some(step) = step_of(event).map(|step| step as f64) else {
        return false;
    };
    let stays = |from: &Option<Resumption>| match event["epoch"].as_f64() {
        Some(epoch) => from.is_some_and(|from| from.keeps(step, Some(epoch))),
        None => from.is_some_and(|from| step < from.step),
    };
    let mut later = starts.iter().filter(|(at, _)| *at > end);
    later.any(|(_, from)| !stays(from))
}

/// The step to which a record belongs; the first one of an attempt's start. Checkpoints count the steps taken, and notices
/// may be of any.
fn step_of(record: &Value) -> Option<u64> {
    match record["kind"].as_str() {
        Some("checkpoint" | "notice") => None,
        Some("start") => record["resumed_at"].as_u64(),
        _ => record["step"].as_u64(),
    }
}

/// Which steps the record counts: of steps, of epochs, or the program's own.
fn kind(record: &Value) -> usize {
    match record {
        record if record.get("loss").is_some() => 0,
        record if record.get("train_loss").is_some() => 1,
        _ => 2,
    }
}

/// The file `name`, if it is another one than `before`.
fn replaced(dir: &Dir, name: &str, before: Option<Stamp>) -> Result<Option<(Stamp, Value)>> {
    let Some(mut file) = dir.open_read(name)? else {
        return Ok(None);
    };
    let failed = |e| cannot_read(dir, name, e);
    let about = file.metadata().map_err(failed)?;
    let stamp = (about.ino(), about.len(), about.mtime(), about.mtime_nsec());
    if Some(stamp) == before {
        return Ok(None);
    }
    let mut text = Vec::new();
    let limited = (&mut file).take(LARGEST_FILE).read_to_end(&mut text);
    limited.map_err(failed)?;
    // Written by hand, or by another program: it may be complete the next time.
    Ok(serde_json::from_slice(&text).ok().map(|json| (stamp, json)))
}

/// What was read of a file of lines.
#[derive(Default)]
struct Added {
    file: Option<File>,
    /// JSON, and the offset at which the line ends.
    lines: VecDeque<(Value, u64)>,
    /// Where the last complete line ends, or a part of one that is too long.
    end: u64,
    /// It is inside a line that is too long.
    is_cut: bool,
    /// The file is another one than before, and was read from its beginning.
    is_again: bool,
    has_more: bool,
}

impl Added {
    /// Brings the place in the file to where the lines that are left begin.
    fn end(&mut self, dir: &Dir, name: &str, at: &mut Lines) -> Result<()> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        if self.lines.is_empty() {
            (at.offset, at.is_inside) = (self.end, self.is_cut);
        }
        let tail = tail(file, at.offset);
        at.tail = tail.map_err(|e| cannot_read(dir, name, e))?.unwrap_or(0);
        Ok(())
    }
}

/// The next complete lines of the file `name`.
fn lines(dir: &Dir, name: &str, at: &mut Lines) -> Result<Added> {
    let mut read = Added::default();
    let Some(mut file) = dir.open_read(name)? else {
        return Ok(read);
    };
    let failed = |e| cannot_read(dir, name, e);
    if tail(&mut file, at.offset).map_err(failed)? != Some(at.tail) && at.offset > 0 {
        *at = Lines::default();
        read.is_again = true;
    }
    let mut text = Vec::new();
    for most in [READ_BYTES, LONGEST_LINE] {
        text.clear();
        file.seek(SeekFrom::Start(at.offset)).map_err(failed)?;
        (&mut file)
            .take(most)
            .read_to_end(&mut text)
            .map_err(failed)?;
        read.has_more = text.len() as u64 == most;
        if text.contains(&b'\n') || !read.has_more {
            break;
        }
    }
    let end = text
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map(|at| at + 1);
    let (complete, is_cut) = match end {
        Some(end) => (end, false),
        // No end of the line in sight.
        None if read.has_more => (text.len(), true),
        None => return Ok(read),
    };
    let mut offset = at.offset;
    let lines = text[..complete].split_inclusive(|byte| *byte == b'\n');
    for (number, line) in lines.enumerate() {
        offset += line.len() as u64;
        if number > 0 || !at.is_inside {
            let value = serde_json::from_slice(line).ok();
            read.lines.extend(value.map(|value| (value, offset)));
        }
    }
    (read.end, read.is_cut, read.file) = (offset, is_cut, Some(file));
    Ok(read)
}

/// CRC-32 of the bytes before `offset`; none, if the file is shorter.
fn tail(file: &mut File, offset: u64) -> std::io::Result<Option<u32>> {
    if file.metadata()?.len() < offset {
        return Ok(None);
    }
    let len = offset.min(TAIL_BYTES);
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset - len))?;
    file.take(len).read_to_end(&mut bytes)?;
    Ok(Some(crc32fast::hash(&bytes)))
}

fn cannot_read(dir: &Dir, name: &str, e: std::io::Error) -> Error {
    let path = dir.path().join(name);
    Error::new(ErrorKind::System, format!("cannot read {}", path.display())).caused_by(e)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use serde_json::json;

    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Folder {
            Folder(tempfile::tempdir().expect("folder"))
        }

        fn add(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            let file = OpenOptions::new().append(true).create(true).open(path);
            let written = file.expect("opened").write_all(text.as_bytes());
            written.expect("written");
        }

        /// As a resumed run replaces `metrics.jsonl`.
        fn replace(&self, name: &str, text: &str) {
            let dir = Dir::open(self.0.path()).expect("folder");
            let written = dir.write(name, |out| out.write_all(text.as_bytes()));
            written.expect("written");
        }

        fn follow(&self) -> Follow {
            Follow::open(self.0.path())
        }
    }

    fn step(step: u64, attempt: u64) -> String {
        let elapsed = attempt * 1000 + step;
        format!("{{\"step\":{step},\"loss\":0.1,\"elapsed_s\":{elapsed}}}\n")
    }

    fn epoch(step: u64, attempt: u64) -> String {
        format!("{{\"step\":{step},\"train_loss\":0.1,\"elapsed_s\":{attempt}}}\n")
    }

    /// All that is there; attempt by the elapsed time.
    fn all(follow: &mut Follow) -> Vec<Record> {
        let polls = std::iter::repeat_with(|| follow.poll().expect("read"));
        polls
            .take_while(|records| !records.is_empty())
            .flatten()
            .collect()
    }

    fn steps(records: &[Record]) -> Vec<u64> {
        let step = |record: &Record| match record {
            Record::Metrics(metrics) => metrics["step"].as_u64(),
            _ => None,
        };
        records.iter().filter_map(step).collect()
    }

    #[test]
    fn records_are_given_once_as_they_are_written() {
        let folder = Folder::new();
        let gone = Follow::open(&folder.0.path().join("later")).poll();
        assert_eq!(gone.expect("empty"), []);
        let mut follow = folder.follow();
        assert_eq!(follow.poll().expect("empty"), []);
        folder.add(
            METRICS_FILE,
            "{\"step\":0,\"loss\":0.30000000000000004}\n{\"st",
        );
        folder.add(EVENTS_FILE, "{\"kind\":\"start\",\"time\":7.5}\n");
        let first = Record::Metrics(json!({"step": 0, "loss": 0.1 + 0.2}));
        let start = Record::Event(json!({"kind": "start", "time": 7.5}));
        assert_eq!(follow.poll().expect("read"), [start, first]);
        assert_eq!(follow.poll().expect("read"), []);
        folder.add(RUN_FILE, "{\"id\":\"a\"}");
        folder.add(METRICS_FILE, "ep\":1}\nno JSON\n\n{\"step\":2}\n");
        folder.add(SUMMARY_FILE, "{\"accuracy\":1");
        let run = Record::Run(json!({"id": "a"}));
        let [one, two] = [1, 2].map(|step| Record::Metrics(json!({"step": step})));
        assert_eq!(follow.poll().expect("read"), [run, one, two]);
        // The position is all that is needed to continue.
        let kept = serde_json::to_string(follow.position()).expect("JSON");
        let kept = serde_json::from_str(&kept).expect("a position");
        let mut follow = Follow::open_at(folder.0.path(), kept);
        assert_eq!(follow.poll().expect("read"), []);
        folder.add(SUMMARY_FILE, ".0}");
        let summary = Record::Summary(json!({"accuracy": 1.0}));
        assert_eq!(follow.poll().expect("read"), [summary]);
        assert_eq!(follow.poll().expect("read"), []);
    }

    #[test]
    fn steps_that_a_resumed_run_takes_again_are_given_once() {
        let folder = Folder::new();
        folder.add(RUN_FILE, "{\"id\":\"a\",\"attempt\":1}");
        let text = |to, attempt| (0..to).map(|n| step(n, attempt)).collect::<String>();
        folder.add(
            METRICS_FILE,
            &(text(8, 0) + &epoch(8, 0) + &step(8, 0) + &step(9, 0)),
        );
        let log = "{\"step\":9,\"mine\":1,\"elapsed_s\":0}\n";
        folder.add(METRICS_FILE, log);
        let mut follow = folder.follow();
        assert_eq!(
            steps(&all(&mut follow)),
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9]
        );
        // At step 5, and the file grows beyond what was read before the reader looks again.
        let mut other = follow.clone();
        folder.replace(RUN_FILE, "{\"id\":\"a\",\"attempt\":2}");
        folder.replace(METRICS_FILE, &text(5, 0));
        assert_eq!(steps(&all(&mut follow)), [0; 0]);
        for n in 5..8 {
            folder.add(METRICS_FILE, &step(n, 1));
        }
        folder.add(METRICS_FILE, &epoch(8, 1));
        assert_eq!(steps(&all(&mut follow)), [0; 0]);
        for n in 8..12 {
            folder.add(METRICS_FILE, &step(n, 1));
            // The second was not written by the attempt before.
            folder.add(METRICS_FILE, &log.replace('9', &n.to_string()).repeat(2));
        }
        folder.add(METRICS_FILE, &epoch(16, 1));
        for follow in [&mut follow, &mut other] {
            let records = all(follow);
            assert_eq!(steps(&records), [9, 10, 10, 10, 11, 11, 11, 16]);
            assert_eq!(all(follow), []);
        }
    }

    #[test]
    fn another_run_in_the_folder_is_read_from_its_beginning() {
        let folder = Folder::new();
        folder.add(RUN_FILE, "{\"id\":\"a\"}");
        folder.add(METRICS_FILE, &(step(0, 0) + &step(1, 0)));
        folder.add(EVENTS_FILE, "{\"time\":5}\n{\"time\":6}\n");
        let mut follow = folder.follow();
        assert_eq!(all(&mut follow).len(), 5);
        // A copy in which the same events are at another place.
        folder.replace(EVENTS_FILE, "{\"time\":6}\n{\"time\":7}\n{\"time\":7}\n");
        assert_eq!(all(&mut follow).len(), 2);
        folder.replace(METRICS_FILE, &step(0, 1));
        folder.replace(EVENTS_FILE, "{\"time\":5}\n");
        folder.replace(RUN_FILE, "{\"id\":\"b\"}");
        let records = all(&mut follow);
        assert_eq!((records.len(), steps(&records)), (3, vec![0]));
    }

    #[test]
    fn long_files_are_read_in_pieces_and_too_long_lines_left_out() {
        let folder = Folder::new();
        let many: String = (0..20_000).map(|n| step(n, 0)).collect();
        folder.add(METRICS_FILE, &many);
        folder.add(SUMMARY_FILE, "{}");
        let long = |bytes: usize| format!("{{\"text\":\"{}\"}}\n", "x".repeat(bytes));
        folder.add(EVENTS_FILE, &long(READ_BYTES as usize));
        folder.add(EVENTS_FILE, &long(2 * LONGEST_LINE as usize));
        folder.add(EVENTS_FILE, "{\"kind\":\"finish\"}\n");
        let mut follow = folder.follow();
        let mut records = follow.poll().expect("read");
        assert!(follow.has_more());
        records.extend(all(&mut follow));
        assert_eq!(steps(&records), (0..20_000).collect::<Vec<_>>());
        assert!(!follow.has_more());
        let events = records
            .iter()
            .filter(|record| matches!(record, Record::Event(_)));
        assert_eq!(events.count(), 2);
        assert_eq!(records.last(), Some(&Record::Summary(json!({}))));
    }

    /// The step of each record, histograms negative.
    fn order(records: &[Record]) -> Vec<i64> {
        let of = |record: &Record| match record {
            Record::Metrics(metrics) => metrics["step"].as_i64(),
            Record::Event(event) => event["step"].as_i64().map(|step| -step),
            _ => None,
        };
        records.iter().filter_map(of).collect()
    }

    #[test]
    fn histograms_come_between_the_steps_where_they_belong_however_long_they_are() {
        let folder = Folder::new();
        let (mut metrics, mut events) = (String::new(), String::new());
        let mut expected = Vec::new();
        for at in 1..=4000 {
            metrics += &step(at, 0);
            expected.push(at as i64);
            if at % 400 == 0 {
                let long = "x".repeat(100_000);
                events += &format!("{{\"kind\":\"watch\",\"step\":{at},\"x\":\"{long}\"}}\n");
                expected.push(-(at as i64));
            }
        }
        folder.add(METRICS_FILE, &metrics);
        folder.add(EVENTS_FILE, &events);
        let mut follow = folder.follow();
        assert_eq!(order(&all(&mut follow)), expected);
        assert_eq!(all(&mut follow), []);
        // From any position on as well.
        let mut follow = folder.follow();
        let mut got = Vec::new();
        loop {
            let records = follow.poll().expect("read");
            if records.is_empty() {
                break;
            }
            got.extend(order(&records));
            let kept = serde_json::to_value(follow.position()).expect("JSON");
            let kept = serde_json::from_value(kept).expect("a position");
            follow = Follow::open_at(folder.0.path(), kept);
        }
        assert_eq!(got, expected);
    }

    #[test]
    fn what_a_resumed_attempt_logs_again_is_left_out_and_the_rest_is_in_order() {
        let folder = Folder::new();
        folder.add(
            METRICS_FILE,
            &(1..=9).map(|n| step(n, 1)).collect::<String>(),
        );
        let watch = |step: u64| format!("{{\"kind\":\"watch\",\"step\":{step}}}\n");
        let text = |step: u64, epoch: u64| {
            format!("{{\"kind\":\"text\",\"step\":{step},\"epoch\":{epoch}}}\n")
        };
        let first = [watch(2), text(4, 1), watch(4), text(6, 2), watch(6)].concat();
        let start = "{\"kind\":\"start\",\"attempt\":1}\n";
        // After the first epoch, which has four steps.
        let again = "{\"kind\":\"start\",\"attempt\":2,\"resumed_at\":4,\"epoch\":2}\n";
        let second = [watch(4), text(5, 2)].concat();
        folder.add(EVENTS_FILE, &[start, &first, again, &second].concat());
        let expected = [1, 2, -2, 3, 4, -4, -4, 5, -5, 6, 7, 8, 9];
        assert_eq!(order(&all(&mut folder.follow())), expected);
        // An attempt that began from nothing.
        folder.add(EVENTS_FILE, start);
        assert_eq!(
            order(&all(&mut folder.follow())),
            (1..=9).collect::<Vec<_>>()
        );
    }

    #[test]
    fn links_are_not_followed_and_damaged_positions_do_no_harm() {
        let folder = Folder::new();
        folder.add("elsewhere", &step(0, 0));
        let at = |name: &str| folder.0.path().join(name);
        std::os::unix::fs::symlink(at("elsewhere"), at(METRICS_FILE)).expect("link");
        let error = folder.follow().poll().expect_err("a link");
        assert_eq!(error.kind(), ErrorKind::Usage);
        fs::remove_file(at(METRICS_FILE)).expect("removed");
        folder.add(METRICS_FILE, &step(0, 0));
        let far = r#"{"metrics": {"offset": 18446744073709551615, "tail": 1}}"#;
        let far = serde_json::from_str(far).expect("a position");
        let mut follow = Follow::open_at(folder.0.path(), far);
        assert_eq!(steps(&all(&mut follow)), [0]);
        fs::remove_file(at(METRICS_FILE)).expect("removed");
        fs::create_dir(at(METRICS_FILE)).expect("folder");
        folder.follow().poll().expect_err("a folder");
    }
}
