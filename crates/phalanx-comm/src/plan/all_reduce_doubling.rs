//! All-reduce of small data among many ranks: all inputs are collected in
//! `⌈log₂ P⌉` rounds, the number of inputs each rank has doubling in each; then
//! everyone folds all of them.
//!
//! *Steps:* `⌈log₂ P⌉` rounds with one send and one receive; in round `k` rank
//! `r` sends all it has, at most `2^k` inputs, to `r − 2^k` and receives as many
//! from `r + 2^k`.
//! *Bytes sent per rank:* `(P − 1)·n`, as in one round, but in `⌈log₂ P⌉`
//! messages instead of `P − 1`.
//! *Order of additions:* canonical on every rank: the same fold of the same
//! inputs, hence the same bits.
//! *Scratch:* `P·n`.
//! *Source:* Bruck et al., "Efficient algorithms for all-to-all communications
//! in multiport message-passing systems", 1997; docs/design/collectives.md §4, "tiny,
//! H > 16".

use super::{Buf, Part, RankPlan, Round, Spec};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let (world, n) = (spec.world, spec.count);
    if world == 1 {
        return plan;
    }
    plan.scratch_elems = world * n;
    let all = Part::new(Buf::Output, 0, n);
    // The inputs of so many ranks, of which `rank + first` is the first.
    let inputs = |first: usize, ranks: usize| Part::new(Buf::Scratch, first * n, ranks * n);
    let mut have = 1;
    while have < world {
        let more = have.min(world - have);
        let mut round = Round::default();
        let sent = if have == 1 { all } else { inputs(0, more) };
        round.send((rank + world - have) % world, sent);
        round.recv((rank + have) % world, inputs(have, more));
        if have == 1 {
            round.copy(all, inputs(0, 1));
        }
        plan.rounds.push(round);
        have *= 2;
    }
    let sources = (0..world)
        .map(|r| inputs((r + world - rank) % world, 1))
        .collect();
    if let Some(last) = plan.rounds.last_mut() {
        last.fold_all(all, sources);
    }
    plan
}

#[cfg(test)]
pub(super) fn sent_elems(spec: &Spec) -> usize {
    (spec.world - 1) * spec.count
}
