//! 1x1 kernels at stride 1 are products: pixels of all images are the rows.
//!
//! *Order*: an element is one sum over channels. With channels in sixteens, a weight's sum goes over
//! all pixels: the bits of `direct`. With others it goes over chunks of images, folded in order (by the caller).

use super::ConvShape;
use crate::Mode;
use crate::bias::finish;
use crate::par::ThreadPool;
use crate::product::{Mat, product_threaded};

/// Whether this method computes the layer.
pub(super) fn fits(s: &ConvShape) -> bool {
    s.kernel == [1, 1] && s.stride == [1, 1] && s.padding == [0, 0] && s.groups == 1
}

/// Whether a product is faster than the tables of `direct`, where both compute the layer: these cost much of the time
/// of a pixel with few weights; over many pixels they read each from memory fewer times.
pub(super) fn beats_tables(s: &ConvShape) -> bool {
    s.weight_len() < 1 << 14 || s.images * (s.in_len() + s.out_len()) <= 1 << 20
}

/// `y = act(x w + bias)`.
pub(super) fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    (bias, relu): (&[f32], bool),
    y: &mut [f32],
) {
    let rows = s.images * s.pixels();
    let a = Mat::rows(x, rows, s.inp, s.inp);
    let b = Mat::rows(w, s.inp, s.out, s.out);
    product_threaded(threads, y, a, b, Mode::Write);
    if !bias.is_empty() || relu {
        threads.split(y, ROWS * s.out, |_, y| finish(y, bias, relu));
    }
}

/// Rows of a pass over outputs.
const ROWS: usize = 256;

/// `dw (+)=` the weight gradient of these images.
pub(super) fn weight_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
    mode: Mode,
) {
    let rows = dy.len().checked_div(s.out).unwrap_or(0);
    let a = Mat::rows(x, rows, s.inp, s.inp).t();
    product_threaded(threads, dw, a, Mat::rows(dy, rows, s.out, s.out), mode);
}

/// `dx (+)= dy wᵀ`.
pub(super) fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    mode: Mode,
) {
    let rows = s.images * s.pixels();
    let a = Mat::rows(dy, rows, s.out, s.out);
    product_threaded(threads, dx, a, Mat::rows(w, s.inp, s.out, s.out).t(), mode);
}
