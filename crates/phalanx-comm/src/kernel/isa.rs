//! The same loops compiled for several instruction sets, chosen at run time.

use super::Source;
use super::blocks;
use super::lane::{Acc, Lane, Max, Min, Op, Product, Sum};
use crate::ReduceOp;

/// What [`blocks`] offers for a type; lets plain types take the short path
/// for two sources while 16-bit ones do not have it.
pub(super) trait Fold: Lane {
    /// # Safety
    ///
    /// As [`super::fold`].
    unsafe fn run<O: Op<Self::Acc>>(
        into: *mut Self,
        sources: &[Source],
        count: usize,
        scale: Option<usize>,
    );
}

macro_rules! plain_fold {
    ($($t:ty),*) => {$(
        impl Fold for $t {
            #[inline(always)]
            unsafe fn run<O: Op<Self>>(into: *mut Self, sources: &[Source], count: usize, scale: Option<usize>) {
                let own: Source = into.cast_const().cast();
                // SAFETY: handed on from the caller; in the pair cases the
                // other source differs from `into`, hence is disjoint.
                unsafe {
                    match *sources {
                        [a, b] if a == own && b != own => blocks::fold_pair_in_place::<$t, O>(into, b, true, count, scale),
                        [a, b] if b == own && a != own => blocks::fold_pair_in_place::<$t, O>(into, a, false, count, scale),
                        _ => blocks::fold::<$t, O>(into, sources, count, scale),
                    }
                }
            }
        }
    )*};
}
plain_fold!(f32, f64, i32, i64, u8);

macro_rules! wide_fold {
    ($($t:ty),*) => {$(
        impl Fold for $t {
            #[inline(always)]
            unsafe fn run<O: Op<f32>>(into: *mut Self, sources: &[Source], count: usize, scale: Option<usize>) {
                // SAFETY: handed on from the caller.
                unsafe { blocks::fold::<$t, O>(into, sources, count, scale) }
            }
        }
    )*};
}
wide_fold!(half::f16, half::bf16);

/// Picks the operator, then the widest instruction set this processor has.
///
/// # Safety
///
/// As [`super::fold`].
pub(super) unsafe fn fold<T: Fold>(
    op: ReduceOp,
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale: Option<usize>,
) where
    T::Acc: Acc,
{
    // SAFETY: handed on from the caller.
    unsafe {
        match op {
            ReduceOp::Sum => widest::<T, Sum>(into, sources, count, None),
            ReduceOp::Mean => widest::<T, Sum>(into, sources, count, scale),
            ReduceOp::Product => widest::<T, Product>(into, sources, count, None),
            ReduceOp::Min => widest::<T, Min>(into, sources, count, None),
            ReduceOp::Max => widest::<T, Max>(into, sources, count, None),
        }
    }
}

/// # Safety
///
/// As [`super::fold`].
unsafe fn widest<T: Fold, O: Op<T::Acc>>(
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale: Option<usize>,
) {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the features were just detected; the rest is handed on.
            return unsafe { avx512::<T, O>(into, sources, count, scale) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was just detected; the rest is handed on.
            return unsafe { avx2::<T, O>(into, sources, count, scale) };
        }
    }
    // SAFETY: handed on from the caller.
    unsafe { baseline::<T, O>(into, sources, count, scale) }
}

/// # Safety
///
/// As [`super::fold`].
pub(super) unsafe fn baseline<T: Fold, O: Op<T::Acc>>(
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale: Option<usize>,
) {
    // SAFETY: handed on from the caller.
    unsafe { T::run::<O>(into, sources, count, scale) }
}

/// # Safety
///
/// As [`super::fold`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2<T: Fold, O: Op<T::Acc>>(
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale: Option<usize>,
) {
    // SAFETY: handed on from the caller.
    unsafe { T::run::<O>(into, sources, count, scale) }
}

/// # Safety
///
/// As [`super::fold`], and the processor has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn avx512<T: Fold, O: Op<T::Acc>>(
    into: *mut T,
    sources: &[Source],
    count: usize,
    scale: Option<usize>,
) {
    // SAFETY: handed on from the caller.
    unsafe { T::run::<O>(into, sources, count, scale) }
}
