//! Generated digits, a replacement for MNIST that can be learned and needs no download; and
//! generated text.
//!
//! Digits are drawn from strokes with random control points, rotation, shear, scale, shift
//! and width, over a noisy background. Sample i depends on (seed, i) alone, so nothing is
//! stored and any rank can draw any sample. Only additions, multiplications, divisions and
//! square roots are used, so every machine draws the same bytes.

mod glyphs;
pub mod noise;
mod pen;
mod pictures;
mod text;

use crate::cifar10::{self, Scaling};
use crate::dataset::{ImageDataset, check_read};
use crate::digits::normalised;
use crate::stored::scale;
use crate::words::Words;
use glyphs::GLYPHS;
use pen::{Canvas, Hand};
use phalanx_base::{Result, refuse};

pub use text::text;

/// Height and width of an image.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const PIXELS: usize = SIDE * SIDE;
/// The largest N of `synthetic:N`.
const MAX_SAMPLES: usize = 100_000_000;

/// Index of a first sample that no training uses: trainings use samples from 0 on.
pub const UNSEEN: u64 = 1 << 40;

/// Share of images with an extra stroke, in 1/256.
const STRAY_OF_256: u32 = 72;
/// Maximum amplitude of the background noise, relative to full ink.
const MAX_NOISE: f32 = 0.45;

/// A range of an endless sequence of generated images of one seed.
#[derive(Clone, Debug)]
pub struct GeneratedImages {
    name: &'static str,
    content: String,
    shape: [usize; 3],
    classes: usize,
    seed: u64,
    first: u64,
    len: usize,
    /// The scaled value of every byte, by channel.
    tables: Vec<[f32; 256]>,
    draw: fn(u64, u64, &mut [u8]) -> u32,
}

/// The first `n` generated digits of `seed`.
pub fn digits(n: usize, seed: u64) -> GeneratedImages {
    range(0, n, seed)
}

/// `n` generated digits of `seed` from index `first` on.
pub fn range(first: u64, n: usize, seed: u64) -> GeneratedImages {
    GeneratedImages {
        name: "synthetic digits",
        content: format!("synthetic digits {n} from {first}, seed {seed}"),
        shape: [SIDE, SIDE, 1],
        classes: GLYPHS.len(),
        seed,
        first,
        len: n,
        tables: vec![normalised()],
        draw,
    }
}

/// `n` generated pictures of `seed` from index `first` on, a replacement for CIFAR-10.
pub fn pictures(first: u64, n: usize, seed: u64, scaling: Scaling) -> GeneratedImages {
    GeneratedImages {
        name: "synthetic pictures",
        content: format!("synthetic pictures, {n} samples"),
        shape: [cifar10::SIDE, cifar10::SIDE, cifar10::CHANNELS],
        classes: cifar10::CLASSES,
        seed,
        first,
        len: n,
        tables: scaling.table().to_vec(),
        draw: pictures::draw,
    }
}

/// `n` training digits, and a sixth as many test digits; they have no sample in common.
pub fn train_and_test(n: usize, seed: u64) -> (GeneratedImages, GeneratedImages) {
    (digits(n, seed), range(n as u64, (n / 6).max(1), seed))
}

/// The number of training samples, or characters of a text, in the value of a flag `--data`: `default` for `synthetic`, N
/// for `synthetic:N`, `None` for anything else, which names a folder or file.
///
/// # Errors
///
/// `Usage` when N is not a number from 1 to 100,000,000.
pub fn samples(data: &str, default: usize) -> Result<Option<usize>> {
    if data == "synthetic" {
        return Ok(Some(default));
    }
    let Some(n) = data.strip_prefix("synthetic:") else {
        return Ok(None);
    };
    match n.parse() {
        Ok(n) if (1..=MAX_SAMPLES).contains(&n) => Ok(Some(n)),
        _ => refuse!(
            "--data {data}: the number must be from 1 to {MAX_SAMPLES}, as in synthetic:1000"
        ),
    }
}

impl GeneratedImages {
    /// Draws sample `index`, one byte per value, row by row, and returns its class. `index`
    /// may be beyond [`len`](ImageDataset::len).
    pub fn draw(&self, index: usize, pixels: &mut [u8]) -> u32 {
        (self.draw)(self.seed, self.first.wrapping_add(index as u64), pixels)
    }
}

impl ImageDataset for GeneratedImages {
    fn name(&self) -> &str {
        self.name
    }

    fn len(&self) -> usize {
        self.len
    }

    fn image_shape(&self) -> [usize; 3] {
        self.shape
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn content(&self) -> String {
        self.content.clone()
    }

    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        let mut memory = [0; cifar10::PIXELS];
        let pixels = &mut memory[..out.len()];
        let label = self.draw(index, pixels);
        scale(&self.tables, pixels, out);
        Ok(label)
    }
}

fn draw(seed: u64, sample: u64, pixels: &mut [u8]) -> u32 {
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
    // Squared, so that most images have little noise.
    let dirt = words.unit();
    canvas.develop(&hand, dirt * dirt * MAX_NOISE, &mut words, pixels);
    label
}
