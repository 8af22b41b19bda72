//! Reduce-scatter in one round: everyone sends part `q` to rank `q`.
//!
//! *Steps:* 1 round with `P − 1` sends and receives in flight.
//! *Bytes sent per rank:* `(P − 1)·n`, with `n` one rank's part.
//! *Order of additions:* canonical.
//! *Scratch:* `P − 1` parts.

use super::{Buf, Part, RankPlan, Round, Spec, rotation, slot};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let part = |r: usize| Part::new(Buf::Input, r * spec.count, spec.count);
    let result = Part::new(Buf::Output, 0, spec.count);
    let mut round = Round::default();
    if spec.world == 1 {
        round.copy(part(0), result);
        plan.rounds = vec![round];
        return plan;
    }
    let stride = spec.padded(spec.count);
    let inbox = |peer| Part::new(Buf::Scratch, slot(rank, peer) * stride, spec.count);
    plan.scratch_elems = stride * (spec.world - 1);
    for (to, from) in rotation(rank, spec.world) {
        round.send(to, part(to));
        round.recv(from, inbox(from));
    }
    let sources = (0..spec.world)
        .map(|r| if r == rank { part(rank) } else { inbox(r) })
        .collect();
    round.fold_all(result, sources);
    plan.rounds = vec![round];
    plan
}

pub(super) fn sent_elems(spec: &Spec) -> usize {
    (spec.world - 1) * spec.count
}
