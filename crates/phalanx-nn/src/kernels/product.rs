//! Matrix products through `gemm`, always on the calling thread: how a product
//! is cut is decided here, by shape alone, so the number of threads cannot
//! change a bit. (Its K block does follow the processor's cache sizes: two
//! processor models may differ.)

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

use super::Mode;
use crate::par::{Disjoint, Team};

/// A matrix inside a slice, by strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with rows `stride` elements apart (rows may overlap: that is
    /// how a convolution reads its windows without copying them).
    pub(crate) fn rows(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        let m = Mat {
            data,
            rows,
            cols,
            row_stride: stride,
            col_stride: 1,
        };
        assert!(
            m.end() <= data.len(),
            "matrix of {rows} x {cols} does not fit its slice"
        );
        m
    }

    /// The transposed view.
    pub(crate) fn t(self) -> Self {
        Mat {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    fn end(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
    }

    /// Rows `from..to` and columns `left..right`.
    fn part(self, from: usize, to: usize, left: usize, right: usize) -> Self {
        let first = from * self.row_stride + left * self.col_stride;
        Mat {
            data: &self.data[first.min(self.data.len())..],
            rows: to - from,
            cols: right - left,
            ..self
        }
    }
}

/// `c (+)= a * b` with `c` row-major, rows `stride` apart.
pub(crate) fn product(c: &mut [f32], stride: usize, a: Mat<'_>, b: Mat<'_>, mode: Mode) {
    let (m, n) = (a.rows, b.cols);
    assert!(m == 0 || n == 0 || (n <= stride && (m - 1) * stride + n <= c.len()));
    // SAFETY: the block of m x n with this stride lies in `c`, checked above.
    unsafe { product_at(c.as_mut_ptr(), stride, a, b, mode) }
}

/// As [`product`], for a block of a larger matrix.
///
/// # Safety
/// `c` points to a row-major block of `a.rows` x `b.cols` with rows `stride`
/// apart that is valid for writes and touched by nobody else.
unsafe fn product_at(c: *mut f32, stride: usize, a: Mat<'_>, b: Mat<'_>, mode: Mode) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner sizes of a product differ");
    assert!(a.end() <= a.data.len() && b.end() <= b.data.len());
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if mode == Mode::Write {
            for r in 0..m {
                // SAFETY: inside the block by the caller's promise.
                unsafe { std::slice::from_raw_parts_mut(c.add(r * stride), n).fill(0.0) };
            }
        }
        return;
    }
    // `gemm` wants its output's columns contiguous: hand it the transposed
    // problem, cᵀ = bᵀ aᵀ.
    // SAFETY: sizes and strides describe memory inside the three blocks
    // (asserted above for a and b, promised for c); the function pointer is
    // chosen by `gemm` for this processor.
    unsafe {
        get_gemm_fn()(
            n,
            m,
            k,
            c,
            stride as isize,
            1,
            mode == Mode::Add,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.col_stride as isize,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.col_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Multiplications below which a product is not worth cutting.
const MIN_PART: usize = 1 << 21;
/// Parts at most: enough to keep 16 threads busy.
const MAX_PARTS: usize = 16;
/// Parts but the last are whole multiples of this many rows or columns: whole
/// vectors of every instruction set. (A last part of one row takes another path
/// inside `gemm` and may have other bits than it would have uncut; the cut goes by
/// shape, so they are the same on any number of threads.)
const GRAIN: usize = 64;

/// `c (+)= a * b`, cut over its longer side; every element of `c` belongs to
/// one part and its whole inner sum is made there.
pub(crate) fn product_team(team: &Team, c: &mut [f32], a: Mat<'_>, b: Mat<'_>, mode: Mode) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(m * n <= c.len());
    let (parts, piece) = cut(m, n, k);
    let out = Disjoint::new(c);
    team.run(parts, |i| {
        let (from, to) = (i * piece, (i + 1) * piece);
        let (pa, pb, at) = if m >= n {
            (a.part(from, to.min(m), 0, k), b, from * n)
        } else {
            (a, b.part(0, k, from, to.min(n)), from)
        };
        // SAFETY: part i covers rows (or columns) of c that no other covers.
        unsafe { product_at(out.pointer(at), n, pa, pb, mode) }
    });
}

/// Number of parts and rows (or columns) of one.
fn cut(m: usize, n: usize, k: usize) -> (usize, usize) {
    let long = m.max(n);
    let work = m.saturating_mul(n).saturating_mul(k);
    let parts = (work / MIN_PART)
        .clamp(1, MAX_PARTS)
        .min(long.div_ceil(GRAIN))
        .max(1);
    let piece = long.div_ceil(parts).div_ceil(GRAIN) * GRAIN;
    if parts == 1 {
        (1, long)
    } else {
        (long.div_ceil(piece), piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::scalar::{self, noise};
    use crate::par::Threads;

    #[test]
    fn agrees_with_the_scalar_product_in_every_orientation() {
        for (m, n, k) in [
            (1, 1, 1),
            (2, 1, 2),
            (7, 5, 3),
            (64, 128, 300),
            (130, 10, 64),
            (9, 32, 600),
            (3, 4, 0),
            (0, 4, 4),
        ] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let want = scalar::product(m, n, k, |i, p| a[i * k + p], |p, j| b[p * n + j]);
            let mut at = vec![0.0; m * k];
            let mut bt = vec![0.0; n * k];
            (0..m).for_each(|i| (0..k).for_each(|p| at[p * m + i] = a[i * k + p]));
            (0..n).for_each(|j| (0..k).for_each(|p| bt[j * k + p] = b[p * n + j]));
            for ta in [false, true] {
                for tb in [false, true] {
                    let ma = if ta {
                        Mat::rows(&at, k, m, m).t()
                    } else {
                        Mat::rows(&a, m, k, k)
                    };
                    let mb = if tb {
                        Mat::rows(&bt, n, k, k).t()
                    } else {
                        Mat::rows(&b, k, n, n)
                    };
                    let mut c = vec![1.0; m * n];
                    product(&mut c, n, ma, mb, Mode::Write);
                    let close = |c: &[f32], add: f64| {
                        c.iter().zip(&want).for_each(|(&g, &w)| {
                            assert!(
                                (f64::from(g) - w - add).abs() <= 1e-5 * (k as f64).sqrt().max(1.0),
                                "{m} {n} {k} {ta} {tb}: {g} {w}"
                            );
                        });
                    };
                    close(&c, 0.0);
                    c.fill(1.0);
                    product(&mut c, n, ma, mb, Mode::Add);
                    close(&c, 1.0);
                }
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for (m, n, k) in [
            (64, 128, 9216),
            (9216, 128, 64),
            (64, 9216, 128),
            (200, 300, 100),
        ] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let run = |threads| {
                let mut c = vec![0.0; m * n];
                product_team(
                    &Team::new(Threads(threads)),
                    &mut c,
                    Mat::rows(&a, m, k, k),
                    Mat::rows(&b, k, n, n),
                    Mode::Write,
                );
                c
            };
            let one = run(1);
            assert!(one == run(2) && one == run(4));
        }
    }

    #[test]
    fn parts_cover_everything() {
        for (m, n, k) in [
            (1, 1, 1),
            (9216, 128, 64),
            (64, 9216, 128),
            (65, 64, 100_000),
            (0, 0, 5),
            (1000, 1000, 1000),
        ] {
            let (parts, piece) = cut(m, n, k);
            assert!(parts * piece >= m.max(n) && parts <= MAX_PARTS);
            assert!(parts <= 1 || (parts - 1) * piece < m.max(n));
        }
    }
}
