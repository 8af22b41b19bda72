//! One connection of the server: buffers and state.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use phalanx_wire::store_msg::{LENGTH_BYTES, MAX_REQUEST_BYTES, Response, request_bytes};

/// Capacity that an empty buffer keeps.
const BUFFER_KEPT_BYTES: usize = 64 << 10;

/// State of a connection.
pub(super) enum State {
    /// A member, whose requests are served.
    Member,
    /// A member with a wait in progress.
    Waiting(Wait),
    /// A follower with this identifier.
    Follower(u64),
    /// To be closed when the queued response has been sent.
    Closing,
}

/// What a wait is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All keys; the response has no value.
    Keys,
    /// The only key; the response has its value.
    Value,
    /// The only key, which ends with a number; the response has its value and those of the next numbers.
    Values,
    /// An element of a queue; the only key is the queue's name.
    Element,
}

/// A wait of a member.
pub(super) struct Wait {
    /// All keys, in the member's order.
    pub(super) keys: Vec<String>,
    /// Number of entries of this connection in the table of waiters.
    pub(super) outstanding: usize,
    /// Total length of the keys.
    pub(super) key_bytes: u64,
    /// Time at which to respond with the missing keys.
    pub(super) deadline: Instant,
    /// What it is for.
    pub(super) wanted: Wanted,
}

pub(super) struct Conn {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) state: State,
    /// When it became a member, or was to be closed.
    pub(super) since: Instant,
    /// The peer has closed; its earlier requests are still served.
    pub(super) ended: bool,
    /// Since when a request is incomplete or a response not received.
    pub(super) stalled: Option<Instant>,
    /// Its will: key and value to store when it closes.
    pub(super) will: Option<(String, Vec<u8>)>,
    /// Received bytes; the first `parsed` of them are done.
    inbox: Vec<u8>,
    parsed: usize,
    /// Bytes to send; the first `sent` of them have been.
    pub(super) outbox: Vec<u8>,
    sent: usize,
    /// The response is not sent before the followers have this change.
    pub(super) held_until: Option<u64>,
}

/// Result of reading or writing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum IoState {
    /// Still connected.
    Open,
    /// The peer has closed or reset the connection.
    Gone,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, state: State) -> Self {
        Self {
            stream,
            peer,
            state,
            since: Instant::now(),
            ended: false,
            stalled: None,
            will: None,
            inbox: Vec::new(),
            parsed: 0,
            outbox: Vec::new(),
            sent: 0,
            held_until: None,
        }
    }

    /// Number of further bytes to accept: up to one request in all.
    fn room(&self) -> usize {
        (MAX_REQUEST_BYTES + LENGTH_BYTES).saturating_sub(self.unread().len())
    }

    /// Received bytes that are not parsed yet.
    fn unread(&self) -> &[u8] {
        self.inbox.get(self.parsed..).unwrap_or_default()
    }

    /// Marks the next `bytes` bytes as parsed. They are not removed for each request,
    /// which would take quadratic time for many small requests.
    fn mark_parsed(&mut self, bytes: usize) {
        self.parsed += bytes;
        if self.parsed >= self.inbox.len() {
            self.parsed = 0;
            self.inbox.clear();
            // Release the memory of a large request.
            self.inbox.shrink_to(BUFFER_KEPT_BYTES);
        }
    }

    /// Memory that this connection uses, in bytes.
    pub(super) fn buffered_bytes(&self) -> u64 {
        let will = self.will.as_ref().map_or(0, |(k, v)| k.len() + v.len());
        (self.inbox.capacity() + self.outbox.capacity() + will) as u64 + self.waited_bytes()
    }

    /// Length of the keys that the member waits for.
    pub(super) fn waited_bytes(&self) -> u64 {
        match &self.state {
            State::Waiting(wait) => wait.key_bytes,
            _ => 0,
        }
    }

    /// Updates `stalled`: whether the peer has an incomplete request or has not
    /// received a response. `complete` means that further complete requests wait to
    /// be served.
    pub(super) fn note_stall(&mut self, complete: bool) {
        let is_stalled = self.has_output() || (!complete && !self.unread().is_empty());
        let waits = matches!(self.state, State::Waiting(_));
        self.stalled = match (is_stalled && !waits, self.stalled) {
            (false, _) => None,
            (true, since) => Some(since.unwrap_or_else(Instant::now)),
        };
    }

    pub(super) fn wants_input(&self) -> bool {
        !self.ended && !matches!(self.state, State::Closing) && self.room() > 0
    }

    pub(super) fn has_output(&self) -> bool {
        self.sent < self.outbox.len()
    }

    /// Whether it has output that may be sent.
    pub(super) fn wants_output(&self) -> bool {
        self.has_output() && self.held_until.is_none()
    }

    /// Queues a message to a follower, behind others.
    pub(super) fn queue(&mut self, message: &Response) {
        if self.sent > self.outbox.len() / 2 {
            self.outbox.drain(..self.sent);
            self.sent = 0;
        }
        let encoded = message.encode(&mut self.outbox);
        debug_assert!(encoded.is_ok(), "the table has the limits of the codec");
        self.stalled.get_or_insert_with(Instant::now);
    }

    /// Reads available bytes, up to the limit. Memory grows with the bytes received,
    /// not with announced lengths.
    pub(super) fn pull(&mut self, chunk: &mut [u8]) -> IoState {
        loop {
            let room = self.room().min(chunk.len());
            if room == 0 {
                return IoState::Open;
            }
            match self.stream.read(&mut chunk[..room]) {
                Ok(0) => return IoState::Gone,
                Ok(n) => {
                    if self.parsed > 0 {
                        // Once per read, not per request.
                        self.inbox.drain(..self.parsed);
                        self.parsed = 0;
                    }
                    self.inbox.extend_from_slice(&chunk[..n]);
                    // A short read has emptied the socket.
                    if n < room {
                        return IoState::Open;
                    }
                }
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return IoState::Open,
                Err(_) => return IoState::Gone,
            }
        }
    }

    /// Sends as much as the socket takes, unless the response is held.
    pub(super) fn push(&mut self) -> IoState {
        if self.held_until.is_some() {
            return IoState::Open;
        }
        while self.has_output() {
            match self.stream.write(&self.outbox[self.sent..]) {
                Ok(0) => return IoState::Gone,
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return IoState::Open,
                Err(_) => return IoState::Gone,
            }
        }
        self.sent = 0;
        self.outbox.clear();
        // Release the memory of a large value.
        self.outbox.shrink_to(BUFFER_KEPT_BYTES);
        IoState::Open
    }

    /// The body of the next request, if complete.
    pub(super) fn next_request(&mut self) -> Result<Option<Vec<u8>>, phalanx_wire::Error> {
        let unread = self.unread();
        let Some(length) = unread.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let end = LENGTH_BYTES + request_bytes(*length)?;
        let Some(body) = unread.get(LENGTH_BYTES..end) else {
            return Ok(None);
        };
        let body = body.to_vec();
        self.mark_parsed(end);
        Ok(Some(body))
    }
}
