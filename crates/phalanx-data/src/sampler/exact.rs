//! The exact order: each sample once, for any number of ranks.

use super::SamplerConfig;
use super::plan::{EpochPlan, StepEnd};

/// Divides the permutation from `done` on into global batches, of which this rank gets
/// every `world`-th element.
pub(super) fn plan(
    config: &SamplerConfig,
    epoch: u64,
    permutation: impl Iterator<Item = u64>,
    global_batch: usize,
    drop_last: bool,
    done: usize,
) -> EpochPlan {
    let (world, rank) = (config.world, config.rank);
    let mut rest = config.samples - done;
    if drop_last {
        rest -= rest % global_batch;
    }
    let mut indices = Vec::with_capacity(rest / world + 1);
    let mut place = 0;
    for index in permutation.skip(done).take(rest) {
        if place % world == rank {
            indices.push(index);
        }
        place = (place + 1) % global_batch;
    }
    let mut end = 0;
    let steps = (0..rest).step_by(global_batch).map(|first| {
        let global_len = global_batch.min(rest - first);
        end += global_len.saturating_sub(rank).div_ceil(world);
        StepEnd { end, global_len }
    });
    EpochPlan {
        epoch,
        steps: steps.collect(),
        indices,
        done: done as u64,
        parts: 1,
    }
}
