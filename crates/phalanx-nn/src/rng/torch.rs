//! PyTorch's CPU generator and the distributions drawn from it.
//!
//! Bits are equal to PyTorch's on x86-64 for raw words, permutations, integers, places by
//! weight, uniform
//! numbers, Bernoulli masks and normal numbers of whole tensors (checked
//! against PyTorch 2.15 in `tests/it/rng_torch.rs` and `selections.rs`). Single normal numbers, and
//! those of tensors of fewer than 16, come from the platform's logarithm, sine
//! and cosine, as PyTorch's do.

use phalanx_kernels::rng::mt19937::Mt19937;
use phalanx_kernels::rng::numbers::{NORMAL_BLOCK, box_muller, uniforms};

use crate::{Result, refuse};

/// The default seed of a PyTorch generator.
pub const DEFAULT_SEED: u64 = 67_280_421_310_721;

/// From this length on `randperm` takes 64-bit draws: `u32::MAX / 20`.
const LARGE_PERMUTATION: usize = 214_748_364;

/// From this range on `randint` takes 64-bit draws.
const LARGE_RANGE: u64 = 1 << 28;

/// `torch.Generator('cpu')`.
///
/// A clone draws the same numbers as the original.
#[derive(Clone, PartialEq)]
pub struct Generator {
    words: Mt19937,
    /// Second half of a scalar Box-Muller pair; the next scalar normal takes
    /// it, even one for another tensor.
    cached_normal: Option<f64>,
}

impl std::fmt::Debug for Generator {
    // The 624 words of state are left out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator").finish_non_exhaustive()
    }
}

impl Default for Generator {
    fn default() -> Self {
        Self::new(DEFAULT_SEED)
    }
}

impl Generator {
    /// `torch.Generator().manual_seed(seed)`. PyTorch looks at the low 32 bits
    /// only; a negative seed is passed as `seed as u64`.
    pub fn new(seed: u64) -> Self {
        Self {
            words: Mt19937::new(seed as u32),
            cached_normal: None,
        }
    }

    /// One 32-bit draw.
    #[inline]
    pub fn random(&mut self) -> u32 {
        self.words.word()
    }

    /// Two draws, the first one in the high half.
    #[inline]
    pub fn random64(&mut self) -> u64 {
        let high = u64::from(self.random());
        (high << 32) | u64::from(self.random())
    }

    /// `torch.empty((), dtype=torch.int64).random_()`: 63 bits. A `DataLoader`
    /// draws its seeds this way.
    pub fn random_int64(&mut self) -> i64 {
        (self.random64() & (u64::MAX >> 1)) as i64
    }

    /// `torch.randperm(n)`.
    pub fn randperm(&mut self, n: usize) -> Vec<u64> {
        if n < LARGE_PERMUTATION {
            self.randperm_small(n)
        } else {
            self.randperm_large(n)
        }
    }

    /// `torch.randint(low, high, (n,))`: whole numbers from `low` to below `high`.
    ///
    /// # Errors
    /// `Usage` when there is none.
    pub fn randint(&mut self, low: i64, high: i64, n: usize) -> Result<Vec<i64>> {
        if low >= high {
            refuse!("randint: there is no number from {low} to below {high}");
        }
        let range = high.wrapping_sub(low) as u64;
        let draw = |_| {
            let word = match range {
                LARGE_RANGE.. => self.random64(),
                _ => u64::from(self.random()),
            };
            low.wrapping_add((word % range) as i64)
        };
        Ok((0..n).map(draw).collect())
    }

    /// `torch.multinomial(weights, n, replacement=True)` of a float32 row: places, each drawn with the probability of its weight
    /// over the sum of all. As in PyTorch a single place is drawn in another way, with an exponential draw for each weight.
    ///
    /// *Order*: weights are summed in order, in f32.
    ///
    /// # Errors
    /// `Usage` when a weight is negative or not finite, or their sum is 0 or not finite.
    pub fn multinomial(&mut self, weights: &[f32], n: usize) -> Result<Vec<usize>> {
        let mut sum = 0.0f32;
        let mut sums: Vec<f32> = Vec::with_capacity(weights.len());
        for (i, &w) in weights.iter().enumerate() {
            if !(w >= 0.0 && w.is_finite()) {
                refuse!("multinomial: weight {i} is {w}; it must be a number of at least 0");
            }
            sum += w;
            sums.push(sum);
        }
        if !(sum > 0.0 && sum.is_finite()) {
            refuse!("multinomial: the sum of the weights is {sum}; it must be a positive number");
        }
        if n == 1 {
            let mut best = (0, 0.0);
            for (i, &w) in weights.iter().enumerate() {
                let exponential = -(-self.unit_f64()).ln_1p() as f32;
                let share = w / exponential;
                if share > best.1 {
                    best = (i, share);
                }
            }
            return Ok(vec![best.0]);
        }
        // The last one is all there is, whatever the sum was rounded to.
        sums.pop();
        sums.iter_mut().for_each(|s| *s /= sum);
        let draw = |_| {
            let share = self.unit_f64();
            sums.partition_point(|&s| f64::from(s) < share)
        };
        Ok((0..n).map(draw).collect())
    }

    fn randperm_small(&mut self, n: usize) -> Vec<u64> {
        let mut p: Vec<u64> = (0..n as u64).collect();
        // n - 1 draws: the last element has nowhere to go.
        for i in 0..n.saturating_sub(1) {
            let z = self.random() as usize % (n - i);
            p.swap(i, i + z);
        }
        p
    }

    fn randperm_large(&mut self, n: usize) -> Vec<u64> {
        let mut p = vec![0; n];
        for i in 0..n {
            let z = (self.random64() % (i as u64 + 1)) as usize;
            // In this order, so that z == i leaves i in its place.
            p[i] = p[z];
            p[z] = i as u64;
        }
        p
    }

    /// `tensor.uniform_(lo, hi)` over a contiguous float32 tensor.
    ///
    /// The bounds are rounded to float32 first, as PyTorch does; the scaling
    /// is one *fused* multiply-add, without which half of the values differ
    /// in their last bit. Never `hi` unless `lo == hi`.
    pub fn fill_uniform_f32(&mut self, out: &mut [f32], lo: f64, hi: f64) {
        let (lo, hi) = (lo as f32, hi as f32);
        // Little enough to be in the cache for the second pass.
        for block in out.chunks_mut(4096) {
            self.words.fill(block);
            uniforms(block, lo, hi);
        }
    }

    /// A uniform float64 in [0, 1): 53 bits of one 64-bit draw.
    fn unit_f64(&mut self) -> f64 {
        const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.random64() & ((1 << 53) - 1)) as f64 * UNIT
    }

    /// One element of `tensor.bernoulli_(p)`: true with probability `p`.
    #[inline]
    pub fn bernoulli(&mut self, p: f64) -> bool {
        self.unit_f64() < p
    }

    /// One scalar normal number in double precision, as PyTorch draws them
    /// for tensors of fewer than 16 elements. Every second call draws nothing:
    /// it takes the other half of the pair.
    pub fn normal_f64(&mut self, mean: f64, std: f64) -> f64 {
        if let Some(value) = self.cached_normal.take() {
            return value * std + mean;
        }
        let u1 = self.unit_f64();
        let u2 = self.unit_f64();
        let radius = (-2.0 * (-u2).ln_1p()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * u1;
        self.cached_normal = Some(radius * angle.sin());
        radius * angle.cos() * std + mean
    }

    /// `tensor.normal_(mean, std)` over a contiguous float32 tensor: the bits
    /// of PyTorch on x86-64 with AVX2. PyTorch's own differ by 2e-6 elsewhere.
    pub fn fill_normal_f32(&mut self, out: &mut [f32], mean: f64, std: f64) {
        let n = out.len();
        if n < NORMAL_BLOCK {
            for value in out {
                *value = self.normal_f64(mean, std) as f32;
            }
            return;
        }
        let (short_mean, short_std) = (mean as f32, std as f32);
        self.fill_uniform_f32(out, 0.0, 1.0);
        box_muller(out, short_mean, short_std);
        if !n.is_multiple_of(NORMAL_BLOCK) {
            // PyTorch draws the last whole block anew instead of padding.
            let last = &mut out[n - NORMAL_BLOCK..];
            self.fill_uniform_f32(last, 0.0, 1.0);
            box_muller(last, short_mean, short_std);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Generator;

    // The path of 214,748,364 elements and more, at a size that fits a test;
    // expected values from parity/torch_rng.py with the limit lowered.
    #[test]
    fn large_permutations_draw_64_bits_inside_out() {
        assert_eq!(Generator::new(42).randperm_large(12), LARGE_12);
        assert_eq!(Generator::new(7).randperm_large(1), [0]);
        assert!(Generator::new(7).randperm_large(0).is_empty());
    }

    const LARGE_12: [u64; 12] = [6, 0, 5, 11, 10, 2, 3, 1, 9, 4, 7, 8];
}
