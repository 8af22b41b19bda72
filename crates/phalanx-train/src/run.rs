//! The run of a program that has a training loop of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use phalanx_base::env::real_env;
use phalanx_track::Tracker;
use serde_json::{Map, Value, json};

use crate::args::Settings;
use crate::best::{Best, BestMeasure, EarlyStopping};
use crate::deliveries::Deliveries;
use crate::error::{Result, refuse};
use crate::evaluation::Evaluation;
use crate::folder::{Files, Output, RunDir, default_output_dir};
use crate::log::{RunInfo, RunLog};
use crate::say;
use phalanx_member::RankContext;

/// What is known of a [`Run`] before its first step.
#[derive(Debug, Default)]
pub struct About {
    /// What the model is called.
    pub model: String,
    /// What the data set is called.
    pub data: String,
    /// Steps of an epoch.
    pub steps: usize,
    /// Hyperparameters by name.
    pub settings: BTreeMap<String, String>,
    /// The measure that decides which evaluation is the best: see [`TrainerBuilder::best`](crate::TrainerBuilder::best).
    pub best: Option<String>,
    /// When the training ends before its last epoch.
    pub early_stopping: Option<EarlyStopping>,
}

/// The run of a program that trains without a [`Trainer`](crate::Trainer), as one of Burn or candle with their optimizers: its
/// folder with metrics, log and report, trackers, the best evaluation and early stopping. Made by [`Job::run`](crate::Job::run).
///
/// All ranks make the same calls in the same order. What is written comes from rank 0. A run that is dropped without
/// [`finish`](Self::finish) is shown as failed.
///
/// ```no_run
/// # use phalanx_train::{About, Evaluation, Job, Result};
/// # use phalanx_data::metrics::Confusion;
/// # fn train_step() -> f64 { 0.5 }
/// # fn test(epoch: usize) -> Evaluation { Evaluation::new(0.5, Confusion::new(0)) }
/// fn train(job: &Job<'_>) -> Result<()> {
///     let mut run = job.run(About { model: "CNN".into(), steps: 100, ..About::default() })?;
///     for epoch in 1..=job.settings().epochs() {
///         for _ in 0..100 {
///             let loss = train_step();
///             run.step(loss, job.settings().lr())?;
///         }
///         let is_best = run.evaluated(test(epoch))?;
///         if is_best && job.is_main() {
///             // Save the weights in run.dir().
///         }
///         if run.is_over() {
///             break;
///         }
///     }
///     run.finish()
/// }
/// ```
#[must_use = "a run must end with Run::finish"]
pub struct Run<'j> {
    ctx: &'j RankContext,
    settings: &'j Settings,
    program: String,
    steps: usize,
    /// Steps that were taken.
    taken: u64,
    /// The sum of the losses of the epoch, and their number.
    losses: (f64, u64),
    last: Evaluation,
    accuracies: Vec<f64>,
    best: Best,
    summary: Map<String, Value>,
    /// When the last step or evaluation ended.
    since: Instant,
    /// In steps, and in evaluations.
    spent: [Duration; 2],
    log: RunLog,
    /// Dropped after the log, which says how the run has ended.
    deliveries: Deliveries,
    /// Dropped after these, which write into its folder.
    output: Output,
}

impl<'j> Run<'j> {
    pub(crate) fn start(
        (ctx, settings): (&'j RankContext, &'j Settings),
        program: &str,
        about: About,
    ) -> Result<Run<'j>> {
        let saving = &settings.saving;
        if saving.enabled() || ctx.elastic.is_some() {
            refuse!(
                "--save-every, --stop-after, --resume and --elastic are for programs with a Trainer"
            );
        }
        let dir = settings.output_dir.clone();
        let dir = ctx.folder_of_rank_0(dir.unwrap_or_else(|| default_output_dir(program)))?;
        if ctx.is_main() {
            RunDir::at(dir.clone()).check(saving, &dir)?;
        }
        let trackers: Vec<Box<dyn Tracker + Send>> = match ctx.is_main() {
            true => settings.track.of_run(&real_env())?,
            false => Vec::new(),
        };
        let best = about.best.as_deref().map(BestMeasure::parse).transpose()?;
        let output = Output::open(ctx, dir.clone(), Files::default(), saving, None)?;
        output.begin(&dir, saving)?;
        let mut shown = settings.of_each_rank();
        shown.extend(about.settings);
        let info = RunInfo {
            program: program.to_owned(),
            title: about.model,
            data: about.data,
            steps: about.steps,
            settings: shown,
            labels: settings.labels.clone(),
            ..RunInfo::default()
        };
        ctx.note(&format!("folder   {}", dir.display()));
        Ok(Run {
            ctx,
            settings,
            program: info.program.clone(),
            steps: about.steps,
            taken: 0,
            losses: (0.0, 0),
            last: Evaluation::nothing(),
            accuracies: Vec::new(),
            best: Best::new(best, about.early_stopping),
            summary: Map::new(),
            since: Instant::now(),
            spent: [Duration::ZERO; 2],
            log: output.log(ctx, None, &info, false)?,
            deliveries: Deliveries::start(output.dir(), trackers),
            output,
        })
    }

    /// The run's folder, which rank 0 has made.
    pub fn dir(&self) -> &Path {
        self.output.dir()
    }

    /// Step and epoch that come next, the first counted from 0, the second from 1.
    fn next(&self) -> (u64, usize) {
        (
            self.taken,
            (self.taken / self.steps.max(1) as u64) as usize + 1,
        )
    }

    /// Counts the time since the last step or evaluation as one of steps (0) or evaluations (1).
    fn count(&mut self, kind: usize) {
        self.spent[kind] += self.since.elapsed();
        self.since = Instant::now();
        let counters = self.log.counters();
        let counters = [&counters.train, &counters.evaluation];
        counters[kind].store(self.spent[kind].as_nanos() as u64, Relaxed);
    }

    /// Counts a step of the mean loss `loss`, and logs it with the learning rate `lr` if it is to be (`--log-interval`).
    ///
    /// # Errors
    ///
    /// Those of writing the metrics.
    pub fn step(&mut self, loss: f64, lr: f64) -> Result<()> {
        let (step, epoch) = self.next();
        let all = self.settings.epochs().saturating_mul(self.steps) as u64;
        let interval = self.settings.record_interval(all) as u64;
        if (step % self.steps.max(1) as u64).is_multiple_of(interval) {
            let elapsed = self.ctx.started().elapsed().as_secs_f64();
            self.log.event(&json!({
                "step": step, "epoch": epoch, "loss": loss, "lr": lr, "elapsed_s": elapsed,
            }))?;
        }
        self.losses = (self.losses.0 + loss, self.losses.1 + 1);
        self.taken += 1;
        self.log.counters().steps.fetch_add(1, Relaxed);
        self.count(0);
        Ok(())
    }

    /// Takes `evaluation` as the result of the epoch that the last step was of, or of a part of it. Returns whether it is the
    /// best so far; the weights are the program's to save.
    ///
    /// # Errors
    ///
    /// Those of writing the metrics; `Usage`, when the measure that [`About::best`] names is missing.
    pub fn evaluated(&mut self, evaluation: Evaluation) -> Result<bool> {
        self.count(1);
        let step = self.taken.saturating_sub(1);
        let epoch = (step / self.steps.max(1) as u64) as usize + 1;
        let (sum, count) = std::mem::take(&mut self.losses);
        let elapsed = self.ctx.started().elapsed().as_secs_f64();
        let record = json!({
            "step": step, "epoch": epoch, "train_loss": sum / count.max(1) as f64,
            "train_s": self.spent[0].as_secs_f64(), "elapsed_s": elapsed,
        });
        self.log.event(&evaluation.added_to(record))?;
        if evaluation.confusion.classes() > 0 {
            self.accuracies.push(evaluation.accuracy);
        }
        self.best
            .compare(epoch, self.taken, &evaluation, String::new())?;
        self.last = evaluation;
        if let Some(why) = self.best.why_stopped() {
            let text = format!("stopped early: {why}");
            self.log.notice(self.taken, &text);
            self.ctx.note(&text);
        }
        Ok(self.best.take_new().is_some())
    }

    /// Whether the training is to end before its last epoch ([`About::early_stopping`]).
    pub fn is_over(&self) -> bool {
        self.best.stops()
    }

    /// As [`Trainer::log`](crate::Trainer::log).
    ///
    /// # Errors
    ///
    /// As that.
    pub fn log(&mut self, values: &[(&str, f64)]) -> Result<()> {
        self.log.values(self.next(), values).map(drop)
    }

    /// As [`Trainer::log_image`](crate::Trainer::log_image).
    ///
    /// # Errors
    ///
    /// As that.
    pub fn log_image(&self, name: &str, png: &[u8]) -> Result<()> {
        self.log.image(self.next(), name, png)
    }

    /// As [`Trainer::log_text`](crate::Trainer::log_text).
    pub fn log_text(&self, name: &str, text: &str) {
        self.log.text(self.next(), name, text);
    }

    /// Adds an entry to `summary.json`, unless it has one of this name.
    pub fn add_to_summary(&mut self, name: &str, value: impl Into<Value>) {
        self.summary.insert(name.to_owned(), value.into());
    }

    /// Ends the run: writes `summary.json` and the report, and waits for the trackers. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of writing; peers that are lost.
    pub fn finish(mut self) -> Result<()> {
        self.log.flush();
        self.ctx.group().barrier()?;
        self.log.finish();
        let (ctx, last) = (self.ctx, &self.last);
        let mut summary = last.added_to(json!({
            "recipe": self.program, "version": env!("CARGO_PKG_VERSION"), "arguments": say::arguments(),
            "world_size": ctx.world(), "threads_per_rank": ctx.threads,
            "epochs": self.settings.epochs(), "steps": self.taken,
            "stopped_early": self.best.stops().then_some(self.taken),
            "accuracies": self.accuracies, "class_accuracies": last.class_accuracies(), "confusion": last.matrix(),
            "train_s": self.spent[0].as_secs_f64(), "test_s": self.spent[1].as_secs_f64(),
            "total_s": ctx.started().elapsed().as_secs_f64(),
        }));
        for (name, value) in std::mem::take(&mut self.summary) {
            if summary.get(&name).is_none() {
                summary[name] = value;
            }
        }
        self.output.save_summary(&summary)?;
        self.output.announce_report(ctx);
        self.deliveries.finish();
        Ok(ctx.group().barrier()?)
    }
}
