//! Dropout of elements or channels.

use crate::{Result, Value};

/// Zeroes elements with probability `p` while training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    p: f64,
    channels: bool,
}

impl Dropout {
    /// Drops single elements.
    pub fn new(p: f64) -> Self {
        Dropout { p, channels: false }
    }

    /// Drops whole channels of images.
    pub fn channels(p: f64) -> Self {
        Dropout { p, channels: true }
    }

    /// The probability.
    pub(crate) fn p(&self) -> f64 {
        self.p
    }

    /// # Errors
    /// As [`Value::dropout`] and [`Value::dropout2d`].
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        if self.channels {
            x.dropout2d(self.p)
        } else {
            x.dropout(self.p)
        }
    }
}
