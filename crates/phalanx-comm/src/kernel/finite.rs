//! Whether all numbers are finite: asked of every gradient in every step, so
//! it must cost next to nothing.

use super::Isa;
use super::pass::ask_for;

/// Elements that are looked at together.
const BLOCK: usize = 256;
/// How far ahead to ask, in elements.
const AHEAD: usize = 2048;

/// Whether none of `values` is an infinity or a NaN. Reads them once, in
/// order, with the processor's widest vectors; of megabytes that were just
/// written it is twice as fast as what the compiler makes of the loop for any processor.
pub fn all_finite(values: &[f32]) -> bool {
    // An unknown instruction set is refused where the group is formed.
    on(Isa::chosen().unwrap_or(Isa::Scalar), values)
}

/// [`all_finite`] on one instruction set, which this processor must have.
fn on(isa: Isa, values: &[f32]) -> bool {
    match isa {
        // SAFETY: only instruction sets of this processor are chosen.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(values) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(values) },
        _ => look(values),
    }
}

/// # Safety
///
/// The processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
unsafe fn avx512(values: &[f32]) -> bool {
    look(values)
}

/// # Safety
///
/// The processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(values: &[f32]) -> bool {
    look(values)
}

/// The loop; inlined where it is to use more than every processor has.
#[inline(always)]
fn look(values: &[f32]) -> bool {
    /// Bits of infinity; without the sign, those of every NaN are more.
    const INFINITY: i32 = 0x7f80_0000;
    let magnitude = |value: &f32| (value.to_bits() & 0x7fff_ffff) as i32;
    values.chunks(BLOCK).all(|block| {
        ask_for(
            block.as_ptr().wrapping_add(AHEAD).cast(),
            size_of_val(block),
        );
        // Without an exit inside it becomes vector code.
        block.iter().map(magnitude).fold(0, i32::max) < INFINITY
    })
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
            assert!(on(isa, &values) && on(isa, &[]), "{isa}");
            for at in [0, 9, 255, 256, 1023, 2815, 2999, 3000] {
                let quiet = f32::from_bits(0x7f80_0001);
                for bad in [f32::NAN, -f32::NAN, quiet, f32::INFINITY, -f32::INFINITY] {
                    let kept = std::mem::replace(&mut values[at], bad);
                    assert!(!on(isa, &values), "{isa}: {bad} at {at}");
                    assert!(!on(isa, &values[at..=at]), "{isa}: {bad} alone");
                    values[at] = kept;
                }
            }
        }
    }
}
