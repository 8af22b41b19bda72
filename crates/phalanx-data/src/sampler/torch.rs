//! PyTorch's order: `DistributedSampler` feeding a `DataLoader`.

use super::SamplerConfig;
use super::plan::{EpochPlan, StepEnd};

/// How PyTorch's loader divides a rank's samples into batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchBatches {
    /// Samples of one rank in one step (`DataLoader(batch_size=…)`).
    pub batch_size: usize,
    /// `DistributedSampler(drop_last=…)`: drop the tail of the data set
    /// instead of padding it to a multiple of the world size.
    pub drop_samples: bool,
    /// `DataLoader(drop_last=…)`: drop a rank's short last batch.
    pub drop_batch: bool,
}

/// Number of samples that `DistributedSampler` gives to each rank.
pub(super) fn samples_per_rank(config: &SamplerConfig, drop_samples: bool) -> usize {
    let SamplerConfig { samples, world, .. } = *config;
    if drop_samples && !samples.is_multiple_of(world) {
        // Not samples / world: PyTorch's formula, which is 0 for samples < world.
        samples.saturating_sub(world).div_ceil(world)
    } else {
        samples.div_ceil(world)
    }
}

/// Number of samples of a rank that are in a batch.
pub(super) fn kept(per_rank: usize, batches: TorchBatches) -> usize {
    if batches.drop_batch {
        per_rank - per_rank % batches.batch_size
    } else {
        per_rank
    }
}

/// The plan of the rank's samples from number `skip` on.
pub(super) fn plan(
    config: &SamplerConfig,
    epoch: u64,
    permutation: impl Iterator<Item = u64>,
    batches: TorchBatches,
    skip: usize,
) -> EpochPlan {
    let SamplerConfig { world, rank, .. } = *config;
    let permutation: Vec<u64> = permutation.collect();
    let n = permutation.len();
    let total = kept(samples_per_rank(config, batches.drop_samples), batches);
    // Padding repeats the permutation from its start, cyclically. With drop,
    // or an empty set, no position reaches n.
    let indices: Vec<u64> = (skip..total)
        .map(|i| permutation[(i * world + rank) % n])
        .collect();
    let mut steps = Vec::with_capacity(indices.len().div_ceil(batches.batch_size));
    let mut end = 0;
    while end < indices.len() {
        let len = batches.batch_size.min(indices.len() - end);
        end += len;
        steps.push(StepEnd {
            end,
            global_len: len * world,
        });
    }
    EpochPlan {
        epoch,
        indices,
        steps,
        done: (skip * world) as u64,
        parts: 1,
    }
}
