//! Gradient clipping by norm.

use super::Optimizer;
use crate::param::{GradView, ParamId, Params};
use crate::{Result, ThreadPool};

/// Sums side by side.
const LANES: usize = 16;
/// Pieces of a gradient at most.
const PIECES: usize = 64;
/// Elements of a piece at least.
const PIECE: usize = 1 << 16;

simd! {
    fn squares(g: &[f32]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let rows = g.chunks_exact(LANES);
        let rest = rows.remainder();
        for row in rows {
            for (l, &v) in lanes.iter_mut().zip(row) {
                *l += f64::from(v) * f64::from(v);
            }
        }
        for (l, &v) in lanes.iter_mut().zip(rest) {
            *l += f64::from(v) * f64::from(v);
        }
        lanes.iter().sum()
    }
}

pub(super) fn sum_of_squares(threads: &ThreadPool, g: &[f32]) -> f64 {
    let mut sums = [0.0; PIECES];
    let piece = g.len().div_ceil(PIECES).max(PIECE);
    let pieces = g.len().div_ceil(piece);
    threads.split(&mut sums[..pieces], 1, |i, sum| {
        sum[0] = squares(&g[i * piece..g.len().min((i + 1) * piece)]);
    });
    sums[..pieces].iter().fold(0.0, |sum, next| sum + next)
}

/// The Euclidean norm of all gradients together, except [local](GradView::is_local) ones and
/// those of [untouched](GradView::untouched) parameters.
///
/// *Order*: a parameter's gradient in at most 64 pieces, none but the last of fewer than 65,536 elements; sixteen sums of
/// squares per piece, folded in order; pieces in order, parameters in order; in f64. The same on all ranks if the gradients
/// are, and for any number of threads.
pub fn grad_norm(params: &Params, grads: &dyn GradView, threads: &ThreadPool) -> f64 {
    let counts = |id: &ParamId| !grads.untouched(*id) && !grads.is_local(*id);
    let all = params
        .ids()
        .filter(counts)
        .map(|id| sum_of_squares(threads, grads.grad(id)));
    // Not `sum`, which makes -0.0 of nothing.
    all.fold(0.0f64, |sum, next| sum + next).sqrt()
}

/// The factor by which PyTorch's `clip_grad_norm_` multiplies gradients of this norm:
/// `min(1, limit / (norm + 1e-6))`.
pub fn clip_factor(norm: f64, limit: f64) -> f32 {
    let factor = limit / (norm + 1e-6);
    // NaN stays, as in PyTorch.
    (if factor > 1.0 { 1.0 } else { factor }) as f32
}

/// A step with gradients scaled down to a norm of at most `limit`; returns the norm
/// before. The gradients themselves do not change: the optimizer scales them as it
/// reads them.
///
/// # Errors
/// As [`Optimizer::step`].
pub fn step_clipped(
    optimizer: &mut dyn Optimizer,
    params: &mut Params,
    grads: &dyn GradView,
    limit: f64,
) -> Result<f64> {
    let norm = grad_norm(params, grads, &optimizer.thread_pool());
    optimizer.step_scaled(params, grads, clip_factor(norm, limit))?;
    Ok(norm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::scalar::noise;
    use crate::par::Threads;

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
