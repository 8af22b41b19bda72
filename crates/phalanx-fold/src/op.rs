//! Reductions.

use crate::DType;

/// How the elements of all ranks are combined.
///
/// *Order.* Canonical algorithms (all except the ring) compute
/// `((x₀ ∘ x₁) ∘ x₂) ∘ …`, the left fold in ascending rank order, with f16
/// and bf16 widened to f32 first and rounded once at the end. Multiplication
/// and addition are never fused, so the bits are the same on every processor.
///
/// *Guaranteed:* all ranks end with the same bits, and these are the same on
/// every processor; a NaN that a reduction yields is always the quiet one with
/// no sign and no payload. (A rank alone in its group keeps its data as it is.)
///
/// *Names.* `torch.distributed.ReduceOp` calls them `SUM`, `AVG`, `MIN`,
/// `MAX`, `PRODUCT`, `BAND`, `BOR` and `BXOR`. Its `PREMUL_SUM` exists for
/// NCCL only and is left out: multiply before the call. Booleans travel as
/// `u8`, as in PyTorch, where `BitAnd` and `BitOr` are "all" and "any".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum. Integers wrap around on overflow, as two's complement does.
    Sum,
    /// Sum, then one multiplication by `1/P` before the final rounding
    /// (PyTorch's `AVG`). Integers are refused: their mean is not an integer.
    Mean,
    /// Least element. A NaN on any rank wins, as in `torch.amin`. Of two
    /// zeros of different sign the lowest rank's is kept.
    Min,
    /// Greatest element. A NaN on any rank wins, as in `torch.amax`. Of two
    /// zeros of different sign the lowest rank's is kept.
    Max,
    /// Product. Integers wrap around on overflow.
    Product,
    /// Bitwise and, of integers only.
    BitAnd,
    /// Bitwise or, of integers only.
    BitOr,
    /// Bitwise exclusive or, of integers only.
    BitXor,
}

impl ReduceOp {
    /// Whether elements of type `dtype` support this reduction.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            ReduceOp::Sum | ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => true,
            ReduceOp::Mean => dtype.is_float(),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !dtype.is_float(),
        }
    }
}

// Code 0 is left for collectives that do not reduce.
crate::coded! {
    ReduceOp: Sum "sum", Mean "mean", Min "min", Max "max", Product "product",
    BitAnd "bit_and", BitOr "bit_or", BitXor "bit_xor"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_codes_are_distinct_and_never_zero() {
        for o in ReduceOp::ALL {
            assert_ne!(o.wire(), 0);
            assert_eq!(ReduceOp::from_wire(o.wire()), Some(o));
        }
        assert_eq!(ReduceOp::from_wire(0), None);
    }

    #[test]
    fn means_of_integers_and_bits_of_floats_are_refused() {
        for dtype in DType::ALL {
            for op in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
                assert_ne!(op.supports(dtype), dtype.is_float());
            }
        }
        assert!(!ReduceOp::Mean.supports(DType::I64));
        assert!(!ReduceOp::Mean.supports(DType::U8));
        assert!(ReduceOp::Mean.supports(DType::Bf16));
        assert!(ReduceOp::Sum.supports(DType::U8));
    }
}
