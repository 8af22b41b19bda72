//! Which instruction set the kernels use, and the macro that compiles one body for each.

use std::sync::OnceLock;

/// Instruction sets, from the simplest up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Code for any processor.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

#[cfg(target_arch = "x86_64")]
impl Isa {
    pub(crate) fn is_avx512(self) -> bool {
        self == Isa::Avx512
    }
}

#[cfg(test)]
thread_local! {
    /// Lets a test run one body on several instruction sets.
    pub(crate) static FORCED: std::cell::Cell<Option<Isa>> = const { std::cell::Cell::new(None) };
}

/// Environment variable that names the instruction set to use; phalanx-comm
/// reads it too.
const VARIABLE: &str = "PHALANX_ISA";

/// The instruction set in use: the best one of this processor, or a lower one
/// named by `PHALANX_ISA`.
pub fn isa() -> Isa {
    #[cfg(test)]
    if let Some(i) = FORCED.get() {
        return i.min(detected());
    }
    // `Scope::build` has reported an invalid value.
    chosen().unwrap_or_else(|_| detected())
}

/// [`isa`], or a message for the user when `PHALANX_ISA` names none of this
/// processor's.
pub fn chosen() -> Result<Isa, &'static str> {
    static CHOSEN: OnceLock<Result<Isa, String>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => parse(text.trim(), detected()),
        Err(std::env::VarError::NotPresent) => Ok(detected()),
        Err(e) => Err(format!("{VARIABLE}: {e}")),
    });
    chosen.as_ref().copied().map_err(String::as_str)
}

/// Reads a value of `PHALANX_ISA` on a processor that has `best` and less.
fn parse(text: &str, best: Isa) -> Result<Isa, String> {
    // Plain code for 64-bit ARM uses NEON, which all of them have.
    let choices: &[(&str, Isa)] = if cfg!(target_arch = "x86_64") {
        &[
            ("scalar", Isa::Scalar),
            ("avx2", Isa::Avx2),
            ("avx512", Isa::Avx512),
        ]
    } else if cfg!(target_arch = "aarch64") {
        &[("scalar", Isa::Scalar), ("neon", Isa::Scalar)]
    } else {
        &[("scalar", Isa::Scalar)]
    };
    if matches!(text, "" | "auto") {
        return Ok(best);
    }
    let here = || choices.iter().filter(|(_, isa)| *isa <= best);
    match here().find(|(name, _)| *name == text) {
        Some((_, isa)) => Ok(*isa),
        None => {
            let names: Vec<&str> = here().map(|(name, _)| *name).collect();
            Err(format!(
                "{VARIABLE}={text:?} is not an instruction set of this processor: use {} or auto",
                names.join(", ")
            ))
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detected() -> Isa {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma")) {
        Isa::Scalar
    } else if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
        Isa::Avx512
    } else {
        Isa::Avx2
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> Isa {
    Isa::Scalar
}

/// Whether the processor multiplies bf16 tiles and the system lets this process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_detected() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILE: u32 = 1 << 24;
        /// `arch_prctl`: ask to use a processor state component; 18 is tile data.
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        let bits = std::arch::x86_64::__cpuid_count(7, 0).edx;
        bits & BF16 != 0
            && bits & TILE != 0
            // SAFETY: the call asks for a permission and touches no memory.
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

/// Whether bf16 blocks are multiplied by AMX tiles.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_tiles() -> bool {
    #[cfg(target_os = "linux")]
    return isa() == Isa::Avx512 && tiles_detected();
    #[cfg(not(target_os = "linux"))]
    return false;
}

/// Bytes of a core's L2 cache; 1 MiB where the system does not say.
pub(crate) fn l2_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        #[cfg(target_env = "gnu")]
        // SAFETY: the call reads a constant of the system.
        let bytes = unsafe { libc::sysconf(libc::_SC_LEVEL2_CACHE_SIZE) };
        #[cfg(not(target_env = "gnu"))]
        let bytes = 0;
        usize::try_from(bytes)
            .ok()
            .filter(|b| *b > 0)
            .unwrap_or(1 << 20)
    })
}

/// The end of a function's body: returns `$wide` compiled with `$features` where `$has` holds,
/// else `$avx2` compiled for AVX2 and FMA where the processor has them, else `$plain`.
/// `$has`, of the instruction set in use, must imply that the processor has `$features`.
macro_rules! dispatch {
    ([$($generics:tt)*] ($($arg:ident: $ty:ty),*) [$($ret:tt)*];
     $features:literal if $has:path => $wide:expr; $avx2:expr; $plain:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            use $crate::isa::{Isa, isa};
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = $features)]
            fn wide $($generics)* ($($arg: $ty),*) $($ret)* { $wide }
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $($generics)* ($($arg: $ty),*) $($ret)* { $avx2 }
            let isa = isa();
            if $has(isa) {
                // SAFETY: the processor has these features, by the macro's contract.
                return unsafe { wide($($arg),*) };
            }
            if isa >= Isa::Avx2 {
                // SAFETY: `isa()` names only sets that this processor has.
                return unsafe { avx2($($arg),*) };
            }
        }
        $plain
    }};
}

/// Defines a function whose body is compiled once per instruction set; the
/// best one allowed is chosen at each call (one load and one compare).
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident: $bound:ident),*>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[allow(clippy::too_many_arguments)]
            #[inline(always)]
            fn body $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? $body

            dispatch! {
                [$(<$($g: $bound),*>)?] ($($arg: $ty),*) [$(-> $ret)?];
                "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma" if Isa::is_avx512 => body($($arg),*);
                body($($arg),*);
                body($($arg),*)
            }
        }
    };
}

/// Runs `f` once per instruction set of this processor.
#[cfg(test)]
pub(crate) fn on_each_isa(mut f: impl FnMut(Isa)) {
    for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
        FORCED.set(Some(isa));
        f(isa);
    }
    FORCED.set(None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused_with_the_choices() {
        assert_eq!(parse("auto", Isa::Scalar), Ok(Isa::Scalar));
        assert_eq!(parse("scalar", detected()), Ok(Isa::Scalar));
        for text in ["sse9", "AVX2", "avx512 "] {
            let error = parse(text, Isa::Scalar).unwrap_err();
            assert!(error.contains(text), "{error}");
            assert!(error.contains("use scalar"), "{error}");
            assert!(error.ends_with(" or auto"), "{error}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_the_processor_lacks_is_refused() {
        assert_eq!(parse("avx2", Isa::Avx512), Ok(Isa::Avx2));
        let error = parse("avx512", Isa::Avx2).unwrap_err();
        assert!(error.ends_with("use scalar, avx2 or auto"), "{error}");
    }
}
