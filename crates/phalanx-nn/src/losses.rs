//! Reductions of losses, and losses composed of several operations.

pub use crate::ops::cross_entropy::CrossEntropyOptions;
pub use crate::ops::element_loss::Reduction;
pub use crate::ops::nll::IGNORE_LABEL;
use crate::{Result, Tensor};

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
