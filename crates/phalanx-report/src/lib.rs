//! Runs as one HTML page: curves, settings, confusion matrix, predictions.
//!
//! The page needs no network: style, script, numbers and pictures are inside. The files of a run
//! are data only. Their JSON stands in a `<script type="application/json">` without any `<`, and
//! the page's script shows text by `textContent`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod curve;

use std::collections::BTreeMap;
use std::path::Path;

use curve::{Curve, Points};
use phalanx_data::files::Dir;
use phalanx_data::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::value::RawValue;

/// The page's name in a run's folder.
pub const REPORT_FILE: &str = "report.html";

/// Images of `predictions.jsonl` in one picture, 32 in a row (`phalanx_data::image::sheet`).
pub const PICTURES_FILE: &str = "predictions.png";
const PER_ROW: usize = 32;

/// Limits of what is read and shown. A log of a million steps has 0.2 GiB.
const MAX_METRICS_BYTES: u64 = 4 << 30;
const MAX_SUMMARY_BYTES: u64 = 16 << 20;
const MAX_PREDICTIONS_BYTES: u64 = 256 << 20;
const MAX_PICTURES_BYTES: u64 = 32 << 20;
const MAX_CURVES: usize = 200;
const MAX_EVENTS: usize = 1000;
const MAX_PREDICTIONS: usize = 10_000;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

/// What one run's folder has.
#[derive(Debug, Serialize)]
pub struct Run {
    name: String,
    /// `summary.json`.
    summary: Option<Box<RawValue>>,
    /// Each named number of `metrics.jsonl`, over the steps.
    curves: BTreeMap<String, Points>,
    /// What else `metrics.jsonl` says of a step.
    events: Vec<Event>,
    /// The first rows of `predictions.jsonl`.
    predictions: Vec<Box<RawValue>>,
    predictions_total: usize,
    pictures: Option<Pictures>,
}

#[derive(Debug, Serialize)]
struct Event {
    step: f64,
    text: String,
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
    /// `Usage` where there is neither `metrics.jsonl` nor `summary.json`; `Io`; `Data` for files
    /// beyond the limits and a summary that is not JSON.
    pub fn read_in(dir: &Dir) -> Result<Run> {
        let metrics = dir.read("metrics.jsonl", MAX_METRICS_BYTES)?;
        let summary = dir.read("summary.json", MAX_SUMMARY_BYTES)?;
        let path = dir.path();
        if metrics.is_none() && summary.is_none() {
            let what = format!(
                "{} has neither metrics.jsonl nor summary.json; give the folder of a run",
                path.display()
            );
            return Err(Error::new(ErrorKind::Usage, what));
        }
        let summary = summary.map(|text| {
            serde_json::from_slice(&text).map_err(|e| {
                let what = format!("{} is not JSON", path.join("summary.json").display());
                Error::new(ErrorKind::Data, what).with_source(e)
            })
        });
        let predictions = dir.read("predictions.jsonl", MAX_PREDICTIONS_BYTES)?;
        let predictions = predictions.unwrap_or_default();
        let pictures = dir.read(PICTURES_FILE, MAX_PICTURES_BYTES);
        let (curves, events) = curves(&metrics.unwrap_or_default());
        let name = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(Run {
            name: name
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            summary: summary.transpose()?,
            curves,
            events,
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

/// Every number of every record by its name, and the records that say something else of a step.
fn curves(metrics: &[u8]) -> (BTreeMap<String, Points>, Vec<Event>) {
    let mut curves: BTreeMap<String, Curve> = BTreeMap::new();
    let mut events = Vec::new();
    for (number, line) in lines(metrics).enumerate() {
        let Ok(record) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(line) else {
            continue;
        };
        // Exact, as JavaScript reads it; the parser of serde_json may be one bit off.
        let value = |text: &RawValue| text.get().parse::<f64>().ok().filter(|v| v.is_finite());
        let step = record.get("step").and_then(|step| value(step));
        let step = step.unwrap_or(number as f64);
        for (name, text) in &record {
            let say = |text| Event { step, text };
            let fits = curves.len() < MAX_CURVES || curves.contains_key(name);
            match value(text) {
                _ if name == "step" => {}
                Some(value) if fits => curves.entry(name.clone()).or_default().add(step, value),
                None if events.len() == MAX_EVENTS => {}
                // A program may measure neither in its evaluation.
                None if ["accuracy", "test_loss"].contains(&name.as_str()) => {}
                None if text.get() == "null" => {
                    events.push(say(format!("{name} is not a number")));
                }
                None if name == "event" || name == "message" => {
                    let text = serde_json::from_str(text.get());
                    events.extend(text.ok().map(say));
                }
                _ => {}
            }
        }
    }
    let points = curves.into_iter().map(|(name, c)| (name, c.points()));
    (points.collect(), events)
}

impl Pictures {
    /// None if it is not PNG.
    fn new(png: Vec<u8>) -> Option<Pictures> {
        let side = |at: usize| Some(u32::from_be_bytes(png.get(at..at + 4)?.try_into().ok()?));
        (png.starts_with(b"\x89PNG\r\n\x1a\n")).then_some(())?;
        Some(Pictures {
            width: side(16)?,
            height: side(20)?,
            per_row: PER_ROW,
            src: format!("data:image/png;base64,{}", base64(&png)),
        })
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            text.push(match digit <= three.len() {
                true => char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]),
                false => '=',
            });
        }
    }
    text
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
