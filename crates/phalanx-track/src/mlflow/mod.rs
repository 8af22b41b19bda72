//! MLflow's tracking server, by its REST API.

mod server;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use phalanx_base::env::Env;
use phalanx_base::files::{Dir, as_typed};
use phalanx_base::say;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::server::{Refused, Server, URI};
use crate::files::{files_of, open_in, version};
use crate::follow::{LARGEST_FILE, RUN_FILE};
use crate::values::{folder_name, is_weights, shown};
use crate::{Error, Result, Tracker, refuse};

const EXPERIMENT: &str = "MLFLOW_EXPERIMENT_NAME";

/// The server's limits for one request.
const MOST_METRICS: usize = 1000;
const MOST_PARAMS: usize = 100;

/// The server's limits in characters; older servers take shorter values of parameters.
const NAME_CHARS: usize = 250;
const TAG_CHARS: usize = 5000;
const PARAM_CHARS: [usize; 3] = [6000, 500, 250];

/// The scheme of artifacts that the server takes.
const PROXIED: &str = "mlflow-artifacts:";

/// Files and folders of a run that are of no use on the server.
const LEFT_OUT: [&str; 3] = ["checkpoints", "flight", "wandb"];

/// Sends a run to an MLflow tracking server: its settings as parameters, its metrics, its status, and at its end its
/// files as artifacts.
pub struct Mlflow {
    server: Server,
    /// What the environment names; otherwise that of the process before, or `Default`.
    experiment: Option<String>,
    dir: PathBuf,
    state: State,
}

/// What the next process must know.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct State {
    /// The server's address.
    uri: String,
    experiment: Option<String>,
    run_id: Option<String>,
    artifact_uri: String,
    /// When the command was started, in seconds since 1970.
    started: f64,
    /// Parameters that the run has.
    params: BTreeMap<String, String>,
    /// The last attempt that was begun.
    attempt: u64,
    /// Its status and when it ended.
    status: Option<(String, f64)>,
    /// Whether the server knows the status.
    is_told: bool,
    /// Size and time of the artifacts that were sent.
    artifacts: BTreeMap<String, (u64, i64)>,
    /// Steps that had been taken at the last metrics that were sent.
    taken: u64,
    /// Where the steps of what ranks use begin in the last attempt that was begun, and where they end.
    system_begin: u64,
    system_end: u64,
    /// The run on the server has a branch that the training has left. This one has the training as it is now, with the
    /// branch that began with the attempt `branch`.
    parent: Option<String>,
    branch: Option<u64>,
    /// The parent's status and when it ended, while the server does not know.
    parent_status: Option<(String, f64)>,
}

impl State {
    /// The attempt with which the training left a branch whose metrics were sent, and its steps before, by `run`,
    /// which is `run.json`.
    fn left(&self, run: &Value) -> Option<(u64, u64)> {
        let branches = run["branches"].as_array().into_iter().flatten().rev();
        let numbers = branches
            .filter_map(|branch| Some((branch["attempt"].as_u64()?, branch["step"].as_u64()?)));
        let mut since = numbers.filter(|(attempt, _)| *attempt > self.attempt);
        since.find(|(_, step)| *step < self.taken)
    }

    /// A new run, whose parent this one is.
    fn branched(self, attempt: u64, now: f64) -> State {
        let killed = || ("KILLED".to_owned(), now);
        State {
            uri: self.uri,
            experiment: self.experiment,
            started: self.started,
            parent: self.run_id,
            branch: Some(attempt),
            parent_status: (!self.is_told).then(|| self.status.unwrap_or_else(killed)),
            ..State::default()
        }
    }
}

impl Mlflow {
    /// A tracker that sends to the server at `uri`, or else at `MLFLOW_TRACKING_URI`, with the user, password or token
    /// and the experiment that MLflow's other variables in `env` name.
    ///
    /// # Errors
    ///
    /// `Usage`, where there is no address, or not one of a server.
    pub fn new(uri: Option<&str>, env: &Env) -> Result<Mlflow> {
        let uri = uri
            .or(env.get(URI).map(|uri| &**uri))
            .filter(|uri| !uri.is_empty());
        let Some(uri) = uri else {
            refuse!("no address of an MLflow server: give one as http://HOST:PORT, or set {URI}");
        };
        let experiment = env.get(EXPERIMENT).filter(|name| !name.is_empty());
        Ok(Mlflow {
            server: Server::new(uri, env)?,
            experiment: experiment.cloned(),
            dir: PathBuf::new(),
            state: State::default(),
        })
    }

    /// The id of the experiment, which is made where it is missing.
    fn experiment(&self) -> Result<String> {
        let own = self.state.experiment.as_deref().unwrap_or("Default");
        let name = utf8_percent_encode(own, NON_ALPHANUMERIC);
        let by_name = format!("experiments/get-by-name?experiment_name={name}");
        let id = |experiment: &Value| experiment["experiment_id"].as_str().map(str::to_owned);
        let found = match self.server.get(&by_name)? {
            Ok(answer) => {
                let experiment = &answer["experiment"];
                if experiment["lifecycle_stage"] == "deleted" {
                    refuse!(
                        "the experiment \"{own}\" on {} is deleted; set {EXPERIMENT} to another one",
                        self.server.uri()
                    );
                }
                id(experiment)
            }
            Err(refused) if refused.code == "RESOURCE_DOES_NOT_EXIST" => {
                let create = json!({"name": own});
                id(&self.server.post("experiments/create", &create)?)
            }
            Err(refused) => return Err(refused.error()),
        };
        found.ok_or_else(|| self.garbled())
    }

    /// The run on the server, which is made where it is missing. `run` is `run.json`, or null.
    fn run_of(&mut self, run: &Value) -> Result<String> {
        if let Some(id) = &self.state.run_id {
            return Ok(id.clone());
        }
        let experiment = self.experiment()?;
        let ours = run["id"].as_str().map(|id| match self.state.branch {
            Some(attempt) => format!("{id}-{attempt}"),
            None => id.to_owned(),
        });
        let ours = ours.unwrap_or_default();
        // An answer to a request for it may have been lost.
        let mut found = Value::Null;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if !ours.is_empty() && ours.chars().all(is_plain) {
            let filter = format!("tags.`phalanx.id` = '{ours}'");
            let search =
                json!({"experiment_ids": [experiment], "filter": filter, "max_results": 1});
            found = part(self.server.post("runs/search", &search)?, "/runs/0/info");
        }
        if found.is_null() {
            let dir = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
            let name = folder_name(&dir);
            let user = std::env::var("USER").unwrap_or_default();
            let words = |name: &str| run[name].as_str().unwrap_or_default().to_owned();
            let git = |name: &str| run["git"][name].as_str().unwrap_or_default().to_owned();
            let parent = self.state.parent.clone().unwrap_or_default();
            let tags = [
                ("mlflow.parentRunId", parent),
                ("mlflow.runName", name.clone()),
                ("mlflow.user", user.clone()),
                ("mlflow.source.type", "LOCAL".to_owned()),
                ("mlflow.source.name", words("program")),
                ("mlflow.source.git.commit", git("commit")),
                ("mlflow.source.git.branch", git("branch")),
                ("phalanx.id", ours),
                ("phalanx.version", words("phalanx")),
                ("phalanx.folder", dir.display().to_string()),
                ("phalanx.host", words("host")),
            ];
            let tags = tags.iter().filter(|(_, value)| !value.is_empty());
            let tags: Vec<Value> = tags.map(|(key, value)| tag(key, value)).collect();
            let create = json!({
                "experiment_id": experiment,
                "run_name": name,
                "user_id": user,
                "start_time": millis(self.state.started),
                "tags": tags,
            });
            found = part(self.server.post("runs/create", &create)?, "/run/info");
        }
        let id = found["run_id"]
            .as_str()
            .ok_or_else(|| self.garbled())?
            .to_owned();
        let artifacts = found["artifact_uri"].as_str().unwrap_or_default();
        self.state.artifact_uri = artifacts.to_owned();
        self.state.run_id = Some(id.clone());
        Ok(id)
    }

    /// Records how the parent run ended; this run continues its training.
    fn end_parent(&mut self) -> Result<()> {
        if let (Some(parent), Some((status, ended))) =
            (&self.state.parent, &self.state.parent_status)
        {
            let update = json!({"run_id": parent, "status": status, "end_time": millis(*ended)});
            // Without the parent there is nothing to say.
            let _ = self.server.try_post("runs/update", &update)?;
            self.state.parent_status = None;
        }
        Ok(())
    }

    fn garbled(&self) -> Error {
        let what = format!("{} gives an answer without an id", self.server.uri());
        Error::new(crate::ErrorKind::PeerLost, what)
    }

    /// Adds `values`, of the list `what`, to the run.
    fn log(&mut self, what: &str, values: &[Value]) -> Result<std::result::Result<(), Refused>> {
        let run = self.run_of(&Value::Null)?;
        let most = if what == "metrics" {
            MOST_METRICS
        } else {
            MOST_PARAMS
        };
        for values in values.chunks(most) {
            let batch = json!({"run_id": run, what: values});
            match self.server.try_post("runs/log-batch", &batch)? {
                Ok(_) => {}
                Err(refused) if refused.code == "RESOURCE_DOES_NOT_EXIST" => {
                    return Err(self.gone(&run));
                }
                Err(refused) => return Ok(Err(refused)),
            }
        }
        Ok(Ok(()))
    }

    fn gone(&self, run: &str) -> Error {
        let kept = self.dir.join(".tracker-mlflow.json");
        Error::usage(format!(
            "the run {run} is not on {} any more; remove {} to send it again",
            self.server.uri(),
            kept.display()
        ))
    }

    fn log_all(&mut self, what: &str, values: &[Value]) -> Result<()> {
        self.log(what, values)?.map_err(Refused::error)
    }

    /// Sends settings that the run does not have yet. A parameter cannot be changed: what a resume has changed
    /// becomes a tag.
    fn params(&mut self, run: &Value) -> Result<()> {
        let mut params = BTreeMap::new();
        for (name, value) in run["settings"].as_object().into_iter().flatten() {
            params.insert(name_of(name.trim_start_matches('-')), shown(value));
        }
        for name in [
            "program",
            "ranks",
            "threads_per_rank",
            "transport",
            "data",
            "processor",
        ] {
            if !run[name].is_null() {
                let value = || shown(&run[name]);
                params.entry(name.to_owned()).or_insert_with(value);
            }
        }
        if let Some(title) = run["model"]["title"].as_str() {
            params
                .entry("model".to_owned())
                .or_insert_with(|| title.to_owned());
        }
        if let Some(count) = run["model"]["parameters"].as_u64() {
            params.insert("parameters".to_owned(), count.to_string());
        }
        let known = &self.state.params;
        params.retain(|name, value| known.get(name) != Some(value));
        let (changed, new): (Vec<_>, Vec<_>) = params
            .into_iter()
            .partition(|(name, _)| known.contains_key(name));
        for (at, chars) in PARAM_CHARS.into_iter().enumerate() {
            let entry =
                |(name, value): &(String, String)| json!({"key": name, "value": cut(value, chars)});
            let entries: Vec<Value> = new.iter().map(entry).collect();
            let shorter = PARAM_CHARS.get(at + 1);
            match self.log("params", &entries)? {
                Ok(()) => break,
                Err(refused) => {
                    let longest = new.iter().map(|(_, value)| value.chars().count()).max();
                    if shorter.is_none_or(|shorter| longest <= Some(*shorter)) {
                        return Err(refused.error());
                    }
                }
            }
        }
        let attempt = run["attempt"].as_u64().unwrap_or_default();
        let tags = changed
            .iter()
            .map(|(name, value)| tag(&format!("attempt-{attempt}/{name}"), value));
        let tags: Vec<Value> = tags.collect();
        self.log_all("tags", &tags)?;
        self.state.params.extend(new.into_iter().chain(changed));
        Ok(())
    }

    /// The numbers of `record` by name, as metrics of `step`.
    fn numbers(
        &self,
        record: &Map<String, Value>,
        prefix: &str,
        step: u64,
        time: f64,
    ) -> Vec<Value> {
        let numbers = record.iter().filter(|(name, value)| {
            value.is_number() && !["step", "epoch", "elapsed_s", "time"].contains(&name.as_str())
        });
        let metric = |(name, value): (&String, &Value)| {
            let name = name_of(&format!("{prefix}{name}"));
            json!({"key": name, "value": value, "timestamp": millis(time), "step": step})
        };
        numbers.map(metric).collect()
    }

    /// When `record` was written.
    fn time_of(&self, record: &Value) -> f64 {
        let elapsed = || self.state.started + record["elapsed_s"].as_f64().unwrap_or(0.0);
        record["time"].as_f64().unwrap_or_else(elapsed)
    }

    /// Sends files that were not sent yet; those with weights last, because they are large.
    fn send_artifacts(&mut self) -> Result<()> {
        let uri = self.state.artifact_uri.clone();
        // `mlflow-artifacts:/0/RUN/artifacts`; with a host, it may be another server.
        let root = uri
            .strip_prefix(PROXIED)
            .and_then(|rest| rest.strip_prefix('/'));
        let Some(root) = root.filter(|root| !root.starts_with('/')) else {
            say::note(format_args!(
                "mlflow: no files are sent: this server does not take artifacts itself (its runs' are at {})",
                uri.split(':').next().unwrap_or_default()
            ));
            return Ok(());
        };
        let dir = Dir::open(&self.dir)?;
        let mut files = files_of(&dir, &LEFT_OUT)?;
        files.sort_by_key(|name| (is_weights(name), name.clone()));
        for name in files {
            // Links and other things that are not regular files are left out.
            let Some(file) = open_in(&dir, &name) else {
                continue;
            };
            let version = version(&file)?;
            if self.state.artifacts.get(&name) == Some(&version) {
                continue;
            }
            let path = format!("{root}/{name}");
            let parts = path
                .split('/')
                .map(|part| utf8_percent_encode(part, NON_ALPHANUMERIC).to_string());
            self.server
                .put(&parts.collect::<Vec<_>>().join("/"), file)?;
            self.state.artifacts.insert(name, version);
        }
        Ok(())
    }
}

impl Tracker for Mlflow {
    fn name(&self) -> &str {
        "mlflow"
    }

    fn begin(&mut self, dir: &Path, state: &Value) -> Result<bool> {
        self.dir = dir.to_owned();
        let kept: Option<State> = serde_json::from_value(state.clone()).ok();
        let uri = self.server.uri().to_owned();
        let experiment = kept.as_ref().and_then(|kept| kept.experiment.clone());
        let experiment = self.experiment.clone().or(experiment);
        let kept =
            kept.filter(|kept| kept.uri == uri && (kept.run_id.is_some() || kept.parent.is_some()));
        let now = phalanx_base::unix_time().as_secs_f64();
        let run = Dir::open(dir)?.read(RUN_FILE, LARGEST_FILE)?;
        let run: Option<Value> = run.and_then(|text| serde_json::from_slice(&text).ok());
        let left = kept
            .as_ref()
            .and_then(|kept| kept.left(&run.unwrap_or_default()));
        let goes_on = kept.is_some() && left.is_none();
        self.state = match (kept, left) {
            (Some(kept), None) => kept,
            // Values of a step cannot be changed on the server.
            (Some(kept), Some((attempt, _))) => kept.branched(attempt, now),
            (None, _) => State {
                uri,
                started: now,
                ..State::default()
            },
        };
        self.state.experiment = experiment;
        Ok(goes_on)
    }

    fn state(&self) -> Value {
        serde_json::to_value(&self.state).unwrap_or_default()
    }

    fn run(&mut self, run: &Value) -> Result<()> {
        if let Some((_, step)) = self.state.left(run) {
            return Err(Error::usage(format!(
                "the training was resumed from step {step} with other settings while it was sent"
            ))
            .note("try", "send it again"));
        }
        if let Some(started) = run["started"].as_f64() {
            self.state.started = started;
        }
        let attempt = run["attempt"].as_u64().unwrap_or_default();
        let is_known = self.state.run_id.is_some() && attempt != self.state.attempt;
        let id = self.run_of(run)?;
        if is_known {
            let update = json!({"run_id": id, "status": "RUNNING"});
            match self.server.try_post("runs/update", &update)? {
                Ok(_) => (self.state.status, self.state.is_told) = (None, false),
                Err(refused) if refused.code == "RESOURCE_DOES_NOT_EXIST" => {
                    return Err(self.gone(&id));
                }
                Err(refused) => return Err(refused.error()),
            }
        }
        self.state.attempt = attempt;
        self.end_parent()?;
        self.params(run)?;
        self.log_all("tags", &labels(run))
    }

    fn metrics(&mut self, records: &[Value]) -> Result<()> {
        let of = |record: &Value| {
            let step = record["step"].as_u64().unwrap_or_default();
            let numbers = record
                .as_object()
                .map(|numbers| self.numbers(numbers, "", step, self.time_of(record)));
            numbers.unwrap_or_default()
        };
        let metrics: Vec<Value> = records.iter().flat_map(of).collect();
        for record in records {
            // A step's number is that of the steps before it.
            let own = u64::from(record.get("loss").is_some());
            let taken = record["step"].as_u64().map(|step| step + own);
            self.state.taken = self.state.taken.max(taken.unwrap_or_default());
        }
        self.log_all("metrics", &metrics)
    }

    fn event(&mut self, event: &Value) -> Result<()> {
        let time = self.time_of(event);
        match event["kind"].as_str() {
            Some("start") => {
                // `elapsed_s` is the attempt's own.
                self.state.system_begin = self.state.system_end;
                // That of the attempt before.
                if !self.state.is_told {
                    self.state.status = None;
                }
                Ok(())
            }
            Some("system") => {
                let elapsed = event["elapsed_s"].as_f64().unwrap_or(0.0) as u64;
                let step = self.state.system_begin + elapsed;
                self.state.system_end = self.state.system_end.max(step + 1);
                let mut metrics = Vec::new();
                for rank in event["ranks"].as_array().into_iter().flatten() {
                    let Some(numbers) = rank.as_object() else {
                        continue;
                    };
                    let prefix = format!("system/rank_{}/", rank["rank"]);
                    let mut numbers = numbers.clone();
                    numbers.remove("rank");
                    numbers.remove("pid");
                    metrics.extend(self.numbers(&numbers, &prefix, step, time));
                }
                self.log_all("metrics", &metrics)
            }
            Some("finish") => {
                let status = match event["status"].as_str() {
                    Some("finished") => "FINISHED",
                    Some("stopped") => "KILLED",
                    _ => "FAILED",
                };
                self.state.status = Some((status.to_owned(), time));
                self.state.is_told = false;
                match event["error"].as_str() {
                    Some(error) => self.log_all("tags", &[tag("error", error)]),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn summary(&mut self, summary: &Value) -> Result<()> {
        let Some(summary) = summary.as_object() else {
            return Ok(());
        };
        let ended = self.state.started
            + summary
                .get("total_s")
                .and_then(Value::as_f64)
                .unwrap_or(0.0);
        if self.state.status.is_none() {
            self.state.status = Some(("FINISHED".to_owned(), ended));
        }
        let metrics = self.numbers(summary, "summary/", 0, ended);
        self.log_all("metrics", &metrics)
    }

    fn finish(&mut self) -> Result<()> {
        let id = self.run_of(&Value::Null)?;
        if let Some((status, ended)) = self.state.status.clone().filter(|_| !self.state.is_told) {
            let update = json!({"run_id": id, "status": status, "end_time": millis(ended)});
            self.server.post("runs/update", &update)?;
            self.state.is_told = true;
        }
        self.send_artifacts()
    }

    fn later(&self, dir: &Path) -> Option<String> {
        Some(format!(
            "phalanx report {} --upload {}",
            as_typed(dir),
            self.server.uri()
        ))
    }
}

/// A name that the server takes: letters, digits and `_-. :/`, which is no path to elsewhere.
fn name_of(name: &str) -> String {
    let allowed = |c: char| {
        if c.is_alphanumeric() || "_-. :/".contains(c) {
            c
        } else {
            '_'
        }
    };
    let name: String = name.chars().map(allowed).collect();
    let parts = name
        .split('/')
        .filter(|part| !["", ".", ".."].contains(part));
    let name: String = parts.collect::<Vec<_>>().join("/");
    match cut(&name, NAME_CHARS) {
        "" => "_".to_owned(),
        name => name.trim_end_matches('/').to_owned(),
    }
}

/// What `json` has at `pointer`, or null.
fn part(mut json: Value, pointer: &str) -> Value {
    json.pointer_mut(pointer)
        .map(Value::take)
        .unwrap_or_default()
}

/// The user's tags and note, of `run.json`.
fn labels(run: &Value) -> Vec<Value> {
    let tags = run["tags"].as_object().into_iter().flatten();
    let tags = tags.map(|(name, value)| tag(name, value.as_str().unwrap_or_default()));
    let note = run["note"].as_str();
    tags.chain(note.map(|note| tag("mlflow.note.content", note)))
        .collect()
}

fn tag(name: &str, value: &str) -> Value {
    json!({"key": name_of(name), "value": cut(value, TAG_CHARS)})
}

/// At most `chars` characters of `text`.
fn cut(text: &str, chars: usize) -> &str {
    text.char_indices()
        .nth(chars)
        .map_or(text, |(end, _)| &text[..end])
}

/// Seconds as milliseconds.
fn millis(seconds: f64) -> i64 {
    (seconds * 1000.0) as i64
}
