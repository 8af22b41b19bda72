//! Runs as one HTML page: curves, settings, confusion matrix, predictions.
//!
//! The page needs no network: style, script, numbers and pictures are inside. The files of a run
//! are data only. Their JSON stands in a `<script type="application/json">` without any `<`, and
//! the page's script shows text by `textContent`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod curve;
mod events;
#[cfg(all(any(test, fuzzing), feature = "images"))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "images")]
pub mod image;
mod line;
mod logged;
mod resumption;
mod system;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
pub use curve::{Curve, MAX_POINTS, Points};
use events::{Event, Events, Finish};
use logged::Logged;
use phalanx_base::files::Dir;
use phalanx_base::{Error, ErrorKind, Result};
pub use resumption::Resumption;
use serde::Serialize;
use serde_json::value::RawValue;
use system::System;
use watch::Watch;

/// The page's name in a run's folder.
pub const REPORT_FILE: &str = "report.html";

/// Images of `predictions.jsonl` in one picture, each once, in the order of the file
/// (`image::sheet`).
pub const PICTURES_FILE: &str = "predictions.png";

/// Images in a row of the picture that `image::sheet` makes and a run's report shows.
pub const IMAGES_PER_ROW: usize = 32;

/// Width and height of an image in the form of a PNG file; `None` if it is none.
pub fn png_size(png: &[u8]) -> Option<[u32; 2]> {
    let side = |at: usize| Some(u32::from_be_bytes(png.get(at..at + 4)?.try_into().ok()?));
    png.starts_with(b"\x89PNG\r\n\x1a\n").then_some(())?;
    Some([side(16)?, side(20)?])
}

/// Limits of what is read and shown. A log of a million steps has 0.2 GiB.
const MAX_METRICS_BYTES: u64 = 4 << 30;
const MAX_SUMMARY_BYTES: u64 = 16 << 20;
const MAX_ABOUT_BYTES: u64 = 16 << 20;
const MAX_EVENTS_BYTES: u64 = 1 << 30;
const MAX_PREDICTIONS_BYTES: u64 = 256 << 20;
const MAX_PICTURES_BYTES: u64 = 32 << 20;
const MAX_CURVES: usize = 200;
const MAX_LEFT_OUT: usize = 10_000;
const MAX_PREDICTIONS: usize = 10_000;

const HTML: &str = include_str!("page/page.html");
/// The page's style.
pub const CSS: &str = include_str!("page/page.css");
/// The page's script. It shows the runs in the element `data`; `render` in `main.js` shows others.
pub const JS: &str = concat!(
    include_str!("page/base.js"),
    include_str!("page/chart.js"),
    include_str!("page/overview.js"),
    include_str!("page/curves.js"),
    include_str!("page/events.js"),
    include_str!("page/time.js"),
    include_str!("page/system.js"),
    include_str!("page/watch.js"),
    include_str!("page/confusion.js"),
    include_str!("page/predictions.js"),
    include_str!("page/logged.js"),
    include_str!("page/model.js"),
    include_str!("page/main.js"),
);

/// What one run's folder has.
#[derive(Debug, Serialize)]
pub struct Run {
    name: String,
    /// `run.json`.
    about: Option<Box<RawValue>>,
    /// `summary.json`.
    summary: Option<Box<RawValue>>,
    /// The last record of `events.jsonl`, if it is one: how the run ended.
    finish: Option<Finish>,
    /// Each named number of `metrics.jsonl`, over the steps.
    curves: BTreeMap<String, Points>,
    /// Numbers of `metrics.jsonl` that are not among the curves.
    curves_left_out: usize,
    /// Notices, checkpoints, starts, and what else `metrics.jsonl` says of a step; the first ones.
    events: Vec<Event>,
    events_total: usize,
    rank_changes: Vec<[f64; 3]>,
    system: Option<System>,
    watch: Option<Watch>,
    /// Images, tables and texts of the program.
    logged: Vec<Logged>,
    logged_total: usize,
    /// The first rows of `predictions.jsonl`.
    predictions: Vec<Box<RawValue>>,
    predictions_total: usize,
    pictures: Option<Pictures>,
}

/// [`PICTURES_FILE`]: its size, and itself as a `data:` address.
#[derive(Debug, Serialize)]
struct Pictures {
    width: u32,
    height: u32,
    per_row: usize,
    src: String,
}

impl Run {
    /// Reads the run in the folder at `path`.
    ///
    /// # Errors
    ///
    /// `Usage`, when it is no run's folder; as [`read_in`](Self::read_in).
    pub fn read(path: &Path) -> Result<Run> {
        if !path.is_dir() {
            let what = format!("no folder {}", path.display());
            return Err(Error::new(ErrorKind::Usage, what));
        }
        Run::read_in(&Dir::open(path)?)
    }

    /// Reads the run in `dir`. Files that are missing leave their part of the page out, and lines
    /// that are not JSON objects are left out.
    ///
    /// # Errors
    ///
    /// `Usage` where there is neither `run.json` nor `metrics.jsonl` nor `summary.json`; `System`; `Data`
    /// for files beyond the limits, and for `run.json` and `summary.json` that are not JSON.
    pub fn read_in(dir: &Dir) -> Result<Run> {
        if !["run.json", "metrics.jsonl", "summary.json"]
            .iter()
            .any(|name| dir.has(name))
        {
            let what = format!(
                "{} has neither run.json nor metrics.jsonl nor summary.json; give the folder of a run",
                dir.path().display()
            );
            return Err(Error::new(ErrorKind::Usage, what));
        }
        let metrics = dir.read("metrics.jsonl", MAX_METRICS_BYTES)?;
        let events = dir.read("events.jsonl", MAX_EVENTS_BYTES)?;
        Run::read_lines(
            dir,
            &metrics.unwrap_or_default(),
            &events.unwrap_or_default(),
        )
    }

    /// As [`read_in`](Self::read_in), with `metrics` and `events` in place of the lines of
    /// `metrics.jsonl` and `events.jsonl`: of a long run that is not over, some.
    ///
    /// # Errors
    ///
    /// `System`; `Data` as [`read_in`](Self::read_in).
    pub fn read_lines(dir: &Dir, metrics: &[u8], events: &[u8]) -> Result<Run> {
        let json = |name: &str, most_bytes: u64| -> Result<Option<Box<RawValue>>> {
            let text = dir.read(name, most_bytes)?;
            let parsed = text.map(|text| serde_json::from_slice(&text)).transpose();
            parsed.map_err(|e| {
                let what = format!("{} is not JSON", dir.path().join(name).display());
                Error::new(ErrorKind::Data, what).with_source(e)
            })
        };
        let about = json("run.json", MAX_ABOUT_BYTES)?;
        let summary = json("summary.json", MAX_SUMMARY_BYTES)?;
        let path = dir.path();
        let mut events = Events::read(events, dir);
        let predictions = dir.read("predictions.jsonl", MAX_PREDICTIONS_BYTES)?;
        let predictions = predictions.unwrap_or_default();
        let pictures = dir.read(PICTURES_FILE, MAX_PICTURES_BYTES);
        let (curves, curves_left_out) = curves(metrics, &mut events);
        let name = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(Run {
            name: name
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            about,
            summary,
            finish: events.finish,
            curves,
            curves_left_out,
            events: events.list,
            events_total: events.total,
            rank_changes: events.rank_changes,
            system: events.system,
            watch: events.watch,
            logged: events.logged,
            logged_total: events.logged_total,
            predictions: lines(&predictions)
                .take(MAX_PREDICTIONS)
                .filter_map(|line| serde_json::from_slice(line).ok())
                .collect(),
            predictions_total: lines(&predictions).count(),
            pictures: pictures.ok().flatten().and_then(Pictures::new),
        })
    }
}

/// The lines that are complete.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let all = text.split_inclusive(|byte| *byte == b'\n');
    all.filter_map(|line| line.strip_suffix(b"\n"))
}

/// Every number of every record by its name, and how many names are left out. What the records
/// say else of a step is added to `events`.
fn curves(metrics: &[u8], events: &mut Events) -> (BTreeMap<String, Points>, usize) {
    let mut curves: BTreeMap<String, Curve> = BTreeMap::new();
    let mut left_out = BTreeSet::new();
    for (number, line) in lines(metrics).enumerate() {
        let Ok(record) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(line) else {
            continue;
        };
        // Exact, as JavaScript reads it; the parser of serde_json may be one bit off.
        let value = |text: &RawValue| text.get().parse::<f64>().ok().filter(|v| v.is_finite());
        let step = record.get("step").and_then(|step| value(step));
        let step = step.unwrap_or(number as f64);
        for (name, text) in &record {
            let mut say = |text| {
                events.add(Event {
                    kind: "metric",
                    step: Some(step),
                    elapsed_s: None,
                    text,
                });
            };
            let fits = curves.len() < MAX_CURVES || curves.contains_key(name);
            match value(text) {
                _ if name == "step" => {}
                Some(value) if fits => curves.entry(name.clone()).or_default().add(step, value),
                Some(_) if left_out.len() < MAX_LEFT_OUT => {
                    left_out.insert(name.clone());
                }
                // A program may measure neither in its evaluation.
                None if ["accuracy", "test_loss"].contains(&name.as_str()) => {}
                None if text.get() == "null" => say(format!("{name} is not a number")),
                None if name == "event" || name == "message" => {
                    if let Ok(text) = serde_json::from_str(text.get()) {
                        say(text);
                    }
                }
                _ => {}
            }
        }
    }
    let points = curves.into_iter().map(|(name, c)| (name, c.points()));
    (points.collect(), left_out.len())
}

impl Pictures {
    /// None if it is not PNG.
    fn new(png: Vec<u8>) -> Option<Pictures> {
        let [width, height] = png_size(&png)?;
        Some(Pictures {
            width,
            height,
            per_row: IMAGES_PER_ROW,
            src: format!("data:image/png;base64,{}", BASE64_STANDARD.encode(&png)),
        })
    }
}

/// The page of these runs.
///
/// # Errors
///
/// `Internal`, if a run cannot be JSON.
pub fn page(runs: &[Run]) -> Result<String> {
    let data = serde_json::to_string(runs)
        .map_err(|e| Error::new(ErrorKind::Internal, "a report cannot be JSON").with_source(e))?;
    // `<` is in strings only. Without it, neither `</script>` nor `<!--` ends or changes the element.
    let data = data.replace('<', "\\u003c");
    let mut page = String::with_capacity(HTML.len() + CSS.len() + JS.len() + data.len());
    let mut rest = HTML;
    for (mark, text) in [("{{css}}", CSS), ("{{data}}", &data), ("{{js}}", JS)] {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(text);
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

/// Writes the report of the run in `dir` there.
///
/// # Errors
///
/// Those of reading the run and of writing.
pub fn write_of(dir: &Dir) -> Result<()> {
    write_in(dir, &page(&[Run::read_in(dir)?])?)
}

/// Writes `page` into `dir`, as [`REPORT_FILE`].
///
/// # Errors
///
/// Those of writing.
pub fn write_in(dir: &Dir, page: &str) -> Result<()> {
    dir.write(REPORT_FILE, |out| out.write_all(page.as_bytes()))
}

#[cfg(test)]
mod tests;
