//! The DDP quick start, launch form: its `main.py`, one process a rank.
//!
//! ```text
//! cargo build --release --example quick_start_launch
//! phalanx launch --nproc_per_node 2 target/release/examples/quick_start_launch
//! ```
//!
//! It trains on the CIFAR-10 in `./data` (`phalanx download cifar10 --to data`), or, saying so,
//! on drawn pictures where there is none, and saves `saved_model.ckpt`, which
//! `torch.load` reads.

use std::path::Path;
use std::sync::Arc;

use phalanx::checkpoint;
use phalanx::comm::{InitOptions, ProcessGroup};
use phalanx::data::cifar10::{self, Scaling, Split};
use phalanx::data::loader::{Loader, LoaderOptions};
use phalanx::data::sampler::{Cursor, Sampler, SamplerConfig};
use phalanx::data::{ImageDataset, synthetic};
use phalanx::ddp::{DistributedDataParallel, verify_equal};
use phalanx::nn::layers::Linear;
use phalanx::nn::optim::Sgd;
use phalanx::nn::{Scope, Seed, StepKey, Tape, Threads};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // DDP: dist.init_process_group(); rank and world size come from the launcher.
    let group = ProcessGroup::init(InitOptions::default())?;
    let (rank, world) = (group.rank(), group.world_size());
    let local_rank = local_rank()?;

    let folder = Path::new("data");
    let data: Arc<dyn ImageDataset> = match cifar10::check(folder) {
        Ok(_) => Arc::new(cifar10::load(folder, Split::Train, Scaling::Unit)?),
        Err(missing) => {
            if rank == 0 {
                let missing = missing.to_string();
                let what = missing.lines().next().unwrap_or_default();
                let mend = "phalanx download cifar10 --to data";
                eprintln!(
                    "warning: {what}: training on drawn pictures instead (`{mend}` gets the real ones)"
                );
            }
            Arc::new(synthetic::pictures(0, 512, 1, Scaling::Unit))
        }
    };
    // DDP: the rank's part of every epoch; there is no set_epoch to forget.
    let config = SamplerConfig {
        samples: data.len(),
        world,
        rank,
        shuffle: true,
        seed: 1,
    };
    let sampler = Sampler::exact(config, 64)?;
    let mut loader = Loader::new(data, LoaderOptions::default())?;

    let mut scope = Scope::new(Seed(1));
    let model = Linear::new(scope.enter("linear"), 3 * 32 * 32, 10);
    let mut params = scope.build()?;
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?; // DDP
    let mut optimizer = Sgd::new(&params, 0.001);
    let mut tape = Tape::new(Threads(1));
    println!("Loaded the model on CPU {local_rank}");

    for (epoch, plan) in sampler.epochs(Cursor::START)?.take(2).enumerate() {
        loader.start(plan);
        let mut index = 0;
        while let Some(batch) = loader.next_batch()? {
            let n = batch.labels.len();
            let step = tape.step(&params, StepKey::new(epoch as u64, index));
            let scores = model.forward(step.input(&batch.images, &[n, 3 * 32 * 32])?)?;
            let loss = scores.cross_entropy(&batch.labels, n as f32)?;
            if index == 0 {
                println!("rank {rank}/{world} epoch {epoch} loss {:.4}", loss.item()?);
            }
            loss.backward(&mut ddp)?; // DDP
            drop(step);
            if ddp.finish()?.is_yes() {
                optimizer.step(&mut params, &ddp)?;
            }
            index += 1;
        }
    }
    verify_equal(&group, &params, checkpoint::weights_digest(&params))?; // DDP
    // DDP: one rank saves, under the model's own names.
    if rank == 0 {
        checkpoint::save_pth(Path::new("saved_model.ckpt"), &params)?;
    }
    group.shutdown()?;
    Ok(())
}

/// `--local_rank`, or what the launcher says: the quick start's
/// `torch.cuda.set_device(local_rank)` has nothing to choose here.
fn local_rank() -> Result<usize, std::num::ParseIntError> {
    let typed = std::env::args().skip_while(|arg| arg != "--local_rank");
    let mut typed = typed.skip(1);
    let number = typed.next().or_else(|| std::env::var("LOCAL_RANK").ok());
    number.map_or(Ok(0), |text| text.parse())
}
