//! All-gather in one round.
//!
//! *Steps:* 1 round with `P − 1` sends and receives in flight.
//! *Bytes sent per rank:* `(P − 1)·n`, with `n` one rank's part; the least
//! possible without relaying.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let input = Part::new(Buf::Input, 0, spec.count);
    let place = |r: usize| Part::new(Buf::Output, r * spec.count, spec.count);
    let mut round = Round::default();
    for (to, from) in rotation(rank, spec.world) {
        round.send(to, input);
        round.recv(from, place(from));
    }
    round.copy(input, place(rank));
    plan.rounds = vec![round];
    plan
}

pub(super) fn sent_elems(spec: &Spec) -> usize {
    (spec.world - 1) * spec.count
}
