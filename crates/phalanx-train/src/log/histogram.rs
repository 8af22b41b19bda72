//! Histograms of parameters and gradients, for `--watch`.

use serde::Serialize;

/// What `events.jsonl` has of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Histogram {
    count: f64,
    min: f64,
    max: f64,
    sum: f64,
    sum_squares: f64,
    /// Counts between `min` and `max` in equal parts.
    buckets: Vec<f64>,
}

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
        histogram.count += 1.0;
        histogram.sum += value;
        histogram.sum_squares += value * value;
    }
    if histogram.count == 0.0 {
        return histogram;
    }
    (histogram.min, histogram.max) = (min, max);
    let buckets = if min < max { BUCKETS } else { 1 };
    let width = (max - min) / buckets as f64;
    histogram.buckets = vec![0.0; buckets];
    for value in finite() {
        // 0 where all are equal: the division gives no number.
        let at = ((value - min) / width) as usize;
        histogram.buckets[at.min(buckets - 1)] += 1.0;
    }
    histogram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_number_is_counted() {
        let infinite = [f32::NAN, f32::INFINITY];
        let histogram = of(&[&infinite[..], &[-1.0, 0.0, 1.0, 2.0]].concat());
        // 30 buckets of a tenth from -1 to 2.
        let filled = |at: usize| f64::from(u8::from([0, 10, 20, 29].contains(&at)));
        let expected = Histogram {
            count: 4.0,
            min: -1.0,
            max: 2.0,
            sum: 2.0,
            sum_squares: 6.0,
            buckets: (0..30).map(filled).collect(),
        };
        assert_eq!(histogram, expected);
        assert_eq!(of(&[0.5; 3]).buckets, [3.0]);
        assert_eq!(of(&infinite), Histogram::default());
    }
}
