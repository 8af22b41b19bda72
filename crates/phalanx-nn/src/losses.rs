//! Reductions of losses, and losses composed of several operations.

pub use crate::ops::cross_entropy::CrossEntropyOptions;
use crate::{Result, Tensor};

/// A label that is ignored (PyTorch's -100).
pub const IGNORE_LABEL: u32 = u32::MAX;

/// How the losses of elements (of rows, in losses over classes) are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reduction {
    /// One loss per element, or per row; ignored rows have 0.
    None,
    /// Their sum.
    Sum,
    /// The sum divided by the number of elements (NaN if there are none, as in PyTorch).
    Mean,
    /// The sum divided by a given number, such as the size of the batch over all ranks.
    Over(f32),
}

impl Reduction {
    pub(crate) fn divisor(self, elements: usize) -> f32 {
        match self {
            Reduction::None | Reduction::Sum => 1.0,
            Reduction::Mean => elements as f32,
            Reduction::Over(d) => d,
        }
    }
}

/// The sum divided by this number.
impl From<f32> for Reduction {
    fn from(divisor: f32) -> Self {
        Reduction::Over(divisor)
    }
}

impl<'s> Tensor<'s> {
    /// [`log_softmax`](Tensor::log_softmax), then [`nll_loss`](Tensor::nll_loss).
    ///
    /// # Errors
    /// As [`nll_loss`](Tensor::nll_loss).
    pub fn cross_entropy(
        self,
        labels: &[u32],
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        self.log_softmax()?.nll_loss(labels, reduction)
    }
}
