//! TensorBoard event files: what `metrics.jsonl` has, as scalars, the settings as text and hyperparameters, histograms,
//! images, predictions, texts, what the ranks use, the model's graph, and how the run ended.

mod proto;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use phalanx_base::files::Dir;
use phalanx_report::png_size;
use prost::Message as _;
use serde_json::{Value, json};

use self::proto::{Event, What, record};
use crate::values::{self, Predictions, failed, shown};
use crate::{Error, ErrorKind, Result, Tracker};

/// What the names of event files begin with.
pub const EVENT_FILE_PREFIX: &str = "events.out.tfevents.";

/// The name of the tracker.
pub(crate) const TENSORBOARD: &str = "tensorboard";

/// Writes a run as an event file of TensorBoard, directly in the run's folder, so that TensorBoard calls the run by its
/// folder.
///
/// Each process writes the file from the run's beginning, under a new name, and at its end removes those before. TensorBoard
/// drops what it has read of the run when it comes to a new file.
#[derive(Default)]
pub struct TensorBoard {
    dir: PathBuf,
    out: Option<Out>,
    has_graph: bool,
    /// When the attempt began, in seconds since 1970.
    started: f64,
    /// The step and time of the last record.
    step: u64,
    time: f64,
    /// How the last attempt ended.
    finish: Option<Value>,
}

struct Out {
    dir: Dir,
    /// Files of earlier processes.
    before: Vec<String>,
    path: PathBuf,
    file: BufWriter<File>,
}

impl Out {
    /// Creates the file of the run `id`.
    fn create(dir: &Dir, id: &str) -> Result<Out> {
        let names = dir.names()?;
        let names = names
            .iter()
            .filter_map(|name| Some((name, name.strip_prefix(EVENT_FILE_PREFIX)?)));
        // Files are read in the order of their names: each has a later second than those before.
        let second = |(_, name): (&String, &str)| name.split('.').next()?.parse::<u64>().ok();
        let last = names.clone().filter_map(second).max();
        let now = phalanx_base::unix_time().as_secs();
        let now = now.max(last.map_or(0, |last| last.saturating_add(1)));
        let host = phalanx_base::host_name();
        let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        let end = format!(".{id}");
        let name = format!(
            "{EVENT_FILE_PREFIX}{now:010}.{host}.{}{end}",
            std::process::id()
        );
        let file = BufWriter::new(dir.create_file(&name)?);
        let before = names.map(|(name, _)| name.clone());
        let before = before.filter(|name| !id.is_empty() && name.ends_with(&end));
        let before = before.collect();
        let path = dir.path().join(&name);
        Ok(Out {
            dir: dir.clone(),
            before,
            path,
            file,
        })
    }

    fn write(&mut self, wall_time: f64, step: u64, what: What) -> Result<()> {
        let event = Event {
            wall_time,
            step: i64::try_from(step).unwrap_or(i64::MAX),
            what: Some(what),
        };
        let written = self.file.write_all(&record(&event));
        written.map_err(|e| failed("write", &self.path, e))
    }

    fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        flushed.map_err(|e| failed("write", &self.path, e))
    }
}

impl TensorBoard {
    /// The open file; `run` is `run.json`, or null.
    fn out(&mut self, run: &Value) -> Result<&mut Out> {
        if self.out.is_none() {
            self.started = run["started"].as_f64().unwrap_or(0.0);
            self.time = self.started;
            let id = run["id"].as_str().unwrap_or_default();
            let id: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
            let mut out = Out::create(&Dir::open(&self.dir)?, &id)?;
            let version = What::FileVersion("brain.Event:2".to_owned());
            out.write(self.started, 0, version)?;
            // What files of earlier processes have is dropped. Also without any: TensorBoard takes the first start that it
            // sees for no restart.
            let status = proto::SESSION_START;
            let start = What::SessionLog(proto::SessionLog { status });
            out.write(self.started, 0, start)?;
            let values = vec![text("settings", &table(run)), hparams(run, self.started)];
            out.write(self.started, 0, summary(values))?;
            self.out = Some(out);
        }
        let none = || Error::new(ErrorKind::Failed, "tensorboard: no file");
        self.out.as_mut().ok_or_else(none)
    }

    /// Writes `values` of the last step.
    fn write(&mut self, values: Vec<proto::Value>) -> Result<()> {
        let (time, step) = (self.time, self.step);
        self.out(&Value::Null)?.write(time, step, summary(values))
    }

    /// Takes over the step and time of a record.
    fn follow(&mut self, record: &Value) {
        self.step = record["step"].as_u64().unwrap_or(self.step);
        let elapsed = record["elapsed_s"].as_f64().map(|s| self.started + s);
        self.time = record["time"].as_f64().or(elapsed).unwrap_or(self.time);
    }

    /// What an event has to show.
    fn shown(&self, event: &Value) -> Result<Vec<proto::Value>> {
        let word = |name: &str| event[name].as_str().unwrap_or_default();
        Ok(match word("kind") {
            "system" => system(event),
            "watch" => ["parameters", "gradients"]
                .map(|kind| histograms(kind, &event[kind]))
                .concat(),
            "text" => vec![text(word("name"), word("text"))],
            "image" => {
                let png = values::read(&Dir::open(&self.dir)?, word("file"));
                image(word("name"), png).into_iter().collect()
            }
            "rows" => {
                let predictions = Predictions::of(&self.dir, event)?;
                let png = predictions.and_then(|predictions| predictions.framed());
                image("predictions", png).into_iter().collect()
            }
            _ => Vec::new(),
        })
    }
}

impl Tracker for TensorBoard {
    fn name(&self) -> &str {
        TENSORBOARD
    }

    fn begin(&mut self, dir: &Path, _: &Value) -> Result<bool> {
        self.dir = dir.to_owned();
        Ok(false)
    }

    fn run(&mut self, run: &Value) -> Result<()> {
        self.out(run)?;
        let graph = &run["model"]["graph"];
        if !self.has_graph && graph.is_array() {
            let graph = proto::graph(graph).encode_to_vec();
            let time = self.time;
            self.out(run)?.write(time, 0, What::Graph(graph))?;
            self.has_graph = true;
        }
        self.out(run)?.flush()
    }

    fn metrics(&mut self, records: &[Value]) -> Result<()> {
        for record in records {
            self.follow(record);
            let values = scalars(record);
            if !values.is_empty() {
                self.write(values)?;
            }
        }
        self.out(&Value::Null)?.flush()
    }

    fn event(&mut self, event: &Value) -> Result<()> {
        match event["kind"].as_str() {
            Some("start") => {
                let began = event["time"].as_f64().zip(event["elapsed_s"].as_f64());
                self.started = began.map_or(self.started, |(time, elapsed)| time - elapsed);
                self.finish = None;
            }
            Some("finish") => self.finish = Some(event.clone()),
            _ => {}
        }
        let values = self.shown(event)?;
        if values.is_empty() {
            return Ok(());
        }
        self.follow(event);
        self.write(values)?;
        self.out(&Value::Null)?.flush()
    }

    fn summary(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }

    /// Writes how the run ended. TensorBoard keeps the first end that it reads, so a run that can be resumed gets its mark
    /// as a text only.
    fn finish(&mut self) -> Result<()> {
        if let Some(finish) = self.finish.take() {
            let status = finish["status"].as_str().unwrap_or("finished");
            let error = finish["error"].as_str();
            let said = error.map_or(status.to_owned(), |error| format!("{status}: {error}"));
            self.time = finish["time"].as_f64().unwrap_or(self.time);
            let mut values = vec![text("end", &said)];
            let status = match status {
                "finished" => Some(proto::SUCCESS),
                "failed" => Some(proto::FAILURE),
                _ => None,
            };
            let end = status.map(|status| proto::SessionEnd {
                status,
                end_time_secs: self.time,
            });
            let hparams = end.map(|end| proto::Hparams {
                end: Some(end),
                ..proto::Hparams::default()
            });
            values.extend(hparams.map(|hparams| of_hparams("session_end_info", &hparams)));
            self.write(values)?;
        }
        let out = self.out(&Value::Null)?;
        out.flush()?;
        for name in std::mem::take(&mut out.before) {
            out.dir.remove(&name)?;
        }
        Ok(())
    }
}

fn summary(values: Vec<proto::Value>) -> What {
    What::Summary(proto::Summary { values })
}

/// The flags and the number of ranks, for the plugin that compares runs by them.
fn hparams(run: &Value, started: f64) -> proto::Value {
    let settings = run["settings"].as_object().into_iter().flatten();
    let flags = settings.filter_map(|(name, value)| Some((name.strip_prefix("--")?, shown(value))));
    let ranks = run["ranks"]
        .as_u64()
        .map(|ranks| ("ranks", ranks.to_string()));
    let of = |(name, value): (&str, String)| {
        let kind = match value.parse() {
            Ok(number) => proto::HparamKind::Number(number),
            Err(_) => proto::HparamKind::String(value),
        };
        (name.to_owned(), proto::Hparam { kind: Some(kind) })
    };
    let start = proto::SessionStart {
        hparams: flags.chain(ranks).map(of).collect(),
        start_time_secs: started,
    };
    let hparams = proto::Hparams {
        start: Some(start),
        ..proto::Hparams::default()
    };
    of_hparams("session_start_info", &hparams)
}

/// `rank_N/NAME` of each rank.
fn system(event: &Value) -> Vec<proto::Value> {
    values::system(event)
        .filter_map(|(rank, name, value)| scalar(format!("system/rank_{rank}/{name}"), value))
        .collect()
}

/// The number `value`; none, if it is not one.
fn scalar(tag: String, value: &Value) -> Option<proto::Value> {
    Some(proto::Value {
        tag,
        simple_value: Some(value.as_f64()? as f32),
        ..proto::Value::default()
    })
}

/// Histograms by the names of the tensors.
fn histograms(kind: &str, of: &Value) -> Vec<proto::Value> {
    let histograms = of.as_object().into_iter().flatten();
    let value = |(name, histogram): (&String, &Value)| {
        let number = |name: &str| histogram[name].as_f64().unwrap_or_default();
        let buckets = histogram["buckets"].as_array().into_iter().flatten();
        proto::Value {
            tag: format!("{kind}/{name}"),
            histogram: Some(proto::Histogram {
                min: number("min"),
                max: number("max"),
                num: number("count"),
                sum: number("sum"),
                sum_squares: number("sum_squares"),
                bucket_limit: values::edges(histogram).skip(1).collect(),
                bucket: buckets.filter_map(Value::as_f64).collect(),
            }),
            ..proto::Value::default()
        }
    };
    histograms.map(value).collect()
}

/// An image; none, if `png` is not one.
fn image(tag: &str, png: Option<Vec<u8>>) -> Option<proto::Value> {
    let png = png?;
    let [width, height] = png_size(&png)?.map(|side| i32::try_from(side).unwrap_or(i32::MAX));
    Some(proto::Value {
        tag: tag.to_owned(),
        image: Some(proto::Image {
            height,
            width,
            colorspace: proto::RGB,
            png,
        }),
        ..proto::Value::default()
    })
}

/// The numbers of a record: `train/NAME` of a step, `test/NAME` of an evaluation, `epoch/NAME` of an epoch, `NAME` of a
/// program's own.
fn scalars(record: &Value) -> Vec<proto::Value> {
    let Some(record) = record.as_object() else {
        return Vec::new();
    };
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
        scalar(tag, value)
    });
    values.collect()
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

/// The settings as a table in Markdown.
fn table(run: &Value) -> String {
    let mut table = "| setting | value |\n|---|---|\n".to_owned();
    let words = run["arguments"].as_array().into_iter().flatten();
    let words: Vec<&str> = words.filter_map(Value::as_str).collect();
    let own = [
        ("arguments", json!(words.join(" "))),
        ("ranks", run["ranks"].clone()),
        ("transport", run["transport"].clone()),
    ];
    let own = own
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value));
    let settings = run["settings"].as_object().cloned().unwrap_or_default();
    for (name, value) in settings.into_iter().chain(own).collect::<BTreeMap<_, _>>() {
        let value = shown(&value).replace('|', "\\|").replace('\n', " ");
        // Writing to a string does not fail.
        let _ = writeln!(table, "| {name} | {value} |");
    }
    table
}
