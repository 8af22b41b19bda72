//! Broadcast over hosts with several ranks each: to every host once, then inside
//! it.
//!
//! The data is cut as in `grid.rs`: on every host each slice has one holder. Hosts
//! are counted from the root's, cyclically. Data up to [`TREE_MAX_BYTES`] goes from
//! host to host down a binomial tree, longer data along a chain of all hosts, in
//! segments.
//!
//! *Steps:* for every segment: from the root to the holders on its host; from host
//! to host (`⌈log₂ H⌉` or `H − 1` rounds); on each host from the holders to the
//! others. Stages of different segments overlap.
//! *Bytes sent by rank r:* with s the bytes it holds (about n/L): `s` for each host
//! that its host passes the data on to, in a chain at most one; inside the host
//! `(L − 1)·s`, and on the root's host `(L − 2)·s`, the root itself in addition
//! `n − s`. So every host but the root's receives `n`, and in a chain no network
//! card sends more.
//! *Source:* docs/design/collectives.md §5; a pipelined chain is the usual bandwidth-optimal
//! broadcast.

use super::grid::{self, Unit};
use super::{Hosts, RankPlan, Round, Spec, local_stage};

/// Up to this size, latency matters more than how often the root's network card sends the data.
pub(crate) const TREE_MAX_BYTES: usize = 64 << 10;

/// The place of a host in the route of the data.
pub(super) struct Route {
    parent: Option<usize>,
    pub(super) children: Vec<usize>,
    /// Hops from the root's host.
    depth: usize,
    /// The largest depth of a host.
    deepest: usize,
}

impl Route {
    pub(super) fn new(spec: &Spec, hosts: &Hosts, host: usize) -> Route {
        let count = hosts.count();
        let origin = hosts.host_of(spec.root);
        let distance = (host + count - origin) % count;
        let at = |distance: usize| (origin + distance) % count;
        if spec.count * spec.elem_bytes > TREE_MAX_BYTES {
            let next = Some(distance + 1).filter(|next| *next < count);
            return Route {
                parent: distance.checked_sub(1).map(at),
                children: next.map(at).into_iter().collect(),
                depth: distance,
                deepest: count - 1,
            };
        }
        // The parent lacks the highest bit; children have one more above it.
        let steps = (0..usize::BITS - count.leading_zeros()).map(|k| 1usize << k);
        Route {
            parent: distance
                .checked_ilog2()
                .map(|bit| at(distance - (1 << bit))),
            children: steps
                .filter(|step| *step > distance && distance + step < count)
                .map(|step| at(distance + step))
                .collect(),
            depth: distance.count_ones() as usize,
            deepest: (count.max(2) - 1).ilog2() as usize + 1,
        }
    }
}

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let units = grid::units(spec, hosts);
    let host = hosts.host_of(rank);
    let route = Route::new(spec, hosts, host);
    // Unit `u` is scattered on the root's host in tick u, reaches hosts of depth d
    // in tick u + d, and is passed on one tick later.
    let unit_in = |tick: usize, begun: usize| units.get(tick.checked_sub(begun)?);
    for tick in 0..units.len() + route.deepest + 1 {
        let mut inside = Round::default();
        if let Some(unit) = unit_in(tick, 0).filter(|_| route.depth == 0) {
            scatter(&mut inside, unit, host, spec.root, rank);
        }
        let mut across = Round::default();
        let run_in = |begun| local_stage::run_of(unit_in(tick, begun)?, host, rank);
        if let (Some(parent), Some(run)) = (route.parent, run_in(route.depth)) {
            across.recv(run.holders[parent], local_stage::output(&run.elems));
        }
        if let Some(run) = run_in(route.depth + 1) {
            for child in &route.children {
                across.send(run.holders[*child], local_stage::output(&run.elems));
            }
        }
        let mut outward = Round::default();
        if let Some(unit) = unit_in(tick, route.depth + 1) {
            gather(&mut outward, unit, hosts, spec.root, rank);
        }
        plan.rounds.extend([inside, across, outward]);
    }
    plan
}

/// The root sends each run to its holder on its host.
fn scatter(round: &mut Round, unit: &Unit, host: usize, root: usize, rank: usize) {
    for run in unit {
        let (holder, part) = (run.holders[host], local_stage::output(&run.elems));
        if rank == root && holder != root {
            round.send(holder, part);
        } else if rank == holder && rank != root {
            round.recv(root, part);
        }
    }
}

/// Every holder sends its run to the others of its host, but not to the root.
fn gather(round: &mut Round, unit: &Unit, hosts: &Hosts, root: usize, rank: usize) {
    let host = hosts.host_of(rank);
    for run in unit {
        let (holder, part) = (run.holders[host], local_stage::output(&run.elems));
        if rank != holder && rank != root {
            round.recv(holder, part);
        } else if rank == holder {
            let others = hosts.ranks(host).filter(|r| *r != rank && *r != root);
            others.for_each(|other| round.send(other, part));
        }
    }
}
