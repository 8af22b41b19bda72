//! The DDP quick start, launch form: its `main.py`, one process a rank.
//!
//! ```text
//! cargo build --release --example quick_start_launch
//! phalanx launch --nproc_per_node 2 target/release/examples/quick_start_launch
//! ```

use phalanx::comm::{InitOptions, ProcessGroup};
use phalanx::ddp::{DistributedDataParallel, verify_equal};
use phalanx::nn::layers::Linear;
use phalanx::nn::optim::Sgd;
use phalanx::nn::{Scope, Seed, StepKey, Tape, Threads};
use phalanx::train::checkpoint;
use phalanx::train::loader::{Loader, LoaderOptions};
use phalanx::train::sampler::{Cursor, Sampler, SamplerConfig};
use phalanx::train::synthetic;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // DDP: dist.init_process_group(); rank and world size come from the launcher.
    let group = ProcessGroup::init(InitOptions::default())?;
    let (rank, world) = (group.rank(), group.world_size());

    // DDP: the rank's part of every epoch; there is no set_epoch to forget.
    let data = std::sync::Arc::new(synthetic::digits(512, 1));
    let config = SamplerConfig {
        samples: 512,
        world,
        rank,
        shuffle: true,
        seed: 1,
    };
    let sampler = Sampler::exact(config, 64)?;
    let mut loader = Loader::new(data, LoaderOptions::default())?;

    let mut scope = Scope::new(Seed(1));
    let model = Linear::new(scope.enter("linear"), 784, 10);
    let mut params = scope.build()?;
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?; // DDP
    let mut optimizer = Sgd::new(&params, 0.001);
    let mut tape = Tape::new(Threads(1));

    for (epoch, plan) in sampler.epochs(Cursor::START)?.take(2).enumerate() {
        loader.start(plan);
        let mut index = 0;
        while let Some(batch) = loader.next_batch()? {
            let n = batch.labels.len();
            let step = tape.step(&params, StepKey::new(epoch as u64, index));
            let scores = model.forward(step.input(&batch.images, &[n, 784])?)?;
            let loss = scores.cross_entropy(&batch.labels, n as f32)?;
            if index == 0 {
                println!("rank {rank}/{world} epoch {epoch} loss {:.4}", loss.item());
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
        let path = std::env::temp_dir().join("saved_model.safetensors");
        checkpoint::save_params(&path, &params, &Default::default())?;
        println!("saved {}", path.display());
    }
    group.shutdown()?;
    Ok(())
}
