//! The ModelArts document's ResNet-18 program: its flags and what it prints. `train resnet18` is its network and its
//! training; `train resnet9` prints the same lines.

use phalanx::prelude::*;
use phalanx::train::{Determinism, choice_name};
use phalanx_base::env::{number, real_env};

/// How the learning rate is scaled. The document has it both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LrScaling {
    /// Not scaled
    None,
    /// Times the ranks of this host (the document's first listing)
    Node,
    /// Times all ranks (the document's complete listing)
    World,
}

/// The document's own flags.
#[derive(Debug, Clone, clap::Args)]
pub struct DocumentArgs {
    /// Whether a GPU may be used; `phalanx train` computes on the CPU either way
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub enable_gpu: bool,
    /// How the learning rate is scaled [default: world; none with --deterministic shards, whose results do not
    /// depend on the number of ranks]
    #[arg(long, value_enum)]
    lr_scaling: Option<LrScaling>,
}

impl DocumentArgs {
    /// Refuses `--lr-scaling` with `--deterministic shards`, whose results must not depend on the number of ranks.
    ///
    /// # Errors
    ///
    /// That one.
    pub fn check(&self, settings: &Settings) -> Result<()> {
        self.lr(settings, 1)?;
        let determinism = settings.split.determinism();
        if determinism == Determinism::Shards && self.lr_scaling(determinism) != LrScaling::None {
            return Err(Error::usage(
                "--lr-scaling makes weights depend on the number of ranks; leave it out with --deterministic shards",
            ));
        }
        Ok(())
    }

    fn lr_scaling(&self, determinism: Determinism) -> LrScaling {
        self.lr_scaling.unwrap_or(match determinism {
            Determinism::Shards => LrScaling::None,
            _ => LrScaling::World,
        })
    }

    /// `--lr-scaling` or its default.
    pub fn must_agree(&self, determinism: Determinism) -> String {
        format!(
            "--lr-scaling {}",
            choice_name(&self.lr_scaling(determinism))
        )
    }

    /// The learning rate when `world` ranks train.
    ///
    /// # Errors
    ///
    /// Usage, where `LOCAL_WORLD_SIZE` is no number.
    pub fn lr(&self, settings: &Settings, world: usize) -> Result<f64> {
        let factor = match self.lr_scaling(settings.split.determinism()) {
            LrScaling::None => 1,
            LrScaling::World => world,
            LrScaling::Node => number(&real_env(), "LOCAL_WORLD_SIZE")?.unwrap_or(world),
        };
        Ok(settings.lr() * factor as f64)
    }
}

/// One line after training and one after testing each epoch: every rank prints its own if this is true, as in the
/// document, otherwise rank 0.
pub struct ModelArts(pub bool);

impl Reporter for ModelArts {
    fn on_epoch_end(&mut self, ctx: &RankContext, epoch: usize, loss: f64, own: f64) -> Result<()> {
        let loss = if self.0 { own } else { loss };
        if self.0 || ctx.is_main() {
            ctx.line(&format!("train | epoch: {epoch} | loss: {loss:.4}"))?;
        }
        Ok(())
    }

    fn on_evaluation(
        &mut self,
        ctx: &RankContext,
        epoch: usize,
        tested: &Evaluation,
    ) -> Result<()> {
        if self.0 || ctx.is_main() {
            // Python's print puts a space before the empty line.
            ctx.line(&format!(
                "val | epoch: {epoch} | loss: {:.4} | accuracy: {:.4} \n",
                tested.loss, tested.accuracy
            ))?;
        }
        Ok(())
    }
}
