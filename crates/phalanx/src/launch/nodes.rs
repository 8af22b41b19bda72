//! Several launchers as one: they meet in the store of node 0, agree on the
//! world, and share the verdict.
//!
//! | key               | value                          | written by            |
//! |-------------------|--------------------------------|-----------------------|
//! | `launch/node/R`   | the node's card (JSON)         | node R, once          |
//! | `launch/beat/R`   | a count that rises             | node R, every second  |
//! | `launch/abort`    | the verdict (JSON)             | the first that knows  |
//! | `launch/done/R`   | all ranks of node R ended well | node R                |
//! | `launch/left/R`   | node R needs the store no more | node R                |
//!
//! A launcher that dies leaves no verdict itself; its guard writes one, or, before
//! there is a guard, the store by its will. A host
//! that dies or is cut off stops beating; node 0 notices. When node 0 dies,
//! the store dies with it, and that is the message.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, TcpStore, Will};
use phalanx_wire::Token;
use serde::{Deserialize, Serialize};

use super::Event;
use super::args::Meeting;
use super::report::Verdict;
use crate::error::{Error, ErrorKind, Result};

/// The first verdict, and the only one unless it was an echo.
pub(crate) const ABORT_KEY: &str = "launch/abort";

/// How often blocking steps look up for a Ctrl-C.
const SLICE: Duration = Duration::from_millis(200);
/// The same for connecting, which may need several round trips.
const CONNECT_SLICE: Duration = Duration::from_secs(1);
/// How often a launcher shows that it lives.
const BEAT: Duration = Duration::from_secs(1);
/// A node that did not beat for this long is lost. Only a dead or cut-off
/// host gets here, so it may be patient with a busy one.
const BEAT_LIMIT: Duration = Duration::from_secs(15);
/// How long node 0 keeps the store, from the moment on when all is decided,
/// so that every launcher can read the end of the story there.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// How long the store may take to answer while ranks run.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long the store may take to answer once this node's end is decided: it
/// may be out of reach, and an end must not wait for that.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How long one waits in silence.
const QUIET: Duration = Duration::from_secs(5);

/// What a node says of itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    /// How many nodes it expects.
    pub(crate) nodes: usize,
    /// Ranks that it starts.
    pub(crate) local_ranks: usize,
    /// The job's name.
    pub(crate) run_id: String,
    /// Host name.
    pub(crate) host: String,
    /// The launcher's process id.
    pub(crate) pid: u32,
    /// Our version: launchers of different builds do not mix.
    pub(crate) version: String,
}

/// Where the store listens, and how it is reached.
pub(crate) struct Place {
    /// On node 0, the store itself.
    pub(crate) server: Option<TcpServer>,
    /// What this launcher dials.
    pub(crate) dial: String,
    /// What the ranks of this node dial.
    pub(crate) master_addr: String,
    /// The port.
    pub(crate) master_port: u16,
    /// The address by which other nodes reach this one.
    pub(crate) bind: Option<IpAddr>,
    /// Something a person should know.
    pub(crate) warning: Option<String>,
}

/// Hosts the store of a launch on one node.
pub(crate) fn host_locally(
    port: Option<u16>,
    bind: Option<IpAddr>,
    token: &Token,
) -> Result<Place> {
    let ip = bind.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let server = listen(&[SocketAddr::new(ip, port.unwrap_or(0))], token).map_err(|error| {
        if port.is_some() && error.kind() == ErrorKind::Usage {
            error.note(
                "fix",
                "leave --master-port out (a free port is taken then), or choose another",
            )
        } else {
            error
        }
    })?;
    let (dial, warning) = reachable(server.local_addr());
    Ok(Place {
        dial: dial.to_string(),
        master_addr: dial.ip().to_string(),
        master_port: dial.port(),
        bind: None,
        warning,
        server: Some(server),
    })
}

/// Hosts the store on node 0, or finds out how to reach it.
pub(crate) fn meeting_place(
    meeting: &Meeting,
    bind: Option<IpAddr>,
    token: &Token,
) -> Result<Place> {
    let named = if meeting.host.contains(':') {
        format!("[{}]:{}", meeting.host, meeting.port)
    } else {
        format!("{}:{}", meeting.host, meeting.port)
    };
    if meeting.node_rank > 0 {
        // A name that does not resolve yet may do so later, when the first
        // node's pod or container is up: connecting tries again and again.
        let bind = bind.or_else(|| route_to(&named));
        return Ok(Place {
            server: None,
            dial: named,
            master_addr: meeting.host.clone(),
            master_port: meeting.port,
            bind,
            warning: None,
        });
    }
    let addresses: Vec<SocketAddr> = match bind {
        Some(ip) => vec![SocketAddr::new(ip, meeting.port)],
        None => named
            .to_socket_addrs()
            .map_err(|error| {
                Error::usage(format!(
                    "--master-addr {} is no host that is known here",
                    meeting.host
                ))
                .caused_by(error)
            })?
            .collect(),
    };
    let server = listen(&addresses, token).map_err(|error| match bind {
        Some(_) => error,
        None => error.note(
            "fix",
            "choose another --master-port, or, if the name belongs to another address of this host, add --bind ADDR",
        ),
    })?;
    let (dial, mut warning) = reachable(server.local_addr());
    let literal = meeting.host.parse::<IpAddr>().is_ok() || meeting.host == "localhost";
    if warning.is_none() && dial.ip().is_loopback() && !literal {
        warning = Some(format!(
            "{} is {} on this host, which other hosts cannot reach; if there are any, add --bind ADDR",
            meeting.host,
            dial.ip()
        ));
    }
    Ok(Place {
        dial: dial.to_string(),
        master_addr: match bind {
            Some(_) => dial.ip().to_string(),
            None => meeting.host.clone(),
        },
        master_port: meeting.port,
        bind: Some(server.local_addr().ip()).filter(|ip| !ip.is_unspecified()),
        warning,
        server: Some(server),
    })
}

/// The address to dial for one we listen on, with a warning for "all".
fn reachable(addr: SocketAddr) -> (SocketAddr, Option<String>) {
    if !addr.ip().is_unspecified() {
        return (addr, None);
    }
    let loopback = match addr {
        SocketAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
        SocketAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
    };
    let warning =
        format!("the store listens on all addresses ({addr}); --bind one of them to be stricter");
    (SocketAddr::new(loopback, addr.port()), Some(warning))
}

/// Listens on the first address that works.
fn listen(addresses: &[SocketAddr], token: &Token) -> Result<TcpServer> {
    let mut last = None;
    for addr in addresses {
        match TcpServer::bind(*addr, token.clone()) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some((addr, error)),
        }
    }
    let Some((addr, error)) = last else {
        return Err(Error::usage("the master address has no address"));
    };
    let kind = match error.kind() {
        StoreKind::Internal => ErrorKind::System,
        _ => ErrorKind::Usage,
    };
    Err(Error::new(kind, format!("cannot listen on {addr}")).caused_by(error))
}

/// Our own address on the way to `named`. Nothing is sent.
fn route_to(named: &str) -> Option<IpAddr> {
    let to = named.to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = if to.is_ipv4() {
        (IpAddr::from([0, 0, 0, 0]), 0).into()
    } else {
        (IpAddr::from([0u16; 8]), 0).into()
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The nodes of the job, after all have joined.
pub(crate) struct Nodes {
    store: Arc<TcpStore>,
    server: Option<TcpServer>,
    me: usize,
    cards: Vec<Card>,
    stop: Arc<AtomicBool>,
    /// The store did not answer our last words.
    out_of_reach: AtomicBool,
    /// Our verdict, should we be killed before we have a guard.
    will: Mutex<Option<Will>>,
}

/// Joins; `interrupted` is asked often and ends it.
///
/// # Errors
/// `Timeout` names the nodes that did not come, or the address where nobody
/// listens; `Usage` names the node that was started differently.
pub(crate) fn join(
    place: &mut Place,
    me: usize,
    card: Card,
    token: &Token,
    host_is_default: bool,
    timeout: Duration,
    mut interrupted: impl FnMut() -> Option<Error>,
) -> Result<Nodes> {
    let started = Instant::now();
    let deadline = started + timeout;
    let store = connect(
        &place.dial,
        token,
        host_is_default,
        started,
        deadline,
        &mut interrupted,
    )?;
    let total = card.nodes;
    // Until all are here the meeting's deadline holds for every question.
    let left = deadline.saturating_duration_since(Instant::now());
    store.set_answer_limit(left.clamp(LAST_WORDS, ANSWER_LIMIT));
    let mine = encode(&card)?;
    let stored = store
        .compare_set(&node_key(me), None, &mine)
        .map_err(lost_store)?;
    if stored != mine {
        let other = decode::<Card>(&stored);
        let who = other.map_or("another launcher".into(), |c| {
            format!("host {}, pid {}", c.host, c.pid)
        });
        return Err(Error::usage(format!("there is a node {me} already: {who}"))
            .note("fix", "give every launcher its own --node-rank"));
    }
    let will = match me {
        // Its store would die with it.
        0 => None,
        _ => store
            .leave_will(ABORT_KEY, &encode(&Verdict::of_killed(me, &card.host))?)
            .map_err(lost_store)?,
    };
    let nodes = Nodes {
        store: Arc::new(store),
        server: place.server.take(),
        me,
        cards: Vec::new(),
        stop: Arc::new(AtomicBool::new(false)),
        out_of_reach: AtomicBool::new(false),
        will: Mutex::new(will),
    };
    // From here on the others count on us: a failure must reach them.
    match nodes.gather(total, &card, started, deadline, &mut interrupted) {
        Ok(cards) => {
            nodes.store.set_answer_limit(ANSWER_LIMIT);
            Ok(Nodes { cards, ..nodes })
        }
        Err(error) => {
            let verdict = Verdict {
                code: error.exit_code(),
                echo: false,
                node: me,
                message: format!("node {me} (host {}): {}", card.host, error.chain()),
                notes: Vec::new(),
            };
            nodes.publish(&verdict);
            nodes.leave(total, Instant::now());
            Err(error)
        }
    }
}

fn connect(
    dial: &str,
    token: &Token,
    host_is_default: bool,
    started: Instant,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<TcpStore> {
    let mut spoken = false;
    loop {
        let slice = CONNECT_SLICE.min(deadline.saturating_duration_since(Instant::now()));
        let error =
            match TcpStore::connect(dial, token.clone(), slice.max(Duration::from_millis(20))) {
                Ok(store) => return Ok(store),
                Err(error) => error,
            };
        match error.kind() {
            StoreKind::TokenMismatch => {
                return Err(Error::usage(format!(
                    "the launcher at {dial} belongs to another job: its token is not ours"
                ))
                .note("fix", "give all launchers of the job the same --token-file"));
            }
            StoreKind::Stranger | StoreKind::Rejected(_) | StoreKind::Usage => {
                return Err(Error::usage(format!("no launcher to join at {dial}")).caused_by(error));
            }
            // Nobody listens, the name is not known yet, the handshake was
            // cut off: node 0 may just be starting.
            _ => {}
        }
        if let Some(error) = interrupted() {
            return Err(error);
        }
        if Instant::now() >= deadline {
            let waited = started.elapsed().as_secs_f64();
            let mut ours = Error::new(
                ErrorKind::Timeout,
                format!("no launcher of node 0 answered at {dial} within {waited:.1} s"),
            )
            .caused_by(error);
            if host_is_default {
                ours = ours.note(
                    "perhaps",
                    "--master-addr HOST is missing: 127.0.0.1 is only the default",
                );
            }
            return Err(ours.note("fix", "start node 0, check --master-addr and --master-port and that the way there is open"));
        }
        if !spoken && started.elapsed() > QUIET {
            spoken = true;
            eprintln!("waiting for the launcher of node 0 at {dial}");
        }
        // Refusals come at once; do not hammer.
        thread::sleep(
            Duration::from_millis(50).min(deadline.saturating_duration_since(Instant::now())),
        );
    }
}

impl Nodes {
    /// Waits for everybody's card and compares them with ours.
    fn gather(
        &self,
        total: usize,
        card: &Card,
        started: Instant,
        deadline: Instant,
        interrupted: &mut impl FnMut() -> Option<Error>,
    ) -> Result<Vec<Card>> {
        let keys: Vec<String> = (0..total).map(node_key).collect();
        let mut missing: Vec<String> = keys.clone();
        let mut seen: HashMap<String, Card> = HashMap::new();
        let mut spoken = false;
        loop {
            let wanted: Vec<&str> = missing.iter().map(String::as_str).collect();
            let left = match self.store.wait(&wanted, SLICE) {
                Ok(()) => Vec::new(),
                Err(error) if error.kind() == StoreKind::Timeout => error.missing_keys().to_vec(),
                Err(error) => return Err(lost_store(error)),
            };
            // Look at cards as they come: a node that expects another world
            // must not keep us waiting for one that never comes.
            for key in missing.iter().filter(|key| !left.contains(key)) {
                let Some(bytes) = self.store.try_get(key).map_err(lost_store)? else {
                    continue;
                };
                let theirs = decode::<Card>(&bytes).ok_or_else(|| {
                    Error::new(ErrorKind::System, format!("{key} holds no node's card"))
                })?;
                compare(card, self.me, &theirs, key)?;
                seen.insert(key.clone(), theirs);
            }
            if left.is_empty() {
                break;
            }
            missing = left;
            let verdict = self.store.try_get(ABORT_KEY).map_err(lost_store)?;
            if let Some(verdict) = verdict.and_then(|bytes| decode::<Verdict>(&bytes)) {
                return Err(verdict.into_error(None));
            }
            if let Some(error) = interrupted() {
                return Err(error);
            }
            let absent: Vec<String> = missing
                .iter()
                .filter_map(|key| key.rsplit('/').next())
                .map(str::to_owned)
                .collect();
            let absent = absent.join(", ");
            if Instant::now() >= deadline {
                let waited = started.elapsed().as_secs_f64();
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("node {absent} of {total} did not come within {waited:.1} s"),
                )
                .note(
                    "fix",
                    "start a launcher there, or wait longer with --rdzv-timeout S",
                ));
            }
            if !spoken && started.elapsed() > QUIET {
                spoken = true;
                eprintln!("waiting for node {absent} of {total}");
            }
        }
        keys.iter()
            .map(|key| {
                seen.remove(key)
                    .ok_or_else(|| Error::new(ErrorKind::System, format!("{key} vanished")))
            })
            .collect()
    }

    /// Our guard has our verdict: from now on a broken connection to the store
    /// alone is nobody's death.
    pub(crate) fn is_guarded(&self) {
        let mut will = self.will.lock().unwrap_or_else(PoisonError::into_inner);
        drop(will.take());
    }

    /// The nodes' cards, by node rank.
    pub(crate) fn cards(&self) -> &[Card] {
        &self.cards
    }

    /// Starts the thread that beats and listens.
    pub(crate) fn watch(&self, events: Sender<Event>) -> Result<()> {
        let store = self.store.clone();
        let stop = self.stop.clone();
        let me = self.me;
        let hosts: Vec<String> = self.cards.iter().map(|card| card.host.clone()).collect();
        thread::Builder::new()
            .name("nodes".into())
            .spawn(move || {
                let mut pulse = Pulse::new(hosts.len());
                while !stop.load(Ordering::Relaxed) {
                    match store.get(ABORT_KEY, BEAT / 2) {
                        Ok(bytes) => {
                            let verdict = decode(&bytes).unwrap_or_else(|| Verdict {
                                code: ErrorKind::PeerLost.exit_code(),
                                echo: true,
                                node: me,
                                message: "another node failed and gave no reason".into(),
                                notes: Vec::new(),
                            });
                            let _ = events.send(Event::Abort(Box::new(verdict)));
                            return;
                        }
                        Err(error) if error.kind() == StoreKind::Timeout => {}
                        Err(error) => {
                            let _ = events.send(Event::StoreLost(error.to_string()));
                            return;
                        }
                    }
                    match pulse.beat(&*store, me, Instant::now()) {
                        Ok(None) => {}
                        Ok(Some(node)) => {
                            let verdict = Verdict {
                                code: ErrorKind::PeerLost.exit_code(),
                                echo: false,
                                node: me,
                                message: format!(
                                    "node {node} (host {}) has not been heard of for {} s",
                                    hosts.get(node).map_or("?", String::as_str),
                                    BEAT_LIMIT.as_secs()
                                ),
                                notes: vec![(
                                    "perhaps".into(),
                                    "the host or the network between is down".into(),
                                )],
                            };
                            let _ =
                                encode(&verdict).map(|v| store.compare_set(ABORT_KEY, None, &v));
                        }
                        Err(error) => {
                            let _ = events.send(Event::StoreLost(error.to_string()));
                            return;
                        }
                    }
                }
            })
            .map(drop)
            .map_err(|error| {
                Error::new(ErrorKind::System, "cannot start a thread").caused_by(error)
            })
    }

    /// Whether there is any use in asking the store: once the end is decided,
    /// a store that did not answer is not asked again.
    fn reachable<T>(&self, ask: impl FnOnce(&TcpStore) -> phalanx_store::Result<T>) -> Option<T> {
        if self.out_of_reach.load(Ordering::Relaxed) {
            return None;
        }
        self.store.set_answer_limit(LAST_WORDS);
        match ask(&self.store) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.out_of_reach.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    /// Writes the verdict unless there is a better one, and gives back the
    /// one that holds.
    pub(crate) fn publish(&self, verdict: &Verdict) -> Verdict {
        let Ok(mine) = encode(verdict) else {
            return verdict.clone();
        };
        let mut expected: Option<Vec<u8>> = None;
        // Twice: once against nothing, once against an echo.
        for _ in 0..2 {
            let put = |store: &TcpStore| store.compare_set(ABORT_KEY, expected.as_deref(), &mine);
            let Some(stored) = self.reachable(put) else {
                break;
            };
            if stored == mine {
                break;
            }
            match decode::<Verdict>(&stored) {
                Some(theirs) if theirs.echo && !verdict.echo => expected = Some(stored),
                Some(theirs) => return theirs,
                None => break,
            }
        }
        verdict.clone()
    }

    /// The verdict that holds now.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        decode(&self.reachable(|store| store.try_get(ABORT_KEY))??)
    }

    /// Says that all ranks here ended well.
    pub(crate) fn done(&self) -> Result<()> {
        self.store
            .set(&format!("launch/done/{}", self.me), b"")
            .map_err(lost_store)
    }

    fn everybody(&self) -> Vec<usize> {
        (0..self.cards.len()).collect()
    }

    /// Whether all nodes said so; waits a moment for it.
    pub(crate) fn all_done(&self) -> Result<bool> {
        self.wait_all("launch/done", &self.everybody(), SLICE)
            .map_err(lost_store)
    }

    /// The last words: nothing is asked of the store after this. Node 0 keeps
    /// the store until all that joined have said so, within reason: `decided`
    /// is when the others could know how it ends.
    pub(crate) fn leave(&self, total: usize, decided: Instant) {
        self.stop.store(true, Ordering::Relaxed);
        let left = format!("launch/left/{}", self.me);
        self.reachable(|store| store.set(&left, b""));
        if self.server.is_none() {
            return;
        }
        let joined = |node: &usize| matches!(self.store.try_get(&node_key(*node)), Ok(Some(_)));
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
            Err(error) if error.kind() == StoreKind::Timeout => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Our own beat and, on node 0, everybody's.
struct Pulse {
    next: Option<Instant>,
    heard: Vec<(Option<Vec<u8>>, Option<Instant>)>,
}

impl Pulse {
    fn new(nodes: usize) -> Self {
        Pulse {
            next: None,
            heard: vec![(None, None); nodes],
        }
    }

    /// Beats when it is time. `Some(node)`: that node is lost.
    fn beat(
        &mut self,
        store: &dyn Store,
        me: usize,
        now: Instant,
    ) -> phalanx_store::Result<Option<usize>> {
        if self.next.is_some_and(|next| now < next) {
            return Ok(None);
        }
        self.next = Some(now + BEAT);
        store.add(&format!("launch/beat/{me}"), 1)?;
        if me != 0 {
            return Ok(None);
        }
        for (node, (value, since)) in self.heard.iter_mut().enumerate() {
            if node == me {
                continue;
            }
            let beat = store.try_get(&format!("launch/beat/{node}"))?;
            if beat != *value || since.is_none() {
                *value = beat;
                *since = Some(now);
            } else if since.is_some_and(|since| now.duration_since(since) > BEAT_LIMIT) {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }
}

fn node_key(node: usize) -> String {
    format!("launch/node/{node}")
}

/// Two nodes must agree about the world before anything starts.
fn compare(mine: &Card, me: usize, theirs: &Card, key: &str) -> Result<()> {
    let node = key.rsplit('/').next().unwrap_or("?");
    let differ =
        |what: &str, their: &dyn std::fmt::Display, my: &dyn std::fmt::Display| {
            Err(Error::usage(format!(
            "node {node} (host {}) was started with {what} {their}, node {me} (host {}) with {my}",
            theirs.host, mine.host
        ))
        .note("fix", "start all launchers of a job alike, but for --node-rank"))
        };
    if theirs.nodes != mine.nodes {
        return differ("--nnodes", &theirs.nodes, &mine.nodes);
    }
    if theirs.run_id != mine.run_id {
        return differ("--rdzv-id", &theirs.run_id, &mine.run_id);
    }
    if theirs.version != mine.version {
        return differ("phalanx", &theirs.version, &mine.version);
    }
    Ok(())
}

/// The store does not answer any more: node 0 is gone. The store's own words
/// say where it was.
fn lost_store(error: phalanx_store::Error) -> Error {
    let kind = match error.kind() {
        StoreKind::Timeout => ErrorKind::Timeout,
        _ => ErrorKind::PeerLost,
    };
    Error::new(kind, "lost the launcher of node 0").caused_by(error)
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|error| Error::new(ErrorKind::System, "cannot write JSON").caused_by(error))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_store::MemStore;

    fn card() -> Card {
        Card {
            nodes: 2,
            local_ranks: 2,
            run_id: "none".into(),
            host: "a".into(),
            pid: 1,
            version: "0.1.0".into(),
        }
    }

    #[test]
    fn cards_must_agree() {
        let mine = card();
        assert!(
            compare(
                &mine,
                0,
                &Card {
                    local_ranks: 7,
                    ..card()
                },
                "launch/node/1"
            )
            .is_ok()
        );
        for (theirs, want) in [
            (Card { nodes: 3, ..card() }, "--nnodes 3"),
            (
                Card {
                    run_id: "x".into(),
                    ..card()
                },
                "--rdzv-id x",
            ),
            (
                Card {
                    version: "9".into(),
                    ..card()
                },
                "phalanx 9",
            ),
        ] {
            let error = compare(&mine, 0, &theirs, "launch/node/1").unwrap_err();
            assert!(error.chain().contains(want), "{}", error.chain());
            assert!(
                error.chain().starts_with("node 1 (host a)"),
                "{}",
                error.chain()
            );
        }
    }

    #[test]
    fn a_silent_node_is_lost_and_a_beating_one_is_not() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(3);
        let start = Instant::now();
        let mut now = start;
        let mut lost = None;
        while lost.is_none() && now < start + 2 * BEAT_LIMIT {
            // node 1 beats, node 2 does for three seconds
            store.add("launch/beat/1", 1).unwrap();
            if now < start + 3 * BEAT {
                store.add("launch/beat/2", 1).unwrap();
            }
            lost = pulse.beat(&store, 0, now).unwrap();
            now += BEAT;
        }
        assert_eq!(lost, Some(2));
        assert!(now > start + BEAT_LIMIT + 3 * BEAT);
    }

    #[test]
    fn a_node_that_never_beat_is_lost_too() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(2);
        let start = Instant::now();
        assert_eq!(pulse.beat(&store, 0, start).unwrap(), None);
        assert_eq!(pulse.beat(&store, 0, start + BEAT_LIMIT).unwrap(), None);
        assert_eq!(
            pulse.beat(&store, 0, start + 2 * BEAT_LIMIT).unwrap(),
            Some(1)
        );
    }

    #[test]
    fn other_nodes_only_beat() {
        let store = MemStore::new();
        let mut pulse = Pulse::new(2);
        let start = Instant::now();
        for n in 0..40 {
            assert_eq!(pulse.beat(&store, 1, start + n * BEAT).unwrap(), None);
        }
        assert_eq!(store.try_get("launch/beat/1").unwrap().unwrap(), b"40");
    }

    #[test]
    fn our_address_on_the_way_to_loopback() {
        assert_eq!(route_to("127.0.0.1:9"), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(route_to("no such host:9"), None);
    }
}
