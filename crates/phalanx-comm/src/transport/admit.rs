//! Accepting connections of members while strangers knock too.
//!
//! Each accepted connection gets a thread and a deadline of its own for its
//! handshake, so a stranger that sends garbage, nothing, or one byte a second
//! costs a thread for at most five seconds and delays no member. At most 64
//! handshakes are open at once; when more knock, the oldest that has had its
//! fair time is closed. Used for TCP and for the Unix socket of a host.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_store::auth::{self, Channel, HANDSHAKE_TIMEOUT, MAX_PENDING_HANDSHAKES, StrangerLog};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use rustix::event::{PollFd, PollFlags};

use crate::{Error, Result, limits};

/// How long a pending handshake is safe from being closed for a newer one. A
/// member's takes a few milliseconds.
const FAIR_TIME: Duration = Duration::from_millis(250);
/// The same for one that has not said a byte: a member's hello comes right
/// behind its connection.
const SILENT_TIME: Duration = Duration::from_millis(20);
/// Connections that may wait to be accepted. The ranks listen while they wait
/// for the last of them to come: strangers should not fill the queue that fast.
const BACKLOG: i32 = 1024;
/// Turn of the accept loop: how long a finished handshake may go unnoticed.
const TURN: Duration = Duration::from_millis(2);
/// Distance between two calls of the caller's `check`, which asks the store.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// A socket that can be accepted here.
pub(super) trait Socket: Channel + AsFd + Sized + Send + 'static {
    /// Another handle of the same socket.
    fn duplicate(&self) -> std::io::Result<Self>;
    /// Ends it, also for a thread that blocks in it.
    fn end(&self);
    /// Prepares a fresh one; an error closes it.
    fn prepare(&self) -> std::io::Result<()>;
}

impl Socket for TcpStream {
    fn duplicate(&self) -> std::io::Result<Self> {
        self.try_clone()
    }

    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }

    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)?;
        self.set_nodelay(true)
    }
}

impl Socket for UnixStream {
    fn duplicate(&self) -> std::io::Result<Self> {
        self.try_clone()
    }

    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }

    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)?;
        super::shm::check_same_user(self)
    }
}

/// A listener whose sockets can be accepted here.
pub(super) trait Listener: AsFd {
    /// What it accepts.
    type Stream: Socket;
    /// One waiting connection and where it comes from.
    fn take(&self) -> std::io::Result<(Self::Stream, IpAddr)>;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn take(&self) -> std::io::Result<(TcpStream, IpAddr)> {
        self.accept().map(|(stream, from)| (stream, from.ip()))
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    fn take(&self) -> std::io::Result<(UnixStream, IpAddr)> {
        self.accept()
            .map(|(stream, _)| (stream, IpAddr::V4(Ipv4Addr::LOCALHOST)))
    }
}

/// Who is let in: rank and stream, and whether it already was.
struct Guests {
    me: Hello,
    list: Mutex<Vec<(usize, u16, bool)>>,
}

impl Guests {
    /// Runs after the peer's proof, hence never for a stranger.
    fn decide(&self, peer: &Hello) -> Result<Hello, RejectReason> {
        self.me.check_same_group(peer)?;
        if peer.role != role_of(self.me.role, peer.stream) {
            return Err(RejectReason::WrongRole);
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = peer.rank as usize;
        if !list.iter().any(|(r, ..)| *r == rank) {
            return Err(RejectReason::WrongRank);
        }
        match list
            .iter_mut()
            .find(|(r, s, _)| (*r, *s) == (rank, peer.stream))
        {
            None => Err(RejectReason::WrongStream),
            Some((.., true)) => Err(RejectReason::DuplicateRank),
            Some((.., taken)) => {
                *taken = true;
                Ok(Hello {
                    role: peer.role,
                    stream: peer.stream,
                    ..self.me
                })
            }
        }
    }

    /// Its handshake failed after all.
    fn forget(&self, peer: &Hello) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        for (rank, stream, taken) in list.iter_mut() {
            if (*rank, *stream) == (peer.rank as usize, peer.stream) {
                *taken = false;
            }
        }
    }
}

/// The role a peer takes for `stream` when the acceptor's is `mine`.
pub(super) fn role_of(mine: Role, stream: u16) -> Role {
    match (mine, stream) {
        (Role::SharedMemory, _) => Role::SharedMemory,
        (_, super::tcp::CONTROL) => Role::Control,
        _ => Role::Peer,
    }
}

/// One member that was let in.
pub(super) struct Admitted<S> {
    pub(super) rank: usize,
    pub(super) stream: u16,
    pub(super) socket: S,
}

/// A socket that remembers whether anything was ever read from it.
struct Listening<S> {
    socket: S,
    heard: Arc<AtomicBool>,
}

impl<S: Socket> Read for Listening<S> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.socket.read(into)?;
        if count > 0 {
            self.heard.store(true, Ordering::Relaxed);
        }
        Ok(count)
    }
}

impl<S: Socket> Write for Listening<S> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.socket.flush()
    }
}

impl<S: Socket> Channel for Listening<S> {
    fn set_timeouts(&self, limit: Option<Duration>) -> std::io::Result<()> {
        self.socket.set_timeouts(limit)
    }
}

/// One open handshake.
struct Pending<S> {
    id: u64,
    since: Instant,
    socket: S,
    /// Whether its fate is sealed: either it has proven the token and is being
    /// told so, or it was closed to make room. Whoever sets it decides which.
    sealed: Arc<AtomicBool>,
    /// Whether the peer has said anything.
    heard: Arc<AtomicBool>,
    /// It was closed to make room.
    closed: bool,
    thread: JoinHandle<()>,
}

impl<S: Socket> Pending<S> {
    /// Whether the peer has said anything, read or not.
    fn has_spoken(&self) -> bool {
        use rustix::net::{RecvFlags, recv};
        let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        self.heard.load(Ordering::Relaxed)
            || recv(&self.socket, &mut [0_u8; 1], peek).is_ok_and(|(_, bytes)| bytes > 0)
    }
}

struct Door<S> {
    guests: Arc<Guests>,
    token: Token,
    place: String,
    strangers: Arc<StrangerLog>,
    pending: VecDeque<Pending<S>>,
    next_id: u64,
    tell: Sender<(u64, Option<Admitted<S>>)>,
    heard: Receiver<(u64, Option<Admitted<S>>)>,
}

impl<S: Socket> Door<S> {
    fn new(me: Hello, token: &Token, expected: &[(usize, u16)]) -> Self {
        let (tell, heard) = channel();
        let guests = expected
            .iter()
            .map(|&(rank, stream)| (rank, stream, false))
            .collect();
        Door {
            guests: Arc::new(Guests {
                me,
                list: Mutex::new(guests),
            }),
            token: token.clone(),
            place: format!("rank {}", me.rank),
            strangers: Arc::new(StrangerLog::new()),
            pending: VecDeque::new(),
            next_id: 0,
            tell,
            heard,
        }
    }

    /// Starts the handshake of a fresh connection.
    fn open(&mut self, socket: S, from: IpAddr) {
        let twin = match socket.prepare().and_then(|()| socket.duplicate()) {
            Ok(twin) => twin,
            Err(e) => {
                self.strangers.note(from, &self.place, &e);
                return;
            }
        };
        let id = self.next_id;
        self.next_id += 1;
        let (guests, token, tell) = (
            Arc::clone(&self.guests),
            self.token.clone(),
            self.tell.clone(),
        );
        let (strangers, place) = (Arc::clone(&self.strangers), self.place.clone());
        let sealed = Arc::new(AtomicBool::new(false));
        let seal = Arc::clone(&sealed);
        let heard = Arc::new(AtomicBool::new(false));
        let mut socket = Listening {
            socket,
            heard: Arc::clone(&heard),
        };
        let work = move || {
            let mut reserved = None;
            let result = auth::accept(&mut socket, &token, HANDSHAKE_TIMEOUT, |peer| {
                // Before it hears that it is in: closed afterwards, it would
                // not come again.
                if seal.swap(true, Ordering::AcqRel) {
                    return Err(RejectReason::Full);
                }
                let mine = guests.decide(peer)?;
                reserved = Some(*peer);
                Ok(mine)
            });
            let admitted = match result {
                Ok(peer) => Some(Admitted {
                    rank: peer.rank as usize,
                    stream: peer.stream,
                    socket: socket.socket,
                }),
                Err(e) => {
                    if let Some(peer) = reserved {
                        guests.forget(&peer);
                    }
                    strangers.note(from, &place, &e);
                    None
                }
            };
            // Nobody listens any more once all members are in.
            let _ = tell.send((id, admitted));
        };
        let thread = std::thread::Builder::new()
            .name("phalanx-handshake".to_owned())
            .spawn(work);
        match thread {
            Ok(thread) => {
                self.pending.push_back(Pending {
                    id,
                    since: Instant::now(),
                    socket: twin,
                    sealed,
                    heard,
                    closed: false,
                    thread,
                });
            }
            // The connection is closed; a member tries again.
            Err(e) => tracing::warn!("cannot start a handshake thread: {e}"),
        }
    }

    /// Whether one more handshake may be opened now.
    fn has_room(&mut self) -> bool {
        if self.pending.len() < MAX_PENDING_HANDSHAKES {
            return true;
        }
        // Whoever has said nothing goes, all at once: behind a crowd of them
        // members wait. The others go one at a time, in order of age.
        let mut room = self.pending.iter().any(|p| p.closed);
        for pending in self.pending.iter_mut().filter(|p| !p.closed) {
            let age = pending.since.elapsed();
            if age < SILENT_TIME {
                break;
            }
            let silent = !pending.has_spoken();
            let due = silent || (age >= FAIR_TIME && !room);
            if due && !pending.sealed.swap(true, Ordering::AcqRel) {
                pending.closed = true;
                pending.socket.end();
                room = true;
            }
        }
        false
    }

    /// The members whose handshake has ended since the last call.
    fn finished(&mut self) -> Vec<Admitted<S>> {
        let mut members = Vec::new();
        while let Ok((id, admitted)) = self.heard.try_recv() {
            if let Some(at) = self.pending.iter().position(|p| p.id == id)
                && let Some(pending) = self.pending.remove(at)
            {
                // It has sent its last message: this does not wait.
                let _ = pending.thread.join();
            }
            members.extend(admitted);
        }
        members
    }
}

/// Makes the queue in front of a listening socket longer than the standard
/// library does. Best effort: a short one costs time, not members.
pub(super) fn lengthen_backlog(listener: &impl AsFd) {
    if let Err(e) = rustix::net::listen(listener, BACKLOG) {
        tracing::debug!("listen: {e}");
    }
}

/// Lets the `expected` members (rank, stream) in. `me` is how this side
/// introduces itself. From time to time `check` is told who is missing; it
/// returns false to give up on those, or an error to end the whole thing.
///
/// Returns those who came by `deadline`; the caller sees who did not.
pub(super) fn admit<L: Listener>(
    listener: &L,
    me: Hello,
    token: &Token,
    expected: &[(usize, u16)],
    deadline: Instant,
    mut check: impl FnMut(&[(usize, u16)]) -> Result<bool>,
) -> Result<Vec<Admitted<L::Stream>>> {
    if expected.is_empty() {
        return Ok(Vec::new());
    }
    let mut door = Door::<L::Stream>::new(me, token, expected);
    let result = run(&mut door, listener, expected, deadline, &mut check);
    for pending in door.pending.drain(..) {
        pending.socket.end();
        let _ = pending.thread.join();
    }
    result
}

fn run<L: Listener>(
    door: &mut Door<L::Stream>,
    listener: &L,
    expected: &[(usize, u16)],
    deadline: Instant,
    check: &mut impl FnMut(&[(usize, u16)]) -> Result<bool>,
) -> Result<Vec<Admitted<L::Stream>>> {
    let mut members: Vec<Admitted<L::Stream>> = Vec::new();
    let mut next_check = Instant::now() + CHECK_EVERY;
    loop {
        members.extend(door.finished());
        if members.len() >= expected.len() || Instant::now() >= deadline {
            return Ok(members);
        }
        if Instant::now() >= next_check {
            let missing: Vec<_> = expected
                .iter()
                .copied()
                .filter(|&(r, s)| !members.iter().any(|m| (m.rank, m.stream) == (r, s)))
                .collect();
            if !check(&missing)? {
                return Ok(members);
            }
            next_check = Instant::now() + CHECK_EVERY;
        }
        if !door.has_room() {
            std::thread::sleep(TURN);
            continue;
        }
        if knocked(listener.as_fd()) {
            match listener.take() {
                Ok((socket, from)) => door.open(socket, from),
                // The stranger went away again.
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) if limits::is_out_of_files(&e) => {
                    return Err(Error::io("accepting a connection", e));
                }
                Err(e) => {
                    tracing::debug!("accept: {e}");
                    std::thread::sleep(TURN);
                }
            }
        }
    }
}

/// Waits one turn for a connection.
fn knocked(listener: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    let turn = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: TURN.subsec_nanos().into(),
    };
    matches!(rustix::event::poll(&mut fds, Some(&turn)), Ok(n) if n > 0)
}

#[cfg(test)]
#[path = "admit_tests.rs"]
mod tests;
