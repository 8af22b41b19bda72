//! From dumps to one sentence: pure functions.
//!
//! All ranks of a group number their collectives in the same order. So the ranks in
//! the operation with the highest number wait for those that have not reached it; and
//! where two ranks have different operations with one number, their programs diverged.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_comm::recorder::{Dump, Entry, Failure, State};
use serde::Serialize;

use super::describe::label;
pub use super::describe::last_known;
pub(crate) use super::describe::{doing, named};
use super::history::{self, Change, Event};
use crate::format::{join, plural, rank_list};

/// The findings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// All of it in one sentence.
    pub sentence: String,
    /// Generation of the process group.
    pub generation: u32,
    /// The group: 0 is the world.
    pub group: u32,
    /// The operation that some ranks are in and others are not.
    pub seq: Option<u64>,
    /// Ranks that are in it.
    pub waiting: Vec<usize>,
    /// Ranks that have not reached it, or died.
    pub late: Vec<usize>,
    /// Ranks without a dump.
    pub missing: Vec<usize>,
    /// Members of the generation, where ranks were lost or joined; in the group they are numbered from 0, in this order.
    pub members: Vec<usize>,
    /// What happened to the ranks of an elastic job, in the order of time.
    pub changes: Vec<Change>,
    /// Whether ranks called different operations with one sequence number.
    pub desync: bool,
    /// How often each rank was the last to arrive.
    pub slowest: Vec<Arrivals>,
    /// Operations whose arrivals could be compared.
    pub compared: usize,
    /// Further findings, one line each.
    pub notes: Vec<String>,
}

/// How often a rank was the last to arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Arrivals {
    /// The rank.
    pub rank: usize,
    /// Operations at which it arrived last.
    pub last: usize,
    /// How long after the first rank, on average over those.
    pub mean_late_us: u64,
}

/// One rank's collectives in the group that matters.
struct RankTimeline<'a> {
    dump: &'a Dump,
    by_seq: BTreeMap<u64, &'a Entry>,
    done: Option<u64>,
    /// The newest that began and is not complete.
    current: Option<&'a Entry>,
    /// The same in another group.
    elsewhere: Option<&'a Entry>,
}

impl<'a> RankTimeline<'a> {
    fn new(dump: &'a Dump, generation: u32, group: u32) -> RankTimeline<'a> {
        let by_seq: BTreeMap<u64, &Entry> = collectives(dump, generation)
            .filter(|entry| entry.group == group)
            .filter_map(|entry| Some((entry.seq?, entry)))
            .collect();
        let newest = |is: fn(State) -> bool| {
            let mut entries = by_seq.values().rev();
            entries.find(|entry| is(entry.state)).copied()
        };
        let done = newest(|state| state == State::Done).and_then(|entry| entry.seq);
        let current = newest(|state| matches!(state, State::Running | State::Aborted))
            .filter(|entry| entry.seq > done);
        let elsewhere = collectives(dump, generation)
            .filter(|entry| matches!(entry.state, State::Running | State::Aborted))
            .find(|entry| entry.group != group);
        RankTimeline {
            dump,
            by_seq,
            done,
            current,
            elsewhere,
        }
    }

    fn rank(&self) -> usize {
        self.dump.rank
    }

    fn is_in(&self, seq: u64) -> bool {
        self.current.is_some_and(|entry| entry.seq == Some(seq))
    }

    /// What this rank does instead of coming to the operation.
    fn excuse(&self, seq: Option<u64>) -> String {
        let mut parts = Vec::new();
        if let Some(ended) = &self.dump.ended {
            parts.push(ended.clone());
        }
        if seq.is_some_and(|seq| self.is_in(seq)) {
            parts.push("was in it too".to_owned());
        } else {
            parts.push(match self.done {
                Some(done) => format!("last completed seq {done}"),
                None => "completed no operation".to_owned(),
            });
        }
        let verb = match self.dump.ended {
            Some(_) => "was",
            None => "is",
        };
        if let Some(entry) = self.elsewhere {
            let mut text = format!("{verb} in {}", named(self.dump, entry));
            if !entry.awaited.is_empty() {
                let awaited: Vec<usize> = entry.awaited.iter().map(|r| *r as usize).collect();
                text.push_str(&format!(", where it waits for {}", rank_list(&awaited)));
            }
            parts.push(text);
        }
        if let Some(phase) = &self.dump.phase {
            parts.push(format!(
                "{verb} {}",
                doing(self.dump, &phase.name, phase.for_ms)
            ));
        }
        join(&parts)
    }
}

fn ranks_of<'a>(views: impl IntoIterator<Item = &'a &'a RankTimeline<'a>>) -> Vec<usize> {
    views.into_iter().map(|view| view.rank()).collect()
}

fn collectives(dump: &Dump, generation: u32) -> impl Iterator<Item = &Entry> {
    dump.entries
        .iter()
        .filter(move |entry| entry.generation == generation && entry.op != "send/recv")
}

/// Finds what happened, from at most one dump a rank.
pub fn diagnose(all: &[Dump]) -> Diagnosis {
    let in_job = all.iter().filter(|dump| !dump.is_lost);
    let newest = in_job.map(|dump| dump.generation).max();
    let generation = newest.unwrap_or_else(|| {
        let lost = all.iter().map(|dump| dump.generation);
        lost.max().unwrap_or(0)
    });
    let (dumps, old): (Vec<&Dump>, Vec<&Dump>) =
        all.iter().partition(|dump| dump.generation == generation);
    let members = members(&dumps);
    let changes = history::changes(all, generation, &members);
    if newest.is_none() && !all.is_empty() {
        return of_lost_ranks(generation, changes);
    }
    let has = |rank: usize| dumps.iter().any(|dump| dump.rank == rank);
    let missing: Vec<usize> = members.iter().copied().filter(|rank| !has(*rank)).collect();
    let group = group_of_interest(&dumps, generation);
    let views: Vec<RankTimeline<'_>> = dumps
        .iter()
        .map(|dump| RankTimeline::new(dump, generation, group))
        .collect();
    let mut story = Diagnosis {
        generation,
        group,
        missing,
        members: match changes.is_empty() {
            true => Vec::new(),
            false => members,
        },
        changes,
        ..Diagnosis::default()
    };
    let plot = different_operations(&mut story, &views)
        .or_else(|| waiting(&mut story, &views))
        .unwrap_or_else(|| nothing_in_progress(&views));
    story.sentence = format!("generation {generation}: {plot}");
    let is_whole_group = group == 0;
    if is_whole_group && !story.missing.is_empty() {
        let s = if story.missing.len() == 1 { "" } else { "s" };
        let left = format!("; {} left no dump{s}", rank_list(&story.missing));
        story.sentence.push_str(&left);
    }
    let old: Vec<&Dump> = old.into_iter().filter(|dump| !dump.is_lost).collect();
    notes(&mut story, &dumps, &old);
    arrivals(&mut story, &views);
    story
}

/// What is known where only lost ranks have left dumps.
fn of_lost_ranks(generation: u32, changes: Vec<Change>) -> Diagnosis {
    let lost = changes.iter().filter(|change| change.what == Event::Lost);
    let lost: BTreeSet<usize> = lost.filter_map(|change| change.rank).collect();
    let lost: Vec<usize> = lost.into_iter().collect();
    Diagnosis {
        sentence: format!(
            "the job went on without {}; no other rank has left a dump, as when a job succeeds",
            rank_list(&lost)
        ),
        generation,
        changes,
        ..Diagnosis::default()
    }
}

/// The ranks of the generation that `dumps` are of.
fn members(dumps: &[&Dump]) -> Vec<usize> {
    // A group that was not formed anew has all ranks.
    if dumps.iter().any(|dump| dump.members.is_empty()) {
        let world = dumps.iter().map(|dump| dump.world).max();
        return (0..world.unwrap_or(0)).collect();
    }
    let members = dumps.iter().flat_map(|dump| &dump.members);
    let members: BTreeSet<usize> = members.copied().collect();
    members.into_iter().collect()
}

/// The world, unless only a subgroup is in an operation.
fn group_of_interest(dumps: &[&Dump], generation: u32) -> u32 {
    let mut stuck: Vec<u32> = dumps
        .iter()
        .flat_map(|dump| collectives(dump, generation))
        .filter(|entry| matches!(entry.state, State::Running | State::Aborted))
        .map(|entry| entry.group)
        .collect();
    stuck.sort_unstable();
    stuck.first().copied().unwrap_or(0)
}

/// Different operations under one number: the first such number.
fn different_operations(story: &mut Diagnosis, views: &[RankTimeline<'_>]) -> Option<String> {
    let mut first: BTreeMap<u64, (&RankTimeline<'_>, &Entry)> = BTreeMap::new();
    let mut parted: Option<u64> = None;
    let key = |entry: &Entry| (entry.describe(), entry.method.clone());
    for view in views {
        for (seq, entry) in &view.by_seq {
            let (_, known) = first.entry(*seq).or_insert((view, entry));
            if key(known) != key(entry) && parted.is_none_or(|at| *seq < at) {
                parted = Some(*seq);
            }
        }
    }
    let seq = parted?;
    let mut called: Vec<((String, String), String, Vec<usize>)> = Vec::new();
    for view in views {
        let Some(entry) = view.by_seq.get(&seq) else {
            continue;
        };
        let key = key(entry);
        match called.iter_mut().find(|(known, ..)| *known == key) {
            Some((.., ranks)) => ranks.push(view.rank()),
            None => called.push((key, label(view.dump, entry), vec![view.rank()])),
        }
    }
    story.desync = true;
    story.seq = Some(seq);
    let same_call = called.iter().all(|((what, _), ..)| *what == called[0].0.0);
    let texts: Vec<String> = called
        .iter()
        .take(4)
        .map(|((what, method), label, ranks)| {
            let by = if same_call {
                format!(" by {method}")
            } else {
                String::new()
            };
            format!("{} called {what}{by}{label}", rank_list(ranks))
        })
        .collect();
    Some(format!(
        "ranks are in different operations: at seq {seq} {}",
        join(&texts)
    ))
}

/// Some ranks are in an operation to which others have not come.
fn waiting(story: &mut Diagnosis, views: &[RankTimeline<'_>]) -> Option<String> {
    let newest = views
        .iter()
        .filter_map(|view| Some((view.current?.seq?, view)))
        .max_by_key(|(seq, view)| (*seq, std::cmp::Reverse(view.rank())));
    let (seq, leader) = newest?;
    let what = named(leader.dump, leader.current?);
    let is_dead = |view: &&RankTimeline<'_>| view.dump.ended.is_some();
    let inside: Vec<&RankTimeline<'_>> = views.iter().filter(|view| view.is_in(seq)).collect();
    let alive = ranks_of(inside.iter().filter(|view| !is_dead(view)));
    let is_member = |view: &&RankTimeline<'_>| story.group == 0 || !view.by_seq.is_empty();
    let absent: Vec<&RankTimeline<'_>> = views
        .iter()
        .filter(|view| is_dead(view) || !view.is_in(seq))
        .filter(|view| view.done.is_none_or(|done| done < seq))
        .filter(is_member)
        .collect();
    story.seq = Some(seq);
    story.waiting = alive.clone();
    story.late = ranks_of(&absent);
    let mut parts = Vec::new();
    if !alive.is_empty() {
        let verb = if alive.len() == 1 { "waits" } else { "wait" };
        parts.push(format!("{} {verb} in {what}", rank_list(&alive)));
    } else {
        parts.push(format!("no rank waits in {what} any more"));
    }
    const SHOWN: usize = 3;
    for view in absent.iter().take(SHOWN) {
        parts.push(format!("rank {} {}", view.rank(), view.excuse(Some(seq))));
    }
    if absent.len() > SHOWN {
        let more = rank_list(&ranks_of(&absent[SHOWN..]));
        parts.push(format!("also not in it: {more}"));
    }
    // A rank that died after it had done the same is named as well.
    let gone = views.iter().filter(is_dead);
    let gone = gone.filter(|view| view.done.is_some_and(|done| done >= seq));
    for view in gone.take(SHOWN) {
        parts.push(format!("rank {} {}", view.rank(), view.excuse(None)));
    }
    if absent.is_empty() && story.missing.is_empty() {
        // All came; each reports the rank that it waits for. But where a
        // connection broke, both its ends left, and the others wait for those
        // or for each other as it happens: the first failure decides then.
        let broke = |view: &RankTimeline<'_>| view.dump.failure == Some(Failure::PeerLost);
        let mut votes: BTreeMap<usize, usize> = BTreeMap::new();
        let asked = if views.iter().any(broke) {
            &[][..]
        } else {
            &inside[..]
        };
        let running = asked.iter().filter_map(|view| view.current);
        for rank in running.flat_map(|entry| &entry.awaited) {
            *votes.entry(*rank as usize).or_default() += 1;
        }
        let most = votes.values().max().copied();
        votes.retain(|_, count| Some(*count) == most);
        let awaited: Vec<usize> = votes.into_keys().collect();
        parts.push(match &awaited[..] {
            [] => "all have come to it".to_owned(),
            some => format!("all have come to it; {} did not continue", rank_list(some)),
        });
        if let [rank] = awaited[..] {
            story.late = vec![rank];
        }
    }
    Some(parts.join("; "))
}

fn nothing_in_progress(views: &[RankTimeline<'_>]) -> String {
    let newest = views.iter().filter_map(|view| view.done).max();
    let Some(newest) = newest else {
        return "no operation was recorded".to_owned();
    };
    let behind: Vec<&RankTimeline<'_>> = views
        .iter()
        .filter(|view| view.done != Some(newest) || view.dump.ended.is_some())
        .collect();
    let mut parts = vec!["no rank is in an operation".to_owned()];
    if behind.is_empty() {
        parts.push(format!("all last completed seq {newest}"));
    }
    for view in behind.iter().take(3) {
        parts.push(format!("rank {} {}", view.rank(), view.excuse(None)));
    }
    if let [view] = views
        && behind.is_empty()
    {
        parts = vec![format!("rank {} {}", view.rank(), view.excuse(None))];
    }
    parts.join("; ")
}

fn notes(story: &mut Diagnosis, dumps: &[&Dump], old: &[&Dump]) {
    // The first rank that failed knows why; the others only noticed.
    let first = dumps
        .iter()
        .filter(|dump| dump.reason.is_some())
        .min_by_key(|dump| dump.taken_unix_ns);
    if let Some(dump) = first
        && let Some(reason) = &dump.reason
    {
        story
            .notes
            .push(format!("first failure, on rank {}: {reason}", dump.rank));
    }
    for dump in dumps {
        let queued = dump
            .entries
            .iter()
            .filter(|entry| entry.state == State::Queued)
            .count();
        if queued > 0 && story.notes.len() < 8 {
            let queued = plural(queued, "more operation");
            let note = format!("rank {} has {queued} queued", dump.rank);
            story.notes.push(note);
        }
    }
    if !old.is_empty() {
        let ranks: Vec<usize> = old.iter().map(|dump| dump.rank).collect();
        story.notes.push(format!(
            "ignored: {} of an earlier generation",
            rank_list(&ranks)
        ));
    }
}

/// Finds the last rank to arrive at each operation that all dumps have.
fn arrivals(story: &mut Diagnosis, views: &[RankTimeline<'_>]) {
    let Some((first, rest)) = views.split_first() else {
        return;
    };
    if rest.is_empty() {
        return;
    }
    let one_host = rest.iter().all(|view| view.dump.host == first.dump.host);
    let came = |view: &RankTimeline<'_>, seq: u64| -> Option<u64> {
        let started = view.by_seq.get(&seq)?.started_ns?;
        Some(if one_host {
            started
        } else {
            let dump = view.dump;
            let ago = dump.taken_ns.saturating_sub(started);
            dump.taken_unix_ns.saturating_sub(ago)
        })
    };
    let mut last: BTreeMap<usize, (usize, u64)> = BTreeMap::new();
    for seq in first.by_seq.keys() {
        let times: Option<Vec<(u64, usize)>> = views
            .iter()
            .map(|view| Some((came(view, *seq)?, view.rank())))
            .collect();
        let Some(times) = times else { continue };
        let (Some(from), Some(to)) = (times.iter().min(), times.iter().max()) else {
            continue;
        };
        story.compared += 1;
        let (count, sum) = last.entry(to.1).or_default();
        *count += 1;
        *sum = sum.saturating_add((to.0 - from.0) / 1000);
    }
    story.slowest = last
        .into_iter()
        .map(|(rank, (last, sum))| Arrivals {
            rank,
            last,
            mean_late_us: sum / last as u64,
        })
        .collect();
    story
        .slowest
        .sort_by_key(|arrivals| std::cmp::Reverse(arrivals.last));
    if !one_host && story.compared > 0 {
        story
            .notes
            .push("arrivals are compared by the clocks of several hosts".to_owned());
    }
}

#[cfg(test)]
mod tests;
