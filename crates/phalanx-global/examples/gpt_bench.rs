//! Phalanx's side of `tools/runs/2026-11-24-dtensor/run.py`: a GPT trained on the characters of a text by one rank,
//! DistributedDataParallel, tensor parallel, fully sharded, or the last two over a mesh of 2 x 2. Rank 0 prints JSON.
//!
//! `phalanx launch --no-prefix --nproc-per-node 2 -- target/release/examples/gpt_bench --mode fsdp --text input.txt`

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use phalanx_comm::{InitOptions, ProcessGroup};
use phalanx_ddp::DistributedDataParallel;
use phalanx_global::{GlobalParams, Placement, Sbp};
use phalanx_nn::models::{Gpt, GptConfig};
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{ParamInfo, Params, Reduction, Scope, Seed, StepKey, Tape, Threads};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Mode {
    Single,
    Ddp,
    Tensor,
    Fsdp,
    Mesh2d,
}

#[derive(Parser)]
struct Args {
    #[arg(long)]
    mode: Mode,
    /// File whose characters are learned.
    #[arg(long)]
    text: PathBuf,
    #[arg(long, default_value_t = 2)]
    layers: usize,
    #[arg(long, default_value_t = 4)]
    heads: usize,
    #[arg(long, default_value_t = 64)]
    width: usize,
    #[arg(long, default_value_t = 32)]
    context: usize,
    /// Sequences of a step on all ranks together.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    #[arg(long, default_value_t = 20)]
    steps: usize,
    #[arg(long)]
    sgd: bool,
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Write the initial weights as safetensors.
    #[arg(long)]
    save_init: Option<PathBuf>,
}

/// The text as numbers of its characters in the order of their code points, and how many characters there are.
fn read(path: &Path) -> Result<(Vec<u32>, usize)> {
    let text = std::fs::read_to_string(path)?;
    let mut all: Vec<char> = text.chars().collect();
    all.sort_unstable();
    all.dedup();
    let number = |c| all.binary_search(&c).unwrap_or_default() as u32;
    Ok((text.chars().map(number).collect(), all.len()))
}

/// Some rows of the batch of step `i`, and the tokens that follow.
fn batch(text: &[u32], args: &Args, i: usize, rows: Range<usize>) -> [Vec<u32>; 2] {
    let starts = text.len() - args.context - 1;
    [0, 1].map(|shift| {
        let start = |r| ((i * args.batch + r) * 7919) % starts + shift;
        let row = |r| text[start(r)..][..args.context].iter().copied();
        rows.clone().flat_map(row).collect()
    })
}

/// Column and row parallel.
fn tensor_parallel(info: &ParamInfo) -> Sbp {
    let is = |parts: &[&str]| parts.iter().any(|p| info.name.contains(p));
    if is(&["attn.q", "attn.k", "attn.v", "mlp.fc", "lm_head", "wte"]) {
        Sbp::split(0)
    } else if is(&["attn.proj.weight", "mlp.proj.weight"]) {
        Sbp::split(1)
    } else {
        Sbp::Broadcast
    }
}

fn optimizer(args: &Args, params: &Params) -> Box<dyn Optimizer> {
    match args.sgd {
        true => Box::new(Sgd::new(params, args.lr)),
        false => Box::new(Adam::new(params, args.lr)),
    }
}

/// A line of /proc/self/status in MiB: VmRSS, or VmHWM for the most so far.
fn memory(line: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let rest = status.split(line).nth(1).unwrap_or_default();
    let number = rest.split_whitespace().next().unwrap_or_default();
    Ok(number.parse::<f64>()? / 1024.0)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (text, vocab) = read(&args.text)?;
    let group = match args.mode {
        Mode::Single => ProcessGroup::threads(1, Default::default()).remove(0),
        _ => ProcessGroup::init(InitOptions::default())?,
    };
    let (rank, world) = (group.rank(), group.world_size());
    let base = memory("VmRSS:")?;
    let mut scope = Scope::new(Seed(1));
    let config = GptConfig {
        vocab,
        context: args.context,
        layers: args.layers,
        heads: args.heads,
        width: args.width,
        dropout: 0.0,
    };
    let model = Gpt::new(&mut scope, &config);
    let mut params = scope.build()?;
    let parameters = params.numel();
    if let (Some(path), 0) = (&args.save_init, rank) {
        phalanx_checkpoint::save_params(path, &params, &Default::default())?;
    }
    let sizes = [args.batch, args.context];
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    let mut tape = Tape::new(Threads(1));
    if matches!(args.mode, Mode::Single | Mode::Ddp) {
        let mut ddp = DistributedDataParallel::new(group.clone(), &mut params, Default::default())?;
        let mut optimizer = optimizer(&args, &params);
        let rows = args.batch / world;
        for i in 0..args.steps {
            let began = Instant::now();
            let [x, y] = batch(&text, &args, i, rank * rows..(rank + 1) * rows);
            let step = tape.step(&params, StepKey::new(0, i as u64));
            let logits = model.forward(&step, &x, (rows, args.context))?;
            let loss = logits.cross_entropy(&y, Reduction::Mean)?;
            let mut value = [loss.item()?];
            loss.backward(&mut ddp)?;
            drop(step);
            if ddp.finish()?.is_yes() {
                optimizer.step(&mut params, &ddp)?;
            }
            group.all_reduce(&mut value, phalanx_comm::ReduceOp::Mean)?;
            losses.push(value[0]);
            times.push(began.elapsed());
        }
    } else {
        let (s0, whole) = (Sbp::split(0), Sbp::Broadcast);
        let (dims, tokens): (&[_], &[Sbp]) = match args.mode {
            Mode::Tensor => (&[("tensor", world)], &[whole]),
            Mode::Fsdp => (&[("data", world)], &[s0]),
            _ => (&[("data", 2), ("tensor", 2)], &[s0, whole]),
        };
        let placement = Placement::new(&group, dims)?;
        let mut weights = GlobalParams::new(&placement, &params, |info| match args.mode {
            Mode::Tensor => vec![tensor_parallel(info)],
            Mode::Fsdp => vec![s0],
            _ => vec![s0, tensor_parallel(info)],
        })?;
        if args.mode != Mode::Tensor {
            weights = weights.gather_over("data")?;
        }
        drop(params);
        let mut grads = weights.grads();
        let mut optimizer = optimizer(&args, weights.local());
        for i in 0..args.steps {
            let began = Instant::now();
            let [x, y] = batch(&text, &args, i, 0..args.batch);
            let step = weights.step(&mut tape, StepKey::new(0, i as u64));
            let [x, y] = [x, y].map(|all| step.indices(&all, &sizes, tokens));
            let logits = model.forward(&step, &x?, (sizes[0], sizes[1]))?;
            let loss = logits.cross_entropy(&y?, Reduction::Mean)?;
            let value = loss.item()?;
            loss.backward(&mut grads)?;
            drop(step);
            optimizer.step(weights.local_mut(), &grads)?;
            losses.push(value);
            times.push(began.elapsed());
        }
    }
    let memories = group.all_gather_object(&[base, memory("VmHWM:")?])?;
    // The first two find memory and plans for the others.
    times.drain(..2.min(times.len().saturating_sub(1)));
    times.sort();
    let median = times.get(times.len() / 2).map(Duration::as_secs_f64);
    if rank == 0 {
        let all = serde_json::json!({
            "ranks": world, "parameters": parameters, "losses": losses,
            "median_ms": median.map(|s| s * 1e3), "memory_mib": memories,
        });
        println!("{all}");
    }
    Ok(())
}
