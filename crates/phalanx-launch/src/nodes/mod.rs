//! A job of several nodes: their launchers meet in the store of node 0, agree on the
//! nodes and ranks of the job, and share the verdict: why the job ended.
//!
//! | key               | value                          | written by            |
//! |-------------------|--------------------------------|-----------------------|
//! | `launch/log/K`    | what has happened to launchers, and what was decided (`membership.rs`) | launchers |
//! | `launch/arrived`  | a count that rises             | launchers without a number, to get one |
//! | `launch/refused`  | why a launcher did not join, for the messages of those that wait | the last one that was refused |
//! | `launch/beat/R`   | nothing                        | launcher R, every 200 ms; node 0 removes it when it has seen it |
//! | `launch/left/R`   | launcher R does not need the store any more | launcher R |
//! | `launch/gone/R`   | for how many seconds launcher R has been silent, or `closed` | node 0, the store (launcher R's will) |
//!
//! Node 0 is the node whose launcher hosts the store. With `--elastic`, another launcher may host it later (`standby.rs`).
//!
//! When a launcher dies, its guard writes that into the log. Before there is a guard, the
//! store writes it (the launcher's will). When a host vanishes or is cut off, node 0 misses its
//! heartbeats (`pulse.rs`, `silence.rs`). When node 0 or its store is lost, the others get no more answers.
//!
//! Ranks may notice a lost node sooner than launchers do. Their error is only an echo of the cause, so the verdict
//! names the lost node instead ([`Nodes::lost`]).

mod attempts;
mod info;
mod join;
mod membership;
mod pulse;
mod silence;
mod standby;
mod store;

pub use attempts::{Next, insist};
pub use info::NodeInfo;
pub use join::join;
pub use membership::{Attempt, LauncherEvent, LauncherLog, Rules};
pub use standby::Moved;
pub use store::{NodeStore, host_locally, meeting_store};

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, TcpStore, Will};
use phalanx_wire::Token;

use self::info::name_of;
use self::membership::Launchers;
use self::pulse::{Heartbeats, Pulse, SILENT, gone_key};
use self::standby::{Quorum, Roster};
use super::Event;
use super::report::JobFailure;
use crate::error::{Error, ErrorKind, Result};
use crate::{lock, say, spawn};

/// How often blocking steps check for a Ctrl-C.
const SLICE: Duration = Duration::from_millis(200);
/// How long one request for the verdict waits.
const VERDICT_WAIT: Duration = Duration::from_millis(500);
/// How long node 0 keeps the store after the verdict is decided, so that every launcher can read it.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// How long the store may take to answer while the nodes meet.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long the store may take to answer once the end of this node is decided: the store
/// may be out of reach, and the launcher must end all the same.
const END_LIMIT: Duration = Duration::from_millis(500);

/// When a wait is reported for the first time; then again each time it has doubled.
const QUIET: Duration = Duration::from_secs(2);

/// The nodes of the job, after all have joined.
pub struct Nodes {
    store: Arc<TcpStore>,
    /// The store, on the launcher that hosts it.
    server: Option<Arc<TcpServer>>,
    /// On another launcher, the closed server to which the store can move.
    standby: Option<Arc<TcpServer>>,
    /// Disconnected when the thread that follows the host of the store has ended.
    standing_by: Option<Receiver<()>>,
    /// The launchers of the attempt, and which of them hosts the store.
    roster: Arc<Mutex<Roster>>,
    /// The address of node 0.
    first: String,
    token: Token,
    /// The file with the address of the store, for this launcher and its ranks, if the store may move.
    moves: Option<PathBuf>,
    /// The log of the launchers.
    log: Mutex<LauncherLog>,
    /// The number of this launcher: the node rank, unless launchers join and leave.
    id: usize,
    me: usize,
    /// The attempt of which this launcher is part, or was last.
    attempt: Attempt,
    stop: Arc<AtomicBool>,
    /// Ends the threads that watch the launchers of this attempt.
    is_watched: Arc<AtomicBool>,
    beats: Arc<Heartbeats>,
    host: Arc<Heartbeats>,
    /// The will by which the others learn that the connection of this launcher to the store has ended.
    gone: Arc<Mutex<Option<Will>>>,
    /// The store did not answer after the end was decided.
    out_of_reach: AtomicBool,
    /// The verdict that the store publishes if this launcher is killed before it has a guard.
    will: Mutex<Option<Will>>,
    /// Another attempt may follow.
    can_restart: bool,
    /// Launchers may leave, or join and leave.
    is_elastic: bool,
    /// This launcher has announced that it leaves.
    has_left: Arc<AtomicBool>,
    to_begin: attempts::ToBegin,
    /// An attempt runs without this launcher, which waits as a spare.
    is_spare: bool,
    /// For a spare: the addresses at which it looks for the store when it loses it, and until when.
    servers: Vec<String>,
    searches_until: Option<Instant>,
}

impl Drop for Nodes {
    /// This launcher ends without a guard. If it could not publish why, the others learn it from its will.
    fn drop(&mut self) {
        let will = self.will.get_mut().unwrap_or_else(PoisonError::into_inner);
        will.take().into_iter().for_each(Will::execute);
    }
}

impl Nodes {
    /// The guard has the verdict now: from here on a broken connection to the store
    /// does not mean that this launcher is dead.
    pub fn is_guarded(&self) {
        let mut will = lock(&self.will);
        drop(will.take());
    }

    /// The number of this node.
    pub fn node_rank(&self) -> usize {
        self.me
    }

    /// The nodes of the job, by node rank.
    pub fn infos(&self) -> &[NodeInfo] {
        &self.attempt.infos
    }

    /// Starts the threads that send heartbeats and read the log. A node is lost after a silence of `limit`.
    pub fn watch(&self, limit: Duration, events: Sender<Event>) -> Result<()> {
        self.beats.watch(self.infos().len(), limit);
        self.host.watch(1, limit);
        // The store waits for a lost node for this long.
        self.store.set_response_timeout(limit);
        self.start_watching(events)
    }

    fn start_watching(&self, events: Sender<Event>) -> Result<()> {
        let pulse = || Pulse {
            store: self.store.clone(),
            beats: self.beats.clone(),
            host: self.host.clone(),
            gone: self.gone.clone(),
            stop: self.stop.clone(),
            is_watched: self.is_watched.clone(),
            id: self.id,
            ids: self.attempt.ids.clone(),
            lost: self.lost_launchers(),
        };
        // If the main thread has ended, there is no receiver.
        let send = move |event: Event| drop(events.send(event));
        let (beating, send_loss) = (pulse(), send.clone());
        if self.server.is_some() {
            let lost = self.on_loss(send_loss);
            spawn("beat", move || beating.watch(lost))?;
            if let Some(quorum) = self.quorum() {
                let (watching, publish, me) = (pulse(), self.publish_loss(), self.me);
                let attempt = self.attempt.clone();
                spawn("quorum", move || {
                    while watching.is_running() {
                        quorum.note_dropped();
                        for id in quorum.drop_ended() {
                            let name = attempt.name_of(id);
                            publish(id, verdict_of_lost(&name, me, Duration::ZERO));
                        }
                        std::thread::sleep(silence::LOOK);
                    }
                })?;
            }
        } else {
            spawn("beat", move || beating.beat())?;
            let (looking, host) = (pulse(), self.node_of_host());
            // Otherwise the thread that follows the host of the store does this.
            if self.moves.is_none() {
                spawn("silence", move || {
                    if looking.is_host_lost() {
                        send_loss(Event::NodeLost(host));
                    }
                })?;
            }
        }
        let host = name_of(self.infos(), self.node_of_host());
        let listening = pulse();
        let mut log = lock(&self.log).clone();
        let mut last = (self.attempt.number, self.attempt.ids.len());
        let mut over = None;
        let may_be_lost = self.is_elastic && self.server.is_none();
        let (id, has_left) = (self.id, self.has_left.clone());
        spawn("nodes", move || {
            while listening.is_running() {
                let all = log.state();
                // This launcher also writes it before it leaves.
                if may_be_lost && all.why_lost(id).is_some() && !has_left.load(Ordering::Relaxed) {
                    return send(Event::WasLost);
                }
                if let Some(verdict) = all.abort() {
                    return send(Event::Abort(Box::new(verdict.clone())));
                }
                if let Some(attempt) = all.attempt() {
                    let number = attempt.number;
                    if let Some(why) = all.over().filter(|_| over != Some(number)) {
                        over = Some(number);
                        send(Event::Over(number, Box::new(why.clone())));
                    }
                    let now = (number, attempt.ids.len());
                    if std::mem::replace(&mut last, now) < now {
                        send(Event::Admit(Box::new(attempt.clone())));
                    }
                }
                match log.wait(VERDICT_WAIT) {
                    Ok(_) => {}
                    Err(error) if error.kind() == StoreKind::NoAnswer => {}
                    // It has moved since the question.
                    Err(_) if !listening.is_running() => return,
                    Err(error) => {
                        return send(Event::StoreLost(lost_store(&host, error).chain()));
                    }
                }
            }
        })
    }

    /// What the host of the store does about a node that is silent for too long.
    fn on_loss<T>(&self, send: T) -> impl FnMut(usize) -> bool + use<T>
    where
        T: Fn(Event) + Send + 'static,
    {
        let (beats, is_elastic, me) = (self.beats.clone(), self.is_elastic, self.me);
        let attempt = self.attempt.clone();
        let (quorum, publish_loss) = (self.quorum(), self.publish_loss());
        let is_watched = self.is_watched.clone();
        move |node| {
            if !is_elastic {
                send(Event::NodeLost(node));
                return true;
            }
            let ids = &attempt.ids;
            let is_silent = |node: &usize| *node != me && beats.is_lost(*node);
            let silent = (0..ids.len()).filter(is_silent).map(|node| ids[node]);
            let silent: BTreeSet<usize> = silent.collect();
            if let Some(quorum) = &quorum
                && !quorum.drop(ids[node], &silent)
            {
                is_watched.store(false, Ordering::Relaxed);
                send(Event::Parted);
                return true;
            }
            // The job continues without it.
            let name = attempt.name_of(ids[node]);
            publish_loss(ids[node], verdict_of_lost(&name, me, beats.silent(node)));
            true
        }
    }

    /// Publishes that a launcher is lost, unless it has ended as it should. Runs on a thread of its own, because the answer may
    /// wait for another silent launcher, and repeats until the store has the event.
    fn publish_loss(&self) -> impl Fn(usize, JobFailure) + Send + use<> {
        let (store, roster, stop) = (self.store.clone(), self.roster.clone(), self.stop.clone());
        let log = lock(&self.log).clone();
        move |id, verdict| {
            let (store, roster, stop) = (store.clone(), roster.clone(), stop.clone());
            let mut log = log.clone();
            let mut publish = move || -> phalanx_store::Result<()> {
                if store.try_get(&left_key(id))?.is_none() {
                    log.append(|all| all.lost_for(id, &verdict))?;
                    lock(&roster).lost.insert(id);
                }
                // Later failures have other causes.
                store.delete(&gone_key(id)).map(drop)
            };
            let publishing = spawn("lost", move || {
                while !stop.load(Ordering::Relaxed) && publish().is_err() {
                    std::thread::sleep(SLICE);
                }
            });
            if let Err(error) = publishing {
                say::note(format_args!("warning: {}", error.chain()));
            }
        }
    }

    fn quorum(&self) -> Option<Quorum> {
        let server = self.server.as_ref().filter(|_| self.moves.is_some())?;
        Some(Quorum {
            server: server.clone(),
            roster: self.roster.clone(),
            token: self.token.clone(),
            id: self.id,
        })
    }

    /// The node whose launcher hosts the store.
    fn node_of_host(&self) -> usize {
        let host = lock(&self.roster).host;
        self.attempt.node_of(host).unwrap_or(0)
    }

    /// The launchers that are lost, as far as this one has read.
    fn lost_launchers(&self) -> BTreeSet<usize> {
        lock(&self.log).state().lost()
    }

    /// The verdict that the silent `node` is lost. If it hosted the store, the store is not asked again.
    pub fn verdict_of_lost(&self, node: usize) -> JobFailure {
        let silent = match node == self.node_of_host() && self.server.is_none() {
            true => {
                self.ask_no_more();
                self.host.silent(0)
            }
            false => self.beats.silent(node),
        };
        verdict_of_lost(&name_of(self.infos(), node), self.me, silent)
    }

    /// The verdict that this launcher reaches too few of the others to continue.
    pub fn verdict_of_parted(&self) -> JobFailure {
        self.ask_no_more();
        let node = match &self.server {
            None => self.node_of_host(),
            Some(_) => {
                let lost = &lock(&self.roster).lost;
                let is_lost = |node: &usize| {
                    let is_other = *node != self.me && !lost.contains(&self.attempt.ids[*node]);
                    is_other && self.beats.is_lost(*node)
                };
                (0..self.infos().len()).find(is_lost).unwrap_or(0)
            }
        };
        let mut verdict = self.verdict_of_lost(node);
        let why =
            "this node reaches no majority of the ranks, and the others may continue without it";
        verdict.notes.push(("so".into(), why.into()));
        verdict
    }

    /// From now on no request waits for the store.
    fn ask_no_more(&self) {
        self.out_of_reach.store(true, Ordering::Relaxed);
        self.store.set_response_timeout(END_LIMIT);
        if let Some(file) = &self.moves {
            self.store.move_with(file.clone(), Duration::ZERO);
        }
    }

    /// Asks the store with a short limit, for the time after the end is decided. A store that did not
    /// answer once is not asked again.
    fn reachable<T>(&self, ask: impl FnOnce(&TcpStore) -> phalanx_store::Result<T>) -> Option<T> {
        if self.out_of_reach.load(Ordering::Relaxed) {
            return None;
        }
        self.store.set_response_timeout(END_LIMIT);
        match ask(&self.store) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.out_of_reach.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    /// Writes `event`, and returns the verdict that holds after it; `None`: the store has not answered.
    fn write(
        &self,
        event: impl Fn(&Launchers) -> Option<LauncherEvent>,
        holds: impl FnOnce(&Launchers) -> Option<&JobFailure>,
    ) -> Option<JobFailure> {
        let mut log = lock(&self.log);
        self.reachable(|_| log.append(event))?;
        holds(log.state()).cloned()
    }

    /// Writes the verdict unless there is a better one, and returns the
    /// one that holds. If it is not final, another attempt may follow.
    pub fn publish(&self, verdict: &JobFailure, is_final: bool) -> JobFailure {
        let is_interrupt = verdict.code == ErrorKind::Interrupted.exit_code();
        if is_final && self.is_elastic && is_interrupt && !self.hosts_store() {
            // The others continue without this launcher, unless they need its store.
            return self.go(verdict);
        }
        let number = self.attempt.number;
        let stored = match is_final || !self.can_restart {
            true => self.write(|all| all.abort_for(verdict), Launchers::abort),
            false => self.write(|all| all.over_for(number, verdict, true), Launchers::over),
        };
        stored.unwrap_or_else(|| verdict.clone())
    }

    /// The headline of the verdict if a node is lost, which may be why ranks of this node failed.
    pub fn lost(&self) -> Option<String> {
        let silent = self.host.silent(0);
        if self.server.is_none() && silent >= SILENT {
            return Some(disconnected(
                &name_of(self.infos(), self.node_of_host()),
                silent,
            ));
        }
        let lost = self.lost_launchers();
        let others = self.attempt.ids.iter().copied();
        let others = others.filter(|id| *id != self.id && !lost.contains(id));
        let others: Vec<usize> = others.collect();
        let keys: Vec<String> = others.iter().copied().map(gone_key).collect();
        let missing = self.reachable(|store| {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            match store.wait(&keys, Duration::ZERO) {
                Ok(()) => Ok(Vec::new()),
                Err(error) if error.kind() == StoreKind::Timeout => {
                    Ok(error.missing_keys().to_vec())
                }
                Err(error) => Err(error),
            }
        })?;
        let gone = others.iter().zip(&keys);
        let gone = gone.filter(|(_, key)| !missing.contains(key));
        gone.into_iter().find_map(|(id, key)| {
            let why = self.reachable(|store| store.try_get(key))??;
            // It has ended as it should.
            if self
                .reachable(|store| store.try_get(&left_key(*id)))?
                .is_some()
            {
                return None;
            }
            let seconds = String::from_utf8(why).ok()?.parse().ok();
            Some(match seconds.map(Duration::try_from_secs_f64) {
                Some(silent) => disconnected(&self.attempt.name_of(*id), silent.ok()?),
                None => closed(&self.attempt.name_of(*id)),
            })
        })
    }

    /// The verdict that holds now.
    pub fn verdict(&self) -> Option<JobFailure> {
        if self.has_left.load(Ordering::Relaxed) {
            return None;
        }
        let number = self.attempt.number;
        let mut log = lock(&self.log);
        self.reachable(|_| log.read().map(drop))?;
        let all = log.state();
        let of_attempt = all.attempt().filter(|last| last.number == number);
        let over = all
            .over()
            .filter(|why| of_attempt.is_some() && why.code != 0);
        all.abort().or(over).cloned()
    }

    /// Announces that this launcher does not need the store any more. Node 0 keeps
    /// the store until all launchers have announced it, at most [`LEAVE_LIMIT`] after `decided`,
    /// the moment when the others could read the verdict.
    pub fn leave(&self, decided: Instant) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(standing_by) = &self.standing_by {
            // The copy of the store retires.
            let _ = standing_by.recv_timeout(END_LIMIT);
        }
        if let Some(file) = &self.moves {
            self.store.move_with(file.clone(), END_LIMIT);
        }
        self.reachable(|store| store.set(&left_key(self.id), b""));
        let Some(server) = &self.server else {
            return;
        };
        let is_alone = self.out_of_reach.load(Ordering::Relaxed);
        if self.has_left.load(Ordering::Relaxed) || (is_alone && self.moves.is_some()) {
            return;
        }
        // The store moves no more.
        server.drop_followers();
        self.ask_no_more();
        let is_silent = |id: &usize| {
            let node = self.attempt.node_of(*id);
            node.is_some_and(|node| self.beats.is_lost(node))
        };
        let mut log = lock(&self.log);
        let _ = log.read();
        let joined = log.state().there().filter(|id| !is_silent(id));
        let left: Vec<String> = joined.map(left_key).collect();
        let left: Vec<&str> = left.iter().map(String::as_str).collect();
        let limit = (decided + LEAVE_LIMIT).saturating_duration_since(Instant::now());
        let _ = self.store.wait(&left, limit);
    }
}

fn left_key(node: usize) -> String {
    format!("launch/left/{node}")
}

/// The message that the node `name` has been silent for this long.
fn disconnected(name: &str, silent: Duration) -> String {
    let silent = silent.as_secs_f64();
    format!("lost the connection to {name}: nothing has come from it for {silent:.1} s")
}

fn closed(name: &str) -> String {
    format!("lost {name}: the connection of its launcher was closed, and it gave no reason")
}

/// The verdict of node `me` that the node `name` has been silent for this long.
fn verdict_of_lost(name: &str, me: usize, silent: Duration) -> JobFailure {
    let code = ErrorKind::PeerLost.exit_code();
    if silent < SILENT {
        return JobFailure::new(code, me, closed(name));
    }
    let perhaps = "the host or the network between is down";
    JobFailure {
        notes: vec![("perhaps".into(), perhaps.into())],
        ..JobFailure::new(code, me, disconnected(name, silent))
    }
}

/// The error that the store does not answer any more: `node_0` is gone. The cause has its address.
fn lost_store(node_0: &str, error: phalanx_store::Error) -> Error {
    let kind = match error.kind() {
        StoreKind::Timeout | StoreKind::NoAnswer => ErrorKind::Timeout,
        _ => ErrorKind::PeerLost,
    };
    Error::new(kind, format!("lost the launcher of {node_0}")).caused_by(error)
}

#[cfg(test)]
mod tests;
