//! Products of bf16 values with f32 sums: convolutions and, as 1x1 convolutions,
//! fully connected layers.
//!
//! Operands are rounded to bf16 (nearest, ties to even) while they are packed,
//! where they are not bf16 in memory already; weights and their gradients are f32
//! always, other results rounded once if their memory is bf16. AMX tiles multiply
//! where the processor has them, `vdpbf16ps` elsewhere (`tile`). Both treat subnormal
//! numbers as zero. Nothing here runs on processors of [`Family::Other`](crate::Family).
//!
//! *Order*: sums go over the inner dimension in ascending order. AMX adds the products of
//! 32 places, those at even and at odd places as one chain each, to the sum so far;
//! `vdpbf16ps` those of two places. Chunks, blocks and threads do not affect it.

mod forward;
mod layout;
mod pack;
#[cfg(test)]
mod tests;
mod tile;
mod weight;
mod window;

pub use forward::{forward, input_gradient};
pub use weight::weight_gradient;

use super::conv::ConvShape;
use layout::{FORWARD_PIXELS, WEIGHT_PIXELS};
use window::Window;

/// Pixels, or inner elements, of an A tile's row: 32 values of two bytes.
const DEPTH: usize = 32;
/// Rows and columns of one block of sums: two by two tiles.
const SIDE: usize = 32;

/// Whether products of this layer can be computed in bf16: no groups, and windows of a
/// moderate size.
pub(crate) fn fits(s: &ConvShape) -> bool {
    let channels = DEPTH.max(s.inp).max(s.out);
    s.groups == 1
        && s.inp > 0
        && s.out > 0
        && s.kernel[0] * s.kernel[1] <= window::MAX_TAPS
        && s.kernel[0] * s.kernel[1] * channels <= 1 << 20
}

/// Elements of `work` that all passes of a layer need.
pub fn work_len(s: &ConvShape) -> usize {
    let forward = pack::weights_len(&Window::forward(s), s.out);
    let mut backward = 0;
    Window::phases(s, |w, _| backward += pack::weights_len(w, s.inp));
    forward.max(backward).max(weight::work_len(s))
}
