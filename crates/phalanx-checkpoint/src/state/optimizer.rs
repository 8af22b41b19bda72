//! The optimizer's state in a checkpoint.

use std::borrow::Cow;

use phalanx_nn::optim::Optimizer;

/// Counts and buffers of an optimizer, or of a sharded one gathered from all ranks. Buffers
/// have the layout of [`Params::flat`](phalanx_nn::Params::flat).
#[derive(Debug, Clone)]
pub struct OptimizerState<'a> {
    /// Number of steps taken.
    pub steps: u64,
    /// Number of steps that updated each parameter.
    pub updates: Cow<'a, [u64]>,
    /// Buffers by PyTorch's names, in the optimizer's order.
    pub buffers: Vec<(&'static str, Cow<'a, [f32]>)>,
}

impl<'a, O: Optimizer + ?Sized> From<&'a O> for OptimizerState<'a> {
    fn from(optimizer: &'a O) -> OptimizerState<'a> {
        let borrow = |(name, values)| (name, Cow::Borrowed(values));
        OptimizerState {
            steps: optimizer.steps(),
            updates: Cow::Borrowed(optimizer.updates()),
            buffers: optimizer.state().into_iter().map(borrow).collect(),
        }
    }
}
