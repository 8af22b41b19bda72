//! An offline run of wandb: a folder that `wandb sync` uploads.

mod media;
mod proto;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use phalanx_base::env::Env;
use phalanx_base::files::Dir;
use prost::Message as _;
use serde_json::{Value, json};

use self::media::{Cell, Media};
use self::proto::{FilesItem, Item, Items, What};
use crate::tensorboard::EVENT_FILE_PREFIX;
use crate::values::{self, Predictions, failed, folder_name, is_weights};
use crate::{EVENTS_FILE, Error, ErrorKind, METRICS_FILE, Result, Tracker};

/// The folder in the run's folder.
const FOLDER: &str = "wandb";

/// The client whose files these are like.
const MIN_CONSUMER: &str = "0.70.0";

/// The exit code of a run that somebody has stopped: wandb calls it killed.
const KILLED: i32 = 255;

/// What the summary calls why the run has failed.
const ERROR: &str = "error";

/// What the summary calls the model's graph, as `wandb.watch` does.
const GRAPH: &str = "graph_0";

/// How long a row waits for further values of its step.
const HOLD: Duration = Duration::from_secs(2);

/// Values by name.
type Row = BTreeMap<String, Value>;

/// Writes a run as an offline run of wandb, into `wandb/offline-run-<date>_<time>-<id>` in the run's folder: settings,
/// metrics, what the ranks use, histograms, images, tables (one with the predictions of each epoch), texts, and at the end
/// the files of the folder and the model as an artifact. `wandb sync` uploads it.
///
/// Each process writes the file from the run's beginning. What artifacts have lies in the folder of the offline run, the
/// model in the run's: `wandb sync` needs it where it was when the run was written.
#[derive(Default)]
pub struct Wandb {
    project: Option<String>,
    entity: Option<String>,
    display_name: Option<String>,
    dir: PathBuf,
    /// The folder that an earlier process has made.
    folder: Option<String>,
    out: Option<Out>,
    /// When the last attempt was started, and the one that is being read, in seconds since 1970.
    started: f64,
    began: f64,
    /// Values by step that are not written yet, and when the first of them came.
    rows: BTreeMap<u64, (Instant, Row)>,
    /// The last step that was written.
    step: Option<u64>,
    /// The last values, by name.
    last: Row,
    exit: Option<proto::Exit>,
}

struct Out {
    dir: Dir,
    id: String,
    project: String,
    program: String,
    path: PathBuf,
    file: BufWriter<File>,
    offset: u64,
    records: i64,
}

impl Out {
    fn create(dir: Dir, id: &str, project: String, program: String) -> Result<Out> {
        let name = format!("run-{id}.wandb");
        // So that `wandb sync` takes it for a new one.
        dir.remove(&format!("{name}.synced"))?;
        let mut out = Out {
            id: id.to_owned(),
            project,
            program,
            path: dir.path().join(&name),
            file: BufWriter::new(dir.create_file(&name)?),
            dir,
            offset: proto::MAGIC.len() as u64,
            records: 0,
        };
        let begun = out.file.write_all(proto::MAGIC);
        begun.map_err(|e| failed("write", &out.path, e))?;
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
        self.offset = written.map_err(|e| failed("write", &self.path, e))?;
        Ok(())
    }

    fn media<'a>(&'a self, entity: &'a str) -> Media<'a> {
        Media {
            dir: &self.dir,
            id: &self.id,
            entity,
            project: &self.project,
        }
    }

    fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        flushed.map_err(|e| failed("write", &self.path, e))
    }
}

/// The user's tags, `NAME` or `NAME=VALUE`; wandb takes at most 64 characters.
fn tags(run: &Value) -> Vec<String> {
    let tags = run["tags"].as_object().into_iter().flatten();
    let tags = tags.map(|(name, value)| match value.as_str() {
        Some(value) => format!("{name}={value}"),
        None => name.clone(),
    });
    tags.map(|tag| tag.chars().take(64).collect()).collect()
}

impl Wandb {
    /// A tracker with the project, entity (or else user) and name that wandb's variables in `env` give; the project is otherwise
    /// the program, and the name that of the run's folder.
    pub fn new(env: &Env) -> Wandb {
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty()).cloned();
        Wandb {
            project: set("WANDB_PROJECT"),
            entity: set("WANDB_ENTITY").or_else(|| set("WANDB_USERNAME")),
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
        let own = folder_name(&dir);
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
        self.began = self.started;
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
        folder.create_sub(media::FILES)?;
        let program = match words("program") {
            none if none.is_empty() => "phalanx".to_owned(),
            program => program,
        };
        let project = self.project.clone().unwrap_or_else(|| program.clone());
        let mut out = Out::create(folder, &id, project.clone(), program)?;
        out.write(What::Run(proto::Run {
            id,
            entity: self.entity.clone().unwrap_or_default(),
            project,
            config: Some(config(run)),
            display_name: self.display_name.clone().unwrap_or(own),
            notes: words("note"),
            tags: tags(run),
            host: words("host"),
            start_time: Some(time(self.started)),
        }))?;
        Ok(out)
    }

    /// Adds values of a record; those of one step are one row. Rows are written in the order of their steps, after a
    /// moment: records of a step come from two files.
    fn add(
        &mut self,
        record: &Value,
        values: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<()> {
        let step = self.step_of(record);
        let elapsed = record["elapsed_s"].as_f64().unwrap_or(0.0);
        let (_, row) = self
            .rows
            .entry(step)
            .or_insert_with(|| (Instant::now(), Row::new()));
        row.extend(values);
        row.insert("_step".to_owned(), json!(step));
        row.insert("_runtime".to_owned(), json!(elapsed));
        row.insert("_timestamp".to_owned(), json!(self.began + elapsed));
        while let Some(first) = self.rows.first_entry()
            && first.get().0.elapsed() > HOLD
        {
            let (step, (_, row)) = first.remove_entry();
            self.write_row(step, row)?;
        }
        Ok(())
    }

    /// The step of `record`, or the next one whose row is not written yet.
    fn step_of(&self, record: &Value) -> u64 {
        let last = self.rows.last_key_value().map(|(step, _)| *step);
        let step = record["step"].as_u64().or(last).unwrap_or(0);
        step.max(self.step.map_or(0, |written| written + 1))
    }

    fn write_rows(&mut self) -> Result<()> {
        let mut rows = std::mem::take(&mut self.rows).into_iter();
        rows.try_for_each(|(step, (_, row))| self.write_row(step, row))
    }

    fn write_row(&mut self, step: u64, row: Row) -> Result<()> {
        self.step = Some(step);
        let item = items(&row);
        let step = Some(proto::Step {
            num: i64::try_from(step).unwrap_or(i64::MAX),
        });
        self.out(&Value::Null)?
            .write(What::History(proto::History { item, step }))?;
        let is_epoch = row.contains_key("train_loss");
        // As long as they are, histograms are no results.
        let is_result = |(_, value): &(String, Value)| value["_type"] != "histogram";
        self.last.extend(row.into_iter().filter(is_result));
        if is_epoch {
            self.write_summary()
        } else {
            Ok(())
        }
    }

    /// Writes the image or table of an event: its name and what history has of it; none, where its file is gone.
    fn media(&mut self, event: &Value) -> Result<Option<(String, Value)>> {
        let run = Dir::open(&self.dir)?;
        let word = |name: &str| event[name].as_str().unwrap_or_default();
        let step = self.step_of(event);
        let entity = self.entity.clone().unwrap_or_default();
        let dir = self.dir.clone();
        let out = self.out(&Value::Null)?;
        let media = out.media(&entity);
        let (name, columns, rows) = match word("kind") {
            "image" => {
                let Some(png) = values::read(&run, word("file")) else {
                    return Ok(None);
                };
                let (value, file) = media.image(word("name"), step, &png)?;
                out.write(What::Files(proto::Files { files: vec![file] }))?;
                return Ok(Some((word("name").to_owned(), value)));
            }
            "table" => {
                let (columns, rows) = cells(&values::rows(&run, word("file")));
                (word("name").to_owned(), columns, rows)
            }
            _ => {
                let Some(predictions) = Predictions::of(&dir, event)? else {
                    return Ok(None);
                };
                let (columns, rows) = predicted(&predictions);
                (format!("{}_predictions", out.program), columns, rows)
            }
        };
        let table = media.table(&name, step, &columns, &rows)?;
        out.write(What::Artifact(table.artifact))?;
        out.write(What::Files(proto::Files {
            files: vec![table.file],
        }))?;
        Ok(Some((name, table.value)))
    }

    /// Writes which files of the run's folder are uploaded, and the model.
    fn write_files(&mut self) -> Result<()> {
        let run = Dir::open(&self.dir)?;
        let is_left_out = |name: &str| {
            // Their lines are in the history.
            [METRICS_FILE, EVENTS_FILE].contains(&name)
                || name.starts_with('.')
                || name.starts_with(EVENT_FILE_PREFIX)
                || run.sub(name).ok().flatten().is_some()
        };
        let mut names = run.names()?;
        names.retain(|name| !is_left_out(name));
        names.sort();
        let entity = self.entity.clone().unwrap_or_default();
        let has_finished = self.exit.as_ref().is_some_and(|exit| exit.exit_code == 0);
        let out = self.out(&Value::Null)?;
        let media = out.media(&entity);
        // Those of a run that has not finished may still change.
        let weights = names.iter().filter(|name| has_finished && is_weights(name));
        let weights: Vec<String> = weights.cloned().collect();
        let model = media.model(&run, &weights)?;
        let mut copied = Vec::new();
        for name in names {
            if media.copy(&run, &name)? {
                copied.push(name);
            }
        }
        let item = |path: &String| FilesItem {
            path: path.clone(),
            policy: proto::AT_END,
        };
        let items = copied.iter().map(item).collect();
        out.write(What::Files(proto::Files { files: items }))?;
        match model {
            Some(model) => out.write(What::Artifact(model)),
            None => Ok(()),
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
        let (is_new, has_graph) = (self.out.is_none(), self.last.contains_key(GRAPH));
        let out = self.out(run)?;
        if !is_new {
            out.write(What::Config(config(run)))?;
        }
        if let (Some(nodes), false) = (run["model"]["graph"].as_array(), has_graph) {
            let (value, file) = out.media("").graph(nodes)?;
            out.write(What::Files(proto::Files { files: vec![file] }))?;
            self.last.insert(GRAPH.to_owned(), value);
            return self.write_summary();
        }
        out.flush()
    }

    fn metrics(&mut self, records: &[Value]) -> Result<()> {
        for record in records {
            let values = record.as_object().into_iter().flatten();
            let values = values.filter(|(name, value)| {
                !["step", "elapsed_s"].contains(&name.as_str()) && !value.is_null()
            });
            let values = values.map(|(name, value)| (name.clone(), value.clone()));
            self.add(record, values)?;
        }
        self.out(&Value::Null)?.flush()
    }

    fn event(&mut self, event: &Value) -> Result<()> {
        let at = event["time"].as_f64().unwrap_or(0.0);
        match event["kind"].as_str() {
            Some("system") => {
                let numbers = values::system(event);
                let item = numbers.map(|(rank, name, value)| Item {
                    key: format!("rank_{rank}.{name}"),
                    nested_key: Vec::new(),
                    value_json: value.to_string(),
                });
                let item = item.collect();
                let timestamp = Some(time(at));
                let out = self.out(&Value::Null)?;
                out.write(What::Stats(proto::Stats { timestamp, item }))?;
                out.flush()
            }
            Some("watch") => {
                let kinds = ["parameters", "gradients"].into_iter();
                let all = kinds.flat_map(|kind| {
                    let histograms = event[kind].as_object().into_iter().flatten();
                    histograms.map(move |(name, of)| (format!("{kind}/{name}"), histogram(of)))
                });
                self.add(event, all)
            }
            Some("text") => {
                let name = event["name"].as_str().unwrap_or("text").to_owned();
                self.add(event, [(name, event["text"].clone())])
            }
            Some("image" | "table" | "rows") => {
                let shown = self.media(event)?;
                self.add(event, shown)
            }
            Some("start") => {
                let began = event["elapsed_s"].as_f64().map(|elapsed| at - elapsed);
                self.began = began.unwrap_or(self.began);
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
        self.write_rows()?;
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
        self.write_rows()?;
        self.write_summary()?;
        self.write_files()?;
        // A run that was killed has none.
        let exit = self.exit.take();
        let out = self.out(&Value::Null)?;
        if let Some(exit) = exit {
            out.write(What::Exit(exit))?;
        }
        out.flush()
    }
}

/// An object is an item for each of its values.
fn items(values: &Row) -> Vec<Item> {
    let item = |nested_key: Vec<String>, value: &Value| Item {
        key: String::new(),
        nested_key,
        value_json: value.to_string(),
    };
    let all = values.iter().flat_map(|(name, value)| match value {
        Value::Object(parts) => {
            let parts = parts.iter();
            parts
                .map(|(part, value)| item(vec![name.clone(), part.clone()], value))
                .collect()
        }
        value => vec![item(vec![name.clone()], value)],
    });
    all.collect()
}

/// What history has of a histogram.
fn histogram(of: &Value) -> Value {
    let bins: Vec<f64> = values::edges(of).collect();
    json!({"_type": "histogram", "values": of["buckets"], "bins": bins})
}

/// The columns and cells of a table that a program has logged.
fn cells(rows: &[Value]) -> (Vec<String>, Vec<Vec<Cell>>) {
    let names = rows.iter().filter_map(Value::as_object);
    let names: BTreeSet<&String> = names.flat_map(|row| row.keys()).collect();
    let columns: Vec<String> = names.into_iter().cloned().collect();
    let row = |row: &Value| {
        columns
            .iter()
            .map(|name| Cell::Json(row[name].clone()))
            .collect()
    };
    let rows = rows.iter().map(row).collect();
    (columns, rows)
}

/// The columns and cells of predictions: `id`, `image`, `guess`, `truth`, and `score_N` of each class.
fn predicted(predictions: &Predictions) -> (Vec<String>, Vec<Vec<Cell>>) {
    let rows = &predictions.rows;
    let scores = |row: &Value| row["scores"].as_array().map_or(0, Vec::len);
    let classes = rows.iter().map(scores).max().unwrap_or(0);
    let columns = ["id", "image", "guess", "truth"]
        .map(str::to_owned)
        .into_iter();
    let columns = columns.chain((0..classes).map(|class| format!("score_{class}")));
    let row = |row: &Value| {
        let image = match predictions.image(row) {
            Some(png) => Cell::Png(png),
            None => Cell::Json(row["image"].clone()),
        };
        let json = |value: &Value| Cell::Json(value.clone());
        let [id, guess, truth] = ["id", "guess", "truth"].map(|name| json(&row[name]));
        let scores = (0..classes).map(|class| json(&row["scores"][class]));
        [id, image, guess, truth]
            .into_iter()
            .chain(scores)
            .collect()
    };
    (columns.collect(), rows.iter().map(row).collect())
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
