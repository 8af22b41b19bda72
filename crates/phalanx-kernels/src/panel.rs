//! Products of matrices that lie in panels of sixteen columns: `[columns / 16][rows][16]`.
//!
//! Row blocks stay in registers while the inner dimension runs; all strides in
//! the inner loop are constants. *Order*: an element is one chain of fused
//! multiply-adds over the inner dimension, continued in memory when `add` is set:
//! neither blocking nor vector width nor the place of a cut can change a bit.

use super::vector::{LANES, Vector};

/// `c[r][k] (+)= sum over i of a[r][i] * b[i][k]`.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    pub a: *const f32,
    /// Floats from one panel of `a` to the next.
    pub a_panel: usize,
    pub b: *const f32,
    pub b_panel: usize,
    pub c: *mut f32,
    pub c_panel: usize,
    /// Rows of `c`: rows of `a` for [`multiply`], sixteen times its panels for [`multiply_transposed`].
    pub rows: usize,
    /// Inner dimension: sixteen times the panels of `a` for [`multiply`], its rows for [`multiply_transposed`].
    pub depth: usize,
    /// Panels of `b` and `c`.
    pub columns: usize,
    pub add: bool,
}

/// `len` steps of an `M` x `16 N` block: element (r, i) of `a` lies at
/// `r * ROW + i * STEP`, row i of `b` at `16 i`.
#[inline(always)]
unsafe fn steps<V: Vector, const M: usize, const N: usize, const ROW: usize, const STEP: usize>(
    sums: &mut [[V; N]; M],
    a: *const f32,
    b: *const f32,
    b_panel: usize,
    len: usize,
) {
    for i in 0..len {
        // SAFETY: the caller's blocks hold `len` steps.
        unsafe {
            let mut row = [V::splat(0.0); N];
            for (j, r) in row.iter_mut().enumerate() {
                *r = V::load(b.add(j * b_panel + i * LANES));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let v = V::splat(*a.add(m * ROW + i * STEP));
                for (s, &r) in sums.iter_mut().zip(&row) {
                    *s = v.fma(r, *s);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn begin<V: Vector, const M: usize, const N: usize>(
    c: *const f32,
    c_panel: usize,
    add: bool,
) -> [[V; N]; M] {
    // SAFETY: the block of `c` is valid.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        if add {
            for (m, sums) in sums.iter_mut().enumerate() {
                for (j, s) in sums.iter_mut().enumerate() {
                    *s = V::load(c.add(j * c_panel + m * LANES));
                }
            }
        }
        sums
    }
}

#[inline(always)]
unsafe fn end<V: Vector, const M: usize, const N: usize>(
    sums: [[V; N]; M],
    c: *mut f32,
    c_panel: usize,
) {
    for (m, sums) in sums.iter().enumerate() {
        for (j, s) in sums.iter().enumerate() {
            // SAFETY: the block of `c` is valid.
            unsafe { s.store(c.add(j * c_panel + m * LANES)) };
        }
    }
}

#[inline(always)]
unsafe fn rows<V: Vector, const M: usize, const N: usize>(p: &Panels, r: usize, j: usize) {
    // SAFETY: rows r .. r + M and panels j .. j + N lie in the matrices.
    unsafe {
        let c = p.c.add(j * p.c_panel + r * LANES);
        let mut sums = begin::<V, M, N>(c, p.c_panel, p.add);
        let mut a = p.a.add(r * LANES);
        let mut b = p.b.add(j * p.b_panel);
        for _ in 0..p.depth / LANES {
            steps::<V, M, N, LANES, 1>(&mut sums, a, b, p.b_panel, LANES);
            a = a.add(p.a_panel);
            b = b.add(LANES * LANES);
        }
        end(sums, c, p.c_panel);
    }
}

#[inline(always)]
unsafe fn columns<V: Vector, const N: usize>(p: &Panels, j: usize) {
    let mut r = 0;
    // SAFETY: only whole blocks of rows that exist.
    unsafe {
        while p.rows - r >= 10 || p.rows - r == 6 {
            rows::<V, 6, N>(p, r, j);
            r += 6;
        }
        // Two blocks share the last seven to nine rows: thin ones would wait for their sums.
        let left = p.rows - r;
        if left == 5 || left == 9 {
            rows::<V, 5, N>(p, r, j);
            r += 5;
        }
        while p.rows - r >= 4 {
            rows::<V, 4, N>(p, r, j);
            r += 4;
        }
        match p.rows - r {
            3 => rows::<V, 3, N>(p, r, j),
            2 => rows::<V, 2, N>(p, r, j),
            1 => rows::<V, 1, N>(p, r, j),
            _ => {}
        }
    }
}

#[inline(always)]
unsafe fn multiply_body<V: Vector>(p: &Panels) {
    let mut j = 0;
    // SAFETY: only panels that exist.
    unsafe {
        while V::SPAN >= 4 && j + 4 <= p.columns {
            columns::<V, 4>(p, j);
            j += 4;
        }
        while j < p.columns {
            columns::<V, 1>(p, j);
            j += 1;
        }
    }
}

vectorised! {
    /// The product; `depth` is a multiple of sixteen.
    ///
    /// # Safety
    /// The three matrices are valid for their sizes, and `c` is touched by no other code.
    pub(crate) unsafe fn multiply(p: &Panels) = multiply_body
}

#[inline(always)]
unsafe fn transposed_rows<V: Vector, const M: usize, const N: usize>(
    p: &Panels,
    r: usize,
    j: usize,
) {
    // SAFETY: rows r .. r + M lie in one panel of `a`, panels j .. j + N in `b` and `c`.
    unsafe {
        let c = p.c.add(j * p.c_panel + r * LANES);
        let a = p.a.add(r / LANES * p.a_panel + r % LANES);
        let mut sums = begin::<V, M, N>(c, p.c_panel, p.add);
        steps::<V, M, N, 1, LANES>(&mut sums, a, p.b.add(j * p.b_panel), p.b_panel, p.depth);
        end(sums, c, p.c_panel);
    }
}

#[inline(always)]
unsafe fn transposed_body<V: Vector>(p: &Panels) {
    let mut j = 0;
    // SAFETY: only blocks that exist; rows are a multiple of sixteen.
    unsafe {
        while V::SPAN >= 4 && j + 2 <= p.columns {
            for r in (0..p.rows).step_by(8) {
                transposed_rows::<V, 8, 2>(p, r, j);
            }
            j += 2;
        }
        while j < p.columns {
            for r in (0..p.rows).step_by(4) {
                transposed_rows::<V, 4, 1>(p, r, j);
            }
            j += 1;
        }
    }
}

vectorised! {
    /// `c[r][k] (+)= sum over i of a[i][r] * b[i][k]`: `a` enters transposed;
    /// `rows` is a multiple of sixteen.
    ///
    /// # Safety
    /// As [`multiply`].
    pub(crate) unsafe fn multiply_transposed(p: &Panels) = transposed_body
}
