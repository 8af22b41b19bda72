//! What the rank of a dump was doing, in words.

use std::time::Duration;

use phalanx_comm::recorder::{Dump, Entry, State};

use crate::format::duration;

/// `in loading data for 58 s (epoch 1 step 212)`.
pub(crate) fn doing(dump: &Dump, phase: &str, for_ms: u64) -> String {
    let at = dump.position.map_or(String::new(), |at| {
        format!(" (epoch {} step {})", at.epoch, at.step)
    });
    format!(
        "in {phase} for {}{at}",
        duration(Duration::from_millis(for_ms))
    )
}

/// ` (bucket 4 of 7: layer3.0.conv1.weight)`, where the operation has a label.
pub(super) fn label(dump: &Dump, entry: &Entry) -> String {
    let label = dump.label_of(entry);
    label.map_or(String::new(), |label| format!(" ({label})"))
}

/// `all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight)`.
pub(crate) fn named(dump: &Dump, entry: &Entry) -> String {
    let seq = entry.seq.map_or(String::new(), |seq| format!(" seq {seq}"));
    let label = label(dump, entry);
    let group = match entry.group {
        0 => String::new(),
        group => format!(" of group {group:#x}"),
    };
    format!("{}{seq}{group}{label}", entry.op)
}

/// What one rank was doing, for a launcher's report: where in the training,
/// and which operation was in flight.
pub fn last_known(dump: &Dump) -> Option<String> {
    let mut parts = Vec::new();
    let phase = dump.phase.as_ref().map(|phase| phase.name.clone());
    let at = dump
        .position
        .map(|at| format!("epoch {} step {}", at.epoch, at.step));
    let place: Vec<String> = at.into_iter().chain(phase).collect();
    if !place.is_empty() {
        parts.push(place.join(", "));
    }
    let in_flight = dump
        .entries
        .iter()
        .filter(|entry| entry.state == State::Running)
        .min_by_key(|entry| entry.n);
    let completed = dump.entries.iter().find(|entry| entry.state == State::Done);
    match (in_flight, completed) {
        (Some(entry), _) => parts.push(format!("{} was in flight", named(dump, entry))),
        (None, Some(entry)) => parts.push(format!("last completed {}", named(dump, entry))),
        (None, None) => {}
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}
