//! Layer and RMS normalisation.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Value};

/// Normalises over the last dimensions, with PyTorch's `weight` (ones) and `bias` (zeros).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// The factor of every element.
    pub weight: ParamId,
    /// The offset of every element, if there is one.
    pub bias: Option<ParamId>,
    shape: Vec<usize>,
    eps: f64,
}

impl LayerNorm {
    /// Over the last dimensions, whose sizes are `shape`; eps 1e-5.
    pub fn new(scope: Scope, shape: &[usize]) -> Self {
        Self::with(scope, shape, true)
    }

    /// As [`new`](Self::new), without bias.
    pub fn without_bias(scope: Scope, shape: &[usize]) -> Self {
        Self::with(scope, shape, false)
    }

    fn with(mut scope: Scope, shape: &[usize], bias: bool) -> Self {
        let mut param = |name, start| scope.param(name, shape, Layout::Same, Init::Constant(start));
        LayerNorm {
            weight: param("weight", 1.0),
            bias: bias.then(|| param("bias", 0.0)),
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
        x.layer_norm(&self.shape, (Some(self.weight), self.bias), self.eps)
    }
}

/// Divides by the root of the mean square over the last dimension, with PyTorch's `weight` (ones).
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// The factor of every element.
    pub weight: ParamId,
    eps: f64,
}

impl RmsNorm {
    /// Over a last dimension of `width`; eps is f32's distance from 1 to the next number (1.2e-7), as PyTorch's.
    pub fn new(mut scope: Scope, width: usize) -> Self {
        RmsNorm {
            weight: scope.param("weight", &[width], Layout::Same, Init::Constant(1.0)),
            eps: f64::from(f32::EPSILON),
        }
    }

    /// Sets eps, which is added to the mean square.
    #[must_use]
    pub fn eps(self, eps: f64) -> Self {
        RmsNorm { eps, ..self }
    }

    /// # Errors
    /// `Usage` when the last size differs.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.rms_norm(Some(self.weight), self.eps)
    }
}
