//! What is logged of a run: `metrics.jsonl`, and by a thread of its own `events.jsonl` and what the ranks' processes use.
//! TensorBoard's file is made of them. `docs/design/run-folder.md` has the format.

mod histogram;
mod run;
mod source;
mod system;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use phalanx_comm::set_notice_listener;
use phalanx_data::metrics::MetricsLog;
use phalanx_member::RankContext;
use phalanx_nn::{GradView, GraphNode, Params};
use phalanx_report::png_size;
use phalanx_track::{Delivery, TensorBoard};
use serde_json::{Value, json};

pub use self::run::RunInfo;
pub(crate) use self::run::{Attempt, RUN_FILE, VERSION, document, write};
pub(crate) use self::system::{Counters, processor};
use self::system::{Members, System};
pub(crate) use self::writer::{EVENTS_FILE, Files, IMAGES_DIR, TABLES_DIR, has_launcher, warn};
use self::writer::{Message, Status, Writer, event};
use crate::error::{Error, ErrorKind, Result, refuse};
use crate::say;

/// The names in the trainer's own records of `metrics.jsonl`, also of those that earlier versions wrote. Others are the
/// program's, but for measures of an evaluation, which begin with [`OF_EVALUATION`].
const OWN_NAMES: [&str; 21] = [
    "accuracy",
    "agreed_s",
    "data_wait_total_ms",
    "elapsed_s",
    "epoch",
    "exposed_comm_ms",
    "grad_norm",
    "loss",
    "lr",
    "mfu",
    "noticed_s",
    "ranks",
    "ranks_before",
    "redone_s",
    "saving_total_ms",
    "state_s",
    "step",
    "suggested_lr",
    "train_loss",
    "train_s",
    "weights_sha256",
];
const OF_EVALUATION: &str = "test_";

fn is_own_name(name: &str) -> bool {
    OWN_NAMES.contains(&name) || name.starts_with(OF_EVALUATION)
}

/// Messages that may wait for the thread. What comes on top is dropped and counted.
const QUEUE: usize = 1024;
/// How long a checkpoint and the end of a run wait for the thread.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
const FINISH_LIMIT: Duration = Duration::from_secs(10);

/// The log of a run on this rank. `metrics.jsonl` must be written; everything else is written by a thread, which no step
/// waits for, and what cannot be written is warned of once. On ranks other than 0 the thread only reports to rank 0 what the
/// rank's process uses.
#[derive(Debug)]
pub struct RunLog {
    metrics: MetricsLog,
    /// `None`: no thread could be started.
    thread: Option<Thread>,
    counters: Arc<Counters>,
    /// Makes TensorBoard's file of the others.
    tensorboard: Option<Delivery>,
    is_main: bool,
    started: Instant,
    has_graph: bool,
    /// What it fails by, or is stopped by.
    error: Option<(Status, String)>,
}

#[derive(Debug)]
struct Thread {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
    /// Closed when the thread ends.
    ended: Receiver<()>,
}

impl RunLog {
    /// Starts the thread; `files` on rank 0.
    pub(super) fn start(
        ctx: &RankContext,
        metrics: MetricsLog,
        mut files: Option<Files>,
        start: Value,
    ) -> RunLog {
        let first = start["resumed_at"].as_u64().unwrap_or(0);
        // Before anything reads the file: what is logged again from `first` on is left out then.
        if let Some(files) = &mut files {
            files.event(&event("start", ctx.started(), None, start));
        }
        let counters = Arc::new(Counters::default());
        let (queue, messages) = sync_channel(QUEUE);
        let (alive, ended) = sync_channel(0);
        let tensorboard = files.as_ref().and_then(|files| {
            let started = Delivery::start(files.dir.path(), Box::new(TensorBoard::default()));
            started
                .map_err(|error| warn("TensorBoard's event file", error.chain()))
                .ok()
        });
        let writer = Writer::new(System::new(ctx, Arc::clone(&counters)), files, first);
        let spawned = std::thread::Builder::new()
            .name("phalanx-log".to_owned())
            .spawn(move || {
                writer.run(&messages);
                drop(alive);
            });
        if let Err(error) = &spawned {
            ctx.note(&format!("warning: {EVENTS_FILE} is not written: {error}"));
        }
        let dropped = Arc::new(AtomicU64::new(0));
        if ctx.is_main() && spawned.is_ok() {
            let (queue, dropped, started) = (queue.clone(), Arc::clone(&dropped), ctx.started());
            set_notice_listener(Some(Arc::new(move |text| {
                let event = event("notice", started, None, json!({ "text": text }));
                if queue.try_send(Message::Event(event)).is_err() {
                    dropped.fetch_add(1, Relaxed);
                }
            })));
        }
        RunLog {
            metrics,
            thread: spawned.ok().map(|_| Thread {
                queue,
                dropped,
                ended,
            }),
            counters,
            tensorboard,
            is_main: ctx.is_main(),
            started: ctx.started(),
            has_graph: false,
            error: None,
        }
    }

    /// What the ranks' time goes to.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Writes a record of a step (with `loss`), of an epoch (with `train_loss`), or of a program's own numbers.
    ///
    /// # Errors
    ///
    /// Those of writing `metrics.jsonl`.
    pub fn event(&mut self, record: &Value) -> Result<()> {
        let names = record
            .as_object()
            .into_iter()
            .flat_map(|record| record.keys());
        if let Some(name) = names.into_iter().find(|name| !is_own_name(name)) {
            let what = format!("\"{name}\" is not among the names of the trainer's own records");
            return Err(Error::new(ErrorKind::Internal, what));
        }
        self.metrics.event(record)
    }

    /// Writes a record of the trainer's or the program's.
    pub(crate) fn write(&mut self, record: &Value) -> Result<()> {
        self.metrics.event(record)
    }

    /// Writes numbers of the program's own at `step` of `epoch`, and gives the record.
    pub(crate) fn values(
        &mut self,
        (step, epoch): (u64, usize),
        values: &[(&str, f64)],
    ) -> Result<Value> {
        let elapsed = self.started.elapsed().as_secs_f64();
        let mut record = json!({ "step": step, "epoch": epoch, "elapsed_s": elapsed });
        for (name, value) in values {
            if is_own_name(name) {
                refuse!("\"{name}\" is logged by the trainer; use another name");
            }
            record[*name] = json!(value);
        }
        self.write(&record)?;
        Ok(record)
    }

    /// Writes histograms of all parameters and of the gradients that there are.
    pub(super) fn watch(&self, step: u64, params: &Params, grads: Option<&dyn GradView>) {
        let (mut parameters, mut gradients) = (Vec::new(), Vec::new());
        for (id, info) in params.ids().zip(params.infos()) {
            let name = &info.name;
            parameters.push((name.clone(), histogram::of(params.get(id))));
            let grad = grads.map(|grads| grads.grad(id)).unwrap_or_default();
            if !grad.is_empty() {
                gradients.push((name.clone(), histogram::of(grad)));
            }
        }
        let event = self.make("watch", Some(step), json!({}));
        self.send(Message::Watch {
            event,
            parameters,
            gradients,
        });
    }

    /// Writes the model's graph to `run.json`, once.
    pub fn graph(&mut self, graph: impl FnOnce() -> Vec<GraphNode>) {
        if self.is_main && !std::mem::replace(&mut self.has_graph, true) {
            self.send(Message::Graph(graph()));
        }
    }

    /// Writes what a person should know of the step `step`, counted from 0.
    pub fn notice(&self, step: u64, text: &str) {
        self.say("notice", Some(step), json!({ "text": text }));
    }

    /// Takes the ranks of `ctx`, which are others than before. What this rank's process uses is theirs from now on.
    pub(crate) fn set_members(&self, ctx: &RankContext) {
        self.send(Message::Members(Members::of(ctx)));
    }

    /// Writes that a checkpoint of `step` steps is being saved.
    pub fn checkpoint(&self, step: u64, file: &Path) {
        let file = file.to_string_lossy();
        self.say("checkpoint", Some(step), json!({ "file": file }));
    }

    /// Writes `png` to `images/`.
    pub(crate) fn image(&self, (step, epoch): (u64, usize), name: &str, png: &[u8]) -> Result<()> {
        if png_size(png).is_none() {
            refuse!("the image \"{name}\" is not a PNG");
        }
        let file = format!("{}-{epoch}-{step}.png", file_name(name));
        let path = format!("{IMAGES_DIR}/{file}");
        let fields = json!({ "epoch": epoch, "name": name, "file": path });
        self.send(Message::Image {
            event: self.make("image", Some(step), fields),
            file,
            png: png.to_vec(),
        });
        Ok(())
    }

    /// Writes `rows` to `tables/`, a JSON object a line.
    pub(crate) fn table(
        &self,
        (step, epoch): (u64, usize),
        name: &str,
        rows: Vec<u8>,
        count: usize,
    ) {
        let file = format!("{}-{epoch}-{step}.jsonl", file_name(name));
        let path = format!("{TABLES_DIR}/{file}");
        let fields = json!({ "epoch": epoch, "name": name, "file": path, "rows": count });
        let event = self.make("table", Some(step), fields);
        self.send(Message::Table { event, file, rows });
    }

    /// Writes a text at `step` of `epoch`.
    pub fn text(&self, (step, epoch): (u64, usize), name: &str, text: &str) {
        let fields = json!({ "epoch": epoch, "name": name, "text": text });
        self.say("text", Some(step), fields);
    }

    /// Writes that the rows of `file` in the run's folder were written again, with those of `epoch`.
    pub fn rows(&self, (step, epoch): (u64, usize), file: &str) {
        self.say("rows", Some(step), json!({ "epoch": epoch, "file": file }));
    }

    /// Hands everything to the system, on rank 0, and reports to rank 0 what this rank's process uses, on the others. A run
    /// that is resumed from a checkpoint has what was logged before it. *Blocks* for at most a second.
    pub fn flush(&mut self) {
        let (done, wait) = sync_channel(1);
        self.send(Message::Flush(done));
        let _ = wait.recv_timeout(FLUSH_LIMIT);
    }

    /// What the run fails by, if it does.
    pub fn failed_by(&mut self, error: &Error) {
        let status = match error.kind() {
            ErrorKind::Interrupted => Status::Stopped,
            _ => Status::Failed,
        };
        self.error = Some((status, error.chain()));
    }

    /// The run has finished: nothing is logged from now on. *Blocks* for at most ten seconds. A log that is dropped without
    /// it says that the run failed.
    pub fn finish(&mut self) {
        self.end(Status::Finished);
    }

    /// The run was stopped and can be resumed; as [`finish`](Self::finish).
    pub fn stop(&mut self) {
        self.end(Status::Stopped);
    }

    fn end(&mut self, status: Status) {
        // A later run may have its own listener when this log is dropped.
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.is_main {
            set_notice_listener(None);
        }
        let dropped = thread.dropped.load(Relaxed);
        if dropped > 0 {
            say::note(format_args!(
                "warning: {dropped} records of {EVENTS_FILE} were dropped, because writing them took too long"
            ));
        }
        let (status, error) = match (status, self.error.take()) {
            (Status::Failed, Some((status, error))) => (status, Some(error)),
            (status, _) => (status, None),
        };
        let mut fields = json!({ "status": status });
        if let Some(error) = error {
            fields["error"] = json!(error);
        }
        let end = Message::Finish(event("finish", self.started, None, fields), status);
        // The queue may be full.
        let deadline = Instant::now() + FINISH_LIMIT;
        let mut end = Some(end);
        while let Some(message) = end.take() {
            match thread.queue.try_send(message) {
                Err(TrySendError::Full(back)) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                    end = Some(back);
                }
                _ => {}
            }
        }
        drop(thread.queue);
        if self.is_main {
            let left = || deadline.saturating_duration_since(Instant::now());
            let _ = thread.ended.recv_timeout(left());
            if let Some(Err(error)) = self.tensorboard.take().map(|files| files.finish(left())) {
                say::note(format_args!("warning: {}", error.chain()));
            }
        }
    }

    /// Writes an event of the kind `kind`; steps count from 0.
    pub(crate) fn say(&self, kind: &str, step: Option<u64>, fields: Value) {
        self.send(Message::Event(self.make(kind, step, fields)));
    }

    fn make(&self, kind: &str, step: Option<u64>, fields: Value) -> Value {
        event(kind, self.started, step, fields)
    }

    fn send(&self, message: Message) {
        let Some(thread) = &self.thread else {
            return;
        };
        let is_mine = self.is_main || matches!(message, Message::Flush(_) | Message::Members(_));
        if is_mine && thread.queue.try_send(message).is_err() {
            thread.dropped.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for RunLog {
    /// A run that has not finished has failed.
    fn drop(&mut self) {
        self.end(Status::Failed);
    }
}

/// `name` as a part of a file's name.
fn file_name(name: &str) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() || "-_".contains(c) {
        true => c,
        false => '_',
    };
    name.chars().take(100).map(plain).collect()
}

#[cfg(test)]
mod tests;
