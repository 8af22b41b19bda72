//! A launcher joins a job: it connects to the store of node 0, publishes its [`NodeInfo`], and waits for the others.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_comm::PortRange;
use phalanx_comm::transport::what_loopback_means;
use phalanx_member::Replay;
use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, TcpStore, Will};
use phalanx_wire::Token;

use super::attempts::ToBegin;
use super::info::{NodeInfo, compare, compare_jobs};
use super::membership::{Attempt, LauncherEvent, LauncherLog, Launchers};
use super::pulse::Heartbeats;
use super::standby::{self, Roster};
use super::{ANSWER_LIMIT, END_LIMIT, NodeStore, Nodes, QUIET, SLICE, lost_store};
use crate::error::{Error, ErrorKind, Result};
use crate::report::JobFailure;
use crate::{lock, say, spawn, system};

/// How many nodes without a number have arrived.
const ARRIVED_KEY: &str = "launch/arrived";
/// Why the last launcher was refused.
const REFUSED_KEY: &str = "launch/refused";

/// How much longer than its deadline connecting may take: resolving a name has none.
const LOOKUP_LIMIT: Duration = Duration::from_secs(1);
/// Threads of a launcher that use the store at once: for heartbeats, for the verdict, and the main thread.
pub(super) const ASKING_THREADS: usize = 3;
/// Most kinds of refused connections that are named at a time.
const REFUSED_SHOWN: usize = 3;

/// Joins as node `me`, or as the next one that arrives; `interrupted` is asked often and ends it.
///
/// # Errors
/// `Timeout` names the nodes that did not come, or the address where no launcher
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
    // Other nodes reach this one at the local address of its connection to node 0.
    if at.server.is_none() {
        at.bind = at.bind.or(store.local_ip());
    }
    info.address = at.bind;
    let standby = standby_of(at, &info, token, ports);
    info.standby = standby.as_ref().map(TcpServer::local_addr);
    let total = info.nodes;
    // Until all nodes have joined, the deadline of joining limits every request.
    let left = deadline.saturating_duration_since(Instant::now());
    store.set_response_timeout(left.clamp(END_LIMIT, ANSWER_LIMIT));
    // Without reserved connections a request opens one.
    let _ = store.reserve_connections(ASKING_THREADS);
    let store = Arc::new(store);
    let mut log = LauncherLog::new(store.clone());
    if at.server.is_none() && me != Some(0) {
        // Compared before anything is written, so that a refused launcher does not disturb the others.
        let first = node_0(&mut log, deadline, &mut interrupted)?;
        compare_jobs(&info, &first, &at.dial)?;
        compare(&info, me, &first, 0).inspect_err(|error| refuse(&*store, &info, error))?;
    }
    let me = match me {
        Some(me) => me,
        None if at.server.is_some() => 0,
        None => arrive(&store, &mut log, info.least.map_or(total, |_| usize::MAX))?,
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
        moves: None,
        log: Mutex::new(log),
        id: me,
        me,
        attempt: Attempt::default(),
        stop: Arc::new(AtomicBool::new(false)),
        is_watched: Arc::new(AtomicBool::new(true)),
        beats: Arc::new(Heartbeats::new(total)),
        host: Arc::new(Heartbeats::new(1)),
        gone: Arc::default(),
        out_of_reach: AtomicBool::new(false),
        will: Mutex::new(will),
        can_restart: info.max_restarts > 0 || info.elastic || info.least.is_some(),
        is_elastic: info.least.is_some(),
        has_left: Arc::default(),
        to_begin: ToBegin::default(),
        is_spare: false,
        servers: Vec::new(),
        searches_until: None,
    };
    if nodes.is_elastic {
        nodes.store.set_response_timeout(ANSWER_LIMIT);
        return Ok(nodes);
    }
    // From here on the others expect this launcher: they must learn of its failure.
    match nodes.gather(total, &info, started, deadline, &mut interrupted) {
        Ok(attempt) => {
            nodes.is_elastic = info.elastic;
            nodes.enter(&attempt);
            Ok(nodes)
        }
        Err(error) => {
            let message = format!("node {me} (host {}): {}", info.host, error.chain());
            let why = JobFailure::new(error.exit_code(), me, message);
            let event = |all: &Launchers| match me {
                0 => all.abort_for(&why),
                // Only its own entry: another launcher may have taken its place.
                _ if all.info(me) == Some(&info) => all.lost_for(me, &why),
                _ => None,
            };
            let written = nodes.reachable(|_| lock(&nodes.log).append(event));
            if written.is_some() {
                nodes.is_guarded();
            }
            // Otherwise another launcher may come under this number, and node 0 must wait for that one at the end.
            if lock(&nodes.log).state().abort().is_some() {
                nodes.leave(Instant::now());
            }
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

/// Writes the description of launcher `me`; from then on the others expect it. Returns its will.
fn register(log: &mut LauncherLog, me: usize, info: &NodeInfo) -> Result<Option<Will>> {
    let why = JobFailure::of_killed(me, &info.host);
    let killed = LauncherEvent::Lost { id: me, why };
    // Left before the entry, because from then on the others expect this launcher.
    let mut will = match me {
        // The store would end with it.
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
    let who = format!("host {}, pid {}", other.host, other.pid);
    let error = Error::usage(format!("node {me} has already joined: {who}"))
        .note("fix", "give every launcher its own --node-rank");
    refuse(&**log.store(), info, &error);
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
        check_not_over(log.state(), interrupted)?;
    }
}

/// Fails if the job has a verdict, or this launcher was interrupted.
fn check_not_over(
    launchers: &Launchers,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<()> {
    let verdict = launchers.abort().cloned();
    let error = verdict.map(|verdict| verdict.into_error(None));
    error.or_else(interrupted).map_or(Ok(()), Err)
}

/// The number of a launcher without one: the next after those that have arrived, or that of one that has left.
fn arrive(store: &TcpStore, log: &mut LauncherLog, total: usize) -> Result<usize> {
    let arrived = store.add(ARRIVED_KEY, 1).map_err(lost_node_0)?;
    let me = usize::try_from(arrived).unwrap_or(usize::MAX);
    if me < total {
        return Ok(me);
    }
    let all = log.read().map_err(lost_node_0)?;
    let free = (1..total).find(|node| all.attempt().is_none() && all.info(*node).is_none());
    free.ok_or_else(|| {
        Error::usage(format!(
        "the job has its {total} nodes already: this launcher is one more"
    ))
    .note(
        "fix",
        "start one launcher per node, and a new job (--rdzv-endpoint) after the last one has ended",
    )
    })
}

/// Publishes to the launchers that wait why this one does not join them.
fn refuse(store: &dyn Store, info: &NodeInfo, error: &Error) {
    let (host, error) = (&info.host, error.chain());
    let why = format!("a launcher on host {host} was refused: {error}");
    // If that does not arrive, the others print less.
    let _ = store.set(REFUSED_KEY, why.as_bytes());
}

fn connect(
    dial: &str,
    token: &Token,
    started: Instant,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<TcpStore> {
    // One attempt until the deadline, because a new one goes to the end of a busy server's queue.
    // It cannot be interrupted, so it runs on a thread.
    let (sender, connected) = channel();
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
        // After an interrupt there is no receiver.
        let _ = sender.send(store);
    })?;
    let last = || lock(&last).clone();
    let mut say_at = QUIET;
    let error = loop {
        match connected.recv_timeout(SLICE) {
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
    /// Waits for the first attempt, which begins when all nodes have joined.
    fn gather(
        &self,
        total: usize,
        info: &NodeInfo,
        started: Instant,
        deadline: Instant,
        interrupted: &mut impl FnMut() -> Option<Error>,
    ) -> Result<Attempt> {
        let mut log = lock(&self.log);
        let mut say_at = QUIET;
        loop {
            // Where many arrive at once, several events are read with one request.
            std::thread::sleep(Duration::from_micros(250) * total.min(1000) as u32);
            match log.wait(SLICE) {
                Ok(_) => {}
                // The log was not read: no event is known.
                Err(error) if error.kind() == StoreKind::NoAnswer => {}
                Err(error) => return Err(lost_node_0(error)),
            }
            if self.me == 0 {
                let first = Attempt {
                    ids: (0..total).collect(),
                    master_port: info.master_port.unwrap_or(0),
                    ..Attempt::default()
                };
                let are_all = |all: &Launchers| (0..total).all(|node| all.info(node).is_some());
                let written = log.append(|all| all.begin_with(&first).filter(|_| are_all(all)));
                written.map_err(lost_node_0)?;
            }
            let all = log.state();
            if all.info(self.me) != Some(info) {
                let what = "the launcher of node 0 has lost the connection to this one";
                return Err(Error::new(ErrorKind::PeerLost, what));
            }
            if let Some(attempt) = all.attempt() {
                return Ok(attempt.clone());
            }
            check_not_over(all, interrupted)?;
            let absent = (0..total).filter(|node| all.info(*node).is_none());
            let absent: Vec<String> = absent.map(|node| node.to_string()).collect();
            // If all have joined, node 0 has yet to begin the attempt.
            let absent = match absent.is_empty() {
                true => "0".to_owned(),
                false => absent.join(", "),
            };
            if Instant::now() >= deadline {
                let waited = started.elapsed().as_secs_f64();
                let mut error = Error::new(
                    ErrorKind::Timeout,
                    format!("node {absent} of {total} did not join within {waited:.1} s"),
                );
                let refused = self.refused(all);
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
                let refused = self.refused(all).join("; ");
                let why = match (&self.server, refused.as_str()) {
                    (None, "") => String::new(),
                    (_, "") => format!(": it has not connected to {}", self.reached_at()),
                    (_, refused) => format!(
                        ": {refused}; give all launchers of the job the same flags and --token-file"
                    ),
                };
                say::note(format_args!("waiting for node {absent} of {total}{why}"));
            }
        }
    }

    /// The address of our store.
    fn reached_at(&self) -> String {
        let addr = self.store.addr();
        match addr.parse::<SocketAddr>() {
            Ok(at) if at.ip().is_loopback() => format!("{addr}, which no other host can reach"),
            _ => addr,
        }
    }

    /// The connections that our store refused, and the last launcher that was refused or has left.
    fn refused(&self, all: &Launchers) -> Vec<String> {
        let refused = self.server.as_ref().map(|server| server.refused());
        let refused = refused.unwrap_or_default();
        let most = refused.iter().take(REFUSED_SHOWN);
        let most = most.map(ToString::to_string);
        let last = self.store.try_get(REFUSED_KEY).ok().flatten();
        let last = last.map(|why| String::from_utf8_lossy(&why).into_owned());
        most.chain(last).chain(all.left.clone()).collect()
    }
}

/// The error that the store does not answer before all nodes have joined.
fn lost_node_0(error: phalanx_store::Error) -> Error {
    lost_store("node 0", error)
}
