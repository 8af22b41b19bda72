//! Accepting connections of members while strangers connect too.
//!
//! One thread reads all handshakes as bytes arrive, so a stranger that sends garbage,
//! nothing, or one byte a second costs an open file for at most five seconds and delays
//! no member. When the table is full, a connection that is not a member's is closed
//! ([`closable`]). Used for TCP and for the Unix socket of a host.

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use phalanx_store::auth::{
    self, Channel, HANDSHAKE_TIMEOUT, HelloState, PendingHandshake, Progress, RefusalLog, closable,
    is_out_of_files, max_pending, next_closable,
};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Proven, RejectReason, Role, TAG_BYTES};
use rustix::event::{PollFd, PollFlags};

use crate::{Error, Result};

/// Connections that may wait to be accepted. The ranks listen while they wait for the
/// last one: strangers should not fill the queue that fast.
const BACKLOG: i32 = 4096;
/// Connections accepted before the open ones are served again.
const ACCEPT_BATCH: usize = 256;
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(2);
/// Interval between two calls of the caller's `check`, which reads the store.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// A socket that can be accepted here.
pub(super) trait Socket: Channel + AsFd {
    /// Prepares a new socket; an error closes it.
    fn prepare(&self) -> std::io::Result<()>;
    /// Sets whether reads and writes block.
    fn set_blocking(&self, blocking: bool) -> std::io::Result<()>;
}

impl Socket for TcpStream {
    fn set_blocking(&self, blocking: bool) -> std::io::Result<()> {
        self.set_nonblocking(!blocking)
    }

    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(true)?;
        self.set_nodelay(true)
    }
}

impl Socket for UnixStream {
    fn set_blocking(&self, blocking: bool) -> std::io::Result<()> {
        self.set_nonblocking(!blocking)
    }

    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(true)?;
        super::shm::check_same_user(self)
    }
}

/// A listener whose sockets can be accepted here.
pub(super) trait Listener: AsFd {
    /// The type of an accepted socket.
    type Stream: Socket;
    /// Accepts one waiting connection and returns it with its address.
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

/// The expected members, by rank and stream, and whether each has been admitted.
struct Guests {
    me: Hello,
    list: Vec<(usize, u16, bool)>,
}

impl Guests {
    /// Runs after the peer's proof, hence never for a stranger.
    fn decide(&mut self, peer: &Hello) -> Result<Hello, RejectReason> {
        self.me.check_same_group(peer)?;
        if peer.role != role_of(self.me.role, peer.stream) {
            return Err(RejectReason::WrongRole);
        }
        let list = &mut self.list;
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

    /// The handshake failed after the decision.
    fn forget(&mut self, peer: &Hello) {
        for (rank, stream, taken) in &mut self.list {
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

/// One admitted member.
pub(super) struct Admitted<S> {
    pub(super) rank: usize,
    pub(super) stream: u16,
    pub(super) socket: S,
}

/// One open handshake.
struct Pending<S> {
    id: u64,
    socket: S,
    from: IpAddr,
    since: Instant,
    greeting: PendingHandshake,
    standing: HelloState,
    /// The tag of its hello, if that is valid.
    tag: Option<[u8; TAG_BYTES]>,
}

struct Door<'a, S> {
    guests: Guests,
    token: &'a Token,
    place: String,
    strangers: RefusalLog,
    /// Most open handshakes.
    places: usize,
    pending: Vec<Pending<S>>,
    next_id: u64,
}

impl<'a, S: Socket> Door<'a, S> {
    fn new(me: Hello, token: &'a Token, expected: &[(usize, u16)]) -> Self {
        let guests = expected.iter().map(|&(rank, stream)| (rank, stream, false));
        Door {
            guests: Guests {
                me,
                list: guests.collect(),
            },
            token,
            place: format!("rank {}", me.rank),
            strangers: RefusalLog::new(),
            places: max_pending(),
            pending: Vec::new(),
            next_id: 0,
        }
    }

    fn standings(&self) -> impl Iterator<Item = auth::Pending<u64>> {
        self.pending.iter().map(|pending| auth::Pending {
            id: pending.id,
            hello: pending.standing,
            source: pending.from,
            since: pending.since,
        })
    }

    /// Waits for events, at most until `until`; returns which handshakes are ready, and
    /// whether a connection can be accepted.
    fn sleep<L: AsFd>(&self, listener: &L, mut until: Instant) -> (Vec<bool>, bool) {
        let now = Instant::now();
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.pending.len() + 1);
        for pending in &self.pending {
            until = until.min(pending.since + HANDSHAKE_TIMEOUT);
            fds.push(PollFd::new(&pending.socket, PollFlags::IN));
        }
        let mut has_room = true;
        if self.pending.len() >= self.places
            && let Some(when) = next_closable(self.standings())
            && when > now
        {
            has_room = false;
            until = until.min(when);
        }
        if has_room {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let left = until.saturating_duration_since(now);
        let timeout = rustix::event::Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        // An interruption counts as no event.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let knocked = has_room && ready.pop().unwrap_or(false);
        (ready, knocked)
    }

    /// Continues the handshakes that are `ready`, and ends those that take too long;
    /// returns the members whose handshake is complete.
    fn attend(&mut self, ready: &[bool]) -> Vec<Admitted<S>> {
        let mut members = Vec::new();
        // From the end: a removed entry is replaced by the last one.
        for at in (0..self.pending.len()).rev() {
            if ready.get(at).is_some_and(|ready| *ready) {
                match self.advance(at) {
                    Ok(None) => {}
                    Ok(Some(proven)) => {
                        let pending = self.pending.swap_remove(at);
                        members.extend(self.judge(pending, proven));
                        continue;
                    }
                    Err(e) => {
                        self.close(at, &e);
                        continue;
                    }
                }
            }
            if self.pending[at].since.elapsed() >= HANDSHAKE_TIMEOUT {
                self.close(at, &"no handshake within the time limit");
            }
        }
        members
    }

    fn advance(&mut self, at: usize) -> phalanx_store::Result<Option<Proven>> {
        loop {
            let pending = &mut self.pending[at];
            match pending.greeting.advance(&mut pending.socket, self.token)? {
                Progress::Waiting => return Ok(None),
                Progress::Proven(proven) => return Ok(Some(proven)),
                Progress::Challenged(tag) => {
                    // One that comes twice was recorded.
                    let is_new = tag.is_some() && self.pending.iter().all(|p| p.tag != tag);
                    let pending = &mut self.pending[at];
                    (pending.standing, pending.tag) = match tag {
                        Some(_) if is_new => (HelloState::Tagged, tag),
                        _ => (HelloState::Untagged, None),
                    };
                }
            }
        }
    }

    /// The peer has proven the token: is it expected?
    fn judge(&mut self, pending: Pending<S>, proven: Proven) -> Option<Admitted<S>> {
        let Pending {
            mut socket, from, ..
        } = pending;
        let peer = *proven.peer();
        let mine = match self.guests.decide(&peer) {
            Ok(mine) => mine,
            Err(reason) => {
                // It does not matter here whether it arrives.
                let _ = auth::send(&mut socket, &proven.reject(reason));
                let why = format_args!("refused a member (rank {}): {reason}", peer.rank);
                self.strangers.warn(from, &self.place, &why);
                return None;
            }
        };
        let welcomed = auth::send(&mut socket, &proven.welcome(mine)).map_err(|e| e.to_string());
        match welcomed.and_then(|()| socket.set_blocking(true).map_err(|e| e.to_string())) {
            Ok(()) => Some(Admitted {
                rank: peer.rank as usize,
                stream: peer.stream,
                socket,
            }),
            Err(e) => {
                self.guests.forget(&peer);
                self.strangers.warn(from, &self.place, &e);
                None
            }
        }
    }

    fn close(&mut self, at: usize, why: &dyn std::fmt::Display) {
        let pending = self.pending.swap_remove(at);
        self.strangers.warn(pending.from, &self.place, why);
    }

    /// Accepts waiting connections; when the table is full, in the place of another.
    fn accept<L: Listener<Stream = S>>(&mut self, listener: &L) -> Result<()> {
        // Listed once, when needed: connections accepted here are too new.
        let mut closable = None;
        for _ in 0..ACCEPT_BATCH {
            if self.pending.len() >= self.places && !self.make_place(&mut closable) {
                break;
            }
            let (socket, from) = match listener.take() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if is_out_of_files(&e) => {
                    if self.make_place(&mut closable) {
                        continue;
                    }
                    return Err(Error::io("accepting a connection", e));
                }
                // The peer has closed it again.
                Err(e) => {
                    tracing::debug!("accept: {e}");
                    std::thread::sleep(ACCEPT_PAUSE);
                    return Ok(());
                }
            };
            if let Err(e) = socket.prepare() {
                self.strangers.warn(from, &self.place, &e);
                continue;
            }
            self.next_id += 1;
            self.pending.push(Pending {
                id: self.next_id,
                socket,
                from,
                since: Instant::now(),
                greeting: PendingHandshake::default(),
                standing: HelloState::Silent,
                tag: None,
            });
        }
        Ok(())
    }

    /// Closes one to make place for another; false: none may be closed now.
    fn make_place(&mut self, list: &mut Option<Vec<u64>>) -> bool {
        let list = list.get_or_insert_with(|| closable(self.standings(), Instant::now()));
        let Some(id) = list.pop() else { return false };
        if let Some(at) = self.pending.iter().position(|pending| pending.id == id) {
            self.close(at, &"its place was needed for another connection");
        }
        true
    }
}

/// Makes the queue of a listening socket longer than the standard library does. Best
/// effort: a short queue costs time, not members.
pub(super) fn lengthen_backlog(listener: &impl AsFd) {
    if let Err(e) = rustix::net::listen(listener, BACKLOG) {
        tracing::debug!("listen: {e}");
    }
}

/// Admits the `expected` members (rank, stream). `me` is this side's hello. From time
/// to time `check` is called with the missing members; it returns false to give up on
/// them, or an error to end all.
///
/// Returns the members that came by `deadline`.
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
    run(&mut door, listener, expected, deadline, &mut check)
}

fn run<L: Listener>(
    door: &mut Door<'_, L::Stream>,
    listener: &L,
    expected: &[(usize, u16)],
    deadline: Instant,
    check: &mut impl FnMut(&[(usize, u16)]) -> Result<bool>,
) -> Result<Vec<Admitted<L::Stream>>> {
    let mut members: Vec<Admitted<L::Stream>> = Vec::new();
    let mut next_check = Instant::now() + CHECK_EVERY;
    while members.len() < expected.len() && Instant::now() < deadline {
        if Instant::now() >= next_check {
            let missing: Vec<_> = expected
                .iter()
                .copied()
                .filter(|&(r, s)| !members.iter().any(|m| (m.rank, m.stream) == (r, s)))
                .collect();
            if !check(&missing)? {
                break;
            }
            next_check = Instant::now() + CHECK_EVERY;
        }
        let (ready, knocked) = door.sleep(listener, next_check.min(deadline));
        members.extend(door.attend(&ready));
        if knocked {
            door.accept(listener)?;
        }
    }
    Ok(members)
}

#[cfg(test)]
#[path = "admit_tests.rs"]
mod tests;
