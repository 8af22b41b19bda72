//! A table of vectors.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Step, Tensor};

/// Rows of PyTorch's `weight` of shape `[rows, width]`, drawn from a standard normal.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    /// The table.
    pub weight: ParamId,
}

impl Embedding {
    /// `rows` vectors of `width` numbers.
    pub fn new(scope: Scope, rows: usize, width: usize) -> Self {
        let mut scope = scope;
        let init = Init::Normal {
            mean: 0.0,
            std: 1.0,
        };
        Embedding {
            weight: scope.param("weight", &[rows, width], Layout::Same, init),
        }
    }

    /// Row `indices[i]` for every i: a tensor of `shape` with the width added.
    ///
    /// # Errors
    /// As [`Step::embedding`].
    pub fn forward<'s>(
        &self,
        step: &'s Step<'_>,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<Tensor<'s>> {
        step.embedding(self.weight, indices, shape, None)
    }
}
