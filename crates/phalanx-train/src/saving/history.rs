//! What a training has measured so far, as its checkpoints keep it.

use serde::{Deserialize, Serialize};

/// What is measured on the way, and must go on where it stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// Test accuracy of each epoch, as bits: JSON would round.
    accuracies: Vec<u64>,
    /// All that went into the digest of the metrics.
    metrics: Vec<u64>,
    /// Sums of the running epoch's losses by part of the batches, and samples.
    losses: Vec<u64>,
    samples: u64,
    /// Steps that were voted down.
    pub(super) skipped_steps: u64,
    pub(super) hook: Option<Hook>,
}

/// The gradient hook's state; its numbers are in the data file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Hook {
    pub(super) name: String,
    pub(super) steps: u64,
    /// Name and length.
    pub(super) tensors: Vec<(String, usize)>,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn floats(bits: &[u64]) -> Vec<f64> {
    bits.iter().map(|v| f64::from_bits(*v)).collect()
}

impl History {
    /// `losses` and `samples` are of the running epoch, over all ranks.
    pub fn new(accuracies: &[f64], metrics: &[f64], losses: &[f64], samples: usize) -> History {
        History {
            accuracies: bits(accuracies),
            metrics: bits(metrics),
            losses: bits(losses),
            samples: samples as u64,
            ..History::default()
        }
    }

    /// Test accuracy of each epoch.
    pub fn accuracies(&self) -> Vec<f64> {
        floats(&self.accuracies)
    }

    /// All that went into the digest of the metrics.
    pub fn metrics(&self) -> Vec<f64> {
        floats(&self.metrics)
    }

    /// Sums of the running epoch's losses by part, and samples.
    pub fn losses(&self) -> (Vec<f64>, usize) {
        (floats(&self.losses), self.samples as usize)
    }
}
