//! Dropout. Saves nothing: backward computes the mask again.

use crate::kernels::dropout::{MaskKey, Rate, Share, apply};
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Error, Result, Tensor};

pub(crate) struct Dropout {
    rows: usize,
    key: MaskKey,
    rate: Rate,
    share: Share,
}

impl<'s> Tensor<'s> {
    /// In training, zeroes each element with probability `p` and multiplies
    /// the others by 1 / (1 - p); in inference, does nothing.
    ///
    /// The mask is a function of the step's key, the sample's id, the number of
    /// this random operation within the step and the element's place.
    ///
    /// # Errors
    /// `Usage` when `p` is not within 0 and 1, or the key names another number
    /// of samples than the outermost dimension has.
    pub fn dropout(self, p: f64) -> Result<Tensor<'s>> {
        self.drop_out(p, Share::Element)
    }

    /// As [`dropout`](Tensor::dropout), but whole channels of images (N, H, W, C).
    ///
    /// # Errors
    /// As [`dropout`](Tensor::dropout), and when this is not a batch of images.
    pub fn dropout2d(self, p: f64) -> Result<Tensor<'s>> {
        let [_, _, _, c] = self.image_dims("dropout2d")?;
        self.drop_out(p, Share::Channel(c))
    }

    fn drop_out(self, p: f64, share: Share) -> Result<Tensor<'s>> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::usage(format!(
                "dropout probability {p} is not within 0 and 1"
            )));
        }
        let (step, dims) = (self.step(), self.dims());
        let Some(&rows) = dims.first() else {
            return Err(Error::usage("dropout of a tensor without dimensions"));
        };
        if !step.training() {
            return Ok(self);
        }
        // The operation is numbered even where p is 0, so that switching
        // one layer off does not change the others' masks.
        let key = step.state().next_mask(rows)?;
        if p == 0.0 {
            return Ok(self);
        }
        let rate = Rate::new(p);
        let op = Dropout {
            rows,
            key,
            rate,
            share,
        };
        step.apply([self.slot()], dims, op)
    }
}

impl Operation for Dropout {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        let (samples, y) = (c.state.samples(self.rows), buf.slice_mut());
        apply(c.threads, y, samples, self.key, self.rate, self.share);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (samples, d) = (ctx.samples(self.rows), dy.slice_mut());
        apply(ctx.threads, d, samples, self.key, self.rate, self.share);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
