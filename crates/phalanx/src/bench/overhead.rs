//! What data-parallel training costs over ranks that leave each other alone:
//! all of it, hooks, copies and waiting for a slower rank included.
//!
//! Blocks of steps with and without communication take turns in the same
//! processes, so that whatever else the machine does, it does to both. A pair of
//! neighbouring blocks gives one ratio; the median of the ratios is reported,
//! and the ratio of the times that a tenth of the blocks stay below, which
//! tells what it costs when nothing else disturbs either rank.

use std::time::Instant;

use phalanx_comm::ReduceOp;
use serde_json::json;

use super::train::{TrainBenchArgs, Trainer, median};
use crate::error::Result;
use crate::train::RankContext;

/// Steps in one go.
const BLOCK: usize = 4;

/// Times as many blocks of each kind as hold `--steps` steps; rank 0 prints.
///
/// # Errors
///
/// Anything that ends the training.
pub fn run(ctx: &RankContext, args: &TrainBenchArgs, trainer: &mut Trainer) -> Result<()> {
    for i in 0..args.warmup.max(2) {
        trainer.step(i, true)?;
        trainer.step(i, false)?;
    }
    let blocks = args.steps.div_ceil(BLOCK);
    let mut times_ms = Vec::with_capacity(2 * blocks);
    for block in 0..2 * blocks {
        ctx.group.barrier()?;
        let began = Instant::now();
        for i in 0..BLOCK {
            trainer.step(i, is_synced(block))?;
        }
        times_ms.push(began.elapsed().as_secs_f64() * 1e3 / BLOCK as f64);
    }
    // Ranks that leave each other alone are as fast as they are together.
    ctx.group.all_reduce(&mut times_ms, ReduceOp::Mean)?;
    if !ctx.is_main() {
        return Ok(());
    }
    let of = |synced: bool| -> Vec<f64> {
        let kind = times_ms.iter().enumerate();
        let kind = kind.filter(|(block, _)| is_synced(*block) == synced);
        kind.map(|(_, ms)| *ms).collect()
    };
    let (mut synced, mut alone) = (of(true), of(false));
    let pairs = synced.iter().zip(&alone);
    let mut percent: Vec<f64> = pairs.map(|(s, a)| 100.0 * (s / a - 1.0)).collect();
    let (synced_ms, alone_ms) = (median(&mut synced), median(&mut alone));
    let overhead = median(&mut percent);
    // `median` has sorted them.
    let undisturbed = 100.0 * (synced[blocks / 10] / alone[blocks / 10] - 1.0);
    let quarter = percent.len() / 4;
    let (low, high) = (percent[quarter], percent[percent.len() - 1 - quarter]);
    if args.json {
        let line = json!({
            "model": args.recipe.key(), "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "blocks": blocks, "block_steps": BLOCK, "step_ms_median": synced_ms, "alone_ms_median": alone_ms,
            "overhead_percent": overhead, "overhead_percent_quartiles": [low, high],
            "overhead_percent_undisturbed": undisturbed,
        });
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank\nstep          {synced_ms:.2} ms, {alone_ms:.2} ms without communication (medians of \
         {blocks} blocks of {BLOCK} steps each)\noverhead      {overhead:.1} % (median of pairs of blocks; middle half \
         {low:.1} to {high:.1} %), {undisturbed:.1} % between the fastest tenths",
        args.recipe.title(),
        args.precision.describe(),
        ctx.describe(),
        args.batch,
    ))
}

/// Pairs begin with either kind in turn.
fn is_synced(block: usize) -> bool {
    matches!(block % 4, 0 | 3)
}
