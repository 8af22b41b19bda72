//! Functions of one number as layers.

use super::Activation;
use crate::{Result, Value};

impl Activation {
    /// The function of every element of `x`.
    ///
    /// # Errors
    /// As [`Value::activation`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.activation(*self)
    }
}
