//! Reductions of losses, and losses composed of several operations.

pub use crate::ops::cross_entropy::CrossEntropyOptions;
pub use crate::ops::element_loss::Reduction;
pub use crate::ops::nll::IGNORE_LABEL;
use crate::{Result, Tensor, Value, refuse};

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

    /// Of rows (N, E) and those of `other`: 1 - cosine where `alike`, `max(0, cosine - margin)` elsewhere, reduced. PyTorch:
    /// `cosine_embedding_loss`.
    ///
    /// # Errors
    /// `Usage` when the shapes or the length of `alike` do not fit.
    pub fn cosine_embedding_loss(
        self,
        other: Tensor<'s>,
        alike: &[bool],
        margin: f32,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        let cosine = self.cosine_similarity(other, 1)?;
        if cosine.shape() != [alike.len()] {
            refuse!(
                "cosine_embedding_loss: {} labels for pairs of shape {:?}",
                alike.len(),
                cosine.shape()
            );
        }
        let near = cosine.share().scale(-1.0)?.add_scalar(1.0)?;
        let far = cosine.add_scalar(-margin)?.relu()?;
        near.select_where(alike, far)?.reduced(reduction.into())
    }

    /// Of rows (N, E): `max(0, |x - positive| - |x - negative| + margin)`, reduced. Distances are Euclidean, with 1e-6 added to
    /// each difference. PyTorch: `triplet_margin_loss`.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit.
    pub fn triplet_margin_loss(
        self,
        positive: Tensor<'s>,
        negative: Tensor<'s>,
        margin: f32,
        reduction: impl Into<Reduction>,
    ) -> Result<Tensor<'s>> {
        let anchor = self.share();
        let distance = |x: Tensor<'s>, to| x.sub(to)?.add_scalar(1e-6)?.norm(1, false);
        let (near, far) = (distance(self, positive)?, distance(anchor, negative)?);
        let each = near.sub(far)?.add_scalar(margin)?.relu()?;
        each.reduced(reduction.into())
    }

    /// The losses of elements, combined.
    fn reduced(self, reduction: Reduction) -> Result<Tensor<'s>> {
        match reduction {
            Reduction::None => Ok(self),
            Reduction::Sum => self.sum(&[], false),
            Reduction::Mean => self.mean(&[], false),
            Reduction::Over(divisor) => self.sum(&[], false)?.scale(1.0 / divisor),
        }
    }
}
