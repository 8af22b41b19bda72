//! The losses of an epoch.

use phalanx_comm::ProcessGroup;
use phalanx_ddp::ShardTree;

use crate::error::Result;
use crate::saving::History;
use crate::split::BatchSplit;
use phalanx_member::RankContext;

/// The sums of all ranks, and the samples in them.
pub(super) type Losses = (Vec<f64>, usize);

/// The losses of an epoch, kept by part, so that their sum does not depend on
/// who had which part.
pub(super) struct EpochLoss {
    sums: Vec<f64>,
    /// Whether these are those of all ranks, and not of this one's parts only.
    of_all: bool,
    samples: usize,
    own: f64,
    steps: usize,
}

impl EpochLoss {
    /// None yet, in an epoch whose batches have `parts` parts; each rank is given those `of_all` ranks, or its own.
    pub(super) fn new(parts: usize, of_all: bool) -> EpochLoss {
        EpochLoss {
            sums: vec![0.0; parts],
            of_all,
            samples: 0,
            own: 0.0,
            steps: 0,
        }
    }

    /// Adds a step of `samples` samples over all ranks: what this rank's parts sum
    /// up to, and the mean of its own samples.
    pub(super) fn add(&mut self, sums: &[f64], own: f64, samples: usize) {
        for (total, sum) in self.sums.iter_mut().zip(sums) {
            *total += sum;
        }
        self.samples += samples;
        self.own += own;
        self.steps += 1;
    }

    /// Those of all ranks.
    pub(super) fn gathered(&self, group: &ProcessGroup) -> Result<Losses> {
        let mut sums = self.sums.clone();
        if !self.of_all {
            ShardTree::gather_values(group, &mut sums)?;
        }
        Ok((sums, self.samples))
    }

    /// Those of all ranks, where each rank has them.
    pub(super) fn full(&self) -> Losses {
        (self.sums.clone(), self.samples)
    }

    /// Batches have `parts` parts from now on.
    pub(super) fn divide(&mut self, parts: usize) {
        if parts != self.sums.len() {
            let total = self.sums.iter().sum();
            self.sums = vec![0.0; parts];
            self.sums[0] = total;
        }
    }

    /// Continues from what a checkpoint says. A rank with a part has its sum;
    /// where the parts are others now, rank 0 has them all.
    pub(super) fn resume(&mut self, ctx: &RankContext, split: &BatchSplit, history: &History) {
        let (sums, samples) = history.losses();
        self.samples = samples;
        if self.of_all {
            self.sums = sums;
            self.divide(split.parts());
        } else if split.tree().is_some() && sums.len() == self.sums.len() {
            let mine = split.mine();
            self.sums[mine.clone()].copy_from_slice(&sums[mine]);
        } else if ctx.is_main() {
            self.sums[0] = sums.iter().sum();
        }
    }

    /// Mean of this rank's steps.
    pub(super) fn own(&self) -> f64 {
        self.own / self.steps.max(1) as f64
    }

    /// Mean over the samples of all ranks, the same on all.
    pub(super) fn mean(&mut self, group: &ProcessGroup, split: &BatchSplit) -> Result<f64> {
        if !self.of_all {
            ShardTree::gather_values(group, &mut self.sums)?;
        }
        let total = match split.tree() {
            Some(tree) => tree.sum(&self.sums),
            None => self.sums.iter().sum(),
        };
        Ok(total / self.samples.max(1) as f64)
    }
}
