//! `phalanx live FOLDER`: the runs below a folder, as they grow. Nothing is written there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use phalanx_base::files::read_regular;
use phalanx_base::process::ProcessName;
use phalanx_track::{EVENTS_FILE, Follow, METRICS_FILE, RUN_FILE, Record, SUMMARY_FILE};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::hub::{self, Hub};
use crate::run::{Curves, New, Stamp, stamp};

/// How often new runs are looked for.
const SCAN_EVERY: Duration = Duration::from_secs(3);

/// How long it reads before the page gets what was read.
const READ_LIMIT: Duration = Duration::from_millis(250);

/// Runs that are shown: the newest ones.
const MOST_RUNS: usize = 500;

/// Folders that are looked into, and how deep they may lie.
const MOST_FOLDERS: usize = 20_000;
const MOST_DEEP: usize = 6;

/// Folders of a run that have no runs.
const PARTS_OF_RUNS: [&str; 2] = ["checkpoints", "images"];

/// Curves of a run, and points of each. The report of a run has more.
const MOST_CURVES: usize = 40;
const MOST_POINTS: usize = 500;

/// Clocks and counters, which are not compared.
const NOT_SHOWN: [&str; 4] = ["epoch", "train_s", "data_wait_total_ms", "saving_total_ms"];

/// How long a run without a process may have logged nothing before it counts as killed.
const QUIET_S: f64 = 10.0;

/// A line of the list.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Row {
    id: usize,
    /// `running`, `finished`, `failed`, `stopped`.
    state: &'static str,
    /// Why it failed.
    error: Option<String>,
    step: Option<f64>,
    /// The last step's loss; `None` if it is not finite.
    loss: Option<f64>,
    /// When the run was written last, in seconds since 1970.
    written: f64,
    /// All that is there was read.
    is_read: bool,
}

/// What the page has of a run.
struct Shown {
    path: PathBuf,
    row: New<Row>,
    /// `run.json`, without the model.
    about: New<Value>,
    curves: Curves,
    /// All of it is to be sent.
    is_new: bool,
}

/// What the page shows.
#[derive(Default)]
pub(crate) struct Runs {
    folder: New<String>,
    runs: BTreeMap<String, Shown>,
    gone: BTreeSet<String>,
    /// Runs below the folder.
    total: New<usize>,
}

impl Shown {
    fn new(path: &Path, id: usize) -> Shown {
        let mut shown = Shown {
            path: path.to_owned(),
            row: New::default(),
            about: New::default(),
            curves: Curves::new(MOST_POINTS),
            is_new: true,
        };
        let state = "running";
        shown.row.set(Row {
            id,
            state,
            ..Row::default()
        });
        shown
    }

    fn add(&mut self, record: Record, row: &mut Row) {
        match record {
            Record::Run(mut about) => {
                // The graph of a large model is most of it.
                about.as_object_mut().map(|about| about.remove("model"));
                self.about.update(about);
            }
            Record::Metrics(metrics) => {
                let is_shown = |name: &str| !NOT_SHOWN.contains(&name);
                self.curves.add(&metrics, MOST_CURVES, is_shown);
                if let Some(loss) = metrics.get("loss") {
                    row.loss = loss.as_f64();
                    row.step = metrics["step"].as_f64().map(|step| step + 1.0);
                }
            }
            Record::Event(event) => {
                let (state, error) = match (event["kind"].as_str(), event["status"].as_str()) {
                    (Some("start"), _) => ("running", None),
                    (Some("finish"), Some("finished")) => ("finished", None),
                    (Some("finish"), Some("stopped")) => ("stopped", event["error"].as_str()),
                    (Some("finish"), _) => ("failed", event["error"].as_str()),
                    _ => return,
                };
                row.state = state;
                row.error = error.map(str::to_owned);
            }
            // Runs of older versions have no events.
            Record::Summary(_) => row.state = "finished",
        }
    }

    fn whole(&self) -> Value {
        json!({"row": self.row.value, "about": self.about.value, "curves": self.curves.whole(), "all": true})
    }

    fn change(&mut self) -> Option<Value> {
        let mut change = Map::new();
        let curves = self.curves.change();
        self.row.add_to(&mut change, "row");
        self.about.add_to(&mut change, "about");
        if std::mem::take(&mut self.is_new) {
            return Some(self.whole());
        }
        change.extend(curves.map(|curves| ("curves".to_owned(), curves)));
        (!change.is_empty()).then(|| change.into())
    }
}

impl hub::View for Runs {
    const FILES: &'static [(&'static str, &'static str)] = &[
        ("/", include_str!("page/page.html")),
        ("/run", include_str!("page/page.html")),
        ("/page.js", include_str!("page/runs.js")),
    ];

    fn whole(&self) -> Value {
        let runs = self.runs.iter();
        let runs: Map<_, _> = runs.map(|(n, run)| (n.clone(), run.whole())).collect();
        json!({"folder": self.folder.value, "total": self.total.value, "runs": runs})
    }

    fn change(&mut self) -> Option<Value> {
        let mut change = Map::new();
        self.folder.add_to(&mut change, "folder");
        self.total.add_to(&mut change, "total");
        let gone = std::mem::take(&mut self.gone).into_iter();
        let mut runs: Map<_, _> = gone.map(|name| (name, Value::Null)).collect();
        let changed = self.runs.iter_mut();
        runs.extend(changed.filter_map(|(name, run)| Some((name.clone(), run.change()?))));
        if !runs.is_empty() {
            change.insert("runs".to_owned(), runs.into());
        }
        (!change.is_empty()).then(|| change.into())
    }

    fn run(&self, id: usize) -> Option<(PathBuf, Value)> {
        let mut runs = self.runs.values();
        let run = runs.find(|run| run.row.value.id == id)?;
        let Row { state, error, .. } = &run.row.value;
        let end = json!({"status": state, "error": error});
        Some((run.path.clone(), end))
    }
}

/// How far a run was read.
struct Read {
    path: PathBuf,
    id: usize,
    follow: Follow,
    /// The files as they were when nothing was left to read.
    seen: Option<[Stamp; 4]>,
    metrics: Stamp,
}

impl Read {
    fn new(path: PathBuf, id: usize) -> Read {
        let follow = Follow::open(&path);
        Read {
            path,
            id,
            follow,
            seen: None,
            metrics: None,
        }
    }

    /// The next records, and whether the run is to be shown from its beginning: a resumed run has dropped some.
    fn poll(&mut self) -> (bool, Vec<Record>) {
        let files = [METRICS_FILE, EVENTS_FILE, RUN_FILE, SUMMARY_FILE];
        let now = files.map(|name| stamp(&self.path.join(name)));
        if self.seen == Some(now) {
            return (false, Vec::new());
        }
        let is_again = match (self.metrics, now[0]) {
            (Some(before), Some(now)) => before.0 != now.0 || now.1 < before.1,
            (before, now) => before.is_some() && now.is_none(),
        };
        if is_again {
            self.follow = Follow::open(&self.path);
        }
        self.metrics = now[0];
        // What cannot be read now may be readable later.
        let records = self.follow.poll().unwrap_or_default();
        self.seen = (!self.follow.has_more()).then_some(now);
        (is_again, records)
    }

    /// When the run was written last, in seconds since 1970.
    fn written(&self) -> f64 {
        let files = self.seen.iter().flatten().flatten();
        files.fold(0.0, |last, file| last.max(file.2 as f64))
    }

    /// Whether the process that has locked the folder is gone. Those of other hosts are not known.
    fn is_killed(&self, host: &Value) -> bool {
        if *host != *phalanx_base::host_name()
            || phalanx_base::unix_time().as_secs_f64() - self.written() < QUIET_S
        {
            return false;
        }
        let Ok(text) = read_regular(&self.path.join(".lock"), 4096) else {
            return true;
        };
        if let Ok(name) = serde_json::from_slice::<ProcessName>(&text) {
            return name.is_running() == Some(false);
        }
        // Of an older version.
        let pid = String::from_utf8_lossy(&text).trim().parse::<u32>();
        pid.is_ok_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
    }
}

/// Follows the runs below `folder` until `stop` is disconnected.
pub(crate) fn follow(folder: &Path, hub: &Hub<Runs>, stop: &Receiver<()>) {
    let mut runs: BTreeMap<String, Read> = BTreeMap::new();
    let (mut next_id, mut scanned) = (0, None::<Instant>);
    hub.update(|view| view.folder.set(folder.display().to_string()));
    loop {
        if scanned.is_none_or(|at| at.elapsed() >= SCAN_EVERY) {
            let (found, total) = scan(folder);
            let names: BTreeSet<&String> = found.iter().map(|(name, _)| name).collect();
            runs.retain(|name, _| names.contains(name));
            for (name, path) in found {
                runs.entry(name).or_insert_with(|| {
                    next_id += 1;
                    Read::new(path, next_id)
                });
            }
            scanned = Some(Instant::now());
            hub.update(|view| {
                let Runs {
                    runs: shown, gone, ..
                } = view;
                shown.retain(|name, _| {
                    let stays = runs.contains_key(name);
                    if !stays {
                        gone.insert(name.clone());
                    }
                    stays
                });
                for (name, read) in &runs {
                    let new = || Shown::new(&read.path, read.id);
                    shown.entry(name.clone()).or_insert_with(new);
                }
                view.total.update(total);
            });
        }
        // The newest first; a long one does not delay the others.
        let mut order: Vec<&String> = runs.keys().collect();
        order.sort_by_key(|name| std::cmp::Reverse(runs[*name].id));
        let names: Vec<String> = order.into_iter().cloned().collect();
        let mut has_more = true;
        while has_more {
            has_more = false;
            let mut rest = &names[..];
            while !rest.is_empty() {
                let until = Instant::now() + READ_LIMIT;
                let mut read = Vec::new();
                while let [name, others @ ..] = rest {
                    rest = others;
                    let Some(run) = runs.get_mut(name) else {
                        continue;
                    };
                    loop {
                        let (is_again, records) = run.poll();
                        read.push((name, is_again, records));
                        if run.seen.is_some() || Instant::now() >= until {
                            break;
                        }
                    }
                    has_more |= run.seen.is_none();
                    if Instant::now() >= until {
                        break;
                    }
                }
                hub.update(|view| show(view, &runs, read));
                if stop.try_recv() != Err(TryRecvError::Empty) {
                    return;
                }
            }
        }
        if !hub.wait(stop) {
            return;
        }
    }
}

/// Adds what was read to the page.
fn show(view: &mut Runs, runs: &BTreeMap<String, Read>, read: Vec<(&String, bool, Vec<Record>)>) {
    for (name, is_again, records) in read {
        let (Some(shown), Some(run)) = (view.runs.get_mut(name), runs.get(name)) else {
            continue;
        };
        if is_again {
            *shown = Shown::new(&run.path, run.id);
        }
        let mut row = shown.row.value.clone();
        for record in records {
            shown.add(record, &mut row);
        }
        if run.seen.is_some() {
            row.is_read = true;
            row.written = run.written();
            if row.state == "running" && run.is_killed(&shown.about.value["host"]) {
                row.state = "failed";
                row.error = Some("its process ended without a message".to_owned());
            }
        }
        shown.row.update(row);
    }
}

/// The newest runs below `folder` with their names, the oldest first, and how many there are.
fn scan(folder: &Path) -> (Vec<(String, PathBuf)>, usize) {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_owned(), 0)];
    let mut looked = 0;
    while let Some((path, depth)) = folders.pop() {
        let about = fs::symlink_metadata(path.join(RUN_FILE));
        if let Ok(about) = about
            && about.is_file()
        {
            let time = about.modified().unwrap_or(UNIX_EPOCH);
            found.push((time, path.clone()));
        }
        looked += 1;
        if depth == MOST_DEEP || looked > MOST_FOLDERS {
            continue;
        }
        let entries = fs::read_dir(&path).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let is_part = PARTS_OF_RUNS.iter().any(|part| name == *part);
            let is_hidden = name.as_encoded_bytes().starts_with(b".");
            // Links are not followed.
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && !is_hidden && !is_part {
                folders.push((entry.path(), depth + 1));
            }
        }
    }
    let total = found.len();
    found.sort();
    let newest = found.split_off(total.saturating_sub(MOST_RUNS));
    let name = |path: &Path| match path.strip_prefix(folder) {
        Ok(below) if !below.as_os_str().is_empty() => below.display().to_string(),
        _ => folder.display().to_string(),
    };
    let newest = newest.into_iter().map(|(_, path)| (name(&path), path));
    (newest.collect(), total)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::SystemTime;

    use super::*;

    fn is_killed(run: &mut Read, host: &str) -> bool {
        run.poll();
        run.is_killed(&host.into())
    }

    #[test]
    fn a_quiet_run_without_its_process_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at(RUN_FILE), "{}").unwrap();
        fs::write(at(".lock"), std::process::id().to_string()).unwrap();
        let age = |s: u64| {
            let file = File::options().write(true).open(at(RUN_FILE)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(s))
                .unwrap();
        };
        let own = phalanx_base::host_name();
        let mut run = Read::new(dir.path().to_owned(), 0);
        age(60);
        assert!(!is_killed(&mut run, &own), "its process runs");
        // No process has this number.
        fs::write(at(".lock"), "4194305\n").unwrap();
        assert!(is_killed(&mut run, &own));
        assert!(!is_killed(&mut run, "elsewhere"));
        let mut name = ProcessName::own();
        for is_later in [false, true] {
            fs::write(at(".lock"), serde_json::to_string(&name).unwrap()).unwrap();
            assert_eq!(is_killed(&mut run, &own), is_later);
            name.started += 1;
        }
        age(1);
        assert!(!is_killed(&mut run, &own), "just written");
        age(60);
        fs::remove_file(at(".lock")).unwrap();
        assert!(is_killed(&mut run, &own));
    }

    #[test]
    fn runs_are_found_below_a_folder_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b", "a/c", "a/c/checkpoints", ".hidden", "1/2/3/4/5/6/7"] {
            fs::create_dir_all(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join(RUN_FILE), "{}").unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("b"), dir.path().join("link")).unwrap();
        let names = |folder: &Path| {
            let (found, total) = scan(folder);
            assert_eq!(found.len(), total);
            let names = found.into_iter().map(|(name, _)| name);
            names.collect::<BTreeSet<_>>()
        };
        let expected = ["a/c", "b"].map(str::to_owned);
        assert_eq!(names(dir.path()), BTreeSet::from(expected));
        let own = dir.path().join("b");
        assert_eq!(names(&own), BTreeSet::from([own.display().to_string()]));
        assert!(names(&dir.path().join("none")).is_empty());
    }
}
