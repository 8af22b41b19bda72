//! Cross-entropy of unnormalised scores with label smoothing, class weights and
//! ignored rows, in one operation. Saves the gradient for a loss gradient of one.

use super::element_loss::{Prepared, Reduction};
use super::nll::IGNORE_LABEL;
use crate::tensor::Shape;
use crate::{Precision, Result, Tensor, refuse};
use phalanx_kernels::softmax_dim::{class_rows, exponentials, scaled_exponentials};

/// The target of a row.
enum Target<'a> {
    Label(usize),
    /// The share of each class.
    Shares(&'a [f32]),
}

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
    /// *Order*: exponentials in f32; their sums as log-softmax has them, classes and rows in order, in f64. The loss is rounded once.
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
            refuse!(
                "{} labels for {rows} rows of shape {:?}",
                labels.len(),
                self.dims()
            );
        }
        let ignored = |l: u32| l == IGNORE_LABEL;
        if let Some(l) = labels
            .iter()
            .find(|l| **l as usize >= classes && !ignored(**l))
        {
            refuse!("label {l} is not below {classes}, the number of classes");
        }
        let weight = |c: usize| options.class_weights.map_or(1.0, |w| f64::from(w[c]));
        let mean = labels
            .iter()
            .filter(|l| !ignored(**l))
            .map(|&l| weight(l as usize))
            .sum();
        self.class_losses(classes, &options, mean, |row| {
            let label = labels[row];
            (!ignored(label)).then_some(Target::Label(label as usize))
        })
    }

    /// PyTorch's `cross_entropy` with probabilities as targets: one share per score, in
    /// the scores' order. A row's loss is
    /// `sum_c w[c] ((1 - e) t[c] + e / C) (-log p[c])`; shares need not add up to 1.
    ///
    /// *Order*: exponentials in f32; their sums as log-softmax has them, classes and rows in order, in f64. The loss is rounded once.
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
            refuse!(
                "{} shares of classes for scores of shape {:?}",
                shares.len(),
                self.dims()
            );
        }
        self.class_losses(classes, &options, rows as f64, |row| {
            Some(Target::Shares(&shares[row * classes..][..classes]))
        })
    }

    /// Numbers of classes and of rows, if the settings fit them.
    fn classes(&self, options: &CrossEntropyOptions<'_>) -> Result<(usize, usize)> {
        let dims = self.dims();
        let Some((&classes, outer)) = dims.split_last() else {
            refuse!("a loss over classes needs a dimension of classes");
        };
        let smoothing = options.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            refuse!("label smoothing is {smoothing}; it must lie between 0 and 1");
        }
        if let Some(w) = options.class_weights
            && w.len() != classes
        {
            refuse!("{} class weights for {classes} classes", w.len());
        }
        Ok((classes, outer.iter().product()))
    }

    /// `target(row)` is the target of a row, or nothing for a row that does not count. `mean` is what the mean divides by.
    fn class_losses<'t>(
        self,
        classes: usize,
        options: &CrossEntropyOptions<'_>,
        mean: f64,
        target: impl Fn(usize) -> Option<Target<'t>> + Sync,
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let each = options.reduction == Reduction::None;
        let divisor = match options.reduction {
            Reduction::None | Reduction::Sum => 1.0,
            Reduction::Mean => mean,
            Reduction::Over(d) => f64::from(d),
        };
        let smoothing = options.label_smoothing;
        let factors = Factors {
            weights: options.class_weights,
            given: 1.0 - smoothing,
            even: smoothing / classes.max(1) as f64,
            divisor,
        };
        let shape = Shape::new(if each { &dims[..dims.len() - 1] } else { &[] })?;
        let rows = dims[..dims.len() - 1].iter().product();
        let mut st = step.state();
        let mut grad = st.take_for_writing(x);
        let mut buf = st.pool.get(shape.numel());
        // Of f64s.
        let mut losses = st.pool.get(2 * rows);
        let losses_of_rows = &mut losses.f64_mut()[..rows];
        let made = grad.slice_mut();
        class_rows(
            step.threads(),
            made,
            losses_of_rows,
            |i, row| match target(i) {
                Some(target) => factors.differentiate(&target, row),
                None => {
                    row.fill(0.0);
                    0.0
                }
            },
        );
        if each {
            for (to, loss) in buf.slice_mut().iter_mut().zip(&*losses_of_rows) {
                *to = *loss as f32;
            }
        } else {
            // Not `sum`, which makes -0.0 of nothing.
            let total = losses_of_rows.iter().fold(0.0, |sum, loss| sum + loss);
            buf.slice_mut()[0] = (total / divisor) as f32;
        }
        let wide = if each { classes } else { grad.slice().len() };
        st.pool.put(losses);
        let (kind, op) = ((shape, Precision::F32), Prepared { wide, name: None });
        step.emit(&mut st, [x], kind, (buf, Some(grad)), op)
    }
}

/// The factor of -log p of class c is `weight[c] * (given * share[c] + even)`.
struct Factors<'a> {
    weights: Option<&'a [f32]>,
    given: f64,
    even: f64,
    divisor: f64,
}

impl Factors<'_> {
    fn of(&self, class: usize, share: f64) -> f64 {
        let weight = self.weights.map_or(1.0, |w| f64::from(w[class]));
        weight * (self.given * share + self.even)
    }

    /// The loss of a row of scores, which become its gradient.
    fn differentiate(&self, target: &Target<'_>, row: &mut [f32]) -> f64 {
        let (most, sum) = exponentials(row);
        let shift = f64::from(most) + sum.ln();
        // An impossible class that does not count must not make NaN.
        let loss = |factor: f64, score: f32| {
            if factor == 0.0 {
                0.0
            } else {
                factor * (shift - f64::from(score))
            }
        };
        if let (Target::Label(label), true) = (target, self.even == 0.0) {
            // No other class has a factor.
            let (label, factor) = (*label, self.of(*label, 1.0));
            let score = row[label];
            scaled_exponentials(row, most, (factor / sum / self.divisor) as f32);
            let over = (f64::from(score) - shift).exp_m1();
            row[label] = (factor * over / self.divisor) as f32;
            return loss(factor, score);
        }
        let factor = |class: usize| {
            let share = match target {
                Target::Label(label) => f64::from(u8::from(class == *label)),
                Target::Shares(shares) => f64::from(shares[class]),
            };
            self.of(class, share)
        };
        let (mut total, mut factors) = (0.0, 0.0);
        for (class, &score) in row.iter().enumerate() {
            let factor = factor(class);
            factors += factor;
            total += loss(factor, score);
        }
        scaled_exponentials(row, most, (1.0 / sum) as f32);
        for (class, v) in row.iter_mut().enumerate() {
            *v = ((f64::from(*v) * factors - factor(class)) / self.divisor) as f32;
        }
        total
    }
}
