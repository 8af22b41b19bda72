//! Fold kernels: the arithmetic of reductions.
//!
//! [`fold`] computes, element by element, the left fold of its sources in the
//! order given. The work is cut into blocks that fit the first-level cache;
//! one source after another is folded into an accumulator block, which is
//! scaled, rounded and stored once. So 16-bit types are widened to f32, kept
//! there over *all* sources, and rounded once.
//!
//! The loops are plain; the compiler vectorises them. [`isa`] compiles them a
//! second and third time for wider registers and picks at run time. Nothing
//! is ever contracted to a fused multiply-add or reassociated, so all copies
//! give the same bits.

mod blocks;
mod isa;
mod lane;

use crate::{DType, ReduceOp};
use half::{bf16, f16};

/// A read-only run of elements given by its address.
pub(crate) type Source = *const u8;

/// Folds `count` elements of every source, in order, into `into`.
/// `scale_by_inverse_of` is the world size when a mean is to be finished.
///
/// # Safety
///
/// * `into` and all sources point to `count` initialised elements of `dtype`,
///   aligned for it.
/// * `into` is either disjoint from a source or exactly equal to it.
/// * Nobody writes the sources or touches `into` meanwhile.
/// * `op` supports `dtype`, and `sources` is not empty.
pub(crate) unsafe fn fold(
    dtype: DType,
    op: ReduceOp,
    into: *mut u8,
    sources: &[Source],
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    debug_assert!(!sources.is_empty() && op.supports(dtype));
    if count == 0 {
        return;
    }
    macro_rules! typed {
        ($t:ty) => {
            // SAFETY: handed on from the caller; the type is the one `dtype`
            // names.
            unsafe { isa::fold::<$t>(op, into.cast::<$t>(), sources, count, scale_by_inverse_of) }
        };
    }
    match dtype {
        DType::F32 => typed!(f32),
        DType::F64 => typed!(f64),
        DType::F16 => typed!(f16),
        DType::Bf16 => typed!(bf16),
        DType::I32 => typed!(i32),
        DType::I64 => typed!(i64),
        DType::U8 => typed!(u8),
    }
}

#[cfg(test)]
mod tests;
