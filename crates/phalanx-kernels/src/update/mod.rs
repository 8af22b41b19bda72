//! Steps of optimizers, over the elements of one parameter: what they compute is in the documentation of each optimizer.

pub mod adam;
pub mod ema;
pub mod lamb;
pub mod lion;
pub mod muon;
pub mod rmsprop;
pub mod sgd;

/// Between `from` and `to`, from the nearer end, as `torch.lerp`.
#[inline(always)]
fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 {
        weight.mul_add(to - from, from)
    } else {
        (to - from).mul_add(weight - 1.0, to)
    }
}

/// The gradient `g` with weight decay.
#[inline(always)]
fn decayed(p: f32, g: f32, decay: f32) -> f32 {
    // A zero decay must not touch the gradient: infinity * 0 is NaN.
    match decay == 0.0 {
        true => g,
        false => p.mul_add(decay, g),
    }
}
