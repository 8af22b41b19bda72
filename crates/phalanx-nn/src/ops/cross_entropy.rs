//! Cross-entropy of unnormalised scores with label smoothing, class weights and
//! ignored rows, in one operation. Saves the gradient for a loss gradient of one.

use super::element_loss::Prepared;
use crate::losses::{IGNORE_LABEL, Reduction};
use crate::tensor::Shape;
use crate::{Error, Precision, Result, Tensor};

/// Settings of [`Tensor::cross_entropy_with`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions<'a> {
    /// Share of the target that is distributed evenly over all classes.
    pub label_smoothing: f64,
    /// Weight of each class; `None` means 1.
    pub class_weights: Option<&'a [f32]>,
    /// `Mean` divides by the sum of the weights of the rows' labels (without
    /// weights, the number of rows), without ignored rows; with probabilities as
    /// targets always by the number of rows.
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
    /// `Usage` when there is not one label per row, a label is not a class, or settings do not fit.
    pub fn cross_entropy_with(
        self,
        labels: &[u32],
        options: CrossEntropyOptions<'_>,
    ) -> Result<Tensor<'s>> {
        let (classes, rows) = self.classes(&options)?;
        if labels.len() != rows {
            return Err(Error::usage(format!(
                "{} labels for {rows} rows of shape {:?}",
                labels.len(),
                self.dims()
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
        let weight = |c: usize| options.class_weights.map_or(1.0, |w| f64::from(w[c]));
        let mean = labels
            .iter()
            .filter(|l| !ignored(**l))
            .map(|&l| weight(l as usize))
            .sum();
        self.class_losses(classes, &options, mean, |row| {
            let label = labels[row];
            (!ignored(label)).then_some(move |c: usize| f64::from(u8::from(c == label as usize)))
        })
    }

    /// PyTorch's `cross_entropy` with probabilities as targets: one share per score, in
    /// the scores' order. A row's loss is
    /// `sum_c w[c] ((1 - e) t[c] + e / C) (-log p[c])`; shares need not add up to 1.
    ///
    /// *Order*: rows in order; in f64, rounded once.
    ///
    /// # Errors
    /// `Usage` when there is not one share per score, or settings do not fit.
    pub fn cross_entropy_shares(
        self,
        shares: &[f32],
        options: CrossEntropyOptions<'_>,
    ) -> Result<Tensor<'s>> {
        let (classes, rows) = self.classes(&options)?;
        if shares.len() != classes * rows {
            return Err(Error::usage(format!(
                "{} shares of classes for scores of shape {:?}",
                shares.len(),
                self.dims()
            )));
        }
        self.class_losses(classes, &options, rows as f64, |row| {
            let shares = &shares[row * classes..][..classes];
            Some(move |c: usize| f64::from(shares[c]))
        })
    }

    /// Numbers of classes and of rows, if the settings fit them.
    fn classes(&self, options: &CrossEntropyOptions<'_>) -> Result<(usize, usize)> {
        let dims = self.dims();
        let Some((&classes, outer)) = dims.split_last() else {
            return Err(Error::usage(
                "a loss over classes needs a dimension of classes",
            ));
        };
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
        Ok((classes, outer.iter().product()))
    }

    /// `target(row)` gives the share of each class in a row's target, or nothing for a
    /// row that does not count. `mean` is what the mean divides by.
    fn class_losses<F: Fn(usize) -> f64>(
        self,
        classes: usize,
        options: &CrossEntropyOptions<'_>,
        mean: f64,
        target: impl Fn(usize) -> Option<F>,
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let weight = |c: usize| options.class_weights.map_or(1.0, |w| f64::from(w[c]));
        let each = options.reduction == Reduction::None;
        let divisor = match options.reduction {
            Reduction::None | Reduction::Sum => 1.0,
            Reduction::Mean => mean,
            Reduction::Over(d) => f64::from(d),
        };
        let smoothing = options.label_smoothing;
        let even = smoothing / classes.max(1) as f64;
        let shape = Shape::new(if each { &dims[..dims.len() - 1] } else { &[] })?;
        let mut st = step.state();
        let mut grad = st.take_for_writing(x);
        let mut buf = st.pool.get(shape.numel());
        if classes == 0 {
            // There is no row to take a loss of.
            buf.slice_mut().fill(0.0);
        }
        let mut total = 0.0f64;
        let all_rows = grad.slice_mut().chunks_exact_mut(classes.max(1));
        for (i, row) in all_rows.enumerate() {
            let mut loss = 0.0f64;
            if let Some(share) = target(i) {
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let most = f64::from(most);
                let sum: f64 = row.iter().map(|&v| (f64::from(v) - most).exp()).sum();
                let shift = most + sum.ln();
                // The factor of -log p of each class, and the sum of the factors.
                let part = |c: usize| weight(c) * ((1.0 - smoothing) * share(c) + even);
                let mut mass = 0.0;
                for (c, &v) in row.iter().enumerate() {
                    let part = part(c);
                    mass += part;
                    // An impossible class that does not count must not make NaN.
                    if part != 0.0 {
                        loss += part * (shift - f64::from(v));
                    }
                }
                for (c, v) in row.iter_mut().enumerate() {
                    let p = (f64::from(*v) - shift).exp();
                    *v = ((p * mass - part(c)) / divisor) as f32;
                }
            } else {
                row.fill(0.0);
            }
            if each {
                buf.slice_mut()[i] = loss as f32;
            }
            total += loss;
        }
        if !each {
            buf.slice_mut()[0] = (total / divisor) as f32;
        }
        let wide = if each { classes } else { grad.slice().len() };
        let (kind, op) = ((shape, Precision::F32), Prepared { wide, name: None });
        step.emit(&mut st, [x], kind, (buf, Some(grad)), op)
    }
}
