//! What travels instead of float32 gradients.
//!
//! A hook averages each bucket over the ranks in its own way. It is called
//! when backward has ended, bucket by bucket in index order, so its
//! communication is not hidden behind backward; the default, without a hook,
//! is. The votes of a step travel apart from it, as they are.

use half::{bf16, f16};
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::Params;

use crate::error::{Error, Result};

/// Averages the gradients of one bucket over the ranks.
pub trait GradientHook: Send {
    /// What messages and fingerprints call it, settings included; must be the
    /// same on all ranks.
    fn name(&self) -> String;

    /// Replaces `gradients` of bucket number `bucket`, this rank's own, by what
    /// the optimizer is to get: on all ranks the same bits, if the ranks' weights are
    /// to stay equal. Gaps between tensors are zeros or finite leftovers.
    ///
    /// # Errors
    ///
    /// `Comm` when a collective failed.
    fn average(&mut self, group: &ProcessGroup, bucket: usize, gradients: &mut [f32])
    -> Result<()>;
}

/// Gradients travel as bfloat16: half the bytes, 8 bits of precision, the
/// range of float32. The mean is folded in rank order and rounded to bfloat16.
#[derive(Debug, Clone, Default)]
pub struct Bf16Gradients {
    wire: Vec<bf16>,
}

impl GradientHook for Bf16Gradients {
    fn name(&self) -> String {
        "bf16".to_owned()
    }

    fn average(&mut self, group: &ProcessGroup, _: usize, gradients: &mut [f32]) -> Result<()> {
        self.wire.clear();
        self.wire
            .extend(gradients.iter().map(|g| bf16::from_f32(*g)));
        group
            .all_reduce(&mut self.wire, ReduceOp::Mean)
            .map_err(|e| Error::comm_while("bfloat16 gradients could not be averaged", e))?;
        let pairs = gradients.iter_mut().zip(&self.wire);
        pairs.for_each(|(g, w)| *g = w.to_f32());
        Ok(())
    }
}

/// Gradients travel as float16: half the bytes, 11 bits of precision. They are
/// divided by the number of ranks first, so that their sum does not overflow
/// where none of them does; one beyond 65,504 votes the step down.
#[derive(Debug, Clone, Default)]
pub struct F16Gradients {
    wire: Vec<f16>,
}

impl GradientHook for F16Gradients {
    fn name(&self) -> String {
        "f16".to_owned()
    }

    fn average(&mut self, group: &ProcessGroup, _: usize, gradients: &mut [f32]) -> Result<()> {
        let share = 1.0 / group.world_size() as f32;
        self.wire.clear();
        self.wire
            .extend(gradients.iter().map(|g| f16::from_f32(*g * share)));
        group
            .all_reduce(&mut self.wire, ReduceOp::Sum)
            .map_err(|e| Error::comm_while("float16 gradients could not be averaged", e))?;
        let pairs = gradients.iter_mut().zip(&self.wire);
        pairs.for_each(|(g, w)| *g = w.to_f32());
        Ok(())
    }
}

/// Gradients stay where they are: for measuring what communication costs, and
/// for [`LocalSgd`]. The ranks' weights drift apart.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalGradients;

impl GradientHook for LocalGradients {
    fn name(&self) -> String {
        "local".to_owned()
    }

    fn average(&mut self, _: &ProcessGroup, _: usize, _: &mut [f32]) -> Result<()> {
        Ok(())
    }
}

/// Averages *weights* every so many steps instead of gradients in each: with
/// [`LocalGradients`], local SGD (Stich, "Local SGD Converges Fast and
/// Communicates Little", 2019).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSgd {
    every: u64,
    steps: u64,
}

impl LocalSgd {
    /// Averages after every `every` steps.
    ///
    /// # Errors
    ///
    /// `Usage` for 0.
    pub fn new(every: u64) -> Result<LocalSgd> {
        if every == 0 {
            return Err(Error::usage(
                "weights cannot be averaged every 0 steps; choose at least 1",
            ));
        }
        Ok(LocalSgd { every, steps: 0 })
    }

    /// Counts a step that the optimizer has taken; whether the parameters were
    /// averaged after it (buffers are left to
    /// [`Buffers`](crate::Buffers)). The mean is folded in rank order.
    ///
    /// *Blocks* until all ranks of the group call it, when it averages.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn after_step(&mut self, group: &ProcessGroup, params: &mut Params) -> Result<bool> {
        self.steps += 1;
        if !self.steps.is_multiple_of(self.every) {
            return Ok(false);
        }
        if group.world_size() > 1 {
            group
                .all_reduce(params.flat_mut(), ReduceOp::Mean)
                .map_err(|e| Error::comm_while("weights could not be averaged", e))?;
        }
        Ok(true)
    }
}
