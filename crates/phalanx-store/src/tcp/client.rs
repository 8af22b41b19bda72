//! A client of the store server.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use phalanx_wire::store_msg::{Failure, LENGTH_BYTES, Request, Response, response_bytes};

use super::FOLLOWER_STREAM;
use super::socket::tune;
use crate::store::millis;
use crate::{Error, ErrorKind, Result, Store, Will, auth};

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
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(50 * 24 * 3600);

/// Maximum number of idle connections. More are opened when more threads use the
/// store at once, and closed again.
const MAX_IDLE: usize = 8;

/// How often the file with the server's address is read while the server is sought.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How often a request in progress looks whether the file names another address.
const WAIT_SLICE: Duration = Duration::from_millis(200);

/// A client of a [`TcpServer`](crate::TcpServer).
///
/// Each call uses a separate connection from a pool, so a thread that waits does not
/// block others. *Cost:* one round trip per call.
///
/// Broken connections are not reopened: the store is in the server's memory, so a
/// new server would be empty. [`move_with`](Self::move_with) says where a server with
/// a copy is.
#[derive(Debug)]
pub struct TcpStore {
    /// Where the server is.
    place: Mutex<Place>,
    /// The stream of its hellos.
    stream: u16,
    token: Token,
    /// Our address of the first connection.
    local_ip: Option<IpAddr>,
    /// Timeout of a response, in milliseconds.
    response_ms: AtomicU32,
}

/// Where a server is, and the connections to it.
#[derive(Debug)]
struct Place {
    addr: String,
    /// The number that its server has chosen, once it is known.
    instance: Option<u16>,
    /// How often the address has changed.
    moves: u64,
    idle: Vec<Connection>,
    /// The file that names the address, and how long a request seeks it.
    file: Option<(PathBuf, Duration)>,
    /// When the file was read.
    looked: Option<Instant>,
}

/// What is known of a server by an attempt to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    /// It serves members. With the number that it has chosen: another one at the same
    /// address is another server.
    Open(u16),
    /// It is [closed](crate::TcpServer::bind_closed), or serves followers only.
    Closed,
    /// No process listens at its address, as the host there says.
    Ended,
    /// There was no answer in time, or one that says nothing.
    Unknown,
}

/// Of a closed server.
const NOT_OPEN: ErrorKind = ErrorKind::Rejected(RejectReason::NotOpen);

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Name of the store in messages.
    store: String,
    /// [`Place::moves`] when it was opened.
    moves: u64,
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
        on_failure: impl FnMut(&Error),
    ) -> Result<TcpStore> {
        Self::unconnected(addr, token)?.connected(timeout, on_failure)
    }

    /// As [`connect_with`](Self::connect_with), and then [`move_with`](Self::move_with): the address in `file` is tried as
    /// soon as there is one.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_moving(
        addr: &str,
        token: Token,
        timeout: Duration,
        (file, limit): (PathBuf, Duration),
        on_failure: impl FnMut(&Error),
    ) -> Result<TcpStore> {
        let store = Self::unconnected(addr, token)?;
        store.move_with(file, limit);
        store.connected(timeout, on_failure)
    }

    /// With its first connection.
    fn connected(
        mut self,
        timeout: Duration,
        mut on_failure: impl FnMut(&Error),
    ) -> Result<TcpStore> {
        self.refresh();
        let first = self.open(timeout, true, &mut |error| {
            on_failure(error);
            self.refresh();
            true
        })?;
        self.local_ip = first.stream.local_addr().ok().map(|addr| addr.ip());
        self.keep(first);
        Ok(self)
    }

    /// A connection for a follower, and the name of the store. A refused connection and a
    /// closed server are final.
    pub(super) fn dial_to_follow(
        addr: &str,
        token: Token,
        timeout: Duration,
    ) -> Result<(String, u16, TcpStream)> {
        let mut store = Self::unconnected(addr, token)?;
        store.stream = FOLLOWER_STREAM;
        let goes_on = &mut |error: &Error| !error.is_refused() && error.kind() != NOT_OPEN;
        let connection = store.open(timeout, true, goes_on)?;
        let instance = store.place().instance.unwrap_or_default();
        Ok((store.location(), instance, connection.stream))
    }

    /// Whether members can connect to `addr`, as one attempt of up to `timeout` shows.
    pub fn state_of(addr: &str, token: Token, timeout: Duration) -> ServerState {
        let Ok(store) = Self::unconnected(addr, token) else {
            return ServerState::Unknown;
        };
        match store.open(timeout, true, &mut |_| false) {
            Ok(_) => ServerState::Open(store.place().instance.unwrap_or_default()),
            Err(error) if error.kind() == NOT_OPEN => ServerState::Closed,
            Err(error) if error.is_refused() => ServerState::Ended,
            Err(_) => ServerState::Unknown,
        }
    }

    fn unconnected(addr: &str, token: Token) -> Result<TcpStore> {
        if !is_address(addr) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{addr:?} is not a store address; give host:port, for example 127.0.0.1:29500"
                ),
            ));
        }
        Ok(TcpStore {
            place: Mutex::new(Place {
                addr: addr.to_owned(),
                instance: None,
                moves: 0,
                idle: Vec::new(),
                file: None,
                looked: None,
            }),
            stream: 0,
            local_ip: None,
            token,
            response_ms: AtomicU32::new(millis(RESPONSE_TIMEOUT)),
        })
    }

    /// From now on the server may change. When it does not answer or has ended, or when
    /// `file` names another address ("host:port" on one line), requests go to the
    /// address in the file, for up to `limit` after the first failure; then the first
    /// error is returned. The file may be missing or empty; it must be replaced as a
    /// whole, by renaming another one. A wait in progress notices a changed file within
    /// 500 ms, and continues at the new address with the time that is left.
    ///
    /// A request that is repeated may have been executed before: an addition, an append or
    /// a push may count twice, a pop may lose an element, a deletion may say that the key
    /// did not exist, and a compare-and-set may find its own value. A [`Will`] is not moved.
    pub fn move_with(&self, file: PathBuf, limit: Duration) {
        self.place().file = Some((file, limit));
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the file, if it was not read just before, and takes the address in it.
    /// Returns how often the address has changed.
    fn refresh(&self) -> u64 {
        let mut place = self.place();
        if let Some((file, _)) = &place.file
            && place
                .looked
                .is_none_or(|then| then.elapsed() >= LOOK_INTERVAL)
        {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            place.looked = Some(Instant::now());
            let addr = text.trim();
            if addr != place.addr && is_address(addr) {
                tracing::info!("the store moves from {} to {addr}", place.addr);
                place.addr = addr.to_owned();
                place.instance = None;
                place.moves += 1;
                place.idle.clear();
            }
        }
        place.moves
    }

    /// Opens connections in advance, so that `threads` threads can use the store at
    /// once. Opening one later may take long while the server is busy with
    /// unauthenticated connections.
    ///
    /// # Errors
    /// As for a request.
    pub fn reserve_connections(&self, threads: usize) -> Result<()> {
        while self.place().idle.len() < threads.min(MAX_IDLE) {
            let more = self.open(self.response_timeout(), false, &mut |_| true)?;
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

    /// The address in use: as given to [`connect`](Self::connect), or the one it has
    /// moved to.
    pub fn addr(&self) -> String {
        self.place().addr.clone()
    }

    /// Opens a connection, trying up to `timeout` while `go_on` returns true. After the
    /// first one of a store, a refused connection is final: the server has ended.
    fn open(
        &self,
        timeout: Duration,
        is_first: bool,
        go_on: &mut dyn FnMut(&Error) -> bool,
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
                Err(error) if is_final(error.kind()) => return Err(error.context(self.location())),
                Err(error) if is_out_of_files(&error) => return Err(error.context(self.location())),
                Err(error) if !is_first && error.is_refused() => {
                    return Err(closed(&self.location()).caused_by(error));
                }
                Err(error) => error,
            };
            if !go_on(&error) {
                return Err(error.context(self.location()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if is_mismatch(error.kind()) {
                let since = *mismatch_since.get_or_insert_with(Instant::now);
                if left.is_zero() || since.elapsed() >= MISMATCH_TIMEOUT {
                    return Err(error.context(self.location()));
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
                let kind = if is_first {
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
                        self.location(),
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
        let (addr_text, moves) = {
            let place = self.place();
            (place.addr.clone(), place.moves)
        };
        let addrs: Vec<SocketAddr> = addr_text
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
                Ok((stream, instance)) => {
                    let mut place = self.place();
                    if place.moves == moves && *place.instance.get_or_insert(instance) != instance {
                        // Its keys are not those that this client has seen.
                        let why = "connecting: another server listens there now";
                        return Err(Error::io(why, IoKind::ConnectionRefused.into()));
                    }
                    drop(place);
                    return Ok(Connection {
                        stream,
                        store: name(&addr_text),
                        moves,
                        buffer: Vec::new(),
                        timeout: None,
                    });
                }
                Err(error) if is_final(error.kind()) => return Err(error),
                // No server listens only if all addresses refuse.
                Err(error) if last.is_some() && error.is_refused() => {}
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
    ) -> Result<(TcpStream, u16)> {
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
            return Err(Error::io("connecting", IoKind::ConnectionRefused.into()));
        }
        tune(&stream).map_err(|e| Error::io("setting up a connection", e))?;
        let hello = Hello::new(Role::StoreClient, self.token.job_id()).stream(self.stream);
        let server = auth::initiate(&mut stream, hello, &self.token, left(handshake_timeout))?;
        if server.role != Role::StoreServer {
            return Err(Error::new(
                ErrorKind::WrongProtocol,
                "a member of this job listens there, but it is not a store",
            ));
        }
        Ok((stream, server.stream))
    }

    fn keep(&self, connection: Connection) {
        let mut place = self.place();
        if place.moves == connection.moves && place.idle.len() < MAX_IDLE {
            place.idle.push(connection);
        }
    }

    /// Sends a request and receives the response on a connection, at another address if
    /// the server moves. With a will, the connection must be a `fresh` one.
    fn exchange(&self, request: &Request<'_>, fresh: bool) -> Result<Connection> {
        let wait = request.timeout();
        let Some((_, limit)) = self.place().file.clone() else {
            return self.exchange_here(request, self.response_timeout(), fresh);
        };
        let start = Instant::now();
        // The first failure.
        let mut failed: Option<(Instant, Error)> = None;
        let mut request = request.clone();
        loop {
            let moves = self.refresh();
            let left = wait.saturating_sub(start.elapsed());
            if let Request::Get { timeout_ms, .. }
            | Request::GetNumbered { timeout_ms, .. }
            | Request::Wait { timeout_ms, .. }
            | Request::QueuePop { timeout_ms, .. } = &mut request
            {
                *timeout_ms = millis(left);
            }
            let mut patience = self.response_timeout();
            if let Some((since, _)) = &failed {
                patience = patience.min(limit.saturating_sub(since.elapsed()));
            }
            let error = match self.exchange_here(&request, patience, fresh) {
                Ok(connection) => return Ok(connection),
                Err(error) if !may_move(&error) => return Err(error),
                Err(error) => error,
            };
            if self.refresh() != moves {
                continue;
            }
            let (since, error) = failed.take().unwrap_or_else(|| (Instant::now(), error));
            if since.elapsed() >= limit {
                return Err(error);
            }
            failed = Some((since, error));
            // The other connections have probably ended too.
            self.place().idle.clear();
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Sends a request and receives the response, within its time plus `patience`.
    fn exchange_here(
        &self,
        request: &Request<'_>,
        patience: Duration,
        fresh: bool,
    ) -> Result<Connection> {
        let wait = request.timeout();
        let (idle, moves, slice) = {
            let mut place = self.place();
            let idle = if fresh { None } else { place.idle.pop() };
            let slice = place.file.as_ref().map_or(MAX_TIMEOUT, |_| WAIT_SLICE);
            (idle, place.moves, slice)
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => {
                // One attempt does not notice that the server has moved.
                let most = match slice {
                    WAIT_SLICE => ATTEMPT_TIMEOUT,
                    _ => MAX_TIMEOUT,
                };
                self.open(patience.min(most), false, &mut |_| self.refresh() == moves)?
            }
        };
        let moves = connection.moves;
        connection.round_trip(request, wait.saturating_add(patience), slice, &mut || {
            self.refresh() != moves
        })?;
        Ok(connection)
    }
}

/// Errors that another attempt would repeat.
fn is_final(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::Rejected(reason) => !matches!(
            reason,
            RejectReason::Full
                | RejectReason::ShuttingDown
                | RejectReason::NotOpen
                | RejectReason::WrongVersion
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
    io_source(error).is_some_and(crate::pending::is_out_of_files)
}

/// Errors after which the server may be found elsewhere.
fn may_move(error: &Error) -> bool {
    let is_of_peer = matches!(
        error.kind(),
        ErrorKind::PeerLost | ErrorKind::NoAnswer | ErrorKind::Io
    );
    let is_of_another = matches!(
        error.kind(),
        ErrorKind::Timeout | ErrorKind::Rejected(_) | ErrorKind::WrongProtocol
    );
    (is_of_peer || is_of_another || is_mismatch(error.kind())) && !is_out_of_files(error)
}

/// Whether this is "host:port".
fn is_address(addr: &str) -> bool {
    addr.rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0))
}

fn name(addr: &str) -> String {
    format!("the store at {addr}")
}

/// Whether an attempt timed out.
fn is_late(error: &Error) -> bool {
    error.kind() == ErrorKind::Timeout
        || io_source(error).is_some_and(|e| e.kind() == IoKind::TimedOut)
}

fn io_source(error: &Error) -> Option<&std::io::Error> {
    std::error::Error::source(error)?.downcast_ref()
}

/// The server of this store has ended.
fn closed(store: &str) -> Error {
    Error::new(
        ErrorKind::PeerLost,
        format!(
            "{store} closed the connection: the process that hosts it (rank 0 or the launcher) has ended"
        ),
    )
}

impl Connection {
    fn response(&self) -> Result<Response> {
        Response::decode(&self.buffer).map_err(|e| self.malformed(e))
    }

    fn malformed(&self, source: phalanx_wire::Error) -> Error {
        let what = format!("{} sent a malformed response: {source}", self.store);
        Error::new(ErrorKind::Protocol, what).caused_by(source)
    }

    fn late(&self, limit: Duration) -> Error {
        let what = format!(
            "{} did not answer within {limit:.1?}: its process is stopped, or its host out of reach",
            self.store
        );
        Error::new(ErrorKind::NoAnswer, what)
    }

    /// Sends the request and receives the body of the response into the buffer. Asks
    /// every `slice` whether the server has moved. After an error the connection cannot
    /// be used: a response may still arrive.
    fn round_trip(
        &mut self,
        request: &Request<'_>,
        limit: Duration,
        slice: Duration,
        has_moved: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + limit.min(MAX_TIMEOUT);
        self.buffer.clear();
        request
            .encode(&mut self.buffer)
            .map_err(|e| Error::new(ErrorKind::Usage, e.to_string()).caused_by(e))?;
        self.set_timeout(limit.min(slice))?;
        // Returns an error unless the call may be tried again.
        let mut again = |connection: &mut Connection, error| {
            connection.check_error(error, (deadline, limit), slice)?;
            match has_moved() {
                true => Err(Error::new(ErrorKind::PeerLost, "the store has moved")),
                false => Ok(()),
            }
        };
        let mut sent = 0;
        while sent < self.buffer.len() {
            match self.stream.write(&self.buffer[sent..]) {
                Ok(0) => return Err(closed(&self.store)),
                Ok(n) => sent += n,
                Err(e) => again(self, e)?,
            }
        }
        let mut length = [0; LENGTH_BYTES];
        self.fill(&mut length, (deadline, limit), &mut again)?;
        let bytes = response_bytes(length).map_err(|e| self.malformed(e))?;
        // At most MAX_RESPONSE_BYTES, from a peer with the token.
        let mut body = std::mem::take(&mut self.buffer);
        body.clear();
        body.resize(bytes, 0);
        self.fill(&mut body, (deadline, limit), &mut again)?;
        self.buffer = body;
        Ok(())
    }

    fn fill(
        &mut self,
        into: &mut [u8],
        (deadline, limit): (Instant, Duration),
        again: &mut dyn FnMut(&mut Self, std::io::Error) -> Result<()>,
    ) -> Result<()> {
        let mut have = 0;
        while have < into.len() {
            match self.stream.read(&mut into[have..]) {
                Ok(0) => return Err(closed(&self.store)),
                Ok(n) => have += n,
                Err(e) => again(self, e)?,
            }
            if have < into.len() && Instant::now() >= deadline {
                return Err(self.late(limit));
            }
        }
        Ok(())
    }

    /// Sets the timeout of reads and writes, if it differs from the current one.
    fn set_timeout(&mut self, limit: Duration) -> Result<()> {
        let limit = Some(limit.max(Duration::from_millis(1)));
        if self.timeout != limit {
            auth::Channel::set_timeouts(&self.stream, limit).map_err(|e| self.failed(e))?;
            self.timeout = limit;
        }
        Ok(())
    }

    /// Returns an error unless the call may be tried again.
    fn check_error(
        &mut self,
        error: std::io::Error,
        (deadline, limit): (Instant, Duration),
        slice: Duration,
    ) -> Result<()> {
        match error.kind() {
            IoKind::Interrupted | IoKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(self.late(limit));
                }
                self.set_timeout(left.min(slice))
            }
            // The last one: the keep-alive probes were not answered.
            IoKind::ConnectionReset
            | IoKind::ConnectionAborted
            | IoKind::BrokenPipe
            | IoKind::TimedOut => Err(closed(&self.store).caused_by(error)),
            _ => Err(self.failed(error)),
        }
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::io(format_args!("a request to {}", self.store), error)
    }
}

impl Store for TcpStore {
    fn location(&self) -> String {
        name(&self.place().addr)
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        let connection = self.exchange(request, false)?;
        let response = connection.response()?;
        // The server closes the connection after this failure.
        if response != Response::Failed(Failure::BadRequest) {
            self.keep(connection);
        }
        Ok(response)
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        let request = Request::Will {
            key,
            value: Some(value),
        };
        Error::check(key, &request)?;
        // Its own connection, which is not returned to the pool.
        let connection = self.exchange(&request, true)?;
        match connection.response()? {
            Response::Failed(failure) => Err(Error::failed(&self.location(), key, failure)),
            _ => Ok(Some(Will {
                stream: connection.stream,
                buffer: connection.buffer,
                key: key.to_owned(),
                executed: false,
            })),
        }
    }
}

/// The address `HOST:PORT` for [`TcpStore::connect`], with an IPv6 address in brackets.
pub fn host_port(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}
