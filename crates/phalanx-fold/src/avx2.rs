//! AVX2 with F16C: every x86-64 processor since 2013 (Intel) or 2015 (AMD).

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::pass::{Job, Set, pass};
use super::vector::{Bits, Float, NAN_F32, NAN_F64, Op, Vector, Wide, vector};

/// The instruction set.
pub(super) struct Avx2;

impl Set for Avx2 {
    type F32 = F32;
    type F64 = F64;
    type I8 = I8;
    type U8 = U8;
    type I32 = I32;
    type I64 = I64;

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn run<V: Vector, O: Op<V>>(job: &Job<'_>) {
        // SAFETY: handed on from the caller.
        unsafe { pass::<V, O>(job) }
    }
}

// `vminps` returns its second operand when one is a NaN or both are zeros. So with the
// accumulator second, only a NaN in the first must be restored.
vector! {
    F32 of [f32; 8] in __m256;
    memory {
        load(p) = _mm256_loadu_ps(p);
        store(p, a) = _mm256_storeu_ps(p, a);
    }
    arithmetic {
        sum(a, x) = _mm256_add_ps(a, x);
        product(a, x) = _mm256_mul_ps(a, x);
        min(a, x) = _mm256_blendv_ps(_mm256_min_ps(x, a), x, nan_ps(x));
        max(a, x) = _mm256_blendv_ps(_mm256_max_ps(x, a), x, nan_ps(x));
        canonical(a) = _mm256_blendv_ps(a, _mm256_set1_ps(NAN_F32), nan_ps(a));
    }
    float {
        inverse_of(world) = _mm256_set1_ps(1.0 / world as f32);
    }
}

vector! {
    F64 of [f64; 4] in __m256d;
    memory {
        load(p) = _mm256_loadu_pd(p);
        store(p, a) = _mm256_storeu_pd(p, a);
    }
    arithmetic {
        sum(a, x) = _mm256_add_pd(a, x);
        product(a, x) = _mm256_mul_pd(a, x);
        min(a, x) = _mm256_blendv_pd(_mm256_min_pd(x, a), x, nan_pd(x));
        max(a, x) = _mm256_blendv_pd(_mm256_max_pd(x, a), x, nan_pd(x));
        canonical(a) = _mm256_blendv_pd(a, _mm256_set1_pd(NAN_F64), nan_pd(a));
    }
    float {
        inverse_of(world) = _mm256_set1_pd(1.0 / world as f64);
    }
}

/// # Safety
///
/// The processor has AVX.
#[inline(always)]
unsafe fn nan_ps(x: __m256) -> __m256 {
    // SAFETY: handed on from the caller.
    unsafe { _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x) }
}

/// # Safety
///
/// The processor has AVX.
#[inline(always)]
unsafe fn nan_pd(x: __m256d) -> __m256d {
    // SAFETY: handed on from the caller.
    unsafe { _mm256_cmp_pd::<_CMP_UNORD_Q>(x, x) }
}

macro_rules! integers {
    ($($name:ident of [$t:ty; $lanes:expr]: $add:ident, $mul:ident, $min:ident, $max:ident;)*) => {$(
        vector! {
            $name of [$t; $lanes] in __m256i;
            memory {
                load(p) = _mm256_loadu_si256(p.cast());
                store(p, a) = _mm256_storeu_si256(p.cast(), a);
            }
            arithmetic {
                sum(a, x) = $add(a, x);
                product(a, x) = $mul(a, x);
                min(a, x) = $min(a, x);
                max(a, x) = $max(a, x);
            }
            bits {
                and(a, x) = _mm256_and_si256(a, x);
                or(a, x) = _mm256_or_si256(a, x);
                xor(a, x) = _mm256_xor_si256(a, x);
            }
        }
    )*};
}
integers! {
    I8 of [i8; 32]: _mm256_add_epi8, mul_epi8, _mm256_min_epi8, _mm256_max_epi8;
    U8 of [u8; 32]: _mm256_add_epi8, mul_epi8, _mm256_min_epu8, _mm256_max_epu8;
    I32 of [i32; 8]: _mm256_add_epi32, _mm256_mullo_epi32, _mm256_min_epi32, _mm256_max_epi32;
    I64 of [i64; 4]: _mm256_add_epi64, mul_epi64, min_epi64, max_epi64;
}

/// The low bytes of the products, from two products of 16 bits each.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn mul_epi8(a: __m256i, x: __m256i) -> __m256i {
    // SAFETY: handed on from the caller.
    unsafe {
        let even = _mm256_mullo_epi16(a, x);
        let odd = _mm256_mullo_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(x));
        let odd = _mm256_slli_epi16::<8>(odd);
        _mm256_or_si256(odd, _mm256_and_si256(even, _mm256_set1_epi16(0xff)))
    }
}

/// The low halves of the products: of the four partial products the highest
/// is beyond 64 bits, and of the two middle ones only the low halves count.
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn mul_epi64(a: __m256i, x: __m256i) -> __m256i {
    // SAFETY: handed on from the caller.
    unsafe {
        let low = _mm256_mul_epu32(a, x);
        let swapped = _mm256_shuffle_epi32::<0b10_11_00_01>(x);
        let middle = _mm256_mullo_epi32(a, swapped);
        let middle = _mm256_add_epi32(middle, _mm256_srli_epi64::<32>(middle));
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(middle))
    }
}

/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn min_epi64(a: __m256i, x: __m256i) -> __m256i {
    // SAFETY: handed on from the caller.
    unsafe { _mm256_blendv_epi8(a, x, _mm256_cmpgt_epi64(a, x)) }
}

/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn max_epi64(a: __m256i, x: __m256i) -> __m256i {
    // SAFETY: handed on from the caller.
    unsafe { _mm256_blendv_epi8(a, x, _mm256_cmpgt_epi64(x, a)) }
}

impl Wide for F32 {
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: handed on from the caller.
        unsafe { F32(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        // SAFETY: handed on from the caller.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<NEAREST>(self.0)) }
    }

    // The first of the pair holds the elements with even numbers.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [Self; 2] {
        // SAFETY: handed on from the caller.
        unsafe {
            let both = _mm256_loadu_si256(from.cast());
            let even = _mm256_slli_epi32::<16>(both);
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [
                F32(_mm256_castsi256_ps(even)),
                F32(_mm256_castsi256_ps(odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store_bf16([even, odd]: [Self; 2], to: *mut bf16) {
        // SAFETY: handed on from the caller.
        unsafe {
            let even = _mm256_srli_epi32::<16>(rounded(even));
            let both = _mm256_blend_epi16::<0b1010_1010>(even, rounded(odd));
            _mm256_storeu_si256(to.cast(), both);
        }
    }
}

/// Bits whose upper half is the number rounded to bf16, as in
/// [`super::scalar::bf16_from_f32`].
///
/// # Safety
///
/// The processor has AVX2.
#[inline(always)]
unsafe fn rounded(x: F32) -> __m256i {
    // SAFETY: handed on from the caller.
    unsafe {
        let bits = _mm256_castps_si256(x.0);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        _mm256_add_epi32(bits, half)
    }
}
