//! Gradient clipping by norm.

use super::Optimizer;
use crate::param::{GradView, ParamId, Params};
use crate::{Result, ThreadPool};
use phalanx_kernels::squares::sum_of_squares;

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
