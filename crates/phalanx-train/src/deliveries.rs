//! What rank 0 hands to trackers.

use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_track::{Delivery, FINISH_WAIT, Tracker};

use crate::say;

/// What each tracker gets at the end, also where another one has used up the time.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// Deliveries of the run to trackers. None of them ends the training: what cannot be delivered is a warning.
#[derive(Default)]
pub(crate) struct Deliveries(Vec<Delivery>);

impl Deliveries {
    /// Begins to hand the run in the folder `dir` to `trackers`.
    pub(crate) fn start(dir: &Path, trackers: Vec<Box<dyn Tracker + Send>>) -> Deliveries {
        let started = trackers.into_iter().filter_map(|tracker| {
            let name = tracker.name().to_owned();
            let started = Delivery::start(dir, tracker);
            started
                .map_err(|e| warn(&format!("{name}: nothing is delivered: {}", e.chain())))
                .ok()
        });
        Deliveries(started.collect())
    }

    /// The run has ended. *Blocks* until everything is delivered, at most [`FINISH_WAIT`] and [`LEAST_WAIT`] for
    /// each further tracker; longer for those that [ask for it](Tracker::patience).
    pub(crate) fn finish(&mut self) {
        self.0.iter().for_each(Delivery::end);
        let until = Instant::now() + FINISH_WAIT;
        for delivery in self.0.drain(..) {
            let left = until.saturating_duration_since(Instant::now());
            if let Err(error) = delivery.finish(left.max(LEAST_WAIT)) {
                warn(&error.chain());
            }
        }
    }
}

impl Drop for Deliveries {
    /// A training that was stopped, or failed.
    fn drop(&mut self) {
        self.finish();
    }
}

fn warn(what: &str) {
    say::note(format_args!("warning: {what}"));
}
