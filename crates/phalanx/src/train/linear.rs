//! `train linear`: the OneFlow document's `ddp_train.py`.
//!
//! One weight `[2, 1]` from zero, two samples a rank, mean squared error with
//! *sum* reduction, SGD with learning rate 0.01, 500 steps. Gradients are
//! averaged over the ranks, which is what makes the printed losses come out to
//! the last digit (features.md, golden test G1).

use phalanx_ddp::{DdpOptions, DistributedDataParallel};
use phalanx_nn::models::LinearToy;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};

use super::context::RankContext;
use super::format::python_repr;
use crate::error::Result;
use crate::ranks;

/// Arguments of `train linear`.
#[derive(Debug, Clone, clap::Args)]
pub struct LinearArgs {
    /// Steps to train; a loss line is printed every 50
    #[arg(long, default_value_t = 500, value_name = "N")]
    pub iterations: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.01, allow_negative_numbers = true)]
    pub lr: f64,
}

/// The document gives two ranks two samples each; further ranks get them
/// again, in turn.
const TRAIN_X: [[f32; 4]; 2] = [[1., 2., 2., 3.], [4., 6., 3., 1.]];
const TRAIN_Y: [[f32; 2]; 2] = [[8., 13.], [26., 9.]];

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 50;

/// Checks what can be checked before any rank is started.
///
/// # Errors
///
/// Usage errors naming the flag.
pub fn validate(args: &LinearArgs) -> Result<()> {
    super::check_lr(args.lr)?;
    ranks::check_count("--iterations", args.iterations, usize::MAX)
}

/// Trains as one rank.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run_rank(ctx: &RankContext, args: &LinearArgs) -> Result<()> {
    let mut scope = Scope::new(Seed(0));
    let net = LinearToy::new(&mut scope);
    let mut params = scope.build()?;
    let options = DdpOptions {
        must_agree: vec![
            format!("--iterations {}", args.iterations),
            format!("--lr {}", args.lr),
        ],
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(ctx.group.clone(), &mut params, options)?;
    let mut optimizer = Sgd::new(&params, args.lr);
    let mut tape = Tape::new(Threads(1));
    let data = ctx.rank() % TRAIN_X.len();
    for i in 0..args.iterations {
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(&TRAIN_X[data], &[2, 2])?;
        let loss = net.forward(x)?.mse_loss(&TRAIN_Y[data], Reduction::Sum)?;
        let value = f64::from(loss.item());
        ctx.check_loss(value, format_args!("step {}", i + 1), args.lr)?;
        if (i + 1) % PRINT_EVERY == 0 {
            let value = python_repr(value);
            ctx.line(&format!("{}/{} loss:{value}", i + 1, args.iterations))?;
        }
        loss.backward(&mut ddp)?;
        drop(step);
        let commit = ddp.finish()?;
        if commit.is_yes() {
            optimizer.step(&mut params, &ddp)?;
        } else {
            ctx.note_skipped(&commit, format_args!("step {}", i + 1));
        }
    }
    let weight = params.export(net.w);
    let rows: Vec<String> = weight.iter().map(|w| format!("[{w:.4}]")).collect();
    ctx.line(&format!("w:tensor([{}])", rows.join(",\n        ")))
}
