//! Aligned memory: [`Bucket`] for callers, [`Scratch`] for the executor, and
//! the [`Arena`] for registered buckets.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(target_os = "linux")]
use rustix::mm::Advice;

mod arena;

pub(crate) use self::arena::Arena;

use self::arena::Lease;
use crate::Element;
use crate::region::{ALIGN_BYTES, HUGE_BYTES, PAGE_BYTES};

/// From this size on, private memory begins on a huge page's boundary, so that the
/// system can back it with huge pages if it is configured to.
const LARGE_BYTES: usize = HUGE_BYTES;

/// Owned bytes, which begin as zeros and are 64-byte aligned unless they are another owner's.
struct Block {
    start: NonNull<u8>,
    bytes: usize,
    place: Place,
}

/// The kind of memory a block is in, and how it is freed.
enum Place {
    Heap,
    /// In memory that other ranks map. The lease gives it back.
    Arena(#[expect(dead_code, reason = "held for its drop")] Lease),
    /// The same, of a [`Registered`], and its owner, which is dropped first.
    Moved(
        #[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>,
        #[expect(dead_code, reason = "held for its drop")] Arc<Lease>,
    ),
    /// Memory of another library, which its owner frees.
    Other(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>),
}

impl Block {
    fn zeroed(bytes: usize) -> Self {
        let place = Place::Heap;
        if bytes == 0 {
            // SAFETY: ALIGN_BYTES is not zero. The address is never read.
            let start =
                unsafe { NonNull::new_unchecked(std::ptr::without_provenance_mut(ALIGN_BYTES)) };
            return Block {
                start,
                bytes,
                place,
            };
        }
        let layout = Self::layout(bytes);
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(raw) else {
            handle_alloc_error(layout)
        };
        // Before zeroing, which allocates the pages.
        huge_pages(raw, bytes);
        // SAFETY: `bytes` bytes that were just allocated.
        unsafe { raw.write_bytes(0, bytes) };
        Block {
            start,
            bytes,
            place,
        }
    }

    fn layout(bytes: usize) -> Layout {
        let align = if bytes >= LARGE_BYTES {
            HUGE_BYTES
        } else {
            ALIGN_BYTES
        };
        match Layout::from_size_align(bytes, align) {
            Ok(layout) => layout,
            // As `Vec` does: a size beyond `isize::MAX` is a capacity
            // overflow of the caller, not a condition to handle.
            Err(_) => panic!("a bucket of {bytes} bytes exceeds the address space"),
        }
    }
}

/// Asks for huge pages in `bytes` that were just allocated at `start`. Refused, it costs speed.
fn huge_pages(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= LARGE_BYTES {
        let whole = bytes / HUGE_BYTES * HUGE_BYTES;
        // SAFETY: this advice changes no byte, and these are the block's own, whole huge pages of them.
        let _ = unsafe { rustix::mm::madvise(start.cast(), whole, Advice::LinuxHugepage) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

impl Drop for Block {
    fn drop(&mut self) {
        if matches!(self.place, Place::Heap) && self.bytes != 0 {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
        }
    }
}

// SAFETY: a `Block` owns its bytes, like `Box<[u8]>`. Other ranks touch those
// in an arena only while an operation owns the block (shm/README.md).
unsafe impl Send for Block {}
// SAFETY: shared access to a `Block` only reads.
unsafe impl Sync for Block {}

/// Memory for collectives: owned, and unless made by [`from_owner`](Bucket::from_owner) 64-byte aligned and zeroed.
///
/// Buckets made by [`ProcessGroup::bucket`](crate::ProcessGroup::bucket) are
/// *registered* where all ranks of the group share memory: the others read and
/// write them in place, and nothing is copied. The operations that do so take
/// the bucket itself, by value or as `&mut Bucket`; a slice of it is ordinary
/// memory to them.
///
/// An asynchronous operation takes the bucket *by value* and gives it back
/// when it is finished. Hence no reference into it can exist while other
/// ranks read or write it; the compiler refuses this:
///
/// ```compile_fail,E0382
/// use phalanx_comm::{Bucket, Call, ProcessGroup, ReduceOp};
/// fn step(group: &ProcessGroup, mut bucket: Bucket<f32>) {
///     let work = group.all_reduce_async(bucket, ReduceOp::Mean, Call::default());
///     bucket[0] = 1.0; // still in flight
///     work.wait().unwrap();
/// }
/// ```
///
/// The same with the write after `wait` compiles:
///
/// ```
/// use phalanx_comm::{Bucket, Call, ProcessGroup, ReduceOp};
/// fn step(group: &ProcessGroup, bucket: Bucket<f32>) {
///     let work = group.all_reduce_async(bucket, ReduceOp::Mean, Call::default());
///     let mut bucket = work.wait().unwrap();
///     bucket[0] = 1.0;
/// }
/// ```
///
/// After a failed operation the bucket is gone: its contents would be
/// undefined anyway.
pub struct Bucket<T: Element> {
    block: Block,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Bucket<T> {
    /// A bucket of `len_elems` zeros.
    ///
    /// # Panics
    ///
    /// When the bytes exceed the address space, as `Vec` does.
    pub fn zeroed(len_elems: usize) -> Self {
        let Some(bytes) = len_elems.checked_mul(size_of::<T>()) else {
            panic!("a bucket of {len_elems} elements exceeds the address space")
        };
        Bucket {
            block: Block::zeroed(bytes),
            len: len_elems,
            elements: PhantomData,
        }
    }

    /// A bucket of zeros in `arena`, or on the heap when it does not fit.
    pub(crate) fn in_arena(arena: Option<&Arc<Arena>>, len_elems: usize) -> Self {
        let bytes = len_elems.checked_mul(size_of::<T>());
        match bytes.and_then(|bytes| arena?.lease(bytes)) {
            // SAFETY: the lease is of so many bytes, zeroed, and ends with the bucket.
            Some(lease) => unsafe { Self::at(lease.start(), len_elems, Place::Arena(lease)) },
            None => Self::zeroed(len_elems),
        }
    }

    /// The elements that are at `start`. They exist, so that they are no more than the address space.
    ///
    /// # Safety
    ///
    /// As [`from_owner`](Self::from_owner), with `place` for the owner.
    unsafe fn at(start: NonNull<u8>, len_elems: usize, place: Place) -> Self {
        Bucket {
            block: Block {
                start,
                bytes: len_elems * size_of::<T>(),
                place,
            },
            len: len_elems,
            elements: PhantomData,
        }
    }

    /// Whether the other ranks of the group that made the bucket can read and write it
    /// in place.
    pub fn is_registered(&self) -> bool {
        matches!(self.block.place, Place::Arena(_) | Place::Moved(..))
    }

    /// A bucket of `len_elems` elements in memory that belongs to `owner`, such as a tensor of another library, which is
    /// dropped with the bucket. The other ranks cannot read and write it in place, and it may have any alignment that `T`
    /// has.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped, `start` is the address of `len_elems` initialised elements, aligned for `T`, which stay
    /// where they are. Nothing else writes them, nor reads them if an operation writes them.
    pub unsafe fn from_owner(
        start: NonNull<T>,
        len_elems: usize,
        owner: impl Any + Send + Sync,
    ) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::at(start.cast(), len_elems, Place::Other(Box::new(owner))) }
    }

    /// A bucket with a copy of `elements`.
    pub fn from_slice(elements: &[T]) -> Self {
        let mut bucket = Self::zeroed(elements.len());
        bucket.copy_from_slice(elements);
        bucket
    }
}

impl<T: Element> Deref for Bucket<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were allocated, aligned to 64 ≥ align_of T,
        // and initialised with zeros, a valid value of every element type; or the caller of `from_owner` says so.
        unsafe { std::slice::from_raw_parts(self.block.start.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Bucket<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the bucket owns the block exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.block.start.as_ptr().cast(), self.len) }
    }
}

impl<T: Element> Default for Bucket<T> {
    /// An empty bucket; allocates nothing.
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl<T: Element> fmt::Debug for Bucket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket<{}>({} elements)", T::DTYPE, self.len)
    }
}

/// Memory of another library, such as the storage of a tensor, that the other ranks of a group read and write in place; see
/// [`ProcessGroup::register`](crate::ProcessGroup::register).
pub struct Registered {
    lease: Arc<Lease>,
    bytes: usize,
}

impl Registered {
    /// # Safety
    ///
    /// As [`ProcessGroup::register`](crate::ProcessGroup::register).
    pub(crate) unsafe fn new(
        arena: Option<&Arc<Arena>>,
        start: NonNull<u8>,
        bytes: usize,
    ) -> Option<Registered> {
        if !start.addr().get().is_multiple_of(PAGE_BYTES) {
            return None;
        }
        let lease = arena?.lease(bytes)?;
        // SAFETY: as this function's.
        unsafe { lease.move_from(start) }.then(|| Registered {
            lease: Arc::new(lease),
            bytes,
        })
    }

    /// A [registered](Bucket::is_registered) bucket of the `len_elems` elements that lie `offset_bytes` behind the start;
    /// `None` where they do not lie inside, or not on a line of the cache (64 bytes). `owner`, whose memory this is, is
    /// dropped with the bucket.
    ///
    /// # Safety
    ///
    /// As [`Bucket::from_owner`].
    pub unsafe fn bucket<T: Element>(
        &self,
        offset_bytes: usize,
        len_elems: usize,
        owner: impl Any + Send + Sync,
    ) -> Option<Bucket<T>> {
        let bytes = len_elems.checked_mul(size_of::<T>())?;
        let end = offset_bytes.checked_add(bytes)?;
        if end > self.bytes || !offset_bytes.is_multiple_of(ALIGN_BYTES) {
            return None;
        }
        // SAFETY: inside the piece.
        let start = unsafe { self.lease.start().add(offset_bytes) };
        let place = Place::Moved(Box::new(owner), Arc::clone(&self.lease));
        // SAFETY: inside the piece, which `place` holds; the rest is the caller's.
        Some(unsafe { Bucket::at(start, len_elems, place) })
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({} bytes)", self.bytes)
    }
}

/// Working memory of the executor. Grows, never shrinks, keeps no contents.
pub(crate) struct Scratch {
    block: Block,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Scratch {
            block: Block::zeroed(0),
        }
    }

    /// At least `bytes` bytes; earlier contents are lost when it grows.
    pub(crate) fn reserve(&mut self, bytes: usize) -> (*mut u8, usize) {
        if bytes > self.block.bytes {
            // The old block is freed first, so that the peak is one block.
            self.block = Block::zeroed(0);
            self.block = Block::zeroed(bytes);
        }
        (self.block.start.as_ptr(), self.block.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_zeroed_and_aligned() {
        for len in [0usize, 1, 15, 16, 17, 1000] {
            let b = Bucket::<f64>::zeroed(len);
            assert_eq!(b.len(), len);
            assert!(b.iter().all(|x| *x == 0.0));
            assert_eq!(b.as_ptr() as usize % ALIGN_BYTES, 0);
        }
    }

    #[test]
    fn large_ones_begin_on_huge_pages() {
        for bytes in [LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES - 64] {
            let b = Bucket::<u8>::zeroed(bytes);
            assert!(b.iter().all(|x| *x == 0));
            assert_eq!(b.as_ptr() as usize % HUGE_BYTES, 0);
        }
    }

    #[test]
    fn from_slice_copies() {
        let mut b = Bucket::from_slice(&[1i32, 2, 3]);
        b[1] = 7;
        assert_eq!(&b[..], &[1, 7, 3]);
    }

    #[test]
    fn memory_of_another_owner_is_used_where_it_lies() {
        let mut theirs = [1i32, 2, 3, 4];
        let start = NonNull::from(&mut theirs[1..]).cast();
        let owner = Arc::new(());
        // SAFETY: three elements of the array, which outlives the bucket and which nothing else uses meanwhile.
        let mut bucket = unsafe { Bucket::<i32>::from_owner(start, 3, Arc::clone(&owner)) };
        bucket[2] = 7;
        assert_eq!(&bucket[..], [2, 3, 7]);
        assert!(!bucket.is_registered());
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(bucket);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(theirs, [1, 2, 3, 7]);
    }

    #[test]
    fn scratch_only_grows() {
        let mut s = Scratch::new();
        assert_eq!(s.reserve(100).1, 100);
        let (p, n) = s.reserve(10);
        assert_eq!((s.reserve(100).0, n), (p, 100));
        assert_eq!(s.reserve(200).1, 200);
    }
}
