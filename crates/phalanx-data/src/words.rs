//! Random numbers of one sample.

use phalanx_nn::rng::philox::{philox4x32_10, unit_f32};

/// Separates these random numbers from others with the same seed.
const STREAM: u32 = 0x6469_6769; // "digi"

/// Random numbers that depend on (seed, sample) and their order of use only.
pub(crate) struct Words {
    key: [u32; 2],
    sample: [u32; 2],
    block: u32,
    words: [u32; 4],
    used: usize,
}

impl Words {
    pub(crate) fn new(seed: u64, sample: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            sample: [sample as u32, (sample >> 32) as u32],
            block: 0,
            words: [0; 4],
            used: 4,
        }
    }

    #[inline]
    pub(crate) fn word(&mut self) -> u32 {
        if self.used == 4 {
            let counter = [self.sample[0], self.sample[1], self.block, STREAM];
            self.words = philox4x32_10(counter, self.key);
            self.block += 1;
            self.used = 0;
        }
        let word = self.words[self.used];
        self.used += 1;
        word
    }

    /// Uniform in [0, 1).
    #[inline]
    pub(crate) fn unit(&mut self) -> f32 {
        unit_f32(self.word())
    }

    /// Uniform in [low, high).
    #[inline]
    pub(crate) fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Uniform in -size .. size.
    #[inline]
    pub(crate) fn around(&mut self, size: f32) -> f32 {
        self.between(-size, size)
    }

    /// Uniform in 0 .. n, for small n.
    #[inline]
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(n)) >> 32) as u32
    }
}
