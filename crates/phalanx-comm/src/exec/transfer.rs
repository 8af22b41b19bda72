//! One frame in progress.
//!
//! A frame is a 64-byte header and at most `segment_bytes` of payload, a piece
//! of one transfer. Payload is not copied here: it is sent from and received into the
//! buffers of the plan, with its header in the same system call. Only the payload of a
//! small frame is staged behind the header, for links that cannot take two buffers at
//! once.
//!
//! A receiver knows the only valid header before it arrives: operation, round, offset
//! and length. So no frame is requested or announced, and the payload may be read
//! together with the header. Any other frame ends the operation, whose buffers are then
//! undefined anyway.

use phalanx_wire::frame::{Header, Kind};

use crate::operation::{PeerOperation, Signature};
use crate::transport::Link;
use crate::{Error, Result};

/// Payload bytes that are copied behind their header. A copy of this size
/// costs less than waking a peer twice.
const INLINE_BYTES: usize = 4096;

/// What all frames of one operation have in common.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) signature: &'a Signature,
    pub(crate) generation: u32,
    pub(crate) group: u32,
    pub(crate) rank: usize,
}

/// Which piece of which transfer a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Round of the plan; the tag of a message.
    pub(crate) step: u32,
    /// Bytes of the transfer before this piece.
    pub(crate) offset: u64,
    /// At most `MAX_FRAME_BYTES`.
    pub(crate) length: u32,
}

/// The progress of a frame in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether any byte moved.
    pub(crate) moved: bool,
    /// Whether the frame is complete.
    pub(crate) done: bool,
}

/// The sending side of one lane. Reused from frame to frame.
pub(crate) struct Sender {
    /// Header, followed by a small payload.
    stage: Vec<u8>,
    /// Bytes sent of header and payload; a frame is in progress if any are staged.
    sent: usize,
}

impl Sender {
    pub(crate) fn new() -> Self {
        Sender {
            stage: Vec::with_capacity(Header::BYTES + INLINE_BYTES),
            sent: 0,
        }
    }

    /// Discards a frame that an earlier operation left half sent.
    pub(crate) fn reset(&mut self) {
        self.stage.clear();
    }

    /// Sends what the link takes of `frame`, whose payload is given.
    pub(crate) fn step(
        &mut self,
        link: &mut dyn Link,
        frame: &Frame,
        payload: &[u8],
        context: &Context<'_>,
    ) -> Result<Progress> {
        debug_assert_eq!(payload.len(), frame.length as usize);
        if self.stage.is_empty() {
            self.begin(frame, payload, context);
        }
        let total = Header::BYTES + payload.len();
        let mut moved = false;
        while self.sent < total {
            let (staged, rest) = if self.sent < self.stage.len() {
                let in_stage = self.stage.len() - Header::BYTES;
                (&self.stage[self.sent..], &payload[in_stage..])
            } else {
                (&[][..], &payload[self.sent - Header::BYTES..])
            };
            let n = link.try_send_both(staged, rest)?;
            if n == 0 {
                return Ok(Progress { moved, done: false });
            }
            moved = true;
            self.sent += n;
        }
        self.stage.clear();
        Ok(Progress { moved, done: true })
    }

    fn begin(&mut self, frame: &Frame, payload: &[u8], context: &Context<'_>) {
        let mut header = context.signature.header(context.generation, context.group);
        header.step = frame.step;
        header.offset = frame.offset;
        header.length = frame.length;
        self.stage.extend_from_slice(&header.encode());
        if payload.len() <= INLINE_BYTES {
            self.stage.extend_from_slice(payload);
        }
        self.sent = 0;
    }
}

/// The receiving side of one lane. Reused from frame to frame.
pub(super) struct Receiver {
    header: [u8; Header::BYTES],
    /// Bytes received of header and payload.
    received: usize,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Receiver {
            header: [0; Header::BYTES],
            received: 0,
        }
    }

    /// Discards a frame that an earlier operation left half received.
    pub(super) fn reset(&mut self) {
        self.received = 0;
    }

    /// Bytes of `frame` still to be received; 0 until its header is here, since another frame may arrive
    /// instead.
    pub(super) fn coming_bytes(&self, frame: &Frame) -> usize {
        match self.received >= Header::BYTES {
            true => Header::BYTES + frame.length as usize - self.received,
            false => 0,
        }
    }

    /// Receives what is there of `frame`, the next one of this lane; its
    /// payload goes to `place`.
    pub(super) fn step(
        &mut self,
        link: &mut dyn Link,
        peer: usize,
        frame: &Frame,
        place: &mut [u8],
        context: &Context<'_>,
    ) -> Result<Progress> {
        debug_assert_eq!(place.len(), frame.length as usize);
        let total = Header::BYTES + place.len();
        let mut moved = false;
        while self.received < total {
            let had_header = self.received >= Header::BYTES;
            let n = if had_header {
                link.try_recv(&mut place[self.received - Header::BYTES..])?
            } else {
                link.try_recv_both(&mut self.header[self.received..], place)?
            };
            if n == 0 {
                return Ok(Progress { moved, done: false });
            }
            moved = true;
            self.received += n;
            if !had_header && self.received >= Header::BYTES {
                self.check_header(peer, frame, context)?;
            }
        }
        self.received = 0;
        Ok(Progress { moved, done: true })
    }

    /// Compares a frame with the expected one.
    fn check_header(&self, peer: usize, due: &Frame, context: &Context<'_>) -> Result<()> {
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
        if (header.generation, header.group) != (context.generation, context.group) {
            return Err(Error::protocol(
                peer,
                format!(
                    "rank {peer} sent a frame of generation {}, group {:#x} into generation {}, group {:#x}",
                    header.generation, header.group, context.generation, context.group
                ),
            ));
        }
        let theirs = PeerOperation::of_frame(&header);
        context.signature.compare(context.rank, peer, &theirs)?;
        let sent = Frame {
            step: header.step,
            offset: header.offset,
            length: header.length,
        };
        // Stream 0 is the data connection.
        if sent != *due || header.stream != 0 {
            return Err(Error::protocol(
                peer,
                format!(
                    "rank {peer} sent {} bytes at offset {} of step {} on stream {} where {} bytes \
                     at offset {} of step {} were due (is the frame size the same on all ranks?)",
                    sent.length,
                    sent.offset,
                    sent.step,
                    header.stream,
                    due.length,
                    due.offset,
                    due.step,
                ),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
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
            method: Some(Method::AllReduceDirect),
            dtype: Some(DType::U8),
            op: Some(ReduceOp::Sum),
            root: 0,
            count: 9000,
            lengths: 0,
            seq: 4,
        }
    }

    fn context(signature: &Signature) -> Context<'_> {
        Context {
            signature,
            generation: 1,
            group: 2,
            rank: 0,
        }
    }

    #[test]
    fn every_frame_size_and_trickle_delivers_the_bytes() {
        let signature = signature();
        let context = context(&signature);
        for total in [0usize, 1, 63, 64, 65, 4095, 4096, 4097, 9000] {
            let payload: Vec<u8> = (0..total).map(|i| (i * 7 + i / 251) as u8).collect();
            for at_once in [1, 13, 64, 65, 100_000] {
                let mut link = Trickle {
                    bytes: VecDeque::new(),
                    at_once,
                    capacity: 300,
                };
                let (mut tx, mut rx) = (Sender::new(), Receiver::new());
                // Twice: nothing of a frame is left for the next.
                for offset in [0, 77] {
                    let frame = Frame {
                        step: 3,
                        offset,
                        length: total as u32,
                    };
                    let mut place = vec![0u8; total];
                    let (mut sent, mut got) = (false, false);
                    while !(sent && got) {
                        let mut moved = false;
                        if !sent {
                            let p = tx.step(&mut link, &frame, &payload, &context).unwrap();
                            (moved, sent) = (p.moved, p.done);
                        }
                        if !got {
                            let p = rx.step(&mut link, 1, &frame, &mut place, &context).unwrap();
                            (moved, got) = (moved | p.moved, p.done);
                        }
                        assert!(moved, "stuck: total {total} at once {at_once}");
                    }
                    assert_eq!(place, payload);
                    assert!(link.bytes.is_empty());
                }
            }
        }
    }

    #[test]
    fn nothing_is_certain_to_come_before_the_header_is_there() {
        let signature = signature();
        let context = context(&signature);
        let frame = Frame {
            step: 0,
            offset: 0,
            length: 9000,
        };
        let mut link = Trickle {
            bytes: VecDeque::new(),
            at_once: 70,
            capacity: 70,
        };
        let (mut tx, mut rx) = (Sender::new(), Receiver::new());
        let payload = [3u8; 9000];
        let mut place = [0u8; 9000];
        assert_eq!(rx.coming_bytes(&frame), 0);
        tx.step(&mut link, &frame, &payload, &context).unwrap();
        let rest = link.bytes.split_off(Header::BYTES - 1);
        rx.step(&mut link, 1, &frame, &mut place, &context).unwrap();
        assert_eq!(rx.coming_bytes(&frame), 0);
        link.bytes = rest;
        rx.step(&mut link, 1, &frame, &mut place, &context).unwrap();
        assert_eq!(rx.coming_bytes(&frame), 9000 - 6);
    }

    /// Lets a receiver of 100 bytes read one frame with `change`d header.
    fn error_of(change: impl FnOnce(&mut Header)) -> Error {
        let signature = signature();
        let mut header = signature.header(1, 2);
        header.step = 3;
        header.offset = 500;
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
        let due = Frame {
            step: 3,
            offset: 500,
            length: 100,
        };
        rx.step(&mut link, 5, &due, &mut [0; 100], &context(&signature))
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
        let changes: [fn(&mut Header); 10] = [
            |h| h.step = 4,
            |h| h.stream = 1,
            |h| h.offset = 0,
            |h| h.length = 99,
            |h| h.length = 101,
            |h| h.length = 0,
            |h| h.generation = 0,
            |h| h.group = 7,
            |h| h.kind = Kind::Abort,
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
