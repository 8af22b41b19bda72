//! Data types of products.

/// Data type of the operands of convolutions and linear layers, in all three passes.
///
/// Weights, their gradients, sums and statistics are f32 either way: with bf16 the
/// operands of a product are rounded (nearest, ties to even), and their products
/// are added in f32. Convolutions with groups, and products of two activations
/// (`Tensor::bmm`), always multiply f32.
///
/// With bf16 a convolution without bias and activation stores its output as bf16,
/// rounded once; the batch normalisation after it computes in f32, and rounds its
/// output (with residual and activation) once, too; and the gradients of both are bf16
/// between operations: half the memory, and half the bytes to move. Other operations,
/// and `Tensor::data`, get the same values as f32.
///
/// Processors with AMX tiles compute the products with them. Others use f32 arithmetic,
/// slower than the kernels of f32, with the same bits except for subnormal numbers,
/// which AMX treats as zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// 24 bits of mantissa.
    #[default]
    F32,
    /// 8 bits of mantissa, the range of f32.
    Bf16,
}

impl Precision {
    /// Whether this processor has instructions for such products, so that they
    /// are faster than f32's.
    pub fn is_native(self) -> bool {
        match self {
            Precision::F32 => true,
            Precision::Bf16 => crate::isa::has_tiles(),
        }
    }
}
