//! Times whole training steps in steady state on ready-made batches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use phalanx::comm::ReduceOp;
use phalanx::data::{Dataset, ImageBatch, ImageDataset, TextBatch, synthetic};
use phalanx::nn::models::{Gpt, GptConfig};
use phalanx::nn::optim::{Adam, Sgd};
use phalanx::nn::rng::torch::Generator;
use phalanx::nn::{Params, Reduction, Scope, Tensor};
use phalanx::train::{
    ExchangeArg, Job, MicroBatch, PrecisionArg, RankContext, Settings, Trainer, choice_name,
};
use phalanx_base::process::peak_rss_bytes;
use phalanx_launch::RankArgs;
use phalanx_recipes::{NETWORKS, Network};
use serde_json::json;

use crate::error::{Result, refuse};

/// What is timed, with its line of help.
fn timed() -> impl Iterator<Item = (Timed, &'static str)> {
    let networks = NETWORKS.into_iter().filter_map(|(name, network)| {
        let (title, help) = (network.title, network.timed?);
        let kind = Kind::Images(network);
        Some((Timed { name, title, kind }, help))
    });
    let gpts = GPTS.into_iter().map(|(name, title, config, help)| {
        let kind = Kind::Text(config);
        (Timed { name, title, kind }, help)
    });
    networks.chain(gpts)
}

/// GPTs: name, title, sizes, line of help. Sequences are as long as the context.
const GPTS: [(&str, &str, GptConfig, &str); 2] = [
    (
        "gpt",
        "GPT of nanoGPT's CPU setting",
        GptConfig {
            vocab: 65,
            context: 64,
            layers: 4,
            heads: 4,
            width: 128,
            dropout: 0.0,
        },
        "GPT with 4 layers of 4 heads, width 128, on sequences of 64 of 65 characters (nanoGPT on a CPU)",
    ),
    (
        "gpt2",
        "GPT with GPT-2's layers",
        GptConfig {
            vocab: 50_257,
            context: 64,
            layers: 12,
            heads: 12,
            width: 768,
            dropout: 0.0,
        },
        "GPT with the 12 layers of GPT-2 small and an output layer of its own, on sequences of 64 of 50257 tokens",
    ),
];

/// A recipe by its name at the command line.
fn recipe_parser() -> impl TypedValueParser<Value = Timed> {
    let names = timed().map(|(recipe, help)| PossibleValue::new(recipe.name).help(help));
    PossibleValuesParser::new(names.collect::<Vec<_>>()).try_map(|name| {
        let mut recipes = timed().map(|(recipe, _)| recipe);
        let found = recipes.find(|recipe| recipe.name == name);
        found.ok_or("no such recipe")
    })
}

/// A model to time.
#[derive(Debug, Clone, Copy)]
pub struct Timed {
    pub(super) name: &'static str,
    title: &'static str,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Images(Network),
    Text(GptConfig),
}

impl Kind {
    /// Learning rate. At 0.01 GPT-2's shape diverges, which gives subnormal numbers, and these are slow to compute with.
    fn lr(self) -> f64 {
        match self {
            Kind::Images(_) => 0.01,
            Kind::Text(_) => 6e-4,
        }
    }
}

impl Timed {
    fn has_blocks(&self) -> bool {
        match self.kind {
            Kind::Images(network) => network.has_blocks,
            Kind::Text(_) => true,
        }
    }
}

/// Ready-made batches of one rank, and the steps that go round them.
struct Batches<B> {
    all: Vec<B>,
    steps: usize,
    /// Samples of a step over all ranks.
    global: usize,
}

impl<B: Ready> Dataset for Batches<B> {
    type Batch = B;

    fn len(&self) -> usize {
        self.steps * self.global
    }

    fn read_batch(&self, _epoch: u64, indices: &[u64], batch: &mut B) -> Result<()> {
        let first = indices.first().map_or(0, |index| *index as usize);
        self.all[first / self.global % BATCHES].copy_to(batch);
        Ok(())
    }
}

/// A batch that is copied into the memory of another one.
trait Ready: Default + Send + Sync + 'static {
    fn copy_to(&self, batch: &mut Self);
}

impl Ready for ImageBatch {
    fn copy_to(&self, batch: &mut Self) {
        batch.images.clone_from(&self.images);
        batch.labels.clone_from(&self.labels);
        batch.image_shape = self.image_shape;
    }
}

impl Ready for TextBatch {
    fn copy_to(&self, batch: &mut Self) {
        batch.clone_from(self);
    }
}

/// Arguments of `bench train`.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainBenchArgs {
    /// Model to time
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
    /// Profile steps 3 to 12: print the time of operations and layers, and write a Chrome trace of operations and
    /// communication per rank to FILE.<rank>.json
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
            refuse!(
                "{steps} steps of {} samples are too many; use fewer --steps",
                self.batch
            );
        }
        if self.recompute && !self.recipe.has_blocks() {
            let others = timed().filter(|(recipe, _)| recipe.has_blocks());
            let others: Vec<&str> = others.map(|(recipe, _)| recipe.name).collect();
            refuse!(
                "--recompute: the {} has no blocks to recompute; use one of {}",
                self.recipe.title,
                others.join(", ")
            );
        }
        if self.warmup > 1 << 30 {
            refuse!("--warmup can be at most 1073741824");
        }
        Ok(())
    }
}

/// Ready-made batches that the steps go round.
const BATCHES: usize = 4;

/// Drawn digits, as the MNIST recipe's synthetic set has them.
fn digits(ctx: &RankContext, batch: usize) -> Result<Vec<ImageBatch>> {
    let data = synthetic::digits(BATCHES * batch * ctx.world(), 1);
    let image_shape = data.image_shape();
    let pixels = image_shape.iter().product();
    let mut all = Vec::with_capacity(BATCHES);
    for b in 0..BATCHES {
        let mut images = vec![0.0; batch * pixels];
        let mut labels = Vec::with_capacity(batch);
        for (i, image) in images.chunks_exact_mut(pixels).enumerate() {
            labels.push(data.read((b * ctx.world() + ctx.rank()) * batch + i, image)?);
        }
        all.push(ImageBatch {
            images,
            labels,
            image_shape,
        });
    }
    Ok(all)
}

/// Random numbers of a batch, others for every rank.
fn generator(ctx: &RankContext, batch: usize) -> Generator {
    Generator::new((batch * ctx.world() + ctx.rank()) as u64)
}

/// Noise of this size.
fn noise(ctx: &RankContext, image_shape: [usize; 3], batch: usize) -> Vec<ImageBatch> {
    let len = batch * image_shape.iter().product::<usize>();
    let all = (0..BATCHES).map(|b| {
        let mut images = vec![0.0; len];
        generator(ctx, b).fill_uniform_f32(&mut images, -1.0, 1.0);
        let labels = (0..batch as u32).map(|i| i % 10).collect();
        ImageBatch {
            images,
            labels,
            image_shape,
        }
    });
    all.collect()
}

/// Random tokens.
fn tokens(ctx: &RankContext, config: &GptConfig, batch: usize) -> Vec<TextBatch> {
    let all = (0..BATCHES).map(|b| {
        let mut generator = generator(ctx, b);
        let mut draw = || {
            let mut numbers = vec![0.0; batch * config.context];
            generator.fill_uniform_f32(&mut numbers, 0.0, config.vocab as f64);
            let last = config.vocab as u32 - 1;
            numbers.iter().map(|n| (*n as u32).min(last)).collect()
        };
        TextBatch {
            tokens: draw(),
            targets: draw(),
        }
    });
    all.collect()
}

/// What was measured: the longest step of a rank, the mean of exposed communication, the largest memory; and when this
/// rank's first step was.
struct Measured {
    step_ms: f64,
    exposed_ms: f64,
    peak_mib: f64,
    first_began: Duration,
    first_step: Duration,
}

/// Runs the steps.
fn steps<B: Ready, M>(
    ctx: &RankContext,
    args: &TrainBenchArgs,
    data: &Arc<Batches<B>>,
    mut trainer: Trainer<'_, M>,
    loss: impl for<'s> Fn(&M, MicroBatch<'s, B>) -> Result<Tensor<'s>>,
) -> Result<Measured> {
    let (mut first_began, mut first_step) = (Duration::ZERO, Duration::ZERO);
    let mut times_ms = Vec::with_capacity(args.steps);
    let mut exposed_ms = Vec::with_capacity(args.steps);
    let mut batches = trainer.batches(data)?;
    for i in 0..args.warmup + args.steps {
        let began = Instant::now();
        if i == 0 {
            first_began = ctx.started().elapsed();
        }
        let Some(batch) = batches.next() else { break };
        trainer.step(&batch, &loss)?;
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
    Ok(Measured {
        step_ms: median(&mut times_ms),
        exposed_ms: median(&mut exposed_ms),
        peak_mib: peak_mib[0],
        first_began,
        first_step,
    })
}

/// Runs the benchmark as one rank; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run_rank(ctx: &RankContext, args: &TrainBenchArgs) -> Result<()> {
    let exchange = ExchangeArg::from(args.exchange.choose(ctx)?);
    let settings = Settings {
        epochs: Some(1),
        batch_size: Some(args.batch),
        lr: Some(args.recipe.kind.lr()),
        precision: args.precision,
        exchange,
        profile: args.profile.clone(),
        ..Settings::untyped()?
    };
    let job = Job::new("bench", ctx, &settings);
    let (steps_in_all, global) = (args.warmup + args.steps, args.batch * ctx.world());
    let (measured, unit, of_a_sample) = match args.recipe.kind {
        Kind::Images(network) => {
            let data = Arc::new(Batches {
                all: match network.image {
                    [_, _, 1] => digits(ctx, args.batch)?,
                    image => noise(ctx, image, args.batch),
                },
                steps: steps_in_all,
                global,
            });
            let net = |scope: &mut Scope| (network.build)(scope, args.recompute, network.classes);
            let sgd = |params: &Params, lr| Sgd::new(params, lr).momentum(0.9);
            let builder = job.trainer(&data, net, sgd).shuffle(false);
            let trainer = builder.measure_only().start()?;
            let measured = steps(ctx, args, &data, trainer, |net, batch| {
                let scores = net(batch.images()?)?;
                let samples = batch.samples() as f32;
                network.loss.of(scores, batch.labels(), samples)
            })?;
            (measured, "images", 1)
        }
        Kind::Text(config) => {
            let data = Arc::new(Batches {
                all: tokens(ctx, &config, args.batch),
                steps: steps_in_all,
                global,
            });
            // As `train gpt` does.
            let gpt = |scope: &mut Scope| Gpt::new(scope, &config).recompute(args.recompute);
            let adam = |params: &Params, lr| Adam::new(params, lr).betas(0.9, 0.99);
            let builder = job.trainer(&data, gpt, adam).shuffle(false);
            let trainer = builder.clip_grad_norm(1.0).measure_only().start()?;
            let measured = steps(ctx, args, &data, trainer, |gpt, batch| {
                let scores = phalanx_recipes::scores(gpt, &batch)?;
                scores.cross_entropy(&batch.targets, Reduction::Mean)
            })?;
            (measured, "tokens", config.context)
        }
    };
    if !ctx.is_main() {
        return Ok(());
    }
    let per_s = (global * of_a_sample) as f64 / measured.step_ms * 1e3;
    if args.json {
        let mut line = json!({
            "model": args.recipe.name, "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "recompute": args.recompute, "exchange": choice_name(&exchange), "steps": args.steps, "step_ms_median": measured.step_ms,
            "exposed_comm_ms": measured.exposed_ms, "peak_rss_mib": measured.peak_mib, "first_step_began_s": measured.first_began.as_secs_f64(),
            "first_step_s": measured.first_step.as_secs_f64(),
        });
        line[format!("{unit}_per_s")] = per_s.into();
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank\nstep          {:.2} ms (median of {})\nthroughput    {per_s:.0} {unit}/s\n\
         communication {:.2} ms exposed a step\nmemory        {:.0} MiB peak a rank\nfirst step    began {:.2} s after start, ended {:.2} s after it",
        args.recipe.title,
        args.precision.describe(),
        ctx.describe(phalanx_nn::isa_name()),
        args.batch,
        measured.step_ms,
        args.steps,
        measured.exposed_ms,
        measured.peak_mib,
        measured.first_began.as_secs_f64(),
        measured.first_step.as_secs_f64()
    ))
}

/// Middle value (the upper one of an even count).
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
