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
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_data::files::{create_folder, read_regular};
use phalanx_launch::{Guard, reap_group, tied_command};
use phalanx_process::error::{Error, ErrorKind, Result};
use phalanx_process::{format, say, stop};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

use crate::child::{self, Start, log_file, outputs_dir, work_dir};
use crate::lock::EngineLock;
use crate::objects::cannot;
use crate::resources::{Grant, Limiter, Machine, Pool, end_group, size};
use crate::spec::{Action, Placeholder, Resources, Source, Task, Type, Value, Workflow};
use crate::store::{Attempt, Cached, Item, Items, Node, Run, State, Store, now};

/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

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
    Ended(String),
    Signal(i32),
}

/// An attempt that runs.
struct Live {
    child: Child,
    group: Pid,
    dir: PathBuf,
    cgroup: Option<PathBuf>,
    grant: Grant,
    started: Instant,
    /// When it is told to end, and when it is killed.
    term_at: Option<Instant>,
    kill_at: Option<Instant>,
    /// Why the engine ends it.
    why: Option<String>,
    is_reaped: bool,
}

impl Live {
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }

    fn end(&mut self, why: &str) {
        if self.why.is_none() {
            self.why = Some(why.to_owned());
            self.term_at = None;
            self.kill_at = Some(Instant::now() + GRACE);
            self.signal(Signal::TERM);
        }
    }

    /// Ends and reaps all its processes; whether its memory limit was exceeded.
    fn finish(&mut self) -> (std::io::Result<ExitStatus>, bool) {
        self.signal(Signal::KILL);
        let status = self.child.wait();
        self.is_reaped = true;
        reap_group(self.group);
        let too_large = self.cgroup.take().is_some_and(|group| end_group(&group));
        (status, too_large)
    }
}

impl Drop for Live {
    /// No attempt outlives its engine.
    fn drop(&mut self) {
        if !self.is_reaped {
            let _ = self.finish();
        }
    }
}

/// One engine, which runs one workflow.
struct Engine<'a> {
    store: &'a Store,
    id: &'a str,
    run: Run,
    nodes: BTreeMap<String, Node>,
    options: &'a Options,
    pool: Pool,
    limiter: Limiter,
    guard: Guard,
    live: BTreeMap<String, Live>,
    /// When a failed task is tried again.
    pauses: BTreeMap<String, Instant>,
    /// Tasks whose cache was looked at; or that they wait was said.
    looked_up: BTreeMap<String, String>,
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

/// Starts a new run of `workflow` with `given`; returns its id.
pub(crate) fn create(
    store: &Store,
    workflow: Workflow,
    given: &BTreeMap<String, Json>,
) -> Result<String> {
    let mut inputs = Items::new();
    for (name, input) in &workflow.inputs {
        let Some(value) = given.get(name).or(input.default.as_ref()) else {
            return Err(
                Error::usage(format!("input {name:?} ({}) has no default", input.kind))
                    .note("try", format!("--input {name}=VALUE")),
            );
        };
        inputs.insert(
            name.clone(),
            resolve(store, input.kind, value, &workflow.folder)?,
        );
    }
    let mut constants = Items::new();
    let disk = rustix::fs::statvfs(&store.dir).ok();
    let free = disk.map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    for task in &workflow.tasks {
        if task.requests.storage.is_some_and(|bytes| bytes > free) {
            let message = format!(
                "task {:?} requests {} of storage, but {} has {}",
                task.name,
                size(task.requests.storage.unwrap_or(0)),
                store.dir.display(),
                size(free)
            );
            return Err(
                Error::usage(message).note("try", "free some space, or another --store DIR")
            );
        }
        for (name, input) in &task.inputs {
            if let Value::Constant(value) = &input.value {
                let item =
                    resolve(store, input.kind, value, &workflow.folder).map_err(|error| {
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

/// A value as it is recorded; files and folders are copied into the store.
fn resolve(store: &Store, kind: Type, value: &Json, folder: &Path) -> Result<Item> {
    match value {
        Json::String(path) if kind.is_path() => Ok(Item::Object(
            store.objects.import(&folder.join(path), kind)?,
        )),
        value => Ok(Item::Value(canonical(kind, value))),
    }
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
    store.objects.clear_tmp();
    let limiter = Limiter::new();
    let (sender, events) = channel();
    let watch = watch_signals(sender.clone())?;
    let to_stop = sender.clone();
    let _cancels = lock.watch(store, id, move || {
        let _ = to_stop.send(Event::Signal(signal_hook::consts::SIGTERM));
    })?;
    phalanx_launch::adopt_orphans();
    let mut engine = Engine {
        store,
        id,
        nodes: BTreeMap::new(),
        options,
        pool: Pool::new(Machine::new(&options.resources)),
        guard: Guard::start()?,
        live: BTreeMap::new(),
        pauses: BTreeMap::new(),
        looked_up: BTreeMap::new(),
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
    outcome
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
            if node.state == State::Done {
                match self.check_all(&node.outputs) {
                    Ok(()) => self
                        .screen
                        .line("Kept", &format!("{}: done before", task.name)),
                    Err(why) => {
                        self.screen
                            .line("Lost", &format!("{}: {why}; it runs again", task.name));
                        node.state = State::Waiting;
                    }
                }
            } else {
                node.state = State::Waiting;
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

    fn check_all(&self, items: &Items) -> std::result::Result<(), String> {
        items.values().try_for_each(|item| match item {
            Item::Object(object) => self.store.objects.check(object),
            Item::Value(_) => Ok(()),
        })
    }

    fn work(&mut self) -> Result<Items> {
        loop {
            if self.stopping.is_none() {
                self.advance()?;
            }
            if self.live.is_empty() && (self.stopping.is_some() || self.pauses.is_empty()) {
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
                // The engine has a sender of its own.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            self.tick();
        }
    }

    fn signaled(&mut self, signal: i32) {
        if self.stopping.replace(signal).is_some() {
            self.live
                .values()
                .for_each(|live| live.signal(Signal::KILL));
            return;
        }
        self.pauses.clear();
        if !self.live.is_empty() {
            let names: Vec<&str> = self.live.keys().map(String::as_str).collect();
            self.screen.line("Stopping", &names.join(", "));
        }
        self.live.values_mut().for_each(|live| live.end("stopped"));
    }

    /// Timeouts, kills, and pauses that are over.
    fn tick(&mut self) {
        let now = Instant::now();
        for (name, live) in &mut self.live {
            if live.term_at.is_some_and(|at| at <= now) {
                let task = self.run.workflow.task(name);
                let limit = task.and_then(|task| task.timeout).unwrap_or_default();
                live.end(&format!(
                    "timeout after {}",
                    humantime::format_duration(limit)
                ));
            }
            if live.kill_at.is_some_and(|at| at <= now) {
                live.kill_at = None;
                live.signal(Signal::KILL);
            }
        }
        self.pauses.retain(|_, at| *at > now);
    }

    /// Starts, serves from the cache or skips all tasks that can be.
    fn advance(&mut self) -> Result<()> {
        // In an order in which each comes after those that it needs.
        for task in self.run.workflow.tasks.clone() {
            let name = &task.name;
            if self.nodes[name].state != State::Waiting || self.pauses.contains_key(name) {
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
                let inputs = self.inputs_of(&task);
                let key = key_of(&task, &inputs);
                self.change(name, |node| node.inputs = inputs)?;
                self.looked_up.insert(name.clone(), key.clone());
                if task.cache.is_some() && !self.options.no_cache && self.serve(&task, &key)? {
                    continue;
                }
            }
            match self.pool.take(&task) {
                Ok(grant) => self.start(&task, grant)?,
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

    /// Uses a cached result, if there is a whole one.
    fn serve(&mut self, task: &Task, key: &str) -> Result<bool> {
        let Some(found) = self.store.cached(key)? else {
            return Ok(false);
        };
        if let Err(why) = self.check_all(&found.outputs) {
            self.screen.line(
                "Damaged",
                &format!("{}: not from the cache: {why}", task.name),
            );
            return Ok(false);
        }
        self.screen
            .line("Cached", &format!("{} (from {})", task.name, found.run));
        self.change(&task.name, |node| {
            node.state = State::Done;
            node.outputs = found.outputs;
            node.cached = Some(found.run);
        })?;
        Ok(true)
    }

    fn start(&mut self, task: &Task, grant: Grant) -> Result<()> {
        let name = &task.name;
        let number = self.nodes[name].attempts.len() + 1;
        let inputs = self.nodes[name].inputs.clone();
        if let Err(why) = self.check_all(&inputs) {
            self.pool.give_back(grant);
            return Err(Error::new(
                ErrorKind::Failed,
                format!("task {name:?} cannot start: {why}"),
            )
            .note(
                "try",
                format!("{} run --resume {}", self.options.command, self.id),
            ));
        }
        let dir = self.store.attempt_dir(self.id, name, number);
        // Of an engine that was killed before it had recorded the attempt.
        let _ = fs::remove_dir_all(&dir);
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
        let child = tied_command(&self.guard, args)
            .and_then(|mut command| {
                command
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
        let live = Live {
            child,
            group,
            dir,
            cgroup,
            started,
            term_at: task.timeout.and_then(|limit| started.checked_add(limit)),
            kill_at: None,
            why: None,
            is_reaped: false,
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

    /// A task's process has ended: what has become of the task?
    fn ended(&mut self, name: &str) -> Result<()> {
        let (Some(mut live), Some(task)) = (
            self.live.remove(name),
            self.run.workflow.task(name).cloned(),
        ) else {
            return Ok(());
        };
        let (status, too_large) = live.finish();
        let status = status.map_err(|error| cannot("wait for", &live.dir, error))?;
        self.guard.ended(live.group);
        child::end_all(&live.dir)?;
        let took = format!("{:.1} s", live.started.elapsed().as_secs_f64());
        let dir = live.dir.clone();
        self.pool.give_back(std::mem::take(&mut live.grant));
        let (end, is_final, outputs) = match (&live.why, status.code()) {
            (_, Some(0)) if live.why.as_deref() != Some("stopped") => {
                match self.collect(&task, &dir)? {
                    Ok(outputs) => ("done".to_owned(), false, Some(outputs)),
                    Err(why) => (why, true, None),
                }
            }
            (Some(why), _) => (why.clone(), false, None),
            (None, Some(code)) => (
                format!("exit code {code}"),
                task.unrecoverable.contains(&code),
                None,
            ),
            (None, None) if too_large => ("memory limit exceeded".to_owned(), false, None),
            (None, None) => {
                let signal = status.signal().unwrap_or(0);
                (
                    format!("killed by {}", stop::signal_name(signal)),
                    false,
                    None,
                )
            }
        };
        let mut node = self.nodes[name].clone();
        let counts = outputs.is_some() || live.why.as_deref() != Some("stopped");
        if let Some(attempt) = node.attempts.last_mut() {
            attempt.ended = Some(now());
            attempt.end = Some(end.clone());
            attempt.counts = counts;
        }
        let failures = node
            .attempts
            .iter()
            .filter(|attempt| attempt.counts)
            .count();
        let failures = u32::try_from(failures).unwrap_or(u32::MAX);
        node.state = match (&outputs, counts) {
            (Some(_), _) => State::Done,
            (None, true) if is_final || failures > task.retries.times => State::Failed,
            (None, _) => State::Waiting,
        };
        let entry = outputs.as_ref().map(|outputs| Cached {
            task: task.name.clone(),
            version: task.cache.clone().unwrap_or_default(),
            run: self.id.to_owned(),
            time: now(),
            outputs: outputs.clone(),
        });
        node.outputs = outputs.unwrap_or_default();
        self.store.write(|changes| {
            changes.node(self.id, name, &node);
            if let (Some(entry), Some(key), true) =
                (&entry, self.looked_up.get(name), task.cache.is_some())
            {
                changes.cache(key, entry);
            }
        })?;
        let state = node.state;
        self.nodes.insert(name.to_owned(), node);
        match state {
            State::Done => {
                self.screen.line("Done", &format!("{name} in {took}"));
                for folder in [work_dir(&dir), outputs_dir(&dir), dir.join("inputs")] {
                    let _ = fs::remove_dir_all(folder);
                }
            }
            State::Failed => {
                self.screen.line("Failed", &format!("{name}: {end}"));
                for line in last_lines(&log_file(&dir), 10) {
                    self.screen.line("", &line);
                }
            }
            _ if counts => {
                let pause = task.retries.pause(failures);
                self.pauses.insert(name.to_owned(), Instant::now() + pause);
                let pause = humantime::format_duration(pause);
                let left = task.retries.times + 1 - failures;
                self.screen.line(
                    "Retry",
                    &format!("{name}: {end}; again in {pause} ({left} left)"),
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Moves the outputs of an attempt into the store, or says which one is missing or wrong.
    fn collect(&self, task: &Task, dir: &Path) -> Result<std::result::Result<Items, String>> {
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
                match self.store.objects.adopt(&path, *kind) {
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

    fn conclude(&mut self) -> Result<Items> {
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
        let again = format!("{} run --resume {}", self.options.command, self.id);
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
        match (state, self.stopping, error) {
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
        }
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

/// What decides whether a cached result fits: all that the task gets, not where.
fn key_of(task: &Task, inputs: &Items) -> String {
    let key = json!({
        "task": task.name,
        "version": task.version,
        "cache": task.cache,
        "action": task.action,
        "env": task.env,
        "inputs": inputs,
        "outputs": task.outputs,
    });
    hex::encode(Sha256::digest(key.to_string()))
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
        self.raw(&phalanx_data::text::one_line(&short));
        self.has_status = true;
    }
}
