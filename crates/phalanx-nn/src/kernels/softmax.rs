//! Log-softmax over rows. Sums and exponentials in f64: rows are short, and
//! the loss is what people compare.

/// `y = x - log(sum(exp(x)))` for every row of `classes`, in place.
pub(crate) fn log_softmax(y: &mut [f32], classes: usize) {
    if classes == 0 {
        return;
    }
    for row in y.chunks_exact_mut(classes) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row
            .iter()
            .map(|&v| (f64::from(v) - f64::from(max)).exp())
            .sum();
        let shift = f64::from(max) + sum.ln();
        for v in row {
            *v = (f64::from(*v) - shift) as f32;
        }
    }
}

/// `dy = dy - exp(y) * sum(dy)` for every row, in place.
pub(crate) fn log_softmax_backward(y: &[f32], dy: &mut [f32], classes: usize) {
    if classes == 0 {
        return;
    }
    for (row, d) in y.chunks_exact(classes).zip(dy.chunks_exact_mut(classes)) {
        let sum: f64 = d.iter().map(|&v| f64::from(v)).sum();
        for (d, &v) in d.iter_mut().zip(row) {
            *d = (f64::from(*d) - f64::from(v).exp() * sum) as f32;
        }
    }
}

/// Elements of a piece of whole rows, about 4,096.
pub(crate) fn piece(classes: usize) -> usize {
    classes.max(1) * (4096 / classes.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_numbers_do_not_overflow() {
        let mut y = [1000.0, 1001.0, 999.0];
        log_softmax(&mut y, 3);
        assert!((y[1] + 0.407_606).abs() < 1e-5);
        let mut d = [0.0, 1.0, 0.0];
        log_softmax_backward(&y, &mut d, 3);
        assert!(d.iter().sum::<f32>().abs() < 1e-6);
        log_softmax(&mut [], 0);
    }
}
