//! All-to-all in one round.
//!
//! *Steps:* 1 round with `P − 1` sends and receives in flight.
//! *Bytes sent per rank:* `(P − 1)·n`, with `n` the part for one rank; the
//! least possible.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let part = |r: usize| Part::new(Buf::Input, r * spec.count, spec.count);
    let place = |r: usize| Part::new(Buf::Output, r * spec.count, spec.count);
    let mut round = Round::default();
    for (to, from) in rotation(rank, spec.world) {
        round.send(to, part(to));
        round.recv(from, place(from));
    }
    round.copy(part(rank), place(rank));
    plan.rounds = vec![round];
    plan
}

pub(super) fn sent_elems(spec: &Spec) -> usize {
    (spec.world - 1) * spec.count
}
