//! Counts the bytes that collectives in shared memory move.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that one rank's collectives in shared memory have moved so far.
///
/// Collectives on registered buckets copy nothing (beyond small ones, which
/// are copied once because that is faster).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveBytes {
    /// Copied into memory that the others read, and out of it.
    pub staged_bytes: u64,
    /// Copied directly from input to output.
    pub moved_bytes: u64,
    /// Read by reductions, all ranks' inputs together.
    pub folded_bytes: u64,
}

/// Written by the rank's executor, readable from any thread.
#[derive(Default)]
pub(crate) struct Counters {
    staged: AtomicU64,
    moved: AtomicU64,
    folded: AtomicU64,
}

impl Counters {
    pub(super) fn staged(&self, bytes: usize) {
        self.staged.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn folded(&self, bytes: usize) {
        self.folded.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> CollectiveBytes {
        CollectiveBytes {
            staged_bytes: self.staged.load(Ordering::Relaxed),
            moved_bytes: self.moved.load(Ordering::Relaxed),
            folded_bytes: self.folded.load(Ordering::Relaxed),
        }
    }
}
