//! Reads the files of a run's folder as they grow.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use phalanx_data::files::Dir;
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

/// As many bytes before a position tell whether a file still has what was read of it.
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
        }
    }

    /// How far it has read: after the records of the last [`poll`](Self::poll).
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// The next records; none, if nothing was added. At most half a MiB of `metrics.jsonl` and `events.jsonl` is
    /// read (except for a longer line), so the next call may have more at once.
    ///
    /// Each record is given once. A resumed run cuts `metrics.jsonl` and takes some steps again: their records are
    /// given for steps, epochs and records of the program that were not given before. Lines that are not JSON,
    /// and those above 16 MiB, are left out. A last line without a line feed is left for later.
    ///
    /// # Errors
    ///
    /// `System`, where a file cannot be read; `Usage` for a link or anything else that is no regular file.
    pub fn poll(&mut self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
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
            }
            (at.id, at.run) = (id, Some(stamp));
            records.push(Record::Run(run));
        }
        // Before the lines: those that were written before it are given before it.
        let summary = replaced(&dir, SUMMARY_FILE, at.summary)?;
        let (steps, time) = (&mut at.steps, &mut at.time);
        let metrics = lines(&dir, METRICS_FILE, &mut at.metrics)?;
        if metrics.is_again {
            steps.iter_mut().for_each(|mark| mark.seen = 0);
        }
        let is_new = |record: &Value| match record["step"].as_u64() {
            Some(step) => steps[kind(record)].is_new(step),
            None => true,
        };
        records.extend(
            metrics
                .values
                .into_iter()
                .filter(is_new)
                .map(Record::Metrics),
        );
        let events = lines(&dir, EVENTS_FILE, &mut at.events)?;
        let given = if events.is_again { *time } else { None };
        for event in events.values {
            let now = event["time"].as_f64();
            if now.is_some() && now <= given {
                continue;
            }
            *time = now.or(*time);
            records.push(Record::Event(event));
        }
        if let Some((stamp, summary)) = summary.filter(|_| !metrics.has_more && !events.has_more) {
            at.summary = Some(stamp);
            records.push(Record::Summary(summary));
        }
        self.position = at;
        Ok(records)
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
    values: Vec<Value>,
    /// The file is another one than before, and was read from its beginning.
    is_again: bool,
    has_more: bool,
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
    let mut lines = text[..complete].split_inclusive(|byte| *byte == b'\n');
    if at.is_inside {
        lines.next();
    }
    let values = lines.filter_map(|line| serde_json::from_slice(line).ok());
    read.values = values.collect();
    at.offset += complete as u64;
    at.is_inside = is_cut;
    at.tail = tail(&mut file, at.offset).map_err(failed)?.unwrap_or(0);
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
        assert_eq!(follow.poll().expect("read"), [first, start]);
        assert_eq!(follow.poll().expect("read"), []);
        folder.add(RUN_FILE, "{\"id\":\"a\"}");
        folder.add(METRICS_FILE, "ep\":1}\nno JSON\n\n{\"step\":2}\n");
        folder.add(SUMMARY_FILE, "{\"accuracy\":1");
        let run = Record::Run(json!({"id": "a"}));
        let [one, two] = [1, 2].map(|step| Record::Metrics(json!({"step": step})));
        assert_eq!(follow.poll().expect("read"), [run, one, two]);
        // The position is all that is needed to go on.
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
        let first = follow.poll().expect("read");
        let bytes: usize = first.iter().map(|_| 35).sum();
        assert!(bytes < READ_BYTES as usize && first.len() > 1000);
        let mut records = first;
        // A piece of a line that is too long gives none.
        for _ in 0..20 {
            records.extend(follow.poll().expect("read"));
        }
        assert_eq!(steps(&records), (0..20_000).collect::<Vec<_>>());
        let events = records
            .iter()
            .filter(|record| matches!(record, Record::Event(_)));
        assert_eq!(events.count(), 2);
        assert_eq!(records.last(), Some(&Record::Summary(json!({}))));
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
