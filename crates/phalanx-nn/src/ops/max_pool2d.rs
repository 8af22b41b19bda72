//! Max-pooling. Saves, per output element, the winning window position (one byte).

use super::avg_pool2d::window_count;
use super::window;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Precision, Result, Tensor, refuse};
use phalanx_kernels::element::{Bf16, Element, Values, elements, elements_mut};
use phalanx_kernels::max_pool::{self, PoolShape};

/// Window positions at most: a position is kept in one byte.
const MAX_WINDOW: usize = 256;

/// Window, stride, padding and dilation (height, width each) of a max-pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool2dOptions {
    /// Size of the window.
    pub kernel: [usize; 2],
    /// Stride.
    pub stride: [usize; 2],
    /// Padding on each side, which never wins.
    pub padding: [usize; 2],
    /// Distance between window taps.
    pub dilation: [usize; 2],
    /// Whether windows may reach past the end of the image (PyTorch: `ceil_mode`).
    pub ceil: bool,
}

impl MaxPool2dOptions {
    /// A square window with a stride of its own size.
    pub fn new(kernel: usize) -> Self {
        MaxPool2dOptions {
            kernel: [kernel; 2],
            stride: [kernel; 2],
            padding: [0; 2],
            dilation: [1; 2],
            ceil: false,
        }
    }

    /// Sets the stride of both directions.
    #[must_use]
    pub fn stride(mut self, stride: usize) -> Self {
        self.stride = [stride; 2];
        self
    }

    /// Sets the padding (which never wins) of both directions.
    #[must_use]
    pub fn padding(mut self, padding: usize) -> Self {
        self.padding = [padding; 2];
        self
    }

    /// Sets the distance between window taps of both directions.
    #[must_use]
    pub fn dilation(mut self, dilation: usize) -> Self {
        self.dilation = [dilation; 2];
        self
    }

    /// Keeps windows that reach past the end of the image.
    #[must_use]
    pub fn ceil_mode(self) -> Self {
        MaxPool2dOptions { ceil: true, ..self }
    }

    /// Outputs along dimension `d` (0 is the height) of `input` inputs; `None` if the window does not fit.
    pub fn out_size(&self, d: usize, input: usize) -> Option<usize> {
        let (kernel, stride) = (self.kernel[d], self.stride[d]);
        let (padding, dilation) = (self.padding[d], self.dilation[d]);
        window_count(input, kernel, stride, padding, dilation, self.ceil)
    }
}

/// A square window of this size, with a stride of its own size.
impl From<usize> for MaxPool2dOptions {
    fn from(kernel: usize) -> Self {
        Self::new(kernel)
    }
}

pub(crate) struct MaxPool2d(PoolShape);

impl<'s> Tensor<'s> {
    /// The largest value of each window of images (N, H, W, C). The first
    /// maximum in row-major order takes the gradient.
    ///
    /// # Errors
    /// `Usage` when the window does not fit or has more than 256 positions.
    pub fn max_pool2d(self, options: impl Into<MaxPool2dOptions>) -> Result<Tensor<'s>> {
        let (o, [images, h, w, channels]) = (options.into(), self.image_dims("max_pool2d")?);
        if o.kernel[0].saturating_mul(o.kernel[1]) > MAX_WINDOW {
            refuse!(
                "max_pool2d: a window of {} x {} has more than {MAX_WINDOW} positions",
                o.kernel[0],
                o.kernel[1]
            );
        }
        let (Some(oh), Some(ow)) = (o.out_size(0, h), o.out_size(1, w)) else {
            let others = [
                ("stride", o.stride),
                ("padding", o.padding),
                ("dilation", o.dilation),
            ];
            let window = window("window", o.kernel, &others);
            refuse!("max_pool2d: {window} does not fit images of {h} x {w}");
        };
        let s = PoolShape {
            images,
            channels,
            input: [h, w],
            output: [oh, ow],
            kernel: o.kernel,
            stride: o.stride,
            padding: o.padding,
            dilation: o.dilation,
        };
        let shape = Shape::new(&[images, oh, ow, channels])?;
        // Elements stay as they are where none of the gradient's is a sum.
        let x = match s.is_disjoint() {
            true => self.own_slot(),
            false => self.slot(),
        };
        let precision = self.step().state().precision_of(x);
        self.step().apply_as([x], (shape, precision), MaxPool2d(s))
    }
}

impl Operation for MaxPool2d {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let s = &self.0;
        let numel = s.images * s.output[0] * s.output[1] * s.channels;
        let precision = c.state.precision_of(x);
        let mut buf = c.state.pool.get(precision.memory_len(numel));
        let mut winners = c.state.pool.get(numel.div_ceil(size_of::<f32>()));
        let (to, at) = (buf.slice_mut(), winners.bytes_mut(numel));
        match c.state.values(x) {
            Values::F32(x) => max_pool::forward(c.threads, s, x, to, at),
            Values::Bf16(x) => max_pool::forward(c.threads, s, x, elements_mut(to, numel), at),
        }
        Ok((buf, Some(winners)))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        match ctx.precision_of(s.x[0]) {
            Precision::F32 => self.backward_as::<f32>(ctx, s, dy),
            Precision::Bf16 => self.backward_as::<Bf16>(ctx, s, dy),
        }
    }
}

impl MaxPool2d {
    fn backward_as<T: Element>(
        &self,
        ctx: &mut BackwardContext<'_>,
        s: &Slots<1>,
        dy: Buf,
    ) -> Result<()> {
        let (numel, to) = (ctx.shape(s.out).numel(), ctx.shape(s.x[0]).numel());
        let (threads, winners) = (ctx.threads, ctx.bytes(s.aux()?, numel));
        let mut dx = ctx.pool().get(T::PRECISION.memory_len(to));
        let (dy_elements, dx_elements) = (
            elements::<T>(dy.slice(), numel),
            elements_mut::<T>(dx.slice_mut(), to),
        );
        max_pool::backward(threads, &self.0, dy_elements, winners, dx_elements);
        ctx.pool().put(dy);
        ctx.give(s.x[0], dx);
        Ok(())
    }
}
