//! The layout of a recorder's memory, in 64-bit words.
//!
//! ```text
//! header   who, which clock, phase, why it failed        4 KiB
//! entries  4096 of 128 B, a ring by ticket; one spare   512 KiB
//! labels   255 texts of at most 248 B                     64 KiB
//! ```
//!
//! The memory may be shared with the launcher, which can still read it after the rank
//! was killed.

/// Operations remembered.
pub(crate) const ENTRIES: usize = 4096;
/// Different labels remembered.
pub(crate) const LABELS: usize = 255;
/// The operation had a label for which there was no room.
pub(crate) const LABEL_LOST: u16 = u16::MAX;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"PHLXFLT\0");
pub(crate) const VERSION: u64 = 1;

/// Words of the header.
pub(crate) mod head {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 1;
    /// The process that writes; 0: none yet.
    pub(crate) const OWNER: usize = 2;
    /// `world << 32 | rank`.
    pub(crate) const RANK: usize = 3;
    pub(crate) const GENERATION: usize = 4;
    pub(crate) const CLOCK: usize = 5;
    pub(crate) const ANCHOR_TICKS: usize = 6;
    pub(crate) const ANCHOR_MONOTONIC: usize = 7;
    pub(crate) const ANCHOR_WALL: usize = 8;
    pub(crate) const LABELS_USED: usize = 9;
    /// Ticks; 0: no phase was ever set.
    pub(crate) const PHASE_SINCE: usize = 10;
    /// Text, padded with zeros.
    pub(crate) const PHASE: usize = 11;
    pub(crate) const PHASE_WORDS: usize = crate::status::PHASE_WORDS;
    /// `epoch << 40 | step`, plus 1; 0: unknown.
    pub(crate) const POSITION: usize = 15;
    /// Ticks; 0: nothing failed.
    pub(crate) const FAILED_AT: usize = 16;
    /// Why: text, padded with zeros.
    pub(crate) const REASON: usize = 17;
    pub(crate) const REASON_WORDS: usize = 64;
    /// The kind of failure; 0: not set. See `Failure`.
    pub(crate) const FAILURE: usize = 81;
    /// `generation << 32 | group` in which it failed.
    pub(crate) const FAILED_GROUP: usize = 82;
    /// Milliseconds that the rank requests between SIGTERM and SIGKILL; 0: not set.
    pub(crate) const STOP_GRACE_MS: usize = 83;
    /// When the declared phase must be over, on the monotonic clock in nanoseconds; 0: there is none.
    pub(crate) const BUSY_UNTIL: usize = 84;
    /// Generation of the first group.
    pub(crate) const JOINED: usize = 85;
    /// When the first group of the newest generation was formed, in ticks; 0: none was.
    pub(crate) const FORMED: usize = 86;
    /// See [`Dump::job`](super::Dump::job).
    pub(crate) const JOB: usize = 87;
    /// Tickets issued; on its own cache line.
    pub(crate) const TICKETS: usize = 96;
    /// The operation that [`AWAITED_WIDE`] belongs to, as ticket + 1; 0: none.
    pub(crate) const AWAITED_WIDE_OF: usize = 104;
    /// Ranks from 128 up that the operation waits for, as bits.
    pub(crate) const AWAITED_WIDE: usize = 105;
    /// The directory for the rank's dumps: a path, padded with zeros.
    pub(crate) const DIR: usize = 128;
    pub(crate) const DIR_WORDS: usize = 128;
    /// Members of the newest generation by their first ranks, as bits; none: not set.
    pub(crate) const MEMBERS: usize = 256;
    pub(crate) const MEMBERS_WORDS: usize = 256;
    pub(crate) const WORDS: usize = 512;
}

/// Words of an entry.
pub(crate) mod entry {
    /// Ticket + 1, or [`BUSY`](super::BUSY) while the entry is being written; 0: never used.
    pub(crate) const STAMP: usize = 0;
    pub(crate) const SEQ: usize = 1;
    /// `generation << 32 | group`.
    pub(crate) const GROUP: usize = 2;
    pub(crate) const COUNT: usize = 3;
    /// collective, method, dtype, reduce-op, transport (8 bits each), label (16).
    pub(crate) const WHAT: usize = 4;
    /// `target << 32 | root`.
    pub(crate) const ROOT: usize = 5;
    pub(crate) const QUEUED: usize = 6;
    pub(crate) const STARTED: usize = 7;
    pub(crate) const PROGRESS: usize = 8;
    pub(crate) const DONE: usize = 9;
    pub(crate) const WAITED: usize = 10;
    pub(crate) const FOLDED: usize = 11;
    /// Ranks 0 to 127 that are waited for, as bits; higher ones are in the header.
    pub(crate) const AWAITED: usize = 12;
    pub(crate) const AWAITED_WORDS: usize = 2;
    /// The rank that was waited for longest, plus 1.
    pub(crate) const SLOWEST: usize = 14;
    pub(crate) const STATE: usize = 15;
    pub(crate) const WORDS: usize = 16;
}

/// In a stamp: a thread is writing this entry.
pub(crate) const BUSY: u64 = 1 << 63;
/// The ticket of an operation for which there was no room; its entry is a spare one
/// that is never read.
pub(crate) const NO_TICKET: u64 = u64::MAX;

/// States of an operation, as stored.
pub(crate) mod state {
    pub(crate) const QUEUED: u64 = 1;
    pub(crate) const RUNNING: u64 = 2;
    pub(crate) const DONE: u64 = 3;
    pub(crate) const ABORTED: u64 = 4;
}

/// Words of a label: length in bytes, then text.
pub(crate) const LABEL_WORDS: usize = 32;
/// Most bytes of a label.
pub(crate) const LABEL_BYTES: usize = 8 * (LABEL_WORDS - 1);

pub(crate) const fn entry_at(ticket: u64) -> usize {
    let slot = if ticket == NO_TICKET {
        ENTRIES
    } else {
        ticket as usize % ENTRIES
    };
    head::WORDS + slot * entry::WORDS
}

pub(crate) const fn label_at(index: usize) -> usize {
    head::WORDS + (ENTRIES + 1) * entry::WORDS + index * LABEL_WORDS
}

/// Words in all.
pub(crate) const WORDS: usize = label_at(LABELS);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::words::MASK_WORDS;

    #[test]
    fn parts_are_disjoint_and_inside() {
        const { assert!(head::REASON + head::REASON_WORDS <= head::TICKETS) };
        const { assert!(head::TICKETS + 8 <= head::AWAITED_WIDE_OF) };
        const {
            let wide = MASK_WORDS - entry::AWAITED_WORDS;
            assert!(head::AWAITED_WIDE + wide <= head::DIR);
        };
        const { assert!(head::JOB < head::TICKETS) };
        const { assert!(head::DIR + head::DIR_WORDS <= head::MEMBERS) };
        const { assert!(head::MEMBERS + head::MEMBERS_WORDS <= head::WORDS) };
        const { assert!(head::PHASE + head::PHASE_WORDS <= head::POSITION) };
        assert_eq!(entry_at(0), head::WORDS);
        assert_eq!(entry_at(ENTRIES as u64), entry_at(0));
        assert_eq!(
            entry_at(ENTRIES as u64 - 1) + entry::WORDS,
            entry_at(NO_TICKET)
        );
        assert_eq!(entry_at(NO_TICKET) + entry::WORDS, label_at(0));
        const { assert!(WORDS * 8 < 1 << 20, "a megabyte a rank is too much") };
    }
}
