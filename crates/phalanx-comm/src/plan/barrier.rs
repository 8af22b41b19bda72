//! Dissemination barrier.
//!
//! *Steps:* `⌈log₂ P⌉` rounds; in round `k` rank `r` sends an empty message to
//! `r + 2^k` and waits for one from `r − 2^k`. After round `k` it knows,
//! directly or not, of the `2^(k+1) − 1` ranks before it.
//! *Bytes of payload:* none.
//! *Source:* Hensgen, Finkel and Manber, "Two algorithms for barrier
//! synchronization", 1988.

use super::{Buf, Part, RankPlan, Round, Spec, Transfer};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let world = spec.world;
    let nothing = Part::new(Buf::Output, 0, 0);
    let mut step = 1;
    while step < world {
        plan.rounds.push(Round {
            sends: vec![Transfer {
                peer: (rank + step) % world,
                part: nothing,
            }],
            recvs: vec![Transfer {
                peer: (rank + world - step) % world,
                part: nothing,
            }],
            local: Vec::new(),
        });
        step *= 2;
    }
    plan
}
