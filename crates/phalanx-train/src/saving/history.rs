//! What a training has measured so far, as its checkpoints keep it.

use phalanx_checkpoint::digest::MetricsDigest;
use phalanx_data::metrics::Confusion;
use phalanx_nn::optim::schedule::Schedule;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::best::{BestEpoch, MetricPoint};
use crate::evaluation::Evaluation;
use crate::param_group::SavedGroup;

/// What is measured on the way, and must continue where it stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// Test accuracy of each epoch, as bits: JSON would round.
    accuracies: Vec<u64>,
    /// All that went into the digest of the metrics, in older checkpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    metrics: Vec<u64>,
    /// The state of the digest of the metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metrics_state: Option<String>,
    /// Sums of the running epoch's losses by part of the batches, and samples.
    losses: Vec<u64>,
    samples: u64,
    /// The last evaluation; older checkpoints do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<SavedEvaluation>,
    /// The steps of the training before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_step: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// As the evaluations that were compared say.
    pub(crate) best: Option<BestEpoch>,
    /// The evaluations that were compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) judged: Vec<MetricPoint>,
    /// What was measured before the last evaluation, where `--max-steps` has cut an epoch for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before_cut: Option<Box<History>>,
    /// The learning rate that the program has set, as bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lr: Option<u64>,
    /// The program's own state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) state: Option<Value>,
    /// Steps that were voted down.
    pub(crate) skipped_steps: u64,
    /// Where there are several optimizers: all of them, the trainer's own first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) groups: Vec<SavedGroup>,
}

/// Most numbers of a confusion matrix that is read.
const MOST_CELLS: usize = 1 << 28;

/// An [`Evaluation`]; numbers as bits.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct SavedEvaluation {
    loss: u64,
    accuracy: u64,
    values: Vec<(String, u64)>,
    classes: usize,
    /// Counts that are not zero, and where they are.
    confusion: Vec<(usize, i64)>,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn floats(bits: &[u64]) -> Vec<f64> {
    bits.iter().map(|v| f64::from_bits(*v)).collect()
}

impl History {
    /// Accuracies, metrics and the `last` evaluation; `losses` and `samples` are of the running epoch, over all ranks.
    pub fn new(
        accuracies: &[f64],
        metrics: &MetricsDigest,
        (losses, samples): (&[f64], usize),
        last: &Evaluation,
    ) -> History {
        let counts = last.confusion.counts().iter().copied().enumerate();
        let values = last.values.iter();
        History {
            accuracies: bits(accuracies),
            metrics_state: Some(metrics.state()),
            losses: bits(losses),
            samples: samples as u64,
            last: Some(SavedEvaluation {
                loss: last.loss.to_bits(),
                accuracy: last.accuracy.to_bits(),
                values: values.map(|(k, v)| (k.clone(), v.to_bits())).collect(),
                classes: last.confusion.classes(),
                confusion: counts.filter(|(_, count)| *count != 0).collect(),
            }),
            ..History::default()
        }
    }

    /// The learning rate that the program has set.
    pub fn lr(&self) -> Option<f64> {
        self.lr.map(f64::from_bits)
    }

    /// Brings `schedule`, which is at its beginning, to where it was after `steps` steps.
    pub fn replay(&self, schedule: &mut Schedule, steps: u64) {
        let mut judged = self.judged.iter().peekable();
        for step in 1..=steps {
            schedule.advance();
            while let Some(judged) = judged.next_if(|judged| judged.step() <= step) {
                let (value, greatest) = judged.value();
                schedule.observe(value, greatest);
            }
        }
    }

    /// Continues after `step` steps, where `--max-steps` had cut an epoch: without the cut nothing would have been evaluated, or
    /// only a part of the epoch, if `is_part`.
    pub(crate) fn go_past_cut(&mut self, step: u64, is_part: bool) {
        let before = self.before_cut.take();
        if let Some(before) = &before {
            self.metrics_state.clone_from(&before.metrics_state);
        }
        match before {
            _ if is_part => {}
            Some(before) => {
                (self.last, self.last_step) = (before.last, before.last_step);
                (self.best, self.judged) = (before.best, before.judged);
            }
            // Of an older version.
            None => self.judged.retain(|judged| judged.step() != step),
        }
    }

    /// The best epoch so far.
    pub fn best(&self) -> Option<BestEpoch> {
        match self.last {
            Some(_) => self.best.clone(),
            // Of an older version.
            None => BestEpoch::by_accuracy(&self.accuracies()),
        }
    }

    /// The best weights of all from which a training may continue.
    pub(crate) fn bests(&self) -> impl Iterator<Item = &BestEpoch> {
        let before = self.before_cut.as_ref();
        let before = before.and_then(|before| before.best.as_ref());
        self.best.iter().chain(before)
    }

    /// The steps of the training before the last evaluation, as far as it is known.
    pub fn last_step(&self) -> Option<u64> {
        let judged = self.judged.last().map(MetricPoint::step);
        self.last_step.or(judged)
    }

    /// The last evaluation.
    pub fn last(&self) -> Option<Evaluation> {
        let saved = self.last.as_ref()?;
        let cells = saved.classes.checked_mul(saved.classes)?;
        if cells > MOST_CELLS {
            return None;
        }
        let mut confusion = Confusion::new(saved.classes);
        for (at, count) in &saved.confusion {
            *confusion.counts_mut().get_mut(*at)? = *count;
        }
        let values = saved.values.iter();
        Some(Evaluation {
            loss: f64::from_bits(saved.loss),
            accuracy: f64::from_bits(saved.accuracy),
            confusion,
            values: values
                .map(|(k, v)| (k.clone(), f64::from_bits(*v)))
                .collect(),
        })
    }

    /// Test accuracy of each epoch.
    pub fn accuracies(&self) -> Vec<f64> {
        floats(&self.accuracies)
    }

    /// The digest of the metrics; `None` where its state is damaged.
    pub fn metrics(&self) -> Option<MetricsDigest> {
        if let Some(state) = &self.metrics_state {
            return MetricsDigest::from_state(state);
        }
        let mut digest = MetricsDigest::new();
        let values = self.metrics.iter();
        values.for_each(|bits| digest.add(f64::from_bits(*bits)));
        Some(digest)
    }

    /// Sums of the running epoch's losses by part, and samples.
    pub fn losses(&self) -> (Vec<f64>, usize) {
        (floats(&self.losses), self.samples as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_goes_on_with_the_values_of_an_older_checkpoint_and_with_its_state() {
        let values = [0.5, f64::NAN, 3.0e-200];
        let mut digest = MetricsDigest::new();
        values.iter().for_each(|value| digest.add(*value));
        let older = serde_json::json!({
            "accuracies": [], "metrics": bits(&values), "losses": [], "samples": 0, "skipped_steps": 0, "hook": null,
        });
        let older = History::deserialize(older).expect("read");
        let newer = History::new(&[], &digest, (&[], 0), &Evaluation::nothing());
        let text = serde_json::to_string(&newer).expect("JSON");
        let newer: History = serde_json::from_str(&text).expect("read");
        for history in [&older, &newer] {
            assert_eq!(history.metrics().expect("whole").sha256(), digest.sha256());
        }
        let damaged = History {
            metrics_state: newer.metrics_state.map(|state| state[2..].to_owned()),
            ..History::default()
        };
        assert!(damaged.metrics().is_none());
    }
}
