//! Times whole training steps in steady state on ready-made batches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use phalanx::comm::ReduceOp;
use phalanx::data::{Dataset, ImageBatch, ImageDataset, synthetic};
use phalanx::nn::optim::Sgd;
use phalanx::nn::rng::torch::Generator;
use phalanx::nn::{Params, Scope};
use phalanx::train::{ExchangeArg, Job, PrecisionArg, RankContext, Settings, choice_name};
use phalanx_base::process::peak_rss_bytes;
use phalanx_launch::RankArgs;
use phalanx_recipes::{NETWORKS, Network};
use serde_json::json;

use crate::error::{Error, Result};

/// Recipes whose steps are timed, with their networks and lines of help.
fn timed() -> impl Iterator<Item = (Timed, &'static str)> {
    let all = NETWORKS.into_iter();
    all.filter_map(|(name, network)| Some((Timed { name, network }, network.timed?)))
}

/// A recipe by its name at the command line.
fn recipe_parser() -> impl TypedValueParser<Value = Timed> {
    let names = timed().map(|(recipe, help)| PossibleValue::new(recipe.name).help(help));
    PossibleValuesParser::new(names.collect::<Vec<_>>()).try_map(|name| {
        let mut recipes = timed().map(|(recipe, _)| recipe);
        let found = recipes.find(|recipe| recipe.name == name);
        found.ok_or("no such recipe")
    })
}

/// A recipe to time.
#[derive(Debug, Clone, Copy)]
pub struct Timed {
    pub(super) name: &'static str,
    pub(super) network: Network,
}

/// Ready-made batches of one rank, and the steps that go round them.
struct Batches {
    image: [usize; 3],
    all: Vec<(Vec<f32>, Vec<u32>)>,
    steps: usize,
    /// Samples of a step over all ranks.
    global: usize,
}

impl Dataset for Batches {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.steps * self.global
    }

    fn read_batch(&self, _epoch: u64, indices: &[u64], batch: &mut ImageBatch) -> Result<()> {
        let first = indices.first().map_or(0, |index| *index as usize);
        let (images, labels) = &self.all[first / self.global % BATCHES];
        batch.images.clear();
        batch.images.extend_from_slice(images);
        batch.labels.clear();
        batch.labels.extend_from_slice(labels);
        batch.image_shape = self.image;
        Ok(())
    }
}

/// Arguments of `bench train`.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainBenchArgs {
    /// Recipe to time
    #[arg(value_parser = recipe_parser())]
    pub recipe: Timed,
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
    /// Untimed steps before
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub warmup: usize,
    /// Data type of the inputs of convolutions and linear layers, and of stored activations; weights and sums are
    /// always fp32
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    pub precision: PrecisionArg,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results (not for mnist,
    /// which has no blocks)
    #[arg(long)]
    pub recompute: bool,
    /// Gradient synchronization: all-reduce, reduce-scatter, or inside the optimizer step; with the latter two, each
    /// rank updates a part of the parameters and holds the momentum of that part only (ZeRO stage 1)
    #[arg(long, value_enum, default_value_t = ExchangeArg::Auto)]
    pub exchange: ExchangeArg,
    /// Profile operations and layers of steps 3 to 12: print a table and write a Chrome trace per rank to
    /// FILE.<rank>.json
    #[arg(long, value_name = "FILE")]
    pub profile: Option<std::path::PathBuf>,
    /// Print one JSON object instead of text
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
        crate::error::check_count("--batch", self.batch, 1 << 20)?;
        crate::error::check_count("--steps", self.steps, 1 << 30)?;
        // The order of all samples is made before the first step.
        let steps = self.steps.saturating_add(self.warmup);
        if steps.saturating_mul(self.batch) > 1 << 26 {
            return Err(Error::usage(format!(
                "{steps} steps of {} samples are too many; use fewer --steps",
                self.batch
            )));
        }
        let network = &self.recipe.network;
        if self.recompute && !network.has_blocks {
            let others = timed().filter(|(recipe, _)| recipe.network.has_blocks);
            let others: Vec<&str> = others.map(|(recipe, _)| recipe.name).collect();
            return Err(Error::usage(format!(
                "--recompute: the {} has no blocks to recompute; use {}",
                network.title,
                others.join(" or ")
            )));
        }
        if self.warmup > 1 << 30 {
            return Err(Error::usage("--warmup can be at most 1073741824"));
        }
        Ok(())
    }
}

/// Ready-made batches that the steps go round.
const BATCHES: usize = 4;

/// Drawn digits, as the MNIST recipe's synthetic set has them.
fn digits(ctx: &RankContext, batch: usize) -> Result<Vec<(Vec<f32>, Vec<u32>)>> {
    let data = synthetic::digits(BATCHES * batch * ctx.world(), 1);
    let pixels = data.image_shape().iter().product();
    let mut all = Vec::with_capacity(BATCHES);
    for b in 0..BATCHES {
        let mut images = vec![0.0; batch * pixels];
        let mut labels = Vec::with_capacity(batch);
        for (i, image) in images.chunks_exact_mut(pixels).enumerate() {
            labels.push(data.read((b * ctx.world() + ctx.rank()) * batch + i, image)?);
        }
        all.push((images, labels));
    }
    Ok(all)
}

/// Noise of this size, other numbers for every rank and batch.
fn noise(ctx: &RankContext, image: [usize; 3], batch: usize) -> Vec<(Vec<f32>, Vec<u32>)> {
    let len = batch * image.iter().product::<usize>();
    let all = (0..BATCHES).map(|b| {
        let mut numbers = vec![0.0; len];
        let mut generator = Generator::new((b * ctx.world() + ctx.rank()) as u64);
        generator.fill_uniform_f32(&mut numbers, -1.0, 1.0);
        (numbers, (0..batch as u32).map(|i| i % 10).collect())
    });
    all.collect()
}

/// Runs the benchmark as one rank; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run_rank(ctx: &RankContext, args: &TrainBenchArgs) -> Result<()> {
    let network = args.recipe.network;
    let data = Arc::new(Batches {
        image: network.image,
        all: match network.image {
            [_, _, 1] => digits(ctx, args.batch)?,
            image => noise(ctx, image, args.batch),
        },
        steps: args.warmup + args.steps,
        global: args.batch * ctx.world(),
    });
    let exchange = ExchangeArg::from(args.exchange.choose(ctx)?);
    let settings = Settings {
        epochs: Some(1),
        batch_size: Some(args.batch),
        lr: Some(0.01),
        precision: args.precision,
        exchange,
        profile: args.profile.clone(),
        ..Settings::untyped()?
    };
    let job = Job::new("bench", ctx, &settings);
    let net = |scope: &mut Scope| (network.build)(scope, args.recompute);
    let sgd = |params: &Params, lr| Sgd::new(params, lr).momentum(0.9);
    let builder = job.trainer(&data, net, sgd).shuffle(false);
    let mut trainer = builder.measure_only().start()?;
    let (mut first_began, mut first_step) = (Duration::ZERO, Duration::ZERO);
    let mut times_ms = Vec::with_capacity(args.steps);
    let mut exposed_ms = Vec::with_capacity(args.steps);
    let mut batches = trainer.batches(&data)?;
    for i in 0..args.warmup + args.steps {
        let began = Instant::now();
        if i == 0 {
            first_began = ctx.started().elapsed();
        }
        let Some(batch) = batches.next() else { break };
        trainer.step(&batch, |net, batch| {
            let scores = net(batch.images()?)?;
            Ok(network
                .loss
                .of(scores, batch.labels(), batch.samples() as f32)?)
        })?;
        if i == 0 {
            first_step = ctx.started().elapsed();
        }
        if i >= args.warmup {
            times_ms.push(began.elapsed().as_secs_f64() * 1e3);
            let exposed = trainer.exposed_communication().unwrap_or_default();
            exposed_ms.push(exposed.as_secs_f64() * 1e3);
        }
    }
    // Before the digest of all weights.
    let mut peak_mib = [peak_rss_bytes().map_or(f64::NAN, |b| b as f64 / f64::from(1 << 20))];
    trainer.finish()?;
    // A step lasts as long as on its slowest rank.
    ctx.group().all_reduce(&mut times_ms, ReduceOp::Max)?;
    ctx.group().all_reduce(&mut exposed_ms, ReduceOp::Mean)?;
    ctx.group().all_reduce(&mut peak_mib, ReduceOp::Max)?;
    if !ctx.is_main() {
        return Ok(());
    }
    let step_ms = median(&mut times_ms);
    let images_per_s = (args.batch * ctx.world()) as f64 / step_ms * 1e3;
    let exposed = median(&mut exposed_ms);
    if args.json {
        let line = json!({
            "model": args.recipe.name, "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "recompute": args.recompute, "exchange": choice_name(&exchange), "steps": args.steps, "step_ms_median": step_ms, "images_per_s": images_per_s,
            "exposed_comm_ms": exposed, "peak_rss_mib": peak_mib[0], "first_step_began_s": first_began.as_secs_f64(), "first_step_s": first_step.as_secs_f64(),
        });
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank\nstep          {step_ms:.2} ms (median of {})\nthroughput    {images_per_s:.0} images/s\n\
         communication {exposed:.2} ms exposed a step\nmemory        {:.0} MiB peak a rank\nfirst step    began {:.2} s after start, ended {:.2} s after it",
        args.recipe.network.title,
        args.precision.describe(),
        ctx.describe(phalanx_nn::isa_name()),
        args.batch,
        args.steps,
        peak_mib[0],
        first_began.as_secs_f64(),
        first_step.as_secs_f64()
    ))
}

/// Middle value (the upper one of an even count).
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
