//! The run around a training on global tensors: batches over a mesh, steps, evaluation, checkpoints, and the run's folder.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_base::process;
use phalanx_checkpoint as checkpoint;
use phalanx_checkpoint::digest::{MetricsDigest, optimizer_sha256};
use phalanx_checkpoint::state::{OptimizerState, Place};
use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_data::loader::{LoadedBatch, Loader, LoaderOptions};
use phalanx_data::metrics::Confusion;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::{EpochPlan, Sampler, SamplerConfig};
use phalanx_ddp::{Commit, Fingerprint, ShardTree, broadcast_parameters, verify_equal};
use phalanx_global::{Global, GlobalGrads, GlobalParams, GlobalStep, Indices, Parallel, Sbp};
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Optimizer, clip_factor};
use phalanx_nn::{Params, Scope, Seed, StepKey, Tape, Tensor, Threads};
use phalanx_train::different_arguments;
use phalanx_train::{
    BatchSplit, Best, CHECKPOINTS_DIR, Evaluation, Files, History, Measure, Output, RankContext,
    Reporter, Resumed, RunInfo, RunLog, SaveAction, Saving, Settings, SplitArgs, StepFacts,
    default_output_dir, settings_by_name,
};
use serde_json::{Value, json};

use super::explain;
use super::mesh::Mesh;
use crate::error::Result;
use crate::format::{bytes, plural, rounded, thousands};
use crate::say;
use phalanx_train::choice_name;

/// What is trained: a model of global tensors on a data set.
pub trait Task {
    /// The training set and the test set.
    type Data: Dataset + ?Sized;

    /// Its parameters are registered by [`Setup::model`].
    type Model;

    /// The model's scores of a batch, a row for each sample.
    ///
    /// # Errors
    ///
    /// Those of the model.
    fn scores<'s>(
        &self,
        model: &Self::Model,
        batch: &Rows<'s, <Self::Data as Dataset>::Batch>,
    ) -> Result<Global<'s>>;

    /// The mean loss over the whole batch.
    ///
    /// # Errors
    ///
    /// Those of the loss.
    fn loss<'s>(
        &self,
        scores: Global<'s>,
        batch: &Rows<'s, <Self::Data as Dataset>::Batch>,
    ) -> Result<Global<'s>>;

    /// Loss and answers of this rank's rows in an evaluation; `scores` are theirs.
    ///
    /// # Errors
    ///
    /// Those of the loss.
    fn measure(
        &self,
        scores: Tensor<'_>,
        batch: &<Self::Data as Dataset>::Batch,
        samples: usize,
    ) -> Result<Measure>;
}

/// This rank's rows of a batch that is split over the mesh's `data`.
pub struct Rows<'s, B> {
    step: &'s GlobalStep<'s>,
    /// What the loader has read.
    pub data: &'s B,
    /// Their number; 0 where a last batch has fewer rows than there are ranks.
    pub own: usize,
    sbp: &'s [Sbp],
}

impl<'s, B> Rows<'s, B> {
    /// The step that the batch is for.
    pub fn step(&self) -> &'s GlobalStep<'s> {
        self.step
    }

    /// A global tensor of all ranks' rows of `shape` (`x.to_global(placement, sbp=S0)`).
    ///
    /// # Errors
    ///
    /// Other values than the shape has; peers that are lost.
    pub fn tensor(&self, values: &[f32], shape: &[usize]) -> Result<Global<'s>> {
        let shape = [&[self.own], shape].concat();
        let values = &values[..shape.iter().product::<usize>().min(values.len())];
        let local = self.step.local().input(values, &shape)?;
        Ok(self.step.to_global(local, self.sbp)?)
    }

    /// The same of numbers that choose rows or classes (`y.to_global(placement, sbp=S0)`).
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    pub fn indices(&self, values: &[u32], shape: &[usize]) -> Result<Indices> {
        let shape = [&[self.own], shape].concat();
        let values = &values[..shape.iter().product::<usize>().min(values.len())];
        let placement = self.step.placement();
        Ok(Indices::from_local(placement, values, &shape, self.sbp)?)
    }
}

/// What makes an optimizer of this rank's parts of the parameters.
type MakeOptimizer<'a> = Box<dyn FnOnce(&Params, f64) -> Box<dyn Optimizer> + 'a>;

/// What a [`GlobalRun`] is made of.
pub struct Setup<'a, M> {
    /// What the program is called at the command line.
    pub name: &'static str,
    /// What the model is called.
    pub title: String,
    /// What samples are called.
    pub unit: &'static str,
    /// The data set, for people.
    pub data: String,
    /// Tells other data apart.
    pub content: String,
    /// The ranks.
    pub mesh: Mesh,
    /// How the parameters lie.
    pub parallel: Parallel,
    /// Registers the parameters.
    pub model: Box<dyn FnOnce(&mut Scope) -> M + 'a>,
    /// Makes the optimizer.
    pub optimizer: MakeOptimizer<'a>,
    /// The optimizer, for people.
    pub optimizer_title: String,
    /// The learning rate of each of so many steps; none keeps the optimizer's.
    pub schedule: Option<fn(f64, u64) -> phalanx_nn::Result<Schedule>>,
    /// The largest norm of the gradients.
    pub clip: Option<f64>,
    /// Further settings that shape the training, a flag and its value a line.
    pub shaping: Vec<String>,
    /// The files that are written besides metrics and summary.
    pub files: Files,
    /// What is printed.
    pub reporter: Box<dyn Reporter + 'a>,
}

/// One rank's part in a training on global tensors.
pub struct GlobalRun<'a, T: Task> {
    ctx: &'a RankContext,
    settings: &'a Settings,
    mesh: Mesh,
    name: &'static str,
    unit: &'static str,
    task: T,
    model: T::Model,
    weights: GlobalParams,
    grads: GlobalGrads,
    optimizer: Box<dyn Optimizer + 'a>,
    schedule: Option<Schedule>,
    clip: Option<f64>,
    tape: Tape,
    rows: Vec<Sbp>,
    /// This rank's rows of each batch, and the rows of all.
    parts: [(BatchSplit, Vec<Sampler>); 2],
    samples: usize,
    /// Of an epoch.
    steps: usize,
    place: Place,
    /// Of the running epoch: the sum of the losses, and the samples.
    losses: (f64, usize),
    reporter: Box<dyn Reporter + 'a>,
    progress: Progress,
    output: Output,
    log: RunLog,
    saving: Saving<'a>,
    results: Results,
    summary: serde_json::Map<String, Value>,
}

/// What is measured on the way.
struct Results {
    initial: Option<String>,
    /// On rank 0, after the last epoch.
    weights: String,
    accuracies: Vec<f64>,
    last: Evaluation,
    best: Best,
    metrics: MetricsDigest,
    trained: Duration,
    tested: Duration,
    waited: Duration,
    saved: Duration,
    images: usize,
}

/// Whether a training goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goes {
    On,
    Stopped,
}

impl<'a, T: Task> GlobalRun<'a, T> {
    /// Lays the parameters out over the mesh, new or from a checkpoint of any mesh or of DDP, and opens the run's folder.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, naming flag, folder or file; settings that differ between ranks; peers that are lost.
    pub fn open(
        ctx: &'a RankContext,
        settings: &'a Settings,
        setup: Setup<'a, T::Model>,
        task: T,
        train: &Arc<T::Data>,
    ) -> Result<Self> {
        let (mesh, name) = (setup.mesh, setup.name);
        let starting = ctx.phase("starting");
        let dir = settings.output_dir.clone();
        let dir = dir.unwrap_or_else(|| default_output_dir(name));
        let dir = ctx.folder_of_rank_0(dir)?;
        let resumed = Resumed::find(ctx, &settings.saving, &dir)?;
        let resumable = settings.resumable(name, &setup.content, mesh.data);
        let mut shaping = [settings.shaping(), mesh.shaping(), setup.shaping].concat();
        shaping.extend(setup.clip.map(|limit| format!("clip_grad_norm {limit}")));
        let by_name = settings_by_name(&shaping);

        let mut scope = Scope::new(Seed(settings.seed));
        let model = (setup.model)(&mut scope);
        let mut params = scope.build()?;
        match &resumed {
            Some(resumed) => {
                resumed.check(&resumable)?;
                resumed.params(&mut params, &by_name)?;
            }
            None => settings.init.fill(ctx, &mut params)?,
        }
        let mut facts = vec![format!("train {name}")];
        facts.extend(settings.must_agree());
        facts.extend(shaping.clone());
        facts.push(format!("data {}", setup.content));
        let mut fingerprint = Fingerprint::new();
        for fact in &facts {
            fingerprint.line(fact.as_str());
        }
        let compared = fingerprint.parameters(&params).compare(&ctx.group);
        compared.map_err(different_arguments)?;
        broadcast_parameters(&ctx.group, &mut params, 0)?;

        let placement = mesh.placement(&ctx.group)?;
        let mut tape = Tape::new(Threads(ctx.threads));
        tape.set_precision(settings.precision.into());
        let weights = setup.parallel.build(&placement, &params)?;
        let mut optimizer = (setup.optimizer)(weights.local(), settings.lr());
        optimizer.set_thread_pool(tape.thread_pool());
        if let Some(resumed) = &resumed {
            resumed.update_with(ctx, &params, &by_name, |steps, updates, buffers| {
                let parts = buffers
                    .iter()
                    .map(|(name, values)| Ok((*name, part_of(&weights, &params, values)?)));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                let views: Vec<(&str, &[f32])> = parts.iter().map(|(n, v)| (*n, &v[..])).collect();
                Ok(optimizer.restore(steps, updates, &views)?)
            })?;
        }

        let config = SamplerConfig {
            samples: train.len(),
            world: mesh.data,
            rank: placement.coordinates()[0],
            shuffle: true,
            seed: settings.seed,
        };
        // One logical rank that takes the parts of all.
        let all = SplitArgs {
            accumulate: mesh.data,
            ..settings.split.clone()
        };
        let own = BatchSplit::new(&settings.split, mesh.data, config.rank)?;
        let sampled = |split: BatchSplit| -> Result<(BatchSplit, Vec<Sampler>)> {
            let samplers = settings.samplers(&split, config, false)?;
            Ok((split, samplers))
        };
        let parts = [sampled(own)?, sampled(BatchSplit::new(&all, 1, 0)?)?];
        let steps = parts[0].0.epoch(&parts[0].1, 0).len();
        if let Some(resumed) = &resumed {
            resumed.fits(steps)?;
        }
        let epochs = settings.epochs();
        let schedule = setup.schedule;
        let schedule = schedule.map(|make| make(settings.lr(), (steps * epochs) as u64));
        let mut schedule = schedule.transpose()?;

        let metadata = setup.files.metadata();
        let mut output = Output::open(ctx, dir, setup.files, &settings.saving)?;
        let saved = resumable.into_iter().chain(by_name.clone()).collect();
        let folder = output.checkpoints(CHECKPOINTS_DIR, settings.saving.keep());
        let saving = Saving::open(ctx, &settings.saving, saved, folder, resumed.as_ref())?;
        let saving = saving.with_metadata(metadata);
        output.begin(output.dir(), &settings.saving)?;

        let digest = checkpoint::weights_sha256(&params);
        let initial = (ctx.is_main() && resumed.is_none()).then(|| digest.clone());
        let place = resumed.as_ref().map(Resumed::place).unwrap_or_default();
        if place.epoch as usize >= epochs {
            output.find_complete(ctx, &digest, ("epochs", epochs))?;
        }
        let count = params.numel();
        ctx.note(&format!(
            "phalanx {}  {name}  {}",
            env!("CARGO_PKG_VERSION"),
            ctx.describe(phalanx_nn::isa_name())
        ));
        ctx.note(&format!("data     {}", setup.data));
        ctx.note(&format!(
            "model    {}, {}, {} parameters in {} tensors",
            setup.title,
            settings.precision.describe(),
            thousands(count),
            params.len(),
        ));
        let own = Mesh::range(ctx, weights.local().numel(), thousands)?;
        let size = Mesh::range(ctx, size_of::<f32>() * weights.local().numel(), bytes)?;
        ctx.note(&format!("mesh     {}", mesh.describe()));
        ctx.note(&format!(
            "         {own} parameters on each rank ({size}, and as much for gradients and each optimizer state)"
        ));
        if let Some(initial) = &initial {
            let from = settings.init.describe(settings.seed);
            ctx.note(&format!("weights  {from} ({initial:.12}…)"));
        }
        let global = settings.global_batch(mesh.data);
        ctx.note(&format!(
            "training {} of {}, global batch {global} over data={}, {}",
            plural(epochs, "epoch"),
            plural(steps, "step"),
            mesh.data,
            setup.optimizer_title,
        ));
        ctx.note(&format!("output   {}", output.dir().display()));
        if mesh.explain {
            ctx.note(&explain::layouts(&weights));
        }
        let mut reporter = setup.reporter;
        if output.complete().is_none() {
            reporter.trains(ctx, epochs)?;
        }
        output.reopen()?;
        if let Some(resumed) = &resumed {
            let taken = thousands(place.step as usize);
            let all = plural(steps * epochs, "step");
            let complete = match output.complete() {
                Some(_) => format!(
                    ": the run is complete and stays as it is; --epochs {} continues it",
                    epochs + 1
                ),
                None => String::new(),
            };
            ctx.note(&format!("resumed  after {taken} of {all}{complete}"));
            resumed.announce_changes(ctx, &by_name);
            settings.init.announce_unused(ctx);
        }
        if let Some(schedule) = &mut schedule {
            (0..place.step).for_each(|_| schedule.advance());
        }
        let history = resumed.as_ref().map(Resumed::history).transpose()?;
        let history = history.unwrap_or_default();
        let mut metrics = MetricsDigest::new();
        history
            .metrics()
            .into_iter()
            .for_each(|value| metrics.add(value));
        let best = history.best();
        let at_end = (place.step_in_epoch == 0).then_some(place.epoch as usize);
        let begun = output.begin_best(ctx, best.as_ref(), at_end, &params);
        saving.handle_weights_error("the best", begun)?;
        let (sums, samples) = history.losses();
        let mut grads = weights.grads();
        grads.set_skipped_steps(history.skipped_steps());
        let nothing = Evaluation::new(f64::NAN, Confusion::new(0));
        let mut shown = settings_by_name(&facts);
        // "no --flag" of what was not typed.
        shown.remove("no");
        shown.insert("model".to_owned(), setup.title.clone());
        shown.insert("optimizer".to_owned(), setup.optimizer_title);
        let info = RunInfo {
            program: name,
            title: &setup.title,
            data: &setup.data,
            steps,
            settings: shown,
            params: &params,
            frozen: &[],
            labels: &settings.labels,
        };
        let log = output.log(ctx, resumed.as_ref().map(Resumed::place), &info)?;
        drop(starting);
        Ok(GlobalRun {
            ctx,
            settings,
            mesh,
            name,
            unit: setup.unit,
            task,
            model,
            grads,
            weights,
            optimizer,
            schedule,
            clip: setup.clip,
            tape,
            rows: mesh.rows(),
            parts,
            samples: train.len(),
            steps,
            place,
            losses: (sums.iter().sum(), samples),
            reporter,
            progress: Progress::for_rank(ctx.rank()).with_unit(setup.unit),
            output,
            log,
            saving,
            results: Results {
                initial,
                weights: digest,
                accuracies: history.accuracies(),
                last: history.last().unwrap_or(nothing),
                best: Best::new(settings.best.clone(), best),
                metrics,
                trained: Duration::ZERO,
                tested: Duration::ZERO,
                waited: Duration::ZERO,
                saved: Duration::ZERO,
                images: 0,
            },
            summary: serde_json::Map::new(),
        })
    }

    /// Adds an entry to `summary.json`.
    pub fn add_to_summary(&mut self, name: &str, value: impl Into<Value>) {
        self.summary.insert(name.to_owned(), value.into());
    }

    /// The model.
    pub fn model(&self) -> &T::Model {
        &self.model
    }

    /// Logs a text to the run's folder, from rank 0.
    pub fn log_text(&self, name: &str, text: &str) {
        let epoch = self.place.epoch as usize;
        self.log.text((self.place.step, epoch), name, text);
    }

    /// Trains all epochs that are left, and evaluates after each. `false`: it was asked to stop, and is saved.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read; a loss that is no number; peers that are lost; those of saving. After SIGTERM,
    /// `Interrupted`.
    pub fn train(&mut self, train: &Arc<T::Data>, test: &Arc<T::Data>) -> Result<bool> {
        let outcome = self.epochs(train, test).map_err(|error| {
            self.log.failed_by(&error);
            self.output.with_report(error)
        });
        Ok(outcome? == Goes::On)
    }

    fn epochs(&mut self, train: &Arc<T::Data>, test: &Arc<T::Data>) -> Result<Goes> {
        let epochs = self.place.epoch as usize + 1..=self.settings.epochs();
        if epochs.is_empty() && self.results.last.loss.is_nan() {
            // Resumed after its last epoch, from an older checkpoint, which does not have its evaluation.
            self.results.last = self.evaluate(test)?;
        }
        for epoch in epochs {
            let (mut stop, began) = (false, Instant::now());
            if self.epoch(epoch, train, &mut stop)? == Goes::Stopped {
                return Ok(Goes::Stopped);
            }
            self.results.trained += began.elapsed();
            self.progress.end();
            let (sum, samples) = std::mem::take(&mut self.losses);
            let train_loss = sum / samples.max(1) as f64;
            self.reporter
                .trained(self.ctx, epoch, train_loss, train_loss)?;
            self.check_copies()?;
            let whole = self.whole()?;
            if let Some(whole) = &whole {
                self.results.weights = checkpoint::weights_sha256(whole);
            }
            let evaluation = self.evaluate(test)?;
            self.record(epoch, train_loss, evaluation)?;
            if self.end_epoch(epoch, whole.as_ref(), stop)? == Goes::Stopped {
                return Ok(Goes::Stopped);
            }
        }
        Ok(Goes::On)
    }

    /// The steps of an epoch that are left; `stop` is set if its last step was to be the last of all.
    fn epoch(&mut self, epoch: usize, train: &Arc<T::Data>, stop: &mut bool) -> Result<Goes> {
        let ctx = self.ctx;
        self.reporter.epoch(ctx, epoch)?;
        let first = self.place.step_in_epoch as usize;
        self.progress
            .begin(epoch as u64, self.settings.epochs() as u64, self.steps);
        self.progress.skip(first);
        let cursor = self.place.into();
        let [own, all] = &self.parts;
        let own: EpochPlan = own.0.rest(&own.1, cursor)?;
        let all: EpochPlan = all.0.rest(&all.1, cursor)?;
        let mut loader = Loader::new(Arc::clone(train), self.loader_options())?;
        loader.start(own.clone());
        let parts = self.mesh.data;
        for index in first..self.steps {
            let (loading, before) = (ctx.phase("loading data"), loader.waited());
            let Some(batch) = loader.next_batch()? else {
                break;
            };
            drop(loading);
            self.results.waited += loader.waited() - before;
            let at = index - first;
            let slices = (at * parts..(at + 1) * parts).filter_map(|part| all.slice(part));
            let ids: Vec<u64> = slices.flat_map(|(ids, _)| ids.iter().copied()).collect();
            self.step(epoch, index, &ids, &batch)?;
            let cursor = own.cursor_after(at + 1);
            let ended = index + 1 == self.steps;
            self.place = Place {
                epoch: cursor.epoch,
                samples: cursor.samples,
                step_in_epoch: if ended { 0 } else { index as u64 + 1 },
                step: self.place.step + 1,
            };
            let action = self.saving.after_step(self.place.step)?;
            if ended {
                *stop = action == SaveAction::Stop;
            } else if action != SaveAction::Continue {
                let whole = self.whole()?;
                if self.save(action, whole.as_ref())? == Goes::Stopped {
                    return Ok(Goes::Stopped);
                }
            }
        }
        Ok(Goes::On)
    }

    /// Forward, backward and update; `ids` are the samples of all ranks.
    fn step(
        &mut self,
        epoch: usize,
        index: usize,
        ids: &[u64],
        batch: &LoadedBatch<T::Data>,
    ) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        ctx.group.set_position(epoch as u64, index as u64 + 1);
        if let Some(schedule) = &self.schedule {
            schedule.apply(&mut self.optimizer)?;
        }
        ctx.group.set_phase("forward");
        let key = StepKey::new(epoch as u64 - 1, index as u64).seed(settings.seed);
        let step = self.weights.step(&mut self.tape, key.samples(ids));
        let explained = std::mem::take(&mut self.mesh.explain);
        if explained {
            step.keep_conversions();
        }
        let rows = Rows {
            step: &step,
            data: &**batch,
            own: batch.indices().len(),
            sbp: &self.rows,
        };
        let scores = self.task.scores(&self.model, &rows)?;
        let loss = self.task.loss(scores, &rows)?;
        // The same on all ranks.
        let mean = f64::from(loss.item()?);
        if self.log.wants_graph() {
            self.log.graph(step.local().graph());
        }
        if explained {
            let text = explain::conversions(&step.explain());
            self.progress.suspend(|| ctx.note(&text));
        }
        ctx.group.set_phase("backward");
        loss.backward(&mut self.grads)?;
        drop(step);
        let lr = self.optimizer.lr();
        ctx.check_loss(mean, format_args!("epoch {epoch}, step {}", index + 1), lr)?;
        ctx.group.set_phase("optimizer");
        let (commit, factor) = match self.clip {
            Some(limit) => {
                let (commit, norm) = self.grads.commit_with_norm(&self.weights)?;
                (commit, clip_factor(norm, limit))
            }
            None => (self.grads.commit(&self.weights)?, 1.0),
        };
        self.update(
            &commit,
            factor,
            format_args!("epoch {epoch}, step {}", index + 1),
        )?;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        self.report(epoch, index, ids.len(), mean, lr)
    }

    /// Updates the model, if the ranks want the step `at`.
    fn update(&mut self, commit: &Commit, factor: f32, at: fmt::Arguments<'_>) -> Result<()> {
        let local = self.weights.local_mut();
        if commit.is_yes() {
            self.optimizer.step_scaled(local, &self.grads, factor)?;
            self.tape.update_buffers(local)?;
            return Ok(());
        }
        // Statistics of a batch that is not trained on must not stay.
        let buffers = local.buffers_flat().to_vec();
        self.tape.update_buffers(local)?;
        local.buffers_flat_mut().copy_from_slice(&buffers);
        let ctx = self.ctx;
        let text = format!("{at} is skipped on all ranks: {commit}");
        self.log.notice(self.place.step, &text);
        self.progress.suspend(|| ctx.note_skipped(commit, at));
        Ok(())
    }

    fn report(
        &mut self,
        epoch: usize,
        index: usize,
        samples: usize,
        loss: f64,
        lr: f64,
    ) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        let _phase = ctx.phase("reporting");
        self.losses.0 += loss * samples as f64;
        self.losses.1 += samples;
        self.results.images += samples;
        self.progress.step(samples, Some(loss));
        let logged = index.is_multiple_of(settings.log_interval);
        let facts = StepFacts {
            epoch,
            index,
            steps: self.steps,
            done: index * settings.global_batch(self.mesh.data),
            samples: self.samples,
            loss,
            logged,
        };
        if let Some(text) = self.reporter.step(ctx, &facts) {
            self.progress.suspend(|| ctx.line(&text))?;
        }
        if logged {
            self.results.metrics.add(loss);
        }
        if logged || index.is_multiple_of(settings.record_interval(self.steps)) {
            let results = &self.results;
            self.log.event(&json!({
                "step": (epoch - 1) * self.steps + index, "epoch": epoch, "loss": loss, "lr": lr,
                "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                "data_wait_total_ms": results.waited.as_secs_f64() * 1e3,
                "saving_total_ms": results.saved.as_secs_f64() * 1e3,
            }))?;
        }
        self.count(1);
        Ok(())
    }

    /// Tells the log what the time went to, after `steps` more steps.
    fn count(&self, steps: u64) {
        let results = &self.results;
        let times = [
            results.trained,
            results.waited,
            results.saved,
            results.tested,
        ];
        self.log.count(steps, times, self.sent_bytes());
    }

    /// By this rank to all others, over the groups of the mesh.
    fn sent_bytes(&self) -> u64 {
        let placement = self.weights.placement();
        let lines = (0..placement.sizes().len()).map(|dim| placement.line(dim));
        let groups = match placement.sizes() {
            // The line is the group itself.
            [_] => vec![placement.group()],
            _ => lines.chain([placement.group()]).collect(),
        };
        groups.iter().flat_map(|group| group.bytes_sent_to()).sum()
    }

    /// Evaluates `data`, each sample once; the same on all ranks.
    fn evaluate(&mut self, data: &Arc<T::Data>) -> Result<Evaluation> {
        let (ctx, began) = (self.ctx, Instant::now());
        let _phase = ctx.phase("evaluating");
        let line = self.weights.placement().line(0).clone();
        let config = SamplerConfig {
            samples: data.len(),
            world: line.world_size(),
            rank: line.rank(),
            shuffle: false,
            seed: 0,
        };
        let ranks = line.world_size();
        let batch = self.settings.test_batch_size.saturating_mul(ranks);
        let plan = Sampler::exact(config, batch)?.epoch(0);
        // A slot for each batch of each rank: the sums do not depend on who has which.
        let slots = plan.len() * ranks;
        let (mut losses, mut confusion) = (vec![0.0; slots], None);
        let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut loader = Loader::new(Arc::clone(data), self.loader_options())?;
        loader.start(plan);
        let mut slot = line.rank();
        while let Some(batch) = loader.next_batch()? {
            let step = self.weights.inference(&mut self.tape);
            let own = batch.indices().len();
            let rows = Rows {
                step: &step,
                data: &*batch,
                own,
                sbp: &self.rows,
            };
            // All ranks take part in the model, also one that has no row.
            let scores = self.task.scores(&self.model, &rows)?;
            let scores = scores.to_global(&self.rows)?.to_local();
            if own > 0 {
                let measured = self.task.measure(scores, &batch, own)?;
                losses[slot] = measured.loss;
                for (name, sum) in measured.values() {
                    let all = values.entry(name.clone());
                    all.or_insert_with(|| vec![0.0; slots])[slot] = *sum;
                }
                if let Some(counts) = measured.confusion {
                    let all = confusion.get_or_insert_with(|| Confusion::new(counts.classes()));
                    all.merge(&counts)?;
                }
            }
            slot += ranks;
        }
        // The first rank has the first batch, others may have none.
        let names: Vec<String> = values.keys().cloned().collect();
        let measured = (confusion.as_ref().map_or(0, Confusion::classes), names);
        let (classes, names): (usize, Vec<String>) = line.broadcast_object(Some(&measured), 0)?;
        let mut confusion = confusion.unwrap_or_else(|| Confusion::new(classes));
        ShardTree::gather_values(&line, &mut losses)?;
        if classes > 0 {
            line.all_reduce(confusion.counts_mut(), ReduceOp::Sum)?;
        }
        let samples = data.len() as f64;
        let mut evaluation = Evaluation::new(losses.iter().sum::<f64>() / samples, confusion);
        for name in names {
            let mut sums = values.remove(&name).unwrap_or_else(|| vec![0.0; slots]);
            ShardTree::gather_values(&line, &mut sums)?;
            evaluation
                .values
                .insert(name, sums.iter().sum::<f64>() / samples);
        }
        self.results.tested += began.elapsed();
        self.count(0);
        Ok(evaluation)
    }

    /// Takes `evaluation` as the result of epoch `epoch`.
    fn record(&mut self, epoch: usize, train_loss: f64, evaluation: Evaluation) -> Result<()> {
        let (ctx, results) = (self.ctx, &mut self.results);
        results.best.compare(epoch, &evaluation)?;
        results.metrics.add(evaluation.loss);
        if evaluation.confusion.classes() > 0 {
            results.metrics.add(evaluation.accuracy);
            results.accuracies.push(evaluation.accuracy);
        }
        self.reporter.evaluated(ctx, epoch, &evaluation)?;
        let mut event = json!({
            "step": epoch * self.steps, "epoch": epoch, "train_loss": train_loss, "test_loss": evaluation.loss,
            "accuracy": evaluation.accuracy, "weights_sha256": results.weights,
            "train_s": results.trained.as_secs_f64(), "elapsed_s": ctx.started.elapsed().as_secs_f64(),
        });
        for (name, value) in &evaluation.values {
            event[format!("test_{name}")] = json!(value);
        }
        self.log.event(&event)?;
        results.last = evaluation;
        Ok(())
    }

    /// Leaves the ended epoch's files and checkpoint; `whole` on rank 0.
    fn end_epoch(&mut self, epoch: usize, whole: Option<&Params>, stop: bool) -> Result<Goes> {
        let is_last = epoch >= self.settings.epochs();
        if let Some(whole) = whole {
            let saved = self.output.save_epoch(epoch, whole);
            match is_last {
                false => (self.saving).handle_weights_error(&format!("epoch {epoch}'s"), saved)?,
                true => saved?,
            }
        }
        if let (Some(whole), Some(best)) = (whole, self.results.best.take_new()) {
            let saved = self.output.save_best(best, whole);
            self.saving.handle_weights_error("the best", saved)?;
        }
        if !self.saving.enabled() {
            return Ok(Goes::On);
        }
        self.save(
            match stop && !is_last {
                true => SaveAction::Stop,
                false => SaveAction::Save,
            },
            whole,
        )
    }

    /// Takes a checkpoint as one rank alone would have it; `whole` on rank 0.
    fn save(&mut self, action: SaveAction, whole: Option<&Params>) -> Result<Goes> {
        let (began, _phase) = (Instant::now(), self.ctx.phase("saving"));
        let state = whole_state(&self.weights, &*self.optimizer, whole)?;
        let (accuracies, metrics) = (&self.results.accuracies, self.results.metrics.values());
        let (sum, samples) = self.losses;
        let history = History::new(accuracies, metrics, &[sum], samples);
        let history = history
            .with_skipped_steps(self.grads.skipped_steps())
            .with_last(&self.results.last)
            .with_best(self.results.best.so_far());
        self.log.flush();
        self.saving
            .save_whole(action, whole.zip(state), self.place, history)?;
        self.results.saved += began.elapsed();
        if action != SaveAction::Stop {
            return Ok(Goes::On);
        }
        self.progress.end();
        self.log.stop();
        self.saving.stop(self.place)?;
        Ok(Goes::Stopped)
    }

    /// All parameters in full, on rank 0: gathered one by one.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn whole(&self) -> Result<Option<Params>> {
        let (weights, is_main) = (&self.weights, self.ctx.is_main());
        let mut ids = weights.local().ids();
        let whole = weights.local().map(|info, own| {
            let Some(id) = ids.next() else {
                return Ok((info.shape.clone(), own));
            };
            let values = weights.full(id)?;
            let shape = weights.layout(id).shape();
            Ok(match is_main {
                true => (shape.to_vec(), values),
                false => (vec![0; shape.len()], Vec::new()),
            })
        })?;
        Ok(is_main.then_some(whole))
    }

    /// Compares what several ranks have of the parameters, over each dimension of the mesh.
    fn check_copies(&self) -> Result<()> {
        let (weights, placement) = (&self.weights, self.weights.placement());
        for dim in 0..placement.sizes().len() {
            let mut ids = weights.local().ids();
            let copies = weights.local().map(|info, own| {
                let sbp = ids.next().map(|id| weights.layout(id).sbp()[dim]);
                Ok(match sbp {
                    Some(Sbp::Broadcast) => (info.shape.clone(), own),
                    _ => (vec![0; info.shape.len()], Vec::new()),
                })
            })?;
            let digest = checkpoint::weights_digest(&copies);
            verify_equal(placement.line(dim), &copies, digest)?;
        }
        Ok(())
    }

    fn loader_options(&self) -> LoaderOptions {
        LoaderOptions {
            workers: self.settings.workers,
            ..LoaderOptions::default()
        }
    }

    /// Saves the weights (`whole` on rank 0), writes `summary.json`, and prints the last lines.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of writing; peers that are lost.
    pub fn finish(mut self, whole: Option<&Params>) -> Result<()> {
        let ctx = self.ctx;
        if self.output.complete().is_some() {
            ctx.note(&format!(
                "complete {}weights {:.12}…; nothing was changed in {}",
                self.result(),
                self.results.weights,
                self.output.dir().display()
            ));
            self.log.finish();
            return self.reporter.ends(ctx);
        }
        let phase = ctx.phase("saving");
        let state = whole_state(&self.weights, &*self.optimizer, whole)?;
        let optimizer = state.map(optimizer_sha256);
        self.count(0);
        self.log.flush();
        // Rank 0 knows what all ranks used.
        ctx.group.barrier()?;
        self.saving.finish()?;
        self.reporter.saves(ctx, true)?;
        if let Some(whole) = whole {
            self.results.weights = checkpoint::weights_sha256(whole);
            self.output.save_weights(whole)?;
        }
        self.reporter.saves(ctx, false)?;
        self.output.save_accuracies(&self.results.accuracies)?;
        self.log.finish();
        if let Some(optimizer) = optimizer {
            self.output.save_summary(&self.summary(&optimizer))?;
        }
        drop(phase);
        // Nobody leaves before the files are complete.
        ctx.group.barrier()?;
        self.reporter.ends(ctx)?;
        let results = &self.results;
        ctx.note(&format!(
            "done in {:.1} s: {}{} {}/s",
            ctx.started.elapsed().as_secs_f64(),
            self.result(),
            thousands(self.per_second() as usize),
            self.unit,
        ));
        ctx.note(&format!(
            "weights {:.12}…; saved {}",
            results.weights,
            self.output.saved().display()
        ));
        self.output.announce_report(ctx);
        Ok(())
    }

    /// What the last evaluation gave, in words.
    fn result(&self) -> String {
        let last = &self.results.last;
        match last.confusion.classes() {
            0 => format!("test loss {}, ", rounded(last.loss)),
            _ => format!("accuracy {:.2} %, ", last.accuracy * 100.0),
        }
    }

    fn per_second(&self) -> f64 {
        self.results.images as f64 / self.results.trained.as_secs_f64().max(1e-9)
    }

    fn summary(&self, optimizer_sha256: &str) -> Value {
        let (ctx, settings, results) = (self.ctx, self.settings, &self.results);
        let last = &results.last;
        let mut summary = json!({
            "recipe": self.name,
            "version": env!("CARGO_PKG_VERSION"),
            "arguments": say::arguments(),
            "world_size": ctx.world(),
            "mesh": self.weights.placement().to_string(),
            "fully_sharded": self.mesh.fully_sharded,
            "threads_per_rank": ctx.threads,
            "precision": settings.precision.title(),
            "transport": ctx.describe(phalanx_nn::isa_name()),
            "seed": settings.seed,
            "epochs": settings.epochs(),
            "test_loss": last.loss,
            "accuracy": last.accuracy,
            "accuracies": results.accuracies,
            "class_accuracies": last.class_accuracies(),
            "confusion": last.matrix(),
            "unit": self.unit,
            "images_per_s": self.per_second(),
            "train_s": results.trained.as_secs_f64(),
            "test_s": results.tested.as_secs_f64(),
            "total_s": ctx.started.elapsed().as_secs_f64(),
            "data_wait_s": results.waited.as_secs_f64(),
            "saving_s": results.saved.as_secs_f64(),
            "sent_bytes": self.sent_bytes(),
            "skipped_steps": self.grads.skipped_steps(),
            "peak_rss_mib": process::peak_rss_bytes().map(|b| b as f64 / f64::from(1 << 20)),
            "deterministic": choice_name(&settings.split.determinism()),
            "initial_sha256": results.initial,
            "weights_sha256": results.weights,
            "optimizer_sha256": optimizer_sha256,
            "metrics_sha256": results.metrics.sha256(),
        });
        for (name, value) in &last.values {
            summary[format!("test_{name}")] = json!(value);
        }
        for (name, value) in &self.summary {
            summary[name] = value.clone();
        }
        summary
    }
}

/// The optimizer's state in full, on rank 0, where `whole` are the parameters.
fn whole_state<'o>(
    weights: &GlobalParams,
    optimizer: &'o (dyn Optimizer + 'o),
    whole: Option<&Params>,
) -> Result<Option<OptimizerState<'o>>> {
    let own = OptimizerState::from(optimizer);
    let mut buffers = Vec::new();
    for (name, values) in &own.buffers {
        let mut all = whole.cloned();
        for id in weights.local().ids() {
            let full = weights.full_of(id, values)?;
            if let Some(all) = &mut all {
                all.import(id, &full)?;
            }
        }
        buffers.extend(all.map(|all| (*name, Cow::Owned(all.flat().to_vec()))));
    }
    let (steps, updates) = (own.steps, own.updates);
    Ok(whole.map(|_| OptimizerState {
        steps,
        updates,
        buffers,
    }))
}

/// This rank's part of an optimizer's buffer that is laid out as the whole `params`.
fn part_of(weights: &GlobalParams, params: &Params, values: &[f32]) -> Result<Vec<f32>> {
    let (mut local, mut full) = (weights.local().clone(), Vec::new());
    for id in params.ids() {
        full.clear();
        params.export_of(id, values, &mut full);
        local.import(id, &weights.part_of(id, &full)?)?;
    }
    Ok(local.flat().to_vec())
}

#[cfg(test)]
mod tests;
