//! One step: forward, backward, update, and what is told and saved of it.

use std::time::Instant;

use phalanx_comm::ReduceOp;
use phalanx_ddp::{Commit, GlobalBatch, ShardTree};
use phalanx_nn::StepKey;
use phalanx_train::sampler::Cursor;
use phalanx_train::state::Place;
use serde_json::json;

use super::Training;
use super::losses::EpochLoss;
use crate::error::Result;
use crate::train::program::{Net, Program};
use crate::train::saving::Now;
use crate::train::voice::StepFacts;

/// Which step it is, and what there is to do in it.
pub(super) struct Turn {
    /// From 1.
    pub(super) epoch: usize,
    /// In the epoch, from 0.
    pub(super) index: usize,
    /// Of this rank's micro-batches, the empty ones last.
    pub(super) sizes: Vec<usize>,
    /// Over all ranks.
    pub(super) global: GlobalBatch,
}

impl Turn {
    /// For messages.
    fn name(&self) -> String {
        format!("epoch {}, step {}", self.epoch, self.index + 1)
    }
}

impl<P: Program> Training<'_, P> {
    /// Takes a step, counts and tells it.
    pub(super) fn step(&mut self, turn: &Turn, losses: &mut EpochLoss) -> Result<()> {
        let ctx = self.ctx;
        let (epoch, index) = (turn.epoch, turn.index);
        ctx.group.set_position(epoch as u64, index as u64 + 1);
        if let Some(schedule) = &self.schedule {
            self.update.set_lr(schedule.lr());
        }
        let mut sums = vec![0.0; self.cut.parts()];
        let marks = self.reports.trace.begin();
        self.reports.profiler.before(&mut self.tape);
        let buffers = self.params.buffers_flat().to_vec();
        let (commit, forward_ended) = self.gradients(turn, &mut sums)?;
        self.update(turn, &commit, &buffers)?;
        // Files and terminals may be slow.
        let _phase = ctx.phase("reporting");
        self.reports.samples.step(epoch, index)?;
        let times = self.ddp.times();
        self.reports.trace.end(marks, forward_ended, times)?;
        let profiler = &mut self.reports.profiler;
        profiler.after(ctx, &mut self.tape, &self.params)?;

        let local: f64 = sums.iter().sum();
        let mean = local / turn.sizes.iter().sum::<usize>().max(1) as f64;
        ctx.check_loss(mean, format_args!("{}", turn.name()), self.update.lr())?;
        losses.add(&sums, mean, turn.global.samples);
        let timing = &mut self.results.timing;
        timing.add(times.exposed(), turn.global.samples);
        self.tell(turn, sums, mean)?;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        Ok(())
    }

    /// Forward and backward of this rank's parts, gradients averaged over all;
    /// `sums` gets the losses by part. Whether the ranks want the step, and when
    /// the last forward had ended.
    fn gradients(&mut self, turn: &Turn, sums: &mut [f64]) -> Result<(Commit, Instant)> {
        let ctx = self.ctx;
        let mut forward_ended = Instant::now();
        let busy = turn.sizes.iter().filter(|n| **n > 0).count();
        // DDP: the mean is taken over all samples, however unevenly they are cut.
        let mut micro_batches = self.ddp.begin_known(&turn.sizes[..busy], turn.global)?;
        for part in self.cut.mine() {
            let loading = ctx.phase("loading data");
            let Some(batch) = self.loader.next_batch()? else {
                break;
            };
            drop(loading);
            if batch.labels.is_empty() {
                continue;
            }
            self.reports.samples.add(&batch.indices);
            ctx.group.set_phase("forward");
            let key = StepKey::new(turn.epoch as u64 - 1, turn.index as u64)
                .seed(self.program.settings().seed)
                .samples(&batch.indices);
            let step = self.tape.step(&self.params, key);
            let [h, w, c] = self.data.train.image_shape();
            let images = step.input(&batch.images, &[batch.labels.len(), h, w, c])?;
            let samples = batch.labels.len() as f32;
            let scores = self.net.forward(images)?;
            let loss = self.program.loss().of(scores, &batch.labels, samples)?;
            sums[part] = f64::from(loss.item()) * f64::from(samples);
            forward_ended = Instant::now();
            loss.backward(micro_batches.micro_batch()?)?; // DDP
            drop(step);
            micro_batches.update_buffers(&mut self.tape, &mut self.params)?;
        }
        Ok((micro_batches.finish()?, forward_ended)) // DDP
    }

    /// Updates the model, if the ranks want the step; `buffers` were its own before.
    fn update(&mut self, turn: &Turn, commit: &Commit, buffers: &[f32]) -> Result<()> {
        self.ctx.group.set_phase("optimizer");
        if commit.is_yes() {
            self.ddp.sync_buffers(&mut self.params)?; // DDP
            self.update.step(&mut self.params, &mut self.ddp)?; // DDP
        } else {
            // Statistics of a batch that is not trained on must not stay.
            self.params.buffers_flat_mut().copy_from_slice(buffers);
            let (ctx, at) = (self.ctx, turn.name());
            let progress = &self.reports.progress;
            progress.suspend(|| ctx.note_skipped(commit, format_args!("{at}")));
        }
        Ok(())
    }

    /// Shows a step of this rank's mean loss `mean`; `sums` are its losses by part.
    fn tell(&mut self, turn: &Turn, mut sums: Vec<f64>, mut mean: f64) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.program.settings());
        let Turn {
            epoch,
            index,
            global,
            ..
        } = *turn;
        let reports = &mut self.reports;
        reports.progress.step(global.samples, Some(mean));
        let logged = index.is_multiple_of(settings.log_interval);
        if let (Some(tree), true) = (self.cut.tree(), logged) {
            // DDP: the loss of the global batch, whoever had which shard.
            ShardTree::gather_values(&ctx.group, &mut sums)?;
            mean = tree.sum(&sums) / global.samples as f64;
        }
        let facts = StepFacts {
            epoch,
            index,
            steps: self.steps,
            done: index * settings.global_batch(ctx.world()),
            samples: self.data.train.len(),
            loss: mean,
            logged,
        };
        if let Some(text) = reports.voice.step(ctx, &facts) {
            reports.progress.suspend(|| ctx.line(&text))?;
        }
        if logged {
            self.results.metrics.add(mean);
            reports.log.event(&json!({
                "step": (epoch - 1) * self.steps + index, "epoch": epoch, "loss": mean, "lr": self.update.lr(),
                "elapsed_s": ctx.started.elapsed().as_secs_f64(),
                "exposed_comm_ms": self.ddp.times().exposed().as_secs_f64() * 1e3,
                "data_wait_total_ms": self.loader.waited().as_secs_f64() * 1e3,
                "saving_total_ms": self.results.timing.saved.as_secs_f64() * 1e3,
            }))?;
        }
        Ok(())
    }

    /// Saves after a step, if it is time; `cursor` is where the data go on. After an
    /// epoch's last step nothing is saved before the test.
    pub(super) fn save_after(
        &mut self,
        turn: &Turn,
        cursor: Cursor,
        losses: &EpochLoss,
    ) -> Result<Now> {
        let ended = turn.index + 1 == self.steps;
        self.place = Place {
            epoch: cursor.epoch,
            samples: cursor.samples,
            step_in_epoch: if ended { 0 } else { turn.index as u64 + 1 },
            step: self.place.step + 1,
        };
        self.saving.prepare(&self.params, &self.update)?; // DDP
        let now = self.saving.after_step(self.place.step)?; // DDP
        if ended {
            self.stop = now == Now::Stop;
            return Ok(Now::GoOn);
        }
        if now != Now::GoOn {
            let began = Instant::now();
            let _phase = self.ctx.phase("saving");
            let buffers = self.mean_buffers()?;
            let (sums, samples) = losses.gathered(self.ctx)?;
            self.save(now, buffers.as_deref(), &sums, samples)?;
            self.results.timing.saved += began.elapsed();
        }
        Ok(now)
    }

    /// The model's buffers for a checkpoint between two steps of an epoch, where they
    /// are other than the rank's: running statistics that are each rank's own until the
    /// epoch ends become their mean, in the checkpoint only. A resumed rank may stand for
    /// any of them.
    fn mean_buffers(&self) -> Result<Option<Vec<f32>>> {
        let own = self.params.buffers_flat();
        if self.cut.tree().is_some() || self.ctx.world() == 1 || own.is_empty() {
            return Ok(None);
        }
        let mut buffers = own.to_vec();
        self.ctx.group.all_reduce(&mut buffers, ReduceOp::Mean)?; // DDP
        Ok(Some(buffers))
    }
}
