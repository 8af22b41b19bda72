//! Softmax and its logarithm along one dimension of an array of (outer, n, inner).
//!
//! *Order*: exponentials in f32, their sums in f64: along contiguous rows in sixteen lanes that are added in pairs (of
//! log-softmax, and in backward, 64 terms at a time), else in order.

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

/// Rows at most that go through each pass together: the passes over a single row would wait for each other.
const TOGETHER: usize = 64;
/// Elements at most of these rows, unless one row has more.
const NEAR: usize = 4096;

simd! {
    /// Softmax of rows of `width`, in place. Elements that are not open become 0; with `log`, all must be open.
    pub(super) fn rows(y: &mut [f32], width: usize, open: Open, log: bool) {
        debug_assert!(!log || open.first == width);
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
                let (blocks, rest) = y[..of_row(i).1].as_chunks_mut::<LANES>();
                for block in blocks {
                    block.iter_mut().for_each(|v| *v = exp_normal(*v - most));
                }
                rest.iter_mut().for_each(|v| *v = exp_normal(*v - most));
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
    /// The largest number of a row, and the sum of `exp(x - largest)` over the row.
    pub fn exponentials(x: &[f32]) -> (f32, f64) {
        let most = most_of(x);
        (most, sum_of_pairs(x, x, |v, _| exp_normal(v - most)))
    }
}

simd! {
    /// In place: `factor e^(x - most)`.
    pub fn scaled_exponentials(x: &mut [f32], most: f32, factor: f32) {
        for v in x {
            *v = factor * exp_normal(*v - most);
        }
    }
}

/// Runs `f(row, its elements)` for all rows, which are as many as there are `losses`, and keeps what it returns there.
pub fn class_rows(
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
pub fn forward(threads: &ThreadPool, y: &mut [f32], n: usize, inner: usize, log: bool) {
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
            // Where the sum is not finite, they are not 0.
            d[open..].fill(0.0);
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
pub fn backward(
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;
    use crate::par::Threads;
    use crate::scalar::noise;

    /// In f64, of the first `open` numbers; 0 elsewhere.
    fn softmax(x: &[f32], open: usize) -> Vec<f64> {
        let most = x[..open].iter().fold(f64::MIN, |m, &v| m.max(v.into()));
        let all = x.iter().enumerate();
        let mut y: Vec<f64> = all
            .map(|(i, &v)| {
                if i < open {
                    (f64::from(v) - most).exp()
                } else {
                    0.0
                }
            })
            .collect();
        let sum: f64 = y.iter().sum();
        y.iter_mut().for_each(|y| *y /= sum);
        y
    }

    #[test]
    fn rows_of_every_width_are_right_and_equal_on_every_instruction_set() {
        for width in [1, 15, 16, 17, 65, 257, 5000] {
            let count = 70.min(20_000 / width);
            for more in [0, 1] {
                let first = if more == 0 { width } else { 1 };
                let open = Open { first, more };
                let x: Vec<f32> = noise(count * width, 1)
                    .iter()
                    .map(|v| 1000.0 + 8.0 * v)
                    .collect();
                let dy = noise(count * width, 2);
                let mut bits: Option<Vec<f32>> = None;
                on_each_isa(|isa| {
                    let mut y = x.clone();
                    rows(&mut y, width, open, false);
                    let mut d = dy.clone();
                    rows_backward(&y, &mut d, width, open, false);
                    let mut logs = x.clone();
                    let threads = ThreadPool::new(Threads(3));
                    forward(&threads, &mut logs, width, 1, true);
                    let mut log_d = dy.clone();
                    backward(&threads, &logs, &mut log_d, (width, 1), true);
                    for row in 0..count {
                        let at = row * width..(row + 1) * width;
                        let (x, dy) = (&x[at.clone()], &dy[at.clone()]);
                        let seen = (open.first + row * more).min(width);
                        let want = softmax(x, seen);
                        let sum: f64 = want.iter().zip(dy).map(|(y, &d)| y * f64::from(d)).sum();
                        for i in 0..width {
                            let (y, d) = (y[at.start + i], d[at.start + i]);
                            let slope = want[i] * (f64::from(dy[i]) - sum);
                            assert!((f64::from(y) - want[i]).abs() < 1e-6, "{width} {isa:?}");
                            assert!((f64::from(d) - slope).abs() < 1e-6, "{width} {isa:?}");
                            assert!(i < seen || (y, d) == (0.0, 0.0));
                        }
                        let want = softmax(x, width);
                        let sum: f64 = dy.iter().map(|&d| f64::from(d)).sum();
                        for i in 0..width {
                            let error = f64::from(logs[at.start + i]) - want[i].ln();
                            assert!(error.abs() < 2e-6, "{width} {isa:?}: {error}");
                            let slope = f64::from(dy[i]) - want[i] * sum;
                            let error = f64::from(log_d[at.start + i]) - slope;
                            assert!(error.abs() < 3e-5, "{width} {isa:?}: {error}");
                        }
                    }
                    let now = [y, d, logs, log_d].concat();
                    assert!(
                        bits.get_or_insert_with(|| now.clone()) == &now,
                        "{width} {isa:?}"
                    );
                });
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_stay_in_their_row_and_its_open_part() {
        let (width, open) = (20, Open { first: 5, more: 0 });
        let mut y = noise(4 * width, 1);
        (y[3], y[width]) = (f32::NAN, f32::INFINITY);
        y[2 * width..3 * width].fill(f32::NEG_INFINITY);
        rows(&mut y, width, open, false);
        for (row, y) in y.chunks_exact(width).enumerate() {
            assert_eq!(y[..5].iter().all(|v| v.is_nan()), row < 3, "{row}");
            assert_eq!(y[5..], [0.0; 15]);
        }
        let mut d = vec![f32::INFINITY; width];
        rows_backward(&y[3 * width..], &mut d, width, open, false);
        assert_eq!(d[5..], [0.0; 15]);
    }
}
