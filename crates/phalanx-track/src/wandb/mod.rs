//! An offline run of wandb: a folder that `wandb sync` uploads.

mod proto;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use phalanx_data::files::Dir;
use phalanx_process::env::Env;
use prost::Message as _;
use serde_json::{Value, json};

use self::proto::{Item, Items, What};
use crate::{Error, ErrorKind, Result, Tracker};

/// The folder in the run's folder.
const FOLDER: &str = "wandb";

/// The client whose files these are like.
const MIN_CONSUMER: &str = "0.70.0";

/// The exit code of a run that somebody has stopped: wandb calls it killed.
const KILLED: i32 = 255;

/// What the summary calls why the run has failed.
const ERROR: &str = "error";

/// Writes a run as an offline run of wandb, into `wandb/offline-run-<date>_<time>-<id>` in the run's folder. `wandb
/// sync` uploads it.
///
/// Each process writes the file from the run's beginning.
#[derive(Default)]
pub struct Wandb {
    project: Option<String>,
    entity: Option<String>,
    display_name: Option<String>,
    dir: PathBuf,
    /// The folder that an earlier process has made.
    folder: Option<String>,
    out: Option<Out>,
    /// When the command was started, in seconds since 1970.
    started: f64,
    /// The values of the step that is being read.
    row: BTreeMap<String, Value>,
    step: u64,
    /// The last values, by name.
    last: BTreeMap<String, Value>,
    exit: Option<proto::Exit>,
}

struct Out {
    path: PathBuf,
    file: BufWriter<File>,
    offset: u64,
    records: i64,
}

impl Out {
    fn create(dir: &Dir, id: &str) -> Result<Out> {
        let name = format!("run-{id}.wandb");
        // So that `wandb sync` takes it for a new one.
        dir.remove(&format!("{name}.synced"))?;
        let mut out = Out {
            path: dir.path().join(&name),
            file: BufWriter::new(dir.create_file(&name)?),
            offset: proto::MAGIC.len() as u64,
            records: 0,
        };
        let begun = out.file.write_all(proto::MAGIC);
        begun.map_err(|e| out.failed(e))?;
        let version = proto::Version {
            producer: concat!("phalanx ", env!("CARGO_PKG_VERSION")).to_owned(),
            min_consumer: MIN_CONSUMER.to_owned(),
        };
        out.write(What::Header(proto::Header {
            version: Some(version),
        }))?;
        Ok(out)
    }

    fn write(&mut self, what: What) -> Result<()> {
        self.records += 1;
        let record = proto::Record {
            num: self.records,
            what: Some(what),
        };
        let data = record.encode_to_vec();
        let written = proto::write_frames(&mut self.file, self.offset, &data);
        self.offset = written.map_err(|e| self.failed(e))?;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        flushed.map_err(|e| self.failed(e))
    }

    /// No second attempt: a part of a record may be in the file.
    fn failed(&self, e: std::io::Error) -> Error {
        let what = format!("cannot write {}", self.path.display());
        Error::new(ErrorKind::Failed, what).caused_by(e)
    }
}

impl Wandb {
    /// A tracker with the project, entity and name that wandb's variables in `env` give; the project is otherwise the
    /// program, and the name that of the run's folder.
    pub fn new(env: &Env) -> Wandb {
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty()).cloned();
        Wandb {
            project: set("WANDB_PROJECT"),
            entity: set("WANDB_ENTITY"),
            display_name: set("WANDB_NAME"),
            ..Wandb::default()
        }
    }

    /// The open file; `run` is `run.json`, or null.
    fn out(&mut self, run: &Value) -> Result<&mut Out> {
        if self.out.is_none() {
            self.out = Some(self.create(run)?);
        }
        self.out
            .as_mut()
            .ok_or_else(|| Error::new(ErrorKind::Failed, "wandb: no file"))
    }

    fn create(&mut self, run: &Value) -> Result<Out> {
        let words = |name: &str| run[name].as_str().unwrap_or_default().to_owned();
        let dir = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        let own = dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        // It becomes a file's name, and a part of an address.
        let id: String = words("id")
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .collect();
        let id = if id.is_empty() {
            format!("{:08x}", crc32fast::hash(own.as_bytes()))
        } else {
            id
        };
        self.started = run["started"].as_f64().unwrap_or(0.0);
        let folder = self.folder.get_or_insert_with(|| {
            let start = UNIX_EPOCH + Duration::try_from_secs_f64(self.started).unwrap_or_default();
            let start = humantime::format_rfc3339_seconds(start).to_string();
            let stamp = start
                .trim_end_matches('Z')
                .replace('T', "_")
                .replace(['-', ':'], "");
            format!("offline-run-{stamp}-{id}")
        });
        let folder = Dir::open(&self.dir)?
            .create_sub(FOLDER)?
            .create_sub(folder)?;
        // As the client makes it.
        folder.create_sub("files")?;
        let mut out = Out::create(&folder, &id)?;
        let program = words("program");
        let project = self.project.clone().unwrap_or(program);
        out.write(What::Run(proto::Run {
            id,
            entity: self.entity.clone().unwrap_or_default(),
            project: if project.is_empty() {
                "phalanx".to_owned()
            } else {
                project
            },
            config: Some(config(run)),
            display_name: self.display_name.clone().unwrap_or(own),
            host: words("host"),
            start_time: Some(time(self.started)),
        }))?;
        Ok(out)
    }

    /// Adds the values of a record; those of one step are one row.
    fn add(&mut self, record: &Value) -> Result<()> {
        let step = record["step"].as_u64().unwrap_or(self.step).max(self.step);
        if step != self.step {
            self.write_row()?;
            self.step = step;
        }
        let elapsed = record["elapsed_s"].as_f64().unwrap_or(0.0);
        for (name, value) in record.as_object().into_iter().flatten() {
            if !["step", "elapsed_s"].contains(&name.as_str()) && !value.is_null() {
                self.row.insert(name.clone(), value.clone());
            }
        }
        self.row.insert("_step".to_owned(), json!(step));
        self.row.insert("_runtime".to_owned(), json!(elapsed));
        self.row
            .insert("_timestamp".to_owned(), json!(self.started + elapsed));
        Ok(())
    }

    fn write_row(&mut self) -> Result<()> {
        let row = std::mem::take(&mut self.row);
        if row.is_empty() {
            return Ok(());
        }
        let item = items(&row);
        let step = Some(proto::Step {
            num: i64::try_from(self.step).unwrap_or(i64::MAX),
        });
        self.out(&Value::Null)?
            .write(What::History(proto::History { item, step }))?;
        let is_epoch = row.contains_key("train_loss");
        self.last.extend(row);
        if is_epoch {
            self.write_summary()
        } else {
            Ok(())
        }
    }

    fn write_summary(&mut self) -> Result<()> {
        let update = items(&self.last);
        self.out(&Value::Null)?
            .write(What::Summary(Items { update }))
    }
}

impl Tracker for Wandb {
    fn name(&self) -> &str {
        "wandb"
    }

    fn begin(&mut self, dir: &Path, state: &Value) -> Result<bool> {
        self.dir = dir.to_owned();
        let is_ours = |name: &&str| name.starts_with("offline-run-") && !name.contains('/');
        self.folder = state["folder"].as_str().filter(is_ours).map(str::to_owned);
        Ok(false)
    }

    fn state(&self) -> Value {
        json!({"folder": self.folder})
    }

    fn run(&mut self, run: &Value) -> Result<()> {
        let is_new = self.out.is_none();
        let out = self.out(run)?;
        if !is_new {
            out.write(What::Config(config(run)))?;
        }
        out.flush()
    }

    fn metrics(&mut self, records: &[Value]) -> Result<()> {
        records.iter().try_for_each(|record| self.add(record))?;
        self.out(&Value::Null)?.flush()
    }

    fn event(&mut self, event: &Value) -> Result<()> {
        let at = event["time"].as_f64().unwrap_or(0.0);
        match event["kind"].as_str() {
            Some("system") => {
                let mut item = Vec::new();
                for rank in event["ranks"].as_array().into_iter().flatten() {
                    let numbers = rank.as_object().into_iter().flatten();
                    let numbers = numbers.filter(|(name, value)| {
                        value.is_number() && !["rank", "pid"].contains(&name.as_str())
                    });
                    item.extend(numbers.map(|(name, value)| Item {
                        key: format!("rank_{}.{name}", rank["rank"]),
                        nested_key: Vec::new(),
                        value_json: value.to_string(),
                    }));
                }
                let timestamp = Some(time(at));
                let out = self.out(&Value::Null)?;
                out.write(What::Stats(proto::Stats { timestamp, item }))?;
                out.flush()
            }
            Some("start") => {
                // That of the attempt before.
                self.exit = None;
                self.last.remove(ERROR);
                Ok(())
            }
            Some("finish") => {
                let exit_code = match event["status"].as_str() {
                    Some("finished") => 0,
                    Some("stopped") => KILLED,
                    _ => 1,
                };
                self.exit = Some(proto::Exit {
                    exit_code,
                    runtime: (at - self.started) as i32,
                });
                if event["error"].is_string() {
                    self.last.insert(ERROR.to_owned(), event["error"].clone());
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn summary(&mut self, summary: &Value) -> Result<()> {
        self.write_row()?;
        for (name, value) in summary.as_object().into_iter().flatten() {
            // Lists and tables would be an entry for each of their values.
            if value.is_number() || value.is_string() || value.is_boolean() {
                self.last
                    .entry(name.clone())
                    .or_insert_with(|| value.clone());
            }
        }
        let runtime = summary["total_s"].as_f64().unwrap_or(0.0) as i32;
        self.exit.get_or_insert(proto::Exit {
            exit_code: 0,
            runtime,
        });
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.write_row()?;
        self.write_summary()?;
        // A run that was killed has none.
        let exit = self.exit.take();
        let out = self.out(&Value::Null)?;
        if let Some(exit) = exit {
            out.write(What::Exit(exit))?;
        }
        out.flush()
    }
}

fn items(values: &BTreeMap<String, Value>) -> Vec<Item> {
    let item = |(name, value): (&String, &Value)| Item {
        key: String::new(),
        nested_key: vec![name.clone()],
        value_json: value.to_string(),
    };
    values.iter().map(item).collect()
}

/// The settings, numbers as such.
fn config(run: &Value) -> Items {
    let mut values = BTreeMap::new();
    for (name, value) in run["settings"].as_object().into_iter().flatten() {
        let number = value
            .as_str()
            .and_then(|text| text.parse::<serde_json::Number>().ok());
        let value = number.map_or_else(|| value.clone(), Value::Number);
        values.insert(name.trim_start_matches('-').to_owned(), value);
    }
    for name in [
        "program",
        "phalanx",
        "ranks",
        "threads_per_rank",
        "transport",
        "data",
    ] {
        if !run[name].is_null() {
            values
                .entry(name.to_owned())
                .or_insert_with(|| run[name].clone());
        }
    }
    let item = |(key, value): (String, Value)| Item {
        key,
        nested_key: Vec::new(),
        value_json: value.to_string(),
    };
    Items {
        update: values.into_iter().map(item).collect(),
    }
}

/// Seconds since 1970.
fn time(seconds: f64) -> proto::Time {
    proto::Time {
        seconds: seconds as i64,
        nanos: ((seconds.fract()) * 1e9) as i32,
    }
}
