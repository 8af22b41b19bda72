//! `--precision`: what is multiplied.

use phalanx_nn::{Family, Precision};

/// Data type of the inputs of convolutions and linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PrecisionArg {
    /// f32
    Fp32,
    /// bf16 activations with f32 sums and f32 weights: less memory, faster on processors with AMX or AVX512_BF16
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

    /// The same, with the [`Family`] that bf16's bits are those of.
    pub fn describe(self) -> String {
        match self {
            PrecisionArg::Fp32 => self.title().to_owned(),
            PrecisionArg::Bf16 => format!("bf16 ({})", Family::here().title()),
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
