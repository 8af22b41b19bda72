//! A two-dimensional convolution.

use super::{Act, Conv2dOptions, weight_and_bias};
use crate::param::{Layout, ParamId, Scope};
use crate::{Result, Value};

/// A convolution over images (N, H, W, C) with PyTorch's `weight` of shape
/// `[out, in / groups, kh, kw]` and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
    options: Conv2dOptions,
}

impl Conv2d {
    /// `options`: a kernel size, or [`Conv2dOptions`].
    pub fn new(
        scope: Scope,
        inputs: usize,
        outputs: usize,
        options: impl Into<Conv2dOptions>,
    ) -> Self {
        let (mut scope, options) = (scope, options.into());
        let [kh, kw] = options.kernel;
        // No groups at all is reported by the first forward pass.
        let group_in = inputs / options.groups.max(1);
        let weight = (&[outputs, group_in, kh, kw][..], Layout::Conv);
        let bias = options.bias.then_some(outputs);
        let (weight, bias) = weight_and_bias(&mut scope, weight, group_in * kh * kw, bias);
        Conv2d {
            weight,
            bias,
            options,
        }
    }

    /// Images (N, H, W, C) to images.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        self.forward_act(x, Act::None)
    }

    /// The layer followed by `act`, fused.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_act<'s, V: Value<'s>>(&self, x: V, act: Act) -> Result<V> {
        x.conv2d(self.weight, self.bias, self.options, act)
    }
}
