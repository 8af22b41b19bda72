//! What a program prints on standard output.

use crate::error::Result;
use crate::evaluation::Evaluation;
use crate::format::rounded;
use phalanx_member::RankContext;

/// What a step has done.
#[derive(Debug, Clone, Copy)]
pub struct StepInfo {
    /// Counted from 1.
    pub epoch: usize,
    /// In the epoch, from 0.
    pub index: usize,
    /// Steps of an epoch.
    pub steps: usize,
    /// Samples of the epoch before this step, over all ranks.
    pub done: usize,
    /// Samples of the training set.
    pub samples: usize,
    /// Mean loss of this rank's samples of the step; of the global batch
    /// where results do not depend on the ranks and this step is logged.
    pub loss: f64,
    /// Whether `--log-interval` logs this step.
    pub logged: bool,
}

/// What a program prints on standard output, and when. Every method is called on all ranks.
pub trait Reporter {
    /// Called once before the first step.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output; so for all of these.
    fn on_train_start(&mut self, _ctx: &RankContext, _epochs: usize) -> Result<()> {
        Ok(())
    }

    /// Called before the first step of epoch `epoch`, from 1.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_epoch_start(&mut self, _ctx: &RankContext, _epoch: usize) -> Result<()> {
        Ok(())
    }

    /// Called after each step; gives what to print of it, if anything. `facts.logged` is the only
    /// hint; a program with an interval of its own may ignore it.
    fn on_step(&mut self, _ctx: &RankContext, _facts: &StepInfo) -> Option<String> {
        None
    }

    /// Called after the last step of an epoch. `loss` is the mean over all samples,
    /// `own` the mean of this rank's steps.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_epoch_end(
        &mut self,
        _ctx: &RankContext,
        _epoch: usize,
        _loss: f64,
        _own: f64,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after the evaluation of an epoch.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_evaluation(
        &mut self,
        _ctx: &RankContext,
        _epoch: usize,
        _tested: &Evaluation,
    ) -> Result<()> {
        Ok(())
    }

    /// Called after an evaluation between two steps of an epoch (`--eval-every`), after `step` steps of the training: prints a
    /// line from rank 0.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_step_evaluation(
        &mut self,
        ctx: &RankContext,
        step: u64,
        tested: &Evaluation,
    ) -> Result<()> {
        print_evaluation(ctx, &format!("step {step}"), tested)
    }

    /// Called before the weights (`true`) or the accuracies are saved at the end.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_save(&mut self, _ctx: &RankContext, _weights: bool) -> Result<()> {
        Ok(())
    }

    /// Called when all files of all ranks are saved.
    ///
    /// # Errors
    ///
    /// As [`on_train_start`](Self::on_train_start).
    fn on_train_end(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }
}

/// A line after the last step and one after the evaluation of each epoch, from rank 0: what a
/// program prints that has no [`Reporter`] of its own.
#[derive(Debug, Clone, Copy)]
pub struct EpochLines;

impl Reporter for EpochLines {
    fn on_epoch_end(
        &mut self,
        ctx: &RankContext,
        epoch: usize,
        loss: f64,
        _own: f64,
    ) -> Result<()> {
        match ctx.is_main() {
            true => ctx.line(&format!("epoch {epoch}: train loss {}", rounded(loss))),
            false => Ok(()),
        }
    }

    fn on_evaluation(
        &mut self,
        ctx: &RankContext,
        epoch: usize,
        evaluation: &Evaluation,
    ) -> Result<()> {
        print_evaluation(ctx, &format!("epoch {epoch}"), evaluation)
    }
}

/// Prints the evaluation after `what` in a line, from rank 0.
fn print_evaluation(ctx: &RankContext, what: &str, evaluation: &Evaluation) -> Result<()> {
    if !ctx.is_main() {
        return Ok(());
    }
    let mut text = format!("{what}: test loss {}", rounded(evaluation.loss));
    if evaluation.confusion.classes() > 0 {
        text.push_str(&format!(", accuracy {:.4}", evaluation.accuracy));
    }
    for (name, value) in &evaluation.values {
        text.push_str(&format!(", {name} {}", rounded(*value)));
    }
    ctx.line(&text)
}
