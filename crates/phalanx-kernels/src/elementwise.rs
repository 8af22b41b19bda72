//! Element-wise passes.

use super::element::Element;
use crate::par::{PIECE, ThreadPool};

simd! {
    fn add_piece<T: Element, F: Element>(into: &mut [T], from: &[F]) {
        for (a, b) in into.iter_mut().zip(from) {
            *a = T::of(a.wide() + b.wide());
        }
    }
}

simd! {
    fn scale_piece(data: &mut [f32], factor: f32) {
        for v in data {
            *v *= factor;
        }
    }
}

/// Bounds of an activation; NaN where there is none, as every comparison with it is false.
#[derive(Clone, Copy, Debug)]
pub struct Clip {
    /// Lower bound.
    pub low: f32,
    /// Upper bound.
    pub high: f32,
}

impl Clip {
    /// `v` inside the bounds; NaN stays.
    #[inline(always)]
    pub fn apply(self, v: f32) -> f32 {
        let v = if v < self.low { self.low } else { v };
        if v > self.high { self.high } else { v }
    }

    /// Whether `v`, before or after clipping, lets no gradient through.
    #[inline(always)]
    pub fn closed(self, v: f32) -> bool {
        (v <= self.low) | (v >= self.high)
    }
}

simd! {
    fn clip_piece(y: &mut [f32], clip: Clip) {
        for v in y {
            *v = clip.apply(*v);
        }
    }
}

simd! {
    fn clip_backward_piece(y: &[f32], dy: &mut [f32], clip: Clip) {
        for (d, &v) in dy.iter_mut().zip(y) {
            *d = if clip.closed(v) { 0.0 } else { *d };
        }
    }
}

/// In place: values outside the bounds become the bounds.
pub fn clip(threads: &ThreadPool, y: &mut [f32], clip: Clip) {
    threads.split(y, PIECE, |_, p| clip_piece(p, clip));
}

/// In place: the gradient passes where the output `y` is inside the bounds.
pub fn clip_backward(threads: &ThreadPool, y: &[f32], dy: &mut [f32], clip: Clip) {
    threads.split(dy, PIECE, |at, p| {
        clip_backward_piece(&y[at..at + p.len()], p, clip)
    });
}

/// `into += from`, rounded to what they are.
#[inline(never)]
pub fn add<T: Element, F: Element>(threads: &ThreadPool, into: &mut [T], from: &[F]) {
    threads.split(into, PIECE, |at, p| add_piece(p, &from[at..at + p.len()]));
}

/// `data *= factor`.
pub fn scale(threads: &ThreadPool, data: &mut [f32], factor: f32) {
    threads.split(data, PIECE, |_, p| scale_piece(p, factor));
}

/// Folds equal-sized partial sums in order: `out (+)= ((p0 + p1) + p2) + …`.
pub fn fold(threads: &ThreadPool, partials: &[f32], out: &mut [f32], mode: super::Mode) {
    let len = out.len();
    threads.split(out, PIECE, |at, piece| {
        let size = piece.len();
        let part = |i: usize| &partials[i * len + at..i * len + at + size];
        let count = partials.len().checked_div(len).unwrap_or(0);
        match mode {
            super::Mode::Write if count > 0 => {
                piece.copy_from_slice(part(0));
                (1..count).for_each(|i| add_piece(piece, part(i)));
            }
            super::Mode::Write => piece.fill(0.0),
            // The sum of this use is computed first, then added: the same bits as two
            // backward passes whose gradients are added.
            super::Mode::Add if count > 0 => crate::par::scratch(size, |sum| {
                sum.copy_from_slice(part(0));
                (1..count).for_each(|i| add_piece(sum, part(i)));
                add_piece(piece, sum);
            }),
            super::Mode::Add => {}
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mode;
    use crate::par::Threads;

    #[test]
    fn fold_is_in_order_and_survives_no_partials() {
        let threads = ThreadPool::new(Threads(1));
        let mut out = [5.0, 5.0];
        fold(&threads, &[1.0, 2.0, 3.0, 4.0], &mut out, Mode::Write);
        assert_eq!(out, [4.0, 6.0]);
        fold(&threads, &[1.0, 2.0, 3.0, 4.0], &mut out, Mode::Add);
        assert_eq!(out, [8.0, 12.0]);
        fold(&threads, &[], &mut out, Mode::Add);
        assert_eq!(out, [8.0, 12.0]);
        fold(&threads, &[], &mut out, Mode::Write);
        assert_eq!(out, [0.0, 0.0]);
    }
}
