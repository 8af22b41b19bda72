//! A fully connected layer.

use super::Act;
use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Tensor};

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
        let mut scope = scope;
        let weight = Self::weight(&mut scope, inputs, outputs);
        let init = Init::FanInUniform { fan_in: inputs };
        let bias = Some(scope.param("bias", &[outputs], Layout::Same, init));
        Linear { weight, bias }
    }

    /// Without bias.
    pub fn without_bias(scope: Scope, inputs: usize, outputs: usize) -> Self {
        let mut scope = scope;
        Linear {
            weight: Self::weight(&mut scope, inputs, outputs),
            bias: None,
        }
    }

    fn weight(scope: &mut Scope, inputs: usize, outputs: usize) -> ParamId {
        let init = Init::KaimingUniform { fan_in: inputs };
        scope.param("weight", &[outputs, inputs], Layout::Same, init)
    }

    /// Over the last dimension of `x`.
    ///
    /// # Errors
    /// `Usage` when that is not the number of inputs.
    pub fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        self.forward_act(x, Act::None)
    }

    /// The layer followed by `act`, fused.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_act<'s>(&self, x: Tensor<'s>, act: Act) -> Result<Tensor<'s>> {
        x.linear(self.weight, self.bias, act)
    }
}
