//! Group and instance normalisation.

use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Value};

/// Normalises groups of channels of each image (N, …, C), with PyTorch's
/// `weight` (ones) and `bias` (zeros).
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// The factor of every channel.
    pub weight: ParamId,
    /// The offset of every channel.
    pub bias: ParamId,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// `groups` divides `channels`; eps 1e-5.
    pub fn new(mut scope: Scope, groups: usize, channels: usize) -> Self {
        GroupNorm {
            weight: scope.param("weight", &[channels], Layout::Same, Init::Constant(1.0)),
            bias: scope.param("bias", &[channels], Layout::Same, Init::Constant(0.0)),
            groups,
            eps: 1e-5,
        }
    }

    /// Sets eps, which is added to the variance.
    #[must_use]
    pub fn eps(self, eps: f64) -> Self {
        GroupNorm { eps, ..self }
    }

    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.group_norm(self.groups, (Some(self.weight), Some(self.bias)), self.eps)
    }
}

/// Normalises each channel of each image (N, …, C), without parameters, as PyTorch's `InstanceNorm2d` by default.
#[derive(Clone, Copy, Debug)]
pub struct InstanceNorm {
    channels: usize,
    affine: (Option<ParamId>, Option<ParamId>),
    eps: f64,
}

impl InstanceNorm {
    /// eps 1e-5.
    pub fn new(channels: usize) -> Self {
        InstanceNorm {
            channels,
            affine: (None, None),
            eps: 1e-5,
        }
    }

    /// With PyTorch's `weight` (ones) and `bias` (zeros): `affine=True`.
    pub fn affine(scope: Scope, channels: usize) -> Self {
        let GroupNorm { weight, bias, .. } = GroupNorm::new(scope, channels, channels);
        InstanceNorm {
            affine: (Some(weight), Some(bias)),
            ..Self::new(channels)
        }
    }

    /// Sets eps, which is added to the variance.
    #[must_use]
    pub fn eps(self, eps: f64) -> Self {
        InstanceNorm { eps, ..self }
    }

    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        x.group_norm(self.channels, self.affine, self.eps)
    }
}
