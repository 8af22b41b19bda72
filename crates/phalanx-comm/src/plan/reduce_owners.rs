//! Reduce of large data: chunk owners fold, then send to the root.
//!
//! *Steps:* 2 rounds.
//! *Bytes sent by rank r:* `n − n_r` to the owners, then `n_r` to the root
//! unless it is the root: `n`, and `n − n_root` for the root.
//! *Order of additions:* canonical.
//! *Scratch:* `P` chunks: the data of ranks other than the root is not
//! touched, so an owner's result needs a separate place.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let root = spec.root;
    let chunks = spec.chunks();
    let chunk = |owner| Part::of(Buf::Output, chunks.range(owner));
    let mine = chunk(rank);
    let stride = spec.padded(mine.len);
    // The rank's own slot is free for the result.
    let inbox = |peer: usize| Part::new(Buf::Scratch, peer * stride, mine.len);
    plan.scratch_elems = stride * spec.world;

    let mut scatter = Round::default();
    let mut gather = Round::default();
    for (to, from) in rotation(rank, spec.world) {
        scatter.send(to, chunk(to));
        scatter.recv(from, inbox(from));
        if rank == root {
            gather.recv(from, chunk(from));
        }
    }
    let result = if rank == root { mine } else { inbox(rank) };
    let sources = (0..spec.world)
        .map(|r| if r == rank { mine } else { inbox(r) })
        .collect();
    scatter.fold_all(result, sources);
    if rank != root {
        gather.send(root, result);
    }
    plan.rounds = vec![scatter, gather];
    plan
}
