//! Synchronised batch normalisation: statistics of the batch of all ranks.
//!
//! In forward, all ranks gather the count, mean and sum of squared deviations of every
//! channel and combine them in rank order, with the spread of the means (Chan, Golub
//! and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
//! variances", 1979). In backward, two sums per channel are added over the ranks. All
//! in float64, the same bits on all ranks.

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::layers::JoinStatistics;

use crate::error::Error;

/// Joins the batches of the ranks of one group in every batch normalisation
/// of a model. Pass it to [`Tape::join_statistics`](phalanx_nn::Tape::join_statistics), or call
/// [`DistributedDataParallel::sync_batch_norm`](crate::DistributedDataParallel::sync_batch_norm),
/// which does everything.
///
/// Batches may differ in size. A rank without data must still run the model,
/// on a batch of no samples, since every rank takes part in every
/// normalisation of a training step; evaluation does not communicate.
pub struct SyncBatchNorm {
    group: ProcessGroup,
}

impl SyncBatchNorm {
    /// Over the ranks of `group`. If gradients are averaged in the same group,
    /// normalisations wait for the buckets launched before them; in a separate group
    /// ([`ProcessGroup::new_group`]) they do not.
    pub fn new(group: ProcessGroup) -> SyncBatchNorm {
        SyncBatchNorm { group }
    }
}

impl JoinStatistics for SyncBatchNorm {
    fn join(&self, rows: f64, mean: &mut [f64], squares: &mut [f64]) -> phalanx_base::Result<f64> {
        if self.group.world_size() == 1 {
            return Ok(rows);
        }
        let mut mine = vec![rows];
        mine.extend_from_slice(mean);
        mine.extend_from_slice(squares);
        let mut all = vec![0.0; mine.len() * self.group.world_size()];
        self.group
            .all_gather(&mine, &mut all)
            .map_err(|e| Error::comm_while("batch statistics of all ranks are needed", e))?;
        Ok(combine(&all, mean, squares))
    }

    fn sum(&self, sums: &mut [f64]) -> phalanx_base::Result<()> {
        if self.group.world_size() > 1 {
            self.group.all_reduce(sums, ReduceOp::Sum).map_err(|e| {
                Error::comm_while("sums of batch norm over all ranks are needed", e)
            })?;
        }
        Ok(())
    }
}

/// Combines `all`, which has for each rank its count, means and sums of
/// squared deviations, in that order; returns the joined count.
fn combine(all: &[f64], mean: &mut [f64], squares: &mut [f64]) -> f64 {
    let c = mean.len();
    let ranks = || all.chunks_exact(1 + 2 * c).filter(|r| r[0] > 0.0);
    let rows: f64 = ranks().map(|r| r[0]).sum();
    for i in 0..c {
        // Relative to the first rank's mean, so that large offsets cost no digits.
        let origin = ranks().next().map_or(0.0, |r| r[1 + i]);
        let shift: f64 = ranks().map(|r| r[0] * (r[1 + i] - origin)).sum();
        let shift = shift / rows.max(1.0);
        mean[i] = origin + shift;
        squares[i] = ranks()
            .map(|r| {
                let from_mean = r[1 + i] - origin - shift;
                r[1 + c + i] + r[0] * from_mean * from_mean
            })
            .sum();
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against two plain passes over the joined values.
    #[test]
    fn parts_of_any_size_combine_to_the_joined_batch() {
        let value = |i: usize| 1e4 + ((i * 37) % 101) as f64 / 10.0;
        for sizes in [
            vec![3, 5],
            vec![1, 0, 4],
            vec![0, 0, 7, 1],
            vec![2; 8],
            vec![0, 0],
        ] {
            let (mut all, mut from) = (Vec::new(), 0);
            let moments = |values: &[f64]| {
                let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
                let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
                (mean, squares)
            };
            let mut joined = Vec::new();
            for n in &sizes {
                let part: Vec<f64> = (from..from + n).map(value).collect();
                let (mean, squares) = moments(&part);
                all.extend([*n as f64, mean, squares]);
                joined.extend(part);
                from += n;
            }
            let (mut mean, mut squares) = ([0.0], [0.0]);
            let rows = combine(&all, &mut mean, &mut squares);
            let want = moments(&joined);
            assert_eq!(rows, joined.len() as f64);
            assert!((mean[0] - want.0).abs() < 1e-9, "{sizes:?}");
            assert!(
                (squares[0] - want.1).abs() <= 1e-9 * want.1.max(1.0),
                "{sizes:?}"
            );
        }
    }
}
