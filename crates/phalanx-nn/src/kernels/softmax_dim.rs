//! Softmax and its logarithm along one dimension of an array of (outer, n, inner).
//!
//! *Order*: along contiguous rows sums run in sixteen lanes, else in order; in f64.

use super::math::exp;
use crate::par::ThreadPool;

const LANES: usize = 16;
/// Columns that go side by side.
const COLUMNS: usize = 32;

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if (b > a) | b.is_nan() { b } else { a }
}

/// The largest number, or NaN.
#[inline(always)]
fn most_of(y: &[f32]) -> f32 {
    let (blocks, rest) = y.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for (l, &v) in lanes.iter_mut().zip(block) {
            *l = larger(*l, v);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |m, &v| larger(m, v))
}

/// Sixteen partial sums, folded in order.
#[inline(always)]
fn sum_of(len: usize, term: impl Fn(usize) -> f32) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let whole = len / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        for (i, l) in lanes.iter_mut().enumerate() {
            *l += f64::from(term(at + i));
        }
    }
    for (i, l) in (whole..len).zip(&mut lanes) {
        *l += f64::from(term(i));
    }
    lanes.iter().sum()
}

simd! {
    /// One row, in place.
    pub(super) fn row(y: &mut [f32], log: bool) {
        let most = most_of(y);
        if log {
            let sum = sum_of(y.len(), |i| exp(y[i] - most));
            let shift = sum.ln();
            for v in y {
                *v = (f64::from(*v - most) - shift) as f32;
            }
        } else {
            for v in y.iter_mut() {
                *v = exp(*v - most);
            }
            let sum = sum_of(y.len(), |i| y[i]);
            let factor = (1.0 / sum) as f32;
            for v in y {
                *v *= factor;
            }
        }
    }
}

simd! {
    /// `block` holds `n` rows of `inner`; columns `at ..` of at most [`COLUMNS`].
    fn columns(block: &mut [f32], inner: usize, at: usize, log: bool) {
        let w = COLUMNS.min(inner - at);
        let mut most = [f32::NEG_INFINITY; COLUMNS];
        for row in block.chunks_exact(inner) {
            for (m, &v) in most.iter_mut().zip(&row[at..at + w]) {
                *m = larger(*m, v);
            }
        }
        let mut sums = [0.0f64; COLUMNS];
        for row in block.chunks_exact(inner) {
            for ((s, &m), &v) in sums.iter_mut().zip(&most).zip(&row[at..at + w]) {
                *s += f64::from(exp(v - m));
            }
        }
        for s in &mut sums[..w] {
            *s = if log { s.ln() } else { 1.0 / *s };
        }
        for row in block.chunks_exact_mut(inner) {
            for ((s, &m), v) in sums.iter().zip(&most).zip(&mut row[at..at + w]) {
                *v = if log {
                    (f64::from(*v - m) - s) as f32
                } else {
                    exp(*v - m) * *s as f32
                };
            }
        }
    }
}

/// In place along `n` of (outer, n, inner); `log`: its logarithm.
pub(crate) fn forward(threads: &ThreadPool, y: &mut [f32], n: usize, inner: usize, log: bool) {
    if y.is_empty() {
        return;
    }
    threads.split(y, n * inner, |_, y| {
        if inner == 1 {
            return row(y, log);
        }
        (0..inner)
            .step_by(COLUMNS)
            .for_each(|at| columns(y, inner, at, log));
    });
}

simd! {
    /// `d` of one row becomes the input's gradient.
    pub(super) fn row_backward(y: &[f32], d: &mut [f32], log: bool) {
        if log {
            let sum = sum_of(d.len(), |i| d[i]) as f32;
            for (d, &y) in d.iter_mut().zip(y) {
                *d = (-exp(y)).mul_add(sum, *d);
            }
        } else {
            let sum = sum_of(d.len(), |i| d[i] * y[i]) as f32;
            for (d, &y) in d.iter_mut().zip(y) {
                *d = y * (*d - sum);
            }
        }
    }
}

simd! {
    fn columns_backward(y: &[f32], d: &mut [f32], inner: usize, at: usize, log: bool) {
        let w = COLUMNS.min(inner - at);
        let mut sums = [0.0f64; COLUMNS];
        for (y, d) in y.chunks_exact(inner).zip(d.chunks_exact(inner)) {
            for ((s, &y), &d) in sums.iter_mut().zip(&y[at..at + w]).zip(&d[at..at + w]) {
                *s += f64::from(if log { d } else { d * y });
            }
        }
        for (y, d) in y.chunks_exact(inner).zip(d.chunks_exact_mut(inner)) {
            for ((s, &y), d) in sums.iter().zip(&y[at..at + w]).zip(&mut d[at..at + w]) {
                let s = *s as f32;
                *d = if log { (-exp(y)).mul_add(s, *d) } else { y * (*d - s) };
            }
        }
    }
}

/// `dy` becomes the input's gradient; `y` is the output.
pub(crate) fn backward(
    threads: &ThreadPool,
    y: &[f32],
    dy: &mut [f32],
    (n, inner): (usize, usize),
    log: bool,
) {
    if y.is_empty() {
        return;
    }
    threads.split(dy, n * inner, |at, d| {
        let y = &y[at..at + d.len()];
        if inner == 1 {
            return row_backward(y, d, log);
        }
        (0..inner)
            .step_by(COLUMNS)
            .for_each(|at| columns_backward(y, d, inner, at, log));
    });
}
