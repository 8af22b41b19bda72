//! The ranks' flight recorders. The launcher shares their memory, so it can read those of
//! killed and stopped ranks, too.

use std::path::{Path, PathBuf};

use phalanx_base::files::as_typed;
use phalanx_comm::recorder::{Dump, State};

use super::machine::ExitStatus;
use super::ranks::Rank;
use super::report;
use crate::inspect::analysis;

/// Describes a rank that is stopped and has not ended.
pub(super) const STOPPED: &str = "is stopped (SIGSTOP or a debugger)";
/// Exit codes of ranks that report another rank's failure: a lost peer, a deadline.
const MESSENGERS: [i32; 2] = [3, 4];

/// What `rank` was doing when it ended; of one that only lost a peer or met a
/// deadline, what the ranks of this node were doing.
pub(super) fn last_known(
    ranks: &[Rank],
    rank: &Rank,
    end: ExitStatus,
    stopped: &[usize],
) -> Option<String> {
    let is_messenger = matches!(end, ExitStatus::Code(code) if MESSENGERS.contains(&code));
    if !is_messenger {
        return analysis::last_known(&rank.flight()?);
    }
    let story = analysis::diagnose(&dumps(ranks, stopped));
    // Without an operation that some ranks have not reached, the error says it all.
    let generation = format!("generation {}: ", story.generation);
    let sentence = story.sentence.strip_prefix(&generation);
    sentence.filter(|_| story.seq.is_some()).map(str::to_owned)
}

/// The ranks of this node that have not come to an operation in which others wait, and wait in no other themselves;
/// or the one that has come to it and does not continue.
pub(super) fn late(ranks: &[Rank]) -> Vec<usize> {
    let dumps = dumps(ranks, &[]);
    let waits = |dump: &&Dump| {
        let entries = dump.entries.iter();
        let mut newest = entries.filter(|entry| entry.generation == dump.generation);
        newest.any(|entry| matches!(entry.state, State::Running | State::Aborted))
    };
    let waiting: Vec<usize> = dumps.iter().filter(waits).map(|dump| dump.rank).collect();
    let story = analysis::diagnose(&dumps);
    let is_late = |number: &usize| story.waiting.contains(number) || !waiting.contains(number);
    let late = ranks
        .iter()
        .filter(|rank| story.late.contains(&rank.number));
    late.filter(|rank| is_late(&rank.number))
        .map(|rank| rank.rank)
        .collect()
}

fn dumps(ranks: &[Rank], stopped: &[usize]) -> Vec<Dump> {
    let dump_of = |rank: &Rank| {
        let mut dump = rank.flight()?;
        dump.ended = stopped.contains(&rank.rank).then(|| STOPPED.to_owned());
        Some(dump)
    };
    let ranks = ranks.iter().filter(|rank| !rank.is_lost);
    let mut dumps: Vec<Dump> = ranks.filter_map(dump_of).collect();
    dumps.sort_by_key(|dump| dump.rank);
    dumps
}

/// Writes the recorder of a rank that the job has lost because of `why` into `dir`, or where the rank asked for it.
pub(super) fn keep_lost(dump: Option<Dump>, why: String, dir: Option<&Path>) {
    let Some(mut dump) = dump else {
        return;
    };
    dump.ended = Some(why);
    if let Some(dir) = dir.map(Path::to_owned).or_else(|| dump.folder.clone()) {
        // The report of a failure says where recorders cannot be written.
        let _ = dump.write_into(&dir);
    }
}

/// Writes the recorders of this node's ranks into `dir`, or where the ranks
/// asked for it, and says how to look at them. `ends` has how each ended by
/// itself; `stopped` are those that somebody had stopped. Nothing when no rank recorded anything.
pub(super) fn keep(
    ranks: &[Rank],
    ends: &[Option<ExitStatus>],
    stopped: &[usize],
    dir: Option<&Path>,
) -> Option<String> {
    let mut folder: Option<PathBuf> = dir.map(Path::to_owned);
    let mut dumps = Vec::new();
    // Those of lost ranks were written when they were lost.
    for (rank, end) in ranks.iter().zip(ends).filter(|(rank, _)| !rank.is_lost) {
        let Some(mut dump) = rank.flight() else {
            continue;
        };
        dump.ended = if stopped.contains(&rank.rank) {
            Some(STOPPED.to_owned())
        } else {
            end.filter(is_own_fate).map(|end| report::ended(end, true))
        };
        if folder.is_none() {
            folder.clone_from(&dump.folder);
        }
        dumps.push(dump);
    }
    if dumps.is_empty() {
        return None;
    }
    let Some(folder) = folder else {
        return Some(
            "nothing was kept; set PHALANX_FLIGHT_DIR (or --log-dir) to keep flight recorders"
                .into(),
        );
    };
    for dump in &dumps {
        if let Err(e) = dump.write_into(&folder) {
            return Some(format!(
                "the flight recorders could not be written into {}: {e}",
                folder.display()
            ));
        }
    }
    // `inspect` finds the folder `flight` in a run's folder.
    let shown = match folder.parent() {
        Some(run) if folder.ends_with("flight") && !run.as_os_str().is_empty() => run,
        _ => &folder,
    };
    Some(format!("phalanx inspect {}", as_typed(shown)))
}

/// Whether the rank's end explains why others wait for it.
fn is_own_fate(end: &ExitStatus) -> bool {
    match end {
        ExitStatus::Signal(_) => true,
        ExitStatus::Code(code) => *code != 0 && !MESSENGERS.contains(code),
    }
}
