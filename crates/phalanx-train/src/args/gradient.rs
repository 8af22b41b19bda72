//! How gradients are synchronized, and as what data type.

use phalanx_ddp::{Bf16Gradients, Exchange, F16Gradients, GradientHook};

use super::{Determinism, Settings};
use crate::error::{Result, refuse};

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

/// Gradient synchronization: all-reduce, reduce-scatter, or inside the optimizer step ([`Exchange`]). The results are
/// bit-identical.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExchangeArg {
    /// `at-step` if the ranks of one host use all its cores with at most 2 threads each; otherwise, and with --watch, --bucket-cap-mb or Muon, `all-reduce`
    Auto,
    /// Every rank gets all averaged gradients, bucket by bucket during backward
    AllReduce,
    /// Every rank gets a part of each bucket during backward; updated parameters are gathered after the step (ZeRO stage 1).
    /// With --elastic another rank has a copy of each part
    ReduceScatter,
    /// Every rank averages its part inside the optimizer step (ZeRO stage 1): the least work, but no overlap with
    /// backward. With --elastic it is `reduce-scatter` after backward
    AtStep,
}

impl From<Exchange> for ExchangeArg {
    fn from(exchange: Exchange) -> ExchangeArg {
        match exchange {
            Exchange::AllReduce => ExchangeArg::AllReduce,
            Exchange::ReduceScatter => ExchangeArg::ReduceScatter,
            Exchange::AtStep => ExchangeArg::AtStep,
        }
    }
}

impl ExchangeArg {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flags.
    pub fn validate(self, settings: &Settings) -> Result<()> {
        match (self, needs_whole(settings)) {
            (ExchangeArg::ReduceScatter | ExchangeArg::AtStep, Some(flag)) => {
                refuse!(
                    "{flag} needs every rank to have whole gradients; leave out --exchange, or say --exchange all-reduce"
                )
            }
            _ => Ok(()),
        }
    }
}

/// The flag, if any, with which every rank must have whole gradients.
pub(crate) fn needs_whole(settings: &Settings) -> Option<&'static str> {
    if settings.gradient_type != GradientType::F32 {
        return Some("--gradient-type");
    }
    (settings.split.determinism() == Determinism::Shards).then_some("--deterministic shards")
}
