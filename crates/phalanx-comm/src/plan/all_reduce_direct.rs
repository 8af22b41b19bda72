//! All-reduce, direct: reduce-scatter by chunk owners, then all-gather, a
//! segment of every chunk at a time.
//!
//! *Steps:* 2 rounds for every segment of a chunk (2 in all when a chunk is no
//! longer than that), each with up to `P − 1` sends and receives in flight.
//! *Bytes sent by rank r:* `(n − n_r) + (P − 1)·n_r`, with `n_r` its chunk;
//! about `2·n·(P − 1)/P`, the least possible.
//! *Order of additions:* canonical: owner `r` holds chunk `r` of all ranks and
//! folds them in ascending rank order; segments cut elements apart, never an
//! element's sum.
//! *Scratch:* `P − 1` segments, so that what was received is folded while it
//! is still in the cache.
//! *Source:* collectives.md §4, "direct reduce-scatter + all-gather".

use super::{Buf, Part, RankPlan, Round, Spec, rotation, slot};

/// Bytes of a chunk that are folded at once. `P − 1` of these and the ring
/// buffers should stay in a core's L2 cache; much smaller ones would spend
/// their time on synchronisation.
const SEGMENT_BYTES: usize = 256 << 10;

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    if spec.world == 1 {
        return plan;
    }
    let chunks = spec.chunks();
    let segment_elems = spec.padded((SEGMENT_BYTES / spec.elem_bytes.max(1)).max(1));
    let longest = (0..spec.world).map(|r| chunks.len(r)).max().unwrap_or(0);
    let segments = longest.div_ceil(segment_elems);
    // Segment `k` of `owner`'s chunk; empty where the chunk has ended.
    let part = |owner, k: usize| {
        let chunk = chunks.range(owner);
        let start = (chunk.start + k * segment_elems).min(chunk.end);
        let end = (start + segment_elems).min(chunk.end);
        Part::of(Buf::Output, start..end)
    };
    let stride = spec.padded(chunks.len(rank).min(segment_elems));
    let inbox = |peer, len| Part::new(Buf::Scratch, slot(rank, peer) * stride, len);
    plan.scratch_elems = stride * (spec.world - 1);

    let scatter = |k| {
        let mut round = Round::default();
        let mine = part(rank, k);
        for (to, from) in rotation(rank, spec.world) {
            round.send(to, part(to, k));
            round.recv(from, inbox(from, mine.len));
        }
        let sources = (0..spec.world)
            .map(|r| if r == rank { mine } else { inbox(r, mine.len) })
            .collect();
        round.fold_all(mine, sources);
        round
    };
    let gather = |k| {
        let mut round = Round::default();
        for (to, from) in rotation(rank, spec.world) {
            round.send(to, part(rank, k));
            round.recv(from, part(from, k));
        }
        round
    };
    // The results of a segment are gathered after the next one is scattered:
    // by then the owners have had time to fold them.
    for k in 0..segments {
        plan.rounds.push(scatter(k));
        if k > 0 {
            plan.rounds.push(gather(k - 1));
        }
    }
    if segments > 0 {
        plan.rounds.push(gather(segments - 1));
    }
    plan
}

pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    let own = spec.chunks().len(rank);
    (spec.count - own) + (spec.world - 1) * own
}
