//! A one-dimensional convolution.

use super::{Act, Conv2dOptions, weight_and_bias};
use crate::param::{Layout, ParamId, Scope};
use crate::{Result, Value};

/// A convolution over sequences (N, L, C) with PyTorch's `weight` of shape
/// `[out, in / groups, k]` and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct Conv1d {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
    options: Conv2dOptions,
}

impl Conv1d {
    /// `options`: a kernel size, or [`Conv2dOptions`], of which the second dimension is used.
    pub fn new(
        scope: Scope,
        inputs: usize,
        outputs: usize,
        options: impl Into<Conv2dOptions>,
    ) -> Self {
        let (mut scope, options) = (scope, options.into());
        let (group_in, k) = (inputs / options.groups.max(1), options.kernel[1]);
        let weight = (&[outputs, group_in, k][..], Layout::Conv1d);
        let bias = options.bias.then_some(outputs);
        let (weight, bias) = weight_and_bias(&mut scope, weight, group_in * k, bias);
        Conv1d {
            weight,
            bias,
            options,
        }
    }

    /// Sequences (N, L, C) to sequences.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.conv1d(self.weight, self.bias, self.options, Act::None)
    }
}
