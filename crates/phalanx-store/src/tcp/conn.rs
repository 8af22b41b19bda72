//! One connection of the server: bytes in, bytes out, and where it stands.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use phalanx_wire::handshake::TAG_BYTES;
use phalanx_wire::store_msg::{LENGTH_BYTES, MAX_REQUEST_BYTES, request_bytes};

use crate::auth::{Greeting, Standing};

/// Capacity that an idle inbox or outbox keeps.
const BUFFER_KEPT_BYTES: usize = 64 << 10;

/// Where a connection stands.
pub(super) enum State {
    /// Nothing proven yet. Boxed: it is short-lived and large.
    Greeting(Box<Greeting>),
    /// A member, whose requests are served.
    Member,
    /// A member that waits for keys.
    Waiting(Wait),
    /// To be closed as soon as what is queued has been sent.
    Closing,
}

/// A wait that a member has asked for.
pub(super) struct Wait {
    /// All keys asked for, in the member's order.
    pub(super) keys: Vec<String>,
    /// Mentions of this connection in the table of waiters.
    pub(super) outstanding: usize,
    /// Bytes of all keys.
    pub(super) key_bytes: u64,
    /// When to answer with the missing keys.
    pub(super) deadline: Instant,
    /// Whether to answer with the value of the only key.
    pub(super) wants_value: bool,
}

pub(super) struct Conn {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) state: State,
    /// When it was accepted.
    pub(super) since: Instant,
    /// What it has shown before it has proven the token.
    pub(super) standing: Standing,
    /// The tag of its hello, if that is valid.
    pub(super) tag: Option<[u8; TAG_BYTES]>,
    /// The other side has gone; what it said before still counts.
    pub(super) ended: bool,
    /// Since when a request is incomplete or an answer not taken.
    pub(super) stalled: Option<Instant>,
    /// What to store when it closes: key and value.
    pub(super) will: Option<(String, Vec<u8>)>,
    /// Received; the first `understood` bytes are done with.
    inbox: Vec<u8>,
    understood: usize,
    /// To send; `sent` bytes of it have been.
    pub(super) outbox: Vec<u8>,
    sent: usize,
}

/// What became of reading.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Pulled {
    /// Still connected.
    Open,
    /// The other side has closed or broken off.
    Gone,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr) -> Self {
        Self {
            stream,
            peer,
            state: State::Greeting(Box::default()),
            since: Instant::now(),
            standing: Standing::Silent,
            tag: None,
            ended: false,
            stalled: None,
            will: None,
            inbox: Vec::new(),
            understood: 0,
            outbox: Vec::new(),
            sent: 0,
        }
    }

    /// Whether this connection has yet to prove itself.
    pub(super) fn is_pending(&self) -> bool {
        matches!(self.state, State::Greeting(_))
    }

    /// Most bytes that may lie unread: one request of a member. What a stranger
    /// says is read by its handshake.
    fn room(&self) -> usize {
        (MAX_REQUEST_BYTES + LENGTH_BYTES).saturating_sub(self.unread().len())
    }

    /// Received and not yet understood.
    fn unread(&self) -> &[u8] {
        self.inbox.get(self.understood..).unwrap_or_default()
    }

    /// The next `bytes` bytes are understood. Moving the rest to the front
    /// for each of many small requests would cost the square of their number.
    fn understand(&mut self, bytes: usize) {
        self.understood += bytes;
        if self.understood >= self.inbox.len() {
            self.understood = 0;
            self.inbox.clear();
            // One large request must not hold a megabyte for ever.
            self.inbox.shrink_to(BUFFER_KEPT_BYTES);
        }
    }

    /// Memory that this connection takes.
    pub(super) fn buffered_bytes(&self) -> u64 {
        let keys = match &self.state {
            State::Waiting(wait) => wait.key_bytes,
            _ => 0,
        };
        let will = self.will.as_ref().map_or(0, |(k, v)| k.len() + v.len());
        (self.inbox.capacity() + self.outbox.capacity() + will) as u64 + keys
    }

    /// Notes whether the other side owes us something: the rest of a request,
    /// or room for an answer. `complete` says that more requests wait only
    /// for their turn.
    pub(super) fn note_stall(&mut self, complete: bool) {
        let owes = self.has_output() || (!complete && !self.unread().is_empty());
        let waits = matches!(self.state, State::Waiting(_));
        self.stalled = match (owes && !waits, self.stalled) {
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

    /// Reads what is there, as far as there is room for it. Memory grows with
    /// what has arrived, never with what was announced.
    pub(super) fn pull(&mut self, chunk: &mut [u8]) -> Pulled {
        loop {
            let room = self.room().min(chunk.len());
            if room == 0 {
                return Pulled::Open;
            }
            match self.stream.read(&mut chunk[..room]) {
                Ok(0) => return Pulled::Gone,
                Ok(n) => {
                    if self.understood > 0 {
                        // Once a read, not once a request.
                        self.inbox.drain(..self.understood);
                        self.understood = 0;
                    }
                    self.inbox.extend_from_slice(&chunk[..n]);
                    // A short read has emptied the socket; `poll` tells when
                    // there is more.
                    if n < room {
                        return Pulled::Open;
                    }
                }
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return Pulled::Open,
                Err(_) => return Pulled::Gone,
            }
        }
    }

    /// Sends what it can.
    pub(super) fn push(&mut self) -> Pulled {
        while self.has_output() {
            match self.stream.write(&self.outbox[self.sent..]) {
                Ok(0) => return Pulled::Gone,
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => return Pulled::Open,
                Err(_) => return Pulled::Gone,
            }
        }
        self.sent = 0;
        self.outbox.clear();
        // One large value must not hold a megabyte for ever.
        self.outbox.shrink_to(BUFFER_KEPT_BYTES);
        Pulled::Open
    }

    /// The body of the next request, if it is complete.
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
        self.understand(end);
        Ok(Some(body))
    }
}
