//! A job of several nodes: their launchers meet in the store of node 0, agree on the
//! world, and share the verdict (why the job ended).
//!
//! | key               | value                          | written by            |
//! |-------------------|--------------------------------|-----------------------|
//! | `launch/log/K`    | what has happened to launchers, and what was decided (`membership.rs`) | launchers |
//! | `launch/arrived`  | a count that rises             | launchers without a number, to get one |
//! | `launch/beat/R`   | nothing                        | launcher R, every 200 ms; node 0 removes it when it has seen it |
//! | `launch/left/R`   | launcher R needs the store no more | launcher R        |
//! | `launch/gone/R`   | nothing comes from launcher R: for how many seconds, or `closed` | node 0, the store (launcher R's will) |
//!
//! Node 0 is the one whose launcher hosts the store: where ranks go on in place it may be another one later (`standby.rs`).
//!
//! When a launcher dies, its guard writes so into the log, or, before there is a guard, the
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

pub use attempts::{Next, insist};
pub use info::NodeInfo;
pub use membership::{Attempt, LauncherEvent, LauncherLog, Rules};
pub use standby::Moved;
pub use store::{NodeStore, host_locally, meeting_store};

use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm::PortRange;
use phalanx_comm::transport::what_loopback_means;
use phalanx_member::Replay;
use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, TcpStore, Will};
use phalanx_wire::Token;

use self::info::{compare, compare_jobs, mixed, name_of};
use self::membership::Launchers;
use self::pulse::{Heard, Pulse, SILENT, gone_key};
use self::standby::{Quorum, Roster};
use super::Event;
use super::report::JobFailure;
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
    /// What has happened to the launchers.
    log: Mutex<LauncherLog>,
    /// The number of this launcher. It is the node's unless launchers come and go.
    id: usize,
    me: usize,
    /// The attempt of which this launcher is part, or was last.
    attempt: Attempt,
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
    /// Another attempt may follow.
    can_restart: bool,
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
    let store = Arc::new(store);
    let mut log = LauncherLog::new(store.clone());
    if at.server.is_none() && me != Some(0) {
        // Before anything is written: a launcher that is refused hurts no other.
        let first = node_0(&mut log, deadline, &mut interrupted)?;
        compare_jobs(&info, &first, &at.dial)?;
        compare(&info, me, &first, 0).inspect_err(|error| {
            if info.least.is_none() {
                // The others would wait for this node, unless all have met.
                let _ = tell::leave_word(&mut log, store.local_ip(), &info.host, error);
            }
        })?;
    }
    let me = match me {
        Some(me) => me,
        None if at.server.is_some() => 0,
        None => arrive(&store, info.least.map_or(total, |_| usize::MAX))?,
    };
    let will = register(&mut log, me, &info)?;
    let mut nodes = Nodes {
        store,
        server: at.server.take().map(Arc::new),
        standby: standby.map(Arc::new),
        standing_by: None,
        roster: Arc::new(Mutex::new(Roster::new(&at.first))),
        first: at.first.clone(),
        token: token.clone(),
        last_host: 0,
        moves: None,
        log: Mutex::new(log),
        id: me,
        me,
        attempt: Attempt::default(),
        stop: Arc::new(AtomicBool::new(false)),
        is_watched: Arc::new(AtomicBool::new(true)),
        heard: Arc::new(Heard::new(total)),
        host: Arc::new(Heard::new(1)),
        gone: Arc::default(),
        out_of_reach: AtomicBool::new(false),
        will: Mutex::new(will),
        can_restart: info.max_restarts > 0 || info.elastic || info.least.is_some(),
        is_elastic: info.least.is_some(),
        has_left: Arc::default(),
        to_begin: attempts::ToBegin::default(),
        is_spare: false,
        servers: Vec::new(),
        searches_until: None,
    };
    if nodes.is_elastic {
        nodes.store.set_response_timeout(ANSWER_LIMIT);
        return Ok(nodes);
    }
    // From here on the others count on us: a failure must reach them.
    match nodes.gather(total, &info, started, deadline, &mut interrupted) {
        Ok(attempt) => {
            nodes.is_elastic = info.elastic;
            nodes.enter(&attempt);
            Ok(nodes)
        }
        Err(error) => {
            let message = format!("node {me} (host {}): {}", info.host, error.chain());
            nodes.publish(&JobFailure::new(error.exit_code(), me, message), true);
            nodes.leave(Instant::now());
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

/// Writes the description of launcher `me`, with which the others begin to count on it. Returns its will.
fn register(log: &mut LauncherLog, me: usize, info: &NodeInfo) -> Result<Option<Will>> {
    let why = JobFailure::of_killed(me, &info.host);
    let killed = match info.least.is_some() && me != 0 {
        true => LauncherEvent::Lost { id: me, why },
        false => LauncherEvent::Abort(why),
    };
    // Before the entry, with which the others begin to count on us.
    let mut will = match me {
        // Its store would die with it.
        0 => None,
        _ => {
            let killed = serde_json::to_vec(&killed).map_err(system("cannot write JSON"))?;
            let will = log.store().leave_will(Launchers::PREFIX, &killed);
            will.map_err(lost_node_0)?
        }
    };
    let written = log.append(|all| {
        let info = info.clone();
        let is_new = all.info(me).is_none();
        is_new.then_some(LauncherEvent::Arrived { id: me, info })
    });
    written.map_err(|error| {
        // The entry may be there: only the answer was lost.
        will.take().into_iter().for_each(Will::execute);
        lost_store("node 0", error)
    })?;
    let other = log.state().info(me).filter(|other| *other != info);
    let Some(other) = other.cloned() else {
        return Ok(will);
    };
    drop(will); // no launcher waits for this one
    let error = match other.by_arrival == info.by_arrival {
        false => mixed(info, &other),
        true => {
            let who = format!("host {}, pid {}", other.host, other.pid);
            Error::usage(format!("node {me} has already joined: {who}"))
                .note("fix", "give every launcher its own --node-rank")
        }
    };
    // Without its number, which is the other launcher's.
    let _ = tell::leave_word(log, info.address, &info.host, &error);
    Err(error)
}

/// Waits for the description of node 0.
fn node_0(
    log: &mut LauncherLog,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<NodeInfo> {
    loop {
        match log.wait(SLICE) {
            Ok(all) => {
                if let Some(info) = all.info(0) {
                    return Ok(info.clone());
                }
                if Instant::now() >= deadline {
                    let what = "the launcher of node 0 has not joined its own job";
                    return Err(Error::new(ErrorKind::Timeout, what));
                }
            }
            Err(error) if error.kind() == StoreKind::NoAnswer && Instant::now() < deadline => {}
            Err(error) => return Err(lost_node_0(error)),
        }
        check_goes_on(log.state(), interrupted)?;
    }
}

/// That the job has no verdict yet, and this launcher was not interrupted.
fn check_goes_on(
    launchers: &Launchers,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<()> {
    let verdict = launchers.abort().cloned();
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
    /// Waits for the first attempt, which begins when all nodes have joined, and compares their descriptions with ours.
    fn gather(
        &self,
        total: usize,
        info: &NodeInfo,
        started: Instant,
        deadline: Instant,
        interrupted: &mut impl FnMut() -> Option<Error>,
    ) -> Result<Attempt> {
        let mut log = lock(&self.log);
        let mut seen = BTreeSet::new();
        let mut say_at = QUIET;
        loop {
            match log.wait(SLICE) {
                Ok(_) => {}
                // It says nothing of who came.
                Err(error) if error.kind() == StoreKind::NoAnswer => {}
                Err(error) => return Err(lost_node_0(error)),
            }
            // Look at entries as they come: a node that expects another world
            // must not keep us waiting for one that never comes.
            let there = (0..total).filter_map(|node| Some((node, log.state().info(node)?)));
            for (node, theirs) in there.filter(|(node, _)| !seen.contains(node)) {
                compare(info, Some(self.me), theirs, node)?;
            }
            let (here, absent): (Vec<usize>, _) =
                (0..total).partition(|node| log.state().info(*node).is_some());
            seen.extend(here);
            if let Some(first) = log
                .state()
                .info(0)
                .filter(|_| absent.is_empty() && self.me == 0)
            {
                let first = Attempt {
                    ids: (0..total).collect(),
                    master_port: first.master_port.unwrap_or(0),
                    ..Attempt::default()
                };
                let written = log.append(|all| all.begin_with(&first));
                written.map_err(lost_node_0)?;
            }
            if let Some(attempt) = log.state().attempt() {
                return Ok(attempt.clone());
            }
            check_goes_on(log.state(), interrupted)?;
            // Where all have come, node 0 has still to say so.
            let absent = match absent.is_empty() {
                true => vec![0],
                false => absent,
            };
            let absent: Vec<String> = absent.iter().map(usize::to_string).collect();
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
        &self.attempt.infos
    }

    /// Starts the threads that beat and listen. A node is lost after a silence of `limit`.
    pub fn watch(&self, limit: Duration, events: Sender<Event>) -> Result<()> {
        self.heard.watch(self.infos().len(), limit);
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
            ids: self.attempt.ids.clone(),
            lost: self.lost_launchers(),
        };
        // Where the main thread has ended, nobody listens.
        let tell = move |event: Event| drop(events.send(event));
        let (beating, tell_of_loss) = (pulse(), tell.clone());
        if self.server.is_some() {
            let lost = self.on_loss(tell_of_loss);
            spawn("beat", move || beating.hear(lost))?;
            if let Some(quorum) = self.quorum() {
                let (watching, publish, me) = (pulse(), self.publish_loss(), self.me);
                let attempt = self.attempt.clone();
                spawn("quorum", move || {
                    while watching.goes_on() {
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
            // The thread that follows the host looks otherwise.
            if self.moves.is_none() {
                spawn("silence", move || {
                    if looking.is_host_lost() {
                        tell_of_loss(Event::NodeLost(host));
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
            while listening.goes_on() {
                let all = log.state();
                // This launcher writes the same before it goes.
                if may_be_lost && all.why_lost(id).is_some() && !has_left.load(Ordering::Relaxed) {
                    return tell(Event::WasLost);
                }
                if let Some(verdict) = all.abort() {
                    return tell(Event::Abort(Box::new(verdict.clone())));
                }
                if let Some(attempt) = all.attempt() {
                    let number = attempt.number;
                    if let Some(why) = all.over().filter(|_| over != Some(number)) {
                        over = Some(number);
                        tell(Event::Over(number, Box::new(why.clone())));
                    }
                    let now = (number, attempt.ids.len());
                    if std::mem::replace(&mut last, now) < now {
                        tell(Event::Admit(Box::new(attempt.clone())));
                    }
                }
                match log.wait(VERDICT_WAIT) {
                    Ok(_) => {}
                    Err(error) if error.kind() == StoreKind::NoAnswer => {}
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
        let (heard, is_elastic, me) = (self.heard.clone(), self.is_elastic, self.me);
        let attempt = self.attempt.clone();
        let (quorum, publish_loss) = (self.quorum(), self.publish_loss());
        let is_watched = self.is_watched.clone();
        move |node| {
            if !is_elastic {
                tell(Event::NodeLost(node));
                return true;
            }
            let ids = &attempt.ids;
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
            let name = attempt.name_of(ids[node]);
            publish_loss(ids[node], verdict_of_lost(&name, me, heard.silent(node)));
            true
        }
    }

    /// Publishes that a launcher is lost, unless it has ended as it should: on a thread of its own, since the answer may wait
    /// for another launcher that is silent, and again until it is told.
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
        self.attempt.node_of(host).unwrap_or(0)
    }

    /// The launchers that are lost, as far as this one has read.
    fn lost_launchers(&self) -> BTreeSet<usize> {
        lock(&self.log).state().lost()
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
        verdict_of_lost(&name_of(self.infos(), node), self.me, silent)
    }

    /// The verdict that this launcher reaches too few of the others to go on.
    pub fn verdict_of_parted(&self) -> JobFailure {
        self.ask_no_more();
        let node = match &self.server {
            None => self.node_of_host(),
            Some(_) => {
                let lost = &lock(&self.roster).lost;
                let is_lost = |node: &usize| {
                    let is_other = *node != self.me && !lost.contains(&self.attempt.ids[*node]);
                    is_other && self.heard.is_lost(*node)
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

    /// Writes `event`, and gives back the verdict that holds then; `None`: the store has not answered.
    fn write(
        &self,
        event: impl Fn(&Launchers) -> Option<LauncherEvent>,
        holds: impl FnOnce(&Launchers) -> Option<&JobFailure>,
    ) -> Option<JobFailure> {
        let mut log = lock(&self.log);
        self.reachable(|_| log.append(event))?;
        holds(log.state()).cloned()
    }

    /// Writes the verdict unless there is a better one, and gives back the
    /// one that holds. One that is not final may be followed by another attempt.
    pub fn publish(&self, verdict: &JobFailure, is_final: bool) -> JobFailure {
        let is_interrupt = verdict.code == ErrorKind::Interrupted.exit_code();
        if is_final && self.is_elastic && is_interrupt && !self.hosts_store() {
            // The others go on without this launcher, unless they need its store.
            return self.go(verdict);
        }
        let number = self.attempt.number;
        let stored = match is_final || !self.can_restart {
            true => self.write(|all| all.abort_for(verdict), Launchers::abort),
            false => self.write(|all| all.over_for(number, verdict, true), Launchers::over),
        };
        stored.unwrap_or_else(|| verdict.clone())
    }

    /// The node that is lost, where ranks of this node may have failed for that reason; the headline of a verdict.
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

    /// The last words: nothing is asked of the store after this. Node 0 keeps
    /// the store until all that joined have said so, within reason: `decided`
    /// is when the others could know how it ends.
    pub fn leave(&self, decided: Instant) {
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
        let is_silent = |id: &usize| {
            let node = self.attempt.node_of(*id);
            node.is_some_and(|node| self.heard.is_lost(node))
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

#[cfg(test)]
mod tests;
