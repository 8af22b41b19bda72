//! The allocator of one rank's registered buckets.
//!
//! The bookkeeping is private to the rank; only the bytes are shared. Large
//! pieces are taken from the low end, next to each other and as huge pages
//! where the kernel has them; small ones from the high end, so that they do
//! not cost a huge page each. Pieces given back return to the system at once.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::Advice;

use crate::region::{HUGE_BYTES, PAGE_BYTES};
use crate::transport::Arenas;

/// From this size on a piece is worth huge pages.
const LARGE_BYTES: usize = 256 << 10;

/// One rank's own arena.
pub(crate) struct Arena {
    arenas: Arc<Arenas>,
    seat: usize,
    /// Free pieces by where they begin, with their size. Neighbours are merged.
    free: Mutex<BTreeMap<usize, usize>>,
    /// Set when the group has failed: a peer that has not noticed yet may still write
    /// to memory that was in flight, so no memory is used a second time.
    closed: AtomicBool,
}

impl Arena {
    pub(crate) fn new(arenas: Arc<Arenas>, seat: usize) -> Arc<Arena> {
        let free = BTreeMap::from([(0, arenas.each_bytes())]);
        Arc::new(Arena {
            arenas,
            seat,
            free: Mutex::new(free),
            closed: AtomicBool::new(false),
        })
    }

    /// No memory is handed out or given back from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// `bytes` zeros, or `None` when there is no room or no memory.
    pub(crate) fn lease(self: &Arc<Self>, bytes: usize) -> Option<Lease> {
        if bytes == 0 || self.closed.load(Ordering::SeqCst) {
            return None;
        }
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let offset = take(&mut self.lock(), bytes)?;
        // From here on a failure gives the piece back.
        let lease = Lease {
            arena: Arc::clone(self),
            offset,
            bytes,
        };
        let (region, base) = self.arenas.of(self.seat);
        let start = offset / HUGE_BYTES * HUGE_BYTES;
        let end = (offset + bytes)
            .next_multiple_of(HUGE_BYTES)
            .min(self.arenas.each_bytes());
        if bytes >= LARGE_BYTES {
            // SAFETY: this advice changes no byte. Refused, it costs speed.
            let _ = unsafe { region.advise(base + start, end - start, Advice::LinuxHugepage) };
        }
        // A lack of memory is noticed here, where the heap can be used instead;
        // noticed at a store it would be a SIGBUS.
        // SAFETY: this advice changes no byte.
        let populated = unsafe { region.advise(base + offset, bytes, Advice::LinuxPopulateWrite) };
        match populated {
            // Kernels before 5.14 do not know it.
            Err(e) if e.raw_os_error() != Some(libc::EINVAL) => None,
            _ => {
                if bytes >= LARGE_BYTES {
                    region.join_pages(base + start, end - start);
                }
                Some(lease)
            }
        }
    }

    fn give_back(&self, offset: usize, bytes: usize) {
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        let (region, base) = self.arenas.of(self.seat);
        let advice = if self.arenas.is_shared() {
            Advice::LinuxRemove
        } else {
            Advice::LinuxDontNeed
        };
        // SAFETY: the lease is being dropped, and no operation owns it: nothing refers
        // to these bytes. Removed pages read as zeros afterwards.
        if unsafe { region.advise(base + offset, bytes, advice) }.is_err() {
            // SAFETY: as above; the piece lies within our arena.
            unsafe { region.bytes_at(base + offset, bytes).write_bytes(0, bytes) };
        }
        give(&mut self.lock(), offset, bytes);
    }

    /// Bytes not handed out.
    #[cfg(test)]
    fn free_bytes(&self) -> usize {
        self.lock().values().sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        // Only our own code runs under this lock, and it does not panic.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// First fit from the low end for large pieces, from the high end for small.
fn take(free: &mut BTreeMap<usize, usize>, bytes: usize) -> Option<usize> {
    let fits = |(_, size): &(&usize, &usize)| **size >= bytes;
    if bytes >= LARGE_BYTES {
        let (&start, &size) = free.iter().find(fits)?;
        free.remove(&start);
        if size > bytes {
            free.insert(start + bytes, size - bytes);
        }
        Some(start)
    } else {
        let (&start, &size) = free.iter().rfind(fits)?;
        free.remove(&start);
        if size > bytes {
            free.insert(start, size - bytes);
        }
        Some(start + size - bytes)
    }
}

/// Puts a piece back and merges it with its free neighbours.
fn give(free: &mut BTreeMap<usize, usize>, mut start: usize, mut bytes: usize) {
    if let Some((&before, &size)) = free.range(..start).next_back()
        && before + size == start
    {
        free.remove(&before);
        start = before;
        bytes += size;
    }
    if let Some(size) = free.remove(&(start + bytes)) {
        bytes += size;
    }
    free.insert(start, bytes);
}

/// A piece of an arena; given back when dropped.
pub(crate) struct Lease {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

impl Lease {
    /// Where it begins: on a page, and zero at first.
    pub(crate) fn start(&self) -> NonNull<u8> {
        let (region, base) = self.arena.arenas.of(self.arena.seat);
        let start = region.bytes_at(base + self.offset, self.bytes);
        // SAFETY: an address inside a mapping is not null.
        unsafe { NonNull::new_unchecked(start) }
    }

    /// Moves what is in the mapped pages at `at` here, and maps this piece there. `false` leaves the contents where they
    /// were.
    ///
    /// # Safety
    ///
    /// At `at` begins a mapping as long as this piece, which nothing else uses now, or another process ever. Those pages
    /// are not used after this is dropped.
    pub(crate) unsafe fn move_from(&self, at: NonNull<u8>) -> bool {
        if !self.arena.arenas.is_shared() {
            return false;
        }
        let (region, base) = self.arena.arenas.of(self.arena.seat);
        let (ours, bytes) = (self.start().as_ptr(), self.bytes);
        // SAFETY: as many bytes at both places, which do not overlap; both are the caller's alone.
        unsafe { ours.copy_from_nonoverlapping(at.as_ptr(), bytes) };
        // SAFETY: as this function's.
        let mapped = unsafe { region.map_at(base + self.offset, bytes, at) };
        if mapped.is_ok() {
            let (at, all) = (at.as_ptr().cast(), Advice::LinuxPopulateWrite);
            // SAFETY: populating changes no byte of this mapping. Refused, it costs speed.
            let _ = unsafe { rustix::mm::madvise(at, bytes, all) };
        }
        mapped.is_ok()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.arena.give_back(self.offset, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(bytes: usize) -> Arc<Arena> {
        let mut meshes = crate::transport::thread_mesh_with(2, 64, Some(bytes));
        let memory = meshes.remove(1).memory().unwrap();
        Arena::new(memory.arenas.unwrap(), 1)
    }

    #[test]
    fn pieces_are_disjoint_and_all_come_back() {
        let arena = arena(8 << 20);
        let all = arena.free_bytes();
        let mut leases = Vec::new();
        for bytes in [1, 5000, 300 << 10, 64, 1 << 20, 4096, 2 << 20] {
            leases.push(arena.lease(bytes).unwrap());
        }
        let mut ranges: Vec<_> = leases
            .iter()
            .map(|l| (l.offset, l.offset + l.bytes))
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0), "{ranges:?}");
        // In an order that needs merging on both sides.
        for i in [3, 0, 0, 2, 0, 1, 0] {
            leases.remove(i);
        }
        assert_eq!(arena.free_bytes(), all);
        assert_eq!(arena.lock().len(), 1);
    }

    #[test]
    fn memory_is_zero_also_the_second_time() {
        let arena = arena(4 << 20);
        for bytes in [100, 1 << 20] {
            for _ in 0..3 {
                let lease = arena.lease(bytes).unwrap();
                // SAFETY: the lease is ours alone and `bytes` long.
                let memory =
                    unsafe { std::slice::from_raw_parts_mut(lease.start().as_ptr(), bytes) };
                assert!(memory.iter().all(|b| *b == 0));
                memory.fill(7);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let arena = arena(2 << 20);
        assert!(arena.lease(usize::MAX).is_none());
        assert!(arena.lease((2 << 20) + 1).is_none());
        let all = arena.lease(2 << 20).unwrap();
        assert!(arena.lease(1).is_none());
        drop(all);
        assert!(arena.lease(1).is_some());
    }

    #[test]
    fn a_closed_arena_uses_nothing_twice() {
        let arena = arena(2 << 20);
        let lease = arena.lease(100).unwrap();
        let free = arena.free_bytes();
        arena.close();
        drop(lease);
        assert_eq!(arena.free_bytes(), free);
        assert!(arena.lease(1).is_none());
    }
}
