//! `events.jsonl`: what happened besides the numbers.

use crate::Resumption;
use phalanx_base::files::Dir;
use serde::Serialize;

use crate::line::Line;
use crate::lines;
use crate::logged::Logged;
use crate::system::System;
use crate::watch::Watch;

/// Most events that are listed.
const MAX_EVENTS: usize = 1000;

/// An event that is listed and marked on the curves.
#[derive(Debug, Serialize)]
pub struct Event {
    /// `metric` for what `metrics.jsonl` says of a step, otherwise the event's own.
    pub kind: &'static str,
    pub step: Option<f64>,
    /// Seconds since the attempt began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    pub text: String,
}

/// How a run ended.
#[derive(Debug, Serialize)]
pub struct Finish {
    status: String,
    error: Option<String>,
}

/// All of `events.jsonl`.
#[derive(Debug, Default)]
pub struct Events {
    pub list: Vec<Event>,
    pub total: usize,
    /// If the last record is one.
    pub finish: Option<Finish>,
    /// Changes of the ranks: the step, how many there were before, and how many after.
    pub rank_changes: Vec<[f64; 3]>,
    pub system: Option<System>,
    pub watch: Option<Watch>,
    pub logged: Vec<Logged>,
    pub logged_total: usize,
}

impl Events {
    /// Counts `event`, and keeps it if there are not too many.
    pub fn add(&mut self, event: Event) {
        self.total += 1;
        if self.list.len() < MAX_EVENTS {
            self.list.push(event);
        }
    }

    /// Reads `text`; files that it names are those in `dir`. Lines that are no events are left out.
    pub fn read(text: &[u8], dir: &Dir) -> Events {
        let mut events = Events::default();
        let (mut system, mut watched, mut logged) = (Vec::new(), Vec::new(), Vec::new());
        // The attempt's number among those in the file.
        let mut attempts = 0;
        for line in lines(text) {
            let Ok(head) = serde_json::from_slice::<Line>(line) else {
                continue;
            };
            events.finish = None;
            let said = match &*head.kind {
                "start" => {
                    // The rank that takes the place of rank 0 continues the attempt, and its clock.
                    attempts += u64::from(!head.takes_over);
                    let resumed = head.resumed_at.map(|step| Resumption {
                        step,
                        epoch: head.epoch,
                    });
                    watched.retain(|(step, _)| resumed.is_some_and(|from| *step < from.step));
                    let changes = &mut events.rank_changes;
                    changes.retain(|[step, ..]| resumed.is_some_and(|from| *step < from.step));
                    logged.retain(|line: &Line| {
                        resumed.is_some_and(|from| {
                            line.step.is_none_or(|step| from.keeps(step, line.epoch))
                        })
                    });
                    let number = head.attempt.unwrap_or(attempts);
                    let text = match head.resumed_at {
                        Some(step) if head.takes_over => {
                            format!("another rank takes the place of rank 0 at step {step}")
                        }
                        Some(step) => format!("attempt {number} resumed at step {step}"),
                        None => format!("attempt {number} started"),
                    };
                    Some(("start", text))
                }
                "system" => {
                    system.push((attempts, line));
                    None
                }
                "ranks" => {
                    let change = (head.step.zip(head.before)).zip(head.after);
                    let change = change.map(|((step, before), after)| [step, before, after]);
                    events.rank_changes.extend(change);
                    None
                }
                "watch" => {
                    watched.extend(head.step.map(|step| (step, line)));
                    None
                }
                "notice" => head.text.as_ref().map(|text| ("notice", text.to_string())),
                "checkpoint" => {
                    let file = head.file.as_deref().unwrap_or_default();
                    Some(("checkpoint", format!("checkpoint {file}")))
                }
                "finish" => {
                    let status = head.status.as_deref().unwrap_or("finished").to_owned();
                    let error = head.error.as_deref().map(str::to_owned);
                    let why = error.iter().map(|error| format!(": {error}"));
                    let text = why.fold(status.clone(), |all, why| all + &why);
                    events.finish = Some(Finish { status, error });
                    Some(("finish", text))
                }
                "image" | "table" | "text" => {
                    logged.push(head);
                    continue;
                }
                _ => None,
            };
            if let Some((kind, text)) = said {
                events.add(Event {
                    kind,
                    step: head.step.or(head.resumed_at),
                    elapsed_s: head.elapsed_s,
                    text,
                });
            }
        }
        events.system = System::read(&system);
        events.watch = Watch::read(&watched);
        events.logged_total = logged.len();
        events.logged = Logged::read(&logged, dir);
        events
    }
}
