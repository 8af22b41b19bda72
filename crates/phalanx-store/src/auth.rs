//! The handshake of [`phalanx_wire::handshake`] over a stream, with a timeout for
//! the whole handshake.
//!
//! Ranks use it for their own sockets too: no other data is sent on a connection
//! before both sides have proven the job's token.
//!
//! ```
//! use phalanx_store::auth;
//! use phalanx_wire::handshake::{Hello, Role};
//! use phalanx_wire::Token;
//! use std::os::unix::net::UnixStream;
//! use std::time::Duration;
//!
//! let token = Token::generate()?;
//! let me = |rank| Hello::new(Role::Peer, token.job_id()).rank(rank).world(2);
//! let limit = Duration::from_secs(5);
//! let (mut here, mut there) = UnixStream::pair()?;
//! std::thread::scope(|scope| {
//!     let accepted = scope.spawn(|| {
//!         auth::accept(&mut there, &token, limit, |peer| {
//!             me(0).check_same_group(peer)?;
//!             Ok(me(0))
//!         })
//!     });
//!     assert_eq!(auth::initiate(&mut here, me(1), &token, limit)?.rank, 0);
//!     assert_eq!(accepted.join().unwrap()?.rank, 1);
//!     Ok::<(), phalanx_store::Error>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashMap;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::handshake::{
    Acceptor, Awaiting, Hello, Initiator, MAX_MESSAGE_BYTES, Outcome, PREFIX_BYTES, Proven,
    RejectReason, TAG_BYTES, body_bytes, version_notice,
};
use phalanx_wire::{ErrorKind as WireKind, Token};

pub use crate::pending::is_out_of_files;
use crate::{Error, ErrorKind, Result};

/// Timeout of an acceptor for the whole handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// A blocking byte stream with timeouts.
pub trait Channel: Read + Write {
    /// Sets the timeout of every read and write; `None` removes it.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn set_timeouts(&self, limit: Option<Duration>) -> std::io::Result<()>;
}

impl Channel for TcpStream {
    fn set_timeouts(&self, limit: Option<Duration>) -> std::io::Result<()> {
        self.set_read_timeout(limit)?;
        self.set_write_timeout(limit)
    }
}

impl Channel for UnixStream {
    fn set_timeouts(&self, limit: Option<Duration>) -> std::io::Result<()> {
        self.set_read_timeout(limit)?;
        self.set_write_timeout(limit)
    }
}

/// Runs the handshake on the side that connected. Both sides prove the token;
/// returns the other side's hello. The nonce in `hello` is replaced by a fresh one.
///
/// The stream must be blocking; its timeouts are removed on success. After an
/// error it cannot be used further.
///
/// # Errors
/// [`ErrorKind::TokenMismatch`], [`ErrorKind::Rejected`] (with the other
/// side's reason), [`ErrorKind::WrongProtocol`],
/// [`ErrorKind::Timeout`], [`ErrorKind::PeerLost`] (closed before the end),
/// [`ErrorKind::Io`].
pub fn initiate<S: Channel + ?Sized>(
    stream: &mut S,
    hello: Hello,
    token: &Token,
    timeout: Duration,
) -> Result<Hello> {
    let mut timed = Timed::new(stream, timeout);
    let (initiator, message) = Initiator::start(hello, token)?;
    timed.write(&message)?;
    let challenge = timed.read(Awaiting::Challenge)?;
    let (proving, proof) = initiator.answer(&challenge)?;
    timed.write(&proof)?;
    let verdict = timed.read(Awaiting::Verdict)?;
    match proving.finish(&verdict)? {
        Outcome::Welcome(peer) => {
            timed.clear_timeouts()?;
            Ok(peer)
        }
        Outcome::Rejected(reason) => {
            let what = format!("rejected by the other side: {reason}");
            Err(Error::new(ErrorKind::Rejected(reason), what))
        }
    }
}

/// Runs the handshake on the side that accepted the connection. Returns the hello
/// of a peer that has proven the token and that `decide` has accepted.
///
/// `decide` runs after the proof. It returns this side's hello, or the reason to
/// refuse the peer, which is sent to it.
///
/// The stream must be blocking; its timeouts are removed on success. After an
/// error, close the stream, log it ([`RefusalLog`]) and continue: an
/// unauthenticated connection must not fail the job.
///
/// # Errors
/// [`ErrorKind::TokenMismatch`] (a wrong proof; an honest peer with another token
/// closes the connection before it: [`ErrorKind::PeerLost`]),
/// [`ErrorKind::Rejected`] (by `decide`), [`ErrorKind::WrongProtocol`],
/// [`ErrorKind::Timeout`], [`ErrorKind::Io`].
pub fn accept<S: Channel + ?Sized>(
    stream: &mut S,
    token: &Token,
    timeout: Duration,
    decide: impl FnOnce(&Hello) -> Result<Hello, RejectReason>,
) -> Result<Hello> {
    let mut timed = Timed::new(stream, timeout);
    let hello = timed.read(Awaiting::Hello).inspect_err(|error| {
        if error.kind() == ErrorKind::Rejected(RejectReason::WrongVersion) {
            // For the peer's user; whether it arrives does not matter here.
            let _ = timed.stream.write(&version_notice());
        }
    })?;
    let (acceptor, challenge) = Acceptor::start(&hello, token)?;
    timed.write(&challenge)?;
    let proven = acceptor.verify(&timed.read(Awaiting::Proof)?)?;
    let peer = *proven.peer();
    match decide(&peer) {
        Ok(mine) => {
            timed.write(&proven.welcome(mine))?;
            timed.clear_timeouts()?;
            Ok(peer)
        }
        Err(reason) => {
            timed.write(&proven.reject(reason))?;
            let what = format!("refused rank {}: {reason}", peer.rank);
            Err(Error::new(ErrorKind::Rejected(reason), what))
        }
    }
}

/// The accepting side of a handshake over a nonblocking stream, for an acceptor
/// with many handshakes at once.
#[derive(Debug)]
pub struct PendingHandshake {
    bytes: [u8; MAX_MESSAGE_BYTES],
    have: usize,
    /// Set once the challenge has been sent.
    acceptor: Option<Acceptor>,
}

/// Result of [`PendingHandshake::advance`].
#[derive(Debug)]
pub enum Progress {
    /// The next message is not complete.
    Waiting,
    /// The hello has arrived and the challenge was sent. Holds the hello's
    /// [tag](Acceptor::tag), if it is valid.
    Challenged(Option<[u8; TAG_BYTES]>),
    /// The peer has proven the token and waits for a verdict.
    Proven(Proven),
}

impl Default for PendingHandshake {
    fn default() -> Self {
        PendingHandshake {
            bytes: [0; MAX_MESSAGE_BYTES],
            have: 0,
            acceptor: None,
        }
    }
}

impl PendingHandshake {
    /// Reads available bytes, up to the end of one message, and answers a complete
    /// message. After [`Progress::Challenged`] there may be more to read.
    ///
    /// # Errors
    /// As [`accept`]; close the connection.
    pub fn advance<S: Read + Write + ?Sized>(
        &mut self,
        stream: &mut S,
        token: &Token,
    ) -> Result<Progress> {
        let awaiting = match self.acceptor {
            None => Awaiting::Hello,
            Some(_) => Awaiting::Proof,
        };
        let mut need = PREFIX_BYTES;
        loop {
            if let Some(prefix) = self.bytes[..self.have].first_chunk::<PREFIX_BYTES>() {
                need = PREFIX_BYTES
                    + body_bytes(prefix, awaiting).inspect_err(|e| {
                        if e.kind() == WireKind::WrongVersion && awaiting == Awaiting::Hello {
                            // For the peer's user; whether it arrives does not matter here.
                            let _ = stream.write(&version_notice());
                        }
                    })?;
            }
            if self.have == need {
                break;
            }
            match stream.read(&mut self.bytes[self.have..need]) {
                Ok(0) => return Err(closed(self.have)),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(Progress::Waiting),
                Err(e) => return Err(io_error(e)),
            }
        }
        self.have = 0;
        let message = &self.bytes[..need];
        match self.acceptor.take() {
            Some(acceptor) => Ok(Progress::Proven(acceptor.verify(message)?)),
            None => {
                let (acceptor, challenge) = Acceptor::start(message, token)?;
                send(stream, &challenge)?;
                let tag = acceptor.tag();
                self.acceptor = Some(acceptor);
                Ok(Progress::Challenged(tag))
            }
        }
    }
}

/// Sends a handshake message over a nonblocking stream. It fits the send buffer,
/// since little was sent before.
///
/// # Errors
/// [`ErrorKind::PeerLost`] or [`ErrorKind::Io`].
pub fn send<S: Write + ?Sized>(stream: &mut S, message: &[u8]) -> Result<()> {
    stream.write_all(message).map_err(io_error)
}

fn io_error(error: std::io::Error) -> Error {
    match error.kind() {
        IoKind::ConnectionReset | IoKind::BrokenPipe | IoKind::ConnectionAborted => Error::new(
            ErrorKind::PeerLost,
            "the other side reset the connection during the handshake",
        )
        .caused_by(error),
        _ => Error::io("handshake", error),
    }
}

/// A stream with one deadline for all reads and writes together.
struct Timed<'a, S: Channel + ?Sized> {
    stream: &'a mut S,
    start: Instant,
    timeout: Duration,
}

impl<'a, S: Channel + ?Sized> Timed<'a, S> {
    fn new(stream: &'a mut S, timeout: Duration) -> Self {
        Self {
            stream,
            start: Instant::now(),
            timeout,
        }
    }

    /// Sets the timeout of the next call to the remaining time.
    fn limit(&self) -> Result<()> {
        let left = self.timeout.saturating_sub(self.start.elapsed());
        self.stream
            // A zero timeout would be an error.
            .set_timeouts(Some(left.max(Duration::from_millis(1))))
            .map_err(|e| Error::io("setting the timeout of a connection", e))
    }

    fn check_deadline(&self) -> Result<()> {
        if self.start.elapsed() < self.timeout {
            return Ok(());
        }
        let what = format!("no handshake within {:.1?}", self.timeout);
        Err(Error::new(ErrorKind::Timeout, what))
    }

    fn clear_timeouts(&self) -> Result<()> {
        self.stream
            .set_timeouts(None)
            .map_err(|e| Error::io("removing the timeout of a connection", e))
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            self.check_deadline()?;
            self.limit()?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(closed(0)),
                Ok(n) => bytes = &bytes[n..],
                Err(e) => self.check_error(e)?,
            }
        }
        Ok(())
    }

    /// Reads exactly one message. Bytes that have already arrived are read even
    /// after the deadline: this process may have been stopped meanwhile, and a
    /// welcome is not sent twice.
    fn read(&mut self, awaiting: Awaiting) -> Result<Vec<u8>> {
        let mut bytes = [0; MAX_MESSAGE_BYTES];
        let mut have = 0;
        let mut need = PREFIX_BYTES;
        while have < need {
            self.limit()?;
            match self.stream.read(&mut bytes[have..need]) {
                Ok(0) => return Err(closed(have)),
                Ok(n) => have += n,
                Err(e) => self.check_error(e)?,
            }
            if need == PREFIX_BYTES
                && let Some(prefix) = bytes[..have].first_chunk()
            {
                need += body_bytes(prefix, awaiting)?;
            }
        }
        Ok(bytes[..need].to_vec())
    }

    /// Returns an error unless the call may be tried again.
    fn check_error(&self, error: std::io::Error) -> Result<()> {
        match error.kind() {
            // Try again; the deadline of the
            // whole handshake decides.
            IoKind::Interrupted | IoKind::WouldBlock | IoKind::TimedOut => self.check_deadline(),
            _ => Err(io_error(error)),
        }
    }
}

fn closed(have: usize) -> Error {
    let how = if have == 0 {
        "closed the connection during the handshake".to_owned()
    } else {
        format!("closed the connection after {have} bytes of a handshake message")
    };
    Error::new(ErrorKind::PeerLost, format!("the other side {how}"))
}

/// Maximum number of sources that a [`RefusalLog`] remembers; further sources are
/// not logged.
const MAX_SOURCES: usize = 1024;

/// Logs refused connections at most once a minute per source, so that a port
/// scanner cannot fill the disk.
#[derive(Debug, Default)]
pub struct RefusalLog {
    last: Mutex<HashMap<IpAddr, Instant>>,
}

impl RefusalLog {
    /// Interval between two log lines of one source.
    pub const INTERVAL: Duration = Duration::from_secs(60);

    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Logs a warning unless this source had one within the last minute. `location`
    /// names this side. Returns whether it logged.
    pub fn warn(&self, source: IpAddr, location: &str, why: &dyn std::fmt::Display) -> bool {
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(then) = last.get(&source)
            && now.duration_since(*then) < Self::INTERVAL
        {
            return false;
        }
        if last.len() >= MAX_SOURCES {
            last.retain(|_, then| now.duration_since(*then) < Self::INTERVAL);
            if last.len() >= MAX_SOURCES {
                return false;
            }
        }
        last.insert(source, now);
        drop(last);
        tracing::warn!(%source, location, "refused a connection: {why} (further ones from this source are counted but not logged for a minute)");
        true
    }
}
