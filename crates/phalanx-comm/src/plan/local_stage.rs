//! The steps of hierarchical plans inside one host.

use std::ops::Range;

use super::grid::{Run, Unit};
use super::{Buf, Hosts, Part, Round, Spec};

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

/// Scratch of a rank on a chain of hosts: for every unit in progress an inbox, followed
/// by the prefix over the previous hosts.
pub(super) struct ChainScratch {
    locals: usize,
    stride: usize,
    depth: usize,
}

impl ChainScratch {
    /// The scratch of a rank on `host`. Data is scattered in one tick, folded `host` ticks
    /// later, and the result is used one tick later. Units that many ticks apart share a
    /// place.
    pub(super) fn new(spec: &Spec, hosts: &Hosts, units: &[Unit], host: usize) -> ChainScratch {
        let longest = units.iter().flatten().map(|run| run.elems.len()).max();
        ChainScratch {
            locals: hosts.ranks(host).len() - 1,
            stride: spec.padded(longest.unwrap_or(0)),
            depth: (host + 2).min(units.len()),
        }
    }

    pub(super) fn elems(&self) -> usize {
        (self.locals + 1) * self.stride * self.depth
    }

    /// Where unit `u` arrives inside the host.
    pub(super) fn inbox(&self, u: usize) -> Inbox {
        Inbox {
            start: (u % self.depth) * (self.locals + 1) * self.stride,
            stride: self.stride,
        }
    }

    /// Where the prefix of `run`, of unit `u`, arrives.
    pub(super) fn prefix(&self, u: usize, run: &Run) -> Part {
        let start = self.inbox(u).start + self.locals * self.stride;
        Part::new(Buf::Scratch, start, run.elems.len())
    }
}

/// The run of `unit` that `rank` holds.
pub(super) fn run_of(unit: &Unit, host: usize, rank: usize) -> Option<&Run> {
    unit.iter().find(|run| run.holders[host] == rank)
}

/// Every rank sends each run of its data, which is in `from`, to its holder on this
/// host. Returns the parts from which the rank's own run is folded, in ascending rank order.
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
