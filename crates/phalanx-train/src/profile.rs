//! `--profile`: where some steps' time goes, by operation, by layer and by communication.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_data::metrics::write_summary;
use phalanx_ddp::StepTimes;
use phalanx_nn::{Params, Tape};
use serde_json::{Value, json};

use crate::format::plural;
use crate::say;
use phalanx_member::RankContext;

/// Steps before the first that is profiled: buckets are rebuilt and memory is warm then.
const SKIPPED: usize = 2;
/// Steps that are profiled.
const STEPS: usize = 10;
/// Layers that the table names.
const LAYERS: usize = 20;

/// Microseconds, the unit of Chrome traces.
fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Profiles a few steps of a run and reports once.
pub struct Profiler {
    /// `None`: nothing wanted, or all done.
    path: Option<PathBuf>,
    rank: usize,
    seen: usize,
    /// Start of the first profiled step, and of the last.
    began: Option<[Instant; 2]>,
    /// Forward, backward, optimizer and communication of the profiled steps.
    events: Vec<Value>,
}

impl Profiler {
    /// Will write a Chrome trace to `file` with `.<number>.json` appended and rank
    /// 0's table to standard error, or nothing.
    pub fn new(file: Option<&Path>, ctx: &RankContext) -> Profiler {
        Profiler {
            path: file.map(|f| crate::of_rank(f, ctx.number(), "json")),
            rank: ctx.rank(),
            seen: 0,
            began: None,
            events: Vec::new(),
        }
    }

    /// Before a step: starts taking times when it is the first to profile.
    pub fn before(&mut self, tape: &mut Tape) {
        if self.path.is_none() || self.seen < SKIPPED {
            return;
        }
        let now = Instant::now();
        match &mut self.began {
            Some([_, last]) => *last = now,
            None => {
                self.began = Some([now; 2]);
                tape.profile(true);
            }
        }
    }

    /// After a step with these times, if they are measured: reports when it was the last.
    pub fn after(
        &mut self,
        ctx: &RankContext,
        tape: &mut Tape,
        params: &Params,
        forward_ended: Instant,
        times: Option<&StepTimes>,
    ) {
        if let (Some(_), Some([origin, began]), Some(times)) = (&self.path, self.began, times) {
            let lane = [
                ("forward", Some(began), forward_ended),
                ("optimizer", times.reduced, Instant::now()),
            ];
            self.events
                .extend(lane.into_iter().filter_map(|(name, from, to)| {
                    Some(json!({
                        "name": name, "ph": "X", "pid": self.rank, "tid": 0,
                        "ts": us(from?.saturating_duration_since(origin)),
                        "dur": us(to.saturating_duration_since(from?)),
                    }))
                }));
            self.events.extend(times.chrome_events(self.rank, origin));
        }
        self.seen += 1;
        if self.seen == SKIPPED + STEPS {
            self.finish(ctx, tape, params);
        }
    }

    /// At the end of the run: reports the steps of a run that was shorter. A trace that cannot be written is a warning.
    pub fn finish(&mut self, ctx: &RankContext, tape: &mut Tape, params: &Params) {
        let Some(path) = self.path.take() else {
            return;
        };
        let profile = tape.take_profile(params);
        tape.profile(false);
        let Some([origin, _]) = self.began else {
            ctx.note("--profile: the run has no step after the second to profile");
            return;
        };
        let mut events = std::mem::take(&mut self.events);
        events.extend(profile.spans().iter().map(|s| {
            let pass = if s.backward { "backward" } else { "forward" };
            json!({
                "name": s.operation, "cat": pass, "ph": "X", "pid": self.rank, "tid": 2,
                "ts": us(s.began.saturating_duration_since(origin)), "dur": us(s.time),
                "args": { "layer": s.layer, "pass": pass },
            })
        }));
        for (lane, name) in ["step", "communication", "operations"].iter().enumerate() {
            if events.iter().any(|event| event["tid"] == lane) {
                events.push(json!({
                    "name": "thread_name", "ph": "M", "pid": self.rank, "tid": lane, "args": { "name": name },
                }));
            }
        }
        let trace = json!({ "traceEvents": events, "displayTimeUnit": "ms" });
        let steps = self.seen.saturating_sub(SKIPPED).max(1);
        let (table, of) = (profile.table(steps, LAYERS), plural(steps, "step"));
        match write_summary(&path, &trace) {
            Ok(()) => ctx.note(&format!("{table}Chrome trace of {of}: {}", path.display())),
            Err(error) => {
                ctx.note(table.trim_end());
                // Each rank has a file of its own.
                say::note(format_args!("warning: --profile: {}", error.chain()));
            }
        }
    }
}
