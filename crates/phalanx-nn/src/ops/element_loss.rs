//! Losses of element against target: squared and absolute difference, binary
//! cross-entropy. Save the gradient for a loss gradient of one.
//!
//! *Order*: elements in memory order, in f64, rounded once.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Operation, Slots};
use crate::tensor::Shape;
use crate::{Precision, Result, Tensor, refuse};

/// How the losses of elements (of rows, in losses over classes) are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    /// One loss per element, or per row; ignored rows have 0.
    None,
    /// Their sum.
    Sum,
    /// The sum divided by the number of elements (NaN if there are none, as in PyTorch).
    Mean,
    /// The sum divided by a given number, such as the size of the batch over all ranks.
    Over(f32),
}

impl Reduction {
    pub(super) fn divisor(self, elements: usize) -> f32 {
        match self {
            Reduction::None | Reduction::Sum => 1.0,
            Reduction::Mean => elements as f32,
            Reduction::Over(d) => d,
        }
    }
}

/// The sum divided by this number.
impl From<f32> for Reduction {
    fn from(divisor: f32) -> Self {
        Reduction::Over(divisor)
    }
}

/// The sum divided by this number, such as the number of labels.
impl From<usize> for Reduction {
    fn from(divisor: usize) -> Self {
        Reduction::Over(divisor as f32)
    }
}

/// A loss whose gradient was computed in the forward pass.
pub(crate) struct Prepared {
    /// Elements of the gradient for each element of the output.
    pub(super) wide: usize,
    pub(super) name: Option<&'static str>,
}

impl<'s> Tensor<'s> {
    /// `(x - target)^2`, reduced. The target of this loss and of the others gets no gradient; that of another tensor is its
    /// [`data`](Tensor::data).
    ///
    /// *Order*: squares in f32, summed in memory order in f64, rounded once.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements.
    pub fn mse_loss(self, target: &[f32], reduction: impl Into<Reduction>) -> Result<Tensor<'s>> {
        let reduction = reduction.into();
        let norm = 2.0 / reduction.divisor(target.len());
        self.element_loss(Some("Mse"), target, reduction, |_, x, t, _| {
            let d = x - t;
            (f64::from(d * d), norm * d)
        })
    }

    /// `|x - target|`, reduced; the derivative at 0 is 0.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements.
    pub fn l1_loss(self, target: &[f32], reduction: impl Into<Reduction>) -> Result<Tensor<'s>> {
        self.element_loss(None, target, reduction.into(), |_, x, t, divisor| {
            let d = f64::from(x) - f64::from(t);
            let slope = if d > 0.0 {
                1.0
            } else if d < 0.0 {
                -1.0
            } else {
                d * 0.0
            };
            (d.abs(), (slope / divisor) as f32)
        })
    }

    /// `d^2 / 2` of the difference `d` of `x` and `target` up to `delta`, `delta (|d| - delta / 2)` beyond, reduced.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements, or `delta` is not a positive number.
    pub fn huber_loss(
        self,
        target: &[f32],
        delta: f64,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        if !(delta > 0.0 && delta.is_finite()) {
            refuse!("huber_loss: delta is {delta}; it must be a positive number");
        }
        self.bent_loss("Huber", target, (delta, 1.0), reduction.into())
    }

    /// [`huber_loss`](Tensor::huber_loss) with `delta` = `beta`, divided by it; with 0 it is [`l1_loss`](Tensor::l1_loss).
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements, or `beta` is negative or not finite.
    pub fn smooth_l1_loss(
        self,
        target: &[f32],
        beta: f64,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        if beta == 0.0 {
            return self.l1_loss(target, reduction);
        }
        if !(beta > 0.0 && beta.is_finite()) {
            refuse!("smooth_l1_loss: beta is {beta}; it must be a number of at least 0");
        }
        self.bent_loss("SmoothL1", target, (beta, beta), reduction.into())
    }

    fn bent_loss(
        self,
        name: &'static str,
        target: &[f32],
        (delta, over): (f64, f64),
        reduction: Reduction,
    ) -> Result<Tensor<'s>> {
        self.element_loss(Some(name), target, reduction, |_, x, t, divisor| {
            let d = f64::from(x) - f64::from(t);
            let slope = d.clamp(-delta, delta);
            // Half the square, or the line that continues it.
            let loss = slope * (d - slope / 2.0);
            (loss / over, (slope / over / divisor) as f32)
        })
    }

    /// `-(p t log s(x) + (1 - t) log(1 - s(x)))` with the sigmoid s, reduced.
    /// `positive` holds p of each element of the last dimension; `None` means 1.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements, or `positive` does not fit.
    pub fn bce_with_logits(
        self,
        target: &[f32],
        positive: Option<&[f32]>,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        let wide = self.dims().last().copied().unwrap_or(1).max(1);
        if let Some(p) = positive
            && p.len() != wide
        {
            refuse!(
                "bce_with_logits: {} positive weights for shape {:?}",
                p.len(),
                self.dims()
            );
        }
        self.element_loss(None, target, reduction.into(), |i, x, t, divisor| {
            let (x, t) = (f64::from(x), f64::from(t));
            let p = positive.map_or(1.0, |p| f64::from(p[i % wide]));
            // log(1 + e^-x) without overflow.
            let soft = (-x.abs()).exp().ln_1p() + (-x).max(0.0);
            let s = 1.0 / (1.0 + (-x).exp());
            let both = (p - 1.0).mul_add(t, 1.0);
            let slope = (1.0 - t) - both * (1.0 - s);
            ((1.0 - t) * x + both * soft, (slope / divisor) as f32)
        })
    }

    /// `target (log(target) - x)` of log-probabilities `x`, 0 where the target is 0, reduced. PyTorch's `kl_div`; its `batchmean`
    /// is the number of rows as divisor.
    ///
    /// # Errors
    /// `Usage` when `target` has another number of elements.
    pub fn kl_div(self, target: &[f32], reduction: impl Into<Reduction>) -> Result<Tensor<'s>> {
        self.element_loss(
            Some("KlDiv"),
            target,
            reduction.into(),
            |_, x, t, divisor| {
                let (x, t) = (f64::from(x), f64::from(t));
                let loss = if t == 0.0 { 0.0 } else { t * (t.ln() - x) };
                (loss, (-t / divisor) as f32)
            },
        )
    }

    /// `f(place, x, target, divisor)` gives the loss and its derivative over the divisor.
    fn element_loss(
        self,
        name: Option<&'static str>,
        target: &[f32],
        reduction: Reduction,
        f: impl Fn(usize, f32, f32, f64) -> (f64, f32),
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        if target.len() != dims.numel() {
            refuse!("{} targets for shape {dims:?}", target.len());
        }
        let divisor = f64::from(reduction.divisor(target.len()));
        let each = reduction == Reduction::None;
        let shape = if each { dims } else { Shape::new(&[])? };
        let mut st = step.state();
        let mut grad = st.take_for_writing(x);
        let mut buf = st.pool.get(shape.numel());
        let mut total = 0.0;
        for (i, (v, &t)) in grad.slice_mut().iter_mut().zip(target).enumerate() {
            let (loss, slope) = f(i, *v, t, divisor);
            if each {
                buf.slice_mut()[i] = loss as f32;
            }
            total += loss;
            *v = slope;
        }
        if !each {
            buf.slice_mut()[0] = (total / divisor) as f32;
        }
        let wide = if each { 1 } else { target.len() };
        let (kind, op) = ((shape, Precision::F32), Prepared { wide, name });
        step.emit(&mut st, [x], kind, (buf, Some(grad)), op)
    }
}

impl Operation for Prepared {
    const RECOMPUTES: bool = false;

    fn name(&self) -> Option<&'static str> {
        self.name
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let (g, wide) = (ctx.value(s.aux()?), self.wide.max(1));
        ctx.give_made(s.x[0], dy, |dy, dx| {
            let rows = dx.chunks_mut(wide).zip(g.chunks(wide));
            for ((dx, g), &factor) in rows.zip(dy) {
                for (d, &g) in dx.iter_mut().zip(g) {
                    *d = g * factor;
                }
            }
        });
        Ok(())
    }
}
