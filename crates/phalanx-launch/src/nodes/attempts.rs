//! Attempts of a job on several nodes: how one ends on all nodes, and how the next one begins.
//!
//! All launchers stop their ranks when the attempt is [over](LauncherEvent::Over). When all have written that theirs have ended,
//! a thread of the store's host decides (`membership.rs`). That launcher removes the keys of the ranks and writes that the next
//! attempt has begun; the other launchers wait for this event. When no attempt may follow, the job [ends](LauncherEvent::Abort).
//!
//! With `--nnodes MIN:MAX` launchers join and leave. They are numbered by arrival, and a node rank is the place in the
//! attempt's list of launchers. A launcher that is not part of an attempt waits for the next one.
//!
//! With `--elastic` too, the attempt continues when launchers are lost or join: the ranks of a lost launcher are reported as
//! lost, and a new launcher starts ranks that join the others. The attempt's list of launchers only grows.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_member::{Log, State};
use phalanx_store::{ErrorKind as StoreKind, ServerState, Store, TcpServer, TcpStore};

use super::info::name_of;
use super::membership::{
    Attempt, Decision, Host, Id, LauncherEvent, LauncherLog, Launchers, Rules,
};
use super::pulse::{Heartbeats, gone_key};
use super::standby::{self, HOST_KEY, MOVED_KEY, Moved, Roster, Standby, point_here};
use super::{ANSWER_LIMIT, END_LIMIT, NodeInfo, Nodes, SLICE, lost_store, verdict_of_lost};
use crate::error::{ErrorKind, Result};
use crate::report::JobFailure;
use crate::{Event, format::plural, lock, say, spawn};

/// The prefix of the keys of launchers; all other keys in the store belong to ranks.
const LAUNCHERS: &str = "launch/";
/// How long the host of the store waits for an event before it looks at the clock.
const LOOK: Duration = Duration::from_millis(50);
/// How many times the host asks its own store again when it does not answer.
const TRIES: u32 = 20;

/// What follows an attempt.
pub enum Next {
    /// Another one, of which this launcher is part.
    Attempt(Attempt),
    /// The job runs already, and its store is at this address.
    Elsewhere(String),
    /// The end of the job; the code is 0 if the job has succeeded without this launcher.
    End(JobFailure),
}

/// The attempt that the host of the store is to begin.
pub(super) type ToBegin = Arc<Mutex<Option<Attempt>>>;

impl Nodes {
    /// Whether another attempt may follow this one.
    pub fn can_restart(&self) -> bool {
        self.can_restart
    }

    /// Whether launchers may leave, or join and leave.
    pub fn is_elastic(&self) -> bool {
        self.is_elastic
    }

    /// Whether this launcher is part of an attempt.
    pub fn has_begun(&self) -> bool {
        !self.attempt.infos.is_empty()
    }

    /// Whether an attempt runs without this launcher.
    pub fn waits_for_place(&self) -> bool {
        !self.has_begun() && self.is_spare
    }

    /// Whether ranks continue without those of lost launchers, and with those of new ones.
    pub fn continues_in_place(&self) -> bool {
        self.is_elastic && self.has_begun() && self.infos().iter().all(|info| info.elastic)
    }

    /// The number of this launcher.
    pub fn id(&self) -> Id {
        self.id
    }

    /// The nodes with which the attempt began, by node rank.
    pub fn first_infos(&self) -> impl Iterator<Item = &NodeInfo> {
        let infos = self.infos().iter();
        infos.filter(|info| info.joins_as.is_none())
    }

    /// The numbers of the first ranks of this node in the attempt.
    pub fn ranks(&self) -> std::ops::Range<usize> {
        self.attempt.ranks_of(self.id)
    }

    /// This node, with its host and ranks.
    pub fn name(&self) -> String {
        name_of(self.infos(), self.me)
    }

    /// Whether this launcher has joined an attempt that had begun.
    pub fn has_joined_late(&self) -> bool {
        let own = self.infos().get(self.me);
        own.is_some_and(|info| info.joins_as.is_some())
    }

    /// The store, through which this launcher reaches ranks.
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Whether the others continue without this launcher.
    pub fn was_lost(&self) -> bool {
        let may_be = self.is_elastic && !self.hosts_store();
        may_be
            && !self.has_left.load(Ordering::Relaxed)
            && (lock(&self.log).read()).is_ok_and(|all| all.why_lost(self.id).is_some())
    }

    /// This launcher leaves, for the reason in `verdict`, and the others continue. Returns the reason that holds.
    pub fn go(&self, verdict: &JobFailure) -> JobFailure {
        if self.has_left.swap(true, Ordering::Relaxed) {
            return verdict.clone();
        }
        let own = self.write(
            |all| all.lost_for(self.id, verdict),
            |all| all.why_lost(self.id),
        );
        // The host of the store may end now, and later requests of this launcher need not wait for the next host.
        if let Some(file) = &self.moves {
            self.store.move_with(file.clone(), END_LIMIT);
        }
        own.unwrap_or_else(|| verdict.clone())
    }

    /// The event that is written if this launcher is killed.
    pub fn killed_event(&self, why: JobFailure) -> LauncherEvent {
        LauncherEvent::Lost { id: self.id, why }
    }

    /// Whether this launcher hosts the store.
    pub fn hosts_store(&self) -> bool {
        self.server.is_some()
    }

    /// Whether the job can continue without this launcher: if it hosts the store, the store can move.
    pub fn may_go(&self) -> bool {
        let server = self.server.as_ref();
        server.is_none_or(|server| self.moves.is_some() && !server.followers().is_empty())
    }

    /// Waits a moment for the next event, and returns `question` of the launchers; `None`: the store has not answered.
    fn ask<T>(&self, question: impl FnOnce(&Launchers) -> T) -> Result<Option<T>> {
        match lock(&self.log).wait(SLICE) {
            Ok(launchers) => Ok(Some(question(launchers))),
            Err(error) if error.kind() == StoreKind::NoAnswer => Ok(None),
            Err(error) => Err(self.lost_store(error)),
        }
    }

    /// Writes `event`; false: the store has not answered.
    fn append(&self, event: impl Fn(&Launchers) -> Option<LauncherEvent>) -> Result<bool> {
        match lock(&self.log).append(event) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == StoreKind::NoAnswer => Ok(false),
            Err(error) => Err(self.lost_store(error)),
        }
    }

    /// Writes that all ranks of this launcher have succeeded; false: the store has not answered.
    pub fn done(&self) -> Result<bool> {
        let (id, attempt) = (self.id, self.attempt.number);
        self.append(|_| Some(LauncherEvent::Done { id, attempt }))
    }

    /// Why this attempt has ended, once it has; waits a moment for it. The code is 0 where all ranks have succeeded.
    pub fn end_of_attempt(&self) -> Result<Option<JobFailure>> {
        Ok(self.ask(|all| all.over().cloned())?.flatten())
    }

    /// Writes that the ranks of this launcher have ended after the attempt. If the attempt is not over in the log, writes that
    /// too, with the reason `why`. False: the store has not answered.
    pub fn ended(&self, why: &JobFailure) -> Result<bool> {
        // This launcher continues, so the store has its usual time again.
        self.store.set_response_timeout(self.beats.limit());
        let (id, attempt) = (self.id, self.attempt.number);
        Ok(self.append(|all| {
            all.over()
                .is_none()
                .then(|| all.over_for(attempt, why, true))?
        })? && self.append(|_| Some(LauncherEvent::Ended { id, attempt }))?)
    }

    /// What follows this attempt, once that is decided; waits a moment for it.
    pub fn next(&mut self) -> Result<Option<Next>> {
        let began = Instant::now();
        match self.look_for_next() {
            Err(error) if self.waits_for_place() => self.search(Some(error)),
            // The store has not answered.
            Ok(None) if self.waits_for_place() && began.elapsed() > ANSWER_LIMIT => {
                self.search(None)
            }
            found => {
                self.searches_until = None;
                found
            }
        }
    }

    fn look_for_next(&mut self) -> Result<Option<Next>> {
        let (is_member, id, last) = (self.has_begun(), self.id, self.attempt.number);
        let found = self.ask(|all| {
            let new = all.attempt().filter(|new| !is_member || new.number > last);
            let verdict = || {
                let good = all.over().filter(|why| why.code == 0 && !is_member);
                let lost = all.why_lost(id).filter(|_| !is_member);
                all.abort().or(good).or(lost).cloned().map(Next::End)
            };
            let next = match new {
                Some(new) if new.node_of(id).is_some() => Some(Next::Attempt(new.clone())),
                Some(_) if is_member => {
                    let code = ErrorKind::PeerLost.exit_code();
                    let what = "the other nodes continue without this one, which they had lost";
                    Some(Next::End(JobFailure::new(code, self.me, what)))
                }
                _ => verdict(),
            };
            (next, new.cloned())
        })?;
        let Some((next, running)) = found else {
            return Ok(None);
        };
        if let Some(running) = running.filter(|_| !is_member) {
            self.is_spare = true;
            let servers = running.infos.iter().filter_map(|info| info.standby);
            self.servers = servers.map(|at| at.to_string()).collect();
        }
        if next.is_some() || is_member {
            return Ok(next);
        }
        let at = match self.store.try_get(MOVED_KEY) {
            Err(error) if error.kind() == StoreKind::NoAnswer => None,
            answer => answer.map_err(|error| self.lost_store(error))?,
        };
        let at = at.map(|at| String::from_utf8_lossy(&at).into_owned());
        Ok(at.map(Next::Elsewhere))
    }

    /// Looks for the store after a spare launcher has lost it.
    fn search(&mut self, error: Option<crate::error::Error>) -> Result<Option<Next>> {
        let limit = 2 * standby::longest_election(self.host.limit());
        let until = *(self.searches_until).get_or_insert_with(|| Instant::now() + limit);
        let state = |at: &String| TcpStore::state_of(at, self.token.clone(), SLICE);
        let is_open = |at: &&String| matches!(state(at), ServerState::Open(_));
        match self.servers.iter().find(is_open) {
            Some(at) => Ok(Some(Next::Elsewhere(at.clone()))),
            None if Instant::now() >= until => error.map_or(Ok(None), Err),
            None => {
                std::thread::sleep(SLICE);
                Ok(None)
            }
        }
    }

    /// On the host of the store: the attempt that is to begin with [`begin`](Self::begin).
    pub fn to_begin(&self) -> Option<Attempt> {
        lock(&self.to_begin).take()
    }

    /// Removes the keys of the last attempt's ranks, and writes that the attempt has begun.
    pub fn begin(&self, attempt: &Attempt) -> Result<()> {
        if let Some(server) = &self.server {
            server.clear_all_but(LAUNCHERS);
        }
        let mut log = lock(&self.log);
        let written = insist(|| log.append(|all| all.begin_with(attempt)));
        written.map_err(|error| self.lost_store(error))
    }

    /// This launcher is part of the attempt.
    pub fn enter(&mut self, attempt: &Attempt) {
        self.attempt.clone_from(attempt);
        self.note_members();
        self.me = attempt.node_of(self.id).unwrap_or(self.me);
        if self.is_elastic {
            self.is_watched.store(false, Ordering::Relaxed);
            self.is_watched = Arc::new(AtomicBool::new(true));
            // The threads of the last attempt use other node ranks.
            self.beats = Arc::new(Heartbeats::new(attempt.infos.len()));
        }
        self.out_of_reach.store(false, Ordering::Relaxed);
    }

    /// The last launcher of `attempt` has joined it, unless another attempt has begun. Returns its name, on the host of the
    /// store.
    pub fn admit(&mut self, attempt: &Attempt, events: Sender<Event>) -> Result<Option<String>> {
        let joined = attempt.ids.last().copied().unwrap_or_default();
        if attempt.number != self.attempt.number || attempt.ids.len() <= self.attempt.ids.len() {
            return Ok(None);
        }
        self.attempt.clone_from(attempt);
        self.note_members();
        if !self.hosts_store() {
            return Ok(None);
        }
        self.beats.extend(attempt.infos.len());
        self.watch_again(events)?;
        Ok(Some(attempt.name_of(joined)))
    }

    /// On the host of the store, which perhaps `has_moved` here: starts the thread that decides when ranks start, and when the
    /// job has succeeded.
    pub fn coordinate(&self, rules: Rules, has_moved: bool) -> Result<()> {
        if self.server.is_none() {
            return Ok(());
        }
        let launchers = lock(&self.log).clone();
        let attempt = launchers.state().attempt();
        let joined = attempt.iter().flat_map(|attempt| attempt.launchers());
        let joined = joined.filter(|(_, info)| info.joins_as.is_some());
        let mut coordinator = Coordinator {
            store: self.store.clone(),
            roster: self.roster.clone(),
            id: self.id,
            joining: joined.map(|(id, _)| id).collect(),
            launchers,
            host: Host::new(rules),
            to_begin: self.to_begin.clone(),
            log: None,
            // Whether ranks wait is decided again.
            is_enough: has_moved,
        };
        let (stop, began) = (self.stop.clone(), Instant::now());
        spawn("attempts", move || coordinator.run(&stop, began))
    }

    /// This launcher starts no job, because the job already runs elsewhere. Returns its store.
    pub fn give_up(mut self) -> Option<Arc<TcpServer>> {
        self.stop.store(true, Ordering::Relaxed);
        self.server.take()
    }

    /// From now on the store may move to a launcher that keeps a copy. This one keeps a copy, unless it hosts the store.
    /// `file` has the address of the store once it has moved.
    pub fn stand_by(&mut self, file: PathBuf, events: Sender<Event>) -> Result<()> {
        let is_possible = self.standby.is_some() || self.server.is_some();
        if !is_possible || self.moves.is_some() || !self.continues_in_place() {
            return Ok(());
        }
        let host =
            insist(|| self.store.try_get(HOST_KEY)).map_err(|error| self.lost_store(error))?;
        lock(&self.roster).note_host(host);
        let limit = standby::longest_election(self.host.limit()) * 2;
        self.store.move_with(file.clone(), limit);
        self.moves = Some(file.clone());
        self.watch_again(events.clone())?;
        let Some(server) = self.standby.clone() else {
            return Ok(());
        };
        let standby = Standby {
            server,
            token: self.token.clone(),
            id: self.id,
            roster: self.roster.clone(),
            beats: self.host.clone(),
            file,
            stop: self.stop.clone(),
        };
        let (ends, standing_by) = std::sync::mpsc::channel();
        self.standing_by = Some(standing_by);
        spawn("standby", move || {
            let _ends: Sender<()> = ends;
            // If the main thread has ended, there is no receiver.
            standby.run(|event| drop(events.send(event)));
        })
    }

    /// The file with the address of the store, for the ranks of this launcher, if the store may move.
    pub fn moves(&self) -> Option<&Path> {
        self.moves.as_deref()
    }

    /// The store has moved. Returns the name of its new node, and its address.
    pub fn store_moved(
        &mut self,
        moved: Moved,
        rules: Rules,
        events: Sender<Event>,
    ) -> Result<(String, String)> {
        let host = moved.host;
        // The will was left in the old store. A thread may be about to leave one there.
        self.gone = Arc::default();
        self.out_of_reach.store(false, Ordering::Relaxed);
        if host == self.id {
            self.server = self.standby.take();
            self.beats.watch_again(self.infos().len());
            let mut log = lock(&self.log).clone();
            insist(|| log.read().map(drop)).map_err(|error| self.lost_store(error))?;
            if let Some(attempt) = log.state().attempt()
                && attempt.number == self.attempt.number
            {
                self.attempt.clone_from(attempt);
                self.beats.extend(attempt.infos.len());
            }
            *lock(&self.log) = log;
            // From here on no response waits for a launcher that is lost now.
            self.watch_again(events.clone())?;
            for id in moved.ended {
                let verdict = verdict_of_lost(&self.attempt.name_of(id), self.me, Duration::ZERO);
                let mut log = lock(&self.log);
                let written = insist(|| log.append(|all| all.lost_for(id, &verdict)));
                written.map_err(|error| self.lost_store(error))?;
            }
            self.coordinate(rules, true)?;
            let here = self.server.as_ref().map(|server| server.local_addr());
            let comes = self.infos().iter().any(|info| info.least.is_some());
            if let Some(here) = here.filter(|_| comes) {
                let (first, token, stop) =
                    (self.first.clone(), self.token.clone(), self.stop.clone());
                let here = here.to_string();
                spawn("redirect", move || point_here(&first, &token, &here, &stop))?;
            }
        }
        self.watch_again(events)?;
        let at = lock(&self.roster).address_of(host).unwrap_or_default();
        Ok((self.attempt.name_of(host), at))
    }

    /// Replaces the threads that watch the other launchers.
    fn watch_again(&mut self, events: Sender<Event>) -> Result<()> {
        self.is_watched.store(false, Ordering::Relaxed);
        self.is_watched = Arc::new(AtomicBool::new(true));
        self.start_watching(events)
    }

    /// Passes the launchers of the attempt to the threads that elect the host of the store.
    fn note_members(&self) {
        lock(&self.roster).enter(&self.attempt);
    }

    pub(super) fn lost_store(&self, error: phalanx_store::Error) -> crate::error::Error {
        lost_store(&name_of(self.infos(), self.node_of_host()), error)
    }
}

/// The thread of the store's host that carries decisions out.
struct Coordinator {
    store: Arc<TcpStore>,
    roster: Arc<Mutex<Roster>>,
    /// The number of this launcher.
    id: Id,
    launchers: LauncherLog,
    host: Host,
    to_begin: ToBegin,
    /// The log of this attempt's processes.
    log: Option<(u32, Log)>,
    /// Ranks that wait may continue once the ranks of all admitted launchers have joined.
    is_enough: bool,
    /// Launchers that were admitted, and whose ranks may not have joined yet.
    joining: Vec<Id>,
}

impl Coordinator {
    fn run(&mut self, stop: &AtomicBool, began: Instant) {
        while !stop.load(Ordering::Relaxed) {
            match self.launchers.wait(LOOK) {
                // This launcher leaves the job, and the store with it.
                Ok(all) if all.why_lost(self.id).is_some() => return,
                Ok(all) => {
                    lock(&self.roster).lost.extend(all.lost());
                    // Without its own store this launcher ends; its other threads report it.
                    if self.act(began.elapsed()).is_err() {
                        return;
                    }
                }
                // This process was suspended, or the machine is busy.
                Err(error) if error.kind() == StoreKind::NoAnswer => std::thread::sleep(LOOK),
                Err(_) => return,
            }
        }
    }

    fn attempt(&self) -> Attempt {
        let attempt = self.launchers.state().attempt();
        attempt.cloned().unwrap_or_default()
    }

    /// Reads or writes the log of the attempt's processes; does nothing before the attempt has begun.
    fn processes<T: Default>(
        &mut self,
        act: impl Fn(&mut Log) -> phalanx_store::Result<T>,
    ) -> phalanx_store::Result<T> {
        let Some(attempt) = self.launchers.state().attempt() else {
            return Ok(T::default());
        };
        let known = self.log.take();
        let known = known.filter(|(number, _)| *number == attempt.number);
        let new = || (attempt.number, Log::new(self.store.clone()));
        let (_, log) = self.log.insert(known.unwrap_or_else(new));
        insist(|| act(log))
    }

    /// Returns `question` of the processes of the attempt.
    fn ask<T: Default>(&mut self, question: impl Fn(&State) -> T) -> phalanx_store::Result<T> {
        self.processes(|log| log.read().map(&question))
    }

    /// Writes `event` into the log of the launchers.
    fn write(
        &mut self,
        event: impl Fn(&Launchers) -> Option<LauncherEvent>,
    ) -> phalanx_store::Result<()> {
        insist(|| self.launchers.append(&event))
    }

    /// Lets ranks that wait continue when a rank of each admitted launcher has joined.
    fn release(&mut self) -> phalanx_store::Result<()> {
        while let Some(id) = self.joining.last().copied().filter(|_| self.is_enough) {
            let numbers = self.numbers_of(id)?;
            if !self.ask(|state| state.continues_with(0, numbers.iter().copied()))? {
                return Ok(());
            }
            self.joining.pop();
        }
        if std::mem::take(&mut self.is_enough) {
            self.processes(|log| log.hold(None))?;
        }
        Ok(())
    }

    /// The numbers of the processes that launcher `id` has started in the attempt.
    fn numbers_of(&mut self, id: Id) -> phalanx_store::Result<Vec<usize>> {
        let attempt = self.attempt();
        let (ranks, world) = (attempt.ranks_of(id), attempt.world());
        self.ask(|state| {
            let later = state.started_by(world, id);
            let mut numbers: Vec<usize> = ranks.clone().chain(later).collect();
            // The ranks of an admitted launcher are in both.
            numbers.sort_unstable();
            numbers.dedup();
            numbers
        })
    }

    fn act(&mut self, now: Duration) -> phalanx_store::Result<()> {
        self.release()?;
        let waits = self.launchers.state().waiting().next().is_some();
        if self.host.rules.in_place && waits {
            // Processes can join only after the ranks have begun to train.
            self.host.can_grow = self.ask(State::can_grow)?;
        }
        loop {
            let Some(decision) = self.launchers.state().decide(&mut self.host, now) else {
                return Ok(());
            };
            match decision {
                Decision::Start(ids, restarts) => self.start(ids, restarts),
                Decision::Succeed => {
                    let good = JobFailure::new(0, 0, "all ranks have succeeded");
                    self.end_attempt(&good)?;
                }
                Decision::Fail(why) => self.abort(&why)?,
                Decision::Stop => self.stop()?,
                Decision::TooFew(there) => self.abort(&self.too_few(there))?,
                Decision::Lose(id) => self.lose(id)?,
                Decision::Admit(id) => self.admit(id)?,
                Decision::Hold(_) if !self.ask(State::can_grow)? => self.host.never_holds(),
                Decision::Hold(there) => {
                    self.is_enough = false;
                    let least = self.host.rules.least;
                    let why = format!("{there} of at least {least} nodes are present");
                    self.processes(|log| log.hold(Some(&why)))?;
                }
                Decision::Continue => self.is_enough = true,
            }
        }
    }

    fn stop(&mut self) -> phalanx_store::Result<()> {
        let code = ErrorKind::PeerLost.exit_code();
        let changes = self.launchers.state().changes();
        self.end_attempt(&JobFailure::new(code, 0, changes))
    }

    fn end_attempt(&mut self, why: &JobFailure) -> phalanx_store::Result<()> {
        let number = self.attempt().number;
        self.write(|all| {
            all.over()
                .is_none()
                .then(|| all.over_for(number, why, false))?
        })
    }

    fn abort(&mut self, why: &JobFailure) -> phalanx_store::Result<()> {
        self.write(|all| all.abort_for(why))
    }

    /// The ranks continue without those of launcher `id`, if a remaining rank has the state of the training.
    fn lose(&mut self, id: Id) -> phalanx_store::Result<()> {
        let own = self.numbers_of(id)?;
        self.joining.retain(|joining| *joining != id);
        let world = self.attempt().world();
        let (continues, is_over) = self.ask(|state| {
            let others = state.numbers(world).filter(|number| !own.contains(number));
            (state.continues_with(world, others), state.over().is_some())
        })?;
        let Some(why) = self.launchers.state().why_lost(id).cloned() else {
            return Ok(());
        };
        let can_join = self.attempt().infos.iter().any(|info| info.least.is_some());
        match (continues, is_over) {
            (true, _) => {
                for number in own {
                    self.processes(|log| log.lose(number, &why.message))?;
                }
                // Later failures have other causes.
                insist(|| self.store.delete(&gone_key(id)))?;
                let why = why.message;
                say::note(format_args!("{why}; the ranks of the other nodes continue"));
            }
            // Its ranks have ended with those of the others, or have stopped the training.
            (false, true) if why.code != ErrorKind::Interrupted.exit_code() => {}
            (false, false) if can_join => return self.stop(),
            (false, _) => return self.abort(&why),
        }
        self.write(|_| Some(LauncherEvent::Continued { id }))
    }

    /// Launcher `id` joins the attempt.
    fn admit(&mut self, id: Id) -> phalanx_store::Result<()> {
        let world = self.attempt().world();
        let info = self.launchers.state().info(id);
        let ranks = info.map_or(0, |info| info.local_ranks);
        let first = self.processes(|log| log.start(id, world, ranks))?;
        self.joining.push(id);
        let admitted = LauncherEvent::Admitted { id, first };
        self.write(|all| {
            let is_member = all.attempt().is_some_and(|all| all.node_of(id).is_some());
            (!is_member).then(|| admitted.clone())
        })
    }

    fn too_few(&self, there: usize) -> JobFailure {
        let rules = self.host.rules;
        let (least, seconds) = (rules.least, rules.join.as_secs());
        let code = ErrorKind::Timeout.exit_code();
        let message = format!("{there} of at least {least} nodes have joined within {seconds} s");
        let mut notes = vec![(
            "fix".to_owned(),
            "start more launchers, or wait longer with --rdzv-conf join_timeout=S".to_owned(),
        )];
        let changes = self.launchers.state().changes();
        if self.launchers.state().attempt().is_some() && !changes.is_empty() {
            notes.insert(0, ("since".to_owned(), changes));
        }
        JobFailure {
            notes,
            ..JobFailure::new(code, 0, message)
        }
    }

    fn start(&mut self, ids: Vec<Id>, restarts: u32) {
        let (all, most) = (self.launchers.state(), self.host.rules.max_restarts);
        let last = all.attempt();
        let why = match last {
            None => String::new(),
            Some(last) if last.restarts != restarts => {
                let why = all.over().map_or("", |why| &why.message);
                format!("restart {restarts} of {most}: {why}")
            }
            Some(_) => {
                let infos = ids.iter().filter_map(|id| all.info(*id));
                let ranks: usize = infos.map(|info| info.local_ranks).sum();
                let (ranks, nodes) = (plural(ranks, "rank"), plural(ids.len(), "node"));
                let changes = all.changes();
                format!("restart with {ranks} on {nodes}: {changes}")
            }
        };
        let attempt = Attempt {
            number: last.map_or(0, |last| last.number + 1),
            why,
            ids,
            restarts,
            ..Attempt::default()
        };
        self.joining.clear();
        self.is_enough = false;
        *lock(&self.to_begin) = Some(attempt);
    }
}

/// Asks again while the store does not answer: a decision is taken once.
pub fn insist<T>(ask: impl FnMut() -> phalanx_store::Result<T>) -> phalanx_store::Result<T> {
    let mut tries = 0..TRIES;
    phalanx_member::insist(|| tries.next().is_some(), ask)
}
