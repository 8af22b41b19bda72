//! The handshake of [`phalanx_wire::handshake`] over a blocking stream, with a
//! deadline for the whole of it.
//!
//! Ranks use it for their own sockets too: nothing is read from or written to
//! a connection before both sides have proven the job's token.
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

pub use crate::pending::{
    Pending, Standing, closable, is_out_of_files, max_pending, next_closable,
};
use crate::{Error, ErrorKind, Result};

/// How long an acceptor gives a peer for the whole handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// A blocking byte stream whose reads and writes can be given a time limit.
pub trait Channel: Read + Write {
    /// Limits every single read and write from now on; `None` lifts the limit.
    ///
    /// # Errors
    /// As the operating system says.
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

/// The side that connected: says hello, proves the token, and returns the
/// hello of the other side, which has proven it too. The nonce in `hello` is
/// replaced by a fresh one.
///
/// The stream must be blocking; its timeouts are lifted on success. After an
/// error it is of no further use.
///
/// # Errors
/// [`ErrorKind::TokenMismatch`], [`ErrorKind::Rejected`] (with the other
/// side's reason), [`ErrorKind::Stranger`] (not our protocol),
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
            timed.lift()?;
            Ok(peer)
        }
        Outcome::Rejected(reason) => Err(Error::new(
            ErrorKind::Rejected(reason),
            format!("rejected by the other side: {reason}"),
        )),
    }
}

/// The side that was connected to: returns the hello of a peer that has
/// proven the token and that `decide` has accepted.
///
/// `decide` runs after the proof, hence never for a stranger. It returns the
/// hello with which this side introduces itself, or the reason to refuse,
/// which the peer is told.
///
/// The stream must be blocking; its timeouts are lifted on success. After an
/// error close it, count it, log it ([`StrangerLog`]), and go on: a stranger
/// never fails the job.
///
/// # Errors
/// [`ErrorKind::TokenMismatch`] (the peer proved wrongly; one that is honest
/// and has another token notices first and leaves: [`ErrorKind::PeerLost`]),
/// [`ErrorKind::Rejected`] (what `decide` said), [`ErrorKind::Stranger`],
/// [`ErrorKind::Timeout`], [`ErrorKind::Io`].
pub fn accept<S: Channel + ?Sized>(
    stream: &mut S,
    token: &Token,
    timeout: Duration,
    decide: impl FnOnce(&Hello) -> Result<Hello, RejectReason>,
) -> Result<Hello> {
    let mut timed = Timed::new(stream, timeout);
    let hello = match timed.read(Awaiting::Hello) {
        Ok(hello) => hello,
        Err(error) => {
            if error.kind() == ErrorKind::Rejected(RejectReason::WrongVersion) {
                // A courtesy; whether it arrives changes nothing here.
                let _ = timed.write(&version_notice());
            }
            return Err(error);
        }
    };
    let (acceptor, challenge) = Acceptor::start(&hello, token)?;
    timed.write(&challenge)?;
    let proof = timed.read(Awaiting::Proof)?;
    let proven = acceptor.verify(&proof)?;
    let peer = *proven.peer();
    match decide(&peer) {
        Ok(mine) => {
            timed.write(&proven.welcome(mine))?;
            timed.lift()?;
            Ok(peer)
        }
        Err(reason) => {
            timed.write(&proven.reject(reason))?;
            Err(Error::new(
                ErrorKind::Rejected(reason),
                format!("refused a member (rank {}): {reason}", peer.rank),
            ))
        }
    }
}

/// The side that was connected to, over a stream that does not block: for an
/// acceptor that keeps many handshakes open at once.
#[derive(Debug)]
pub struct Greeting {
    bytes: [u8; MAX_MESSAGE_BYTES],
    have: usize,
    /// Has challenged.
    acceptor: Option<Acceptor>,
}

/// How far a [`Greeting`] has come.
#[derive(Debug)]
pub enum Greeted {
    /// More is to be read.
    Waiting,
    /// The peer has said hello, and was challenged. The [tag](Acceptor::tag) of its
    /// hello, if that is valid.
    Challenged(Option<[u8; TAG_BYTES]>),
    /// The peer has proven the token; it waits for a verdict.
    Proven(Proven),
}

impl Default for Greeting {
    fn default() -> Self {
        Greeting {
            bytes: [0; MAX_MESSAGE_BYTES],
            have: 0,
            acceptor: None,
        }
    }
}

impl Greeting {
    /// Reads what is there, at most one message and not a byte more, and answers
    /// it. After [`Greeted::Challenged`] there may be more to read.
    ///
    /// # Errors
    /// As [`accept`]; close the connection.
    pub fn advance<S: Read + Write + ?Sized>(
        &mut self,
        stream: &mut S,
        token: &Token,
    ) -> Result<Greeted> {
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
                            // A courtesy; whether it arrives changes nothing here.
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
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(Greeted::Waiting),
                Err(e) => return Err(broken_off(e)),
            }
        }
        self.have = 0;
        let message = &self.bytes[..need];
        match self.acceptor.take() {
            Some(acceptor) => Ok(Greeted::Proven(acceptor.verify(message)?)),
            None => {
                let (acceptor, challenge) = Acceptor::start(message, token)?;
                send(stream, &challenge)?;
                let tag = acceptor.tag();
                self.acceptor = Some(acceptor);
                Ok(Greeted::Challenged(tag))
            }
        }
    }
}

/// Sends a message of the handshake over a stream that does not block: there is
/// room, as hardly anything was sent before.
///
/// # Errors
/// [`ErrorKind::PeerLost`] or [`ErrorKind::Io`].
pub fn send<S: Write + ?Sized>(stream: &mut S, message: &[u8]) -> Result<()> {
    stream.write_all(message).map_err(broken_off)
}

fn broken_off(error: std::io::Error) -> Error {
    match error.kind() {
        IoKind::ConnectionReset | IoKind::BrokenPipe | IoKind::ConnectionAborted => Error::new(
            ErrorKind::PeerLost,
            "the other side broke the connection off during the handshake",
        )
        .caused_by(error),
        _ => Error::io("handshake", error),
    }
}

/// A stream with one deadline over many reads and writes: a peer that sends a
/// byte now and then does not get more time for it.
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

    fn arm(&self) -> Result<()> {
        if self.start.elapsed() >= self.timeout {
            return Err(self.late());
        }
        self.limit()
    }

    /// Lets the next call take what is left of the time.
    fn limit(&self) -> Result<()> {
        let left = self.timeout.saturating_sub(self.start.elapsed());
        self.stream
            // A zero limit would mean none.
            .set_timeouts(Some(left.max(Duration::from_millis(1))))
            .map_err(|e| Error::io("setting a time limit on a connection", e))
    }

    fn late(&self) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!("no handshake within {:.1?}", self.timeout),
        )
    }

    fn lift(&self) -> Result<()> {
        self.stream
            .set_timeouts(None)
            .map_err(|e| Error::io("lifting the time limit of a connection", e))
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            self.arm()?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(closed(0)),
                Ok(n) => bytes = &bytes[n..],
                Err(e) => self.judge(e)?,
            }
        }
        Ok(())
    }

    /// Reads one whole message, and not a byte more. When the time is over, what
    /// lies there counts: this process may have been stopped since it came, and a
    /// welcome that is not read is not given a second time.
    fn read(&mut self, awaiting: Awaiting) -> Result<Vec<u8>> {
        let mut bytes = [0; MAX_MESSAGE_BYTES];
        let mut have = 0;
        let mut need = PREFIX_BYTES;
        while have < need {
            self.limit()?;
            match self.stream.read(&mut bytes[have..need]) {
                Ok(0) => return Err(closed(have)),
                Ok(n) => have += n,
                Err(e) => self.judge(e)?,
            }
            if have == PREFIX_BYTES && need == PREFIX_BYTES {
                let mut prefix = [0; PREFIX_BYTES];
                prefix.copy_from_slice(&bytes[..PREFIX_BYTES]);
                need += body_bytes(&prefix, awaiting)?;
            }
        }
        Ok(bytes[..need].to_vec())
    }

    /// Whether to try again after this error.
    fn judge(&self, error: std::io::Error) -> Result<()> {
        match error.kind() {
            // Interrupted: at once. Timed out: the next `arm` knows whether the
            // whole handshake is late.
            IoKind::Interrupted | IoKind::WouldBlock | IoKind::TimedOut => {
                if self.start.elapsed() >= self.timeout {
                    return Err(self.late());
                }
                Ok(())
            }
            _ => Err(broken_off(error)),
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

/// Most sources that a [`StrangerLog`] remembers; beyond it the log keeps
/// silent rather than grow.
const MAX_SOURCES: usize = 1024;

/// Logs refused connections at most once a minute per source, so that a port
/// scanner cannot fill a disk. The count of all of them is kept elsewhere.
#[derive(Debug, Default)]
pub struct StrangerLog {
    last: Mutex<HashMap<IpAddr, Instant>>,
}

impl StrangerLog {
    /// How long a source stays silent after a line.
    pub const QUIET: Duration = Duration::from_secs(60);

    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes a warning, unless this source had one within the last minute.
    /// `place` names this side. Returns whether it wrote.
    pub fn note(&self, source: IpAddr, place: &str, why: &dyn std::fmt::Display) -> bool {
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(then) = last.get(&source)
            && now.duration_since(*then) < Self::QUIET
        {
            return false;
        }
        if last.len() >= MAX_SOURCES {
            last.retain(|_, then| now.duration_since(*then) < Self::QUIET);
            if last.len() >= MAX_SOURCES {
                return false;
            }
        }
        last.insert(source, now);
        drop(last);
        tracing::warn!(%source, place, "refused a connection: {why} (further ones from there are counted, not logged, for a minute)");
        true
    }
}
