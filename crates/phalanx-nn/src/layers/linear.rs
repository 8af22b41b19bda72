//! A fully connected layer.

use super::{Act, weight_and_bias};
use crate::param::{Layout, Lora, ParamId, Scope};
use crate::{Result, Value};

/// `y = x Wᵀ + b` with PyTorch's `weight` of shape `[out, in]` and its initial values, and what its adapter adds if
/// [LoRA](Scope::lora) is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
    pub(super) lora: Option<Lora>,
}

impl Linear {
    /// With bias.
    pub fn new(scope: Scope, inputs: usize, outputs: usize) -> Self {
        Self::with(scope, [inputs, outputs], (true, false), Layout::Same)
    }

    /// Without bias.
    pub fn without_bias(scope: Scope, inputs: usize, outputs: usize) -> Self {
        Self::with(scope, [inputs, outputs], (false, false), Layout::Same)
    }

    /// With bias, and a `weight` of shape `[in, out]`, as the layers of Hugging Face's GPT-2 (`Conv1D`) have it.
    pub fn transposed(scope: Scope, inputs: usize, outputs: usize) -> Self {
        Self::with(scope, [inputs, outputs], (true, false), Layout::Transposed)
    }

    /// `adapted`: it has an adapter also where its name is not among those of the adapters.
    pub(super) fn with(
        mut scope: Scope,
        [inputs, outputs]: [usize; 2],
        (bias, adapted): (bool, bool),
        layout: Layout,
    ) -> Self {
        let shape = match layout {
            Layout::Transposed => [inputs, outputs],
            _ => [outputs, inputs],
        };
        let bias = bias.then_some(outputs);
        let (weight, bias) = weight_and_bias(&mut scope, (&shape[..], layout), inputs, bias);
        let lora = scope.adapter(inputs, outputs, adapted);
        Linear { weight, bias, lora }
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
        let Some(lora) = self.lora else {
            return x.linear(self.weight, self.bias, act);
        };
        let y = x.share().linear(self.weight, self.bias, Act::None)?;
        let x = match lora.dropout > 0.0 {
            true => x.dropout(lora.dropout)?,
            false => x,
        };
        let x = x.linear(lora.a, None, Act::None)?;
        let y = y.add(x.linear(lora.b, None, Act::None)?.scale(lora.scale)?)?;
        match act {
            Act::None => Ok(y),
            Act::Relu => y.relu(),
            Act::Relu6 => y.relu6(),
        }
    }
}
