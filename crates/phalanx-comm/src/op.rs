//! Reductions.

use crate::DType;

/// How the elements of all ranks become one.
///
/// *Order.* Canonical algorithms (all except the ring) compute
/// `((x₀ ∘ x₁) ∘ x₂) ∘ …`, the left fold in ascending rank order, with f16
/// and bf16 widened to f32 first and rounded once at the end. Multiplication
/// and addition are never fused, so the bits are the same on every processor.
///
/// *Guaranteed:* all ranks end with the same bits. *Not guaranteed:* the sign
/// and payload bits of a NaN that arithmetic produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum. Integers wrap around on overflow, as two's complement does.
    Sum,
    /// Sum, then one multiplication by `1/P` before the final rounding.
    /// Integers are refused: their mean is not an integer.
    Mean,
    /// Least element. A NaN on any rank wins, as in `torch.amin`. Of two
    /// zeros of different sign the lowest rank's is kept.
    Min,
    /// Greatest element. A NaN on any rank wins, as in `torch.amax`. Of two
    /// zeros of different sign the lowest rank's is kept.
    Max,
    /// Product. Integers wrap around on overflow.
    Product,
}

impl ReduceOp {
    /// Every reduction, in wire order.
    pub const ALL: [ReduceOp; 5] = [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
    ];

    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        }
    }

    /// Whether elements of type `dtype` can be reduced so.
    pub const fn supports(self, dtype: DType) -> bool {
        !matches!(self, ReduceOp::Mean) || dtype.is_float()
    }

    /// Code in frame headers; 0 is left for collectives that do not reduce.
    pub(crate) const fn wire(self) -> u8 {
        match self {
            ReduceOp::Sum => 1,
            ReduceOp::Mean => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Product => 5,
        }
    }

    /// Inverse of [`ReduceOp::wire`].
    pub(crate) fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|o| o.wire() == code)
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
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
    fn mean_of_integers_is_refused() {
        assert!(!ReduceOp::Mean.supports(DType::I64));
        assert!(!ReduceOp::Mean.supports(DType::U8));
        assert!(ReduceOp::Mean.supports(DType::Bf16));
        assert!(ReduceOp::Sum.supports(DType::U8));
    }
}
