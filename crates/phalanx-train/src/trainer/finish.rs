//! The end of a training: its files, and what is said of it.

use phalanx_base::process;
use serde_json::json;

use super::{Purpose, Trainer};
use crate::args::{Determinism, GradientType};
use crate::error::Result;
use crate::evaluation::Evaluation;
use crate::format::{rounded, thousands};
use crate::strategy::{Strategy, skipped_steps, weights_sha256};
use crate::{choice_name, say};

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Ends the training: saves the weights, writes `summary.json` and prints the last lines.
    /// Gives the evaluation of these weights; where they were not evaluated after the last step, its numbers are NaN, and null in
    /// `summary.json`. Of a complete run that was resumed, nothing is written.
    ///
    /// *Blocks* until all files of all ranks are complete.
    ///
    /// # Errors
    ///
    /// Those of saving; peers that are lost. After a stop (SIGTERM, `--stop-after`) the error that
    /// ends the program orderly.
    pub fn finish(self) -> Result<Evaluation> {
        self.finish_with(|_| Ok(()))
    }

    /// As [`finish`](Self::finish); `save` writes files of the program's own, after the weights and
    /// before the summary, without which a run is not complete.
    ///
    /// # Errors
    ///
    /// As [`finish`](Self::finish), and those of `save`.
    pub fn finish_with(mut self, mut save: impl FnMut(&Self) -> Result<()>) -> Result<Evaluation> {
        match self.purpose {
            Purpose::Train => {}
            Purpose::Evaluate => return Ok(self.course.results.last),
            Purpose::Measure => return self.end_measurement(),
        }
        self.best = None;
        if self.is_complete() {
            return self.stay_complete();
        }
        self.end_epoch()?;
        let ctx = self.ctx;
        let phase = ctx.phase("saving");
        self.course.results.timing.sent_bytes = self.strategy.report(self.settings).sent_bytes;
        let optimizer = self.together(|trainer| {
            let digest = trainer.strategy.optimizer_sha256()?;
            trainer.share_digest(digest)
        })?;
        self.count_time(0);
        self.reports.log.flush();
        // Rank 0 knows what all ranks used.
        self.together(|trainer| Ok(trainer.ctx.group().barrier()?))?;
        let saved = self.by_rank_0(|trainer| trainer.save_files(optimizer.as_deref(), &mut save));
        // No rank leaves before the files are complete.
        let saved = saved.and_then(|()| match ctx.elastic {
            None => Ok(ctx.group().barrier()?),
            Some(_) => Ok(()),
        });
        let saved = saved.or_else(|error| match self.is_over() {
            true => Ok(()),
            false => Err(error),
        });
        self.noted(saved)?;
        drop(phase);
        self.end_joining();
        self.reports.reporter.on_train_end(ctx)?;
        self.sum_up();
        self.reports.deliveries.finish();
        self.trainings.unfinished.set(false);
        Ok(self.evaluated())
    }

    /// The evaluation of the weights that are there, if it was the last one.
    fn evaluated(&self) -> Evaluation {
        match self.course.results.last_step == Some(self.course.place.step) {
            true => self.course.results.last.clone(),
            false => Evaluation::nothing(),
        }
    }

    fn end_measurement(mut self) -> Result<Evaluation> {
        self.end_epoch()?;
        self.finish_profile();
        self.trainings.unfinished.set(false);
        Ok(self.course.results.last)
    }

    fn stay_complete(mut self) -> Result<Evaluation> {
        let (ctx, dir) = (self.ctx, self.reports.output.dir());
        ctx.note(&format!(
            "complete {}weights {:.12}…; nothing was changed in {}",
            self.result(),
            self.course.results.weights,
            dir.display()
        ));
        self.reports.reporter.on_train_end(ctx)?;
        self.reports.log.finish();
        self.reports.deliveries.finish();
        Ok(self.evaluated())
    }

    fn save_files(
        &mut self,
        optimizer_sha256: Option<&str>,
        save: &mut impl FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        self.saving.finish()?;
        self.must_open_reports()?;
        self.finish_profile();
        let timing = &mut self.course.results.timing;
        timing.skipped = skipped_steps(&self.strategy).iter().sum();
        timing.waited = self.sources.waited.get();
        let spent = timing.spent(self.course.extent.all() as usize);
        let narrower = settings.gradient_type == GradientType::F32
            && settings.split.determinism() != Determinism::Shards;
        for advice in spent.advice(settings.workers, narrower) {
            ctx.note(&format!("warning: {advice}"));
        }
        self.reports.reporter.on_save(ctx, true)?;
        let is_averaged = self.strategy.groups()[0].optimizer.averages().is_some();
        self.course.results.averages = self.with_averages(|trainer| {
            let output = &mut trainer.reports.output;
            (trainer.strategy)
                .gather_weights(ctx, |outline, values| output.save_weights(outline, values))?;
            match is_averaged {
                true => weights_sha256(&trainer.strategy, ctx),
                false => Ok(None),
            }
        })?;
        let (reporter, output) = (&mut self.reports.reporter, &mut self.reports.output);
        reporter.on_save(ctx, false)?;
        output.save_accuracies(&self.course.results.accuracies)?;
        save(self)?;
        self.reports.log.finish();
        if let Some(optimizer) = optimizer_sha256 {
            let summary = self.summary(optimizer);
            self.reports.output.save_summary(&summary)?;
        }
        Ok(())
    }

    fn summary(&self, optimizer_sha256: &str) -> serde_json::Value {
        let ctx = self.ctx;
        let (results, settings) = (&self.course.results, self.settings);
        let (timing, last) = (&results.timing, &self.evaluated());
        let mut summary = last.added_to(json!({
            "recipe": self.reports.info.program,
            "version": env!("CARGO_PKG_VERSION"),
            "arguments": say::arguments(),
            "world_size": ctx.world(),
            "threads_per_rank": ctx.threads,
            "precision": settings.precision.title(),
            "transport": ctx.describe(phalanx_nn::isa_name()),
            "seed": settings.seed,
            "epochs": self.course.extent.epochs(),
            "steps": self.course.place.step,
            "planned_steps": self.course.extent.all(),
            "stopped_early": self.course.results.best.stops().then_some(self.course.place.step),
            "accuracies": results.accuracies,
            "class_accuracies": last.class_accuracies(),
            "confusion": last.matrix(),
            "unit": self.sources.unit.0,
            "images_per_s": timing.images_per_s(),
            "train_s": timing.trained.as_secs_f64(),
            "test_s": timing.tested.as_secs_f64(),
            "total_s": ctx.started().elapsed().as_secs_f64(),
            "data_wait_s": timing.waited.as_secs_f64(),
            "saving_s": timing.saved.as_secs_f64(),
            "rank_flops_per_step": timing.flops_per_step(),
            "rank_peak_flops_per_s": timing.peak_flops_per_s,
            "mfu": timing.total_mfu(),
            "sent_bytes": timing.sent_bytes,
            "skipped_steps": timing.skipped,
            "peak_rss_mib": process::peak_rss_bytes().map(|b| b as f64 / f64::from(1 << 20)),
            "deterministic": choice_name(&settings.split.determinism()),
            "initial_sha256": results.initial,
            "weights_sha256": results.weights,
            "averages_sha256": results.averages,
            "optimizer_sha256": optimizer_sha256,
            "metrics_sha256": results.metrics.sha256(),
        }));
        if let Some(summary) = summary.as_object_mut() {
            summary.extend(self.strategy.report(settings).summary);
            if self.exposed_communication().is_some() {
                let percent = json!(timing.exposed_percent());
                summary.insert("exposed_comm_percent".to_owned(), percent);
            }
        }
        for (name, value) in &self.reports.summary {
            if summary.get(name).is_none() {
                summary[name] = value.clone();
            }
        }
        summary
    }

    /// What the evaluation of the weights gave, in words.
    fn result(&self) -> String {
        let (last, taken) = (self.evaluated(), self.course.place.step);
        match (
            last.confusion.classes(),
            last.loss,
            self.course.results.last_step,
        ) {
            (_, _, Some(step)) if step != taken => {
                format!("weights of step {taken} not evaluated (those of step {step} were), ")
            }
            (0, loss, _) if loss.is_nan() => String::new(),
            (0, loss, _) => format!("test loss {}, ", rounded(loss)),
            _ => format!("accuracy {:.2} %, ", last.accuracy * 100.0),
        }
    }

    /// The last lines, for the person at the terminal.
    fn sum_up(&self) {
        let (ctx, results) = (self.ctx, &self.course.results);
        let exposed = self.exposed_communication().map(|_| {
            let percent = results.timing.exposed_percent();
            format!(", communication exposed {percent:.1} % of the step")
        });
        let equal = match self.strategy.report(self.settings).equal_weights {
            true => format!(" equal on all {} ranks", ctx.world()),
            false => String::new(),
        };
        ctx.note(&format!(
            "done in {:.1} s: {}{} {}/s{}",
            ctx.started().elapsed().as_secs_f64(),
            self.result(),
            thousands(results.timing.images_per_s() as usize),
            self.sources.unit.0,
            exposed.unwrap_or_default(),
        ));
        let averages = results.averages.as_ref();
        let averages = averages.map(|digest| format!("their averages {digest:.12}… in "));
        ctx.note(&format!(
            "weights {:.12}…{equal}; saved {}{}",
            results.weights,
            averages.unwrap_or_default(),
            self.reports.output.saved().display()
        ));
        self.reports.output.announce_report(ctx);
    }
}
