//! The steps of one epoch on one rank.

use super::Cursor;

/// The samples of one step on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Samples of this rank, in order; may be empty in the exact order.
    pub indices: Vec<u64>,
    /// Number of samples of this step over all ranks, the divisor of a mean.
    pub global_len: usize,
}

/// The steps of one epoch, or of the rest of it, on one rank.
///
/// Stores the rank's samples once; steps are slices of them.
#[derive(Clone, Debug)]
pub struct EpochPlan {
    pub(super) epoch: u64,
    /// All samples of this rank in this plan, step after step.
    pub(super) indices: Vec<u64>,
    /// End of each step in `indices`, and its length over all ranks.
    pub(super) steps: Vec<StepEnd>,
    /// Number of samples of the epoch before this plan.
    pub(super) done: u64,
    /// Number of micro-batches in one optimizer step; each step above is one of them.
    pub(super) parts: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct StepEnd {
    pub(super) end: usize,
    pub(super) global_len: usize,
}

impl EpochPlan {
    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Number of steps, equal on all ranks.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there are no steps.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Number of samples of this rank in all steps.
    pub fn samples(&self) -> usize {
        self.indices.len()
    }

    /// Step `index` of this plan.
    pub fn step(&self, index: usize) -> Option<StepPlan> {
        let (indices, global_len) = self.slice(index)?;
        Some(StepPlan {
            indices: indices.to_vec(),
            global_len,
        })
    }

    /// Samples of this rank in step `index`, and the step's length over all ranks.
    pub fn slice(&self, index: usize) -> Option<(&[u64], usize)> {
        let StepEnd { end, global_len } = *self.steps.get(index)?;
        let start = index.checked_sub(1).map_or(0, |i| self.steps[i].end);
        Some((&self.indices[start..end], global_len))
    }

    /// All steps in order.
    pub fn iter(&self) -> impl Iterator<Item = StepPlan> + '_ {
        (0..self.len()).map_while(|i| self.step(i))
    }

    /// Combines the plans of several parts of a rank's batches: for each step, the
    /// micro-batches of all parts. `global_len` is that of the optimizer step. All plans
    /// must be of the same epoch and division.
    pub fn interleave(plans: &[EpochPlan]) -> EpochPlan {
        let mut all = EpochPlan {
            epoch: plans.first().map_or(0, |p| p.epoch),
            indices: Vec::with_capacity(plans.iter().map(|p| p.indices.len()).sum()),
            steps: Vec::new(),
            done: plans.first().map_or(0, |p| p.done),
            parts: plans.len().max(1),
        };
        for index in 0..plans.iter().map(EpochPlan::len).max().unwrap_or(0) {
            for (indices, global_len) in plans.iter().filter_map(|p| p.slice(index)) {
                all.indices.extend_from_slice(indices);
                all.steps.push(StepEnd {
                    end: all.indices.len(),
                    global_len,
                });
            }
        }
        all
    }

    /// Number of micro-batches in one optimizer step: 1 unless
    /// [interleaved](Self::interleave).
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// The cursor after optimizer step `index`, before which it is `cursor`; after the last, the start of the next epoch.
    pub fn cursor_after_step(&self, cursor: Cursor, index: usize) -> Cursor {
        match self.steps.get(index * self.parts) {
            Some(step) if (index + 1) * self.parts < self.len() => Cursor {
                epoch: self.epoch,
                samples: cursor.samples + step.global_len as u64,
            },
            _ => Cursor {
                epoch: self.epoch + 1,
                samples: 0,
            },
        }
    }

    /// The cursor after `steps` steps of this plan; at its end, the start of the next
    /// epoch.
    pub fn cursor_after(&self, steps: usize) -> Cursor {
        if steps >= self.len() {
            return Cursor {
                epoch: self.epoch + 1,
                samples: 0,
            };
        }
        let steps = self.steps[..steps].iter().step_by(self.parts);
        let taken: usize = steps.map(|s| s.global_len).sum();
        Cursor {
            epoch: self.epoch,
            samples: self.done + taken as u64,
        }
    }
}
