//! What rank 0 logs of a run: `metrics.jsonl`, and the same for TensorBoard.

use std::fmt::Display;
use std::io;

use phalanx_data::metrics::MetricsLog;
use phalanx_nn::{GradView, Params};
use serde_json::Value;

use crate::error::Result;
use crate::events::Events;
use crate::say;

/// The log of a run. `metrics.jsonl` must be written; events that cannot be written are warned of once, and the
/// training goes on without them.
#[derive(Debug)]
pub struct RunLog {
    metrics: MetricsLog,
    events: Option<Events>,
}

impl RunLog {
    pub(super) fn new(metrics: MetricsLog, events: Result<Events>) -> RunLog {
        let events = events.map_err(|error| warn(error.chain())).ok();
        RunLog { metrics, events }
    }

    pub(super) fn disabled() -> RunLog {
        RunLog {
            metrics: MetricsLog::disabled(),
            events: None,
        }
    }

    /// Writes a record of a step (with `loss`) or of an epoch.
    ///
    /// # Errors
    ///
    /// Those of writing `metrics.jsonl`.
    pub fn event(&mut self, record: &Value) -> Result<()> {
        self.metrics.event(record)?;
        self.repeat(record);
        Ok(())
    }

    /// Writes a record for TensorBoard only: `metrics.jsonl` already has it.
    pub(super) fn repeat(&mut self, record: &Value) {
        self.try_events(|events| events.record(record));
    }

    /// Writes histograms for TensorBoard, as [`Events::histograms`].
    pub(super) fn histograms(&mut self, step: u64, params: &Params, grads: Option<&dyn GradView>) {
        self.try_events(|events| events.histograms(step, params, grads));
    }

    /// Hands all events to the system: a run that is resumed from a checkpoint has those before it.
    pub fn flush(&mut self) {
        self.try_events(Events::flush);
    }

    fn try_events(&mut self, write: impl FnOnce(&mut Events) -> io::Result<()>) {
        if let Some(events) = &mut self.events
            && let Err(error) = write(events)
        {
            warn(format_args!("{}: {error}", events.path().display()));
            self.events = None;
        }
    }
}

fn warn(why: impl Display) {
    say::note(format_args!(
        "warning: events for TensorBoard are not written from now on: {why}"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::tests::on_a_full_disk;
    use phalanx_data::files::Dir;
    use serde_json::json;

    #[test]
    fn a_full_disk_ends_the_events_and_not_the_metrics() {
        let dir = tempfile::tempdir().expect("folder");
        let open = Dir::open(dir.path()).expect("folder");
        let metrics = MetricsLog::create(&open, "metrics.jsonl", 1).expect("a log");
        let mut log = RunLog::new(metrics, Ok(on_a_full_disk()));
        log.event(&json!({"step": 0, "loss": 1.0}))
            .expect("written");
        assert!(log.events.is_some(), "nothing has reached the disk");
        for step in 1..3 {
            log.event(&json!({"step": step, "train_loss": 1.0}))
                .expect("written");
            assert!(log.events.is_none());
        }
        let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("a file");
        assert_eq!(text.lines().count(), 3);
    }
}
