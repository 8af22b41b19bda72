//! Adaptive max pooling. Saves, per output element, the winning pixel.

use crate::kernels::adaptive_max;
use crate::kernels::avg_pool::{AvgShape, Windows};
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct AdaptiveMaxPool2d {
    x: SlotId,
    out: SlotId,
    winners: SlotId,
    shape: AvgShape,
}

impl<'s> Tensor<'s> {
    /// The largest values of windows chosen so that images (N, H, W, C) become
    /// `height` x `width`: PyTorch's, which may overlap. The first maximum in
    /// row-major order takes the gradient; NaN wins.
    ///
    /// # Errors
    /// `Usage` when that is nothing, or the operand is no image of at most 2^32 pixels.
    pub fn adaptive_max_pool2d(self, height: usize, width: usize) -> Result<Tensor<'s>> {
        let [images, h, w, channels] = self.image_dims("adaptive_max_pool2d")?;
        if [height, width, h, w].contains(&0) || u32::try_from(h * w).is_err() {
            return Err(Error::usage(format!(
                "adaptive_max_pool2d: cannot make {height} x {width} of {h} x {w}"
            )));
        }
        let s = AvgShape {
            images,
            channels,
            input: [h, w],
            output: [height, width],
            windows: [Windows::Adaptive; 2],
        };
        let (step, x) = (self.step(), self.slot());
        let shape = Shape::new(&[images, height, width, channels])?;
        let out = {
            let mut st = step.state();
            let mut buf = st.pool.get(shape.numel());
            let mut winners = st.pool.get(shape.numel());
            adaptive_max::forward(
                step.team(),
                &s,
                st.value(x),
                buf.slice_mut(),
                winners.slice_mut(),
            );
            let wants = st.wants_grad(x);
            let out = st.add_output(shape, buf, wants);
            if wants {
                let winners = st.add_aux(winners)?;
                st.record(AdaptiveMaxPool2d {
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

impl Recorded for AdaptiveMaxPool2d {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.winners));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let numel = pass.shape(self.x).numel();
        let mut dx = pass.pool().get(numel);
        let winners = pass.value(self.winners);
        adaptive_max::backward(pass.team, &self.shape, dy.slice(), winners, dx.slice_mut());
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }
}
