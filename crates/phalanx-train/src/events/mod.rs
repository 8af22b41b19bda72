//! TensorBoard event files: what `metrics.jsonl` has, as scalars, the settings as text and hyperparameters, histograms,
//! images, texts and the model's graph.
//!
//! A process writes one file, directly in the run's folder, so that TensorBoard calls the run by its folder.

pub(crate) mod histogram;
mod proto;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use phalanx_data::files::Dir;
use prost::Message as _;
use serde_json::Value;

pub(crate) use self::proto::Histogram;
use self::proto::{Event, What, record};
use crate::error::Result;
use crate::log::{Named, Status};

/// What the names of event files begin with.
pub(crate) const PREFIX: &str = "events.out.tfevents.";

/// How long a record may wait for the next ones.
const FLUSH_INTERVAL: Duration = Duration::from_secs(2);

/// An event file that is being written.
#[derive(Debug)]
pub(crate) struct Events {
    path: PathBuf,
    out: BufWriter<File>,
    flushed: Instant,
    /// When the command was started, and that moment as seconds since 1970.
    started: (Instant, f64),
}

impl Events {
    /// Creates this process's file in `dir`, for a training that has taken `step` steps. TensorBoard drops what
    /// earlier files have of step `step` and later ones.
    pub(crate) fn create(
        dir: &Dir,
        started: Instant,
        step: u64,
        settings: &BTreeMap<String, String>,
    ) -> Result<Events> {
        let since_1970 = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH);
        let now = since_1970(SystemTime::now()).unwrap_or_default();
        // Files are read in the order of their names: each has a later second than those before.
        let second = |name: &String| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok();
        let last: Option<u64> = dir.names()?.iter().filter_map(second).max();
        let host = phalanx_process::host_name();
        let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        let name = format!(
            "{PREFIX}{:010}.{}.{}.0",
            now.as_secs()
                .max(last.map_or(0, |last| last.saturating_add(1))),
            host,
            std::process::id()
        );
        let mut events = Events {
            path: dir.path().join(&name),
            out: BufWriter::new(dir.create_file(&name)?),
            flushed: Instant::now(),
            started: (
                started,
                (now.saturating_sub(started.elapsed())).as_secs_f64(),
            ),
        };
        events.begin(step, settings)?;
        Ok(events)
    }

    fn begin(&mut self, step: u64, settings: &BTreeMap<String, String>) -> io::Result<()> {
        let version = What::FileVersion("brain.Event:2".to_owned());
        self.write(0, None, version)?;
        // Also a first one: TensorBoard takes the first start that it sees for no restart.
        let status = proto::SESSION_START;
        let start = What::SessionLog(proto::SessionLog { status });
        self.write(step, None, start)?;
        let values = vec![text("settings", &table(settings)), self.hparams(settings)];
        self.write(step, None, What::Summary(proto::Summary { values }))?;
        self.flush()
    }

    /// Writes the numbers of a record of `metrics.jsonl` as scalars.
    pub(crate) fn record(&mut self, record: &Value) -> io::Result<()> {
        let (Some(step), Some(values)) = (record["step"].as_u64(), scalars(record)) else {
            return Ok(());
        };
        let elapsed = record["elapsed_s"].as_f64();
        self.write(step, elapsed, What::Summary(proto::Summary { values }))?;
        if !record["train_loss"].is_null() || self.flushed.elapsed() >= FLUSH_INTERVAL {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes histograms of parameters and gradients.
    pub(crate) fn histograms(
        &mut self,
        step: u64,
        parameters: Vec<(String, Histogram)>,
        gradients: Vec<(String, Histogram)>,
    ) -> io::Result<()> {
        let value = |kind: &str, (name, histogram): (String, Histogram)| proto::Value {
            tag: format!("{kind}/{name}"),
            histogram: Some(histogram),
            ..proto::Value::default()
        };
        let parameters = parameters.into_iter().map(|h| value("parameters", h));
        let gradients = gradients.into_iter().map(|h| value("gradients", h));
        let values = parameters.chain(gradients).collect();
        self.write(step, None, What::Summary(proto::Summary { values }))
    }

    /// Writes an image of `size` (width and height).
    pub(crate) fn image(
        &mut self,
        step: u64,
        name: &str,
        size: [u32; 2],
        png: Vec<u8>,
    ) -> io::Result<()> {
        let [width, height] = size.map(|side| i32::try_from(side).unwrap_or(i32::MAX));
        let value = proto::Value {
            tag: name.to_owned(),
            image: Some(proto::Image {
                height,
                width,
                colorspace: proto::RGB,
                png,
            }),
            ..proto::Value::default()
        };
        let values = vec![value];
        self.write(step, None, What::Summary(proto::Summary { values }))
    }

    /// Writes a text.
    pub(crate) fn text(&mut self, step: u64, name: &str, content: &str) -> io::Result<()> {
        let values = vec![text(name, content)];
        self.write(step, None, What::Summary(proto::Summary { values }))
    }

    /// Writes the model's graph.
    pub(crate) fn graph(&mut self, nodes: &[Named]) -> io::Result<()> {
        let graph = proto::graph(nodes);
        self.write(0, None, What::Graph(graph.encode_to_vec()))
    }

    /// Writes that the run has finished, if it has. TensorBoard keeps the first end that it reads, so there is none for a
    /// run that can be resumed.
    pub(crate) fn end(&mut self, status: Status) -> io::Result<()> {
        if status == Status::Finished {
            let end = proto::SessionEnd {
                status: proto::SUCCESS,
                end_time_secs: self.started.1 + self.started.0.elapsed().as_secs_f64(),
            };
            let hparams = proto::Hparams {
                end: Some(end),
                ..proto::Hparams::default()
            };
            let values = vec![of_hparams("session_end_info", &hparams)];
            self.write(0, None, What::Summary(proto::Summary { values }))?;
        }
        self.flush()
    }

    /// Hands what was written to the system.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.flushed = Instant::now();
        self.out.flush()
    }

    /// Where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what happened `elapsed` seconds after the start, or now.
    fn write(&mut self, step: u64, elapsed: Option<f64>, what: What) -> io::Result<()> {
        let (started, at) = self.started;
        let event = Event {
            wall_time: at + elapsed.unwrap_or_else(|| started.elapsed().as_secs_f64()),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            what: Some(what),
        };
        self.out.write_all(&record(&event))
    }

    /// The flags and the number of ranks, for the plugin that compares runs by them.
    fn hparams(&self, settings: &BTreeMap<String, String>) -> proto::Value {
        let shown = |name: &&String| *name == "ranks" || name.starts_with("--");
        let flags = settings.iter().filter(|(name, _)| shown(name));
        let flags = flags.map(|(name, value)| {
            let kind = match value.parse() {
                Ok(number) => proto::HparamKind::Number(number),
                Err(_) => proto::HparamKind::String(value.clone()),
            };
            let name = name.trim_start_matches('-').to_owned();
            (name, proto::Hparam { kind: Some(kind) })
        });
        let start = proto::SessionStart {
            hparams: flags.collect(),
            start_time_secs: self.started.1,
        };
        let hparams = proto::Hparams {
            start: Some(start),
            ..proto::Hparams::default()
        };
        of_hparams("session_start_info", &hparams)
    }
}

/// The numbers of a record: `train/NAME` of a step, `test/NAME` of an evaluation, `epoch/NAME` of an epoch, `NAME` of a
/// program's own.
fn scalars(record: &Value) -> Option<Vec<proto::Value>> {
    let record = record.as_object()?;
    let is_step = record.contains_key("loss");
    let has_all = |names: &[&str]| names.iter().all(|name| record.contains_key(*name));
    let is_own = !is_step && !has_all(&["train_loss"]) && !has_all(&["test_loss", "accuracy"]);
    let values = record.iter().filter_map(|(name, value)| {
        let tag = match &name[..] {
            "step" | "epoch" | "elapsed_s" => return None,
            name if is_own => name.to_owned(),
            name if is_step => format!("train/{name}"),
            "accuracy" => "test/accuracy".to_owned(),
            name => match name.strip_prefix("test_") {
                Some(name) => format!("test/{name}"),
                None => format!("epoch/{name}"),
            },
        };
        Some(proto::Value {
            tag,
            simple_value: Some(value.as_f64()? as f32),
            ..proto::Value::default()
        })
    });
    Some(values.collect())
}

fn of_hparams(name: &str, hparams: &proto::Hparams) -> proto::Value {
    proto::Value {
        tag: format!("_hparams_/{name}"),
        metadata: Some(of_plugin("hparams", hparams.encode_to_vec())),
        ..proto::Value::default()
    }
}

fn text(tag: &str, text: &str) -> proto::Value {
    proto::Value {
        tag: tag.to_owned(),
        tensor: Some(proto::Tensor {
            dtype: proto::DT_STRING,
            shape: Some(proto::Shape {}),
            strings: vec![text.into()],
        }),
        metadata: Some(of_plugin("text", Vec::new())),
        ..proto::Value::default()
    }
}

fn of_plugin(name: &str, content: Vec<u8>) -> proto::Metadata {
    let name = name.to_owned();
    proto::Metadata {
        plugin: Some(proto::Plugin { name, content }),
    }
}

/// As a table in Markdown.
fn table(settings: &BTreeMap<String, String>) -> String {
    let mut table = "| setting | value |\n|---|---|\n".to_owned();
    for (name, value) in settings {
        let value = value.replace('|', "\\|").replace('\n', " ");
        // Writing to a string does not fail.
        let _ = writeln!(table, "| {name} | {value} |");
    }
    table
}
