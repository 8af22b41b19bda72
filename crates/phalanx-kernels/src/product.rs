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
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with rows `stride` elements apart (rows may overlap: that is
    /// how a convolution reads its windows without copying them).
    pub fn rows(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
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
    pub fn t(self) -> Self {
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

/// The right-hand side of a product.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    Matrix(Mat<'a>),
    Packed(Packed<'a>),
}

/// A matrix in the panels of [`pack`], for each [`DEPTH`] rows one after another.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
}

impl<'a> From<Mat<'a>> for Right<'a> {
    fn from(b: Mat<'a>) -> Self {
        Right::Matrix(b)
    }
}

impl<'a> Right<'a> {
    fn sizes(&self) -> (usize, usize) {
        match self {
            Right::Matrix(b) => (b.rows, b.cols),
            Right::Packed(b) => (b.rows, b.cols),
        }
    }

    /// Panels of rows `from .. from + depth` and columns `left .. right`; `own` is memory for them.
    fn panels<'s>(
        &self,
        (from, depth): (usize, usize),
        (left, right): (usize, usize),
        own: &'s mut [f32],
    ) -> &'s [f32]
    where
        'a: 's,
    {
        match *self {
            Right::Matrix(b) => {
                pack(b.part(from, from + depth, left, right), own);
                own
            }
            Right::Packed(b) => {
                let before = from * b.cols.div_ceil(LANES) + depth * (left / LANES);
                &b.data[before * LANES..]
            }
        }
    }
}

/// `c (+)= a * b` with `c` row-major, rows `stride` apart.
pub fn product(c: &mut [f32], stride: usize, a: Mat<'_>, b: Mat<'_>, mode: Mode) {
    let (m, n) = (a.rows, b.cols);
    assert!(m == 0 || n == 0 || (n <= stride && (m - 1) * stride + n <= c.len()));
    // SAFETY: the block of m x n with this stride lies in `c`, checked above.
    unsafe { product_at(c.as_mut_ptr(), stride, a, b.into(), mode.into(), &[]) };
}

/// As [`product`], for a block of a larger matrix. A bias that is not empty is added to each row; its length is that of a row,
/// rounded up to whole vectors. Returns whether all of the block is finite then; with a bias and no inner size, it is not
/// looked at.
///
/// # Safety
/// `c` points to a row-major block of `a.rows` rows and the columns of `b` with rows `stride`
/// apart that is valid for writes, holds numbers unless it begins at zero, and is touched by no other code.
pub(super) unsafe fn product_at(
    c: *mut f32,
    stride: usize,
    a: Mat<'_>,
    b: Right<'_>,
    begin: Begin,
    bias: &[f32],
) -> bool {
    let (inner, n) = b.sizes();
    assert_eq!(a.cols, inner, "inner sizes of a product differ");
    assert!(bias.is_empty() || begin != Begin::AddAfter);
    assert!(
        a.end() <= a.data.len() && (bias.is_empty() || bias.len() >= n.next_multiple_of(LANES))
    );
    let (m, k) = (a.rows, a.cols);
    let mut finite = true;
    for top in (0..m).step_by(SLAB) {
        let rows = SLAB.min(m - top);
        for left in (0..n).step_by(COLUMNS) {
            let wide = COLUMNS.min(n - left);
            let a = a.part(top, top + rows, 0, k);
            let columns = (left, left + wide);
            let bias = bias.get(left..).unwrap_or_default();
            // SAFETY: inside the block by the caller's promise.
            let to = unsafe { c.add(top * stride + left) };
            if begin == Begin::AddAfter && k > DEPTH {
                // The sum is made first, then added.
                scratch(rows * wide, |sum| {
                    // SAFETY: `sum` has this size.
                    unsafe { block(sum.as_mut_ptr(), wide, a, (b, columns), Begin::Zero, &[]) };
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
                finite &= unsafe { block(to, stride, a, (b, columns), begin, bias) };
            }
        }
    }
    finite
}

/// Rows for which one packing of `b` serves.
const SLAB: usize = 1024;
/// Columns of `b` packed at a time.
const COLUMNS: usize = 256;
/// Inner steps between two visits of `c`: this many of the columns of a tile stay in L1 while the rows go by.
const DEPTH: usize = 256;
/// Rows of `a` that stay in cache while the columns go by.
const ROWS: usize = 96;
/// Rows of the tallest tile; smaller ones fit into it.
const TALL: usize = 12;
/// Elements of a page of memory.
const PAGE: usize = 1024;

/// `a * b` with these columns of `b`. What `c` holds is added afterwards only to sums of at most [`DEPTH`]. Whether all of `c`
/// is finite then.
///
/// # Safety
/// As [`product_at`].
unsafe fn block(
    c: *mut f32,
    stride: usize,
    a: Mat<'_>,
    (b, columns): (Right<'_>, (usize, usize)),
    begin: Begin,
    bias: &[f32],
) -> bool {
    let (m, n, k) = (a.rows, columns.1 - columns.0, a.cols);
    let mut finite = k > 0 || begin == Begin::Zero; // else it was not looked at
    if k == 0 && begin == Begin::Zero {
        for r in 0..m {
            // SAFETY: inside the block by the caller's promise.
            let row = unsafe { std::slice::from_raw_parts_mut(c.add(r * stride), n) };
            match bias.get(..n) {
                Some(bias) if n > 0 => row.copy_from_slice(bias),
                _ => row.fill(0.0),
            }
        }
    }
    let own = match b {
        Right::Matrix(_) => n.next_multiple_of(LANES) * k.min(DEPTH),
        Right::Packed(_) => 0,
    };
    // Each step of `a` on another page: many of them would share the same few lines of L1.
    let far = a.row_stride == 1 && a.col_stride >= PAGE;
    let left = if far { ROWS * k.min(DEPTH) } else { 0 };
    scratch(left + own, |own| {
        let (left, own) = own.split_at_mut(left);
        for from in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - from);
            let packed = b.panels((from, depth), columns, own);
            for top in (0..m).step_by(ROWS) {
                let rows = ROWS.min(m - top);
                let a = a.part(top, top + rows, from, from + depth);
                let (from_left, a_tile, a_step) = if far {
                    pack_left(a, left);
                    (left.as_ptr(), depth * TALL, TALL)
                } else {
                    (a.data.as_ptr(), TALL * a.row_stride, a.col_stride)
                };
                let strip = Strip {
                    a: from_left,
                    a_tile,
                    a_row: a.row_stride,
                    a_step,
                    b: packed.as_ptr(),
                    depth,
                    // SAFETY: inside the block by the caller's promise.
                    c: unsafe { c.add(top * stride) },
                    stride,
                    rows,
                    columns: n,
                    bias: (from + depth == k && !bias.is_empty()).then_some(bias.as_ptr()),
                    begin: if from > 0 { Begin::Continue } else { begin },
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
        if b.col_stride == 1 {
            // Row by row, so that memory is read in order.
            let (to, _) = to.as_chunks_mut::<LANES>();
            for i in 0..b.rows {
                let (whole, rest) = b.data[i * b.row_stride..][..b.cols].as_chunks::<LANES>();
                for (j, from) in whole.iter().enumerate() {
                    to[j * b.rows + i] = *from;
                }
                if !rest.is_empty() {
                    let to = &mut to[whole.len() * b.rows + i];
                    to.fill(0.0);
                    to[..rest.len()].copy_from_slice(rest);
                }
            }
            return;
        }
        for (j, panel) in to
            .chunks_exact_mut(b.rows * LANES)
            .take(b.cols.div_ceil(LANES))
            .enumerate()
        {
            let (first, wide) = (j * LANES, LANES.min(b.cols - j * LANES));
            let from = &b.data[first * b.col_stride..];
            if b.row_stride == 1 && wide == LANES {
                transpose_rows(from, b.col_stride, panel, b.rows);
                continue;
            }
            for (i, to) in panel.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                to.fill(0.0);
                for (l, to) in to[..wide].iter_mut().enumerate() {
                    *to = from[i * b.row_stride + l * b.col_stride];
                }
            }
        }
    }
}

simd! {
    /// `a`, whose columns are contiguous, into blocks of [`TALL`] rows: `[rows / 12][columns][12]`, the last one not filled up.
    fn pack_left(a: Mat<'_>, to: &mut [f32]) {
        for (t, block) in to.chunks_mut(a.cols * TALL).take(a.rows.div_ceil(TALL)).enumerate() {
            let (tall, columns) = (TALL.min(a.rows - t * TALL), a.data[t * TALL..].chunks(a.col_stride));
            for (to, from) in block.as_chunks_mut::<TALL>().0.iter_mut().zip(columns) {
                match from.first_chunk() {
                    Some(from) => *to = *from,
                    None => to[..tall].copy_from_slice(&from[..tall]),
                }
            }
        }
    }
}

/// How sums begin and end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// At zero.
    Zero,
    /// With what `c` holds: the chain continues.
    Continue,
    /// At zero; what `c` holds is added to the whole sum.
    AddAfter,
}

impl From<Mode> for Begin {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Write => Begin::Zero,
            Mode::Add => Begin::AddAfter,
        }
    }
}

/// Some rows of `a` times packed panels.
struct Strip {
    a: *const f32,
    /// Elements from [`TALL`] rows to the next.
    a_tile: usize,
    a_row: usize,
    a_step: usize,
    b: *const f32,
    depth: usize,
    c: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    /// Added to whole sums.
    bias: Option<*const f32>,
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
        let wide = |n: usize| if n + 1 == N { tail } else { LANES };
        // Loops over the sums stay short, so that all of them are unrolled and the sums are in registers.
        let mut sums = [[V::splat(0.0); N]; M];
        if s.begin == Begin::Continue {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (n, v) in sums.iter_mut().enumerate() {
                    *v = V::load_first(c.add(m * s.stride + n * LANES), wide(n));
                }
            }
        }
        let panel = s.depth * LANES;
        let b = s.b.add(j * panel);
        let mut a = s.a.add(r / TALL * s.a_tile + r % TALL * s.a_row);
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
        if let Some(bias) = s.bias {
            let mut row = [V::splat(0.0); N];
            for (n, v) in row.iter_mut().enumerate() {
                *v = V::load(bias.add((j + n) * LANES));
            }
            for sums in &mut sums {
                for (s, &b) in sums.iter_mut().zip(&row) {
                    *s = s.add(b);
                }
            }
        }
        // Chains that do not wait for each other; not from 0, as `seen`. Columns that do not exist are sums of zeros times
        // a row: not finite only if those that do are not.
        let mut squares = [V::splat(1.0); N];
        for (m, sums) in sums.iter().enumerate() {
            for (n, (&v, square)) in sums.iter().zip(&mut squares).enumerate() {
                let to = c.add(m * s.stride + n * LANES);
                let v = match s.begin {
                    Begin::AddAfter => V::load_first(to, wide(n)).add(v),
                    _ => v,
                };
                *square = v.fma(v, *square);
                v.store_first(to, wide(n));
            }
        }
        squares.iter().for_each(|&square| *seen = seen.add(square));
    }
}

#[inline(always)]
unsafe fn group<V: Vector, const M: usize, const N: usize>(s: &Strip, j: usize, seen: &mut V) {
    let tail = LANES.min(s.columns - (j + N - 1) * LANES);
    let mut r = 0;
    // SAFETY: only rows that exist.
    unsafe {
        while r + M <= s.rows {
            tile::<V, M, N>(s, r, j, tail, seen);
            r += M;
        }
        if r + 8 <= s.rows {
            tile::<V, 8, N>(s, r, j, tail, seen);
            r += 8;
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
            while j + 2 <= panels {
                group::<V, TALL, 2>(s, j, &mut seen);
                j += 2;
            }
            if j < panels {
                group::<V, TALL, 1>(s, j, &mut seen);
            }
        } else {
            while j < panels {
                group::<V, 6, 1>(s, j, &mut seen);
                j += 1;
            }
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
pub fn product_threaded(
    threads: &ThreadPool,
    c: &mut [f32],
    a: Mat<'_>,
    b: Mat<'_>,
    mode: Mode,
) -> bool {
    parts(threads, c, (a, b), mode, &[])
}

/// `c = a * b + bias`, with `bias` added to each row of the whole sums.
pub fn product_biased(
    threads: &ThreadPool,
    c: &mut [f32],
    (a, b): (Mat<'_>, Mat<'_>),
    bias: &[f32],
) {
    assert!(bias.is_empty() || bias.len() == b.cols);
    parts(threads, c, (a, b), Mode::Write, bias);
}

/// [`product_threaded`] with a bias of a row, or none.
fn parts(
    threads: &ThreadPool,
    c: &mut [f32],
    (a, b): (Mat<'_>, Mat<'_>),
    mode: Mode,
    bias: &[f32],
) -> bool {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert!(m * n <= c.len());
    let (parts, piece) = cut(m, n, k);
    let out = Disjoint::new(c);
    let finite = AtomicBool::new(true);
    let run = |a: Mat<'_>, b: Right<'_>, begin, bias: &[f32]| {
        // Innermost, so that both kinds of products keep the same scratch memory.
        scratch(bias.len().next_multiple_of(LANES), |whole| {
            whole.fill(0.0);
            whole[..bias.len()].copy_from_slice(bias);
            threads.run(parts, |i| {
                let (from, to) = (i * piece, (i + 1) * piece);
                let (pa, pb, at, bias) = match b {
                    Right::Matrix(b) if m < n => {
                        let bias = whole.get(from..).unwrap_or_default();
                        let columns = b.part(0, b.rows, from, to.min(n));
                        (a, columns.into(), from, bias)
                    }
                    b => (a.part(from, to.min(m), 0, a.cols), b, from * n, &*whole),
                };
                // SAFETY: part i covers rows (or columns) of c that no other covers.
                if !unsafe { product_at(out.pointer(at), n, pa, pb, begin, bias) } {
                    finite.store(false, Ordering::Relaxed);
                }
            });
        });
    };
    let width = n.next_multiple_of(LANES);
    let by_rows = m >= n && parts > 1;
    let near = if by_rows {
        MOST_PACKED / width
    } else {
        MOST_LEFT / m.max(1)
    };
    // A slab of inner steps reads and writes all of `c`. That must cost less than reading `a` again for each part. With
    // `Add`, the sum has to be whole before it is added.
    let pays = near >= DEPTH && (by_rows || n <= 4 * near);
    let most = if pays && mode == Mode::Write {
        near / DEPTH * DEPTH
    } else {
        k.max(1)
    };
    for from in (0..k.max(1)).step_by(most) {
        let to = k.min(from + most);
        let (a, b) = (a.part(0, m, from, to), b.part(from, to, 0, n));
        let begin = if from > 0 {
            Begin::Continue
        } else {
            mode.into()
        };
        let bias = if to == k { bias } else { &[] };
        let size = width * (to - from);
        if !by_rows || size > MOST_PACKED {
            run(a, b.into(), begin, bias);
            continue;
        }
        // All parts read the same columns.
        scratch(size, |data| {
            pack_all(threads, b, data);
            let (rows, cols) = (to - from, n);
            run(a, Right::Packed(Packed { data, rows, cols }), begin, bias);
        });
    }
    finite.into_inner()
}

/// Elements of a left-hand side that stay in cache from part to part: 512 KiB.
const MOST_LEFT: usize = 1 << 17;
/// Elements of a right-hand side that is packed as a whole: 16 MiB.
const MOST_PACKED: usize = 1 << 22;

/// `b` as [`Packed`] has it.
fn pack_all(threads: &ThreadPool, b: Mat<'_>, to: &mut [f32]) {
    let width = b.cols.next_multiple_of(LANES);
    for (i, to) in to.chunks_mut((DEPTH * width).max(1)).enumerate() {
        let (from, depth) = (i * DEPTH, to.len() / width);
        // Four panels at a time.
        threads.split(to, 4 * LANES * depth, |at, to| {
            let left = at / depth;
            let right = b.cols.min(left + to.len() / depth);
            pack(b.part(from, from + depth, left, right), to);
        });
    }
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
    use crate::par::Threads;
    use crate::scalar::{self, noise};

    #[test]
    fn packed_wholes_and_biases_change_no_bit() {
        let pool = ThreadPool::new(Threads(3));
        for (m, n, k) in [
            (300, 70, 300),
            (200, 200, 257),
            (90, 130, 513),
            (400, 33, 0),
            (48, 96, 9000),
            (130, 80, 53_000),
        ] {
            let (a, b, bias) = (noise(m * k, 1), noise(n * k, 2), noise(n, 3));
            let (a, b) = (Mat::rows(&a, m, k, k), Mat::rows(&b, n, k, k).t());
            let (mut want, mut got) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
            product(&mut want, n, a, b, Mode::Write);
            for row in want.chunks_exact_mut(n) {
                row.iter_mut().zip(&bias).for_each(|(w, b)| *w += b);
            }
            product_biased(&pool, &mut got, (a, b), &bias);
            assert_eq!(got, want, "{m} x {k} x {n}");
            // The sum continues from the stored value.
            let (left, right) = (k / 3, k - k / 3);
            let mut onto = vec![0.0; m * n];
            for (from, to) in [(0, left), (left, left + right)] {
                let (a, b) = (a.part(0, m, from, to), b.part(from, to, 0, n));
                // SAFETY: all of the matrix.
                unsafe { product_at(onto.as_mut_ptr(), n, a, b.into(), Begin::Continue, &[]) };
            }
            product(&mut want, n, a, b, Mode::Write);
            assert_eq!(onto, want, "{m} x {k} x {n}, in two parts");
        }
    }

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
            (1030, 40, 300),
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
        for (m, n, k) in [(14, 100, 70), (6, 64, 1100), (1, 17, 513), (1031, 20, 260)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let mut turned = vec![0.0; m * k];
            (0..m * k).for_each(|at| turned[at % k * m + at / k] = a[at]);
            let chain = |i: usize, j: usize| {
                (0..k).fold(0.0f32, |sum, p| a[i * k + p].mul_add(b[p * n + j], sum))
            };
            let want: Vec<f32> = (0..m * n).map(|at| chain(at / n, at % n)).collect();
            crate::isa::on_each_isa(|isa| {
                let (ma, mb) = (Mat::rows(&a, m, k, k), Mat::rows(&b, k, n, n));
                let mut c = vec![f32::NAN; m * n];
                product(&mut c, n, ma, mb, Mode::Write);
                assert!(c == want, "{m} {n} {k} {isa:?}");
                let columns = Mat::rows(&turned, k, m, m).t();
                product(&mut c, n, columns, mb, Mode::Write);
                assert!(c == want, "{m} {n} {k} {isa:?}, transposed");
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
            crate::isa::on_each_isa(|isa| {
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
