//! Gradient clipping by norm.

use super::Optimizer;
use crate::Result;
use crate::param::{GradView, ParamId, Params};

/// Sums side by side.
const LANES: usize = 16;

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

/// The Euclidean norm of all gradients together, except [local](GradView::is_local) ones and
/// those of [untouched](GradView::untouched) parameters.
///
/// *Order*: sixteen sums of squares per parameter, folded in order, parameters in
/// order; in f64. The same on all ranks if the gradients are.
pub fn grad_norm(params: &Params, grads: &dyn GradView) -> f64 {
    let counts = |id: &ParamId| !grads.untouched(*id) && !grads.is_local(*id);
    let all = params
        .ids()
        .filter(counts)
        .map(|id| squares(grads.grad(id)));
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
    let norm = grad_norm(params, grads);
    optimizer.step_scaled(params, grads, clip_factor(norm, limit))?;
    Ok(norm)
}
