//! What the CIFAR-10 programs share: where images come from, and what is done
//! to them.

use std::sync::Arc;

use phalanx::data::augment::{Augmentation, Augmented};
use phalanx::data::cifar10::{self, Split};
use phalanx::data::synthetic::{self, noise};
use phalanx::data::{ImageDataset, StoredImages};
use phalanx::nn::optim::schedule::{OneCycle, Schedule};
use phalanx::train::{RankContext, Settings};
use phalanx::{Error, Job, Result};

use super::image::{Data, counts};
use super::net::{Loss, Pixels};
use super::photos::PhotoArgs;
use super::prepare::{FetchArgs, Kind, unreadable};
use crate::error::check_count;

/// Arguments of programs for CIFAR-10, whose networks have batch norms.
#[derive(Debug, Clone, clap::Args)]
pub struct CifarArgs {
    /// Folder with CIFAR-10 (pickles, binary version or original archive), the archive itself, a folder of JPEG and PNG images with
    /// a subfolder for each class (or `train` and `val` with these; else a tenth is held out), or `synthetic` for 50000 generated
    /// training images, `synthetic:N` for N, and a sixth as many test images
    #[arg(
        long,
        visible_alias = "data",
        default_value = "input_dir",
        value_name = "DIR|synthetic[:N]"
    )]
    data_url: String,
    /// Batch norms take the mean and variance of all ranks' samples (PyTorch's SyncBatchNorm); on a mesh they always do
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// Train on random data, as the ModelArts document does; accuracy stays at chance level
    #[arg(long, default_value_t = false, action = clap::ArgAction::Set, value_name = "true|false")]
    pub custom_data: bool,
    #[command(flatten)]
    photos: PhotoArgs,
    #[command(flatten)]
    fetch: FetchArgs,
    /// Train on the first N images only
    #[arg(long, value_name = "N")]
    train_samples: Option<usize>,
    /// Test on the first N images only
    #[arg(long, value_name = "N")]
    test_samples: Option<usize>,
}

/// Height, width, channels.
pub const IMAGE: [usize; 3] = [cifar10::SIDE, cifar10::SIDE, cifar10::CHANNELS];

/// What is minimized where a recipe has no other loss.
pub const LOSS: Loss = Loss::CrossEntropy { smoothing: 0.0 };

/// Training samples of the synthetic set.
const SAMPLES: usize = 50_000;

impl CifarArgs {
    /// Checks them before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag or the folder.
    pub fn check(&self, settings: &Settings) -> Result<()> {
        if self.sync_batch_norm {
            settings.check_sync_batch_norm()?;
        }
        for (flag, samples) in [
            ("--train-samples", self.train_samples),
            ("--test-samples", self.test_samples),
        ] {
            check_count(flag, samples.unwrap_or(1), 100_000_000)?;
        }
        self.fetch.validate()?;
        if self.custom_data {
            self.fetch.refuse("--custom-data")?;
        } else if synthetic::samples(&self.data_url, SAMPLES)?.is_some() {
            self.fetch.refuse(&self.data_url)?;
        } else if !self.fetch.wanted()
            && let Err(none) = cifar10::check(self.data_url.as_ref())
            && !self.photos.check(&self.data_url)?
        {
            let own = "or your own: a folder with a subfolder of JPEG or PNG images for each class";
            return Err(none.note("", own));
        }
        Ok(())
    }

    /// With this side of the images of a folder where none was typed.
    pub fn with_image_size(mut self, side: usize) -> Self {
        self.photos.image_size.get_or_insert(side);
        self
    }

    /// The document's own sentence on random data; its complete listing logs it.
    pub fn warn_of_random(&self, ctx: &RankContext) {
        if self.custom_data {
            ctx.note("[warning] you are training on custom random dataset, validation accuracy may range from 0.4 to 0.6.");
        }
    }

    /// The flags that shape the training, a flag and its value a line.
    pub fn shaping(&self) -> Vec<String> {
        let images = |n: Option<usize>| n.map_or_else(|| "all".to_owned(), |n| n.to_string());
        vec![
            format!("--train-samples {}", images(self.train_samples)),
            format!("--test-samples {}", images(self.test_samples)),
            self.photos.shaping(),
        ]
    }

    /// Downloads the data, where that is asked for, and reads or draws it. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    pub fn load(
        &self,
        job: &Job<'_>,
        pixels: Pixels,
        augmentation: Option<Augmentation>,
    ) -> Result<Data> {
        self.fetch.run(job, Kind::Cifar10, &self.data_url)?;
        let (_loading, seed) = (job.context().phase("loading data"), job.settings().seed);
        let scaling = pixels.scaling();
        let mut data = if self.custom_data {
            let n = self.train_samples.unwrap_or(noise::TRAIN_SAMPLES);
            let m = self.test_samples.unwrap_or(noise::TEST_SAMPLES);
            Data {
                train: Arc::new(noise::noise(n, seed, 0)),
                test: Arc::new(noise::noise(m, seed, 1)),
                name: "custom random data".to_owned(),
                description: format!("custom random data, seed {seed}, {}", counts(n, m)),
                content: format!("custom {n} + {m}, seed {seed}"),
                classes: None,
            }
        } else if let Some(drawn) = synthetic::samples(&self.data_url, SAMPLES)? {
            let n = self.train_samples.unwrap_or(drawn);
            let sixth = (drawn / 6).max(1);
            let m = self.test_samples.unwrap_or(sixth);
            // The test pictures follow the training pictures, so none is seen in training.
            let first = n.max(drawn) as u64;
            Data {
                train: Arc::new(synthetic::pictures(0, n, seed, scaling)),
                test: Arc::new(synthetic::pictures(first, m, seed, scaling)),
                name: self.data_url.clone(),
                description: format!("synthetic pictures, seed {seed}, {}", counts(n, m)),
                content: format!("synthetic pictures {n} + {m} from {first}, seed {seed}"),
                classes: None,
            }
        } else if let Err(none) = cifar10::check(self.data_url.as_ref()) {
            let own = (self.photos).load(job, &self.data_url, pixels, augmentation.is_some())?;
            return own.ok_or(none);
        } else {
            let folder = self.data_url.as_ref();
            let load = |split, flag: &str, wanted: Option<usize>| -> Result<StoredImages> {
                let set = cifar10::load(folder, split, scaling);
                let mut set = set.map_err(|e| unreadable(Kind::Cifar10, &self.data_url, e))?;
                if let Some(n) = wanted {
                    // Figures must not be those of fewer images than was asked for.
                    check_count(flag, n, set.len())?;
                    set.truncate(n);
                }
                Ok(set)
            };
            let images = load(Split::Train, "--train-samples", self.train_samples)?;
            let tests = load(Split::Test, "--test-samples", self.test_samples)?;
            Data::stored(&self.data_url, [images, tests])
        };
        if let Some(augmentation) = augmentation {
            let cut = [", cut out", ""][usize::from(augmentation.cutout == 0)];
            let how = format!(", shifted by up to {}, flipped{cut}", augmentation.shift);
            data.description.push_str(&how);
            data.train = Arc::new(Augmented::new(data.train, augmentation, seed)?);
        }
        Ok(data)
    }
}

/// A black pixel of normalized images.
pub fn black() -> [f32; 3] {
    std::array::from_fn(|c| -cifar10::MEAN[c] / cifar10::DEVIATION[c])
}

/// The schedule of the speed records: up in straight lines to `lr` in `rising`
/// of the steps, then down to `last` of it; the momentum stays.
///
/// # Errors
///
/// Usage, when there are too few steps for a rise and a fall.
pub fn one_cycle(lr: f64, steps: u64, rising: f64, first: f64, last: f64) -> Result<Schedule> {
    let cycle = OneCycle {
        rising,
        divisor: 1.0 / first,
        final_divisor: first / last,
        cosine: false,
        momentum: None,
        ..OneCycle::new(lr, steps)
    };
    Schedule::one_cycle(cycle).map_err(|e| {
        Error::usage(e.to_string()).note("try", "more --epochs, or a smaller --batch-size")
    })
}
