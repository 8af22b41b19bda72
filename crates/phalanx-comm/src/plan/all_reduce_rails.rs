//! All-reduce over hosts with several ranks each, by rails: the ranks of a host
//! fold among themselves, holders of the same elements all-reduce across
//! hosts, and the ranks of a host gather.
//!
//! *Steps:* for every segment 4 rounds: to the holder on each host; from the
//! holders to the host that owns the chunk; back to all holders; to the others
//! of the host. Stages of different segments overlap.
//! *Bytes sent by rank r:* with s the bytes it holds (about n/L) and o those of
//! them its host owns (about s/H): `n − s` and `(L − 1)·s` inside the host,
//! `s − o` and `(H − 1)·o` to other hosts; so a host's network card sends
//! `2·n·(H − 1)/H`, the least possible.
//! *Order of additions:* fixed, not canonical: the left fold over hosts of the left
//! folds over their ranks. 16-bit types are rounded once per host.
//! *Scratch:* a few segments per local rank and per host.
//! *Source:* docs/design/collectives.md §5.

use super::grid::{self, Run, Unit};
use super::local_stage::{self, Inbox};
use super::{Buf, Chunks, Hosts, Local, Part, RankPlan, Round, Spec};

/// Units whose inboxes are in use at the same time.
const DEPTH: usize = 4;

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let units = grid::units(spec, hosts);
    let longest = units.iter().flatten().map(|run| run.elems.len()).max();
    let stride = spec.padded(longest.unwrap_or(0));
    let host = hosts.host_of(rank);
    let (locals, others) = (hosts.ranks(host).len() - 1, hosts.count() - 1);
    let per_unit = (locals + others) * stride;
    plan.scratch_elems = per_unit * DEPTH.min(units.len());
    let place = |u: usize| (u % DEPTH) * per_unit;

    let fold_here = |u: usize, unit: &Unit| {
        let mut round = Round::default();
        let inbox = Inbox {
            start: place(u),
            stride,
        };
        let sources = local_stage::scatter(&mut round, unit, Buf::Output, (hosts, rank), &inbox);
        if let (Some(run), true) = (local_stage::run_of(unit, host, rank), sources.len() > 1) {
            round.local.push(Local::Fold {
                into: local_stage::output(&run.elems),
                sources,
                finish: hosts.count() == 1,
            });
        }
        round
    };
    let to_owner = |u: usize, unit: &Unit| {
        let mut round = Round::default();
        let Some(run) = local_stage::run_of(unit, host, rank) else {
            return round;
        };
        let mine = chunk(spec, run, host);
        let inbox = |other: usize| {
            let slot = if other < host { other } else { other - 1 };
            let start = place(u) + (locals + slot) * stride;
            Part::new(Buf::Scratch, start, mine.len)
        };
        for (other, peer) in rotated(run, host) {
            round.send(peer, chunk(spec, run, other));
            round.recv(peer, inbox(other));
        }
        if hosts.count() > 1 {
            let sources = (0..hosts.count())
                .map(|other| if other == host { mine } else { inbox(other) })
                .collect();
            round.fold_all(mine, sources);
        }
        round
    };
    let from_owner = |unit: &Unit| {
        let mut round = Round::default();
        if let Some(run) = local_stage::run_of(unit, host, rank) {
            for (other, peer) in rotated(run, host) {
                round.send(peer, chunk(spec, run, host));
                round.recv(peer, chunk(spec, run, other));
            }
        }
        round
    };
    for tick in 0..units.len() + 3 {
        if let Some(unit) = units.get(tick) {
            plan.rounds.push(fold_here(tick, unit));
        }
        if let Some(unit) = tick.checked_sub(1).and_then(|u| units.get(u)) {
            plan.rounds.push(to_owner(tick - 1, unit));
        }
        if let Some(unit) = tick.checked_sub(2).and_then(|u| units.get(u)) {
            plan.rounds.push(from_owner(unit));
        }
        if let Some(unit) = tick.checked_sub(3).and_then(|u| units.get(u)) {
            let mut round = Round::default();
            local_stage::gather(&mut round, unit, hosts, rank);
            plan.rounds.push(round);
        }
    }
    plan
}

/// The part of a run that `host` owns.
pub(super) fn chunk(spec: &Spec, run: &Run, host: usize) -> Part {
    let range = Chunks::new(run.elems.len(), run.holders.len(), spec.line_elems()).range(host);
    Part::new(Buf::Output, run.elems.start + range.start, range.len())
}

/// The other hosts and their holders, beginning with the next.
fn rotated(run: &Run, host: usize) -> impl Iterator<Item = (usize, usize)> {
    let hosts = run.holders.len();
    (1..hosts).map(move |k| {
        let other = (host + k) % hosts;
        (other, run.holders[other])
    })
}
