//! Binary trees over ranks, numbered in order: all *places* left of a node
//! are below it and all right of it are above.
//!
//! Of `n` places the root is the largest power of two less one, so that the
//! left side is full; both sides are made the same way. A place is a leaf if
//! it is even, and every odd one has at least a left child. So two such trees,
//! one of which is turned by one place, have their inner nodes in different
//! ranks, and no rank has to pass on more than another.
//!
//! *Source:* Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
//! broadcast, reduction and scan", 2009; what NCCL calls tree.

/// One place and its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) parent: Option<usize>,
    /// Levels below the parent; 0 for the root.
    pub(super) parent_height: usize,
    pub(super) left: Option<usize>,
    pub(super) right: Option<usize>,
    /// Levels below.
    pub(super) height: usize,
    /// Levels above.
    pub(super) depth: usize,
}

impl Node {
    /// The node at `place` of a tree of `places`.
    pub(super) fn at(place: usize, places: usize) -> Node {
        let (mut first, mut len) = (0, places);
        let (mut parent, mut parent_height, mut depth) = (None, 0, 0);
        loop {
            let height = height(len);
            let here = root(first, len);
            let (left, right) = ((1 << height) - 1, len.saturating_sub(1 << height));
            if place == here || len == 0 {
                return Node {
                    parent,
                    parent_height,
                    left: (left > 0).then(|| root(first, left)),
                    right: (right > 0).then(|| root(here + 1, right)),
                    height,
                    depth,
                };
            }
            (parent, parent_height) = (Some(here), height);
            depth += 1;
            (first, len) = if place < here {
                (first, left)
            } else {
                (here + 1, right)
            };
        }
    }

    /// How many children there are.
    pub(super) fn children(&self) -> usize {
        usize::from(self.left.is_some()) + usize::from(self.right.is_some())
    }
}

/// Levels below the root of a tree of so many places.
pub(super) fn height(places: usize) -> usize {
    places.max(1).ilog2() as usize
}

/// The root of the `len` places from `first` on.
pub(super) fn root(first: usize, len: usize) -> usize {
    first + (1 << height(len)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_know_each_other_and_their_levels() {
        for places in 1..=130 {
            let nodes: Vec<Node> = (0..places).map(|p| Node::at(p, places)).collect();
            let roots: Vec<usize> = (0..places).filter(|p| nodes[*p].parent.is_none()).collect();
            assert_eq!(roots, [root(0, places)]);
            assert_eq!(nodes[roots[0]].depth, 0);
            for (place, node) in nodes.iter().enumerate() {
                assert_eq!(node.left.is_some(), place % 2 == 1, "{place} of {places}");
                assert!(node.left.is_none_or(|left| left < place));
                assert!(node.right.is_none_or(|right| right > place));
                for child in [node.left, node.right].into_iter().flatten() {
                    assert_eq!(nodes[child].parent, Some(place));
                    assert_eq!(nodes[child].parent_height, node.height);
                    assert_eq!(nodes[child].depth, node.depth + 1);
                    assert!(nodes[child].height < node.height);
                }
            }
            let edges: usize = nodes.iter().map(Node::children).sum();
            assert_eq!(edges, places - 1);
        }
    }

    #[test]
    fn turned_by_one_place_no_rank_is_inside_twice() {
        for places in 2..=65 {
            for rank in 0..places {
                let inner = |place| Node::at(place, places).children() > 0;
                assert!(!(inner(rank) && inner((rank + 1) % places)));
            }
        }
    }
}
