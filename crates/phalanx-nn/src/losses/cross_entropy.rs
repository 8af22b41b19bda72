//! Cross-entropy of labels against unnormalised scores.

use crate::{Result, Tensor};

impl<'s> Tensor<'s> {
    /// [`log_softmax`](Tensor::log_softmax), then [`nll_loss`](Tensor::nll_loss).
    ///
    /// # Errors
    /// As [`nll_loss`](Tensor::nll_loss).
    pub fn cross_entropy(self, labels: &[u32], divisor: f32) -> Result<Tensor<'s>> {
        self.log_softmax()?.nll_loss(labels, divisor)
    }
}
