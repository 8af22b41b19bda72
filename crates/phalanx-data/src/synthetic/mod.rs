//! Drawn digits: a learnable stand-in for MNIST that needs no download.
//!
//! Glyphs of strokes, written with shaking hands (every control point moves),
//! turned, sheared, scaled, shifted, drawn with pens of different width over
//! a noisy background. Sample i depends on (seed, i) alone: nothing is
//! stored, any rank draws any sample, and no rank draws what it does not
//! train on. Only additions, multiplications, divisions and square roots
//! enter, so every machine draws the same bytes.

mod glyphs;
pub mod noise;
mod pen;
mod pictures;
mod words;

use crate::Result;
use crate::dataset::{ImageDataset, check_read};
use crate::mnist::{Split, normalised};
use glyphs::GLYPHS;
use pen::{Canvas, Hand};
use words::Words;

pub use pictures::{Pictures, pictures};

/// Height and width of an image.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const PIXELS: usize = SIDE * SIDE;
/// Training samples of [`split`]: as many as MNIST's.
pub const TRAIN_SAMPLES: usize = 60_000;
/// Test samples of [`split`].
pub const TEST_SAMPLES: usize = 10_000;

/// Number of a sample that no training sees, nor any within 2^40 after it: trainings draw
/// theirs from number 0 on.
pub const UNSEEN: u64 = 1 << 40;

/// Share of images with a stray stroke, in 1/256.
const STRAY_OF_256: u32 = 72;
/// Largest amplitude of the background noise, of full ink.
const MAX_NOISE: f32 = 0.45;

/// A range of the endless sequence of drawn digits under one seed.
#[derive(Clone)]
pub struct Digits {
    seed: u64,
    first: u64,
    len: usize,
    normalised: [f32; 256],
}

/// The first `n` drawn digits under `seed`.
pub fn digits(n: usize, seed: u64) -> Digits {
    range(0, n, seed)
}

/// `n` drawn digits under `seed` from number `first` on.
pub fn range(first: u64, n: usize, seed: u64) -> Digits {
    Digits {
        seed,
        first,
        len: n,
        normalised: normalised(),
    }
}

/// Training and test halves of MNIST's size, without a common sample.
pub fn split(split: Split, seed: u64) -> Digits {
    match split {
        Split::Train => digits(TRAIN_SAMPLES, seed),
        Split::Test => range(TRAIN_SAMPLES as u64, TEST_SAMPLES, seed),
    }
}

impl Digits {
    /// Draws sample `index`, a byte a pixel, row by row, and returns its
    /// digit. Samples beyond [`len`](ImageDataset::len) exist too.
    pub fn draw(&self, index: usize, pixels: &mut [u8; PIXELS]) -> u32 {
        draw(self.seed, self.first.wrapping_add(index as u64), pixels)
    }
}

impl std::fmt::Debug for Digits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Digits")
            .field("seed", &self.seed)
            .field("first", &self.first)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl ImageDataset for Digits {
    fn name(&self) -> &str {
        "synthetic digits"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn image_shape(&self) -> [usize; 3] {
        [SIDE, SIDE, 1]
    }

    fn classes(&self) -> usize {
        GLYPHS.len()
    }

    fn content(&self) -> String {
        let (first, seed) = (self.first, self.seed);
        format!("synthetic digits {} from {first}, seed {seed}", self.len)
    }

    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        let mut pixels = [0; PIXELS];
        let label = self.draw(index, &mut pixels);
        for (value, &pixel) in out.iter_mut().zip(&pixels) {
            *value = self.normalised[usize::from(pixel)];
        }
        Ok(label)
    }
}

fn draw(seed: u64, sample: u64, pixels: &mut [u8; PIXELS]) -> u32 {
    let mut words = Words::new(seed, sample);
    let label = words.below(GLYPHS.len() as u32);
    let styles = GLYPHS[label as usize];
    let glyph = styles[words.below(styles.len() as u32) as usize];
    let hand = Hand::random(&mut words);
    let mut canvas = Canvas::new();
    for stroke in glyph {
        canvas.stroke(stroke, &hand, &mut words);
    }
    if words.below(256) < STRAY_OF_256 {
        canvas.stray(&mut words);
    }
    // Squared: most images are clean, a few are bad.
    let dirt = words.unit();
    canvas.develop(&hand, dirt * dirt * MAX_NOISE, &mut words, pixels);
    label
}
