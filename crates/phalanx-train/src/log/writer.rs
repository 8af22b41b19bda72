//! The thread that writes what no step may wait for.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Instant;

use phalanx_base::env::RUN_POINTER_VARIABLE;
use phalanx_base::files::Dir;
use phalanx_data::metrics::MetricsLog;
use phalanx_nn::GraphNode;
use serde::Serialize;
use serde_json::{Value, json};

use super::histogram::Histogram;
use super::run;
use super::system::{Members, System};
use crate::error::Result;
use crate::say;

/// The file of everything that is not a number by step or epoch.
pub(crate) const EVENTS_FILE: &str = "events.jsonl";
/// Folders for what `log_image` and `log_table` get.
pub(crate) const IMAGES_DIR: &str = "images";
pub(crate) const TABLES_DIR: &str = "tables";

pub(super) type Histograms = Vec<(String, Histogram)>;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    Finished,
    /// It can be resumed.
    Stopped,
    Failed,
}

/// A message to the thread.
#[derive(Debug)]
pub(super) enum Message {
    /// A record of `events.jsonl`.
    Event(Value),
    Watch {
        event: Value,
        parameters: Histograms,
        gradients: Histograms,
    },
    Graph(Vec<GraphNode>),
    /// The ranks are others from now on.
    Members(Members),
    Image {
        event: Value,
        file: String,
        png: Vec<u8>,
    },
    Table {
        event: Value,
        file: String,
        rows: Vec<u8>,
    },
    /// All before this is to be handed to the system, and then an answer sent.
    Flush(SyncSender<()>),
    Finish(Value, Status),
}

/// What rank 0 writes.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) dir: Dir,
    /// `events.jsonl`; `None` once it could not be written.
    pub(crate) log: Option<MetricsLog>,
    /// `run.json`.
    pub(crate) run: Value,
}

pub(super) struct Writer {
    system: System,
    files: Option<Files>,
    /// The step that this attempt began with.
    first: u64,
    next: Instant,
}

impl Writer {
    pub(super) fn new(system: System, files: Option<Files>, first: u64) -> Writer {
        Writer {
            next: Instant::now() + system.interval(),
            system,
            files,
            first,
        }
    }

    /// Writes until the log is dropped.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        self.system.post();
        loop {
            let left = self.next.saturating_duration_since(Instant::now());
            match messages.recv_timeout(left) {
                Ok(Message::Flush(done)) => {
                    if self.files.is_none() {
                        self.system.post();
                    }
                    let _ = done.send(());
                }
                Ok(Message::Members(members)) => self.system.set_members(members),
                Ok(Message::Finish(event, status)) => {
                    self.measure();
                    if let Some(files) = &mut self.files {
                        files.event(&event);
                        // A launcher writes that of a run that fails.
                        if status == Status::Stopped || status == Status::Failed && !has_launcher()
                        {
                            files.report();
                        }
                    }
                    return;
                }
                Ok(message) => {
                    if let Some(files) = &mut self.files {
                        files.write(message);
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.measure(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn measure(&mut self) {
        self.next = Instant::now() + self.system.interval();
        self.system.post();
        if let Some(files) = &mut self.files {
            let ranks = self.system.all();
            let started = self.system.started();
            let step = self.first + self.system.steps();
            files.event(&event("system", started, Some(step), ranks));
        }
    }
}

impl Files {
    /// Writes the report of a run that has not finished.
    fn report(&self) {
        if let Err(error) = phalanx_report::write_of(&self.dir) {
            warn(phalanx_report::REPORT_FILE, error);
        }
    }

    pub(super) fn event(&mut self, event: &Value) {
        if let Some(log) = &mut self.log
            && let Err(error) = log.event(event)
        {
            warn(EVENTS_FILE, error);
            self.log = None;
        }
    }

    fn write(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.event(&event),
            Message::Watch {
                mut event,
                parameters,
                gradients,
            } => {
                event["parameters"] = as_json(parameters);
                event["gradients"] = as_json(gradients);
                self.event(&event);
            }
            Message::Graph(graph) => {
                let nodes = run::named(graph);
                // `phalanx report --tag` may have changed it.
                if let Ok(Some(text)) = self.dir.read(run::RUN_FILE, run::MAX_RUN_BYTES)
                    && let Ok(run) = serde_json::from_slice(&text)
                {
                    self.run = run;
                }
                self.run["model"]["graph"] = run::graph(&nodes);
                if let Err(error) = run::write(&self.dir, &self.run) {
                    warn(run::RUN_FILE, error);
                }
            }
            Message::Image { event, file, png } => {
                if self.save(IMAGES_DIR, &file, &png) {
                    self.event(&event);
                }
            }
            Message::Table { event, file, rows } => {
                if self.save(TABLES_DIR, &file, &rows) {
                    self.event(&event);
                }
            }
            // The thread's own.
            Message::Flush(_) | Message::Members(_) | Message::Finish(..) => {}
        }
    }

    fn save(&self, folder: &str, file: &str, bytes: &[u8]) -> bool {
        let write = || -> Result<()> {
            let folder = self.dir.create_sub(folder)?;
            folder.write(file, |out| out.write_all(bytes))
        };
        match write() {
            Ok(()) => true,
            Err(error) => {
                say::note(format_args!("warning: {error}"));
                false
            }
        }
    }
}

/// Whether a launcher of ours has started this rank: it writes the report of a run that has not finished.
pub(crate) fn has_launcher() -> bool {
    std::env::var_os(RUN_POINTER_VARIABLE).is_some()
}

pub(crate) fn warn(file: &str, why: impl Display) {
    say::note(format_args!("warning: {file} is no longer written: {why}"));
}

fn as_json(histograms: Histograms) -> Value {
    let of = |(name, histogram)| (name, json!(histogram));
    Value::Object(histograms.into_iter().map(of).collect())
}

/// A record of `events.jsonl`.
pub(super) fn event(kind: &str, started: Instant, step: Option<u64>, fields: Value) -> Value {
    let mut event = json!({ "kind": kind, "time": phalanx_base::unix_time().as_secs_f64(), "elapsed_s": started.elapsed().as_secs_f64() });
    if let Some(step) = step {
        event["step"] = json!(step);
    }
    if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
        event.extend(fields);
    }
    event
}
