//! MNIST, Fashion-MNIST and synthetic digits.

use std::sync::Arc;

use phalanx::data::augment::{Augmentation, Augmented};
use phalanx::data::{ImageDataset, mnist, synthetic};
use phalanx::{Job, Result};

use super::image::{Data, counts};
use super::prepare::{FetchArgs, Kind, unreadable};

/// Arguments about digits.
#[derive(Debug, Clone, clap::Args)]
pub struct DigitArgs {
    /// Folder with the MNIST or Fashion-MNIST files, or `synthetic` for 60000 generated training digits, `synthetic:N` for N,
    /// and a sixth as many test digits
    #[arg(long, default_value = "synthetic", value_name = "DIR|synthetic[:N]")]
    data: String,
    #[command(flatten)]
    fetch: FetchArgs,
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
        self.fetch.validate()?;
        if synthetic::samples(&self.data, SAMPLES)?.is_some() {
            return self.fetch.refuse(&self.data);
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
        let mut data = match synthetic::samples(&self.data, SAMPLES)? {
            Some(n) => drawn(&self.data, n, seed),
            None => read(&self.data)?,
        };
        if let Some(augmentation) = augmentation {
            data.train = Arc::new(Augmented::new(data.train, augmentation, seed)?);
            let shifted = format!(", shifted by up to {}", augmentation.shift);
            data.description.push_str(&shifted);
        }
        Ok(data)
    }
}

fn drawn(name: &str, n: usize, seed: u64) -> Data {
    let (train, test) = synthetic::train_and_test(n, seed);
    let m = test.len();
    Data {
        train: Arc::new(train),
        test: Arc::new(test),
        name: name.to_owned(),
        description: format!("synthetic digits, {}, seed {seed}", counts(n, m)),
        content: format!("synthetic {n} + {m}, seed {seed}"),
        classes: None,
    }
}

fn read(folder: &str) -> Result<Data> {
    let load = |split| {
        let set = mnist::load(folder.as_ref(), split);
        set.map_err(|error| unreadable(Kind::Mnist, folder, error))
    };
    let sets = [load(mnist::Split::Train)?, load(mnist::Split::Test)?];
    Ok(Data::stored(folder, sets))
}
