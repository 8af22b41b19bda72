//! What hierarchical plans do inside one host.

use std::ops::Range;

use super::grid::Unit;
use super::{Buf, Hosts, Part, Round};

/// The inbox of a holder: for every local peer a slot.
pub(super) struct Inbox {
    pub(super) start: usize,
    pub(super) stride: usize,
}

impl Inbox {
    /// Where the data of the `local`th rank of the host of `me` arrives; `me`
    /// is the holder's own local number.
    fn part(&self, local: usize, me: usize, len: usize) -> Part {
        let slot = if local < me { local } else { local - 1 };
        Part::new(Buf::Scratch, self.start + slot * self.stride, len)
    }
}

/// The run of `unit` that `rank` holds.
pub(super) fn run_of(unit: &Unit, host: usize, rank: usize) -> Option<&super::grid::Run> {
    unit.iter().find(|run| run.holders[host] == rank)
}

/// Everyone sends each run of its data, which lies in `from`, to its holder on
/// this host. Returns what the holder's own run has to be folded from, in ascending
/// rank order.
pub(super) fn scatter(
    round: &mut Round,
    unit: &Unit,
    from: Buf,
    (hosts, rank): (&Hosts, usize),
    inbox: &Inbox,
) -> Vec<Part> {
    let host = hosts.host_of(rank);
    let locals = hosts.ranks(host);
    for run in unit {
        let holder = run.holders[host];
        if holder != rank {
            round.send(holder, Part::of(from, run.elems.clone()));
        }
    }
    let Some(run) = run_of(unit, host, rank) else {
        return Vec::new();
    };
    let me = rank - locals.start;
    locals
        .clone()
        .map(|peer| {
            if peer == rank {
                return Part::of(from, run.elems.clone());
            }
            let part = inbox.part(peer - locals.start, me, run.elems.len());
            round.recv(peer, part);
            part
        })
        .collect()
}

/// Every holder sends its run's result to the others of this host.
pub(super) fn gather(round: &mut Round, unit: &Unit, hosts: &Hosts, rank: usize) {
    let host = hosts.host_of(rank);
    for run in unit {
        let holder = run.holders[host];
        let part = output(&run.elems);
        if holder != rank {
            round.recv(holder, part);
            continue;
        }
        for peer in hosts.ranks(host).filter(|peer| *peer != rank) {
            round.send(peer, part);
        }
    }
}

pub(super) fn output(elems: &Range<usize>) -> Part {
    Part::of(Buf::Output, elems.clone())
}
