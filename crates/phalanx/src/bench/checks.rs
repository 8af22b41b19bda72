//! What the checks cost that are on unless somebody leaves them out.
//!
//! Two of them work in every step: the look for infinities and NaNs, and finding parameters that no rank used. For each,
//! blocks of steps with and without it take turns in the same processes, on two wrappers of one model. Both
//! communicate, so skew is in neither. A pair of neighbouring blocks gives one ratio; the median of the ratios is
//! told, with the middle half. Two wrappers without any difference are compared as well: what comes out there is noise.
//!
//! Two work now and then: the comparison of models and settings when a wrapper is made, and that of the weights
//! after an epoch. They are timed by themselves, and told as shares of an epoch of the model's own data set.

use phalanx_comm::ReduceOp;
use phalanx_data::checkpoint::weights_digest;
use phalanx_ddp::{DdpOptions, Unused, verify_equal};
use serde_json::json;

use super::overhead::{BLOCK, begin, ms};
use super::train::{TrainBenchArgs, Trainer, median};
use crate::error::Result;
use phalanx_train::RankContext;

/// How often what works now and then is timed.
const TIMES: usize = 9;

/// What is compared with the defaults, and what the line about it begins with.
fn without() -> [(&'static str, &'static str, DdpOptions); 3] {
    let finiteness = DdpOptions {
        unchecked: true,
        ..DdpOptions::default()
    };
    let unused = DdpOptions {
        unused: Unused::Refuse,
        ..DdpOptions::default()
    };
    [
        ("nothing", "no difference    ", DdpOptions::default()),
        ("finiteness", "finite gradients ", finiteness),
        ("unused", "unused parameters", unused),
    ]
}

/// Times as many pairs of blocks of each kind as hold `--steps` steps; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run(ctx: &RankContext, args: &TrainBenchArgs, trainer: &mut Trainer) -> Result<()> {
    let mut lines = Vec::new();
    let mut found = serde_json::Map::new();
    let mut step_ms = f64::NAN;
    for (key, title, options) in without() {
        trainer.compare_with(ctx, Some(options))?;
        let (median_ms, mut percent) = compare(ctx, args, trainer)?;
        step_ms = median_ms;
        let middle = median(&mut percent);
        let quarter = percent.len() / 4;
        let (low, high) = (percent[quarter], percent[percent.len() - 1 - quarter]);
        lines.push(format!(
            "{title} {middle:+.2} % of a step (middle half {low:+.2} to {high:+.2} %)"
        ));
        found.insert(
            key.to_owned(),
            json!({ "percent": middle, "percent_quartiles": [low, high] }),
        );
    }
    let epoch_ms =
        step_ms * (args.recipe.samples() as f64 / (args.batch * ctx.world()) as f64).ceil();
    for (key, title, times) in [
        (
            "construction",
            "construction     ",
            timed(ctx, || {
                trainer.compare_with(ctx, Some(DdpOptions::default()))
            })?,
        ),
        ("weights", "equal weights    ", {
            let params = trainer.params();
            timed(ctx, || {
                Ok(verify_equal(&ctx.group, params, weights_digest(params))?)
            })?
        }),
    ] {
        let mut times = times;
        let middle = median(&mut times);
        let percent = 100.0 * middle / epoch_ms;
        lines.push(format!(
            "{title} {middle:.2} ms ({:.2} to {:.2}), {percent:.3} % of an epoch of {:.1} s",
            times[0],
            times[TIMES - 1],
            epoch_ms / 1e3
        ));
        found.insert(
            key.to_owned(),
            json!({ "ms": middle, "ms_range": [times[0], times[TIMES - 1]], "percent_of_an_epoch": percent }),
        );
    }
    if !ctx.is_main() {
        return Ok(());
    }
    if args.json {
        let line = json!({
            "model": args.recipe.key(), "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(),
            "batch": args.batch, "pairs": args.steps.div_ceil(BLOCK), "block_steps": BLOCK, "step_ms_median": step_ms, "checks": found,
        });
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank\nstep              {step_ms:.2} ms (medians of {} pairs of blocks of {BLOCK} steps)\n{}",
        args.recipe.title(),
        args.precision.describe(),
        ctx.describe(),
        args.batch,
        args.steps.div_ceil(BLOCK),
        lines.join("\n")
    ))
}

/// The median of a step's milliseconds, and for each pair of blocks by how many percent the one with defaults is longer.
fn compare(
    ctx: &RankContext,
    args: &TrainBenchArgs,
    trainer: &mut Trainer,
) -> Result<(f64, Vec<f64>)> {
    for i in 0..args.warmup.max(2) {
        trainer.step(i, true)?;
        trainer.step(i, false)?;
    }
    let mut blocks = Vec::new();
    for block in 0..args.steps.div_ceil(BLOCK) {
        let mut pair = [0.0; 2];
        for which in [block % 2, 1 - block % 2] {
            let began = begin(ctx)?;
            for i in 0..BLOCK {
                trainer.step(i, which == 0)?;
            }
            pair[which] = ms(began.elapsed()) / BLOCK as f64;
        }
        blocks.extend(pair);
    }
    ctx.group.all_reduce(&mut blocks, ReduceOp::Mean)?;
    let pairs = blocks.chunks_exact(2);
    let percent = pairs.map(|p| 100.0 * (p[0] / p[1] - 1.0)).collect();
    let mut whole: Vec<f64> = blocks.iter().copied().step_by(2).collect();
    Ok((median(&mut whole), percent))
}

/// Milliseconds of each of [`TIMES`] goes, of the slowest rank.
fn timed(ctx: &RankContext, mut go: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let began = begin(ctx)?;
        go()?;
        times.push(ms(began.elapsed()));
    }
    ctx.group.all_reduce(&mut times, ReduceOp::Max)?;
    Ok(times)
}
