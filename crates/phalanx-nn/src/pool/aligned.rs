//! Zeroed `f32` memory on a 64-byte boundary (one cache line, one AVX-512 vector).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment in bytes of every region, slab and parameter.
pub(crate) const ALIGN_BYTES: usize = 64;
/// The same in elements.
pub(crate) const ALIGN_ELEMS: usize = ALIGN_BYTES / size_of::<f32>();
/// From here on a region starts on a huge page's boundary, so that the system
/// can back it with huge pages where it is set to (first touch is several times
/// faster).
const HUGE_BYTES: usize = 2 << 20;

/// Rounds a length in elements up to whole cache lines.
pub(crate) const fn round_up(len: usize) -> usize {
    len.div_ceil(ALIGN_ELEMS) * ALIGN_ELEMS
}

/// A boxed slice of `f32`, 64-byte aligned, zeroed when made.
pub(crate) struct AlignedBuf {
    ptr: NonNull<f32>,
    len: usize,
}

// SAFETY: the buffer owns its memory, as `Box<[f32]>` does.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only hands out `&[f32]`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zeros. Aborts when the system has no memory, as `Vec` does.
    pub(crate) fn zeroed(len: usize) -> Self {
        let Some(layout) = Self::layout(len) else {
            return AlignedBuf {
                ptr: NonNull::dangling(),
                len: 0,
            };
        };
        // SAFETY: `layout` has a size above zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw.cast::<f32>()) else {
            handle_alloc_error(layout)
        };
        huge_pages(raw, layout);
        AlignedBuf { ptr, len }
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

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.ptr.as_ptr()
    }
}

/// Asks for huge pages: transforms walk dozens of planes at a time, more than
/// small pages' translations fit the processor. Refusal costs speed only.
fn huge_pages(raw: *mut u8, layout: Layout) {
    #[cfg(target_os = "linux")]
    if layout.size() >= HUGE_BYTES {
        let whole = layout.size() / HUGE_BYTES * HUGE_BYTES;
        // SAFETY: advice on `whole` bytes that `alloc_zeroed` has just given us,
        // from a boundary of huge pages on; it changes no contents.
        unsafe { libc::madvise(raw.cast(), whole, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (raw, layout);
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
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `zeroed` with the same layout.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_and_zero_and_may_be_empty() {
        for len in [0, 1, 17, 1 << 20] {
            let b = AlignedBuf::zeroed(len);
            assert_eq!(b.len(), len);
            assert!(len == 0 || (b.as_ptr() as usize).is_multiple_of(ALIGN_BYTES));
            assert!(b.iter().all(|&v| v == 0.0));
        }
    }
}
