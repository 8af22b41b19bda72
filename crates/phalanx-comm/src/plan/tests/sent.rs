//! What each rank sends in total, by the formula in the head comment of the method's file; the checker compares it with the
//! plan.

use std::ops::Range;

use crate::plan::{
    Hosts, Method, Spec, all_gather_hosts, all_reduce_rails, broadcast_hosts, grid, local_stage,
    reduce_scatter_hosts,
};

/// Elements that `rank` sends.
pub(super) fn stated_sent_elems(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let (count, world) = (spec.count, spec.world);
    let is_root = rank == spec.root;
    match spec.method {
        Method::BroadcastTree => broadcast_tree(spec, rank),
        Method::AllGatherHosts => all_gather_over_hosts(spec, hosts, rank),
        Method::AllGather | Method::ReduceScatter | Method::AllToAll => (world - 1) * count,
        Method::AllReduceOneRound => (world - 1) * count,
        Method::Gather | Method::ReduceRoot if is_root => 0,
        Method::Gather | Method::ReduceRoot => count,
        Method::Scatter if !is_root => 0,
        Method::Scatter => (world - 1) * count,
        Method::Barrier => 0,
        Method::AllReduceDirect => {
            let own = spec.chunks().len(rank);
            (count - own) + (world - 1) * own
        }
        _ if world == 1 => 0,
        Method::AllReduceRails => rails(spec, hosts, rank),
        Method::AllReduceChain => chain(spec, hosts, rank),
        Method::AllReduceRing => ring(spec, rank),
        Method::BroadcastScatter => broadcast_scatter(spec, rank),
        Method::BroadcastHosts => broadcast_over_hosts(spec, hosts, rank),
        Method::ReduceOwners if is_root => count - spec.chunks().len(rank),
        Method::ReduceOwners => count,
        Method::ReduceHosts => reduce_over_hosts(spec, hosts, rank),
        Method::ReduceScatterHosts => reduce_scatter_over_hosts(spec, hosts, rank),
    }
}

/// The elements that `rank` holds.
pub(in crate::plan) fn held(spec: &Spec, hosts: &Hosts, rank: usize) -> Range<usize> {
    let host = hosts.host_of(rank);
    grid::slices(spec, hosts, host).range(rank - hosts.ranks(host).start)
}

fn all_gather_over_hosts(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let host = hosts.host_of(rank);
    let inside = hosts.ranks(host).len() - 1;
    let passed = all_gather_hosts::passed_on(hosts, host)
        .filter(|(by, _)| *by == rank)
        .count();
    spec.count * (inside * (1 + passed) + hosts.count() - 1)
}

fn chain(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let host = hosts.host_of(rank);
    let held = held(spec, hosts, rank).len();
    let neighbours = usize::from(host > 0) + usize::from(host + 1 < hosts.count());
    (spec.count - held) + (hosts.ranks(host).len() - 1) * held + neighbours * held
}

fn rails(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let host = hosts.host_of(rank);
    let held = held(spec, hosts, rank).len();
    let owned: usize = grid::units(spec, hosts)
        .iter()
        .filter_map(|unit| local_stage::run_of(unit, host, rank))
        .map(|run| all_reduce_rails::chunk(spec, run, host).len)
        .sum();
    let inside = (spec.count - held) + (hosts.ranks(host).len() - 1) * held;
    inside + (held - owned) + (hosts.count() - 1) * owned
}

fn ring(spec: &Spec, rank: usize) -> usize {
    let chunks = spec.chunks();
    // Of each pass a rank sends all chunks but one: the one that it ends up
    // owning, then the one that its successor owned from the start.
    2 * spec.count - chunks.len((rank + 1) % spec.world) - chunks.len((rank + 2) % spec.world)
}

fn broadcast_over_hosts(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let host = hosts.host_of(rank);
    let held = held(spec, hosts, rank).len();
    let locals = hosts.ranks(host).len();
    let has_root = hosts.host_of(spec.root) == host;
    let across = broadcast_hosts::Route::new(spec, hosts, host)
        .children
        .len()
        * held;
    let inside = if rank == spec.root {
        spec.count - held + (locals - 1) * held
    } else if has_root {
        (locals - 2) * held
    } else {
        (locals - 1) * held
    };
    across + inside
}

fn broadcast_scatter(spec: &Spec, rank: usize) -> usize {
    let own = spec.chunks().len(rank);
    if rank == spec.root {
        (spec.count - own) + (spec.world - 1) * own
    } else {
        (spec.world - 2) * own
    }
}

fn broadcast_tree(spec: &Spec, rank: usize) -> usize {
    let distance = (rank + spec.world - spec.root) % spec.world;
    let children = (0..usize::BITS)
        .map(|k| 1usize << k)
        .take_while(|step| *step < spec.world)
        .filter(|step| *step > distance && distance + step < spec.world)
        .count();
    children * spec.count
}

fn reduce_over_hosts(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let held = held(spec, hosts, rank).len();
    let is_last = hosts.host_of(rank) + 1 == hosts.count();
    match is_last && rank == spec.root {
        true => spec.count - held,
        false => spec.count,
    }
}

fn reduce_scatter_over_hosts(spec: &Spec, hosts: &Hosts, rank: usize) -> usize {
    let all = reduce_scatter_hosts::whole(spec);
    let held = held(&all, hosts, rank);
    let is_last = hosts.host_of(rank) + 1 == hosts.count();
    let own = rank * spec.count..(rank + 1) * spec.count;
    let kept = held
        .end
        .min(own.end)
        .saturating_sub(held.start.max(own.start));
    all.count - if is_last { kept } else { 0 }
}
