//! Uniform and normal numbers from words, as PyTorch makes them.

use super::cephes;

/// Values that one vectorised Box-Muller block of PyTorch produces.
pub const NORMAL_BLOCK: usize = 16;

/// A word as a number from `lo` to `hi`.
#[inline(always)]
pub fn uniform(word: u32, lo: f32, hi: f32) -> f32 {
    // Of 24 bits, so that a signed conversion (which vectors have) does.
    let x = (word & 0x00FF_FFFF) as i32 as f32 * (1.0 / 16_777_216.0);
    let value = x.mul_add(hi - lo, lo);
    if value == hi { lo } else { value }
}

simd! {
    /// Turns words (as the bits of floats) into uniform numbers.
    pub fn uniforms(words: &mut [f32], lo: f32, hi: f32) {
        for w in words {
            *w = uniform(w.to_bits(), lo, hi);
        }
    }
}

simd! {
    /// Turns whole blocks of 16 uniform numbers into normal ones; value j of a block
    /// pairs with value j + 8.
    pub fn box_muller(numbers: &mut [f32], mean: f32, std: f32) {
        for block in numbers.chunks_exact_mut(NORMAL_BLOCK) {
            let (first, second) = block.split_at_mut(NORMAL_BLOCK / 2);
            for (a, b) in first.iter_mut().zip(second) {
                // 1 - u is exact in float32 and lies in (0, 1].
                let radius = (-2.0 * cephes::ln(1.0 - *a)).sqrt();
                let (sine, cosine) = cephes::sin_cos(std::f32::consts::TAU * *b);
                *a = (radius * cosine).mul_add(std, mean);
                *b = (radius * sine).mul_add(std, mean);
            }
        }
    }
}
