//! Average pooling.

use super::AvgPool2dOptions;
use crate::{Result, Value};

/// The mean of each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgPool2d {
    options: AvgPool2dOptions,
}

impl AvgPool2d {
    /// `options`: a window size, or [`AvgPool2dOptions`].
    pub fn new(options: impl Into<AvgPool2dOptions>) -> Self {
        AvgPool2d {
            options: options.into(),
        }
    }

    /// # Errors
    /// As [`Value::avg_pool2d`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.avg_pool2d(self.options)
    }
}
