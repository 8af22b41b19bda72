//! The loop of all kernels: one pass over the sources, accumulators in
//! registers from the first load to the last store.

use super::Source;
use super::vector::{Bits, Float, Op, Vector, Wide};

/// The arguments of one [`super::fold_to_many`].
pub(super) struct Job<'a> {
    pub(super) into: &'a [*mut u8],
    pub(super) sources: &'a [Source],
    pub(super) count: usize,
    /// For the mean; otherwise unused.
    pub(super) world: usize,
}

/// The vectors of an instruction set.
pub(super) trait Set {
    type F32: Wide;
    type F64: Float<Elem = f64>;
    type I8: Bits<Elem = i8>;
    type U8: Bits<Elem = u8>;
    type I32: Bits<Elem = i32>;
    type I64: Bits<Elem = i64>;

    /// [`pass`] compiled for the instruction set.
    ///
    /// # Safety
    ///
    /// As [`super::fold_to_many`] for elements of type `V::Elem`, and the
    /// processor has the instruction set.
    unsafe fn run<V: Vector, O: Op<V>>(job: &Job<'_>);
}

/// Vectors in flight: enough to hide the latency of four additions in a row
/// and few enough for sixteen registers with both operands of a min and its
/// mask.
const AT_ONCE: usize = 4;

/// From this many bytes per source on, sources are not in a private cache of the core,
/// and prefetching pays off (figures in README.md).
const FAR_BYTES: usize = 256 << 10;
/// Prefetch distance. Half and twice the distance were no better.
const AHEAD_BYTES: usize = 1024;

/// Prefetches the `bytes` at `at`, which may be any address.
#[inline(always)]
pub(super) fn ask_for(at: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..bytes.div_ceil(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction; it changes nothing and
        // ignores addresses without memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line * 64).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, bytes);
}

/// Runs one job with vectors of one kind.
///
/// # Safety
///
/// As [`super::fold_to_many`] for elements of type `V::Elem`, and the
/// processor has the instruction set. Must be inlined into a function that is
/// compiled for it.
#[inline(always)]
pub(super) unsafe fn pass<V: Vector, O: Op<V>>(job: &Job<'_>) {
    // SAFETY: handed on from the caller.
    unsafe {
        // Literal lengths unroll the loops over the sources: two ranks, with
        // the result on one or on both, are by far the commonest job.
        match (job.into, job.sources) {
            (&[d], &[a, b]) => run::<V, O>(&[d], &[a, b], job),
            (&[d, e], &[a, b]) => run::<V, O>(&[d, e], &[a, b], job),
            (into, sources) => run::<V, O>(into, sources, job),
        }
    }
}

/// # Safety
///
/// As [`pass`]; `into` and `sources` are the job's.
#[inline(always)]
unsafe fn run<V: Vector, O: Op<V>>(into: &[*mut u8], sources: &[*const u8], job: &Job<'_>) {
    let [first, rest @ ..] = sources else { return };
    let count = job.count;
    let mut at = 0;
    // SAFETY: handed on from the caller for the state. Every access is to
    // elements below `count`, and all sources are read at a place before any
    // destination, which may be one of them, is written there.
    unsafe {
        let state = O::state(job.world);
        let step = AT_ONCE * V::LANES;
        let elem = size_of::<V::Elem>();
        let far = count * elem >= FAR_BYTES;
        // AMD's processors see far enough ahead, and have this extension.
        #[cfg(target_arch = "x86_64")]
        let far = far && !std::arch::is_x86_feature_detected!("sse4a");
        let ahead = |source: *const u8, at: usize| {
            if far {
                ask_for(source.wrapping_add(at * elem + AHEAD_BYTES), step * elem);
            }
        };
        while count - at >= step {
            let place = |lane: usize| at + lane * V::LANES;
            ahead(*first, at);
            let from = first.cast::<V::Elem>();
            let mut acc = [V::load(from.add(at)); AT_ONCE];
            for (lane, a) in acc.iter_mut().enumerate().skip(1) {
                *a = V::load(from.add(place(lane)));
            }
            for source in rest {
                ahead(*source, at);
                let from = source.cast::<V::Elem>();
                for (lane, a) in acc.iter_mut().enumerate() {
                    *a = O::apply(*a, V::load(from.add(place(lane))));
                }
            }
            for a in &mut acc {
                *a = O::finish(*a, state);
            }
            for destination in into {
                let to = destination.cast::<V::Elem>();
                for (lane, a) in acc.iter().enumerate() {
                    a.store(to.add(place(lane)));
                }
            }
            at += step;
        }
        while count - at >= V::LANES {
            let mut acc = V::load(first.cast::<V::Elem>().add(at));
            for source in rest {
                acc = O::apply(acc, V::load(source.cast::<V::Elem>().add(at)));
            }
            acc = O::finish(acc, state);
            for destination in into {
                acc.store(destination.cast::<V::Elem>().add(at));
            }
            at += V::LANES;
        }
        let left = count - at;
        if left > 0 {
            let mut acc = V::load_part(first.cast::<V::Elem>().add(at), left);
            for source in rest {
                let x = V::load_part(source.cast::<V::Elem>().add(at), left);
                acc = O::apply(acc, x);
            }
            acc = O::finish(acc, state);
            for destination in into {
                acc.store_part(destination.cast::<V::Elem>().add(at), left);
            }
        }
    }
}
