//! Softmax and its logarithm along one dimension of an array of (outer, n, inner).
//!
//! *Order*: along contiguous rows sums run in sixteen lanes, else in order; in f64.

use super::math::{LANES, exp_normal, fold_lanes, sum_of, sum_of_pairs};
use crate::par::{Disjoint, PIECE, ThreadPool};

/// Columns that go side by side.
const COLUMNS: usize = 32;

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest number. NaN is passed over: the sum of exponentials has it.
#[inline(always)]
fn most_of(y: &[f32]) -> f32 {
    let (blocks, rest) = y.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for (l, &v) in lanes.iter_mut().zip(block) {
            *l = larger(*l, v);
        }
    }
    let most = fold_lanes(lanes, larger);
    rest.iter().fold(most, |m, &v| larger(m, v))
}

/// How many elements of the rows of a block count, the first ones.
#[derive(Clone, Copy)]
pub(super) struct Open {
    /// Of the first row.
    pub(super) first: usize,
    /// By how many each row has more than the one before.
    pub(super) more: usize,
}

impl Open {
    /// All of rows of `width`.
    fn all(width: usize) -> Self {
        Open {
            first: width,
            more: 0,
        }
    }

    /// Elements of row `i` of `width` that count, and with them those that are filled up to whole vectors.
    #[inline(always)]
    fn of_row(self, i: usize, width: usize) -> (usize, usize) {
        let open = (self.first + i * self.more).min(width);
        (open, open.next_multiple_of(LANES).min(width))
    }
}

/// Rows that go through each pass together, as passes over one row wait for their own results.
const TOGETHER: usize = 64;
/// Elements of them.
const NEAR: usize = 4096;

simd! {
    /// Rows of `width`, in place. What is not open becomes 0.
    pub(super) fn rows(y: &mut [f32], width: usize, open: Open, log: bool) {
        let together = (NEAR / width).clamp(1, TOGETHER);
        let mut most = [0.0f32; TOGETHER];
        let mut sums = [0.0f64; TOGETHER];
        for (block, y) in y.chunks_mut(together * width).enumerate() {
            let of_row = |i: usize| open.of_row(block * together + i, width);
            for (i, (y, most)) in y.chunks_exact_mut(width).zip(&mut most).enumerate() {
                let (open, filled) = of_row(i);
                y[open..filled].fill(f32::NEG_INFINITY);
                *most = most_of(&y[..filled]);
            }
            if log {
                for ((y, &most), sum) in y.chunks_exact(width).zip(&most).zip(&mut sums) {
                    *sum = sum_of_pairs(y, y, |v, _| exp_normal(v - most)).ln();
                }
                for ((y, &most), &sum) in y.chunks_exact_mut(width).zip(&most).zip(&sums) {
                    for v in y {
                        *v = (f64::from(*v - most) - sum) as f32;
                    }
                }
                continue;
            }
            for (i, (y, &most)) in y.chunks_exact_mut(width).zip(&most).enumerate() {
                for v in &mut y[..of_row(i).1] {
                    *v = exp_normal(*v - most);
                }
            }
            for (i, (y, sum)) in y.chunks_exact(width).zip(&mut sums).enumerate() {
                *sum = sum_of(&y[..of_row(i).1], f64::from);
            }
            for (i, (y, &sum)) in y.chunks_exact_mut(width).zip(&sums).enumerate() {
                let (open, filled) = of_row(i);
                let factor = (1.0 / sum) as f32;
                for v in &mut y[..filled] {
                    *v *= factor;
                }
                y[open..].fill(0.0);
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
                *s += f64::from(exp_normal(v - m));
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
                    exp_normal(*v - m) * *s as f32
                };
            }
        }
    }
}

simd! {
    /// The largest number of a row, and the sum of the exponentials of all numbers less that.
    pub(crate) fn exponentials(x: &[f32]) -> (f32, f64) {
        let most = most_of(x);
        (most, sum_of_pairs(x, x, |v, _| exp_normal(v - most)))
    }
}

simd! {
    /// In place: `factor e^(x - most)`.
    pub(crate) fn scaled_exponentials(x: &mut [f32], most: f32, factor: f32) {
        for v in x {
            *v = factor * exp_normal(*v - most);
        }
    }
}

/// Runs `f(row, its elements)` for all rows, which are as many as there are `losses`, and keeps what it returns there.
pub(crate) fn class_rows(
    threads: &ThreadPool,
    data: &mut [f32],
    losses: &mut [f64],
    f: impl Fn(usize, &mut [f32]) -> f64 + Sync,
) {
    let classes = data.len() / losses.len().max(1);
    let data = Disjoint::new(data);
    threads.split(
        losses,
        piece(classes.max(1), 1) / classes.max(1),
        |first, losses| {
            for (row, loss) in (first..).zip(losses) {
                // SAFETY: this row belongs to this piece.
                let of_row = unsafe { data.range(row * classes..(row + 1) * classes) };
                *loss = f(row, of_row);
            }
        },
    );
}

/// Elements of a piece of work: one block of `n` times `inner`, or some rows.
fn piece(n: usize, inner: usize) -> usize {
    if inner == 1 {
        return n * (PIECE / 4 / n).max(1);
    }
    n * inner
}

/// In place along `n` of (outer, n, inner); `log`: its logarithm.
pub(crate) fn forward(threads: &ThreadPool, y: &mut [f32], n: usize, inner: usize, log: bool) {
    if y.is_empty() {
        return;
    }
    threads.split(y, piece(n, inner), |_, y| {
        if inner == 1 {
            return rows(y, n, Open::all(n), log);
        }
        (0..inner)
            .step_by(COLUMNS)
            .for_each(|at| columns(y, inner, at, log));
    });
}

simd! {
    /// `d` of rows of `width` becomes the input's gradient; 0 where it is not open.
    pub(super) fn rows_backward(y: &[f32], d: &mut [f32], width: usize, open: Open, log: bool) {
        let rows = y.chunks_exact(width).zip(d.chunks_exact_mut(width));
        for (i, (y, d)) in rows.enumerate() {
            let (open, filled) = open.of_row(i, width);
            d[open..].fill(0.0);
            let (y, d) = (&y[..filled], &mut d[..filled]);
            if log {
                let sum = sum_of(d, f64::from) as f32;
                for (d, &y) in d.iter_mut().zip(y) {
                    *d = (-exp_normal(y)).mul_add(sum, *d);
                }
            } else {
                let sum = sum_of_pairs(d, y, |d, y| d * y) as f32;
                for (d, &y) in d.iter_mut().zip(y) {
                    *d = y * (*d - sum);
                }
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
                *d = if log { (-exp_normal(y)).mul_add(s, *d) } else { y * (*d - s) };
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
    threads.split(dy, piece(n, inner), |at, d| {
        let y = &y[at..at + d.len()];
        if inner == 1 {
            return rows_backward(y, d, n, Open::all(n), log);
        }
        (0..inner)
            .step_by(COLUMNS)
            .for_each(|at| columns_backward(y, d, inner, at, log));
    });
}
