//! Scatter in one round.
//!
//! *Steps:* 1 round.
//! *Bytes sent:* `(P − 1)·n` by the root, with `n` one rank's part.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let part = |r: usize| Part::new(Buf::Input, r * spec.count, spec.count);
    let result = Part::new(Buf::Output, 0, spec.count);
    let mut round = Round::default();
    if rank == spec.root {
        for (to, _) in rotation(rank, spec.world) {
            round.send(to, part(to));
        }
        round.copy(part(rank), result);
    } else {
        round.recv(spec.root, result);
    }
    plan.rounds = vec![round];
    plan
}

pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    if rank == spec.root {
        (spec.world - 1) * spec.count
    } else {
        0
    }
}
