//! Negative log-likelihood of labels. Saves the labels.

use super::element_loss::Reduction;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Operation, Slots};
use crate::tensor::Shape;
use crate::{Precision, Result, Tensor, refuse};

/// A label that is ignored (PyTorch's -100).
pub const IGNORE_LABEL: u32 = u32::MAX;

pub(crate) struct Nll {
    labels: (usize, usize),
    classes: usize,
    /// `None`: one loss per row.
    divisor: Option<f32>,
}

impl<'s> Tensor<'s> {
    /// `-x[row][label]` of each row of log-probabilities, classes last, reduced. A number
    /// for `reduction` divides the sum: [`Reduction::Over`].
    ///
    /// For PyTorch's mean, divide by the number of samples of the batch; with several ranks
    /// of unequal batches, by a number that makes the ranks' combined loss right. Rows
    /// labelled [`IGNORE_LABEL`] are ignored.
    ///
    /// *Order*: rows in order, summed in f64, rounded once.
    ///
    /// # Errors
    /// `Usage` when there is not one label per row or a label is not a class.
    pub fn nll_loss(self, labels: &[u32], reduction: impl Into<Reduction>) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let Some((&classes, outer)) = dims.split_last() else {
            refuse!("a loss over classes needs a dimension of classes");
        };
        let rows: usize = outer.iter().product();
        if labels.len() != rows {
            refuse!("{} labels for {rows} rows of shape {dims:?}", labels.len());
        }
        if let Some((row, label)) = labels
            .iter()
            .enumerate()
            .find(|(_, l)| **l as usize >= classes && **l != IGNORE_LABEL)
        {
            refuse!("label {label} of row {row} is not below {classes}, the number of classes");
        }
        let counted = labels.iter().filter(|l| **l != IGNORE_LABEL).count();
        let divisor = match reduction.into() {
            Reduction::None => None,
            reduction => Some(reduction.divisor(counted)),
        };
        let mut st = step.state();
        let shape = match divisor {
            Some(_) => Shape::new(&[])?,
            None => Shape::new(outer)?,
        };
        let mut buf = st.pool.get(shape.numel());
        let scores = st.value(x).chunks_exact(classes.max(1));
        let losses = labels.iter().zip(scores).map(|(&l, row)| match l {
            IGNORE_LABEL => 0.0,
            l => -f64::from(row[l as usize]),
        });
        match divisor {
            // `+ 0.0`: an empty sum is -0 in Rust.
            Some(d) => {
                buf.slice_mut()[0] = ((losses.sum::<f64>() + 0.0) / f64::from(d)) as f32;
            }
            None => {
                for (to, loss) in buf.slice_mut().iter_mut().zip(losses) {
                    *to = loss as f32;
                }
            }
        }
        let op = Nll {
            labels: st.add_labels(labels),
            classes,
            divisor,
        };
        let kind = (shape, Precision::F32);
        step.emit(&mut st, [x], kind, (buf, None), op)
    }
}

impl Operation for Nll {
    const RECOMPUTES: bool = false;

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let numel = ctx.shape(s.x[0]).numel();
        let g = |row: usize| match self.divisor {
            Some(d) => -(dy.slice()[0] / d),
            None => -dy.slice()[row],
        };
        let mut dx = ctx.pool().get_zeroed(numel);
        let rows = dx.slice_mut().chunks_exact_mut(self.classes.max(1));
        for (i, (row, &l)) in rows.zip(ctx.labels(self.labels)).enumerate() {
            if l != IGNORE_LABEL {
                row[l as usize] = g(i);
            }
        }
        ctx.pool().put(dy);
        ctx.give(s.x[0], dx);
        Ok(())
    }
}
