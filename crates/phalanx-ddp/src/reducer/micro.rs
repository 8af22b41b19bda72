//! The micro-batches of a step, and their weights.

use super::Reducer;
use super::memory::Memory;
use crate::average::{self, Average, GlobalBatch};
use crate::error::{Error, Result};

/// How the gradient of one step is computed.
pub(super) struct Micro {
    /// Factor of each micro-batch's gradient; 0 drops it.
    pub(super) weights: Vec<f32>,
    /// Factor of the mean over ranks.
    pub(super) scale: f32,
    /// The running micro-batch.
    pub(super) index: usize,
}

impl Micro {
    pub(super) fn single() -> Micro {
        Micro {
            weights: vec![1.0],
            scale: 1.0,
            index: 0,
        }
    }

    pub(super) fn is_last(&self) -> bool {
        self.index + 1 >= self.weights.len()
    }
}

impl Reducer {
    /// Declares the next step: one micro-batch for each of `weights`, whose
    /// gradients are multiplied by them and added in order; the mean of that
    /// over the ranks is multiplied by `scale`. A weight of 0 drops the
    /// gradient; no weight at all means that this rank has no data, and takes
    /// part with zeros. Without this call a step is one micro-batch of weight
    /// 1. `scale` must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// `Usage` when the backward of a step has begun already.
    pub fn plan_step(&mut self, weights: &[f32], scale: f32) -> Result<()> {
        self.check_usable()?;
        if self.in_backward {
            return Err(Error::usage(
                "micro-batches must be declared before the first backward of a step; this one has begun",
            ));
        }
        if weights.len() > 1 {
            let elems = self.params.iter().map(|p| p.len).sum();
            self.scratch.resize(elems, 0.0);
        }
        self.micro = Micro {
            weights: weights.to_vec(),
            scale,
            index: 0,
        };
        Ok(())
    }

    /// Starts the next micro-batch of the step.
    ///
    /// # Errors
    ///
    /// `Usage` when there is none, or naming the parameters for which the previous one
    /// gave no gradient.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.check_usable()?;
        if self.micro.is_last() {
            return Err(Error::usage(format!(
                "the step was declared with {} micro-batches and all of them have run",
                self.micro.weights.len()
            )));
        }
        if self.order.len() < self.params.len() {
            return Err(self.fail(self.no_gradient_error()));
        }
        self.micro.index += 1;
        self.ready.fill(false);
        self.order.clear();
        Ok(())
    }

    /// Declares the next step, in which this rank has micro-batches of `sizes` samples, and all ranks have `global`; without
    /// samples on any rank it has no gradients. Gives the weights of the micro-batches.
    ///
    /// # Errors
    ///
    /// `Usage` when the backward of a step has begun.
    pub(crate) fn plan_sizes(
        &mut self,
        average: Average,
        sizes: &[usize],
        global: GlobalBatch,
    ) -> Result<Vec<f32>> {
        if global.samples == 0 {
            // No gradient of the step before may be applied again.
            self.plan_step(&[1.0], 1.0)?;
            self.committed = false;
            self.veto_next = false;
            return Ok(Vec::new());
        }
        let (weights, scale) = average::weigh(average, sizes, global, self.group.world_size());
        self.plan_step(&weights, scale)?;
        Ok(weights)
    }

    pub(super) fn weigh_and_add(&mut self, param: usize, mut finite: bool) {
        let (bucket, range) = self.plan.place(param);
        let weight = self.micro.weights.get(self.micro.index).copied();
        let Memory::Filling(memory) = &mut self.memory[bucket] else {
            return;
        };
        let at = self.scratch_at[param];
        let scratch = at..at + range.len();
        let sum = &mut memory[range];
        let later = self.micro.index > 0;
        let new = if later {
            &mut self.scratch[scratch.clone()]
        } else {
            &mut *sum
        };
        match weight {
            // No sample, so no gradient, even if the mean over no samples is NaN.
            Some(0.0) => new.fill(0.0),
            Some(weight) if weight != 1.0 => {
                new.iter_mut().for_each(|g| *g *= weight);
                finite = false; // no longer known
            }
            _ => {}
        }
        if later {
            let new = &self.scratch[scratch];
            sum.iter_mut().zip(new).for_each(|(s, g)| *s += *g);
            finite = false;
        }
        // Checks the sum, since that of finite numbers may not be finite; a number that is not
        // finite stays so in the sum.
        if !finite && !self.options.unchecked {
            let largest = phalanx_comm::largest(sum);
            let world = self.group.world_size() as f64;
            if !largest.is_finite() {
                self.ballot.not_finite(param);
            } else if self.micro.is_last() && f64::from(largest) * world > 0.5 * f64::from(f32::MAX)
            {
                self.ballot.large();
            }
        }
    }
}
