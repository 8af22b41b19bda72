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
}

impl<'s> Tensor<'s> {
    /// `sum((x - target)^2)`, reduced.
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
            let mut sum = 0.0f64;
            for (d, &t) in diff.slice_mut().iter_mut().zip(target) {
                *d -= t;
                sum += f64::from(*d * *d);
            }
            let mut buf = st.pool.get(1);
            buf.slice_mut()[0] = (sum / f64::from(divisor)) as f32;
            let wants = st.wants_grad(x);
            let out = st.add_output(Shape::new(&[])?, buf, wants);
            if wants {
                let difference = st.add_aux(diff)?;
                st.record(Mse {
                    x,
                    out,
                    difference,
                    divisor,
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
        let (g, norm) = (dy.slice()[0], 2.0 / self.divisor);
        let mut dx = pass.pool().get(diff.len());
        for (d, &v) in dx.slice_mut().iter_mut().zip(diff) {
            *d = norm * v * g;
        }
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }
}
