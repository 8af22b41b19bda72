//! Data type of gradients in their exchange.

use phalanx_ddp::{Bf16Gradients, F16Gradients, GradientHook};

/// Data type of gradients in their exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GradientType {
    /// Overlapped with backward
    F32,
    /// Half the bytes, 8 bits of precision
    Bf16,
    /// Half the bytes, 11 bits of precision
    F16,
}

impl GradientType {
    /// The hook that sends gradients as this type; none for float32.
    pub fn hook(self) -> Option<Box<dyn GradientHook>> {
        match self {
            GradientType::F32 => None,
            GradientType::Bf16 => Some(Box::new(Bf16Gradients::default())),
            GradientType::F16 => Some(Box::new(F16Gradients::default())),
        }
    }
}
