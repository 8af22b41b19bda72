//! A table of all ranks' last operations, around the one that some ranks have not reached.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use phalanx_comm::recorder::{Dump, Entry, State};

use super::analysis::Diagnosis;
use crate::format::{duration, rank_list};

/// Rows shown.
const ROWS: usize = 6;
/// Ranks that get a column each; of more, ranks in the same state share one line.
const COLUMNS: usize = 6;

/// A table, or nothing when no collective was recorded.
pub(super) fn last_operations(story: &Diagnosis, dumps: &[Dump]) -> String {
    let mut rows: BTreeMap<u64, Vec<Option<&Entry>>> = BTreeMap::new();
    let dumps: Vec<&Dump> = dumps
        .iter()
        .filter(|dump| dump.generation == story.generation)
        .collect();
    for (column, dump) in dumps.iter().enumerate() {
        let entries = dump.entries.iter().filter(|entry| {
            entry.generation == story.generation
                && entry.group == story.group
                && entry.op != "send/recv"
        });
        for entry in entries {
            let Some(seq) = entry.seq else { continue };
            let row = rows.entry(seq).or_insert_with(|| vec![None; dumps.len()]);
            row[column] = Some(entry);
        }
    }
    // Two rows behind the point, the rest before it.
    let until = story.seq.map_or(u64::MAX, |seq| seq.saturating_add(2));
    let shown: Vec<_> = rows.range(..=until).rev().take(ROWS).collect();
    let mut text = String::new();
    let wide = dumps.len() <= COLUMNS;
    if wide && !shown.is_empty() {
        let _ = write!(text, "{:>8}  {:<44}", "seq", "operation");
        for dump in &dumps {
            let _ = write!(text, "  {:>14}", format!("rank {}", dump.rank));
        }
        text = format!("{}\n", text.trim_end());
    }
    for (seq, row) in shown.into_iter().rev() {
        let what = dumps
            .iter()
            .zip(row)
            .find_map(|(dump, entry)| Some(operation(dump, (*entry)?)))
            .unwrap_or_default();
        let mut line = format!("{seq:>8}  {what:<44}");
        if wide {
            for (dump, entry) in dumps.iter().zip(row) {
                let _ = write!(line, "  {:>14}", cell(dump, *entry));
            }
        } else {
            let mut states: Vec<(&str, Vec<usize>)> = Vec::new();
            for (dump, entry) in dumps.iter().zip(row) {
                let state = word(*entry);
                match states.iter_mut().find(|(known, _)| *known == state) {
                    Some((_, ranks)) => ranks.push(dump.rank),
                    None => states.push((state, vec![dump.rank])),
                }
            }
            let states: Vec<String> = states
                .iter()
                .map(|(state, ranks)| format!("{state}: {}", rank_list(ranks)))
                .collect();
            let _ = write!(line, "  {}", states.join("; "));
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// `all_reduce f32 sum of 100 elements, bucket 4 of 7`, at most 44 columns.
fn operation(dump: &Dump, entry: &Entry) -> String {
    let mut text = entry.describe();
    if let Some(label) = dump.label_of(entry) {
        let short = label.split(':').next().unwrap_or(label);
        text = format!("{} {} {short}", entry.op, entry.count);
    }
    if text.chars().count() > 44 {
        text = text.chars().take(43).chain(['…']).collect();
    }
    text
}

fn word(entry: Option<&Entry>) -> &'static str {
    match entry.map(|entry| entry.state) {
        None => "not there",
        Some(State::Queued) => "queued",
        Some(State::Running) => "waiting",
        Some(State::Done) => "done",
        Some(State::Aborted) => "failed",
    }
}

fn cell(dump: &Dump, entry: Option<&Entry>) -> String {
    let Some(entry) = entry else {
        return "-".into();
    };
    let since = |to: Option<u64>| {
        let from = entry.started_ns.unwrap_or(entry.queued_ns);
        duration(Duration::from_nanos(
            to.unwrap_or(dump.taken_ns).saturating_sub(from),
        ))
    };
    match entry.state {
        State::Queued => "queued".into(),
        State::Running => format!("waits {}", since(None)),
        State::Done => since(entry.done_ns),
        State::Aborted => format!("failed {}", since(entry.done_ns)),
    }
}

/// `came last: rank 2 in 71 % of 4012 operations, 3.1 ms after the first; ...`.
pub(super) fn slowest(story: &Diagnosis) -> Option<String> {
    if story.compared == 0 {
        return None;
    }
    let texts: Vec<String> = story
        .slowest
        .iter()
        .take(3)
        .map(|arrivals| {
            format!(
                "rank {} in {} % ({} after the first)",
                arrivals.rank,
                100 * arrivals.last / story.compared,
                duration(Duration::from_micros(arrivals.mean_late_us))
            )
        })
        .collect();
    Some(format!(
        "came last, of {} operations: {}",
        story.compared,
        texts.join(", ")
    ))
}
