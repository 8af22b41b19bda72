//! A job of several nodes: their launchers meet in the store of node 0, agree on the
//! world, and share the verdict (why the job ended).
//!
//! | key               | value                          | written by            |
//! |-------------------|--------------------------------|-----------------------|
//! | `launch/arrived`  | a count that rises             | launchers without a number, to get one |
//! | `launch/node/R`   | the node's NodeInfo (JSON)     | node R, once          |
//! | `launch/beat/R`   | nothing                        | node R, every 200 ms; node 0 removes it when it has seen it |
//! | `launch/abort`    | the verdict (JSON)             | the first to fail     |
//! | `launch/done/R`   | all ranks of node R ended well | node R                |
//! | `launch/left/R`   | node R needs the store no more | node R                |
//! | `launch/gone/R`   | nothing comes from node R: for how many seconds, or `closed` | node 0, the store (node R's will) |
//!
//! Those of jobs that start their ranks again are in `attempts.rs`. In all of these, node 0 is the one whose launcher hosts
//! the store: where ranks go on in place it may be another one later (`standby.rs`).
//!
//! When a launcher dies, its guard writes the verdict, or, before there is a guard, the
//! store does (the launcher's will). A host that vanishes or is cut off stops beating, which
//! node 0 notices (`pulse.rs`, `silence.rs`). All others notice when node 0's answers end, or its store.
//!
//! Ranks may notice a lost node sooner than launchers do. A verdict that only says so (an echo) names the node
//! that is lost instead ([`Nodes::lost`]).

mod attempts;
mod info;
mod membership;
mod pulse;
mod silence;
mod standby;
mod store;
mod tell;

pub use attempts::{Attempt, Next, insist};
pub use info::NodeInfo;
pub use membership::Rules;
pub use standby::Moved;
pub use store::{NodeStore, host_locally, meeting_store};

use std::collections::{BTreeSet, HashMap};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm::PortRange;
use phalanx_comm::transport::what_loopback_means;
use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, TcpStore, Will};
use phalanx_wire::Token;
use serde::{Deserialize, Serialize};

use self::attempts::lost_key;
use self::info::{compare, compare_jobs, mixed, name_of};
use self::pulse::{Heard, Pulse, SILENT, gone_key};
use self::standby::{Quorum, Roster};
use super::Event;
use super::report::{ABORT_KEY, JobFailure};
use crate::error::{Error, ErrorKind, Result};
use crate::{lock, say, spawn, system};

/// How many nodes without a number have arrived.
const ARRIVED_KEY: &str = "launch/arrived";

/// How often blocking steps check for a Ctrl-C.
const SLICE: Duration = Duration::from_millis(200);
/// How much longer than its deadline connecting may take: resolving a name has none.
const LOOKUP_LIMIT: Duration = Duration::from_secs(1);
/// Threads of a launcher that ask the store at once: the one that beats, the one that waits for the verdict, and the
/// main one.
const ASKING_THREADS: usize = 3;
/// How long one question for the verdict waits.
const VERDICT_WAIT: Duration = Duration::from_millis(500);
/// How long node 0 keeps the store, from the moment on when all is decided,
/// so that every launcher can read the end of the story there.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// How long the store may take to answer while the nodes meet.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long the store may take to answer once this node's end is decided: it
/// may be out of reach, and an end must not wait for that.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// When a wait is reported for the first time; then again each time it has doubled.
const QUIET: Duration = Duration::from_secs(2);
/// Most kinds of refused connections that are named at a time.
const REFUSED_SHOWN: usize = 3;

/// The nodes of the job, after all have joined.
pub struct Nodes {
    store: Arc<TcpStore>,
    /// On the host of the store, the store.
    server: Option<Arc<TcpServer>>,
    /// Of another launcher, where the store may move to.
    standby: Option<Arc<TcpServer>>,
    /// Disconnected when the thread that follows the host of the store has ended.
    standing_by: Option<Receiver<()>>,
    /// The launchers of the attempt, and which of them hosts the store.
    roster: Arc<Mutex<Roster>>,
    /// The address of node 0.
    first: String,
    token: Token,
    /// Who hosted it when the main thread heard of it last.
    last_host: usize,
    /// Where this launcher and its ranks read where the store is, once it may move.
    moves: Option<PathBuf>,
    /// The number of this launcher, and those of all, by node. They are the nodes' unless launchers come and go.
    id: usize,
    ids: Vec<usize>,
    /// On node 0, those of them that are lost.
    lost: Vec<usize>,
    me: usize,
    infos: Vec<NodeInfo>,
    stop: Arc<AtomicBool>,
    /// Ends the threads that watch the launchers of this attempt.
    is_watched: Arc<AtomicBool>,
    heard: Arc<Heard>,
    host: Arc<Heard>,
    /// Tells the others that our connection to the store has ended.
    gone: Arc<Mutex<Option<Will>>>,
    /// The store did not answer our last words.
    out_of_reach: AtomicBool,
    /// Our verdict, should we be killed before we have a guard.
    will: Mutex<Option<Will>>,
    /// The number of the next attempt, where one may follow.
    next: Option<u32>,
    /// Launchers may go, or come and go.
    is_elastic: bool,
    /// This one has said that it goes.
    has_left: Arc<AtomicBool>,
    to_begin: attempts::ToBegin,
    /// An attempt runs without this launcher, which waits for a place.
    is_spare: bool,
    /// Where the store may be next, for a spare, and until when it looks there.
    servers: Vec<String>,
    searches_until: Option<Instant>,
}

/// Joins as node `me`, or as the next one that arrives; `interrupted` is asked often and ends it.
///
/// # Errors
/// `Timeout` names the nodes that did not come, or the address where nobody
/// listens; `Usage` names the node that was started differently.
pub fn join(
    at: &mut NodeStore,
    me: Option<usize>,
    mut info: NodeInfo,
    token: &Token,
    timeout: Duration,
    ports: Option<PortRange>,
    mut interrupted: impl FnMut() -> Option<Error>,
) -> Result<Nodes> {
    let started = Instant::now();
    let deadline = started + timeout;
    let store = reach(at, &info, token, (started, deadline), &mut interrupted)?;
    // The way to node 0 says by which of our addresses others reach us.
    if at.server.is_none() {
        at.bind = at.bind.or(store.local_ip());
    }
    info.address = at.bind;
    let standby = standby_of(at, &info, token, ports);
    info.standby = standby.as_ref().map(TcpServer::local_addr);
    let total = info.nodes;
    // Until all are here the meeting's deadline holds for every question.
    let left = deadline.saturating_duration_since(Instant::now());
    store.set_response_timeout(left.clamp(LAST_WORDS, ANSWER_LIMIT));
    // Without them a request opens one.
    let _ = store.reserve_connections(ASKING_THREADS);
    if at.server.is_none() && me != Some(0) {
        // Before anything is written: a launcher that is refused hurts no other.
        let first = node_0(&store, deadline, &mut interrupted)?;
        compare_jobs(&info, &first, &at.dial)?;
        compare(&info, me, &first, &node_key(0)).inspect_err(|error| {
            if info.least.is_none() {
                // The others would wait for this node, unless all have met.
                let _ = tell::leave_word(&store, &info.host, error);
            }
        })?;
    }
    let me = match me {
        Some(me) => me,
        None if at.server.is_some() => 0,
        None => arrive(&store, info.least.map_or(total, |_| usize::MAX))?,
    };
    let will = register(&store, me, &info)?;
    let mut nodes = Nodes {
        store: Arc::new(store),
        server: at.server.take().map(Arc::new),
        standby: standby.map(Arc::new),
        standing_by: None,
        roster: Arc::default(),
        first: at.first.clone(),
        token: token.clone(),
        last_host: 0,
        moves: None,
        id: me,
        ids: (0..total).collect(),
        lost: Vec::new(),
        me,
        infos: Vec::new(),
        stop: Arc::new(AtomicBool::new(false)),
        is_watched: Arc::new(AtomicBool::new(true)),
        heard: Arc::new(Heard::new(total)),
        host: Arc::new(Heard::new(1)),
        gone: Arc::default(),
        out_of_reach: AtomicBool::new(false),
        will: Mutex::new(will),
        next: (info.max_restarts > 0).then_some(1),
        is_elastic: info.least.is_some(),
        has_left: Arc::default(),
        to_begin: attempts::ToBegin::default(),
        is_spare: false,
        servers: Vec::new(),
        searches_until: None,
    };
    if nodes.is_elastic {
        nodes.store.set_response_timeout(ANSWER_LIMIT);
        nodes.next = Some(0);
        return Ok(nodes);
    }
    // From here on the others count on us: a failure must reach them.
    match nodes.gather(total, &info, started, deadline, &mut interrupted) {
        Ok(infos) => {
            nodes.infos = infos;
            if info.elastic {
                (nodes.is_elastic, nodes.next) = (true, Some(1));
                nodes.note_members(&nodes.running());
            }
            Ok(nodes)
        }
        Err(error) => {
            let message = format!("node {me} (host {}): {}", info.host, error.chain());
            nodes.publish(&JobFailure::new(error.exit_code(), me, message), true);
            nodes.leave(total, Instant::now());
            Err(error)
        }
    }
}

/// Connects to the store of the job, also where it has moved from node 0.
fn reach(
    at: &mut NodeStore,
    info: &NodeInfo,
    token: &Token,
    (started, deadline): (Instant, Instant),
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<TcpStore> {
    loop {
        let store = connect(&at.dial, token, started, deadline, interrupted)?;
        let moved = store.try_get(standby::MOVED_KEY).map_err(lost_node_0)?;
        // A launcher that hosts this store joins it as node 0; `next` then sends it to the other store.
        let Some(address) = moved.filter(|_| info.least.is_some() && at.server.is_none()) else {
            return Ok(store);
        };
        let address = String::from_utf8_lossy(&address).into_owned();
        match TcpStore::connect(&address, token.clone(), ANSWER_LIMIT) {
            Ok(store) => {
                at.moved(&address);
                return Ok(store);
            }
            // It has moved once more.
            Err(_) if Instant::now() < deadline => std::thread::sleep(SLICE),
            Err(error) => return Err(lost_store("the node with the store", error)),
        }
        if let Some(error) = interrupted() {
            return Err(error);
        }
    }
}

/// The server to which the store can move, of a launcher that does not host it.
fn standby_of(
    at: &NodeStore,
    info: &NodeInfo,
    token: &Token,
    ports: Option<PortRange>,
) -> Option<TcpServer> {
    if !info.elastic {
        return None;
    }
    if let Some(server) = &at.server {
        standby::leave_out_beats(server);
        return None;
    }
    let standby = at.bind.and_then(|ip| standby::bind(ip, ports, token));
    if standby.is_none() {
        say::note(
            "warning: no port is free for this node's copy of the job's store: the store cannot move here, and the ranks of this node do not count where the network breaks; give --port-range one port more",
        );
    }
    standby
}

/// Writes the description of node `me`, with which the others begin to count on it. Returns its will.
fn register(store: &TcpStore, me: usize, info: &NodeInfo) -> Result<Option<Will>> {
    let death_key = attempts::death_key(me, info.least.is_some(), false);
    // Before the entry, with which the others begin to count on us.
    let mut will = match me {
        // Its store would die with it.
        0 => None,
        _ => store
            .leave_will(&death_key, &encode(&JobFailure::of_killed(me, &info.host))?)
            .map_err(lost_node_0)?,
    };
    let mine = encode(&info)?;
    let stored = store
        .compare_set(&node_key(me), None, &mine)
        .map_err(|error| {
            // The entry may be there: only the answer was lost.
            will.take().into_iter().for_each(Will::execute);
            lost_store("node 0", error)
        })?;
    if stored != mine {
        drop(will); // nobody waits for this launcher
        let other = decode::<NodeInfo>(&stored);
        let error = match other.as_ref().filter(|o| o.by_arrival != info.by_arrival) {
            Some(other) => mixed(info, other),
            None => {
                let who = other.map_or("another launcher".into(), |c| {
                    format!("host {}, pid {}", c.host, c.pid)
                });
                Error::usage(format!("node {me} has already joined: {who}"))
                    .note("fix", "give every launcher its own --node-rank")
            }
        };
        // Without its number, which is the other launcher's.
        let _ = tell::leave_word(store, &info.host, &error);
        return Err(error);
    }
    Ok(will)
}

/// Waits for the description of node 0.
fn node_0(
    store: &TcpStore,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<NodeInfo> {
    let key = node_key(0);
    loop {
        match store.get(&key, SLICE) {
            Ok(bytes) => return decode(&bytes).ok_or_else(|| no_node(&key)),
            Err(error) if Instant::now() >= deadline => return Err(lost_node_0(error)),
            Err(error) if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {}
            Err(error) => return Err(lost_node_0(error)),
        }
        check_goes_on(store, interrupted)?;
    }
}

/// That the job has no verdict yet, and this launcher was not interrupted.
fn check_goes_on(store: &TcpStore, interrupted: &mut impl FnMut() -> Option<Error>) -> Result<()> {
    let verdict = store.try_get(ABORT_KEY).map_err(lost_node_0)?;
    let verdict = verdict.and_then(|bytes| decode::<JobFailure>(&bytes));
    let error = verdict.map(|verdict| verdict.into_error(None));
    error.or_else(interrupted).map_or(Ok(()), Err)
}

/// The number of a node that has none: the next one after those that have arrived.
fn arrive(store: &TcpStore, total: usize) -> Result<usize> {
    let arrived = store.add(ARRIVED_KEY, 1).map_err(lost_node_0)?;
    let me = usize::try_from(arrived).unwrap_or(usize::MAX);
    if me < total {
        return Ok(me);
    }
    Err(Error::usage(format!(
        "the job has its {total} nodes already: this launcher is one more"
    ))
    .note(
        "fix",
        "start one launcher per node, and a new job (--rdzv-endpoint) after the last one has ended",
    ))
}

impl Drop for Nodes {
    /// This launcher ends without a guard. Where it could not publish why, its will is all that the others hear.
    fn drop(&mut self) {
        let will = self.will.get_mut().unwrap_or_else(PoisonError::into_inner);
        will.take().into_iter().for_each(Will::execute);
    }
}

fn connect(
    dial: &str,
    token: &Token,
    started: Instant,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<TcpStore> {
    // One attempt until the deadline, as a new one goes to the end of a busy server's queue.
    // It cannot be interrupted, so it runs on a thread.
    let (tell, told) = channel();
    let last = Arc::new(Mutex::new(None));
    let failure = last.clone();
    let (to, token) = (dial.to_owned(), token.clone());
    spawn("connect", move || {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(20));
        let mut is_first = true;
        let store = TcpStore::connect_with(&to, token, left, |error| {
            if std::mem::take(&mut is_first)
                && let Some(means) = means_this_host(&to)
            {
                say::note(format_args!(
                    "warning: {means}: if node 0 is on another host, give all nodes its address as --master-addr"
                ));
            }
            *lock(&failure) = Some(error.to_string());
        });
        // Nobody listens after an interrupt.
        let _ = tell.send(store);
    })?;
    let last = || lock(&last).clone();
    let mut say_at = QUIET;
    let error = loop {
        match told.recv_timeout(SLICE) {
            Ok(Ok(store)) => return Ok(store),
            Ok(Err(error)) => break Some(error),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break None,
        }
        if let Some(error) = interrupted() {
            return Err(error);
        }
        if Instant::now() >= deadline + LOOKUP_LIMIT {
            break None;
        }
        if started.elapsed() >= say_at {
            say_at = started.elapsed() * 2;
            let why = last().unwrap_or_else(|| "it does not answer".to_owned());
            say::note(format_args!(
                "waiting for the launcher of node 0 at {dial}: {why}"
            ));
        }
    };
    match error.as_ref().map(phalanx_store::Error::kind) {
        Some(StoreKind::TokenMismatch) => {
            return Err(Error::usage(format!(
                "the launcher at {dial} belongs to another job: it has another token"
            ))
            .note("fix", "give all launchers of the job the same --token-file"));
        }
        Some(StoreKind::Rejected(_) | StoreKind::Usage) => {
            let ours = Error::usage(format!("no launcher to join at {dial}"));
            return Err(match error {
                Some(error) => ours.caused_by(error),
                None => ours,
            });
        }
        _ => {}
    }
    let waited = started.elapsed().as_secs_f64();
    let ours = Error::new(
        ErrorKind::Timeout,
        format!("no launcher of node 0 answered at {dial} within {waited:.1} s"),
    );
    let ours = match error {
        Some(error) => ours.caused_by(error),
        None => ours.note("last", last().unwrap_or_else(|| "no answer".to_owned())),
    };
    Err(ours.note(
        "fix",
        "start node 0; check --master-addr, --master-port and firewalls",
    ))
}

/// Whether the name in `dial` is this host's own, so that node 0 cannot be found by it from here.
fn means_this_host(dial: &str) -> Option<String> {
    let (host, _) = dial.rsplit_once(':')?;
    let addresses: Vec<SocketAddr> = dial.to_socket_addrs().ok()?.collect();
    let is_local = addresses.iter().all(|address| address.ip().is_loopback());
    let first = addresses.first().filter(|_| is_local)?;
    what_loopback_means(host.trim_matches(['[', ']']), first.ip())
}

impl Nodes {
    /// Waits for all nodes' descriptions and compares them with ours.
    fn gather(
        &self,
        total: usize,
        info: &NodeInfo,
        started: Instant,
        deadline: Instant,
        interrupted: &mut impl FnMut() -> Option<Error>,
    ) -> Result<Vec<NodeInfo>> {
        let keys: Vec<String> = (0..total).map(node_key).collect();
        let mut missing: Vec<String> = keys.clone();
        let mut seen: HashMap<String, NodeInfo> = HashMap::new();
        let mut say_at = QUIET;
        loop {
            let wanted: Vec<&str> = missing.iter().map(String::as_str).collect();
            let left = match self.store.wait(&wanted, SLICE) {
                Ok(()) => Vec::new(),
                Err(error) if error.kind() == StoreKind::Timeout => error.missing_keys().to_vec(),
                // It says nothing of who came.
                Err(error) if error.kind() == StoreKind::NoAnswer => missing.clone(),
                Err(error) => return Err(lost_node_0(error)),
            };
            // Look at entries as they come: a node that expects another world
            // must not keep us waiting for one that never comes.
            for key in missing.iter().filter(|key| !left.contains(key)) {
                let Some(bytes) = self.store.try_get(key).map_err(lost_node_0)? else {
                    continue;
                };
                let theirs = decode::<NodeInfo>(&bytes).ok_or_else(|| no_node(key))?;
                compare(info, Some(self.me), &theirs, key)?;
                seen.insert(key.clone(), theirs);
            }
            if left.is_empty() {
                break;
            }
            missing = left;
            check_goes_on(&self.store, interrupted)?;
            let absent: Vec<String> = missing
                .iter()
                .filter_map(|key| key.rsplit('/').next())
                .map(str::to_owned)
                .collect();
            let absent = absent.join(", ");
            if Instant::now() >= deadline {
                let waited = started.elapsed().as_secs_f64();
                let mut error = Error::new(
                    ErrorKind::Timeout,
                    format!("node {absent} of {total} did not join within {waited:.1} s"),
                );
                let refused = self.refused();
                if refused.is_empty() && self.server.is_some() {
                    error = error.note(
                        "seen",
                        format!("it has not connected to {}", self.reached_at()),
                    );
                }
                for refused in refused {
                    error = error.note("perhaps", refused);
                }
                return Err(error.note(
                    "fix",
                    "start a launcher there, check its --master-addr and --master-port and firewalls between, or wait longer with --rdzv-timeout S",
                ));
            }
            if started.elapsed() >= say_at {
                say_at = started.elapsed() * 2;
                let refused = self.refused().join("; ");
                let why = match (&self.server, refused.as_str()) {
                    (None, _) => String::new(),
                    (_, "") => format!(": it has not connected to {}", self.reached_at()),
                    (_, refused) => format!(
                        ": {refused}; all launchers need the same --master-addr, --master-port and --token-file"
                    ),
                };
                say::note(format_args!("waiting for node {absent} of {total}{why}"));
            }
        }
        keys.iter()
            .map(|key| {
                seen.remove(key)
                    .ok_or_else(|| Error::new(ErrorKind::System, format!("{key} vanished")))
            })
            .collect()
    }

    /// The address of our store.
    fn reached_at(&self) -> String {
        let addr = self.store.addr();
        let is_local = addr
            .parse::<SocketAddr>()
            .is_ok_and(|a| a.ip().is_loopback());
        let only = if is_local {
            ", which no other host can reach"
        } else {
            ""
        };
        format!("{addr}{only}")
    }

    /// The connections that our store refused.
    fn refused(&self) -> Vec<String> {
        let refused = self.server.as_ref().map(|server| server.refused());
        let refused = refused.unwrap_or_default();
        let most = refused.iter().take(REFUSED_SHOWN);
        most.map(ToString::to_string).collect()
    }

    /// Our guard has our verdict: from now on a broken connection to the store
    /// alone is nobody's death.
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
        &self.infos
    }

    /// Starts the threads that beat and listen. A node is lost after a silence of `limit`.
    pub fn watch(&self, limit: Duration, events: Sender<Event>) -> Result<()> {
        self.heard.watch(self.infos.len(), limit);
        self.host.watch(1, limit);
        // A node that is lost is waited for no longer.
        self.store.set_response_timeout(limit);
        self.start_watching(events)
    }

    fn start_watching(&self, events: Sender<Event>) -> Result<()> {
        let pulse = || Pulse {
            store: self.store.clone(),
            heard: self.heard.clone(),
            host: self.host.clone(),
            gone: self.gone.clone(),
            stop: self.stop.clone(),
            is_watched: self.is_watched.clone(),
            id: self.id,
            ids: self.ids.clone(),
            lost: self.lost.clone(),
        };
        // Where the main thread has ended, nobody listens.
        let tell = move |event: Event| drop(events.send(event));
        let (beating, tell_of_loss) = (pulse(), tell.clone());
        if self.server.is_some() {
            let lost = self.on_loss(tell_of_loss);
            spawn("beat", move || beating.hear(lost))?;
            if let Some(quorum) = self.quorum() {
                let (watching, publish, me) = (pulse(), self.publish_loss(), self.me);
                let (ids, infos) = (self.ids.clone(), self.infos.clone());
                spawn("quorum", move || {
                    while watching.goes_on() {
                        quorum.note_dropped();
                        for id in quorum.drop_ended() {
                            if let Some(node) = ids.iter().position(|other| *other == id) {
                                let name = name_of(&infos, node);
                                publish(id, verdict_of_lost(&name, me, Duration::ZERO));
                            }
                        }
                        std::thread::sleep(silence::LOOK);
                    }
                })?;
            }
        } else {
            spawn("beat", move || beating.beat())?;
            let (looking, host) = (pulse(), self.node_of_host());
            // The thread that follows the host looks otherwise.
            if self.moves.is_none() {
                spawn("silence", move || {
                    if looking.is_host_lost() {
                        tell_of_loss(Event::NodeLost(host));
                    }
                })?;
            }
        }
        let host = name_of(&self.infos, self.node_of_host());
        let lost_key = (self.is_elastic && self.server.is_none()).then(|| self.death_key());
        let (store, me, listening) = (self.store.clone(), self.me, pulse());
        let has_left = self.has_left.clone();
        spawn("nodes", move || {
            while listening.goes_on() {
                let key = lost_key.as_ref();
                let is_lost = key.is_some_and(|key| matches!(store.try_get(key), Ok(Some(_))));
                // This launcher writes the same key before it goes.
                if is_lost && !has_left.load(Ordering::Relaxed) {
                    return tell(Event::WasLost);
                }
                match store.get(ABORT_KEY, VERDICT_WAIT) {
                    Ok(bytes) => {
                        let code = ErrorKind::PeerLost.exit_code();
                        let verdict = decode(&bytes).unwrap_or_else(|| JobFailure {
                            echo: true,
                            ..JobFailure::new(code, me, "another node failed and gave no reason")
                        });
                        return tell(Event::Abort(Box::new(verdict)));
                    }
                    Err(error)
                        if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {}
                    // It has moved since the question.
                    Err(_) if !listening.goes_on() => return,
                    Err(error) => {
                        return tell(Event::StoreLost(lost_store(&host, error).chain()));
                    }
                }
            }
        })
    }

    /// What the host of the store does about a node from which nothing comes any more.
    fn on_loss<T>(&self, tell: T) -> impl FnMut(usize) -> bool + use<T>
    where
        T: Fn(Event) + Send + 'static,
    {
        let (store, heard) = (self.store.clone(), self.heard.clone());
        let (is_elastic, in_place, me) = (self.is_elastic, self.goes_on_in_place(), self.me);
        let (ids, infos) = (self.ids.clone(), self.infos.clone());
        let (quorum, publish_loss) = (self.quorum(), self.publish_loss());
        let is_watched = self.is_watched.clone();
        move |node| {
            if !is_elastic {
                tell(Event::NodeLost(node));
                return true;
            }
            let is_silent = |node: &usize| *node != me && heard.is_lost(*node);
            let silent = (0..ids.len()).filter(is_silent).map(|node| ids[node]);
            let silent: BTreeSet<usize> = silent.collect();
            if let Some(quorum) = &quorum
                && !quorum.drop(ids[node], &silent)
            {
                is_watched.store(false, Ordering::Relaxed);
                tell(Event::Parted);
                return true;
            }
            // The job goes on without it.
            let verdict = verdict_of_lost(&name_of(&infos, node), me, heard.silent(node));
            if quorum.is_some() {
                publish_loss(ids[node], verdict);
                return true;
            }
            let key = attempts::death_key(ids[node], is_elastic, in_place);
            let is_told = verdict.publish_at(&store, &key).is_ok();
            // It is no reason for what fails later.
            is_told && store.delete(&gone_key(ids[node])).is_ok()
        }
    }

    /// Publishes that a launcher is lost, unless it has ended as it should: on a thread of its own, since the answer may wait
    /// for another launcher that is silent, and again until it is told.
    fn publish_loss(&self) -> impl Fn(usize, JobFailure) + Send + use<> {
        let (store, roster, stop) = (self.store.clone(), self.roster.clone(), self.stop.clone());
        move |id, verdict| {
            let (store, roster, stop) = (store.clone(), roster.clone(), stop.clone());
            let publish = move || -> phalanx_store::Result<()> {
                if store.try_get(&left_key(id))?.is_none() {
                    verdict.publish_at(&store, &lost_key(id))?;
                    lock(&roster).lost.insert(id);
                }
                // It is no reason for what fails later.
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
        self.ids.iter().position(|id| *id == host).unwrap_or(0)
    }

    /// The verdict that `node`, from which nothing comes any more, is lost. Without its host nothing else is asked of the
    /// store.
    pub fn verdict_of_lost(&self, node: usize) -> JobFailure {
        let silent = match node == self.node_of_host() && self.server.is_none() {
            true => {
                self.ask_no_more();
                self.host.silent(0)
            }
            false => self.heard.silent(node),
        };
        verdict_of_lost(&name_of(&self.infos, node), self.me, silent)
    }

    /// The verdict that this launcher reaches too few of the others to go on.
    pub fn verdict_of_parted(&self) -> JobFailure {
        self.ask_no_more();
        let node = match &self.server {
            None => self.node_of_host(),
            Some(_) => {
                let lost = &lock(&self.roster).lost;
                let is_lost = |node: &usize| {
                    let is_other = *node != self.me && !lost.contains(&self.ids[*node]);
                    is_other && self.heard.is_lost(*node)
                };
                (0..self.infos.len()).find(is_lost).unwrap_or(0)
            }
        };
        let mut verdict = self.verdict_of_lost(node);
        let why =
            "this node reaches no majority of the ranks, and the others may continue without it";
        verdict.notes.push(("so".into(), why.into()));
        verdict
    }

    /// From now on nothing waits for the store.
    fn ask_no_more(&self) {
        self.out_of_reach.store(true, Ordering::Relaxed);
        self.store.set_response_timeout(LAST_WORDS);
        if let Some(file) = &self.moves {
            self.store.move_with(file.clone(), Duration::ZERO);
        }
    }

    /// Whether there is any use in asking the store: once the end is decided,
    /// a store that did not answer is not asked again.
    fn reachable<T>(&self, ask: impl FnOnce(&TcpStore) -> phalanx_store::Result<T>) -> Option<T> {
        if self.out_of_reach.load(Ordering::Relaxed) {
            return None;
        }
        self.store.set_response_timeout(LAST_WORDS);
        match ask(&self.store) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.out_of_reach.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    /// Writes the verdict unless there is a better one, and gives back the
    /// one that holds. One that is not final may be followed by another attempt.
    pub fn publish(&self, verdict: &JobFailure, is_final: bool) -> JobFailure {
        let mut key = self.verdict_key(is_final);
        if is_final && self.is_elastic && verdict.code == ErrorKind::Interrupted.exit_code() {
            // The others go on without this launcher, unless they need its store.
            if !self.hosts_store() {
                key = self.death_key();
                self.has_left.store(true, Ordering::Relaxed);
            }
        }
        let stored = self.reachable(|store| verdict.publish_at(store, &key));
        stored.unwrap_or_else(|| verdict.clone())
    }

    /// The node that is lost, where ranks of this node may have failed for that reason; the headline of a verdict.
    pub fn lost(&self) -> Option<String> {
        let silent = self.host.silent(0);
        if self.server.is_none() && silent >= SILENT {
            return Some(disconnected(
                &name_of(&self.infos, self.node_of_host()),
                silent,
            ));
        }
        let is_lost = |node: &usize| self.lost.contains(&self.ids[*node]);
        let others = (0..self.infos.len()).filter(|node| *node != self.me && !is_lost(node));
        let others: Vec<usize> = others.collect();
        let keys = others.iter().map(|node| gone_key(self.ids[*node]));
        let keys: Vec<String> = keys.collect();
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
        gone.into_iter().find_map(|(node, key)| {
            let why = self.reachable(|store| store.try_get(key))??;
            // It has ended as it should.
            if self
                .reachable(|store| store.try_get(&left_key(self.ids[*node])))?
                .is_some()
            {
                return None;
            }
            let seconds = String::from_utf8(why).ok()?.parse().ok();
            Some(match seconds.map(Duration::try_from_secs_f64) {
                Some(silent) => disconnected(&name_of(&self.infos, *node), silent.ok()?),
                None => closed(&name_of(&self.infos, *node)),
            })
        })
    }

    /// The verdict that holds now.
    pub fn verdict(&self) -> Option<JobFailure> {
        if self.has_left.load(Ordering::Relaxed) {
            return None;
        }
        let look = |is_final| {
            let key = self.verdict_key(is_final);
            self.reachable(|store| store.try_get(&key))?
        };
        decode(&look(true).or_else(|| look(false))?)
    }

    /// Says that all ranks here ended well; false: the store has not answered.
    pub fn done(&self) -> Result<bool> {
        self.say(&self.done_key())
    }

    /// Whether all nodes said so; waits a moment for it.
    pub fn all_done(&self) -> Result<bool> {
        let all: Vec<usize> = (0..self.infos.len()).collect();
        self.wait_all("launch/done", &all, SLICE)
            .map_err(|error| self.lost_store(error))
    }

    /// The last words: nothing is asked of the store after this. Node 0 keeps
    /// the store until all that joined have said so, within reason: `decided`
    /// is when the others could know how it ends.
    pub fn leave(&self, total: usize, decided: Instant) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(standing_by) = &self.standing_by {
            // Until it has retired.
            let _ = standing_by.recv_timeout(LAST_WORDS);
        }
        if let Some(file) = &self.moves {
            self.store.move_with(file.clone(), LAST_WORDS);
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
        let total = match self.is_elastic {
            true => total.max(attempts::arrived(&self.store).unwrap_or(0) + 1),
            false => total,
        };
        let is_there = |key: &str| matches!(self.store.try_get(key), Ok(Some(_)));
        let is_lost = |id: usize| {
            let node = self.ids.iter().position(|other| *other == id);
            node.is_some_and(|node| self.heard.is_lost(node))
        };
        let joined =
            |id: &usize| is_there(&node_key(*id)) && !is_lost(*id) && !is_there(&lost_key(*id));
        let joined: Vec<usize> = (0..total).filter(joined).collect();
        let limit = (decided + LEAVE_LIMIT).saturating_duration_since(Instant::now());
        let _ = self.wait_all("launch/left", &joined, limit);
    }

    fn wait_all(
        &self,
        what: &str,
        nodes: &[usize],
        limit: Duration,
    ) -> phalanx_store::Result<bool> {
        let keys: Vec<String> = nodes.iter().map(|node| format!("{what}/{node}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.store.wait(&keys, limit) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

fn no_node(key: &str) -> Error {
    Error::new(ErrorKind::System, format!("{key} does not describe a node"))
}

fn node_key(node: usize) -> String {
    format!("launch/node/{node}")
}

fn left_key(node: usize) -> String {
    format!("launch/left/{node}")
}

/// Nothing has come from the node `name` for this long.
fn disconnected(name: &str, silent: Duration) -> String {
    let silent = silent.as_secs_f64();
    format!("lost the connection to {name}: nothing has come from it for {silent:.1} s")
}

fn closed(name: &str) -> String {
    format!("lost {name}: the connection of its launcher was closed, and it gave no reason")
}

/// The verdict of node `me` that nothing has come from the node `name` for this long.
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

/// The store does not answer any more: `node_0` is gone. The store's own words
/// say where it was.
fn lost_store(node_0: &str, error: phalanx_store::Error) -> Error {
    let kind = match error.kind() {
        StoreKind::Timeout | StoreKind::NoAnswer => ErrorKind::Timeout,
        _ => ErrorKind::PeerLost,
    };
    Error::new(kind, format!("lost the launcher of {node_0}")).caused_by(error)
}

/// The same before the nodes know each other.
fn lost_node_0(error: phalanx_store::Error) -> Error {
    lost_store("node 0", error)
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(system("cannot write JSON"))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

#[cfg(test)]
mod tests;
