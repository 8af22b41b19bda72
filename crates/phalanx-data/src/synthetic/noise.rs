//! The ModelArts document's random data set: noise with labels 0 and 1, which cannot be
//! learned.

use phalanx_nn::rng::torch::Generator;

use crate::cifar10::{CHANNELS, CLASSES, PIXELS, SIDE};
use crate::dataset::{ImageDataset, check_read};
use phalanx_base::Result;

/// Number of the document's training samples.
pub const TRAIN_SAMPLES: usize = 5000;
/// Number of its test samples.
pub const TEST_SAMPLES: usize = 1000;
/// Seed with which it shuffles labels.
const LABEL_SEED: u64 = 2021;

/// Images of standard normal values; half of the labels are 1, half 0, shuffled.
#[derive(Clone)]
pub struct Noise {
    values: Vec<f32>,
    labels: Vec<u8>,
}

/// `samples` samples of `seed`; `part` distinguishes data sets of one seed.
///
/// The document draws with `torch.randn` and shuffles with Python's `random`; here both use
/// PyTorch's generator, so labels are in another order.
pub fn noise(samples: usize, seed: u64, part: u64) -> Noise {
    let mut values = vec![0.0; samples * PIXELS];
    let mut generator = Generator::new(seed.wrapping_mul(2).wrapping_add(part));
    generator.fill_normal_f32(&mut values, 0.0, 1.0);
    let order = Generator::new(LABEL_SEED + part).randperm(samples);
    let labels = order.iter().map(|&i| u8::from(i < samples as u64 / 2));
    Noise {
        labels: labels.collect(),
        values,
    }
}

impl std::fmt::Debug for Noise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Noise")
            .field("samples", &self.labels.len())
            .finish_non_exhaustive()
    }
}

impl ImageDataset for Noise {
    fn name(&self) -> &str {
        "custom random data"
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn image_shape(&self) -> [usize; 3] {
        [SIDE, SIDE, CHANNELS]
    }

    fn classes(&self) -> usize {
        CLASSES
    }

    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        out.copy_from_slice(&self.values[index * PIXELS..(index + 1) * PIXELS]);
        Ok(u32::from(self.labels[index]))
    }
}
