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
    /// Steps taken.
    pub steps: u64,
    /// Floating-point operations of this rank's model in the steps.
    pub flops: f64,
    /// The measured peak, in floating-point operations per second; 0 if it was not measured.
    pub peak_flops_per_s: f64,
    /// Time and operations at the last call of [`mfu`](Self::mfu).
    mfu_since: (Duration, f64),
}

impl Timing {
    /// Adds a step of `images` samples over all ranks; one of another group of parameters has none.
    pub fn add(&mut self, exposed: Duration, images: usize) {
        self.exposed += exposed;
        self.images += images;
        self.steps += u64::from(images > 0);
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

    /// Model FLOPs utilization, the share of the peak that the model's operations reach, since the last call: `trained` is the
    /// time in steps so far, checkpoints included. None where it is not known.
    pub fn mfu(&mut self, trained: Duration) -> Option<f64> {
        let now = (trained.saturating_sub(self.saved), self.flops);
        let (time, flops) = std::mem::replace(&mut self.mfu_since, now);
        self.share_of_peak(now.1 - flops, now.0.saturating_sub(time))
    }

    /// The same of the run.
    pub fn total_mfu(&self) -> Option<f64> {
        self.share_of_peak(self.flops, self.trained.saturating_sub(self.saved))
    }

    fn share_of_peak(&self, flops: f64, time: Duration) -> Option<f64> {
        let share = flops / time.as_secs_f64() / self.peak_flops_per_s;
        (flops > 0.0 && share.is_finite()).then_some(share)
    }

    /// Floating-point operations of a step on this rank.
    pub fn flops_per_step(&self) -> Option<f64> {
        (self.flops > 0.0).then(|| self.flops / self.steps.max(1) as f64)
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
