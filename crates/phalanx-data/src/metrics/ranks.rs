//! Measures by the order of values.

use super::confusion::rows;
use phalanx_base::Result;

/// Number of rows of `classes` scores whose label is among the `k` classes with the highest scores (accuracy at k). Of equal
/// scores the first class is the higher; a NaN is below all.
///
/// # Errors
///
/// `Usage` unless there is one row of scores for each label.
pub fn top_k(scores: &[f32], classes: usize, labels: &[u32], k: usize) -> Result<usize> {
    let is_right = |(row, label): &(&[f32], u32)| {
        let label = *label as usize;
        let Some(own) = row.get(label).filter(|own| !own.is_nan()) else {
            return false;
        };
        let is_higher =
            |(class, score): &(usize, &f32)| *score > own || *score == own && *class < label;
        row.iter().enumerate().filter(is_higher).count() < k
    };
    Ok(rows(scores, classes, labels)?.filter(is_right).count())
}

/// Area under the ROC curve of scores and whether each sample is positive: the share of pairs of a positive and a negative
/// sample in which the positive one has the higher score, where equal scores count half. `None` without such a pair, and
/// with a score that is NaN.
///
/// *Source*: Mann and Whitney, 1947, by the sum of the positive samples' ranks.
pub fn roc_auc(samples: &[(f64, bool)]) -> Option<f64> {
    let mut sorted: Vec<&(f64, bool)> = samples.iter().collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut before, mut ranks) = (0.0, 0.0);
    for equal in sorted.chunk_by(|a, b| a.0 == b.0) {
        let positive = equal.iter().filter(|sample| sample.1).count() as f64;
        ranks += positive * (before + (equal.len() as f64 + 1.0) / 2.0);
        before += equal.len() as f64;
    }
    let positive = samples.iter().filter(|sample| sample.1).count() as f64;
    let pairs = positive * (samples.len() as f64 - positive);
    let is_nan = samples.iter().any(|sample| sample.0.is_nan());
    (pairs > 0.0 && !is_nan).then(|| (ranks - positive * (positive + 1.0) / 2.0) / pairs)
}

/// The value below which the share `q` of all `values` lies, interpolated between two of them as `torch.quantile` does: 0.5 is
/// the median. `None` without values, with one that is NaN, and unless `q` is from 0 to 1.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    if values.is_empty() || values.iter().any(|v| v.is_nan()) || !(0.0..=1.0).contains(&q) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = q * (sorted.len() - 1) as f64;
    let (low, high) = (
        sorted[place.floor() as usize],
        sorted[place.ceil() as usize],
    );
    Some(low + (high - low) * place.fract())
}
