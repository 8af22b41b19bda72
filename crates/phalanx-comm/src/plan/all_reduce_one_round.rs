//! All-reduce in one round: every rank sends all its data to every other, and folds all
//! of it.
//!
//! *Steps:* 1 round with `P − 1` sends and receives in flight.
//! *Bytes sent per rank:* `(P − 1)·n`: only for small data.
//! *Order of additions:* canonical on every rank: the same fold of the same
//! inputs, hence the same bits.
//! *Scratch:* `(P − 1)·n`.
//! *Source:* docs/design/collectives.md §4, "direct all-gather + local fold"; Open MPI's
//! choice for one rank per node.

use super::{Buf, Part, RankPlan, Round, Spec, rotation, slot};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let all = Part::new(Buf::Output, 0, spec.count);
    let stride = spec.padded(spec.count);
    let inbox = |peer| Part::new(Buf::Scratch, slot(rank, peer) * stride, spec.count);
    plan.scratch_elems = stride * (spec.world - 1);

    let mut round = Round::default();
    for (to, from) in rotation(rank, spec.world) {
        round.send(to, all);
        round.recv(from, inbox(from));
    }
    let sources = (0..spec.world)
        .map(|r| if r == rank { all } else { inbox(r) })
        .collect();
    round.fold_all(all, sources);
    plan.rounds = vec![round];
    plan
}
