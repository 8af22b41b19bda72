//! The cell of a rank: what it does, how far it is, and tiny data.
//!
//! | word | is |
//! |---|---|
//! | 0 | phase: how often the rank has published; written last |
//! | 1–3 | the operation's signature |
//! | 4 | where its data lies in its arena, or `STAGED` |
//! | 5 | the stage size it wishes for |
//! | 6–14 | data of at most 72 bytes |
//! | 15 | the phase to which it was the last to come, if it had to wake others |
//!
//! Each rank has two cells and uses them in turn, one for each collective.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::transport::Segment;

const PHASE: usize = 0;
const SIGNATURE: usize = 1;
const OFFSET: usize = 4;
const WISH: usize = 5;
const PAYLOAD: usize = 6;
const LAST: usize = 15;

/// Data up to this size rides in the cell.
pub(super) const PAYLOAD_BYTES: usize = (LAST - PAYLOAD) * 8;

/// The data is not in an arena.
const STAGED: u64 = u64::MAX;

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
    pub(super) fn phase(self) -> u64 {
        let word = self.segment.cell_word(self.rank, self.which, PHASE);
        word.load(SeqCst)
    }

    /// Makes everything written before visible to who sees `phase`.
    #[inline]
    pub(super) fn publish(self, phase: u64) {
        let word = self.segment.cell_word(self.rank, self.which, PHASE);
        word.store(phase, SeqCst);
    }

    /// Tells those who slept that this rank was the last to come to `phase`.
    pub(super) fn was_last(self, phase: u64) {
        let word = self.segment.cell_word(self.rank, self.which, LAST);
        word.store(phase, Relaxed);
    }

    /// The phase of the latest [`Cell::was_last`].
    pub(super) fn last(self) -> u64 {
        let word = self.segment.cell_word(self.rank, self.which, LAST);
        word.load(Relaxed)
    }

    /// Writes what others may read once it is published.
    pub(super) fn describe(self, signature: [u64; 3], offset: Option<u64>, wish: usize) {
        let word = |i| self.segment.cell_word(self.rank, self.which, i);
        for (i, value) in signature.into_iter().enumerate() {
            word(SIGNATURE + i).store(value, Relaxed);
        }
        word(OFFSET).store(offset.unwrap_or(STAGED), Relaxed);
        word(WISH).store(wish as u64, Relaxed);
    }

    pub(super) fn signature(self) -> [u64; 3] {
        std::array::from_fn(|i| {
            let word = self.segment.cell_word(self.rank, self.which, SIGNATURE + i);
            word.load(Relaxed)
        })
    }

    /// Where the rank says that its data lies; not checked.
    pub(super) fn offset(self) -> Option<u64> {
        let word = self.segment.cell_word(self.rank, self.which, OFFSET);
        Some(word.load(Relaxed)).filter(|offset| *offset != STAGED)
    }

    /// The stage size it wishes for; not checked.
    pub(super) fn wish(self) -> usize {
        let word = self.segment.cell_word(self.rank, self.which, WISH);
        usize::try_from(word.load(Relaxed)).unwrap_or(usize::MAX)
    }

    /// Where tiny data lies: [`PAYLOAD_BYTES`], aligned to 16.
    pub(super) fn payload(self) -> *mut u8 {
        self.segment.cell_bytes(self.rank, self.which, PAYLOAD)
    }
}
