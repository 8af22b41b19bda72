//! What one element does: widening, the operators, rounding.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An accumulator type with its arithmetic.
pub(super) trait Acc: Copy + Default + 'static {
    fn sum(self, x: Self) -> Self;
    fn product(self, x: Self) -> Self;
    fn min(self, x: Self) -> Self;
    fn max(self, x: Self) -> Self;
    /// Multiplies by `1/world`, computed in this precision.
    fn inverse_of(world: usize) -> Self;
}

macro_rules! float_acc {
    ($($t:ty),*) => {$(
        impl Acc for $t {
            #[inline(always)]
            fn sum(self, x: Self) -> Self { self + x }
            #[inline(always)]
            fn product(self, x: Self) -> Self { self * x }
            // `x != x` lets a NaN in; once in, no comparison is true, so it
            // stays. Bitwise `|` keeps the loop free of branches.
            #[inline(always)]
            #[allow(clippy::eq_op)]
            fn min(self, x: Self) -> Self { if (x < self) | (x != x) { x } else { self } }
            #[inline(always)]
            #[allow(clippy::eq_op)]
            fn max(self, x: Self) -> Self { if (x > self) | (x != x) { x } else { self } }
            #[inline(always)]
            fn inverse_of(world: usize) -> Self { 1.0 / world as $t }
        }
    )*};
}
float_acc!(f32, f64);

macro_rules! integer_acc {
    ($($t:ty),*) => {$(
        impl Acc for $t {
            #[inline(always)]
            fn sum(self, x: Self) -> Self { self.wrapping_add(x) }
            #[inline(always)]
            fn product(self, x: Self) -> Self { self.wrapping_mul(x) }
            #[inline(always)]
            fn min(self, x: Self) -> Self { Ord::min(self, x) }
            #[inline(always)]
            fn max(self, x: Self) -> Self { Ord::max(self, x) }
            // Never asked for: means of integers are refused at the door.
            #[inline(always)]
            fn inverse_of(_: usize) -> Self { 1 }
        }
    )*};
}
integer_acc!(i32, i64, u8);

/// One binary operator on accumulators.
pub(super) trait Op<A> {
    fn apply(a: A, x: A) -> A;
}
pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;
impl<A: Acc> Op<A> for Sum {
    #[inline(always)]
    fn apply(a: A, x: A) -> A {
        a.sum(x)
    }
}
impl<A: Acc> Op<A> for Product {
    #[inline(always)]
    fn apply(a: A, x: A) -> A {
        a.product(x)
    }
}
impl<A: Acc> Op<A> for Min {
    #[inline(always)]
    fn apply(a: A, x: A) -> A {
        a.min(x)
    }
}
impl<A: Acc> Op<A> for Max {
    #[inline(always)]
    fn apply(a: A, x: A) -> A {
        a.max(x)
    }
}

/// An element type: how blocks of it enter and leave the accumulator.
pub(super) trait Lane: Copy + 'static {
    type Acc: Acc;
    /// `acc = widen(src)`; equal lengths.
    fn load(src: &[Self], acc: &mut [Self::Acc]);
    /// `acc = op(acc, widen(src))`; equal lengths.
    fn accumulate<O: Op<Self::Acc>>(src: &[Self], acc: &mut [Self::Acc]);
    /// `dst = round(acc)`; equal lengths.
    fn store(acc: &[Self::Acc], dst: &mut [Self]);
}

macro_rules! plain_lane {
    ($($t:ty),*) => {$(
        impl Lane for $t {
            type Acc = $t;
            #[inline(always)]
            fn load(src: &[Self], acc: &mut [Self]) { acc.copy_from_slice(src); }
            #[inline(always)]
            fn accumulate<O: Op<Self>>(src: &[Self], acc: &mut [Self]) {
                for (a, x) in acc.iter_mut().zip(src) {
                    *a = O::apply(*a, *x);
                }
            }
            #[inline(always)]
            fn store(acc: &[Self], dst: &mut [Self]) { dst.copy_from_slice(acc); }
        }
    )*};
}
plain_lane!(f32, f64, i32, i64, u8);

impl Lane for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn load(src: &[Self], acc: &mut [f32]) {
        for (a, x) in acc.iter_mut().zip(src) {
            *a = bf16_to_f32(*x);
        }
    }
    #[inline(always)]
    fn accumulate<O: Op<f32>>(src: &[Self], acc: &mut [f32]) {
        for (a, x) in acc.iter_mut().zip(src) {
            *a = O::apply(*a, bf16_to_f32(*x));
        }
    }
    #[inline(always)]
    fn store(acc: &[f32], dst: &mut [Self]) {
        for (d, a) in dst.iter_mut().zip(acc) {
            *d = bf16_from_f32(*a);
        }
    }
}

impl Lane for f16 {
    type Acc = f32;
    // `half` converts slices with F16C where there is one.
    #[inline(always)]
    fn load(src: &[Self], acc: &mut [f32]) {
        src.convert_to_f32_slice(acc);
    }
    #[inline(always)]
    fn accumulate<O: Op<f32>>(src: &[Self], acc: &mut [f32]) {
        // A quarter of a KiB at a time stays in registers and first cache.
        let mut wide = [0f32; 64];
        for (a, s) in acc.chunks_mut(64).zip(src.chunks(64)) {
            let wide = &mut wide[..s.len()];
            s.convert_to_f32_slice(wide);
            for (a, x) in a.iter_mut().zip(wide.iter()) {
                *a = O::apply(*a, *x);
            }
        }
    }
    #[inline(always)]
    fn store(acc: &[f32], dst: &mut [Self]) {
        dst.convert_from_f32_slice(acc);
    }
}

/// `bf16::to_f32` without its NaN branch, so that loops vectorise. A
/// signalling NaN keeps its payload here; the first addition quiets it.
#[inline(always)]
pub(super) fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Round to nearest even, as `bf16::from_f32`, without branches.
#[inline(always)]
pub(super) fn bf16_from_f32(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Adding half a unit, less one when the kept part is even, carries into
    // the kept part exactly when rounding up is due.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // The carry must not turn a NaN into an infinity.
    let quiet_nan = (bits >> 16) | 0x40;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16)
}
