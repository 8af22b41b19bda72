//! Times whole training steps in steady state on ready-made batches.

use std::time::{Duration, Instant};

use phalanx_comm::ReduceOp;
use phalanx_ddp::{DdpOptions, DistributedDataParallel};
use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Scope, Seed, StepKey, Tape, Threads};
use phalanx_train::process::peak_rss_bytes;
use phalanx_train::{Dataset, synthetic};
use serde_json::json;

use crate::error::{Error, ErrorKind, Result};
use crate::ranks::{self, RankArgs};
use crate::train::RankContext;

/// Which model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Model {
    /// PyTorch's basic MNIST CNN
    Mnist,
}

/// Arguments of `bench train`.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainBenchArgs {
    /// Recipe to time
    #[arg(value_enum)]
    pub recipe: Model,
    /// Samples per rank and step
    #[arg(
        long,
        visible_alias = "batch-size",
        default_value_t = 64,
        value_name = "N"
    )]
    pub batch: usize,
    /// Steps to time
    #[arg(long, default_value_t = 50, value_name = "N")]
    pub steps: usize,
    /// Steps before that
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub warmup: usize,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ranks: RankArgs,
}

impl TrainBenchArgs {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self) -> Result<()> {
        ranks::check_count("--batch", self.batch, 1 << 20)?;
        ranks::check_count("--steps", self.steps, 1 << 30)?;
        if self.warmup > 1 << 30 {
            return Err(Error::usage("--warmup can be at most 1073741824"));
        }
        Ok(())
    }
}

/// Ready-made batches that the steps go round.
const BATCHES: usize = 4;

/// Runs the benchmark as one rank; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run_rank(ctx: &RankContext, args: &TrainBenchArgs) -> Result<()> {
    let data = synthetic::digits(BATCHES * args.batch * ctx.world(), 1);
    let [h, w, c] = data.image_shape();
    let pixels = h * w * c;
    let mut batches = Vec::with_capacity(BATCHES);
    for b in 0..BATCHES {
        let mut images = vec![0.0; args.batch * pixels];
        let mut labels = Vec::with_capacity(args.batch);
        for (i, image) in images.chunks_exact_mut(pixels).enumerate() {
            labels.push(data.read((b * ctx.world() + ctx.rank()) * args.batch + i, image)?);
        }
        batches.push((images, labels));
    }

    let mut scope = Scope::new(Seed(1));
    let net = MnistCnn::new(&mut scope);
    let mut params = scope.build()?;
    let mut ddp =
        DistributedDataParallel::new(ctx.group.clone(), &mut params, DdpOptions::default())?;
    let mut optimizer = Sgd::new(&params, 0.01).momentum(0.9);
    let mut tape = Tape::new(Threads(ctx.threads));

    let mut first_step = Duration::ZERO;
    let mut times_ms = Vec::with_capacity(args.steps);
    let mut exposed_ms = Vec::with_capacity(args.steps);
    for i in 0..args.warmup + args.steps {
        let (images, labels) = &batches[i % BATCHES];
        let began = Instant::now();
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(images, &[args.batch, h, w, c])?;
        let loss = net.forward(x)?.nll_loss(labels, args.batch as f32)?;
        let value = loss.item();
        loss.backward(&mut ddp)?;
        drop(step);
        ddp.finish()?;
        optimizer.step(&mut params, &ddp)?;
        if !value.is_finite() {
            return Err(Error::new(
                ErrorKind::Failed,
                format!("the loss became {value} in step {i}"),
            ));
        }
        if i == 0 {
            first_step = ctx.started.elapsed();
        }
        if i >= args.warmup {
            times_ms.push(began.elapsed().as_secs_f64() * 1e3);
            exposed_ms.push(ddp.times().exposed().as_secs_f64() * 1e3);
        }
    }
    // A step lasts as long as on its slowest rank.
    ctx.group.all_reduce(&mut times_ms, ReduceOp::Max)?;
    ctx.group.all_reduce(&mut exposed_ms, ReduceOp::Mean)?;
    let mut peak_mib = [peak_rss_bytes().map_or(f64::NAN, |b| b as f64 / f64::from(1 << 20))];
    ctx.group.all_reduce(&mut peak_mib, ReduceOp::Max)?;
    if !ctx.is_main() {
        return Ok(());
    }
    let step_ms = median(&mut times_ms);
    let images_per_s = (args.batch * ctx.world()) as f64 / step_ms * 1e3;
    let exposed = median(&mut exposed_ms);
    if args.json {
        let line = json!({
            "model": "mnist", "world": ctx.world(), "threads": ctx.threads, "batch": args.batch,
            "steps": args.steps, "step_ms_median": step_ms, "images_per_s": images_per_s,
            "exposed_comm_ms": exposed, "peak_rss_mib": peak_mib[0], "first_step_s": first_step.as_secs_f64(),
        });
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "mnist CNN fp32, {}, batch {} a rank\nstep          {step_ms:.2} ms (median of {})\nthroughput    {images_per_s:.0} images/s\n\
         communication {exposed:.2} ms exposed a step\nmemory        {:.0} MiB peak a rank\nfirst step    {:.2} s after start",
        ctx.describe(),
        args.batch,
        args.steps,
        peak_mib[0],
        first_step.as_secs_f64()
    ))
}

/// Middle value (the upper one of an even count).
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
