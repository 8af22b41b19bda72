//! The first cause of a group's end, visible to every rank of the host.
//!
//! | phase   | meaning                                    | next    |
//! |---------|--------------------------------------------|---------|
//! | CLEAR   | the group works                            | WRITING |
//! | WRITING | the first to abort writes its cause        | SET     |
//! | SET     | the cause may be read; final               | –       |
//!
//! The state word holds the phase and, from WRITING on, the origin rank. `CLEAR
//! → WRITING` is a compare-exchange: first cause wins. A writer that dies in
//! WRITING leaves a poisoned group with an origin but without a cause.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::{Duration, Instant};

use super::layout::Layout;
use crate::region::Region;

/// Most bytes of a cause; longer ones are truncated.
pub const MAX_CAUSE_BYTES: usize = 400;

const CLEAR: u32 = 0;
const WRITING: u32 = 1;
const SET: u32 = 2;
/// The phase is in the low bits of the state, the origin rank above them.
const PHASE_BITS: u32 = 2;
const PHASE_MASK: u32 = (1 << PHASE_BITS) - 1;

/// How long a reader waits for a writer between WRITING and SET; writing takes
/// less than a microsecond unless the writer is descheduled or dead.
const WRITER_PATIENCE: Duration = Duration::from_millis(20);

/// Why a group ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poison {
    /// The rank whose failure came first.
    pub origin_rank: usize,
    /// What happened there, at most [`MAX_CAUSE_BYTES`] bytes.
    pub cause: String,
}

impl Poison {
    /// A poison whose cause is truncated to [`MAX_CAUSE_BYTES`] at a character boundary.
    pub fn new(origin_rank: usize, cause: impl Into<String>) -> Poison {
        let mut cause = cause.into();
        cause.truncate(cause.floor_char_boundary(MAX_CAUSE_BYTES));
        Poison { origin_rank, cause }
    }

    pub(crate) fn to_error(&self) -> crate::Error {
        crate::Error::aborted(self.origin_rank, &self.cause)
    }
}

/// Whether the group is poisoned: one load, for every round of every wait.
#[inline]
pub(super) fn is_set(region: &Region) -> bool {
    region.u32_at(Layout::POISON_STATE).load(SeqCst) != CLEAR
}

/// Records `poison` unless another cause was first. True if it won.
pub(super) fn set(region: &Region, poison: &Poison) -> bool {
    let state = region.u32_at(Layout::POISON_STATE);
    let origin = u32::try_from(poison.origin_rank).unwrap_or(u32::MAX) << PHASE_BITS;
    if state
        .compare_exchange(CLEAR, origin | WRITING, SeqCst, SeqCst)
        .is_err()
    {
        return false;
    }
    // Truncates a cause that was not made by `Poison::new`.
    let poison = Poison::new(poison.origin_rank, poison.cause.as_str());
    let mut words = [0_u8; MAX_CAUSE_BYTES];
    words[..poison.cause.len()].copy_from_slice(poison.cause.as_bytes());
    for (i, word) in words.as_chunks::<8>().0.iter().enumerate() {
        region
            .u64_at(Layout::POISON_CAUSE + 8 * i)
            .store(u64::from_le_bytes(*word), Relaxed);
    }
    region
        .u32_at(Layout::POISON_LENGTH)
        .store(poison.cause.len() as u32, Relaxed);
    state.store(origin | SET, SeqCst);
    true
}

/// The first cause, if the group is poisoned. Nothing in it is trusted.
pub(super) fn get(region: &Region) -> Option<Poison> {
    let state = region.u32_at(Layout::POISON_STATE);
    let first = state.load(Acquire);
    if first == CLEAR {
        return None;
    }
    let origin = (first >> PHASE_BITS) as usize;
    let start = Instant::now();
    while state.load(Acquire) & PHASE_MASK != SET {
        if start.elapsed() > WRITER_PATIENCE {
            return Some(Poison::new(origin, "it died before it could say why"));
        }
        std::thread::yield_now();
    }
    let mut bytes = [0_u8; MAX_CAUSE_BYTES];
    for (i, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = region
            .u64_at(Layout::POISON_CAUSE + 8 * i)
            .load(Relaxed)
            .to_le_bytes();
    }
    let length = region.u32_at(Layout::POISON_LENGTH).load(Relaxed) as usize;
    let text = String::from_utf8_lossy(&bytes[..length.min(MAX_CAUSE_BYTES)]);
    Some(Poison::new(origin, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn region() -> Region {
        Region::anonymous(Layout::new(1, 64).unwrap().total()).unwrap()
    }

    #[test]
    fn first_cause_wins() {
        let region = region();
        assert!(!is_set(&region));
        assert_eq!(get(&region), None);
        assert!(set(&region, &Poison::new(3, "out of memory")));
        assert!(!set(&region, &Poison::new(1, "rank 3 is gone")));
        assert!(is_set(&region));
        assert_eq!(get(&region), Some(Poison::new(3, "out of memory")));
    }

    #[test]
    fn exactly_one_of_many_wins_and_readers_see_no_mixture() {
        let region = region();
        let winners = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (region, winners) = (&region, &winners);
                scope.spawn(move || {
                    let cause = format!("{rank}").repeat(150);
                    if set(region, &Poison::new(rank, cause)) {
                        winners.fetch_add(1, SeqCst);
                    }
                    let seen = get(region).unwrap();
                    assert_eq!(seen.cause, format!("{}", seen.origin_rank).repeat(150));
                });
            }
        });
        assert_eq!(winners.load(SeqCst), 1);
    }

    #[test]
    fn long_causes_are_cut_at_a_character() {
        let poison = Poison::new(0, "é".repeat(250));
        assert_eq!(poison.cause.len(), 400);
        let poison = Poison::new(0, format!("x{}", "é".repeat(250)));
        assert_eq!(poison.cause.len(), 399);
    }

    #[test]
    fn lies_in_the_block_are_harmless() {
        let region = region();
        region.u32_at(Layout::POISON_LENGTH).store(u32::MAX, SeqCst);
        region.u64_at(Layout::POISON_CAUSE).store(u64::MAX, SeqCst);
        region.u32_at(Layout::POISON_STATE).store(SET, SeqCst);
        assert!(get(&region).unwrap().cause.len() <= MAX_CAUSE_BYTES);
    }

    #[test]
    fn a_writer_that_died_half_way_still_poisons() {
        let region = region();
        region
            .u32_at(Layout::POISON_STATE)
            .store((3 << PHASE_BITS) | WRITING, SeqCst);
        assert!(is_set(&region));
        assert!(!set(&region, &Poison::new(1, "echo")));
        let poison = get(&region).unwrap();
        assert_eq!(poison.origin_rank, 3);
        assert!(poison.cause.contains("died"));
    }
}
