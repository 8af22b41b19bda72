//! What the page shows, and what has changed of it.

use std::collections::BTreeMap;
use std::path::Path;

use phalanx_base::files::read_regular;
use phalanx_base::job_files::{JOB_FILE, output_file};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::Error;
use crate::hub;
use crate::run::{New, RunView, Stamp, stamp};

/// The longest file of a job.
const FILE_BYTES: u64 = 64 << 20;

/// What the page shows.
#[derive(Default)]
pub(crate) struct View {
    /// The job's file.
    job: Map<String, Value>,
    /// The job, its ranks, and the messages of its launcher.
    parts: BTreeMap<&'static str, New<Value>>,
    outputs: BTreeMap<u64, Output>,
    pub run: RunView,
}

/// The last lines of a rank's output.
#[derive(Default)]
struct Output {
    /// The file as it was read.
    seen: Stamp,
    printed: Printed,
    /// Lines that were sent.
    sent: usize,
}

/// The file with the last lines of a rank's output.
#[derive(Default, Deserialize)]
struct Printed {
    /// Lines so far, with those that are not kept.
    count: usize,
    lines: Vec<Value>,
}

impl View {
    /// Reads what the launcher has written into `folder`. `trouble`: why the run's folder cannot be read. A job that `is_over`
    /// has failed if its launcher has not said how it ended.
    pub fn read_job(&mut self, folder: &Path, trouble: Option<Error>, is_over: bool) {
        let read = read_regular(&folder.join(JOB_FILE), FILE_BYTES).ok();
        if let Some(Value::Object(job)) = read.and_then(|text| serde_json::from_slice(&text).ok()) {
            self.job = job;
        }
        let mut job = self.job.clone();
        let Some((ranks, notes)) = job.remove("ranks").zip(job.remove("notes")) else {
            return;
        };
        job.insert("trouble".into(), json!(trouble.map(|error| error.chain())));
        if is_over && job["ended"].is_null() {
            let now = phalanx_base::unix_time().as_secs_f64();
            let why = "the launcher ended with an error";
            job.extend([
                ("ended".into(), now.into()),
                ("state".into(), "failed".into()),
                ("message".into(), why.into()),
            ]);
        }
        self.set("job", job.into());
        self.set("ranks", ranks);
        self.set("notes", notes);
        let ranks = self.parts["ranks"].value.as_array().into_iter().flatten();
        // The output of others is known to their launchers.
        let here = ranks.filter(|rank| !rank["pid"].is_null());
        for rank in here.filter_map(|rank| rank["rank"].as_u64()) {
            let path = folder.join(output_file(rank as usize));
            let (output, now) = (self.outputs.entry(rank).or_default(), stamp(&path));
            if output.seen != now
                && let Ok(text) = read_regular(&path, FILE_BYTES)
                && let Ok(printed) = serde_json::from_slice(&text)
            {
                (output.seen, output.printed) = (now, printed);
            }
        }
    }

    /// Sets the job, its ranks, or the messages of its launcher.
    pub fn set(&mut self, name: &'static str, value: Value) {
        self.parts.entry(name).or_default().update(value);
    }
}

impl hub::View for View {
    const FILES: &'static [(&'static str, &'static str)] = &[
        ("/", include_str!("page/page.html")),
        ("/page.js", include_str!("page/live.js")),
    ];

    fn whole(&self) -> Value {
        let outputs = self.outputs.iter();
        let lines = outputs.map(|(rank, output)| (rank.to_string(), json!(output.printed.lines)));
        let lines: Map<_, _> = lines.collect();
        let parts = self.parts.iter();
        let parts = parts.map(|(name, part)| ((*name).to_owned(), part.value.clone()));
        let mut whole: Map<_, _> = parts.chain([("lines".to_owned(), lines.into())]).collect();
        self.run.whole(&mut whole);
        whole.into()
    }

    fn change(&mut self) -> Option<Value> {
        let mut change = Map::new();
        for (name, part) in &mut self.parts {
            part.add_to(&mut change, name);
        }
        self.run.change(&mut change);
        let mut lines = Map::new();
        for (rank, Output { printed, sent, .. }) in &mut self.outputs {
            let new = printed.count.saturating_sub(*sent).min(printed.lines.len());
            if new > 0 {
                let first = printed.lines.len() - new;
                lines.insert(rank.to_string(), json!(printed.lines[first..]));
            }
            *sent = printed.count;
        }
        if !lines.is_empty() {
            change.insert("lines".to_owned(), lines.into());
        }
        (!change.is_empty()).then(|| change.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::View as _;

    #[test]
    fn output_is_sent_once_and_a_job_without_an_end_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: Value| {
            let new = dir.path().join("new");
            std::fs::write(&new, value.to_string()).unwrap();
            std::fs::rename(new, dir.path().join(name)).unwrap();
        };
        let printed = |count: usize| {
            let lines: Vec<usize> = (count.saturating_sub(200)..count).collect();
            write(&output_file(1), json!({"count": count, "lines": lines}));
        };
        let mut view = View::default();
        let mut look = |is_over: bool| {
            view.read_job(dir.path(), None, is_over);
            let change = view.change().unwrap_or_default();
            (change, view.whole())
        };
        let (change, whole) = look(false);
        assert_eq!(
            (&change["job"], &whole["ranks"]),
            (&Value::Null, &Value::Null)
        );
        let ranks = json!([{"rank": 0, "pid": null}, {"rank": 1, "pid": 7}]);
        let job = json!({"state": "running", "ended": null, "ranks": ranks, "notes": ["a"]});
        write(JOB_FILE, job);
        printed(2);
        // That of a rank of another host.
        write(&output_file(0), json!({"count": 1, "lines": ["x"]}));
        let (change, _) = look(false);
        assert_eq!(
            (&change["ranks"], &change["notes"]),
            (&ranks, &json!(["a"]))
        );
        assert_eq!(change["lines"], json!({"1": [0, 1]}));
        assert_eq!(look(false).0, Value::Null, "nothing has changed");
        printed(250);
        let (change, whole) = look(false);
        assert_eq!(change["lines"]["1"], json!((50..250).collect::<Vec<_>>()));
        assert_eq!(change["lines"], whole["lines"]);
        printed(251);
        assert_eq!(look(false).0, json!({"lines": {"1": [250]}}));
        std::fs::remove_file(dir.path().join(JOB_FILE)).unwrap();
        let (change, _) = look(true);
        assert_eq!(change["job"]["state"], "failed");
        assert!(change["job"]["ended"].is_number());
    }
}
