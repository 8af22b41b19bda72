//! Sixteen floats at a time: what the hand-blocked kernels are written in.
//!
//! One generic body serves every instruction set: [`Wide`] is an AVX-512
//! register, [`Pair`] two AVX ones, [`Plain`] an array (which the compiler makes
//! NEON where it can). All operations round as the scalar ones do and
//! multiply-adds are fused, so the three give the same bits.

use crate::Precision;
use crate::element::Element;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen floats.
///
/// # Safety
/// Methods of [`Wide`] and [`Pair`] may only be called in functions compiled for
/// AVX-512 or for AVX2 and FMA, on a processor that has them ([`vectorised`]
/// sees to both). Pointers are valid for sixteen floats.
///
/// [`vectorised`]: crate::vector
pub(crate) trait Vector: Copy {
    /// Vectors that a micro-kernel's output row spans: as many as leave it
    /// enough registers.
    const SPAN: usize;

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Sixteen elements of either kind.
    #[inline(always)]
    unsafe fn load_from<S: Element>(from: *const S) -> Self {
        // SAFETY: valid for sixteen elements, by the trait's contract.
        unsafe {
            match S::PRECISION {
                Precision::F32 => Self::load(from.cast()),
                Precision::Bf16 => {
                    let wide = from.cast::<[S; LANES]>().read_unaligned().map(S::wide);
                    Self::load(wide.as_ptr())
                }
            }
        }
    }
    /// Stores elements of either kind, rounded.
    #[inline(always)]
    unsafe fn store_to<S: Element>(self, to: *mut S) {
        // SAFETY: as in `load_from`.
        unsafe {
            match S::PRECISION {
                Precision::F32 => self.store(to.cast()),
                Precision::Bf16 => {
                    let mut wide = [0.0; LANES];
                    self.store(wide.as_mut_ptr());
                    to.cast::<[S; LANES]>().write_unaligned(wide.map(S::of));
                }
            }
        }
    }
    /// The first of sixteen elements, and zeros: only as many are touched.
    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        let mut own = [0.0; LANES];
        // SAFETY: valid for this many, by the trait's contract.
        unsafe {
            if count == LANES {
                return Self::load(from);
            }
            from.copy_to_nonoverlapping(own.as_mut_ptr(), count);
            Self::load(own.as_ptr())
        }
    }
    /// Stores the first elements only.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        let mut own = [0.0; LANES];
        // SAFETY: as in `load_first`.
        unsafe {
            if count == LANES {
                return self.store(to);
            }
            self.store(own.as_mut_ptr());
            to.copy_from_nonoverlapping(own.as_ptr(), count);
        }
    }
    unsafe fn splat(v: f32) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    /// Negative lanes become 0; NaN stays.
    unsafe fn relu(self) -> Self;
    /// Lane i of result j is lane j of row i.
    unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES];
    /// Asks for the cache line at `at`, which need not be valid memory, to come to L2.
    #[inline(always)]
    unsafe fn fetch(at: *const f32) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast())
        };
        let _ = at;
    }
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
    #[inline(always)]
    unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut to = rows;
        for (i, row) in rows.iter().enumerate() {
            for (to, v) in to.iter_mut().zip(row.0) {
                to.0[i] = v;
            }
        }
        to
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Vector};
    use std::arch::x86_64::*;

    /// One AVX-512 register.
    #[derive(Clone, Copy)]
    #[repr(transparent)]
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
        unsafe fn load_first(from: *const f32, count: usize) -> Self {
            // SAFETY: see the impl; lanes outside the mask are not read.
            Wide(unsafe { _mm512_maskz_loadu_ps(((1u32 << count) - 1) as u16, from) })
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            // SAFETY: see the impl; lanes outside the mask are not written.
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << count) - 1) as u16, self.0) }
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
        #[inline(always)]
        unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
            // SAFETY: see the impl; both are registers of 64 bytes.
            unsafe {
                let rows = std::mem::transmute::<[Wide; LANES], [__m512i; LANES]>(rows);
                std::mem::transmute::<[__m512i; LANES], [Wide; LANES]>(transpose(rows))
            }
        }
    }

    /// Sixteen lanes of 32 bits each, rows and columns exchanged.
    ///
    /// # Safety
    /// The processor has AVX-512, and the caller is compiled for it.
    #[inline(always)]
    pub(crate) unsafe fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
        // Pairs of rows, then of pairs, then quarters of registers.
        // SAFETY: the caller's promise.
        unsafe {
            let mut a = rows;
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
            }
            let mut b = a;
            for i in 0..4 {
                b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
                b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
                b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
                b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
            }
            // b[4 i + j], quarter q: column 4 q + j of rows 4 i .. 4 i + 4.
            let mut r = b;
            for j in 0..4 {
                let even = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
                let odd = _mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]);
                let even2 = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
                let odd2 = _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]);
                r[j] = _mm512_shuffle_i32x4::<0x88>(even, even2);
                r[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even, even2);
                r[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, odd2);
                r[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, odd2);
            }
            r
        }
    }

    /// Two AVX registers.
    #[derive(Clone, Copy)]
    pub(crate) struct Pair(__m256, __m256);

    const HALF: usize = LANES / 2;

    /// Rows and columns of a square of eight exchanged.
    #[inline(always)]
    unsafe fn transpose_eight(rows: [__m256; HALF]) -> [__m256; HALF] {
        // Pairs of rows, then of pairs, then halves of registers.
        // SAFETY: the caller is compiled for AVX2.
        unsafe {
            let (mut a, mut b, mut r) = (rows, rows, rows);
            for i in 0..4 {
                a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            for i in 0..2 {
                b[4 * i] = _mm256_shuffle_ps::<0x44>(a[4 * i], a[4 * i + 2]);
                b[4 * i + 1] = _mm256_shuffle_ps::<0xee>(a[4 * i], a[4 * i + 2]);
                b[4 * i + 2] = _mm256_shuffle_ps::<0x44>(a[4 * i + 1], a[4 * i + 3]);
                b[4 * i + 3] = _mm256_shuffle_ps::<0xee>(a[4 * i + 1], a[4 * i + 3]);
            }
            for i in 0..4 {
                r[i] = _mm256_permute2f128_ps::<0x20>(b[i], b[4 + i]);
                r[4 + i] = _mm256_permute2f128_ps::<0x31>(b[i], b[4 + i]);
            }
            r
        }
    }

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
        #[inline(always)]
        unsafe fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
            // Four squares of eight; those off the diagonal change places.
            // SAFETY: see the impl.
            unsafe {
                let mut squares = [[_mm256_setzero_ps(); HALF]; 4];
                for i in 0..HALF {
                    squares[0][i] = rows[i].0;
                    squares[1][i] = rows[HALF + i].0;
                    squares[2][i] = rows[i].1;
                    squares[3][i] = rows[HALF + i].1;
                }
                for square in &mut squares {
                    *square = transpose_eight(*square);
                }
                let mut to = rows;
                for i in 0..HALF {
                    to[i] = Pair(squares[0][i], squares[1][i]);
                    to[HALF + i] = Pair(squares[2][i], squares[3][i]);
                }
                to
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Pair, Wide, transpose};

/// Defines `unsafe fn name(args)` that calls the generic `body::<V>` compiled
/// for the instruction set in use.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident $(<$g:ident: $bound:ident>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
            dispatch! {
                [$(<$g: $bound>)?] ($($arg: $ty),*) [$(-> $ret)?];
                "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma" if Isa::is_avx512 =>
                // SAFETY: compiled for AVX-512; the rest is the caller's promise.
                unsafe { $body::<$crate::vector::Wide $(, $g)?>($($arg),*) };
                // SAFETY: compiled for AVX2 and FMA; the rest is the caller's promise.
                unsafe { $body::<$crate::vector::Pair $(, $g)?>($($arg),*) };
                // SAFETY: the caller's promise.
                unsafe { $body::<$crate::vector::Plain $(, $g)?>($($arg),*) }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;

    #[inline(always)]
    unsafe fn transposed_body<V: Vector>(square: &mut [[f32; LANES]; LANES]) {
        // SAFETY: sixteen floats each; fetching touches nothing.
        unsafe {
            let mut rows = [V::splat(0.0); LANES];
            for (v, row) in rows.iter_mut().zip(&*square) {
                V::fetch(row.as_ptr().wrapping_add(1 << 40));
                *v = V::load(row.as_ptr());
            }
            for (v, row) in V::transpose(rows).into_iter().zip(square) {
                v.store(row.as_mut_ptr());
            }
        }
    }

    vectorised! {
        unsafe fn transposed(square: &mut [[f32; LANES]; LANES]) = transposed_body
    }

    #[test]
    fn squares_are_transposed_on_every_instruction_set() {
        on_each_isa(|isa| {
            let mut square = [[0.0; LANES]; LANES];
            for (i, row) in square.iter_mut().enumerate() {
                for (j, v) in row.iter_mut().enumerate() {
                    *v = (i * LANES + j) as f32;
                }
            }
            // SAFETY: nothing to keep.
            unsafe { transposed(&mut square) };
            for (i, row) in square.iter().enumerate() {
                for (j, &v) in row.iter().enumerate() {
                    assert_eq!(v, (j * LANES + i) as f32, "{isa:?}");
                }
            }
        });
    }
}
