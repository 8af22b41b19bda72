//! Squared error. Saves the difference.

use crate::losses::Reduction;
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Mse {
    x: SlotId,
    out: SlotId,
    difference: SlotId,
    divisor: f32,
    /// One loss an element.
    each: bool,
}

impl<'s> Tensor<'s> {
    /// `(x - target)^2`, reduced.
    ///
    /// *Order*: squares in f32, summed in memory order in f64, rounded once.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements.
    pub fn mse_loss(self, target: &[f32], reduction: Reduction) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        if target.len() != dims.numel() {
            return Err(Error::usage(format!(
                "{} targets for shape {dims:?}",
                target.len()
            )));
        }
        let divisor = reduction.divisor(target.len());
        let out = {
            let mut st = step.state();
            let mut diff = st.take_for_writing(x);
            let each = reduction == Reduction::None;
            let mut buf = st.pool.get(if each { target.len() } else { 1 });
            let mut sum = 0.0f64;
            for (i, (d, &t)) in diff.slice_mut().iter_mut().zip(target).enumerate() {
                *d -= t;
                if each {
                    buf.slice_mut()[i] = *d * *d;
                }
                sum += f64::from(*d * *d);
            }
            if !each {
                buf.slice_mut()[0] = (sum / f64::from(divisor)) as f32;
            }
            let wants = st.wants_grad(x);
            let shape = if each { dims } else { Shape::new(&[])? };
            let out = st.add_output(shape, buf, wants);
            if wants {
                let difference = st.add_aux(diff)?;
                st.record(Mse {
                    x,
                    out,
                    difference,
                    divisor,
                    each,
                });
            } else {
                st.pool.put(diff);
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for Mse {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.difference));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let diff = pass.value(self.difference);
        let norm = 2.0 / self.divisor;
        let mut dx = pass.pool().get(diff.len());
        for (i, (d, &v)) in dx.slice_mut().iter_mut().zip(diff).enumerate() {
            *d = norm * v * dy.slice()[if self.each { i } else { 0 }];
        }
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }
}
