//! One message on its way in.

use phalanx_wire::frame::{Header, Kind};

use super::pending::Pending;
use crate::operation::PeerOperation;
use crate::plan::Collective;
use crate::{DType, Error, Result};

/// What a rank receives from another one.
pub(super) struct Incoming {
    header: [u8; Header::BYTES],
    /// Bytes of the header that have come.
    filled: usize,
    /// Bytes of the frame still to come.
    pub(super) frame_left: usize,
    pub(super) message: Option<Arriving>,
    /// The peer has left, and nothing more comes.
    pub(super) gone: bool,
}

/// A message of which some frames have come.
pub(super) struct Arriving {
    pub(super) operation: PeerOperation,
    pub(super) tag: u32,
    pub(super) total: usize,
    pub(super) got: usize,
    pub(super) target: Target,
}

/// Where a message goes.
pub(super) enum Target {
    /// There is no receive for it and no room.
    None,
    Receive(Box<Pending>),
    /// No receive has been issued for it yet.
    Early(Vec<u8>),
}

impl Incoming {
    pub(super) fn new() -> Incoming {
        Incoming {
            header: [0; Header::BYTES],
            filled: 0,
            frame_left: 0,
            message: None,
            gone: false,
        }
    }

    /// The rest of the header, if it is not complete.
    pub(super) fn header_left(&mut self) -> Option<&mut [u8]> {
        (self.filled < Header::BYTES).then(|| &mut self.header[self.filled..])
    }

    /// `bytes` of the header have come; returns it when it is complete.
    pub(super) fn fill_header(&mut self, peer: usize, bytes: usize) -> Result<Option<Header>> {
        self.filled += bytes;
        if self.filled < Header::BYTES {
            return Ok(None);
        }
        let header = Header::decode(&self.header).map_err(|e| {
            Error::protocol(peer, format!("rank {peer} sent a garbled frame: {e}")).with_source(e)
        })?;
        Ok(Some(header))
    }

    /// The frame is complete.
    pub(super) fn next_frame(&mut self) {
        self.filled = 0;
    }

    /// Checks a frame of the message `seq` of `peer`, the next one or one that has begun to come.
    pub(super) fn accept(
        &mut self,
        header: &Header,
        peer: usize,
        ids: (u32, u32),
        seq: u64,
    ) -> Result<bool> {
        let wrong = |what: &str| {
            Err(Error::protocol(
                peer,
                format!("rank {peer} sent a frame of a message with {what}"),
            ))
        };
        if header.kind != Kind::Data
            || header.collective != Collective::SendRecv.wire()
            || header.plan != 0
        {
            return wrong("another purpose");
        }
        if (header.generation, header.group) != ids {
            return wrong("another group");
        }
        if header.root as usize != peer {
            return wrong("another sender");
        }
        let Some(dtype) = DType::from_wire(header.dtype) else {
            return wrong("an unknown data type");
        };
        let total = usize::try_from(header.count)
            .ok()
            .and_then(|count| count.checked_mul(dtype.size_bytes()))
            .filter(|total| isize::try_from(*total).is_ok());
        let Some(total) = total else {
            return wrong("an impossible length");
        };
        let operation = PeerOperation::of_frame(header);
        let is_new = self.message.is_none();
        let message = self.message.get_or_insert(Arriving {
            operation,
            tag: header.step,
            total,
            got: 0,
            target: Target::None,
        });
        let length = header.length as usize;
        if (message.operation, message.tag, header.seq) != (operation, header.step, seq)
            || header.offset != message.got as u64
            || length > message.total - message.got
            || (length == 0 && total > 0)
        {
            return wrong("an offset or length that is not due");
        }
        self.frame_left = length;
        Ok(is_new)
    }
}
