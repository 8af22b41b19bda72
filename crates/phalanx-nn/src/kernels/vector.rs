//! Sixteen floats at a time: what the hand-blocked kernels are written in.
//!
//! One generic body serves every instruction set: [`Wide`] is an AVX-512
//! register, [`Pair`] two AVX ones, [`Plain`] an array (which the compiler turns
//! into NEON where it can). All operations round as the scalar ones do and
//! multiply-adds are fused, so the three give the same bits.

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen floats.
///
/// # Safety
/// Methods of [`Wide`] and [`Pair`] may only be called in functions compiled for
/// AVX-512 or for AVX2 and FMA, on a processor that has them ([`vectorised`]
/// sees to both). Pointers are valid for sixteen floats.
///
/// [`vectorised`]: crate::kernels::vector
pub(crate) trait Vector: Copy {
    /// Vectors that a micro-kernel's output row spans: as many as leave it
    /// enough registers.
    const SPAN: usize;

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn splat(v: f32) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// Negative lanes become 0; NaN stays.
    unsafe fn relu(self) -> Self;
}

/// Without vector instructions of its own.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut r = self;
        for (r, b) in r.0.iter_mut().zip(b.0) {
            *r = f(*r, b);
        }
        r
    }
}

impl Vector for Plain {
    const SPAN: usize = 1;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: valid for sixteen floats, by the trait's contract.
        Plain(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        Plain([v; LANES])
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        let mut r = c;
        for ((r, a), b) in r.0.iter_mut().zip(self.0).zip(b.0) {
            *r = a.mul_add(b, *r);
        }
        r
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        self.zip(self, |a, _| if a < 0.0 { 0.0 } else { a })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Vector};
    use std::arch::x86_64::*;

    /// One AVX-512 register.
    #[derive(Clone, Copy)]
    pub(crate) struct Wide(__m512);

    // SAFETY (every block below): the trait's contract: the processor has
    // AVX-512 and pointers are valid for sixteen floats.
    impl Vector for Wide {
        const SPAN: usize = 4;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn splat(v: f32) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_set1_ps(v) })
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_add_ps(self.0, b.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_sub_ps(self.0, b.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_mul_ps(self.0, b.0) })
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // Of two operands, `max` gives the second where either is NaN or both are zero.
            // SAFETY: see the impl.
            Wide(unsafe { _mm512_max_ps(_mm512_setzero_ps(), self.0) })
        }
    }

    /// Two AVX registers.
    #[derive(Clone, Copy)]
    pub(crate) struct Pair(__m256, __m256);

    const HALF: usize = LANES / 2;

    // SAFETY (every block below): the trait's contract: the processor has AVX2
    // and FMA, and pointers are valid for sixteen floats.
    impl Vector for Pair {
        const SPAN: usize = 1;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            unsafe { Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(HALF))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(HALF), self.1);
            }
        }
        #[inline(always)]
        unsafe fn splat(v: f32) -> Self {
            // SAFETY: see the impl.
            let v = unsafe { _mm256_set1_ps(v) };
            Pair(v, v)
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: see the impl.
            unsafe {
                Pair(
                    _mm256_fmadd_ps(self.0, b.0, c.0),
                    _mm256_fmadd_ps(self.1, b.1, c.1),
                )
            }
        }
        #[inline(always)]
        unsafe fn add(self, b: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { Pair(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn sub(self, b: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { Pair(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn mul(self, b: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { Pair(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the impl; the order of operands as in `Wide`.
            unsafe {
                let zero = _mm256_setzero_ps();
                Pair(_mm256_max_ps(zero, self.0), _mm256_max_ps(zero, self.1))
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Pair, Wide};

/// Defines `unsafe fn name(args)` that calls the generic `body::<V>` compiled
/// for the instruction set in use.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::kernels::isa::{Isa, isa};
                use $crate::kernels::vector::{Pair, Wide};
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                unsafe fn wide($($arg: $ty),*) {
                    // SAFETY: compiled for AVX-512; the rest is the caller's promise.
                    unsafe { $body::<Wide>($($arg),*) }
                }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma")]
                unsafe fn pair($($arg: $ty),*) {
                    // SAFETY: compiled for AVX2 and FMA; the rest is the caller's promise.
                    unsafe { $body::<Pair>($($arg),*) }
                }
                match isa() {
                    // SAFETY: `isa()` names only sets that this processor has.
                    Isa::Avx512 => return unsafe { wide($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { pair($($arg),*) },
                    Isa::Scalar => {}
                }
            }
            // SAFETY: the caller's promise.
            unsafe { $body::<$crate::kernels::vector::Plain>($($arg),*) }
        }
    };
}
