//! Shapes without allocation.

use std::fmt;
use std::ops::Deref;

use crate::error::{Result, refuse};

/// Dimensions at most.
const MAX_RANK: usize = 6;

/// Sizes of a dense row-major tensor, outermost first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    pub(crate) fn new(dims: &[usize]) -> Result<Self> {
        let mut d = [1; MAX_RANK];
        let Some(head) = d.get_mut(..dims.len()) else {
            refuse!("shape {dims:?} has more than {MAX_RANK} dimensions");
        };
        head.copy_from_slice(dims);
        // A zero must not hide the others: operations multiply some of the sizes.
        let total = dims
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)));
        if total.is_none_or(|n| n > isize::MAX as usize / 8) {
            refuse!("shape {dims:?} is too large");
        }
        Ok(Shape {
            dims: d,
            rank: dims.len() as u8,
        })
    }

    /// This shape with size `n` in dimension `dim`.
    pub(crate) fn with(mut self, dim: usize, n: usize) -> Result<Self> {
        self.dims[dim] = n;
        Shape::new(&self)
    }

    /// Number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.iter().product()
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &**self)
    }
}
