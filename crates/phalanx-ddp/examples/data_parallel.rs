//! Data parallelism in one process, as PyTorch's `DataParallel` does it: in each step a master copies its parameters to the
//! replicas, gives each a part of the batch, adds their gradients, and alone takes the optimizer's step. Trains a second time
//! with `DistributedDataParallel`: the losses and the weights have the same bits.
//!
//! `cargo run -p phalanx-ddp --example data_parallel`
//!
//! For comparison only: what the master moves grows with the number of replicas, where `DistributedDataParallel` sends at most
//! twice the gradients from any rank.

use std::ops::Range;

use phalanx_comm::ProcessGroup;
use phalanx_ddp::DistributedDataParallel;
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradSink, Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const REPLICAS: usize = 4;
const STEPS: usize = 5;
const BATCH: usize = 32; // of all replicas
const IN: usize = 9;
const OUT: usize = 4;

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

fn model() -> Result<(Net, Params)> {
    let mut scope = Scope::new(Seed(2));
    let net = Net {
        first: Linear::new(scope.enter("first"), IN, 21),
        norm: BatchNorm::new(scope.enter("norm"), 21),
        last: Linear::new(scope.enter("last"), 21, OUT),
    };
    Ok((net, scope.build()?))
}

/// The samples of one replica.
fn part(replica: usize) -> Range<usize> {
    let each = BATCH / REPLICAS;
    replica * each..(replica + 1) * each
}

/// Forward and backward of some samples of a step; their mean loss.
fn backward(
    net: &Net,
    params: &Params,
    tape: &mut Tape,
    index: usize,
    samples: Range<usize>,
    sink: &mut dyn GradSink,
) -> Result<f32> {
    let random = |i: usize| (((index * 1000 + i) as f32).sin() * 43_758.547).fract(); // -1 to 1
    let n = samples.len();
    let x: Vec<f32> = (samples.start * IN..samples.end * IN).map(random).collect();
    let y = x.chunks(IN).flat_map(|x| [x[0], x[1] * x[2], -x[3], 0.5]);
    let y: Vec<f32> = y.collect();
    let step = tape.step(params, StepKey::new(0, index as u64));
    let x = net.first.forward(step.input(&x, &[n, IN])?)?;
    let x = net.norm.forward(x)?.relu()?;
    let loss = net.last.forward(x)?.mse_loss(&y, Reduction::Mean)?;
    let value = loss.item()?;
    loss.backward(sink)?;
    Ok(value)
}

struct Replica {
    params: Params,
    grads: Grads,
    tape: Tape,
}

/// Each replica's losses, step by step; the master's parameters; bytes that the master has moved.
fn data_parallel() -> Result<(Vec<Vec<f32>>, Params, usize)> {
    let (net, mut params) = model()?;
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let replica = |_| Replica {
        params: params.clone(),
        grads: Grads::like(&params),
        tape: Tape::new(Threads(1)),
    };
    let mut replicas: Vec<Replica> = (0..REPLICAS).map(replica).collect();
    let (mut losses, mut moved_bytes) = (Vec::new(), 0);
    for index in 0..STEPS {
        // The master's parameters and statistics to all.
        for replica in &mut replicas {
            replica.params.flat_mut().copy_from_slice(params.flat());
            let buffers = replica.params.buffers_flat_mut();
            buffers.copy_from_slice(params.buffers_flat());
        }
        // Forward and backward of all at once.
        let of_step: Result<Vec<f32>> = std::thread::scope(|scope| {
            let net = &net;
            let start = |(r, replica): (usize, &'_ mut Replica)| {
                let Replica {
                    params,
                    grads,
                    tape,
                } = replica;
                backward(net, params, tape, index, part(r), grads)
            };
            let threads = replicas.iter_mut().enumerate();
            let threads: Vec<_> = threads.map(|r| scope.spawn(move || start(r))).collect();
            let ended = threads.into_iter().map(|t| t.join().expect("no panic"));
            ended.collect()
        });
        losses.push(of_step?);
        // Their gradients to the master, which takes the step.
        let (master, others) = replicas.split_first_mut().ok_or("no replica")?;
        let mean = master.grads.flat_mut();
        for other in others {
            mean.iter_mut()
                .zip(other.grads.flat())
                .for_each(|(mean, g)| *mean += g);
            moved_bytes += 2 * size_of_val(params.flat()) + size_of_val(params.buffers_flat());
            other.tape.update_buffers(&mut other.params)?;
        }
        mean.iter_mut().for_each(|g| *g *= 1.0 / REPLICAS as f32);
        optimizer.step(&mut params, &master.grads)?;
        master.tape.update_buffers(&mut params)?;
    }
    Ok((losses, params, moved_bytes))
}

/// This rank's losses and parameters.
fn distributed(group: ProcessGroup) -> Result<(Vec<f32>, Params)> {
    let rank = group.rank();
    let (net, mut params) = model()?;
    let mut ddp = DistributedDataParallel::new(group, &mut params, Default::default())?;
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let mut tape = Tape::new(Threads(1));
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let loss = backward(&net, &params, &mut tape, index, part(rank), &mut ddp)?;
        losses.push(loss);
        if ddp.finish()?.is_yes() {
            optimizer.step(&mut params, &ddp)?;
        }
        ddp.update_buffers(&mut tape, &mut params)?;
        ddp.sync_buffers(&mut params)?;
    }
    Ok((losses, params))
}

fn main() -> Result<()> {
    let (losses, master, moved_bytes) = data_parallel()?;
    let ranks: Vec<(Vec<f32>, Params)> = std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(REPLICAS, Default::default()).into_iter();
        let ranks: Vec<_> = groups.map(|g| scope.spawn(|| distributed(g))).collect();
        let ended = ranks.into_iter().map(|r| r.join().expect("no panic"));
        ended.collect::<Result<_>>()
    })?;
    let mean = |losses: &mut dyn Iterator<Item = f32>| losses.sum::<f32>() / REPLICAS as f32;
    for (step, of_step) in losses.iter().enumerate() {
        println!(
            "step {step}  loss {:.9} with DataParallel, {:.9} with DistributedDataParallel",
            mean(&mut of_step.iter().copied()),
            mean(&mut ranks.iter().map(|(losses, _)| losses[step]))
        );
    }
    let bits = |params: &Params| {
        let values = params.flat().iter().chain(params.buffers_flat());
        values.map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    let same = ranks
        .iter()
        .all(|(_, params)| bits(params) == bits(&master));
    println!("weights and running statistics have the same bits: {same}");
    println!(
        "the master has moved {} bytes a step; a model has {}",
        moved_bytes / STEPS,
        size_of_val(master.flat())
    );
    Ok(())
}
