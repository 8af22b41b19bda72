//! The times of one step, for traces and for the exposed communication: the part that
//! did *not* overlap with backward.

use std::time::{Duration, Instant};

/// The times of one bucket.
#[derive(Debug, Clone)]
pub struct BucketTimes {
    /// Bucket index (launch order).
    pub bucket: usize,
    /// Bytes of gradient in it.
    pub bytes: usize,
    /// Names of its parameters.
    pub label: std::sync::Arc<str>,
    /// Its last gradient was final and the all-reduce was issued.
    pub launched: Instant,
    /// The all-reduce began to run.
    pub started: Instant,
    /// The averaged gradients were complete.
    pub finished: Instant,
}

/// The times of one step's backward and communication.
#[derive(Debug, Clone, Default)]
pub struct StepTimes {
    /// The first gradient was requested.
    pub backward_began: Option<Instant>,
    /// All gradients were produced.
    pub backward_ended: Option<Instant>,
    /// All gradients were averaged.
    pub reduced: Option<Instant>,
    /// Time of the exchange within the optimizer's step, without the updates themselves: with
    /// [`Exchange::AtStep`](crate::Exchange::AtStep) that of gradients and parameters, with
    /// [`Exchange::ReduceScatter`](crate::Exchange::ReduceScatter) that of parameters.
    pub in_step: Duration,
    /// One entry per bucket, in launch order. Empty with a world of one, unless a hook averages.
    pub buckets: Vec<BucketTimes>,
}

impl StepTimes {
    /// Time that the training thread spent on communication after backward: waiting for it,
    /// and taking part in it in the optimizer's step.
    pub fn exposed(&self) -> Duration {
        let waited = match (self.backward_ended, self.reduced) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        waited + self.in_step
    }

    /// Whether the first bucket's all-reduce ran before backward had ended.
    pub fn overlapped(&self) -> bool {
        match (self.buckets.first(), self.backward_ended) {
            (Some(first), Some(end)) => first.started < end,
            _ => false,
        }
    }

    /// The step as events of the Chrome trace format ("X" events, microseconds
    /// since `origin`): backward on thread 0, all-reduces on thread 1 of
    /// process `rank`.
    pub fn chrome_events(&self, rank: usize, origin: Instant) -> Vec<serde_json::Value> {
        let event = |name: String, thread: u32, from: Instant, to: Instant| {
            serde_json::json!({
                "name": name, "ph": "X", "pid": rank, "tid": thread,
                "ts": from.saturating_duration_since(origin).as_nanos() as f64 / 1e3,
                "dur": to.saturating_duration_since(from).as_nanos() as f64 / 1e3,
            })
        };
        let mut events = Vec::new();
        if let (Some(from), Some(to)) = (self.backward_began, self.backward_ended) {
            events.push(event("backward".into(), 0, from, to));
            if let Some(reduced) = self.reduced {
                events.push(event("wait for gradients".into(), 0, to, reduced));
            }
        }
        for b in &self.buckets {
            let name = format!("all_reduce bucket {} ({})", b.bucket, b.label);
            events.push(event(name, 1, b.started, b.finished));
        }
        events
    }
}
