//! A table of vectors.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, ValueStep};

/// Rows of PyTorch's `weight` of shape `[rows, width]`, drawn from a standard normal.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    /// The table.
    pub weight: ParamId,
}

impl Embedding {
    /// `rows` vectors of `width` numbers.
    pub fn new(mut scope: Scope, rows: usize, width: usize) -> Self {
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
    /// As [`ValueStep::embedding`].
    pub fn forward<'s, S: ValueStep<'s>>(
        &self,
        step: S,
        indices: &S::Tokens,
        shape: &[usize],
    ) -> Result<S::Value> {
        step.embedding(self.weight, indices, shape, None)
    }
}
