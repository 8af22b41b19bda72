//! The cell of a rank: its operation, its progress, and tiny data.
//!
//! | word | is |
//! |---|---|
//! | 0 | phase: how often the rank has published; written last |
//! | 1–3 | the operation's signature |
//! | 4 | where its data is: a [`Place`] |
//! | 5 | the stage size it prefers (40 bits); the core on which it was when it began, where ranks share cores; highest bit: it can read all others' memory |
//! | 6–14 | data of at most 72 bytes; before the first operation a [`Sign`] |
//! | 15 | the last phase in which it arrived last and had to wake others |
//!
//! Each rank has two cells and alternates between them, one for each collective.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::direct::Sign;
use crate::transport::Segment;

const PHASE: usize = 0;
const SIGNATURE: usize = 1;
const PLACE: usize = 4;
const WISH: usize = 5;
const PAYLOAD: usize = 6;
const LAST: usize = 15;

/// Data up to this size is stored in the cell.
pub(super) const PAYLOAD_BYTES: usize = (LAST - PAYLOAD) * 8;

/// A place that is staged.
const STAGED: u64 = u64::MAX;
/// A place that is an address, not an offset. No user's address has it.
const ADDRESS: u64 = 1 << 63;
/// A rank can read all others' memory.
const READS: u64 = 1 << 63;
/// Bits of the stage size, below those of the core.
const WISH_BITS: u32 = 40;

/// Where others find a rank's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Piece by piece in its stages.
    Staged,
    /// At this offset into its arena.
    Arena(u64),
    /// At this address in its process.
    Address(u64),
}

/// One of the two cells of one rank.
#[derive(Clone, Copy)]
pub(super) struct Cell<'a> {
    segment: &'a Segment,
    rank: usize,
    which: usize,
}

impl<'a> Cell<'a> {
    pub(super) fn new(segment: &'a Segment, rank: usize, which: usize) -> Self {
        Cell {
            segment,
            rank,
            which,
        }
    }

    #[inline]
    fn word(self, index: usize) -> &'a AtomicU64 {
        self.segment.cell_word(self.rank, self.which, index)
    }

    #[inline]
    pub(super) fn phase(self) -> u64 {
        self.word(PHASE).load(SeqCst)
    }

    /// Makes everything written before visible to readers of `phase`.
    #[inline]
    pub(super) fn publish(self, phase: u64) {
        self.word(PHASE).store(phase, SeqCst);
    }

    /// Publishes, for the ranks that slept, that this rank was the last to reach `phase`.
    pub(super) fn was_last(self, phase: u64) {
        self.word(LAST).store(phase, Relaxed);
    }

    /// The phase of the latest [`Cell::was_last`].
    pub(super) fn last(self) -> u64 {
        self.word(LAST).load(Relaxed)
    }

    /// Writes what others may read once it is published. `wish` are the stage size that the rank
    /// prefers, the core on which it is, and whether it can read all others' memory.
    pub(super) fn describe(self, signature: [u64; 3], place: Place, wish: (usize, usize, bool)) {
        let (stage, core, reads) = wish;
        for (i, value) in signature.into_iter().enumerate() {
            self.word(SIGNATURE + i).store(value, Relaxed);
        }
        let place = match place {
            Place::Staged => STAGED,
            Place::Arena(offset) => offset,
            Place::Address(address) => address | ADDRESS,
        };
        self.word(PLACE).store(place, Relaxed);
        let (stage, core) = (stage as u64 & !(u64::MAX << WISH_BITS), core as u64);
        let wish = (core << WISH_BITS & !READS) | stage | (u64::from(reads) << 63);
        self.word(WISH).store(wish, Relaxed);
    }

    /// The core on which the rank was when it began its latest operation in this cell; a hint.
    pub(super) fn core(self) -> u64 {
        (self.word(WISH).load(Relaxed) & !READS) >> WISH_BITS
    }

    pub(super) fn signature(self) -> [u64; 3] {
        std::array::from_fn(|i| self.word(SIGNATURE + i).load(Relaxed))
    }

    /// The published place of the rank's data; not checked.
    pub(super) fn place(self) -> Place {
        match self.word(PLACE).load(Relaxed) {
            STAGED => Place::Staged,
            address if address & ADDRESS != 0 => Place::Address(address & !ADDRESS),
            offset => Place::Arena(offset),
        }
    }

    /// The stage size it prefers; not checked.
    pub(super) fn wish(self) -> usize {
        (self.word(WISH).load(Relaxed) & !(u64::MAX << WISH_BITS)) as usize
    }

    /// Whether it claims to read all others' memory; not checked.
    pub(super) fn reads(self) -> bool {
        self.word(WISH).load(Relaxed) & READS != 0
    }

    /// Writes a sign into the room for data.
    pub(super) fn show(self, sign: Sign) {
        for (i, value) in sign.words().into_iter().enumerate() {
            self.word(PAYLOAD + i).store(value, Relaxed);
        }
    }

    /// The sign in the cell; not checked.
    pub(super) fn shown(self) -> Sign {
        Sign::of(std::array::from_fn(|i| {
            self.word(PAYLOAD + i).load(Relaxed)
        }))
    }

    /// The room for tiny data: [`PAYLOAD_BYTES`], aligned to 16.
    pub(super) fn payload(self) -> *mut u8 {
        self.segment.cell_bytes(self.rank, self.which, PAYLOAD)
    }
}
