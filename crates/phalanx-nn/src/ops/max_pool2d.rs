//! Max-pooling. Saves, per output element, the winning window position (one byte).

use crate::kernels::max_pool::{self, PoolShape};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

/// Window positions at most: a position is kept in one byte.
const MAX_WINDOW: usize = 256;

/// Window, stride, padding and dilation (height, width each) of a max-pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool2dOptions {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    ceil: bool,
}

impl MaxPool2dOptions {
    /// A square window, moved by its own size.
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
    pub fn stride(self, stride: usize) -> Self {
        MaxPool2dOptions {
            stride: [stride; 2],
            ..self
        }
    }

    /// Sets the padding (which never wins) of both directions.
    #[must_use]
    pub fn padding(self, padding: usize) -> Self {
        MaxPool2dOptions {
            padding: [padding; 2],
            ..self
        }
    }

    /// Sets the distance between window taps of both directions.
    #[must_use]
    pub fn dilation(self, dilation: usize) -> Self {
        MaxPool2dOptions {
            dilation: [dilation; 2],
            ..self
        }
    }

    /// Keeps windows that reach past the end of the image.
    #[must_use]
    pub fn ceil_mode(self) -> Self {
        MaxPool2dOptions { ceil: true, ..self }
    }

    /// Output size along dimension `d`, as PyTorch computes it; `None` when
    /// PyTorch refuses.
    fn out_size(&self, d: usize, input: usize) -> Option<usize> {
        let (k, s, p) = (self.kernel[d], self.stride[d], self.padding[d]);
        if p > k / 2 || input == 0 || self.dilation[d] == 0 {
            return None;
        }
        let reach = self.dilation[d]
            .checked_mul(k.checked_sub(1)?)?
            .checked_add(1)?;
        let extra = if self.ceil { s.checked_sub(1)? } else { 0 };
        let padded = input.checked_add(2 * p)?.checked_add(extra)?;
        let out = padded.checked_sub(reach)?.checked_div(s)? + 1;
        // The last window must begin inside the image or its leading padding.
        Some(if self.ceil && (out - 1) * s >= input + p {
            out - 1
        } else {
            out
        })
    }
}

/// A square window of this size, moved by its own size.
impl From<usize> for MaxPool2dOptions {
    fn from(kernel: usize) -> Self {
        Self::new(kernel)
    }
}

pub(crate) struct MaxPool2d {
    x: SlotId,
    out: SlotId,
    winners: SlotId,
    shape: PoolShape,
}

impl<'s> Tensor<'s> {
    /// The largest value of each window of images (N, H, W, C). The first
    /// maximum in row-major order takes the gradient.
    ///
    /// # Errors
    /// `Usage` when the window does not fit or has more than 256 positions.
    pub fn max_pool2d(self, options: impl Into<MaxPool2dOptions>) -> Result<Tensor<'s>> {
        let (o, dims) = (options.into(), self.dims());
        let (step, x) = (self.step(), self.slot());
        let &[images, h, w, channels] = &*dims else {
            return Err(Error::usage(format!(
                "max_pool2d needs images (N, H, W, C), got shape {dims:?}"
            )));
        };
        if o.kernel[0].saturating_mul(o.kernel[1]) > MAX_WINDOW {
            return Err(Error::usage(format!(
                "max_pool2d: window {:?} has more than {MAX_WINDOW} positions",
                o.kernel
            )));
        }
        let (Some(oh), Some(ow)) = (o.out_size(0, h), o.out_size(1, w)) else {
            return Err(Error::usage(format!(
                "max_pool2d: {o:?} does not fit images of {h} x {w}"
            )));
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
        let out = {
            let mut st = step.state();
            let (buf, winners) = compute(&mut step.compute(&mut st), x, &s);
            let wants = st.wants_grad(x);
            let out = st.add_output(shape, buf, wants);
            if wants {
                let winners = st.add_aux(winners)?;
                st.record(MaxPool2d {
                    x,
                    out,
                    winners,
                    shape: s,
                });
            } else {
                st.pool.put(winners);
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

/// The maxima and where they were.
fn compute(c: &mut Compute<'_>, x: SlotId, s: &PoolShape) -> (Buf, Buf) {
    let numel = s.images * s.output[0] * s.output[1] * s.channels;
    let mut buf = c.state.pool.get(numel);
    let mut winners = c.state.pool.get(numel.div_ceil(size_of::<f32>()));
    let (to, at) = (buf.slice_mut(), winners.bytes_mut(numel));
    max_pool::forward(c.team, s, c.state.value(x), to, at);
    (buf, winners)
}

impl Recorded for MaxPool2d {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.winners));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let numel = pass.shape(self.x).numel();
        let mut dx = pass.pool().get(numel);
        let winners = pass.bytes(self.winners, dy.slice().len());
        max_pool::backward(pass.team, &self.shape, dy.slice(), winners, dx.slice_mut());
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let (buf, winners) = compute(c, self.x, &self.shape);
        c.state.pool.put(winners); // as before
        Ok(buf)
    }
}
