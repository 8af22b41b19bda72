//! Gradients of one replica or shard that other code adds up.

use phalanx_nn::{GradSink, GradView, Grads, ParamId, Params};

use crate::error::{Error, Result};

/// Gradients in memory of their own, and which parameters have any. Those of
/// parameters that the loss does not depend on are zeros.
pub(crate) struct OwnGrads {
    grads: Grads,
    used: Vec<bool>,
}

impl OwnGrads {
    pub(crate) fn like(params: &Params) -> OwnGrads {
        OwnGrads {
            grads: Grads::like(params),
            used: vec![false; params.len()],
        }
    }

    /// A new backward begins.
    pub(crate) fn begin(&mut self) {
        self.used.fill(false);
    }

    /// All gradients, laid out like the parameters.
    pub(crate) fn flat(&self) -> &[f32] {
        self.grads.flat()
    }

    /// Whether each parameter has a gradient.
    pub(crate) fn used(&self) -> &[bool] {
        &self.used
    }

    /// Hands the gradients on, the last parameter's first.
    pub(crate) fn give(&self, params: &Params, to: &mut dyn GradSink) -> Result<()> {
        for param in params.ids().rev() {
            let done = if self.used[param.index()] {
                let values = self.grads.grad(param);
                let slot = to.slot(param);
                if slot.len() == values.len() {
                    slot.copy_from_slice(values);
                }
                to.ready(param)
            } else {
                to.unused(param)
            };
            done.map_err(|e| Error::usage(e.to_string()))?;
        }
        Ok(())
    }
}

impl GradSink for OwnGrads {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        self.grads.slot(param)
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        if let Some(used) = self.used.get_mut(param.index()) {
            *used = true;
        }
        self.grads.ready(param)
    }

    fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.grads.slot(param).fill(0.0);
        self.grads.ready(param)
    }
}
