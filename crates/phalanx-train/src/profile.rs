//! `--profile`: where some steps' time goes, by operation and by layer.

use std::path::{Path, PathBuf};

use phalanx_data::metrics::write_summary;
use phalanx_nn::{Params, Tape};
use serde_json::json;

use crate::error::Result;
use crate::format::plural;
use phalanx_launch::RankContext;

/// Steps before the first that is profiled: buckets are rebuilt and memory is warm then.
const SKIPPED: usize = 2;
/// Steps that are profiled.
const STEPS: usize = 10;
/// Layers that the table names.
const LAYERS: usize = 20;

/// Profiles a few steps of a run and reports once.
pub struct Profiler {
    /// `None`: nothing wanted, or all done.
    path: Option<PathBuf>,
    rank: usize,
    seen: usize,
}

impl Profiler {
    /// Will write a Chrome trace to `file` with `.<rank>.json` appended and rank
    /// 0's table to standard error, or nothing.
    pub fn new(file: Option<&Path>, ctx: &RankContext) -> Profiler {
        Profiler {
            path: file.map(|f| crate::of_rank(f, ctx.rank(), "json")),
            rank: ctx.rank(),
            seen: 0,
        }
    }

    /// Before a step: starts taking times when it is the first to profile.
    pub fn before(&self, tape: &mut Tape) {
        if self.path.is_some() && self.seen == SKIPPED {
            tape.profile(true);
        }
    }

    /// After a step: reports when it was the last.
    ///
    /// # Errors
    ///
    /// Fails when the trace cannot be written.
    pub fn after(&mut self, ctx: &RankContext, tape: &mut Tape, params: &Params) -> Result<()> {
        self.seen += 1;
        if self.seen == SKIPPED + STEPS {
            self.finish(ctx, tape, params)?;
        }
        Ok(())
    }

    /// At the end of the run: reports the steps of a run that was shorter.
    ///
    /// # Errors
    ///
    /// Fails when the trace cannot be written.
    pub fn finish(&mut self, ctx: &RankContext, tape: &mut Tape, params: &Params) -> Result<()> {
        let Some(path) = self.path.take() else {
            return Ok(());
        };
        let profile = tape.take_profile(params);
        tape.profile(false);
        let Some(first) = profile.spans().first().map(|s| s.began) else {
            ctx.note("--profile: the run has no step after the second to profile");
            return Ok(());
        };
        let events: Vec<_> = profile
            .spans()
            .iter()
            .map(|s| {
                let us = |d: std::time::Duration| d.as_nanos() as f64 / 1e3;
                let pass = if s.backward { "backward" } else { "forward" };
                json!({
                    "name": s.operation, "cat": pass, "ph": "X", "pid": self.rank, "tid": 0,
                    "ts": us(s.began.saturating_duration_since(first)), "dur": us(s.time),
                    "args": { "layer": s.layer, "pass": pass },
                })
            })
            .collect();
        write_summary(
            &path,
            &json!({ "traceEvents": events, "displayTimeUnit": "ms" }),
        )?;
        let steps = self.seen.saturating_sub(SKIPPED).max(1);
        ctx.note(&format!(
            "{}Chrome trace of {}: {}",
            profile.table(steps, LAYERS),
            plural(steps, "step"),
            path.display()
        ));
        Ok(())
    }
}
