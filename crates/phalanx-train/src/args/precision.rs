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

    /// The [`Family`] that bf16's bits are those of, as a setting: ranks may differ in it.
    pub(crate) fn family(self) -> Option<(String, String)> {
        let title = || Family::here().title().to_owned();
        (self == PrecisionArg::Bf16).then(|| ("bf16".to_owned(), title()))
    }

    /// Precision and family.
    pub fn describe(self) -> String {
        match self.family() {
            None => self.title().to_owned(),
            Some((title, family)) => format!("{title} ({family})"),
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
