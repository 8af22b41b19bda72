//! What the launcher writes of a job that is shown on a page (`--live`): into the job's folder.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_base::job_files::{JOB_FILE, output_file};
use serde::Serialize;

use crate::error::{Error, ErrorKind};
use crate::tail::Tail;

/// Messages of the launcher that are kept.
const MOST_NOTES: usize = 200;

/// A rank of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankFacts {
    /// Its number in the job.
    pub rank: usize,
    /// Name of its host.
    pub host: String,
    /// Its process, if that is on this host.
    pub pid: Option<i32>,
    /// `running`; `late`: other ranks wait for it; `stopped` by a signal or a debugger; `done`: ended with success; `failed`;
    /// `ended` by the launcher, after another rank's end or a signal; `elsewhere`: on another host.
    pub state: &'static str,
    /// How it has ended: `exited with code 1`.
    pub end: Option<String>,
}

/// The contents of the job's file.
#[derive(Debug, Serialize)]
struct JobFacts {
    program: String,
    /// This machine.
    host: String,
    /// Seconds since 1970.
    started: f64,
    ended: Option<f64>,
    /// `running`, `finished`, `stopped`, `failed`.
    state: &'static str,
    /// Why it has failed, or the signal that has stopped it.
    message: Option<String>,
    ranks: Vec<RankFacts>,
    /// Messages of the launcher.
    notes: Vec<String>,
}

/// The files. One that cannot be written is left as it is: the job continues.
pub struct JobFiles {
    folder: PathBuf,
    job: RefCell<JobFacts>,
    /// The output by rank, and how many lines were written.
    outputs: RefCell<BTreeMap<usize, (Arc<Tail>, u64)>>,
}

impl JobFiles {
    /// Of the job `program`, in `folder`. The job's file is there at once.
    pub fn new(folder: &Path, program: String) -> JobFiles {
        let job = JobFacts {
            program,
            host: phalanx_base::host_name(),
            started: phalanx_base::unix_time().as_secs_f64(),
            ended: None,
            state: "running",
            message: None,
            ranks: Vec::new(),
            notes: Vec::new(),
        };
        let files = JobFiles {
            folder: folder.to_owned(),
            job: job.into(),
            outputs: RefCell::default(),
        };
        files.change(|_| {});
        files
    }

    /// The ranks of the job are now these. Their new output is written too.
    pub fn set_ranks(&self, ranks: Vec<RankFacts>) {
        if self.job.borrow().ranks != ranks {
            self.change(|job| job.ranks = ranks);
        }
        for (rank, (tail, written)) in self.outputs.borrow_mut().iter_mut() {
            if let Some((count, text)) = tail.grown(*written) {
                self.write(&output_file(*rank), &text);
                *written = count;
            }
        }
    }

    /// Where the output of rank `rank` is added.
    pub fn tail(&self, rank: usize) -> Arc<Tail> {
        self.outputs.borrow_mut().entry(rank).or_default().0.clone()
    }

    /// Adds a message of the launcher.
    pub fn note(&self, text: &str) {
        self.change(|job| {
            job.notes.push(text.to_owned());
            let most = job.notes.len().saturating_sub(MOST_NOTES);
            job.notes.drain(..most);
        });
    }

    /// The job has ended, by `error` if there is one.
    pub fn end(&self, error: Option<&Error>) {
        self.change(|job| {
            job.ended = Some(phalanx_base::unix_time().as_secs_f64());
            job.state = match error.map(Error::kind) {
                None => "finished",
                Some(ErrorKind::Interrupted) => "stopped",
                Some(_) => "failed",
            };
            job.message = error.map(Error::chain);
        });
    }

    fn change(&self, change: impl FnOnce(&mut JobFacts)) {
        let mut job = self.job.borrow_mut();
        change(&mut job);
        self.write(JOB_FILE, &serde_json::to_string(&*job).unwrap_or_default());
    }

    /// Replaces the file `name` at once: a reader has the old text or the new one.
    fn write(&self, name: &str, text: &str) {
        let new = self.folder.join(format!(".{name}"));
        // A full disk, for example.
        let _ =
            std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, self.folder.join(name)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_files_say_what_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str| -> Value {
            let text = std::fs::read(dir.path().join(name)).unwrap();
            serde_json::from_slice(&text).unwrap()
        };
        let files = JobFiles::new(dir.path(), "program --flag".into());
        let job = read(JOB_FILE);
        assert_eq!(job["program"], "program --flag");
        assert_eq!(
            (&job["state"], &job["ended"]),
            (&json!("running"), &Value::Null)
        );
        let rank = RankFacts {
            rank: 3,
            host: "a".into(),
            pid: Some(7),
            state: "failed",
            end: Some("exited with code 1".into()),
        };
        files.tail(3).push(true, b"why\n");
        files.set_ranks(vec![rank]);
        let want = json!({"rank": 3, "host": "a", "pid": 7, "state": "failed", "end": "exited with code 1"});
        assert_eq!(read(JOB_FILE)["ranks"], json!([want]));
        let lines = json!([{"err": true, "text": "why"}]);
        assert_eq!(read(&output_file(3)), json!({"count": 1, "lines": lines}));
        for n in 0..MOST_NOTES + 5 {
            files.note(&n.to_string());
        }
        let notes = read(JOB_FILE)["notes"].take();
        let notes = notes.as_array().unwrap();
        assert_eq!((notes.len(), &notes[0]), (MOST_NOTES, &json!("5")));
        for (kind, state) in [
            (ErrorKind::Interrupted, "stopped"),
            (ErrorKind::Failed, "failed"),
        ] {
            files.end(Some(&Error::new(kind, "it")));
            let job = read(JOB_FILE);
            assert_eq!([&job["state"], &job["message"]], [state, "it"]);
            assert!(job["ended"].is_number());
        }
        files.end(None);
        let job = read(JOB_FILE);
        assert_eq!(
            (&job["state"], &job["message"]),
            (&json!("finished"), &Value::Null)
        );
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            2,
            "no other files"
        );
    }
}
