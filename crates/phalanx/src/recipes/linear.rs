//! `train linear`: the OneFlow document's `ddp_train.py`.
//!
//! One weight `[2, 1]` from zero, two samples a rank, mean squared error with
//! *sum* reduction, SGD with learning rate 0.01, 500 steps. Gradients are
//! averaged over the ranks, which is what makes the printed losses come out to
//! the last digit (golden test G1).

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_data::checkpoint;
use phalanx_data::digest::optimizer_sha256;
use phalanx_data::state::Place;
use phalanx_ddp::{DdpOptions, DistributedDataParallel, verify_equal};
use phalanx_nn::models::LinearToy;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads};
use serde_json::json;

use phalanx_launch::Speakers;
use phalanx_process::unlike;
use phalanx_train::{
    CHECKPOINTS_DIR, CheckpointSource, Files, History, Output, RankContext, Resumed, SaveAction,
    Saving, SavingArgs, Settings, Update, check_lr, default_output_dir, settings_by_name,
};

use super::AnyRecipe;
use crate::error::{Result, check_count};
use crate::format::{plural, python_repr};
use crate::say;

/// Arguments of `train linear`.
#[derive(Debug, Clone, clap::Args)]
pub struct LinearArgs {
    /// Steps to train; a loss line is printed every 50
    #[arg(long, default_value_t = 500, value_name = "N")]
    pub iterations: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.01)]
    pub lr: f64,
    #[command(flatten)]
    pub saving: SavingArgs,
    /// Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: runs/linear-<date>-<time>]
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
}

/// The document gives two ranks two samples each; further ranks get them
/// again, in turn.
const TRAIN_X: [[f32; 4]; 2] = [[1., 2., 2., 3.], [4., 6., 3., 1.]];
const TRAIN_Y: [[f32; 2]; 2] = [[8., 13.], [26., 9.]];

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 50;

/// What a run leaves besides the files that every run does.
fn files() -> Files {
    Files {
        model: "linear".into(),
        weights: Some("linear.safetensors".into()),
        ..Files::default()
    }
}

impl AnyRecipe for LinearArgs {
    fn name(&self) -> &'static str {
        "linear"
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
        run_rank(ctx, self)
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

/// After `taken` steps. There is one epoch, and every step sees all samples.
fn place(taken: usize) -> Place {
    Place {
        step_in_epoch: taken as u64,
        step: taken as u64,
        ..Place::default()
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

/// Trains as one rank.
///
/// # Errors
///
/// Anything that ends the training.
fn run_rank(ctx: &RankContext, args: &LinearArgs) -> Result<()> {
    let dir = args.output_dir.clone();
    let dir = dir.unwrap_or_else(|| default_output_dir("linear"));
    let dir = ctx.folder_of_rank_0(dir)?;
    let resumed = Resumed::find(ctx, &args.saving, &dir)?;
    let mut scope = Scope::new(Seed(0));
    let net = LinearToy::new(&mut scope);
    let mut params = scope.build()?;
    if let Some(resumed) = &resumed {
        resumed.check(&resumable(ctx.world()))?;
        resumed.params(&mut params)?;
    }
    let shaping = [
        format!("--iterations {}", args.iterations),
        format!("--lr {}", args.lr),
    ];
    let mut must_agree = vec!["train linear".to_owned()];
    must_agree.extend(args.saving.must_agree());
    must_agree.extend(shaping.clone());
    let shaping = settings_by_name(&shaping);
    let options = DdpOptions {
        must_agree,
        ..DdpOptions::default()
    };
    let ddp = DistributedDataParallel::new(ctx.group.clone(), &mut params, options);
    let mut ddp = ddp.map_err(unlike)?;
    let mut update = Update::Whole(Box::new(Sgd::new(&params, args.lr)));
    if let Some(resumed) = &resumed {
        resumed.wrapper(ctx, &mut ddp)?;
        resumed.update(ctx, &params, &mut update, &shaping)?;
    }
    let first = resumed.as_ref().map_or(0, |r| r.place().step as usize);
    let starting = ctx.phase("starting");
    let mut output = Output::open(ctx, dir, files(), &args.saving)?;
    let mut log = output.metrics(resumed.as_ref().map(Resumed::place))?;
    let facts = resumable(ctx.world());
    let facts = facts.into_iter().chain(shaping.clone()).collect();
    let checkpoints = output.checkpoints(CHECKPOINTS_DIR, args.saving.keep());
    let saving = Saving::open(ctx, &args.saving, facts, checkpoints, resumed.as_ref())?;
    let mut saving = saving.with_metadata(files().metadata());
    output.begin(&args.saving)?;
    if first < args.iterations {
        output.reopen()?;
    }
    ctx.note(&format!(
        "phalanx {}  linear  {}\noutput   {}",
        env!("CARGO_PKG_VERSION"),
        ctx.describe(),
        output.dir().display()
    ));
    if let Some(resumed) = &resumed {
        let all = plural(args.iterations, "step");
        ctx.note(&match first < args.iterations {
            true => format!("resumed  after {first} of {all}"),
            false => format!("resumed  after {first} of {all}; --iterations N for more"),
        });
        resumed.announce_changes(ctx, &shaping);
    }
    drop(starting);
    let mut tape = Tape::new(Threads(1));
    let data = ctx.rank() % TRAIN_X.len();
    for i in first..args.iterations {
        let step = tape.step(&params, StepKey::new(0, i as u64));
        let x = step.input(&TRAIN_X[data], &[2, 2])?;
        let loss = net.forward(x)?.mse_loss(&TRAIN_Y[data], Reduction::Sum)?;
        let value = f64::from(loss.item());
        ctx.check_loss(value, format_args!("step {}", i + 1), args.lr)?;
        if (i + 1) % PRINT_EVERY == 0 {
            let text = python_repr(value);
            ctx.line(&format!("{}/{} loss:{text}", i + 1, args.iterations))?;
            log.event(&json!({"step": i, "loss": value, "lr": args.lr}))?;
        }
        loss.backward(&mut ddp)?;
        drop(step);
        let commit = ddp.finish()?;
        if commit.is_yes() {
            update.step(&mut params, &mut ddp, None)?;
        } else {
            ctx.note_skipped(&commit, format_args!("step {}", i + 1));
        }
        let mut now = saving.after_step(i as u64 + 1)?;
        if i + 1 == args.iterations && saving.enabled() {
            now = SaveAction::Save;
        }
        if now != SaveAction::Continue {
            let _phase = ctx.phase("saving");
            let whole = CheckpointSource {
                params: &params,
                buffers: None,
                update: &update,
                ddp: &ddp,
            };
            saving.save(now, &whole, place(i + 1), History::default())?;
        }
        if now == SaveAction::Stop {
            return saving.stop(place(i + 1));
        }
    }
    let digest = checkpoint::weights_digest(&params);
    verify_equal(&ctx.group, &params, digest)?;
    ctx.line(&printed(&params.export(net.w), ctx.local_rank))?;
    // Its parts are gathered by all.
    let optimizer = optimizer_sha256(update.state()?);
    let phase = ctx.phase("saving");
    saving.finish()?;
    output.save_weights(&params)?;
    output.save_summary(&json!({
        "recipe": "linear",
        "version": env!("CARGO_PKG_VERSION"),
        "arguments": say::arguments(),
        "world_size": ctx.world(),
        "transport": ctx.describe(),
        "iterations": args.iterations,
        "lr": args.lr,
        "skipped_steps": ddp.skipped_steps(),
        "total_s": ctx.started.elapsed().as_secs_f64(),
        "weights_sha256": hex::encode(digest),
        "optimizer_sha256": optimizer,
    }))?;
    drop(phase);
    // Nobody leaves before the files are complete.
    Ok(ctx.group.barrier()?)
}
