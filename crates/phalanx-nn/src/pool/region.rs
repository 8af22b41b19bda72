//! One large block of memory, cut into buffers of any size and joined again: gradients can
//! use the memory of values of any other size.
//!
//! The lowest place that is large enough is taken, so that a step that repeats gets the
//! same places again, and pages beyond the highest are never touched.

use phalanx_kernels::aligned::{ALIGN_ELEMS, AlignedBuf, round_up};

/// Between two buffers: arrays that are walked together must not lie a
/// multiple of 4 KiB apart, and sizes often are one. An odd number of cache lines.
const GAP: usize = 15 * ALIGN_ELEMS;

/// Elements whose pages become huge between two steps (256 MiB: some 50 ms).
const HUGE_AT_ONCE: usize = 1 << 26;

/// A place in a region, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: usize,
    len: usize,
}

impl Extent {
    fn end(self) -> usize {
        self.start + self.len
    }
}

/// A stretch of address space, of which the first part has been used.
pub(super) struct Region {
    memory: AlignedBuf,
    /// Free places below `high_water`, ascending; no two of them touch.
    free: Vec<Extent>,
    /// The end of the highest element ever handed out.
    high_water: usize,
    /// Pages up to this element are huge.
    huge: usize,
}

impl Region {
    /// A region for at least `len` elements: as much address space as the system
    /// grants, of which only what is used becomes memory.
    pub(super) fn new(len: usize) -> Self {
        let need = Self::taken_by(len);
        let memory = RESERVES
            .iter()
            .filter(|&&r| r > need)
            .find_map(|&r| AlignedBuf::try_zeroed(r));
        Region {
            memory: memory.unwrap_or_else(|| AlignedBuf::zeroed(need)),
            free: Vec::new(),
            high_water: 0,
            huge: 0,
        }
    }

    /// Elements that a buffer of `len` elements takes.
    fn taken_by(len: usize) -> usize {
        round_up(len) + GAP
    }

    /// A place for `len` elements, if there is one.
    pub(super) fn take(&mut self, len: usize) -> Option<Extent> {
        let len = Self::taken_by(len);
        let fits = self.free.iter().position(|e| e.len >= len);
        if let Some(i) = fits {
            let e = &mut self.free[i];
            let start = e.start;
            if e.len == len {
                self.free.remove(i);
            } else {
                e.start += len;
                e.len -= len;
            }
            return Some(Extent { start, len });
        }
        let last = self.free.last().filter(|e| e.end() == self.high_water);
        let start = last.map_or(self.high_water, |e| e.start);
        let end = start.checked_add(len)?;
        if end > self.memory.len() {
            return None;
        }
        if start < self.high_water {
            self.free.pop();
        }
        self.high_water = end;
        Some(Extent { start, len })
    }

    /// Takes a place back.
    pub(super) fn put(&mut self, e: Extent) {
        let i = self.free.partition_point(|f| f.start < e.start);
        let joins_next = self.free.get(i).is_some_and(|n| e.end() == n.start);
        let joins_last = i > 0 && self.free[i - 1].end() == e.start;
        match (joins_last, joins_next) {
            (true, true) => {
                self.free[i - 1].len += e.len + self.free[i].len;
                self.free.remove(i);
            }
            (true, false) => self.free[i - 1].len += e.len,
            (false, true) => {
                self.free[i].start = e.start;
                self.free[i].len += e.len;
            }
            (false, false) => self.free.insert(i, e),
        }
    }

    /// Takes everything back.
    pub(super) fn reset(&mut self) {
        self.free.clear();
        if self.high_water > 0 {
            self.free.push(Extent {
                start: 0,
                len: self.high_water,
            });
        }
    }

    /// Between two steps: asks for huge pages for the memory in use, a part at a time.
    /// Returns whether there was any.
    pub(super) fn promote_to_huge_pages(&mut self) -> bool {
        let end = self.high_water.min(self.huge + HUGE_AT_ONCE);
        let new = end > self.huge;
        self.memory.join_pages(self.huge, end);
        self.huge = end;
        new
    }

    /// Elements that have ever been handed out at once.
    pub(super) fn high_water(&self) -> usize {
        self.high_water
    }

    /// The first element of a place.
    pub(super) fn at(&mut self, e: Extent) -> *mut f32 {
        assert!(e.end() <= self.memory.len());
        // SAFETY: inside the memory, as just asserted.
        unsafe { self.memory.as_mut_ptr().add(e.start) }
    }
}

/// Sizes of regions to ask for, in elements: 256 GiB, and less where the system
/// limits address space. Elsewhere than on Linux untouched memory may not be free.
const RESERVES: &[usize] = if cfg!(all(target_os = "linux", target_pointer_width = "64")) {
    &[1 << 36, 1 << 32, 1 << 28]
} else {
    &[1 << 24]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_joined_and_the_same_ones_come_again() {
        let mut r = Region::new(10);
        let lens = [1000, 16, 2000, 500];
        let one: Vec<Extent> = lens.iter().filter_map(|&l| r.take(l)).collect();
        assert_eq!(one.len(), 4);
        let high_water = r.high_water();
        for pair in one.windows(2) {
            assert_eq!(pair[0].end(), pair[1].start);
            assert_eq!(pair[1].start % ALIGN_ELEMS, 0);
        }
        // A gap of two joins to one for a larger buffer, in whatever order they return.
        r.put(one[2]);
        r.put(one[1]);
        let larger = r.take(2016).expect("room");
        assert_eq!((larger.start, r.high_water()), (one[1].start, high_water));
        r.put(larger);
        r.put(one[3]);
        r.put(one[0]);
        assert_eq!(r.free.len(), 1);
        // Larger than what is free at the end: it grows there.
        let whole = r.take(100_000).expect("room");
        assert_eq!(whole.start, 0);
        assert!(r.high_water() > high_water);
        r.put(whole);
        let again: Vec<Extent> = lens.iter().filter_map(|&l| r.take(l)).collect();
        assert_eq!(one, again);
        r.reset();
        assert_eq!(
            r.take(4),
            Some(Extent {
                start: 0,
                len: 16 + GAP
            })
        );
    }

    #[test]
    fn a_full_region_says_so() {
        let mut r = Region {
            memory: AlignedBuf::zeroed(4096),
            free: Vec::new(),
            high_water: 0,
            huge: 0,
        };
        let all = r.take(4096 - GAP).expect("room");
        assert_eq!(r.take(1), None);
        r.put(all);
        assert_eq!(r.take(4096), None);
        let half = r.take(1024).expect("room");
        assert_eq!(r.take(3072), None);
        let at = r.at(half);
        // SAFETY: the place is ours and lies in the region.
        unsafe { at.write(1.0) };
        assert_eq!(r.memory[half.start], 1.0);
    }
}
