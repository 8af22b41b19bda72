//! Matrix products of any size and layout, always on the calling thread: how a product
//! is cut is decided here, by shape alone.
//!
//! *Order*: an element is one chain of fused multiply-adds over the inner dimension,
//! ascending, whatever the blocking, the cut and the instruction set; what it is added
//! to is added to the whole sum.
//!
//! Products say whether all that they have written is finite, even squared: asked while it is in
//! registers, that costs one more multiply-add an element. Reading a gradient of 4.7 MB again for it
//! took 0.25 ms (`tools/runs/2026-11-22-overhead-later`).

use std::sync::atomic::{AtomicBool, Ordering};

use super::Mode;
use super::transpose::transpose_rows;
use super::vector::{LANES, Vector};
use crate::par::{Disjoint, ThreadPool, scratch};

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
    unsafe { product_at(c.as_mut_ptr(), stride, a, b, mode) };
}

/// As [`product`], for a block of a larger matrix. Whether all of it is finite then.
///
/// # Safety
/// `c` points to a row-major block of `a.rows` x `b.cols` with rows `stride`
/// apart that is valid for writes and touched by no other code.
unsafe fn product_at(c: *mut f32, stride: usize, a: Mat<'_>, b: Mat<'_>, mode: Mode) -> bool {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner sizes of a product differ");
    assert!(a.end() <= a.data.len() && b.end() <= b.data.len());
    let add = mode == Mode::Add;
    let mut finite = true;
    for top in (0..m).step_by(SLAB) {
        let rows = SLAB.min(m - top);
        for left in (0..n).step_by(COLUMNS) {
            let wide = COLUMNS.min(n - left);
            let (a, b) = (
                a.part(top, top + rows, 0, k),
                b.part(0, k, left, left + wide),
            );
            // SAFETY: inside the block by the caller's promise.
            let to = unsafe { c.add(top * stride + left) };
            if add && k > DEPTH {
                // The sum is made first, then added.
                scratch(rows * wide, |sum| {
                    // SAFETY: `sum` has this size.
                    unsafe { block(sum.as_mut_ptr(), wide, a, b, false) };
                    for (r, sum) in sum.chunks_exact(wide).enumerate() {
                        // SAFETY: rows of the block, which this call alone touches.
                        let to =
                            unsafe { std::slice::from_raw_parts_mut(to.add(r * stride), wide) };
                        for (t, s) in to.iter_mut().zip(sum) {
                            *t += s;
                            finite &= (*t * *t).is_finite();
                        }
                    }
                });
            } else {
                // SAFETY: inside the block by the caller's promise.
                finite &= unsafe { block(to, stride, a, b, add) };
            }
        }
    }
    finite
}

/// Rows for which one packing of `b` serves.
const SLAB: usize = 1024;
/// Columns of `b` packed at a time.
const COLUMNS: usize = 256;
/// Inner steps between two visits of `c`: packed, they and their columns fit L2.
const DEPTH: usize = 512;
/// Rows of `a` that stay in cache while the columns go by.
const ROWS: usize = 96;

/// `c = a * b`, or with `add` (inner size at most [`DEPTH`]) `c += a * b`. Whether all of `c` is finite then.
///
/// # Safety
/// As [`product_at`].
unsafe fn block(c: *mut f32, stride: usize, a: Mat<'_>, b: Mat<'_>, add: bool) -> bool {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let mut finite = k > 0 || !add; // else it was not looked at
    if k == 0 && !add {
        for r in 0..m {
            // SAFETY: inside the block by the caller's promise.
            unsafe { std::slice::from_raw_parts_mut(c.add(r * stride), n).fill(0.0) };
        }
    }
    let panels = n.div_ceil(LANES);
    scratch(panels * LANES * k.min(DEPTH), |packed| {
        for from in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - from);
            pack(b.part(from, from + depth, 0, n), packed);
            for top in (0..m).step_by(ROWS) {
                let rows = ROWS.min(m - top);
                let a = a.part(top, top + rows, from, from + depth);
                let strip = Strip {
                    a: a.data.as_ptr(),
                    a_row: a.row_stride,
                    a_step: a.col_stride,
                    b: packed.as_ptr(),
                    depth,
                    // SAFETY: inside the block by the caller's promise.
                    c: unsafe { c.add(top * stride) },
                    stride,
                    rows,
                    columns: n,
                    begin: match (from > 0, add) {
                        (true, _) => Begin::Continue,
                        (false, true) => Begin::AddAfter,
                        (false, false) => Begin::Zero,
                    },
                };
                // SAFETY: `packed` holds the panels, the parts lie in their matrices. What is not finite stays so
                // in the rest of its sum.
                finite &= unsafe { strips(&strip) };
            }
        }
    });
    finite
}

simd! {
    /// `b` into panels of sixteen columns, `[columns / 16][rows][16]`, the last filled up with zeros.
    fn pack(b: Mat<'_>, to: &mut [f32]) {
        for (j, panel) in to
            .chunks_exact_mut(b.rows * LANES)
            .take(b.cols.div_ceil(LANES))
            .enumerate()
        {
            let (first, wide) = (j * LANES, LANES.min(b.cols - j * LANES));
            let from = &b.data[first * b.col_stride..];
            let (rows, _) = panel.as_chunks_mut::<LANES>();
            if b.row_stride == 1 && wide == LANES {
                transpose_rows(from, b.col_stride, panel, b.rows);
                continue;
            }
            for (i, to) in rows.iter_mut().enumerate() {
                let from = &from[i * b.row_stride..];
                match from.first_chunk() {
                    Some(all) if b.col_stride == 1 && wide == LANES => *to = *all,
                    _ => {
                        to.fill(0.0);
                        for (l, to) in to[..wide].iter_mut().enumerate() {
                            *to = from[l * b.col_stride];
                        }
                    }
                }
            }
        }
    }
}

/// How sums begin and end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// At zero.
    Zero,
    /// With what `c` holds: the chain continues.
    Continue,
    /// At zero; what `c` holds is added to the whole sum.
    AddAfter,
}

/// Some rows of `a` times packed panels.
struct Strip {
    a: *const f32,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    depth: usize,
    c: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    begin: Begin,
}

/// `M` rows of `N` panels from panel `j` on; of the last panel `tail` columns exist. `seen`, above 0, becomes infinite
/// or NaN, in some lane, by any square that is not finite.
#[inline(always)]
unsafe fn tile<V: Vector, const M: usize, const N: usize>(
    s: &Strip,
    r: usize,
    j: usize,
    tail: usize,
    seen: &mut V,
) {
    // SAFETY: rows r .. r + M and panels j .. j + N exist; of `c`, only columns
    // that exist are touched.
    unsafe {
        let c = s.c.add(r * s.stride + j * LANES);
        let partial = |n: usize| n + 1 == N && tail < LANES;
        let fetch = |m: usize, n: usize| {
            let at = c.add(m * s.stride + n * LANES);
            if partial(n) {
                let mut own = [0.0; LANES];
                std::ptr::copy_nonoverlapping(at, own.as_mut_ptr(), tail);
                V::load(own.as_ptr())
            } else {
                V::load(at)
            }
        };
        let mut sums = [[V::splat(0.0); N]; M];
        if s.begin == Begin::Continue {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (n, v) in sums.iter_mut().enumerate() {
                    *v = fetch(m, n);
                }
            }
        }
        let panel = s.depth * LANES;
        let b = s.b.add(j * panel);
        let mut a = s.a.add(r * s.a_row);
        for i in 0..s.depth {
            let mut row = [V::splat(0.0); N];
            for (n, v) in row.iter_mut().enumerate() {
                *v = V::load(b.add(n * panel + i * LANES));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let v = V::splat(*a.add(m * s.a_row));
                for (s, &b) in sums.iter_mut().zip(&row) {
                    *s = v.fma(b, *s);
                }
            }
            a = a.wrapping_add(s.a_step);
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, &v) in sums.iter().enumerate() {
                let v = match s.begin {
                    Begin::AddAfter => fetch(m, n).add(v),
                    _ => v,
                };
                // Columns that do not exist are sums of zeros times a row: not finite only if those that do are not.
                *seen = v.fma(v, *seen);
                let at = c.add(m * s.stride + n * LANES);
                if partial(n) {
                    let mut own = [0.0; LANES];
                    v.store(own.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(own.as_ptr(), at, tail);
                } else {
                    v.store(at);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn group<V: Vector, const N: usize>(s: &Strip, j: usize, seen: &mut V) {
    let tail = LANES.min(s.columns - (j + N - 1) * LANES);
    let mut r = 0;
    // SAFETY: only rows that exist.
    unsafe {
        while r + 6 <= s.rows {
            tile::<V, 6, N>(s, r, j, tail, seen);
            r += 6;
        }
        if r + 4 <= s.rows {
            tile::<V, 4, N>(s, r, j, tail, seen);
            r += 4;
        }
        while r < s.rows {
            tile::<V, 1, N>(s, r, j, tail, seen);
            r += 1;
        }
    }
}

#[inline(always)]
unsafe fn strips_body<V: Vector>(s: &Strip) -> bool {
    let (mut j, panels) = (0, s.columns.div_ceil(LANES));
    // SAFETY: only panels that exist.
    unsafe {
        // Not from 0: small squares would add up to subnormal numbers, which are slow.
        let mut seen = V::splat(1.0);
        if V::SPAN >= 4 {
            while j + 4 <= panels {
                group::<V, 4>(s, j, &mut seen);
                j += 4;
            }
            if j + 2 <= panels {
                group::<V, 2>(s, j, &mut seen);
                j += 2;
            }
        }
        while j < panels {
            group::<V, 1>(s, j, &mut seen);
            j += 1;
        }
        let mut lanes = [0.0; LANES];
        seen.store(lanes.as_mut_ptr());
        lanes.iter().all(|sum| sum.is_finite())
    }
}

vectorised! {
    /// All rows of the strip times all panels; whether all that was written is finite.
    ///
    /// # Safety
    /// The matrices hold what the strip names, and no other code touches its part of `c`.
    unsafe fn strips(s: &Strip) -> bool = strips_body
}

/// Multiplications below which a product is not worth cutting.
const MIN_PART: usize = 1 << 21;
/// Parts at most: enough to keep 16 threads busy.
const MAX_PARTS: usize = 16;
/// Parts but the last are whole multiples of this many rows or columns: whole
/// vectors.
const GRAIN: usize = 64;

/// `c (+)= a * b`, cut over its longer side; every element of `c` belongs to
/// one part and its whole inner sum is made there. Whether all of `c` is known to be finite then.
pub(crate) fn product_threaded(
    threads: &ThreadPool,
    c: &mut [f32],
    a: Mat<'_>,
    b: Mat<'_>,
    mode: Mode,
) -> bool {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(m * n <= c.len());
    let (parts, piece) = cut(m, n, k);
    let out = Disjoint::new(c);
    let finite = AtomicBool::new(true);
    threads.run(parts, |i| {
        let (from, to) = (i * piece, (i + 1) * piece);
        let (pa, pb, at) = if m >= n {
            (a.part(from, to.min(m), 0, k), b, from * n)
        } else {
            (a, b.part(0, k, from, to.min(n)), from)
        };
        // SAFETY: part i covers rows (or columns) of c that no other covers.
        if !unsafe { product_at(out.pointer(at), n, pa, pb, mode) } {
            finite.store(false, Ordering::Relaxed);
        }
    });
    finite.into_inner()
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
            (13, 300, 520),
            (1100, 70, 9),
            (3, 16, 1030),
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
    fn bits_are_a_plain_chain_on_every_instruction_set() {
        for (m, n, k) in [(14, 100, 70), (6, 64, 1100), (1, 17, 513)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let chain = |i: usize, j: usize| {
                (0..k).fold(0.0f32, |sum, p| a[i * k + p].mul_add(b[p * n + j], sum))
            };
            let want: Vec<f32> = (0..m * n).map(|at| chain(at / n, at % n)).collect();
            crate::kernels::isa::on_each_isa(|isa| {
                let (ma, mb) = (Mat::rows(&a, m, k, k), Mat::rows(&b, k, n, n));
                let mut c = vec![f32::NAN; m * n];
                product(&mut c, n, ma, mb, Mode::Write);
                assert!(c == want, "{m} {n} {k} {isa:?}");
                c.fill(0.75);
                product(&mut c, n, ma, mb, Mode::Add);
                assert!(
                    c.iter().zip(&want).all(|(c, w)| *c == 0.75 + w),
                    "{m} {n} {k} {isa:?}"
                );
            });
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
                product_threaded(
                    &ThreadPool::new(Threads(threads)),
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
    fn products_know_whether_they_are_finite() {
        for (m, n, k, mode) in [
            (6, 64, 5, Mode::Write),
            (13, 83, 70, Mode::Write),
            (13, 83, 70, Mode::Add),
            (3, 20, 1100, Mode::Write),
            (3, 20, 1100, Mode::Add),
            (5, 3, 0, Mode::Write),
            (70, 700, 64, Mode::Write),
        ] {
            let (mut a, b) = (noise(m * k, 1), noise(k * n, 2));
            let threads = ThreadPool::new(Threads(2));
            let known = |a: &[f32], c: &mut [f32]| {
                let (a, b) = (Mat::rows(a, m, k, k), Mat::rows(&b, k, n, n));
                product_threaded(&threads, c, a, b, mode)
            };
            let mut c = vec![1.0; m * n];
            crate::kernels::isa::on_each_isa(|isa| {
                c.fill(1.0);
                assert!(known(&a, &mut c), "{m} {n} {k} {isa:?}");
                for at in [0, (m / 2) * n + n / 2, m * n - 1] {
                    c.fill(1.0);
                    c[at] = f32::NEG_INFINITY;
                    assert_eq!(
                        known(&a, &mut c),
                        mode == Mode::Write,
                        "{m} {n} {k} {isa:?}"
                    );
                }
                for at in [0, m * k / 2, (m * k).saturating_sub(1)] {
                    let Some(&kept) = a.get(at) else { continue };
                    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
                        a[at] = bad;
                        c.fill(f32::MAX);
                        let want = known(&a, &mut c);
                        assert_eq!(
                            want,
                            c.iter().all(|c| (c * c).is_finite()),
                            "{m} {n} {k} {bad} {isa:?}"
                        );
                        a[at] = kept;
                    }
                }
            });
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
