//! The JSON half of a checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sampler::Cursor;

/// What files of this kind say of themselves.
pub(super) const FORMAT: &str = "phalanx state";

/// The version that is written, and the only one that is read.
pub(super) const VERSION: u32 = 1;

/// How far a training is: where the next step begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Epoch of the next step, from 0.
    pub epoch: u64,
    /// Samples of that epoch that all ranks together have taken.
    pub samples: u64,
    /// Steps of that epoch that were taken.
    pub step_in_epoch: u64,
    /// Steps of the training that were taken.
    pub step: u64,
}

impl Place {
    /// The sampler's part of it.
    pub fn cursor(&self) -> Cursor {
        Cursor {
            epoch: self.epoch,
            samples: self.samples,
        }
    }
}

/// Everything but the numbers of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub(super) format: String,
    pub(super) version: u32,
    /// Name of the data file beside the manifest.
    pub(super) file: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// Where the training goes on.
    pub place: Place,
    /// Steps that the optimizer has taken: less than the training's where
    /// ranks voted one down.
    pub optimizer_steps: u64,
    /// Names of the optimizer's buffers, in its order.
    pub optimizer_buffers: Vec<String>,
    /// Settings that a resumed training must share: name and value.
    pub facts: BTreeMap<String, String>,
    /// What else the program wants back: losses, accuracies.
    pub progress: serde_json::Value,
}
