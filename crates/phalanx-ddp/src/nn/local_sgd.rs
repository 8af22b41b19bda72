//! Weights that are averaged now and then instead of gradients.

use phalanx_nn::Params;

use super::ddp::DistributedDataParallel;
use crate::error::{Error, Result};
#[cfg(doc)]
use crate::hooks::LocalGradients;

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
    /// averaged after it, but for those that `wrapper` [ignores](crate::DdpOptions::ignored)
    /// or has [frozen](crate::DdpOptions::frozen) (buffers are left to
    /// [`Buffers`](crate::Buffers)). The mean is folded in rank order.
    ///
    /// *Blocks* until all ranks of the group call it, when it averages.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn after_step(
        &mut self,
        wrapper: &DistributedDataParallel,
        params: &mut Params,
    ) -> Result<bool> {
        self.steps += 1;
        if !self.steps.is_multiple_of(self.every) {
            return Ok(false);
        }
        if wrapper.group().world_size() > 1 {
            wrapper.average_weights(params)?;
        }
        Ok(true)
    }
}
