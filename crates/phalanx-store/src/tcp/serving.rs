//! The server's thread, around `poll`.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use phalanx_wire::store_msg::{Failure, Request, Response};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::conn::{Conn, IoState, State, Wait, Wanted};
use super::followers::Followers;
use super::socket::tune;
use super::waiters::{ConnId, Waiters};
use super::{FOLLOWER_STREAM, room};
use crate::auth::HANDSHAKE_TIMEOUT;
use crate::handshakes::{Authenticated, Handshakes};
use crate::pending::max_pending;
use crate::refused::Refusals;
use crate::table::{Limits, Table, element};

#[cfg(any(test, fuzzing))]
#[path = "fuzzing.rs"]
pub(crate) mod fuzzing;

/// Pause after `poll` has failed.
const POLL_PAUSE: Duration = Duration::from_millis(100);

/// Size of the read buffer.
const SCRATCH_BYTES: usize = 128 << 10;

/// Maximum number of requests of one member served before the others.
const REQUESTS_PER_ROUND: usize = 64;

/// Maximum memory for all members together: incomplete requests, responses not yet
/// received, and keys of waits. 4096 ranks that wait for each other use 80 MiB.
const MAX_BUFFERED_BYTES: u64 = 128 << 20;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Limits of the store.
    pub limits: Limits,
    /// Maximum number of connected members (4096).
    pub max_clients: usize,
    /// Maximum number of unauthenticated connections
    /// (a quarter of the process's open files, at most 4096).
    pub max_pending_handshakes: usize,
    /// Timeout of a handshake (5 s).
    pub handshake_timeout: Duration,
    /// Maximum memory for all members together (128 MiB), besides the store's keys
    /// and values: incomplete requests, responses not yet received, and, up to half
    /// of it, keys of waits.
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

/// State shared by the server's thread and its owner.
#[derive(Debug, Default)]
pub(super) struct ServerControl {
    pub(super) stop: AtomicBool,
    pub(super) refusals: Arc<Refusals>,
    pub(super) clients: AtomicUsize,
    pub(super) pending_waits: AtomicUsize,
    pub(super) buffered_bytes: AtomicU64,
}

/// What the server's owner has its thread do.
pub(super) type Task = Box<dyn FnOnce(&mut ServerLoop) + Send>;

/// Which clients a server serves: none, followers only, or all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Closed,
    Followers,
    Open,
}

/// Result of one step of a connection.
#[derive(PartialEq, Eq)]
enum Step {
    /// There may be more to do.
    Continue,
    /// Nothing to do until the next event.
    Idle,
}

/// The state of the server's thread.
pub(super) struct ServerLoop {
    location: String,
    /// Source address in log lines about the listener itself.
    listening_on: IpAddr,
    handshakes: Handshakes<TcpListener>,
    woken: UnixStream,
    token: Token,
    options: ServerOptions,
    shared: Arc<ServerControl>,
    tasks: Receiver<Task>,
    pub(super) mode: Mode,
    /// It takes no followers any more.
    pub(super) is_alone: bool,
    /// A number by which clients distinguish this server from another one at its address.
    instance: u16,
    pub(super) table: Table,
    pub(super) followers: Followers,
    waiters: Waiters,
    /// Those that wait for an element, by their queue.
    poppers: Waiters,
    pub(super) conns: HashMap<ConnId, Conn>,
    next_id: ConnId,
    /// Connections whose wait was ended by another connection: they have a response
    /// to send, and may have further requests.
    answered: Vec<ConnId>,
    /// Members with complete requests left after an iteration.
    unfinished: BTreeSet<ConnId>,
    /// Total length of the keys of waits; an upper bound between two counts.
    waited_bytes: u64,
    /// Read buffer.
    scratch: Vec<u8>,
}

impl ServerLoop {
    pub(super) fn new(
        (listener, addr): (TcpListener, SocketAddr),
        woken: UnixStream,
        token: Token,
        options: ServerOptions,
        shared: Arc<ServerControl>,
        tasks: Receiver<Task>,
    ) -> ServerLoop {
        let location = format!("store server {addr}");
        let prepare = |stream: &TcpStream| {
            stream.set_nonblocking(true)?;
            tune(stream)
        };
        let mut handshakes = Handshakes::new(listener, token.clone(), location.clone(), prepare);
        handshakes.limit = options.max_pending_handshakes;
        handshakes.timeout = options.handshake_timeout;
        handshakes.refusals = Arc::clone(&shared.refusals);
        ServerLoop {
            location,
            listening_on: addr.ip(),
            handshakes,
            woken,
            token,
            options,
            shared,
            tasks,
            mode: Mode::Open,
            is_alone: false,
            instance: RandomState::new().hash_one(()) as u16,
            table: Table::new(options.limits),
            followers: Followers::default(),
            waiters: Waiters::default(),
            poppers: Waiters::default(),
            conns: HashMap::new(),
            next_id: 0,
            answered: Vec::new(),
            unfinished: BTreeSet::new(),
            waited_bytes: 0,
            scratch: vec![0; SCRATCH_BYTES],
        }
    }

    pub(super) fn run(mut self) {
        // Launchers know by its answers that this host lives, also while ranks use all processors.
        let _ = rustix::process::setpriority_process(None, -20);
        let mut ready = Vec::new();
        while !self.shared.stop.load(Ordering::Acquire) {
            let handshakes = match self.sleep(&mut ready) {
                Ok(handshakes) => handshakes,
                Err(e) => {
                    // Out of memory, or a bug. Continuing at once would spin.
                    tracing::error!(location = self.location, "poll failed: {e}");
                    std::thread::sleep(POLL_PAUSE);
                    continue;
                }
            };
            for (id, flags) in ready.drain(..) {
                self.handle_ready(id, flags);
            }
            while let Ok(task) = self.tasks.try_recv() {
                task(&mut self);
            }
            self.finish_round();
            self.admit(&handshakes);
            self.publish();
        }
    }

    /// Continues handshakes. Those who have proven the token become members.
    fn admit(&mut self, ready: &[bool]) {
        // A closed one is only looked at.
        self.handshakes.logs = self.mode != Mode::Closed;
        match self.handshakes.serve(ready) {
            Ok(all) => all.into_iter().for_each(|one| self.decide(one)),
            Err(e) => {
                let why = format_args!("{e}; raise the limit of open files (ulimit -n)");
                self.handshakes.warn(self.listening_on, &why);
            }
        }
    }

    pub(super) fn admit_followers(&mut self, entries: Vec<(String, Vec<u8>)>, dropped: Vec<u64>) {
        if self.mode != Mode::Closed {
            return;
        }
        self.mode = Mode::Followers;
        self.followers.refuse(dropped);
        self.table.clear();
        for (key, value) in entries {
            self.set(&key, &value);
        }
    }

    /// Sets a key on the server's own account.
    pub(super) fn set(&mut self, key: &str, value: &[u8]) {
        match self.table.set(key, value) {
            Ok(()) => {
                self.followers.changed(&mut self.conns, &self.table, key);
                self.key_appeared(key);
            }
            Err(e) => tracing::error!(location = self.location, "cannot set {key}: {e:?}"),
        }
    }

    pub(super) fn drop_follower(&mut self, id: u64, key: &str) {
        self.set(key, b"");
        self.followers.demand_newest();
        if let Some(conn) = self.followers.remove(id) {
            self.close(conn);
        }
    }

    pub(super) fn close_to_followers(&mut self) {
        if self.mode != Mode::Followers {
            return;
        }
        self.mode = Mode::Closed;
        self.followers.clear();
        for id in self.conns.keys().copied().collect::<Vec<_>>() {
            self.close(id);
        }
    }

    /// Lets go the responses whose changes all followers have.
    fn release(&mut self) {
        let Some(acked) = self.followers.take_grown() else {
            return;
        };
        for (id, conn) in &mut self.conns {
            if conn.held_until.is_some_and(|seq| seq <= acked) {
                conn.held_until = None;
                self.answered.push(*id);
            }
        }
    }

    /// Ends an iteration of the loop: timeouts, remaining requests, ended waits, memory limit.
    fn finish_round(&mut self) {
        self.expire();
        for id in std::mem::take(&mut self.unfinished) {
            self.advance(id);
            self.close_if_ended(id);
        }
        loop {
            self.release();
            let Some(id) = self.answered.pop() else {
                break;
            };
            self.advance(id);
        }
        self.make_room();
    }

    /// Closes stalled members, the largest first, until the memory limit is kept.
    fn make_room(&mut self) {
        let mut bytes = room::buffered_bytes(&self.conns);
        while bytes > self.options.max_buffered_bytes {
            let Some(id) = room::largest_stalled(&self.conns) else {
                // No member is stalled.
                break;
            };
            if let Some(conn) = self.conns.get(&id) {
                bytes -= conn.buffered_bytes();
                self.handshakes.warn(
                    conn.peer.ip(),
                    &"the memory limit for incomplete requests and unread responses is reached",
                );
            }
            self.close(id);
        }
        self.waited_bytes = room::waited_bytes(&self.conns);
        self.shared.buffered_bytes.store(bytes, Ordering::Relaxed);
    }

    fn publish(&self) {
        let waits = self.conns.values();
        let waits = waits.filter(|c| matches!(c.state, State::Waiting(_)));
        let shared = &self.shared;
        shared.pending_waits.store(waits.count(), Ordering::Relaxed);
        shared.clients.store(self.conns.len(), Ordering::Relaxed);
    }

    /// Sleeps until the next event or timeout. Fills `ready` with the connections
    /// that are ready; returns which of the handshakes are.
    fn sleep(&mut self, ready: &mut Vec<(ConnId, PollFlags)>) -> std::io::Result<Vec<bool>> {
        let mut fds = Vec::with_capacity(self.conns.len() + self.handshakes.count() + 2);
        fds.push(PollFd::new(&self.woken, PollFlags::IN));
        let ids: Vec<ConnId> = self.conns.keys().copied().collect();
        let ends = self.conns.values().map(|conn| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, conn.wants_input());
            flags.set(PollFlags::OUT, conn.wants_output());
            fds.push(PollFd::new(&conn.stream, flags));
            self.end_of(conn)
        });
        let end = ends.flatten().min();
        let more = (!self.unfinished.is_empty()).then(Instant::now);
        let due = self.handshakes.poll_fds(&mut fds);
        let due = due.into_iter().chain(end).chain(more).min();
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        }
        let mut events = fds.iter().map(PollFd::revents);
        if events.next().is_some_and(|woken| !woken.is_empty()) {
            let mut sink = [0; 16];
            // The flag `stop` has the reason.
            let _ = (&self.woken).read(&mut sink);
        }
        let all = ids.into_iter().zip(events.by_ref());
        ready.extend(all.filter(|(_, flags)| !flags.is_empty()));
        Ok(events.map(|flags| !flags.is_empty()).collect())
    }

    /// When a connection's wait, or its time to receive the last response, ends.
    fn end_of(&self, conn: &Conn) -> Option<Instant> {
        match &conn.state {
            State::Waiting(wait) => Some(wait.deadline),
            State::Closing => Some(conn.since + self.options.handshake_timeout),
            State::Member | State::Follower(_) => None,
        }
    }

    /// Serves a connection that is ready.
    fn handle_ready(&mut self, id: ConnId, flags: PollFlags) {
        // Another connection may have closed it.
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let mut gone = false;
        if flags.intersects(PollFlags::OUT) && conn.push() == IoState::Gone {
            gone = true;
        }
        if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            if conn.wants_input() {
                gone |= conn.pull(&mut self.scratch) == IoState::Gone;
            } else if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
                gone = true;
            }
        }
        // Requests before the end are still served.
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.ended |= gone;
        }
        self.advance(id);
        self.close_if_ended(id);
    }

    /// Closes a connection whose peer has closed, once its requests are served.
    fn close_if_ended(&mut self, id: ConnId) {
        let ended = self.conns.get(&id).is_some_and(|conn| conn.ended);
        if ended && !self.unfinished.contains(&id) {
            self.close(id);
        }
    }

    /// Serves the received requests of a connection, up to the limit per iteration.
    fn advance(&mut self, id: ConnId) {
        let more = self.serve_round(id);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.note_stall(more);
        }
        if more {
            self.unfinished.insert(id);
        }
    }

    /// Serves a connection in one iteration. Returns whether requests are left.
    fn serve_round(&mut self, id: ConnId) -> bool {
        for _ in 0..REQUESTS_PER_ROUND {
            if self.step(id) == Step::Idle {
                return false;
            }
        }
        true
    }

    /// Handles one message, if it is complete and the previous response was sent.
    fn step(&mut self, id: ConnId) -> Step {
        let Some(conn) = self.conns.get_mut(&id) else {
            return Step::Idle;
        };
        if conn.push() == IoState::Gone {
            self.close(id);
            return Step::Idle;
        }
        if let State::Follower(follower) = conn.state {
            return self.step_follower(id, follower);
        }
        // One response at a time, so that a member that does not read its responses
        // cannot fill the memory.
        if conn.has_output() {
            return Step::Idle;
        }
        match conn.state {
            State::Member => match conn.next_request() {
                Ok(None) => return Step::Idle,
                Ok(Some(body)) => self.serve(id, &body),
                Err(e) => self.protocol_error(id, &e),
            },
            State::Waiting(_) | State::Follower(_) => return Step::Idle,
            State::Closing => {
                self.close(id);
                return Step::Idle;
            }
        }
        Step::Continue
    }

    /// Reads a follower's acknowledgement, or sends it more of its copy.
    fn step_follower(&mut self, id: ConnId, follower: u64) -> Step {
        let Some(conn) = self.conns.get_mut(&id) else {
            return Step::Idle;
        };
        let body = match conn.next_request() {
            Ok(Some(body)) => body,
            Ok(None) if !conn.has_output() && self.followers.copy(follower, conn, &self.table) => {
                return Step::Continue;
            }
            Ok(None) => return Step::Idle,
            // No request.
            Err(_) => Vec::new(),
        };
        match Request::decode(&body) {
            Ok(Request::Ack { seq }) if self.followers.acknowledge(follower, seq) => {}
            Ok(Request::Leave) => self.followers.leave(follower),
            Ok(Request::Retire { key }) => self.drop_follower(follower, key),
            other => {
                tracing::warn!(location = self.location, peer = %conn.peer, "follower {follower} broke the protocol: {other:?}");
                self.close(id);
            }
        }
        Step::Continue
    }

    /// Accepts or refuses a peer that has proven the token.
    fn decide(&mut self, authenticated: Authenticated<TcpStream>) {
        let Authenticated {
            stream,
            peer: address,
            proven,
        } = authenticated;
        let peer = proven.peer();
        let mine = Hello::new(Role::StoreServer, self.token.job_id()).stream(self.instance);
        let reason = if peer.role != Role::StoreClient {
            Some(RejectReason::WrongRole)
        } else if peer.job != mine.job {
            Some(RejectReason::WrongJob)
        } else if self.mode == Mode::Closed
            || (self.mode == Mode::Followers && peer.stream != FOLLOWER_STREAM)
        {
            Some(RejectReason::NotOpen)
        } else if self.conns.len() >= self.options.max_clients {
            Some(RejectReason::Full)
        } else {
            None
        };
        let (state, message) = match reason {
            None => (State::Member, proven.welcome(mine)),
            Some(reason) => {
                // Before it opens, members come again and again.
                if reason != RejectReason::NotOpen {
                    self.shared.refusals.count();
                    tracing::warn!(location = self.location, peer = %address, "rejected a member: {reason}");
                }
                (State::Closing, proven.reject(reason))
            }
        };
        let mut conn = Conn::new(stream, address, state);
        conn.outbox.extend_from_slice(&message);
        self.next_id += 1;
        self.conns.insert(self.next_id, conn);
        self.advance(self.next_id);
    }

    /// Serves a request of a member.
    fn serve(&mut self, id: ConnId, body: &[u8]) {
        let request = match Request::decode(body) {
            Ok(request) => request,
            Err(e) => return self.protocol_error(id, &e),
        };
        if let Request::Follow { id: follower } = request {
            return self.follow(id, follower);
        } else if self.mode != Mode::Open {
            return self.protocol_error(id, &"a request before the store is open");
        }
        match request {
            Request::Get { key, timeout_ms } => self.wait(id, &[key], timeout_ms, Wanted::Value),
            Request::GetNumbered { key, timeout_ms } => {
                self.wait(id, &[key], timeout_ms, Wanted::Values);
            }
            Request::Wait { keys, timeout_ms } => self.wait(id, &keys, timeout_ms, Wanted::Keys),
            Request::QueuePop { queue, timeout_ms } => {
                self.wait(id, &[queue], timeout_ms, Wanted::Element);
            }
            Request::Will { key, value } => {
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.will = value.map(|value| (key.to_owned(), value.to_vec()));
                }
                self.answer(id, [key], &Response::Done);
            }
            request => match self.table.apply(&request) {
                (Response::Failed(Failure::BadRequest), _) => {
                    self.protocol_error(id, &"only a follower sends this request");
                }
                (response, changed) => {
                    for key in &changed {
                        self.followers.changed(&mut self.conns, &self.table, key);
                    }
                    // Of a push, that is the element.
                    let about = match (&request, &changed[..]) {
                        (Request::QueuePush { .. }, [element]) => element,
                        _ => request.key(),
                    };
                    self.answer(id, [about], &response);
                    for key in &changed {
                        self.key_appeared(key);
                    }
                }
            },
        }
    }

    /// Makes a member a follower.
    fn follow(&mut self, id: ConnId, follower: u64) {
        if self.is_alone || self.followers.is_dropped(follower) {
            return self.fail(id, Failure::Dropped);
        }
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.state = State::Follower(follower);
        }
        if let Some(previous) = self.followers.add(follower, id) {
            self.close(previous);
        }
    }

    /// Starts a wait.
    fn wait(&mut self, id: ConnId, keys: &[&str], timeout_ms: u32, wanted: Wanted) {
        let key_bytes: u64 = keys.iter().map(|key| key.len() as u64).sum();
        let full = Response::Failed(Failure::StoreFull);
        while self.waited_bytes + key_bytes > self.options.max_buffered_bytes / 2 {
            // The wait with the most bytes fails: this one, or another.
            let Some((other, bytes)) = room::longest_wait(&self.conns, key_bytes) else {
                return self.answer(id, [""], &full);
            };
            self.waited_bytes = self.waited_bytes.saturating_sub(bytes);
            self.remove_wait(other);
            if let Some(conn) = self.conns.get_mut(&other) {
                conn.state = State::Member;
            }
            self.answer(other, [""], &full);
            self.answered.push(other);
        }
        self.waited_bytes += key_bytes;
        let wait = Wait {
            key_bytes,
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            outstanding: 0,
            deadline: Instant::now() + Duration::from_millis(u64::from(timeout_ms)),
            wanted,
        };
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.state = State::Waiting(wait);
        }
        match keys {
            [queue] if wanted == Wanted::Element => self.check_pop(id, queue),
            _ => self.check_wait(id),
        }
    }

    /// Responds to a wait if all its keys exist; otherwise registers the missing ones.
    fn check_wait(&mut self, id: ConnId) {
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
        let response = match (wait.wanted, &wait.keys[..]) {
            (Wanted::Value, [key]) => self.table.value(key),
            (Wanted::Values, [key]) => {
                let (keys, values) = self.table.numbered(key);
                wait.keys = keys;
                values
            }
            _ => Response::Done,
        };
        self.end_wait(id, None, &response);
    }

    /// Responds to a wait; the response is about its keys, or this `element`.
    fn end_wait(&mut self, id: ConnId, element: Option<&str>, response: &Response) {
        if let Some(conn) = self.conns.get_mut(&id)
            && let State::Waiting(wait) = std::mem::replace(&mut conn.state, State::Member)
        {
            let keys = wait.keys.iter().map(String::as_str);
            let keys = keys.filter(|_| element.is_none()).chain(element);
            self.answer(id, keys, response);
        }
    }

    /// Responds to a pop if the queue has an element; otherwise registers it.
    fn check_pop(&mut self, id: ConnId, queue: &str) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        // One that has closed takes no element. The next iteration notices its end.
        if conn.pull(&mut self.scratch) == IoState::Gone {
            return;
        }
        let Some((key, value)) = self.table.pop(queue) else {
            return self.poppers.add(queue, id);
        };
        self.followers.changed(&mut self.conns, &self.table, &key);
        self.end_wait(id, Some(&key), &Response::Value(value));
    }

    /// Ends the waits for which this was the last missing key, if it exists. One that waits for
    /// an element takes it.
    fn key_appeared(&mut self, key: &str) {
        if !self.table.contains(key) {
            return; // it was removed
        }
        for id in self.waiters.take(key) {
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            if let State::Waiting(wait) = &mut conn.state {
                wait.outstanding = wait.outstanding.saturating_sub(1);
                if wait.outstanding == 0 {
                    self.check_wait(id);
                    self.answered.push(id);
                }
            }
        }
        let Some((queue, _)) = element(key) else {
            return;
        };
        while self.table.contains(key)
            && let Some(id) = self.poppers.take_first(queue)
        {
            self.check_pop(id, queue);
            self.answered.push(id);
        }
    }

    /// Ends waits and closing connections that have timed out.
    fn expire(&mut self) {
        let now = Instant::now();
        let is_late = |(_, conn): &(_, &Conn)| self.end_of(conn).is_some_and(|end| end <= now);
        let late = self.conns.iter().filter(is_late);
        let late: Vec<ConnId> = late.map(|(id, _)| *id).collect();
        for id in late {
            match self.conns.get(&id).map(|conn| &conn.state) {
                Some(State::Waiting(_)) => {
                    self.time_out_wait(id);
                    self.advance(id);
                }
                _ => self.close(id),
            }
        }
    }

    /// Responds to a wait that timed out with the missing keys.
    fn time_out_wait(&mut self, id: ConnId) {
        self.remove_wait(id);
        let Some(State::Waiting(wait)) = self.conns.get(&id).map(|conn| &conn.state) else {
            return;
        };
        let missing = self.table.missing(wait.keys.iter().map(String::as_str));
        let response = match wait.wanted {
            Wanted::Element => Response::NotFound,
            _ => Response::Missing(missing.into_iter().map(str::to_owned).collect()),
        };
        self.end_wait(id, None, &response);
    }

    /// Removes a connection's wait from the table of waiters.
    fn remove_wait(&mut self, id: ConnId) {
        if let Some(State::Waiting(wait)) = self.conns.get(&id).map(|conn| &conn.state) {
            let waiters = match wait.wanted {
                Wanted::Element => &mut self.poppers,
                _ => &mut self.waiters,
            };
            waiters.remove(wait.keys.iter().map(String::as_str), id);
        }
    }

    /// Closes the connection of a member that broke the protocol.
    fn protocol_error(&mut self, id: ConnId, why: &dyn std::fmt::Display) {
        let Some(conn) = self.conns.get(&id) else {
            return;
        };
        tracing::warn!(location = self.location, peer = %conn.peer, "a member broke the protocol: {why}");
        self.fail(id, Failure::BadRequest);
    }

    /// Closes a connection after this response.
    fn fail(&mut self, id: ConnId, failure: Failure) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.state = State::Closing;
            conn.since = Instant::now();
        }
        // It says nothing about the keys, so it is not held.
        self.answer(id, [], &Response::Failed(failure));
    }

    /// Queues a response about `keys`, to be held until the followers have them.
    fn answer<'a>(
        &mut self,
        id: ConnId,
        keys: impl IntoIterator<Item = &'a str>,
        response: &Response,
    ) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.held_until = self.followers.hold(keys);
        if let Err(e) = response.encode(&mut conn.outbox) {
            // The table has the same limits as the codec, so this is a bug. Close the
            // connection, so that the member does not hang.
            tracing::error!(location = self.location, "cannot encode a response: {e}");
            conn.state = State::Closing;
        }
    }

    pub(super) fn close(&mut self, id: ConnId) {
        self.remove_wait(id);
        let closed = self.conns.remove(&id);
        self.followers.ended(id);
        debug_assert!(!self.conns.is_empty() || self.waiters.len() + self.poppers.len() == 0);
        if let Some((mut key, value)) = closed.and_then(|conn| conn.will) {
            if key.ends_with('/') {
                let free = (0_u64..).find(|n| !self.table.contains(&format!("{key}{n}")));
                key.push_str(&free.unwrap_or(u64::MAX).to_string());
            }
            // Without room in the store, the will is lost.
            match self.table.compare_set(&key, None, &value) {
                Ok(true) => {
                    self.followers.changed(&mut self.conns, &self.table, &key);
                    self.key_appeared(&key);
                }
                Ok(false) => {}
                Err(e) => {
                    tracing::warn!(location = self.location, "cannot execute a will: {e:?}");
                }
            }
        }
    }
}
