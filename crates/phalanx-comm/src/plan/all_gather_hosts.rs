//! All-gather over hosts with several ranks each: every part to every host once,
//! then inside it.
//!
//! *Steps:* 1 round with a part to every rank of the own host and to one, the
//! *partner*, on every other; then for every other host a round (more where hosts
//! have different numbers of ranks) in which partners pass on what they received.
//! A part is passed on as soon as it is there.
//! *Bytes sent by rank r:* with L ranks on its host and L' on another: `(L − 1)·n`
//! for its own part and `(H − 1)·n` to other hosts; `(L − 1)·n` for each rank
//! whose partner it is, about H − 1. A host's network card so sends `(H − 1)·L·n`
//! instead of `(P − L)·L·n`.
//! *Source:* docs/design/collectives.md §5, for data that is not reduced.

use super::{Buf, Hosts, Part, RankPlan, Round, Spec};

/// The rank of `host` that receives the part of the `local`th rank of another host.
fn partner(hosts: &Hosts, host: usize, local: usize) -> usize {
    let ranks = hosts.ranks(host);
    ranks.start + local % ranks.len()
}

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let input = Part::new(Buf::Input, 0, spec.count);
    let place = |r: usize| Part::new(Buf::Output, r * spec.count, spec.count);
    let host = hosts.host_of(rank);
    let mut first = Round::default();
    for peer in others(hosts, host, rank) {
        first.send(peer, input);
        first.recv(peer, place(peer));
    }
    let local = rank - hosts.ranks(host).start;
    // Rotated, so that not all hosts send to the same one at first.
    for k in 1..hosts.count() {
        let to = (host + k) % hosts.count();
        first.send(partner(hosts, to, local), input);
    }
    for (_, r) in passed_on(hosts, host).filter(|(by, _)| *by == rank) {
        first.recv(r, place(r));
    }
    first.copy(input, place(rank));
    plan.rounds.push(first);
    // One part at a time from each partner.
    let mut sent = vec![0; hosts.ranks(host).len()];
    let mut rounds: Vec<Round> = Vec::new();
    for (by, r) in passed_on(hosts, host) {
        let next = &mut sent[by - hosts.ranks(host).start];
        if *next == rounds.len() {
            rounds.push(Round::default());
        }
        let round = &mut rounds[*next];
        *next += 1;
        if by == rank {
            others(hosts, host, rank).for_each(|peer| round.send(peer, place(r)));
        } else {
            round.recv(by, place(r));
        }
    }
    plan.rounds.extend(rounds);
    plan
}

fn others(hosts: &Hosts, host: usize, rank: usize) -> impl Iterator<Item = usize> + use<> {
    hosts.ranks(host).filter(move |peer| *peer != rank)
}

/// On `host`, which partner passes on the part of which rank of another host;
/// hosts in rotated order.
pub(super) fn passed_on(hosts: &Hosts, host: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = hosts.count();
    (1..count).flat_map(move |k| {
        let from = hosts.ranks((host + count - k) % count);
        let locals = 0..from.len();
        locals.map(move |local| (partner(hosts, host, local), from.start + local))
    })
}
