//! A piece of mapped memory that other threads or processes may write.
//!
//! Nothing here hands out references to plain bytes: only to atomics, which others may
//! change at any time, and raw pointers that the ring copies through.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

/// Alignment of all memory of this crate and of chunk boundaries: one cache
/// line, and one AVX-512 register.
pub(crate) const ALIGN_BYTES: usize = 64;
/// A page of the base size.
pub(crate) const PAGE_BYTES: usize = 4096;
/// A huge page of x86-64 and of arm64 with 4 KiB pages. Wrong elsewhere, it
/// costs speed only.
pub(crate) const HUGE_BYTES: usize = 2 << 20;

/// Memory mapped read-write, unmapped on drop.
pub(crate) struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the whole process, not to a thread, and is
// unmapped once, by drop. All access goes through atomics or through raw
// copies whose exclusivity the ring protocol establishes.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives out atomics and raw pointers only.
unsafe impl Sync for Region {}

/// Maps `bytes` read-write at `place`: those of `fd`, shared, or else memory of this process alone.
///
/// # Safety
///
/// What these flags replace belongs to the caller, and nothing refers to it.
unsafe fn map(
    place: *mut c_void,
    bytes: usize,
    fd: Option<BorrowedFd<'_>>,
    flags: MapFlags,
) -> rustix::io::Result<*mut c_void> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: handed on from the caller.
    unsafe {
        match fd {
            Some(fd) => rustix::mm::mmap(place, bytes, access, MapFlags::SHARED | flags, fd, 0),
            None => rustix::mm::mmap_anonymous(place, bytes, access, MapFlags::PRIVATE | flags),
        }
    }
}

impl Region {
    /// Zeroed memory of this process alone.
    pub(crate) fn anonymous(bytes: usize) -> std::io::Result<Region> {
        let bytes = bytes.max(1);
        // SAFETY: a new mapping at an address of the kernel's choice; it
        // overlaps nothing we own.
        let base = unsafe { map(std::ptr::null_mut(), bytes, None, MapFlags::empty()) }?;
        Region::adopt(base.cast(), bytes)
    }

    /// The first `bytes` of the object behind `fd`, shared with every process that maps
    /// it. The caller has checked that the object is that large and can no longer
    /// shrink (touching a truncated page would kill the process).
    pub(crate) fn shared(fd: BorrowedFd<'_>, bytes: usize) -> std::io::Result<Region> {
        // SAFETY: a new mapping at an address of the kernel's choice; it
        // overlaps nothing we own.
        let base = unsafe { map(std::ptr::null_mut(), bytes, Some(fd), MapFlags::empty()) }?;
        Region::adopt(base.cast(), bytes)
    }

    /// Like [`Region::shared`], or without `fd` [`Region::anonymous`], but on a huge-page boundary and
    /// without a claim on memory before it is touched.
    pub(crate) fn sparse(bytes: usize, fd: Option<BorrowedFd<'_>>) -> std::io::Result<Region> {
        let too_large = || std::io::Error::other("more than the address space");
        let wide = bytes.checked_add(HUGE_BYTES).ok_or_else(too_large)?;
        // SAFETY: a new mapping at an address of the kernel's choice, which
        // no code can access; it overlaps nothing we own.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                wide,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let head = start.addr().next_multiple_of(HUGE_BYTES) - start.addr();
        // SAFETY: `head` is less than the huge page that was added.
        let place = unsafe { start.byte_add(head) };
        // SAFETY: `head + bytes` lies within the reservation.
        let tail = unsafe { place.byte_add(bytes) };
        // SAFETY: both ends belong to the reservation and nothing refers to
        // them. A refusal costs address space only.
        unsafe {
            if head > 0 {
                let _ = rustix::mm::munmap(start, head);
            }
            let _ = rustix::mm::munmap(tail, HUGE_BYTES - head);
        }
        let over = MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: `place` is a reservation of our own, of these bytes,
        // that nothing refers to yet; it is replaced as a whole.
        match unsafe { map(place, bytes, fd, over) } {
            Ok(base) => Region::adopt(base.cast(), bytes),
            Err(e) => {
                // SAFETY: the reservation is ours and nothing refers to it.
                let _ = unsafe { rustix::mm::munmap(place, bytes) };
                Err(e.into())
            }
        }
    }

    fn adopt(base: *mut u8, bytes: usize) -> std::io::Result<Region> {
        NonNull::new(base)
            .map(|base| Region { base, bytes })
            .ok_or_else(|| std::io::Error::other("the kernel mapped memory at address zero"))
    }

    /// Size of the mapping.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The 32-bit atomic at `offset`.
    ///
    /// # Panics
    ///
    /// On an offset outside or misaligned: layouts are ours, so that is a bug.
    pub(crate) fn u32_at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && self.bytes >= 4 && offset <= self.bytes - 4);
        // SAFETY: in bounds and aligned (mappings start on a page); an atomic
        // may be written by others while the reference exists; the mapping
        // outlives `&self`.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The 64-bit atomic at `offset`; panics like [`Region::u32_at`].
    pub(crate) fn u64_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && self.bytes >= 8 && offset <= self.bytes - 8);
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Pointer to `bytes` bytes at `offset`; panics when they are not inside.
    pub(crate) fn bytes_at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset);
        // SAFETY: the offset is inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`; panics when they do not fit.
    ///
    /// # Safety
    ///
    /// By the protocol of this memory the place belongs to the caller now:
    /// no other thread or process reads or writes it. (A peer process that breaks the
    /// protocol can corrupt the bytes, not this process.)
    #[inline]
    pub(crate) unsafe fn write_at(&self, offset: usize, bytes: &[u8]) {
        let target = self.bytes_at(offset, bytes.len());
        // SAFETY: in bounds (checked above); `bytes` is a Rust reference and
        // hence never part of a region; exclusive, says the caller.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) }
    }

    /// Copies the bytes at `offset`; panics when they are not inside.
    ///
    /// # Safety
    ///
    /// By the protocol of this memory no thread or process writes the place now.
    #[inline]
    pub(crate) unsafe fn read_at(&self, offset: usize, into: &mut [u8]) {
        let source = self.bytes_at(offset, into.len());
        // SAFETY: as in `write_at`.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), into.len()) }
    }

    /// Touches pages `[offset, offset + bytes)` now rather than in the first
    /// operation (first touch of shared memory cost 0.5 ms per MiB). Best
    /// effort: old kernels refuse.
    pub(crate) fn populate(&self, offset: usize, bytes: usize) {
        let start = offset - offset % PAGE_BYTES;
        let end = (offset + bytes).min(self.bytes);
        if start < end {
            // SAFETY: populating changes no byte.
            let _ = unsafe { self.advise(start, end - start, Advice::LinuxPopulateWrite) };
        }
    }

    /// Makes huge pages of `[offset, offset + bytes)`, whole ones of the mapping, at once and for
    /// every process that maps them (Linux 6.1). Otherwise shared memory gets none where
    /// `shmem_enabled` is `never`, the usual setting. Best effort.
    pub(crate) fn join_pages(&self, offset: usize, bytes: usize) {
        /// `MADV_COLLAPSE` of `<linux/mman.h>`, which the libc crate names for some C libraries only.
        const COLLAPSE: libc::c_int = 25;
        let address = self.bytes_at(offset, bytes);
        // SAFETY: the range lies inside our mapping; joining pages changes no byte.
        let _ = unsafe { libc::madvise(address.cast(), bytes, COLLAPSE) };
    }

    /// Maps the whole pages of `[offset, offset + bytes)` at `at` too, in place of what is mapped there. After an error
    /// that is still there.
    ///
    /// # Safety
    ///
    /// The pages at `at` are a mapping of the caller's, or a part of one, and nothing uses them now.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    pub(crate) unsafe fn map_at(
        &self,
        offset: usize,
        bytes: usize,
        at: NonNull<u8>,
    ) -> std::io::Result<()> {
        let ours = self.bytes_at(offset, bytes).cast();
        // SAFETY: an old size of zero maps the same pages a second time, at an address of the kernel's choice.
        let second = unsafe { rustix::mm::mremap(ours, 0, bytes, MremapFlags::MAYMOVE) }?;
        let at: *mut c_void = at.as_ptr().cast();
        // SAFETY: the second mapping is ours alone; what it takes the place of is the caller's.
        let moved =
            unsafe { rustix::mm::mremap_fixed(second, bytes, bytes, MremapFlags::MAYMOVE, at) };
        let Err(error) = moved else {
            return Ok(());
        };
        let (access, how) = (ProtFlags::empty(), MapFlags::FIXED_NOREPLACE);
        // SAFETY: ours alone; and a mapping where there is none.
        let hole = unsafe {
            let _ = rustix::mm::munmap(second, bytes);
            rustix::mm::mmap_anonymous(at, bytes, access, MapFlags::PRIVATE | how)
        };
        if hole.is_ok() {
            // The kernel has unmapped the caller's memory and then had none for its own tables.
            std::process::abort();
        }
        Err(error.into())
    }

    /// Calls `madvise` for whole pages of this mapping.
    ///
    /// # Safety
    ///
    /// When the advice discards contents, nothing refers to them.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    pub(crate) unsafe fn advise(
        &self,
        offset: usize,
        bytes: usize,
        advice: Advice,
    ) -> std::io::Result<()> {
        let address = self.bytes_at(offset, bytes);
        // SAFETY: the range lies inside our mapping; the rest is the caller's.
        unsafe { rustix::mm::madvise(address.cast(), bytes, advice) }?;
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: we own the mapping, and every holder of pointers into it also holds
        // an `Arc` of this region.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
