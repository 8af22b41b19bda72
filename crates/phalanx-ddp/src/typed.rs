//! Memory of buckets of several element types.

use std::fmt;

use half::{bf16, f16};
use phalanx_comm::{Bucket, Call, DType, Element, OpTimes, ProcessGroup, ReduceOp, Work};

/// What a gradient is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GradType {
    /// IEEE 754 binary32, as all gradients of `phalanx-nn` are.
    #[default]
    F32,
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary16; means are folded in `f32` and rounded once, sums of micro-batches after each.
    F16,
    /// bfloat16; as [`F16`](GradType::F16).
    Bf16,
}

impl GradType {
    /// Every type.
    pub const ALL: [GradType; 4] = [GradType::F32, GradType::F64, GradType::F16, GradType::Bf16];

    /// Size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        self.element().size_bytes()
    }

    const fn element(self) -> DType {
        match self {
            GradType::F32 => DType::F32,
            GradType::F64 => DType::F64,
            GradType::F16 => DType::F16,
            GradType::Bf16 => DType::Bf16,
        }
    }
}

/// As Rust spells it.
impl fmt::Display for GradType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.element().fmt(f)
    }
}

/// Numbers that gradients are made of: `f32`, `f64`, `f16` and `bf16`. Sealed.
pub trait Gradient: Element + OfType {
    /// Which of the types it is.
    const TYPE: GradType;
}

/// How a type finds its own among memory of any type, and what is computed with it.
pub trait OfType: Element {
    fn memory(any: &AnyMemory) -> Option<&Memory<Self>>;
    fn memory_mut(any: &mut AnyMemory) -> Option<&mut Memory<Self>>;
    fn spare(of: &mut Spare) -> &mut Vec<Self>;
    /// The largest magnitude, in proportion to the type's largest number: above 1, or a NaN,
    /// if one of them is not finite.
    fn largest(values: &[Self]) -> f64;
    fn all_finite(values: &[Self]) -> bool {
        Self::largest(values) <= 1.0
    }
    /// Rounded once.
    fn times(self, factor: f32) -> Self;
    /// Rounded once.
    fn plus(self, other: Self) -> Self;
}

/// Memory of one bucket; the states are told of where the reducer is.
pub enum Memory<T: Element> {
    Filling(Bucket<T>),
    InFlight(Work<Bucket<T>>),
    /// With the chunk that this rank gets.
    Scattering(Work<(Bucket<T>, Bucket<T>)>),
    Reduced(Bucket<T>),
    /// The all-reduce failed and took the memory with it.
    Lost,
}

impl<T: Gradient> Memory<T> {
    /// Lets backward write.
    pub fn begin(&mut self) {
        if let Memory::Reduced(bucket) = std::mem::replace(self, Memory::Lost) {
            *self = Memory::Filling(bucket);
        }
    }

    /// What backward wrote, as if it were the mean.
    pub fn left_alone(self) -> Memory<T> {
        match self {
            Memory::Filling(bucket) => Memory::Reduced(bucket),
            other => other,
        }
    }

    /// Starts the mean over the ranks of what backward wrote.
    pub fn all_reduced(self, group: &ProcessGroup, call: Call) -> Memory<T> {
        match self {
            Memory::Filling(bucket) => {
                Memory::InFlight(group.all_reduce_async(bucket, ReduceOp::Mean, call))
            }
            other => other,
        }
    }

    /// Waits for it; when it ran.
    pub fn collected(self) -> phalanx_comm::Result<(Memory<T>, Option<OpTimes>)> {
        match self {
            Memory::InFlight(work) => {
                let (bucket, times) = work.wait_traced()?;
                Ok((Memory::Reduced(bucket), Some(times)))
            }
            other => Ok((other, None)),
        }
    }

    /// Multiplies the first `elems` of a mean.
    pub fn multiply(&mut self, elems: usize, factor: f32) {
        if let Memory::Reduced(bucket) = self {
            let gradients = &mut bucket[..elems];
            gradients.iter_mut().for_each(|g| *g = g.times(factor));
        }
    }

    /// Writes zeros where backward would write.
    pub fn fill_zeros(&mut self, elems: usize) {
        if let Memory::Filling(bucket) = self {
            bucket[..elems].fill(T::default());
        }
    }
}

/// Memory of a bucket of any type.
pub enum AnyMemory {
    F32(Memory<f32>),
    F64(Memory<f64>),
    F16(Memory<f16>),
    Bf16(Memory<bf16>),
}

/// `$e` with the [`Memory`] in `$any` as `$m`, whatever its type.
macro_rules! of_any {
    ($any:expr, $m:ident => $e:expr) => {
        match $any {
            AnyMemory::F32($m) => $e,
            AnyMemory::F64($m) => $e,
            AnyMemory::F16($m) => $e,
            AnyMemory::Bf16($m) => $e,
        }
    };
}
pub(crate) use of_any;

impl AnyMemory {
    /// Zeros that may be read.
    pub fn new(group: &ProcessGroup, of: GradType, elems: usize) -> AnyMemory {
        match of {
            GradType::F32 => AnyMemory::F32(Memory::Reduced(group.bucket(elems))),
            GradType::F64 => AnyMemory::F64(Memory::Reduced(group.bucket(elems))),
            GradType::F16 => AnyMemory::F16(Memory::Reduced(group.bucket(elems))),
            GradType::Bf16 => AnyMemory::Bf16(Memory::Reduced(group.bucket(elems))),
        }
    }

    /// What is there while the memory is somewhere else.
    pub fn lost() -> AnyMemory {
        AnyMemory::F32(Memory::Lost)
    }
}

/// Room for runs of any type beside the buckets, one run behind the other by type.
#[derive(Default)]
pub struct Spare {
    f32: Vec<f32>,
    f64: Vec<f64>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}

impl Spare {
    /// Where each of `runs` (type and elements) begins in the room of its type.
    pub fn starts(runs: impl Iterator<Item = (GradType, usize)>) -> Vec<usize> {
        let mut ends = [0; GradType::ALL.len()];
        runs.map(|(of, len)| {
            let at = ends[of as usize];
            ends[of as usize] += len;
            at
        })
        .collect()
    }

    /// Makes room for `runs`.
    pub fn hold(&mut self, runs: impl Iterator<Item = (GradType, usize)>) {
        let mut elems = [0; GradType::ALL.len()];
        runs.for_each(|(of, len)| elems[of as usize] += len);
        self.f32.resize(elems[GradType::F32 as usize], 0.0);
        self.f64.resize(elems[GradType::F64 as usize], 0.0);
        self.f16.resize(elems[GradType::F16 as usize], f16::ZERO);
        self.bf16.resize(elems[GradType::Bf16 as usize], bf16::ZERO);
    }
}

/// A NaN if one of them is.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    let larger = |most: f64, value: f64| match value.is_nan() {
        true => value,
        false if value.abs() > most => value.abs(),
        false => most,
    };
    values.fold(0.0, larger)
}

macro_rules! gradient {
    ($t:ty, $of:ident, $spare:ident, largest $largest:expr, times $times:expr, plus $plus:expr) => {
        impl Gradient for $t {
            const TYPE: GradType = GradType::$of;
        }

        impl OfType for $t {
            fn memory(any: &AnyMemory) -> Option<&Memory<$t>> {
                match any {
                    AnyMemory::$of(memory) => Some(memory),
                    _ => None,
                }
            }

            fn memory_mut(any: &mut AnyMemory) -> Option<&mut Memory<$t>> {
                match any {
                    AnyMemory::$of(memory) => Some(memory),
                    _ => None,
                }
            }

            fn spare(of: &mut Spare) -> &mut Vec<$t> {
                &mut of.$spare
            }

            fn largest(values: &[$t]) -> f64 {
                $largest(values)
            }

            #[inline]
            fn times(self, factor: f32) -> $t {
                $times(self, factor)
            }

            #[inline]
            fn plus(self, other: $t) -> $t {
                $plus(self, other)
            }
        }

        impl From<Memory<$t>> for AnyMemory {
            fn from(memory: Memory<$t>) -> AnyMemory {
                AnyMemory::$of(memory)
            }
        }
    };
}

gradient!(f32, F32, f32,
    largest |values: &[f32]| f64::from(phalanx_comm::largest(values)) / f64::from(f32::MAX),
    times |a: f32, factor: f32| a * factor,
    plus |a: f32, b: f32| a + b);
gradient!(f64, F64, f64,
    largest |values: &[f64]| largest(values.iter().map(|g| g / f64::MAX)),
    times |a: f64, factor: f32| a * f64::from(factor),
    plus |a: f64, b: f64| a + b);
gradient!(f16, F16, f16,
    largest |values: &[f16]| largest(values.iter().map(|g| g.to_f64() / f16::MAX.to_f64())),
    times |a: f16, factor: f32| f16::from_f32(a.to_f32() * factor),
    plus |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32()));
gradient!(bf16, Bf16, bf16,
    largest |values: &[bf16]| largest(values.iter().map(|g| g.to_f64() / bf16::MAX.to_f64())),
    times |a: bf16, factor: f32| bf16::from_f32(a.to_f32() * factor),
    plus |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()));
