//! Making and opening memfds.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use super::super::layout::Layout;
use super::super::segment::Segment;
use crate::limits;
use crate::region::Region;

/// The seals required before mapping: of the size, and of the seals.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A new segment and the descriptor to pass on. Errors are texts for the store, where
/// other ranks read why there is no shared memory.
pub(crate) fn create(layout: Layout, nonce: &[u8; 32]) -> Result<(OwnedFd, Segment), String> {
    let fd = sealed_memfd("phalanx", layout.total())?;
    let region = Region::shared(fd.as_fd(), layout.total()).map_err(|e| format!("mmap: {e}"))?;
    Ok((fd, Segment::create(region, layout, nonce)))
}

/// Opens a segment that another process made, after checking that no process can change
/// its size any more and that it is the expected one.
pub(crate) fn open(fd: &OwnedFd, seats: usize, nonce: &[u8; 32]) -> Result<Segment, String> {
    let size = sealed_size(fd, Layout::MAX_TOTAL)?;
    let region = Region::shared(fd.as_fd(), size).map_err(|e| format!("mmap: {e}"))?;
    Segment::open(region, seats, nonce)
}

/// A memfd of `bytes` zeros whose size no process can change.
pub(crate) fn sealed_memfd(name: &str, bytes: usize) -> Result<OwnedFd, String> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Old kernels do not know NOEXEC_SEAL; some new ones insist on it.
    let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(name, flags))
        .map_err(|e| format!("memfd_create: {}", limits::explain(&e.into())))?;
    limits::check_file_size(bytes).map_err(|e| e.to_string())?;
    rustix::fs::ftruncate(&fd, bytes as u64)
        .map_err(|e| format!("no {bytes} bytes of shared memory: {e}"))?;
    rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|e| format!("sealing: {e}"))?;
    Ok(fd)
}

/// Size of a memfd that another process made, after checking that no process can change
/// it any more and that it is at most `most`.
pub(crate) fn sealed_size(fd: &OwnedFd, most: usize) -> Result<usize, String> {
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|e| format!("the descriptor is not a memfd: {e}"))?;
    if !seals.contains(SEALS) {
        return Err("the segment is not sealed against a change of its size".to_owned());
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err("the segment is sealed against writing".to_owned());
    }
    let size = rustix::fs::fstat(fd)
        .map_err(|e| format!("fstat: {e}"))?
        .st_size;
    usize::try_from(size)
        .ok()
        .filter(|size| (1..=most).contains(size))
        .ok_or_else(|| format!("the segment has an impossible size of {size} bytes"))
}
