//! Runs a workflow: starts what is ready, waits for resources, retries, records.
//!
//! All state is in the store before it has consequences: an attempt is recorded before it
//! starts; outputs are moved into the store and synced, then recorded together with `done`.
//! An engine that dies at any moment therefore leaves a run that another one continues.

mod attempt;
mod files;
mod screen;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::create_folder;
use phalanx_base::{format, stop};
use phalanx_process::Guard;
use phalanx_process::reap::adopt_orphans;
use rustix::process::Signal;

use self::attempt::{Live, Why, start_of};
use self::files::{Broken, broken, check, collect, has, mend};
use self::screen::Screen;
use crate::call::Call;
use crate::child;
use crate::lock::EngineLock;
use crate::objects::{cannot, remove_all};
use crate::resources::{Grant, Limiter, Machine, Pool};
use crate::secrets::Secrets;
use crate::spec::{Resources, Source, Task, Value, Workflow};
use crate::store::{Attempt, Cached, Item, Items, Node, Run, State, Store, now};

/// When it is looked again whether the processes of a stopped task have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Tasks for which files are read at the same time, before they start.
const MOST_BUSY: usize = 8;

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
    secrets: Secrets,
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

/// Checks that this machine can run all tasks of `workflow`, and reads their secrets.
pub(crate) fn check_machine(workflow: &Workflow, options: &Options) -> Result<Secrets> {
    let machine = Machine::new(&options.resources);
    let mut tasks = workflow.tasks.iter();
    tasks.try_for_each(|task| machine.check(task))?;
    Secrets::of(workflow)
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
    let secrets = check_machine(&run.workflow, options)?;
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
        secrets,
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
                let number = node.attempts.len();
                child::end_all(&self.store.attempt_dir(self.id, &task.name, number))?;
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
        let text = format!("{} ({})", self.id, format::plural(tasks.len(), "task"));
        self.screen.line("Run", &text);
        let has_limits = |task: &Task| {
            task.limits.cpus.or(task.limits.gpus).is_some() || task.limits.memory.is_some()
        };
        if tasks.iter().any(has_limits) {
            let text = format!("by {}", self.run.limits);
            self.screen.line("Limits", &text);
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
            let live = self.live.values();
            let times = live.flat_map(|live| [live.term_at, live.kill_at]);
            let next = times.flatten().chain(self.pauses.values().copied()).min();
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
                Item::Value(value) => Item::Value(input.kind.canonical(value)),
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

    /// Continues a task after another thread has read files for it.
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
        let attempt = Attempt::new(String::new(), Vec::new());
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
        for folder in child::folders(&dir) {
            create_folder(&folder)?;
        }
        let group = format!("{name}-{number}");
        let (limits, said) = self.limiter.limits(task, &grant, &group)?;
        let call = self.call(task, inputs);
        let names = [self.id, &number.to_string()];
        let start = start_of(&call, &self.store.objects, &dir, names, limits)?;
        let args = child::prepare(&start)?;
        let attempt = Attempt::new(said.clone(), grant.gpus.clone());
        self.change(name, |node| {
            node.state = State::Running;
            node.attempts.push(attempt);
        })?;
        let (sender, ended) = (self.sender.clone(), Event::Ended(name.clone()));
        let ended = move || drop(sender.send(ended));
        let (guard, secrets) = (&self.guard, &self.secrets);
        let live = Live::start(task, start, args, grant, guard, secrets, ended)?;
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
        let is_cached = task.cache.is_some();
        let call = is_cached.then(|| self.call(&task, inputs.clone()));
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
        let task = self.run.workflow.task(name).cloned();
        let (Some(live), Some(task)) = (self.live.remove(name), task) else {
            return Ok(());
        };
        let failed = |error| cannot("wait for", &live.dir, error);
        let status = end.status.map_err(failed)?;
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
                for folder in child::folders(&live.dir) {
                    let _ = remove_all(&folder);
                }
            }
            State::Failed => {
                self.screen.line("Failed", &format!("{name}: {text}"));
                for line in child::last_lines(&live.dir, 10) {
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
                let text = format!("{name}: {text}; again in {pause} ({left} left)");
                self.screen.line("Retry", &text);
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
        let live = self.live.iter_mut();
        let mut others = live.filter(|(name, _)| has_it(name)).peekable();
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
        let mut nodes = self.nodes.iter();
        let failed = nodes.find(|(_, node)| node.state == State::Failed);
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
            let log = format!("{} logs {} {name}", self.options.command, self.id);
            let error = Error::new(ErrorKind::Failed, message).note("log", log);
            error.note("try", again.clone())
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
        let is_done = |node: &&Node| node.state == State::Done;
        let done = self.nodes.values().filter(is_done).count();
        let live = (self.live.iter())
            .map(|(name, live)| format!("{name} {} s", live.started.elapsed().as_secs()));
        let live: Vec<String> = live.collect();
        let text = format!("{done}/{} done: {}", self.nodes.len(), live.join(", "));
        self.screen.status(&text);
    }
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
