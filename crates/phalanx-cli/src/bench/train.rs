//! Times whole training steps in steady state on ready-made batches.

use std::time::{Duration, Instant};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use phalanx_base::process::peak_rss_bytes;
use phalanx_comm::ReduceOp;
use phalanx_data::{ImageDataset, synthetic};
use phalanx_ddp::{DdpOptions, DistributedDataParallel, Exchange, ShardedOptimizer};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::rng::torch::Generator;
use phalanx_nn::{GradSink, Grads, ParamId, Params, Scope, Seed, StepKey};
use phalanx_nn::{Tape, Threads};
use serde_json::json;

use super::overhead;
use crate::error::{Error, ErrorKind, Result};
use phalanx_launch::RankArgs;
use phalanx_recipes::{Loss, NETWORKS, Net, Network};
use phalanx_train::ExchangeArg;
use phalanx_train::PrecisionArg;
use phalanx_train::Profiler;
use phalanx_train::RankContext;

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

/// Ready-made batches of one rank.
struct Batches {
    image: [usize; 3],
    all: Vec<(Vec<f32>, Vec<u32>)>,
}

/// All that one rank trains with.
pub(super) struct Trainer {
    net: Net,
    loss: Loss,
    params: Params,
    ddp: DistributedDataParallel,
    /// Gradients of steps without communication.
    alone: Grads,
    optimizer: Sgd,
    /// Steps with communication by parts, where asked for.
    sharded: Option<ShardedOptimizer<Sgd>>,
    tape: Tape,
    batches: Batches,
    batch: usize,
    /// Of the last step without communication.
    backward: Backward,
}

/// Parts of a step: forward and backward, waiting for the gradients, the optimizer's step.
pub(super) const PARTS: usize = 3;

/// When things happened in a backward without communication.
pub(super) struct Backward {
    /// The first gradient was asked for.
    pub began: Option<Instant>,
    /// Each parameter's gradient was final.
    pub ready: Vec<Option<Instant>>,
    /// All gradients were.
    pub ended: Option<Instant>,
}

/// Gradients that stay where they are, with the time of each.
struct Watched<'a> {
    grads: &'a mut Grads,
    times: &'a mut Backward,
}

impl GradSink for Watched<'_> {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        self.times.began.get_or_insert_with(Instant::now);
        self.grads.slot(param)
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.times.ready[param.index()] = Some(Instant::now());
        self.grads.ready(param)
    }
}

impl Trainer {
    fn new(ctx: &RankContext, args: &TrainBenchArgs, batches: Batches) -> Result<Trainer> {
        let mut scope = Scope::new(Seed(1));
        let network = args.recipe.network;
        let net = (network.build)(&mut scope, args.recompute);
        let mut params = scope.build()?;
        let group = ctx.group.clone();
        let exchange = args.exchange.choose(ctx)?;
        let options = DdpOptions {
            exchange,
            ..DdpOptions::default()
        };
        let ddp = DistributedDataParallel::new(group, &mut params, options)?;
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(args.precision.into());
        let make = |params: &Params| {
            let mut optimizer = Sgd::new(params, 0.01).momentum(0.9);
            optimizer.set_thread_pool(tape.thread_pool());
            optimizer
        };
        let optimizer = make(&params);
        let sharded = match exchange.is_scattered() {
            true => Some(ShardedOptimizer::for_wrapper(&ddp, &params, make)?),
            false => None,
        };
        Ok(Trainer {
            net,
            loss: network.loss,
            ddp,
            alone: Grads::like(&params),
            backward: Backward {
                began: None,
                ready: vec![None; params.ids().count()],
                ended: None,
            },
            optimizer,
            sharded,
            tape,
            params,
            batches,
            batch: args.batch,
        })
    }

    /// Step `i`; not `synced`, each rank takes it for itself. How many milliseconds each of its parts took.
    pub(super) fn step(&mut self, i: usize, synced: bool) -> Result<[f64; PARTS]> {
        let began = Instant::now();
        let (images, labels) = &self.batches.all[i % BATCHES];
        let [h, w, c] = self.batches.image;
        let step = self.tape.step(&self.params, StepKey::new(0, i as u64));
        let x = step.input(images, &[self.batch, h, w, c])?;
        let scores = (self.net)(x)?;
        let loss = self.loss.of(scores, labels, labels.len() as f32)?;
        let value = loss.item()?;
        let mut ddp = synced.then_some(&mut self.ddp);
        if let Some(ddp) = &mut ddp {
            loss.backward(*ddp)?;
        } else {
            self.backward.began = None;
            loss.backward(&mut Watched {
                grads: &mut self.alone,
                times: &mut self.backward,
            })?;
            self.backward.ended = Some(Instant::now());
        }
        drop(step);
        let computed = Instant::now();
        let mut finished = computed;
        let commit = ddp.as_mut().map(|ddp| ddp.finish()).transpose()?;
        if commit.is_none_or(|commit| commit.is_yes()) {
            finished = Instant::now();
            self.tape.update_buffers(&mut self.params)?;
            match (ddp, &mut self.sharded) {
                (None, _) => self.optimizer.step(&mut self.params, &self.alone)?,
                (Some(ddp), Some(sharded)) => sharded.step_scattered(&mut self.params, ddp)?,
                (Some(ddp), None) => self.optimizer.step(&mut self.params, ddp)?,
            }
        }
        if !value.is_finite() {
            return Err(Error::new(
                ErrorKind::Failed,
                format!("the loss became {value} in step {i}"),
            ));
        }
        let parts = [computed - began, finished - computed, finished.elapsed()];
        Ok(parts.map(|part| part.as_secs_f64() * 1e3))
    }

    /// Averages the gradients that are in the buckets, as a step does, and nothing else.
    pub(super) fn communicate(&mut self) -> Result<()> {
        // The last layers' are the first that backward makes.
        let ids: Vec<ParamId> = self.params.ids().collect();
        for id in ids.into_iter().rev() {
            self.ddp.ready(id).map_err(|e| {
                Error::new(ErrorKind::Failed, "a gradient could not be averaged").caused_by(e)
            })?;
        }
        let _ = self.ddp.finish()?;
        Ok(())
    }

    /// Milliseconds of backward in the last step, `synced` or not.
    pub(super) fn backward_ms(&self, synced: bool) -> f64 {
        let times = self.ddp.times();
        let (began, ended) = match synced {
            true => (times.backward_began, times.backward_ended),
            false => (self.backward.began, self.backward.ended),
        };
        let took = began.zip(ended).map(|(began, ended)| ended - began);
        took.unwrap_or_default().as_secs_f64() * 1e3
    }

    /// Times of the last step without communication.
    pub(super) fn backward(&self) -> &Backward {
        &self.backward
    }

    pub(super) fn ddp(&self) -> &DistributedDataParallel {
        &self.ddp
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
    /// Measure what communication costs per step: time steps with it, without it, and communication alone
    #[arg(long, conflicts_with = "profile")]
    pub overhead: bool,
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
fn digits(ctx: &RankContext, batch: usize) -> Result<Batches> {
    let data = synthetic::digits(BATCHES * batch * ctx.world(), 1);
    let image = data.image_shape();
    let pixels = image.iter().product();
    let mut all = Vec::with_capacity(BATCHES);
    for b in 0..BATCHES {
        let mut images = vec![0.0; batch * pixels];
        let mut labels = Vec::with_capacity(batch);
        for (i, image) in images.chunks_exact_mut(pixels).enumerate() {
            labels.push(data.read((b * ctx.world() + ctx.rank()) * batch + i, image)?);
        }
        all.push((images, labels));
    }
    Ok(Batches { image, all })
}

/// Noise of this size, other numbers for every rank and batch.
fn noise(ctx: &RankContext, image: [usize; 3], batch: usize) -> Batches {
    let len = batch * image.iter().product::<usize>();
    let all = (0..BATCHES).map(|b| {
        let mut numbers = vec![0.0; len];
        let mut generator = Generator::new((b * ctx.world() + ctx.rank()) as u64);
        generator.fill_uniform_f32(&mut numbers, -1.0, 1.0);
        (numbers, (0..batch as u32).map(|i| i % 10).collect())
    });
    Batches {
        image,
        all: all.collect(),
    }
}

/// Runs the benchmark as one rank; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run_rank(ctx: &RankContext, args: &TrainBenchArgs) -> Result<()> {
    let batches = match args.recipe.network.image {
        [_, _, 1] => digits(ctx, args.batch)?,
        image => noise(ctx, image, args.batch),
    };
    let mut trainer = Trainer::new(ctx, args, batches)?;
    if args.overhead {
        return overhead::run(ctx, args, &mut trainer);
    }
    let mut profiler = Profiler::new(args.profile.as_deref(), ctx);
    let (mut first_began, mut first_step) = (Duration::ZERO, Duration::ZERO);
    let mut times_ms = Vec::with_capacity(args.steps);
    let mut exposed_ms = Vec::with_capacity(args.steps);
    for i in 0..args.warmup + args.steps {
        let began = Instant::now();
        if i == 0 {
            first_began = ctx.started.elapsed();
        }
        profiler.before(&mut trainer.tape);
        trainer.step(i, true)?;
        if i == 0 {
            first_step = ctx.started.elapsed();
        }
        if i >= args.warmup {
            times_ms.push(began.elapsed().as_secs_f64() * 1e3);
            exposed_ms.push(trainer.ddp.times().exposed().as_secs_f64() * 1e3);
        }
        profiler.after(ctx, &mut trainer.tape, &trainer.params)?;
    }
    profiler.finish(ctx, &mut trainer.tape, &trainer.params)?;
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
            "model": args.recipe.name, "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "recompute": args.recompute, "exchange": exchange_title(trainer.ddp.exchange()), "steps": args.steps, "step_ms_median": step_ms, "images_per_s": images_per_s,
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

/// As `--exchange` has it.
pub(super) fn exchange_title(exchange: Exchange) -> String {
    phalanx_train::choice_name(&ExchangeArg::from(exchange))
}

/// Middle value (the upper one of an even count).
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
