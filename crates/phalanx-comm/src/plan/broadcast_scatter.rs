//! Broadcast of large data: the root scatters chunks, then all ranks gather.
//!
//! *Steps:* 2 rounds.
//! *Bytes sent:* the root `(n − n_root) + (P − 1)·n_root`, about `2n`
//! whatever `P`; another rank `r` sends its chunk to all ranks but the root,
//! `(P − 2)·n_r`. The root needs nothing back.
//! *Use:* large data and three ranks or more.
//! *Source:* van de Geijn's scatter–all-gather broadcast, as in MPICH for long
//! messages, with the direct exchange in place of a ring.

use super::{Buf, Part, RankPlan, Round, Spec, rotation};

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let chunks = spec.chunks();
    let chunk = |owner| Part::of(Buf::Output, chunks.range(owner));
    let root = spec.root;
    let mut scatter = Round::default();
    let mut gather = Round::default();
    if rank != root {
        scatter.recv(root, chunk(rank));
    }
    for (to, from) in rotation(rank, spec.world) {
        if rank == root {
            scatter.send(to, chunk(to));
        } else {
            gather.recv(from, chunk(from));
        }
        if to != root {
            gather.send(to, chunk(rank));
        }
    }
    plan.rounds = vec![scatter, gather];
    plan
}
