//! The training loop in the user's hands: [`Trainer`].
//!
//! `builder` makes what a training consists of, new or from a checkpoint; `batches` and
//! `step` are the loop; `evaluate` measures the model over all ranks; `finish` leaves the
//! files. What makes it distributed is in the trainer's [`Strategy`].

mod announce;
mod builder;
mod elastic;
mod evaluate;
mod extent;
mod finish;
mod losses;
mod step;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_checkpoint::digest::MetricsDigest;
use phalanx_checkpoint::state::{Place, manifest_name};
use phalanx_checkpoint::{Outline, TensorId, Values};
use phalanx_data::Dataset;
use phalanx_data::loader::Loader;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::{Sampler, SamplerConfig};
use phalanx_ddp::StepTimes;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Step, Tape};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub use self::builder::TrainerBuilder;
use self::elastic::Elasticity;
pub use self::extent::Epochs;
use self::extent::{Extent, LoopState};
use self::losses::EpochLoss;
use self::step::BeforeUpdate;
pub use self::step::PendingUpdate;
use crate::args::{FOLDER, Settings};
use crate::batch::{BatchPosition, Batches};
use crate::best::Best;
use crate::deliveries::Deliveries;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::folder::{BEST_FILE, Output, next_step};
use crate::format::number;
use crate::log::RunLog;
use crate::lr_finder::LrFinder;
use crate::profile::Profiler;
use crate::reporter::Reporter;
use crate::sample_log::SampleLog;
use crate::saving::{History, SaveAction, Saving};
use crate::split::BatchSplit;
use crate::strategy::{Ddp, Strategy};
use crate::timing::Timing;
use phalanx_launch::RankContext;

/// A model in training on this rank, with all that belongs to it: parameters, the wrapper that
/// averages gradients over the ranks, optimizer, schedule, checkpoints, metrics and progress.
///
/// All ranks make the same calls in the same order.
///
/// ```no_run
/// # use phalanx_train::{Job, Measure, Result};
/// # use phalanx_nn::{Scope, layers::Linear, optim::Sgd};
/// # use phalanx_data::ImageDataset;
/// # use std::sync::Arc;
/// # fn train(job: &Job, train: Arc<dyn ImageDataset>, test: Arc<dyn ImageDataset>) -> Result<()> {
/// let model = |scope: &mut Scope| Linear::new(scope.enter("linear"), 28 * 28, 10);
/// let mut trainer = job.trainer(&train, model, Sgd::new).start()?;
/// for _epoch in trainer.epochs() {
///     for batch in trainer.batches(&train)? {
///         trainer.step(&batch, |model, batch| {
///             let n = batch.samples();
///             let scores = model.forward(batch.input(&batch.images, &[n, 28 * 28])?)?;
///             Ok(scores.cross_entropy(batch.labels(), n as f32)?)
///         })?;
///     }
///     trainer.evaluate(&test, |model, batch| {
///         let n = batch.samples();
///         let scores = model.forward(batch.input(&batch.images, &[n, 28 * 28])?)?;
///         let measure = Measure::of_scores(&scores, batch.labels())?;
///         Ok(measure.with_loss(scores.cross_entropy(batch.labels(), 1.0)?))
///     })?;
/// }
/// trainer.finish()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a training must end with Trainer::finish, which saves its weights"]
pub struct Trainer<'j, M, S: Strategy = Ddp> {
    ctx: &'j RankContext,
    settings: &'j Settings,
    program: String,
    /// What samples are called.
    unit: &'static str,
    unit_size: usize,
    /// The rank's parts of the training set.
    split: BatchSplit,
    samplers: Vec<Sampler>,
    sampler_config: SamplerConfig,
    drop_last: bool,
    /// Samples of a step over all ranks.
    global_batch: usize,
    samples: usize,
    /// Steps of an epoch.
    steps: usize,
    /// Samples of the last one over all ranks.
    last_batch: usize,
    extent: Extent,
    /// The step of the epoch before which its round ends.
    round_end: usize,
    model: M,
    /// How it is distributed over the ranks: parameters, optimizers, gradients.
    strategy: S,
    /// The learning rate that the schedule was made with.
    lr: f64,
    clip: Option<f64>,
    before_update: Option<BeforeUpdate<'j>>,
    schedule: Option<Schedule>,
    lr_finder: Option<LrFinder>,
    /// The learning rate that the program has set.
    set_lr: Option<f64>,
    tape: Tape,
    saving: Saving<'j>,
    /// What was decided after the round's last step, to be done after its evaluation; with a state of the program's own also
    /// after other steps, to be done before the next one.
    due: SaveAction,
    own_state: OwnState,
    /// How far it has come.
    place: Place,
    /// What was measured before it was resumed.
    history: History,
    /// The epoch that is being trained.
    running: Option<Running>,
    loop_state: Rc<LoopState>,
    /// Where the program is in the batches that it got last.
    position: Rc<Cell<BatchPosition>>,
    /// An epoch that has ended and is not saved yet.
    ended: Option<Ended>,
    waited: Rc<Cell<Duration>>,
    results: Results,
    reports: Reports,
    /// Further entries of the summary.
    summary: serde_json::Map<String, serde_json::Value>,
    purpose: Purpose,
    trainings: Rc<Trainings>,
    elastic: Elasticity,
}

/// What the trainings of one program have in common.
#[derive(Debug, Default)]
pub(crate) struct Trainings {
    /// One has begun and has not ended.
    pub(crate) unfinished: Cell<bool>,
    /// The folders of those that were started, by their names in the run's folder.
    pub(crate) folders: RefCell<BTreeSet<String>>,
}

/// What a program has a trainer for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Train,
    /// To evaluate weights that are there: no epochs, no files.
    Evaluate,
    /// To time its steps: no files, and nothing is printed.
    Measure,
}

/// An epoch between its first step and its last.
struct Running {
    epoch: usize,
    losses: EpochLoss,
    began: Instant,
}

/// An epoch after its last step.
struct Ended {
    epoch: usize,
    /// Where its evaluation is drawn in curves.
    step: usize,
    train_loss: f64,
    /// The sums of its losses, and their samples, if `--max-steps` has cut it.
    losses: (Vec<f64>, usize),
    /// Its weights were compared.
    is_checked: bool,
    /// It has its evaluation.
    is_recorded: bool,
}

/// A state of the program's own, in its checkpoints.
#[derive(Default)]
struct OwnState {
    value: Option<Value>,
    /// The program has one: what it does after a step belongs to the checkpoint of that step.
    is_used: bool,
}

/// What is measured on the way.
struct Results {
    /// SHA-256 of the weights before the first step, on rank 0, unless the run was resumed.
    initial: Option<String>,
    /// SHA-256 of the weights after the last epoch.
    weights: String,
    /// That of their averages, which are in the files, on rank 0.
    averages: Option<String>,
    /// Test accuracy of each epoch.
    accuracies: Vec<f64>,
    /// The last one, and the steps of the training before it, as far as they are known.
    last: Evaluation,
    last_step: Option<u64>,
    /// What was measured before it, where `--max-steps` has cut an epoch for it.
    before_cut: Option<History>,
    best: Best,
    metrics: MetricsDigest,
    timing: Timing,
}

/// Where it is reported.
struct Reports {
    reporter: Box<dyn Reporter>,
    log: RunLog,
    /// Dropped after the log, which says how the run has ended.
    deliveries: Deliveries,
    /// Dropped after these, which write into its folder.
    output: Output,
    samples: SampleLog,
    progress: Progress,
    profiler: Profiler,
}

impl<'j, M, S: Strategy> Trainer<'j, M, S> {
    /// The epochs that are left, from 1: all `--epochs`, or after `--resume` those from the one
    /// in which the checkpoint was saved; of a complete run none. With `--eval-every` the number of an epoch comes once for
    /// each of its parts, so that a loop that evaluates after the batches evaluates after each part.
    pub fn epochs(&self) -> Epochs {
        Epochs::new(self.extent, &self.loop_state, self.place)
    }

    /// Whether the run had ended before it was resumed. No epoch is left then, its files stay as they are, and
    /// [`finish`](Self::finish) gives the result that it ended with.
    pub fn is_complete(&self) -> bool {
        self.reports.output.complete().is_some()
    }

    /// This rank's batches of the next epoch of `data`, the training set that the trainer was
    /// made for; of a resumed training's first epoch those that are left. Every epoch has another
    /// order, which follows from `--seed`, unless the trainer was made with [`shuffle(false)`](TrainerBuilder::shuffle). The epoch before is saved first, if it is to be.
    ///
    /// # Errors
    ///
    /// `Usage`, when `data` has another number of samples. Those of saving. After a stop (SIGTERM,
    /// `--stop-after`) the error that ends the program orderly.
    pub fn batches<D: Dataset + ?Sized>(&mut self, data: &Arc<D>) -> Result<Batches<'j, D>> {
        if self.purpose == Purpose::Evaluate {
            return Err(Error::usage("the trainer was made with evaluate_only"));
        }
        if self.is_complete() {
            let what = "the run is complete and has no epoch left; loop over Trainer::epochs()";
            return Err(Error::usage(what));
        }
        let data_len = self.settings.limited_train(data.len());
        if data_len != self.samples {
            return Err(Error::usage(format!(
                "the trainer was made for {} samples, this data set has {data_len}",
                self.samples,
            )));
        }
        let is_paused = matches!(self.position.get(), BatchPosition::Paused(_));
        match is_paused {
            true => self.end_round()?,
            false => self.end_epoch()?,
        }
        let epoch = self.place.epoch as usize + 1;
        // Steps of this epoch that were taken in earlier rounds, or before the run was resumed.
        let first = self.place.step_in_epoch as usize;
        if !is_paused {
            self.reports.reporter.on_epoch_start(self.ctx, epoch)?;
            let progress = &mut self.reports.progress;
            let end = self.extent.epoch_end(self.place);
            progress.begin(epoch as u64, self.extent.epochs() as u64, end);
            progress.skip(first);
        }
        self.round_end = self.extent.round_end(self.place);
        let cursor = self.place.into();
        self.strategy.begin_epoch(first, cursor)?;
        let plan = self.split.rest(&self.samplers, cursor)?;
        let loader = Loader::new(Arc::clone(data), self.loader_options())?;
        if !is_paused {
            let mut losses = EpochLoss::new(self.split.parts(), self.ctx.elastic.is_some());
            if first > 0 {
                losses.resume(self.ctx, &self.split, &self.history);
            }
            self.running = Some(Running {
                epoch,
                losses,
                began: Instant::now(),
            });
        }
        let is_last = self.round_end == self.steps;
        let place = [epoch, first, self.round_end];
        let (split, waited) = (self.split.clone(), Rc::clone(&self.waited));
        self.position = Rc::default();
        let position = Rc::clone(&self.position);
        let batches = Batches::new(self.ctx, loader, split, plan, place, waited, position);
        Ok(batches.with_pause(!is_last))
    }

    /// Makes the model's buffers (running statistics) those of all ranks, and checks that all
    /// ranks have the same weights: once after each epoch, before they are used.
    /// [`evaluate`](Self::evaluate) calls it. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Ranks whose weights differ, by name; peers that are lost.
    pub fn check_weights(&mut self) -> Result<()> {
        if self.position.get() == BatchPosition::After {
            self.leave_epoch()?;
        }
        let Some(ended) = self.ended.as_mut().filter(|ended| !ended.is_checked) else {
            return Ok(());
        };
        ended.is_checked = true;
        let digest = self.together(|trainer| {
            let buffers = trainer.strategy.params().buffers_flat().to_vec();
            let digest = trainer.strategy.end_epoch(trainer.ctx);
            let digest = digest.and_then(|digest| trainer.share_digest(digest));
            if digest.is_err() {
                let params = trainer.strategy.state().params;
                params.buffers_flat_mut().copy_from_slice(&buffers);
            }
            digest
        })?;
        if let Some(digest) = digest {
            self.results.weights = digest;
        }
        Ok(())
    }

    /// Takes `evaluation` as the result of the epoch that has just ended, or with `--eval-every` of its part, which has one:
    /// further ones are not recorded. Weights and early stopping are decided by it. In the loop over an epoch's batches it is
    /// only written to the metrics, as of its step. All ranks give the same.
    ///
    /// # Errors
    ///
    /// Those of writing the metrics; `Usage`, when the measure that [`best`](crate::TrainerBuilder::best) names is missing, or
    /// one has the name `loss`.
    pub fn record(&mut self, evaluation: Evaluation) -> Result<()> {
        let ctx = self.ctx;
        if evaluation.values.contains_key("loss") {
            let what = "an evaluation has its own \"loss\"; give the further measure another name";
            return Err(Error::usage(what));
        }
        if self.lr_finder.is_some() {
            self.set_last(evaluation);
            return Ok(());
        }
        let branch = self.branch(&evaluation);
        let history = self.measured(&[], 0);
        let Some(ended) = &mut self.ended else {
            return self.record_at_step(evaluation);
        };
        if std::mem::replace(&mut ended.is_recorded, true) {
            return Ok(());
        }
        let (epoch, step, train_loss) = (ended.epoch, ended.step, ended.train_loss);
        let results = &mut self.results;
        results.before_cut = (self.place.step_in_epoch > 0).then_some(history);
        results.metrics.add(evaluation.loss);
        if evaluation.confusion.classes() > 0 {
            results.metrics.add(evaluation.accuracy);
            if self.place.step_in_epoch == 0 {
                results.accuracies.push(evaluation.accuracy);
            }
        }
        self.reports
            .reporter
            .on_evaluation(ctx, epoch, &evaluation)?;
        let record = json!({
            "step": step, "epoch": epoch, "train_loss": train_loss, "weights_sha256": results.weights,
            "train_s": results.timing.trained.as_secs_f64(), "elapsed_s": ctx.started().elapsed().as_secs_f64(),
        });
        let record = with_results(record, &evaluation);
        self.keep_record(&record);
        self.reports.log.event(&record)?;
        self.judge(epoch, evaluation, branch)
    }

    /// Of all that was measured up to `evaluation`.
    fn branch(&self, evaluation: &Evaluation) -> String {
        let mut metrics = self.results.metrics.clone();
        metrics.add(evaluation.loss);
        let mut branch = metrics.sha256();
        branch.truncate(16);
        branch
    }

    /// Takes `evaluation` as the last one.
    fn set_last(&mut self, evaluation: Evaluation) {
        self.results.last = evaluation;
        self.results.last_step = Some(self.place.step);
    }

    /// What was measured so far, for a checkpoint or another rank; `losses` and `samples` are of the running epoch.
    fn measured(&self, losses: &[f64], samples: usize) -> History {
        let results = &self.results;
        History::new(&results.accuracies, &results.metrics, losses, samples)
            .with_last(&results.last, results.last_step)
            .with_best(&results.best)
            .with_before_cut(results.before_cut.as_ref())
            .with_program(self.set_lr, self.own_state.value.as_ref())
    }

    /// [`record`](Self::record) of an epoch that has not ended. Elsewhere it is of no epoch of this run, which was resumed after
    /// its last one, or only evaluates.
    fn record_at_step(&mut self, evaluation: Evaluation) -> Result<()> {
        let ctx = self.ctx;
        let (Some(running), position) = (&self.running, self.position.get()) else {
            self.set_last(evaluation);
            return Ok(());
        };
        let (epoch, is_paused) = (running.epoch, matches!(position, BatchPosition::Paused(_)));
        if is_paused && self.results.best.has_judged(self.place.step) {
            return Ok(());
        }
        if is_paused || matches!(position, BatchPosition::At(_)) {
            let (step, epoch) = self.now();
            let elapsed = ctx.started().elapsed().as_secs_f64();
            let record = json!({ "step": step, "epoch": epoch, "elapsed_s": elapsed });
            let record = with_results(record, &evaluation);
            self.keep_record(&record);
            self.reports.log.event(&record)?;
        }
        if !is_paused {
            self.set_last(evaluation);
            return Ok(());
        }
        let Reports {
            reporter, progress, ..
        } = &mut self.reports;
        let step = self.place.step;
        progress.suspend(|| reporter.on_step_evaluation(ctx, step, &evaluation))?;
        let branch = self.branch(&evaluation);
        self.judge(epoch, evaluation, branch)
    }

    /// Decides by `evaluation`, in epoch `epoch`: the best weights, a schedule's learning rate, an early stop.
    fn judge(&mut self, epoch: usize, evaluation: Evaluation, branch: String) -> Result<()> {
        let best = &mut self.results.best;
        let (value, greatest) = best.compare(epoch, self.place.step, &evaluation, branch)?;
        if let Some(measure) = best.named(&evaluation) {
            self.reports.progress.set_measure(measure);
        }
        self.set_last(evaluation);
        if let Some(schedule) = &mut self.schedule {
            let before = schedule.lr();
            schedule.observe(value, greatest);
            if schedule.lr() != before && self.set_lr.is_none() {
                let rates = [before, schedule.lr()].map(number);
                let text = format!("learning rate {} -> {}", rates[0], rates[1]);
                self.reports.log.notice(self.place.step, &text);
                self.reports.progress.suspend(|| self.ctx.note(&text));
            }
        }
        let best = &self.results.best;
        if let Some(why) = best.why_stopped() {
            let is_there = |epoch| best.is_new() || self.reports.output.has_best(epoch);
            let saved = match best.so_far().is_some_and(is_there) {
                true => format!("saved as {BEST_FILE}"),
                false => "whose weights are not in the run's folder".to_owned(),
            };
            let text = format!("stopped early: {why}, {saved}");
            self.reports.log.notice(self.place.step, &text);
            self.reports.progress.suspend(|| self.ctx.note(&text));
        }
        self.update_loop();
        Ok(())
    }

    /// Tells the program's loop over the epochs how far the training has come.
    fn update_loop(&self) {
        let is_over = self.is_complete() || self.purpose == Purpose::Evaluate || self.is_last();
        self.loop_state.is_over.set(is_over);
        self.loop_state.ended.set(self.place.epoch as usize);
        self.loop_state.step.set(self.place.step);
    }

    /// Whether no step is left.
    fn is_last(&self) -> bool {
        self.extent.is_over(self.place) || self.results.best.stops()
    }

    /// Runs `work` with the averages of the weights in their place, where the optimizer has averages
    /// ([`Ema`](phalanx_nn::optim::Ema)).
    fn with_averages<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let own = self.strategy.state().show_averages();
        let result = work(self);
        if let Some(own) = own {
            let params = self.strategy.state().params;
            params.flat_mut().copy_from_slice(&own);
        }
        result
    }

    /// Ends the running epoch, if its loop was left before its last step.
    fn leave_epoch(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else {
            return Ok(());
        };
        self.reports.progress.end();
        // After a part of an epoch the training may go on with the next part, when it is resumed with other settings.
        if !matches!(self.position.get(), BatchPosition::Paused(_)) {
            self.place = Place {
                epoch: running.epoch as u64,
                samples: 0,
                step_in_epoch: 0,
                step: self.place.step,
            };
            self.update_loop();
        }
        self.close_epoch(running)
    }

    /// Leaves the files and the checkpoint of a part of an epoch that `--eval-every` has ended.
    ///
    /// # Errors
    ///
    /// Those of saving; after a stop the error that ends the program orderly.
    fn end_round(&mut self) -> Result<()> {
        if let Some(best) = self.results.best.take_new().cloned() {
            let began = Instant::now();
            let _phase = self.ctx.phase("saving");
            let joined = self.mean_buffers()?;
            let own = joined.map(|joined| self.replace_buffers(&joined));
            let saved = self.write_weights(|output, saving, outline, values| {
                let saved = output.save_best(&best, saving.folder(), outline, values);
                saving.handle_weights_error("the best", saved)
            });
            if let Some(own) = own {
                self.replace_buffers(&own);
            }
            saved?;
            self.results.timing.saved += began.elapsed();
        }
        self.save_due()
    }

    /// The step and the epoch that what is logged now belongs to: in the loop over an epoch's batches those of the
    /// batch, as its loss, and after it those of the evaluation.
    fn now(&self) -> (u64, usize) {
        let (running, ended) = (self.running.as_ref(), self.ended.as_ref());
        let epoch = running.map(|running| running.epoch);
        let epoch = epoch.or(ended.map(|ended| ended.epoch));
        let (next, next_epoch) = next_step(self.place, self.steps);
        let is_over = self.extent.is_over(self.place);
        let end = self.ended.as_ref().map(|ended| ended.step);
        match (self.position.get(), epoch) {
            (BatchPosition::At(index), Some(epoch)) => {
                (((epoch - 1) * self.steps + index) as u64, epoch)
            }
            // As the last step before it.
            (BatchPosition::Paused(next), Some(epoch)) => {
                (((epoch - 1) * self.steps + next - 1) as u64, epoch)
            }
            (BatchPosition::After, Some(epoch)) => {
                (end.unwrap_or(epoch * self.steps) as u64, epoch)
            }
            _ if is_over => (next, self.place.epoch as usize),
            _ => (next, next_epoch as usize),
        }
    }

    /// Leaves the ended epoch's files and checkpoint.
    ///
    /// # Errors
    ///
    /// Those of saving; after a stop the error that ends the program orderly.
    fn end_epoch(&mut self) -> Result<()> {
        self.leave_epoch()?;
        if self.ended.is_none() {
            return Ok(());
        }
        let _phase = self.ctx.phase("saving");
        self.check_weights()?;
        let Some(ended) = self.ended.take() else {
            return Ok(());
        };
        let (epoch, is_last) = (ended.epoch, self.is_last());
        let finds_lr = self.lr_finder.is_some();
        let best = self.results.best.take_new().cloned();
        self.write_weights(|output, saving, outline, values| {
            let saved = match finds_lr {
                true => Ok(()),
                false => output.save_epoch(epoch, outline, values),
            };
            match is_last {
                false => saving.handle_weights_error(&format!("epoch {epoch}'s"), saved)?,
                // What the training was for.
                true => saved?,
            }
            match &best {
                Some(best) => {
                    let saved = output.save_best(best, saving.folder(), outline, values);
                    saving.handle_weights_error("the best", saved)
                }
                None => Ok(()),
            }
        })?;
        let stop = self.due == SaveAction::Stop && !is_last;
        self.due = SaveAction::Continue;
        if !self.saving.enabled() {
            return Ok(());
        }
        let action = match stop {
            true => SaveAction::Stop,
            false => SaveAction::Save,
        };
        let (sums, samples) = ended.losses;
        self.save_for(action, None, &sums, samples)?;
        match stop {
            true => Err(self.stopped()),
            false => Ok(()),
        }
    }

    /// Runs `write` on rank 0, with the weights, or their averages, a tensor at a time.
    fn write_weights(
        &mut self,
        mut write: impl FnMut(&mut Output, &Saving<'_>, &Outline, &mut Values<'_>) -> Result<()>,
    ) -> Result<()> {
        self.by_rank_0(|trainer| {
            trainer.with_averages(|trainer| {
                let (output, saving) = (&mut trainer.reports.output, &trainer.saving);
                let gathered = trainer
                    .strategy
                    .gather_weights(trainer.ctx, |outline, values| {
                        write(output, saving, outline, values)
                    });
                gathered.map(drop)
            })
        })
    }

    /// [`save`](Self::save); before a stop the checkpoint is on the disk on all ranks' return.
    fn save_for(
        &mut self,
        action: SaveAction,
        buffers: Option<&[f32]>,
        sums: &[f64],
        samples: usize,
    ) -> Result<()> {
        match action {
            _ if action == SaveAction::Stop || self.strategy.is_sharded() => {
                self.by_rank_0(|trainer| trainer.save(action, buffers, sums, samples))
            }
            _ => self.save(action, buffers, sums, samples),
        }
    }

    /// Takes a checkpoint; `sums` and `samples` are the running epoch's losses,
    /// `buffers` stand in for the model's own.
    fn save(
        &mut self,
        action: SaveAction,
        buffers: Option<&[f32]>,
        sums: &[f64],
        samples: usize,
    ) -> Result<()> {
        if self.saving.is_off() {
            if action != SaveAction::Stop {
                return Ok(());
            }
            self.must_open_reports()?;
        }
        let log = &mut self.reports.log;
        if self.saving.enabled() {
            let file = format!("{FOLDER}/{}", manifest_name(self.place.step));
            log.checkpoint(self.place.step, Path::new(&file));
        }
        log.flush();
        let history = self.measured(sums, samples);
        let (saving, place) = (&mut self.saving, self.place);
        self.strategy
            .save(self.ctx, saving, action, buffers, place, history)
    }

    /// All is saved, and the ranks stop: how to resume was told, and the program ends with this
    /// error's exit code, which is 0 unless a SIGTERM was the cause.
    fn stopped(&mut self) -> Error {
        let profiler = &mut self.reports.profiler;
        profiler.finish(self.ctx, &mut self.tape, self.strategy.params());
        let waited = self.together(|trainer| Ok(trainer.ctx.group().barrier()?));
        let waited = waited.or_else(|error| match self.is_over() {
            true => Ok(()),
            false => Err(error),
        });
        self.reports.log.stop();
        self.end_joining();
        let stopped = waited.and_then(|()| self.saving.stop(self.place));
        self.reports.output.announce_report(self.ctx);
        stopped.err().unwrap_or_else(Error::stopped)
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Its parameters on this rank.
    pub fn params(&self) -> &Params {
        self.strategy.params()
    }

    /// A copy of the parameters in full, on rank 0. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn full_params(&self) -> Result<Option<Params>> {
        let own = self.strategy.params();
        self.strategy.gather_weights(self.ctx, |outline, values| {
            let all = outline.params().iter().enumerate();
            let full = all.map(|(i, (_, shape))| Ok((shape.clone(), values(TensorId::Param(i))?)));
            let mut full = full.collect::<Result<Vec<_>>>()?.into_iter();
            Ok(own.map(|info, part| Ok(full.next().unwrap_or((info.shape.clone(), part))))?)
        })
    }

    /// The norm of the averaged gradients of the last [`step`](Self::step) over all parameters, before it was clipped, as
    /// PyTorch's `clip_grad_norm_` gives it. None before the first step, and of a trainer without
    /// [`clip_grad_norm`](TrainerBuilder::clip_grad_norm), whose limit may be `f64::INFINITY`, and
    /// [`before_update`](TrainerBuilder::before_update).
    pub fn grad_norm(&self) -> Option<f64> {
        self.strategy.groups()[0].norm
    }

    /// The learning rate of the next step.
    pub fn lr(&self) -> f64 {
        let scheduled = self.schedule.as_ref().map(Schedule::lr);
        let lr = self.set_lr.or(scheduled);
        lr.unwrap_or_else(|| self.strategy.groups()[0].optimizer.lr())
    }

    /// Sets the learning rate of all following steps, in the place of the schedule's; optimizers of other
    /// [groups](TrainerBuilder::optimizer_of) change by the same factor. A resumed training goes on with it. All ranks set the
    /// same.
    ///
    /// # Errors
    ///
    /// `Usage`, when it is not a number from 0 up.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        if !(lr.is_finite() && lr >= 0.0) {
            let what = format!("a learning rate is a number from 0 up, not {lr}");
            return Err(Error::usage(what));
        }
        if self.lr_finder.is_none() {
            self.set_lr = Some(lr);
        }
        Ok(())
    }

    /// What [`set_state`](Self::set_state) has kept, in this run or before the checkpoint was saved from which it was resumed. A
    /// program with such a state asks for it before its first step.
    ///
    /// # Errors
    ///
    /// `Usage`, when it is no `T`.
    pub fn state<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        self.own_state.is_used = true;
        let Some(value) = &self.own_state.value else {
            return Ok(None);
        };
        T::deserialize(value).map(Some).map_err(|error| {
            Error::usage("the program's state in the checkpoint is of another type")
                .caused_by(error)
        })
    }

    /// Keeps a state of the program's own, which checkpoints save from now on: what it counts or decides from step to step. It is
    /// written as JSON, which has no NaN and no infinities. Rank 0's is saved, and all ranks of a resumed run get it.
    ///
    /// The checkpoint of a step is saved at the beginning of the next step, so that what the program does after a step, also
    /// an evaluation, is in it.
    ///
    /// # Errors
    ///
    /// `Usage`, when it cannot be written as JSON.
    pub fn set_state<T: Serialize + DeserializeOwned>(&mut self, state: &T) -> Result<()> {
        let value = serde_json::to_value(state);
        // A NaN is null there, and no number.
        let read = value.and_then(|value| T::deserialize(&value).map(|_| value));
        let value = read.map_err(|error| {
            let what = "the program's state cannot be written as JSON and read again; JSON has no NaN and no infinity";
            Error::usage(what).caused_by(error)
        })?;
        self.own_state = OwnState {
            value: Some(value),
            is_used: true,
        };
        Ok(())
    }

    /// Takes over what the program has set in the training that `history` is of.
    fn take_program(&mut self, history: &History) {
        self.set_lr = history.lr();
        self.own_state.value = history.state().cloned();
        self.own_state.is_used |= self.own_state.value.is_some();
    }

    /// The optimizer steps that were taken, those before a resume included.
    pub fn steps_taken(&self) -> u64 {
        self.place.step
    }

    /// The result of the last epoch's [`evaluate`](Self::evaluate); NaN before the first.
    pub fn last_evaluation(&self) -> &Evaluation {
        &self.results.last
    }

    /// The rank.
    pub fn context(&self) -> &'j RankContext {
        self.ctx
    }

    /// How long this rank waited in the last step for averaged gradients, after its own backward pass; none on a mesh, where
    /// they are averaged on the way.
    pub fn exposed_communication(&self) -> Option<Duration> {
        self.strategy.groups()[0].times.map(StepTimes::exposed)
    }

    /// The training flags of the command line.
    pub fn settings(&self) -> &'j Settings {
        self.settings
    }

    /// Adds an entry to `summary.json`; the trainer's own entries stay.
    pub fn add_to_summary(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.summary.insert(name.to_owned(), value.into());
    }

    /// Logs numbers of the program's own to `metrics.jsonl` and all trackers, from rank 0: in the loop over an epoch's
    /// batches at the step of the batch, as the trainer logs its loss, and after the loop at the step of the epoch's
    /// evaluation.
    ///
    /// # Errors
    ///
    /// `Usage` for a name that the trainer uses itself (`loss`, `step`, `test_loss`; `docs/design/run-folder.md` has them), or
    /// that begins with `test_`, as those of an evaluation's measures; those of writing.
    pub fn log(&mut self, values: &[(&str, f64)]) -> Result<()> {
        let now = self.now();
        let record = self.reports.log.values(now, values)?;
        self.keep_record(&record);
        Ok(())
    }

    /// Logs an image, a PNG file's bytes, to the run's folder and all trackers, from rank 0. It never waits for the disk.
    ///
    /// # Errors
    ///
    /// `Usage` when `png` is no PNG file.
    pub fn log_image(&self, name: &str, png: &[u8]) -> Result<()> {
        self.reports.log.image(self.now(), name, png)
    }

    /// Logs `rows` as a table to the run's folder and all trackers, from rank 0. Rows are objects with the same names. It
    /// never waits for the disk.
    ///
    /// # Errors
    ///
    /// `Failed` when a row is not JSON.
    pub fn log_table(&self, name: &str, rows: &[impl serde::Serialize]) -> Result<()> {
        let text = crate::folder::json_lines(name, rows)?;
        self.reports.log.table(self.now(), name, text, rows.len());
        Ok(())
    }

    /// Logs a text to the run's folder and all trackers, from rank 0. It never waits for the disk.
    pub fn log_text(&self, name: &str, text: &str) {
        self.reports.log.text(self.now(), name, text);
    }

    /// Writes `rows` to the file `name` in the run's folder, a JSON object a line; on rank 0,
    /// nothing elsewhere.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_rows(&self, name: &str, rows: &[impl serde::Serialize]) -> Result<()> {
        self.reports.output.save_rows(name, rows)?;
        self.reports.log.rows(self.now(), name);
        Ok(())
    }

    /// The rows that [`save_rows`](Self::save_rows) wrote to the file `name` before this run was
    /// resumed; lines that are no such rows are left out. None elsewhere than on rank 0.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn load_rows<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        self.reports.output.load_rows(name)
    }

    /// Writes the images of `predictions.jsonl` as one picture to `predictions.png`, which the
    /// run's report shows; on rank 0, nothing elsewhere. `phalanx_report::image::sheet` makes one.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_pictures(&self, png: &[u8]) -> Result<()> {
        self.reports.output.save_pictures(png)
    }
}

impl<M> Trainer<'_, M> {
    /// Runs the model in evaluation mode on this rank alone: `f` gets it and the engine's step,
    /// in which its tensors live. Its time counts as evaluation.
    ///
    /// # Errors
    ///
    /// Those of `f`.
    pub fn infer<R>(&mut self, f: impl for<'s> FnOnce(&M, &'s Step<'s>) -> Result<R>) -> Result<R> {
        let began = Instant::now();
        let outcome = self.with_averages(|trainer| {
            let step = trainer.tape.inference(trainer.strategy.params());
            f(&trainer.model, &step)
        });
        self.count_evaluation(began);
        outcome
    }
}

/// `record` with what `evaluation` has measured.
fn with_results(mut record: Value, evaluation: &Evaluation) -> Value {
    record["test_loss"] = json!(evaluation.loss);
    record["accuracy"] = json!(evaluation.accuracy);
    for (name, value) in &evaluation.values {
        record[format!("test_{name}")] = json!(value);
    }
    record
}
