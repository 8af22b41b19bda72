//! A running mean weighted by counts.

/// A weighted mean, kept as sum and count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    /// An empty mean.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a mean over `count` samples, for example the loss of a batch.
    pub fn add(&mut self, mean: f64, count: usize) {
        // The mean of an empty batch is NaN and must not be added.
        if count > 0 {
            self.add_sum(mean * count as f64, count);
        }
    }

    /// Adds a sum over `count` samples.
    pub fn add_sum(&mut self, sum: f64, count: usize) {
        self.sum += sum;
        self.count += count as f64;
    }

    /// The mean so far; `None` before the first sample.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// Number of samples (an integer).
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Sum and count, for an all-reduce in float64.
    pub fn parts(&self) -> [f64; 2] {
        [self.sum, self.count]
    }

    /// The mean of the sum of all ranks' [`parts`](Self::parts).
    pub fn from_parts([sum, count]: [f64; 2]) -> Self {
        Self { sum, count }
    }
}
