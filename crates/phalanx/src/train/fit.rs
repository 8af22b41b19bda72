//! The training loop of every image program, top to bottom.
//!
//! The lines that make it distributed are marked `DDP`; without them this is a
//! single-process training loop.

use std::time::Instant;

use phalanx_comm::ReduceOp;
use phalanx_ddp::{DistributedDataParallel, ShardTree, verify_equal};
use phalanx_nn::{Params, Scope, Seed, StepKey, Tape, Threads};
use phalanx_train::digest::{MetricsDigest, optimizer_sha256};
use phalanx_train::progress::Progress;
use phalanx_train::sampler::SamplerConfig;
use phalanx_train::state::Place;
use phalanx_train::{checkpoint, process};
use serde_json::json;

use super::context::RankContext;
use super::cut::{Cut, Determinism};
use super::evaluate::{Tested, Tester, loader};
use super::format::{bytes, plural, thousands};
use super::output::Output;
use super::prepare;
use super::profile::Profiler;
use super::program::{Data, Net, Program};
use super::sample_log::SampleLog;
use super::saving::{History, Now, Resumed, Saving, Whole};
use super::timing::Timing;
use super::trace::Trace;
use super::voice::StepFacts;
use crate::error::Result;

/// SHA-256 of what a run ends with, in hexadecimal.
struct Digests {
    /// Before the first step, unless the run went on from a checkpoint.
    initial: Option<String>,
    weights: String,
    optimizer: String,
    metrics: String,
}

/// Trains `program` as one rank.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run<P: Program>(ctx: &RankContext, program: &P) -> Result<()> {
    let settings = program.settings();
    let world = ctx.world();
    settings.validate(world)?;
    ctx.group.set_phase("starting");
    let mut voice = program.voice();
    voice.starts(ctx)?;
    let global_batch = settings.global_batch(world);
    let dir = settings.output_dir.clone();
    let dir = dir.unwrap_or_else(|| super::default_output_dir(program.name()));
    let resumed = Resumed::find(ctx, &settings.saving, &dir)?;
    prepare::data(ctx, program.fetch())?;
    let data = program.data()?;
    voice.loaded(ctx)?;
    let resumable = settings.resumable(program.name(), &data.content, world);

    let mut scope = Scope::new(Seed(settings.seed));
    let net = program.net(&mut scope);
    let mut params = scope.build()?;
    program.prepare(&mut params, &data)?;
    if let Some(resumed) = &resumed {
        resumed.check(&resumable)?;
        resumed.params(&mut params)?;
    } else {
        settings.init.fill(ctx, &mut params)?;
    }
    let mut facts = settings.must_agree();
    facts.extend(program.must_agree());
    facts.push(format!("data {}", data.content));
    let options = settings.ddp_options(facts, program.frozen())?;
    let mut ddp = DistributedDataParallel::new(ctx.group.clone(), &mut params, options)?; // DDP
    if let Some(hook) = settings.gradients.hook(settings.seed)? {
        ddp.set_hook(Some(hook))?; // DDP
    }
    if let Some(resumed) = &resumed {
        resumed.wrapper(ctx, &mut ddp)?; // DDP
    }
    let (mut optimizer, optimizer_name) = program.optimizer(&params, world);
    if let Some(resumed) = &resumed {
        resumed.optimizer(ctx, &params, optimizer.as_mut())?; // DDP
    }
    let mut tape = Tape::new(Threads(ctx.threads));
    tape.set_precision(settings.precision.into());
    optimizer.set_workers(tape.workers());

    // DDP: the rank's parts of the training set.
    let cut = Cut::new(&settings.cut, world, ctx.rank())?;
    let config = SamplerConfig {
        samples: data.train.len(),
        world,
        rank: ctx.rank(),
        shuffle: true,
        seed: settings.seed,
    };
    let samplers = settings.samplers(&cut, config, program.drops_last())?;
    let steps = cut.epoch(&samplers, 0).len() / cut.mine().len();
    let mut schedule = program.schedule(world, steps * settings.epochs())?;
    let mut output = Output::open(ctx, dir, program.files(), resumed.is_some())?;
    let mut saving = Saving::open(
        ctx,
        &settings.saving,
        resumable,
        output.dir(),
        resumed.is_some(),
    )?;
    let initial = (ctx.is_main() && resumed.is_none()).then(|| checkpoint::weights_sha256(&params));
    let about = About {
        data: &data,
        initial: initial.as_deref(),
        steps,
        optimizer: &optimizer_name,
    };
    announce(ctx, program, &about, &params, &ddp, &output);
    voice.trains(ctx, settings.epochs())?;

    let mut place = resumed.as_ref().map(Resumed::place).unwrap_or_default();
    let history = resumed.as_ref().map(Resumed::history).transpose()?;
    let history = history.unwrap_or_default();
    if let Some(resumed) = &resumed {
        resumed.fits(steps)?;
        let (taken, all) = (thousands(place.step as usize), steps * settings.epochs());
        let next = match place.epoch as usize >= settings.epochs() {
            true => "no epoch is left; --epochs N for more".to_owned(),
            false => format!(
                "epoch {}, step {}",
                place.epoch + 1,
                place.step_in_epoch + 1
            ),
        };
        ctx.note(&format!(
            "resumed  after {taken} of {}: {next}",
            plural(all, "step")
        ));
    }
    if let Some(schedule) = &mut schedule {
        (0..place.step).for_each(|_| schedule.advance());
    }
    let mut log = output.metrics(resumed.as_ref().map(Resumed::place))?;
    let mut samples = SampleLog::open(ctx, settings.log_samples.as_deref())?;
    let mut progress = Progress::for_rank(ctx.rank());
    let mut loader = loader(settings, &data.train)?;
    let trace = Trace::new(settings.trace.as_deref(), ctx);
    let mut profiler = Profiler::new(settings.profile.as_deref(), ctx);
    let tester = Tester {
        ctx,
        program,
        net: &net,
        cut: &cut,
        data: &data.test,
    };
    let mut accuracies = history.accuracies();
    let mut timing = Timing::default();
    let mut stop = false;
    let mut last = Tested::nothing();
    let mut metrics = MetricsDigest::new();
    history
        .metrics()
        .into_iter()
        .for_each(|value| metrics.add(value));
    let mut weights = hex::encode(checkpoint::weights_digest(&params));
    if place.epoch as usize >= settings.epochs() {
        last = tester.test(&params, &mut tape)?;
    }
    for epoch in place.epoch as usize + 1..=settings.epochs() {
        voice.epoch(ctx, epoch)?;
        progress.begin(epoch as u64, settings.epochs() as u64, steps);
        // Steps of this epoch that were taken before the run was resumed.
        let first = place.step_in_epoch as usize;
        let plan = cut.rest(&samplers, place.cursor())?;
        loader.start(plan.clone());
        let began = Instant::now();
        let mut losses = EpochLoss::new(cut.parts());
        if first > 0 {
            losses.resume(ctx, &cut, &history);
        }
        for index in first..steps {
            ctx.group.set_position(epoch as u64, index as u64 + 1);
            if let Some(schedule) = &schedule {
                optimizer.set_lr(schedule.lr());
            }
            let (sizes, global) = cut.sizes(&plan, index - first);
            let busy = sizes.iter().filter(|n| **n > 0).count();
            let mut sums = vec![0.0; cut.parts()];
            let marks = trace.begin(epoch, index);
            profiler.before(&mut tape);
            let buffers = params.buffers_flat().to_vec();
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
                samples.add(&batch.indices);
                ctx.group.set_phase("forward");
                let key = StepKey::new(epoch as u64 - 1, index as u64)
                    .seed(settings.seed)
                    .samples(&batch.indices);
                let step = tape.step(&params, key);
                let [h, w, c] = data.train.image_shape();
                let images = step.input(&batch.images, &[batch.labels.len(), h, w, c])?;
                let samples = batch.labels.len() as f32;
                let scores = net.forward(images)?;
                let loss = program.loss().of(scores, &batch.labels, samples)?;
                sums[part] = f64::from(loss.item()) * f64::from(samples);
                forward_ended = Instant::now();
                loss.backward(micro_batches.micro_batch()?)?; // DDP
                drop(step);
                micro_batches.update_buffers(&mut tape, &mut params)?;
            }
            let commit = micro_batches.finish()?; // DDP
            ctx.group.set_phase("optimizer");
            if commit.is_yes() {
                ddp.sync_buffers(&mut params)?; // DDP
                optimizer.step(&mut params, &ddp)?;
            } else {
                // Statistics of a batch that is not trained on must not stay.
                params.buffers_flat_mut().copy_from_slice(&buffers);
                let at = format_args!("epoch {epoch}, step {}", index + 1);
                progress.suspend(|| ctx.note_skipped(&commit, at));
            }
            samples.step(epoch, index)?;
            trace.end(marks, forward_ended, ddp.times())?;
            profiler.after(ctx, &mut tape, &params)?;

            let local: f64 = sums.iter().sum();
            let mean = local / sizes.iter().sum::<usize>().max(1) as f64;
            let at = format_args!("epoch {epoch}, step {}", index + 1);
            ctx.check_loss(mean, at, optimizer.lr())?;
            losses.add(&sums, mean, global.samples);
            timing.add(ddp.times().exposed(), global.samples);
            progress.step(global.samples, Some(mean));
            let logged = index.is_multiple_of(settings.log_interval);
            let mean = match cut.tree() {
                // DDP: the loss of the global batch, whoever had which shard.
                Some(tree) if logged => {
                    ShardTree::gather_values(&ctx.group, &mut sums)?;
                    tree.sum(&sums) / global.samples as f64
                }
                _ => mean,
            };
            let facts = StepFacts {
                epoch,
                index,
                steps,
                done: index * global_batch,
                samples: data.train.len(),
                loss: mean,
                logged,
            };
            if let Some(text) = voice.step(ctx, &facts) {
                progress.suspend(|| ctx.line(&text))?;
            }
            if logged {
                metrics.add(mean);
                log.event(&json!({
                    "step": (epoch - 1) * steps + index, "epoch": epoch, "loss": mean, "lr": optimizer.lr(),
                    "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                    "exposed_comm_ms": ddp.times().exposed().as_secs_f64() * 1e3,
                    "data_wait_total_ms": loader.waited().as_secs_f64() * 1e3,
                    "saving_total_ms": timing.saved.as_secs_f64() * 1e3,
                }))?;
            }
            if let Some(schedule) = &mut schedule {
                schedule.advance();
            }
            let cursor = plan.cursor_after((index - first + 1) * plan.parts());
            let ended = index + 1 == steps;
            place = Place {
                epoch: cursor.epoch,
                samples: cursor.samples,
                step_in_epoch: if ended { 0 } else { index as u64 + 1 },
                step: place.step + 1,
            };
            saving.prepare(&params, optimizer.as_ref());
            let now = saving.after_step(place.step)?; // DDP
            let began = Instant::now();
            if ended {
                // Saved after the test.
                stop = now == Now::Stop;
            } else if now != Now::GoOn {
                ctx.group.set_phase("saving");
                let buffers = mean_buffers(ctx, &cut, &params)?;
                let (sums, seen) = losses.gathered(ctx)?;
                let history = History::new(&accuracies, metrics.values(), &sums, seen);
                let whole = Whole {
                    params: &params,
                    buffers: buffers.as_deref(),
                    optimizer: optimizer.as_ref(),
                    ddp: &ddp,
                };
                saving.save(now, &whole, place, history)?;
                timing.saved += began.elapsed();
                if now == Now::Stop {
                    progress.end();
                    return saving.stop(place);
                }
            }
        }
        let train_loss = losses.mean(ctx, &cut)?;
        timing.trained += began.elapsed();
        progress.end();
        voice.trained(ctx, epoch, train_loss, losses.own())?;

        ctx.group.set_phase("validation");
        let began = Instant::now();
        ddp.end_epoch(&mut params)?; // DDP
        let digest = checkpoint::weights_digest(&params);
        weights = hex::encode(digest);
        verify_equal(&ctx.group, &params, digest)?; // DDP
        last = tester.test(&params, &mut tape)?;
        metrics.add(last.loss);
        metrics.add(last.accuracy);
        accuracies.push(last.accuracy);
        timing.tested += began.elapsed();
        voice.tested(ctx, epoch, &last)?;
        log.event(&json!({
            "step": epoch * steps, "epoch": epoch, "train_loss": train_loss, "test_loss": last.loss,
            "accuracy": last.accuracy, "weights_sha256": weights,
            "train_s": timing.trained.as_secs_f64(), "elapsed_s": ctx.started.elapsed().as_secs_f64(),
        }))?;
        ctx.group.set_phase("saving");
        output.save_epoch(epoch, &params)?;
        if saving.enabled() {
            let before = &accuracies[..accuracies.len() - 1];
            if before.iter().all(|a| last.accuracy > *a) {
                output.save_best(epoch, last.accuracy, &params)?;
            }
            let history = History::new(&accuracies, metrics.values(), &[], 0);
            let now = match stop && epoch < settings.epochs() {
                true => Now::Stop,
                false => Now::Save,
            };
            let whole = Whole {
                params: &params,
                buffers: None,
                optimizer: optimizer.as_ref(),
                ddp: &ddp,
            };
            saving.save(now, &whole, place, history)?;
            if now == Now::Stop {
                return saving.stop(place);
            }
        }
    }
    saving.finish()?;
    profiler.finish(ctx, &mut tape, &params)?;
    timing.skipped = ddp.skipped_steps();
    timing.waited = loader.waited();
    timing.sent_bytes = ctx.group.bytes_sent_to().iter().sum();
    for advice in timing
        .spent(steps * settings.epochs())
        .advice(settings.workers)
    {
        ctx.note(&format!("warning: {advice}"));
    }
    ctx.group.set_phase("saving");
    voice.saves(ctx, true)?;
    output.save_weights(&params)?;
    voice.saves(ctx, false)?;
    output.save_accuracies(&accuracies)?;
    output.save_predictions(&tester.predictions(&params, &mut tape)?)?;
    let digests = Digests {
        initial,
        weights,
        optimizer: optimizer_sha256(optimizer.as_ref()),
        metrics: metrics.sha256(),
    };
    output.save_summary(&summary(
        ctx,
        program,
        &accuracies,
        &last,
        &timing,
        &digests,
    ))?;
    ctx.group.barrier()?; // DDP: nobody leaves before the files are complete
    voice.ends(ctx)?;
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
        &digests.weights[..12],
        output.saved().display()
    ));
    Ok(())
}

/// The losses of an epoch, kept by part, so that their sum does not depend on
/// who had which part.
struct EpochLoss {
    sums: Vec<f64>,
    samples: usize,
    own: f64,
    steps: usize,
}

impl EpochLoss {
    fn new(parts: usize) -> EpochLoss {
        EpochLoss {
            sums: vec![0.0; parts],
            samples: 0,
            own: 0.0,
            steps: 0,
        }
    }

    fn add(&mut self, sums: &[f64], own: f64, samples: usize) {
        for (total, sum) in self.sums.iter_mut().zip(sums) {
            *total += sum;
        }
        self.samples += samples;
        self.own += own;
        self.steps += 1;
    }

    /// The sums of all ranks, and the samples in them.
    fn gathered(&self, ctx: &RankContext) -> Result<(Vec<f64>, usize)> {
        let mut sums = self.sums.clone();
        ShardTree::gather_values(&ctx.group, &mut sums)?; // DDP
        Ok((sums, self.samples))
    }

    /// Goes on from what a checkpoint says. Whoever has a part has its sum;
    /// where the parts are others now, rank 0 has them all.
    fn resume(&mut self, ctx: &RankContext, cut: &Cut, history: &History) {
        let (sums, samples) = history.losses();
        self.samples = samples;
        if cut.tree().is_some() && sums.len() == self.sums.len() {
            let mine = cut.mine();
            self.sums[mine.clone()].copy_from_slice(&sums[mine]);
        } else if ctx.is_main() {
            self.sums[0] = sums.iter().sum();
        }
    }

    /// Mean of this rank's steps.
    fn own(&self) -> f64 {
        self.own / self.steps.max(1) as f64
    }

    /// Mean over the samples of all ranks, the same on all.
    fn mean(&mut self, ctx: &RankContext, cut: &Cut) -> Result<f64> {
        ShardTree::gather_values(&ctx.group, &mut self.sums)?; // DDP
        let total = match cut.tree() {
            Some(tree) => tree.sum(&self.sums),
            None => self.sums.iter().sum(),
        };
        Ok(total / self.samples.max(1) as f64)
    }
}

/// The model's buffers for a checkpoint between two steps of an epoch, where they
/// are other than the rank's: running statistics that are each rank's own until the
/// epoch ends become their mean, in the checkpoint only. A resumed rank may stand for
/// any of them.
fn mean_buffers(ctx: &RankContext, cut: &Cut, params: &Params) -> Result<Option<Vec<f32>>> {
    if cut.tree().is_some() || ctx.world() == 1 || params.buffers_flat().is_empty() {
        return Ok(None);
    }
    let mut buffers = params.buffers_flat().to_vec();
    ctx.group.all_reduce(&mut buffers, ReduceOp::Mean)?; // DDP
    Ok(Some(buffers))
}

/// What is announced besides the settings.
struct About<'a> {
    data: &'a Data,
    /// SHA-256 of the weights before the first step.
    initial: Option<&'a str>,
    steps: usize,
    optimizer: &'a str,
}

fn announce<P: Program>(
    ctx: &RankContext,
    program: &P,
    about: &About<'_>,
    params: &Params,
    ddp: &DistributedDataParallel,
    output: &Output,
) {
    let settings = program.settings();
    let global_batch = settings.global_batch(ctx.world());
    let count: usize = params.infos().iter().map(|i| i.len).sum();
    let buckets = ddp.plan().buckets().len();
    let sizes: Vec<String> = (0..buckets)
        .map(|b| bytes(ddp.plan().bucket_bytes(b)))
        .collect();
    let buckets = match settings.cut.deterministic {
        Determinism::Ranks | Determinism::Off => {
            format!("{} ({})", plural(buckets, "bucket"), sizes.join(", "))
        }
        Determinism::Shards => format!("added over {} shards", settings.cut.shards),
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
    if settings.cut.accumulate > 1 {
        cut.push_str(&format!(" in {} micro-batches", settings.cut.accumulate));
    }
    ctx.note(&format!(
        "phalanx {}  {}  {}",
        env!("CARGO_PKG_VERSION"),
        program.name(),
        ctx.describe()
    ));
    ctx.note(&format!("data     {}", about.data.description));
    ctx.note(&format!(
        "model    {}, {}, {} parameters in {} tensors, {buckets}",
        program.title(),
        program.settings().precision.describe(),
        thousands(count),
        params.infos().len(),
    ));
    if let Some(initial) = about.initial {
        let from = settings.init.describe(settings.seed);
        ctx.note(&format!("weights  {from} ({initial:.12}…)"));
    }
    ctx.note(&format!(
        "training {} of {}, global batch {cut}, {}",
        plural(settings.epochs(), "epoch"),
        plural(about.steps, "step"),
        about.optimizer,
    ));
    ctx.note(&format!("output   {}", output.dir().display()));
}

fn summary<P: Program>(
    ctx: &RankContext,
    program: &P,
    accuracies: &[f64],
    last: &Tested,
    timing: &Timing,
    digests: &Digests,
) -> serde_json::Value {
    let settings = program.settings();
    json!({
        "recipe": program.name(),
        "version": env!("CARGO_PKG_VERSION"),
        "arguments": std::env::args().skip(1).collect::<Vec<_>>(),
        "world_size": ctx.world(),
        "threads_per_rank": ctx.threads,
        "precision": settings.precision.title(),
        "transport": ctx.describe(),
        "data": program.data_name(),
        "seed": settings.seed,
        "epochs": settings.epochs(),
        "test_loss": last.loss,
        "accuracy": last.accuracy,
        "accuracies": accuracies,
        "class_accuracies": last.class_accuracies(),
        "confusion": last.matrix(),
        "images_per_s": timing.images_per_s(),
        "train_s": timing.trained.as_secs_f64(),
        "test_s": timing.tested.as_secs_f64(),
        "total_s": ctx.started.elapsed().as_secs_f64(),
        "exposed_comm_percent": timing.exposed_percent(),
        "data_wait_s": timing.waited.as_secs_f64(),
        "saving_s": timing.saved.as_secs_f64(),
        "sent_bytes": timing.sent_bytes,
        "skipped_steps": timing.skipped,
        "peak_rss_mib": process::peak_rss_bytes().map(|b| b as f64 / f64::from(1 << 20)),
        "deterministic": format!("{:?}", settings.cut.deterministic).to_lowercase(),
        "initial_sha256": digests.initial,
        "weights_sha256": digests.weights,
        "optimizer_sha256": digests.optimizer,
        "metrics_sha256": digests.metrics,
    })
}
