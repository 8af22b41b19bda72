//! `watch` events: weights and gradients by tensor, over steps.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::curve::{Curve, Points, spread};

/// Most tensors, those of weights and of gradients counted each.
const MAX_TENSORS: usize = 600;
/// Most steps, and most steps times tensors.
const MAX_STEPS: usize = 100;
const MAX_COLUMNS: usize = 20_000;
/// Most parts of a histogram.
const MAX_BUCKETS: usize = 32;

/// Weights and gradients at some steps.
#[derive(Debug, Serialize)]
pub struct Watch {
    steps: Vec<f64>,
    tensors: Vec<Tensor>,
    /// The Euclidean norm over all tensors, at each step of the file.
    norms: BTreeMap<&'static str, Points>,
    /// Steps and tensors of the file.
    steps_total: usize,
    tensors_total: usize,
}

/// One tensor, a value each step; `None` where the file has none.
#[derive(Debug, Default, Serialize)]
struct Tensor {
    name: String,
    kind: &'static str,
    mean: Vec<Option<f32>>,
    deviation: Vec<Option<f32>>,
    min: Vec<Option<f32>>,
    max: Vec<Option<f32>>,
    /// A digit for each equal part between min and max: 9 for the most values, 0 for none.
    levels: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(bound(deserialize = "H: Deserialize<'de>"))]
struct Record<'a, H> {
    #[serde(borrow, default)]
    parameters: BTreeMap<Cow<'a, str>, H>,
    #[serde(borrow, default)]
    gradients: BTreeMap<Cow<'a, str>, H>,
}

impl<'a, H> Record<'a, H> {
    fn kinds(self) -> [(&'static str, BTreeMap<Cow<'a, str>, H>); 2] {
        [("weights", self.parameters), ("gradients", self.gradients)]
    }
}

#[derive(Debug, Deserialize)]
struct Squares {
    sum_squares: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct Histogram {
    count: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    sum: Option<f64>,
    sum_squares: Option<f64>,
    #[serde(default)]
    buckets: Vec<f64>,
}

impl Watch {
    /// The records of `lines`, each with its step; `None` if there are none.
    pub fn read(lines: &[(f64, &[u8])]) -> Option<Watch> {
        let mut norms: BTreeMap<&'static str, Curve> = BTreeMap::new();
        let mut tensors: BTreeMap<(String, &'static str), Tensor> = BTreeMap::new();
        let mut tensors_total = 0;
        for (step, line) in lines {
            let Ok(record) = serde_json::from_slice::<Record<Squares>>(line) else {
                continue;
            };
            for (kind, all) in record.kinds() {
                let sum: Option<f64> = all.values().map(|tensor| tensor.sum_squares).sum();
                let norm = sum
                    .map(f64::sqrt)
                    .filter(|v| v.is_finite() && !all.is_empty());
                if let Some(norm) = norm {
                    norms.entry(kind).or_default().add(*step, norm);
                }
                if let Some(names) = all.len().checked_sub(1) {
                    tensors_total = tensors_total.max(names + 1);
                }
            }
        }
        let most = (MAX_COLUMNS / (2 * tensors_total).clamp(1, MAX_TENSORS)).clamp(1, MAX_STEPS);
        let mut steps = Vec::new();
        for (step, line) in spread(lines.len(), most).into_iter().map(|i| lines[i]) {
            let Ok(record) = serde_json::from_slice::<Record<Histogram>>(line) else {
                continue;
            };
            for (kind, all) in record.kinds() {
                for (name, histogram) in all {
                    let id = (name.into_owned(), kind);
                    if tensors.len() == MAX_TENSORS && !tensors.contains_key(&id) {
                        continue;
                    }
                    let tensor = tensors.entry(id).or_default();
                    tensor.fill(steps.len());
                    tensor.add(histogram);
                }
            }
            steps.push(step);
        }
        let named = tensors.into_iter().map(|((name, kind), mut tensor)| {
            tensor.fill(steps.len());
            Tensor {
                name,
                kind,
                ..tensor
            }
        });
        let tensors: Vec<Tensor> = named.collect();
        (!tensors.is_empty()).then(|| Watch {
            steps,
            tensors,
            norms: norms.into_iter().map(|(k, c)| (k, c.points())).collect(),
            steps_total: lines.len(),
            tensors_total,
        })
    }
}

impl Tensor {
    /// Has nothing at the steps up to `steps` that it lacks.
    fn fill(&mut self, steps: usize) {
        for column in [
            &mut self.mean,
            &mut self.deviation,
            &mut self.min,
            &mut self.max,
        ] {
            column.resize(steps, None);
        }
        self.levels.resize(steps, String::new());
    }

    fn add(&mut self, histogram: Histogram) {
        let short = |value: Option<f64>| value.map(|v| v as f32).filter(|v| v.is_finite());
        let count = histogram.count.filter(|count| *count > 0.0);
        let per = |sum: Option<f64>| Some(sum? / count?);
        let mean = per(histogram.sum);
        let variance = per(histogram.sum_squares)
            .zip(mean)
            .map(|(s, m)| (s - m * m).max(0.0));
        self.mean.push(short(mean));
        self.deviation.push(short(variance.map(f64::sqrt)));
        self.min.push(short(histogram.min));
        self.max.push(short(histogram.max));
        self.levels.push(levels(&histogram.buckets));
    }
}

/// Counts as digits, their square roots in proportion: a part with few values is still seen.
fn levels(buckets: &[f64]) -> String {
    let width = buckets.len().div_ceil(MAX_BUCKETS).max(1);
    let parts: Vec<f64> = buckets
        .chunks(width)
        .map(|part| part.iter().sum())
        .collect();
    let most = parts.iter().copied().fold(0.0, f64::max);
    let level = |count: &f64| ((count / most).sqrt() * 9.0).ceil().clamp(0.0, 9.0) as u8;
    parts
        .iter()
        .map(|count| char::from(b'0' + level(count)))
        .collect()
}
