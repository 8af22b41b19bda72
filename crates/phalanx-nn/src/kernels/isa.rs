//! Which instruction set the kernels use, and the macro that compiles one body for each.

use std::sync::OnceLock;

/// Instruction sets, from the plainest up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Isa {
    Scalar,
    Avx2,
    Avx512,
}

#[cfg(test)]
thread_local! {
    /// Lets a test run one body on several instruction sets.
    pub(crate) static FORCED: std::cell::Cell<Option<Isa>> = const { std::cell::Cell::new(None) };
}

/// The instruction set in use: the best one of this processor, or a lower one
/// named by `PHALANX_ISA=scalar|avx2|avx512`.
pub(crate) fn isa() -> Isa {
    #[cfg(test)]
    if let Some(i) = FORCED.get() {
        return i.min(detected());
    }
    static ISA: OnceLock<Isa> = OnceLock::new();
    *ISA.get_or_init(|| {
        let wanted = match std::env::var("PHALANX_ISA").as_deref() {
            Ok("scalar") => Isa::Scalar,
            Ok("avx2") => Isa::Avx2,
            _ => Isa::Avx512,
        };
        wanted.min(detected())
    })
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

/// Defines a function whose body is compiled once per instruction set; the
/// best one allowed is chosen at each call (one load and one compare).
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[allow(clippy::too_many_arguments)]
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                use $crate::kernels::isa::{Isa, isa};
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                match isa() {
                    // SAFETY: `isa()` names only sets that this processor has.
                    Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    Isa::Scalar => {}
                }
            }
            body($($arg),*)
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
