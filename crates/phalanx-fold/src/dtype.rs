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
    /// Every element type, in wire order.
    pub const ALL: [DType; 12] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::U16,
        DType::U32,
        DType::U64,
    ];

    /// Size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::U8 | DType::I8 => 1,
        }
    }

    /// The name used in messages, as Rust spells it.
    pub const fn name(self) -> &'static str {
        const NAMES: [&str; 12] = [
            "f32", "f64", "f16", "bf16", "i32", "i64", "u8", "i8", "i16", "u16", "u32", "u64",
        ];
        NAMES[self as usize]
    }

    /// Whether the mean of such elements is such an element.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }

    /// Code in frame headers; 0 is left for "no data".
    #[doc(hidden)]
    pub const fn wire(self) -> u8 {
        self as u8 + 1
    }

    /// Inverse of [`DType::wire`].
    #[doc(hidden)]
    pub fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code.checked_sub(1)?)).copied()
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
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
