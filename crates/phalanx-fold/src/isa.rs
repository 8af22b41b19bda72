//! Chooses the instruction set, and dispatches a type and an operator to their code.

use std::fmt;
use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use super::pass::{Job, Set};
use super::scalar::{self, Scalar};
use super::vector::{Bf16, BitAnd, BitOr, BitXor, Bits, F16, Float, Max, Mean, Min, Product, Sum};
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
use crate::{DType, ReduceOp};

/// Environment variable that names the instruction set to use.
const VARIABLE: &str = "PHALANX_ISA";

/// Instruction sets with their own kernels, from the simplest up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Portable code.
    Scalar,
    /// AVX2 with F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Part of every 64-bit ARM.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Isa {
    /// The instruction sets of this processor, from the simplest up.
    pub fn available() -> Vec<Isa> {
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("f16c") {
                all.push(Isa::Avx2);
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    all.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Isa::Neon);
        all
    }

    /// The name in `PHALANX_ISA`.
    fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
        }
    }

    /// Parses `text`, a value of `PHALANX_ISA`, to one of `available`; the error is a
    /// message for the user.
    fn parse(text: &str, available: &[Isa]) -> Result<Isa, String> {
        let best = available.last().copied().unwrap_or(Isa::Scalar);
        if matches!(text, "" | "auto") {
            return Ok(best);
        }
        let named = available.iter().copied().find(|isa| isa.name() == text);
        named.ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            let names = names.join(", ");
            format!(
                "{VARIABLE}={text:?} is not an instruction set of this processor: \
                 use {names} or auto"
            )
        })
    }

    /// The best of this processor, or the one that `PHALANX_ISA` names.
    ///
    /// # Errors
    ///
    /// A message for the user when this processor does not have the named one.
    pub fn chosen() -> Result<Isa, &'static str> {
        static CHOSEN: OnceLock<Result<Isa, String>> = OnceLock::new();
        let chosen = CHOSEN.get_or_init(|| {
            let available = Isa::available();
            match std::env::var(VARIABLE) {
                Ok(text) => Isa::parse(text.trim(), &available),
                Err(std::env::VarError::NotPresent) => Isa::parse("auto", &available),
                Err(e) => Err(format!("{VARIABLE}: {e}")),
            }
        });
        chosen.as_ref().copied().map_err(String::as_str)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Runs a job on one instruction set.
///
/// # Safety
///
/// As [`super::fold_to_many`], and the processor has the instruction set.
pub(super) unsafe fn on(isa: Isa, dtype: DType, op: ReduceOp, job: &Job<'_>) {
    // SAFETY: handed on from the caller.
    unsafe {
        match isa {
            Isa::Scalar => with::<Scalar>(dtype, op, job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with::<Avx2>(dtype, op, job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => with::<Avx512>(dtype, op, job),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => with::<Neon>(dtype, op, job),
        }
    }
}

/// # Safety
///
/// As [`on`] for the instruction set `S`.
unsafe fn with<S: Set>(dtype: DType, op: ReduceOp, job: &Job<'_>) {
    // SAFETY: handed on from the caller; the vectors are of the type that
    // `dtype` names, or of the signed one of its size.
    unsafe {
        match dtype {
            DType::F32 => float::<S, S::F32>(op, job),
            DType::F64 => float::<S, S::F64>(op, job),
            DType::F16 => float::<S, F16<S::F32>>(op, job),
            DType::Bf16 => float::<S, Bf16<S::F32>>(op, job),
            DType::I8 => integer::<S, S::I8>(op, job),
            DType::U8 => integer::<S, S::U8>(op, job),
            DType::I32 => integer::<S, S::I32>(op, job),
            DType::I64 => integer::<S, S::I64>(op, job),
            DType::I16 => integer::<S, scalar::I16>(op, job),
            DType::U16 => integer::<S, scalar::U16>(op, job),
            // All but the order has the bits of the signed type's.
            DType::U32 if is_order(op) => integer::<S, scalar::U32>(op, job),
            DType::U32 => integer::<S, S::I32>(op, job),
            DType::U64 if is_order(op) => integer::<S, scalar::U64>(op, job),
            DType::U64 => integer::<S, S::I64>(op, job),
        }
    }
}

fn is_order(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Min | ReduceOp::Max)
}

/// # Safety
///
/// As [`Set::run`].
unsafe fn float<S: Set, V: Float>(op: ReduceOp, job: &Job<'_>) {
    // SAFETY: handed on from the caller.
    unsafe {
        match op {
            ReduceOp::Sum => S::run::<V, Sum>(job),
            ReduceOp::Mean => S::run::<V, Mean>(job),
            ReduceOp::Product => S::run::<V, Product>(job),
            ReduceOp::Min => S::run::<V, Min>(job),
            ReduceOp::Max => S::run::<V, Max>(job),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
                unreachable!("{op} of floats was refused when it was asked for")
            }
        }
    }
}

/// # Safety
///
/// As [`Set::run`].
unsafe fn integer<S: Set, V: Bits>(op: ReduceOp, job: &Job<'_>) {
    // SAFETY: handed on from the caller.
    unsafe {
        match op {
            ReduceOp::Sum => S::run::<V, Sum>(job),
            ReduceOp::Product => S::run::<V, Product>(job),
            ReduceOp::Min => S::run::<V, Min>(job),
            ReduceOp::Max => S::run::<V, Max>(job),
            ReduceOp::BitAnd => S::run::<V, BitAnd>(job),
            ReduceOp::BitOr => S::run::<V, BitOr>(job),
            ReduceOp::BitXor => S::run::<V, BitXor>(job),
            ReduceOp::Mean => {
                unreachable!("the mean of integers was refused when it was asked for")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_nonsense_is_refused_with_the_choices() {
        let all = Isa::available();
        for isa in &all {
            assert_eq!(Isa::parse(isa.name(), &all), Ok(*isa));
        }
        assert_eq!(Isa::parse("auto", &all).ok(), all.last().copied());
        for text in ["sse9", "AVX2 ", "avx"] {
            let error = Isa::parse(text, &all).unwrap_err();
            assert!(
                error.contains(text) && error.contains("scalar, "),
                "{error}"
            );
        }
        // Known, but not available on this processor.
        let error = Isa::parse("avx512", &[Isa::Scalar]).unwrap_err();
        assert!(error.ends_with("use scalar or auto"), "{error}");
    }
}
