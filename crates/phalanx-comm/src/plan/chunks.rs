//! One chunk per rank.

use std::ops::Range;

/// Splits `count` elements into `world` consecutive chunks, in rank order.
///
/// Boundaries are multiples of a 64-byte line, so that no line and no vector
/// register is split between two owners. Lines are distributed as evenly as possible,
/// the first chunks getting one more; with fewer lines than ranks the last chunks are
/// empty.
#[derive(Clone, Copy, Debug)]
pub struct Chunks {
    count: usize,
    line_elems: usize,
    lines_each: usize,
    with_one_more: usize,
}

impl Chunks {
    pub(crate) fn new(count: usize, world: usize, line_elems: usize) -> Self {
        let lines = count.div_ceil(line_elems);
        Chunks {
            count,
            line_elems,
            lines_each: lines / world,
            with_one_more: lines % world,
        }
    }

    /// The elements of chunk `owner`.
    pub fn range(&self, owner: usize) -> Range<usize> {
        self.boundary(owner)..self.boundary(owner + 1)
    }

    /// Number of elements of chunk `owner`.
    pub fn len(&self, owner: usize) -> usize {
        self.range(owner).len()
    }

    fn boundary(&self, owner: usize) -> usize {
        let lines = owner * self.lines_each + owner.min(self.with_one_more);
        (lines * self.line_elems).min(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_tile_the_data_on_line_boundaries() {
        for world in 1..=20 {
            for count in [0, 1, 15, 16, 17, 160, 1000, 10007] {
                let chunks = Chunks::new(count, world, 16);
                let mut at = 0;
                for owner in 0..world {
                    let range = chunks.range(owner);
                    assert_eq!(range.start, at);
                    assert!(range.end == count || range.end.is_multiple_of(16));
                    at = range.end;
                }
                assert_eq!(at, count);
            }
        }
    }

    #[test]
    fn chunks_differ_by_at_most_one_line() {
        let chunks = Chunks::new(10007, 8, 16);
        let lines: Vec<usize> = (0..8).map(|o| chunks.len(o).div_ceil(16)).collect();
        assert_eq!(lines, [79, 79, 78, 78, 78, 78, 78, 78]);
    }
}
