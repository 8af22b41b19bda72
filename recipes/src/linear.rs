//! `train linear`: the OneFlow document's `ddp_train.py`.
//!
//! One weight `[2, 1]` from zero, two samples a rank, mean squared error with
//! *sum* reduction, SGD with learning rate 0.01, 500 steps. Gradients are
//! averaged over the ranks, which is what makes the printed losses come out to
//! the last digit (golden test G1).

use phalanx::data::Dataset;
use phalanx::nn::models::LinearToy;
use phalanx::prelude::*;
use phalanx::train::Determinism;
use phalanx::{PrintingRanks, Subcommand};

use crate::error::check_count;
use crate::format::python_repr;

pub fn program() -> Subcommand {
    Program::new()
        .name("linear")
        .about("The OneFlow document's linear model: two weights, 500 steps")
        .defaults(Defaults::new(1, 2, 0.01))
        .check(Linear::check)
        .printing(|_| PrintingRanks::All)
        .subcommand(train)
}

/// Flags of `train linear`.
#[derive(Debug, Clone, clap::Args)]
struct Linear {
    /// Steps of an epoch; a loss line is printed every 50
    #[arg(long, default_value_t = 500, value_name = "N")]
    iterations: usize,
}

impl Linear {
    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        settings.validate(world)?;
        check_count("--iterations", self.iterations, 10_000_000)?;
        check_count("--batch-size", settings.batch_size(), 1000)?;
        // Every rank has samples of its own, whose losses are added up.
        let split = &settings.split;
        let other_batches = split.accumulate > 1 || split.determinism() == Determinism::Shards;
        if other_batches || settings.global_batch_size.is_some() {
            return Err(Error::usage(
                "train linear has no --accumulate, --deterministic shards or --global-batch-size",
            ));
        }
        Ok(())
    }
}

/// The samples of an epoch. The document gives each of two ranks two samples, in every step; further ranks get them
/// again, in turn.
struct Samples {
    steps: usize,
    ranks: usize,
    /// Samples of a rank and step.
    batch: usize,
}

const TRAIN_X: [[[f32; 2]; 2]; 2] = [[[1., 2.], [2., 3.]], [[4., 6.], [3., 1.]]];
const TRAIN_Y: [[f32; 2]; 2] = [[8., 13.], [26., 9.]];

impl Dataset for Samples {
    /// Inputs and targets.
    type Batch = (Vec<f32>, Vec<f32>);

    fn len(&self) -> usize {
        self.steps * self.ranks * self.batch
    }

    fn read_batch(&self, _epoch: u64, indices: &[u64], batch: &mut Self::Batch) -> Result<()> {
        let (x, y) = batch;
        x.clear();
        y.clear();
        for index in indices {
            // Consecutive samples go to consecutive ranks.
            let (rank, own) = (*index as usize % self.ranks, *index as usize / self.ranks);
            let (half, sample) = (rank % TRAIN_X.len(), own % self.batch % 2);
            x.extend(TRAIN_X[half][sample]);
            y.push(TRAIN_Y[half][sample]);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "the document's samples".to_owned()
    }

    /// The same in every step, of however many.
    fn content(&self) -> String {
        format!("{} of {} ranks", self.describe(), self.ranks)
    }
}

fn train(job: &Job<'_>, args: &Linear) -> Result<()> {
    let (settings, ranks) = (job.settings(), job.world_size());
    let samples = Arc::new(Samples {
        steps: args.iterations,
        ranks,
        batch: settings.batch_size(),
    });
    let mut trainer = (job.trainer(&samples, LinearToy::new, Sgd::new))
        .shuffle(false)
        .hyperparameters(vec![format!("--iterations {}", args.iterations)])
        .reporter(Box::new(Lines {
            iterations: args.iterations,
        }))
        .start()?;
    for _epoch in trainer.epochs() {
        for batch in trainer.batches(&samples)? {
            trainer.step(&batch, |net, batch| {
                let (x, y) = &*batch;
                let x = batch.input(x, &[batch.samples(), 2])?;
                net.forward(x)?.mse_loss(y, Reduction::Sum)
            })?;
        }
    }
    trainer.check_weights()?;
    let weight = trainer.params().export(trainer.model().w);
    let ctx = job.context();
    ctx.line(&printed(&weight, ctx.local_rank))?;
    trainer.finish().map(drop)
}

/// The document's lines, on every rank.
struct Lines {
    iterations: usize,
}

/// Steps between two loss lines, as in the document.
const PRINT_EVERY: usize = 50;

impl Reporter for Lines {
    fn on_step(&mut self, _ctx: &RankContext, facts: &StepInfo) -> Option<String> {
        let (step, all) = (facts.index + 1, self.iterations);
        let loss = || format!("{step}/{all} loss:{}", python_repr(facts.loss));
        step.is_multiple_of(PRINT_EVERY).then(loss)
    }
}

/// What the document's `print(f"\nw:{m.w}")` shows, its empty line first. A rank's
/// device is the processor's, where the document has `cuda:1`.
fn printed(weight: &[f32], device: usize) -> String {
    let rows: Vec<String> = weight.iter().map(|w| format!("[{w:.4}]")).collect();
    let rows = rows.join(",\n        ");
    format!(
        "\nw:tensor([{rows}], device='cpu:{device}', dtype=oneflow.float32,\n       grad_fn=<accumulate_grad>)"
    )
}
