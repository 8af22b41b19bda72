//! Sums and maxima over some dimensions of an array.
//!
//! *Order*: one result belongs to one thread. Along the last dimension sixteen
//! sums run side by side and are folded in order; over other dimensions elements
//! are added in memory order. Sums are made in f64 and rounded once.

use crate::par::ThreadPool;
use crate::squares::sum_in_lanes;

/// Dimensions at most.
pub const RANK: usize = 6;
/// Columns whose results stay in registers.
const COLUMNS: usize = 32;

/// The operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// The sum times a factor (of the call).
    Sum,
    /// The largest; NaN if there is one.
    Max,
}

/// Dimensions of one kind: sizes and steps, outermost first.
#[derive(Clone, Copy, Default)]
struct Walk {
    size: [usize; RANK],
    step: [usize; RANK],
    rank: usize,
}

impl Walk {
    fn push(&mut self, size: usize, step: usize) {
        self.size[self.rank] = size;
        self.step[self.rank] = step;
        self.rank += 1;
    }

    fn count(&self) -> usize {
        self.size[..self.rank].iter().product()
    }

    fn offset(&self, mut index: usize) -> usize {
        let mut at = 0;
        for i in (0..self.rank).rev() {
            at += index % self.size[i] * self.step[i];
            index /= self.size[i];
        }
        at
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if (b > a) | b.is_nan() { b } else { a }
}

simd! {
    /// The fold of one run of memory.
    fn run(fold: Fold, x: &[f32]) -> f64 {
        match fold {
            Fold::Sum => sum_in_lanes(x, |v| v),
            Fold::Max => f64::from(x.iter().fold(f32::NEG_INFINITY, |m, &v| larger(m, v))),
        }
    }
}

simd! {
    fn add_row(sums: &mut [f64], row: &[f32]) {
        for (s, &v) in sums.iter_mut().zip(row) {
            *s += f64::from(v);
        }
    }
}

simd! {
    fn max_row(most: &mut [f64], row: &[f32]) {
        for (m, &v) in most.iter_mut().zip(row) {
            *m = f64::from(larger(*m as f32, v));
        }
    }
}

/// Folds the dimensions marked in `over`; `out` has the others' elements.
pub fn reduce(
    threads: &ThreadPool,
    (fold, factor): (Fold, f64),
    x: &[f32],
    shape: &[usize],
    over: &[bool],
    out: &mut [f32],
) {
    let (mut kept, mut gone, mut step) = (Walk::default(), Walk::default(), 1);
    let mut steps = [0; RANK];
    for i in (0..shape.len()).rev() {
        steps[i] = step;
        step *= shape[i];
    }
    for i in 0..shape.len() {
        let walk = if over[i] { &mut gone } else { &mut kept };
        if shape[i] != 1 {
            walk.push(shape[i], steps[i]);
        }
    }
    let start = match fold {
        Fold::Sum => 0.0,
        Fold::Max => f64::NEG_INFINITY,
    };
    let last = |w: &Walk| w.rank > 0 && w.step[w.rank - 1] == 1;
    if last(&kept) {
        // Whole rows join whole rows.
        let inner = kept.size[kept.rank - 1];
        let count = gone.count();
        threads.split(out, inner.max(1), |at, to| {
            let from = kept.offset(at);
            for (c, to) in to.chunks_mut(COLUMNS).enumerate() {
                let mut all = [start; COLUMNS];
                let all = &mut all[..to.len()];
                for i in 0..count {
                    let row = &x[from + gone.offset(i) + c * COLUMNS..][..to.len()];
                    match fold {
                        Fold::Sum => add_row(all, row),
                        Fold::Max => max_row(all, row),
                    }
                }
                for (t, &v) in to.iter_mut().zip(&*all) {
                    *t = (v * factor) as f32;
                }
            }
        });
        return;
    }
    // The last dimension goes (or there is none at all): runs of memory.
    let inner = if last(&gone) {
        gone.rank -= 1;
        gone.size[gone.rank]
    } else {
        1
    };
    let count = gone.count();
    let piece = (crate::par::PIECE / (inner * count).max(1)).max(1);
    threads.split(out, piece, |at, to| {
        for (i, to) in to.iter_mut().enumerate() {
            let from = kept.offset(at + i);
            let mut all = start;
            for r in 0..count {
                let part = run(fold, &x[from + gone.offset(r)..][..inner]);
                all = match fold {
                    Fold::Sum => all + part,
                    Fold::Max => f64::from(larger(all as f32, part as f32)),
                };
            }
            *to = (all * factor) as f32;
        }
    });
}
