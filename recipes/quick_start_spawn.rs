//! The DDP quick start, spawn form:
//!
//! ```python
//! mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)
//! ```
//!
//! Run it: `cargo run --release --example quick_start_spawn`

use phalanx::comm::ProcessGroup;
use phalanx::ddp::DistributedDataParallel;
use phalanx::nn::layers::Linear;
use phalanx::nn::optim::Sgd;
use phalanx::nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};

type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

fn demo_fn(group: ProcessGroup, world_size: &usize) -> Outcome {
    let rank = group.rank(); // DDP
    assert_eq!(group.world_size(), *world_size);

    // The quick start's nn.Linear(10, 10). Each rank starts from another seed;
    // wrapping makes rank 0's weights everybody's.
    let mut scope = Scope::new(Seed(rank as u64));
    let model = Linear::new(scope.enter("linear"), 10, 10);
    let mut params = scope.build()?;
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?; // DDP
    let mut optimizer = Sgd::new(&params, 0.001);
    let mut tape = Tape::new(Threads(1));

    for i in 0..5 {
        // Each rank has data of its own.
        let x: Vec<f32> = (0..200)
            .map(|j| ((j * 7 + i * 3 + rank * 11) % 13) as f32 / 13.0)
            .collect();
        let target = vec![rank as f32; 200];
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let loss = model
            .forward(step.input(&x, &[20, 10])?)?
            .mse_loss(&target, Reduction::Mean)?;
        println!("rank {rank}/{world_size} step {i} loss {:.4}", loss.item()?);
        loss.backward(&mut ddp)?; // DDP: gradients are averaged inside
        drop(step);
        if ddp.finish()?.is_yes() {
            optimizer.step(&mut params, &ddp)?;
        }
    }
    Ok(())
}

fn main() -> Result<(), phalanx::SpawnError> {
    let world_size = 2;
    phalanx::spawn(demo_fn, world_size, world_size, true)?.join()
}
