//! One step: forward, backward, update, and what is reported and saved of it.

use std::time::Instant;

use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_data::state::Place;
use phalanx_ddp::{Commit, ShardTree};
use phalanx_nn::{StepKey, Tensor};
use serde_json::json;

use super::batches::{MicroBatch, StepBatch, StepContext};
use super::{Ended, Running, Trainer};
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
        let ctx = self.ctx;
        let turn = &batch.context;
        let running = self.running.as_ref().map(|running| running.epoch);
        if running != Some(turn.epoch) {
            let what = format!("the batch of {} is not of the running epoch", turn.name());
            return Err(Error::usage(what));
        }
        self.unfinished.set(true);
        ctx.group
            .set_position(turn.epoch as u64, turn.index as u64 + 1);
        if let Some(schedule) = &self.schedule {
            self.update.set_lr(schedule.lr());
        }
        let mut sums = vec![0.0; self.split.parts()];
        let marks = self.reports.trace.begin();
        self.reports.profiler.before(&mut self.tape);
        let buffers = self.params.buffers_flat().to_vec();
        let (commit, forward_ended) = self.gradients(batch, &mut loss, &mut sums)?;
        self.update(turn, &commit, &buffers)?;
        // Files and terminals may be slow.
        let phase = ctx.phase("reporting");
        self.reports.samples.step(turn.epoch, turn.index)?;
        let times = self.ddp.times();
        self.reports.trace.end(marks, forward_ended, times)?;
        let profiler = &mut self.reports.profiler;
        profiler.after(ctx, &mut self.tape, &self.params)?;

        let local: f64 = sums.iter().sum();
        let mean = local / batch.len().max(1) as f64;
        ctx.check_loss(mean, format_args!("{}", turn.name()), self.update.lr())?;
        if let Some(running) = &mut self.running {
            running.losses.add(&sums, mean, turn.global.samples);
        }
        let timing = &mut self.results.timing;
        timing.add(times.exposed(), turn.global.samples);
        self.report(turn, sums, mean)?;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        drop(phase);
        self.save_after(turn)?;
        Ok(mean)
    }

    /// Forward and backward of this rank's parts, gradients averaged over all;
    /// `sums` gets the losses by part. Whether the ranks want the step, and when
    /// the last forward had ended.
    fn gradients<D: Dataset + ?Sized>(
        &mut self,
        batch: &StepBatch<'_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Tensor<'s>>,
        sums: &mut [f64],
    ) -> Result<(Commit, Instant)> {
        let ctx = self.ctx;
        let turn = &batch.context;
        let mut forward_ended = Instant::now();
        let busy = turn.sizes.iter().filter(|n| **n > 0).count();
        batch.seek()?;
        // DDP: the mean is taken over all samples, however unevenly they are split.
        let mut micro_batches = self.ddp.begin_known(&turn.sizes[..busy], turn.global)?;
        for part in self.split.mine() {
            let Some(batch) = batch.next()? else {
                break;
            };
            let indices = batch.indices();
            if indices.is_empty() {
                continue;
            }
            self.reports.samples.add(indices);
            ctx.group.set_phase("forward");
            let key = StepKey::new(turn.epoch as u64 - 1, turn.index as u64)
                .seed(self.settings.seed)
                .samples(indices);
            let step = self.tape.step(&self.params, key);
            let loss = loss(&self.model, MicroBatch::new(&step, &*batch, indices))?;
            sums[part] = f64::from(loss.item()) * f64::from(indices.len() as f32);
            forward_ended = Instant::now();
            loss.backward(micro_batches.micro_batch()?)?; // DDP
            drop(step);
            micro_batches.update_buffers(&mut self.tape, &mut self.params)?;
        }
        Ok((micro_batches.finish()?, forward_ended)) // DDP
    }

    /// Updates the model, if the ranks want the step; `buffers` were its own before.
    fn update(&mut self, turn: &StepContext, commit: &Commit, buffers: &[f32]) -> Result<()> {
        self.ctx.group.set_phase("optimizer");
        if commit.is_yes() {
            self.ddp.sync_buffers(&mut self.params)?; // DDP
            let (params, ddp) = (&mut self.params, &mut self.ddp);
            self.update.step(params, ddp, self.clip)?; // DDP
        } else {
            // Statistics of a batch that is not trained on must not stay.
            self.params.buffers_flat_mut().copy_from_slice(buffers);
            let (ctx, at) = (self.ctx, turn.name());
            let progress = &self.reports.progress;
            progress.suspend(|| ctx.note_skipped(commit, format_args!("{at}")));
        }
        Ok(())
    }

    /// Reports a step of this rank's mean loss `mean`; `sums` are its losses by part.
    fn report(&mut self, turn: &StepContext, mut sums: Vec<f64>, mut mean: f64) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        let StepContext {
            epoch,
            index,
            global,
            ..
        } = *turn;
        let reports = &mut self.reports;
        reports.progress.step(global.samples, Some(mean));
        let logged = index.is_multiple_of(settings.log_interval);
        if let (Some(tree), true) = (self.split.tree(), logged) {
            // DDP: the loss of the global batch, whoever had which shard.
            ShardTree::gather_values(&ctx.group, &mut sums)?;
            mean = tree.sum(&sums) / global.samples as f64;
        }
        let facts = StepFacts {
            epoch,
            index,
            steps: self.steps,
            done: index * settings.global_batch(ctx.world()),
            samples: self.samples,
            loss: mean,
            logged,
        };
        if let Some(text) = reports.reporter.step(ctx, &facts) {
            reports.progress.suspend(|| ctx.line(&text))?;
        }
        if logged {
            self.results.metrics.add(mean);
            reports.log.event(&json!({
                "step": (epoch - 1) * self.steps + index, "epoch": epoch, "loss": mean, "lr": self.update.lr(),
                "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                "exposed_comm_ms": self.ddp.times().exposed().as_secs_f64() * 1e3,
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
        self.saving.prepare(&self.params, &self.update)?; // DDP
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
    fn mean_buffers(&self) -> Result<Option<Vec<f32>>> {
        let own = self.params.buffers_flat();
        if self.split.tree().is_some() || self.ctx.world() == 1 || own.is_empty() {
            return Ok(None);
        }
        let mut buffers = own.to_vec();
        self.ctx.group.all_reduce(&mut buffers, ReduceOp::Mean)?; // DDP
        Ok(Some(buffers))
    }
}
