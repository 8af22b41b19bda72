//! All-reduce over two binary trees: sums travel up, the result down.
//!
//! Each tree carries one half of the data, in segments; data up to
//! [`ONE_TREE_MAX_BYTES`] goes over the first alone. In tree `t` rank `r` has
//! the place `(r + t) mod P`; see `tree.rs` for the shape.
//!
//! *Steps:* `2·⌊log₂ P⌋` for the first segment, one more for each further; in
//! each a rank of every tree sends to its parent, receives from its children,
//! and on the way back the other way round. Steps of the two trees alternate.
//! *Bytes sent by rank r:* of each tree's half h: h unless it is the root, and
//! h for each child: about `2n` in all whatever `P`, because the inner nodes of
//! one tree are leaves of the other.
//! *Order of additions:* fixed by `P`, the number of elements and the half, the
//! same on all ranks, but not canonical: every inner node folds its left
//! subtree's sum, its own data and its right subtree's sum, in this order. 16-bit
//! types are rounded at every inner node.
//! *Scratch:* for each tree and child [`DEPTH`] segments.
//! *Source:* Sanders, Speck and Träff, 2009. docs/design/collectives.md §4, "large H".

use super::tree::{self, Node};
use super::{Buf, Chunks, Local, Part, RankPlan, Round, Spec};

/// Data that one tree carries alone: two would send twice as many messages,
/// which cost more than these bytes.
pub(super) const ONE_TREE_MAX_BYTES: usize = 32 << 10;

/// Segments of a half that is long enough, so that all levels have something to do.
const SEGMENTS: usize = 16;
const SEGMENT_MIN_BYTES: usize = 16 << 10;
const SEGMENT_MAX_BYTES: usize = 256 << 10;

/// Segments of a child that may lie unfolded.
const DEPTH: usize = 2;

/// How many elements each tree carries.
pub(super) fn halves(spec: &Spec) -> [std::ops::Range<usize>; 2] {
    let trees = if spec.count * spec.elem_bytes <= ONE_TREE_MAX_BYTES {
        1
    } else {
        2
    };
    let halves = Chunks::new(spec.count, trees, spec.line_elems());
    let second = if trees == 2 {
        halves.range(1)
    } else {
        spec.count..spec.count
    };
    [halves.range(0), second]
}

/// One tree as a rank sees it.
struct Side {
    elems: std::ops::Range<usize>,
    node: Node,
    /// What to add to a place to get its rank.
    turn: usize,
}

impl Side {
    fn new(spec: &Spec, rank: usize, tree: usize) -> Side {
        Side {
            elems: halves(spec)[tree].clone(),
            node: Node::at((rank + tree) % spec.world, spec.world),
            turn: spec.world - tree,
        }
    }

    fn rank_at(&self, place: usize, world: usize) -> usize {
        (place + self.turn) % world
    }

    fn segment(&self, k: usize, segment: usize) -> Part {
        let start = (self.elems.start + k * segment).min(self.elems.end);
        Part::of(Buf::Output, start..(start + segment).min(self.elems.end))
    }
}

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let world = spec.world;
    if world == 1 || spec.count == 0 {
        return plan;
    }
    let sides = [0, 1].map(|tree| Side::new(spec, rank, tree));
    let longest = sides[0].elems.len().max(sides[1].elems.len());
    let segment = segment_elems(spec, longest);
    let segments = longest.div_ceil(segment);
    let stride = spec.padded(segment.min(longest));
    let top = tree::height(world);
    plan.scratch_elems = sides.iter().map(|s| s.node.children()).sum::<usize>() * stride * DEPTH;
    for tick in 0..segments + 2 * top {
        let mut places = 0;
        for side in &sides {
            let inbox = Part::new(Buf::Scratch, places * stride * DEPTH, stride);
            places += side.node.children();
            if side.elems.is_empty() {
                continue;
            }
            // Segment `k` reaches a node of height h in tick k + h − 1, and comes
            // back to one of depth d in tick k + top + d − 1.
            let at = |begun: usize| {
                let k = tick.checked_sub(begun)?;
                Some((k, side.segment(k, segment))).filter(|(_, part)| part.len > 0)
            };
            plan.rounds.push(round(side, world, top, inbox, at));
        }
    }
    plan
}

/// What `side` does in one tick; `at` says which segment has come so far that
/// it began so many ticks ago.
fn round(
    side: &Side,
    world: usize,
    top: usize,
    inbox: Part,
    at: impl Fn(usize) -> Option<(usize, Part)>,
) -> Round {
    let node = &side.node;
    let mut round = Round::default();
    let rank_at = |place| side.rank_at(place, world);
    if let Some(parent) = node.parent {
        if let Some((_, part)) = at(node.parent_height - 1) {
            round.send(rank_at(parent), part);
        }
        if let Some((_, part)) = at(top + node.depth - 1) {
            round.recv(rank_at(parent), part);
        }
    }
    if let (Some(left), Some((k, own))) = (node.left, node.height.checked_sub(1).and_then(&at)) {
        let place = |child: usize| {
            let start = inbox.start + (child * DEPTH + k % DEPTH) * inbox.len;
            Part::new(Buf::Scratch, start, own.len)
        };
        round.recv(rank_at(left), place(0));
        let mut sources = vec![place(0), own];
        if let Some(right) = node.right {
            round.recv(rank_at(right), place(1));
            sources.push(place(1));
        }
        round.local.push(Local::Fold {
            into: own,
            sources,
            finish: node.parent.is_none(),
        });
    }
    if let Some((_, part)) = at(top + node.depth) {
        for child in [node.left, node.right].into_iter().flatten() {
            round.send(rank_at(child), part);
        }
    }
    round
}

/// Elements of a segment, the same on all ranks.
pub(super) fn segment_elems(spec: &Spec, longest: usize) -> usize {
    spec.segment_elems(
        longest.div_ceil(SEGMENTS),
        SEGMENT_MIN_BYTES..=SEGMENT_MAX_BYTES,
    )
}

#[cfg(test)]
pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    [0, 1]
        .map(|tree| {
            let Side { elems, node, .. } = Side::new(spec, rank, tree);
            elems.len() * (node.children() + usize::from(node.parent.is_some()))
        })
        .iter()
        .sum()
}
