//! Trains a layer on two ranks, with float32 gradients and with PowerSGD. To use PowerSGD in a program, copy `hook.rs`.
//!
//! `cargo run -p phalanx-ddp --example power_sgd`

mod hook;

use hook::{PowerSgd, PowerSgdOptions};
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::{DistributedDataParallel, digest, verify_equal};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const WORLD: usize = 2;
const STEPS: usize = 100;
const BATCH: usize = 16; // of each rank
const WIDTH: usize = 32;

fn train(group: ProcessGroup, compressed: bool) -> Result<()> {
    let rank = group.rank();
    let mut scope = Scope::new(Seed(3));
    let net = Linear::new(scope.enter("only"), WIDTH, WIDTH);
    let mut params = scope.build()?;
    let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?;
    if compressed {
        let options = PowerSgdOptions {
            rank: 2,
            start_step: 10,
            ..PowerSgdOptions::default()
        };
        ddp.set_hook(Some(Box::new(PowerSgd::new(options))))?;
    }
    let mut optimizer = Sgd::new(&params, 2.0);
    let mut tape = Tape::new(Threads(1));
    for index in 0..=STEPS {
        let first = (index * WORLD + rank) * BATCH * WIDTH;
        let random = |i: usize| (((first + i) as f32).sin() * 43_758.547).fract(); // -1 to 1
        let x: Vec<f32> = (0..BATCH * WIDTH).map(random).collect();
        let y = x.chunks(WIDTH).flat_map(|x| x.iter().rev());
        let y: Vec<f32> = y.copied().collect();
        let step = tape.step(&params, StepKey::new(0, index as u64));
        let x = step.input(&x, &[BATCH, WIDTH])?;
        let loss = net.forward(x)?.mse_loss(&y, Reduction::Mean)?;
        let mut mean = [loss.item()?];
        loss.backward(&mut ddp)?;
        drop(step);
        if ddp.finish()?.is_yes() {
            optimizer.step(&mut params, &ddp)?;
        }
        group.all_reduce(&mut mean, ReduceOp::Mean)?;
        if rank == 0 && index % 20 == 0 {
            let how = if compressed { "PowerSGD" } else { "float32" };
            println!("{how}  step {index:3}  loss {:.6}", mean[0]);
        }
    }
    Ok(verify_equal(&group, &params, digest(&params))?)
}

fn main() -> Result<()> {
    for compressed in [false, true] {
        std::thread::scope(|scope| {
            let groups = ProcessGroup::threads(WORLD, Default::default()).into_iter();
            let ranks: Vec<_> = groups
                .map(|g| scope.spawn(move || train(g, compressed)))
                .collect();
            let results = ranks.into_iter().map(|r| r.join().expect("no panic"));
            results.collect::<Result<()>>()
        })?;
    }
    Ok(())
}
