//! Gradient sinks: a local set of gradients, or memory that another crate supplies.

use super::params::{ParamId, ParamInfo, Params};
use phalanx_kernels::aligned::AlignedBuf;

/// Receives gradients, in memory that it supplies.
///
/// *Order*: `ready` (or `ready_finite`) is called exactly once per parameter per backward pass, in
/// true backward order, the moment that gradient is final; parameters that the loss does not depend
/// on come first, filled with zeros.
///
/// An implementation must not touch tensors of the step that is running
/// backward: that panics.
pub trait GradSink {
    /// Memory for this parameter's gradient, as long as the parameter (another
    /// length ends the pass with an error). Called once per write: the first use of a
    /// pass overwrites the memory, later uses add to it.
    fn slot(&mut self, param: ParamId) -> &mut [f32];

    /// The gradient of `param` is final and will not be touched again.
    ///
    /// # Errors
    /// Any error stops the training step; backward returns it at once.
    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()>;

    /// As [`ready`](Self::ready); the layer has checked that the squares of the gradient's values are
    /// finite, so that its sum over any number of ranks is too. A sink need not check it again.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    fn ready_finite(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.ready(param)
    }

    /// The loss does not depend on `param`. By default a sink gets a gradient of zeros (or,
    /// accumulating, one that adds nothing). A sink that writes into another one's memory must
    /// forward this call to it.
    ///
    /// # Errors
    /// As [`ready`](Self::ready).
    fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        if !self.accumulates() {
            self.slot(param).fill(0.0);
        }
        self.ready(param)
    }

    /// Whether the first write of this pass should add to what the slot holds
    /// (a later micro-step of an accumulated gradient) instead of overwriting it.
    fn accumulates(&self) -> bool {
        false
    }
}

/// Finished gradients, for an optimizer to read.
pub trait GradView {
    /// The gradient of one parameter, in the parameter's own memory order;
    /// empty when there is none.
    fn grad(&self, param: ParamId) -> &[f32];

    /// Whether no backward pass used this parameter, so that an optimizer must not change it
    /// or its state (PyTorch: `grad is None`).
    fn untouched(&self, _param: ParamId) -> bool {
        false
    }

    /// Whether the gradient is local to this rank, while others are the same on all ranks. Such a
    /// parameter does not count in the [norm](crate::optim::grad_norm), which would otherwise differ
    /// between ranks, and its gradient is not [scaled](crate::optim::Optimizer::step_scaled).
    fn is_local(&self, _param: ParamId) -> bool {
        false
    }
}

/// Gradients of all parameters in one flat region laid out like the parameters'.
///
/// A parameter [has a gradient](GradView::untouched) if a backward pass that counts used it: the last one, or when
/// [accumulating](Self::set_accumulate) any since [`zero`](Self::zero). A gradient of zeros counts too. Optimizers
/// skip parameters without a gradient.
#[derive(Clone)]
pub struct Grads {
    values: AlignedBuf,
    infos: Vec<ParamInfo>,
    /// Whether each parameter has a gradient.
    present: Vec<bool>,
    accumulate: bool,
}

impl Grads {
    /// Zeros, laid out like `params`; no parameter has a gradient yet.
    pub fn like(params: &Params) -> Self {
        Grads {
            values: AlignedBuf::zeroed(params.flat().len()),
            infos: params.infos().to_vec(),
            present: vec![false; params.len()],
            accumulate: false,
        }
    }

    /// The whole region, gaps (zeros) included.
    pub fn flat(&self) -> &[f32] {
        &self.values
    }

    /// The whole region for writing; gaps must stay zero. Every parameter has a gradient afterwards.
    pub fn flat_mut(&mut self) -> &mut [f32] {
        self.present.fill(true);
        &mut self.values
    }

    /// Sets every gradient to zero; no parameter has one afterwards (PyTorch's `zero_grad`).
    /// Needed only before accumulating: a plain backward pass overwrites.
    pub fn zero(&mut self) {
        self.values.fill(0.0);
        self.present.fill(false);
    }

    /// Whether following backward passes add to the gradients (micro-steps)
    /// instead of overwriting them.
    pub fn set_accumulate(&mut self, on: bool) {
        self.accumulate = on;
    }

    /// A copy of one gradient in PyTorch's row-major order.
    ///
    /// # Panics
    /// If `param` belongs to another, larger model.
    pub fn export(&self, param: ParamId) -> Vec<f32> {
        let info = &self.infos[param.index()];
        let values = self.grad(param);
        let mut out = vec![0.0; info.len];
        info.layout.export(&info.shape, values, &mut out);
        out
    }
}

impl GradSink for Grads {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        match self.infos.get(param.index()) {
            Some(i) => {
                self.present[param.index()] = true;
                &mut self.values[i.range()]
            }
            None => &mut [], // of another model
        }
    }

    fn ready(&mut self, _: ParamId) -> phalanx_base::Result<()> {
        Ok(())
    }

    fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        if !self.accumulate {
            self.slot(param).fill(0.0);
            if let Some(present) = self.present.get_mut(param.index()) {
                *present = false;
            }
        }
        Ok(())
    }

    fn accumulates(&self) -> bool {
        self.accumulate
    }
}

impl GradView for Grads {
    fn grad(&self, param: ParamId) -> &[f32] {
        match self.infos.get(param.index()) {
            Some(i) => &self.values[i.range()],
            None => &[], // of another model
        }
    }

    fn untouched(&self, param: ParamId) -> bool {
        self.present.get(param.index()) == Some(&false)
    }
}

impl std::fmt::Debug for Grads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grads")
            .field("parameters", &self.infos.len())
            .finish()
    }
}
