//! The fixed tree over the logical shards of a global batch. Pure arithmetic,
//! but for [`ShardTree::gather_values`].
//!
//! Shard `s` of `S` has samples `s, s + S, s + 2S, …` of the global batch, so
//! a short batch leaves the *last* shards empty. Rank `r` of `P` computes the
//! shards `r·S/P .. (r+1)·S/P`. Values are added in the complete binary tree
//! over the shards; an empty shard's sibling is passed up alone. Neither the shards nor
//! the tree depend on the ranks, so the sum has the same bits for every world size.

use std::collections::VecDeque;
use std::ops::Range;

use phalanx_comm::{ProcessGroup, ReduceOp};

use crate::error::{Error, Result};

/// One node: the shards `index << level .. (index + 1) << level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) level: u32,
    pub(crate) index: usize,
}

impl Node {
    pub(crate) fn leaf(shard: usize) -> Node {
        Node {
            level: 0,
            index: shard,
        }
    }

    fn parent(self) -> Node {
        Node {
            level: self.level + 1,
            index: self.index / 2,
        }
    }

    /// Whether `right` is the other child of this node's parent.
    pub(crate) fn joins(self, right: Node) -> Option<Node> {
        let siblings = self.level == right.level
            && self.index.is_multiple_of(2)
            && self.index + 1 == right.index;
        siblings.then(|| self.parent())
    }

    fn shards(self) -> Range<usize> {
        self.index << self.level..(self.index + 1) << self.level
    }
}

/// How a global batch is split into logical shards and folded over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardTree {
    shards: usize,
}

impl ShardTree {
    /// Most shards; more would be smaller than any useful batch.
    pub const MAX_SHARDS: usize = 1 << 16;

    /// A tree over `shards` shards.
    ///
    /// # Errors
    ///
    /// `Usage` for none or more than [`MAX_SHARDS`](Self::MAX_SHARDS).
    pub fn new(shards: usize) -> Result<ShardTree> {
        if (1..=Self::MAX_SHARDS).contains(&shards) {
            return Ok(ShardTree { shards });
        }
        Err(Error::usage(format!(
            "a global batch cannot be cut into {shards} shards; choose 1 to {}",
            Self::MAX_SHARDS
        )))
    }

    /// Number of shards.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Shards that `rank` of `world` computes.
    pub fn range(&self, world: usize, rank: usize) -> Range<usize> {
        let border = |r: usize| r * self.shards / world.max(1);
        border(rank)..border(rank + 1)
    }

    /// Samples of `shard` in a global batch of `samples`.
    pub fn size(&self, samples: usize, shard: usize) -> usize {
        samples.saturating_sub(shard).div_ceil(self.shards)
    }

    /// How many shards of a global batch of `samples` are not empty.
    pub fn present(&self, samples: usize) -> usize {
        samples.min(self.shards)
    }

    /// The nodes that remain when `rank` has added all of its shards that can be added
    /// without another rank's.
    pub(crate) fn partial_nodes(&self, world: usize, rank: usize, present: usize) -> Vec<Node> {
        let range = self.range(world, rank);
        let mut stack: Vec<Node> = Vec::new();
        for shard in range.start..range.end.min(present) {
            let mut node = Node::leaf(shard);
            while let Some(parent) = stack.last().and_then(|left| left.joins(node)) {
                stack.pop();
                node = parent;
            }
            stack.push(node);
        }
        stack
    }

    /// Adds nodes that cover the present shards, in ascending order, in the tree.
    /// `None` when there are none.
    pub(crate) fn fold<T>(
        &self,
        mut nodes: VecDeque<(Node, T)>,
        mut add: impl FnMut(T, T) -> T,
    ) -> Option<T> {
        let root = Node {
            level: self.shards.next_power_of_two().trailing_zeros(),
            index: 0,
        };
        fold(root, &mut nodes, &mut add)
    }

    /// Adds one value per shard, `values[s]` for shard `s`, in the tree; 0 for none.
    pub fn sum(&self, values: &[f64]) -> f64 {
        let leaves = values.iter().enumerate();
        self.fold(
            leaves.map(|(s, v)| (Node::leaf(s), *v)).collect(),
            |a, b| a + b,
        )
        .unwrap_or(0.0)
    }

    /// Gives every rank the values of all ranks: `values` has the same length
    /// everywhere, and each element has a value on one rank and 0 on all others. Exact,
    /// since only zeros are added.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn gather_values(group: &ProcessGroup, values: &mut [f64]) -> Result<()> {
        if group.world_size() == 1 || values.is_empty() {
            return Ok(());
        }
        group
            .all_reduce(values, ReduceOp::Sum)
            .map_err(|e| Error::comm_while("values of the shards could not be gathered", e))
    }
}

fn fold<T>(
    at: Node,
    nodes: &mut VecDeque<(Node, T)>,
    add: &mut impl FnMut(T, T) -> T,
) -> Option<T> {
    let (front, _) = nodes.front()?;
    if *front == at {
        return nodes.pop_front().map(|(_, value)| value);
    }
    if front.shards().start >= at.shards().end || at.level == 0 {
        return None;
    }
    let child = |side| Node {
        level: at.level - 1,
        index: 2 * at.index + side,
    };
    let left = fold(child(0), nodes, add);
    let right = fold(child(1), nodes, add);
    match (left, right) {
        (Some(left), Some(right)) => Some(add(left, right)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum as text, which shows its order.
    fn written(tree: ShardTree, nodes: Vec<(Node, String)>) -> String {
        tree.fold(nodes.into(), |a, b| format!("({a}+{b})"))
            .unwrap_or_default()
    }

    #[test]
    fn the_order_is_the_same_for_every_world_size_and_short_batches() {
        for shards in [1, 2, 3, 5, 8, 12, 16] {
            let tree = ShardTree::new(shards).expect("fits");
            for present in 1..=shards {
                let leaves =
                    |range: Range<usize>| range.map(|s| (Node::leaf(s), s.to_string())).collect();
                let want = written(tree, leaves(0..present));
                for world in 1..=shards {
                    let mut nodes = Vec::new();
                    for rank in 0..world {
                        let range = tree.range(world, rank);
                        for node in tree.partial_nodes(world, rank, present) {
                            let shards = node.shards();
                            assert!(
                                range.start <= shards.start && shards.end <= range.end.min(present)
                            );
                            let own: Vec<_> = leaves(shards.clone());
                            let mut own: VecDeque<_> = own.into();
                            let value = fold(node, &mut own, &mut |a, b| format!("({a}+{b})"));
                            nodes.push((node, value.expect("present")));
                        }
                    }
                    assert_eq!(
                        written(tree, nodes),
                        want,
                        "{present} of {shards} shards, {world} ranks"
                    );
                }
            }
        }
        let tree = ShardTree::new(8).expect("fits");
        let text = |n| {
            written(
                tree,
                (0..n).map(|s| (Node::leaf(s), s.to_string())).collect(),
            )
        };
        assert_eq!(text(8), "(((0+1)+(2+3))+((4+5)+(6+7)))");
        assert_eq!(text(6), "(((0+1)+(2+3))+(4+5))");
        assert_eq!(text(5), "(((0+1)+(2+3))+4)");
    }

    #[test]
    fn shards_cover_the_batch_and_ranks_the_shards() {
        for shards in 1..20 {
            let tree = ShardTree::new(shards).expect("fits");
            for samples in 0..60 {
                let sizes: Vec<usize> = (0..shards).map(|s| tree.size(samples, s)).collect();
                assert_eq!(sizes.iter().sum::<usize>(), samples);
                let present = sizes.iter().take_while(|n| **n > 0).count();
                assert_eq!(present, tree.present(samples));
                assert!(sizes[present..].iter().all(|n| *n == 0));
            }
            for world in 1..=shards {
                let all: Vec<usize> = (0..world).flat_map(|r| tree.range(world, r)).collect();
                assert_eq!(all, (0..shards).collect::<Vec<_>>());
            }
        }
        assert!(ShardTree::new(0).is_err());
    }
}
