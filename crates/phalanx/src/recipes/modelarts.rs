//! The lines of the ModelArts document, which `train resnet18` and `train
//! resnet9` print.

use phalanx_train::{Evaluation, RankContext, Reporter};

use crate::error::Result;

/// One line after training and one after testing each epoch.
pub struct ModelArts {
    /// Every rank prints its own, as in the document; rank 0 otherwise.
    pub everybody: bool,
}

impl Reporter for ModelArts {
    fn trained(&mut self, ctx: &RankContext, epoch: usize, loss: f64, own: f64) -> Result<()> {
        let loss = if self.everybody { own } else { loss };
        if self.everybody || ctx.is_main() {
            ctx.line(&format!("train | epoch: {epoch} | loss: {loss:.4}"))?;
        }
        Ok(())
    }

    fn evaluated(&mut self, ctx: &RankContext, epoch: usize, tested: &Evaluation) -> Result<()> {
        if self.everybody || ctx.is_main() {
            // Python's print puts a space before the empty line.
            ctx.line(&format!(
                "val | epoch: {epoch} | loss: {:.4} | accuracy: {:.4} \n",
                tested.loss, tested.accuracy
            ))?;
        }
        Ok(())
    }
}
