//! The end of a training: its files, and what is said of it.

use phalanx_train::digest::optimizer_sha256;
use phalanx_train::process;
use serde_json::json;

use super::Training;
use crate::error::Result;
use crate::say;
use crate::train::cut::Determinism;
use crate::train::evaluate::Tester;
use crate::train::format::{thousands, typed};
use crate::train::gradient::GradientType;
use crate::train::program::Program;

impl<P: Program> Training<'_, P> {
    /// After the last epoch. *Blocks* until all files of all ranks are complete.
    pub(super) fn end(mut self) -> Result<()> {
        let ctx = self.ctx;
        let phase = ctx.phase("saving");
        self.results.timing.sent_bytes = ctx.group.bytes_sent_to().iter().sum();
        // Its parts are gathered by all.
        let optimizer = optimizer_sha256(self.update.state()?);
        self.save_files(&optimizer)?;
        drop(phase);
        ctx.group.barrier()?; // DDP: nobody leaves before the files are complete
        self.reports.voice.ends(ctx)?;
        self.sum_up();
        Ok(())
    }

    fn save_files(&mut self, optimizer_sha256: &str) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.program.settings());
        self.saving.finish()?;
        self.reports.trace.finish(ctx);
        let profiler = &mut self.reports.profiler;
        profiler.finish(ctx, &mut self.tape, &self.params)?;
        let timing = &mut self.results.timing;
        timing.skipped = self.ddp.skipped_steps();
        timing.waited = self.loader.waited();
        let spent = timing.spent(self.steps * settings.epochs());
        let narrower = settings.gradients.gradient_type == GradientType::F32
            && settings.cut.determinism() != Determinism::Shards;
        for advice in spent.advice(settings.workers, narrower) {
            ctx.note(&format!("warning: {advice}"));
        }
        let (voice, output) = (&mut self.reports.voice, &mut self.reports.output);
        voice.saves(ctx, true)?;
        output.save_weights(&self.params)?;
        voice.saves(ctx, false)?;
        output.save_accuracies(&self.results.accuracies)?;
        let tester = Tester {
            ctx,
            program: self.program,
            net: &self.net,
            cut: &self.cut,
            data: &self.data.test,
        };
        output.save_predictions(&tester.predictions(&self.params, &mut self.tape)?)?;
        let summary = self.summary(optimizer_sha256);
        self.reports.output.save_summary(&summary)
    }

    fn summary(&self, optimizer_sha256: &str) -> serde_json::Value {
        let (ctx, program) = (self.ctx, self.program);
        let (results, settings) = (&self.results, program.settings());
        let (timing, last) = (&results.timing, &results.last);
        json!({
            "recipe": program.name(),
            "version": env!("CARGO_PKG_VERSION"),
            "arguments": say::arguments(),
            "world_size": ctx.world(),
            "threads_per_rank": ctx.threads,
            "precision": settings.precision.title(),
            "transport": ctx.describe(),
            "data": program.data_name(),
            "seed": settings.seed,
            "epochs": settings.epochs(),
            "test_loss": last.loss,
            "accuracy": last.accuracy,
            "accuracies": results.accuracies,
            "class_accuracies": last.class_accuracies(),
            "confusion": last.matrix(),
            "images_per_s": timing.images_per_s(),
            "train_s": timing.trained.as_secs_f64(),
            "test_s": timing.tested.as_secs_f64(),
            "total_s": ctx.started.elapsed().as_secs_f64(),
            "exposed_comm_percent": timing.exposed_percent(),
            "data_wait_s": timing.waited.as_secs_f64(),
            "saving_s": timing.saved.as_secs_f64(),
            "sent_bytes": timing.sent_bytes,
            "skipped_steps": timing.skipped,
            "peak_rss_mib": process::peak_rss_bytes().map(|b| b as f64 / f64::from(1 << 20)),
            "gradient_type": typed(&settings.gradients.gradient_type),
            "deterministic": typed(&settings.cut.determinism()),
            "initial_sha256": results.initial,
            "weights_sha256": results.weights,
            "optimizer_sha256": optimizer_sha256,
            "metrics_sha256": results.metrics.sha256(),
        })
    }

    /// The last lines, for the person at the terminal.
    fn sum_up(&self) {
        let (ctx, results) = (self.ctx, &self.results);
        ctx.note(&format!(
            "done in {:.1} s: accuracy {:.2} %, {} images/s, communication exposed {:.1} % of the step",
            ctx.started.elapsed().as_secs_f64(),
            results.last.accuracy * 100.0,
            thousands(results.timing.images_per_s() as usize),
            results.timing.exposed_percent(),
        ));
        let equal = match ctx.world() {
            1 => String::new(),
            world => format!(" equal on all {world} ranks"),
        };
        ctx.note(&format!(
            "weights {:.12}…{equal}; saved {}",
            results.weights,
            self.reports.output.saved().display()
        ));
    }
}
