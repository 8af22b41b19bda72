//! One transfer in progress: a run of bytes cut into frames.
//!
//! A frame is a 64-byte header and at most `segment_bytes` of payload. On the
//! sending side the header and the first [`INLINE_BYTES`] of the payload are
//! staged together, so that a small message leaves in one call (one system
//! call and one packet over tcp); the rest goes straight from its place. On
//! the receiving side the payload goes straight to its place.

use phalanx_wire::frame::{Header, Kind};

use super::signature::{Signature, Theirs};
use crate::transport::Link;
use crate::{Error, ErrorKind, Result};

/// Payload bytes that are copied behind their header. A copy of this size
/// costs less than a second system call.
const INLINE_BYTES: usize = 4096;

/// What all frames of one round have in common.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) signature: &'a Signature,
    pub(super) epoch: u32,
    pub(super) group: u32,
    pub(super) step: u32,
    pub(super) segment_bytes: usize,
    pub(super) rank: usize,
}

/// How far a transfer came in one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Whether any byte moved.
    pub(super) moved: bool,
    /// Whether the transfer is complete.
    pub(super) done: bool,
}

/// The sending side. Reused from operation to operation.
pub(super) struct Sender {
    pub(super) peer: usize,
    pub(super) done: bool,
    /// Bytes of the transfer already put into frames.
    framed: usize,
    total: usize,
    started: bool,
    stage: Vec<u8>,
    stage_sent: usize,
    /// Bytes of the current frame that follow the stage.
    direct_left: usize,
}

impl Sender {
    pub(super) fn new() -> Self {
        Sender {
            peer: 0,
            done: true,
            framed: 0,
            total: 0,
            started: false,
            stage: Vec::with_capacity(Header::BYTES + INLINE_BYTES),
            stage_sent: 0,
            direct_left: 0,
        }
    }

    pub(super) fn begin(&mut self, peer: usize, total: usize) {
        self.peer = peer;
        self.total = total;
        self.done = false;
        self.framed = 0;
        self.started = false;
        self.stage.clear();
        self.stage_sent = 0;
        self.direct_left = 0;
    }

    /// Sends what the link takes, at most up to the end of the frame that is
    /// begun first in this turn, so that many peers are served in turn.
    /// `payload` is the whole transfer.
    pub(super) fn step(
        &mut self,
        link: &mut dyn Link,
        payload: &[u8],
        context: &Context<'_>,
    ) -> Result<Progress> {
        debug_assert_eq!(payload.len(), self.total);
        let mut moved = false;
        let mut begun = false;
        loop {
            if self.stage_sent < self.stage.len() {
                let n = link.try_send(&self.stage[self.stage_sent..])?;
                if n == 0 {
                    break;
                }
                moved = true;
                self.stage_sent += n;
            } else if self.direct_left > 0 {
                let start = self.framed - self.direct_left;
                let n = link.try_send(&payload[start..self.framed])?;
                if n == 0 {
                    break;
                }
                moved = true;
                self.direct_left -= n;
            } else if self.started && self.framed == self.total {
                self.done = true;
                break;
            } else if begun {
                break;
            } else {
                begun = true;
                self.begin_frame(payload, context);
            }
        }
        Ok(Progress {
            moved,
            done: self.done,
        })
    }

    fn begin_frame(&mut self, payload: &[u8], context: &Context<'_>) {
        let length = context.segment_bytes.min(self.total - self.framed);
        let inline = length.min(INLINE_BYTES);
        let mut header = context.signature.header(context.epoch, context.group);
        header.step = context.step;
        header.offset = self.framed as u64;
        // At most MAX_FRAME_BYTES: segment_bytes is clamped to it.
        header.length = length as u32;
        self.stage.clear();
        self.stage.extend_from_slice(&header.encode());
        self.stage
            .extend_from_slice(&payload[self.framed..self.framed + inline]);
        self.stage_sent = 0;
        self.direct_left = length - inline;
        self.framed += length;
        self.started = true;
    }
}

/// The receiving side. Reused from operation to operation.
pub(super) struct Receiver {
    pub(super) peer: usize,
    pub(super) done: bool,
    received: usize,
    total: usize,
    header: [u8; Header::BYTES],
    header_received: usize,
    /// Bytes of the current frame still to come.
    frame_left: usize,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Receiver {
            peer: 0,
            done: true,
            received: 0,
            total: 0,
            header: [0; Header::BYTES],
            header_received: 0,
            frame_left: 0,
        }
    }

    pub(super) fn begin(&mut self, peer: usize, total: usize) {
        self.peer = peer;
        self.total = total;
        self.done = false;
        self.received = 0;
        self.header_received = 0;
        self.frame_left = 0;
    }

    /// Receives what is there, at most up to the end of one frame. `place` is
    /// where the whole transfer goes.
    pub(super) fn step(
        &mut self,
        link: &mut dyn Link,
        place: &mut [u8],
        context: &Context<'_>,
    ) -> Result<Progress> {
        debug_assert_eq!(place.len(), self.total);
        let mut moved = false;
        loop {
            if self.header_received < Header::BYTES {
                let n = link.try_recv(&mut self.header[self.header_received..])?;
                if n == 0 {
                    break;
                }
                moved = true;
                self.header_received += n;
                if self.header_received < Header::BYTES {
                    continue;
                }
                self.frame_left = self.check_header(context)?;
            }
            if self.frame_left > 0 {
                let end = self.received + self.frame_left;
                let n = link.try_recv(&mut place[self.received..end])?;
                if n == 0 {
                    break;
                }
                moved = true;
                self.received += n;
                self.frame_left -= n;
            }
            if self.frame_left == 0 {
                self.header_received = 0;
                self.done = self.received == self.total;
                break;
            }
        }
        Ok(Progress {
            moved,
            done: self.done,
        })
    }

    /// Compares a frame with what this rank posted; returns its length.
    fn check_header(&self, context: &Context<'_>) -> Result<usize> {
        let peer = self.peer;
        let header = Header::decode(&self.header).map_err(|e| {
            Error::protocol(peer, format!("rank {peer} sent a garbled frame: {e}")).with_source(e)
        })?;
        if header.kind != Kind::Data {
            return Err(Error::protocol(
                peer,
                format!(
                    "rank {peer} sent a frame of kind {:?} where data was due",
                    header.kind
                ),
            ));
        }
        if (header.epoch, header.group) != (context.epoch, context.group) {
            return Err(Error::protocol(
                peer,
                format!(
                    "rank {peer} sent a frame of epoch {}, group {:#x} into epoch {}, group {:#x}",
                    header.epoch, header.group, context.epoch, context.group
                ),
            ));
        }
        if !context.signature.matches(&header) {
            return Err(Error::new(
                ErrorKind::Desync,
                format!(
                    "ranks are in different operations: rank {} called {}, rank {peer} called {}",
                    context.rank,
                    context.signature,
                    Theirs(&header)
                ),
            )
            .with_peer(peer));
        }
        // Only one offset is legal, and the plan knows the step; a length of
        // zero is legal only where nothing is due.
        let length = header.length as usize;
        let left = self.total - self.received;
        if header.step != context.step
            || header.offset != self.received as u64
            || length > left
            || (length == 0 && left > 0)
        {
            return Err(Error::protocol(
                peer,
                format!(
                    "rank {peer} sent {length} bytes at offset {} of step {} where {left} bytes \
                     at offset {} of step {} were due",
                    header.offset, header.step, self.received, context.step
                ),
            ));
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Collective, Method};
    use crate::transport::TransportKind;
    use crate::{DType, ReduceOp};
    use std::collections::VecDeque;

    /// A link that takes and gives at most `at_once` bytes a call.
    struct Trickle {
        bytes: VecDeque<u8>,
        at_once: usize,
        capacity: usize,
    }

    impl Link for Trickle {
        fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
            let n = bytes
                .len()
                .min(self.at_once)
                .min(self.capacity - self.bytes.len());
            self.bytes.extend(&bytes[..n]);
            Ok(n)
        }
        fn try_recv(&mut self, into: &mut [u8]) -> Result<usize> {
            let n = into.len().min(self.at_once).min(self.bytes.len());
            for (slot, byte) in into.iter_mut().zip(self.bytes.drain(..n)) {
                *slot = byte;
            }
            Ok(n)
        }
        fn kind(&self) -> TransportKind {
            TransportKind::Thread
        }
    }

    fn signature() -> Signature {
        Signature {
            collective: Collective::AllReduce,
            method: Method::AllReduceDirect,
            dtype: Some(DType::U8),
            op: Some(ReduceOp::Sum),
            root: 0,
            count: 9000,
            seq: 4,
        }
    }

    fn context(signature: &Signature, segment_bytes: usize) -> Context<'_> {
        Context {
            signature,
            epoch: 1,
            group: 2,
            step: 3,
            segment_bytes,
            rank: 0,
        }
    }

    #[test]
    fn every_segment_size_and_trickle_delivers_the_bytes() {
        let signature = signature();
        for total in [0usize, 1, 63, 64, 65, 4096, 4097, 9000] {
            let payload: Vec<u8> = (0..total).map(|i| (i * 7 + i / 251) as u8).collect();
            for segment in [1usize, 100, 4096, 5000, 1 << 20] {
                if total / segment > 1000 {
                    continue;
                }
                for at_once in [1, 13, 64, 100_000] {
                    let mut link = Trickle {
                        bytes: VecDeque::new(),
                        at_once,
                        capacity: 300,
                    };
                    let context = context(&signature, segment);
                    let (mut tx, mut rx) = (Sender::new(), Receiver::new());
                    let mut place = vec![0u8; total];
                    tx.begin(1, total);
                    rx.begin(1, total);
                    while !(tx.done && rx.done) {
                        let mut moved = false;
                        if !tx.done {
                            moved |= tx.step(&mut link, &payload, &context).unwrap().moved;
                        }
                        if !rx.done {
                            moved |= rx.step(&mut link, &mut place, &context).unwrap().moved;
                        }
                        assert!(moved, "stuck: total {total} segment {segment}");
                    }
                    assert_eq!(place, payload);
                    assert!(link.bytes.is_empty());
                }
            }
        }
    }

    /// Lets a receiver of 100 bytes read one frame with `change`d header.
    fn error_of(change: impl FnOnce(&mut Header)) -> Error {
        let signature = signature();
        let mut header = signature.header(1, 2);
        header.step = 3;
        header.length = 100;
        change(&mut header);
        refuse(header.encode())
    }

    fn refuse(bytes: [u8; 64]) -> Error {
        let signature = signature();
        let mut link = Trickle {
            bytes: bytes.into(),
            at_once: 64,
            capacity: 64,
        };
        let mut rx = Receiver::new();
        rx.begin(5, 100);
        rx.step(&mut link, &mut [0; 100], &context(&signature, 1000))
            .unwrap_err()
    }

    #[test]
    fn garbled_frame_names_the_peer() {
        let error = refuse([0x47; 64]);
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Protocol, Some(5)));
        assert!(
            error.to_string().contains("rank 5 sent a garbled frame"),
            "{error}"
        );
    }

    #[test]
    fn frames_out_of_place_are_refused() {
        let changes: [fn(&mut Header); 8] = [
            |h| h.step = 4,
            |h| h.offset = 1,
            |h| h.length = 101,
            |h| h.length = 0,
            |h| h.epoch = 0,
            |h| h.group = 7,
            |h| h.kind = Kind::Heartbeat,
            |h| h.kind = Kind::Goodbye,
        ];
        for change in changes {
            let error = error_of(change);
            assert_eq!(
                (error.kind(), error.peer()),
                (ErrorKind::Protocol, Some(5)),
                "{error}"
            );
        }
    }

    #[test]
    fn another_operation_is_a_desync_with_both_sides() {
        let error = error_of(|h| {
            h.collective = Collective::Broadcast.wire();
            h.seq = 9;
            h.op = 0;
        });
        assert_eq!(error.kind(), ErrorKind::Desync);
        let text = error.to_string();
        assert!(
            text.contains("rank 0 called all_reduce u8 sum of 9000 elements"),
            "{text}"
        );
        assert!(
            text.contains("rank 5 called broadcast u8 of 9000 elements"),
            "{text}"
        );
        assert!(text.contains("seq 4") && text.contains("seq 9"), "{text}");
    }
}
