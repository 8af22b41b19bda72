//! The unauthenticated connections of a listener.
//!
//! One thread reads all handshakes as bytes arrive, so a peer that sends garbage, nothing,
//! or one byte a second costs an open file until the timeout and delays no member. When
//! there are too many, those that are not a member's are closed first ([`closable`]).

use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::handshake::{Proven, TAG_BYTES};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::auth::{Channel, HANDSHAKE_TIMEOUT, PendingHandshake, Progress, RefusalLog};
use crate::pending::{HelloState, Pending, closable, is_out_of_files, max_pending, next_closable};
use crate::refused::{RefusalReason, Refusals};
use crate::{Error, ErrorKind};

/// Pause after connections could not be accepted. The listener stays readable meanwhile, so
/// polling it would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of connections accepted at a time.
const ACCEPT_BATCH: usize = 256;

/// A nonblocking socket that accepts connections.
pub trait Listener: AsFd {
    /// A connection.
    type Stream: Channel + AsFd;
    /// Accepts one. A Unix socket's has the loopback address.
    ///
    /// # Errors
    /// As `accept`.
    fn take(&self) -> std::io::Result<(Self::Stream, SocketAddr)>;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn take(&self) -> std::io::Result<(TcpStream, SocketAddr)> {
        self.accept()
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    fn take(&self) -> std::io::Result<(UnixStream, SocketAddr)> {
        let (stream, _) = self.accept()?;
        Ok((stream, (Ipv4Addr::LOCALHOST, 0).into()))
    }
}

impl<L: Listener> Listener for &L {
    type Stream = L::Stream;

    fn take(&self) -> std::io::Result<(L::Stream, SocketAddr)> {
        (**self).take()
    }
}

/// A connection whose peer has proven the token, and waits for a welcome or a rejection.
#[derive(Debug)]
pub struct Authenticated<S> {
    /// The connection.
    pub stream: S,
    /// The peer's address.
    pub peer: SocketAddr,
    /// The peer's hello, and what answers it.
    pub proven: Proven,
}

struct Connection<S> {
    id: u64,
    stream: S,
    peer: SocketAddr,
    since: Instant,
    handshake: PendingHandshake,
    hello: HelloState,
    /// The tag of its hello, if it is valid.
    tag: Option<[u8; TAG_BYTES]>,
}

/// See the module.
pub struct Handshakes<L: Listener> {
    listener: L,
    token: Token,
    prepare: fn(&L::Stream) -> std::io::Result<()>,
    /// Of the listener, in log lines.
    location: String,
    /// Maximum number of connections.
    pub limit: usize,
    /// Timeout of a handshake.
    pub timeout: Duration,
    /// Whether refused connections are logged.
    pub logs: bool,
    log: RefusalLog,
    pub(crate) refusals: Arc<Refusals>,
    connections: Vec<Connection<L::Stream>>,
    next_id: u64,
    /// Time before which no connection is accepted.
    accept_again: Option<Instant>,
}

impl<L: Listener> Handshakes<L> {
    /// `prepare` makes an accepted connection nonblocking.
    pub fn new(
        listener: L,
        token: Token,
        location: String,
        prepare: fn(&L::Stream) -> std::io::Result<()>,
    ) -> Self {
        Handshakes {
            listener,
            token,
            prepare,
            location,
            limit: max_pending(),
            timeout: HANDSHAKE_TIMEOUT,
            logs: true,
            log: RefusalLog::new(),
            refusals: Arc::default(),
            connections: Vec::new(),
            next_id: 0,
            accept_again: None,
        }
    }

    /// Number of connections.
    pub fn count(&self) -> usize {
        self.connections.len()
    }

    /// Adds what to poll for [`serve`](Self::serve), and returns when to call it at the latest.
    pub fn poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) -> Option<Instant> {
        let connections = self.connections.iter();
        fds.extend(connections.map(|one| PollFd::new(&one.stream, PollFlags::IN)));
        let oldest = self.connections.iter().map(|one| one.since).min();
        let due = oldest.map(|since| since + self.timeout);
        // Without a free slot: when a connection may be closed for another one.
        let is_full = self.connections.len() >= self.limit;
        let closable = next_closable(self.pending()).filter(|_| is_full);
        let later = self.accept_again.into_iter().chain(closable).max();
        match later.filter(|when| *when > Instant::now()) {
            Some(when) => due.into_iter().chain([when]).min(),
            None => {
                fds.push(PollFd::new(&self.listener, PollFlags::IN));
                due
            }
        }
    }

    /// Polls until there is something to serve, or `until`, and serves it.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub fn wait(&mut self, until: Instant) -> std::io::Result<Vec<Authenticated<L::Stream>>> {
        let mut fds = Vec::new();
        let due = self.poll_fds(&mut fds).map_or(until, |due| due.min(until));
        let left = due.saturating_duration_since(Instant::now());
        // An interruption counts as no event.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        self.serve(&ready)
    }

    /// Continues the handshakes of connections that are `ready`, in the order of
    /// [`poll_fds`](Self::poll_fds); closes those that have timed out, and accepts others.
    ///
    /// # Errors
    /// Too many open files, and no connection to close for another one.
    pub fn serve(&mut self, ready: &[bool]) -> std::io::Result<Vec<Authenticated<L::Stream>>> {
        let mut done = Vec::new();
        let accepts = ready.get(self.connections.len()) == Some(&true);
        // From the end: a removed entry is replaced by the last one.
        for at in (0..self.connections.len()).rev() {
            if ready.get(at) == Some(&true) {
                match self.advance(at) {
                    Ok(None) => {}
                    Ok(Some(proven)) => {
                        let Connection { stream, peer, .. } = self.connections.swap_remove(at);
                        done.push(Authenticated {
                            stream,
                            peer,
                            proven,
                        });
                        continue;
                    }
                    Err(e) => {
                        self.refuse(at, reason_of(&e), &e);
                        continue;
                    }
                }
            }
            if self.connections[at].since.elapsed() >= self.timeout {
                self.refuse(at, None, &"the handshake timed out");
            }
        }
        match accepts.then(|| self.accept()) {
            Some(Err(e)) if done.is_empty() => Err(e),
            _ => Ok(done),
        }
    }

    /// Logs why a connection of this source is refused.
    pub fn warn(&self, source: IpAddr, why: &dyn std::fmt::Display) {
        self.log.warn(source, &self.location, why);
    }

    fn pending(&self) -> impl Iterator<Item = Pending> {
        self.connections.iter().map(|one| Pending {
            id: one.id,
            hello: one.hello,
            source: one.peer.ip(),
            since: one.since,
        })
    }

    fn advance(&mut self, at: usize) -> crate::Result<Option<Proven>> {
        loop {
            let one = &mut self.connections[at];
            match one.handshake.advance(&mut one.stream, &self.token)? {
                Progress::Waiting => return Ok(None),
                Progress::Proven(proven) => return Ok(Some(proven)),
                Progress::Challenged(tag) => {
                    // A tag that another connection has was replayed and does not count.
                    let is_new = tag.is_some() && self.connections.iter().all(|o| o.tag != tag);
                    let one = &mut self.connections[at];
                    (one.hello, one.tag) = match is_new {
                        true => (HelloState::Tagged, tag),
                        false => (HelloState::Untagged, None),
                    };
                }
            }
        }
    }

    /// Closes a connection. Without a `reason`, the state of its hello gives one.
    fn refuse(&mut self, at: usize, reason: Option<RefusalReason>, why: &dyn std::fmt::Display) {
        let one = self.connections.swap_remove(at);
        let reason = reason.unwrap_or(match one.hello {
            HelloState::Untagged => RefusalReason::WrongToken,
            _ => RefusalReason::Unfinished,
        });
        self.refusals.note(one.peer.ip(), reason);
        if self.logs {
            self.warn(one.peer.ip(), why);
        }
    }

    fn accept(&mut self) -> std::io::Result<()> {
        // Listed once, when needed: connections accepted here are too new.
        let mut list = None;
        for _ in 0..ACCEPT_BATCH {
            if self.connections.len() >= self.limit && !self.evict(&mut list) {
                break;
            }
            let (stream, peer) = match self.listener.take() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => continue,
                Err(e) if is_out_of_files(&e) && self.evict(&mut list) => continue,
                Err(e) if is_out_of_files(&e) => {
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return Err(e);
                }
                Err(e) => {
                    self.refusals.count();
                    // The peer left before it was accepted.
                    if matches!(
                        e.kind(),
                        IoKind::ConnectionAborted | IoKind::ConnectionReset
                    ) {
                        continue;
                    }
                    self.warn(Ipv4Addr::UNSPECIFIED.into(), &e);
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    break;
                }
            };
            if let Err(e) = (self.prepare)(&stream) {
                self.refusals.count();
                self.warn(peer.ip(), &e);
                continue;
            }
            self.adopt(stream, peer);
        }
        Ok(())
    }

    pub(crate) fn adopt(&mut self, stream: L::Stream, peer: SocketAddr) {
        self.next_id += 1;
        self.connections.push(Connection {
            id: self.next_id,
            stream,
            peer,
            since: Instant::now(),
            handshake: PendingHandshake::default(),
            hello: HelloState::Silent,
            tag: None,
        });
    }

    /// Closes the next of the `list` of connections that may be closed. False if there is none.
    fn evict(&mut self, list: &mut Option<Vec<u64>>) -> bool {
        let list = list.get_or_insert_with(|| closable(self.pending(), Instant::now()));
        let Some(id) = list.pop() else {
            return false;
        };
        if let Some(at) = self.connections.iter().position(|one| one.id == id) {
            self.refuse(at, None, &"its slot was needed for another connection");
        }
        true
    }
}

fn reason_of(error: &Error) -> Option<RefusalReason> {
    match error.kind() {
        ErrorKind::Rejected(_) => Some(RefusalReason::WrongVersion),
        ErrorKind::TokenMismatch => Some(RefusalReason::WrongToken),
        ErrorKind::WrongProtocol => Some(RefusalReason::WrongProtocol),
        _ => None,
    }
}
