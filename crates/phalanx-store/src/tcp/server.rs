//! The store server: a thread around `poll`.

use std::collections::{BTreeSet, HashMap};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Proven, RejectReason, Role, TAG_BYTES};
use phalanx_wire::store_msg::{Failure, Request, Response};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::conn::{Conn, Pulled, State, Wait};
use super::refused::{RefusalReason, Refusals, Refused};
use super::room;
use super::socket::{listen, tune};
use super::waiters::{ConnId, Waiters};
use crate::auth::{
    Greeted, HANDSHAKE_TIMEOUT, Pending, Standing, StrangerLog, closable, is_out_of_files,
    max_pending, next_closable,
};
use crate::table::{Limits, Table};
use crate::{Error, ErrorKind, Result};

#[cfg(any(test, fuzzing))]
#[path = "fuzzing.rs"]
pub(crate) mod fuzzing;

/// Pause after the process ran out of file descriptors: the listener stays
/// readable, so polling it would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes read at once.
const SCRATCH_BYTES: usize = 128 << 10;

/// Connections accepted before the members are served again.
const ACCEPT_BATCH: usize = 256;

/// Requests of one member served before the others have their turn.
const REQUESTS_PER_TURN: usize = 64;

/// What is buffered for all members together at most: all requests under way,
/// answers not taken, keys waited for. Four thousand ranks that wait for each
/// other come to 80 MiB.
const MAX_BUFFERED_BYTES: u64 = 128 << 20;

/// Bounds of a server. The defaults are those of the design; tests and small
/// hosts may want others.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// How much the store may hold.
    pub limits: Limits,
    /// Most members connected at once (4096).
    pub max_clients: usize,
    /// Most connections that have not proven the token
    /// ([`auth::max_pending`](crate::auth::max_pending)).
    pub max_pending_handshakes: usize,
    /// How long a handshake may take (5 s).
    pub handshake_timeout: Duration,
    /// Most bytes buffered for all members together (128 MiB), in addition to
    /// what the store holds: incomplete requests, answers that are not taken,
    /// and, for up to half of it, keys that are waited for.
    pub max_buffered_bytes: u64,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            max_clients: 4096,
            max_pending_handshakes: max_pending(),
            handshake_timeout: HANDSHAKE_TIMEOUT,
            max_buffered_bytes: MAX_BUFFERED_BYTES,
        }
    }
}

/// What the server's thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    rejected: AtomicU64,
    clients: AtomicUsize,
    pending_waits: AtomicUsize,
    buffered_bytes: AtomicU64,
    refusals: Refusals,
}

/// A store server. It runs in a thread of its own until it is dropped, which
/// closes all connections.
///
/// Only holders of the token are served. Whoever else connects is closed,
/// counted ([`rejected`](Self::rejected)) and logged at most once a minute.
#[derive(Debug)]
pub struct TcpServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Serves on `addr`; port 0 takes a free one, see
    /// [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`]; [`ErrorKind::Usage`] when the address is not
    /// this host's, or means all interfaces, for which
    /// [`bind_all_interfaces`](Self::bind_all_interfaces) must be asked.
    pub fn bind(addr: SocketAddr, token: Token) -> Result<TcpServer> {
        Self::bind_with(addr, token, ServerOptions::default())
    }

    /// As [`bind`](Self::bind), with other bounds.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with(addr: SocketAddr, token: Token, options: ServerOptions) -> Result<TcpServer> {
        if addr.ip().is_unspecified() {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{addr} means all interfaces of this host: give the address that the other hosts \
                     know, or ask for all interfaces explicitly (TcpServer::bind_all_interfaces)"
                ),
            ));
        }
        Self::from_listener_with(listen(addr)?, token, options)
    }

    /// Serves on all interfaces of this host, IPv4, and logs a warning: anyone
    /// who can reach the host can try.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_all_interfaces(port: u16, token: Token) -> Result<TcpServer> {
        let addr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
        Self::from_listener(listen(addr)?, token)
    }

    /// Serves on a socket that listens already: one that the launcher passed
    /// on, so that no other process can take the port in between.
    ///
    /// # Errors
    /// [`ErrorKind::Io`].
    pub fn from_listener(listener: TcpListener, token: Token) -> Result<TcpServer> {
        Self::from_listener_with(listener, token, ServerOptions::default())
    }

    /// As [`from_listener`](Self::from_listener), with other bounds.
    ///
    /// # Errors
    /// [`ErrorKind::Io`].
    pub fn from_listener_with(
        listener: TcpListener,
        token: Token,
        options: ServerOptions,
    ) -> Result<TcpServer> {
        let addr = listener
            .local_addr()
            .map_err(|e| Error::io("reading the address of a listening socket", e))?;
        let fail = |e| Error::io(format_args!("setting up the store server on {addr}"), e);
        if addr.ip().is_unspecified() {
            tracing::warn!(%addr, "the store listens on all interfaces of this host; use a private network or a firewall");
        }
        listener.set_nonblocking(true).map_err(fail)?;
        let (waker, woken) = UnixStream::pair().map_err(fail)?;
        woken.set_nonblocking(true).map_err(fail)?;
        waker.set_nonblocking(true).map_err(fail)?;
        let shared = Arc::new(Shared::default());
        let serving = Serving::new((listener, addr), woken, token, options, shared.clone());
        let thread = std::thread::Builder::new()
            .name("phalanx-store".to_owned())
            .spawn(move || serving.run())
            .map_err(fail)?;
        Ok(TcpServer {
            addr,
            shared,
            waker,
            thread: Some(thread),
        })
    }

    /// The address that it listens on, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections refused so far: strangers, wrong tokens, handshakes that
    /// took too long, members with a wrong role or job.
    pub fn rejected(&self) -> u64 {
        self.shared.rejected.load(Ordering::Relaxed)
    }

    /// The same by source and reason, the most first: for a person who waits for
    /// a member that does not come.
    pub fn refused(&self) -> Vec<Refused> {
        self.shared.refusals.list()
    }

    /// Members connected now. A member that waits on several threads at once
    /// has several connections.
    pub fn clients(&self) -> usize {
        self.shared.clients.load(Ordering::Relaxed)
    }

    /// Waits that members have pending now.
    pub fn pending_waits(&self) -> usize {
        self.shared.pending_waits.load(Ordering::Relaxed)
    }

    /// Bytes buffered for members now, beside what the store holds.
    pub fn buffered_bytes(&self) -> u64 {
        self.shared.buffered_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Full means that a wake-up is under way already.
        let _ = self.waker.write(&[1]);
        if let Some(thread) = self.thread.take() {
            // The thread polls and never blocks in a client, so it ends at once.
            // A panic there is a bug that has been printed; there is nobody
            // left to serve either way.
            let _ = thread.join();
        }
    }
}

/// What one step came to.
#[derive(PartialEq, Eq)]
enum Step {
    /// There may be more to do.
    On,
    /// Nothing to do until something happens.
    Rest,
}

/// The state of the server's thread.
struct Serving {
    place: String,
    /// Stands as the source of what the log says about the listener itself.
    listening_on: IpAddr,
    listener: TcpListener,
    woken: UnixStream,
    token: Token,
    options: ServerOptions,
    shared: Arc<Shared>,
    log: StrangerLog,
    table: Table,
    waiters: Waiters,
    conns: HashMap<ConnId, Conn>,
    next_id: ConnId,
    /// Accept no connection before this time.
    accept_again: Option<Instant>,
    /// Waits that were answered because of what another connection did: these
    /// have something to send, and may have asked more in the meantime.
    answered: Vec<ConnId>,
    /// Members with more complete requests than they were served in one turn.
    unfinished: BTreeSet<ConnId>,
    /// Bytes of keys that members wait for; a little too high between two
    /// counts.
    waited_bytes: u64,
    /// What one read fills.
    scratch: Vec<u8>,
}

impl Serving {
    fn new(
        (listener, addr): (TcpListener, SocketAddr),
        woken: UnixStream,
        token: Token,
        options: ServerOptions,
        shared: Arc<Shared>,
    ) -> Serving {
        Serving {
            place: format!("store server {addr}"),
            listening_on: addr.ip(),
            listener,
            woken,
            token,
            options,
            shared,
            log: StrangerLog::new(),
            table: Table::new(options.limits),
            waiters: Waiters::default(),
            conns: HashMap::new(),
            next_id: 0,
            accept_again: None,
            answered: Vec::new(),
            unfinished: BTreeSet::new(),
            waited_bytes: 0,
            scratch: vec![0; SCRATCH_BYTES],
        }
    }

    fn run(mut self) {
        let mut ready = Vec::new();
        while !self.shared.stop.load(Ordering::Acquire) {
            let accept = match self.sleep(&mut ready) {
                Ok(accept) => accept,
                Err(e) => {
                    // `poll` fails for want of memory, or by a bug; going on
                    // at once would spin.
                    tracing::error!(place = self.place, "poll failed: {e}");
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            for (id, flags) in ready.drain(..) {
                self.attend(id, flags);
            }
            self.finish_turn();
            if accept {
                self.accept();
            }
            self.publish();
        }
    }

    /// What follows from the bytes that have come: deadlines, further turns,
    /// answers to those who waited, memory.
    fn finish_turn(&mut self) {
        self.expire();
        for id in std::mem::take(&mut self.unfinished) {
            self.advance(id);
            self.leave_if_ended(id);
        }
        while let Some(id) = self.answered.pop() {
            self.advance(id);
        }
        self.make_room();
    }

    /// Closes members that owe us something, the largest first, until what is
    /// buffered is within its bound.
    fn make_room(&mut self) {
        let mut bytes = room::buffered_bytes(&self.conns);
        while bytes > self.options.max_buffered_bytes {
            let Some(id) = room::largest_stalled(&self.conns) else {
                // The rest is on its way through.
                break;
            };
            if let Some(conn) = self.conns.get(&id) {
                bytes -= conn.buffered_bytes();
                let (place, source) = (&self.place, conn.peer.ip());
                self.log.note(source, place, &"a member leaves requests unfinished or answers untaken, and the memory for that is used up");
            }
            self.close(id);
        }
        self.waited_bytes = room::waited_bytes(&self.conns);
        self.shared.buffered_bytes.store(bytes, Ordering::Relaxed);
    }

    fn publish(&self) {
        let members = self.conns.values().filter(|c| !c.is_pending()).count();
        let waits = self.conns.values();
        let waits = waits.filter(|c| matches!(c.state, State::Waiting(_)));
        self.shared
            .pending_waits
            .store(waits.count(), Ordering::Relaxed);
        self.shared.clients.store(members, Ordering::Relaxed);
    }

    /// Sleeps until something happens or is due. Fills in which connections
    /// are ready, and says whether someone wants to connect.
    fn sleep(&mut self, ready: &mut Vec<(ConnId, PollFlags)>) -> std::io::Result<bool> {
        let now = Instant::now();
        if self.accept_again.is_some_and(|then| then <= now) {
            self.accept_again = None;
        }
        let mut due = self.accept_again;
        if !self.unfinished.is_empty() {
            due = Some(now);
        }
        let mut sooner = |when: Instant| due = Some(due.map_or(when, |due| due.min(when)));
        let mut fds = Vec::with_capacity(self.conns.len() + 2);
        let mut ids = Vec::with_capacity(self.conns.len());
        let mut pending = 0;
        fds.push(PollFd::new(&self.woken, PollFlags::IN));
        for (id, conn) in &self.conns {
            match &conn.state {
                State::Greeting(_) => {
                    pending += 1;
                    sooner(conn.since + self.options.handshake_timeout);
                }
                State::Waiting(wait) => sooner(wait.deadline),
                State::Closing => sooner(conn.since + self.options.handshake_timeout),
                State::Member => {}
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, conn.wants_input());
            flags.set(PollFlags::OUT, conn.has_output());
            ids.push(*id);
            fds.push(PollFd::new(&conn.stream, flags));
        }
        let mut listening = self.accept_again.is_none();
        if pending >= self.options.max_pending_handshakes {
            // No place: look again when one may be taken from somebody.
            if let Some(when) = next_closable(pending_conns(&self.conns))
                && when > now
            {
                listening = false;
                sooner(when);
            }
        }
        if listening {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let timeout = due.map(|due| {
            let left = due.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
        for (id, fd) in ids.iter().zip(&fds[1..]) {
            if !fd.revents().is_empty() {
                ready.push((*id, fd.revents()));
            }
        }
        let accept = listening && fds.last().is_some_and(|fd| !fd.revents().is_empty());
        if !fds[0].revents().is_empty() {
            let mut sink = [0; 16];
            // Emptied or not, the flag says what it was for.
            let _ = (&self.woken).read(&mut sink);
        }
        Ok(accept)
    }

    /// Accepts who wants to connect; while there is no place, in place of
    /// connections that may be closed.
    fn accept(&mut self) {
        let mut pending = self.conns.values().filter(|c| c.is_pending()).count();
        // Listed once, when it is needed: those accepted here are too new.
        let mut evictable: Option<Vec<ConnId>> = None;
        for _ in 0..ACCEPT_BATCH {
            if pending >= self.options.max_pending_handshakes {
                if !self.evict(&mut evictable) {
                    return;
                }
                pending -= 1;
            }
            let (stream, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == IoKind::WouldBlock => return,
                // The stranger left before we opened: as good as a refusal.
                Err(e)
                    if matches!(
                        e.kind(),
                        IoKind::ConnectionAborted | IoKind::ConnectionReset
                    ) =>
                {
                    self.shared.rejected.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                Err(e) if e.kind() == IoKind::Interrupted => continue,
                // No more files: a stranger's is as good as a new one.
                Err(e) if is_out_of_files(&e) && self.evict(&mut evictable) => {
                    pending -= 1;
                    continue;
                }
                Err(e) => {
                    let why = format_args!(
                        "{e}; raise the limit of open files (ulimit -n) if it is that"
                    );
                    self.log.note(self.listening_on, &self.place, &why);
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() || tune(&stream).is_err() {
                // Gone already: these fail on dead sockets only.
                self.shared.rejected.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            self.next_id += 1;
            self.conns.insert(self.next_id, Conn::new(stream, peer));
            pending += 1;
        }
    }

    /// Closes the next of the `evictable` pending connections; false: none may
    /// be closed now.
    fn evict(&mut self, evictable: &mut Option<Vec<ConnId>>) -> bool {
        let now = Instant::now();
        let evictable = evictable.get_or_insert_with(|| closable(pending_conns(&self.conns), now));
        let Some(id) = evictable.pop() else {
            return false;
        };
        self.refuse(id, None, &"its place was needed for another connection");
        true
    }

    /// Serves one connection that `poll` named.
    fn attend(&mut self, id: ConnId, flags: PollFlags) {
        // It may have been closed since by what another one did.
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let mut gone = false;
        if flags.intersects(PollFlags::OUT) && conn.push() == Pulled::Gone {
            gone = true;
        }
        if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            if conn.is_pending() {
                // Its handshake reads for itself, and notices the end.
            } else if conn.wants_input() {
                gone |= conn.pull(&mut self.scratch) == Pulled::Gone;
            } else if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
                gone = true;
            }
        }
        // What came before the end is judged first: a member's last set counts.
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.ended |= gone;
        }
        self.advance(id);
        self.leave_if_ended(id);
    }

    /// Closes a connection whose other side has gone, once all that it said
    /// before has been done.
    fn leave_if_ended(&mut self, id: ConnId) {
        let ended = self.conns.get(&id).is_some_and(|conn| conn.ended);
        if ended && !self.unfinished.contains(&id) {
            self.close(id);
        }
    }

    /// Works through what a connection has received, as far as its turn goes.
    fn advance(&mut self, id: ConnId) {
        let more = self.work(id);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.note_stall(more);
        }
        if more {
            self.unfinished.insert(id);
        }
    }

    /// Whether the turn ended before the connection's requests did.
    fn work(&mut self, id: ConnId) -> bool {
        for _ in 0..REQUESTS_PER_TURN {
            if self.step(id) == Step::Rest {
                return false;
            }
        }
        true
    }

    /// One message, if it is complete and its answer has a place.
    fn step(&mut self, id: ConnId) -> Step {
        let Some(conn) = self.conns.get_mut(&id) else {
            return Step::Rest;
        };
        if conn.push() == Pulled::Gone {
            self.close(id);
            return Step::Rest;
        }
        // One answer at a time: a member that does not read its answers
        // gets no further ones, and cannot fill our memory with them.
        if conn.has_output() {
            return Step::Rest;
        }
        match conn.state {
            State::Greeting(ref mut greeting) => {
                match greeting.advance(&mut conn.stream, &self.token) {
                    Ok(Greeted::Waiting) => return Step::Rest,
                    Ok(Greeted::Challenged(tag)) => self.note_tag(id, tag),
                    Ok(Greeted::Proven(proven)) => self.decide(id, proven),
                    Err(e) => {
                        let reason = match e.kind() {
                            ErrorKind::Rejected(_) => Some(RefusalReason::OtherVersion),
                            ErrorKind::TokenMismatch => Some(RefusalReason::OtherToken),
                            ErrorKind::Stranger => Some(RefusalReason::OtherProtocol),
                            _ => None,
                        };
                        self.refuse(id, reason, &e);
                        return Step::Rest;
                    }
                }
            }
            State::Member => match conn.next_request() {
                Ok(None) => return Step::Rest,
                Ok(Some(body)) => self.serve(id, &body),
                Err(e) => self.offend(id, &e),
            },
            State::Waiting(_) => return Step::Rest,
            State::Closing => {
                self.close(id);
                return Step::Rest;
            }
        }
        Step::On
    }

    /// A hello has come. One that another connection began with was recorded: its
    /// tag counts only once.
    fn note_tag(&mut self, id: ConnId, tag: Option<[u8; TAG_BYTES]>) {
        let others = || self.conns.iter().filter(|(other, _)| **other != id);
        let is_new = tag.is_some() && others().all(|(_, conn)| conn.tag != tag);
        if let Some(conn) = self.conns.get_mut(&id) {
            (conn.standing, conn.tag) = match tag {
                Some(_) if is_new => (Standing::Tagged, tag),
                _ => (Standing::Untagged, None),
            };
        }
    }

    /// A peer has proven the token: may it stay?
    fn decide(&mut self, id: ConnId, proven: Proven) {
        let members = self.conns.values().filter(|c| !c.is_pending()).count();
        let peer = proven.peer();
        let mine = Hello::new(Role::StoreServer, self.token.job_id());
        let verdict = if peer.role != Role::StoreClient {
            Err(RejectReason::WrongRole)
        } else if peer.job != mine.job {
            Err(RejectReason::WrongJob)
        } else if members >= self.options.max_clients {
            Err(RejectReason::Full)
        } else {
            Ok(())
        };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        match verdict {
            Ok(()) => {
                conn.outbox.extend_from_slice(&proven.welcome(mine));
                conn.state = State::Member;
            }
            Err(reason) => {
                self.shared.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(place = self.place, peer = %conn.peer, "rejected a member: {reason}");
                conn.outbox.extend_from_slice(&proven.reject(reason));
                conn.state = State::Closing;
            }
        }
    }

    /// Does what a member asks.
    fn serve(&mut self, id: ConnId, body: &[u8]) {
        let request = match Request::decode(body) {
            Ok(request) => request,
            Err(e) => return self.offend(id, &e),
        };
        let mut appeared = None;
        let result = match request {
            Request::Set { key, value } => {
                appeared = Some(key);
                self.table.set(key, value).map(|()| Response::Done)
            }
            Request::Get { key, timeout_ms } => {
                return self.wait(id, &[key], timeout_ms, true);
            }
            Request::Wait { keys, timeout_ms } => {
                return self.wait(id, &keys, timeout_ms, false);
            }
            Request::TryGet { key } => {
                let value = self.table.get(key);
                Ok(value.map_or(Response::Nothing, Response::Value))
            }
            Request::Add { key, delta } => {
                appeared = Some(key);
                self.table.add(key, delta).map(Response::Number)
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                appeared = Some(key);
                let stored = self.table.compare_set(key, expected, desired);
                let now = self.table.get(key);
                stored.map(|_| now.map_or(Response::Nothing, Response::Value))
            }
            Request::Delete { key } => Ok(Response::Existed(self.table.delete(key))),
            Request::DeletePrefix { prefix } => {
                Ok(Response::Removed(self.table.delete_prefix(prefix)))
            }
            Request::Will { key, value } => {
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.will = value.map(|value| (key.to_owned(), value.to_vec()));
                }
                Ok(Response::Done)
            }
            _ => Err(Failure::BadRequest),
        };
        let response = result.unwrap_or_else(Response::Failed);
        answer(&mut self.conns, &self.place, id, &response);
        if let Some(key) = appeared
            && self.table.contains(key)
        {
            self.announce(key);
        }
    }

    /// Answers at once if all keys are there, else remembers who asked.
    fn wait(&mut self, id: ConnId, keys: &[&str], timeout_ms: u32, wants_value: bool) {
        let key_bytes: u64 = keys.iter().map(|key| key.len() as u64).sum();
        while self.waited_bytes + key_bytes > self.options.max_buffered_bytes / 2 {
            // The longest list goes: this one, or another's.
            let Some((other, bytes)) = room::longest_wait(&self.conns, key_bytes) else {
                let response = Response::Failed(Failure::StoreFull);
                return answer(&mut self.conns, &self.place, id, &response);
            };
            self.waited_bytes = self.waited_bytes.saturating_sub(bytes);
            self.forget_wait(other);
            if let Some(conn) = self.conns.get_mut(&other) {
                conn.state = State::Member;
            }
            let response = Response::Failed(Failure::StoreFull);
            answer(&mut self.conns, &self.place, other, &response);
            self.answered.push(other);
        }
        self.waited_bytes += key_bytes;
        let wait = Wait {
            key_bytes,
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            outstanding: 0,
            deadline: Instant::now() + Duration::from_millis(u64::from(timeout_ms)),
            wants_value,
        };
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.state = State::Waiting(wait);
        }
        self.settle(id);
    }

    /// A connection waits for nothing that is known to be missing: answer it,
    /// or note what is missing now.
    fn settle(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let State::Waiting(wait) = &mut conn.state else {
            return;
        };
        let missing = self.table.missing(wait.keys.iter().map(String::as_str));
        if !missing.is_empty() {
            wait.outstanding = missing.len();
            for key in missing {
                self.waiters.add(key, id);
            }
            return;
        }
        let response = match wait.keys.first() {
            Some(key) if wait.wants_value => {
                Response::Value(self.table.get(key).unwrap_or_default())
            }
            _ => Response::Done,
        };
        let mut out = std::mem::take(&mut conn.outbox);
        let encoded = response.encode(&mut out);
        conn.outbox = out;
        conn.state = State::Member;
        if let Err(e) = encoded {
            self.offend(id, &e);
        }
    }

    /// A key is there: wake whoever waits for it and for nothing else.
    fn announce(&mut self, key: &str) {
        for id in self.waiters.take(key) {
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            if let State::Waiting(wait) = &mut conn.state {
                wait.outstanding = wait.outstanding.saturating_sub(1);
                if wait.outstanding == 0 {
                    self.settle(id);
                    self.answered.push(id);
                }
            }
        }
    }

    /// Ends what has lasted too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let mut late_waits = Vec::new();
        let mut late_handshakes = Vec::new();
        let mut late_closings = Vec::new();
        for (id, conn) in &self.conns {
            let too_old = now.duration_since(conn.since) >= self.options.handshake_timeout;
            match &conn.state {
                State::Waiting(wait) if wait.deadline <= now => late_waits.push(*id),
                State::Greeting(_) if too_old => late_handshakes.push(*id),
                State::Closing if too_old => late_closings.push(*id),
                _ => {}
            }
        }
        for id in late_waits {
            self.give_up(id);
            self.advance(id);
        }
        for id in late_handshakes {
            self.refuse(id, None, &"no handshake within the time limit");
        }
        for id in late_closings {
            self.close(id);
        }
    }

    /// The deadline of a wait has passed: name the missing keys.
    fn give_up(&mut self, id: ConnId) {
        self.forget_wait(id);
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let State::Waiting(wait) = std::mem::replace(&mut conn.state, State::Member) else {
            return;
        };
        let missing = self.table.missing(wait.keys.iter().map(String::as_str));
        let response = Response::Missing(missing);
        answer(&mut self.conns, &self.place, id, &response);
    }

    /// Takes a connection's wait out of the table of waiters.
    fn forget_wait(&mut self, id: ConnId) {
        if let Some(Conn {
            state: State::Waiting(wait),
            ..
        }) = self.conns.get(&id)
        {
            self.waiters
                .remove(wait.keys.iter().map(String::as_str), id);
        }
    }

    /// Closes a connection that has not proven the token. Without a `reason` the
    /// other side made no mistake that tells what it is.
    fn refuse(&mut self, id: ConnId, reason: Option<RefusalReason>, why: &dyn std::fmt::Display) {
        self.shared.rejected.fetch_add(1, Ordering::Relaxed);
        if let Some(conn) = self.conns.get(&id) {
            let reason = reason.unwrap_or(match conn.standing {
                Standing::Untagged => RefusalReason::OtherToken,
                _ => RefusalReason::Unfinished,
            });
            self.shared.refusals.note(conn.peer.ip(), reason);
            self.log.note(conn.peer.ip(), &self.place, why);
        }
        self.close(id);
    }

    /// A member broke the protocol: tell it, and close.
    fn offend(&mut self, id: ConnId, why: &dyn std::fmt::Display) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        tracing::warn!(place = self.place, peer = %conn.peer, "a member broke the protocol: {why}");
        conn.state = State::Closing;
        conn.since = Instant::now();
        let response = Response::Failed(Failure::BadRequest);
        answer(&mut self.conns, &self.place, id, &response);
    }

    fn close(&mut self, id: ConnId) {
        self.forget_wait(id);
        let closed = self.conns.remove(&id);
        debug_assert!(!self.conns.is_empty() || self.waiters.len() == 0);
        if let Some((key, value)) = closed.and_then(|conn| conn.will) {
            // Where there is no room, nobody hears of it: as without a will.
            if let Err(e) = self.table.compare_set(&key, None, &value) {
                tracing::warn!(place = self.place, "cannot execute a will: {e:?}");
            }
            if self.table.contains(&key) {
                self.announce(&key);
            }
        }
    }
}

/// The connections that have not proven the token.
fn pending_conns(conns: &HashMap<ConnId, Conn>) -> impl Iterator<Item = Pending<ConnId>> {
    let pending = conns.iter().filter(|(_, conn)| conn.is_pending());
    pending.map(|(id, conn)| Pending {
        id: *id,
        standing: conn.standing,
        source: conn.peer.ip(),
        since: conn.since,
    })
}

/// Queues a response. A function of its own, because the response may borrow
/// from the table.
fn answer(conns: &mut HashMap<ConnId, Conn>, place: &str, id: ConnId, response: &Response<'_>) {
    if let Some(conn) = conns.get_mut(&id)
        && let Err(e) = response.encode(&mut conn.outbox)
    {
        // The table keeps the same limits as the codec, so this is a bug; the
        // member sees its connection closed rather than hang.
        tracing::error!(place, "cannot encode a response: {e}");
        conn.state = State::Closing;
    }
}
