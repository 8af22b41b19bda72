//! Cross-entropy of unnormalised scores with label smoothing, class weights and
//! ignored rows, in one operation. Saves the gradient for a loss gradient of one.

use crate::losses::{IGNORE_LABEL, Reduction};
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

/// Settings of [`Tensor::cross_entropy_with`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions<'a> {
    /// Share of the target that is spread evenly over all classes.
    pub label_smoothing: f64,
    /// Weight of each class; none means 1.
    pub class_weights: Option<&'a [f32]>,
    /// `Mean` divides by the sum of the weights of the rows' labels (without
    /// weights, the number of rows), ignored rows left out.
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions<'_> {
    /// PyTorch's: no smoothing, no weights, the mean.
    fn default() -> Self {
        CrossEntropyOptions {
            label_smoothing: 0.0,
            class_weights: None,
            reduction: Reduction::Mean,
        }
    }
}

impl<'s> Tensor<'s> {
    /// PyTorch's `cross_entropy` of scores with classes last:
    /// `((1 - e) w[y] (-log p[y]) + e / C sum_c w[c] (-log p[c]))` summed over rows
    /// that are not [`IGNORE_LABEL`], and divided.
    ///
    /// *Order*: rows in order; in f64, rounded once.
    ///
    /// # Errors
    /// `Usage` when there is not one label a row, a label is no class, or settings do not fit.
    pub fn cross_entropy_with(
        self,
        labels: &[u32],
        options: CrossEntropyOptions<'_>,
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let Some((&classes, outer)) = dims.split_last() else {
            return Err(Error::usage(
                "a loss over classes needs a dimension of classes",
            ));
        };
        let rows: usize = outer.iter().product();
        if labels.len() != rows {
            return Err(Error::usage(format!(
                "{} labels for {rows} rows of shape {dims:?}",
                labels.len()
            )));
        }
        let ignored = |l: u32| l == IGNORE_LABEL;
        if let Some(l) = labels
            .iter()
            .find(|l| **l as usize >= classes && !ignored(**l))
        {
            return Err(Error::usage(format!(
                "label {l} is not below {classes}, the number of classes"
            )));
        }
        let smoothing = options.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::usage(format!(
                "label smoothing is {smoothing}; it must lie between 0 and 1"
            )));
        }
        if let Some(w) = options.class_weights
            && w.len() != classes
        {
            return Err(Error::usage(format!(
                "{} class weights for {classes} classes",
                w.len()
            )));
        }
        let weight = |c: usize| options.class_weights.map_or(1.0, |w| f64::from(w[c]));
        let divisor = match options.reduction {
            Reduction::Mean => labels
                .iter()
                .filter(|l| !ignored(**l))
                .map(|&l| weight(l as usize))
                .sum(),
            Reduction::Sum => 1.0,
            Reduction::Over(d) => f64::from(d),
        };
        let even = smoothing / classes.max(1) as f64;
        let out = {
            let mut st = step.state();
            let wants = st.wants_grad(x);
            let mut grad = st.take_for_writing(x);
            let mut total = 0.0f64;
            let all_rows = grad.slice_mut().chunks_exact_mut(classes.max(1));
            for (row, &label) in all_rows.zip(labels) {
                if ignored(label) {
                    row.fill(0.0);
                    continue;
                }
                let label = label as usize;
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let most = f64::from(most);
                let sum: f64 = row.iter().map(|&v| (f64::from(v) - most).exp()).sum();
                let shift = most + sum.ln();
                // What -log p of each class counts for, and all of them together.
                let part = |c: usize| {
                    let sharp = if c == label { 1.0 - smoothing } else { 0.0 };
                    weight(c) * (sharp + even)
                };
                let mut mass = 0.0;
                for (c, &v) in row.iter().enumerate() {
                    let part = part(c);
                    mass += part;
                    // An impossible class that does not count must not make NaN.
                    if part != 0.0 {
                        total += part * (shift - f64::from(v));
                    }
                }
                for (c, v) in row.iter_mut().enumerate() {
                    let p = (f64::from(*v) - shift).exp();
                    *v = ((p * mass - part(c)) / divisor) as f32;
                }
            }
            let mut buf = st.pool.get(1);
            buf.slice_mut()[0] = (total / divisor) as f32;
            let out = st.add_output(Shape::new(&[])?, buf, wants);
            if wants {
                let gradient = st.add_aux(grad)?;
                st.record(Prepared { x, out, gradient });
            } else {
                st.pool.put(grad);
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

/// A loss whose gradient was made in the forward pass.
pub(crate) struct Prepared {
    pub(super) x: SlotId,
    pub(super) out: SlotId,
    pub(super) gradient: SlotId,
}

impl Recorded for Prepared {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.gradient));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let (g, factor) = (pass.value(self.gradient), dy.slice()[0]);
        let mut dx = pass.pool().get(g.len());
        for (d, &g) in dx.slice_mut().iter_mut().zip(g) {
            *d = g * factor;
        }
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }
}
