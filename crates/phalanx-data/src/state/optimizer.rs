//! An optimizer's state as a checkpoint has it.

use std::borrow::Cow;

use phalanx_nn::optim::Optimizer;

/// Counts and buffers, the latter laid out like [`Params::flat`](phalanx_nn::Params::flat): an
/// optimizer's own, or what the ranks have gathered of one that is cut over them.
#[derive(Debug, Clone)]
pub struct OptimizerState<'a> {
    /// Steps taken.
    pub steps: u64,
    /// Steps that updated each parameter.
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
