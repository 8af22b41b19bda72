//! Times one training step of the MNIST network, synthetic data, in steady state.
//!
//! `cargo run --release -p phalanx-nn --example mnist_step -- [threads] [batch] [steps]`
//! prints median and best of forward, backward, update and whole step in milliseconds.

use std::time::Instant;

use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Grads, Scope, Seed, StepKey, Tape, Threads};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).map(|a| a.parse::<usize>());
    let mut next = |default| args.next().unwrap_or(Ok(default));
    let (threads, batch, steps) = (next(1)?, next(64)?, next(30)?.max(1));

    let mut scope = Scope::new(Seed(1));
    let model = MnistCnn::new(&mut scope);
    let mut params = scope.build()?;
    let mut grads = Grads::like(&params);
    let mut sgd = Sgd::new(&params, 0.01).momentum(0.9);
    let mut tape = Tape::new(Threads(threads));

    let images: Vec<f32> = (0..batch * 784)
        .map(|i| (i % 251) as f32 / 251.0 - 0.3)
        .collect();
    let labels: Vec<u32> = (0..batch as u32).map(|i| i % 10).collect();
    let (mut forward, mut backward, mut update, mut whole) = (vec![], vec![], vec![], vec![]);
    let mut last = f32::NAN;
    for i in 0..steps + 3 {
        let begin = Instant::now();
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(&images, &[batch, 28, 28, 1])?;
        let loss = model.forward(x)?.nll_loss(&labels, batch as f32)?;
        last = loss.item()?;
        let forwarded = Instant::now();
        loss.backward(&mut grads)?;
        let backwarded = Instant::now();
        drop(step);
        sgd.step(&mut params, &grads)?;
        let end = Instant::now();
        if i >= 3 {
            forward.push(forwarded - begin);
            backward.push(backwarded - forwarded);
            update.push(end - backwarded);
            whole.push(end - begin);
        }
    }
    // The best is what the code can do when nothing else runs; the median says
    // how busy the machine was.
    let show = |mut v: Vec<std::time::Duration>| {
        v.sort();
        format!(
            "{:.2} (best {:.2})",
            v[v.len() / 2].as_secs_f64() * 1e3,
            v[0].as_secs_f64() * 1e3
        )
    };
    println!(
        "threads {threads} batch {batch}, ms, medians of {steps}: forward {}, backward {}, update {}, step {}",
        show(forward),
        show(backward),
        show(update),
        show(whole),
    );
    println!(
        "pool {} MiB in {} allocations; last loss {last}",
        tape.pool_bytes() >> 20,
        tape.allocations()
    );
    Ok(())
}
