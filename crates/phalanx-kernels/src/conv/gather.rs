//! Any stride, padding, dilation and grouping: windows are copied into a block
//! of rows that fits the L2 cache, and a product does the rest.

use super::ConvShape;
use crate::Mode;
use crate::par::scratch;
use crate::product::{Mat, product};

/// Elements of a block of windows: 256 KiB, an eighth of a usual L2.
const BLOCK_ELEMS: usize = 64 * 1024;

/// Output pixels in a block.
fn block_pixels(s: &ConvShape) -> usize {
    (BLOCK_ELEMS / s.depth().max(1))
        .clamp(16, 4096)
        .min(s.pixels().max(1))
}

simd! {
    /// Rows `first ..` of the window matrix of one group.
    fn fill_windows(s: &ConvShape, group: usize, x: &[f32], first: usize, rows: &mut [f32]) {
        let c = s.group_in();
        // The taps of a kernel row are then one run of memory.
        let runs = s.dilation[1] == 1 && s.groups == 1;
        let run = s.kernel[1] * c;
        for (r, row) in rows.chunks_exact_mut(s.depth()).enumerate() {
            let (oy, ox) = ((first + r) / s.output[1], (first + r) % s.output[1]);
            let x0 = (ox * s.stride[1]).wrapping_sub(s.padding[1]);
            for (ky, to) in row.chunks_exact_mut(run).enumerate() {
                let y = (oy * s.stride[0] + ky * s.dilation[0]).wrapping_sub(s.padding[0]);
                if y >= s.input[0] {
                    to.fill(0.0);
                } else if runs && x0 < s.input[1] && x0 + s.kernel[1] <= s.input[1] {
                    let from = &x[(y * s.input[1] + x0) * c..][..run];
                    if run <= 8 {
                        // Too short for a call of memcpy.
                        for (t, &f) in to.iter_mut().zip(from) {
                            *t = f;
                        }
                    } else {
                        to.copy_from_slice(from);
                    }
                } else {
                    for (kx, to) in to.chunks_exact_mut(c).enumerate() {
                        let px = x0.wrapping_add(kx * s.dilation[1]);
                        if px < s.input[1] {
                            to.copy_from_slice(&x[(y * s.input[1] + px) * s.inp + group * c..][..c]);
                        } else {
                            to.fill(0.0);
                        }
                    }
                }
            }
        }
    }
}

simd! {
    /// Adds rows of window gradients to the input pixels they came from.
    fn scatter_windows(s: &ConvShape, group: usize, rows: &[f32], first: usize, dx: &mut [f32]) {
        let c = s.group_in();
        for (r, row) in rows.chunks_exact(s.depth()).enumerate() {
            let (oy, ox) = ((first + r) / s.output[1], (first + r) % s.output[1]);
            for (ky, from) in row.chunks_exact(s.kernel[1] * c).enumerate() {
                let y = (oy * s.stride[0] + ky * s.dilation[0]).wrapping_sub(s.padding[0]);
                if y >= s.input[0] {
                    continue;
                }
                for (kx, from) in from.chunks_exact(c).enumerate() {
                    let px = (ox * s.stride[1] + kx * s.dilation[1]).wrapping_sub(s.padding[1]);
                    if px < s.input[1] {
                        let to = &mut dx[(y * s.input[1] + px) * s.inp + group * c..][..c];
                        for (d, &v) in to.iter_mut().zip(from) {
                            *d += v;
                        }
                    }
                }
            }
        }
    }
}

/// Calls `f(group, first pixel, pixels)` for every block of one image.
fn blocks(s: &ConvShape, mut f: impl FnMut(usize, usize, usize)) {
    let (per, pixels) = (block_pixels(s), s.pixels());
    for group in 0..s.groups {
        for first in (0..pixels).step_by(per) {
            f(group, first, per.min(pixels - first));
        }
    }
}

/// One image forward.
pub(super) fn forward(s: &ConvShape, x: &[f32], w: &[f32], y: &mut [f32]) {
    let (k, n) = (s.depth(), s.group_out());
    scratch(block_pixels(s) * k, |rows| {
        blocks(s, |group, first, count| {
            let rows = &mut rows[..count * k];
            fill_windows(s, group, x, first, rows);
            let (rows, out) = (Mat::rows(rows, count, k, k), first * s.out + group * n);
            let w = Mat::rows(&w[group * n..], k, n, s.out);
            product(&mut y[out..], s.out, rows, w, Mode::Write);
        });
    });
}

/// Adds one image's part to the weight gradient.
pub(super) fn weight_gradient(s: &ConvShape, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    let (k, n) = (s.depth(), s.group_out());
    scratch(block_pixels(s) * k, |rows| {
        blocks(s, |group, first, count| {
            let rows = &mut rows[..count * k];
            fill_windows(s, group, x, first, rows);
            let d = Mat::rows(&dy[first * s.out + group * n..], count, n, s.out);
            let rows = Mat::rows(rows, count, k, k).t();
            product(&mut dw[group * n..], s.out, rows, d, Mode::Add);
        });
    });
}

/// One image's input gradient, from transposed weights.
pub(super) fn input_gradient(s: &ConvShape, transposed: &[f32], dy: &[f32], dx: &mut [f32]) {
    let (k, n) = (s.depth(), s.group_out());
    dx.fill(0.0);
    scratch(block_pixels(s) * k, |rows| {
        blocks(s, |group, first, count| {
            let rows = &mut rows[..count * k];
            let d = Mat::rows(&dy[first * s.out + group * n..], count, n, s.out);
            let w = Mat::rows(&transposed[group * n * k..], n, k, k);
            product(rows, k, d, w, Mode::Write);
            scatter_windows(s, group, rows, first, dx);
        });
    });
}
