//! A client of the store server.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
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

/// Default timeout of a response, in addition to the timeout of a wait.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// First pause between two attempts to connect; it doubles...
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// ...up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Timeout of one attempt, so that a host that drops packets leaves time for other
/// addresses.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// Timeout of the handshake in one attempt where the name has several addresses.
/// With one address it is the deadline: leaving the queue of a busy server means
/// going to its end.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(8);

/// A token mismatch or another version is an error only after this time: until
/// then, the server may be that of a previous job, or another program in its place.
const MISMATCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum timeout: longer than a server waits (49 days), and short enough to be
/// added to an `Instant`.
const MAX_TIMEOUT: Duration = Duration::from_secs(50 * 24 * 3600);

/// Maximum number of idle connections. More are opened when more threads use the
/// store at once, and closed again.
const MAX_IDLE: usize = 8;

/// A client of a [`TcpServer`](crate::TcpServer).
///
/// Each call uses a separate connection from a pool, so a thread that waits does not
/// block others. *Cost:* one round trip per call.
///
/// Broken connections are not reopened: the store is in the server's memory, so a
/// new server would be empty.
#[derive(Debug)]
pub struct TcpStore {
    /// As given by the caller.
    addr: String,
    /// Name of the store in messages.
    location: String,
    token: Token,
    /// Our address of the first connection.
    local_ip: Option<IpAddr>,
    idle: Mutex<Vec<Connection>>,
    /// Timeout of a response, in milliseconds.
    response_ms: AtomicU32,
}

/// A value that is stored when this process ends; see [`Store::leave_will`].
/// Dropping it removes the will.
#[derive(Debug)]
pub struct Will {
    connection: Connection,
    key: String,
    /// Not to be removed on drop.
    executed: bool,
}

impl Will {
    /// Stores the value now, as if this process had ended.
    pub fn execute(mut self) {
        self.executed = true;
    }
}

impl Drop for Will {
    fn drop(&mut self) {
        if self.executed {
            return; // the server executes it when the connection closes
        }
        let Connection { stream, buffer, .. } = &mut self.connection;
        buffer.clear();
        let remove = Request::Will {
            key: &self.key,
            value: None,
        };
        // The server reads it before the end of the connection. The response is not
        // needed.
        if remove.encode(buffer).is_ok() {
            let _ = stream.write_all(buffer);
        }
    }
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// The last request, then the last response.
    buffer: Vec<u8>,
    /// Current read timeout of the socket.
    timeout: Option<Duration>,
}

impl TcpStore {
    /// Connects to `addr` ("host:port"). Tries again, up to `timeout`, while nothing
    /// or another program listens there, the name does not resolve, or the host
    /// cannot be reached.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] (with address, time, attempts, last cause and a
    /// hint). [`ErrorKind::TokenMismatch`] when the server still has another token
    /// after 10 s, or at the deadline, and likewise [`ErrorKind::Rejected`] for
    /// another version. At once:
    /// [`ErrorKind::Rejected`] for other reasons, [`ErrorKind::Usage`] (no port in
    /// the address).
    pub fn connect(addr: &str, token: Token, timeout: Duration) -> Result<TcpStore> {
        Self::connect_with(addr, token, timeout, |_| {})
    }

    /// As [`connect`](Self::connect). Calls `on_failure` after every failed attempt.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(
        addr: &str,
        token: Token,
        timeout: Duration,
        mut on_failure: impl FnMut(&Error),
    ) -> Result<TcpStore> {
        if !addr.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0)
        }) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{addr:?} is not a store address; give host:port, for example 127.0.0.1:29500"
                ),
            ));
        }
        let mut store = TcpStore {
            local_ip: None,
            addr: addr.to_owned(),
            location: format!("the store at {addr}"),
            token,
            idle: Mutex::default(),
            response_ms: AtomicU32::new(millis(RESPONSE_TIMEOUT)),
        };
        let first = store.open(timeout, Some(&mut on_failure))?;
        store.local_ip = first.stream.local_addr().ok().map(|addr| addr.ip());
        store.keep(first);
        Ok(store)
    }

    /// Opens connections in advance, so that `threads` threads can use the store at
    /// once. Opening one later may take long while the server is busy with
    /// unauthenticated connections.
    ///
    /// # Errors
    /// As for a request.
    pub fn reserve_connections(&self, threads: usize) -> Result<()> {
        let idle = || {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.len()
        };
        while idle() < threads.min(MAX_IDLE) {
            let more = self.open(self.response_timeout(), None)?;
            self.keep(more);
        }
        Ok(())
    }

    /// Sets the timeout of responses, in addition to the timeout of a wait. The
    /// default is 10 s.
    pub fn set_response_timeout(&self, limit: Duration) {
        self.response_ms.store(millis(limit), Ordering::Relaxed);
    }

    fn response_timeout(&self) -> Duration {
        Duration::from_millis(self.response_ms.load(Ordering::Relaxed).into())
    }

    /// The address of this host from which it reached the store.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.local_ip
    }

    /// The address as given to [`connect`](Self::connect).
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// Opens a connection, trying up to `timeout`. Only the first one of a store has
    /// `on_failure`. For later ones a refused connection is final: the server has
    /// ended.
    fn open(
        &self,
        timeout: Duration,
        mut on_failure: Option<&mut dyn FnMut(&Error)>,
    ) -> Result<Connection> {
        let start = Instant::now();
        let deadline = start + timeout.min(MAX_TIMEOUT);
        let mut pause = FIRST_PAUSE;
        let mut attempts = 0_u32;
        let mut before: Option<Error> = None;
        let mut mismatch_since: Option<Instant> = None;
        loop {
            attempts += 1;
            let error = match self.attempt(deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) if is_final(error.kind()) => return Err(error.context(&self.location)),
                Err(error) if is_out_of_files(&error) => return Err(error.context(&self.location)),
                Err(error) if on_failure.is_none() && is_refused(&error) => {
                    return Err(self.describe(Fault::Closed(None), Duration::ZERO));
                }
                Err(error) => error,
            };
            if let Some(on_failure) = &mut on_failure {
                on_failure(&error);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if is_mismatch(error.kind()) {
                let since = *mismatch_since.get_or_insert_with(Instant::now);
                if left.is_zero() || since.elapsed() >= MISMATCH_TIMEOUT {
                    return Err(error.context(&self.location));
                }
            }
            // The last attempt is often cut short by the deadline; the error of the
            // previous one is more specific.
            let error = match before.take() {
                Some(before) if is_late(&error) => before,
                _ => error,
            };
            if left.is_zero() {
                // A server that has answered before may do so again.
                let kind = if on_failure.is_some() {
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
                        self.location,
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

    /// Tries each address of the name once.
    fn attempt(&self, deadline: Instant) -> Result<Connection> {
        let addrs: Vec<SocketAddr> = self
            .addr
            .to_socket_addrs()
            .map_err(|e| Error::io("resolving the host name", e))?
            .collect();
        let handshake_timeout = match addrs.len() {
            1 => MAX_TIMEOUT,
            _ => HANDSHAKE_TIMEOUT,
        };
        let mut last = None;
        for addr in addrs {
            match self.attempt_one(addr, deadline, handshake_timeout) {
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
        handshake_timeout: Duration,
    ) -> Result<Connection> {
        let left = |most: Duration| {
            deadline
                .saturating_duration_since(Instant::now())
                // Zero would be an error.
                .clamp(Duration::from_millis(1), most)
        };
        let mut stream = TcpStream::connect_timeout(&addr, left(ATTEMPT_TIMEOUT))
            .map_err(|e| Error::io("connecting", e))?;
        // On loopback, connecting to a port where nothing listens can connect to
        // itself: the system may choose that port for this side.
        if stream.local_addr().ok() == stream.peer_addr().ok() {
            return Err(Error::new(
                ErrorKind::Io,
                "connecting: nothing listens there",
            ));
        }
        tune(&stream).map_err(|e| Error::io("setting up a connection", e))?;
        let hello = Hello::new(Role::StoreClient, self.token.job_id());
        let server = auth::initiate(&mut stream, hello, &self.token, left(handshake_timeout))?;
        if server.role != Role::StoreServer {
            return Err(Error::new(
                ErrorKind::WrongProtocol,
                "a member of this job listens there, but it is not a store",
            ));
        }
        Ok(Connection {
            stream,
            buffer: Vec::new(),
            timeout: None,
        })
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    /// Sends a request, waits up to `wait` plus the response timeout, and passes the
    /// response to `read`.
    fn request<T>(
        &self,
        request: &Request<'_>,
        wait: Duration,
        read: impl FnOnce(Response<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.open(self.response_timeout(), None)?,
        };
        let body = connection
            .round_trip(request, wait.saturating_add(self.response_timeout()))
            .map_err(|fault| self.describe(fault, wait))?;
        let response = match Response::decode(body) {
            Ok(response) => response,
            Err(e) => return Err(self.broken(e)),
        };
        // The server closes the connection after this failure.
        let usable = response != Response::Failed(Failure::BadRequest);
        let result = match read(response) {
            Some(result) => result,
            None => {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    format!("{} sent a response of the wrong type", self.location),
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
            format!("{} sent a malformed response: {source}", self.location),
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
                        self.location
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
                    self.location,
                    wait.saturating_add(self.response_timeout())
                ),
            ),
            Fault::Io(e) => Error::io(format_args!("a request to {}", self.location), e),
        }
    }

    fn simple<T>(
        &self,
        key: &str,
        request: &Request<'_>,
        read: impl FnOnce(Response<'_>) -> Option<T>,
    ) -> Result<T> {
        request.check().map_err(|e| Error::bad_request(key, e))?;
        self.request(request, Duration::ZERO, |response| match response {
            Response::Failed(failure) => Some(Err(Error::failed(&self.location, key, failure))),
            other => read(other).map(Ok),
        })
    }

    /// The result of a wait for `keys` with these missing.
    fn wait_result(&self, keys: &[&str], timeout: Duration, missing: Vec<String>) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::missing(&self.location, keys.len(), timeout, missing))
    }

    /// Waits for up to [`MAX_WAIT_KEYS`] keys; returns the missing ones.
    fn wait_some(&self, keys: &[&str], timeout: Duration) -> Result<Vec<String>> {
        let request = Request::Wait {
            keys: keys.to_vec(),
            timeout_ms: millis(timeout),
        };
        self.request(&request, timeout, |response| match response {
            Response::Done => Some(Ok(Vec::new())),
            Response::Missing(missing) => {
                Some(Ok(missing.into_iter().map(str::to_owned).collect()))
            }
            Response::Failed(failure) => Some(Err(Error::failed(&self.location, keys[0], failure))),
            _ => None,
        })
    }
}

/// Errors that another attempt would repeat.
fn is_final(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::Rejected(reason) => !matches!(
            reason,
            RejectReason::Full | RejectReason::ShuttingDown | RejectReason::WrongVersion
        ),
        ErrorKind::Timeout | ErrorKind::PeerLost | ErrorKind::Io | ErrorKind::WrongProtocol => {
            false
        }
        other => !is_mismatch(other),
    }
}

/// Errors that another attempt would repeat if this job's server answered.
fn is_mismatch(kind: ErrorKind) -> bool {
    let version = ErrorKind::Rejected(RejectReason::WrongVersion);
    kind == ErrorKind::TokenMismatch || kind == version
}

/// Whether this process or the system has too many open files.
fn is_out_of_files(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<std::io::Error>());
    source.is_some_and(crate::auth::is_out_of_files)
}

/// Whether nothing listens at the address.
fn is_refused(error: &Error) -> bool {
    io_kind(error) == Some(IoKind::ConnectionRefused)
}

/// Whether an attempt timed out.
fn is_late(error: &Error) -> bool {
    error.kind() == ErrorKind::Timeout || io_kind(error) == Some(IoKind::TimedOut)
}

fn io_kind(error: &Error) -> Option<IoKind> {
    let source = std::error::Error::source(error)?;
    Some(source.downcast_ref::<std::io::Error>()?.kind())
}

/// Milliseconds, rounded up so that a wait never ends early; at most 49 days.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

/// An error of one round trip.
enum Fault {
    Encode(phalanx_wire::Error),
    Decode(phalanx_wire::Error),
    Closed(Option<std::io::Error>),
    Late,
    Io(std::io::Error),
}

impl Connection {
    /// Sends the request and returns the body of the response. After an error the
    /// connection cannot be used: a response may still arrive.
    fn round_trip(&mut self, request: &Request<'_>, limit: Duration) -> Result<&[u8], Fault> {
        let deadline = Instant::now() + limit.min(MAX_TIMEOUT);
        self.buffer.clear();
        request.encode(&mut self.buffer).map_err(Fault::Encode)?;
        self.set_timeout(limit.min(MAX_TIMEOUT))?;
        let mut sent = 0;
        while sent < self.buffer.len() {
            match self.stream.write(&self.buffer[sent..]) {
                Ok(0) => return Err(Fault::Closed(None)),
                Ok(n) => sent += n,
                Err(e) => self.check_error(e, deadline)?,
            }
        }
        let mut length = [0; LENGTH_BYTES];
        self.fill(&mut length, deadline)?;
        let bytes = response_bytes(length).map_err(Fault::Decode)?;
        // At most MAX_RESPONSE_BYTES, from a peer with the token.
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
                Err(e) => self.check_error(e, deadline)?,
            }
            if have < into.len() && Instant::now() >= deadline {
                return Err(Fault::Late);
            }
        }
        Ok(())
    }

    /// Sets the timeout of reads and writes, if it differs from the current one.
    fn set_timeout(&mut self, limit: Duration) -> Result<(), Fault> {
        let limit = Some(limit.max(Duration::from_millis(1)));
        if self.timeout != limit {
            auth::Channel::set_timeouts(&self.stream, limit).map_err(Fault::Io)?;
            self.timeout = limit;
        }
        Ok(())
    }

    /// Returns an error unless the call may be tried again.
    fn check_error(&mut self, error: std::io::Error, deadline: Instant) -> Result<(), Fault> {
        match error.kind() {
            IoKind::Interrupted | IoKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Fault::Late);
                }
                self.set_timeout(left)
            }
            IoKind::ConnectionReset | IoKind::ConnectionAborted | IoKind::BrokenPipe => {
                Err(Fault::Closed(Some(error)))
            }
            // The keep-alive probes were not answered.
            IoKind::TimedOut => Err(Fault::Closed(Some(error))),
            _ => Err(Fault::Io(error)),
        }
    }
}

impl Store for TcpStore {
    fn location(&self) -> &str {
        &self.location
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
        self.request(&request, timeout, |response| match response {
            Response::Value(value) => Some(Ok(value.to_vec())),
            Response::Missing(_) => Some(Err(Error::missing(
                &self.location,
                1,
                timeout,
                vec![key.to_owned()],
            ))),
            Response::Failed(failure) => Some(Err(Error::failed(&self.location, key, failure))),
            _ => None,
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.simple(key, &Request::TryGet { key }, |r| match r {
            Response::Value(value) => Some(Some(value.to_vec())),
            Response::NotFound => Some(None),
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
            return self.wait_result(keys, timeout, missing);
        }
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        loop {
            // More keys than one request allows: one part after the other...
            for some in keys.chunks(MAX_WAIT_KEYS) {
                if !self.wait_some(some, left())?.is_empty() {
                    break;
                }
            }
            // ...then all of them again, since a key may have been deleted while the
            // others were waited for, and the error names all missing keys.
            let is_last = left().is_zero();
            let mut missing = Vec::new();
            for some in keys.chunks(MAX_WAIT_KEYS) {
                missing.extend(self.wait_some(some, Duration::ZERO)?);
            }
            if missing.is_empty() || is_last {
                return self.wait_result(keys, timeout, missing);
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
            Response::NotFound => Some(Vec::new()),
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
        // Its own connection, which is not returned to the pool.
        let mut connection = self.open(self.response_timeout(), None)?;
        let body = connection
            .round_trip(&request, self.response_timeout())
            .map_err(|fault| self.describe(fault, Duration::ZERO))?;
        match Response::decode(body) {
            Ok(Response::Done) => Ok(Some(Will {
                connection,
                key: key.to_owned(),
                executed: false,
            })),
            Ok(Response::Failed(failure)) => Err(Error::failed(&self.location, key, failure)),
            Ok(_) => Err(Error::new(
                ErrorKind::Protocol,
                format!("{} sent a response of the wrong type", self.location),
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
/// The address `HOST:PORT` for [`TcpStore::connect`], with an IPv6 address in brackets.
pub fn host_port(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}
