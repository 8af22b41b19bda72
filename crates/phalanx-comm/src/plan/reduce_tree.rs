//! Reduce over a binary tree: sums travel up to the root.
//!
//! *Steps:* `⌊log₂ P⌋` for the first segment, one more for each further. The
//! tree (`tree.rs`) is turned so that the root of the reduction is its root.
//! *Bytes sent:* `n` by every rank but the root.
//! *Order of additions:* fixed by `P`, the root and nothing else, but not canonical:
//! every inner node folds its left subtree's sum, its own data and its right
//! subtree's sum, in this order. 16-bit types are rounded at every inner node.
//! *Scratch:* for each child two segments; at inner nodes more for sums, because
//! the data of ranks other than the root is not touched: one for each level up
//! to the parent, and one.
//! *Source:* as for `all_reduce_tree`, with one tree.

use super::all_reduce_tree::segment_elems;
use super::tree::{self, Node};
use super::{Buf, Local, Part, RankPlan, Round, Spec};

/// Segments of a child that may lie unfolded.
const DEPTH: usize = 2;

/// The place of a rank.
pub(super) fn place(spec: &Spec, rank: usize) -> usize {
    (rank + spec.world - spec.root + tree::root(0, spec.world)) % spec.world
}

pub(super) fn build(spec: &Spec, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    let world = spec.world;
    if world == 1 || spec.count == 0 {
        return plan;
    }
    let node = Node::at(place(spec, rank), world);
    let rank_at = |at: usize| (at + world - place(spec, 0)) % world;
    let segment = segment_elems(spec, spec.count);
    let segments = spec.count.div_ceil(segment);
    let stride = spec.padded(segment.min(spec.count));
    let own = |k: usize| {
        let start = k * segment;
        Part::of(Buf::Output, start..(start + segment).min(spec.count))
    };
    let slot = |place: usize, k: usize| Part::new(Buf::Scratch, place * stride, own(k).len);
    let inbox = |child: usize, k: usize| slot(child * DEPTH + k % DEPTH, k);
    let inboxes = node.children() * DEPTH;
    let is_root = node.parent.is_none();
    // A sum is made in tick k + h − 1 and sent when its parent expects it.
    let sums = match node.parent {
        Some(_) if node.left.is_some() => node.parent_height - node.height + 1,
        _ => 0,
    };
    plan.scratch_elems = (inboxes + sums) * stride;
    let sum = |k: usize| match sums {
        0 => own(k),
        _ => slot(inboxes + k % sums, k),
    };
    // Segment `k` reaches a node of height h in tick k + h − 1.
    for tick in 0..segments + tree::height(world) - 1 {
        let mut round = Round::default();
        let at = |begun: usize| tick.checked_sub(begun).filter(|k| *k < segments);
        if let Some(parent) = node.parent
            && let Some(k) = at(node.parent_height - 1)
        {
            round.send(rank_at(parent), sum(k));
        }
        if let Some(left) = node.left
            && let Some(k) = at(node.height - 1)
        {
            round.recv(rank_at(left), inbox(0, k));
            let mut sources = vec![inbox(0, k), own(k)];
            if let Some(right) = node.right {
                round.recv(rank_at(right), inbox(1, k));
                sources.push(inbox(1, k));
            }
            round.local.push(Local::Fold {
                into: sum(k),
                sources,
                finish: is_root,
            });
        }
        plan.rounds.push(round);
    }
    plan
}

#[cfg(test)]
pub(super) fn sent_elems(spec: &Spec, rank: usize) -> usize {
    if spec.world == 1 || rank == spec.root {
        0
    } else {
        spec.count
    }
}
