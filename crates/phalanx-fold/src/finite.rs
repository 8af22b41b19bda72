//! Tests whether all numbers are finite, and how large they are. Every gradient is
//! tested in every step, so it must cost almost nothing.

use super::Isa;
use super::pass::ask_for;

/// Elements tested together.
const BLOCK: usize = 256;
/// Prefetch distance, in elements.
const AHEAD: usize = 2048;

/// Whether none of `values` is an infinity or a NaN; as fast as [`largest`].
pub fn all_finite(values: &[f32]) -> bool {
    largest(values).is_finite()
}

/// The largest magnitude of `values`: a NaN if one of them is a NaN, 0 if empty. Reads them
/// once, in order, with the processor's widest vectors; for megabytes that were just written
/// it is twice as fast as the portable loop.
pub fn largest(values: &[f32]) -> f32 {
    // An unknown instruction set is refused when the group is formed.
    on(Isa::chosen().unwrap_or(Isa::Scalar), values)
}

/// [`largest`] on one instruction set, which this processor must have.
fn on(isa: Isa, values: &[f32]) -> f32 {
    match isa {
        // SAFETY: only instruction sets of this processor are chosen.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(values) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(values) },
        _ => scan(values),
    }
}

/// # Safety
///
/// The processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
unsafe fn avx512(values: &[f32]) -> f32 {
    scan(values)
}

/// # Safety
///
/// The processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(values: &[f32]) -> f32 {
    scan(values)
}

/// The loop; inlined into functions compiled for more than the baseline instruction set.
#[inline(always)]
fn scan(values: &[f32]) -> f32 {
    // Without the sign, the bits are ordered by magnitude, and those of every NaN are the largest.
    let magnitude = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
    let of_block = |block: &[f32]| {
        ask_for(
            block.as_ptr().wrapping_add(AHEAD).cast(),
            size_of_val(block),
        );
        // Without an early exit it compiles to vector code.
        block.iter().map(magnitude).fold(0, i32::max)
    };
    let most = values.chunks(BLOCK).map(of_block).fold(0, i32::max);
    f32::from_bits(most as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_infinities_and_nans_are_not_finite_wherever_they_are() {
        for isa in Isa::available() {
            let mut values = vec![f32::MAX; 3001];
            values[7] = f32::MIN_POSITIVE / 2.0;
            values[8] = -0.0;
            values[9] = f32::MIN;
            assert!(on(isa, &values) == f32::MAX && on(isa, &[]) == 0.0, "{isa}");
            assert_eq!(on(isa, &values[7..9]), f32::MIN_POSITIVE / 2.0, "{isa}");
            for at in [0, 9, 255, 256, 1023, 2815, 2999, 3000] {
                let quiet = f32::from_bits(0x7f80_0001);
                for bad in [f32::NAN, -f32::NAN, quiet, f32::INFINITY, -f32::INFINITY] {
                    let kept = std::mem::replace(&mut values[at], bad);
                    assert!(!on(isa, &values).is_finite(), "{isa}: {bad} at {at}");
                    let alone = on(isa, &values[at..=at]);
                    assert_eq!(alone.is_nan(), bad.is_nan(), "{isa}: {bad} alone");
                    assert!(!alone.is_finite(), "{isa}: {bad} alone");
                    values[at] = kept;
                }
            }
        }
    }
}
