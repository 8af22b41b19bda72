//! A client of the store server.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use phalanx_wire::store_msg::{
    Failure, LENGTH_BYTES, MAX_WAIT_KEYS, Request, Response, check_key, response_bytes,
};

use super::socket::tune;
use crate::auth;
use crate::{Error, ErrorKind, Result, Store};

/// How long a server may take to answer, beyond the wait that it was asked
/// for, unless told otherwise: the deadline of control messages.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// First pause between attempts to connect; it doubles...
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// ...up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Longest single attempt: a host that drops packets must not use up the time
/// in which another address would have answered.
const ATTEMPT_WITHIN: Duration = Duration::from_secs(3);

/// Longest wait of an attempt for the server's part of the handshake where the
/// name has more addresses to try. With one address it lasts until the deadline:
/// who leaves the queue of a busy server goes to its end.
const GREETED_WITHIN: Duration = Duration::from_secs(8);

/// A server that has another token, or says that it speaks another version, is
/// believed when it does so for this long: it cannot prove it, and may be a
/// stranger, or the server of the job before, in the place of ours.
const BELIEVED_AFTER: Duration = Duration::from_secs(10);

/// Stands for "no deadline": longer than a server waits (49 days), and short
/// enough to be added to a point in time.
const FOREVER: Duration = Duration::from_secs(50 * 24 * 3600);

/// Connections kept for the next caller; more are opened when more threads
/// ask at once, and closed again.
const IDLE_KEPT: usize = 8;

/// A client of a [`TcpServer`](crate::TcpServer).
///
/// Each thread that asks uses a connection for itself (they are kept and
/// reused), so a thread that waits holds up no other. *Cost:* one round trip a
/// call.
///
/// Connections that break are not re-established behind the caller's back:
/// the server's memory is the store, and a new server would be an empty one.
#[derive(Debug)]
pub struct TcpStore {
    /// As the caller gave it.
    addr: String,
    /// As errors name it.
    place: String,
    token: Token,
    idle: Mutex<Vec<Connection>>,
    /// Milliseconds that a server may take to answer.
    answer_ms: AtomicU32,
}

/// What is stored when this process ends; see
/// [`Store::leave_will`]. Dropping it takes it back.
#[derive(Debug)]
pub struct Will {
    connection: Connection,
    key: String,
    /// It is not taken back.
    stands: bool,
}

impl Will {
    /// Has it stored now, as if this process had ended.
    pub fn execute(mut self) {
        self.stands = true;
    }
}

impl Drop for Will {
    fn drop(&mut self) {
        if self.stands {
            return; // the server sees the connection end
        }
        let Connection { stream, buffer, .. } = &mut self.connection;
        buffer.clear();
        let back = Request::Will {
            key: &self.key,
            value: None,
        };
        // The server reads it before it sees the end, and nobody waits for its
        // answer. A server that is gone keeps no will either.
        if back.encode(buffer).is_ok() {
            let _ = stream.write_all(buffer);
        }
    }
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// The last request, then the last response.
    buffer: Vec<u8>,
    /// The read limit that the socket has now.
    limit: Option<Duration>,
}

impl TcpStore {
    /// Connects to `addr` ("host:port"). While nobody listens there, somebody
    /// else does, the name does not resolve, or the host cannot be reached, it
    /// tries again, for `timeout` in all.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] (with address, time, attempts, last cause and a
    /// hint). [`ErrorKind::TokenMismatch`] when the server still has another token
    /// after 10 s, or at the deadline, and in the same way
    /// [`ErrorKind::Rejected`] for another version. At once:
    /// [`ErrorKind::Rejected`] for other reasons, [`ErrorKind::Usage`] (no port in
    /// the address).
    pub fn connect(addr: &str, token: Token, timeout: Duration) -> Result<TcpStore> {
        Self::connect_telling(addr, token, timeout, |_| {})
    }

    /// [`connect`](Self::connect), which tells `failed` of every attempt that
    /// failed, before it tries again.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_telling(
        addr: &str,
        token: Token,
        timeout: Duration,
        mut failed: impl FnMut(&Error),
    ) -> Result<TcpStore> {
        if !addr.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0)
        }) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{addr:?} is not a store address: give host:port, for example 127.0.0.1:29500"
                ),
            ));
        }
        let store = TcpStore {
            addr: addr.to_owned(),
            place: format!("the store at {addr}"),
            token,
            idle: Mutex::default(),
            answer_ms: AtomicU32::new(millis(ANSWER_WITHIN)),
        };
        let first = store.open(timeout, Some(&mut failed))?;
        store.keep(first);
        Ok(store)
    }

    /// Opens connections for `threads` that ask at once, if they are not there:
    /// from then on their requests need no new one, which may take long while
    /// strangers keep the server busy.
    ///
    /// # Errors
    /// As for a request.
    pub fn reserve(&self, threads: usize) -> Result<()> {
        let kept = || {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.len()
        };
        while kept() < threads.min(IDLE_KEPT) {
            let more = self.open(self.answer_within(), None)?;
            self.keep(more);
        }
        Ok(())
    }

    /// From now on a server may take `limit` to answer, beyond the wait that it
    /// is asked for; 10 s at first. For the last words of a process that has no
    /// time to wait for a host that is out of reach.
    pub fn set_answer_limit(&self, limit: Duration) {
        self.answer_ms.store(millis(limit), Ordering::Relaxed);
    }

    fn answer_within(&self) -> Duration {
        Duration::from_millis(self.answer_ms.load(Ordering::Relaxed).into())
    }

    /// The address as given to [`connect`](Self::connect).
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// Opens one more connection, trying until `timeout`. The first of a store tells
    /// `failed` of each attempt; after it a refusal is final: the server has
    /// listened there, so it has ended.
    fn open(
        &self,
        timeout: Duration,
        mut failed: Option<&mut dyn FnMut(&Error)>,
    ) -> Result<Connection> {
        let start = Instant::now();
        let deadline = start + timeout.min(FOREVER);
        let mut pause = FIRST_PAUSE;
        let mut attempts = 0_u32;
        let mut before: Option<Error> = None;
        let mut doubted_since: Option<Instant> = None;
        loop {
            attempts += 1;
            let error = match self.attempt(deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) if is_final(error.kind()) => return Err(error.context(&self.place)),
                Err(error) if is_out_of_files(&error) => return Err(error.context(&self.place)),
                Err(error) if failed.is_none() && is_refused(&error) => {
                    return Err(self.describe(Fault::Closed(None), Duration::ZERO));
                }
                Err(error) => error,
            };
            if let Some(failed) = &mut failed {
                failed(&error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if is_doubtful(error.kind()) {
                let since = *doubted_since.get_or_insert_with(Instant::now);
                if left.is_zero() || since.elapsed() >= BELIEVED_AFTER {
                    return Err(error.context(&self.place));
                }
            }
            // The last attempt is often cut short by the deadline; what the
            // one before it found says more.
            let error = match before.take() {
                Some(before) if is_late(&error) => before,
                _ => error,
            };
            if left.is_zero() {
                // Who has answered before may do so again.
                let kind = if failed.is_some() {
                    ErrorKind::Timeout
                } else {
                    ErrorKind::NoAnswer
                };
                return Err(Error::new(
                    kind,
                    format!(
                        "could not reach {} within {:.1?} ({attempts} attempt{}, last: {error}); \
                         does rank 0 or the launcher run there, are address and port the same on all \
                         hosts, and does a firewall let the port through?",
                        self.place,
                        start.elapsed(),
                        if attempts == 1 { "" } else { "s" },
                    ),
                )
                .caused_by(error));
            }
            before = Some(error);
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt on each address that the name has.
    fn attempt(&self, deadline: Instant) -> Result<Connection> {
        let addrs: Vec<SocketAddr> = self
            .addr
            .to_socket_addrs()
            .map_err(|e| Error::io("resolving the host name", e))?
            .collect();
        let greeted_within = match addrs.len() {
            1 => FOREVER,
            _ => GREETED_WITHIN,
        };
        let mut last = None;
        for addr in addrs {
            match self.attempt_one(addr, deadline, greeted_within) {
                Ok(connection) => return Ok(connection),
                Err(error) if is_final(error.kind()) => return Err(error),
                Err(error) => last = Some(error),
            }
        }
        Err(last
            .unwrap_or_else(|| Error::new(ErrorKind::Io, "the host name resolves to no address")))
    }

    fn attempt_one(
        &self,
        addr: SocketAddr,
        deadline: Instant,
        greeted_within: Duration,
    ) -> Result<Connection> {
        let left = |most: Duration| {
            deadline
                .saturating_duration_since(Instant::now())
                // Zero would be refused as an argument.
                .clamp(Duration::from_millis(1), most)
        };
        let mut stream = TcpStream::connect_timeout(&addr, left(ATTEMPT_WITHIN))
            .map_err(|e| Error::io("connecting", e))?;
        // On loopback, an attempt at a port where nobody listens can meet
        // itself: the system picks that very port for our side.
        if stream.local_addr().ok() == stream.peer_addr().ok() {
            return Err(Error::new(
                ErrorKind::Io,
                "connecting: nobody listens there",
            ));
        }
        tune(&stream).map_err(|e| Error::io("setting up a connection", e))?;
        let hello = Hello::new(Role::StoreClient, self.token.job_id());
        let server = auth::initiate(&mut stream, hello, &self.token, left(greeted_within))?;
        if server.role != Role::StoreServer {
            return Err(Error::new(
                ErrorKind::Stranger,
                "a member of this job listens there, but it is not a store",
            ));
        }
        Ok(Connection {
            stream,
            buffer: Vec::new(),
            limit: None,
        })
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_KEPT {
            idle.push(connection);
        }
    }

    /// Asks, waits at most `wait` plus the answer limit, and gives the
    /// response to `read`.
    fn ask<T>(
        &self,
        request: &Request<'_>,
        wait: Duration,
        read: impl FnOnce(Response<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        let kept = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let mut connection = match kept {
            Some(connection) => connection,
            None => self.open(self.answer_within(), None)?,
        };
        let body = connection
            .round_trip(request, wait.saturating_add(self.answer_within()))
            .map_err(|fault| self.describe(fault, wait))?;
        let response = match Response::decode(body) {
            Ok(response) => response,
            Err(e) => return Err(self.broken(e)),
        };
        // The server closes after this one.
        let usable = response != Response::Failed(Failure::BadRequest);
        let result = match read(response) {
            Some(result) => result,
            None => {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    format!("{} answered another question than was asked", self.place),
                ));
            }
        };
        if usable {
            self.keep(connection);
        }
        result
    }

    fn broken(&self, source: phalanx_wire::Error) -> Error {
        Error::new(
            ErrorKind::Protocol,
            format!("{} sent nonsense: {source}", self.place),
        )
        .caused_by(source)
    }

    fn describe(&self, fault: Fault, wait: Duration) -> Error {
        match fault {
            Fault::Encode(e) => Error::new(ErrorKind::Usage, e.to_string()).caused_by(e),
            Fault::Decode(e) => self.broken(e),
            Fault::Closed(source) => {
                let error = Error::new(
                    ErrorKind::PeerLost,
                    format!(
                        "{} closed the connection: the process that hosts it (rank 0 or the launcher) has ended",
                        self.place
                    ),
                );
                match source {
                    Some(source) => error.caused_by(source),
                    None => error,
                }
            }
            Fault::Late => Error::new(
                ErrorKind::NoAnswer,
                format!(
                    "{} did not answer within {:.1?}: its process is stopped, or its host out of reach",
                    self.place,
                    wait.saturating_add(self.answer_within())
                ),
            ),
            Fault::Io(e) => Error::io(format_args!("asking {}", self.place), e),
        }
    }

    fn simple<T>(
        &self,
        key: &str,
        request: &Request<'_>,
        read: impl FnOnce(Response<'_>) -> Option<T>,
    ) -> Result<T> {
        request.check().map_err(|e| Error::bad_request(key, e))?;
        self.ask(request, Duration::ZERO, |response| match response {
            Response::Failed(failure) => Some(Err(Error::failed(&self.place, key, failure))),
            other => read(other).map(Ok),
        })
    }

    /// What a wait for `keys` says that has found these missing.
    fn all_there(&self, keys: &[&str], timeout: Duration, missing: Vec<String>) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::missing(&self.place, keys.len(), timeout, missing))
    }

    /// Waits for at most [`MAX_WAIT_KEYS`] keys; returns those that are missing.
    fn wait_some(&self, keys: &[&str], timeout: Duration) -> Result<Vec<String>> {
        let request = Request::Wait {
            keys: keys.to_vec(),
            timeout_ms: millis(timeout),
        };
        self.ask(&request, timeout, |response| match response {
            Response::Done => Some(Ok(Vec::new())),
            Response::Missing(missing) => {
                Some(Ok(missing.into_iter().map(str::to_owned).collect()))
            }
            Response::Failed(failure) => Some(Err(Error::failed(&self.place, keys[0], failure))),
            _ => None,
        })
    }
}

/// Errors that another attempt would only repeat.
fn is_final(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::Rejected(reason) => !matches!(
            reason,
            RejectReason::Full | RejectReason::ShuttingDown | RejectReason::WrongVersion
        ),
        ErrorKind::Timeout | ErrorKind::PeerLost | ErrorKind::Io | ErrorKind::Stranger => false,
        other => !is_doubtful(other),
    }
}

/// Errors that another attempt would repeat if it was our server that answered.
fn is_doubtful(kind: ErrorKind) -> bool {
    let version = ErrorKind::Rejected(RejectReason::WrongVersion);
    kind == ErrorKind::TokenMismatch || kind == version
}

/// Whether this process, or the system, has too many files open: no matter of time.
fn is_out_of_files(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<std::io::Error>());
    source.is_some_and(crate::auth::is_out_of_files)
}

/// Whether nobody listens at the address.
fn is_refused(error: &Error) -> bool {
    io_kind(error) == Some(IoKind::ConnectionRefused)
}

/// Whether an attempt ended by its time limit.
fn is_late(error: &Error) -> bool {
    error.kind() == ErrorKind::Timeout || io_kind(error) == Some(IoKind::TimedOut)
}

fn io_kind(error: &Error) -> Option<IoKind> {
    let source = std::error::Error::source(error)?;
    Some(source.downcast_ref::<std::io::Error>()?.kind())
}

/// Rounded up, so that a wait never ends early; more than 49 days are 49 days.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

/// What can go wrong with one round trip.
enum Fault {
    Encode(phalanx_wire::Error),
    Decode(phalanx_wire::Error),
    Closed(Option<std::io::Error>),
    Late,
    Io(std::io::Error),
}

impl Connection {
    /// Sends the request and returns the body of the response. After a fault
    /// the connection is of no use: an answer may still be under way.
    fn round_trip(&mut self, request: &Request<'_>, limit: Duration) -> Result<&[u8], Fault> {
        let deadline = Instant::now() + limit.min(FOREVER);
        self.buffer.clear();
        request.encode(&mut self.buffer).map_err(Fault::Encode)?;
        self.arm(limit.min(FOREVER))?;
        let mut sent = 0;
        while sent < self.buffer.len() {
            match self.stream.write(&self.buffer[sent..]) {
                Ok(0) => return Err(Fault::Closed(None)),
                Ok(n) => sent += n,
                Err(e) => self.judge(e, deadline)?,
            }
        }
        let mut length = [0; LENGTH_BYTES];
        self.fill(&mut length, deadline)?;
        let bytes = response_bytes(length).map_err(Fault::Decode)?;
        // At most MAX_RESPONSE_BYTES, and from a peer that holds the token.
        let mut body = std::mem::take(&mut self.buffer);
        body.clear();
        body.resize(bytes, 0);
        self.fill(&mut body, deadline)?;
        self.buffer = body;
        Ok(&self.buffer)
    }

    fn fill(&mut self, into: &mut [u8], deadline: Instant) -> Result<(), Fault> {
        let mut have = 0;
        while have < into.len() {
            match self.stream.read(&mut into[have..]) {
                Ok(0) => return Err(Fault::Closed(None)),
                Ok(n) => have += n,
                Err(e) => self.judge(e, deadline)?,
            }
            if have < into.len() && Instant::now() >= deadline {
                return Err(Fault::Late);
            }
        }
        Ok(())
    }

    /// Sets the time limit of a single read or write; a system call only
    /// when it differs from the last one.
    fn arm(&mut self, limit: Duration) -> Result<(), Fault> {
        let limit = Some(limit.max(Duration::from_millis(1)));
        if self.limit != limit {
            auth::Channel::set_timeouts(&self.stream, limit).map_err(Fault::Io)?;
            self.limit = limit;
        }
        Ok(())
    }

    /// Whether to go on after this error.
    fn judge(&mut self, error: std::io::Error, deadline: Instant) -> Result<(), Fault> {
        match error.kind() {
            IoKind::Interrupted | IoKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Fault::Late);
                }
                self.arm(left)
            }
            IoKind::ConnectionReset | IoKind::ConnectionAborted | IoKind::BrokenPipe => {
                Err(Fault::Closed(Some(error)))
            }
            // Here: what the probes of a silent connection found.
            IoKind::TimedOut => Err(Fault::Closed(Some(error))),
            _ => Err(Fault::Io(error)),
        }
    }
}

impl Store for TcpStore {
    fn place(&self) -> &str {
        &self.place
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.simple(key, &Request::Set { key, value }, |r| {
            matches!(r, Response::Done).then_some(())
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key(key).map_err(|e| Error::bad_request(key, e))?;
        let request = Request::Get {
            key,
            timeout_ms: millis(timeout),
        };
        self.ask(&request, timeout, |response| match response {
            Response::Value(value) => Some(Ok(value.to_vec())),
            Response::Missing(_) => Some(Err(Error::missing(
                &self.place,
                1,
                timeout,
                vec![key.to_owned()],
            ))),
            Response::Failed(failure) => Some(Err(Error::failed(&self.place, key, failure))),
            _ => None,
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.simple(key, &Request::TryGet { key }, |r| match r {
            Response::Value(value) => Some(Some(value.to_vec())),
            Response::Nothing => Some(None),
            _ => None,
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        for key in keys {
            check_key(key).map_err(|e| Error::bad_request(key, e))?;
        }
        if keys.is_empty() {
            return Ok(());
        }
        if keys.len() <= MAX_WAIT_KEYS {
            let missing = self.wait_some(keys, timeout)?;
            return self.all_there(keys, timeout, missing);
        }
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        loop {
            // More keys than one request takes: one after the other...
            for some in keys.chunks(MAX_WAIT_KEYS) {
                if !self.wait_some(some, left())?.is_empty() {
                    break;
                }
            }
            // ...and then a look at all of them: what was there while the others
            // came may be gone, and an error names all that are missing.
            let is_last = left().is_zero();
            let mut missing = Vec::new();
            for some in keys.chunks(MAX_WAIT_KEYS) {
                missing.extend(self.wait_some(some, Duration::ZERO)?);
            }
            if missing.is_empty() || is_last {
                return self.all_there(keys, timeout, missing);
            }
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.simple(key, &Request::Add { key, delta }, |r| match r {
            Response::Number(number) => Some(number),
            _ => None,
        })
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let request = Request::CompareSet {
            key,
            expected,
            desired,
        };
        self.simple(key, &request, |r| match r {
            Response::Value(value) => Some(value.to_vec()),
            Response::Nothing => Some(Vec::new()),
            _ => None,
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.simple(key, &Request::Delete { key }, |r| match r {
            Response::Existed(existed) => Some(existed),
            _ => None,
        })
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        let request = Request::Will {
            key,
            value: Some(value),
        };
        request.check().map_err(|e| Error::bad_request(key, e))?;
        // One of its own: others are handed from call to call, and closed.
        let mut connection = self.open(self.answer_within(), None)?;
        let body = connection
            .round_trip(&request, self.answer_within())
            .map_err(|fault| self.describe(fault, Duration::ZERO))?;
        match Response::decode(body) {
            Ok(Response::Done) => Ok(Some(Will {
                connection,
                key: key.to_owned(),
                stands: false,
            })),
            Ok(Response::Failed(failure)) => Err(Error::failed(&self.place, key, failure)),
            Ok(_) => Err(Error::new(
                ErrorKind::Protocol,
                format!("{} answered another question than was asked", self.place),
            )),
            Err(e) => Err(self.broken(e)),
        }
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        self.simple(prefix, &Request::DeletePrefix { prefix }, |r| match r {
            Response::Removed(count) => Some(count),
            _ => None,
        })
    }
}
