//! Data types of products.

/// Data type of the operands of convolutions and linear layers, in all three passes.
///
/// Weights, their gradients, sums and statistics are f32 either way. With bf16 a
/// convolution without bias and activation stores its output as bf16, rounded once
/// (nearest, ties to even). The batch normalisation after it computes in f32 and rounds
/// its output (with residual and activation) once, too. The gradients of both are bf16
/// between operations: half the memory, and half the bytes to move. Other operations, and
/// `Tensor::data`, get the same values as f32. Convolutions with groups, 1x1 convolutions
/// of [`Family::Other`], and products of two activations (`Tensor::bmm`) are those of f32.
///
/// What else is rounded follows from the processor's [`Family`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// 24 bits of mantissa.
    #[default]
    F32,
    /// 8 bits of mantissa, the range of f32.
    Bf16,
}

/// How a processor computes products in bf16. Within a family the bits are the same for
/// every number of ranks and threads, and on every instruction set.
///
/// The family follows from the processor and [`isa`](crate::isa::isa): below AVX-512
/// (`PHALANX_ISA=avx2` or `scalar`, too) it is `Other`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Tiles of AMX: both operands are rounded to bf16, weights too, and the products added in f32.
    Amx,
    /// `vdpbf16ps`: the same with another order of the sums. But most 3x3 convolutions at stride 1, where
    /// Winograd's method for f32 is faster, are computed as by `Other`.
    Avx512Bf16,
    /// The products of f32, of values as they are stored: those in bf16 are widened, weights and
    /// operands in f32 are not rounded. Linear layers are those of f32.
    Other,
}

impl Family {
    /// That of this process.
    pub fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        if crate::isa::isa().is_avx512() && std::arch::is_x86_feature_detected!("avx512bf16") {
            return match crate::isa::has_tiles() {
                true => Family::Amx,
                false => Family::Avx512Bf16,
            };
        }
        Family::Other
    }

    /// What multiplies.
    pub fn title(self) -> &'static str {
        match self {
            Family::Amx => "AMX",
            Family::Avx512Bf16 => "AVX512_BF16",
            Family::Other => "f32 products",
        }
    }
}
