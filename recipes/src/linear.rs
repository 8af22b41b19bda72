//! `train linear`: the OneFlow document's `ddp_train.py`.
//!
//! One weight `[2, 1]` from zero, two samples a rank, mean squared error with
//! *sum* reduction, SGD with learning rate 0.01, 500 steps. Gradients are
//! averaged over the ranks, which is what makes the printed losses come out to
//! the last digit (golden test G1).

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_launch::Speakers;
use phalanx_nn::models::LinearToy;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};
use phalanx_train::{Files, RankContext, SavingArgs, Settings, check_lr};
use serde_json::json;

use crate::error::{Result, check_count};
use crate::format::{number, python_repr};
use crate::shared::by_hand::{ByHand, Facts};
use crate::{AnyRecipe, Flags, Recipe};

pub const RECIPE: Recipe = Recipe {
    name: "linear",
    about: "The OneFlow document's linear model: two weights, 500 steps",
    help: &[(
        "save_every",
        "Save a resumable checkpoint every N steps, at the end, and on SIGTERM (exit code 130) or SIGUSR1, which stop the training",
    )],
    defaults: None,
    flags: Flags::of::<Linear>(),
    network: None,
};

/// Arguments of `train linear`.
#[derive(Debug, Clone, clap::Args)]
struct Linear {
    /// Steps to train; a loss line is printed every 50
    #[arg(long, default_value_t = 500, value_name = "N")]
    iterations: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.01)]
    lr: f64,
    #[command(flatten)]
    saving: SavingArgs,
    /// Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: runs/linear-<date>-<time>]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
}

/// The document gives two ranks two samples each; further ranks get them
/// again, in turn.
const TRAIN_X: [[f32; 4]; 2] = [[1., 2., 2., 3.], [4., 6., 3., 1.]];
const TRAIN_Y: [[f32; 2]; 2] = [[8., 13.], [26., 9.]];

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 50;

impl AnyRecipe for Linear {
    fn name(&self) -> &'static str {
        RECIPE.name
    }

    fn settings(&mut self) -> Option<&mut Settings> {
        None
    }

    fn folder(&mut self) -> (&mut Option<PathBuf>, &mut SavingArgs) {
        (&mut self.output_dir, &mut self.saving)
    }

    fn validate(&self, _world: usize) -> Result<()> {
        check_lr(self.lr)?;
        self.saving.validate(self.output_dir.is_some())?;
        check_count("--iterations", self.iterations, usize::MAX)
    }

    fn speakers(&self) -> Speakers {
        Speakers::All
    }

    fn run_rank(&self, ctx: &RankContext) -> Result<()> {
        let mut scope = Scope::new(Seed(0));
        let net = LinearToy::new(&mut scope);
        let facts = Facts {
            name: self.name(),
            files: Files {
                model: "linear".into(),
                weights: Some("linear.safetensors".into()),
                ..Files::default()
            },
            steps: self.iterations,
            lr: self.lr,
            shaping: vec![
                format!("--iterations {}", self.iterations),
                format!("--lr {}", number(self.lr)),
            ],
            resumable: resumable(ctx.world()),
        };
        let (saving, dir) = (&self.saving, self.output_dir.clone());
        let mut run = ByHand::open(ctx, saving, dir, scope.build()?, facts)?;
        let mut tape = Tape::new(Threads(1));
        let data = ctx.rank() % TRAIN_X.len();
        for i in run.first..self.iterations {
            let step = tape.step(&run.params, StepKey::new(0, i as u64));
            let x = step.input(&TRAIN_X[data], &[2, 2])?;
            let loss = net.forward(x)?.mse_loss(&TRAIN_Y[data], Reduction::Sum)?;
            let value = f64::from(loss.item()?);
            ctx.check_loss(value, format_args!("step {}", i + 1), self.lr)?;
            if (i + 1) % PRINT_EVERY == 0 {
                let text = python_repr(value);
                ctx.line(&format!("{}/{} loss:{text}", i + 1, self.iterations))?;
            }
            if i % (self.iterations / 1000).clamp(1, PRINT_EVERY) == 0 {
                run.log
                    .event(&json!({"step": i, "loss": value, "lr": self.lr}))?;
            }
            loss.backward(&mut run.ddp)?;
            drop(step);
            if !run.end_step(i + 1)? {
                return Ok(());
            }
        }
        run.finish(|params| printed(&params.export(net.w), ctx.local_rank))
    }
}

/// What a resumed run must share with the one that was saved. The gradient is
/// the mean over all ranks' samples: any even number of ranks has both
/// halves of them equally often, each odd number has a mean of its own.
fn resumable(world: usize) -> BTreeMap<String, String> {
    let ranks = if world.is_multiple_of(TRAIN_X.len()) {
        "even".to_owned()
    } else {
        world.to_string()
    };
    BTreeMap::from([
        ("program".to_owned(), "linear".to_owned()),
        ("number of ranks".to_owned(), ranks),
    ])
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
