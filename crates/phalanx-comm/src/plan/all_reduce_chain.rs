//! All-reduce over hosts with several ranks each, in canonical order: the
//! prefix of the fold travels from host to host, and the result back.
//!
//! *Steps:* for every segment: to the holder on each host (1 round); host `h`
//! receives the prefix over hosts `0..h`, folds its own ranks onto it and
//! passes it on (`H − 1` rounds); the last host has the result, which travels
//! back (`H − 1` rounds), and to the others of each host (1 round). Stages of
//! different segments overlap.
//! *Bytes sent by rank r:* with s the bytes it holds (about n/L): `n − s` and
//! `(L − 1)·s` inside the host, and s to each neighbouring host. An interior
//! host's network card sends `2n`, the outer ones n: for two hosts the least
//! possible, for more `H/(H − 1)` times that.
//! *Order of additions:* canonical: hosts are folded in order, and in each its
//! ranks. The prefix is stored between hosts, so types that are folded in a wider
//! one (f16, bf16) are rounded once per host: for those it is not chosen.
//! *Scratch:* for every segment between its scattering and its fold, one
//! segment per local rank.
//! *Source:* docs/design/collectives.md §5, "ordered chain".

use super::grid::{self, Unit};
use super::local_stage::{self, ChainScratch};
use super::{Buf, Hosts, Local, RankPlan, Round, Spec};

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let units = grid::units(spec, hosts);
    let host = hosts.host_of(rank);
    let last = hosts.count() - 1;
    let scratch = ChainScratch::new(spec, hosts, &units, host);
    plan.scratch_elems = scratch.elems();

    let to_holder = |u: usize, unit: &Unit| {
        let (mut round, at) = (Round::default(), (hosts, rank));
        let sources = local_stage::scatter(&mut round, unit, Buf::Output, at, &scratch.inbox(u));
        (round, sources)
    };
    // A unit's ranks are folded on host h in tick u + h; the result is back on
    // host h in tick u + last + (last − h).
    let across = |tick: usize| {
        let mut round = Round::default();
        let unit_in = |begun: usize| {
            let u = tick.checked_sub(begun)?;
            let unit = units.get(u)?;
            Some((u, unit, local_stage::run_of(unit, host, rank)?))
        };
        // Onwards: what was folded here one tick ago, then what is folded now.
        if host < last
            && let Some((_, _, run)) = unit_in(host + 1)
        {
            round.send(run.holders[host + 1], local_stage::output(&run.elems));
        }
        if let Some((u, unit, run)) = unit_in(host) {
            let into = local_stage::output(&run.elems);
            let mut sources = Vec::new();
            if host > 0 {
                let prefix = scratch.prefix(u, run);
                round.recv(run.holders[host - 1], prefix);
                sources.push(prefix);
            }
            sources.extend(to_holder(u, unit).1);
            if sources.len() > 1 || host == last {
                round.local.push(Local::Fold {
                    into,
                    sources,
                    finish: host == last,
                });
            }
        }
        // Backwards: host h receives one tick after host h + 1 has it.
        if host < last
            && let Some((_, _, run)) = unit_in(last + (last - host))
        {
            round.recv(run.holders[host + 1], local_stage::output(&run.elems));
        }
        if host > 0
            && let Some((_, _, run)) = unit_in(last + (last - host) + 1)
        {
            round.send(run.holders[host - 1], local_stage::output(&run.elems));
        }
        round
    };
    for tick in 0..units.len() + 2 * last + 1 {
        plan.rounds.push(match units.get(tick) {
            Some(unit) => to_holder(tick, unit).0,
            None => Round::default(),
        });
        plan.rounds.push(across(tick));
        let mut round = Round::default();
        // One tick after the result is back on the first host, for all alike.
        if let Some(unit) = tick.checked_sub(2 * last + 1).and_then(|u| units.get(u)) {
            local_stage::gather(&mut round, unit, hosts, rank);
        }
        plan.rounds.push(round);
    }
    plan
}
