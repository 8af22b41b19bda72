//! The smallest model: one weight.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Value};

/// `y = x w` with one weight `w` of shape [2, 1] that starts at zero, no bias.
#[derive(Clone, Copy, Debug)]
pub struct LinearToy {
    /// The weight.
    pub w: ParamId,
}

impl LinearToy {
    /// Registers `w`.
    pub fn new(scope: &mut Scope) -> Self {
        LinearToy {
            w: scope.param("w", &[2, 1], Layout::Same, Init::Constant(0.0)),
        }
    }

    /// (N, 2) to (N, 1).
    ///
    /// # Errors
    /// `Usage` when the last dimension is not 2.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.matmul(self.w)
    }
}
