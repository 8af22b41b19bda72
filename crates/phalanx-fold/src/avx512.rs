//! AVX-512 F, BW, DQ and VL.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::pass::{Job, Set, pass};
use super::vector::{Bits, Float, NAN_F32, NAN_F64, Op, Vector, Wide, vector};

/// The instruction set.
pub(super) struct Avx512;

impl Set for Avx512 {
    type F32 = F32;
    type F64 = F64;
    type I8 = I8;
    type U8 = U8;
    type I32 = I32;
    type I64 = I64;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
    unsafe fn run<V: Vector, O: Op<V>>(job: &Job<'_>) {
        // SAFETY: handed on from the caller.
        unsafe { pass::<V, O>(job) }
    }
}

/// A bit for each of the first `n` lanes.
#[inline(always)]
fn first(n: usize) -> u64 {
    !(u64::MAX << n)
}

// `vminps` returns its second operand when one is a NaN or both are zeros. So with the
// accumulator second, only a NaN in the first must be restored.
vector! {
    F32 of [f32; 16] in __m512;
    memory {
        load(p) = _mm512_loadu_ps(p);
        store(p, a) = _mm512_storeu_ps(p, a);
    }
    part {
        load_part(p, n) = _mm512_maskz_loadu_ps(first(n) as __mmask16, p);
        store_part(p, n, a) = _mm512_mask_storeu_ps(p, first(n) as __mmask16, a);
    }
    arithmetic {
        sum(a, x) = _mm512_add_ps(a, x);
        product(a, x) = _mm512_mul_ps(a, x);
        min(a, x) = _mm512_mask_mov_ps(_mm512_min_ps(x, a), nan_ps(x), x);
        max(a, x) = _mm512_mask_mov_ps(_mm512_max_ps(x, a), nan_ps(x), x);
        canonical(a) = _mm512_mask_mov_ps(a, nan_ps(a), _mm512_set1_ps(NAN_F32));
    }
    float {
        inverse_of(world) = _mm512_set1_ps(1.0 / world as f32);
    }
}

vector! {
    F64 of [f64; 8] in __m512d;
    memory {
        load(p) = _mm512_loadu_pd(p);
        store(p, a) = _mm512_storeu_pd(p, a);
    }
    part {
        load_part(p, n) = _mm512_maskz_loadu_pd(first(n) as __mmask8, p);
        store_part(p, n, a) = _mm512_mask_storeu_pd(p, first(n) as __mmask8, a);
    }
    arithmetic {
        sum(a, x) = _mm512_add_pd(a, x);
        product(a, x) = _mm512_mul_pd(a, x);
        min(a, x) = _mm512_mask_mov_pd(_mm512_min_pd(x, a), nan_pd(x), x);
        max(a, x) = _mm512_mask_mov_pd(_mm512_max_pd(x, a), nan_pd(x), x);
        canonical(a) = _mm512_mask_mov_pd(a, nan_pd(a), _mm512_set1_pd(NAN_F64));
    }
    float {
        inverse_of(world) = _mm512_set1_pd(1.0 / world as f64);
    }
}

/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn nan_ps(x: __m512) -> __mmask16 {
    // SAFETY: handed on from the caller.
    unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x) }
}

/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn nan_pd(x: __m512d) -> __mmask8 {
    // SAFETY: handed on from the caller.
    unsafe { _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(x, x) }
}

macro_rules! integers {
    ($($name:ident of [$t:ty; $lanes:expr] by $mask:ty: $loadz:ident, $storem:ident,
       $add:ident, $mul:ident, $min:ident, $max:ident;)*) => {$(
        vector! {
            $name of [$t; $lanes] in __m512i;
            memory {
                load(p) = _mm512_loadu_si512(p.cast());
                store(p, a) = _mm512_storeu_si512(p.cast(), a);
            }
            part {
                load_part(p, n) = $loadz(first(n) as $mask, p.cast());
                store_part(p, n, a) = $storem(p.cast(), first(n) as $mask, a);
            }
            arithmetic {
                sum(a, x) = $add(a, x);
                product(a, x) = $mul(a, x);
                min(a, x) = $min(a, x);
                max(a, x) = $max(a, x);
            }
            bits {
                and(a, x) = _mm512_and_si512(a, x);
                or(a, x) = _mm512_or_si512(a, x);
                xor(a, x) = _mm512_xor_si512(a, x);
            }
        }
    )*};
}
integers! {
    I8 of [i8; 64] by __mmask64: _mm512_maskz_loadu_epi8, _mm512_mask_storeu_epi8,
        _mm512_add_epi8, mul_epi8, _mm512_min_epi8, _mm512_max_epi8;
    U8 of [u8; 64] by __mmask64: _mm512_maskz_loadu_epi8, _mm512_mask_storeu_epi8,
        _mm512_add_epi8, mul_epi8, _mm512_min_epu8, _mm512_max_epu8;
    I32 of [i32; 16] by __mmask16: _mm512_maskz_loadu_epi32, _mm512_mask_storeu_epi32,
        _mm512_add_epi32, _mm512_mullo_epi32, _mm512_min_epi32, _mm512_max_epi32;
    I64 of [i64; 8] by __mmask8: _mm512_maskz_loadu_epi64, _mm512_mask_storeu_epi64,
        _mm512_add_epi64, _mm512_mullo_epi64, _mm512_min_epi64, _mm512_max_epi64;
}

/// The low bytes of the products, from two products of 16 bits each.
///
/// # Safety
///
/// The processor has AVX-512 BW.
#[inline(always)]
unsafe fn mul_epi8(a: __m512i, x: __m512i) -> __m512i {
    // SAFETY: handed on from the caller.
    unsafe {
        let even = _mm512_mullo_epi16(a, x);
        let odd = _mm512_mullo_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(x));
        _mm512_mask_mov_epi8(_mm512_slli_epi16::<8>(odd), 0x5555_5555_5555_5555, even)
    }
}

impl Wide for F32 {
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: handed on from the caller.
        unsafe { F32(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: handed on from the caller.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(self.0)) }
    }

    // The first of the pair holds the elements with even numbers.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [Self; 2] {
        // SAFETY: handed on from the caller.
        unsafe {
            let both = _mm512_loadu_si512(from.cast());
            let even = _mm512_slli_epi32::<16>(both);
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [
                F32(_mm512_castsi512_ps(even)),
                F32(_mm512_castsi512_ps(odd)),
            ]
        }
    }

    // Not `vcvtne2ps2bf16`: it treats denormal numbers as zero (a test in this
    // directory shows it).
    #[inline(always)]
    unsafe fn store_bf16([even, odd]: [Self; 2], to: *mut bf16) {
        // SAFETY: handed on from the caller.
        unsafe {
            let even = _mm512_srli_epi32::<16>(rounded(even));
            let both = _mm512_mask_mov_epi16(rounded(odd), 0x5555_5555, even);
            _mm512_storeu_si512(to.cast(), both);
        }
    }
}

/// Bits whose upper half is the number rounded to bf16, as in
/// [`super::scalar::bf16_from_f32`].
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn rounded(x: F32) -> __m512i {
    // SAFETY: handed on from the caller.
    unsafe {
        let bits = _mm512_castps_si512(x.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        _mm512_add_epi32(bits, half)
    }
}
