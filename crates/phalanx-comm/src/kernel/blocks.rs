//! The fold over one run of memory, block by block.

use super::Source;
use super::lane::{Acc, Lane, Op};

/// Elements per block: 8 KiB of f32 accumulators, a quarter of the smallest
/// first-level cache in use, so that accumulator and source block both fit.
const BLOCK_ELEMS: usize = 2048;

/// The 64-byte aligned accumulator.
#[repr(align(64))]
struct Aligned<A>([A; BLOCK_ELEMS]);

/// Folds `count` elements; see [`super::fold`] for what must hold.
///
/// # Safety
///
/// As [`super::fold`].
#[inline(always)]
pub(super) unsafe fn fold<T: Lane, O: Op<T::Acc>>(
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    let scale = scale_by_inverse_of.map(T::Acc::inverse_of);
    let mut acc = Aligned([T::Acc::default(); BLOCK_ELEMS]);
    let mut start = 0;
    while start < count {
        let len = BLOCK_ELEMS.min(count - start);
        let acc = &mut acc.0[..len];
        for (i, source) in sources.iter().enumerate() {
            // SAFETY: `start + len <= count` elements are readable and nobody
            // writes them. A source may equal `into`, but no reference to
            // `into` exists before the store below, after this one is gone.
            let src = unsafe { std::slice::from_raw_parts(source.cast::<T>().add(start), len) };
            if i == 0 {
                T::load(src, acc);
            } else {
                T::accumulate::<O>(src, acc);
            }
        }
        if let Some(scale) = scale {
            for a in acc.iter_mut() {
                *a = a.product(scale);
            }
        }
        // SAFETY: `start + len <= count` elements are writable, nobody else
        // touches them, and no source slice is alive.
        let dst = unsafe { std::slice::from_raw_parts_mut(into.add(start), len) };
        T::store(acc, dst);
        start += len;
    }
}

/// Two sources of a type that is its own accumulator, one of them the
/// destination: by far the commonest fold (two ranks), done in one pass.
///
/// # Safety
///
/// As [`super::fold`] with sources `[into, other]`, or `[other, into]` when
/// `into_first` is false.
#[inline(always)]
pub(super) unsafe fn fold_pair_in_place<T: Lane<Acc = T> + Acc, O: Op<T>>(
    into: *mut T,
    other: Source,
    into_first: bool,
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    // SAFETY: `count` elements are writable and nobody else touches them.
    let dst = unsafe { std::slice::from_raw_parts_mut(into, count) };
    // SAFETY: `other` is disjoint from `into` and nobody writes it.
    let src = unsafe { std::slice::from_raw_parts(other.cast::<T>(), count) };
    match (into_first, scale_by_inverse_of.map(T::inverse_of)) {
        (true, None) => {
            for (d, x) in dst.iter_mut().zip(src) {
                *d = O::apply(*d, *x);
            }
        }
        (true, Some(scale)) => {
            for (d, x) in dst.iter_mut().zip(src) {
                *d = O::apply(*d, *x).product(scale);
            }
        }
        (false, None) => {
            for (d, x) in dst.iter_mut().zip(src) {
                *d = O::apply(*x, *d);
            }
        }
        (false, Some(scale)) => {
            for (d, x) in dst.iter_mut().zip(src) {
                *d = O::apply(*x, *d).product(scale);
            }
        }
    }
}
