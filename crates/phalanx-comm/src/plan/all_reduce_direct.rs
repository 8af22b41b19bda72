//! All-reduce, direct: reduce-scatter by chunk owners, then all-gather, a
//! segment of every chunk at a time.
//!
//! With [short segments](Spec::short_segments) no connection gets far ahead of the others that share its network card, so
//! none is left to finish alone. On a fast network the number of segments costs more than that saves.
//!
//! *Steps:* 2 rounds for every segment of a chunk, each with up to `P − 1`
//! sends and receives in flight. A segment is gathered [`LAG`] rounds of
//! scattering later, so that its owner folds it while others travel.
//! *Bytes sent by rank r:* `(n − n_r) + (P − 1)·n_r`, with `n_r` its chunk;
//! about `2·n·(P − 1)/P`, the least possible.
//! *Order of additions:* canonical: owner `r` holds chunk `r` of all ranks and
//! folds them in ascending rank order; segments cut elements apart, never an
//! element's sum.
//! *Scratch:* `(P − 1)·(LAG + 1)` segments, so that what was received is
//! folded while it is still in the cache.
//! *Source:* docs/design/collectives.md §4, "direct reduce-scatter + all-gather".

use super::{Buf, Part, RankPlan, Round, Spec, rotation, slot};

/// Bytes of a chunk that are folded at once, at most: these and what arrives
/// meanwhile should stay in a core's L2 cache.
const SEGMENT_MAX_BYTES: usize = 256 << 10;

/// At least, if the chunk has that many: with less, synchronisation would take most of
/// the time. Short segments have this length.
const SEGMENT_MIN_BYTES: usize = 64 << 10;

/// Segments of a chunk that is long enough, so that one travels while another is
/// folded.
const SEGMENTS: usize = 4;

/// Segments that are scattered before the first is gathered.
const LAG: usize = 2;

/// The longest that a segment may be.
const fn most_bytes(is_short: bool) -> usize {
    match is_short {
        true => SEGMENT_MIN_BYTES,
        false => SEGMENT_MAX_BYTES,
    }
}

/// Approximate bytes of a segment of a chunk of `chunk_bytes`.
pub(crate) fn segment_bytes(chunk_bytes: usize, is_short: bool) -> usize {
    chunk_bytes
        .div_ceil(SEGMENTS)
        .clamp(SEGMENT_MIN_BYTES, most_bytes(is_short))
}

/// Elements of a segment, the same on all ranks.
pub(super) fn segment_elems(spec: &Spec, longest: usize) -> usize {
    spec.segment_elems(
        longest.div_ceil(SEGMENTS),
        SEGMENT_MIN_BYTES..=most_bytes(spec.short_segments),
    )
}

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let chunks = spec.chunks();
    let longest = (0..spec.world).map(|r| chunks.len(r)).max().unwrap_or(0);
    let segment_elems = segment_elems(spec, longest);
    let segments = longest.div_ceil(segment_elems);
    // Segment `k` of `owner`'s chunk; empty where the chunk has ended.
    let part = |owner, k: usize| {
        let chunk = chunks.range(owner);
        let start = (chunk.start + k * segment_elems).min(chunk.end);
        let end = (start + segment_elems).min(chunk.end);
        Part::of(Buf::Output, start..end)
    };
    let stride = spec.padded(chunks.len(rank).min(segment_elems));
    let depth = segments.clamp(1, LAG + 1);
    let inbox = |k: usize, peer, len| {
        let place = (k % depth) * (spec.world - 1) + slot(rank, peer);
        Part::new(Buf::Scratch, place * stride, len)
    };
    plan.scratch_elems = stride * (spec.world - 1) * depth;

    let scatter = |k| {
        let mut round = Round::default();
        let mine = part(rank, k);
        for (to, from) in rotation(rank, spec.world) {
            round.send(to, part(to, k));
            round.recv(from, inbox(k, from, mine.len));
        }
        let sources = (0..spec.world)
            .map(|r| {
                if r == rank {
                    mine
                } else {
                    inbox(k, r, mine.len)
                }
            })
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
    for k in 0..segments + LAG {
        if k < segments {
            plan.rounds.push(scatter(k));
        }
        if k >= LAG && k - LAG < segments {
            plan.rounds.push(gather(k - LAG));
        }
    }
    plan
}
