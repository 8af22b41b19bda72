//! The Flyte document's MNIST program: what it prints. `train mnist` is its network and its training.

use phalanx::prelude::*;

/// The document's lines: rank 0 prints steps and tests, and with `--document` every rank its phases.
pub struct Flyte {
    /// Whether `--document` was typed.
    pub document: bool,
}

impl Flyte {
    /// A line that every rank prints, in the document's form only.
    fn all(&self, ctx: &RankContext, text: &str) -> Result<()> {
        match self.document {
            true => ctx.line(text),
            false => Ok(()),
        }
    }

    /// A line of rank 0, in the document's form only.
    fn main(&self, ctx: &RankContext, text: &str) -> Result<()> {
        match ctx.is_main() {
            true => self.all(ctx, text),
            false => Ok(()),
        }
    }

    /// The ranks have met, and compute by CUDA or not; data is not loaded yet.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output.
    pub fn started(&mut self, ctx: &RankContext, is_cuda: bool) -> Result<()> {
        let (rank, world) = (ctx.rank(), ctx.world());
        // Its task prints these before it starts the ranks.
        let text = format!("Start MNIST training:\nDevice count: {world}");
        self.main(ctx, &text)?;
        let cuda = if is_cuda { "True" } else { "False" };
        let backend = if world > 1 { ctx.transport() } else { "local" };
        let text = format!(
            "Using distributed Phalanx with {backend} backend\n\
             Running MNIST training on rank {rank}, world size: {world}\n\
             Use cuda: {cuda}\n\
             Rank {}/{world} process initialized.\n\n\
             Getting data loaders",
            rank + 1
        );
        self.all(ctx, &text)
    }

    /// The data is loaded.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output.
    pub fn loaded(&mut self, ctx: &RankContext) -> Result<()> {
        self.all(ctx, "Defining model")
    }
}

impl Reporter for Flyte {
    fn on_train_start(&mut self, ctx: &RankContext, epochs: usize) -> Result<()> {
        self.all(ctx, &format!("Training for {epochs} epochs"))
    }

    fn on_step(&mut self, ctx: &RankContext, facts: &StepInfo) -> Option<String> {
        if !(facts.logged && ctx.is_main()) {
            return None;
        }
        // The document counts the samples of rank 0 alone.
        let counted = if self.document { ctx.world() } else { 1 };
        let done = facts.done / counted;
        let percent = 100.0 * facts.index as f64 / facts.steps as f64;
        Some(format!(
            "Train Epoch: {} [{done}/{} ({percent:.0}%)]\tloss={:.4}",
            facts.epoch, facts.samples, facts.loss
        ))
    }

    fn on_evaluation(
        &mut self,
        ctx: &RankContext,
        _epoch: usize,
        tested: &Evaluation,
    ) -> Result<()> {
        let (loss, accuracy) = (tested.loss, tested.accuracy);
        match ctx.is_main() {
            true => ctx.line(&format!("\ntest_loss={loss:.4}\naccuracy={accuracy:.4}\n")),
            false => Ok(()),
        }
    }

    fn on_save(&mut self, ctx: &RankContext, weights: bool) -> Result<()> {
        let what = if weights { "model" } else { "accuracies" };
        self.main(ctx, &format!("Saving {what}"))
    }

    fn on_train_end(&mut self, ctx: &RankContext) -> Result<()> {
        let (number, world) = (ctx.rank() + 1, ctx.world());
        self.all(ctx, &format!("Rank {number}/{world} process complete.\n"))?;
        self.main(ctx, "Training Complete")
    }
}
