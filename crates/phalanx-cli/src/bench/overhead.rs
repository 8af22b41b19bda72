//! The cost of data-parallel training against independent ranks (hooks, copies and
//! waiting for a slower rank included), and how much of the communication backward
//! hides.
//!
//! Blocks of steps with and without communication take turns in the same
//! processes, so that whatever else the machine does, it does to both. A pair of
//! neighbouring blocks gives one ratio; the median of the ratios is reported,
//! and the ratio of the times that a tenth of the blocks stay below, which
//! tells what it costs when nothing else disturbs either rank. Part of it is *skew*: ranks that are not
//! exactly as fast as each other in every step wait for the slowest, whatever averaging costs. It is reported too.
//!
//! After each pair comes a block that only communicates: the same buckets,
//! all full at once. What fits under backward follows from when each bucket was full in the steps alone: the
//! buckets travel one after another, none before it is full, each for its bytes' share of the communication alone, and
//! what of that lies before backward's end fits. Then
//!
//! ```text
//! hidden = (step alone + communication alone - step) / fits
//! ```
//!
//! of which each pair gives one. Communication takes processor time too, its own and the kernel's: where every core
//! computes, nothing hides that part. By how much it makes backward longer is reported too.

use std::time::{Duration, Instant};

use phalanx_comm::ReduceOp;
use phalanx_ddp::Exchange;
use serde_json::json;

use super::train::{PARTS, TrainBenchArgs, Trainer, exchange_title, median};
use crate::error::Result;
use crate::format::plural;
use phalanx_train::RankContext;

/// Steps in one go.
const BLOCK: usize = 4;

/// Milliseconds of one pair of blocks, a step.
#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    synced: f64,
    alone: f64,
    communication: f64,
    /// What backward takes longer when buckets travel meanwhile.
    slowed: f64,
    /// All of backward, and what is left of it when the first bucket is full.
    backward: f64,
    after_first: f64,
    /// Communication that fits under backward.
    fits: f64,
    /// What each part of a step takes longer.
    longer: [f64; PARTS],
}

impl Pair {
    const FIGURES: usize = 7 + PARTS;

    fn figures(self) -> [f64; Self::FIGURES] {
        [
            self.synced,
            self.alone,
            self.communication,
            self.slowed,
            self.backward,
            self.after_first,
            self.fits,
            self.longer[0],
            self.longer[1],
            self.longer[2],
        ]
    }

    fn from_figures(f: &[f64]) -> Pair {
        let at = |i: usize| f.get(i).copied().unwrap_or(f64::NAN);
        Pair {
            synced: at(0),
            alone: at(1),
            communication: at(2),
            slowed: at(3),
            backward: at(4),
            after_first: at(5),
            fits: at(6),
            longer: [at(7), at(8), at(9)],
        }
    }

    fn hidden_percent(&self) -> f64 {
        100.0 * (self.alone + self.communication - self.synced) / self.fits
    }
}

/// Milliseconds of the communication of buckets, each as `(full at, bytes)`, that fit before backward's end
/// when all of them together take `communication` ms. Buckets go in order, one at a time.
fn fits(buckets: &[(f64, usize)], communication: f64, backward: f64) -> f64 {
    let bytes: usize = buckets.iter().map(|b| b.1).sum();
    let (mut free, mut fits) = (0.0f64, 0.0);
    for &(full, bucket_bytes) in buckets {
        let start = free.max(full);
        free = start + communication * bucket_bytes as f64 / bytes.max(1) as f64;
        fits += (free.min(backward) - start).max(0.0);
    }
    fits
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
    let mut alone = Vec::with_capacity(blocks * BLOCK);
    for block in 0..blocks {
        let mut pair = Pair::default();
        // Pairs begin with either kind in turn.
        for synced in [block % 2 == 0, block % 2 != 0] {
            let began = begin(ctx)?;
            for i in 0..BLOCK {
                let began = Instant::now();
                let parts = trainer.step(i, synced)?;
                let took = ms(began.elapsed());
                for (longer, part) in pair.longer.iter_mut().zip(parts) {
                    *longer += if synced { part } else { -part } / BLOCK as f64;
                }
                let backward = trainer.backward_ms(synced) / BLOCK as f64;
                if synced {
                    pair.slowed += backward;
                } else {
                    alone.push(took);
                    pair.backward += backward;
                }
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
        pair.slowed -= pair.backward;
        look_at_backward(trainer, &mut pair);
        figures.extend(pair.figures());
    }
    // Ranks that leave each other alone are as fast as they are together.
    ctx.group.all_reduce(&mut figures, ReduceOp::Mean)?;
    let skew = skew_percent(ctx, alone)?;
    if !ctx.is_main() {
        return Ok(());
    }
    let pairs: Vec<Pair> = figures
        .chunks_exact(Pair::FIGURES)
        .map(Pair::from_figures)
        .collect();
    report(ctx, args, trainer, &pairs, skew)
}

/// How much longer, in percent, steps alone would take if every rank waited for the slowest in each of them, with
/// communication that costs nothing: the median of blocks. `alone` are this rank's milliseconds.
fn skew_percent(ctx: &RankContext, mut alone: Vec<f64>) -> Result<f64> {
    let mut slowest = alone.clone();
    ctx.group.all_reduce(&mut slowest, ReduceOp::Max)?;
    ctx.group.all_reduce(&mut alone, ReduceOp::Mean)?;
    let blocks = slowest.chunks(BLOCK).zip(alone.chunks(BLOCK));
    let sum = |times: &[f64]| times.iter().sum::<f64>();
    let mut percent: Vec<f64> = blocks
        .map(|(slowest, mean)| 100.0 * (sum(slowest) / sum(mean) - 1.0))
        .collect();
    Ok(median(&mut percent))
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
    let backward = ms(ended - began);
    let plan = trainer.ddp().plan();
    let full_ms = |params: &Vec<usize>| {
        let ready = params.iter().filter_map(|&p| times.ready[p]).max();
        ready.map_or(0.0, |at| ms(at.saturating_duration_since(began)))
    };
    let full = plan.buckets().iter().map(full_ms);
    let full: Vec<(f64, usize)> = full
        .enumerate()
        .map(|(b, full)| (full, plan.bucket_bytes(b)))
        .collect();
    pair.after_first = backward - full.first().map_or(backward, |b| b.0);
    pair.fits = fits(&full, pair.communication, backward);
}

fn report(
    ctx: &RankContext,
    args: &TrainBenchArgs,
    trainer: &Trainer,
    pairs: &[Pair],
    skew: f64,
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
    let longer = [
        middle(|p| p.longer[0]),
        middle(|p| p.longer[1]),
        middle(|p| p.longer[2]),
    ];
    let (fits_ms, slowed_ms) = (middle(|p| p.fits), middle(|p| p.slowed));
    let hidden = middle(Pair::hidden_percent);
    let hidden_quartiles = quartiles(&of(Pair::hidden_percent));
    let communication = of(|p| p.communication);
    let hidden_undisturbed =
        100.0 * (alone[tenth] + communication[tenth] - synced[tenth]) / of(|p| p.fits)[tenth];
    let plan = trainer.ddp().plan();
    let buckets: Vec<usize> = (0..plan.buckets().len())
        .map(|b| plan.bucket_bytes(b))
        .collect();
    if args.json {
        let line = json!({
            "model": args.recipe.name, "world": ctx.world(), "threads": ctx.threads, "precision": args.precision.title(), "batch": args.batch,
            "exchange": exchange_title(trainer.ddp().exchange()), "blocks": pairs.len(), "block_steps": BLOCK, "step_ms_median": synced_ms, "alone_ms_median": alone_ms,
            "overhead_percent": overhead, "overhead_percent_quartiles": [low, high],
            "overhead_percent_undisturbed": undisturbed, "skew_percent": skew,
            "bucket_bytes": buckets, "communication_alone_ms_median": communication_ms,
            "backward_ms_median": backward_ms, "backward_after_first_bucket_ms_median": after_first_ms,
            "fits_ms_median": fits_ms, "backward_slowed_ms_median": slowed_ms,
            "longer_ms_medians": { "forward_and_backward": longer[0], "waiting": longer[1], "optimizer": longer[2] },
            "hidden_percent": hidden, "hidden_percent_undisturbed": hidden_undisturbed,
            "hidden_percent_quartiles": hidden_quartiles,
        });
        return ctx.line(&line.to_string());
    }
    let under_backward = match trainer.ddp().exchange() {
        Exchange::AtStep => {
            String::from("the optimizer's step exchanges gradients and parameters besides")
        }
        Exchange::AllReduce | Exchange::ReduceScatter => format!(
            "{fits_ms:.2} ms fit under backward, {hidden:.0} % of that is hidden; backward takes {slowed_ms:.2} ms longer"
        ),
    };
    ctx.line(&format!(
        "{} {}, {}, batch {} a rank, {}\nstep          {synced_ms:.2} ms, {alone_ms:.2} ms without communication (medians of \
         {} blocks of {BLOCK} steps each)\noverhead      {overhead:.1} % (median of pairs of blocks; middle half \
         {low:.1} to {high:.1} %), {undisturbed:.1} % between the fastest tenths; waiting for the slower rank alone would be \
         {skew:.1} %\n\
         of it         {:+.2} ms in forward and backward, {:+.2} ms waiting for gradients, {:+.2} ms in the optimizer's step (medians)\n\
         communication {communication_ms:.2} ms alone, {:.1} MB in {}; {under_backward}",
        args.recipe.network.title,
        args.precision.describe(),
        ctx.describe(phalanx_nn::isa_name()),
        args.batch,
        exchange_title(trainer.ddp().exchange()),
        pairs.len(),
        longer[0],
        longer[1],
        longer[2],
        buckets.iter().sum::<usize>() as f64 / 1e6,
        plural(buckets.len(), "bucket"),
    ))
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn buckets_travel_in_order_and_none_before_it_is_full() {
        // Full from the start, and shorter than backward: all of it.
        assert_eq!(fits(&[(0.0, 8)], 10.0, 50.0), 10.0);
        // Longer than what is left of backward: what is left.
        assert_eq!(fits(&[(20.0, 8)], 100.0, 50.0), 30.0);
        // The wire waits for the second, and the third is full too late.
        assert_eq!(fits(&[(0.0, 4), (20.0, 4), (50.0, 8)], 16.0, 50.0), 8.0);
        // The second waits for the wire.
        assert_eq!(fits(&[(0.0, 4), (1.0, 4)], 16.0, 10.0), 10.0);
        assert_eq!(fits(&[], 16.0, 10.0), 0.0);
    }
}
