//! What happened to the ranks of an elastic job: which were lost, which joined.

use phalanx_comm::recorder::Dump;
use serde::Serialize;

use super::describe::last_known;
use crate::format::rank_list;

/// Something that happened to the ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Change {
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What.
    pub what: Event,
    /// The generation in which a rank was lost, or that it joined, or that was formed.
    pub generation: u32,
    /// The rank that was lost or joined.
    pub rank: Option<usize>,
    /// All of it in words.
    pub text: String,
}

/// What happens to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// A rank was lost, and the others went on.
    Lost,
    /// A process joined.
    Joined,
    /// The newest group was formed.
    Formed,
}

/// The changes that `all` dumps show, up to the newest `generation`, which has `members`. None where no rank was lost and
/// none joined.
pub(super) fn changes(all: &[Dump], generation: u32, members: &[usize]) -> Vec<Change> {
    let first = all.iter().map(|dump| dump.joined).min().unwrap_or(0);
    let change = |what, dump: &Dump, unix_ns: u64, generation: u32, text: String| Change {
        unix_ms: unix_ns / 1_000_000,
        what,
        generation,
        rank: Some(dump.rank),
        text: format!(
            "rank {} (pid {}, host {}) {text}",
            dump.rank, dump.pid, dump.host
        ),
    };
    let joined = all.iter().filter(|dump| dump.joined > first);
    let joined = joined.map(|dump| {
        let of = dump.joined;
        let place = dump.instead_of;
        let place = place.map_or(String::new(), |rank| format!(" in place of rank {rank}"));
        let text = format!("joined generation {of}{place}");
        change(Event::Joined, dump, dump.joined_unix_ns, of, text)
    });
    let lost = all.iter().filter(|dump| dump.is_lost);
    let lost = lost.map(|dump| {
        let why = dump.ended.as_deref().unwrap_or("it is not known why");
        let known = last_known(dump).map_or(String::new(), |known| format!("; {known}"));
        let text = format!("was lost in generation {}: {why}{known}", dump.generation);
        change(Event::Lost, dump, dump.taken_unix_ns, dump.generation, text)
    });
    let mut changes: Vec<Change> = joined.chain(lost).collect();
    let newest = all
        .iter()
        .filter(|dump| !dump.is_lost && dump.generation == generation);
    // A newcomer's recorder is made when the group has formed.
    let formed = newest
        .flat_map(|dump| {
            let joined = (dump.joined == generation).then_some(dump.joined_unix_ns);
            [Some(dump.formed_unix_ns), joined]
        })
        .flatten()
        .filter(|at| *at > 0)
        .max();
    if let Some(formed) = formed.filter(|_| !changes.is_empty() && generation > first) {
        let renumbered = match members
            .iter()
            .enumerate()
            .any(|(rank, number)| rank != *number)
        {
            true => ", which the group numbers from 0 in this order",
            false => "",
        };
        changes.push(Change {
            unix_ms: formed / 1_000_000,
            what: Event::Formed,
            generation,
            rank: None,
            text: format!(
                "generation {generation} was formed of {}{renumbered}",
                rank_list(members)
            ),
        });
    }
    // A launcher of a busy host may have read the recorder of a lost rank after the others had formed a new group.
    let times: Vec<(u32, u64)> = (changes.iter())
        .map(|change| (change.generation, change.unix_ms))
        .collect();
    for lost in changes.iter_mut().filter(|c| c.what == Event::Lost) {
        let later = times.iter().filter(|(at, _)| *at > lost.generation);
        let first = later.map(|(_, unix_ms)| *unix_ms).min();
        lost.unix_ms = lost.unix_ms.min(first.unwrap_or(u64::MAX));
    }
    changes.sort();
    changes
}

/// `11:02:07 UTC`.
pub(super) fn time_of_day(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000 % 86_400;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02} UTC", seconds % 60)
}
