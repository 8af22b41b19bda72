//! Model parallelism by hand: each of three ranks has a part of the network. Activations travel from rank to rank, and their
//! gradients back. Trains a second time in one process: the losses and the weights have the same bits.
//!
//! `cargo run -p phalanx-ddp --example model_parallel`
//!
//! Only one rank computes at a time unless a batch is cut into several: this is for models that do not fit one rank, not for
//! speed. A model that does not fit builds the rank's own part only.

use std::ops::Range;

use phalanx_comm::ProcessGroup;
use phalanx_nn::layers::{BatchNorm, Linear};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Grads, Params, Reduction, Scope, Seed, StepKey, Tape, Tensor, Threads};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const PARTS: usize = 3;
const STEPS: usize = 5;
const BATCH: usize = 10;
const IN: usize = 9;
const HIDDEN: usize = 21;
const OUT: usize = 4;

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

impl Net {
    fn part<'s>(&self, part: usize, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>> {
        match part {
            0 => self.first.forward(x),
            1 => self.norm.forward(x)?.relu(),
            _ => self.last.forward(x),
        }
    }
}

fn model() -> Result<(Net, Params)> {
    let mut scope = Scope::new(Seed(2));
    let net = Net {
        first: Linear::new(scope.enter("part0"), IN, HIDDEN),
        norm: BatchNorm::new(scope.enter("part1"), HIDDEN),
        last: Linear::new(scope.enter("part2"), HIDDEN, OUT),
    };
    Ok((net, scope.build()?))
}

/// Inputs and targets of a step.
fn batch(step: usize) -> (Vec<f32>, Vec<f32>) {
    let random = |i: usize| (((step * 1000 + i) as f32).sin() * 43_758.547).fract(); // -1 to 1
    let x: Vec<f32> = (0..BATCH * IN).map(random).collect();
    let y = x.chunks(IN).flat_map(|x| [x[0], x[1] * x[2], -x[3], 0.5]);
    (x.clone(), y.collect())
}

/// Trains the parts `mine` of the network; losses where the last part is. `group` leads to the ranks of the others.
fn train(mine: Range<usize>, group: Option<&ProcessGroup>) -> Result<(Params, Vec<f32>)> {
    let (net, mut params) = model()?;
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let before = group.filter(|_| mine.start > 0);
    let behind = group.filter(|_| mine.end < PARTS);
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let (x, y) = batch(index);
        let step = tape.step(&params, StepKey::new(0, index as u64));

        let input = match before {
            None => step.input(&x, &[BATCH, IN])?,
            Some(group) => {
                let mut values = vec![0.0; BATCH * HIDDEN];
                group.recv(&mut values, mine.start - 1)?;
                step.variable(&values, &[BATCH, HIDDEN])? // its gradient is wanted
            }
        };
        let received = input.share();
        let output = mine.clone().try_fold(input, |x, part| net.part(part, x))?;

        match behind {
            None => {
                let loss = output.mse_loss(&y, Reduction::Mean)?;
                losses.push(loss.item()?);
                loss.backward(&mut grads)?;
            }
            Some(group) => {
                group.send(output.data(), mine.end)?;
                let mut gradient = vec![0.0; output.data().len()];
                group.recv(&mut gradient, mine.end)?;
                output.backward_with(&gradient, &mut grads)?;
            }
        }
        if let Some(group) = before {
            let gradient = received
                .grad()
                .ok_or("the loss does not depend on the input")?;
            group.send(&gradient, mine.start - 1)?;
        }

        drop(received);
        drop(step);
        tape.update_buffers(&mut params)?;
        optimizer.step(&mut params, &grads)?;
    }
    Ok((params, losses))
}

fn main() -> Result<()> {
    let (whole, alone) = train(0..PARTS, None)?;
    let ranks: Vec<(Params, Vec<f32>)> = std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(PARTS, Default::default()).into_iter();
        let rank = |group: ProcessGroup| train(group.rank()..group.rank() + 1, Some(&group));
        let ranks: Vec<_> = groups.map(|g| scope.spawn(move || rank(g))).collect();
        let ended = ranks.into_iter().map(|r| r.join().expect("no panic"));
        ended.collect::<Result<_>>()
    })?;
    for (step, (many, one)) in ranks[PARTS - 1].1.iter().zip(&alone).enumerate() {
        println!("step {step}  loss {many:.9} on {PARTS} ranks, {one:.9} in one process");
    }
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let same = (0..PARTS).all(|part| {
        let own = |params: &Params| {
            let own = format!("part{part}.");
            let ids = params.ids().zip(params.infos());
            let ids = ids.filter(|(_, info)| info.name.starts_with(&own));
            ids.flat_map(|(id, _)| bits(params.get(id)))
                .collect::<Vec<_>>()
        };
        own(&ranks[part].0) == own(&whole)
    });
    let same = same && bits(ranks[1].0.buffers_flat()) == bits(whole.buffers_flat());
    println!("weights and running statistics have the same bits: {same}");
    Ok(())
}
