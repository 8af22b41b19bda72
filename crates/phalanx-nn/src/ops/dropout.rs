//! Dropout. Saves nothing: backward makes the mask again.

use crate::kernels::dropout::{MaskKey, Rate, Share, apply};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Error, Result, Tensor};

pub(crate) struct Dropout {
    x: SlotId,
    out: SlotId,
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
        let dims = self.dims();
        let &[_, _, _, c] = &*dims else {
            return Err(Error::usage(format!(
                "dropout2d needs images (N, H, W, C), got shape {dims:?}"
            )));
        };
        self.drop_out(p, Share::Channel(c))
    }

    fn drop_out(self, p: f64, share: Share) -> Result<Tensor<'s>> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::usage(format!(
                "dropout probability {p} is not within 0 and 1"
            )));
        }
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let Some(&rows) = dims.first() else {
            return Err(Error::usage("dropout of a tensor without dimensions"));
        };
        if !step.training() {
            return Ok(self);
        }
        let out = {
            let mut st = step.state();
            // The operation is numbered even where p is 0, so that switching
            // one layer off leaves the others' masks alone.
            let key = st.next_mask(rows)?;
            let rate = Rate::new(p);
            let mut buf = st.take_for_writing(x);
            if p > 0.0 {
                let samples = st.samples(rows);
                apply(step.team(), buf.slice_mut(), samples, key, rate, share);
            }
            let wants = st.wants_grad(x);
            let out = st.add_output(dims, buf, wants);
            if wants {
                st.record(Dropout {
                    x,
                    out,
                    rows,
                    key,
                    rate,
                    share,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for Dropout {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let samples = pass.samples(self.rows);
        apply(
            pass.team,
            dy.slice_mut(),
            samples,
            self.key,
            self.rate,
            self.share,
        );
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let mut buf = c.state.take_for_writing(self.x);
        let samples = c.state.samples(self.rows);
        let (key, rate, share) = (self.key, self.rate, self.share);
        apply(c.team, buf.slice_mut(), samples, key, rate, share);
        Ok(buf)
    }
}
