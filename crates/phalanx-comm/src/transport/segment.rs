//! The memory that the ranks of one host share: poison, bells, seats, rings.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::layout::{CELL_BYTES, Channel, Layout};
use super::poison::{self, Poison};
use super::ring::{Consumer, Producer};
use crate::region::Region;
use crate::status::StatusCell;
use crate::wait::{Bell, FutexKind};

const MAGIC: u64 = u64::from_le_bytes(*b"PHLXSEG\0");
const VERSION: u32 = 5;

/// Up to this size, private memory is reserved in advance.
const SPARSE_ABOVE_BYTES: usize = 1 << 30;

/// A seat that no rank has taken yet.
#[cfg(any(test, fuzzing))]
const ABSENT: u32 = 0;
/// The rank takes part.
const PRESENT: u32 = 1;
/// The rank left in good order; its data stays readable.
const LEFT: u32 = 2;

/// A segment as one of its ranks sees it.
pub(crate) struct Segment {
    region: Arc<Region>,
    layout: Layout,
    futex: FutexKind,
}

impl Segment {
    /// A segment for threads of this process.
    pub(crate) fn private(layout: Layout) -> std::io::Result<Segment> {
        // With many ranks only few rings are used: no memory is reserved for the others.
        let region = match layout.total() {
            total if total > SPARSE_ABOVE_BYTES => Region::sparse(total, None)?,
            total => Region::anonymous(total)?,
        };
        let region = Arc::new(region);
        let segment = Segment {
            region,
            layout,
            futex: FutexKind::Private,
        };
        segment.write_header(&[0; 32]);
        Ok(segment)
    }

    /// The fresh segment in `region`, which other processes will map.
    pub(crate) fn create(region: Region, layout: Layout, nonce: &[u8; 32]) -> Segment {
        let segment = Segment {
            region: Arc::new(region),
            layout,
            futex: FutexKind::Shared,
        };
        segment.write_header(nonce);
        segment
    }

    /// The segment that another process made in `region`. The error describes what is
    /// wrong with it.
    pub(crate) fn open(region: Region, seats: usize, nonce: &[u8; 32]) -> Result<Segment, String> {
        if region.len() < Layout::NONCE + 32 {
            return Err(format!("the segment has only {} bytes", region.len()));
        }
        let magic = region.u64_at(Layout::MAGIC).load(Relaxed);
        let version = region.u32_at(Layout::VERSION).load(Relaxed);
        if (magic, version) != (MAGIC, VERSION) {
            return Err(format!(
                "the segment has magic {magic:#x} version {version}, not {MAGIC:#x} version {VERSION}"
            ));
        }
        for (i, word) in nonce.as_chunks::<8>().0.iter().enumerate() {
            if region.u64_at(Layout::NONCE + 8 * i).load(Relaxed) != u64::from_le_bytes(*word) {
                return Err("the segment belongs to another group (its nonce differs)".to_owned());
            }
        }
        let claimed = region.u32_at(Layout::SEATS).load(Relaxed) as usize;
        if claimed != seats {
            return Err(format!(
                "the segment has {claimed} seats where {seats} are expected"
            ));
        }
        // Each value is read once, so the checked value is the one used.
        let capacity = usize::try_from(region.u64_at(Layout::CAPACITY).load(Relaxed))
            .ok()
            .and_then(|capacity| Layout::new(seats, capacity));
        let Some(layout) = capacity else {
            return Err("the segment's ring size is impossible".to_owned());
        };
        if layout.total() != region.len() {
            return Err(format!(
                "the segment has {} bytes where its layout takes {}",
                region.len(),
                layout.total()
            ));
        }
        Ok(Segment {
            region: Arc::new(region),
            layout,
            futex: FutexKind::Shared,
        })
    }

    fn write_header(&self, nonce: &[u8; 32]) {
        let region = &self.region;
        region.u32_at(Layout::VERSION).store(VERSION, Relaxed);
        region
            .u32_at(Layout::SEATS)
            .store(self.layout.seats() as u32, Relaxed);
        region
            .u64_at(Layout::CAPACITY)
            .store(self.layout.capacity() as u64, Relaxed);
        for (i, word) in nonce.as_chunks::<8>().0.iter().enumerate() {
            region
                .u64_at(Layout::NONCE + 8 * i)
                .store(u64::from_le_bytes(*word), Relaxed);
        }
        // Others map the segment after a message that orders these stores.
        region.u64_at(Layout::MAGIC).store(MAGIC, SeqCst);
    }

    pub(crate) fn seats(&self) -> usize {
        self.layout.seats()
    }

    /// The bell of the rank on `seat` for collectives.
    pub(crate) fn bell(&self, seat: usize) -> Bell<'_> {
        self.bell_of(Channel::Collectives, seat)
    }

    /// Its bell for a channel.
    pub(crate) fn bell_of(&self, channel: Channel, seat: usize) -> Bell<'_> {
        let at = self.layout.bell(channel, seat);
        Bell::new(self.region.u32_at(at), self.futex)
    }

    /// The status of the rank on `seat`, for the others of this host.
    pub(crate) fn cell(&self, seat: usize) -> StatusCell {
        StatusCell::new(Arc::clone(&self.region), self.layout.seat_state(seat))
    }

    /// Wakes all ranks.
    pub(crate) fn ring_all(&self) {
        for seat in 0..self.seats() {
            self.bell(seat).ring();
            self.bell_of(Channel::Messages, seat).ring();
        }
    }

    /// Takes a seat for this process.
    pub(crate) fn sit(&self, seat: usize) {
        self.region
            .u32_at(self.layout.seat_state(seat))
            .store(PRESENT, SeqCst);
    }

    /// Leaves the seat in good order and wakes the ranks that still wait for us.
    pub(crate) fn leave(&self, seat: usize) {
        self.region
            .u32_at(self.layout.seat_state(seat))
            .store(LEFT, SeqCst);
        self.ring_all();
    }

    /// Whether the rank on `seat` left in good order.
    pub(crate) fn has_left(&self, seat: usize) -> bool {
        self.region
            .u32_at(self.layout.seat_state(seat))
            .load(SeqCst)
            == LEFT
    }

    /// Whether the rank on `seat` ever came.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn is_taken(&self, seat: usize) -> bool {
        self.region
            .u32_at(self.layout.seat_state(seat))
            .load(SeqCst)
            != ABSENT
    }

    /// Whether the group is poisoned; one load.
    #[inline]
    pub(crate) fn is_poisoned(&self) -> bool {
        poison::is_set(&self.region)
    }

    /// The first cause, if the group is poisoned.
    pub(crate) fn poisoned(&self) -> Option<Poison> {
        poison::get(&self.region)
    }

    /// Poisons the group on this host and wakes all ranks. True if `cause` is the
    /// first.
    pub(crate) fn poison(&self, cause: &Poison) -> bool {
        let first = poison::set(&self.region, cause);
        self.ring_all();
        first
    }

    /// Our ends of a channel's two rings between `mine` and `other`. To be taken once,
    /// while the segment is new.
    pub(crate) fn ends(&self, channel: Channel, mine: usize, other: usize) -> (Producer, Consumer) {
        let capacity = self.layout.capacity();
        let ring = |from, to| self.layout.ring(channel, from, to);
        (
            Producer::new(Arc::clone(&self.region), ring(mine, other), capacity),
            Consumer::new(Arc::clone(&self.region), ring(other, mine), capacity),
        )
    }

    /// Word `word` (of 16) of cell `which` (0 or 1) of the rank on `seat`.
    #[inline]
    pub(crate) fn cell_word(&self, seat: usize, which: usize, word: usize) -> &AtomicU64 {
        debug_assert!(word < CELL_BYTES / 8);
        self.region.u64_at(self.layout.cell(seat, which) + 8 * word)
    }

    /// The bytes of that cell from word `word` on.
    pub(crate) fn cell_bytes(&self, seat: usize, which: usize, word: usize) -> *mut u8 {
        let offset = 8 * word;
        self.region
            .bytes_at(self.layout.cell(seat, which) + offset, CELL_BYTES - offset)
    }

    /// Bytes of each stage.
    pub(crate) fn stage_capacity(&self) -> usize {
        self.layout.stage_capacity()
    }

    /// Stage `which` (0 or 1) of the rank on `seat`.
    pub(crate) fn stage(&self, seat: usize, which: usize) -> *mut u8 {
        self.region
            .bytes_at(self.layout.stage(seat, which), self.stage_capacity())
    }

    /// A copy of the first bytes: header, poison, seats.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn head(&self) -> Vec<u8> {
        (0..self.region.len().min(4096) / 8)
            .flat_map(|i| self.region.u64_at(8 * i).load(SeqCst).to_le_bytes())
            .collect()
    }

    /// Any write anywhere, as a hostile peer may do.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn scribble(&self, offset: usize, value: u64) {
        self.region.u64_at(offset).store(value, SeqCst);
    }

    /// Touches the pages that `mine` will write in collectives.
    pub(crate) fn populate(&self, mine: usize) {
        let (offset, bytes) = self.layout.rings_from(mine);
        self.region.populate(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Region {
        let layout = Layout::new(3, 4096).unwrap();
        Region::anonymous(layout.total()).unwrap()
    }

    fn written(nonce: &[u8; 32]) -> Region {
        let layout = Layout::new(3, 4096).unwrap();
        let segment = Segment::create(fresh(), layout, nonce);
        Arc::into_inner(segment.region).unwrap()
    }

    #[test]
    fn a_fresh_header_is_accepted() {
        let nonce = [7; 32];
        let segment = Segment::open(written(&nonce), 3, &nonce).unwrap();
        assert_eq!(segment.seats(), 3);
        assert!(!segment.is_taken(0));
    }

    #[test]
    fn every_lie_in_the_header_is_refused() {
        let nonce = [7; 32];
        assert!(Segment::open(fresh(), 3, &nonce).is_err(), "all zero");
        assert!(
            Segment::open(written(&[8; 32]), 3, &nonce).is_err(),
            "other nonce"
        );
        assert!(
            Segment::open(written(&nonce), 4, &nonce).is_err(),
            "other seats"
        );
        for capacity in [0_u64, 4097, 8192, u64::MAX] {
            let region = written(&nonce);
            region.u64_at(Layout::CAPACITY).store(capacity, SeqCst);
            assert!(
                Segment::open(region, 3, &nonce).is_err(),
                "capacity {capacity}"
            );
        }
        let region = written(&nonce);
        region.u32_at(Layout::VERSION).store(VERSION + 1, SeqCst);
        assert!(Segment::open(region, 3, &nonce).is_err(), "other version");
        assert!(
            Segment::open(Region::anonymous(32).unwrap(), 3, &nonce).is_err(),
            "too short"
        );
    }

    #[test]
    fn leaving_is_seen() {
        let segment = Segment::private(Layout::new(2, 64).unwrap()).unwrap();
        segment.sit(1);
        assert!(segment.is_taken(1) && !segment.has_left(1));
        segment.leave(1);
        assert!(segment.has_left(1));
    }
}
