//! Conversions of 16-bit floats, for every input there is.

use half::{bf16, f16};

use crate::pass::Set;
use crate::scalar::Scalar;
use crate::vector::{Vector, Wide};
use crate::{DType, ReduceOp};
use crate::{Isa, Source, fold_on};

/// A fold of one source widens and narrows: all 65,536 values come back, and
/// every NaN as the one.
#[test]
fn all_values_of_sixteen_bits_survive() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for isa in Isa::available() {
        for dtype in [DType::F16, DType::Bf16] {
            let mut got = vec![0u16; all.len()];
            let source: Source = all.as_ptr().cast();
            let into = got.as_mut_ptr().cast();
            // SAFETY: both have as many elements, and are apart.
            unsafe {
                fold_on(
                    isa,
                    dtype,
                    ReduceOp::Sum,
                    &[into],
                    &[source],
                    all.len(),
                    None,
                );
            }
            for (bits, got) in all.iter().zip(got) {
                let (is_nan, nan) = match dtype {
                    DType::F16 => (f16::from_bits(*bits).is_nan(), 0x7e00),
                    _ => (bf16::from_bits(*bits).is_nan(), 0x7fc0),
                };
                assert_eq!(got, if is_nan { nan } else { *bits }, "{isa} {dtype}");
            }
        }
    }
}

/// Narrows 64 numbers with one instruction set.
///
/// # Safety
///
/// The processor has it.
#[inline(always)]
unsafe fn narrow<S: Set>(wide: &[f32; 64]) -> ([u16; 64], [u16; 64]) {
    let (mut f16s, mut bf16s) = ([0u16; 64], [0u16; 64]);
    let lanes = S::F32::LANES;
    // SAFETY: places are multiples of the lanes below 64; the rest is handed
    // on from the caller. A pair goes through memory to where its halves
    // belong, whatever the order of the instruction set.
    unsafe {
        for at in (0..64).step_by(lanes) {
            let x = S::F32::load(wide.as_ptr().add(at)).canonical();
            x.store_f16(f16s.as_mut_ptr().add(at).cast());
        }
        for at in (0..64).step_by(2 * lanes) {
            // Which lane is which element: found by widening the numbers
            // of the places themselves, which bf16 holds exactly.
            let places: [bf16; 64] = std::array::from_fn(|i| bf16::from_f32(i as f32));
            let pair = S::F32::load_bf16(places.as_ptr());
            let mut order = [[0f32; 64]; 2];
            pair[0].store(order[0].as_mut_ptr());
            pair[1].store(order[1].as_mut_ptr());
            let mut sorted = [[0f32; 64]; 2];
            for (sorted, order) in sorted.iter_mut().zip(&order) {
                for (lane, place) in order.iter().take(lanes).enumerate() {
                    sorted[lane] = wide[at + *place as usize];
                }
            }
            let pair = sorted.map(|half| S::F32::load(half.as_ptr()).canonical());
            S::F32::store_bf16(pair, bf16s.as_mut_ptr().add(at).cast());
        }
    }
    (f16s, bf16s)
}

fn check(isa: Isa, wide: &[f32; 64]) {
    // SAFETY: the instruction set is one of this processor's.
    let (f16s, bf16s) = unsafe {
        match isa {
            Isa::Scalar => narrow::<Scalar>(wide),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => narrow::<crate::avx2::Avx2>(wide),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => narrow::<crate::avx512::Avx512>(wide),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => narrow::<crate::neon::Neon>(wide),
        }
    };
    for ((x, f16_bits), bf16_bits) in wide.iter().zip(f16s).zip(bf16s) {
        let (mut a, mut b) = (f16::from_f32(*x).to_bits(), bf16::from_f32(*x).to_bits());
        if x.is_nan() {
            (a, b) = (0x7e00, 0x7fc0);
        }
        assert_eq!(f16_bits, a, "{isa}: f16 of {x:e} ({:#x})", x.to_bits());
        assert_eq!(bf16_bits, b, "{isa}: bf16 of {x:e} ({:#x})", x.to_bits());
    }
}

fn check_all(isa: Isa, bits: impl Iterator<Item = u32>) {
    let mut wide = [0f32; 64];
    let mut filled = 0;
    for bits in bits {
        wide[filled] = f32::from_bits(bits);
        filled += 1;
        if filled == 64 {
            check(isa, &wide);
            filled = 0;
        }
    }
    check(isa, &wide);
}

/// Every upper half of an f32 with the lower halves on both sides of a tie,
/// for both types and for denormal results, whose ties lie higher.
#[test]
fn rounding_to_sixteen_bits_equals_the_half_crate() {
    const BELOW: [u32; 10] = [
        0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001,
    ];
    for isa in Isa::available() {
        let all = (0..=u16::MAX).flat_map(|high| BELOW.map(|low| u32::from(high) << 16 | low));
        check_all(isa, all);
    }
}

/// All of them: minutes. `cargo test --release -p phalanx-fold --lib
/// every_f32 -- --ignored`
#[test]
#[ignore = "2³² numbers per instruction set: minutes"]
fn every_f32_rounds_to_sixteen_bits_as_the_half_crate_does() {
    for isa in Isa::available() {
        check_all(isa, 0..=u32::MAX);
    }
}

/// Why bf16 is rounded with integer instructions.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_bf16_instruction_takes_denormals_for_zero() {
    use std::arch::x86_64::{__m128bh, _mm_cvtneps_pbh, _mm_set1_ps};
    #[target_feature(enable = "avx512bf16,avx512vl")]
    fn convert(x: f32) -> u16 {
        let bits: [u16; 8] = {
            let narrow = _mm_cvtneps_pbh(_mm_set1_ps(x));
            // SAFETY: both are 16 bytes of plain bits.
            unsafe { std::mem::transmute::<__m128bh, [u16; 8]>(narrow) }
        };
        bits[0]
    }
    if !(std::arch::is_x86_feature_detected!("avx512bf16")
        && std::arch::is_x86_feature_detected!("avx512vl"))
    {
        return;
    }
    let denormal = f32::from_bits(0x0040_0000);
    // SAFETY: the features were just detected.
    let (normal_bits, denormal_bits) = unsafe { (convert(1.5), convert(denormal)) };
    assert_eq!(normal_bits, bf16::from_f32(1.5).to_bits());
    assert_eq!(denormal_bits, 0);
    assert_eq!(bf16::from_f32(denormal).to_bits(), 0x0040);
}
