//! Gather in one round.
//!
//! *Steps:* 1 round.
//! *Bytes sent:* `n` (its part) by every rank but the root.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let input = Part::new(Buf::Input, 0, spec.count);
    let place = |r: usize| Part::new(Buf::Output, r * spec.count, spec.count);
    let mut round = Round::default();
    if rank == spec.root {
        for (_, from) in rotation(rank, spec.world) {
            round.recv(from, place(from));
        }
        round.copy(input, place(rank));
    } else {
        round.send(spec.root, input);
    }
    plan.rounds = vec![round];
    plan
}

pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    if rank == spec.root { 0 } else { spec.count }
}
