//! NEON, which every 64-bit ARM processor has.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::pass::{Job, Set, pass};
use super::vector::{Bits, Float, NAN_F32, NAN_F64, Op, Vector, Wide, vector};

/// The instruction set.
pub(super) struct Neon;

impl Set for Neon {
    type F32 = F32;
    type F64 = F64;
    type I8 = I8;
    type U8 = U8;
    type I32 = I32;
    type I64 = I64;

    unsafe fn run<V: Vector, O: Op<V>>(job: &Job<'_>) {
        // SAFETY: handed on from the caller; NEON is part of the target.
        unsafe { pass::<V, O>(job) }
    }
}

// `fmin` orders zeros by their sign, but the first must be kept. Hence a comparison and
// a select: less, or a NaN, which does not equal itself.
vector! {
    F32 of [f32; 4] in float32x4_t;
    memory {
        load(p) = vld1q_f32(p);
        store(p, a) = vst1q_f32(p, a);
    }
    arithmetic {
        sum(a, x) = vaddq_f32(a, x);
        product(a, x) = vmulq_f32(a, x);
        min(a, x) = vbslq_f32(vornq_u32(vcltq_f32(x, a), vceqq_f32(x, x)), x, a);
        max(a, x) = vbslq_f32(vornq_u32(vcgtq_f32(x, a), vceqq_f32(x, x)), x, a);
        canonical(a) = vbslq_f32(vceqq_f32(a, a), a, vdupq_n_f32(NAN_F32));
    }
    float {
        inverse_of(world) = vdupq_n_f32(1.0 / world as f32);
    }
}

vector! {
    F64 of [f64; 2] in float64x2_t;
    memory {
        load(p) = vld1q_f64(p);
        store(p, a) = vst1q_f64(p, a);
    }
    arithmetic {
        sum(a, x) = vaddq_f64(a, x);
        product(a, x) = vmulq_f64(a, x);
        min(a, x) = vbslq_f64(vornq_u64(vcltq_f64(x, a), vceqq_f64(x, x)), x, a);
        max(a, x) = vbslq_f64(vornq_u64(vcgtq_f64(x, a), vceqq_f64(x, x)), x, a);
        canonical(a) = vbslq_f64(vceqq_f64(a, a), a, vdupq_n_f64(NAN_F64));
    }
    float {
        inverse_of(world) = vdupq_n_f64(1.0 / world as f64);
    }
}

macro_rules! integers {
    ($($name:ident of [$t:ty; $lanes:expr] in $reg:ty: $load:ident, $store:ident, $add:ident, $mul:ident,
       $min:ident, $max:ident, $and:ident, $or:ident, $xor:ident;)*) => {$(
        vector! {
            $name of [$t; $lanes] in $reg;
            memory {
                load(p) = $load(p);
                store(p, a) = $store(p, a);
            }
            arithmetic {
                sum(a, x) = $add(a, x);
                product(a, x) = $mul(a, x);
                min(a, x) = $min(a, x);
                max(a, x) = $max(a, x);
            }
            bits {
                and(a, x) = $and(a, x);
                or(a, x) = $or(a, x);
                xor(a, x) = $xor(a, x);
            }
        }
    )*};
}
integers! {
    I8 of [i8; 16] in int8x16_t: vld1q_s8, vst1q_s8, vaddq_s8, vmulq_s8,
        vminq_s8, vmaxq_s8, vandq_s8, vorrq_s8, veorq_s8;
    U8 of [u8; 16] in uint8x16_t: vld1q_u8, vst1q_u8, vaddq_u8, vmulq_u8,
        vminq_u8, vmaxq_u8, vandq_u8, vorrq_u8, veorq_u8;
    I32 of [i32; 4] in int32x4_t: vld1q_s32, vst1q_s32, vaddq_s32, vmulq_s32,
        vminq_s32, vmaxq_s32, vandq_s32, vorrq_s32, veorq_s32;
    I64 of [i64; 2] in int64x2_t: vld1q_s64, vst1q_s64, vaddq_s64, mul_s64,
        min_s64, max_s64, vandq_s64, vorrq_s64, veorq_s64;
}

/// There is no such instruction, so this takes one lane after the other.
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn mul_s64(a: int64x2_t, x: int64x2_t) -> int64x2_t {
    // SAFETY: handed on from the caller.
    unsafe {
        let low = vgetq_lane_s64::<0>(a).wrapping_mul(vgetq_lane_s64::<0>(x));
        let high = vgetq_lane_s64::<1>(a).wrapping_mul(vgetq_lane_s64::<1>(x));
        vcombine_s64(vdup_n_s64(low), vdup_n_s64(high))
    }
}

/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn min_s64(a: int64x2_t, x: int64x2_t) -> int64x2_t {
    // SAFETY: handed on from the caller.
    unsafe { vbslq_s64(vcltq_s64(x, a), x, a) }
}

/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn max_s64(a: int64x2_t, x: int64x2_t) -> int64x2_t {
    // SAFETY: handed on from the caller.
    unsafe { vbslq_s64(vcgtq_s64(x, a), x, a) }
}

impl Wide for F32 {
    // The intrinsics for f16 need Rust's unstable f16 type; every processor has the
    // instructions.
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: handed on from the caller; the instruction reads and writes
        // registers only.
        unsafe {
            let narrow = vld1_u16(from.cast());
            let wide: float32x4_t;
            asm!(
                "fcvtl {wide:v}.4s, {narrow:v}.4h",
                wide = lateout(vreg) wide,
                narrow = in(vreg) narrow,
                options(pure, nomem, nostack, preserves_flags)
            );
            F32(wide)
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        // SAFETY: as in `load_f16`. Rounds to nearest even, the mode that
        // Rust requires the control register to be in.
        unsafe {
            let narrow: uint16x4_t;
            asm!(
                "fcvtn {narrow:v}.4h, {wide:v}.4s",
                narrow = lateout(vreg) narrow,
                wide = in(vreg) self.0,
                options(pure, nomem, nostack, preserves_flags)
            );
            vst1_u16(to.cast(), narrow);
        }
    }

    // The first of the pair holds the elements with even numbers.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [Self; 2] {
        // SAFETY: handed on from the caller.
        unsafe {
            let both = vreinterpretq_u32_u16(vld1q_u16(from.cast()));
            let even = vshlq_n_u32::<16>(both);
            let odd = vandq_u32(both, vdupq_n_u32(0xffff_0000));
            [
                F32(vreinterpretq_f32_u32(even)),
                F32(vreinterpretq_f32_u32(odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store_bf16([even, odd]: [Self; 2], to: *mut bf16) {
        // SAFETY: handed on from the caller.
        unsafe {
            let even = vshrq_n_u32::<16>(rounded(even));
            let both = vbslq_u32(vdupq_n_u32(0xffff_0000), rounded(odd), even);
            vst1q_u16(to.cast(), vreinterpretq_u16_u32(both));
        }
    }
}

/// Bits whose upper half is the number rounded to bf16, as in
/// [`super::scalar::bf16_from_f32`].
///
/// # Safety
///
/// The processor has NEON.
#[inline(always)]
unsafe fn rounded(x: F32) -> uint32x4_t {
    // SAFETY: handed on from the caller.
    unsafe {
        let bits = vreinterpretq_u32_f32(x.0);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)))
    }
}
