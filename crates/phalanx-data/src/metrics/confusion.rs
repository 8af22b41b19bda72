//! Accuracy and confusion matrix.

use phalanx_base::{Result, refuse};

/// The class with the highest score; the first of equal ones. NaN counts as lowest. `None`
/// without scores.
pub fn argmax(scores: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (class, &score) in scores.iter().enumerate() {
        match best {
            Some((_, highest)) if score <= highest || score.is_nan() => {}
            _ => best = Some((class, score)),
        }
    }
    best.map(|(class, _)| class)
}

pub(super) fn rows<'a>(
    scores: &'a [f32],
    classes: usize,
    labels: &'a [u32],
) -> Result<impl Iterator<Item = (&'a [f32], u32)>> {
    if classes == 0 || scores.len() != classes * labels.len() {
        refuse!(
            "{} scores of {classes} classes do not match {} labels",
            scores.len(),
            labels.len()
        );
    }
    Ok(scores.chunks_exact(classes).zip(labels.iter().copied()))
}

/// Confusion matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    counts: Vec<i64>,
}

impl Confusion {
    /// An empty matrix for `classes` classes.
    pub fn new(classes: usize) -> Self {
        Self {
            classes,
            counts: vec![0; classes * classes],
        }
    }

    /// Counts one prediction.
    ///
    /// # Errors
    ///
    /// `Usage` for a class that does not exist.
    pub fn add(&mut self, label: u32, predicted: usize) -> Result<()> {
        let label = label as usize;
        if label >= self.classes || predicted >= self.classes {
            refuse!(
                "label {label} or prediction {predicted} is outside the {} classes",
                self.classes
            );
        }
        self.counts[label * self.classes + predicted] += 1;
        Ok(())
    }

    /// Counts the predictions of a batch: rows with one score per class.
    ///
    /// # Errors
    ///
    /// `Usage` unless there is one row of scores for each label.
    pub fn add_scores(&mut self, scores: &[f32], labels: &[u32]) -> Result<()> {
        for (row, label) in rows(scores, self.classes, labels)? {
            // Rows are not empty, so there is a prediction.
            self.add(label, argmax(row).unwrap_or(0))?;
        }
        Ok(())
    }

    /// Adds the counts of `other`.
    ///
    /// # Errors
    ///
    /// `Usage`, when it has another number of classes.
    pub fn merge(&mut self, other: &Confusion) -> Result<()> {
        if other.classes() != self.classes() {
            refuse!(
                "a batch has {} classes, earlier batches have {}",
                other.classes(),
                self.classes()
            );
        }
        for (all, count) in self.counts_mut().iter_mut().zip(other.counts()) {
            *all += count;
        }
        Ok(())
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Counts by true class (rows) and predicted class (columns).
    pub fn counts(&self) -> &[i64] {
        &self.counts
    }

    /// The counts for an all-reduce over ranks.
    pub fn counts_mut(&mut self) -> &mut [i64] {
        &mut self.counts
    }

    /// Number of predictions.
    pub fn total(&self) -> i64 {
        self.counts.iter().sum()
    }

    /// Share of correct predictions; `None` if there are none.
    pub fn accuracy(&self) -> Option<f64> {
        let right: i64 = self.counts.iter().step_by(self.classes + 1).sum();
        let total = self.total();
        (total > 0).then(|| right as f64 / total as f64)
    }

    /// Recall of class `class`; `None` if it does not exist or did not occur.
    pub fn recall(&self, class: usize) -> Option<f64> {
        let row = self.counts.chunks_exact(self.classes.max(1)).nth(class)?;
        let total: i64 = row.iter().sum();
        (total > 0).then(|| row[class] as f64 / total as f64)
    }

    /// Precision of class `class`: the share of the samples taken for it that are of it. `None` if it does not exist or none
    /// was taken for it.
    pub fn precision(&self, class: usize) -> Option<f64> {
        let column = self.counts.iter().skip(class).step_by(self.classes.max(1));
        let total: i64 = column.sum();
        let right = *self.counts.get(class * self.classes + class)?;
        (class < self.classes && total > 0).then(|| right as f64 / total as f64)
    }

    /// The F1 score of class `class`: twice the right predictions of it, divided by its samples and the predictions of it
    /// together. `None` if it does not exist, or there are neither.
    pub fn f1(&self, class: usize) -> Option<f64> {
        let row = self.counts.chunks_exact(self.classes.max(1)).nth(class)?;
        let column = self.counts.iter().skip(class).step_by(self.classes);
        let total = row.iter().sum::<i64>() + column.sum::<i64>();
        (total > 0).then(|| 2.0 * row[class] as f64 / total as f64)
    }

    /// The mean of the F1 scores of all classes that have one (scikit-learn's `average="macro"`); `None` without any.
    pub fn macro_f1(&self) -> Option<f64> {
        let all: Vec<f64> = (0..self.classes)
            .filter_map(|class| self.f1(class))
            .collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    }
}
