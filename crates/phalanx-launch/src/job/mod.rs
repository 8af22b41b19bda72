//! Runs a launch: hosts the store, joins the nodes, starts, watches and stops the
//! ranks, and restarts them if asked to.

mod lost;
mod verdict;
mod watch;

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::{stderr, stdout};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use phalanx_base::address::Address;
use phalanx_base::files::as_typed;
use phalanx_comm::PortRange;
use phalanx_member::Log;
use phalanx_process::folder::RunFolder;
use phalanx_process::oom::OomWatch;
use phalanx_process::pump::{Sink, WriteError};
use phalanx_process::signals::{Caught, SignalWatch, interrupted, suspend_self};
use phalanx_process::{Guard, reap};
use phalanx_store::TcpServer;
use signal_hook::consts::{SIGTSTP, SIGUSR1, SIGUSR2};

use crate::args::LaunchArgs;
use crate::contract::LauncherVariables;
use crate::ending::{self, Training};
use crate::error::{Error, ErrorKind, Result};
use crate::evict::Evictions;
use crate::job_files::JobFiles;
use crate::machine::ShutdownState;
use crate::nodes::{self, Attempt, Moved, Next, NodeInfo, NodeStore, Nodes, Rules};
use crate::place::{LOST_AFTER, Meeting};
use crate::plan::LaunchPlan;
use crate::port::{PortForRanks, check_range};
use crate::ranks::Rank;
use crate::report::JobFailure;
use crate::{Event, numa, say, token};

/// How long to wait for the cause of an exit that may be its consequence.
const ECHO_WAIT: Duration = Duration::from_millis(400);
/// When a wait for the next attempt is reported; then again each time it has doubled.
const SAY_WAITING: Duration = Duration::from_secs(2);

/// A job of which this process is about to be a launcher.
pub struct Launch {
    plan: LaunchPlan,
    began: SystemTime,
    /// Whether all descendants of this process belong to our ranks.
    alone: bool,
    sender: Sender<Event>,
    events: Receiver<Event>,
    signals: SignalWatch,
    folder: RunFolder,
    /// Of a job that is shown: its files, and the guard until ranks are started.
    shown: Option<(JobFiles, Arc<Guard>)>,
}

impl Launch {
    pub(crate) fn new(plan: LaunchPlan) -> Result<Launch> {
        let began = SystemTime::now();
        let alone = !reap::has_children();
        reap::adopt_orphans();
        let (sender, events) = channel();
        let others = [SIGTSTP, SIGUSR1, SIGUSR2];
        let signals = SignalWatch::start(
            sender.clone(),
            Event::Signal,
            &plan.args.torchrun.signals,
            &others,
        )?;
        let mut folder = match &plan.logs {
            Some(logs) => RunFolder::kept(&logs.dir),
            None => RunFolder::private()?,
        };
        let mut shown = None;
        if plan.args.live.is_some() {
            let guard = Arc::new(Guard::start()?);
            folder.make(&guard)?;
            shown = Some((JobFiles::new(folder.path(), title(&plan)), guard));
        }
        Ok(Launch {
            plan,
            began,
            alone,
            sender,
            events,
            signals,
            folder,
            shown,
        })
    }

    /// Where a page is to show the job.
    pub fn live(&self) -> Option<&Address> {
        self.plan.args.live.as_ref()
    }

    /// The folder with the files of a job that is shown.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs the job to its end. `finish` gets its result, and the training that has ended with it, and returns the result.
    ///
    /// # Errors
    ///
    /// The root cause, whose kind gives the exit code.
    pub fn run(
        self,
        finish: impl FnOnce(Result<()>, Option<&Training>) -> Result<()>,
    ) -> Result<()> {
        let Launch {
            plan,
            sender,
            events,
            ..
        } = self;
        if self.shown.is_some() {
            say_logs(&plan, &self.folder);
        }
        let binds = plan.args.torchrun.numa;
        let processors = binds.then(|| numa::processors(plan.args.node.local_ranks));
        let processors = processors.transpose()?;
        let token_fd = token::memory_file(&plan.token)?;
        let mut interrupt = || match events.try_recv() {
            Ok(Event::Signal(Caught::End(signal, _))) => Some(interrupted(signal)),
            Ok(Event::Signal(Caught::Suspend)) => {
                suspend_self();
                None
            }
            _ => None,
        };
        let mut at = open_store(&plan, &mut interrupt)?;
        if let Some(warning) = &at.warning {
            say::note(format_args!("warning: {warning}"));
        }
        let (mut nodes, mut port) = (None, None);
        if let Some(meeting) = &plan.args.node.meeting {
            let (joined, held) = join_nodes(&plan, meeting, &mut at, interrupt)?;
            if joined.has_begun() {
                joined.watch(meeting.lost_after, sender.clone())?;
            }
            joined.coordinate(rules(&plan, meeting), false)?;
            drop(plan.until_met.take());
            (nodes, port) = (Some(joined), held);
        }
        let first = nodes.as_ref().map(|nodes| nodes.infos().first());
        let master_port = match first {
            Some(first) => first.and_then(|info| info.master_port).unwrap_or(0),
            None => port
                .insert(PortForRanks::new(plan.args.node.master_port, None)?)
                .number(),
        };
        let shared = shared(&plan, &at, nodes.as_ref(), master_port);
        let unwritten = WriteError::default();
        let (files, guard) = self.shown.unzip();
        let mut job = Job {
            plan: &plan,
            host: phalanx_base::host_name(),
            shared,
            port,
            nodes,
            redirect: None,
            at,
            token_fd,
            folder: self.folder,
            out: Sink::new("standard output", stdout(), Some(unwritten.clone())),
            err: Sink::new("standard error", stderr(), None),
            unwritten,
            oom: OomWatch::start(),
            processors,
            alone: self.alone,
            guard,
            may_continue_elsewhere: false,
            decided: None,
            files,
            began: self.began,
            restarts: 0,
            sender,
            events,
        };
        let result = job.attempts();
        let result = job.end(result, finish);
        drop(self.signals);
        result
    }
}

/// Prints where the logs are.
fn say_logs(plan: &LaunchPlan, folder: &RunFolder) {
    if plan.logs.is_some() {
        say::note(format_args!("logs: {}", as_typed(folder.path())));
    }
}

/// Hosts the store, or says how to reach it.
fn open_store(
    plan: &LaunchPlan,
    interrupt: &mut impl FnMut() -> Option<Error>,
) -> Result<NodeStore> {
    let Some(meeting) = &plan.args.node.meeting else {
        return nodes::host_locally(plan.bind, &plan.token);
    };
    let deadline = Instant::now() + meeting.timeout;
    nodes::meeting_store(meeting, plan.bind, &plan.token, deadline, interrupt)
}

/// Meets the other nodes. On node 0, also holds the port that `MASTER_PORT` names.
fn join_nodes(
    plan: &LaunchPlan,
    meeting: &Meeting,
    at: &mut NodeStore,
    interrupt: impl FnMut() -> Option<Error>,
) -> Result<(Nodes, Option<PortForRanks>)> {
    if let Some(engine) = meeting.engine {
        say::note(format_args!(
            "node {} of {} ({engine}); node 0 is at {}:{}",
            meeting.node_rank.unwrap_or_default(),
            meeting.nodes,
            meeting.host,
            meeting.port
        ));
    }
    let local_ranks = plan.args.node.local_ranks;
    let is_first = at.server.is_some();
    let node = meeting.node_rank.unwrap_or(usize::from(!is_first));
    let store = is_first.then_some(meeting.port);
    let range = meeting.given.ports;
    let checked = range.map_or(Ok(()), |range| {
        check_range(range, node, local_ranks, store, plan.args.elastic)
    });
    let held = checked.and_then(|()| {
        let port = is_first.then(|| PortForRanks::new(None, range));
        port.transpose()
    });
    let port = held?;
    let info = NodeInfo {
        nodes: meeting.nodes,
        least: meeting.least,
        local_ranks,
        run_id: plan.run_id.clone(),
        program: plan.args.run.name(),
        host: phalanx_base::host_name(),
        address: None,
        pid: std::process::id(),
        master_port: port.as_ref().map(PortForRanks::number),
        max_restarts: plan.args.max_restarts,
        by_arrival: meeting.node_rank.is_none(),
        elastic: plan.args.elastic,
        joins_as: None,
        standby: None,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let (token, timeout) = (&plan.token, meeting.timeout);
    let node = meeting.node_rank;
    let nodes = nodes::join(at, node, info, token, timeout, range, interrupt)?;
    Ok((nodes, port))
}

/// When the nodes start their ranks again.
fn rules(plan: &LaunchPlan, meeting: &Meeting) -> Rules {
    Rules {
        least: meeting.least.unwrap_or(match plan.args.elastic {
            true => 1,
            false => meeting.nodes,
        }),
        most: meeting.nodes,
        join: meeting.timeout,
        last_call: meeting.last_call,
        max_restarts: plan.args.max_restarts,
        in_place: plan.args.elastic,
    }
}

/// The program and its arguments, for a page.
fn title(plan: &LaunchPlan) -> String {
    let program = Path::new(&plan.args.run.program).file_name();
    let words = program
        .into_iter()
        .chain(plan.args.run.args.iter().map(OsString::as_os_str));
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    words.join(" ").chars().take(300).collect()
}

fn shared(
    plan: &LaunchPlan,
    at: &NodeStore,
    nodes: Option<&Nodes>,
    master_port: u16,
) -> LauncherVariables {
    let node_rank = nodes.map_or(0, Nodes::node_rank);
    let ranks: Vec<usize> = match nodes {
        None => vec![plan.args.node.local_ranks],
        Some(nodes) => nodes.first_infos().map(|info| info.local_ranks).collect(),
    };
    let meeting = plan.args.node.meeting.as_ref();
    LauncherVariables {
        node_rank,
        nodes: ranks.len(),
        first_rank: nodes.map_or(0, |nodes| nodes.ranks().start),
        local_ranks: plan.args.node.local_ranks,
        world: ranks.iter().sum(),
        role: plan.args.role.clone(),
        store: at.store.clone(),
        store_file: nodes.and_then(|nodes| Some(nodes.moves()?.as_os_str().to_owned())),
        master_addr: at.master_addr.clone(),
        master_port,
        run_id: plan.run_id.clone(),
        max_restarts: plan.args.max_restarts,
        bind: at.bind.map(|ip| ip.to_string()),
        ports: meeting.and_then(|meeting| ports_of_ranks(meeting.given.ports?, master_port)),
        signals: plan.args.torchrun.signal_names(),
        threads_set: plan.threads_set,
        rayon_threads: plan.rayon_threads,
        elastic: plan.args.elastic,
    }
}

/// The ports of `range` that are left to the ranks: `held`, and those above it, are not.
fn ports_of_ranks(range: PortRange, held: u16) -> Option<PortRange> {
    match range.contains(held) {
        true => PortRange::new(range.first(), held - 1).ok(),
        false => Some(range),
    }
}

struct Job<'a> {
    plan: &'a LaunchPlan,
    host: String,
    shared: LauncherVariables,
    /// On the node of rank 0, what `MASTER_PORT` names.
    port: Option<PortForRanks>,
    nodes: Option<Nodes>,
    /// The store at node 0's address, where this launcher has found the job elsewhere.
    redirect: Option<Arc<TcpServer>>,
    /// The store, on one node with its server.
    at: NodeStore,
    token_fd: std::os::fd::OwnedFd,
    /// Dropped before the guard, which removes it when we are killed.
    folder: RunFolder,
    out: Arc<Sink>,
    err: Arc<Sink>,
    unwritten: WriteError,
    oom: OomWatch,
    /// The processors of each rank, where they are bound.
    processors: Option<Vec<Vec<usize>>>,
    /// Whether all descendants of this process belong to our ranks.
    alone: bool,
    /// The guard of the last attempt. It is kept to the end, because it informs the other nodes
    /// and removes the folder if this launcher is killed.
    guard: Option<Arc<Guard>>,
    /// The other nodes continue without this one, or may do so.
    may_continue_elsewhere: bool,
    /// When the last stop began.
    decided: Option<Instant>,
    /// The files of a job that is shown.
    files: Option<JobFiles>,
    began: SystemTime,
    /// On one node: restarts so far, of all ranks or of one.
    restarts: u32,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

/// How one attempt ended.
enum Outcome {
    Success,
    /// A rank failed; another attempt may help.
    Failed(Error),
    /// No attempt can help: the job was interrupted, for example.
    Final(Error),
    /// The ranks of other nodes continue without those of this one.
    Left(Error),
    /// The ranks of other nodes continue without those of this one, which hosts the store.
    HostLeft,
}

impl Job<'_> {
    fn attempts(&mut self) -> Result<()> {
        let mut number = 0;
        if self.nodes.as_ref().is_some_and(|nodes| !nodes.has_begun()) {
            match self.next_attempt(None)? {
                Some(first) => number = first,
                None => return Ok(()),
            }
        }
        let most = self.plan.args.max_restarts;
        loop {
            let outcome = match self.attempt(number)? {
                Outcome::Success => self.wait_for_others(true)?,
                Outcome::HostLeft => self.wait_for_others(false)?,
                outcome => outcome,
            };
            match outcome {
                Outcome::Success | Outcome::HostLeft => return Ok(()),
                Outcome::Left(error) => {
                    self.may_continue_elsewhere = true;
                    // It interrupts no rank.
                    let code = ErrorKind::PeerLost.exit_code();
                    let verdict = self.plain_verdict(code, &error.chain());
                    self.nodes.iter().for_each(|nodes| drop(nodes.go(&verdict)));
                    if error.kind() != ErrorKind::Usage {
                        self.note(format!("{}; the other nodes continue", error.chain()));
                    }
                    return match error.kind() {
                        ErrorKind::Stopped => Ok(()),
                        _ => Err(error),
                    };
                }
                Outcome::Final(error) => {
                    // The others wait for the next attempt otherwise.
                    if let Some(nodes) = self.nodes.as_ref().filter(|nodes| nodes.can_restart()) {
                        nodes.publish(&self.plain_verdict(error.exit_code(), &error.chain()), true);
                    }
                    return Err(error);
                }
                Outcome::Failed(error) if self.nodes.is_some() => {
                    number = self.next_attempt(Some(error))?.unwrap_or(number);
                }
                Outcome::Failed(error) if self.restarts >= most => return Err(error),
                Outcome::Failed(error) => {
                    self.restarts += 1;
                    number = self.restarts;
                    let why = ending::sentence(&error);
                    self.note(format!("restart {number} of {most}: {why}"));
                    if let Some(server) = &self.at.server {
                        server.clear_all_but("launch/");
                    }
                    // Ranks of the new attempt must not connect to remains of the old one.
                    if self.plan.args.node.master_port.is_none() {
                        let port = self.port.insert(PortForRanks::new(None, None)?);
                        self.shared.master_port = port.number();
                    }
                }
            }
        }
    }

    /// Waits until the ranks of all nodes have ended, here after `error`, and for what node 0 decides then. Returns the
    /// number of the next attempt; `None`: the job has done without this launcher.
    fn next_attempt(&mut self, error: Option<Error>) -> Result<Option<u32>> {
        let mut reported = false;
        let (began, mut say_at) = (Instant::now(), SAY_WAITING);
        // No deadline: node 0 has one, and notices lost nodes.
        loop {
            let Some(nodes) = &mut self.nodes else {
                return Ok(None);
            };
            if let Some(error) = error.as_ref().filter(|_| !reported) {
                let (code, node) = (error.exit_code(), self.shared.node_rank);
                reported = nodes.ended(&JobFailure::new(code, node, error.chain()))?;
            }
            if let Some(attempt) = nodes.to_begin() {
                self.begin(attempt)?;
                continue;
            }
            match nodes.next()? {
                Some(Next::Attempt(attempt)) => return self.enter(&attempt).map(Some),
                Some(Next::Elsewhere(at)) => self.join_elsewhere(&at)?,
                Some(Next::End(verdict)) if verdict.code == 0 => {
                    self.note("the job finished without this node".to_owned());
                    return Ok(None);
                }
                Some(Next::End(verdict)) => {
                    // With what this node knows of it.
                    let own = error.filter(|own| own.chain().starts_with(&verdict.message));
                    return Err(own.unwrap_or_else(|| verdict.into_error(None)));
                }
                None => self.take_events()?,
            }
            if began.elapsed() >= say_at {
                say_at *= 2;
                let waits_for_place = self.nodes.as_ref().is_some_and(Nodes::waits_for_place);
                say::note(match waits_for_place {
                    true => "standing by: the job has all of its nodes",
                    false => {
                        "waiting for the other nodes, and for the one with the store to start the next attempt"
                    }
                });
            }
        }
    }

    /// On node 0: lets all nodes start the ranks of `attempt`.
    fn begin(&mut self, mut attempt: Attempt) -> Result<()> {
        let meeting = self.plan.args.node.meeting.as_ref();
        let range = meeting.and_then(|meeting| meeting.given.ports);
        // Ranks of the new attempt must not connect to remains of the old one, unless ports are few.
        if range.is_some() {
            self.port = None;
        }
        let port = PortForRanks::new(None, range);
        let Some(nodes) = &self.nodes else {
            return Ok(());
        };
        let port = port.inspect_err(|error| {
            nodes.publish(&self.plain_verdict(error.exit_code(), &error.chain()), true);
        })?;
        attempt.master_port = self.port.insert(port).number();
        nodes.begin(&attempt)
    }

    fn enter(&mut self, attempt: &Attempt) -> Result<u32> {
        if let Some(nodes) = &mut self.nodes {
            nodes.enter(attempt);
            if nodes.is_elastic() {
                let meeting = self.plan.args.node.meeting.as_ref();
                let limit = meeting.map_or(LOST_AFTER, |meeting| meeting.lost_after);
                nodes.watch(limit, self.sender.clone())?;
            }
        }
        let nodes = self.nodes.as_ref();
        self.shared = shared(self.plan, &self.at, nodes, attempt.master_port);
        match self.nodes.as_ref().filter(|nodes| nodes.has_joined_late()) {
            Some(nodes) => self.note(format!("joining the job as {}", nodes.name())),
            None if !attempt.why.is_empty() => self.note(attempt.why.clone()),
            None => {}
        }
        Ok(attempt.number)
    }

    /// The last launcher of `attempt` has joined it.
    fn admit(&mut self, attempt: &Attempt) -> Result<()> {
        if let Some(nodes) = &mut self.nodes
            && let Some(name) = nodes.admit(attempt, self.sender.clone())?
        {
            self.note(format!("{name} joins"));
        }
        Ok(())
    }

    /// After the last attempt: leaves the other nodes, and ends the job's files.
    fn end(
        &self,
        result: Result<()>,
        finish: impl FnOnce(Result<()>, Option<&Training>) -> Result<()>,
    ) -> Result<()> {
        if let Some(nodes) = &self.nodes {
            let decided = self.decided.unwrap_or_else(Instant::now);
            nodes.leave(decided);
        }
        let result = match (result, self.unwritten.first()) {
            (Ok(()), Some(what)) => Err(Error::new(
                ErrorKind::Failed,
                format!("all ranks succeeded, but {what}"),
            )),
            (result, _) => result,
        };
        // Not where the training may continue elsewhere.
        let training = Training::of_job(self.folder.path(), self.began);
        let training = training.filter(|_| !self.may_continue_elsewhere);
        if let Some(files) = &self.files {
            files.end(result.as_ref().err());
        }
        finish(result, training.as_ref())
    }

    /// Prints a message, and adds it to the job's files.
    fn note(&self, text: String) {
        say::note(&text);
        if let Some(files) = &self.files {
            files.note(&text);
        }
    }

    /// Runs the ranks once; `number` counts the attempts before and, on one node, restarts of one rank.
    fn attempt(&mut self, number: u32) -> Result<Outcome> {
        let guard = Arc::new(Guard::start()?);
        let made = self.folder.make(&guard);
        if made.is_ok() && self.guard.is_none() {
            say_logs(self.plan, &self.folder);
        }
        if let Some(nodes) = self.nodes.as_mut().filter(|_| made.is_ok()) {
            let file = self.folder.path().join("store-address");
            nodes.stand_by(file, self.sender.clone())?;
            self.shared.store_file = nodes.moves().map(|file| file.as_os_str().to_owned());
        }
        if !self.continues_in_place() {
            ending::watch(&guard, self.folder.path(), self.began);
        }
        // This drops the guard of the attempt before.
        self.guard = Some(guard.clone());
        self.instruct_guard();
        let mut ranks = Vec::with_capacity(self.plan.args.node.local_ranks);
        let started = made.and_then(|()| {
            (0..self.plan.args.node.local_ranks).try_for_each(|local| {
                let nodes = self.nodes.as_ref();
                let joins = nodes.is_some_and(Nodes::has_joined_late);
                let joins_as = joins.then_some(self.shared.first_rank + local);
                ranks.push(self.start_rank(local, number, joins_as, &guard)?);
                Ok(())
            })
        });
        let mut children: HashSet<i32> = ranks
            .iter()
            .map(|rank| rank.pid.as_raw_nonzero().get())
            .collect();
        children.extend(i32::try_from(guard.pid()));
        let plan = self.plan;
        let mut watch = Supervision {
            args: &plan.args,
            attempt: number,
            is_final: false,
            asked_to_end: None,
            children,
            machine: ShutdownState::new(ranks.len(), self.plan.args.stop_grace, ECHO_WAIT)
                .elastic(self.plan.args.elastic)
                .with_others(self.continues_in_place()),
            started: ranks.len(),
            restarts: self.restarts,
            log: None,
            ranks,
            reaped: 0,
            give_up: None,
            stopping_since: None,
            verdict: None,
            halted: None,
            lone_at: None,
            lone_reported: false,
            late: BTreeMap::new(),
            leaving: None,
            unreported: Vec::new(),
            was_lost: false,
            refused: None,
            evictions: self.plan.args.evict_after.map(Evictions::new),
            evicted: BTreeMap::new(),
        };
        if let Err(error) = started {
            // Those that did start must not outlive the attempt.
            watch.kill();
            watch.machine = ShutdownState::new(watch.ranks.len(), Duration::ZERO, Duration::ZERO);
            self.watch_to_the_end(&mut watch);
            self.end_strangers(&watch, Duration::ZERO);
            if let Some(nodes) = &self.nodes {
                nodes.publish(&self.plain_verdict(error.exit_code(), &error.chain()), true);
            }
            return Err(error);
        }
        self.watch_to_the_end(&mut watch);
        self.show(&mut watch);
        watch.ranks.iter().for_each(Rank::log_last_error);
        self.decided = watch.stopping_since;
        if self.nodes.is_none() {
            self.restarts = watch.restarts;
        }
        if watch.machine.why().is_some() {
            let grace = match watch.is_interrupt() {
                true => watch.handler_grace(),
                false => self.plan.args.stop_grace,
            };
            self.end_strangers(&watch, grace);
        }
        Ok(self.outcome(watch))
    }

    /// Sets the event that the guard writes for the other nodes if this launcher is killed, unless the store ends with it.
    fn instruct_guard(&self) {
        let nodes = self.nodes.as_ref().filter(|nodes| !nodes.hosts_store());
        let (Some(nodes), Some(guard)) = (nodes, &self.guard) else {
            return;
        };
        let verdict = JobFailure::of_killed(self.shared.node_rank, &self.host);
        let (store, token) = (&self.at.dial, &self.plan.token);
        ending::set_event(guard, store, token, &nodes.killed_event(verdict));
        nodes.is_guarded();
    }

    /// The store has moved to another launcher, or to this one.
    fn store_moved(&mut self, moved: Moved) -> Result<()> {
        let (Some(nodes), Some(meeting)) = (&mut self.nodes, &self.plan.args.node.meeting) else {
            return Ok(());
        };
        let rules = rules(self.plan, meeting);
        let (name, at) = nodes.store_moved(moved, rules, self.sender.clone())?;
        self.at.moved(&at);
        self.shared.master_addr.clone_from(&self.at.master_addr);
        self.shared.store.clone_from(&self.at.store);
        self.note(format!("rendezvous store moved to {name}, at {at}"));
        self.instruct_guard();
        Ok(())
    }

    /// Joins the running job whose store is at `at`: instead of the job that this launcher was about to start, or as a spare
    /// that has lost the store.
    fn join_elsewhere(&mut self, at: &str) -> Result<()> {
        let Some(meeting) = &self.plan.args.node.meeting else {
            return Ok(());
        };
        let old = self.nodes.take();
        self.redirect = old
            .and_then(|nodes| nodes.give_up())
            .or(self.redirect.take());
        if self.redirect.is_none() {
            self.at.moved(at);
        }
        self.note(format!("rendezvous store moved to {at}"));
        let events = &self.events;
        let interrupt = || match events.try_recv() {
            Ok(Event::Signal(Caught::End(signal, _))) => Some(interrupted(signal)),
            _ => None,
        };
        let (nodes, _) = join_nodes(self.plan, meeting, &mut self.at, interrupt)?;
        self.nodes = Some(nodes);
        Ok(())
    }

    /// Whether the ranks of other nodes continue without those of this one.
    fn continues_in_place(&self) -> bool {
        self.nodes.as_ref().is_some_and(Nodes::continues_in_place)
    }

    /// Waits, after all ranks of this launcher have ended, until all nodes are done: the store must
    /// not vanish under running ranks, and all launchers must end with the same code, or start
    /// again together. `done`: the ranks have succeeded; otherwise this launcher is done when the
    /// job is over.
    fn wait_for_others(&mut self, done: bool) -> Result<Outcome> {
        let mut reported = false;
        let mut log = self.nodes.as_ref().map(|nodes| Log::new(nodes.store()));
        // No deadline: lost nodes are noticed.
        loop {
            let Some(nodes) = &self.nodes else {
                return Ok(Outcome::Success);
            };
            let mut is_done = || done || log.as_mut().is_some_and(is_over);
            reported = reported || (is_done() && nodes.done()?);
            // The host of the store decides, so that all know the same.
            match nodes.end_of_attempt()? {
                Some(verdict) if verdict.code == 0 => return Ok(Outcome::Success),
                Some(verdict) => return Ok(Outcome::Failed(verdict.into_error(None))),
                None => {}
            }
            self.take_events()?;
        }
    }

    /// Handles events while no rank runs.
    fn take_events(&mut self) -> Result<()> {
        match self.events.try_recv() {
            Ok(Event::Admit(attempt)) => self.admit(&attempt),
            Ok(Event::WasLost) => {
                let what = "this node was cut off from the others for too long; they continue";
                Err(Error::new(ErrorKind::PeerLost, what))
            }
            Ok(Event::Signal(Caught::End(signal, _))) => {
                let verdict = self.publish(self.interrupt_verdict(signal), true);
                Err(verdict.into_error(None))
            }
            Ok(Event::Signal(Caught::Suspend)) => {
                suspend_self();
                Ok(())
            }
            Ok(Event::Abort(verdict)) => Err(verdict.into_error(None)),
            Ok(Event::StoreLost(why)) => Err(Error::new(ErrorKind::PeerLost, why)),
            Ok(Event::StoreMoved(moved)) => self.store_moved(moved),
            Ok(Event::NodeLost(node)) => {
                let nodes = self.nodes.as_ref();
                nodes.map_or(Ok(()), |nodes| {
                    let verdict = nodes.publish(&nodes.verdict_of_lost(node), true);
                    Err(verdict.into_error(None))
                })
            }
            Ok(Event::Parted) => {
                self.may_continue_elsewhere = true;
                let nodes = self.nodes.as_ref();
                nodes.map_or(Ok(()), |nodes| {
                    Err(nodes.verdict_of_parted().into_error(None))
                })
            }
            _ => Ok(()),
        }
    }
}

/// The ranks of one attempt, and the state of its end.
struct Supervision<'a> {
    args: &'a LaunchArgs,
    attempt: u32,
    /// No other attempt may follow.
    is_final: bool,
    /// The signal that this launcher got while the ranks were stopped for another reason.
    asked_to_end: Option<i32>,
    ranks: Vec<Rank>,
    /// Child processes that other threads wait for.
    children: HashSet<i32>,
    machine: ShutdownState,
    /// Processes that were started.
    started: usize,
    /// Restarts that count for those of one rank: with several nodes, of single ranks here in this attempt.
    restarts: u32,
    /// The log of an elastic job.
    log: Option<Log>,
    reaped: usize,
    give_up: Option<Instant>,
    stopping_since: Option<Instant>,
    verdict: Option<JobFailure>,
    /// Ranks that were stopped (SIGSTOP, a debugger) when the end was decided.
    halted: Option<Vec<usize>>,
    /// When to report that some ranks have ended and others have not.
    lone_at: Option<Instant>,
    lone_reported: bool,
    /// How many times in a row a rank was found late.
    late: BTreeMap<usize, usize>,
    leaving: Option<Leaving>,
    /// Lost local ranks that were not reported yet, as the store did not answer.
    unreported: Vec<usize>,
    /// The other nodes have lost this one, and continue.
    was_lost: bool,
    /// Why the last newcomer has failed before it took a step.
    refused: Option<JobFailure>,
    evictions: Option<Evictions>,
    /// Why local ranks were killed by this launcher.
    evicted: BTreeMap<usize, String>,
}

/// The ranks of this launcher leave the others.
#[derive(Clone, Copy)]
struct Leaving {
    /// The signal that this launcher got.
    signal: i32,
    asked: Instant,
    /// When they are killed.
    until: Instant,
}

/// Whether the ranks have ended the job, as far as the store answers.
fn is_over(log: &mut Log) -> bool {
    log.read().is_ok_and(|state| state.over().is_some())
}

/// The numbers of `ranks`.
fn numbers<'a>(ranks: impl Iterator<Item = &'a Rank>) -> Vec<usize> {
    ranks.map(|rank| rank.rank).collect()
}

impl Supervision<'_> {}
