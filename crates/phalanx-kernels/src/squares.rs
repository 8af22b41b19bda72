//! Sums of squares.

use crate::par::ThreadPool;
use crate::vector::LANES;

/// Pieces of a gradient at most.
const PIECES: usize = 64;
/// Elements of a piece at least.
const PIECE: usize = 1 << 16;

/// The sum of `term` of each element: sixteen sums side by side, folded in order.
#[inline(always)]
pub(crate) fn sum_in_lanes(x: &[f32], term: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (rows, rest) = x.as_chunks::<LANES>();
    for row in rows {
        for (l, &v) in lanes.iter_mut().zip(row) {
            *l += term(f64::from(v));
        }
    }
    for (l, &v) in lanes.iter_mut().zip(rest) {
        *l += term(f64::from(v));
    }
    lanes.iter().sum()
}

simd! {
    fn squares(g: &[f32]) -> f64 {
        sum_in_lanes(g, |v| v * v)
    }
}

/// The sum of all squares.
///
/// *Order*: at most 64 pieces, none but the last of fewer than 65,536 elements; sixteen sums per piece, folded in order;
/// pieces in order; in f64.
pub fn sum_of_squares(threads: &ThreadPool, g: &[f32]) -> f64 {
    let mut sums = [0.0; PIECES];
    let piece = g.len().div_ceil(PIECES).max(PIECE);
    let pieces = g.len().div_ceil(piece);
    threads.split(&mut sums[..pieces], 1, |i, sum| {
        sum[0] = squares(&g[i * piece..g.len().min((i + 1) * piece)]);
    });
    sums[..pieces].iter().fold(0.0, |sum, next| sum + next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::par::Threads;
    use crate::scalar::noise;

    #[test]
    fn norms_are_the_same_for_any_number_of_threads() {
        for len in [0, 1, 100, PIECE, PIECE + 1, 3 * PIECE + 17, 65 * PIECE] {
            let g = noise(len, 3);
            let want: f64 = g.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let sum = |threads| sum_of_squares(&ThreadPool::new(Threads(threads)), &g);
            let one = sum(1);
            assert!((one - want).abs() <= 1e-9 * want, "{len}: {one} {want}");
            assert!(
                [2, 4]
                    .map(sum)
                    .iter()
                    .all(|other| other.to_bits() == one.to_bits())
            );
        }
    }
}
