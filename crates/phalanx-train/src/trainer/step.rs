//! One step: forward, backward, update, and what is reported and saved of it.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use phalanx_checkpoint::state::Place;
use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_ddp::{Commit, ShardTree};
use phalanx_nn::{GradView, Tensor};
use serde_json::json;

use super::batches::{MicroBatch, Randomness, StepBatch, StepContext};
use super::{Ended, Reports, Running, Trainer};
use crate::error::{Error, Result};
use crate::reporter::StepFacts;
use crate::saving::SaveAction;

impl<M> Trainer<'_, M> {
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
        mut loss: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
    ) -> Result<f64> {
        let taken = self.take_step(batch, &mut loss);
        self.noted(taken)
    }

    fn take_step<D: Dataset + ?Sized>(
        &mut self,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
    ) -> Result<f64> {
        let ctx = self.ctx;
        let turn = &batch.context;
        self.begin(0, turn)?;
        let marks = self.reports.trace.begin();
        self.reports.profiler.before(&mut self.tape);
        let (sums, forward_ended) = self.train(0, batch, loss)?;
        // Files and terminals may be slow.
        let phase = ctx.phase("reporting");
        self.reports.samples.step(turn.epoch, turn.index)?;
        let times = self.groups[0].ddp.times();
        self.reports.trace.end(marks, forward_ended, times)?;
        let profiler = &mut self.reports.profiler;
        profiler.after(ctx, &mut self.tape, &self.params)?;

        let mean = self.checked_mean(0, batch, &sums)?;
        if let Some(running) = &mut self.running {
            running.losses.add(&sums, mean, turn.global.samples);
        }
        let timing = &mut self.results.timing;
        timing.add(times.exposed(), turn.global.samples);
        self.count_time(1);
        self.report(turn, sums, mean)?;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        drop(phase);
        self.save_after(turn)?;
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
        mut loss: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
    ) -> Result<f64> {
        let own = self
            .groups
            .iter()
            .skip(1)
            .position(|group| group.name == name);
        let Some(group) = own.map(|i| i + 1) else {
            return Err(Error::usage(format!(
                "step_of(\"{name}\"): the trainer was made without optimizer_of(\"{name}\", ...)"
            )));
        };
        self.begin(group, &batch.context)?;
        let (sums, _) = self.train(group, batch, &mut loss)?;
        let exposed = self.groups[group].ddp.times().exposed();
        self.results.timing.add(exposed, 0);
        self.checked_mean(group, batch, &sums)
    }

    /// Begins a step of the group number `group`.
    fn begin(&mut self, group: usize, turn: &StepContext) -> Result<()> {
        let running = self.running.as_ref().map(|running| running.epoch);
        if running != Some(turn.epoch) {
            let what = format!("the batch of {} is not of the running epoch", turn.name());
            return Err(Error::usage(what));
        }
        self.trainings.unfinished.set(true);
        let position = (turn.epoch as u64, turn.index as u64 + 1);
        self.ctx.group.set_position(position.0, position.1);
        if let Some(schedule) = &self.schedule {
            let group = &mut self.groups[group];
            let optimizer = group.update.optimizer_mut();
            schedule.apply(optimizer)?;
            if group.lr != self.lr {
                // There is no factor where the training's own rate is 0.
                let factor = match self.lr == 0.0 {
                    true => 1.0,
                    false => schedule.lr() / self.lr,
                };
                optimizer.set_lr(group.lr * factor);
            }
        }
        Ok(())
    }

    /// The mean of this rank's losses, an error unless it is a number.
    fn checked_mean<D: Dataset + ?Sized>(
        &self,
        group: usize,
        batch: &StepBatch<'_, D>,
        sums: &[f64],
    ) -> Result<f64> {
        let local: f64 = sums.iter().sum();
        let mean = local / batch.len().max(1) as f64;
        let (turn, lr) = (&batch.context, self.groups[group].update.optimizer().lr());
        self.ctx
            .check_loss(mean, format_args!("{}", turn.name()), lr)?;
        Ok(mean)
    }

    /// Forward, backward and the optimizer's step of the group number `group`: the losses by
    /// part, and when the last forward had ended.
    fn train<D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
    ) -> Result<(Vec<f64>, Instant)> {
        let mut sums = vec![0.0; self.split.parts()];
        let buffers = self.params.buffers_flat().to_vec();
        let (commit, forward_ended) = self.gradients(group, batch, loss, &mut sums)?;
        if self.settings.watch > 0 && group == 0 && commit.is_yes() {
            self.watch(&batch.context);
        }
        self.update(group, &batch.context, &commit, &buffers)?;
        Ok((sums, forward_ended))
    }

    /// Forward and backward of this rank's parts, gradients averaged over all;
    /// `sums` gets the losses by part. Whether the ranks want the step, and when
    /// the last forward had ended.
    fn gradients<D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
        sums: &mut [f64],
    ) -> Result<(Commit, Instant)> {
        let ctx = self.ctx;
        let turn = &batch.context;
        let mut forward_ended = Instant::now();
        let busy = turn.sizes.iter().filter(|n| **n > 0).count();
        let mut kept = batch.kept.take().into_iter();
        let is_fresh = kept.len() == 0;
        let keep = |loaded| {
            if group > 0 {
                batch.kept.borrow_mut().push(loaded);
            }
        };
        if is_fresh {
            batch.seek()?;
        }
        let randomness = Randomness {
            // Each group has other random numbers in the same step.
            seed: self.settings.seed ^ ((group as u64) << 32),
            epoch: turn.epoch as u64 - 1,
            step: turn.index as u64,
        };
        // DDP: the mean is taken over all samples, however unevenly they are split.
        let ddp = &mut self.groups[group].ddp;
        let mut micro_batches = ddp.begin_known(&turn.sizes[..busy], turn.global)?;
        for part in self.split.mine() {
            let next = match is_fresh {
                true => batch.next()?,
                false => kept.next(),
            };
            let Some(loaded) = next else {
                break;
            };
            let indices = loaded.indices();
            if indices.is_empty() {
                keep(loaded);
                continue;
            }
            if group == 0 {
                self.reports.samples.add(indices);
            }
            ctx.group.set_phase("forward");
            let step = self.tape.step(&self.params, randomness.key(indices));
            let calls = Cell::new(0);
            let micro = MicroBatch::new(&step, &*loaded, indices, randomness, &calls);
            let loss = loss(&self.model, micro)?;
            if group == 0 && self.reports.log.wants_graph() {
                self.reports.log.graph(step.graph());
            }
            sums[part] = f64::from(loss.item()?) * f64::from(indices.len() as f32);
            forward_ended = Instant::now();
            loss.backward(micro_batches.micro_batch()?)?; // DDP
            drop(step);
            micro_batches.update_buffers(&mut self.tape, &mut self.params)?;
            keep(loaded);
        }
        Ok((micro_batches.finish()?, forward_ended)) // DDP
    }

    /// Updates the model, if the ranks want the step; `buffers` were its own before.
    fn update(
        &mut self,
        group: usize,
        turn: &StepContext,
        commit: &Commit,
        buffers: &[f32],
    ) -> Result<()> {
        self.ctx.group.set_phase("optimizer");
        if commit.is_yes() {
            let (params, group) = (&mut self.params, &mut self.groups[group]);
            group.ddp.sync_buffers(params)?; // DDP
            group.update.step(params, &mut group.ddp, self.clip)?; // DDP
        } else {
            // Statistics of a batch that is not trained on must not stay.
            self.params.buffers_flat_mut().copy_from_slice(buffers);
            let (ctx, at) = (self.ctx, turn.name());
            let Reports { progress, log, .. } = &self.reports;
            let step = (turn.epoch - 1) * self.steps + turn.index;
            let text = format!("{at} is skipped on all ranks: {commit}");
            log.notice(step as u64, &text);
            progress.suspend(|| ctx.note_skipped(commit, format_args!("{at}")));
        }
        Ok(())
    }

    /// Writes histograms for `--watch`, if it is their step.
    fn watch(&mut self, turn: &StepContext) {
        let step = (turn.epoch - 1) * self.steps + turn.index;
        if step.is_multiple_of(self.settings.watch) && self.ctx.is_main() {
            let _phase = self.ctx.phase("reporting");
            let ddp = &self.groups[0].ddp;
            let grads = (!ddp.exchange().is_scattered()).then_some(ddp as &dyn GradView);
            let log = &self.reports.log;
            log.watch(step as u64, &self.params, grads);
        }
    }

    /// Tells the log what the time went to so far, after `steps` more steps.
    pub(super) fn count_time(&self, steps: u64) {
        let (timing, counters) = (&self.results.timing, self.reports.log.counters());
        let began = self.running.as_ref().map(|running| running.began);
        let running = began.map_or(Duration::ZERO, |began| began.elapsed());
        counters.steps.fetch_add(steps, Relaxed);
        for (counter, time) in [
            (&counters.train, timing.trained + running),
            (&counters.data, self.waited.get()),
            (&counters.exposed, timing.exposed),
            (&counters.saving, timing.saved),
            (&counters.evaluation, timing.tested),
        ] {
            counter.store(time.as_nanos() as u64, Relaxed);
        }
        if counters.wants_bytes.swap(false, Relaxed) {
            let sent = self.ctx.group.bytes_sent_to().iter().sum();
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

    /// Reports a step of this rank's mean loss `own`; `sums` are its losses by part.
    fn report(&mut self, turn: &StepContext, mut sums: Vec<f64>, own: f64) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        let StepContext {
            epoch,
            index,
            global,
            ..
        } = *turn;
        let reports = &mut self.reports;
        reports.progress.step(global.samples, Some(own));
        let logged = index.is_multiple_of(settings.log_interval);
        let recorded = logged || index.is_multiple_of(settings.record_interval(self.steps));
        let mean = match self.split.tree() {
            // DDP: the loss of the global batch, whoever had which shard.
            Some(tree) if recorded => {
                ShardTree::gather_values(&ctx.group, &mut sums)?;
                tree.sum(&sums) / global.samples as f64
            }
            _ => own,
        };
        let facts = StepFacts {
            epoch,
            index,
            steps: self.steps,
            done: index * settings.global_batch(ctx.world()),
            samples: self.samples,
            loss: if logged { mean } else { own },
            logged,
        };
        if let Some(text) = reports.reporter.step(ctx, &facts) {
            reports.progress.suspend(|| ctx.line(&text))?;
        }
        if logged {
            self.results.metrics.add(mean);
        }
        if recorded {
            reports.log.event(&json!({
                "step": (epoch - 1) * self.steps + index, "epoch": epoch, "loss": mean, "lr": self.groups[0].update.optimizer().lr(),
                "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                "exposed_comm_ms": self.groups[0].ddp.times().exposed().as_secs_f64() * 1e3,
                "data_wait_total_ms": self.waited.get().as_secs_f64() * 1e3,
                "saving_total_ms": self.results.timing.saved.as_secs_f64() * 1e3,
            }))?;
        }
        Ok(())
    }

    /// Saves after a step, if it is time. After an epoch's last step nothing is saved before the
    /// evaluation.
    fn save_after(&mut self, turn: &StepContext) -> Result<()> {
        let ended = turn.index + 1 == self.steps;
        self.place = Place {
            epoch: turn.cursor.epoch,
            samples: turn.cursor.samples,
            step_in_epoch: if ended { 0 } else { turn.index as u64 + 1 },
            step: self.place.step + 1,
        };
        self.saving.prepare(&self.params, &self.groups[0].update)?; // DDP
        let action = self.saving.after_step(self.place.step)?; // DDP
        if ended {
            self.stop = action == SaveAction::Stop;
            return match self.running.take() {
                Some(running) => self.close_epoch(running),
                None => Ok(()),
            };
        }
        if action == SaveAction::Continue {
            return Ok(());
        }
        let began = Instant::now();
        let phase = self.ctx.phase("saving");
        let buffers = self.mean_buffers()?;
        let (sums, samples) = match &self.running {
            Some(running) => running.losses.gathered(self.ctx)?,
            None => (Vec::new(), 0),
        };
        self.save(action, buffers.as_deref(), &sums, samples)?;
        drop(phase);
        self.results.timing.saved += began.elapsed();
        self.count_time(0);
        if action == SaveAction::Stop {
            self.reports.progress.end();
            return Err(self.stopped());
        }
        Ok(())
    }

    /// After an epoch's last step.
    pub(super) fn close_epoch(&mut self, mut running: Running) -> Result<()> {
        let epoch = running.epoch;
        let train_loss = running.losses.mean(self.ctx, &self.split)?;
        self.results.timing.trained += running.began.elapsed();
        self.count_time(0);
        self.reports.progress.end();
        let own = running.losses.own();
        self.reports
            .reporter
            .trained(self.ctx, epoch, train_loss, own)?;
        self.ended = Some(Ended {
            epoch,
            train_loss,
            is_checked: false,
            is_recorded: false,
        });
        Ok(())
    }

    /// The model's buffers for a checkpoint between two steps of an epoch, where they
    /// are other than the rank's: running statistics that are each rank's own until the
    /// epoch ends become their mean, in the checkpoint only. A resumed rank may stand for
    /// any of them.
    pub(super) fn mean_buffers(&self) -> Result<Option<Vec<f32>>> {
        let own = self.params.buffers_flat();
        if self.split.tree().is_some() || self.ctx.world() == 1 || own.is_empty() {
            return Ok(None);
        }
        let mut buffers = own.to_vec();
        self.ctx.group.all_reduce(&mut buffers, ReduceOp::Mean)?; // DDP
        Ok(Some(buffers))
    }
}
