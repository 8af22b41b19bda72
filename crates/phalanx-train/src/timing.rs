//! Where the time of a training went.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::advice::Spent;

/// Sums over the steps of a run, on this rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Timing {
    /// In steps, validation left out.
    pub trained: Duration,
    /// In validation.
    pub tested: Duration,
    /// Communication that backward did not hide.
    pub exposed: Duration,
    /// Samples trained on, over all ranks.
    pub images: usize,
    /// Steps that the ranks voted down.
    pub skipped: u64,
    /// For batches, in training.
    pub waited: Duration,
    /// For checkpoints between two steps, in training.
    pub saved: Duration,
    /// By this rank to all others, whatever for.
    pub sent_bytes: u64,
}

impl Timing {
    /// Adds a step of `images` samples over all ranks.
    pub fn add(&mut self, exposed: Duration, images: usize) {
        self.exposed += exposed;
        self.images += images;
    }

    /// The same, as [`Spent::advice`] wants it.
    pub fn spent(&self, steps: usize) -> Spent {
        Spent {
            steps,
            total: self.trained,
            exposed: self.exposed,
            data: self.waited,
        }
    }

    /// Samples a second over all ranks.
    pub fn images_per_s(&self) -> f64 {
        self.images as f64 / self.trained.as_secs_f64().max(1e-9)
    }

    /// Share of the steps' time that communication added.
    pub fn exposed_percent(&self) -> f64 {
        100.0 * self.exposed.as_secs_f64() / self.trained.as_secs_f64().max(1e-9)
    }
}
