//! Max-pooling.

use super::MaxPool2dOptions;
use crate::{Result, Value};

/// The largest value of each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool2d {
    options: MaxPool2dOptions,
}

impl MaxPool2d {
    /// `options`: a window size, or [`MaxPool2dOptions`].
    pub fn new(options: impl Into<MaxPool2dOptions>) -> Self {
        MaxPool2d {
            options: options.into(),
        }
    }

    /// # Errors
    /// As [`Value::max_pool2d`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.max_pool2d(self.options)
    }
}
