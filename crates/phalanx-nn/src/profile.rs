//! Time of every operation of a step, forward and backward, by operation and by
//! layer.
//!
//! An operation's forward time counts from the end of the one before (or the start of
//! the step), so it includes what the model does in between.

use std::fmt::Write;
use std::time::{Duration, Instant};

use crate::param::{ParamId, Params};

/// One operation's time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Span {
    /// Name of the operation, e.g. `Conv2d`.
    pub operation: &'static str,
    /// The layer whose parameters it used, e.g. `features.0.0`; empty without any.
    pub layer: String,
    /// Whether this is its backward pass.
    pub backward: bool,
    /// Its start.
    pub began: Instant,
    /// How long it took.
    pub time: Duration,
}

/// Times of operations, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    spans: Vec<Span>,
}

/// A line of the table: forward and backward time, and how often.
struct Line<'p> {
    name: &'p str,
    times: [Duration; 2],
    count: usize,
}

impl Profile {
    /// Every operation.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Two tables, by operation and by layer (the `most` longest): milliseconds per
    /// step in forward, backward and together, and their share. `steps` is how many
    /// steps were profiled.
    pub fn table(&self, steps: usize, most: usize) -> String {
        let mut text = String::new();
        self.section(&mut text, "operation", steps, usize::MAX, |s| s.operation);
        text.push('\n');
        self.section(&mut text, "layer", steps, most, |s| &s.layer);
        text
    }

    fn section<'p>(
        &'p self,
        text: &mut String,
        title: &str,
        steps: usize,
        most: usize,
        name: impl Fn(&'p Span) -> &'p str,
    ) {
        let mut lines: Vec<Line<'p>> = Vec::new();
        for span in &self.spans {
            let name = name(span);
            let at = lines.iter().position(|l| l.name == name);
            let at = at.unwrap_or_else(|| {
                lines.push(Line {
                    name,
                    times: [Duration::ZERO; 2],
                    count: 0,
                });
                lines.len() - 1
            });
            lines[at].times[usize::from(span.backward)] += span.time;
            lines[at].count += usize::from(!span.backward);
        }
        let sum = |l: &Line<'_>| l.times[0] + l.times[1];
        lines.sort_by_key(|l| std::cmp::Reverse(sum(l)));
        let total: Duration = lines.iter().map(sum).sum();
        let steps = steps.max(1) as f64;
        let ms = |d: Duration| d.as_secs_f64() * 1e3 / steps;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{title:<28} {:>6} {:>10} {:>10} {:>10} {:>6}",
            "times", "forward", "backward", "ms a step", "share"
        );
        let others = lines.split_off(lines.len().min(most));
        if !others.is_empty() {
            let time = |i: usize| others.iter().map(|l| l.times[i]).sum();
            lines.push(Line {
                name: "others",
                times: [time(0), time(1)],
                count: others.iter().map(|l| l.count).sum(),
            });
        }
        for line in &lines {
            let share = sum(line).as_secs_f64() / total.as_secs_f64().max(f64::MIN_POSITIVE);
            let _ = writeln!(
                text,
                "{:<28} {:>6.0} {:>10.3} {:>10.3} {:>10.3} {:>5.1}%",
                if line.name.is_empty() {
                    "(no parameters)"
                } else {
                    line.name
                },
                line.count as f64 / steps,
                ms(line.times[0]),
                ms(line.times[1]),
                ms(sum(line)),
                share * 100.0
            );
        }
    }
}

/// Measures times while steps run.
#[derive(Default)]
pub(crate) struct Clock {
    /// End of the operation before.
    last: Option<Instant>,
    taken: Vec<Taken>,
}

struct Taken {
    operation: &'static str,
    param: Option<ParamId>,
    backward: bool,
    began: Instant,
    time: Duration,
}

impl Clock {
    /// A step starts.
    pub(crate) fn mark(&mut self) {
        self.last = Some(Instant::now());
    }

    /// An operation has been recorded.
    pub(crate) fn forward(&mut self, operation: &'static str, param: Option<ParamId>) {
        let now = Instant::now();
        let began = self.last.replace(now).unwrap_or(now);
        self.taken.push(Taken {
            operation,
            param,
            backward: false,
            began,
            time: now.saturating_duration_since(began),
        });
    }

    /// The backward pass of an operation, which began then, is over.
    pub(crate) fn backward(
        &mut self,
        operation: &'static str,
        param: Option<ParamId>,
        began: Instant,
    ) {
        self.taken.push(Taken {
            operation,
            param,
            backward: true,
            began,
            time: began.elapsed(),
        });
    }

    pub(crate) fn take(&mut self, params: &Params) -> Profile {
        // `conv1.weight` belongs to the layer `conv1`.
        let layer = |id: ParamId| {
            let name = params.infos().get(id.index()).map_or("", |i| &*i.name);
            name.rsplit_once('.')
                .map_or(name, |(layer, _)| layer)
                .to_owned()
        };
        let spans = self.taken.drain(..).map(|t| Span {
            operation: t.operation,
            layer: t.param.map(layer).unwrap_or_default(),
            backward: t.backward,
            began: t.began,
            time: t.time,
        });
        Profile {
            spans: spans.collect(),
        }
    }
}
