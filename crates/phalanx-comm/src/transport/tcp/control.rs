//! The control connection of a pair: why the peer's streams end.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_wire::frame::{Header, Kind};

use super::super::poison::{MAX_CAUSE_BYTES, Poison};
use super::super::segment::Segment;
use crate::Error;
use crate::sync::lock;

/// How long after the end of a data stream its reason may still be in transit on the
/// control stream.
const REASON_PATIENCE: Duration = Duration::from_millis(250);

/// How a peer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It aborted the group, or forwarded another rank's abort.
    Aborted(Poison),
    /// It left in good order.
    Left,
    /// Its connection broke.
    Lost(String),
}

impl Fate {
    /// The error for the rank that needed `peer`.
    pub(crate) fn into_error(self, peer: usize) -> Error {
        match self {
            Fate::Aborted(poison) => poison.to_error(),
            Fate::Left => Error::peer_lost(
                peer,
                format!("rank {peer} left the group while data was expected from it"),
            ),
            Fate::Lost(how) => Error::peer_lost(peer, format!("rank {peer} is gone: {how}")),
        }
    }
}

/// The bytes received so far.
struct Inbox {
    bytes: [u8; Header::BYTES + MAX_CAUSE_BYTES],
    filled: usize,
    fate: Option<Fate>,
}

/// The control connection to one peer.
pub(crate) struct Control {
    peer: usize,
    generation: u32,
    group: u32,
    stream: TcpStream,
    segment: Arc<Segment>,
    said: AtomicBool,
    open: AtomicBool,
    inbox: Mutex<Inbox>,
}

impl Control {
    /// `stream` is connected, authenticated and non-blocking.
    pub(crate) fn new(
        peer: usize,
        (generation, group): (u32, u32),
        stream: TcpStream,
        segment: Arc<Segment>,
    ) -> Control {
        Control {
            peer,
            generation,
            group,
            stream,
            segment,
            said: AtomicBool::new(false),
            open: AtomicBool::new(true),
            inbox: Mutex::new(Inbox {
                bytes: [0; Header::BYTES + MAX_CAUSE_BYTES],
                filled: 0,
                fate: None,
            }),
        }
    }

    pub(crate) fn peer(&self) -> usize {
        self.peer
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether a frame may still come.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Sends the cause of the group's end to the peer, best effort, and ends our side.
    pub(crate) fn send_abort(&self, poison: &Poison) {
        self.say(Kind::Abort, poison);
    }

    /// Notifies the peer that we leave in good order.
    pub(crate) fn send_goodbye(&self) {
        self.say(Kind::Goodbye, &Poison::new(0, ""));
    }

    fn say(&self, kind: Kind, poison: &Poison) {
        if self.said.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut header = Header::new(kind);
        header.generation = self.generation;
        header.group = self.group;
        header.stream = super::CONTROL;
        header.root = u32::try_from(poison.origin_rank).unwrap_or(u32::MAX);
        let poison = Poison::new(poison.origin_rank, poison.cause.as_str());
        header.length = poison.cause.len() as u32;
        let mut message = header.encode().to_vec();
        message.extend_from_slice(poison.cause.as_bytes());
        // The only bytes we ever write here: they fit the empty send buffer,
        // so a non-blocking write takes all or the connection is broken.
        if let Err(e) = (&self.stream).write_all(&message) {
            tracing::debug!(peer = self.peer, "could not say why we end: {e}");
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Reads the bytes that have come; returns the peer's fate once it is known. An
    /// abort also poisons this host.
    pub(crate) fn pump(&self) -> Option<Fate> {
        let mut inbox = lock(&self.inbox);
        if inbox.fate.is_none() {
            inbox.fate = self.read(&mut inbox);
            if let Some(fate) = &inbox.fate {
                self.open.store(false, Ordering::Release);
                if let Fate::Aborted(poison) = fate {
                    self.segment.poison(poison);
                }
            }
        }
        inbox.fate.clone()
    }

    fn read(&self, inbox: &mut Inbox) -> Option<Fate> {
        loop {
            if let Some(fate) = self.parse(inbox) {
                return Some(fate);
            }
            let Inbox { bytes, filled, .. } = inbox;
            match (&self.stream).read(&mut bytes[*filled..]) {
                Ok(0) => return Some(Fate::Lost("its connection was closed".to_owned())),
                Ok(n) => *filled += n,
                Err(e) if e.kind() == IoKind::WouldBlock => return None,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Some(Fate::Lost(e.to_string())),
            }
        }
    }

    /// The fate, if a whole frame has come. An invalid frame counts as a lost peer:
    /// communication with it is impossible.
    fn parse(&self, inbox: &Inbox) -> Option<Fate> {
        let bytes = &inbox.bytes[..inbox.filled];
        let header = match Header::decode(bytes.first_chunk()?) {
            Ok(header) => header,
            Err(e) => {
                return Some(Fate::Lost(format!(
                    "it sent a malformed control frame ({e})"
                )));
            }
        };
        if (header.generation, header.group) != (self.generation, self.group) {
            return Some(Fate::Lost(
                "it sent a control frame of another group".to_owned(),
            ));
        }
        let length = header.length as usize;
        if length > MAX_CAUSE_BYTES {
            return Some(Fate::Lost("it sent an oversized control frame".to_owned()));
        }
        let cause = bytes.get(Header::BYTES..Header::BYTES + length)?;
        Some(match header.kind {
            Kind::Abort => {
                let cause = String::from_utf8_lossy(cause);
                Fate::Aborted(Poison::new(header.root as usize, cause))
            }
            Kind::Goodbye => Fate::Left,
            other => Fate::Lost(format!(
                "it sent a frame of kind {other:?} on its control stream"
            )),
        })
    }

    /// The reason why the data stream ended with `how`; waits briefly for it, because
    /// the two streams are not ordered with each other.
    pub(crate) fn reason(&self, how: &str) -> Fate {
        let start = Instant::now();
        loop {
            match self.pump() {
                Some(fate @ (Fate::Aborted(_) | Fate::Left)) => return fate,
                None if start.elapsed() < REASON_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // Another rank may already have sent us the first cause.
                Some(Fate::Lost(_)) | None => {
                    let first = self.segment.poisoned().map(Fate::Aborted);
                    return first.unwrap_or_else(|| Fate::Lost(how.to_owned()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::Layout;
    use super::*;
    use std::net::TcpListener;

    /// The fate of a peer that writes `bytes` on its control stream.
    fn fate_of(bytes: &[u8]) -> (Fate, Option<Poison>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        let segment = Arc::new(Segment::private(Layout::new(1, 64).unwrap()).unwrap());
        let control = Control::new(1, (3, 4), stream, Arc::clone(&segment));
        assert_eq!(control.pump(), None);
        peer.write_all(bytes).unwrap();
        let start = Instant::now();
        loop {
            if let Some(fate) = control.pump() {
                assert!(!control.is_open());
                return (fate, segment.poisoned());
            }
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
    }

    fn frame(kind: Kind, change: impl FnOnce(&mut Header)) -> Vec<u8> {
        let mut header = Header::new(kind);
        (header.generation, header.group) = (3, 4);
        change(&mut header);
        header.encode().to_vec()
    }

    #[test]
    fn an_abort_poisons_this_host_with_its_cause() {
        let mut bytes = frame(Kind::Abort, |h| (h.root, h.length) = (2, 9));
        bytes.extend_from_slice(b"disk full");
        let poison = Poison::new(2, "disk full");
        assert_eq!(
            fate_of(&bytes),
            (Fate::Aborted(poison.clone()), Some(poison))
        );
    }

    #[test]
    fn a_goodbye_is_no_poison() {
        assert_eq!(fate_of(&frame(Kind::Goodbye, |_| ())), (Fate::Left, None));
    }

    /// The first frame decides: a peer that keeps sending does not keep us reading.
    #[test]
    fn anything_else_is_a_loss() {
        let cases = [
            (frame(Kind::Data, |_| ()), "Data"),
            (frame(Kind::Abort, |h| h.generation = 2), "another group"),
            (
                frame(Kind::Abort, |h| h.length = MAX_CAUSE_BYTES as u32 + 1),
                "oversized",
            ),
            (vec![0x47; Header::BYTES], "malformed"),
        ];
        for (bytes, expected) in cases {
            let (fate, poison) = fate_of(&bytes);
            assert!(
                matches!(&fate, Fate::Lost(how) if how.contains(expected)),
                "{expected}: {fate:?}"
            );
            assert_eq!(poison, None);
        }
    }
}
