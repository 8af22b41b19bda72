//! A copy of a store that follows its server.

use std::collections::BTreeMap;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use phalanx_wire::store_msg::{Failure, LENGTH_BYTES, Request, Response, response_bytes};

use super::client::{MAX_TIMEOUT, TcpStore};
use crate::{Error, ErrorKind, Result};

/// Most bytes of one read.
const READ_BYTES: usize = 128 << 10;

/// A copy of the keys and values of a [`TcpServer`](crate::TcpServer).
///
/// The server answers its members only what all its followers have. So after its end,
/// another server with the copy of any follower that it had not dropped can continue
/// ([`TcpServer::admit_followers`](crate::TcpServer::admit_followers)).
///
/// A follower that is not asked to [`follow`](Self::follow) holds up all members.
#[derive(Debug)]
pub struct Follower {
    /// Name of the server in messages.
    location: String,
    instance: u16,
    stream: TcpStream,
    copy: BTreeMap<String, Vec<u8>>,
    /// Received bytes that are no complete message yet.
    inbox: Vec<u8>,
    /// Number of the last change in the copy.
    seq: u64,
    /// The first copy has arrived in full.
    complete: bool,
}

impl Follower {
    /// Connects to the server at `addr` ("host:port") and receives the whole copy. A
    /// new connection with the same `id` replaces the previous one.
    ///
    /// # Errors
    /// As [`TcpStore::connect`], but a refused connection and a closed server are errors
    /// at once: [`Error::is_refused`],
    /// [`RejectReason::NotOpen`](phalanx_wire::handshake::RejectReason::NotOpen). [`ErrorKind::Dropped`] when the server continues without
    /// this follower.
    pub fn connect(addr: &str, token: Token, id: u64, timeout: Duration) -> Result<Follower> {
        let deadline = Instant::now() + timeout.min(MAX_TIMEOUT);
        let (location, instance, mut stream) = TcpStore::dial_to_follow(addr, token, timeout)?;
        let mut request = Vec::new();
        Request::Follow { id }.encode(&mut request)?;
        stream
            .write_all(&request)
            .map_err(|e| lost(&location).caused_by(e))?;
        let mut follower = Follower {
            location,
            instance,
            stream,
            copy: BTreeMap::new(),
            inbox: Vec::new(),
            seq: 0,
            complete: false,
        };
        while !follower.complete {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no copy of {} within {timeout:.1?}", follower.location),
                ));
            }
            follower.follow(left)?;
        }
        Ok(follower)
    }

    /// Applies and acknowledges what arrives within `limit`. Returns whether something
    /// arrived.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] when the connection has ended; what arrived before is in
    /// the copy. [`ErrorKind::Dropped`], [`ErrorKind::Protocol`], [`ErrorKind::Io`].
    pub fn follow(&mut self, limit: Duration) -> Result<bool> {
        // Zero would be an error.
        let limit = limit.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        self.stream
            .set_read_timeout(Some(limit))
            .map_err(|e| Error::io("setting the timeout of a connection", e))?;
        let have = self.inbox.len();
        self.inbox.resize(have + READ_BYTES, 0);
        let received = self.stream.read(&mut self.inbox[have..]);
        self.inbox
            .truncate(have + received.as_ref().map_or(0, |bytes| *bytes));
        match received {
            Ok(0) => return Err(lost(&self.location)),
            Ok(_) => {}
            Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {
                return Ok(false);
            }
            Err(e) => return Err(lost(&self.location).caused_by(e)),
        }
        if self.apply()? && self.complete {
            let mut ack = Vec::new();
            Request::Ack { seq: self.seq }.encode(&mut ack)?;
            self.stream
                .write_all(&ack)
                .map_err(|e| lost(&self.location).caused_by(e))?;
        }
        Ok(true)
    }

    /// Ends the connection, and informs the server that this follower continues without it: the end of the connection does
    /// not mean that the process has ended.
    pub fn leave(mut self) {
        self.say(&Request::Leave);
    }

    fn say(&mut self, what: &Request<'_>) {
        let mut request = Vec::new();
        if what.encode(&mut request).is_ok() {
            // The server may be out of reach.
            let _ = self.stream.write_all(&request);
        }
    }

    /// Ends the connection, and informs the server that this follower ends and will not continue: it is
    /// [dropped](crate::TcpServer::drop_follower), and `key` is set.
    pub fn retire(mut self, key: &str) {
        self.say(&Request::Retire { key });
    }

    /// Applies the complete messages. Returns whether there were any.
    fn apply(&mut self) -> Result<bool> {
        let mut unread = &self.inbox[..];
        while let Some((length, rest)) = unread.split_first_chunk::<LENGTH_BYTES>() {
            let bytes = response_bytes(*length).map_err(|e| malformed(&self.location, e))?;
            let Some((body, rest)) = rest.split_at_checked(bytes) else {
                break;
            };
            unread = rest;
            match Response::decode(body).map_err(|e| malformed(&self.location, e))? {
                Response::Change { seq, key, value } => {
                    self.seq = seq;
                    match value {
                        Some(value) => self.copy.insert(key, value),
                        None => self.copy.remove(&key),
                    };
                }
                Response::Copied { seq } => (self.seq, self.complete) = (seq, true),
                Response::Failed(Failure::Dropped) => {
                    return Err(Error::new(
                        ErrorKind::Dropped,
                        format!("{} continues without this follower", self.location),
                    ));
                }
                _ => {
                    return Err(Error::new(
                        ErrorKind::Protocol,
                        format!("{} sent a response of the wrong type", self.location),
                    ));
                }
            }
        }
        let done = self.inbox.len() - unread.len();
        self.inbox.drain(..done);
        Ok(done > 0)
    }

    /// The number that the server has chosen, as in [`ServerState::Open`](crate::ServerState::Open).
    pub fn instance(&self) -> u16 {
        self.instance
    }

    /// All keys and values of the copy.
    pub fn entries(&self) -> Vec<(String, Vec<u8>)> {
        let entries = self.copy.iter();
        entries.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// The value of a key in the copy.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.copy.get(key).map(Vec::as_slice)
    }
}

fn lost(location: &str) -> Error {
    Error::new(
        ErrorKind::PeerLost,
        format!("{location} closed the connection of this follower"),
    )
}

fn malformed(location: &str, source: phalanx_wire::Error) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("{location} sent a malformed change: {source}"),
    )
    .caused_by(source)
}
