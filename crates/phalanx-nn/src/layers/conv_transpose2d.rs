//! A transposed two-dimensional convolution.

use super::{Conv2dOptions, weight_and_bias};
use crate::param::{Layout, ParamId, Scope};
use crate::{Result, Value};

/// A transposed convolution over images (N, H, W, C) with PyTorch's `weight` of
/// shape `[in, out / groups, kh, kw]` and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct ConvTranspose2d {
    /// The weight.
    pub weight: ParamId,
    /// The bias, if there is one.
    pub bias: Option<ParamId>,
    options: Conv2dOptions,
    extra: [usize; 2],
}

impl ConvTranspose2d {
    /// `options`: a kernel size, or [`Conv2dOptions`].
    pub fn new(
        scope: Scope,
        inputs: usize,
        outputs: usize,
        options: impl Into<Conv2dOptions>,
    ) -> Self {
        let (mut scope, options) = (scope, options.into());
        let [kh, kw] = options.kernel;
        let group_out = outputs / options.groups.max(1);
        let weight = (&[inputs, group_out, kh, kw][..], Layout::Conv);
        let bias = options.bias.then_some(outputs);
        // PyTorch treats the second dimension as the inputs here too.
        let (weight, bias) = weight_and_bias(&mut scope, weight, group_out * kh * kw, bias);
        ConvTranspose2d {
            weight,
            bias,
            options,
            extra: [0, 0],
        }
    }

    /// Adds rows and columns to the end of the output (PyTorch's `output_padding`).
    #[must_use]
    pub fn output_padding(mut self, height: usize, width: usize) -> Self {
        self.extra = [height, width];
        self
    }

    /// Images (N, H, W, C) to images.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.conv_transpose2d(self.weight, self.bias, self.options, self.extra)
    }
}
