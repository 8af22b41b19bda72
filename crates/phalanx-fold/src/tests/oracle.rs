//! A naive implementation of the fold.

use half::{bf16, f16};

use crate::{DType, ReduceOp};

/// An element type with its naive arithmetic.
pub(super) trait Oracle: Copy + Default + PartialEq + std::fmt::Debug {
    fn dtype() -> DType {
        let name = std::any::type_name::<Self>().rsplit("::").next();
        let mut all = DType::ALL.into_iter();
        all.find(|dtype| Some(dtype.name()) == name).unwrap()
    }
    /// Values at which arithmetic goes wrong.
    fn specials() -> Vec<Self>;
    fn from_bits(bits: u64) -> Self;
    fn from_f64(x: f64) -> Self;
    fn bits(self) -> u64;
    /// The left fold of `each`; a mean is finished for `world` ranks.
    fn fold(op: ReduceOp, each: &[Self], world: Option<usize>) -> Self;
}

macro_rules! float {
    ($t:ty, $bits:ty, $wide:ty, $from:expr, $widen:expr, $narrow:expr, $nan:expr,
     $mantissa:expr) => {
        impl Oracle for $t {
            fn specials() -> Vec<Self> {
                let sign: $bits = 1 << (<$bits>::BITS - 1);
                let infinity = <$t>::INFINITY.to_bits();
                let one = $from(1.0).to_bits();
                let hidden: $bits = 1 << $mantissa;
                let positive = [
                    0,
                    // The least and the greatest denormal, the least normal.
                    1,
                    hidden - 1,
                    hidden,
                    one - 1,
                    one,
                    one + 1,
                    // Where the last bit is worth one: ties lie beyond it.
                    $from((1u64 << $mantissa) as f64).to_bits(),
                    $from((1u64 << $mantissa) as f64 - 1.0).to_bits(),
                    infinity - 1,
                    infinity,
                    // NaNs that signal, that do not, and with everything set.
                    infinity + 1,
                    infinity | hidden >> 1 | 5,
                    infinity | (hidden - 1),
                ];
                let both = positive.into_iter().flat_map(|bits| [bits, bits | sign]);
                both.map(<$t>::from_bits).collect()
            }
            fn from_bits(bits: u64) -> Self {
                <$t>::from_bits(bits as $bits)
            }
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
            fn fold(op: ReduceOp, each: &[Self], world: Option<usize>) -> Self {
                let mut wide = each.iter().map(|x| -> $wide { $widen(*x) });
                let mut a = wide.next().unwrap();
                for x in wide {
                    a = match op {
                        ReduceOp::Sum | ReduceOp::Mean => a + x,
                        ReduceOp::Product => a * x,
                        ReduceOp::Min if a.is_nan() || a <= x => a,
                        ReduceOp::Max if a.is_nan() || a >= x => a,
                        _ => x,
                    };
                }
                if let (ReduceOp::Mean, Some(world)) = (op, world) {
                    a *= 1.0 / world as $wide;
                }
                if a.is_nan() {
                    return <$t>::from_bits($nan);
                }
                $narrow(a)
            }
        }
    };
}
float!(
    f32,
    u32,
    f32,
    |x: f64| x as f32,
    |x| x,
    |x| x,
    0x7fc0_0000,
    23
);
float!(
    f64,
    u64,
    f64,
    |x: f64| x,
    |x| x,
    |x| x,
    0x7ff8_0000_0000_0000,
    52
);
float!(
    f16,
    u16,
    f32,
    f16::from_f64,
    f16::to_f32,
    f16::from_f32,
    0x7e00,
    10
);
float!(
    bf16,
    u16,
    f32,
    bf16::from_f64,
    bf16::to_f32,
    bf16::from_f32,
    0x7fc0,
    7
);

macro_rules! integer {
    ($($t:ty),*) => {$(
        impl Oracle for $t {
            fn specials() -> Vec<Self> {
                let odd = <$t>::from_bits(0x5555_5555_5555_5555);
                vec![0, 1, 2, 3, <$t>::MAX, <$t>::MAX - 1, <$t>::MIN, <$t>::MIN + 1, odd, !odd, !0, !1]
            }
            fn from_bits(bits: u64) -> Self {
                bits as $t
            }
            fn from_f64(x: f64) -> Self {
                (x * 1e3) as i64 as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
            fn fold(op: ReduceOp, each: &[Self], _: Option<usize>) -> Self {
                let each = each.iter().copied();
                each.reduce(|a, x| match op {
                    ReduceOp::Product => a.wrapping_mul(x),
                    ReduceOp::Min => a.min(x),
                    ReduceOp::Max => a.max(x),
                    ReduceOp::BitAnd => a & x,
                    ReduceOp::BitOr => a | x,
                    ReduceOp::BitXor => a ^ x,
                    _ => a.wrapping_add(x),
                })
                .unwrap()
            }
        }
    )*};
}
integer!(i8, u8, i16, u16, i32, u32, i64, u64);
