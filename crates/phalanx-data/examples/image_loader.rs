//! Images per second of an epoch over a folder of images, without a model:
//! `cargo run --release -p phalanx-data --features images --example image_loader -- FOLDER WORKERS`

use std::sync::Arc;
use std::time::Instant;

use phalanx_base::{Error, Result};
use phalanx_data::Dataset;
use phalanx_data::folder::{ImageFolder, Transforms};
use phalanx_data::loader::{Loader, LoaderOptions};
use phalanx_data::sampler::{Sampler, SamplerConfig};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(folder), Some(workers)) = (args.next(), args.next()) else {
        return Err(Error::usage("usage: image_loader FOLDER WORKERS"));
    };
    let workers = (workers.parse()).map_err(|_| Error::usage("WORKERS is a number"))?;
    let images = ImageFolder::open(folder.as_ref())?.transform(Transforms::training(64), 1)?;
    let images = Arc::new(images);
    let options = LoaderOptions {
        workers,
        ahead: 2 * workers,
    };
    let mut loader = Loader::new(Arc::clone(&images), options)?;
    let config = SamplerConfig {
        samples: Dataset::len(&*images),
        world: 1,
        rank: 0,
        shuffle: true,
        seed: 1,
    };
    let (began, mut count) = (Instant::now(), 0);
    loader.start(Sampler::exact(config, 64)?.epoch(0));
    while let Some(batch) = loader.next_batch()? {
        count += batch.labels.len();
    }
    println!("{:.1}", count as f64 / began.elapsed().as_secs_f64());
    Ok(())
}
