//! Runs a workflow: starts what is ready, waits for resources, retries, records.
//!
//! All state is in the store before it has consequences: an attempt is recorded before it
//! starts; outputs are moved into the store and synced, then recorded together with `done`.
//! An engine that dies at any moment therefore leaves a run that another one continues.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::{create_folder, read_regular};
use phalanx_base::{format, say, stop};
use phalanx_process::reap::{adopt_orphans, reap_group};
use phalanx_process::{Guard, own_program, tied_command};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde_json::{Map, Value as Json};

use crate::call::Call;
use crate::child::{self, Start, log_file, outputs_dir, work_dir};
use crate::lock::EngineLock;
use crate::objects::{Objects, cannot, remove_all};
use crate::resources::{Grant, Limiter, Machine, Pool, end_group, size};
use crate::spec::{Action, Placeholder, Resources, Source, Task, Type, Value, Workflow};
use crate::store::{Attempt, Cached, Item, Items, Node, Run, State, Store, now};

/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// When it is looked again whether the processes of a stopped task have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Tasks for which files are read at the same time, before they start.
const MOST_BUSY: usize = 8;

/// Largest text of an output value.
const MOST_VALUE: u64 = 16 << 20;

/// What a user chooses for one run.
#[derive(Default)]
pub(crate) struct Options {
    pub no_cache: bool,
    pub resources: Resources,
    /// What a user types before `run`, for messages.
    pub command: String,
}

enum Event {
    /// The process of a task's attempt.
    Ended(String),
    Signal(i32),
    /// What another thread has found out for a task.
    Found(String, Result<Found>),
}

enum Found {
    /// Whether the outputs of a task that was done before are whole.
    Kept(std::result::Result<(), String>),
    /// The key of a task's call, and the cached result, if there is one and it is whole.
    Key(String, Option<std::result::Result<Cached, String>>),
    /// Whether a task's inputs are whole, and how many entries `alone` had before.
    Inputs(std::result::Result<(), Broken>, usize),
    End(End),
}

/// An input that cannot be used.
struct Broken {
    input: String,
    sha256: String,
    why: String,
}

/// How an attempt has ended.
struct End {
    dir: PathBuf,
    status: std::io::Result<ExitStatus>,
    is_too_large: bool,
    /// Why processes that it has left do not end.
    left: Option<String>,
    /// An input that is another one than before.
    changed: Option<Broken>,
    /// The outputs, or what is wrong with them; `None` after a failure.
    outputs: Option<std::result::Result<Items, String>>,
    /// The key of its call now.
    key: Option<String>,
}

/// Why the engine ends an attempt.
#[derive(Clone, Copy, PartialEq)]
enum Why {
    Timeout(Duration),
    Stopped,
    /// An input was changed by it, or by another task that runs.
    InputChanged,
}

impl Why {
    fn text(self) -> String {
        match self {
            Why::Timeout(limit) => {
                format!("timeout after {}", humantime::format_duration(limit))
            }
            Why::Stopped => "stopped".to_owned(),
            Why::InputChanged => {
                "an input was changed while it and another task ran; it runs again alone".to_owned()
            }
        }
    }
}

/// The processes of an attempt.
struct Processes {
    child: Child,
    group: Pid,
    cgroup: Option<PathBuf>,
    is_reaped: bool,
}

/// An attempt that runs, or whose outputs are read.
struct Live {
    /// `None` once its main process has ended.
    processes: Option<Processes>,
    /// All have ended.
    is_over: Arc<AtomicBool>,
    dir: PathBuf,
    grant: Grant,
    started: Instant,
    /// When it is told to end, and when it is killed.
    term_at: Option<Instant>,
    kill_at: Option<Instant>,
    why: Option<Why>,
}

impl Live {
    fn signal(&self, signal: Signal) {
        if let Some(processes) = &self.processes {
            processes.signal(signal);
        }
    }

    fn end(&mut self, why: Why) {
        if self.why.is_none() {
            self.why = Some(why);
            self.term_at = None;
            self.kill_at = Some(Instant::now() + GRACE);
            self.signal(Signal::TERM);
        }
    }
}

impl Processes {
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }

    /// Ends and reaps all; whether the memory limit was exceeded.
    fn finish(&mut self) -> (std::io::Result<ExitStatus>, bool) {
        self.signal(Signal::KILL);
        let status = self.child.wait();
        self.is_reaped = true;
        reap_group(self.group);
        let too_large = self.cgroup.take().is_some_and(|group| end_group(&group));
        (status, too_large)
    }
}

impl Drop for Processes {
    /// No attempt outlives its engine.
    fn drop(&mut self) {
        if !self.is_reaped {
            let _ = self.finish();
        }
    }
}

/// One engine, which runs one workflow. Files are read on other threads, so that it looks at
/// signals, timeouts and tasks that end meanwhile.
struct Engine<'a> {
    store: &'a Store,
    id: &'a str,
    run: Run,
    nodes: BTreeMap<String, Node>,
    options: &'a Options,
    pool: Pool,
    limiter: Limiter,
    guard: Arc<Guard>,
    live: BTreeMap<String, Live>,
    /// Tasks for which files are read before they start, some with their resources.
    busy: BTreeMap<String, Option<Grant>>,
    /// Tasks that were done before, and are not looked at yet.
    kept: BTreeSet<String>,
    /// When a failed task is tried again.
    pauses: BTreeMap<String, Instant>,
    /// Tasks whose inputs are known, with the key in the cache.
    looked_up: BTreeMap<String, Option<String>>,
    /// How often tasks run again because their outputs were changed.
    again: BTreeMap<String, usize>,
    /// Inputs, by SHA-256, that one attempt at a time gets: one of several had changed it.
    alone: BTreeSet<String>,
    /// Tasks of which it was said that they wait.
    said_waiting: BTreeSet<String>,
    stopping: Option<i32>,
    screen: Screen,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

/// The values of `--input NAME=VALUE`; a file or folder is its absolute path.
///
/// # Errors
///
/// Usage: an unknown name, a value of another type.
pub(crate) fn given(workflow: &Workflow, words: &[String]) -> Result<BTreeMap<String, Json>> {
    let mut values = BTreeMap::new();
    let here = std::env::current_dir()?;
    for word in words {
        let (name, text) = word.split_once('=').ok_or_else(|| {
            Error::usage(format!("--input cannot be {word:?}")).note("try", "--input NAME=VALUE")
        })?;
        // An input of a group may be given without the group's name.
        let is_it = |known: &str| known.split_once('.').is_some_and(|(_, own)| own == name);
        let mut short = workflow.inputs.keys().filter(|known| is_it(known));
        let name = match (
            workflow.inputs.contains_key(name),
            short.next(),
            short.next(),
        ) {
            (false, Some(only), None) => only,
            _ => name,
        };
        let Some(input) = workflow.inputs.get(name) else {
            let known: Vec<&str> = workflow.inputs.keys().map(String::as_str).collect();
            let known = if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            };
            return Err(
                Error::usage(format!("--input {name}: the workflow has no such input"))
                    .note("inputs", known),
            );
        };
        let value = (input.kind.read(text))
            .map_err(|why| Error::usage(format!("--input {name}: {text:?} {why}")))?;
        values.insert(
            name.to_owned(),
            match value {
                Json::String(path) if input.kind.is_path() => {
                    here.join(path).to_string_lossy().into()
                }
                value => value,
            },
        );
    }
    Ok(values)
}

/// Starts a new run of `workflow` with `given`; returns its id. The store must be locked.
pub(crate) fn create(
    store: &Store,
    workflow: Workflow,
    given: &BTreeMap<String, Json>,
) -> Result<String> {
    record_run(store, workflow, given).map_err(|error| match error.kind() {
        ErrorKind::Usage => error,
        _ => error.note("then", "start it again"),
    })
}

fn record_run(store: &Store, workflow: Workflow, given: &BTreeMap<String, Json>) -> Result<String> {
    store.tidy()?;
    let mut sources = BTreeMap::new();
    let mut resolve = |kind: Type, value: &Json| -> Result<Item> {
        match value {
            Json::String(path) if kind.is_path() => {
                let path = std::path::absolute(workflow.folder.join(path))?;
                let object = store.objects.import(&path, kind)?;
                sources.insert(object.sha256.clone(), path);
                Ok(Item::Object(object))
            }
            value => Ok(Item::Value(canonical(kind, value))),
        }
    };
    let mut inputs = Items::new();
    for (name, input) in &workflow.inputs {
        let Some(value) = given.get(name).or(input.default.as_ref()) else {
            return Err(
                Error::usage(format!("input {name:?} ({}) has no default", input.kind))
                    .note("try", format!("--input {name}=VALUE")),
            );
        };
        inputs.insert(name.clone(), resolve(input.kind, value)?);
    }
    let mut constants = Items::new();
    let disk = rustix::fs::statvfs(&store.dir).ok();
    let free = disk.map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    for task in &workflow.tasks {
        let Resources {
            storage,
            ephemeral_storage,
            ..
        } = task.requests;
        // The store has both.
        let asked = storage
            .unwrap_or(0)
            .saturating_add(ephemeral_storage.unwrap_or(0));
        if asked > free {
            let message = format!(
                "task {:?} requests {} of storage, but {} has {}",
                task.name,
                size(asked),
                store.dir.display(),
                size(free)
            );
            return Err(
                Error::usage(message).note("try", "free some space, or another --store DIR")
            );
        }
        for (name, input) in &task.inputs {
            if let Value::Constant(value) = &input.value {
                let item = resolve(input.kind, value).map_err(|error| {
                    error.note("in", format!("task {:?}, input {name:?}", task.name))
                })?;
                constants.insert(format!("{}.{name}", task.name), item);
            }
        }
    }
    let number = store.next_number()?;
    let id = format!("{}-{number}", workflow.name);
    let run = Run {
        number,
        state: State::Interrupted,
        started: now(),
        ended: None,
        limits: String::new(),
        inputs,
        constants,
        sources,
        outputs: Items::new(),
        workflow,
    };
    store.write(|changes| {
        changes.run(&id, &run);
        for task in &run.workflow.tasks {
            changes.node(&id, &task.name, &Node::new());
        }
    })?;
    Ok(id)
}

/// `3` as a float is `3.0`.
pub(crate) fn canonical(kind: Type, value: &Json) -> Json {
    match (kind, value) {
        (Type::Float, Json::Number(n)) => n.as_f64().map_or(Json::Null, Json::from),
        (Type::List(item), Json::Array(items)) => {
            items.iter().map(|v| canonical(item.into(), v)).collect()
        }
        (_, value) => value.clone(),
    }
}

/// Checks that this machine can run all tasks of `workflow`.
pub(crate) fn check_machine(workflow: &Workflow, options: &Options) -> Result<()> {
    let machine = Machine::new(&options.resources);
    workflow
        .tasks
        .iter()
        .try_for_each(|task| machine.check(task))
}

/// Runs, or continues, the run `id` until it has ended. Must be called on a thread that lives as
/// long as the process. SIGINT, SIGTERM and SIGHUP end its tasks; it can then be continued.
///
/// # Errors
///
/// Failed, naming the task; Interrupted; those of the store.
pub(crate) fn execute(
    store: &Store,
    lock: &EngineLock,
    id: &str,
    options: &Options,
) -> Result<Items> {
    let (_, run) = store.find(id)?;
    check_machine(&run.workflow, options)?;
    store.tidy()?;
    let limiter = Limiter::new();
    let (sender, events) = channel();
    let watch = watch_signals(sender.clone())?;
    let to_stop = sender.clone();
    let _cancels = lock.watch(store, id, move || {
        let _ = to_stop.send(Event::Signal(signal_hook::consts::SIGTERM));
    })?;
    adopt_orphans();
    let mut engine = Engine {
        store,
        id,
        nodes: BTreeMap::new(),
        options,
        pool: Pool::new(Machine::new(&options.resources)),
        guard: Arc::new(Guard::start()?),
        live: BTreeMap::new(),
        busy: BTreeMap::new(),
        kept: BTreeSet::new(),
        pauses: BTreeMap::new(),
        looked_up: BTreeMap::new(),
        again: BTreeMap::new(),
        alone: BTreeSet::new(),
        said_waiting: BTreeSet::new(),
        stopping: None,
        screen: Screen::new(),
        events,
        sender,
        run,
        limiter,
    };
    let outcome = engine.prepare().and_then(|()| engine.work());
    // After an error of the store.
    engine.live.clear();
    engine.screen.clear();
    watch.close();
    outcome.unwrap_or_else(|error| Err(error.note("then", engine.resume())))
}

fn watch_signals(sender: Sender<Event>) -> Result<signal_hook::iterator::Handle> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    let failed = |error| Error::new(ErrorKind::System, "cannot watch for signals").caused_by(error);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let watched = [SIGINT, SIGTERM, SIGQUIT, SIGHUP].into_iter();
    let watched = watched.filter(|signal| *signal != SIGHUP || !stop::is_ignored(&status, SIGHUP));
    let mut signals = signal_hook::iterator::Signals::new(watched).map_err(failed)?;
    let handle = signals.handle();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if sender.send(Event::Signal(signal)).is_err() {
                    break;
                }
            }
        })
        .map_err(failed)?;
    Ok(handle)
}

impl Engine<'_> {
    /// Puts right what another engine has left.
    fn prepare(&mut self) -> Result<()> {
        for task in self.run.workflow.tasks.clone() {
            let mut node = self.store.node(self.id, &task.name)?;
            if node.attempts.last().is_some_and(|last| last.end.is_none()) {
                child::end_all(
                    &self
                        .store
                        .attempt_dir(self.id, &task.name, node.attempts.len()),
                )?;
            }
            for attempt in &mut node.attempts {
                attempt.counts = false;
                if attempt.end.is_none() {
                    attempt.end = Some("lost: the engine ended".to_owned());
                }
            }
            match node.state {
                State::Done => {
                    self.kept.insert(task.name.clone());
                }
                _ => node.state = State::Waiting,
            }
            self.nodes.insert(task.name, node);
        }
        self.run.state = State::Running;
        self.run.ended = None;
        self.run.limits = self.limiter.describe();
        self.store.write(|changes| {
            changes.run(self.id, &self.run);
            for (name, node) in &self.nodes {
                changes.node(self.id, name, node);
            }
        })?;
        // In the store they are done, here when that is certain.
        for name in &self.kept {
            if let Some(node) = self.nodes.get_mut(name) {
                node.state = State::Waiting;
            }
        }
        let tasks = &self.run.workflow.tasks;
        self.screen.line(
            "Run",
            &format!("{} ({})", self.id, format::plural(tasks.len(), "task")),
        );
        let has_limits = |task: &Task| {
            task.limits.cpus.or(task.limits.gpus).is_some() || task.limits.memory.is_some()
        };
        if tasks.iter().any(has_limits) {
            self.screen
                .line("Limits", &format!("by {}", self.run.limits));
        }
        Ok(())
    }

    fn resume(&self) -> String {
        format!("{} run --resume {}", self.options.command, self.id)
    }

    /// Does `work` on another thread, which may take long.
    fn find(
        &self,
        task: &str,
        work: impl FnOnce(&Store) -> Result<Found> + Send + 'static,
    ) -> Result<()> {
        let (store, sender, task) = (self.store.clone(), self.sender.clone(), task.to_owned());
        let thread = std::thread::Builder::new().name("files".into());
        let started = thread.spawn(move || {
            let work = std::panic::AssertUnwindSafe(|| work(&store));
            let found = std::panic::catch_unwind(work).unwrap_or_else(|_| {
                let message = format!("a thread for task {task:?} panicked");
                Err(Error::new(ErrorKind::System, message))
            });
            let _ = sender.send(Event::Found(task, found));
        });
        let failed =
            |error| Error::new(ErrorKind::System, "cannot start a thread").caused_by(error);
        started.map(drop).map_err(failed)
    }

    /// Runs all; an error of the store, or how the run has ended.
    fn work(&mut self) -> Result<Result<Items>> {
        loop {
            if self.stopping.is_none() {
                self.advance()?;
            }
            let is_idle = self.pauses.is_empty() && self.busy.is_empty();
            if self.live.is_empty() && (self.stopping.is_some() || is_idle) {
                return self.conclude();
            }
            let now = Instant::now();
            let times = self
                .live
                .values()
                .flat_map(|live| [live.term_at, live.kill_at])
                .flatten();
            let next = times.chain(self.pauses.values().copied()).min();
            let mut wait = next.map_or(Duration::from_secs(60), |at| {
                at.saturating_duration_since(now)
            });
            if self.screen.is_terminal {
                self.status();
                wait = wait.min(Duration::from_millis(500));
            }
            match self.events.recv_timeout(wait) {
                Ok(Event::Ended(task)) => self.ended(&task)?,
                Ok(Event::Signal(signal)) => self.signaled(signal),
                Ok(Event::Found(task, found)) => self.found(&task, found?)?,
                // The engine has a sender of its own.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            self.tick()?;
        }
    }

    fn signaled(&mut self, signal: i32) {
        if self.stopping.replace(signal).is_some() {
            let now = Some(Instant::now());
            self.live.values_mut().for_each(|live| live.kill_at = now);
            return;
        }
        self.pauses.clear();
        self.busy.clear();
        if !self.live.is_empty() {
            let names: Vec<&str> = self.live.keys().map(String::as_str).collect();
            self.screen.line("Stopping", &names.join(", "));
        }
        for live in self.live.values_mut() {
            live.end(Why::Stopped);
        }
    }

    /// Timeouts, kills, and pauses that are over.
    fn tick(&mut self) -> Result<()> {
        let now = Instant::now();
        let mut given_up = Vec::new();
        for (name, live) in &mut self.live {
            if live.term_at.is_some_and(|at| at <= now) {
                let task = self.run.workflow.task(name);
                let limit = task.and_then(|task| task.timeout).unwrap_or_default();
                live.end(Why::Timeout(limit));
            }
            if live.kill_at.is_some_and(|at| at <= now) {
                live.kill_at = None;
                live.signal(Signal::KILL);
                if live.processes.is_none() && self.stopping.is_some() {
                    match live.is_over.load(Ordering::Acquire) {
                        true => given_up.push(name.clone()),
                        false => live.kill_at = Some(now + LOOK_AGAIN),
                    }
                }
            }
        }
        self.pauses.retain(|_, at| *at > now);
        // Its outputs are not read to the end.
        for name in given_up {
            self.live.remove(&name);
            self.record(&name, Why::Stopped.text(), Outcome::Again)?;
        }
        Ok(())
    }

    /// Starts, serves from the cache or skips all tasks that can be.
    fn advance(&mut self) -> Result<()> {
        // In an order in which each comes after those that it needs.
        for task in self.run.workflow.tasks.clone() {
            let name = &task.name;
            let is_waiting = self.nodes[name].state == State::Waiting;
            if !is_waiting || self.pauses.contains_key(name) || self.busy.contains_key(name) {
                continue;
            }
            let is_full = self.busy.len() >= MOST_BUSY;
            if self.kept.contains(name) {
                if !is_full {
                    self.busy.insert(name.clone(), None);
                    let outputs = self.nodes[name].outputs.clone();
                    self.find(name, move |store| Ok(Found::Kept(check(store, &outputs))))?;
                }
                continue;
            }
            let needed = task.dependencies();
            let states = || needed.iter().map(|name| self.nodes[*name].state);
            if states().any(|state| matches!(state, State::Failed | State::Skipped)) {
                self.change(name, |node| node.state = State::Skipped)?;
                self.screen.line("Skipped", name);
                continue;
            }
            if !states().all(|state| state == State::Done) {
                continue;
            }
            if !self.looked_up.contains_key(name) {
                if is_full {
                    continue;
                }
                let inputs = self.inputs_of(&task);
                self.change(name, |node| node.inputs = inputs.clone())?;
                if task.cache.is_some() {
                    self.busy.insert(name.clone(), None);
                    self.look_up(&task, inputs)?;
                    continue;
                }
                self.looked_up.insert(name.clone(), None);
            }
            if is_full || self.has_to_be_alone(name) {
                continue;
            }
            match self.pool.take(&task) {
                Ok(grant) => {
                    self.busy.insert(name.clone(), Some(grant));
                    let inputs = self.nodes[name].inputs.clone();
                    let sources = self.run.sources.clone();
                    let alone = self.alone.len();
                    self.find(name, move |store| {
                        Ok(Found::Inputs(mend(store, &inputs, &sources)?, alone))
                    })?;
                }
                Err(why) => {
                    if self.said_waiting.insert(name.clone()) {
                        self.screen.line("Waiting", &format!("{name}: {why}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, task: &str, change: impl FnOnce(&mut Node)) -> Result<()> {
        let mut node = self.nodes[task].clone();
        change(&mut node);
        self.store
            .write(|changes| changes.node(self.id, task, &node))?;
        self.nodes.insert(task.to_owned(), node);
        Ok(())
    }

    fn item(&self, source: &Source) -> Option<&Item> {
        match source {
            Source::Input(name) => self.run.inputs.get(name),
            Source::Output { task, output } => self.nodes.get(task)?.outputs.get(output),
        }
    }

    fn inputs_of(&self, task: &Task) -> Items {
        let item = |(name, input): (&String, &crate::spec::TaskInput)| {
            let item = match &input.value {
                Value::Constant(_) => self.run.constants.get(&format!("{}.{name}", task.name)),
                Value::From(source) => self.item(source),
            };
            let item = match item? {
                Item::Value(value) => Item::Value(canonical(input.kind, value)),
                object => object.clone(),
            };
            Some((name.clone(), item))
        };
        task.inputs.iter().filter_map(item).collect()
    }

    /// Whether it waits for the end of others that have one of its inputs.
    fn has_to_be_alone(&self, name: &str) -> bool {
        let has_it = |name: &str, sha256: &String| has(&self.nodes[name].inputs, sha256);
        let starting = self.busy.iter().filter(|(_, grant)| grant.is_some());
        let started = self.live.keys().chain(starting.map(|(name, _)| name));
        let mut others = started.filter(|other| *other != name);
        let alone = self.alone.iter().filter(|sha256| has_it(name, sha256));
        let alone: Vec<&String> = alone.collect();
        others.any(|other| alone.iter().any(|sha256| has_it(other, sha256)))
    }

    fn look_up(&mut self, task: &Task, inputs: Items) -> Result<()> {
        let is_used = !self.options.no_cache;
        let call = self.call(task, inputs);
        self.find(&task.name, move |store| {
            let key = call.key(&store.objects)?;
            let found = match is_used {
                true => store.cached(&key)?,
                false => None,
            };
            let whole = found.map(|found| check(store, &found.outputs).map(|()| found));
            Ok(Found::Key(key, whole))
        })
    }

    fn call(&self, task: &Task, inputs: Items) -> Call {
        Call {
            workflow: self.run.workflow.name.clone(),
            folder: self.run.workflow.folder.clone(),
            task: task.clone(),
            inputs,
        }
    }

    /// Goes on with a task after another thread has read files for it.
    fn found(&mut self, name: &str, found: Found) -> Result<()> {
        let found = match found {
            Found::End(end) => return self.settle(name, end),
            found => found,
        };
        // Not after a stop.
        let Some(grant) = self.busy.remove(name) else {
            return Ok(());
        };
        match found {
            Found::End(_) => {}
            Found::Kept(whole) => {
                self.kept.remove(name);
                match whole {
                    Ok(()) => {
                        self.screen.line("Kept", &format!("{name}: done before"));
                        if let Some(node) = self.nodes.get_mut(name) {
                            node.state = State::Done;
                        }
                    }
                    Err(why) => {
                        let text = format!("{name}: {why}; it runs again");
                        self.screen.line("Lost", &text);
                        self.change(name, |node| node.state = State::Waiting)?;
                    }
                }
            }
            Found::Key(key, cached) => {
                self.looked_up.insert(name.to_owned(), Some(key));
                match cached {
                    None => {}
                    Some(Err(why)) => {
                        let text = format!("{name}: not from the cache: {why}");
                        self.screen.line("Damaged", &text);
                    }
                    Some(Ok(found)) => {
                        let text = format!("{name} (from {})", found.run);
                        self.screen.line("Cached", &text);
                        self.change(name, |node| {
                            node.state = State::Done;
                            node.outputs = found.outputs;
                            node.cached = Some(found.run);
                        })?;
                    }
                }
            }
            Found::Inputs(whole, alone) => {
                let Some(task) = self.run.workflow.task(name).cloned() else {
                    return Ok(());
                };
                let grant = grant.unwrap_or_default();
                match whole {
                    // One was found to be changed after they were read.
                    Ok(()) if alone != self.alone.len() => self.pool.give_back(grant),
                    Ok(()) => self.start(&task, grant)?,
                    Err(broken) => {
                        self.pool.give_back(grant);
                        self.cannot_start(&task, &broken)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// An input of `task` is damaged: the task that has made it runs again, or `task` fails.
    fn cannot_start(&mut self, task: &Task, broken: &Broken) -> Result<()> {
        if let Value::From(Source::Output { task: maker, .. }) = &task.inputs[&broken.input].value {
            // Those that need it get its new outputs.
            let tasks = &self.run.workflow.tasks;
            let needs = |name: &String| {
                let task = tasks.iter().find(|task| task.name == *name);
                task.is_some_and(|task| task.dependencies().contains(maker.as_str()))
            };
            if self.nodes[maker].state != State::Done {
                self.looked_up.retain(|name, _| !needs(name));
                return Ok(());
            }
            let again = self.again.entry(maker.clone()).or_default();
            *again += 1;
            // Each time one of those that need it has failed; else it is not they.
            if *again <= tasks.len() {
                self.looked_up
                    .retain(|name, _| name != maker && !needs(name));
                let text = format!("{maker}: {}; it runs again", broken.why);
                self.screen.line("Lost", &text);
                return self.change(maker, |node| {
                    node.state = State::Waiting;
                    node.cached = None;
                });
            }
        }
        let end = format!("cannot start: input {:?}: {}", broken.input, broken.why);
        let attempt = Attempt {
            started: now(),
            ended: None,
            end: None,
            counts: true,
            limits: String::new(),
            gpus: Vec::new(),
        };
        self.change(&task.name, |node| node.attempts.push(attempt))?;
        self.record(&task.name, end.clone(), Outcome::Failed)?;
        self.screen.line("Failed", &format!("{}: {end}", task.name));
        Ok(())
    }

    fn start(&mut self, task: &Task, grant: Grant) -> Result<()> {
        let name = &task.name;
        let number = self.nodes[name].attempts.len() + 1;
        let inputs = self.nodes[name].inputs.clone();
        let dir = self.store.attempt_dir(self.id, name, number);
        // Of an engine that was killed before it had recorded the attempt.
        remove_all(&dir).map_err(|error| cannot("remove", &dir, error))?;
        for folder in [dir.join("inputs"), work_dir(&dir), outputs_dir(&dir)] {
            create_folder(&folder)?;
        }
        let (limits, said) = self
            .limiter
            .limits(task, &grant, &format!("{name}-{number}"))?;
        let cgroup = limits.cgroup.clone();
        let start = self.start_of(task, &inputs, &dir, number, limits)?;
        let args = child::prepare(&start)?;
        let attempt = Attempt {
            started: now(),
            ended: None,
            end: None,
            counts: true,
            limits: said.clone(),
            gpus: grant.gpus.clone(),
        };
        self.change(name, |node| {
            node.state = State::Running;
            node.attempts.push(attempt);
        })?;
        let log =
            fs::File::create(log_file(&dir)).map_err(|error| cannot("create", &dir, error))?;
        let failed = |error| {
            Error::new(
                ErrorKind::System,
                format!("cannot start a process for task {name:?}"),
            )
            .caused_by(error)
        };
        let child = tied_command(&self.guard, None)
            .and_then(|mut command| {
                command
                    .arg(own_program())
                    .args(args)
                    .stdin(Stdio::null())
                    .stdout(log.try_clone()?)
                    .stderr(log)
                    // Tasks without GPUs must not use those of others.
                    .env("CUDA_VISIBLE_DEVICES", grant.gpus.join(","))
                    .spawn()
            })
            .map_err(failed)?;
        // Numbers of processes are positive.
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let group = pid.ok_or_else(|| failed(std::io::Error::other("no process number")))?;
        let started = Instant::now();
        let processes = Processes {
            child,
            group,
            cgroup,
            is_reaped: false,
        };
        let live = Live {
            processes: Some(processes),
            is_over: Arc::default(),
            dir,
            started,
            term_at: task.timeout.and_then(|limit| started.checked_add(limit)),
            kill_at: None,
            why: None,
            grant,
        };
        let (sender, task) = (self.sender.clone(), name.clone());
        std::thread::Builder::new()
            .stack_size(64 << 10)
            .spawn(move || {
                // Not reaped here: until then nobody else gets its number. Without a deadline:
                // the main thread has those.
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while matches!(
                    waitid(WaitId::Pid(group), options),
                    Err(rustix::io::Errno::INTR)
                ) {}
                let _ = sender.send(Event::Ended(task));
            })
            .map_err(failed)?;
        let mut text = name.clone();
        if number > 1 {
            text.push_str(&format!(" (attempt {number})"));
        }
        if !live.grant.gpus.is_empty() {
            text.push_str(&format!(", GPU {}", live.grant.gpus.join(", ")));
        }
        if !said.is_empty() {
            text.push_str(&format!(", limits: {said}"));
        }
        self.screen.line("Running", &text);
        self.live.insert(name.clone(), live);
        Ok(())
    }

    fn start_of(
        &self,
        task: &Task,
        inputs: &Items,
        dir: &Path,
        number: usize,
        limits: child::ProcessLimits,
    ) -> Result<Start> {
        let mut values = Map::new();
        for (name, item) in inputs {
            let value = match item {
                Item::Value(value) => value.clone(),
                Item::Object(object) => {
                    let link = dir.join("inputs").join(name);
                    std::os::unix::fs::symlink(self.store.objects.path(object), &link)
                        .map_err(|error| cannot("create", &link, error))?;
                    Json::from(link.to_string_lossy())
                }
            };
            values.insert(name.clone(), value);
        }
        let text = |name: &str| match values.get(name) {
            Some(Json::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => String::new(),
        };
        let output = |name: &str| outputs_dir(dir).join(name).to_string_lossy().into_owned();
        let folder = self.run.workflow.folder.to_string_lossy();
        let fill = |template: &str| {
            Task::fill(template, &mut |placeholder| match placeholder {
                Placeholder::Input(name) => text(name),
                Placeholder::Output(name) => output(name),
                Placeholder::Folder => folder.to_string(),
            })
        };
        let mut env = BTreeMap::from([
            ("FLOW_RUN".to_owned(), self.id.to_owned()),
            ("FLOW_TASK".to_owned(), task.name.clone()),
            ("FLOW_ATTEMPT".to_owned(), number.to_string()),
            ("FLOW_FOLDER".to_owned(), folder.to_string()),
        ]);
        env.extend(path_with_us().map(|path| ("PATH".to_owned(), path)));
        env.extend(
            task.inputs
                .keys()
                .map(|name| (Task::input_variable(name), text(name))),
        );
        env.extend(
            task.outputs
                .keys()
                .map(|name| (Task::output_variable(name), output(name))),
        );
        env.extend(
            task.env
                .iter()
                .map(|(name, value)| (name.clone(), fill(value))),
        );
        let argv = match &task.action {
            Action::Command(argv) => Some(argv.iter().map(|word| fill(word)).collect()),
            _ => task.argv(),
        };
        Ok(Start {
            argv,
            task: task.name.clone(),
            env,
            inputs: values,
            dir: dir.to_owned(),
            limits,
        })
    }

    /// A task's main process has ended: ends its other ones and reads its outputs.
    fn ended(&mut self, name: &str) -> Result<()> {
        let (Some(live), Some(task)) = (self.live.get_mut(name), self.run.workflow.task(name))
        else {
            return Ok(());
        };
        let Some(mut processes) = live.processes.take() else {
            return Ok(());
        };
        live.term_at = None;
        let (dir, is_stopped) = (live.dir.clone(), live.why == Some(Why::Stopped));
        let is_over = live.is_over.clone();
        let task = task.clone();
        let guard = self.guard.clone();
        let inputs = self.nodes[name].inputs.clone();
        let call = task
            .cache
            .is_some()
            .then(|| self.call(&task, inputs.clone()));
        self.find(name, move |store| {
            let left = child::end_all(&dir).err();
            let (status, is_too_large) = processes.finish();
            guard.ended(processes.group);
            is_over.store(true, Ordering::Release);
            let changed = match is_stopped {
                true => None,
                false => broken(store, &inputs),
            };
            let is_success = matches!(&status, Ok(status) if status.success());
            let is_good = is_success && !is_stopped && left.is_none() && changed.is_none();
            let (mut outputs, mut key) = (None, None);
            if is_good {
                outputs = Some(collect(&store.objects, &task, &dir)?);
                key = call.map(|call| call.key(&store.objects)).transpose()?;
            }
            Ok(Found::End(End {
                dir,
                status,
                is_too_large,
                left: left.map(|error| error.chain()),
                changed,
                outputs,
                key,
            }))
        })
    }

    /// An attempt has ended: what has become of the task?
    fn settle(&mut self, name: &str, end: End) -> Result<()> {
        // It may have been given up.
        if self.live.get(name).is_none_or(|live| live.dir != end.dir) {
            return Ok(());
        }
        let (Some(live), Some(task)) = (
            self.live.remove(name),
            self.run.workflow.task(name).cloned(),
        ) else {
            return Ok(());
        };
        let status = end
            .status
            .map_err(|error| cannot("wait for", &live.dir, error))?;
        self.pool.give_back(live.grant);
        let (text, outcome) = match (live.why, status.code()) {
            (Some(why @ Why::InputChanged), _) => (why.text(), Outcome::Again),
            _ if let Some(changed) = &end.changed => match self.isolate(changed) {
                true => (Why::InputChanged.text(), Outcome::Again),
                false => (
                    format!("it changed its input {:?}: {}", changed.input, changed.why),
                    Outcome::Failed,
                ),
            },
            _ if let Some(left) = end.left => (left, Outcome::Failed),
            _ if let Some(outputs) = end.outputs => match outputs {
                Ok(outputs) => ("done".to_owned(), Outcome::Done(outputs, end.key)),
                Err(why) => (why, Outcome::Failed),
            },
            (Some(why @ Why::Stopped), _) => (why.text(), Outcome::Again),
            (Some(why), _) => (why.text(), Outcome::Retry),
            (None, Some(code)) if task.unrecoverable.contains(&code) => {
                (format!("exit code {code}"), Outcome::Failed)
            }
            (None, Some(code)) => (format!("exit code {code}"), Outcome::Retry),
            (None, None) if end.is_too_large => {
                ("memory limit exceeded".to_owned(), Outcome::Retry)
            }
            (None, None) => {
                let signal = status.signal().unwrap_or(0);
                let text = format!("killed by {}", stop::signal_name(signal));
                (text, Outcome::Retry)
            }
        };
        let is_again = matches!(outcome, Outcome::Again);
        let failures = self.record(name, text.clone(), outcome)?;
        match self.nodes[name].state {
            State::Done => {
                let took = format!("{:.1} s", live.started.elapsed().as_secs_f64());
                self.screen.line("Done", &format!("{name} in {took}"));
                for folder in [
                    work_dir(&live.dir),
                    outputs_dir(&live.dir),
                    live.dir.join("inputs"),
                ] {
                    let _ = remove_all(&folder);
                }
            }
            State::Failed => {
                self.screen.line("Failed", &format!("{name}: {text}"));
                for line in last_lines(&log_file(&live.dir), 10) {
                    self.screen.line("", &line);
                }
            }
            _ if is_again => {
                if live.why != Some(Why::Stopped) {
                    self.screen.line("Again", &format!("{name}: {text}"));
                }
            }
            _ => {
                let pause = task.retries.pause(failures);
                self.pauses.insert(name.to_owned(), Instant::now() + pause);
                let pause = humantime::format_duration(pause);
                let left = task.retries.times + 1 - failures;
                self.screen.line(
                    "Retry",
                    &format!("{name}: {text}; again in {pause} ({left} left)"),
                );
            }
        }
        Ok(())
    }

    /// An attempt had an input that was changed, perhaps by another attempt that has it too: then
    /// all of these run again, one at a time, and the one that changes it again is known.
    fn isolate(&mut self, changed: &Broken) -> bool {
        if self.alone.contains(&changed.sha256) {
            return false;
        }
        let nodes = &self.nodes;
        let has_it = |name: &String| has(&nodes[name].inputs, &changed.sha256);
        let mut others = self
            .live
            .iter_mut()
            .filter(|(name, _)| has_it(name))
            .peekable();
        if others.peek().is_none() {
            return false;
        }
        others.for_each(|(_, live)| live.end(Why::InputChanged));
        self.alone.insert(changed.sha256.clone())
    }

    /// Records the end of the last attempt of `name`; returns how often it has failed.
    fn record(&mut self, name: &str, end: String, outcome: Outcome) -> Result<u32> {
        let Some(task) = self.run.workflow.task(name) else {
            return Ok(0);
        };
        let mut node = self.nodes[name].clone();
        if let Some(attempt) = node.attempts.last_mut() {
            attempt.ended = Some(now());
            attempt.end = Some(end);
            attempt.counts = !matches!(outcome, Outcome::Again);
        }
        let counted = node.attempts.iter().filter(|attempt| attempt.counts);
        let failures = u32::try_from(counted.count()).unwrap_or(u32::MAX);
        let mut entry = None;
        node.state = match outcome {
            Outcome::Done(outputs, key) => {
                node.outputs = outputs;
                // What it read may have been changed meanwhile.
                entry = key.filter(|key| self.looked_up.get(name) == Some(&Some(key.clone())));
                State::Done
            }
            Outcome::Failed => State::Failed,
            Outcome::Retry if failures > task.retries.times => State::Failed,
            Outcome::Retry | Outcome::Again => State::Waiting,
        };
        if node.state != State::Done {
            node.outputs.clear();
        }
        let entry = entry.map(|key| {
            let cached = Cached {
                task: task.name.clone(),
                version: task.cache.clone().unwrap_or_default(),
                run: self.id.to_owned(),
                time: now(),
                outputs: node.outputs.clone(),
            };
            (key, cached)
        });
        self.store.write(|changes| {
            changes.node(self.id, name, &node);
            if let Some((key, entry)) = &entry {
                changes.cache(key, entry);
            }
        })?;
        self.nodes.insert(name.to_owned(), node);
        Ok(failures)
    }

    fn conclude(&mut self) -> Result<Result<Items>> {
        let failed = self
            .nodes
            .iter()
            .find(|(_, node)| node.state == State::Failed);
        let all_done = self.nodes.values().all(|node| node.state == State::Done);
        let cancel = self.store.cancel_file(self.id).exists();
        let state = match (failed, self.stopping) {
            _ if all_done => State::Done,
            (_, Some(_)) if cancel => State::Canceled,
            (_, Some(_)) => State::Interrupted,
            _ => State::Failed,
        };
        let sources = self.run.workflow.outputs.iter();
        let outputs: Items = sources
            .filter_map(|(name, source)| Some((name.clone(), self.item(source)?.clone())))
            .collect();
        let again = self.resume();
        let error = failed.map(|(name, node)| {
            let end = node.attempts.last().and_then(|attempt| attempt.end.clone());
            let message = format!("task {name:?} failed: {}", end.unwrap_or_default());
            Error::new(ErrorKind::Failed, message)
                .note(
                    "log",
                    format!("{} logs {} {name}", self.options.command, self.id),
                )
                .note("try", again.clone())
        });
        self.run.state = state;
        self.run.ended = Some(now());
        self.run.outputs = match state {
            State::Done => outputs.clone(),
            _ => Items::new(),
        };
        self.store
            .write(|changes| changes.run(self.id, &self.run))?;
        Ok(match (state, self.stopping, error) {
            (State::Done, ..) => Ok(outputs),
            (State::Failed, _, Some(error)) => Err(error),
            (_, Some(signal), _) => {
                let why = match cancel {
                    true => "canceled".to_owned(),
                    false => format!("interrupted by {}", stop::signal_name(signal)),
                };
                Err(Error::new(ErrorKind::Interrupted, why).note("try", again))
            }
            _ => Err(Error::new(ErrorKind::Failed, "the run has not ended")),
        })
    }

    fn status(&mut self) {
        let done = self
            .nodes
            .values()
            .filter(|node| node.state == State::Done)
            .count();
        let live = self.live.iter();
        let live: Vec<String> = live
            .map(|(name, live)| format!("{name} {} s", live.started.elapsed().as_secs()))
            .collect();
        let text = format!("{done}/{} done: {}", self.nodes.len(), live.join(", "));
        self.screen.status(&text);
    }
}

/// `PATH`, and at its end the folder of this program: commands find `phalanx`.
fn path_with_us() -> Option<String> {
    let exe = std::env::current_exe().ok()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([exe.parent()?.to_owned()]);
    std::env::join_paths(folders).ok()?.into_string().ok()
}

/// What has become of a task after an attempt.
enum Outcome {
    /// Its outputs, and the key of its call if that is cached.
    Done(Items, Option<String>),
    Failed,
    /// It failed, and may be tried again.
    Retry,
    /// The attempt does not count.
    Again,
}

fn has(items: &Items, sha256: &str) -> bool {
    let mut items = items.values();
    items.any(|item| matches!(item, Item::Object(object) if object.sha256 == sha256))
}

/// Whether all files and folders in `items` are whole.
fn check(store: &Store, items: &Items) -> std::result::Result<(), String> {
    items.values().try_for_each(|item| match item {
        Item::Object(object) => store.objects.check_changes(object),
        Item::Value(_) => Ok(()),
    })
}

/// The first input that is not whole.
fn broken(store: &Store, inputs: &Items) -> Option<Broken> {
    inputs.iter().find_map(|(name, item)| match item {
        Item::Object(object) => Some(Broken {
            why: store.objects.check_changes(object).err()?,
            input: name.clone(),
            sha256: object.sha256.clone(),
        }),
        Item::Value(_) => None,
    })
}

/// Copies inputs that are not whole from where they came, or says why that is not possible.
fn mend(
    store: &Store,
    inputs: &Items,
    sources: &BTreeMap<String, PathBuf>,
) -> Result<std::result::Result<(), Broken>> {
    for item in inputs.values() {
        let Item::Object(object) = item else { continue };
        if let Some(source) = sources.get(&object.sha256)
            && let Err(why) = store.objects.check_changes(object)
            && let Err(and) = store.objects.restore(object, source)?
        {
            let input = inputs.iter().find(|(_, other)| *other == item);
            return Ok(Err(Broken {
                input: input.map(|(name, _)| name.clone()).unwrap_or_default(),
                sha256: object.sha256.clone(),
                why: format!("{why}, and {and}"),
            }));
        }
    }
    Ok(broken(store, inputs).map_or(Ok(()), Err))
}

/// Moves the outputs of an attempt into the store, or says which one is missing or wrong.
fn collect(
    objects: &Objects,
    task: &Task,
    dir: &Path,
) -> Result<std::result::Result<Items, String>> {
    let mut items = Items::new();
    for (name, kind) in &task.outputs {
        let path = outputs_dir(dir).join(name);
        let Ok(found) = path.symlink_metadata() else {
            let variable = Task::output_variable(name);
            return Ok(Err(format!(
                "output {name:?} is missing: the task must write it to ${variable}"
            )));
        };
        let is_right = match kind {
            Type::Folder => found.is_dir(),
            _ => found.is_file(),
        };
        if !is_right {
            return Ok(Err(format!("output {name:?} is not a {kind}")));
        }
        let item = if kind.is_path() {
            match objects.adopt(&path, *kind) {
                Ok(object) => Item::Object(object),
                Err(error) if error.kind() == ErrorKind::Usage => {
                    return Ok(Err(error.chain()));
                }
                Err(error) => return Err(error),
            }
        } else {
            let text = read_regular(&path, MOST_VALUE).map(String::from_utf8);
            let Ok(Ok(text)) = text else {
                return Ok(Err(format!(
                    "output {name:?} is not text of at most 16 MiB"
                )));
            };
            let text = text.strip_suffix('\n').unwrap_or(&text);
            match kind.read(text) {
                Ok(value) => Item::Value(canonical(*kind, &value)),
                Err(why) => return Ok(Err(format!("output {name:?} {why}"))),
            }
        };
        items.insert(name.clone(), item);
    }
    Ok(Ok(items))
}

/// The last `count` lines of a log.
pub(crate) fn last_lines(path: &Path, count: usize) -> Vec<String> {
    use std::io::{Read, Seek, SeekFrom};
    let read = || {
        let mut file = fs::File::open(path)?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(16 << 10)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..]
        .iter()
        .map(|line| (*line).to_owned())
        .collect()
}

/// Lines on standard error, as cargo's, and below them the state of a run on a terminal.
struct Screen {
    is_terminal: bool,
    has_status: bool,
}

impl Screen {
    fn new() -> Screen {
        Screen {
            is_terminal: std::io::stderr().is_terminal(),
            has_status: false,
        }
    }

    fn raw(&mut self, text: &str) {
        use std::io::Write;
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.has_status) {
            self.raw("\r\x1b[K");
        }
    }

    fn line(&mut self, verb: &str, text: &str) {
        self.clear();
        say::note(format!("{verb:>12} {text}"));
    }

    fn status(&mut self, text: &str) {
        self.clear();
        let short: String = text.chars().take(76).collect();
        self.raw(&phalanx_base::text::one_line(&short));
        self.has_status = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `phalanx flow run` of a folder, up to its first task.
    fn start(dir: &Path, folder: &Path) -> Result<String> {
        let text = "name = \"w\"\n[inputs]\ndata = { type = \"folder\" }\n[tasks.a]\nshell = \"true\"\ninputs = { data = \"{inputs.data}\" }\n";
        let workflow = Workflow::from_toml(text, dir, "flow.toml")?;
        let store = Store::create(&dir.join("store"))?;
        let _lock = store.lock()?;
        let given = BTreeMap::from([("data".to_owned(), Json::from(folder.to_string_lossy()))]);
        create(&store, workflow, &given)
    }

    #[test]
    fn a_run_starts_after_one_that_was_killed_while_it_copied_an_input() {
        crate::objects::as_another_user(|dir| {
            use std::os::unix::fs::PermissionsExt;
            let data = dir.join("data");
            fs::create_dir(&data).unwrap();
            fs::write(data.join("a"), "1").unwrap();
            fs::write(data.join("b"), "2").unwrap();
            let read_only = fs::Permissions::from_mode(0o444);
            fs::set_permissions(data.join("a"), read_only.clone()).unwrap();
            let objects = Objects::new(&dir.join("store"));
            let sum = objects.content(&data, Type::Folder).unwrap().sha256;
            // Half of a copy, by the names of older versions and of this one.
            for name in [format!("import-{sum}"), "import-0".to_owned()] {
                let left = dir.join("store/tmp").join(name);
                fs::create_dir_all(&left).unwrap();
                fs::write(left.join("a"), "").unwrap();
                fs::set_permissions(left.join("a"), read_only.clone()).unwrap();
                fs::set_permissions(&left, fs::Permissions::from_mode(0o555)).unwrap();
            }
            assert_eq!(start(dir, &data).unwrap(), "w-1");
            assert_eq!(start(dir, &data).unwrap(), "w-2");
            // The second one found all in the store.
            assert!(!dir.join("store/tmp").exists());
        });
    }

    #[test]
    fn a_folder_with_the_store_in_it_is_no_input() {
        let dir = tempfile::tempdir().unwrap();
        let text = start(dir.path(), dir.path()).unwrap_err().chain();
        assert!(text.contains("the store is in it"), "{text}");
    }
}
