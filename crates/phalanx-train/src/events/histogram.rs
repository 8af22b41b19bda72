//! Histograms of parameters and gradients, for `--watch`.

use super::proto::Histogram;

/// As many as TensorBoard's own.
const BUCKETS: usize = 30;

/// Counts `values` in buckets of equal width between the smallest and the largest. NaN and infinities are left out.
pub(crate) fn of(values: &[f32]) -> Histogram {
    let finite = || {
        values
            .iter()
            .filter(|v| v.is_finite())
            .map(|v| f64::from(*v))
    };
    let mut histogram = Histogram::default();
    let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in finite() {
        (min, max) = (min.min(value), max.max(value));
        histogram.num += 1.0;
        histogram.sum += value;
        histogram.sum_squares += value * value;
    }
    if histogram.num == 0.0 {
        return histogram;
    }
    (histogram.min, histogram.max) = (min, max);
    let buckets = if min < max { BUCKETS } else { 1 };
    let width = (max - min) / buckets as f64;
    histogram.bucket = vec![0.0; buckets];
    for value in finite() {
        // 0 where all are equal: the division gives no number.
        let at = ((value - min) / width) as usize;
        histogram.bucket[at.min(buckets - 1)] += 1.0;
    }
    let limits = (1..buckets).map(|i| min + width * i as f64).chain([max]);
    histogram.bucket_limit = limits.collect();
    histogram
}
