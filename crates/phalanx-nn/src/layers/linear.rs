//! A fully connected layer.

use super::{Act, weight_and_bias};
use crate::param::{Layout, ParamId, Scope};
use crate::{Result, Value};

/// `y = x Wᵀ + b` with PyTorch's `weight` of shape `[out, in]` and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
}

impl Linear {
    /// With bias.
    pub fn new(scope: Scope, inputs: usize, outputs: usize) -> Self {
        Self::with(scope, inputs, outputs, Some(outputs))
    }

    /// Without bias.
    pub fn without_bias(scope: Scope, inputs: usize, outputs: usize) -> Self {
        Self::with(scope, inputs, outputs, None)
    }

    fn with(mut scope: Scope, inputs: usize, outputs: usize, bias: Option<usize>) -> Self {
        let weight = (&[outputs, inputs][..], Layout::Same);
        let (weight, bias) = weight_and_bias(&mut scope, weight, inputs, bias);
        Linear { weight, bias }
    }

    /// Over the last dimension of `x`.
    ///
    /// # Errors
    /// `Usage` when that is not the number of inputs.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        self.forward_act(x, Act::None)
    }

    /// The layer followed by `act`, fused.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_act<'s, V: Value<'s>>(&self, x: V, act: Act) -> Result<V> {
        x.linear(self.weight, self.bias, act)
    }
}
