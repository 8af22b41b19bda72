//! Layer normalisation.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Value};

/// Normalises over the last dimensions, with PyTorch's `weight` (ones) and `bias` (zeros).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// The factor of every element.
    pub weight: ParamId,
    /// The offset of every element.
    pub bias: ParamId,
    shape: Vec<usize>,
    eps: f64,
}

impl LayerNorm {
    /// Over the last dimensions, whose sizes are `shape`; eps 1e-5.
    pub fn new(scope: Scope, shape: &[usize]) -> Self {
        let mut scope = scope;
        LayerNorm {
            weight: scope.param("weight", shape, Layout::Same, Init::Constant(1.0)),
            bias: scope.param("bias", shape, Layout::Same, Init::Constant(0.0)),
            shape: shape.to_vec(),
            eps: 1e-5,
        }
    }

    /// Sets eps, which is added to the variance.
    #[must_use]
    pub fn eps(self, eps: f64) -> Self {
        LayerNorm { eps, ..self }
    }

    /// # Errors
    /// `Usage` when the last sizes differ.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.layer_norm(&self.shape, (Some(self.weight), Some(self.bias)), self.eps)
    }
}
