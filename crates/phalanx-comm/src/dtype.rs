//! The Rust types of elements that travel between ranks.

use half::{bf16, f16};
use phalanx_fold::DType;

mod sealed {
    pub trait Sealed {}
}

/// A type whose values travel between ranks. Sealed: the crate moves elements
/// as bytes and relies on every bit pattern being a valid value and on there
/// being no padding.
///
/// Other types travel as these. A `bool` is a `u8`: "any" and "all" are [`Max`](crate::ReduceOp::Max) and
/// [`Min`](crate::ReduceOp::Min). A complex number is two floats: sums and means of a slice of twice the length are its own.
/// 8-bit floats are `u8` where they are moved; convert them to `f16` or `f32` to reduce them.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialEq + std::fmt::Debug + Send + Sync + 'static
{
    /// The element type's name on the wire.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}

element! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => Bf16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    i8 => I8,
    i16 => I16,
    u16 => U16,
    u32 => U32,
    u64 => U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_match_the_rust_types() {
        fn check<T: Element>() {
            assert_eq!(T::DTYPE.size_bytes(), size_of::<T>());
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i32>();
        check::<i64>();
        check::<u8>();
        check::<i8>();
        check::<i16>();
        check::<u16>();
        check::<u32>();
        check::<u64>();
    }
}
