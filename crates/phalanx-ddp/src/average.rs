//! How the gradients of ranks and micro-batches are averaged.
//!
//! # The rule
//!
//! With [`Average::Samples`] the gradient is that of the mean loss over all samples of
//! all ranks, however they are split: micro-batch `i` of `n_i` samples has weight `n_i
//! / N`. So that equal splits cost nothing and round once, this is computed as `u_i =
//! n_i · M / N` for each micro-batch (1 when all are of one size), the mean over the
//! `P` ranks, and a factor `P / M` at the end, where `M` counts the micro-batches that
//! are not empty.
//!
//! P ranks of one micro-batch, and one rank of P, thus both add P gradients in
//! order and multiply once by `1 / P`: the same bits.

use phalanx_comm::ProcessGroup;

use crate::error::{Error, Result};

/// How gradients are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Average {
    /// Mean over samples (or tokens): the gradient of the joined batch.
    #[default]
    Samples,
    /// The plain mean over ranks and micro-batches, whatever their sizes, as in
    /// PyTorch. Ranks without data count in the divisor.
    Ranks,
    /// The same, but only ranks with data count in the divisor (PyTorch's `join` with
    /// `divide_by_initial_world_size=False`).
    ActiveRanks,
}

/// Whether a rank may have no data while another has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Uneven {
    /// It takes part with zeros.
    #[default]
    Join,
    /// All ranks fail, naming it.
    Refuse,
}

/// Sizes of a step over all ranks, for callers that know them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Samples of all ranks.
    pub samples: usize,
    /// Micro-batches of all ranks that are not empty.
    pub micro_batches: usize,
    /// Ranks with at least one sample.
    pub active_ranks: usize,
}

/// Gathers each rank's samples, non-empty micro-batches and all micro-batches, whose
/// number must be the same on all ranks if they `join` their batches.
pub(crate) fn exchange(
    group: &ProcessGroup,
    sizes: &[usize],
    uneven: Uneven,
    join: bool,
) -> Result<GlobalBatch> {
    let mine = [
        sizes.iter().sum::<usize>() as u64 as i64,
        sizes.iter().filter(|n| **n > 0).count() as i64,
        sizes.len() as i64,
    ];
    let mut all = vec![0i64; mine.len() * group.world_size()];
    if group.world_size() == 1 {
        all.copy_from_slice(&mine);
    } else {
        group
            .all_gather(&mine, &mut all)
            .map_err(|e| Error::comm_while("the ranks could not compare their batch sizes", e))?;
    }
    let ranks: Vec<(i64, i64, i64)> = all.chunks_exact(3).map(|c| (c[0], c[1], c[2])).collect();
    let idle = ranks.iter().position(|r| r.0 <= 0);
    let busy = ranks.iter().position(|r| r.0 > 0);
    if let (Uneven::Refuse, Some(idle), Some(busy)) = (uneven, idle, busy) {
        return Err(Error::mismatch(format!(
            "rank {idle} has no data left while rank {busy} still has some; cut the data evenly, or allow it \
             (Uneven::Join)"
        )));
    }
    let most = (0..ranks.len()).max_by_key(|r| ranks[*r].2);
    let fewest = (0..ranks.len()).min_by_key(|r| ranks[*r].2);
    if let (true, Some(_), Some(most), Some(fewest)) = (join, busy, most, fewest)
        && ranks[most].2 != ranks[fewest].2
    {
        return Err(Error::mismatch(format!(
            "rank {fewest} has {} of the step's micro-batches and rank {most} has {}, but batch normalisations join the \
             batches of all ranks; begin it with as many on each, those that are missing of no samples (&[3, 0]), and run \
             the model on these too",
            ranks[fewest].2, ranks[most].2
        )));
    }
    // A peer's counts are limited so that sums do not overflow.
    let sum = |of: fn(&(i64, i64, i64)) -> i64| {
        let total: i128 = ranks.iter().map(|r| i128::from(of(r).max(0))).sum();
        usize::try_from(total).unwrap_or(usize::MAX)
    };
    Ok(GlobalBatch {
        samples: sum(|r| r.0),
        micro_batches: sum(|r| r.1),
        active_ranks: ranks.iter().filter(|r| r.0 > 0).count(),
    })
}

/// Weights of this rank's micro-batches and the factor at the end.
pub(crate) fn weigh(
    average: Average,
    sizes: &[usize],
    global: GlobalBatch,
    world: usize,
) -> (Vec<f32>, f32) {
    let per_rank = |ranks: usize| {
        let own = sizes.iter().filter(|n| **n > 0).count().max(1);
        let weights = sizes
            .iter()
            .map(|n| if *n > 0 { 1.0 / own as f32 } else { 0.0 })
            .collect();
        (weights, (world as f64 / ranks.max(1) as f64) as f32)
    };
    match average {
        Average::Samples => {
            let (n, m) = (global.samples.max(1), global.micro_batches.max(1));
            let weights = sizes
                .iter()
                .map(|&size| (size as f64 * m as f64 / n as f64) as f32)
                .collect();
            (weights, (world as f64 / m as f64) as f32)
        }
        Average::Ranks => per_rank(world),
        Average::ActiveRanks => per_rank(global.active_ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_micro_batches_weigh_one_and_are_scaled_once() {
        for (world, each) in [(1, 3), (3, 1), (2, 4), (8, 1), (5, 7)] {
            let m = world * each;
            let global = GlobalBatch {
                samples: 64 * m,
                micro_batches: m,
                active_ranks: world,
            };
            let (weights, scale) = weigh(Average::Samples, &vec![64; each], global, world);
            assert_eq!(weights, vec![1.0; each]);
            assert_eq!(scale, world as f32 / m as f32);
        }
    }

    #[test]
    fn weights_are_shares_of_the_samples() {
        let global = GlobalBatch {
            samples: 10,
            micro_batches: 3,
            active_ranks: 2,
        };
        let (weights, scale) = weigh(Average::Samples, &[7, 1, 0], global, 4);
        let share = |w: f32| f64::from(w) * f64::from(scale) / 4.0;
        assert!((share(weights[0]) - 0.7).abs() < 1e-7);
        assert!((share(weights[1]) - 0.1).abs() < 1e-7);
        assert_eq!(weights[2], 0.0);
        let (weights, scale) = weigh(Average::Ranks, &[7, 1, 0], global, 4);
        assert_eq!((weights, scale), (vec![0.5, 0.5, 0.0], 1.0));
        let (weights, scale) = weigh(Average::ActiveRanks, &[7, 1], global, 4);
        assert_eq!((weights, scale), (vec![0.5, 0.5], 2.0));
    }
}
