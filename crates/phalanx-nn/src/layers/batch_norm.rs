//! Batch normalisation.

use super::{Act, BatchNormOptions, RunningStats};
use crate::param::{Init, Layout, Scope};
use crate::{Result, Value};

/// Normalises every channel of images (N, H, W, C), or every feature of rows
/// (N, C), with PyTorch's `weight`, `bias`, `running_mean`, `running_var` and
/// `num_batches_tracked`.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm {
    options: BatchNormOptions,
}

/// PyTorch's name for the layer over images.
pub type BatchNorm2d = BatchNorm;
/// PyTorch's name for the layer over rows.
pub type BatchNorm1d = BatchNorm;

impl BatchNorm {
    /// PyTorch's defaults: weight 1, bias 0, momentum 0.1, eps 1e-5.
    pub fn new(scope: Scope, channels: usize) -> Self {
        Self::with(scope, channels, true, true)
    }

    /// Without weight (a weight of 1).
    pub fn without_weight(scope: Scope, channels: usize) -> Self {
        Self::with(scope, channels, false, true)
    }

    /// Without weight and bias.
    pub fn without_affine(scope: Scope, channels: usize) -> Self {
        Self::with(scope, channels, false, false)
    }

    fn with(mut scope: Scope, channels: usize, weight: bool, bias: bool) -> Self {
        let shape = [channels];
        let mut param =
            |name, start| scope.param(name, &shape, Layout::Same, Init::Constant(start));
        BatchNorm {
            options: BatchNormOptions {
                weight: weight.then(|| param("weight", 1.0)),
                bias: bias.then(|| param("bias", 0.0)),
                running: Some(RunningStats {
                    mean: scope.buffer("running_mean", &[channels], 0.0),
                    var: scope.buffer("running_var", &[channels], 1.0),
                    batches: scope.buffer("num_batches_tracked", &[], 0.0),
                }),
                momentum: Some(0.1),
                eps: 1e-5,
            },
        }
    }

    /// Sets the share of a new batch in the running statistics; `None` gives
    /// all batches the same weight.
    #[must_use]
    pub fn momentum(mut self, momentum: Option<f64>) -> Self {
        self.options.momentum = momentum;
        self
    }

    /// Sets eps, which is added to the variance.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.options.eps = eps;
        self
    }

    /// Its parameters, buffers and settings.
    pub fn options(&self) -> &BatchNormOptions {
        &self.options
    }

    /// # Errors
    /// As [`Value::batch_norm`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        self.forward_act(x, Act::None)
    }

    /// The layer followed by `act`, fused.
    ///
    /// # Errors
    /// As [`Value::batch_norm`].
    pub fn forward_act<'s, V: Value<'s>>(&self, x: V, act: Act) -> Result<V> {
        x.batch_norm(&self.options, None, act)
    }

    /// `act(norm(x) + residual)`, fused.
    ///
    /// # Errors
    /// As [`Value::batch_norm`].
    pub fn forward_residual<'s, V: Value<'s>>(&self, x: V, residual: V, act: Act) -> Result<V> {
        x.batch_norm(&self.options, Some(residual), act)
    }
}
