//! Zeroed `f32` memory on a 64-byte boundary (one cache line, one AVX-512 vector).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment in bytes of every region, slab and parameter.
pub(crate) const ALIGN_BYTES: usize = 64;
/// The same in elements.
pub const ALIGN_ELEMS: usize = ALIGN_BYTES / size_of::<f32>();
/// From this size on a region starts on a huge page's boundary, so that the system can
/// back it with huge pages if configured to (first touch is several times faster).
const HUGE_BYTES: usize = 2 << 20;
/// The same in elements.
const HUGE_ELEMS: usize = HUGE_BYTES / size_of::<f32>();

/// Rounds a length in elements up to whole cache lines.
pub const fn round_up(len: usize) -> usize {
    len.div_ceil(ALIGN_ELEMS) * ALIGN_ELEMS
}

/// A boxed slice of `f32`, 64-byte aligned, zeroed when made.
#[derive(Debug)]
pub struct AlignedBuf {
    ptr: NonNull<f32>,
    len: usize,
}

// SAFETY: the buffer owns its memory, as `Box<[f32]>` does.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only hands out `&[f32]`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zeros; large ones get their pages when these are first written or read. Aborts
    /// when the system has no memory, as `Vec` does.
    pub fn zeroed(len: usize) -> Self {
        match Self::layout(len) {
            None => AlignedBuf {
                ptr: NonNull::dangling(),
                len: 0,
            },
            Some(layout) => {
                let got = Self::try_zeroed(len);
                got.unwrap_or_else(|| handle_alloc_error(layout))
            }
        }
    }

    /// The same, or `None` where the system refuses (`len` is not 0).
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let layout = Self::layout(len)?;
        let raw = if is_mapped(layout) {
            mapped::zeroed(layout)?
        } else {
            // SAFETY: `layout` has a size above zero.
            NonNull::new(unsafe { alloc_zeroed(layout) })?
        };
        let ptr = raw.cast::<f32>();
        Some(AlignedBuf { ptr, len })
    }

    fn layout(len: usize) -> Option<Layout> {
        if len == 0 {
            return None;
        }
        let bytes = len.saturating_mul(size_of::<f32>());
        let align = if bytes >= HUGE_BYTES {
            HUGE_BYTES
        } else {
            ALIGN_BYTES
        };
        match Layout::from_size_align(bytes, align) {
            Ok(l) => Some(l),
            // Larger than the address space: the same end as running out of memory.
            Err(_) => handle_alloc_error(Layout::new::<u8>()),
        }
    }

    /// Where its first element is.
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.ptr.as_ptr()
    }

    /// Asks the system to join the pages of elements `from .. to` to huge pages: transforms
    /// walk dozens of planes at a time, too many for the processor's cache of page translations. Asked for before the first touch, huge pages would delay the first
    /// step: they are cleared whole, one after the other, and a virtual machine may first have
    /// to get them from its host (0.4 s for 300 MiB here). An optimizer asks before, as its first step writes all of its state. A system that cannot join them at once
    /// (before Linux 6.1) does as it finds time, which takes minutes.
    pub fn join_pages(&self, from: usize, to: usize) {
        let to = to.min(self.len);
        if Self::layout(self.len).is_some_and(is_mapped) && from < to {
            let first = from / HUGE_ELEMS * HUGE_BYTES;
            let end = to.div_ceil(HUGE_ELEMS) * HUGE_BYTES;
            mapped::join_pages(self.ptr.cast(), first, end - first);
        }
    }
}

/// Whether the system maps this memory for us, instead of the allocator (which would
/// write zeros into every page of it at once, on one thread).
fn is_mapped(layout: Layout) -> bool {
    cfg!(target_os = "linux") && layout.size() >= HUGE_BYTES
}

#[cfg(target_os = "linux")]
mod mapped {
    use super::{HUGE_BYTES, Layout, NonNull};

    /// Whole huge pages that hold a layout.
    fn bytes(layout: Layout) -> Option<usize> {
        layout.size().checked_next_multiple_of(HUGE_BYTES)
    }

    /// Fresh pages, which read as zeros, from a boundary of huge pages on.
    pub(super) fn zeroed(layout: Layout) -> Option<NonNull<u8>> {
        let bytes = bytes(layout)?;
        let whole = bytes.checked_add(HUGE_BYTES)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // Address space costs nothing before it is written to.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping wherever the system likes, of nothing that is ours yet.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), whole, rights, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let raw = raw.cast::<u8>();
        let before = raw.align_offset(HUGE_BYTES);
        // SAFETY: `before` is less than a huge page, by which the mapping is longer than `bytes`.
        let start = unsafe { raw.add(before) };
        // SAFETY: `bytes` from `start` on lie inside the mapping.
        let end = unsafe { start.add(bytes) };
        for (from, len) in [(raw, before), (end, HUGE_BYTES - before)] {
            if len > 0 {
                // SAFETY: whole pages of our own mapping that nothing refers to yet.
                unsafe { libc::munmap(from.cast(), len) };
            }
        }
        NonNull::new(start)
    }

    /// `MADV_COLLAPSE` of `<linux/mman.h>`, which the libc crate names for some C libraries only.
    const COLLAPSE: libc::c_int = 25;

    /// Makes huge pages of `bytes` from `first` on; both are whole huge pages of the mapping at `at`.
    pub(super) fn join_pages(at: NonNull<u8>, first: usize, bytes: usize) {
        for advice in [libc::MADV_HUGEPAGE, COLLAPSE] {
            // Refusal costs speed only.
            // SAFETY: advice on memory that the caller owns; it changes no contents.
            unsafe { libc::madvise(at.as_ptr().add(first).cast(), bytes, advice) };
        }
    }

    /// Frees what `zeroed` returned for the same layout.
    ///
    /// # Safety
    /// The memory is not used any more.
    pub(super) unsafe fn free(at: NonNull<u8>, layout: Layout) {
        if let Some(bytes) = bytes(layout) {
            // SAFETY: what `zeroed` left of its mapping, which is not used any more.
            unsafe { libc::munmap(at.as_ptr().cast(), bytes) };
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod mapped {
    use super::{Layout, NonNull};

    pub(super) fn zeroed(_: Layout) -> Option<NonNull<u8>> {
        None
    }

    pub(super) fn join_pages(_: NonNull<u8>, _: usize, _: usize) {}

    /// # Safety
    /// Never called: nothing is mapped here.
    pub(super) unsafe fn free(_: NonNull<u8>, _: Layout) {}
}

impl Deref for AlignedBuf {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `ptr` is valid for `len` initialised elements (dangling only
        // with `len == 0`) and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`; `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        let mut b = AlignedBuf::zeroed(self.len);
        b.copy_from_slice(self);
        b
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        let Some(layout) = Self::layout(self.len) else {
            return;
        };
        if is_mapped(layout) {
            // SAFETY: mapped in `try_zeroed` with the same layout; its owner is gone.
            unsafe { mapped::free(self.ptr.cast(), layout) }
        } else {
            // SAFETY: allocated in `try_zeroed` with the same layout.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_and_zero_and_may_be_empty() {
        for len in [0, 1, 17, 1 << 19, (1 << 19) + 1, 1 << 20] {
            let b = AlignedBuf::zeroed(len);
            assert_eq!(b.len(), len);
            assert!(len == 0 || (b.as_ptr() as usize).is_multiple_of(ALIGN_BYTES));
            assert!(b.iter().all(|&v| v == 0.0));
        }
    }
}
