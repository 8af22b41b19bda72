//! The training loop in the user's hands: [`Trainer`].
//!
//! `builder` makes what a training consists of, new or from a checkpoint; `batches` and
//! `step` are the loop; `evaluate` measures the model over all ranks; `finish` leaves the
//! files. What makes it distributed is in the trainer's [`Strategy`].

mod announce;
mod builder;
mod course;
mod elastic;
mod evaluate;
mod extent;
mod finish;
mod handover;
mod joining;
mod losses;
mod model;
mod sources;
mod step;
mod takeover;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_checkpoint::state::{Place, manifest_name};
use phalanx_checkpoint::{Outline, TensorId, Values};
use phalanx_data::Dataset;
use phalanx_data::loader::Loader;
use phalanx_data::progress::Progress;
use phalanx_ddp::StepTimes;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Step};
use phalanx_track::Tracker;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

pub use self::builder::TrainerBuilder;
use self::course::{Course, OwnState, Running};
use self::elastic::Elasticity;
pub use self::extent::Epochs;
use self::losses::{EpochLoss, Losses};
use self::model::Model;
use self::sources::Sources;
pub use self::step::PendingUpdate;
use crate::args::{FOLDER, Settings};
use crate::batch::{BatchPosition, Batches};
use crate::deliveries::Deliveries;
use crate::error::{Error, Result, refuse};
use crate::evaluation::Evaluation;
use crate::folder::{BEST_FILE, Files, Output, next_step};
use crate::format::number;
use crate::log::{RunInfo, RunLog};
use crate::profile::Profiler;
use crate::reporter::Reporter;
use crate::sample_log::SampleLog;
use crate::saving::{History, SaveAction, Saving};
use crate::strategy::{Ddp, Strategy};
use phalanx_member::RankContext;

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
    sources: Sources,
    /// How the training is distributed over the ranks: parameters, optimizers, gradients.
    strategy: S,
    model: Model<'j, M>,
    course: Course,
    saving: Saving<'j>,
    reports: Reports,
    purpose: Purpose,
    trainings: Rc<Trainings>,
    elastic: Elasticity,
    /// After [`load_best`](Self::load_best), what is evaluated.
    best: Option<Params>,
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

/// Where it is reported.
struct Reports {
    info: RunInfo,
    files: Files,
    /// Those of the program, where this rank is not rank 0; it may become that.
    trackers: Vec<Box<dyn Tracker + Send>>,
    /// Further entries of the summary.
    summary: Map<String, Value>,
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
        Epochs::new(
            self.course.extent,
            &self.course.loop_state,
            self.course.place,
        )
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
            refuse!("the trainer was made with evaluate_only");
        }
        if self.is_complete() {
            refuse!("the run is complete and has no epoch left; loop over Trainer::epochs()");
        }
        let data_len = self.settings.limited_train(data.len());
        if data_len != self.sources.config.samples {
            refuse!(
                "the trainer was made for {} samples, this data set has {data_len}",
                self.sources.config.samples
            );
        }
        self.best = None;
        let is_paused = matches!(self.course.position.get(), BatchPosition::Paused(_));
        match is_paused {
            true => self.end_round()?,
            false => self.end_epoch()?,
        }
        let epoch = self.course.place.epoch as usize + 1;
        // Steps of this epoch that were taken in earlier rounds, or before the run was resumed.
        let first = self.course.place.step_in_epoch as usize;
        if !is_paused {
            self.reports.reporter.on_epoch_start(self.ctx, epoch)?;
            let progress = &mut self.reports.progress;
            let end = self.course.extent.epoch_end(self.course.place);
            progress.begin(epoch as u64, self.course.extent.epochs() as u64, end);
            progress.skip(first);
        }
        self.course.round_end = self.course.extent.round_end(self.course.place);
        let cursor = self.course.place.into();
        self.strategy.begin_epoch(first, cursor)?;
        let plan = self.sources.split.rest(&self.sources.samplers, cursor)?;
        let loader = Loader::new(Arc::clone(data), self.loader_options())?;
        if !is_paused {
            let mut losses = EpochLoss::new(self.sources.split.parts(), self.ctx.elastic.is_some());
            if first > 0 {
                losses.resume(self.ctx, &self.sources.split, &self.course.history);
            }
            self.course.running = Some(Running {
                epoch,
                losses,
                began: Instant::now(),
            });
        }
        let end = self.course.round_end;
        let (place, pauses) = ([epoch, first, end], end != self.sources.steps);
        let (parts, waited) = (
            (self.sources.split.clone(), plan),
            Rc::clone(&self.sources.waited),
        );
        self.course.position = Rc::default();
        let position = Rc::clone(&self.course.position);
        Ok(Batches::new(
            self.ctx, loader, parts, place, pauses, waited, position,
        ))
    }

    /// Makes the model's buffers (running statistics) those of all ranks, and checks that all
    /// ranks have the same weights: once after each epoch, before they are used.
    /// [`evaluate`](Self::evaluate) calls it. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Ranks whose weights differ, by name; peers that are lost.
    pub fn check_weights(&mut self) -> Result<()> {
        if self.course.position.get() == BatchPosition::After {
            self.leave_epoch()?;
        }
        let Some(ended) = self.course.ended.as_mut().filter(|ended| !ended.is_checked) else {
            return Ok(());
        };
        ended.is_checked = true;
        let digest = self.together(|trainer| {
            let buffers = trainer.strategy.params().buffers_flat().to_vec();
            let digest = trainer.strategy.end_epoch(trainer.ctx);
            let digest = digest.and_then(|digest| trainer.share_digest(digest));
            if digest.is_err() {
                trainer.set_buffers(&buffers);
            }
            digest
        })?;
        if let Some(digest) = digest {
            self.course.results.weights = digest;
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
            refuse!("an evaluation has its own \"loss\"; give the further measure another name");
        }
        if self.course.lr_finder.is_some() {
            self.set_last(evaluation);
            return Ok(());
        }
        let branch = self.branch(&evaluation);
        let history = self.measured(&Losses::default());
        let Some(ended) = &mut self.course.ended else {
            return self.record_at_step(evaluation);
        };
        if std::mem::replace(&mut ended.is_recorded, true) {
            return Ok(());
        }
        let (epoch, step, train_loss) = (ended.epoch, ended.step, ended.train_loss);
        let results = &mut self.course.results;
        results.before_cut = (self.course.place.step_in_epoch > 0).then_some(history);
        results.metrics.add(evaluation.loss);
        if evaluation.confusion.classes() > 0 {
            results.metrics.add(evaluation.accuracy);
            if self.course.place.step_in_epoch == 0 {
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
        let record = evaluation.added_to(record);
        self.keep_record(&record);
        self.reports.log.event(&record)?;
        self.judge(epoch, evaluation, branch)
    }

    /// Of all that was measured up to `evaluation`.
    fn branch(&self, evaluation: &Evaluation) -> String {
        let mut metrics = self.course.results.metrics.clone();
        metrics.add(evaluation.loss);
        let mut branch = metrics.sha256();
        branch.truncate(16);
        branch
    }

    /// Takes `evaluation` as the last one.
    fn set_last(&mut self, evaluation: Evaluation) {
        self.course.results.last = evaluation;
        self.course.results.last_step = Some(self.course.place.step);
    }

    /// What was measured so far, for a checkpoint or another rank; `losses` are of the running epoch.
    fn measured(&self, (losses, samples): &Losses) -> History {
        let (course, results) = (&self.course, &self.course.results);
        let (accuracies, metrics) = (&results.accuracies, &results.metrics);
        let mut history = History::new(accuracies, metrics, (losses, *samples), &results.last);
        history.last_step = results.last_step;
        history.best = results.best.so_far().cloned();
        history.judged = results.best.judged().to_vec();
        history.before_cut = results.before_cut.clone().map(Box::new);
        history.lr = course.set_lr.map(f64::to_bits);
        history.state = course.own_state.value.clone();
        history
    }

    /// [`record`](Self::record) of an epoch that has not ended. Elsewhere it is of no epoch of this run, which was resumed after
    /// its last one, or only evaluates.
    fn record_at_step(&mut self, evaluation: Evaluation) -> Result<()> {
        let ctx = self.ctx;
        let (Some(running), position) = (&self.course.running, self.course.position.get()) else {
            self.set_last(evaluation);
            return Ok(());
        };
        let (epoch, is_paused) = (running.epoch, matches!(position, BatchPosition::Paused(_)));
        if is_paused && self.course.results.best.has_judged(self.course.place.step) {
            return Ok(());
        }
        if is_paused || matches!(position, BatchPosition::At(_)) {
            let (step, epoch) = self.now();
            let elapsed = ctx.started().elapsed().as_secs_f64();
            let record = json!({ "step": step, "epoch": epoch, "elapsed_s": elapsed });
            let record = evaluation.added_to(record);
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
        let step = self.course.place.step;
        progress.suspend(|| reporter.on_step_evaluation(ctx, step, &evaluation))?;
        let branch = self.branch(&evaluation);
        self.judge(epoch, evaluation, branch)
    }

    /// Decides by `evaluation`, in epoch `epoch`: the best weights, a schedule's learning rate, an early stop.
    fn judge(&mut self, epoch: usize, evaluation: Evaluation, branch: String) -> Result<()> {
        let best = &mut self.course.results.best;
        let (value, greatest) = best.compare(epoch, self.course.place.step, &evaluation, branch)?;
        if let Some(measure) = best.named(&evaluation) {
            self.reports.progress.set_measure(measure);
        }
        self.set_last(evaluation);
        if let Some(schedule) = &mut self.course.schedule {
            let before = schedule.lr();
            schedule.observe(value, greatest);
            if schedule.lr() != before && self.course.set_lr.is_none() {
                let rates = [before, schedule.lr()].map(number);
                self.notice(&format!("learning rate {} -> {}", rates[0], rates[1]));
            }
        }
        let best = &self.course.results.best;
        if let Some(why) = best.why_stopped() {
            let is_there = |epoch| best.is_new() || self.reports.output.has_best(epoch);
            let saved = match best.so_far().is_some_and(is_there) {
                true => format!("saved as {BEST_FILE}"),
                false => "whose weights are not in the run's folder".to_owned(),
            };
            self.notice(&format!("stopped early: {why}, {saved}"));
        }
        self.update_loop();
        Ok(())
    }

    /// Shows the program's loop over the epochs how far the training has come.
    fn update_loop(&self) {
        let is_over =
            self.is_complete() || self.purpose == Purpose::Evaluate || self.course.is_last();
        let (state, place) = (&self.course.loop_state, self.course.place);
        state.is_over.set(is_over);
        state.ended.set(place.epoch as usize);
        state.step.set(place.step);
    }

    /// Runs `work` with the weights of [`load_best`](Self::load_best) in place of the trained ones, or with their averages, where
    /// the optimizer has averages ([`Ema`](phalanx_nn::optim::Ema)).
    fn with_averages<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        if let Some(mut best) = self.best.take() {
            let mut swap = |trainer: &mut Self| {
                let own = trainer.strategy.state().params;
                own.flat_mut().swap_with_slice(best.flat_mut());
                let buffers = own.buffers_flat_mut();
                buffers.swap_with_slice(best.buffers_flat_mut());
            };
            swap(self);
            let result = work(self);
            swap(self);
            self.best = Some(best);
            return result;
        }
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
        let Some(running) = self.course.running.take() else {
            return Ok(());
        };
        self.reports.progress.end();
        // After a part of an epoch the training may continue with the next part, when it is resumed with other settings.
        if !matches!(self.course.position.get(), BatchPosition::Paused(_)) {
            self.course.place = Place {
                epoch: running.epoch as u64,
                samples: 0,
                step_in_epoch: 0,
                step: self.course.place.step,
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
        if let Some(best) = self.course.results.best.take_new().cloned() {
            let began = Instant::now();
            let _phase = self.ctx.phase("saving");
            self.with_mean_buffers(|trainer| {
                trainer.write_weights(|output, saving, outline, values| {
                    let saved = output.save_best(&best, saving.folder(), outline, values);
                    saving.handle_weights_error("the best", saved)
                })
            })?;
            self.course.results.timing.saved += began.elapsed();
        }
        self.save_due()
    }

    /// The step and the epoch that what is logged now belongs to: in the loop over an epoch's batches those of the
    /// batch, as its loss, and after it those of the evaluation.
    fn now(&self) -> (u64, usize) {
        let (running, ended) = (self.course.running.as_ref(), self.course.ended.as_ref());
        let epoch = running.map(|running| running.epoch);
        let epoch = epoch.or(ended.map(|ended| ended.epoch));
        let (next, next_epoch) = next_step(self.course.place, self.sources.steps);
        let is_over = self.course.extent.is_over(self.course.place);
        let end = self.course.ended.as_ref().map(|ended| ended.step);
        match (self.course.position.get(), epoch) {
            (BatchPosition::At(index), Some(epoch)) => {
                (((epoch - 1) * self.sources.steps + index) as u64, epoch)
            }
            // As the last step before it.
            (BatchPosition::Paused(next), Some(epoch)) => {
                (((epoch - 1) * self.sources.steps + next - 1) as u64, epoch)
            }
            (BatchPosition::After, Some(epoch)) => {
                (end.unwrap_or(epoch * self.sources.steps) as u64, epoch)
            }
            _ if is_over => (next, self.course.place.epoch as usize),
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
        if self.course.ended.is_none() {
            return Ok(());
        }
        let _phase = self.ctx.phase("saving");
        self.check_weights()?;
        let Some(ended) = self.course.ended.take() else {
            return Ok(());
        };
        let (epoch, is_last) = (ended.epoch, self.course.is_last());
        let finds_lr = self.course.lr_finder.is_some();
        let best = self.course.results.best.take_new().cloned();
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
        let stop = self.course.due == SaveAction::Stop && !is_last;
        self.course.due = SaveAction::Continue;
        if !self.saving.enabled() {
            return Ok(());
        }
        let action = match stop {
            true => SaveAction::Stop,
            false => SaveAction::Save,
        };
        self.save_for(action, None, &ended.losses)?;
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
                let (strategy, ctx) = (&trainer.strategy, trainer.ctx);
                let gathered = strategy.gather_weights(ctx, |outline, values| {
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
        losses: &Losses,
    ) -> Result<()> {
        match action == SaveAction::Stop || self.strategy.is_sharded() {
            true => self.by_rank_0(|trainer| trainer.save(action, buffers, losses)),
            false => self.save(action, buffers, losses),
        }
    }

    /// Takes a checkpoint; `losses` are the running epoch's, `buffers` stand in for the model's own.
    fn save(&mut self, action: SaveAction, buffers: Option<&[f32]>, losses: &Losses) -> Result<()> {
        if self.saving.is_off {
            if action != SaveAction::Stop {
                return Ok(());
            }
            self.must_open_reports()?;
        }
        let log = &mut self.reports.log;
        if self.saving.enabled() {
            let file = format!("{FOLDER}/{}", manifest_name(self.course.place.step));
            log.checkpoint(self.course.place.step, Path::new(&file));
        }
        log.flush();
        let history = self.measured(losses);
        let (saving, place) = (&mut self.saving, self.course.place);
        self.strategy
            .save(self.ctx, saving, action, buffers, place, history)
    }

    fn finish_profile(&mut self) {
        let profiler = &mut self.reports.profiler;
        profiler.finish(self.ctx, &mut self.model.tape, self.strategy.params());
    }

    /// Writes `text` on the terminal and to the log, as of the last step.
    fn notice(&self, text: &str) {
        self.reports.log.notice(self.course.place.step, text);
        self.reports.progress.suspend(|| self.ctx.note(text));
    }

    /// All is saved, and the ranks stop: how to resume was said, and the program ends with this
    /// error's exit code, which is 0 unless a SIGTERM was the cause.
    fn stopped(&mut self) -> Error {
        self.finish_profile();
        let waited = self.together(|trainer| Ok(trainer.ctx.group().barrier()?));
        let waited = waited.or_else(|error| match self.is_over() {
            true => Ok(()),
            false => Err(error),
        });
        self.reports.log.stop();
        self.end_joining();
        let stopped = waited.and_then(|()| self.saving.stop(self.course.place));
        self.reports.output.announce_report(self.ctx);
        stopped.err().unwrap_or_else(Error::stopped)
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model.net
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
            own.map(|info, part| Ok(full.next().unwrap_or((info.shape.clone(), part))))
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
        let scheduled = self.course.schedule.as_ref().map(Schedule::lr);
        let lr = self.course.set_lr.or(scheduled);
        lr.unwrap_or_else(|| self.strategy.groups()[0].optimizer.lr())
    }

    /// Sets the learning rate of all following steps, in the place of the schedule's; optimizers of other
    /// [groups](TrainerBuilder::optimizer_of) change by the same factor. A resumed training continues with it. All ranks set the
    /// same.
    ///
    /// # Errors
    ///
    /// `Usage`, when it is not a number from 0 up.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        if !(lr.is_finite() && lr >= 0.0) {
            refuse!("a learning rate is a number from 0 up, not {lr}");
        }
        if self.course.lr_finder.is_none() {
            self.course.set_lr = Some(lr);
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
        self.course.own_state.is_used = true;
        let Some(value) = &self.course.own_state.value else {
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
        self.course.own_state = OwnState {
            value: Some(value),
            is_used: true,
        };
        Ok(())
    }

    /// The optimizer steps that were taken, those before a resume included.
    pub fn steps_taken(&self) -> u64 {
        self.course.place.step
    }

    /// The result of the last epoch's [`evaluate`](Self::evaluate); NaN before the first.
    pub fn last_evaluation(&self) -> &Evaluation {
        &self.course.results.last
    }

    /// The rank.
    pub fn context(&self) -> &'j RankContext {
        self.ctx
    }

    /// The run's folder, on all ranks; only rank 0's host has it for sure.
    pub fn folder(&self) -> &Path {
        self.reports.output.dir()
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
        self.reports.summary.insert(name.to_owned(), value.into());
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
            let step = trainer.model.tape.inference(trainer.strategy.params());
            f(&trainer.model.net, &step)
        });
        self.count_evaluation(began);
        outcome
    }
}
