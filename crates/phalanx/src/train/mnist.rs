//! `train mnist`: PyTorch's basic MNIST CNN, data parallel.
//!
//! The lines that make it distributed are marked `DDP`; without them this is a
//! single-process training loop.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_comm::ReduceOp;
use phalanx_ddp::{
    Bf16Gradients, BucketCaps, DdpOptions, DistributedDataParallel, F16Gradients, GradientHook,
    PowerSgd, PowerSgdOptions, ShardTree, verify_equal,
};
use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Params, Scope, Seed, StepKey, Tape, Threads};
use phalanx_train::digest::{MetricsDigest, optimizer_sha256};
use phalanx_train::loader::{Loader, LoaderOptions};
use phalanx_train::metrics::{Confusion, MetricsLog, write_summary};
use phalanx_train::progress::Progress;
use phalanx_train::sampler::{Sampler, SamplerConfig, TorchBatches};
use phalanx_train::{Dataset, checkpoint, mnist, process, synthetic};
use serde_json::json;

use super::advice::Spent;
use super::context::RankContext;
use super::cut::{Cut, CutArgs, Determinism};
use super::format::{bytes, plural, thousands};
use super::profile::Profiler;
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::ranks;

/// Which samples a rank gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SamplerKind {
    /// Each sample exactly once an epoch at any number of ranks; nothing
    /// padded, nothing dropped
    Exact,
    /// As PyTorch's DistributedSampler: pads with repeated samples
    Torch,
}

/// As what gradients travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GradientType {
    /// As they are, while backward still runs
    F32,
    /// Half the bytes, 8 bits of precision
    Bf16,
    /// Half the bytes, 11 bits of precision
    F16,
    /// Matrices as products of two thin ones, after --powersgd-start steps
    Powersgd,
}

impl GradientType {
    fn hook(args: &MnistArgs) -> Result<Option<Box<dyn GradientHook>>> {
        Ok(match args.gradient_type {
            GradientType::F32 => None,
            GradientType::Bf16 => Some(Box::new(Bf16Gradients::default())),
            GradientType::F16 => Some(Box::new(F16Gradients::default())),
            GradientType::Powersgd => Some(Box::new(PowerSgd::new(PowerSgdOptions {
                rank: args.powersgd_rank,
                start_step: args.powersgd_start,
                seed: args.seed,
                ..PowerSgdOptions::default()
            })?)),
        })
    }
}

/// Arguments of `train mnist`.
#[derive(Debug, Clone, clap::Args)]
pub struct MnistArgs {
    /// Folder with the MNIST (or Fashion-MNIST) files, or `synthetic` for drawn digits
    #[arg(long, default_value = "synthetic", value_name = "DIR|synthetic")]
    pub data: String,
    /// Times to go over the training set
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub epochs: usize,
    /// Samples per rank and step
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub batch_size: usize,
    /// Samples per step over all ranks, instead of --batch-size times the number of ranks
    #[arg(long, value_name = "N", conflicts_with = "batch_size")]
    pub global_batch_size: Option<usize>,
    /// Samples per rank and step while testing
    #[arg(long, default_value_t = 500, value_name = "N")]
    pub test_batch_size: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.05, allow_negative_numbers = true)]
    pub lr: f64,
    /// SGD momentum
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    pub momentum: f64,
    /// Seed of weights, shuffling, dropout and synthetic data
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Which samples a rank gets
    #[arg(long, value_enum, default_value_t = SamplerKind::Exact)]
    pub sampler: SamplerKind,
    /// Print and log the loss every so many steps
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub log_interval: usize,
    /// Training samples of the synthetic set (a sixth as many for testing)
    #[arg(long, default_value_t = 60_000, value_name = "N")]
    pub synthetic_samples: usize,
    /// Gradient bucket cap in MiB [default: 4 on one host, 8 across hosts; first and last 1]
    #[arg(long, value_name = "MIB")]
    pub bucket_cap_mb: Option<f64>,
    /// As what gradients travel between ranks
    #[arg(long, value_enum, default_value_t = GradientType::F32)]
    pub gradient_type: GradientType,
    /// Columns of the thin matrices of --gradient-type powersgd
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub powersgd_rank: usize,
    /// Steps with plain means before --gradient-type powersgd begins
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub powersgd_start: u64,
    #[command(flatten)]
    pub cut: CutArgs,
    /// Threads that prepare batches, per rank
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub workers: usize,
    /// Folder for metrics, summary and weights [default: runs/mnist-<date>-<time>]
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Write a Chrome trace of the third step, one file a rank: FILE.<rank>.json
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Time operations and layers of steps 3 to 12: a table, and a Chrome trace for each rank: FILE.<rank>.json
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

/// Samples of one step; a million images of 28 x 28 are 3 GB.
const MAX_BATCH: usize = 1 << 20;

/// Result of one pass over the test set, the same on all ranks.
struct Tested {
    loss: f64,
    accuracy: f64,
}

struct Data {
    train: Arc<dyn Dataset>,
    test: Arc<dyn Dataset>,
    description: String,
    /// Tells other data apart, whatever its folder is called.
    content: String,
}

/// Checks what can be checked before any rank is started.
///
/// # Errors
///
/// Usage errors naming the flag.
pub fn validate(args: &MnistArgs, world: usize) -> Result<()> {
    // The largest are far above any use; beyond them memory or arithmetic
    // would give out in less clear words.
    let counts = [
        ("--epochs", args.epochs, usize::MAX),
        ("--batch-size", args.batch_size, MAX_BATCH),
        ("--test-batch-size", args.test_batch_size, MAX_BATCH),
        ("--log-interval", args.log_interval, usize::MAX),
        ("--workers", args.workers, 64),
        ("--powersgd-rank", args.powersgd_rank, 1024),
        ("--synthetic-samples", args.synthetic_samples, 100_000_000),
        (
            "--global-batch-size",
            args.global_batch_size.unwrap_or(1),
            MAX_BATCH,
        ),
    ];
    for (flag, value, largest) in counts {
        ranks::check_count(flag, value, largest)?;
    }
    super::check_lr(args.lr)?;
    if !(0.0..1.0).contains(&args.momentum) {
        return Err(Error::usage("--momentum must lie in 0..1 (1 excluded)"));
    }
    if args
        .bucket_cap_mb
        .is_some_and(|cap| !(cap.is_finite() && cap > 0.0))
    {
        return Err(Error::usage("--bucket-cap-mb must be above 0"));
    }
    if let Some(global) = args.global_batch_size {
        if global < world {
            return Err(Error::usage(format!(
                "--global-batch-size {global} leaves some of the {world} ranks without a sample; use at least {world}"
            )));
        }
        if args.sampler == SamplerKind::Torch && !global.is_multiple_of(world) {
            return Err(Error::usage(format!(
                "--sampler torch gives every rank the same batch size, and --global-batch-size {global} is not \
                 divisible by {world} ranks; use --sampler exact or another size"
            )));
        }
    }
    args.cut.validate(
        world,
        args.global_batch_size,
        args.sampler == SamplerKind::Torch,
    )?;
    if args.gradient_type != GradientType::F32 && args.cut.deterministic == Determinism::Shards {
        return Err(Error::usage(
            "--deterministic shards adds gradients as they are; leave out --gradient-type",
        ));
    }
    // The data is looked at once here, so that a wrong folder is one error and not
    // one per rank.
    if args.data != "synthetic" {
        mnist::check(args.data.as_ref())?;
    }
    Ok(())
}

/// Trains as one rank.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run_rank(ctx: &RankContext, args: &MnistArgs) -> Result<()> {
    validate(args, ctx.world())?;
    let world = ctx.world();
    ctx.group.set_phase("starting");
    let global_batch = args.global_batch_size.unwrap_or(args.batch_size * world);
    let data = load(args)?;

    let mut scope = Scope::new(Seed(args.seed));
    let net = MnistCnn::new(&mut scope);
    let mut params = scope.build()?;
    let mut ddp =
        DistributedDataParallel::new(ctx.group.clone(), &mut params, ddp_options(args, &data)?)?; // DDP
    if let Some(hook) = GradientType::hook(args)? {
        ddp.set_hook(Some(hook))?; // DDP
    }
    let mut optimizer = Sgd::new(&params, args.lr).momentum(args.momentum);
    let mut tape = Tape::new(Threads(ctx.threads));

    let cut = Cut::new(&args.cut, world, ctx.rank())?; // DDP
    let samplers = samplers(&cut, ctx, args, data.train.len(), global_batch)?;
    let output = Output::open(ctx, args)?;
    let steps = cut.epoch(&samplers, 0).len() / cut.mine().len();
    announce(
        ctx,
        args,
        &data,
        &params,
        &ddp,
        steps,
        global_batch,
        &output,
    );

    let mut log = output.metrics()?;
    let mut progress = Progress::for_rank(ctx.rank());
    let mut loader = loader(args, &data.train)?;
    let trace = Trace::new(args.trace.as_deref(), ctx);
    let mut profiler = Profiler::new(args.profile.as_deref(), ctx);
    let mut accuracies = Vec::new();
    let mut timing = Timing::default();
    let mut last = Tested {
        loss: f64::NAN,
        accuracy: f64::NAN,
    };
    let mut metrics = MetricsDigest::new();
    let mut weights = String::new();
    for epoch in 1..=args.epochs {
        progress.begin(epoch as u64, args.epochs as u64, steps);
        let plan = cut.epoch(&samplers, epoch as u64 - 1);
        loader.start(plan.clone());
        let began = Instant::now();
        for index in 0..steps {
            ctx.group.set_position(epoch as u64, index as u64 + 1);
            let (sizes, global) = cut.sizes(&plan, index);
            let busy = sizes.iter().filter(|n| **n > 0).count();
            let mut sums = vec![0.0; cut.parts()];
            let marks = trace.begin(epoch, index);
            profiler.before(&mut tape);
            let mut forward_ended = Instant::now();
            // DDP: the mean is taken over all samples, however unevenly they are cut.
            let mut micro_batches = ddp.begin_known(&sizes[..busy], global)?;
            for part in cut.mine() {
                ctx.group.set_phase("loading data");
                let Some(batch) = loader.next_batch()? else {
                    break;
                };
                if batch.labels.is_empty() {
                    continue;
                }
                ctx.group.set_phase("forward");
                let key = StepKey::new(epoch as u64 - 1, index as u64)
                    .seed(args.seed)
                    .samples(&batch.indices);
                let step = tape.step(&params, key);
                let [h, w, c] = data.train.image_shape();
                let images = step.input(&batch.images, &[batch.labels.len(), h, w, c])?;
                let samples = batch.labels.len() as f32;
                let loss = net.forward(images)?.nll_loss(&batch.labels, samples)?;
                sums[part] = f64::from(loss.item()) * f64::from(samples);
                forward_ended = Instant::now();
                loss.backward(micro_batches.micro_batch()?)?; // DDP
            }
            let commit = micro_batches.finish()?; // DDP
            ctx.group.set_phase("optimizer");
            if commit.is_yes() {
                optimizer.step(&mut params, &ddp)?;
            } else {
                let at = format_args!("epoch {epoch}, step {}", index + 1);
                progress.suspend(|| ctx.note_skipped(&commit, at));
            }
            trace.end(marks, forward_ended, ddp.times())?;
            profiler.after(ctx, &mut tape, &params)?;

            let local: f64 = sums.iter().sum();
            let mean = local / sizes.iter().sum::<usize>().max(1) as f64;
            let at = format_args!("epoch {epoch}, step {}", index + 1);
            ctx.check_loss(mean, at, args.lr)?;
            timing.add(ddp.times().exposed(), global.samples);
            progress.step(global.samples, Some(mean));
            let logged = index.is_multiple_of(args.log_interval);
            let mean = match cut.tree() {
                // DDP: the loss of the global batch, whoever had which shard.
                Some(tree) if logged => {
                    ShardTree::gather_values(&ctx.group, &mut sums)?;
                    tree.sum(&sums) / global.samples as f64
                }
                _ => mean,
            };
            if logged {
                metrics.add(mean);
            }
            if logged && ctx.is_main() {
                let (n, done) = (data.train.len(), index * global_batch);
                let percent = 100.0 * index as f64 / steps as f64;
                let text =
                    format!("Train Epoch: {epoch} [{done}/{n} ({percent:.0}%)]\tloss={mean:.4}");
                progress.suspend(|| ctx.line(&text))?;
                log.event(&json!({
                    "step": (epoch - 1) * steps + index, "epoch": epoch, "loss": mean, "lr": args.lr,
                    "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                    "exposed_comm_ms": ddp.times().exposed().as_secs_f64() * 1e3,
                    "data_wait_total_ms": loader.waited().as_secs_f64() * 1e3,
                }))?;
            }
        }
        timing.trained += began.elapsed();
        progress.end();

        ctx.group.set_phase("validation");
        let digest = checkpoint::weights_digest(&params);
        weights = hex::encode(digest);
        verify_equal(&ctx.group, &params, digest)?; // DDP
        last = test(ctx, args, &cut, &net, &params, &mut tape, &data.test)?;
        metrics.add(last.loss);
        metrics.add(last.accuracy);
        accuracies.push(last.accuracy);
        if ctx.is_main() {
            ctx.line(&format!(
                "\ntest_loss={:.4}\naccuracy={:.4}\n",
                last.loss, last.accuracy
            ))?;
            log.event(&json!({
                "step": epoch * steps, "epoch": epoch, "test_loss": last.loss, "accuracy": last.accuracy,
                "weights_sha256": weights,
            }))?;
        }
    }
    profiler.finish(ctx, &mut tape, &params)?;
    timing.skipped = ddp.skipped_steps();
    timing.waited = loader.waited();
    timing.sent_bytes = ctx.group.bytes_sent_to().iter().sum();
    for advice in timing.spent(steps * args.epochs).advice(args.workers) {
        ctx.note(&format!("warning: {advice}"));
    }
    ctx.group.set_phase("saving");
    let digests = Digests {
        weights: weights.clone(),
        optimizer: optimizer_sha256(&optimizer),
        metrics: metrics.sha256(),
    };
    output.save(ctx, args, &params, &accuracies, &last, &timing, &digests)?;
    ctx.group.barrier()?; // DDP: nobody leaves before the files are complete
    ctx.note(&format!(
        "done in {:.1} s: accuracy {:.2} %, {} images/s, communication exposed {:.1} % of the step",
        ctx.started.elapsed().as_secs_f64(),
        last.accuracy * 100.0,
        thousands(timing.images_per_s() as usize),
        timing.exposed_percent(),
    ));
    let equal = if world > 1 {
        format!(" equal on all {world} ranks")
    } else {
        String::new()
    };
    ctx.note(&format!(
        "weights {}…{equal}; saved {}",
        &weights[..12],
        output.model_path().display()
    ));
    Ok(())
}

// DDP: the rank's parts of the training set.
fn samplers(
    cut: &Cut,
    ctx: &RankContext,
    args: &MnistArgs,
    samples: usize,
    global_batch: usize,
) -> Result<Vec<Sampler>> {
    let config = SamplerConfig {
        samples,
        world: ctx.world(),
        rank: ctx.rank(),
        shuffle: true,
        seed: args.seed,
    };
    cut.samplers(config, |config| {
        Ok(match args.sampler {
            SamplerKind::Exact => Sampler::exact(config, global_batch)?,
            SamplerKind::Torch => Sampler::torch(
                config,
                TorchBatches {
                    batch_size: global_batch / ctx.world(),
                    drop_samples: false,
                    drop_batch: false,
                },
            )?,
        })
    })
}

fn loader(args: &MnistArgs, data: &Arc<dyn Dataset>) -> Result<Loader> {
    let options = LoaderOptions {
        workers: args.workers,
        ..LoaderOptions::default()
    };
    Ok(Loader::new(data.clone(), options)?)
}

fn load(args: &MnistArgs) -> Result<Data> {
    if args.data == "synthetic" {
        let (n, m) = (args.synthetic_samples, (args.synthetic_samples / 6).max(1));
        // The test digits follow the training digits, so none is seen in training.
        Ok(Data {
            train: Arc::new(synthetic::digits(n, args.seed)),
            test: Arc::new(synthetic::range(n as u64, m, args.seed)),
            description: format!(
                "synthetic digits, {} train / {} test, seed {}",
                thousands(n),
                thousands(m),
                args.seed
            ),
            content: format!("synthetic {n} + {m}, seed {}", args.seed),
        })
    } else {
        let train = mnist::load(args.data.as_ref(), mnist::Split::Train)?;
        let test = mnist::load(args.data.as_ref(), mnist::Split::Test)?;
        let description = format!(
            "{} in {}, {} train / {} test",
            train.name(),
            args.data,
            thousands(train.len()),
            thousands(test.len())
        );
        let content = format!(
            "{} {} + {}, SHA-256 {:.16} + {:.16}",
            train.name(),
            train.len(),
            test.len(),
            train.sha256(),
            test.sha256()
        );
        Ok(Data {
            train: Arc::new(train),
            test: Arc::new(test),
            description,
            content,
        })
    }
}

fn ddp_options(args: &MnistArgs, data: &Data) -> Result<DdpOptions> {
    Ok(DdpOptions {
        caps: args
            .bucket_cap_mb
            .map(|mib| BucketCaps::uniform((mib * f64::from(1 << 20)) as usize)),
        deterministic: args.cut.deterministic()?,
        must_agree: must_agree(args, data),
        ..DdpOptions::default()
    })
}

/// What must be the same on all ranks, a fact a line, so that a difference
/// names just the flag or the data.
fn must_agree(args: &MnistArgs, data: &Data) -> Vec<String> {
    let batch = match args.global_batch_size {
        Some(global) => format!("--global-batch-size {global}"),
        None => format!("--batch-size {}", args.batch_size),
    };
    let mut facts = vec![
        batch,
        format!("--epochs {}", args.epochs),
        format!("--lr {}", args.lr),
        format!("--momentum {}", args.momentum),
        format!("--seed {}", args.seed),
        format!("--sampler {:?}", args.sampler).to_lowercase(),
        format!("--test-batch-size {}", args.test_batch_size),
        format!("--gradient-type {:?}", args.gradient_type).to_lowercase(),
        format!("data {}", data.content),
    ];
    facts.extend(args.cut.must_agree());
    facts
}

#[expect(
    clippy::too_many_arguments,
    reason = "prints what each of them says, once"
)]
fn announce(
    ctx: &RankContext,
    args: &MnistArgs,
    data: &Data,
    params: &Params,
    ddp: &DistributedDataParallel,
    steps: usize,
    global_batch: usize,
    output: &Output,
) {
    let count: usize = params.infos().iter().map(|i| i.len).sum();
    let buckets = ddp.plan().buckets().len();
    let sizes: Vec<String> = (0..buckets)
        .map(|b| bytes(ddp.plan().bucket_bytes(b)))
        .collect();
    let buckets = match args.cut.deterministic {
        Determinism::Ranks => format!("{} ({})", plural(buckets, "bucket"), sizes.join(", ")),
        Determinism::Shards => format!("added over {} shards", args.cut.shards),
    };
    let mut cut = if global_batch.is_multiple_of(ctx.world()) {
        format!(
            "{global_batch} = {} x {}",
            ctx.world(),
            global_batch / ctx.world()
        )
    } else {
        format!("{global_batch} over {} ranks", ctx.world())
    };
    if args.cut.accumulate > 1 {
        cut.push_str(&format!(" in {} micro-batches", args.cut.accumulate));
    }
    ctx.note(&format!(
        "phalanx {}  mnist  {}",
        env!("CARGO_PKG_VERSION"),
        ctx.describe()
    ));
    ctx.note(&format!("data     {}", data.description));
    ctx.note(&format!(
        "model    MNIST CNN, {} parameters in {} tensors, {buckets}",
        thousands(count),
        params.infos().len(),
    ));
    ctx.note(&format!(
        "training {} of {}, global batch {cut}, SGD lr {} momentum {}",
        plural(args.epochs, "epoch"),
        plural(steps, "step"),
        args.lr,
        args.momentum
    ));
    ctx.note(&format!("output   {}", output.dir.display()));
}

/// Tests exactly: every sample once over all ranks, sums and counts reduced.
fn test(
    ctx: &RankContext,
    args: &MnistArgs,
    cut: &Cut,
    net: &MnistCnn,
    params: &Params,
    tape: &mut Tape,
    data: &Arc<dyn Dataset>,
) -> Result<Tested> {
    let [h, w, c] = data.image_shape();
    let config = SamplerConfig {
        samples: data.len(),
        world: ctx.world(),
        rank: ctx.rank(),
        shuffle: false,
        seed: 0,
    };
    // Cut as in training, so that no sum depends on the ranks if none may.
    let batch = args.test_batch_size.saturating_mul(cut.parts());
    let samplers = cut.samplers(config, |config| Ok(Sampler::exact(config, batch)?))?;
    let plan = cut.epoch(&samplers, 0);
    let parts = plan.parts();
    let mut sums = vec![0.0; plan.len() / parts * cut.parts()];
    let mut loader = loader(args, data)?;
    loader.start(plan);
    let mut confusion = Confusion::new(data.classes());
    let mut index = 0;
    while let Some(batch) = loader.next_batch()? {
        let place = index / parts * cut.parts() + cut.mine().start + index % parts;
        index += 1;
        if batch.labels.is_empty() {
            continue;
        }
        let step = tape.inference(params);
        let images = step.input(&batch.images, &[batch.labels.len(), h, w, c])?;
        let scores = net.forward(images)?;
        confusion.add_scores(scores.data(), &batch.labels)?;
        sums[place] = f64::from(scores.nll_loss(&batch.labels, 1.0)?.item());
    }
    ShardTree::gather_values(&ctx.group, &mut sums)?; // DDP
    ctx.group
        .all_reduce(confusion.counts_mut(), ReduceOp::Sum)?; // DDP
    let total: f64 = sums.iter().sum();
    Ok(Tested {
        loss: total / data.len() as f64,
        accuracy: confusion.accuracy().unwrap_or(f64::NAN),
    })
}

/// SHA-256 of what a run ends with, in hexadecimal.
struct Digests {
    weights: String,
    optimizer: String,
    metrics: String,
}

#[derive(Default)]
struct Timing {
    trained: Duration,
    exposed: Duration,
    images: usize,
    /// Steps that the ranks voted down.
    skipped: u64,
    /// For batches, in training.
    waited: Duration,
    /// By this rank to all others, whatever for.
    sent_bytes: u64,
}

impl Timing {
    fn add(&mut self, exposed: Duration, images: usize) {
        self.exposed += exposed;
        self.images += images;
    }

    fn spent(&self, steps: usize) -> Spent {
        Spent {
            steps,
            total: self.trained,
            exposed: self.exposed,
            data: self.waited,
        }
    }

    fn images_per_s(&self) -> f64 {
        self.images as f64 / self.trained.as_secs_f64().max(1e-9)
    }

    fn exposed_percent(&self) -> f64 {
        100.0 * self.exposed.as_secs_f64() / self.trained.as_secs_f64().max(1e-9)
    }
}

const MODEL_FILE: &str = "mnist_cnn.safetensors";
const ACCURACIES_FILE: &str = "mnist_cnn_accuracies.json";
const SUMMARY_FILE: &str = "summary.json";
const METRICS_FILE: &str = "metrics.jsonl";

/// Removes what an earlier run left in the same folder, complete or not, so
/// that a summary and weights always belong to the metrics beside them.
fn clear_earlier_run(dir: &Path) -> Result<()> {
    let failed = |e: std::io::Error| {
        Error::new(
            ErrorKind::System,
            format!("an earlier run in {} cannot be removed", dir.display()),
        )
        .caused_by(e)
        .note("try", "another folder with --output-dir")
    };
    const OURS: [&str; 3] = [MODEL_FILE, ACCURACIES_FILE, SUMMARY_FILE];
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let temporary_of = |ours: &str| {
            let rest = name
                .strip_prefix('.')
                .and_then(|name| name.strip_prefix(ours));
            rest.is_some_and(|rest| rest.ends_with(".tmp"))
        };
        if name == super::FLIGHT_DIR {
            remove_flight_recorders(&entry.path());
        }
        // Complete, or the temporary file of a run that was killed while saving.
        if OURS.iter().any(|ours| name == *ours || temporary_of(ours)) {
            std::fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

/// What `phalanx inspect` would find of an earlier run. Whoever made the
/// folder unwritable learns it when the next ones are written.
fn remove_flight_recorders(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("rank-") && name.ends_with(".json") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The run's folder; only rank 0 touches it.
struct Output {
    dir: PathBuf,
    is_main: bool,
}

impl Output {
    fn open(ctx: &RankContext, args: &MnistArgs) -> Result<Output> {
        let dir = args
            .output_dir
            .clone()
            .unwrap_or_else(|| super::default_output_dir("mnist"));
        ctx.group.set_flight_dir(&dir.join(super::FLIGHT_DIR));
        if ctx.is_main() {
            phalanx_train::files::create_folder(&dir)
                .map_err(|e| Error::from(e).note("try", "another folder with --output-dir"))?;
            clear_earlier_run(&dir)?;
        }
        Ok(Output {
            dir,
            is_main: ctx.is_main(),
        })
    }

    fn metrics(&self) -> Result<MetricsLog> {
        Ok(if self.is_main {
            MetricsLog::create(&self.dir.join(METRICS_FILE), 1)?
        } else {
            MetricsLog::disabled()
        })
    }

    fn model_path(&self) -> PathBuf {
        self.dir.join(MODEL_FILE)
    }

    #[expect(clippy::too_many_arguments, reason = "the summary names them all")]
    fn save(
        &self,
        ctx: &RankContext,
        args: &MnistArgs,
        params: &Params,
        accuracies: &[f64],
        last: &Tested,
        timing: &Timing,
        digests: &Digests,
    ) -> Result<()> {
        if !self.is_main {
            return Ok(());
        }
        let metadata = BTreeMap::from([("model".to_owned(), "mnist_cnn".to_owned())]);
        checkpoint::save_params(&self.model_path(), params, &metadata)?;
        write_summary(&self.dir.join(ACCURACIES_FILE), &accuracies)?;
        let summary = json!({
            "recipe": "mnist",
            "version": env!("CARGO_PKG_VERSION"),
            "arguments": std::env::args().skip(1).collect::<Vec<_>>(),
            "world_size": ctx.world(),
            "threads_per_rank": ctx.threads,
            "transport": ctx.describe(),
            "data": args.data,
            "epochs": args.epochs,
            "test_loss": last.loss,
            "accuracy": last.accuracy,
            "accuracies": accuracies,
            "images_per_s": timing.images_per_s(),
            "train_s": timing.trained.as_secs_f64(),
            "exposed_comm_percent": timing.exposed_percent(),
            "data_wait_s": timing.waited.as_secs_f64(),
            "sent_bytes": timing.sent_bytes,
            "skipped_steps": timing.skipped,
            "peak_rss_mib": process::peak_rss_bytes().map(|b| b as f64 / f64::from(1 << 20)),
            "deterministic": format!("{:?}", args.cut.deterministic).to_lowercase(),
            "weights_sha256": digests.weights,
            "optimizer_sha256": digests.optimizer,
            "metrics_sha256": digests.metrics,
        });
        write_summary(&self.dir.join(SUMMARY_FILE), &summary)?;
        Ok(())
    }
}
