//! What a program prints on standard output.

use crate::error::Result;
use crate::format::rounded;
use crate::trainer::Evaluation;
use phalanx_launch::RankContext;

/// A step that was just taken.
#[derive(Debug, Clone, Copy)]
pub struct StepFacts {
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
    /// Whether it is this step's turn in the log.
    pub logged: bool,
}

/// What a program prints on standard output, and when. Every method is called on all ranks.
pub trait Reporter {
    /// The model is there, training begins.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output; so for all of these.
    fn trains(&mut self, _ctx: &RankContext, _epochs: usize) -> Result<()> {
        Ok(())
    }

    /// Epoch `epoch`, from 1, begins.
    ///
    /// # Errors
    ///
    /// As [`trains`](Self::trains).
    fn epoch(&mut self, _ctx: &RankContext, _epoch: usize) -> Result<()> {
        Ok(())
    }

    /// What to print about a step, if anything. `facts.logged` is the only
    /// hint; a program with an interval of its own may ignore it.
    fn step(&mut self, _ctx: &RankContext, _facts: &StepFacts) -> Option<String> {
        None
    }

    /// All steps of an epoch are done. `loss` is the mean over all samples,
    /// `own` the mean of this rank's steps.
    ///
    /// # Errors
    ///
    /// As [`trains`](Self::trains).
    fn trained(&mut self, _ctx: &RankContext, _epoch: usize, _loss: f64, _own: f64) -> Result<()> {
        Ok(())
    }

    /// An epoch's evaluation is done.
    ///
    /// # Errors
    ///
    /// As [`trains`](Self::trains).
    fn evaluated(&mut self, _ctx: &RankContext, _epoch: usize, _tested: &Evaluation) -> Result<()> {
        Ok(())
    }

    /// Weights (`true`) or accuracies are being saved at the end.
    ///
    /// # Errors
    ///
    /// As [`trains`](Self::trains).
    fn saves(&mut self, _ctx: &RankContext, _weights: bool) -> Result<()> {
        Ok(())
    }

    /// All is saved on all ranks.
    ///
    /// # Errors
    ///
    /// As [`trains`](Self::trains).
    fn ends(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }
}

/// A line after the last step and one after the evaluation of each epoch, from rank 0: what a
/// program prints that has no [`Reporter`] of its own.
#[derive(Debug, Clone, Copy)]
pub struct EpochLines;

impl Reporter for EpochLines {
    fn trained(&mut self, ctx: &RankContext, epoch: usize, loss: f64, _own: f64) -> Result<()> {
        match ctx.is_main() {
            true => ctx.line(&format!("epoch {epoch}: train loss {}", rounded(loss))),
            false => Ok(()),
        }
    }

    fn evaluated(
        &mut self,
        ctx: &RankContext,
        epoch: usize,
        evaluation: &Evaluation,
    ) -> Result<()> {
        if !ctx.is_main() {
            return Ok(());
        }
        let mut text = format!("epoch {epoch}: test loss {}", rounded(evaluation.loss));
        if evaluation.confusion.classes() > 0 {
            text.push_str(&format!(", accuracy {:.4}", evaluation.accuracy));
        }
        for (name, value) in &evaluation.values {
            text.push_str(&format!(", {name} {}", rounded(*value)));
        }
        ctx.line(&text)
    }
}
