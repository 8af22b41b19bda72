//! What `DistributedDataParallel` costs: the CNN of `mnist_candle` is trained without averaging, with gradients averaged by hand
//! in one slice, and by `DistributedDataParallel`, a few steps of each in turn. Prints the median of a step of each.
//!
//! ```text
//! cargo run --release -p phalanx-candle --example overhead_candle -- --nproc-per-node 2
//! ```

use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer as _, VarBuilder, VarMap, loss};
use phalanx_candle::comm::{ProcessGroup, ReduceOp};
use phalanx_candle::{AdamW, DistributedDataParallel, RankContext, Result, clap};
use phalanx_data::mnist;

#[allow(dead_code, reason = "the model and the reader of another example")]
#[path = "mnist_candle.rs"]
mod mnist_candle;
use mnist_candle::{Cnn, read};

/// Measures the cost of averaging.
#[derive(clap::Args)]
struct Args {
    /// Folder with MNIST's files, or synthetic
    #[arg(long, default_value = "synthetic")]
    data: String,
    /// Samples of a rank in a step
    #[arg(long, default_value_t = 32)]
    batch_size: u64,
    /// Rounds; each trains 20 steps in each way
    #[arg(long, default_value_t = 15)]
    rounds: usize,
}

const WAYS: [&str; 3] = ["no averaging", "one slice", "DistributedDataParallel"];

/// Averages the gradients as a program does that has only a process group.
fn by_hand(group: &ProcessGroup, vars: &[Var], optimizer: &mut AdamW, loss: &Tensor) -> Result<()> {
    let mut gradients = loss.backward()?;
    let mut all: Vec<f32> = Vec::new();
    for var in vars {
        if let Some(gradient) = gradients.get(var) {
            all.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    group.all_reduce(&mut all, ReduceOp::Mean)?;
    let mut rest = &all[..];
    for var in vars {
        let (values, after) = rest.split_at(var.elem_count());
        gradients.insert(var, Tensor::from_slice(values, var.shape(), var.device())?);
        rest = after;
    }
    Ok(optimizer.step(&gradients)?)
}

fn measure(rank: &RankContext, args: &Args) -> Result<()> {
    let (train, _) = mnist::open(&args.data, 0)?;
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let model = Cnn::new(vb, 0.5)?;
    let group = rank.group();
    let mut ddp = DistributedDataParallel::new(&group, &varmap, Default::default())?;
    let vars = varmap.all_vars();
    let mut optimizer = AdamW::new(vars.clone(), Default::default())?;
    let first = rank.rank() as u64 * args.batch_size;
    let indices: Vec<u64> = (first..first + args.batch_size).collect();
    let (images, labels) = read(&train, 0, &indices)?;
    let mut seconds = [const { Vec::new() }; 3];
    for _ in 0..args.rounds {
        for (way, seconds) in seconds.iter_mut().enumerate() {
            for _ in 0..20 {
                group.barrier()?;
                let start = Instant::now();
                let loss = loss::nll(&model.forward(&images, true)?, &labels)?;
                match way {
                    0 => optimizer.backward_step(&loss)?,
                    1 => by_hand(&group, &vars, &mut optimizer, &loss)?,
                    _ => ddp.backward_step(&mut optimizer, &loss)?,
                }
                group.barrier()?;
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    for (way, mut seconds) in WAYS.iter().zip(seconds) {
        seconds.sort_by(f64::total_cmp);
        let median = 1e3 * seconds[seconds.len() / 2];
        if rank.is_main() {
            rank.line(&format!("{way:24}{median:.3} ms a step"))?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    phalanx_candle::main_with(measure)
}
