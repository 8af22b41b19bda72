//! Which epoch has the best weights.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::trainer::Evaluation;

/// `--best`: the measure that decides, and which of two values is better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BestArg {
    metric: String,
    greatest: bool,
}

const ACCURACY: &str = "accuracy";
const LOSS: &str = "test_loss";

impl BestArg {
    fn new(metric: &str, greatest: bool) -> BestArg {
        BestArg {
            metric: metric.to_owned(),
            greatest,
        }
    }

    /// The accuracy of what classifies, otherwise the loss.
    fn usual(evaluation: &Evaluation) -> BestArg {
        match evaluation.confusion.classes() {
            0 => BestArg::new(LOSS, false),
            _ => BestArg::new(ACCURACY, true),
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

impl FromStr for BestArg {
    type Err = String;

    fn from_str(typed: &str) -> std::result::Result<BestArg, String> {
        let (metric, order) = match typed.rsplit_once(':') {
            Some((metric, order)) => (metric, Some(order)),
            None => (typed, None),
        };
        let metric = match metric {
            "loss" => LOSS,
            metric => metric,
        };
        match (metric, order) {
            ("", _) => Err("the name of a measure is missing".to_owned()),
            (_, Some("max")) | (ACCURACY, None) => Ok(BestArg::new(metric, true)),
            (_, Some("min")) | (LOSS, None) => Ok(BestArg::new(metric, false)),
            _ => Err(format!("say {metric}:min or {metric}:max")),
        }
    }
}

impl fmt::Display for BestArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.greatest { "max" } else { "min" };
        write!(f, "{}:{order}", self.metric)
    }
}

/// The best epoch of a training so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BestEpoch {
    /// As [`BestArg`] shows it.
    by: String,
    epoch: usize,
    /// As bits: JSON would round.
    value: u64,
}

impl BestEpoch {
    pub(crate) fn new(by: &str, epoch: usize, value: f64) -> BestEpoch {
        BestEpoch {
            by: by.to_owned(),
            epoch,
            value: value.to_bits(),
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
        let by = BestArg::new(ACCURACY, true).to_string();
        best.map(|(epoch, accuracy)| BestEpoch::new(&by, epoch, accuracy))
    }

    /// The epoch, from 1.
    pub(crate) fn epoch(&self) -> usize {
        self.epoch
    }

    /// What the file of its weights says beside them: the epoch, and the measure by its name.
    pub(crate) fn metadata(&self) -> [(&str, String); 2] {
        let metric = self
            .by
            .rsplit_once(':')
            .map_or(&*self.by, |(metric, _)| metric);
        let value = f64::from_bits(self.value).to_string();
        [("epoch", self.epoch.to_string()), (metric, value)]
    }
}

/// Finds the best epoch.
#[derive(Debug)]
pub struct Best {
    wanted: Option<BestArg>,
    best: Option<BestEpoch>,
    is_new: bool,
}

impl Best {
    /// By `wanted`, or by accuracy or loss; `before` was the best one until here.
    pub fn new(wanted: Option<BestArg>, before: Option<BestEpoch>) -> Best {
        Best {
            wanted,
            best: before,
            is_new: false,
        }
    }

    /// Compares the evaluation of epoch `epoch`. The first of equal ones is the best.
    ///
    /// # Errors
    ///
    /// `Usage`, when it has not the measure that decides.
    pub fn compare(&mut self, epoch: usize, evaluation: &Evaluation) -> Result<()> {
        let wanted = self.wanted.clone();
        let by = wanted.unwrap_or_else(|| BestArg::usual(evaluation));
        let Some(value) = by.value(evaluation) else {
            let values = evaluation.values.keys().map(|name| &**name);
            let accuracy = (evaluation.confusion.classes() > 0).then_some(ACCURACY);
            let known: Vec<&str> = accuracy.into_iter().chain([LOSS]).chain(values).collect();
            return Err(Error::usage(format!(
                "--best {by}: the evaluation has no {}; it has {}",
                by.metric,
                known.join(", ")
            )));
        };
        let name = by.to_string();
        let before = self.best.as_ref().filter(|best| best.by == name);
        let before = before.map(|best| f64::from_bits(best.value));
        let is_better = before.is_none_or(|before| match by.greatest {
            true => value > before,
            false => value < before,
        });
        if is_better && !value.is_nan() {
            self.best = Some(BestEpoch::new(&name, epoch, value));
            self.is_new = true;
        }
        Ok(())
    }

    /// The epoch that was compared last, if it is the best; once.
    pub fn take_new(&mut self) -> Option<&BestEpoch> {
        let is_new = std::mem::take(&mut self.is_new);
        self.best.as_ref().filter(|_| is_new)
    }

    /// The best epoch so far.
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
            assert_eq!(typed.parse::<BestArg>().expect(typed).to_string(), shown);
        }
        for wrong in ["f1", "f1:most", ":max", ""] {
            typed_wrong(wrong);
        }
    }

    fn typed_wrong(typed: &str) {
        typed.parse::<BestArg>().expect_err(typed);
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
        let wanted = wanted.map(|typed| typed.parse().expect("a measure"));
        let mut best = Best::new(wanted, None);
        let mut found = Vec::new();
        for (epoch, evaluation) in (1..).zip(all) {
            best.compare(epoch, evaluation).expect("compared");
            found.extend(best.take_new().map(BestEpoch::epoch));
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
        let mut best = Best::new("accuracy".parse().ok(), None);
        let error = best.compare(1, &plain[0]).expect_err("no classifier");
        assert!(
            error.chain().contains("it has test_loss, mae"),
            "{}",
            error.chain()
        );
        let accuracies = [0.5, 0.75, 0.75, 0.25];
        let best = BestEpoch::by_accuracy(&accuracies).expect("one");
        assert_eq!(best, BestEpoch::new("accuracy:max", 2, 0.75));
    }
}
