//! Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019): each rank trains for itself, and every five
//! steps the ranks average their weights instead of their gradients in every step.
//!
//! `cargo run -p phalanx-ddp --example local_sgd`

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::{DistributedDataParallel, LocalGradients, digest, verify_equal};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const WORLD: usize = 2;
const STEPS: usize = 100;
const EVERY: usize = 5;
const BATCH: usize = 16; // of each rank
const FEATURES: usize = 8;

fn train(group: ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let mut scope = Scope::new(Seed(3));
    let net = Linear::new(scope.enter("only"), FEATURES, 1);
    let mut params = scope.build()?;
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?;
    ddp.set_hook(Some(Box::new(LocalGradients)))?; // gradients stay on their rank
    let mut optimizer = Sgd::new(&params, 0.3);
    let mut tape = Tape::new(Threads(1));
    for index in 1..=STEPS {
        let first = (index * WORLD + rank) * BATCH * FEATURES;
        let random = |i: usize| (((first + i) as f32).sin() * 43_758.547).fract(); // -1 to 1
        let x: Vec<f32> = (0..BATCH * FEATURES).map(random).collect();
        let y = x.chunks(FEATURES).map(|x| x[0] - 2.0 * x[1] + 0.5);
        let y: Vec<f32> = y.collect();
        let step = tape.step(&params, StepKey::new(0, index as u64));
        let x = step.input(&x, &[BATCH, FEATURES])?;
        let loss = net.forward(x)?.mse_loss(&y, Reduction::Mean)?;
        let value = loss.item()?;
        loss.backward(&mut ddp)?;
        drop(step);
        if ddp.finish()?.is_yes() {
            optimizer.step(&mut params, &ddp)?;
        }

        // How far each rank's weights are from the mean, before it is taken.
        let mut mean = params.flat().to_vec();
        group.all_reduce(&mut mean, ReduceOp::Mean)?;
        let apart = params.flat().iter().zip(&mean).map(|(w, m)| (w - m).abs());
        let mut facts = [value, apart.fold(0.0, f32::max)];
        group.all_reduce(&mut facts, ReduceOp::Max)?;
        if index % EVERY == 0 {
            params.flat_mut().copy_from_slice(&mean);
            verify_equal(&group, &params, digest(&params))?;
        }
        if rank == 0 && (index < 10 || index % 20 == 0) {
            let averaged = if index % EVERY == 0 { ", averaged" } else { "" };
            println!(
                "step {index:3}  largest loss {:.6}  weights apart by {:.6}{averaged}",
                facts[0], facts[1]
            );
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(WORLD, Default::default()).into_iter();
        let ranks: Vec<_> = groups.map(|g| scope.spawn(|| train(g))).collect();
        let results = ranks.into_iter().map(|r| r.join().expect("no panic"));
        results.collect()
    })
}
