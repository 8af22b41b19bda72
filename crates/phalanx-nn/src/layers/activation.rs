//! Element-wise activation functions as layers.

use super::Activation;
use crate::{Result, Value};

impl Activation {
    /// Applies the function to every element of `x`.
    ///
    /// # Errors
    /// As [`Value::activation`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.activation(*self)
    }
}
