//! Attempts of a job on several nodes: why one has ended, and who starts the ranks again.
//!
//! | key                 | value                                             | written by                        |
//! |---------------------|---------------------------------------------------|-----------------------------------|
//! | `launch/over/A`     | why attempt A has ended (JSON); code 0: as it should | the first rank's launcher that failed, or node 0 |
//! | `launch/done/A/I`   | all ranks of launcher I have succeeded            | launcher I                        |
//! | `launch/ended/A/I`  | all ranks of launcher I have ended after the attempt | launcher I                     |
//! | `launch/attempt/A`  | the attempt (JSON)                                | node 0, once                      |
//! | `launch/joins/A/I`  | the same, with launcher I, which joins it         | node 0, once                      |
//! | `launch/lost/I`     | why launcher I is not there any more (JSON)       | itself, its guard, its will, or node 0 |
//!
//! All launchers stop their ranks when `over` is there. When all have said `ended`, a thread of node 0 decides
//! (`membership.rs`); node 0 then removes the keys of the ranks and writes the next attempt, or the verdict of the job,
//! which all others wait for. A verdict that no attempt can mend is written to `launch/abort` at once.
//!
//! Where launchers come and go (`--nnodes MIN:MAX`) they are numbered by arrival, and keys have that number; a node has
//! its place among the launchers of the attempt. A launcher that is not part of an attempt waits for the next one.
//!
//! Where ranks go on in place (`--elastic` too), the ranks of a launcher that is lost are reported so, and one that comes
//! starts ranks that join the others: the attempt goes on. Its list of launchers only grows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_member::{Log, State};
use phalanx_store::{ErrorKind as StoreKind, ServerState, Store, TcpServer, TcpStore};
use serde::{Deserialize, Serialize};

use super::info::{name_of, ranks_of};
use super::membership::{Decision, Id, Membership, Rules};
use super::pulse::{Heard, gone_key};
use super::standby::{self, HOST_KEY, MOVED_KEY, Moved, Roster, Standby, point_here};
use super::{
    ANSWER_LIMIT, ARRIVED_KEY, NodeInfo, Nodes, SLICE, decode, encode, lost_store, no_node,
    node_key, verdict_of_lost,
};
use crate::error::{ErrorKind, Result};
use crate::report::{ABORT_KEY, JobFailure};
use crate::{Event, format::plural, lock, say, spawn};

/// What launchers write begins so; everything else in the store belongs to ranks.
const LAUNCHERS: &str = "launch/";
/// How often node 0 looks what has happened.
const LOOK: Duration = Duration::from_millis(50);
/// For how many keys node 0 asks at once.
const ASKED_AT_ONCE: usize = 256;
/// How many times node 0 asks its own store again that does not answer.
const TRIES: u32 = 20;
/// How long a question for the end of an attempt waits.
const OVER_WAIT: Duration = Duration::from_millis(500);

/// One attempt, as all its launchers read it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// Its number, from 0.
    pub number: u32,
    /// Why it begins, in one line; empty for the first.
    pub why: String,
    /// Its launchers, by node rank.
    ids: Vec<Id>,
    infos: Vec<NodeInfo>,
    /// The launchers that are lost, by id.
    lost: Vec<Id>,
    /// The ranks' `MASTER_PORT` on node 0.
    pub master_port: u16,
    /// Failures before it.
    #[serde(default)]
    restarts: u32,
}

impl Attempt {
    /// The number and description of each of its launchers.
    pub(super) fn launchers(&self) -> impl Iterator<Item = (Id, &NodeInfo)> {
        self.ids.iter().copied().zip(&self.infos)
    }

    /// The node of launcher `id`, with its host and ranks.
    pub(super) fn name_of(&self, id: Id) -> String {
        let node = self.ids.iter().position(|other| *other == id);
        name_of(&self.infos, node.unwrap_or(0))
    }

    /// With how many ranks it began.
    fn world(&self) -> usize {
        let first = self.infos.iter().filter(|info| info.joins_as.is_none());
        first.map(|info| info.local_ranks).sum()
    }
}

fn count(store: &dyn Store, key: &str) -> phalanx_store::Result<usize> {
    Ok(store.try_get(key)?.map_or(0, |count| decimal(&count)))
}

/// A number in the store; 0 for anything else.
pub(super) fn decimal(count: &[u8]) -> usize {
    let count = std::str::from_utf8(count).ok();
    count.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// The attempt `number` as its last launcher has joined it, if one has that is not `known`; `get` gives the values of the
/// store.
pub(super) fn newest_of<T: AsRef<[u8]>>(
    number: u32,
    known: impl Fn(Id) -> bool,
    get: impl Fn(&str) -> Option<T>,
) -> Option<Attempt> {
    let arrived = get(ARRIVED_KEY).map_or(0, |count| decimal(count.as_ref()));
    let unknown = (1..=arrived).filter(|id| !known(*id));
    let joins = unknown.filter_map(|id| get(&of_attempt("joins", number, id)));
    let joins = joins.filter_map(|text| decode::<Attempt>(text.as_ref()));
    joins.max_by_key(|attempt| attempt.ids.len())
}

/// Whether the job has its verdict, or the attempt `number` has ended as it should; `get` gives the values of the store.
pub(super) fn is_decided<'a>(number: u32, get: impl Fn(&str) -> Option<&'a [u8]>) -> bool {
    let is_good = |bytes| verdict(bytes).code == 0;
    get(ABORT_KEY).is_some() || get(&over_key(number)).is_some_and(is_good)
}

/// What follows an attempt.
pub enum Next {
    /// Another one, of which this launcher is part.
    Attempt(Attempt),
    /// The job runs already, and its store is at this address.
    Elsewhere(String),
    /// The end of the job; the code is 0 where it did without this launcher.
    End(JobFailure),
}

/// The attempt that node 0 is to begin.
pub(super) type ToBegin = Arc<Mutex<Option<Attempt>>>;

impl Nodes {
    /// Whether another attempt may follow this one.
    pub fn can_restart(&self) -> bool {
        self.next.is_some()
    }

    /// The attempt that runs.
    fn attempt(&self) -> u32 {
        self.next.map_or(0, |next| next.saturating_sub(1))
    }

    /// Whether launchers may go, or come and go.
    pub fn is_elastic(&self) -> bool {
        self.is_elastic
    }

    /// Whether this launcher is part of an attempt.
    pub fn has_begun(&self) -> bool {
        !self.infos.is_empty()
    }

    /// Whether an attempt runs without this launcher.
    pub fn waits_for_place(&self) -> bool {
        !self.has_begun() && self.is_spare
    }

    fn note_servers(&mut self, attempt: &Attempt) {
        let servers = attempt.infos.iter().filter_map(|info| info.standby);
        self.servers = servers.map(|at| at.to_string()).collect();
    }

    /// Whether ranks go on without those of lost launchers, and with those of others.
    pub fn goes_on_in_place(&self) -> bool {
        self.is_elastic && self.has_begun() && self.infos.iter().all(|info| info.elastic)
    }

    /// The number of this launcher.
    pub fn id(&self) -> Id {
        self.id
    }

    /// The nodes with which the attempt began, by node rank.
    pub fn first_infos(&self) -> impl Iterator<Item = &NodeInfo> {
        self.infos.iter().filter(|info| info.joins_as.is_none())
    }

    /// The numbers of the first ranks of this node in the attempt.
    pub fn ranks(&self) -> std::ops::Range<usize> {
        ranks_of(&self.infos, self.me)
    }

    /// This node, with its host and ranks.
    pub fn name(&self) -> String {
        name_of(&self.infos, self.me)
    }

    /// Whether this launcher has joined an attempt that had begun.
    pub fn has_joined_late(&self) -> bool {
        let own = self.infos.get(self.me);
        own.is_some_and(|info| info.joins_as.is_some())
    }

    /// The store, for what ranks hear from this launcher.
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Whether the others go on without this launcher.
    pub fn was_lost(&self) -> bool {
        let is_told = || matches!(self.store.try_get(&self.death_key()), Ok(Some(_)));
        let may_be = self.is_elastic && !self.hosts_store();
        may_be && is_told() && !self.has_left.load(Ordering::Relaxed)
    }

    /// This launcher goes, for the reason in `verdict`, and the others go on.
    pub fn go(&self, verdict: &JobFailure) {
        self.has_left.store(true, Ordering::Relaxed);
        let key = self.death_key();
        self.reachable(|store| verdict.publish_at(store, &key));
    }

    /// Where the verdict is written if this launcher is killed.
    pub fn death_key(&self) -> String {
        self.death_key_of(self.id)
    }

    pub(super) fn death_key_of(&self, id: Id) -> String {
        death_key(id, self.is_elastic, self.goes_on_in_place())
    }

    /// Whether this launcher has the store.
    pub fn hosts_store(&self) -> bool {
        self.server.is_some()
    }

    /// Whether the job can go on without this launcher: the store moves, if it is here.
    pub fn may_go(&self) -> bool {
        let server = self.server.as_ref();
        server.is_none_or(|server| self.moves.is_some() && !server.followers().is_empty())
    }

    /// Where the verdict of this attempt is written; a final one ends the job.
    pub(super) fn verdict_key(&self, is_final: bool) -> String {
        match is_final || !self.can_restart() {
            true => ABORT_KEY.to_owned(),
            false => over_key(self.attempt()),
        }
    }

    /// Where this launcher says that its ranks have succeeded.
    pub(super) fn done_key(&self) -> String {
        match self.can_restart() {
            true => of_attempt("done", self.attempt(), self.id),
            false => format!("launch/done/{}", self.me),
        }
    }

    /// Starts the thread that waits for the end of this attempt, where another one may follow.
    pub fn await_end_of_attempt(&self, events: Sender<Event>) -> Result<()> {
        if !self.can_restart() {
            return Ok(());
        }
        let attempt = self.attempt();
        let (store, stop) = (self.store.clone(), self.stop.clone());
        spawn("attempt", move || {
            while !stop.load(Ordering::Relaxed) {
                match store.get(&over_key(attempt), OVER_WAIT) {
                    Ok(bytes) => {
                        let why = Box::new(verdict(&bytes));
                        // Where the main thread has ended, nobody listens.
                        return drop(events.send(Event::Over(attempt, why)));
                    }
                    Err(error)
                        if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {}
                    // The thread that waits for the verdict says so, unless the store has moved.
                    Err(_) => std::thread::sleep(SLICE),
                }
            }
        })
    }

    /// Why this attempt has ended, once it has; waits a moment for it. The code is 0 where all ranks have succeeded.
    pub fn end_of_attempt(&self) -> Result<Option<JobFailure>> {
        let key = over_key(self.attempt());
        Ok(self.look_at(&key, SLICE)?.map(|bytes| verdict(&bytes)))
    }

    /// Says that the ranks of this launcher have ended after the attempt, for `why` if nobody has said that yet; false:
    /// the store has not answered.
    pub fn ended(&self, why: &JobFailure) -> Result<bool> {
        // The last words were none.
        self.store.set_response_timeout(self.heard.limit());
        let key = over_key(self.attempt());
        match self.store.compare_set(&key, None, &encode(why)?) {
            Ok(_) => self.say(&of_attempt("ended", self.attempt(), self.id)),
            Err(error) if error.kind() == StoreKind::NoAnswer => Ok(false),
            Err(error) => Err(self.lost_store(error)),
        }
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
        let next = self.next.unwrap_or(0);
        let is_member = self.has_begun();
        if let Some(bytes) = self.look_at(&attempt_key(next), SLICE)? {
            let attempt = decode::<Attempt>(&bytes).ok_or_else(|| no_node(&attempt_key(next)))?;
            if attempt.ids.contains(&self.id) {
                return Ok(Some(Next::Attempt(attempt)));
            }
            if is_member {
                let verdict = JobFailure::new(
                    ErrorKind::PeerLost.exit_code(),
                    self.me,
                    "the other nodes continue without this one, which they had lost",
                );
                return Ok(Some(Next::End(verdict)));
            }
            self.next = Some(next + 1);
            self.is_spare = true;
            self.note_servers(&attempt);
            return Ok(None);
        }
        if !is_member && let Some(at) = self.look_at(MOVED_KEY, Duration::ZERO)? {
            return Ok(Some(Next::Elsewhere(
                String::from_utf8_lossy(&at).into_owned(),
            )));
        }
        if let Some(last) = next.checked_sub(1).filter(|_| !is_member) {
            let key = of_attempt("joins", last, self.id);
            if let Some(bytes) = self.look_at(&key, Duration::ZERO)? {
                let attempt = decode::<Attempt>(&bytes).ok_or_else(|| no_node(&key))?;
                return Ok(Some(Next::Attempt(attempt)));
            }
            let get = |key: &str| self.look_at(key, Duration::ZERO).ok().flatten();
            if let Some(attempt) = newest_of(last, |id| id == self.id, get) {
                self.note_servers(&attempt);
            }
        }
        let look = |key: &str| -> Result<Option<JobFailure>> {
            let verdict = self.look_at(key, Duration::ZERO)?;
            Ok(verdict.and_then(|bytes| decode(&bytes)))
        };
        let mut verdict = look(ABORT_KEY)?;
        if verdict.is_none() && !is_member {
            verdict = look(&over_key(self.attempt()))?.filter(|verdict| verdict.code == 0);
        }
        Ok(verdict.map(Next::End))
    }

    /// Looks where the store is that a launcher which waits for a place has lost.
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

    /// On node 0: the attempt that is to begin with [`begin`](Self::begin).
    pub fn to_begin(&self) -> Option<Attempt> {
        lock(&self.to_begin).take()
    }

    /// Removes what ranks have left in the store and lets all launchers start theirs.
    pub fn begin(&self, attempt: &Attempt) -> Result<()> {
        if let Some(server) = &self.server {
            server.clear_all_but(LAUNCHERS);
        }
        let written = (|| {
            let last = attempt.number.checked_sub(1);
            let text = encode(attempt).unwrap_or_default();
            let key = attempt_key(attempt.number);
            self.store.compare_set(&key, None, &text)?;
            // Not before: another host of the store would wait for them.
            for what in ["done", "ended"] {
                if let Some(last) = last {
                    let prefix = format!("launch/{what}/{last}/");
                    self.store.delete_prefix(&prefix)?;
                }
            }
            Ok(())
        })();
        written.map_err(|error| self.lost_store(error))
    }

    /// This launcher is part of the attempt.
    pub fn enter(&mut self, attempt: &Attempt) {
        self.next = Some(attempt.number + 1);
        self.lost.clone_from(&attempt.lost);
        self.infos.clone_from(&attempt.infos);
        self.ids.clone_from(&attempt.ids);
        self.note_members(attempt);
        let node = self.ids.iter().position(|id| *id == self.id);
        self.me = node.unwrap_or(self.me);
        if self.is_elastic {
            self.is_watched.store(false, Ordering::Relaxed);
            self.is_watched = Arc::new(AtomicBool::new(true));
            // The threads of the last attempt count by other places.
            self.heard = Arc::new(Heard::new(self.infos.len()));
        }
        self.out_of_reach.store(false, Ordering::Relaxed);
    }

    /// Whether `attempt` is the one that runs.
    pub fn runs(&self, attempt: &Attempt) -> bool {
        self.next == Some(attempt.number + 1)
    }

    /// On node 0: the last launcher of `attempt` could not join it, for the reason in `why`.
    pub fn refuse_last(&self, attempt: &Attempt, why: &JobFailure) {
        if let Some(id) = attempt.ids.last() {
            // Without its own store node 0 is at an end.
            let _ = insist(|| why.publish_at(&self.store, &self.death_key_of(*id)));
        }
    }

    /// On node 0: the last launcher of `attempt` may start its ranks. Its name.
    pub fn admit(&mut self, attempt: &Attempt, events: Sender<Event>) -> Result<String> {
        self.infos.clone_from(&attempt.infos);
        self.ids.clone_from(&attempt.ids);
        self.lost.clone_from(&attempt.lost);
        self.note_members(attempt);
        self.heard.extend(self.infos.len());
        self.watch_anew(events)?;
        let node = attempt.ids.len().saturating_sub(1);
        let id = attempt.ids.last().copied().unwrap_or_default();
        let key = of_attempt("joins", attempt.number, id);
        let text = encode(attempt)?;
        let written = insist(|| self.store.set(&key, &text));
        written.map_err(|error| self.lost_store(error))?;
        Ok(name_of(&attempt.infos, node))
    }

    /// On the host of the store of a job whose nodes may start again: starts the thread that decides when they do.
    pub fn coordinate(&self, rules: Rules, events: Sender<Event>) -> Result<()> {
        if !self.can_restart() || self.server.is_none() {
            return Ok(());
        }
        let has_begun = self.has_begun();
        let machine = match has_begun {
            false => Membership::forming(rules, Duration::ZERO),
            true => Membership::running(rules),
        };
        self.start_coordinator(Coordinator {
            next: self.next.unwrap_or(0),
            infos: self.infos.iter().cloned().enumerate().collect(),
            takes_others: !has_begun,
            arriving: BTreeSet::from([0]),
            running: has_begun.then(|| self.running()),
            log: has_begun.then(|| Log::new(self.store.clone())),
            ..self.coordinator(machine, rules, events)
        })
    }

    /// The attempt that runs, with those that have joined it, and the number of the next one, as the store says.
    fn stored_attempt(&self) -> (Attempt, u32) {
        let get = |key: &str| insist(|| self.store.try_get(key)).ok().flatten();
        let mut running = self.running();
        let mut next = self.next.unwrap_or(0);
        while let Some(attempt) = get(&attempt_key(next)).and_then(|bytes| decode(&bytes)) {
            running = attempt;
            next += 1;
        }
        let newest = newest_of(running.number, |id| running.ids.contains(&id), get);
        (newest.unwrap_or(running), next)
    }

    /// As [`coordinate`](Self::coordinate), where the store has moved to this launcher in the course of `running`.
    fn coordinate_on(
        &self,
        (running, next): (Attempt, u32),
        told: BTreeSet<Id>,
        arrived: Id,
        rules: Rules,
        events: Sender<Event>,
    ) -> Result<()> {
        let infos = running.launchers().map(|(id, info)| {
            let joins_as = None;
            let info = info.clone();
            (id, NodeInfo { joins_as, ..info })
        });
        let joined = running.launchers();
        let joined = joined.filter(|(_, info)| info.joins_as.is_some());
        let machine = Membership::resumed(rules, &running.ids, running.restarts);
        self.start_coordinator(Coordinator {
            next,
            restarts: running.restarts,
            infos: infos.collect(),
            takes_others: running.infos.iter().any(|info| info.least.is_some()),
            told,
            // Those that waited for a place end with the last host. Who has come since, even before this launcher has
            // heard of the move, waits here.
            arrived,
            joining: joined.map(|(id, _)| id).collect(),
            // If they wait, that is decided anew.
            is_enough: true,
            running: Some(running),
            log: Some(Log::new(self.store.clone())),
            ..self.coordinator(machine, rules, events)
        })
    }

    /// One that knows of no launcher and no attempt yet.
    fn coordinator(&self, machine: Membership, rules: Rules, events: Sender<Event>) -> Coordinator {
        Coordinator {
            store: self.store.clone(),
            roster: self.roster.clone(),
            id: self.id,
            machine,
            rules,
            next: 0,
            restarts: 0,
            infos: BTreeMap::new(),
            is_elastic: self.is_elastic,
            takes_others: false,
            told: BTreeSet::new(),
            arrived: 0,
            arriving: BTreeSet::new(),
            changes: Vec::new(),
            to_begin: self.to_begin.clone(),
            running: None,
            log: None,
            is_enough: false,
            joining: Vec::new(),
            events,
        }
    }

    /// This launcher starts no job, as there is one. Its store.
    pub fn give_up(mut self) -> Option<Arc<TcpServer>> {
        self.stop.store(true, Ordering::Relaxed);
        self.server.take()
    }

    fn start_coordinator(&self, mut coordinator: Coordinator) -> Result<()> {
        let (stop, began) = (self.stop.clone(), Instant::now());
        spawn("attempts", move || coordinator.run(&stop, began))
    }

    /// From now on the store may move: to a launcher that follows it, which this one does unless it has it. `file` is to
    /// say where the store is, once it has moved.
    pub fn stand_by(&mut self, file: PathBuf, events: Sender<Event>) -> Result<()> {
        let is_possible = self.standby.is_some() || self.server.is_some();
        if !is_possible || self.moves.is_some() || !self.goes_on_in_place() {
            return Ok(());
        }
        let host =
            insist(|| self.store.try_get(HOST_KEY)).map_err(|error| self.lost_store(error))?;
        self.last_host = lock(&self.roster).note_host(host);
        let limit = standby::longest_election(self.host.limit()) * 2;
        self.store.move_with(file.clone(), limit);
        self.moves = Some(file.clone());
        self.watch_anew(events.clone())?;
        let Some(server) = self.standby.clone() else {
            return Ok(());
        };
        let standby = Standby {
            server,
            token: self.token.clone(),
            id: self.id,
            roster: self.roster.clone(),
            heard: self.host.clone(),
            file,
            stop: self.stop.clone(),
        };
        let (ends, standing_by) = std::sync::mpsc::channel();
        self.standing_by = Some(standing_by);
        spawn("standby", move || {
            let _ends: Sender<()> = ends;
            // Where the main thread has ended, nobody listens.
            standby.run(|event| drop(events.send(event)));
        })
    }

    /// Where the ranks of this launcher read where the store is, if it may move.
    pub fn moves(&self) -> Option<&Path> {
        self.moves.as_deref()
    }

    /// The store has moved. Returns the name of the node where it is, and its address.
    pub fn store_moved(
        &mut self,
        moved: Moved,
        rules: Rules,
        events: Sender<Event>,
    ) -> Result<(String, String)> {
        let host = moved.host;
        let old = std::mem::replace(&mut self.last_host, host);
        // Its will was left at the old place. A thread may be about to leave one there.
        self.gone = Arc::default();
        self.out_of_reach.store(false, Ordering::Relaxed);
        if host == self.id {
            self.server = self.standby.take();
            let told: BTreeSet<Id> = lock(&self.roster).lost.clone();
            self.lost = told.iter().copied().chain([old]).collect();
            self.heard.watch_again(self.infos.len());
            // From here on nothing is held for a launcher that is lost now.
            self.watch_anew(events.clone())?;
            let (running, next) = self.stored_attempt();
            if running.number == self.attempt() {
                self.infos.clone_from(&running.infos);
                self.ids.clone_from(&running.ids);
                self.heard.extend(self.infos.len());
            }
            for id in moved.ended {
                let verdict = verdict_of_lost(&running.name_of(id), self.me, Duration::ZERO);
                let told = insist(|| verdict.publish_at(&self.store, &lost_key(id)));
                told.map_err(|error| self.lost_store(error))?;
            }
            self.coordinate_on((running, next), told, moved.arrived, rules, events.clone())?;
            let here = self.server.as_ref().map(|server| server.local_addr());
            let comes = self.infos.iter().any(|info| info.least.is_some());
            if let Some(here) = here.filter(|_| comes) {
                let (first, token, stop) =
                    (self.first.clone(), self.token.clone(), self.stop.clone());
                let here = here.to_string();
                spawn("redirect", move || point_here(&first, &token, &here, &stop))?;
            }
        }
        self.watch_anew(events)?;
        let at = lock(&self.roster).address_of(host).unwrap_or_default();
        let node = self.ids.iter().position(|id| *id == host);
        let name = node.map_or_else(
            || "another node".to_owned(),
            |node| name_of(&self.infos, node),
        );
        Ok((name, at))
    }

    /// Starts the threads that watch, in place of those that do.
    fn watch_anew(&mut self, events: Sender<Event>) -> Result<()> {
        self.is_watched.store(false, Ordering::Relaxed);
        self.is_watched = Arc::new(AtomicBool::new(true));
        self.start_watching(events)
    }

    /// The attempt that runs, as this launcher knows it.
    pub(super) fn running(&self) -> Attempt {
        Attempt {
            number: self.attempt(),
            why: String::new(),
            ids: self.ids.clone(),
            infos: self.infos.clone(),
            lost: self.lost.clone(),
            master_port: 0,
            restarts: 0,
        }
    }

    pub(super) fn note_members(&self, attempt: &Attempt) {
        lock(&self.roster).enter(attempt, &self.first);
    }

    fn look_at(&self, key: &str, wait: Duration) -> Result<Option<Vec<u8>>> {
        match self.store.get(key, wait) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {
                Ok(None)
            }
            Err(error) => Err(self.lost_store(error)),
        }
    }

    /// Sets a key; false: the store has not answered.
    pub(super) fn say(&self, key: &str) -> Result<bool> {
        match self.store.set(key, b"") {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == StoreKind::NoAnswer => Ok(false),
            Err(error) => Err(self.lost_store(error)),
        }
    }

    pub(super) fn lost_store(&self, error: phalanx_store::Error) -> crate::error::Error {
        lost_store(&name_of(&self.infos, self.node_of_host()), error)
    }
}

/// The thread of the store's host that tells the machine what is in the store, and does what it decides.
struct Coordinator {
    store: Arc<TcpStore>,
    roster: Arc<Mutex<Roster>>,
    /// The number of this launcher.
    id: Id,
    machine: Membership,
    rules: Rules,
    /// The number of the next attempt.
    next: u32,
    /// Failures before this attempt.
    restarts: u32,
    /// Of all launchers that were there, by number.
    infos: BTreeMap<Id, NodeInfo>,
    /// Launchers may go.
    is_elastic: bool,
    /// Others may come.
    takes_others: bool,
    /// Lost launchers of which the last host of the store has told.
    told: BTreeSet<Id>,
    /// The highest number of a launcher.
    arrived: Id,
    /// Launchers that have a number and are not there yet.
    arriving: BTreeSet<Id>,
    /// Who has come and gone since the last attempt began.
    changes: Vec<String>,
    to_begin: ToBegin,
    /// The attempt that was begun last, with those that have joined it.
    running: Option<Attempt>,
    /// What has happened to its processes, once it has begun.
    log: Option<Log>,
    /// The ranks that wait may go on once those that are joining have joined.
    is_enough: bool,
    /// Launchers that were admitted, and whose ranks may not have joined yet.
    joining: Vec<usize>,
    events: Sender<Event>,
}

impl Coordinator {
    fn run(&mut self, stop: &AtomicBool, began: Instant) {
        while !stop.load(Ordering::Relaxed) {
            match self.look() {
                Ok(()) => {
                    // Without its own store node 0 is at an end, as its other threads say.
                    if self.act(began.elapsed()).is_err() {
                        return;
                    }
                }
                // This process was stopped, or the machine is busy.
                Err(error) if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {}
                Err(_) => return,
            }
            std::thread::sleep(LOOK);
        }
    }

    fn attempt(&self) -> u32 {
        self.next.saturating_sub(1)
    }

    fn look(&mut self) -> phalanx_store::Result<()> {
        let (attempt, is_running) = (self.attempt(), self.machine.is_running());
        let begins = is_running && self.log.is_none();
        if begins && self.store.try_get(&attempt_key(attempt))?.is_some() {
            self.log = Some(Log::new(self.store.clone()));
        }
        if is_running && self.store.try_get(&over_key(attempt))?.is_some() {
            self.machine.failed();
        }
        let what = if is_running { "done" } else { "ended" };
        let ids: Vec<Id> = self.machine.ids().collect();
        for id in self.present(&ids, |id| of_attempt(what, attempt, id))? {
            match is_running {
                true => self.machine.done(id),
                false => self.machine.ended(id),
            }
        }
        if self.is_elastic {
            self.look_who_goes(&ids)?;
        }
        if self.takes_others {
            self.look_who_comes()?;
        }
        Ok(())
    }

    fn look_who_goes(&mut self, ids: &[Id]) -> phalanx_store::Result<()> {
        let others: Vec<Id> = ids.iter().copied().filter(|id| *id != self.id).collect();
        let in_place = self.rules.in_place;
        for id in self.present(&others, |id| death_key(id, true, in_place))? {
            let why = self.store.try_get(&death_key(id, true, in_place))?;
            self.changes.push(verdict(&why.unwrap_or_default()).message);
            lock(&self.roster).lost.insert(id);
            self.machine.lost(id);
        }
        Ok(())
    }

    fn look_who_comes(&mut self) -> phalanx_store::Result<()> {
        let arrived = arrived(&self.store)?;
        self.arriving.extend(self.arrived + 1..=arrived);
        self.arrived = arrived;
        // Ranks that have not begun cannot take in others yet.
        if self.rules.in_place && self.machine.is_running() && !self.ask(State::takes_others)? {
            return Ok(());
        }
        let arriving: Vec<Id> = self.arriving.iter().copied().collect();
        for id in self.present(&arriving, node_key)? {
            let card = self.store.try_get(&node_key(id))?;
            self.arriving.remove(&id);
            let Some(info) = card.and_then(|card| decode::<NodeInfo>(&card)) else {
                continue;
            };
            let (host, pid) = (&info.host, info.pid);
            self.changes
                .push(format!("a node has joined (host {host}, pid {pid})"));
            self.infos.insert(id, info);
            self.machine.arrived(id);
        }
        Ok(())
    }

    /// What `question` makes of the processes of the attempt; nothing before it has begun.
    fn ask<T: Default>(&mut self, question: impl Fn(&State) -> T) -> phalanx_store::Result<T> {
        let Some(log) = &mut self.log else {
            return Ok(T::default());
        };
        insist(|| log.read().map(&question))
    }

    /// Writes what `change` does into the log of the attempt.
    fn tell(
        &mut self,
        change: impl Fn(&mut Log) -> phalanx_store::Result<()>,
    ) -> phalanx_store::Result<()> {
        let log = self.log.as_mut();
        log.map_or(Ok(()), |log| insist(|| change(log)))
    }

    /// Lets ranks that wait continue when those of each admitted launcher have joined.
    fn release(&mut self) -> phalanx_store::Result<()> {
        while let Some(id) = self.joining.last().copied().filter(|_| self.is_enough) {
            let numbers = self.numbers_of(id)?;
            if !self.ask(|state| state.continues_with(0, numbers.iter().copied()))? {
                return Ok(());
            }
            self.joining.pop();
        }
        if std::mem::take(&mut self.is_enough) {
            self.tell(|log| log.hold(None))?;
        }
        Ok(())
    }

    /// The number of ranks with which the attempt began.
    fn world(&self) -> usize {
        self.running.as_ref().map_or(0, Attempt::world)
    }

    /// The numbers of the processes that launcher `id` has started in the attempt.
    fn numbers_of(&mut self, id: Id) -> phalanx_store::Result<Vec<usize>> {
        let Some(running) = &self.running else {
            return Ok(Vec::new());
        };
        let node = running.ids.iter().position(|other| *other == id);
        let ranks = node.map_or(0..0, |node| ranks_of(&running.infos, node));
        let world = running.world();
        self.ask(|state| {
            let later = state.started_by(world, id);
            let mut numbers: Vec<usize> = ranks.clone().chain(later).collect();
            // Those of a launcher that was admitted are in both.
            numbers.sort_unstable();
            numbers.dedup();
            numbers
        })
    }

    fn act(&mut self, now: Duration) -> phalanx_store::Result<()> {
        self.release()?;
        while let Some(decision) = self.machine.decide(now) {
            match decision {
                Decision::Start(ids) => self.start(ids)?,
                Decision::Succeed => {
                    let good = JobFailure::new(0, 0, "all ranks have succeeded");
                    self.publish(&good, &over_key(self.attempt()))?;
                }
                Decision::Fail => {
                    self.publish(&self.why()?, ABORT_KEY)?;
                }
                Decision::Stop => {
                    let code = ErrorKind::PeerLost.exit_code();
                    let why = JobFailure::new(code, 0, self.changes.join("; "));
                    if self.publish(&why, &over_key(self.attempt()))? != why {
                        self.machine.failed();
                    }
                }
                Decision::TooFew(there) => {
                    self.publish(&self.too_few(there), ABORT_KEY)?;
                }
                Decision::Lose(id) => self.lose(id)?,
                Decision::Admit(id) => self.admit(id)?,
                Decision::Hold(_) if !self.ask(State::takes_others)? => {
                    self.machine.never_holds();
                }
                Decision::Hold(there) => {
                    self.is_enough = false;
                    let least = self.rules.least;
                    let why = format!("{there} of at least {least} nodes are there");
                    self.tell(|log| log.hold(Some(&why)))?;
                }
                Decision::GoOn => self.is_enough = true,
            }
        }
        Ok(())
    }

    /// The ranks go on without those of launcher `id`, if one that is left has what is needed.
    fn lose(&mut self, id: Id) -> phalanx_store::Result<()> {
        let own = self.numbers_of(id)?;
        self.joining.retain(|joining| *joining != id);
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        running.lost.push(id);
        let world = self.world();
        let (goes_on, is_over) = self.ask(|state| {
            let others = state.numbers(world).filter(|number| !own.contains(number));
            (state.continues_with(world, others), state.over().is_some())
        })?;
        let why = insist(|| self.store.try_get(&lost_key(id)))?;
        let why = verdict(&why.unwrap_or_default());
        if !goes_on && is_over {
            // Its ranks have ended with those of the others, or have stopped the training.
            if why.code == ErrorKind::Interrupted.exit_code() {
                self.machine.end_now();
                self.publish(&why, ABORT_KEY)?;
            }
            return Ok(());
        }
        match (goes_on, self.takes_others) {
            (true, _) => {}
            (false, true) => {
                self.machine.cannot_go_on();
                return Ok(());
            }
            (false, false) => {
                self.machine.end_now();
                return self.publish(&why, ABORT_KEY).map(drop);
            }
        }
        let why = why.message;
        for number in own {
            self.tell(|log| log.lose(number, &why))?;
        }
        // It is no reason for what fails later.
        insist(|| self.store.delete(&gone_key(id)))?;
        self.changes.clear();
        if !self.told.contains(&id) {
            say::note(format_args!("{why}; the ranks of the other nodes continue"));
        }
        Ok(())
    }

    /// Launcher `id` joins the attempt.
    fn admit(&mut self, id: Id) -> phalanx_store::Result<()> {
        let world = self.world();
        let (Some(running), Some(info), Some(log)) =
            (&mut self.running, self.infos.get(&id), &mut self.log)
        else {
            return Ok(());
        };
        let first = insist(|| log.start(id, world, info.local_ranks))?;
        self.joining.push(id);
        running.ids.push(id);
        running.infos.push(NodeInfo {
            joins_as: Some(first),
            ..info.clone()
        });
        self.changes.clear();
        let event = Event::Admit(Box::new(running.clone()));
        // Where the main thread has ended, the job has.
        let _ = self.events.send(event);
        Ok(())
    }

    /// Why the attempt has ended.
    fn why(&self) -> phalanx_store::Result<JobFailure> {
        let key = over_key(self.attempt());
        let bytes = insist(|| self.store.try_get(&key))?;
        Ok(verdict(&bytes.unwrap_or_default()))
    }

    fn publish(&self, verdict: &JobFailure, key: &str) -> phalanx_store::Result<JobFailure> {
        insist(|| verdict.publish_at(&self.store, key))
    }

    fn too_few(&self, there: usize) -> JobFailure {
        let (least, seconds) = (self.rules.least, self.rules.join.as_secs());
        let code = ErrorKind::Timeout.exit_code();
        let message = format!("{there} of at least {least} nodes have joined within {seconds} s");
        let mut notes = vec![(
            "fix".to_owned(),
            "start more launchers, or wait longer with --rdzv-conf join_timeout=S".to_owned(),
        )];
        if self.next > 0 && !self.changes.is_empty() {
            notes.insert(0, ("since".to_owned(), self.changes.join("; ")));
        }
        JobFailure {
            notes,
            ..JobFailure::new(code, 0, message)
        }
    }

    fn start(&mut self, ids: Vec<Id>) -> phalanx_store::Result<()> {
        let changes = std::mem::take(&mut self.changes).join("; ");
        let (restarts, most) = (self.machine.restarts(), self.rules.max_restarts);
        let infos = ids.iter().filter_map(|id| self.infos.get(id).cloned());
        let infos: Vec<NodeInfo> = infos.collect();
        let why = if self.next == 0 {
            String::new()
        } else if std::mem::replace(&mut self.restarts, restarts) != restarts {
            format!("restart {restarts} of {most}: {}", self.why()?.message)
        } else {
            let ranks: usize = infos.iter().map(|info| info.local_ranks).sum();
            let (ranks, nodes) = (plural(ranks, "rank"), plural(ids.len(), "node"));
            format!("restart with {ranks} on {nodes}: {changes}")
        };
        let attempt = Attempt {
            number: self.next,
            why,
            infos,
            ids,
            lost: Vec::new(),
            master_port: 0,
            restarts,
        };
        self.joining.clear();
        self.is_enough = false;
        self.log = None;
        self.running = Some(attempt.clone());
        *lock(&self.to_begin) = Some(attempt);
        self.next += 1;
        Ok(())
    }

    /// Those of `ids` whose key is there.
    fn present(&self, ids: &[Id], key: impl Fn(Id) -> String) -> phalanx_store::Result<Vec<Id>> {
        let keys: Vec<String> = ids.iter().map(|id| key(*id)).collect();
        let asked: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut missing = Vec::new();
        for asked in asked.chunks(ASKED_AT_ONCE) {
            match self.store.wait(asked, Duration::ZERO) {
                Ok(()) => {}
                Err(error) if error.kind() == StoreKind::Timeout => {
                    missing.extend_from_slice(error.missing_keys());
                }
                Err(error) => return Err(error),
            }
        }
        let found = ids.iter().zip(&keys);
        let found = found.filter(|(_, key)| !missing.contains(key));
        Ok(found.map(|(id, _)| *id).collect())
    }
}

/// Asks until there is an answer: a decision is taken once.
pub fn insist<T>(mut ask: impl FnMut() -> phalanx_store::Result<T>) -> phalanx_store::Result<T> {
    let mut tries = 0;
    loop {
        match ask() {
            Err(error) if error.kind() == StoreKind::NoAnswer && tries < TRIES => tries += 1,
            answer => return answer,
        }
    }
}

fn over_key(attempt: u32) -> String {
    format!("launch/over/{attempt}")
}

/// Where the verdict of a launcher that has died is written: without it the job ends, unless launchers come and go, and
/// without node 0 unless ranks go on in place.
pub(super) fn death_key(id: Id, is_elastic: bool, in_place: bool) -> String {
    match is_elastic && (id != 0 || in_place) {
        true => lost_key(id),
        false => ABORT_KEY.to_owned(),
    }
}

/// See [`lost_key`].
pub(super) const LOST: &str = "launch/lost/";

/// Where it is written that the others go on without launcher `id`.
pub(super) fn lost_key(id: Id) -> String {
    format!("{LOST}{id}")
}

/// The highest number of a launcher.
pub(super) fn arrived(store: &TcpStore) -> phalanx_store::Result<Id> {
    count(store, ARRIVED_KEY)
}

pub(super) fn attempt_key(attempt: u32) -> String {
    format!("launch/attempt/{attempt}")
}

fn of_attempt(what: &str, attempt: u32, id: Id) -> String {
    format!("launch/{what}/{attempt}/{id}")
}

fn verdict(bytes: &[u8]) -> JobFailure {
    decode(bytes).unwrap_or_else(|| {
        let code = ErrorKind::PeerLost.exit_code();
        JobFailure::new(code, 0, "another node failed and gave no reason")
    })
}
