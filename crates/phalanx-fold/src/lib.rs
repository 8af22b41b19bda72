//! Element types, reductions, and their arithmetic: the fold kernels below `phalanx-comm`. A crate of its own because it
//! is compiled for every type, operator and instruction set: it takes as long as all that stands on it.
//!
//! [`fold`] computes, element by element, the left fold of its sources in the
//! order given; [`fold_to_many`] writes it to several places. One pass reads every
//! source once: the accumulators stay in registers, where they are scaled and rounded
//! before they are stored. So 16-bit types are widened to f32, kept there over *all*
//! sources, and rounded once.
//!
//! `pass` is that loop, written once over `vector::Vector`; `scalar`, `avx2`,
//! `avx512` and `neon` implement the vectors; `isa` chooses one. No operation is
//! contracted to a fused multiply-add or reassociated, and every NaN in a result is the
//! same one, so all instruction sets give the same bits. [`largest`] only reads.

/// The variants of an enumeration, in their order, and their names.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($kind:ident: $($variant:ident $name:literal),*) => {
        impl $kind {
            /// All of them, in their order.
            pub const ALL: [$kind; [$($name),*].len()] = [$($kind::$variant),*];

            /// The name used in options and messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $($kind::$variant => $name),*
                }
            }
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

/// [`named`], and codes in frame headers: from 1 on.
#[doc(hidden)]
#[macro_export]
macro_rules! coded {
    ($kind:ident: $($variant:ident $name:literal),*) => {
        $crate::named! { $kind: $($variant $name),* }

        impl $kind {
            /// Code in frame headers; 0 is none.
            #[doc(hidden)]
            pub const fn wire(self) -> u8 {
                self as u8 + 1
            }

            /// Inverse of `wire`.
            #[doc(hidden)]
            pub fn from_wire(code: u8) -> Option<Self> {
                Self::ALL.into_iter().find(|kind| kind.wire() == code)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dtype;
mod finite;
mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
mod op;
mod pass;
mod scalar;
mod vector;

pub use self::dtype::DType;
pub use self::finite::{all_finite, largest};
pub use self::isa::Isa;
pub use self::op::ReduceOp;
use self::pass::Job;

/// A read-only run of elements given by its address.
pub type Source = *const u8;

/// [`fold_to_many`] for one destination.
///
/// # Safety
///
/// As [`fold_to_many`].
pub unsafe fn fold(
    dtype: DType,
    op: ReduceOp,
    into: *mut u8,
    sources: &[Source],
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    // SAFETY: handed on from the caller.
    unsafe { fold_to_many(dtype, op, &[into], sources, count, scale_by_inverse_of) }
}

/// Folds `count` elements of every source, in order, and writes the result to
/// every place of `into`. `scale_by_inverse_of` is the world size when a mean
/// is to be finished; without it the mean is a sum that the caller scales later.
///
/// # Safety
///
/// * All places of `into` and all sources point to `count` initialised
///   elements of `dtype`, aligned for it.
/// * A place of `into` is either disjoint from a source or exactly equal to
///   it, and disjoint from the other places.
/// * No other code writes the sources or touches `into` meanwhile.
/// * `op` supports `dtype`, and `sources` is not empty.
pub unsafe fn fold_to_many(
    dtype: DType,
    op: ReduceOp,
    into: &[*mut u8],
    sources: &[Source],
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    // An unknown instruction set is refused when the group is formed.
    let isa = Isa::chosen().unwrap_or(Isa::Scalar);
    // SAFETY: handed on from the caller; only instruction sets that this
    // processor has are chosen.
    unsafe { fold_on(isa, dtype, op, into, sources, count, scale_by_inverse_of) }
}

/// [`fold_to_many`] on one instruction set.
///
/// # Safety
///
/// As [`fold_to_many`], and the processor has the instruction set.
unsafe fn fold_on(
    isa: Isa,
    dtype: DType,
    op: ReduceOp,
    into: &[*mut u8],
    sources: &[Source],
    count: usize,
    scale_by_inverse_of: Option<usize>,
) {
    debug_assert!(!sources.is_empty() && op.supports(dtype));
    let (op, world) = match (op, scale_by_inverse_of) {
        (ReduceOp::Mean, None) => (ReduceOp::Sum, 1),
        (op, world) => (op, world.unwrap_or(1)),
    };
    let job = Job {
        into,
        sources,
        count,
        world,
    };
    // SAFETY: handed on from the caller.
    unsafe { isa::on(isa, dtype, op, &job) }
}

#[cfg(test)]
mod tests;
