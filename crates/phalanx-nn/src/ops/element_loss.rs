//! Losses of element against target: absolute difference, binary cross-entropy.
//! Save the gradient for a loss gradient of one.
//!
//! *Order*: elements in memory order, in f64, rounded once.

use super::cross_entropy::Prepared;
use crate::losses::Reduction;
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

impl<'s> Tensor<'s> {
    /// `|x - target|`, reduced; the derivative at 0 is 0.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements.
    pub fn l1_loss(self, target: &[f32], reduction: Reduction) -> Result<Tensor<'s>> {
        self.element_loss(target, reduction, |_, x, t| {
            let d = f64::from(x) - f64::from(t);
            let slope = if d > 0.0 {
                1.0
            } else if d < 0.0 {
                -1.0
            } else {
                d * 0.0
            };
            (d.abs(), slope)
        })
    }

    /// `-(p t log s(x) + (1 - t) log(1 - s(x)))` with the sigmoid s, reduced.
    /// `positive` holds p of each element of the last dimension; none means 1.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements, or `positive` does not fit.
    pub fn bce_with_logits(
        self,
        target: &[f32],
        positive: Option<&[f32]>,
        reduction: Reduction,
    ) -> Result<Tensor<'s>> {
        let wide = self.dims().last().copied().unwrap_or(1).max(1);
        if let Some(p) = positive
            && p.len() != wide
        {
            return Err(Error::usage(format!(
                "bce_with_logits: {} positive weights for shape {:?}",
                p.len(),
                self.dims()
            )));
        }
        self.element_loss(target, reduction, |i, x, t| {
            let (x, t) = (f64::from(x), f64::from(t));
            let p = positive.map_or(1.0, |p| f64::from(p[i % wide]));
            // log(1 + e^-x) without overflow.
            let soft = (-x.abs()).exp().ln_1p() + (-x).max(0.0);
            let s = 1.0 / (1.0 + (-x).exp());
            let both = (p - 1.0).mul_add(t, 1.0);
            ((1.0 - t) * x + both * soft, (1.0 - t) - both * (1.0 - s))
        })
    }

    /// `f(place, x, target)` gives loss and derivative.
    fn element_loss(
        self,
        target: &[f32],
        reduction: Reduction,
        f: impl Fn(usize, f32, f32) -> (f64, f64),
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        if target.len() != dims.numel() {
            return Err(Error::usage(format!(
                "{} targets for shape {dims:?}",
                target.len()
            )));
        }
        let divisor = f64::from(reduction.divisor(target.len()));
        let out = {
            let mut st = step.state();
            let wants = st.wants_grad(x);
            let mut grad = st.take_for_writing(x);
            let each = reduction == Reduction::None;
            let mut buf = st.pool.get(if each { target.len() } else { 1 });
            let mut total = 0.0;
            for (i, (v, &t)) in grad.slice_mut().iter_mut().zip(target).enumerate() {
                let (loss, slope) = f(i, *v, t);
                if each {
                    buf.slice_mut()[i] = loss as f32;
                }
                total += loss;
                *v = (slope / divisor) as f32;
            }
            let shape = if each { dims } else { Shape::new(&[])? };
            if !each {
                buf.slice_mut()[0] = (total / divisor) as f32;
            }
            let out = st.add_output(shape, buf, wants);
            if wants {
                let gradient = st.add_aux(grad)?;
                st.record(Prepared {
                    x,
                    out,
                    gradient,
                    wide: if each { 1 } else { target.len() },
                });
            } else {
                st.pool.put(grad);
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}
