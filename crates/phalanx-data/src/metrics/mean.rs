//! A running mean weighted by counts.

/// Sum and count; the mean is their ratio.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    /// Nothing measured yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value that is the mean of `count` samples, e.g. the loss of a
    /// batch.
    pub fn add(&mut self, mean: f64, count: usize) {
        // An empty batch has no mean; its NaN must not poison the others.
        if count > 0 {
            self.add_sum(mean * count as f64, count);
        }
    }

    /// Adds a value that is already the sum over `count` samples.
    pub fn add_sum(&mut self, sum: f64, count: usize) {
        self.sum += sum;
        self.count += count as f64;
    }

    /// The mean so far; `None` before the first sample.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// Number of samples, a whole number.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Sum and count, to be added over ranks by an all-reduce in float64.
    pub fn parts(&self) -> [f64; 2] {
        [self.sum, self.count]
    }

    /// The mean of what [`parts`](Self::parts) gave on all ranks, added up.
    pub fn from_parts([sum, count]: [f64; 2]) -> Self {
        Self { sum, count }
    }
}
