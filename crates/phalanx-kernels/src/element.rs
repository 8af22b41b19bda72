//! Data types in memory: f32 in four bytes, or bf16 in two.

use crate::Precision;
use crate::par::{PIECE, ThreadPool};

/// The upper half of an f32's bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// Its bits.
    pub fn bits(self) -> u16 {
        self.0
    }
}

/// Numbers that kernels read as f32 and write from f32.
///
/// # Safety
/// Any bytes make a valid value; memory of `f32`s holds a whole number of them at
/// their alignment. The type has the size and the representation that `PRECISION` names.
pub unsafe trait Element:
    Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static
{
    /// The data type.
    const PRECISION: Precision;
    /// The same number.
    fn wide(self) -> f32;
    /// `v` rounded.
    fn of(v: f32) -> Self;
}

// SAFETY: the same type.
unsafe impl Element for f32 {
    const PRECISION: Precision = Precision::F32;
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    fn of(v: f32) -> Self {
        v
    }
}

// SAFETY: two bytes each, all of them numbers.
unsafe impl Element for Bf16 {
    const PRECISION: Precision = Precision::Bf16;
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    /// To nearest, ties to even. Subnormal numbers become zero, as they do in the
    /// processor's own conversion; NaN stays.
    #[inline(always)]
    fn of(v: f32) -> Self {
        let bits = v.to_bits();
        let (upper, magnitude) = (bits >> 16, bits & 0x7fff_ffff);
        let near = bits.wrapping_add(0x7fff + (upper & 1)) >> 16;
        let r = if magnitude > 0x7f80_0000 {
            upper | 0x40
        } else {
            near
        };
        let r = if magnitude < 0x0080_0000 {
            upper & 0x8000
        } else {
            r
        };
        Bf16(r as u16)
    }
}

impl Precision {
    /// Floats of memory that hold `len` such numbers.
    #[doc(hidden)]
    pub fn memory_len(self, len: usize) -> usize {
        match self {
            Precision::F32 => len,
            Precision::Bf16 => len.div_ceil(2),
        }
    }
}

/// The first `len` elements of some memory.
pub fn elements<T: Element>(memory: &[f32], len: usize) -> &[T] {
    assert!(len * size_of::<T>() <= size_of_val(memory));
    // SAFETY: they lie in the memory (checked); the rest is the trait's contract.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), len) }
}

/// The same, to be written.
pub fn elements_mut<T: Element>(memory: &mut [f32], len: usize) -> &mut [T] {
    assert!(len * size_of::<T>() <= size_of_val(memory));
    // SAFETY: as in `elements`; any bytes make valid `f32`s and back.
    unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), len) }
}

/// Elements of either kind.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// Elements of f32.
    F32(&'a [f32]),
    /// Elements of bf16.
    Bf16(&'a [Bf16]),
}

impl<'a> Values<'a> {
    /// The first `len` numbers of some memory.
    pub fn of(memory: &'a [f32], precision: Precision, len: usize) -> Self {
        match precision {
            Precision::F32 => Values::F32(elements(memory, len)),
            Precision::Bf16 => Values::Bf16(elements(memory, len)),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Values::F32(v) => v.len(),
            Values::Bf16(v) => v.len(),
        }
    }

    /// For kernels that know f32 only.
    pub fn f32(self) -> &'a [f32] {
        match self {
            Values::F32(v) => v,
            Values::Bf16(_) => unreachable!("bf16 values reached a kernel that reads f32"),
        }
    }
}

/// Elements of either kind, to be written.
pub enum ValuesMut<'a> {
    /// Elements of f32.
    F32(&'a mut [f32]),
    /// Elements of bf16.
    Bf16(&'a mut [Bf16]),
}

impl<'a> ValuesMut<'a> {
    /// The first `len` numbers of some memory.
    pub fn of(memory: &'a mut [f32], precision: Precision, len: usize) -> Self {
        match precision {
            Precision::F32 => ValuesMut::F32(elements_mut(memory, len)),
            Precision::Bf16 => ValuesMut::Bf16(elements_mut(memory, len)),
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn len(&self) -> usize {
        match self {
            ValuesMut::F32(v) => v.len(),
            ValuesMut::Bf16(v) => v.len(),
        }
    }

    /// For kernels that know f32 only.
    pub fn f32(self) -> &'a mut [f32] {
        match self {
            ValuesMut::F32(v) => v,
            ValuesMut::Bf16(_) => unreachable!("bf16 values reached a kernel that writes f32"),
        }
    }
}

simd! {
    pub(crate) fn convert_piece<A: Element, B: Element>(from: &[A], to: &mut [B]) {
        for (t, f) in to.iter_mut().zip(from) {
            *t = B::of(f.wide());
        }
    }
}

/// `to = from`, rounded where it must be.
#[inline(never)]
pub fn convert<A: Element, B: Element>(threads: &ThreadPool, from: &[A], to: &mut [B]) {
    assert_eq!(from.len(), to.len());
    threads.split(to, PIECE, |at, to| {
        convert_piece(&from[at..at + to.len()], to)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise;
    use crate::isa::on_each_isa;
    use crate::par::Threads;

    #[test]
    fn rounding_is_to_nearest_even_and_nan_stays() {
        for (v, want) in [
            (1.0, 0x3f80),
            (-2.0, 0xc000),
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::INFINITY, 0x7f80),
            (-0.0, 0x8000),
            (f32::from_bits(1), 0),
            (-f32::from_bits(0x007f_ffff), 0x8000),
            (f32::MIN_POSITIVE, 0x0080),
        ] {
            assert_eq!(Bf16::of(v).bits(), want, "{v}");
        }
        assert!(Bf16::of(f32::NAN).wide().is_nan());
        assert!(Bf16::of(f32::from_bits(0x7f80_0001)).wide().is_nan());
        for bits in (0..=u16::MAX).filter(|b| b & 0x7f80 != 0 && b & 0x7fff <= 0x7f80) {
            assert_eq!(Bf16::of(Bf16(bits).wide()).bits(), bits);
        }
    }

    #[test]
    fn conversions_and_sums_are_those_of_single_values() {
        let threads = ThreadPool::new(Threads(2));
        let a: Vec<f32> = (0..40_001).map(|i| (i as f32 - 2e4) * 1.37e-3).collect();
        on_each_isa(|isa| {
            let mut narrow = vec![Bf16::default(); a.len()];
            convert(&threads, &a, &mut narrow);
            let mut wide = vec![f32::NAN; a.len()];
            convert(&threads, &narrow, &mut wide);
            let mut sum = narrow.clone();
            elementwise::add(&threads, &mut sum, &narrow);
            for i in 0..a.len() {
                assert_eq!(narrow[i], Bf16::of(a[i]), "{isa:?}");
                assert_eq!(wide[i], narrow[i].wide(), "{isa:?}");
                assert_eq!(sum[i], Bf16::of(2.0 * wide[i]), "{isa:?}");
            }
        });
    }
}
