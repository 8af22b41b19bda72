//! One rank's data goes to one other rank.
//!
//! *Steps:* 1 round. *Bytes sent:* `n` by the sender. An empty message still
//! makes a frame, so that a receiver of nothing waits for its sender.

use super::{Buf, Part, RankPlan, Round, Spec, Transfer};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let mut round = Round::default();
    if rank == spec.root {
        round.sends.push(Transfer {
            peer: spec.target,
            part: Part::new(Buf::Input, 0, spec.count),
        });
    } else if rank == spec.target {
        round.recvs.push(Transfer {
            peer: spec.root,
            part: Part::new(Buf::Output, 0, spec.count),
        });
    }
    plan.rounds = vec![round];
    plan
}

#[cfg(test)]
pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    if rank == spec.root { spec.count } else { 0 }
}
