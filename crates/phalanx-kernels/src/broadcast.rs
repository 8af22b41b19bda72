//! Arithmetic of two arrays with broadcasting, as in NumPy and PyTorch: aligned at the
//! last dimension, sizes of 1 repeat.

use super::reduce::RANK;
use crate::par::{PIECE, ThreadPool};

/// An operation on two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`
    Div,
}

/// A common shape, and the steps of both operands through it.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// The common shape, in the first `rank` places.
    pub shape: [usize; RANK],
    /// Number of dimensions.
    pub rank: usize,
    a: [usize; RANK],
    b: [usize; RANK],
}

/// Steps of an array of `shape` through dimensions aligned at the last; 0 where it repeats.
fn steps(shape: &[usize], rank: usize) -> [usize; RANK] {
    let mut all = [0; RANK];
    let mut step = 1;
    for (i, &n) in shape.iter().enumerate().rev() {
        all[rank - shape.len() + i] = if n == 1 { 0 } else { step };
        step *= n;
    }
    all
}

impl Stretch {
    /// `None` when two sizes differ and neither is 1.
    pub fn of(a: &[usize], b: &[usize]) -> Option<Self> {
        let rank = a.len().max(b.len());
        let size = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |i| s[i]);
        let mut shape = [1; RANK];
        for (i, to) in shape.iter_mut().enumerate().take(rank) {
            *to = match (size(a, i), size(b, i)) {
                (1, n) | (n, 1) => n,
                (n, m) if n == m => n,
                _ => return None,
            };
        }
        Some(Stretch {
            shape,
            rank,
            a: steps(a, rank),
            b: steps(b, rank),
        })
    }

    /// The common shape.
    pub fn dims(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Where row `row` of the last dimension starts in both operands.
    fn offsets(&self, mut row: usize) -> (usize, usize) {
        let (mut a, mut b) = (0, 0);
        for i in (0..self.rank.saturating_sub(1)).rev() {
            let at = row % self.shape[i];
            row /= self.shape[i];
            a += at * self.a[i];
            b += at * self.b[i];
        }
        (a, b)
    }
}

#[inline(always)]
fn zip(
    to: &mut [f32],
    a: &[f32],
    b: &[f32],
    (sa, sb): (usize, usize),
    f: impl Fn(f32, f32) -> f32,
) {
    let n = to.len();
    match (sa, sb) {
        (0, 0) => to.fill(f(a[0], b[0])),
        (0, _) => {
            let a = a[0];
            to.iter_mut().zip(&b[..n]).for_each(|(t, &b)| *t = f(a, b));
        }
        (_, 0) => {
            let b = b[0];
            to.iter_mut().zip(&a[..n]).for_each(|(t, &a)| *t = f(a, b));
        }
        _ => {
            for ((t, &a), &b) in to.iter_mut().zip(&a[..n]).zip(&b[..n]) {
                *t = f(a, b);
            }
        }
    }
}

simd! {
    fn row(op: Arithmetic, to: &mut [f32], a: &[f32], b: &[f32], steps: (usize, usize)) {
        match op {
            Arithmetic::Add => zip(to, a, b, steps, |a, b| a + b),
            Arithmetic::Sub => zip(to, a, b, steps, |a, b| a - b),
            Arithmetic::Mul => zip(to, a, b, steps, |a, b| a * b),
            Arithmetic::Div => zip(to, a, b, steps, |a, b| a / b),
        }
    }
}

/// `out = a op b`, of the common shape.
pub fn arithmetic(
    threads: &ThreadPool,
    op: Arithmetic,
    s: &Stretch,
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
) {
    if s.a == s.b {
        // The same shape: one row.
        return threads.split(out, PIECE, |at, to| {
            let range = at..at + to.len();
            row(op, to, &a[range.clone()], &b[range], (1, 1));
        });
    }
    let (inner, last) = match s.rank {
        0 => (1, 0),
        n => (s.shape[n - 1], n - 1),
    };
    let steps = (s.a[last], s.b[last]);
    let inner = inner.max(1);
    threads.split(out, (PIECE / inner).max(1) * inner, |at, to| {
        for (i, to) in to.chunks_exact_mut(inner).enumerate() {
            let (from_a, from_b) = s.offsets(at / inner + i);
            row(op, to, &a[from_a..], &b[from_b..], steps);
        }
    });
}
