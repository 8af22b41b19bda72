//! The thread pool: fixed chunks, any number of threads, the same bits.
//!
//! *Order*: work is cut into chunks by shape alone, never by the number of
//! threads. Threads take chunks in any order; an output element belongs to one
//! chunk, or its partial sums are folded in chunk order afterwards.

mod helpers;
mod scratch;

pub use scratch::scratch;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use helpers::Helpers;

/// How many threads compute. `Threads(1)` uses the calling thread only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(pub usize);

/// The threads that compute: the calling one and its helpers. Clones share them; the default
/// is the calling thread alone.
#[derive(Clone, Default)]
pub struct ThreadPool(Option<Arc<Helpers>>);

impl ThreadPool {
    /// Starts the threads. If the system refuses some, the pool works with fewer:
    /// the results are the same.
    #[doc(hidden)]
    pub fn new(threads: Threads) -> Self {
        let helpers = (threads.0 > 1).then(|| Helpers::new(threads.0 - 1));
        ThreadPool(helpers.filter(|h| h.count() > 0).map(Arc::new))
    }

    /// How many threads there are, with the calling one.
    #[doc(hidden)]
    pub fn count(&self) -> usize {
        1 + self.0.as_ref().map_or(0, |helpers| helpers.count())
    }

    /// Runs `f(0)`, …, `f(chunks - 1)`, each once, in any order.
    #[doc(hidden)]
    pub fn run(&self, chunks: usize, f: impl Fn(usize) + Sync) {
        match &self.0 {
            Some(helpers) if chunks > 1 => helpers.run(chunks, f),
            _ => (0..chunks).for_each(f),
        }
    }

    /// Cuts `data` into pieces of `piece` elements (the last may be shorter)
    /// and runs `f(first element, piece)` on each.
    #[doc(hidden)]
    pub fn split<T: Send + Sync>(
        &self,
        data: &mut [T],
        piece: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let len = data.len();
        let piece = piece.max(1);
        let shared = Disjoint::new(data);
        self.run(len.div_ceil(piece), |i| {
            let range = i * piece..((i + 1) * piece).min(len);
            // SAFETY: chunk i alone touches this range.
            f(range.start, unsafe { shared.range(range) });
        });
    }

    /// As [`split`](Self::split) for slices of equal length, cut in the same places; an empty
    /// slice gives every piece an empty one.
    #[doc(hidden)]
    pub fn split_all<T: Send + Sync, const N: usize>(
        &self,
        data: [&mut [T]; N],
        piece: usize,
        f: impl Fn(usize, [&mut [T]; N]) + Sync,
    ) {
        let len = data.iter().map(|d| d.len()).max().unwrap_or(0);
        assert!(data.iter().all(|d| d.is_empty() || d.len() == len));
        let piece = piece.max(1);
        let shared = data.map(Disjoint::new);
        self.run(len.div_ceil(piece), |i| {
            let range = i * piece..((i + 1) * piece).min(len);
            let parts = shared.each_ref().map(|s| {
                let own = if s.len() == 0 { 0..0 } else { range.clone() };
                // SAFETY: chunk i alone touches this range of this slice.
                unsafe { s.range(own) }
            });
            f(range.start, parts);
        });
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ThreadPool").field(&self.count()).finish()
    }
}

/// Elements of one piece of an element-wise pass: 64 KiB.
pub const PIECE: usize = 16 * 1024;

/// A slice that chunks write to in ranges which do not overlap.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `range`, whose caller promises disjointness, so
// sharing it between threads is like handing out `split_at_mut` parts.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub fn new(data: &'a mut [T]) -> Self {
        Disjoint {
            ptr: data.as_mut_ptr(),
            len: data.len(),
            of: PhantomData,
        }
    }

    /// Elements of the whole slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No other live reference may overlap `range`.
    #[allow(clippy::mut_from_ref)] // that is the type's purpose, see `# Safety`
    pub unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice (checked), exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// Pointer to element `at`, for kernels that write strided blocks.
    /// Dereferencing it needs the same promise as [`range`](Self::range).
    pub(crate) fn pointer(&self, at: usize) -> *mut T {
        assert!(at <= self.len);
        self.ptr.wrapping_add(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 4] {
            let pool = ThreadPool::new(Threads(threads));
            assert_eq!(pool.count(), threads);
            for chunks in [0, 1, 2, 7, 100] {
                let hits: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
                pool.run(chunks, |i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
            let mut v = vec![0usize; 103];
            pool.split(&mut v, 10, |first, part| {
                for (i, x) in part.iter_mut().enumerate() {
                    *x = first + i;
                }
            });
            assert!(v.iter().enumerate().all(|(i, &x)| i == x));
            let (mut a, mut b) = ([0usize; 21], [0usize; 21]);
            pool.split_all([&mut a, &mut b, &mut []], 5, |first, [a, b, none]| {
                assert!(none.is_empty() && a.len() == b.len());
                a.fill(first);
                b.fill(a.len());
            });
            assert_eq!((a[4], a[5], a[20]), (0, 5, 20));
            assert_eq!((b[19], b[20]), (5, 1));
        }
    }
}
