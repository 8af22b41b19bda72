//! What a run's folder has, as the report shows it, while it grows. What is kept of it has limits
//! that do not depend on how long the run is.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use phalanx_base::files::Dir;
use phalanx_report::{Curve, Run};
use phalanx_track::Record;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::Result;

/// Curves of one run.
const MOST_CURVES: usize = 200;

/// Lines of `events.jsonl` that are kept: of a kind over time, every second one is dropped when
/// there are more, of others the oldest.
const MOST_SYSTEM: usize = 150;
const MOST_WATCH: usize = 50;
const MOST_OTHER: usize = 1000;

/// All of them together.
const MOST_BYTES: usize = 64 << 20;

/// A version of a file: inode, length, and when it was written.
pub(crate) type Stamp = Option<(u64, u64, i64, i64)>;

pub(crate) fn stamp(path: &Path) -> Stamp {
    let about = std::fs::symlink_metadata(path).ok()?;
    Some((about.ino(), about.len(), about.mtime(), about.mtime_nsec()))
}

/// A value, and whether it was sent.
#[derive(Default)]
pub(crate) struct New<T> {
    pub value: T,
    is_new: bool,
}

impl<T: Serialize + PartialEq> New<T> {
    /// Sets another value.
    pub fn update(&mut self, value: T) {
        if self.value != value {
            self.set(value);
        }
    }
}

impl<T: Serialize> New<T> {
    pub fn set(&mut self, value: T) {
        (self.value, self.is_new) = (value, true);
    }

    pub fn add_to(&mut self, change: &mut Map<String, Value>, name: &str) {
        if std::mem::take(&mut self.is_new) {
            change.insert(name.to_owned(), json!(self.value));
        }
    }
}

/// What the page needs to say how far the run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Goal {
    epochs: Option<f64>,
    steps_per_epoch: Option<f64>,
    /// Steps that were taken before this attempt.
    resumed_at: Option<f64>,
    /// Steps of rank 0 in this attempt.
    steps: Option<f64>,
}

/// A run.
#[derive(Default)]
pub(crate) struct RunView {
    folder: New<Option<String>>,
    goal: New<Goal>,
    /// The last `system` event's ranks.
    measured: New<Value>,
    notices: Vec<Value>,
    notices_sent: usize,
    curves: Curves,
    /// What lines of `metrics.jsonl` have that is no point.
    odd: Kept,
    events: Kept,
    /// The rest of what the report shows, as it was sent last.
    report: BTreeMap<String, New<Value>>,
    /// The lines have changed since.
    is_outdated: bool,
    is_complete: bool,
}

/// Lines of JSON.
#[derive(Default)]
struct Kept {
    lines: Vec<(&'static str, String)>,
    bytes: usize,
}

impl Kept {
    fn add(&mut self, kind: &'static str, value: &Value, most: usize, is_thinned: bool) {
        let line = format!("{value}\n");
        self.bytes += line.len();
        self.lines.push((kind, line));
        let count = self.lines.iter().filter(|(k, _)| *k == kind).count();
        if count > most {
            let mut place = count;
            self.lines.retain(|(k, _)| {
                if *k != kind {
                    return true;
                }
                place -= 1;
                match is_thinned {
                    true => place.is_multiple_of(2),
                    false => place < most / 2,
                }
            });
            self.bytes = self.lines.iter().map(|(_, line)| line.len()).sum();
        }
        while self.bytes > MOST_BYTES && self.lines.len() > 1 {
            self.lines.drain(..self.lines.len() / 2);
            self.bytes = self.lines.iter().map(|(_, line)| line.len()).sum();
        }
    }

    fn text(&self) -> Vec<u8> {
        let lines = self.lines.iter().flat_map(|(_, line)| line.bytes());
        lines.collect()
    }
}

impl RunView {
    /// Another run, in `folder`.
    pub fn new(folder: &Path) -> RunView {
        let mut run = RunView::default();
        run.folder.set(Some(folder.display().to_string()));
        run.goal.set(Goal::default());
        run.is_outdated = true;
        run
    }

    pub fn add(&mut self, record: &Record) {
        let mut goal = self.goal.value.clone();
        match record {
            Record::Run(about) => {
                let epochs = &about["settings"]["--epochs"];
                let typed = epochs.as_str().and_then(|text| text.parse().ok());
                goal.epochs = typed.or(epochs.as_f64());
                goal.steps_per_epoch = about["steps_per_epoch"].as_f64();
            }
            Record::Metrics(metrics) => {
                self.is_complete = false;
                self.measure(metrics);
                return;
            }
            Record::Event(event) => {
                let (kind, most, is_thinned) = match event["kind"].as_str() {
                    Some("system") => ("system", MOST_SYSTEM, true),
                    Some("watch") => ("watch", MOST_WATCH, true),
                    _ => ("", MOST_OTHER, false),
                };
                self.events.add(kind, event, most, is_thinned);
                match event["kind"].as_str() {
                    Some("system") => {
                        let ranks = event["ranks"].clone();
                        let first = ranks.as_array().and_then(|all| {
                            let first = all.iter().find(|rank| rank["rank"] == 0);
                            first?["steps"].as_f64()
                        });
                        goal.steps = first;
                        self.measured.set(ranks);
                    }
                    Some("start") => {
                        goal.resumed_at = event["resumed_at"].as_f64();
                        goal.steps = None;
                    }
                    Some("notice") => {
                        if self.notices.len() >= MOST_OTHER {
                            self.notices.drain(..MOST_OTHER / 2);
                            self.notices_sent = 0;
                        }
                        self.notices.push(event["text"].clone());
                    }
                    _ => {}
                }
            }
            Record::Summary(_) => self.is_complete = true,
        }
        self.is_outdated = true;
        self.goal.update(goal);
    }

    /// Reads the rest of the report anew, if something has changed: of a complete run all, else
    /// what `run.json` and the events give.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn refresh(&mut self, folder: &Path) -> Result<()> {
        if !std::mem::take(&mut self.is_outdated) {
            return Ok(());
        }
        let dir = Dir::open(folder)?;
        let run = match self.is_complete {
            true => Run::read_in(&dir)?,
            false => Run::read_lines(&dir, &self.odd.text(), &self.events.text())?,
        };
        let Ok(Value::Object(parts)) = serde_json::to_value(run) else {
            return Ok(());
        };
        // Those of the log are sent as they grow.
        for (name, part) in parts.into_iter().filter(|(name, _)| name != "curves") {
            self.report.entry(name).or_default().update(part);
        }
        Ok(())
    }

    /// Whether the report is to be read anew.
    pub fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// Adds a line of `metrics.jsonl` to the curves.
    fn measure(&mut self, metrics: &Value) {
        self.curves.add(metrics, MOST_CURVES, |_| true);
        let values = metrics.as_object().into_iter().flatten();
        let mut values = values.filter(|(name, _)| *name != "step");
        if values.any(|(_, value)| !value.is_number()) {
            let texts = metrics.as_object().into_iter().flatten();
            let texts = texts.filter(|(name, value)| *name == "step" || !value.is_number());
            let texts: Map<_, _> = texts.map(|(n, v)| (n.clone(), v.clone())).collect();
            self.odd.add("", &texts.into(), MOST_OTHER, false);
            self.is_outdated = true;
        }
    }

    /// All of it.
    pub fn whole(&self, whole: &mut Map<String, Value>) {
        let report = self.report.iter();
        let report: Map<_, _> = report
            .map(|(n, part)| (n.clone(), part.value.clone()))
            .collect();
        let parts = [
            ("folder", json!(self.folder.value)),
            ("goal", json!(self.goal.value)),
            ("measured", self.measured.value.clone()),
            ("notices", json!({"all": true, "items": self.notices})),
            ("curves", self.curves.whole()),
            ("report", report.into()),
        ];
        whole.extend(parts.map(|(name, part)| (name.to_owned(), part)));
    }

    /// What has changed since the last call.
    pub fn change(&mut self, change: &mut Map<String, Value>) {
        self.folder.add_to(change, "folder");
        self.goal.add_to(change, "goal");
        self.measured.add_to(change, "measured");
        if self.notices_sent < self.notices.len() {
            let new = &self.notices[self.notices_sent..];
            let new = json!({"all": self.notices_sent == 0, "items": new});
            change.insert("notices".to_owned(), new);
            self.notices_sent = self.notices.len();
        }
        if let Some(grown) = self.curves.change() {
            change.insert("curves".to_owned(), grown);
        }
        let mut report = Map::new();
        for (name, part) in &mut self.report {
            part.add_to(&mut report, name);
        }
        if !report.is_empty() {
            change.insert("report".to_owned(), report.into());
        }
    }
}

/// The numbers of `metrics.jsonl` by name.
pub(crate) struct Curves {
    lines: BTreeMap<String, Line>,
    /// Lines of `metrics.jsonl`.
    records: u64,
    /// Points of a curve.
    most: usize,
}

impl Default for Curves {
    fn default() -> Self {
        Curves::new(phalanx_report::MAX_POINTS)
    }
}

impl Curves {
    /// With about `most` points of each.
    pub fn new(most: usize) -> Curves {
        Curves {
            lines: BTreeMap::new(),
            records: 0,
            most,
        }
    }

    /// Adds the numbers of a line: at most `names` different ones, which are `wanted`.
    pub fn add(&mut self, metrics: &Value, names: usize, wanted: impl Fn(&str) -> bool) {
        let step = metrics["step"].as_f64().unwrap_or(self.records as f64);
        self.records += 1;
        for (name, value) in metrics.as_object().into_iter().flatten() {
            let fits = self.lines.len() < names || self.lines.contains_key(name);
            match value.as_f64() {
                Some(value) if name != "step" && fits && wanted(name) => {
                    let new = || Line::new(self.most);
                    let line = self.lines.entry(name.clone()).or_insert_with(new);
                    line.curve.add(step, value);
                    line.new.0.push(step);
                    line.new.1.push(value);
                }
                _ => {}
            }
        }
    }

    /// All points.
    pub fn whole(&self) -> Value {
        let lines = self.lines.iter();
        let lines: Map<_, _> = lines.map(|(n, line)| (n.clone(), line.whole())).collect();
        lines.into()
    }

    /// The points that were added since the last call, if there are any.
    pub fn change(&mut self) -> Option<Value> {
        let grown = self.lines.iter_mut();
        let grown = grown.filter(|(_, line)| !line.new.0.is_empty());
        let most = self.most;
        let grown: Map<_, _> = grown
            .map(|(n, line)| (n.clone(), line.change(most)))
            .collect();
        (!grown.is_empty()).then(|| grown.into())
    }
}

/// A curve, and its points that were not sent yet.
struct Line {
    curve: Curve,
    new: (Vec<f64>, Vec<f64>),
    /// Points that were added since all of it was sent.
    added: usize,
}

impl Line {
    fn new(most: usize) -> Line {
        Line {
            curve: Curve::new(most),
            new: Default::default(),
            added: 0,
        }
    }

    /// All points, thinned.
    fn whole(&self) -> Value {
        let points = self.curve.points();
        json!({"all": true, "x": points.x, "y": points.y, "total": points.total})
    }

    /// The new points; all, when more than `most` were added.
    fn change(&mut self, most: usize) -> Value {
        let (x, y) = std::mem::take(&mut self.new);
        self.added += x.len();
        if self.added <= most {
            return json!({"x": x, "y": y, "total": self.curve.total()});
        }
        self.added = 0;
        self.whole()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the page has after these changes.
    fn points(changes: &[Map<String, Value>], name: &str) -> Vec<(f64, f64)> {
        let mut all = Vec::new();
        for change in changes {
            let curve = &change["curves"][name];
            if curve["all"] == true {
                all.clear();
            }
            let list = |side: &str| -> Vec<f64> {
                let list = curve[side].as_array().unwrap();
                list.iter().map(|v| v.as_f64().unwrap()).collect()
            };
            all.extend(list("x").into_iter().zip(list("y")));
        }
        all
    }

    fn change(run: &mut RunView) -> Map<String, Value> {
        let mut change = Map::new();
        run.change(&mut change);
        change
    }

    #[test]
    fn curves_grow_by_what_is_new_and_stay_bounded() {
        let mut run = RunView::new(Path::new("/r"));
        let mut changes = Vec::new();
        let mut sent = 0;
        for n in 0..50_000u32 {
            let value = (f64::from(n) * 0.7).sin();
            run.add(&Record::Metrics(json!({"step": n, "loss": value})));
            if n % 100 == 99 {
                changes.push(change(&mut run));
                sent += changes.last().unwrap()["curves"]["loss"]["x"]
                    .as_array()
                    .unwrap()
                    .len();
                let have = points(&changes, "loss");
                assert!(
                    have.len() <= 2 * phalanx_report::MAX_POINTS + 2,
                    "{n}: {}",
                    have.len()
                );
                assert_eq!(have.last().unwrap().0, f64::from(n));
                if n < 2000 {
                    let want: Vec<f64> = (0..=n).map(|n| (f64::from(n) * 0.7).sin()).collect();
                    let have: Vec<f64> = have.iter().map(|p| p.1).collect();
                    assert_eq!(have, want);
                }
            }
        }
        assert!(sent < 2 * 50_000, "{sent}");
        assert!(change(&mut run).is_empty(), "nothing is new");
        let mut whole = Map::new();
        run.whole(&mut whole);
        assert!(points(&[whole], "loss").len() <= 2002);
    }

    #[test]
    fn kept_lines_are_bounded_by_number_and_by_bytes() {
        let mut kept = Kept::default();
        for n in 0..10_000 {
            kept.add("system", &json!({"n": n}), MOST_SYSTEM, true);
            kept.add("", &json!({"o": n}), MOST_OTHER, false);
        }
        let text = String::from_utf8(kept.text()).unwrap();
        let count = |key: &str| text.lines().filter(|l| l.contains(key)).count();
        assert!((MOST_SYSTEM / 3..=MOST_SYSTEM).contains(&count("\"n\"")));
        assert!((MOST_OTHER / 3..=MOST_OTHER).contains(&count("\"o\"")));
        assert!(
            text.ends_with("{\"n\":9999}\n{\"o\":9999}\n"),
            "the last stay"
        );
        assert_eq!(kept.bytes, text.len());
        let long = "x".repeat(MOST_BYTES / 10);
        for _ in 0..40 {
            kept.add("", &json!(long), MOST_OTHER, false);
            assert!(kept.bytes <= MOST_BYTES);
        }
    }
}
