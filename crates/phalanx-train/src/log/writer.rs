//! The thread that writes what no step may wait for.

use std::fmt::Display;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Instant;

use phalanx_data::files::Dir;
use phalanx_data::metrics::MetricsLog;
use phalanx_data::png_size;
use phalanx_nn::GraphNode;
use phalanx_process::env::RUN_POINTER_VARIABLE;
use serde_json::{Value, json};

use super::system::System;
use super::{EVENTS_FILE, IMAGES_DIR, Status, TABLES_DIR, run};
use crate::error::Result;
use crate::events::{Events, Histogram};
use crate::say;

pub(super) type Histograms = Vec<(String, Histogram)>;

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Message {
    /// A record of `metrics.jsonl`.
    Record(Value),
    /// A record of `events.jsonl`.
    Event(Value),
    Watch {
        event: Value,
        step: u64,
        parameters: Histograms,
        gradients: Histograms,
    },
    Graph(Vec<GraphNode>),
    Image {
        event: Value,
        file: String,
        step: u64,
        name: String,
        size: [u32; 2],
        png: Vec<u8>,
    },
    Table {
        event: Value,
        file: String,
        rows: Vec<u8>,
    },
    Text {
        event: Value,
        step: u64,
        name: String,
        text: String,
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
    /// TensorBoard's.
    pub(crate) events: Option<Events>,
    /// `run.json`.
    pub(crate) run: Value,
}

pub(super) struct Writer {
    system: System,
    files: Option<Files>,
    next: Instant,
}

impl Writer {
    pub(super) fn new(system: System, files: Option<Files>) -> Writer {
        Writer {
            next: Instant::now() + system.interval(),
            system,
            files,
        }
    }

    /// Writes until the log is dropped.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        self.system.post();
        loop {
            let left = self.next.saturating_duration_since(Instant::now());
            match messages.recv_timeout(left) {
                Ok(Message::Flush(done)) => {
                    match &mut self.files {
                        Some(files) => files.try_events(Events::flush),
                        None => self.system.post(),
                    }
                    let _ = done.send(());
                }
                Ok(Message::Finish(event, status)) => {
                    self.measure();
                    if let Some(files) = &mut self.files {
                        files.event(&event);
                        files.try_events(|events| events.end(status));
                        if status != Status::Finished && !has_launcher() {
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
            files.event(&super::event("system", started, None, ranks));
        }
    }
}

/// Largest image that is read again.
const MAX_IMAGE_BYTES: u64 = 1 << 30;

impl Files {
    /// Writes for TensorBoard what the other files have already: records of `metrics.jsonl`, and `image` and `text` events.
    pub(crate) fn repeat(&mut self, records: &[Value]) {
        for record in records {
            let step = record["step"].as_u64().unwrap_or_default();
            let text = |name: &str| record[name].as_str().unwrap_or_default();
            match text("kind") {
                "" => self.try_events(|events| events.record(record)),
                "text" => self.try_events(|events| events.text(step, text("name"), text("text"))),
                _ => {
                    let file = text("file").strip_prefix(IMAGES_DIR).unwrap_or_default();
                    let folder = self.dir.sub(IMAGES_DIR).ok().flatten();
                    let read = |dir: Dir| dir.read(file.trim_start_matches('/'), MAX_IMAGE_BYTES);
                    let png = folder.and_then(|dir| read(dir).ok().flatten());
                    if let Some((size, png)) = png.and_then(|png| Some((png_size(&png)?, png))) {
                        self.try_events(|events| events.image(step, text("name"), size, png));
                    }
                }
            }
        }
    }

    /// Writes the report of a run that has not finished.
    fn report(&self) {
        if let Err(error) = phalanx_report::write_of(&self.dir) {
            warn(phalanx_report::REPORT_FILE, error);
        }
    }

    fn event(&mut self, event: &Value) {
        if let Some(log) = &mut self.log
            && let Err(error) = log.event(event)
        {
            warn(EVENTS_FILE, error);
            self.log = None;
        }
    }

    fn write(&mut self, message: Message) {
        match message {
            Message::Record(record) => self.try_events(|events| events.record(&record)),
            Message::Event(event) => self.event(&event),
            Message::Watch {
                mut event,
                step,
                parameters,
                gradients,
            } => {
                event["parameters"] = as_json(&parameters);
                event["gradients"] = as_json(&gradients);
                self.event(&event);
                self.try_events(|events| events.histograms(step, parameters, gradients));
            }
            Message::Graph(graph) => {
                let nodes = run::named(graph);
                self.run["model"]["graph"] = run::graph(&nodes);
                if let Err(error) = run::write(&self.dir, &self.run) {
                    warn(run::RUN_FILE, error);
                }
                self.try_events(|events| events.graph(&nodes));
            }
            Message::Image {
                event,
                file,
                step,
                name,
                size,
                png,
            } => {
                if self.save(IMAGES_DIR, &file, &png) {
                    self.event(&event);
                }
                self.try_events(|events| events.image(step, &name, size, png));
            }
            Message::Table { event, file, rows } => {
                if self.save(TABLES_DIR, &file, &rows) {
                    self.event(&event);
                }
            }
            Message::Text {
                event,
                step,
                name,
                text,
            } => {
                self.event(&event);
                self.try_events(|events| events.text(step, &name, &text));
            }
            // The thread's own.
            Message::Flush(_) | Message::Finish(..) => {}
        }
    }

    fn save(&self, folder: &str, file: &str, bytes: &[u8]) -> bool {
        let write = || -> Result<()> {
            let folder = self.dir.create_sub(folder)?;
            Ok(folder.write(file, |out| out.write_all(bytes))?)
        };
        match write() {
            Ok(()) => true,
            Err(error) => {
                say::note(format_args!("warning: {error}"));
                false
            }
        }
    }

    fn try_events(&mut self, write: impl FnOnce(&mut Events) -> io::Result<()>) {
        if let Some(events) = &mut self.events
            && let Err(error) = write(events)
        {
            warn(&events.path().display().to_string(), error);
            self.events = None;
        }
    }
}

/// Whether a launcher of ours has started this rank: it writes the report of a run that has not finished.
pub(crate) fn has_launcher() -> bool {
    std::env::var_os(RUN_POINTER_VARIABLE).is_some()
}

pub(crate) fn warn(file: &str, why: impl Display) {
    say::note(format_args!(
        "warning: {file} is not written from now on: {why}"
    ));
}

fn as_json(histograms: &Histograms) -> Value {
    let of = |(name, h): &(String, Histogram)| {
        let histogram = json!({
            "count": h.num, "min": h.min, "max": h.max, "sum": h.sum, "sum_squares": h.sum_squares,
            "buckets": h.bucket,
        });
        (name.clone(), histogram)
    };
    Value::Object(histograms.iter().map(of).collect())
}
