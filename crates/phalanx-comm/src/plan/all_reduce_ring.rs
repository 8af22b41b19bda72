//! All-reduce over a ring: each rank talks to its neighbours only.
//!
//! *Steps:* `2(P − 1)` rounds; in each, rank `r` sends one chunk to `r + 1`
//! and receives one from `r − 1`.
//! *Bytes sent by rank r:* `2n − n_{r+1} − n_{r+2}` (chunks counted modulo
//! `P`); `2·n·(P − 1)/P` when all chunks are equal, the least possible.
//! *Order of additions:* chunk `c` is the left fold in the order
//! `c, c + 1, …, c − 1` (modulo `P`): the same on all ranks and in all runs,
//! but not canonical. 16-bit types are rounded at every hop.
//! *Scratch:* one chunk.
//! *Source:* Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
//! clusters of workstations", 2009; what Horovod and Gloo call ring.

use super::{Buf, Local, Part, RankPlan, Round, Spec};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let world = spec.world;
    let chunks = spec.chunks();
    let chunk = |owner: usize| Part::of(Buf::Output, chunks.range(owner % world));
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    plan.scratch_elems = (0..world).map(|c| chunks.len(c)).max().unwrap_or(0);

    // Reduce-scatter: chunk c sets out from rank c and gathers the others'
    // contributions on its way round.
    for step in 0..world - 1 {
        let mut round = Round::default();
        let own = chunk(rank + 2 * world - step - 1);
        let arriving = Part::new(Buf::Scratch, 0, own.len);
        round.send(next, chunk(rank + world - step));
        round.recv(previous, arriving);
        if own.len > 0 {
            round.local.push(Local::Fold {
                into: own,
                sources: vec![arriving, own],
                finish: step == world - 2,
            });
        }
        plan.rounds.push(round);
    }
    // All-gather: rank r now owns chunk r + 1, which goes round once more.
    for step in 0..world - 1 {
        let mut round = Round::default();
        round.send(next, chunk(rank + 1 + world - step));
        round.recv(previous, chunk(rank + world - step));
        plan.rounds.push(round);
    }
    plan
}
