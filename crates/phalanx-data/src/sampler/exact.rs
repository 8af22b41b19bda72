//! The exact order: each sample once, for any number of ranks.

use super::SamplerConfig;
use super::plan::{EpochPlan, StepEnd};

/// Divides the permutation from `done` on into global batches, of which this rank gets
/// every `world`-th element.
pub(super) fn plan(
    config: &SamplerConfig,
    epoch: u64,
    permutation: Vec<u64>,
    global_batch: usize,
    drop_last: bool,
    done: usize,
) -> EpochPlan {
    let rest = &permutation[done..];
    let mut indices = Vec::with_capacity(rest.len() / config.world + 1);
    let mut steps = Vec::with_capacity(rest.len().div_ceil(global_batch));
    let is_taken = |batch: &&[u64]| !drop_last || batch.len() == global_batch;
    for batch in rest.chunks(global_batch).filter(is_taken) {
        indices.extend(batch.iter().skip(config.rank).step_by(config.world));
        steps.push(StepEnd {
            end: indices.len(),
            global_len: batch.len(),
        });
    }
    EpochPlan {
        epoch,
        indices,
        steps,
        done: done as u64,
        parts: 1,
    }
}
