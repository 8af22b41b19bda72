//! Dropout of elements or channels.

use crate::{Result, Tensor};

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

    /// # Errors
    /// As [`Tensor::dropout`] and [`Tensor::dropout2d`].
    pub fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        if self.channels {
            x.dropout2d(self.p)
        } else {
            x.dropout(self.p)
        }
    }
}
