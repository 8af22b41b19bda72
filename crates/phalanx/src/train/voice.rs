//! What a program prints on standard output: the lines of its document.

use super::context::RankContext;
use super::evaluate::Tested;
use crate::error::Result;

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

/// The moments at which a program speaks. All ranks call all of them.
pub trait Voice {
    /// Ranks have met; nothing is loaded.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output; so for all of these.
    fn starts(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }

    /// Data is there, the model is not.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
    fn loaded(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }

    /// The model is there, training begins.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
    fn trains(&mut self, _ctx: &RankContext, _epochs: usize) -> Result<()> {
        Ok(())
    }

    /// Epoch `epoch`, from 1, begins.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
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
    /// As [`starts`](Self::starts).
    fn trained(&mut self, _ctx: &RankContext, _epoch: usize, _loss: f64, _own: f64) -> Result<()> {
        Ok(())
    }

    /// An epoch's validation is done.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
    fn tested(&mut self, _ctx: &RankContext, _epoch: usize, _tested: &Tested) -> Result<()> {
        Ok(())
    }

    /// Weights (`true`) or accuracies are being saved at the end.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
    fn saves(&mut self, _ctx: &RankContext, _weights: bool) -> Result<()> {
        Ok(())
    }

    /// All is saved on all ranks.
    ///
    /// # Errors
    ///
    /// As [`starts`](Self::starts).
    fn ends(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }
}
