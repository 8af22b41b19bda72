//! What an operation is, as all ranks must agree on it, and how frames carry it.

use std::fmt;

use phalanx_wire::frame::{Header, Kind};
use serde::{Deserialize, Serialize};

use crate::plan::{Collective, Method};
use crate::{DType, Error, ErrorKind, ReduceOp, Result};

/// Bits of the sequence number in a cell: enough for a million a second for eight
/// years.
const SEQ_BITS: u32 = 48;
const SEQ_MAX: u64 = (1 << SEQ_BITS) - 1;

/// One operation of a group. Every frame carries it; a receiver compares it
/// with its own, so that ranks in different operations find out at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) collective: Collective,
    /// Absent for operations that are carried out in shared memory rather than by the method's plan
    /// (they send no frame), and for messages.
    pub(crate) method: Option<Method>,
    /// Absent for operations without data.
    pub(crate) dtype: Option<DType>,
    /// Absent for operations that do not reduce.
    pub(crate) op: Option<ReduceOp>,
    /// The root, or the sender of a point-to-point message.
    pub(crate) root: usize,
    pub(crate) count: usize,
    /// Short hash of the lengths of which `count` is the sum, where ranks or
    /// tensors have different ones; otherwise 0.
    pub(crate) lengths: u16,
    pub(crate) seq: u64,
}

impl Signature {
    /// For a cell in shared memory; see [`PeerOperation`].
    pub(crate) fn words(&self) -> [u64; 3] {
        let codes = [
            self.collective.wire(),
            self.method.map_or(0, Method::wire),
            self.dtype.map_or(0, DType::wire),
            self.op.map_or(0, ReduceOp::wire),
        ];
        // Ranks are below 2³²: a group of more is refused when it forms.
        let first = u64::from(u32::from_le_bytes(codes)) | (self.root as u64) << 32;
        [
            first,
            self.count as u64,
            self.seq | u64::from(self.lengths) << SEQ_BITS,
        ]
    }

    /// The header of a data frame of this operation; the caller fills in
    /// step, offset and length.
    pub(crate) fn header(&self, generation: u32, group: u32) -> Header {
        let mut header = Header::new(Kind::Data);
        header.collective = self.collective.wire();
        header.plan = self.method.map_or(0, Method::wire);
        header.dtype = self.dtype.map_or(0, DType::wire);
        header.op = self.op.map_or(0, ReduceOp::wire);
        // Ranks are below 2³²: a group of more is refused when it forms.
        header.root = self.root as u32;
        header.count = self.count as u64;
        header.flags = self.lengths;
        header.seq = self.seq;
        header.generation = generation;
        header.group = group;
        header
    }

    /// Whether a peer is in the same operation.
    pub(crate) fn matches(&self, theirs: &PeerOperation) -> bool {
        self.words() == theirs.0
    }

    /// Compares with a peer's operation; the only place where a mismatch ends a group.
    ///
    /// # Errors
    ///
    /// `Desync` naming both sides.
    #[inline]
    pub(crate) fn compare(&self, rank: usize, peer: usize, theirs: &PeerOperation) -> Result<()> {
        if self.matches(theirs) {
            return Ok(());
        }
        let mine = PeerOperation(self.words());
        let text = desync((rank, &mine), (peer, theirs));
        Err(Error::new(ErrorKind::Desync, text).with_peer(peer))
    }
}

/// Names both sides of ranks in different operations, the lower one first.
#[cold]
pub(crate) fn desync(mine: (usize, &PeerOperation), theirs: (usize, &PeerOperation)) -> String {
    let (first, second) = match mine.0 < theirs.0 {
        true => (mine, theirs),
        false => (theirs, mine),
    };
    let called = |(rank, operation)| format!("rank {rank} called {operation}");
    format!(
        "ranks are in different operations: {}, {}",
        called(first),
        called(second)
    )
}

/// `all_reduce f32 sum of 100 elements by direct (seq 7)`
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PeerOperation(self.words()).fmt(f)
    }
}

/// A peer's operation in the words of [`Signature::words`], read from its cell, its
/// frames or the store. Displayed like [`Signature`]; nothing in it is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerOperation(pub(crate) [u64; 3]);

impl PeerOperation {
    /// The operation to which a frame belongs.
    #[inline]
    pub(crate) fn of_frame(header: &Header) -> PeerOperation {
        let codes = [header.collective, header.plan, header.dtype, header.op];
        // A number beyond the maximum stays one that no operation has.
        let seq = header.seq.min(SEQ_MAX);
        PeerOperation([
            u64::from(u32::from_le_bytes(codes)) | u64::from(header.root) << 32,
            header.count,
            seq | u64::from(header.flags) << SEQ_BITS,
        ])
    }

    /// Its number.
    pub(crate) fn seq(&self) -> u64 {
        self.0[2] & SEQ_MAX
    }

    pub(crate) fn collective(&self) -> Option<Collective> {
        Collective::from_wire(self.0[0] as u8)
    }

    pub(crate) fn root(&self) -> u64 {
        self.0[0] >> 32
    }

    pub(crate) fn count(&self) -> u64 {
        self.0[1]
    }

    pub(crate) fn has_lengths(&self) -> bool {
        self.0[2] > SEQ_MAX
    }
}

impl fmt::Display for PeerOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [collective, method, dtype, op] = (self.0[0] as u32).to_le_bytes();
        let (count, root, seq) = (self.count(), self.root(), self.seq());
        let Some(known) = Collective::from_wire(collective) else {
            return write!(
                f,
                "an operation unknown here (code {collective}, seq {seq})"
            );
        };
        f.write_str(known.name())?;
        if let Some(dtype) = DType::from_wire(dtype) {
            write!(f, " {dtype}")?;
            if let Some(op) = ReduceOp::from_wire(op) {
                write!(f, " {op}")?;
            }
            let plural = if count == 1 { "" } else { "s" };
            write!(f, " of {count} element{plural}")?;
        }
        if known.has_root() {
            write!(f, " with root {root}")?;
        }
        match (known, Method::from_wire(method)) {
            (Collective::SendRecv, _) => write!(f, " from rank {root}")?,
            // Where there is a choice, ranks may have chosen differently.
            (Collective::AllReduce | Collective::Broadcast | Collective::Reduce, Some(method)) => {
                write!(f, " by {}", method.name())?
            }
            _ => {}
        }
        if self.has_lengths() {
            // Only for comparison: it distinguishes two layouts of one size.
            write!(f, " in lengths #{:04x}", self.0[2] >> SEQ_BITS)?;
        }
        write!(f, " (seq {seq})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce() -> Signature {
        Signature {
            collective: Collective::AllReduce,
            method: Some(Method::AllReduceDirect),
            dtype: Some(DType::F32),
            op: Some(ReduceOp::Sum),
            root: 0,
            count: 100,
            lengths: 0,
            seq: 7,
        }
    }

    #[test]
    fn both_sides_read_alike() {
        let mine = all_reduce();
        assert_eq!(
            mine.to_string(),
            "all_reduce f32 sum of 100 elements by direct (seq 7)"
        );
        let header = mine.header(3, 9);
        assert_eq!(
            PeerOperation::of_frame(&header).to_string(),
            mine.to_string()
        );
        assert!(mine.matches(&PeerOperation::of_frame(&header)));
        assert_eq!((header.generation, header.group), (3, 9));
    }

    #[test]
    fn cells_tell_what_frames_tell() {
        let mine = all_reduce();
        assert_eq!(PeerOperation(mine.words()).to_string(), mine.to_string());
        let in_memory = Signature {
            method: None,
            ..mine
        };
        assert_ne!(mine.words(), in_memory.words());
        assert_eq!(
            in_memory.to_string(),
            "all_reduce f32 sum of 100 elements (seq 7)"
        );
        assert_eq!(
            PeerOperation(in_memory.words()).to_string(),
            in_memory.to_string()
        );
        assert!(PeerOperation([77, 0, 0]).to_string().contains("code 77"));
    }

    #[test]
    fn any_difference_is_a_mismatch() {
        let mine = all_reduce();
        let others = [
            Signature {
                collective: Collective::Broadcast,
                ..mine
            },
            Signature {
                method: Some(Method::AllReduceRing),
                ..mine
            },
            Signature {
                dtype: Some(DType::I32),
                ..mine
            },
            Signature {
                op: Some(ReduceOp::Max),
                ..mine
            },
            Signature { root: 1, ..mine },
            Signature { count: 101, ..mine },
            Signature { lengths: 9, ..mine },
            Signature { seq: 8, ..mine },
        ];
        for other in others {
            assert_ne!(mine.words(), other.words(), "{other}");
            let theirs = PeerOperation::of_frame(&other.header(0, 0));
            assert!(!mine.matches(&theirs), "{other}");
            let error = mine.compare(1, 0, &theirs).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Desync, Some(0)));
        }
    }

    #[test]
    fn unknown_codes_are_shown_not_trusted() {
        let mut header = all_reduce().header(0, 0);
        header.seq |= 1 << SEQ_BITS;
        assert!(!all_reduce().matches(&PeerOperation::of_frame(&header)));
        header.collective = 77;
        assert!(
            PeerOperation::of_frame(&header)
                .to_string()
                .contains("code 77")
        );
    }
}
