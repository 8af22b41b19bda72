//! A caching pool: buffers are reused, so that nothing is allocated from the second training
//! step on.
//!
//! Small buffers have a free list for each size class, four per power of two (at
//! most a quarter is wasted); their starts are staggered by a cache line. Large ones are
//! cut from a [`Region`].

use std::ptr::NonNull;

use super::region::{Extent, Region};
use phalanx_kernels::aligned::{ALIGN_ELEMS, AlignedBuf};

/// A buffer handed out by a [`Pool`]. Not `Clone`, no `Drop`: the tape gives it
/// back with [`Pool::put`]. Its contents are arbitrary.
///
/// The memory lives until the pool is dropped; the tape owns both, and never
/// lets a reference outlive its borrow of the step.
pub(crate) struct Buf {
    ptr: NonNull<f32>,
    len: usize,
    place: Place,
}

/// The place of a buffer's memory.
#[derive(Clone, Copy)]
enum Place {
    Small { class: u32, slab: u32 },
    Large { region: u32, extent: Extent },
}

// SAFETY: a `Buf` is the only access to its memory, like a `Box<[f32]>`.
unsafe impl Send for Buf {}

impl Buf {
    /// Its elements.
    pub(crate) fn slice(&self) -> &[f32] {
        // SAFETY: `ptr` is valid for `len` initialised elements of a slab or region that
        // outlives every `Buf` (see the type), and no other `Buf` has this memory.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// Its elements, to be written.
    pub(crate) fn slice_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `slice`; `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// The memory as doubles, half as many.
    pub(crate) fn f64_mut(&mut self) -> &mut [f64] {
        let len = self.len / 2;
        // SAFETY: as in `slice_mut`; buffers start on a cache line, and any
        // bytes make valid `f64`s and back.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), len) }
    }

    /// The first `len` bytes of the memory, for small integers.
    pub(crate) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len * size_of::<f32>());
        // SAFETY: as in `slice_mut`; any bytes make valid `f32`s and back.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), len) }
    }
}

/// One allocation of the system, reused for buffers of one class.
struct Slab {
    memory: AlignedBuf,
    /// First element handed out: the stagger.
    start: usize,
    class: usize,
}

/// The pool of one tape.
#[derive(Default)]
pub(crate) struct Pool {
    slabs: Vec<Slab>,
    /// Free slabs by class.
    free: Vec<Vec<u32>>,
    /// One, unless address space is scarce.
    regions: Vec<Region>,
    /// Large buffers in use.
    large: usize,
    allocations: u64,
    bytes: u64,
    /// Overwrite buffers when they come back, to show up anything that still
    /// reads them. For tests.
    poison: bool,
}

impl Pool {
    /// A buffer of exactly `len` elements with arbitrary contents.
    pub(crate) fn get(&mut self, len: usize) -> Buf {
        let (ptr, place) = if len <= LARGEST_SMALL {
            self.small(class_of(len))
        } else {
            self.large(len)
        };
        // SAFETY: derived from the pointer of a slab or region, which is not null.
        let ptr = unsafe { NonNull::new_unchecked(ptr) };
        Buf { ptr, len, place }
    }

    fn small(&mut self, class: usize) -> (*mut f32, Place) {
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        let slab = match self.free[class].pop() {
            Some(s) => s,
            None => self.allocate(class),
        };
        let s = &mut self.slabs[slab as usize];
        let start = s.start;
        // SAFETY: the slab holds the class's size plus the stagger, so `start`
        // is inside it.
        let ptr = unsafe { s.memory.as_mut_ptr().add(start) };
        let class = class as u32;
        (ptr, Place::Small { class, slab })
    }

    fn large(&mut self, len: usize) -> (*mut f32, Place) {
        self.large += 1;
        let mut index = 0;
        loop {
            if index == self.regions.len() {
                self.regions.push(Region::new(len));
            }
            let region = &mut self.regions[index];
            let before = region.high_water();
            if let Some(extent) = region.take(len) {
                let grown = region.high_water() - before;
                self.allocations += u64::from(grown > 0);
                self.bytes += (grown * size_of::<f32>()) as u64;
                let place = Place::Large {
                    region: index as u32,
                    extent,
                };
                return (region.at(extent), place);
            }
            index += 1;
        }
    }

    /// A buffer of zeros.
    pub(crate) fn get_zeroed(&mut self, len: usize) -> Buf {
        let mut b = self.get(len);
        // Of bytes, which is fast also where this crate is not optimised.
        b.bytes_mut(len * size_of::<f32>()).fill(0);
        b
    }

    fn allocate(&mut self, class: usize) -> u32 {
        let start = self.slabs.len() % 16 * ALIGN_ELEMS;
        let memory = AlignedBuf::zeroed(size_of_class(class) + start);
        self.allocations += 1;
        self.bytes += (memory.len() * size_of::<f32>()) as u64;
        self.slabs.push(Slab {
            memory,
            start,
            class,
        });
        self.slabs.len() as u32 - 1
    }

    /// Takes a buffer back.
    pub(crate) fn put(&mut self, mut buf: Buf) {
        if self.poison {
            buf.slice_mut().fill(f32::NAN);
        }
        match buf.place {
            Place::Small { class, slab } => self.free[class as usize].push(slab),
            Place::Large { region, extent } => {
                self.large -= 1;
                self.regions[region as usize].put(extent);
            }
        }
    }

    /// Takes back everything, also buffers that were lost on an error path
    /// (a dropped `Buf` cannot be used any more). The caller holds none.
    pub(crate) fn reclaim(&mut self) {
        if self.in_use() == 0 {
            return;
        }
        self.free.iter_mut().for_each(Vec::clear);
        for (i, s) in self.slabs.iter().enumerate() {
            self.free[s.class].push(i as u32);
        }
        self.large = 0;
        self.regions.iter_mut().for_each(Region::reset);
    }

    /// Before a step: asks the system for huge pages for the memory that earlier steps
    /// used. Returns whether there was any.
    pub(crate) fn promote_to_huge_pages(&mut self) -> bool {
        let regions = self.regions.iter_mut().map(Region::promote_to_huge_pages);
        regions.fold(false, |any, new| any | new)
    }

    /// How often new memory was needed.
    pub(crate) fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Bytes handed out so far (of large buffers: the peak).
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Buffers in use.
    pub(crate) fn in_use(&self) -> usize {
        self.large + self.slabs.len() - self.free.iter().map(Vec::len).sum::<usize>()
    }

    /// Whether buffers that come back are overwritten with NaN, for tests.
    pub(crate) fn set_poison(&mut self, on: bool) {
        self.poison = on;
    }
}

/// Largest buffer of a size class, in elements. Beyond it, what classes cannot use of each
/// other would add up.
const LARGEST_SMALL: usize = 1 << 14;
/// Smallest class, in elements.
const SMALLEST: usize = 256;

/// Class of a length: 4 per power of two from [`SMALLEST`] up.
fn class_of(len: usize) -> usize {
    if len <= SMALLEST {
        return 0;
    }
    let units = (len - 1) / SMALLEST; // >= 1
    let power = units.ilog2() as usize;
    // Position within the power of two, in quarters (rounded up by `len - 1`).
    let quarter = ((len - 1) * 4 / (SMALLEST << power)) - 4;
    power * 4 + quarter + 1
}

/// Elements of a class: the largest length that `class_of` puts there.
fn size_of_class(class: usize) -> usize {
    if class == 0 {
        return SMALLEST;
    }
    let (power, quarter) = ((class - 1) / 4, (class - 1) % 4);
    (SMALLEST << power) / 4 * (5 + quarter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_fit_tightly() {
        let mut last = 0;
        for len in 0..20_000 {
            let c = class_of(len);
            assert!(c == last || c == last + 1, "{len}");
            last = c;
            let size = size_of_class(c);
            assert!(
                size >= len && (c == 0 || size * 4 <= len * 5 + 4),
                "{len} {size}"
            );
            assert!(c == 0 || size_of_class(c - 1) < len);
        }
    }

    #[test]
    fn buffers_are_reused_and_counted() {
        let mut p = Pool::default();
        let a = p.get(1000);
        let at = a.slice().as_ptr();
        assert_eq!(at as usize % 64, 0);
        assert_eq!((p.allocations(), p.in_use()), (1, 1));
        p.put(a);
        let b = p.get(1020);
        assert_eq!(b.slice().as_ptr(), at);
        assert_eq!(b.slice().len(), 1020);
        let c = p.get_zeroed(1000);
        assert_eq!(p.allocations(), 2);
        assert_ne!(
            c.slice().as_ptr() as usize % 4096,
            b.slice().as_ptr() as usize % 4096
        );
        p.put(b);
        p.put(c);
        assert_eq!(p.in_use(), 0);
        // Large ones of one size serve another.
        let bytes = p.bytes();
        let (a, b) = (p.get(50_000), p.get(70_000));
        assert_eq!(p.in_use(), 2);
        assert_ne!(
            a.slice().as_ptr() as usize % 4096,
            b.slice().as_ptr() as usize % 4096
        );
        let (held, allocations) = (p.bytes(), p.allocations());
        assert!(held >= bytes + 120_000 * 4 && held < bytes + 123_000 * 4);
        p.put(a);
        p.put(b);
        let c = p.get(120_000);
        assert_eq!((p.bytes(), p.allocations()), (held, allocations));
        p.put(c);
        // One that was lost comes back.
        let _ = p.get(90_000);
        p.reclaim();
        assert_eq!(p.in_use(), 0);
        p.set_poison(true);
        let z = p.get(0);
        assert!(z.slice().is_empty());
        p.put(z);
    }
}
