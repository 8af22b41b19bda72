//! Which weights are the best, and when a training stops because they get no better.

use std::collections::BTreeMap;
use std::fmt;

use phalanx_checkpoint::state::Place;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, refuse};
use crate::evaluation::Evaluation;
use crate::format::{plural, rounded};

/// The measure that decides, and which of two values is better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BestMeasure {
    metric: String,
    greatest: bool,
}

const ACCURACY: &str = "accuracy";
const LOSS: &str = "test_loss";

impl BestMeasure {
    fn new(metric: &str, greatest: bool) -> BestMeasure {
        BestMeasure {
            metric: metric.to_owned(),
            greatest,
        }
    }

    /// The accuracy of what classifies, otherwise the loss.
    fn default_for(evaluation: &Evaluation) -> BestMeasure {
        match evaluation.confusion.classes() {
            0 => BestMeasure::new(LOSS, false),
            _ => BestMeasure::new(ACCURACY, true),
        }
    }

    /// Of `name`, `name:max` or `name:min`.
    ///
    /// # Errors
    ///
    /// `Usage`, when it is none of these, or `name` needs an order.
    pub fn parse(text: &str) -> Result<BestMeasure> {
        let (metric, order) = match text.rsplit_once(':') {
            Some((metric, order)) => (metric, Some(order)),
            None => (text, None),
        };
        let metric = match metric {
            "loss" => LOSS,
            metric => metric,
        };
        let wrong = |why: String| Err(Error::usage(format!(".best(\"{text}\"): {why}")));
        match (metric, order) {
            ("", _) => wrong("the name of a measure is missing".to_owned()),
            (_, Some("max")) | (ACCURACY, None) => Ok(BestMeasure::new(metric, true)),
            (_, Some("min")) | (LOSS, None) => Ok(BestMeasure::new(metric, false)),
            _ => wrong(format!("say {metric}:min or {metric}:max")),
        }
    }

    /// What `evaluation` has of the measure.
    fn value(&self, evaluation: &Evaluation) -> Option<f64> {
        let named = |name: &str| evaluation.values.get(name).copied();
        match &*self.metric {
            ACCURACY => (evaluation.confusion.classes() > 0).then_some(evaluation.accuracy),
            LOSS => Some(evaluation.loss),
            name => named(name).or_else(|| named(name.strip_prefix("test_")?)),
        }
    }
}

impl fmt::Display for BestMeasure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.greatest { "max" } else { "min" };
        write!(f, "{}:{order}", self.metric)
    }
}

/// Stops a training early, when the measure that [`best`](crate::TrainerBuilder::best) names has not improved for some evaluations: the accuracy, or the
/// loss if there is none. Made for [`TrainerBuilder::early_stopping`](crate::TrainerBuilder::early_stopping).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EarlyStopping {
    patience: usize,
    min_delta: f64,
}

impl EarlyStopping {
    /// After `patience` evaluations in a row, at least 1, without an improvement.
    pub fn new(patience: usize) -> EarlyStopping {
        EarlyStopping {
            patience: patience.max(1),
            min_delta: 0.0,
        }
    }

    /// What is not better by more than `delta` counts as no improvement.
    #[must_use]
    pub fn min_delta(mut self, delta: f64) -> EarlyStopping {
        self.min_delta = delta.abs();
        self
    }

    /// Whether the measure, which had these values in all evaluations, has not improved for too long.
    fn is_reached(&self, values: impl Iterator<Item = f64>, greatest: bool) -> bool {
        let (mut best, mut since) = (f64::NAN, 0);
        for value in values {
            let is_better = match greatest {
                _ if best.is_nan() => !value.is_nan(),
                true => value > best + self.min_delta,
                false => value < best - self.min_delta,
            };
            since += 1;
            if is_better {
                (best, since) = (value, 0);
            } else if since >= self.patience {
                return true;
            }
        }
        false
    }

    /// For the list of hyperparameters.
    pub(crate) fn describe(&self) -> String {
        format!(
            "early_stopping patience {}, min_delta {}",
            self.patience, self.min_delta
        )
    }
}

/// The best weights of a training so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BestEpoch {
    /// As [`BestMeasure`] shows it.
    by: String,
    /// From 1.
    epoch: usize,
    /// Of the training, after which they were evaluated; older checkpoints do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    /// As bits: JSON would round.
    value: u64,
    /// Of all that was measured until then: other branches of the run have another one. Older checkpoints do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    branch: Option<String>,
}

impl BestEpoch {
    pub(crate) fn new(by: &str, epoch: usize, step: Option<u64>, value: f64) -> BestEpoch {
        BestEpoch {
            by: by.to_owned(),
            epoch,
            step,
            value: value.to_bits(),
            branch: None,
        }
    }

    /// By accuracy, as older versions decided.
    pub(crate) fn by_accuracy(accuracies: &[f64]) -> Option<BestEpoch> {
        let mut best: Option<(usize, f64)> = None;
        for (epoch, accuracy) in (1..).zip(accuracies) {
            if best.is_none_or(|(_, most)| *accuracy > most) {
                best = Some((epoch, *accuracy));
            }
        }
        let by = BestMeasure::new(ACCURACY, true).to_string();
        best.map(|(epoch, accuracy)| BestEpoch::new(&by, epoch, None, accuracy))
    }

    /// Whether they are the weights at `place`.
    pub(crate) fn is_at(&self, place: Place) -> bool {
        match self.step {
            Some(step) => place.step == step,
            None => place.step_in_epoch == 0 && place.epoch as usize == self.epoch,
        }
    }

    /// In words: `accuracy 0.9812 in epoch 3`.
    pub(crate) fn describe(&self) -> String {
        let value = rounded(f64::from_bits(self.value));
        format!("{} {value} in epoch {}", self.metric(), self.epoch)
    }

    /// The measure, by its name.
    fn metric(&self) -> &str {
        let named = self.by.rsplit_once(':');
        named.map_or(&*self.by, |(metric, _)| metric)
    }

    /// What the file of its weights says in addition to them: the epoch, and the measure by its name.
    pub(crate) fn metadata(&self) -> Vec<(&str, String)> {
        let value = f64::from_bits(self.value).to_string();
        let mut metadata = vec![("epoch", self.epoch.to_string()), (self.metric(), value)];
        if let (Some(step), Some(branch)) = (self.step, &self.branch) {
            metadata.extend([("step", step.to_string()), ("branch", branch.clone())]);
        }
        metadata
    }

    /// As [`kept_name`], where these are the best weights.
    pub(crate) fn kept_name(&self) -> Option<String> {
        let metadata = self.metadata().into_iter();
        kept_name(&metadata.map(|(k, v)| (k.to_owned(), v)).collect())
    }
}

/// Files among the checkpoints that begin so are of earlier best weights, with which a checkpoint continues.
pub(crate) const KEPT_BEST: &str = "best-";

/// The name, without its ending, that a file of best weights with this `metadata` has among the checkpoints.
pub(crate) fn kept_name(metadata: &BTreeMap<String, String>) -> Option<String> {
    let step: u64 = metadata.get("step")?.parse().ok()?;
    let branch = u64::from_str_radix(metadata.get("branch")?, 16).ok()?;
    Some(format!("{KEPT_BEST}{step:09}-{branch:016x}"))
}

/// Whether the greatest value of the measure `by`, as [`BestMeasure`] shows it, is the best.
fn maximizes(by: &str) -> bool {
    by.ends_with(":max")
}

/// What an evaluation's measure was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricPoint {
    /// The measure, as [`BestMeasure`] shows it.
    by: String,
    /// Steps of the training before it.
    step: u64,
    /// As bits: JSON would round.
    value: u64,
}

impl MetricPoint {
    /// The steps before it.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Its value, and whether the greatest is the best.
    pub(crate) fn value(&self) -> (f64, bool) {
        (f64::from_bits(self.value), maximizes(&self.by))
    }
}

/// Compares evaluations by one measure.
#[derive(Debug)]
pub struct Best {
    wanted: Option<BestMeasure>,
    early: Option<EarlyStopping>,
    best: Option<BestEpoch>,
    is_new: bool,
    /// All evaluations that were compared, of which everything else follows.
    judged: Vec<MetricPoint>,
}

impl Best {
    /// By `wanted`, or by accuracy or loss.
    pub fn new(wanted: Option<BestMeasure>, early: Option<EarlyStopping>) -> Best {
        Best {
            wanted,
            early,
            best: None,
            is_new: false,
            judged: Vec::new(),
        }
    }

    /// Continues from the evaluations `judged`, of which `best` was the best.
    pub fn go_on(&mut self, best: Option<BestEpoch>, judged: &[MetricPoint]) {
        self.best = best;
        self.judged = judged.to_vec();
    }

    /// Compares the evaluation of epoch `epoch`, after `step` steps of the training, and gives the value of the measure that
    /// decides, and whether the greatest is the best. The first of equal ones is the best. `branch` is of all that was
    /// measured until then.
    ///
    /// # Errors
    ///
    /// `Usage`, when it has not the measure that decides.
    pub fn compare(
        &mut self,
        epoch: usize,
        step: u64,
        evaluation: &Evaluation,
        branch: String,
    ) -> Result<(f64, bool)> {
        let wanted = self.wanted.clone();
        let by = wanted.unwrap_or_else(|| BestMeasure::default_for(evaluation));
        let Some(value) = by.value(evaluation) else {
            let values = evaluation.values.keys().map(|name| &**name);
            let accuracy = (evaluation.confusion.classes() > 0).then_some(ACCURACY);
            let known: Vec<&str> = accuracy.into_iter().chain([LOSS]).chain(values).collect();
            refuse!(
                ".best(\"{by}\"): the evaluation has no {}; it has {}",
                by.metric,
                known.join(", ")
            );
        };
        let name = by.to_string();
        let before = self.best.as_ref().filter(|best| best.by == name);
        let before = before.map(|best| f64::from_bits(best.value));
        let is_better = before.is_none_or(|before| match by.greatest {
            true => value > before,
            false => value < before,
        });
        if is_better && !value.is_nan() {
            let best = BestEpoch::new(&name, epoch, Some(step), value);
            self.best = Some(BestEpoch {
                branch: Some(branch),
                ..best
            });
            self.is_new = true;
        }
        self.judged.push(MetricPoint {
            by: name,
            step,
            value: value.to_bits(),
        });
        Ok((value, by.greatest))
    }

    /// Whether an evaluation after `step` steps was compared.
    pub fn has_judged(&self, step: u64) -> bool {
        self.judged.last().is_some_and(|last| last.step == step)
    }

    /// The evaluations that were compared.
    pub fn judged(&self) -> &[MetricPoint] {
        &self.judged
    }

    /// The measure that the program has named.
    pub fn wanted(&self) -> Option<String> {
        self.wanted.as_ref().map(BestMeasure::to_string)
    }

    /// The name of the measure that the program has named, with its value in `evaluation`.
    pub fn named(&self, evaluation: &Evaluation) -> Option<String> {
        let wanted = self.wanted.as_ref()?;
        Some(format!(
            "{} {}",
            wanted.metric,
            rounded(wanted.value(evaluation)?)
        ))
    }

    /// Why the training stops early, in words.
    pub fn why_stopped(&self) -> Option<String> {
        let (early, best) = (self.early.filter(|_| self.stops())?, self.best.as_ref()?);
        let gain = match early.min_delta {
            0.0 => "not improved".to_owned(),
            delta => format!("not improved by more than {delta}"),
        };
        let evaluations = plural(early.patience, "evaluation");
        let (metric, best) = (best.metric(), best.describe());
        Some(format!(
            "{metric} has {gain} in {evaluations}; the best was {best}"
        ))
    }

    /// Whether the training is to stop early.
    pub fn stops(&self) -> bool {
        let (Some(early), Some(last)) = (&self.early, self.judged.last()) else {
            return false;
        };
        // It may have been another one before the run was resumed.
        let by = self.wanted().unwrap_or_else(|| last.by.clone());
        let judged = self.judged.iter().filter(|judged| judged.by == by);
        early.is_reached(judged.map(|judged| judged.value().0), maximizes(&by))
    }

    /// Whether the weights that were compared last are the best, and are not saved yet.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The epoch that was compared last, if it is the best; once.
    pub fn take_new(&mut self) -> Option<&BestEpoch> {
        let is_new = std::mem::take(&mut self.is_new);
        self.best.as_ref().filter(|_| is_new)
    }

    /// The best so far.
    pub fn so_far(&self) -> Option<&BestEpoch> {
        self.best.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use phalanx_data::metrics::Confusion;

    use super::*;

    #[test]
    fn a_measure_is_typed_with_its_order() {
        for (typed, shown) in [
            ("accuracy", "accuracy:max"),
            ("loss", "test_loss:min"),
            ("test_loss", "test_loss:min"),
            ("f1:max", "f1:max"),
            ("a:b:min", "a:b:min"),
        ] {
            assert_eq!(BestMeasure::parse(typed).expect(typed).to_string(), shown);
        }
        for wrong in ["f1", "f1:most", ":max", ""] {
            BestMeasure::parse(wrong).expect_err(wrong);
        }
    }

    fn evaluation(loss: f64, right: Option<i64>, mae: f64) -> Evaluation {
        let mut confusion = Confusion::new(right.map_or(0, |_| 2));
        for (count, there) in confusion
            .counts_mut()
            .iter_mut()
            .zip([right.unwrap_or(0), 10])
        {
            *count = there;
        }
        let mut evaluation = Evaluation::new(loss, confusion);
        evaluation.values.insert("mae".to_owned(), mae);
        evaluation
    }

    /// The best epochs as they are found.
    fn found(wanted: Option<&str>, all: &[Evaluation]) -> Vec<usize> {
        let wanted = wanted.map(|text| BestMeasure::parse(text).expect("a measure"));
        let mut best = Best::new(wanted, None);
        let mut found = Vec::new();
        for (epoch, evaluation) in (1..).zip(all) {
            best.compare(epoch, 0, evaluation, String::new())
                .expect("compared");
            found.extend(best.take_new().map(|best| best.epoch));
            assert!(best.take_new().is_none());
        }
        found
    }

    #[test]
    fn the_first_of_the_best_is_found_by_any_measure() {
        let nan = f64::NAN;
        let all = [
            evaluation(3.0, Some(1), nan),
            evaluation(1.0, Some(5), 7.0),
            evaluation(nan, Some(5), 9.0),
            evaluation(2.0, Some(6), 8.0),
        ];
        assert_eq!(found(None, &all), [1, 2, 4]);
        assert_eq!(found(Some("loss"), &all), [1, 2]);
        assert_eq!(found(Some("mae:max"), &all), [2, 3]);
        assert_eq!(found(Some("test_mae:min"), &all), [2]);
        let plain = [3.0, 4.0, 2.0].map(|loss| evaluation(loss, None, 0.0));
        assert_eq!(found(None, &plain), [1, 3]);
        let mut best = Best::new(BestMeasure::parse("accuracy").ok(), None);
        let error = best
            .compare(1, 0, &plain[0], String::new())
            .expect_err("no classifier");
        assert!(
            error.chain().contains("it has test_loss, mae"),
            "{}",
            error.chain()
        );
        let accuracies = [0.5, 0.75, 0.75, 0.25];
        let best = BestEpoch::by_accuracy(&accuracies).expect("one");
        assert_eq!(best, BestEpoch::new("accuracy:max", 2, None, 0.75));
    }

    #[test]
    fn an_early_stop_says_which_gain_was_missing() {
        let why = |early: EarlyStopping, wanted: &str, all: &[f64]| {
            let mut best = Best::new(BestMeasure::parse(wanted).ok(), Some(early));
            for (epoch, mae) in (1..).zip(all) {
                best.compare(epoch, 0, &evaluation(*mae, Some(1), *mae), String::new())
                    .expect("compared");
            }
            best.why_stopped()
        };
        let early = EarlyStopping::new(2);
        let all = [0.5, 0.3, 0.29, 0.28];
        assert_eq!(why(early, "mae:min", &all), None);
        let coarse = why(early.min_delta(0.1), "mae:min", &all);
        let text = "mae has not improved by more than 0.1 in 2 evaluations; the best was mae 0.2800 in epoch 4";
        assert_eq!(coarse.as_deref(), Some(text));
        let text =
            "test_loss has not improved in 1 evaluation; the best was test_loss 0.2000 in epoch 1";
        let loss = why(EarlyStopping::new(1), "loss", &[0.2, 0.2]);
        assert_eq!(loss.as_deref(), Some(text));
        let named = Best::new(BestMeasure::parse("test_mae:max").ok(), None);
        let evaluation = evaluation(1.0, None, 0.123_456);
        assert_eq!(named.named(&evaluation).as_deref(), Some("test_mae 0.1235"));
        assert_eq!(Best::new(None, None).named(&evaluation), None);
    }

    #[test]
    fn a_training_stops_after_so_many_evaluations_without_an_improvement() {
        let after = |early: EarlyStopping, values: &[f64], greatest| {
            let reached = |n: &usize| early.is_reached(values[..*n].iter().copied(), greatest);
            (1..=values.len()).find(reached)
        };
        let losses = [3.0, 2.0, 2.5, 2.0, 1.9, 1.95, f64::NAN, 1.9, 0.1];
        assert_eq!(after(EarlyStopping::new(3), &losses, false), Some(8));
        assert_eq!(after(EarlyStopping::new(4), &losses, false), None);
        assert_eq!(after(EarlyStopping::new(1), &losses, false), Some(3));
        assert_eq!(after(EarlyStopping::new(0), &losses, true), Some(2));
        let coarse = EarlyStopping::new(3).min_delta(0.2);
        assert_eq!(after(coarse, &losses, false), Some(5));
        let rising = [f64::NAN, 0.1, 0.2, 0.2, 0.2];
        assert_eq!(after(EarlyStopping::new(2), &rising, true), Some(5));
    }
}
