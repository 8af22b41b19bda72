//! PyTorch's default initial values of linear and convolution layers.
//!
//! A module draws its weight first and its bias right after, each in the
//! memory order of *PyTorch's* layout; modules draw in construction order.
//! With that order kept, all bits are equal to PyTorch's.

use super::torch::Generator;

/// Fills a weight in PyTorch's memory order: `[out, in]` of a linear layer,
/// `[out, in / groups, kh, kw]` of a convolution. `fan_in` is the number of inputs of one
/// output element: the elements of `weight[0]`.
pub fn fill_weight(generator: &mut Generator, weight: &mut [f32], fan_in: usize) {
    // Kaiming with a = sqrt(5), evaluated in double in PyTorch's order (sqrt(5) squared is not
    // exactly 5).
    let slope = 5.0_f64.sqrt();
    let gain = (2.0 / (1.0 + slope * slope)).sqrt();
    let bound = 3.0_f64.sqrt() * (gain / (fan_in as f64).sqrt());
    generator.fill_uniform_f32(weight, -bound, bound);
}

/// Fills the bias of a layer whose weight was just drawn.
pub fn fill_bias(generator: &mut Generator, bias: &mut [f32], fan_in: usize) {
    let bound = match fan_in {
        0 => 0.0,
        _ => 1.0 / (fan_in as f64).sqrt(),
    };
    generator.fill_uniform_f32(bias, -bound, bound);
}
