//! What data-parallel training costs over ranks that leave each other alone:
//! all of it, hooks, copies and waiting for a slower rank included; and how
//! much of the communication backward hides.
//!
//! Blocks of steps with and without communication take turns in the same
//! processes, so that whatever else the machine does, it does to both. A pair of
//! neighbouring blocks gives one ratio; the median of the ratios is reported,
//! and the ratio of the times that a tenth of the blocks stay below, which
//! tells what it costs when nothing else disturbs either rank.
//!
//! After each pair comes a block that only communicates: the same buckets,
//! all full at once. Communication can hide under backward from the moment the
//! first bucket is full, so what fits is the shorter of the two times, and
//!
//! ```text
//! hidden = (step alone + communication alone - step) / min(communication alone, backward after the first bucket)
//! ```
//!
//! of which each pair gives one. Not all that fits can be hidden, for the last bucket is full only when backward
//! has ended.

use std::time::{Duration, Instant};

use phalanx_comm::ReduceOp;
use serde_json::json;

use super::train::{TrainBenchArgs, Trainer, median};
use crate::error::Result;
use crate::train::RankContext;

/// Steps in one go.
const BLOCK: usize = 4;

/// Milliseconds of one pair of blocks, a step.
#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    synced: f64,
    alone: f64,
    communication: f64,
    /// All of backward, and what is left of it when the first bucket is full.
    backward: f64,
    after_first: f64,
}

impl Pair {
    const FIGURES: usize = 5;

    fn figures(self) -> [f64; Self::FIGURES] {
        [
            self.synced,
            self.alone,
            self.communication,
            self.backward,
            self.after_first,
        ]
    }

    fn from_figures(f: &[f64]) -> Pair {
        let at = |i: usize| f.get(i).copied().unwrap_or(f64::NAN);
        Pair {
            synced: at(0),
            alone: at(1),
            communication: at(2),
            backward: at(3),
            after_first: at(4),
        }
    }

    /// Communication that fits under backward.
    fn fits(&self) -> f64 {
        self.communication.min(self.after_first)
    }

    fn hidden_percent(&self) -> f64 {
        100.0 * (self.alone + self.communication - self.synced) / self.fits()
    }
}

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
    trainer.communicate()?;
    let blocks = args.steps.div_ceil(BLOCK);
    let mut figures = Vec::with_capacity(blocks * Pair::FIGURES);
    for block in 0..blocks {
        let mut pair = Pair::default();
        // Pairs begin with either kind in turn.
        for synced in [block % 2 == 0, block % 2 != 0] {
            let began = begin(ctx)?;
            for i in 0..BLOCK {
                trainer.step(i, synced)?;
            }
            *match synced {
                true => &mut pair.synced,
                false => &mut pair.alone,
            } = ms(began.elapsed()) / BLOCK as f64;
        }
        let began = begin(ctx)?;
        for _ in 0..BLOCK {
            trainer.communicate()?;
        }
        pair.communication = ms(began.elapsed()) / BLOCK as f64;
        look_at_backward(trainer, &mut pair);
        figures.extend(pair.figures());
    }
    // Ranks that leave each other alone are as fast as they are together.
    ctx.group.all_reduce(&mut figures, ReduceOp::Mean)?;
    if !ctx.is_main() {
        return Ok(());
    }
    let pairs: Vec<Pair> = figures
        .chunks_exact(Pair::FIGURES)
        .map(Pair::from_figures)
        .collect();
    report(ctx, args, trainer, &pairs)
}

/// Ranks start a block together.
fn begin(ctx: &RankContext) -> Result<Instant> {
    ctx.group.barrier()?;
    Ok(Instant::now())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What could have been hidden under the backward of the last step alone.
fn look_at_backward(trainer: &Trainer, pair: &mut Pair) {
    let times = trainer.backward();
    let (Some(began), Some(ended)) = (times.began, times.ended) else {
        return;
    };
    pair.backward = ms(ended - began);
    let plan = trainer.ddp().plan();
    let full_ms = |params: &Vec<usize>| {
        let ready = params.iter().filter_map(|&p| times.ready[p]).max();
        ready.map_or(0.0, |at| ms(at.saturating_duration_since(began)))
    };
    let full: Vec<f64> = plan.buckets().iter().map(full_ms).collect();
    pair.after_first = pair.backward - full.first().copied().unwrap_or(pair.backward);
}

fn report(
    ctx: &RankContext,
    args: &TrainBenchArgs,
    trainer: &Trainer,
    pairs: &[Pair],
) -> Result<()> {
    let of = |what: fn(&Pair) -> f64| -> Vec<f64> {
        let mut values: Vec<f64> = pairs.iter().map(what).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let quartiles = |sorted: &[f64]| -> [f64; 2] {
        let quarter = sorted.len() / 4;
        [sorted[quarter], sorted[sorted.len() - 1 - quarter]]
    };
    let middle = |what| median(&mut of(what));
    let (synced, alone) = (of(|p| p.synced), of(|p| p.alone));
    let percent = of(|p| 100.0 * (p.synced / p.alone - 1.0));
    let (synced_ms, alone_ms) = (middle(|p| p.synced), middle(|p| p.alone));
    let overhead = middle(|p| 100.0 * (p.synced / p.alone - 1.0));
    let tenth = pairs.len() / 10;
    let undisturbed = 100.0 * (synced[tenth] / alone[tenth] - 1.0);
    let [low, high] = quartiles(&percent);
    let communication_ms = middle(|p| p.communication);
    let (backward_ms, after_first_ms) = (middle(|p| p.backward), middle(|p| p.after_first));
    let fits_ms = middle(Pair::fits);
    let hidden = middle(Pair::hidden_percent);
    let hidden_quartiles = quartiles(&of(Pair::hidden_percent));
    let plan = trainer.ddp().plan();
    let buckets: Vec<usize> = (0..plan.buckets().len())
        .map(|b| plan.bucket_bytes(b))
        .collect();
    if args.json {
        let line = json!({
            "model": args.recipe.key(), "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "blocks": pairs.len(), "block_steps": BLOCK, "step_ms_median": synced_ms, "alone_ms_median": alone_ms,
            "overhead_percent": overhead, "overhead_percent_quartiles": [low, high],
            "overhead_percent_undisturbed": undisturbed,
            "bucket_bytes": buckets, "communication_alone_ms_median": communication_ms,
            "backward_ms_median": backward_ms, "backward_after_first_bucket_ms_median": after_first_ms,
            "fits_ms_median": fits_ms,
            "hidden_percent": hidden, "hidden_percent_quartiles": hidden_quartiles,
        });
        return ctx.line(&line.to_string());
    }
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank\nstep          {synced_ms:.2} ms, {alone_ms:.2} ms without communication (medians of \
         {} blocks of {BLOCK} steps each)\noverhead      {overhead:.1} % (median of pairs of blocks; middle half \
         {low:.1} to {high:.1} %), {undisturbed:.1} % between the fastest tenths\n\
         communication {communication_ms:.2} ms alone, {:.1} MB in {} buckets; {fits_ms:.2} ms fit under backward once \
         the first is full, {hidden:.0} % of that is hidden",
        args.recipe.title(),
        args.precision.describe(),
        ctx.describe(),
        args.batch,
        pairs.len(),
        buckets.iter().sum::<usize>() as f64 / 1e6,
        buckets.len(),
    ))
}
