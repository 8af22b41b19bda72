//! Reduce of small data: all ranks send to the root, which folds.
//!
//! *Steps:* 1 round.
//! *Bytes sent:* `n` by every rank but the root.
//! *Order of additions:* canonical.
//! *Scratch:* `(P − 1)·n` at the root.

use super::{Buf, Part, RankPlan, Round, Spec, rotation, slot};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let all = Part::new(Buf::Output, 0, spec.count);
    let mut round = Round::default();
    if rank == spec.root {
        let stride = spec.padded(spec.count);
        let inbox = |peer| Part::new(Buf::Scratch, slot(rank, peer) * stride, spec.count);
        plan.scratch_elems = stride * (spec.world - 1);
        for (_, from) in rotation(rank, spec.world) {
            round.recv(from, inbox(from));
        }
        let sources = (0..spec.world)
            .map(|r| if r == rank { all } else { inbox(r) })
            .collect();
        round.fold_all(all, sources);
    } else {
        round.send(spec.root, all);
    }
    plan.rounds = vec![round];
    plan
}
