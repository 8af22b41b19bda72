//! Average pooling over fixed or adaptive windows. Saves nothing.

use super::window;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor, refuse};
use phalanx_kernels::avg_pool::{self, AvgShape, Windows};

/// Window, stride and padding of an average pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgPool2dOptions {
    /// Size of the square window.
    pub kernel: usize,
    /// Stride.
    pub stride: usize,
    /// Zeros on each side.
    pub padding: usize,
    /// Whether zeros of the padding count in the divisor (PyTorch: `count_include_pad`).
    pub counted: bool,
    /// Whether windows may reach past the end of the image (PyTorch: `ceil_mode`).
    pub ceil: bool,
}

impl AvgPool2dOptions {
    /// A square window with a stride of its own size; zeros of the padding count.
    pub fn new(kernel: usize) -> Self {
        AvgPool2dOptions {
            kernel,
            stride: kernel,
            padding: 0,
            counted: true,
            ceil: false,
        }
    }

    /// Sets the stride of both directions.
    #[must_use]
    pub fn stride(self, stride: usize) -> Self {
        AvgPool2dOptions { stride, ..self }
    }

    /// Sets the zero padding of both directions.
    #[must_use]
    pub fn padding(self, padding: usize) -> Self {
        AvgPool2dOptions { padding, ..self }
    }

    /// Divides by the number of inputs inside the image only.
    #[must_use]
    pub fn exclude_padding(mut self) -> Self {
        self.counted = false;
        self
    }

    /// Keeps windows that reach past the end of the image.
    #[must_use]
    pub fn ceil_mode(self) -> Self {
        AvgPool2dOptions { ceil: true, ..self }
    }

    /// Outputs along a dimension of `input` inputs; `None` if the window does not fit.
    pub fn out_size(&self, input: usize) -> Option<usize> {
        window_count(input, self.kernel, self.stride, self.padding, 1, self.ceil)
    }
}

/// Number of windows along a dimension, as in PyTorch; `None` when PyTorch refuses.
pub(super) fn window_count(
    input: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
    ceil: bool,
) -> Option<usize> {
    if padding > kernel / 2 || input == 0 || dilation == 0 {
        return None;
    }
    let reach = dilation
        .checked_mul(kernel.checked_sub(1)?)?
        .checked_add(1)?;
    let extra = if ceil { stride.checked_sub(1)? } else { 0 };
    let padded = input.checked_add(2 * padding)?.checked_add(extra)?;
    let out = padded.checked_sub(reach)?.checked_div(stride)? + 1;
    // The last window must begin inside the image or its leading padding.
    let past_the_end = ceil && (out - 1) * stride >= input + padding;
    Some(out - usize::from(past_the_end))
}

/// A square window of this size, with a stride of its own size.
impl From<usize> for AvgPool2dOptions {
    fn from(kernel: usize) -> Self {
        Self::new(kernel)
    }
}

pub(crate) struct AvgPool2d(AvgShape);

impl<'s> Tensor<'s> {
    /// The mean of each window of images (N, H, W, C).
    ///
    /// # Errors
    /// `Usage` when the window does not fit.
    pub fn avg_pool2d(self, options: impl Into<AvgPool2dOptions>) -> Result<Tensor<'s>> {
        let (o, [images, h, w, channels]) = (options.into(), self.image_dims("avg_pool2d")?);
        let (Some(oh), Some(ow)) = (o.out_size(h), o.out_size(w)) else {
            let others = [("stride", [o.stride; 2]), ("padding", [o.padding; 2])];
            let window = window("window", [o.kernel; 2], &others);
            refuse!("avg_pool2d: {window} does not fit images of {h} x {w}");
        };
        let windows = Windows::Fixed {
            kernel: o.kernel,
            stride: o.stride,
            padding: o.padding,
            counted: o.counted,
        };
        self.averages(AvgShape {
            images,
            channels,
            input: [h, w],
            output: [oh, ow],
            windows: [windows; 2],
        })
    }

    /// Means of windows chosen so that the output is `height` x `width`.
    ///
    /// # Errors
    /// `Usage` when a size is 0, or the operand is not an image.
    pub fn adaptive_avg_pool2d(self, height: usize, width: usize) -> Result<Tensor<'s>> {
        let [images, h, w, channels] = self.image_dims("adaptive_avg_pool2d")?;
        if [height, width, h, w].contains(&0) {
            refuse!("adaptive_avg_pool2d: cannot make {height} x {width} of {h} x {w}");
        }
        self.averages(AvgShape {
            images,
            channels,
            input: [h, w],
            output: [height, width],
            windows: [Windows::Adaptive; 2],
        })
    }

    /// The mean over all pixels, one row per sample: (N, H, W, C) to (N, C).
    ///
    /// # Errors
    /// `Usage` when the operand is not an image.
    pub fn global_avg_pool(self) -> Result<Tensor<'s>> {
        let [images, .., channels] = self.image_dims("global_avg_pool")?;
        self.adaptive_avg_pool2d(1, 1)?.reshape(&[images, channels])
    }

    pub(super) fn image_dims(&self, what: &str) -> Result<[usize; 4]> {
        <[usize; 4]>::try_from(&*self.dims()).map_err(|_| {
            Error::usage(format!(
                "{what} needs images (N, H, W, C), got shape {:?}",
                self.dims()
            ))
        })
    }

    fn averages(self, s: AvgShape) -> Result<Tensor<'s>> {
        let shape = Shape::new(&[s.images, s.output[0], s.output[1], s.channels])?;
        self.step().apply([self.slot()], shape, AvgPool2d(s))
    }
}

impl Operation for AvgPool2d {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let s = &self.0;
        let numel = s.images * s.output[0] * s.output[1] * s.channels;
        let mut buf = c.state.pool.get(numel);
        avg_pool::forward(c.threads, s, c.state.value(x), buf.slice_mut());
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let threads = ctx.threads;
        ctx.give_made(s.x[0], dy, |dy, dx| {
            avg_pool::backward(threads, &self.0, dy, dx)
        });
        Ok(())
    }
}
