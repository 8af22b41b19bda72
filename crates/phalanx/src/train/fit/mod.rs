//! The training of every image program: [`start`] builds what it consists of,
//! epochs are below, [`step`] is one step, [`end`] leaves the files.
//!
//! The lines that make it distributed are marked `DDP`; without them this is a
//! single-process training loop.

mod announce;
mod end;
mod losses;
mod start;
mod step;

use std::time::Instant;

use phalanx_ddp::{DistributedDataParallel, verify_equal};
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Tape};
use phalanx_train::checkpoint;
use phalanx_train::digest::MetricsDigest;
use phalanx_train::loader::Loader;
use phalanx_train::metrics::MetricsLog;
use phalanx_train::progress::Progress;
use phalanx_train::sampler::Sampler;
use phalanx_train::state::Place;
use serde_json::json;

use self::losses::EpochLoss;
use self::step::Turn;
use super::context::RankContext;
use super::cut::Cut;
use super::evaluate::{Tested, Tester};
use super::output::Output;
use super::profile::Profiler;
use super::program::{Data, Program};
use super::sample_log::SampleLog;
use super::saving::{History, Now, Saving, Whole};
use super::timing::Timing;
use super::trace::Trace;
use super::update::Update;
use super::voice::Voice;
use crate::error::Result;

/// Trains `program` as one rank.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run<P: Program>(ctx: &RankContext, program: &P) -> Result<()> {
    let mut training = Training::start(ctx, program)?;
    let epochs = program.settings().epochs();
    if training.place.epoch as usize >= epochs {
        // Resumed after its last epoch.
        training.results.last = training.test()?;
    }
    for epoch in training.place.epoch as usize + 1..=epochs {
        let stop = training.epoch(epoch)? == Now::Stop || training.end_epoch(epoch)? == Now::Stop;
        if stop {
            training.reports.trace.finish(ctx);
            return training.saving.stop(training.place);
        }
    }
    training.end()
}

/// A training between two steps: what it consists of on this rank.
struct Training<'a, P: Program> {
    ctx: &'a RankContext,
    program: &'a P,
    data: Data,
    /// DDP: the rank's parts of the training set.
    cut: Cut,
    samplers: Vec<Sampler>,
    loader: Loader,
    /// Steps of an epoch.
    steps: usize,
    net: P::Net,
    params: Params,
    ddp: DistributedDataParallel,
    update: Update,
    schedule: Option<Schedule>,
    tape: Tape,
    saving: Saving<'a>,
    /// A stop was asked for in the epoch's last step.
    stop: bool,
    /// How far it has come.
    place: Place,
    /// What was measured before it was resumed.
    history: History,
    results: Results,
    reports: Reports,
}

/// What is measured on the way.
struct Results {
    /// SHA-256 of the weights before the first step, on rank 0, unless the run went on
    /// from a checkpoint.
    initial: Option<String>,
    /// SHA-256 of the weights after the last epoch.
    weights: String,
    /// Test accuracy of each epoch.
    accuracies: Vec<f64>,
    /// Of the last epoch.
    last: Tested,
    metrics: MetricsDigest,
    timing: Timing,
}

/// Where it is told.
struct Reports {
    voice: Box<dyn Voice>,
    output: Output,
    log: MetricsLog,
    samples: SampleLog,
    progress: Progress,
    trace: Trace,
    profiler: Profiler,
}

impl<P: Program> Training<'_, P> {
    /// The steps of epoch `epoch`, from 1, or those that are left of it. After
    /// `Stop` all is saved.
    fn epoch(&mut self, epoch: usize) -> Result<Now> {
        self.reports.voice.epoch(self.ctx, epoch)?;
        let epochs = self.program.settings().epochs();
        let progress = &mut self.reports.progress;
        progress.begin(epoch as u64, epochs as u64, self.steps);
        // Steps of this epoch that were taken before the run was resumed.
        let first = self.place.step_in_epoch as usize;
        progress.skip(first);
        let plan = self.cut.rest(&self.samplers, self.place.cursor())?;
        self.loader.start(plan.clone());
        let began = Instant::now();
        let mut losses = EpochLoss::new(self.cut.parts());
        if first > 0 {
            losses.resume(self.ctx, &self.cut, &self.history);
        }
        for index in first..self.steps {
            let (sizes, global) = self.cut.sizes(&plan, index - first);
            let turn = Turn {
                epoch,
                index,
                sizes,
                global,
            };
            self.step(&turn, &mut losses)?;
            let cursor = plan.cursor_after((index - first + 1) * plan.parts());
            if self.save_after(&turn, cursor, &losses)? == Now::Stop {
                self.reports.progress.end();
                return Ok(Now::Stop);
            }
        }
        let loss = losses.mean(self.ctx, &self.cut)?;
        self.results.timing.trained += began.elapsed();
        self.reports.progress.end();
        let voice = &mut self.reports.voice;
        voice.trained(self.ctx, epoch, loss, losses.own())?;
        self.validate(epoch, loss)?;
        Ok(Now::GoOn)
    }

    /// Tests what the epoch of mean loss `train_loss` has made of the model.
    fn validate(&mut self, epoch: usize, train_loss: f64) -> Result<()> {
        let ctx = self.ctx;
        let _phase = ctx.phase("evaluating");
        let began = Instant::now();
        self.ddp.end_epoch(&mut self.params)?; // DDP
        let digest = checkpoint::weights_digest(&self.params);
        verify_equal(&ctx.group, &self.params, digest)?; // DDP
        let tested = self.test()?;
        let results = &mut self.results;
        results.weights = hex::encode(digest);
        results.metrics.add(tested.loss);
        results.metrics.add(tested.accuracy);
        results.accuracies.push(tested.accuracy);
        results.timing.tested += began.elapsed();
        self.reports.voice.tested(ctx, epoch, &tested)?;
        self.reports.log.event(&json!({
            "step": epoch * self.steps, "epoch": epoch, "train_loss": train_loss, "test_loss": tested.loss,
            "accuracy": tested.accuracy, "weights_sha256": results.weights,
            "train_s": results.timing.trained.as_secs_f64(), "elapsed_s": ctx.started.elapsed().as_secs_f64(),
        }))?;
        results.last = tested;
        Ok(())
    }

    fn test(&mut self) -> Result<Tested> {
        let tester = Tester {
            ctx: self.ctx,
            program: self.program,
            net: &self.net,
            cut: &self.cut,
            data: &self.data.test,
        };
        tester.test(&self.params, &mut self.tape)
    }

    /// Leaves the epoch's files and checkpoint, whether or not to go on.
    fn end_epoch(&mut self, epoch: usize) -> Result<Now> {
        let _phase = self.ctx.phase("saving");
        let output = &mut self.reports.output;
        let saved = output.save_epoch(epoch, &self.params);
        match epoch < self.program.settings().epochs() {
            true => self
                .saving
                .heed_weights(&format!("epoch {epoch}'s"), saved)?,
            // What the training was for.
            false => saved?,
        }
        if !self.saving.enabled() {
            return Ok(Now::GoOn);
        }
        if let Some((last, before)) = self.results.accuracies.split_last()
            && before.iter().all(|a| last > a)
        {
            let saved = output.save_best(epoch, *last, &self.params);
            self.saving.heed_weights("the best", saved)?;
        }
        let now = match self.stop && epoch < self.program.settings().epochs() {
            true => Now::Stop,
            false => Now::Save,
        };
        self.save(now, None, &[], 0)?;
        Ok(now)
    }

    /// Takes a checkpoint; `sums` and `samples` are the running epoch's losses,
    /// `buffers` stand in for the model's own.
    fn save(
        &mut self,
        now: Now,
        buffers: Option<&[f32]>,
        sums: &[f64],
        samples: usize,
    ) -> Result<()> {
        let (accuracies, metrics) = (&self.results.accuracies, self.results.metrics.values());
        let history = History::new(accuracies, metrics, sums, samples);
        let whole = Whole {
            params: &self.params,
            buffers,
            update: &self.update,
            ddp: &self.ddp,
        };
        self.saving.save(now, &whole, self.place, history)
    }
}
