//! One step: forward, backward, update, and what is reported and saved of it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use phalanx_checkpoint::state::Place;
use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_ddp::{Commit, ShardTree, Veto};
use phalanx_nn::optim::schedule::Schedule;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::course::{Ended, Running};
use super::losses::Losses;
use super::{Reports, Trainer};
use crate::batch::{LoadedMicroBatches, Randomness, StepBatch, StepContext};
use crate::error::{Error, Result, refuse};
use crate::folder::MFU;
use crate::format::plural;
use crate::reporter::StepInfo;
use crate::saving::SaveAction;
use crate::strategy::{Gradients, Group, MicroBatch, StepTools, Strategy, exposed, skipped_steps};

/// An update that [`before_update`](crate::TrainerBuilder::before_update) may refuse.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PendingUpdate<'a> {
    /// The name of the optimizer's [group of parameters](crate::TrainerBuilder::optimizer_of); empty for the trainer's own.
    pub group: &'a str,
    /// The epoch, from 1.
    pub epoch: usize,
    /// The step of the whole training, from 1.
    pub step: u64,
    /// Norm of the averaged gradients, before they are clipped.
    pub grad_norm: f64,
    /// Learning rate of the update.
    pub lr: f64,
}

/// Says whether an update is to be made.
pub(super) type BeforeUpdate<'j> = Box<dyn FnMut(&PendingUpdate<'_>) -> Result<bool> + 'j>;

/// A step that was taken.
#[derive(Serialize, Deserialize)]
struct Taken {
    /// The bits of the losses' sums, by part of the global batch.
    sums: Vec<u64>,
    /// Those of the mean loss of this rank's samples; in an elastic training of all samples.
    mean: u64,
    /// Those of the mean loss of all ranks' samples; of this rank's where they are added over shards.
    mean_of_all: u64,
    /// Ranks are to join, leave or wait.
    wanted: bool,
    #[serde(skip)]
    forward_ended: Option<Instant>,
}

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Takes a step: forward and backward of `loss` for each of this rank's micro-batches,
    /// gradients averaged over all samples of all ranks, then the optimizer's step with the
    /// schedule's learning rate, if all ranks vote for it. A checkpoint is saved if one is due.
    ///
    /// `loss` gives the *mean* over the micro-batch's samples. Gives that of this rank's samples
    /// of the step; 0 where it has none.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of `loss`; samples that cannot be read; a loss that is no number; peers that are
    /// lost; a checkpoint that cannot be saved. After a stop (SIGTERM, `--stop-after`) the error
    /// that ends the program orderly.
    pub fn step<D: Dataset + ?Sized>(
        &mut self,
        batch: &StepBatch<'_, D>,
        mut loss: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<S::Tensor<'s>>,
    ) -> Result<f64> {
        let taken = self.take_step(batch, &mut loss);
        self.noted(taken)
    }

    fn take_step<D: Dataset + ?Sized>(
        &mut self,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<S::Tensor<'s>>,
    ) -> Result<f64> {
        let ctx = self.ctx;
        self.save_due()?;
        self.admit()?;
        self.begin(0, &batch.context())?;
        self.reports.profiler.before(&mut self.model.tape);
        let taken = self.together(|trainer| trainer.train(0, batch, loss))?;
        self.gather_updated(0)?;
        let at = &*batch.context();
        self.elastic.wanted = taken.wanted;
        let sums: Vec<f64> = taken.sums.into_iter().map(f64::from_bits).collect();
        let mean = f64::from_bits(taken.mean);
        // Files and terminals may be slow.
        let phase = ctx.phase("reporting");
        if ctx.elastic.is_none() {
            self.reports.samples.step(at.epoch, at.index, 0);
        }
        let times = self.strategy.groups()[0].times;
        let exposed = exposed(times);
        let forward_ended = taken.forward_ended.unwrap_or_else(Instant::now);
        let (profiler, params) = (&mut self.reports.profiler, self.strategy.params());
        profiler.after(ctx, &mut self.model.tape, params, forward_ended, times);

        match &self.course.lr_finder {
            Some(_) => self.find_lr(at, &sums)?,
            None => self.check_mean(0, at, mean)?,
        }
        if let Some(running) = &mut self.course.running {
            running.losses.add(&sums, mean, at.global.samples);
        }
        let timing = &mut self.course.results.timing;
        timing.add(exposed, at.global.samples * self.sources.unit.1);
        self.count_time(1);
        self.report(at, sums, [mean, f64::from_bits(taken.mean_of_all)])?;
        self.report_change(at)?;
        if let Some(schedule) = &mut self.course.schedule {
            schedule.advance();
        }
        drop(phase);
        self.save_after(at)?;
        Ok(mean)
    }

    /// Trains the parameters of the group `name`
    /// ([`optimizer_of`](crate::TrainerBuilder::optimizer_of)) and nothing else: forward and
    /// backward of `loss`, their gradients averaged over all samples of all ranks, and a step of
    /// their own optimizer, if all ranks vote for it. Gives the mean loss of this rank's samples.
    ///
    /// Call it before [`step`](Self::step) with the same batch, as often as you like. `step` is
    /// what counts as the training's step: it comes last, reports its own loss, and a
    /// checkpoint saved after it has the state of all optimizers.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// `Usage`, when there is no such group; as [`step`](Self::step).
    pub fn step_of<D: Dataset + ?Sized>(
        &mut self,
        name: &str,
        batch: &StepBatch<'_, D>,
        mut loss: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<S::Tensor<'s>>,
    ) -> Result<f64> {
        let groups = self.strategy.groups();
        let is_meant = |group: &Group<'_>| !name.is_empty() && group.name == name;
        let Some(group) = groups.iter().position(is_meant) else {
            refuse!(
                "step_of(\"{name}\"): the trainer was made without optimizer_of(\"{name}\", ...)"
            );
        };
        self.save_due()?;
        self.admit()?;
        self.begin(group, &batch.context())?;
        let taken = self.together(|trainer| trainer.train(group, batch, &mut loss))?;
        self.gather_updated(group)?;
        let mean = f64::from_bits(taken.mean);
        let exposed = exposed(self.strategy.groups()[group].times);
        self.course.results.timing.add(exposed, 0);
        if self.course.lr_finder.is_none() {
            self.check_mean(group, &batch.context(), mean)?;
        }
        Ok(mean)
    }

    /// Takes the losses of a step under `--find-lr`. After the last step, or when the losses diverge, rank 0 says which learning
    /// rate it suggests, and the error ends the program with success.
    fn find_lr(&mut self, at: &StepContext, sums: &[f64]) -> Result<()> {
        let (ctx, lr) = (self.ctx, self.lr());
        let mut sum = [sums.iter().sum::<f64>()];
        let group = self.strategy.batch_group();
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        let Some(finder) = &mut self.course.lr_finder else {
            return Ok(());
        };
        let loss = sum[0] / at.global.samples.max(1) as f64;
        let (step, taken) = (self.course.place.step, self.course.place.step + 1);
        let record = json!({ "step": step, "epoch": at.epoch, "loss": loss, "lr": lr });
        self.reports.log.event(&record)?;
        if !finder.add(lr, loss) && taken < self.course.extent.all() {
            return Ok(());
        }
        self.reports.progress.end();
        let (suggestion, is_enough) = (finder.suggestion(), finder.is_enough());
        self.finish_profile();
        match suggestion {
            Some((suggested, least)) => {
                let record = json!({ "step": step, "epoch": at.epoch, "suggested_lr": suggested });
                self.reports.log.event(&record)?;
                ctx.note(&format!(
                    "suggested learning rate {suggested:.2e} (steepest fall); lowest loss at {least:.2e}"
                ));
                if ctx.is_main() {
                    ctx.line(&format!("suggested_lr={suggested:.2e}"))?;
                }
            }
            None if is_enough => {
                ctx.note("no learning rate to suggest: the loss does not fall");
            }
            None => ctx.note("no learning rate to suggest: the loss diverges in the first steps"),
        }
        ctx.group().barrier()?;
        self.reports.log.finish();
        self.reports.output.save_report();
        self.reports.output.announce_report(ctx);
        Err(Error::stopped())
    }

    /// Begins a step of the group number `group`.
    fn begin(&mut self, group: usize, at: &StepContext) -> Result<()> {
        let running = self.course.running.as_ref().map(|running| running.epoch);
        if running != Some(at.epoch) {
            refuse!("the batch of {} is not of the running epoch", at.name());
        }
        self.trainings.unfinished.set(true);
        let position = (at.epoch as u64, at.index as u64 + 1);
        self.ctx.group().set_position(position.0, position.1);
        let now = self
            .course
            .set_lr
            .or(self.course.schedule.as_ref().map(Schedule::lr));
        if let Some(now) = now {
            let lr = self.strategy.groups()[group].lr;
            let optimizer = &mut *self.strategy.state().optimizers[group];
            if let Some(schedule) = &self.course.schedule {
                schedule.apply(optimizer)?;
            }
            optimizer.set_lr(match lr == self.model.lr {
                true => now,
                // There is no factor where the training's own rate is 0.
                false if self.model.lr == 0.0 => lr,
                false => lr * (now / self.model.lr),
            });
        }
        Ok(())
    }

    /// An error unless the mean of this rank's losses is a number.
    fn check_mean(&self, group: usize, at: &StepContext, mean: f64) -> Result<()> {
        // Another group may have changed the weights within the first step.
        let is_updated = self.course.place.step > 0 || self.strategy.groups().len() > 1;
        let lr = is_updated.then(|| self.strategy.groups()[group].optimizer.lr());
        let checked = (self.ctx).check_loss(mean, format_args!("{}", at.name()), lr);
        checked.map_err(|error| error.note("or", "--anomaly, which names the operation"))
    }

    /// Forward, backward and the optimizer's step of the group number `group`. After an error the parameters are as before.
    fn train<D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<S::Tensor<'s>>,
    ) -> Result<Taken> {
        let buffers = self.strategy.params().buffers_flat().to_vec();
        let skipped = skipped_steps(&self.strategy);
        let flops = self.model.tape.flops();
        let averaged = self.average_gradients(group, batch, loss);
        let at = batch.context();
        let shared = averaged.and_then(|mut gradients| {
            let wanted = match self.ctx.elastic {
                Some(_) => self.share_losses(group, &at, &mut gradients, &buffers)?,
                None => false,
            };
            Ok((gradients, wanted))
        });
        let (gradients, wanted) = shared.inspect_err(|_| {
            self.set_buffers(&buffers);
            self.strategy.set_skipped_steps(&skipped);
        })?;
        self.course.results.timing.flops += self.model.tape.flops().wrapping_sub(flops) as f64;
        let at = &*at;
        if let Some((rows, joined)) = self.model.tape.take_fewest_normalised() {
            self.check_last_batch(at.global.samples, rows, joined)?;
        }
        if self.settings.watch > 0 && group == 0 && gradients.commit.is_yes() {
            self.watch(at);
        }
        self.update(group, at, &gradients.commit, &buffers)?;
        Ok(Taken {
            sums: gradients.sums.into_iter().map(f64::to_bits).collect(),
            mean: gradients.mean.to_bits(),
            mean_of_all: gradients.mean_of_all.to_bits(),
            wanted,
            forward_ended: Some(gradients.forward_ended),
        })
    }

    /// An error on all ranks if batch norms, which had `rows` values a channel in a step of `samples`, will have only one in the
    /// last step of an epoch: it is found before the first update.
    fn check_last_batch(&self, samples: usize, rows: f64, joined: bool) -> Result<()> {
        let (split, last) = (&self.sources.split, self.sources.last_batch);
        let has_one_a_sample = rows < 2.0 * split.smallest(samples, joined) as f64;
        let is_taken = self.course.extent.all() >= self.sources.steps as u64;
        if !has_one_a_sample || !is_taken || split.smallest(last, joined) > 1 {
            return Ok(());
        }
        let whose = match split.parts() > split.world() {
            true => "micro-batch",
            false => "rank",
        };
        let what = format!(
            "batch norm cannot train on a single sample, and a {whose} has only one in the last step of each epoch: {} samples in steps \
             of {} leave {last} for {}",
            self.sources.config.samples,
            self.sources.global_batch,
            plural(split.world(), "rank")
        );
        let fix = "--drop-last, which leaves out the short last batch; or another batch size";
        Err(Error::usage(what).note("fix", fix))
    }

    /// Forward and backward, and what the ranks agree on.
    fn average_gradients<D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<S::Tensor<'s>>,
    ) -> Result<Gradients> {
        if self.ctx.elastic.is_some() {
            self.renew(batch)?;
            self.reports.samples.begin_again();
        }
        let at = &*batch.context();
        let reports = &mut self.reports;
        let samples = (group == 0).then_some(&mut reports.samples);
        let mut batches = LoadedMicroBatches::new(batch, self.sources.split.mine(), samples)?;
        let tools = StepTools {
            ctx: self.ctx,
            tape: &mut self.model.tape,
            split: &self.sources.split,
            step: at,
            randomness: Randomness {
                // Each group has other random numbers in the same step.
                seed: self.settings.seed ^ ((group as u64) << 32),
                epoch: at.epoch as u64 - 1,
                step: at.index as u64,
            },
            clip: self.model.clip,
            log: (group == 0).then_some(&mut reports.log),
            progress: &reports.progress,
        };
        let gradients =
            (self.strategy).gradients(group, tools, &self.model.net, &mut batches, loss)?;
        self.ask_before_update(group, at, gradients)
    }

    /// Calls the program's hook, if there is one. If it refuses the update on any rank, all ranks skip it.
    fn ask_before_update(
        &mut self,
        group: usize,
        at: &StepContext,
        mut gradients: Gradients,
    ) -> Result<Gradients> {
        let (Some(ask), true) = (&mut self.model.before_update, gradients.commit.is_yes()) else {
            return Ok(gradients);
        };
        let now = &self.strategy.groups()[group];
        let is_taken = ask(&PendingUpdate {
            group: now.name,
            epoch: at.epoch,
            step: self.course.place.step + 1,
            grad_norm: now.norm.unwrap_or(f64::NAN),
            lr: now.optimizer.lr(),
        })?;
        let mut refused = vec![0i64; self.ctx.world()];
        let own = [i64::from(!is_taken)];
        self.ctx.group().all_gather(&own, &mut refused)?;
        let refused = refused.iter().enumerate().filter(|(_, no)| **no != 0);
        let vetoes: Vec<Veto> = refused
            .map(|(rank, _)| Veto {
                rank,
                parameter: None,
            })
            .collect();
        if !vetoes.is_empty() {
            gradients.commit = Commit::No(vetoes);
            let mut skipped = skipped_steps(&self.strategy);
            skipped[group] += 1;
            self.strategy.set_skipped_steps(&skipped);
        }
        Ok(gradients)
    }

    /// Updates the model, if the ranks want the step; `buffers` were its own before.
    pub(super) fn update(
        &mut self,
        group: usize,
        at: &StepContext,
        commit: &Commit,
        buffers: &[f32],
    ) -> Result<()> {
        self.ctx.group().set_phase("optimizer");
        if commit.is_yes() {
            self.strategy.update(group, self.model.clip)?;
        } else {
            // Statistics of a batch that is not trained on must not stay.
            self.set_buffers(buffers);
            let (ctx, name) = (self.ctx, at.name());
            let why = match commit {
                Commit::No(vetoes) if vetoes.iter().all(|veto| veto.parameter.is_none()) => {
                    let ranks: Vec<_> = vetoes.iter().map(|veto| veto.rank.to_string()).collect();
                    format!("before_update returned false on rank {}", ranks.join(", "))
                }
                _ => commit.to_string(),
            };
            let Reports { progress, log, .. } = &self.reports;
            let step = (at.epoch - 1) * self.sources.steps + at.index;
            let text = format!("{name} is skipped on all ranks: {why}");
            log.notice(step as u64, &text);
            progress.suspend(|| ctx.note_skipped(&why, format_args!("{name}")));
        }
        Ok(())
    }

    /// Writes histograms for `--watch`, if it is their step.
    fn watch(&mut self, at: &StepContext) {
        let step = (at.epoch - 1) * self.sources.steps + at.index;
        if step.is_multiple_of(self.settings.watch) && self.ctx.is_main() {
            let _phase = self.ctx.phase("reporting");
            let grads = self.strategy.groups()[0].gradients;
            let log = &self.reports.log;
            log.watch(step as u64, self.strategy.params(), grads);
        }
    }

    /// The time in steps so far, checkpoints between them included.
    fn trained(&self) -> Duration {
        let running = self.course.running.as_ref();
        let running = running.map_or(Duration::ZERO, |running| running.began.elapsed());
        self.course.results.timing.trained + running
    }

    /// Counts what was done since `began` as evaluation, and as no training.
    pub(super) fn count_evaluation(&mut self, began: Instant) {
        let took = began.elapsed();
        self.course.results.timing.tested += took;
        self.reports.progress.leave_out(took);
        if let Some(running) = &mut self.course.running {
            running.began += took;
        }
    }

    /// Adds to the log what the time was spent on so far, after `steps` more steps.
    pub(super) fn count_time(&self, steps: u64) {
        let (timing, counters) = (&self.course.results.timing, self.reports.log.counters());
        counters.steps.fetch_add(steps, Relaxed);
        for (counter, time) in [
            (&counters.train, self.trained()),
            (&counters.data, self.sources.waited.get()),
            (&counters.exposed, timing.exposed),
            (&counters.saving, timing.saved),
            (&counters.evaluation, timing.tested),
        ] {
            counter.store(time.as_nanos() as u64, Relaxed);
        }
        if counters.wants_bytes.swap(false, Relaxed) {
            let sent = self.strategy.report(self.settings).sent_bytes;
            counters.sent_bytes.store(sent, Relaxed);
        }
    }

    /// `outcome`; the log has an error, in case it ends the run, which then says how to see its report.
    pub(super) fn noted<T>(&mut self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| {
            self.reports.log.failed_by(&error);
            self.reports.output.with_report(error)
        })
    }

    /// Reports a step of the mean loss `own` of this rank and `mean` of all; `sums` are this rank's losses by part.
    fn report(
        &mut self,
        at: &StepContext,
        mut sums: Vec<f64>,
        [own, mean]: [f64; 2],
    ) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        let (epoch, index, global) = (at.epoch, at.index, at.global);
        let reports = &mut self.reports;
        let units = global.samples * self.sources.unit.1;
        reports.progress.step(units, Some(mean));
        let logged = index.is_multiple_of(settings.log_interval);
        let interval = settings.record_interval(self.course.extent.all());
        let recorded = logged || index.is_multiple_of(interval);
        let mean = match self.sources.split.tree() {
            // The loss of the global batch, whichever rank had which shard.
            Some(tree) if recorded && ctx.elastic.is_none() => {
                ShardTree::gather_values(self.strategy.batch_group(), &mut sums)?;
                tree.sum(&sums) / global.samples as f64
            }
            _ => mean,
        };
        let facts = StepInfo {
            epoch,
            index,
            steps: self.sources.steps,
            done: index * self.sources.global_batch,
            samples: self.sources.config.samples,
            // What a program prints is its rank's own, as in PyTorch, unless no result depends on the ranks.
            loss: match self.sources.split.tree() {
                Some(_) if logged => mean,
                _ => own,
            },
            logged,
        };
        if let Some(text) = reports.reporter.on_step(ctx, &facts) {
            reports.progress.suspend(|| ctx.line(&text))?;
        }
        if logged {
            self.course.results.metrics.add(mean);
        }
        if recorded && self.course.lr_finder.is_none() {
            let main = &self.strategy.groups()[0];
            let mut record = json!({
                "step": (epoch - 1) * self.sources.steps + index, "epoch": epoch, "loss": mean, "lr": main.optimizer.lr(),
                "elapsed_s": ctx.started().elapsed().as_secs_f64(),
                "data_wait_total_ms": self.sources.waited.get().as_secs_f64() * 1e3,
                "saving_total_ms": self.course.results.timing.saved.as_secs_f64() * 1e3,
            });
            if let Some(times) = main.times {
                record["exposed_comm_ms"] = json!(times.exposed().as_secs_f64() * 1e3);
            }
            if let Some(norm) = main.norm {
                record["grad_norm"] = json!(norm);
            }
            let trained = self.trained();
            if let Some(mfu) = self.course.results.timing.mfu(trained) {
                record[MFU] = json!(mfu);
            }
            self.keep_record(&record);
            self.reports.log.event(&record)?;
        }
        Ok(())
    }

    /// Saves after a step, if it is time. After the last step of an epoch, or of its part, nothing is saved before the
    /// evaluation; with a state of the program's own nothing before the next step.
    fn save_after(&mut self, at: &StepContext) -> Result<()> {
        let (next, step) = (at.index + 1, self.course.place.step + 1);
        let is_end = next == self.sources.steps;
        let ended = is_end || self.course.extent.is_cut(step);
        self.course.place = Place {
            epoch: at.cursor.epoch,
            samples: at.cursor.samples,
            step_in_epoch: if is_end { 0 } else { next as u64 },
            step,
        };
        match ended {
            true => self.update_loop(),
            false => self.course.loop_state.step.set(step),
        }
        if !self.saving.is_prepared() {
            self.together(|trainer| {
                trainer.strategy.prepare_saving(&mut trainer.saving)?;
                match trainer.ctx.elastic {
                    Some(_) => Ok(trainer.ctx.group().barrier()?),
                    None => Ok(()),
                }
            })?;
        }
        let action = match self.saving.wishes(self.course.place.step)? {
            None => SaveAction::Continue,
            Some(wishes) => {
                let all = self.together(|trainer| {
                    let (mut all, ctx) = (wishes, trainer.ctx);
                    if ctx.world() > 1 {
                        ctx.group().all_reduce(&mut all, ReduceOp::Max)?;
                    }
                    Ok(all)
                })?;
                self.saving.decide(all)
            }
        };
        self.course.due = action;
        if ended {
            return match self.course.running.take() {
                Some(running) => self.close_epoch(running),
                None => Ok(()),
            };
        }
        match next == self.course.round_end || self.course.own_state.is_used {
            true => Ok(()),
            false => self.save_due(),
        }
    }

    /// Saves between two steps of an epoch, if that was decided after the first.
    ///
    /// # Errors
    ///
    /// Those of saving; after a stop the error that ends the program orderly.
    pub(super) fn save_due(&mut self) -> Result<()> {
        let action = std::mem::replace(&mut self.course.due, SaveAction::Continue);
        if action == SaveAction::Continue {
            return Ok(());
        }
        self.save_between_steps(action)?;
        if action == SaveAction::Stop {
            self.reports.progress.end();
            return Err(self.stopped());
        }
        Ok(())
    }

    /// Takes a checkpoint between two steps of an epoch, if there are checkpoints.
    pub(super) fn save_between_steps(&mut self, action: SaveAction) -> Result<()> {
        let began = Instant::now();
        let phase = self.ctx.phase("saving");
        let buffers = self.mean_buffers()?;
        let losses = match &self.course.running {
            Some(running) => running.losses.gathered(self.strategy.batch_group())?,
            None => Losses::default(),
        };
        self.save_for(action, buffers.as_deref(), &losses)?;
        drop(phase);
        self.course.results.timing.saved += began.elapsed();
        self.count_time(0);
        Ok(())
    }

    /// After an epoch's last step.
    pub(super) fn close_epoch(&mut self, mut running: Running) -> Result<()> {
        let epoch = running.epoch;
        let taken = self.course.place.step_in_epoch as usize;
        let step = match taken {
            0 => epoch * self.sources.steps,
            taken => (epoch - 1) * self.sources.steps + taken - 1,
        };
        let losses = match taken {
            0 => Losses::default(),
            _ => running.losses.gathered(self.strategy.batch_group())?,
        };
        let train_loss = running
            .losses
            .mean(self.strategy.batch_group(), &self.sources.split)?;
        self.course.results.timing.trained += running.began.elapsed();
        self.count_time(0);
        self.reports.progress.end();
        let own = running.losses.own();
        self.reports
            .reporter
            .on_epoch_end(self.ctx, epoch, train_loss, own)?;
        self.course.ended = Some(Ended {
            epoch,
            step,
            train_loss,
            losses,
            is_checked: false,
            is_recorded: false,
        });
        Ok(())
    }

    /// The model's buffers for a checkpoint between two steps of an epoch, where they
    /// are other than the rank's: running statistics that are each rank's own until the
    /// epoch ends become their mean, in the checkpoint only. A resumed rank may stand for
    /// any of them.
    pub(super) fn mean_buffers(&mut self) -> Result<Option<Vec<f32>>> {
        if !self.strategy.has_own_buffers(self.ctx, &self.sources.split) {
            return Ok(None);
        }
        let bits = self.together(|trainer| {
            let mut mean = trainer.strategy.params().buffers_flat().to_vec();
            (trainer.ctx.group()).all_reduce(&mut mean, ReduceOp::Mean)?;
            Ok(mean.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
        })?;
        Ok(Some(bits.into_iter().map(f32::from_bits).collect()))
    }
}
