//! `--precision`: what is multiplied.

use phalanx_nn::Precision;

/// Data type of the inputs of convolutions and linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PrecisionArg {
    /// f32
    Fp32,
    /// bf16 inputs with f32 sums and f32 weights; fast on processors with AMX
    Bf16,
}

impl PrecisionArg {
    /// As it is typed.
    pub fn title(self) -> &'static str {
        match self {
            PrecisionArg::Fp32 => "fp32",
            PrecisionArg::Bf16 => "bf16",
        }
    }

    /// The same, with a word where this processor is slow at it.
    pub fn describe(self) -> &'static str {
        if Precision::from(self).is_native() {
            self.title()
        } else {
            "bf16 (no AMX here: slower than fp32)"
        }
    }
}

impl From<PrecisionArg> for Precision {
    fn from(p: PrecisionArg) -> Self {
        match p {
            PrecisionArg::Fp32 => Precision::F32,
            PrecisionArg::Bf16 => Precision::Bf16,
        }
    }
}
