//! MNIST, Fashion-MNIST and synthetic digits.

use std::sync::Arc;

use phalanx::data::augment::{Augmentation, Augmented};
use phalanx::data::{ImageDataset, mnist, synthetic};
use phalanx::{Job, Result};

use super::image::{Data, check_synthetic_samples};
use super::prepare::{FetchArgs, Kind, unreadable};
use crate::format::thousands;

/// Arguments about digits.
#[derive(Debug, Clone, clap::Args)]
pub struct DigitArgs {
    /// Folder with the MNIST or Fashion-MNIST files, or `synthetic` for generated digits
    #[arg(long, default_value = "synthetic", value_name = "DIR|synthetic")]
    data: String,
    #[command(flatten)]
    fetch: FetchArgs,
    /// Number of synthetic training samples; the test set has a sixth as many [default: 60000]
    #[arg(long, value_name = "N")]
    synthetic_samples: Option<usize>,
}

/// Training samples of the synthetic set.
const SAMPLES: usize = 60_000;

impl DigitArgs {
    /// Checks them before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag or the folder.
    pub fn check(&self) -> Result<()> {
        let is_synthetic = self.data == "synthetic";
        check_synthetic_samples(self.synthetic_samples, &self.data, is_synthetic)?;
        self.fetch.validate()?;
        if is_synthetic {
            return self.fetch.refuse("synthetic");
        }
        if !self.fetch.wanted() {
            mnist::check(self.data.as_ref())?;
        }
        Ok(())
    }

    /// Downloads the data, where that is asked for, and reads or draws it. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    pub fn load(&self, job: &Job<'_>, augmentation: Option<Augmentation>) -> Result<Data> {
        self.fetch.run(job, Kind::Mnist, &self.data)?;
        let (_loading, seed) = (job.context().phase("loading data"), job.settings().seed);
        let mut data = match &*self.data {
            "synthetic" => drawn(self.synthetic_samples.unwrap_or(SAMPLES), seed),
            folder => read(folder)?,
        };
        if let Some(augmentation) = augmentation {
            data.train = Arc::new(Augmented::new(data.train, augmentation, seed)?);
            let shifted = format!(", shifted by up to {}", augmentation.shift);
            data.description.push_str(&shifted);
        }
        Ok(data)
    }
}

fn drawn(n: usize, seed: u64) -> Data {
    let m = (n / 6).max(1);
    // The test digits follow the training digits, so none is seen in training.
    Data {
        train: Arc::new(synthetic::digits(n, seed)),
        test: Arc::new(synthetic::range(n as u64, m, seed)),
        name: "synthetic".to_owned(),
        description: format!(
            "synthetic digits, {} train / {} test, seed {seed}",
            thousands(n),
            thousands(m),
        ),
        content: format!("synthetic {n} + {m}, seed {seed}"),
    }
}

fn read(folder: &str) -> Result<Data> {
    let load = |split| {
        let set = mnist::load(folder.as_ref(), split);
        set.map_err(|error| unreadable(Kind::Mnist, folder, error))
    };
    let (train, test) = (load(mnist::Split::Train)?, load(mnist::Split::Test)?);
    let description = format!(
        "{} in {folder}, {} train / {} test",
        train.name(),
        thousands(train.len()),
        thousands(test.len())
    );
    let content = format!(
        "{} {} + {}, SHA-256 {:.16} + {:.16}",
        train.name(),
        train.len(),
        test.len(),
        train.sha256(),
        test.sha256()
    );
    Ok(Data {
        train: Arc::new(train),
        test: Arc::new(test),
        name: folder.to_owned(),
        description,
        content,
    })
}
