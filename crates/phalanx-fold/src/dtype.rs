//! The types of elements that travel between ranks.

/// The type of one element, as it is named in frame headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary16; reduced in f32.
    F16,
    /// bfloat16 (upper half of an f32); reduced in f32.
    Bf16,
    /// Signed 32-bit integer; sums and products wrap.
    I32,
    /// Signed 64-bit integer; sums and products wrap.
    I64,
    /// Unsigned byte; sums and products wrap.
    U8,
    /// Signed byte; sums and products wrap.
    I8,
    /// Signed 16-bit integer; sums and products wrap.
    I16,
    /// Unsigned 16-bit integer; sums and products wrap.
    U16,
    /// Unsigned 32-bit integer; sums and products wrap.
    U32,
    /// Unsigned 64-bit integer; sums and products wrap.
    U64,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::U8 | DType::I8 => 1,
        }
    }

    /// Whether the mean of such elements is such an element.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }
}

// The names are as Rust spells them; code 0 is left for "no data".
crate::coded! {
    DType: F32 "f32", F64 "f64", F16 "f16", Bf16 "bf16", I32 "i32", I64 "i64",
    U8 "u8", I8 "i8", I16 "i16", U16 "u16", U32 "u32", U64 "u64"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_codes_are_distinct_and_never_zero() {
        for d in DType::ALL {
            assert_ne!(d.wire(), 0);
            assert_eq!(DType::from_wire(d.wire()), Some(d));
        }
        assert_eq!(DType::from_wire(0), None);
        assert_eq!(DType::from_wire(13), None);
    }
}
