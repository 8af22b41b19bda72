//! The layout of the segment that the ranks of one host share.
//!
//! ```text
//! header   magic, version, seats, ring bytes, nonce                   128 B
//! poison   state with origin rank, length, cause                      512 B
//! seats    per rank: a bell for each channel (128 B), state and what it is doing (384 B, `status`)
//! cells    per rank: two of 128 B, see `shm/cell.rs`
//! rings    for each channel, per ordered pair (from, to), from ≠ to: see `ring.rs`
//! staging  per rank: two stages, see `shm/README.md`
//! ```
//!
//! A *seat* is a rank's index among the ranks of its host, in rank order.

use super::ring::{MAX_CAPACITY_BYTES, MIN_CAPACITY_BYTES, ring_bytes};
use crate::region::PAGE_BYTES;
use crate::status;
use crate::wait::BELL_BYTES;

/// Most ranks of one host that share memory: their rings take twice `RINGS_MAX_BYTES` of address
/// space, and each rank has a pidfd of every other.
pub const MAX_LOCAL_RANKS: usize = 1024;

/// What travels on a link. Each channel has links and a bell of its own, so that a thread that waits for messages and
/// one that is in a collective do not disturb each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Collectives,
    /// Sends and receives.
    Messages,
}

const CHANNELS: usize = 2;

const HEADER_BYTES: usize = 128;
const POISON_BYTES: usize = 512;
const SEAT_BYTES: usize = CHANNELS * BELL_BYTES + status::SEAT_BYTES;
/// Size of one cell: a cache line and its neighbour, which x86 prefetches with it.
pub(crate) const CELL_BYTES: usize = 128;

/// Room for the staging of all ranks; touched only when it is used.
const STAGING_BYTES: usize = 64 << 20;
const STAGE_MIN_BYTES: usize = 64 << 10;
const STAGE_MAX_BYTES: usize = 1 << 20;
/// Stages of a rank.
const STAGES: usize = 2;

/// Default size of all rings of a channel.
const RINGS_BYTES: usize = 64 << 20;
const DEFAULT_RING_MIN_BYTES: usize = 64 << 10;
/// Largest total size of a channel's rings by default; with more than 512 ranks it makes them smaller than
/// [`DEFAULT_RING_MIN_BYTES`].
const RINGS_MAX_BYTES: usize = 16 << 30;
const DEFAULT_RING_MAX_BYTES: usize = 1 << 20;

/// Capacity of each of the rings among `seats` ranks: the requested one, rounded down
/// to a power of two in range, or a share of 64 MiB between 64 KiB and 1 MiB, less with
/// more than 512 ranks.
pub(crate) fn ring_capacity(seats: usize, requested: Option<usize>) -> usize {
    let bytes = requested.unwrap_or_else(|| {
        let pairs = seats * seats.saturating_sub(1);
        let share = RINGS_BYTES / pairs.max(1);
        let most = RINGS_MAX_BYTES / pairs.max(1);
        share
            .clamp(DEFAULT_RING_MIN_BYTES, DEFAULT_RING_MAX_BYTES)
            .min(most)
    });
    let bytes = bytes.clamp(MIN_CAPACITY_BYTES, MAX_CAPACITY_BYTES);
    // Rounded down: the caller gave a limit. Exact for powers of two.
    1 << bytes.ilog2()
}

/// All offsets follow from these two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    seats: usize,
    capacity: usize,
}

impl Layout {
    /// `None` when no segment can have these numbers, which may come from a peer.
    pub(crate) fn new(seats: usize, capacity: usize) -> Option<Layout> {
        let capacity_ok = capacity.is_power_of_two()
            && (MIN_CAPACITY_BYTES..=MAX_CAPACITY_BYTES).contains(&capacity);
        // With both limits the total is below 2^51: no sum here can overflow.
        (capacity_ok && (1..=MAX_LOCAL_RANKS).contains(&seats))
            .then_some(Layout { seats, capacity })
    }

    /// No segment is larger than this.
    pub(crate) const MAX_TOTAL: usize = 1 << 51;

    pub(crate) fn seats(&self) -> usize {
        self.seats
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Size of the whole segment.
    pub(crate) fn total(&self) -> usize {
        self.staging() + self.seats * STAGES * self.stage_capacity()
    }

    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 8;
    pub(crate) const SEATS: usize = 12;
    pub(crate) const CAPACITY: usize = 16;
    /// Four 64-bit words.
    pub(crate) const NONCE: usize = 32;

    pub(crate) const POISON_STATE: usize = HEADER_BYTES;
    pub(crate) const POISON_LENGTH: usize = HEADER_BYTES + 4;
    /// 50 64-bit words.
    pub(crate) const POISON_CAUSE: usize = HEADER_BYTES + 8;

    fn seat(&self, seat: usize) -> usize {
        HEADER_BYTES + POISON_BYTES + seat * SEAT_BYTES
    }

    pub(crate) fn bell(&self, channel: Channel, seat: usize) -> usize {
        self.seat(seat) + channel as usize * BELL_BYTES
    }

    pub(crate) fn seat_state(&self, seat: usize) -> usize {
        self.seat(seat) + CHANNELS * BELL_BYTES
    }

    /// Cell `which` (0 or 1) of a rank.
    pub(crate) fn cell(&self, seat: usize, which: usize) -> usize {
        self.seat(self.seats) + (2 * seat + which) * CELL_BYTES
    }

    /// The rings of a channel.
    fn rings(&self, channel: Channel) -> usize {
        let each = self.stride() * self.seats * (self.seats - 1);
        self.cell(self.seats, 0) + channel as usize * each
    }

    fn staging(&self) -> usize {
        let rings = CHANNELS * self.stride() * self.seats * (self.seats - 1);
        (self.cell(self.seats, 0) + rings).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of each stage.
    pub(crate) fn stage_capacity(&self) -> usize {
        let share = STAGING_BYTES / (STAGES * self.seats);
        share.clamp(STAGE_MIN_BYTES, STAGE_MAX_BYTES) / PAGE_BYTES * PAGE_BYTES
    }

    /// Stage `which` (0 or 1) of a rank: input that it lets its peers read.
    pub(crate) fn stage(&self, seat: usize, which: usize) -> usize {
        self.staging() + (STAGES * seat + which) * self.stage_capacity()
    }

    fn stride(&self) -> usize {
        ring_bytes(self.capacity).next_multiple_of(128)
    }

    /// The ring that `from` writes and `to` reads (`from != to`).
    pub(crate) fn ring(&self, channel: Channel, from: usize, to: usize) -> usize {
        let column = if to > from { to - 1 } else { to };
        self.rings(channel) + (from * (self.seats - 1) + column) * self.stride()
    }

    /// All rings that `from` writes in collectives: offset and size.
    pub(crate) fn rings_from(&self, from: usize) -> (usize, usize) {
        let row = self.stride() * (self.seats - 1);
        (self.rings(Channel::Collectives) + from * row, row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_disjoint_aligned_and_inside() {
        for seats in 1..=8 {
            for capacity in [64, 128, 4096, 1 << 16] {
                let layout = Layout::new(seats, capacity).unwrap();
                let mut taken = vec![(0, layout.seat(seats))];
                for from in 0..seats {
                    let (row, bytes) = layout.rings_from(from);
                    for to in (0..seats).filter(|&to| to != from) {
                        for channel in [Channel::Collectives, Channel::Messages] {
                            let start = layout.ring(channel, from, to);
                            let end = start + ring_bytes(capacity);
                            assert!(start.is_multiple_of(128));
                            let is_in_row = row <= start && end <= row + bytes;
                            assert_eq!(is_in_row, channel == Channel::Collectives);
                            taken.push((start, end));
                        }
                    }
                    for which in 0..2 {
                        let cell = layout.cell(from, which);
                        assert!(cell.is_multiple_of(128));
                        taken.push((cell, cell + CELL_BYTES));
                        let stage = layout.stage(from, which);
                        assert!(stage.is_multiple_of(PAGE_BYTES));
                        taken.push((stage, stage + layout.stage_capacity()));
                    }
                }
                taken.sort_unstable();
                assert!(taken.windows(2).all(|w| w[0].1 <= w[1].0));
                assert!(taken.last().unwrap().1 <= layout.total());
            }
        }
    }

    #[test]
    fn default_capacity_follows_the_number_of_ranks() {
        assert_eq!(ring_capacity(2, None), 1 << 20);
        assert_eq!(ring_capacity(8, None), 1 << 20);
        assert_eq!(ring_capacity(16, None), 1 << 18);
        assert_eq!(ring_capacity(64, None), 1 << 16);
        assert_eq!(ring_capacity(512, None), 1 << 16);
        assert_eq!(ring_capacity(1024, None), 1 << 14);
        assert_eq!(ring_capacity(2, Some(5000)), 4096);
        assert_eq!(ring_capacity(2, Some(0)), MIN_CAPACITY_BYTES);
        assert_eq!(ring_capacity(2, Some(usize::MAX)), MAX_CAPACITY_BYTES);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert!(Layout::new(0, 4096).is_none());
        assert!(Layout::new(MAX_LOCAL_RANKS + 1, 4096).is_none());
        assert!(Layout::new(2, 0).is_none());
        assert!(Layout::new(2, 4097).is_none());
        assert!(Layout::new(2, 1 << 40).is_none());
    }
}
