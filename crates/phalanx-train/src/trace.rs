//! `--trace`: one step as a Chrome trace, a file per rank.

use std::path::{Path, PathBuf};
use std::time::Instant;

use phalanx_data::metrics::write_summary;
use phalanx_ddp::StepTimes;
use serde_json::json;

use crate::error::Result;
use phalanx_launch::RankContext;

/// The step of the run, from 1, that is traced: when buckets have been rebuilt and memory
/// is warm.
const TRACED_STEP: usize = 3;

/// Writes the trace when its step has passed.
pub struct Trace {
    /// `None`: nothing wanted, or done.
    path: Option<PathBuf>,
    rank: usize,
    /// Steps that began.
    seen: usize,
}

/// Start of a step that is being traced.
pub struct Marks {
    began: Instant,
}

impl Trace {
    /// Will write `file` with `.<rank>.json` appended, or nothing.
    pub fn new(file: Option<&Path>, ctx: &RankContext) -> Trace {
        Trace {
            path: file.map(|f| crate::of_rank(f, ctx.rank(), "json")),
            rank: ctx.rank(),
            seen: 0,
        }
    }

    /// Marks the start of a step, if it is the one to trace.
    pub fn begin(&mut self) -> Option<Marks> {
        self.seen += 1;
        (self.path.is_some() && self.seen == TRACED_STEP).then(|| Marks {
            began: Instant::now(),
        })
    }

    /// Writes the trace of the step that `marks` began.
    ///
    /// # Errors
    ///
    /// Fails when the file cannot be written.
    pub fn end(
        &mut self,
        marks: Option<Marks>,
        forward_ended: Instant,
        times: Option<&StepTimes>,
    ) -> Result<()> {
        let Some(marks) = marks else {
            return Ok(());
        };
        let Some(path) = self.path.take() else {
            return Ok(());
        };
        let us =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as f64 / 1e3;
        let mut events = vec![json!({
            "name": "forward", "ph": "X", "pid": self.rank, "tid": 0,
            "ts": 0.0, "dur": us(marks.began, forward_ended),
        })];
        events.extend(
            times
                .map(|times| times.chrome_events(self.rank, marks.began))
                .into_iter()
                .flatten(),
        );
        if let Some(reduced) = times.and_then(|times| times.reduced) {
            events.push(json!({
                "name": "optimizer", "ph": "X", "pid": self.rank, "tid": 0,
                "ts": us(marks.began, reduced), "dur": us(reduced, Instant::now()),
            }));
        }
        for (thread, name) in [(0, "compute"), (1, "communication")] {
            events.push(json!({
                "name": "thread_name", "ph": "M", "pid": self.rank, "tid": thread, "args": { "name": name },
            }));
        }
        write_summary(
            &path,
            &json!({ "traceEvents": events, "displayTimeUnit": "ms" }),
        )?;
        Ok(())
    }

    /// At the end of the run: says if nothing was written.
    pub fn finish(&self, ctx: &RankContext) {
        if self.path.is_some() {
            ctx.note("--trace: the run has no third step to trace");
        }
    }
}
