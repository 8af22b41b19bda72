//! Adaptive max pooling. Saves, per output element, the winning pixel.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Result, Tensor, refuse};
use phalanx_kernels::adaptive_max;
use phalanx_kernels::avg_pool::{AvgShape, Windows};

pub(crate) struct AdaptiveMaxPool2d(AvgShape);

impl<'s> Tensor<'s> {
    /// The largest values of windows chosen so that images (N, H, W, C) become `height`
    /// x `width`. The windows are PyTorch's and may overlap. The first maximum in
    /// row-major order takes the gradient; NaN wins.
    ///
    /// # Errors
    /// `Usage` when a size is 0, or the operand is not an image of at most 2^32 pixels.
    pub fn adaptive_max_pool2d(self, height: usize, width: usize) -> Result<Tensor<'s>> {
        let [images, h, w, channels] = self.image_dims("adaptive_max_pool2d")?;
        if [height, width, h, w].contains(&0) || u32::try_from(h * w).is_err() {
            refuse!("adaptive_max_pool2d: cannot make {height} x {width} of {h} x {w}");
        }
        let s = AvgShape {
            images,
            channels,
            input: [h, w],
            output: [height, width],
            windows: [Windows::Adaptive; 2],
        };
        let shape = Shape::new(&[images, height, width, channels])?;
        self.step()
            .apply([self.slot()], shape, AdaptiveMaxPool2d(s))
    }
}

impl Operation for AdaptiveMaxPool2d {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let s = &self.0;
        let numel = s.images * s.output[0] * s.output[1] * s.channels;
        let (mut buf, mut winners) = (c.state.pool.get(numel), c.state.pool.get(numel));
        let (to, at) = (buf.slice_mut(), winners.slice_mut());
        adaptive_max::forward(c.threads, s, c.state.value(x), to, at);
        Ok((buf, Some(winners)))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let (threads, winners) = (ctx.threads, ctx.value(s.aux()?));
        ctx.give_made(s.x[0], dy, |dy, dx| {
            adaptive_max::backward(threads, &self.0, dy, winners, dx);
        });
        Ok(())
    }
}
