//! The OneFlow document's MobileNetV2 program: what it prints. `train mobilenetv2` is its network and its training,
//! with the head for ten classes that the document's `model.classifer` (so spelled) never puts in its place.

use phalanx_train::{Evaluation, RankContext, Reporter, StepFacts};

use crate::error::Result;
use crate::shared::image::Lines;

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 5;

/// The document's lines. It tests nothing; the last line is ours.
pub struct OneFlow {
    /// Samples of a step, as it counts them.
    pub batch: usize,
}

impl Lines for OneFlow {
    fn started(&mut self, ctx: &RankContext) -> Result<()> {
        match ctx.is_main() {
            true => ctx.line("Using cpu device"),
            false => Ok(()),
        }
    }
}

impl Reporter for OneFlow {
    fn epoch(&mut self, ctx: &RankContext, epoch: usize) -> Result<()> {
        if ctx.is_main() {
            ctx.line(&format!("Epoch {epoch}\n-------------------------------"))?;
        }
        Ok(())
    }

    fn step(&mut self, ctx: &RankContext, facts: &StepFacts) -> Option<String> {
        if !ctx.is_main() || !facts.index.is_multiple_of(PRINT_EVERY) {
            return None;
        }
        let current = facts.index * self.batch;
        Some(format!(
            "loss: {:>7.6} [{current:>5}/{:>5}]",
            facts.loss, facts.samples
        ))
    }

    fn evaluated(&mut self, ctx: &RankContext, _epoch: usize, tested: &Evaluation) -> Result<()> {
        ctx.note(&format!(
            "test loss {:.4}, accuracy {:.2} %",
            tested.loss,
            100.0 * tested.accuracy
        ));
        Ok(())
    }
}
