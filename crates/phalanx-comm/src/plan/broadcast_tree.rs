//! Broadcast down a binomial tree.
//!
//! *Steps:* `⌈log₂ P⌉` rounds; in round `k` the `2^k` ranks that have the data
//! pass it on to `2^k` others (ranks counted from the root).
//! *Bytes sent by the rank at distance v from the root:* `n` for each `k` with
//! `2^k > v` and `v + 2^k < P`; the root sends `⌈log₂ P⌉·n`.
//! *Use:* small data, or two ranks.
//! *Source:* the usual one, e.g. MPICH's short-message broadcast.

use super::{Buf, Part, RankPlan, Round, Spec, Transfer};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let world = spec.world;
    if spec.count == 0 {
        return plan;
    }
    let all = Part::new(Buf::Output, 0, spec.count);
    let distance = (rank + world - spec.root) % world;
    let at = |distance: usize| (spec.root + distance) % world;
    let mut have = 1;
    while have < world {
        let mut round = Round::default();
        if distance < have {
            if distance + have < world {
                round.sends.push(Transfer {
                    peer: at(distance + have),
                    part: all,
                });
            }
        } else if distance < 2 * have {
            round.recvs.push(Transfer {
                peer: at(distance - have),
                part: all,
            });
        }
        plan.rounds.push(round);
        have *= 2;
    }
    plan
}
