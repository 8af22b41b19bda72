//! Average pooling, channels-last: windows of a fixed size, or adaptive ones.

use std::ops::Range;

use crate::par::ThreadPool;

/// The inputs that an output averages, along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// `kernel` inputs from `at * stride - padding` on.
    Fixed {
        /// Inputs of a window.
        kernel: usize,
        /// Distance between two windows.
        stride: usize,
        /// Zeros before the first input.
        padding: usize,
        /// Whether zeros of the padding count in the divisor.
        counted: bool,
    },
    /// `floor(at * input / output) .. ceil((at + 1) * input / output)`.
    Adaptive,
}

/// Shape of one pooling: sizes are (height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgShape {
    /// Images of the batch.
    pub images: usize,
    /// Channels.
    pub channels: usize,
    /// Size of the input.
    pub input: [usize; 2],
    /// Size of the output.
    pub output: [usize; 2],
    /// Windows of both directions.
    pub windows: [Windows; 2],
}

impl AvgShape {
    /// The inputs of output position `at` along dimension `d`, and how many count.
    #[inline(always)]
    fn window(&self, d: usize, at: usize) -> (Range<usize>, usize) {
        let (input, output) = (self.input[d], self.output[d]);
        match self.windows[d] {
            Windows::Fixed {
                kernel,
                stride,
                padding,
                counted,
            } => {
                // Positions in padded terms; the padded image ends the window.
                let first = at * stride;
                let end = (first + kernel).min(input + 2 * padding);
                let inside =
                    first.max(padding) - padding..end.min(input + padding).max(padding) - padding;
                let count = if counted { end - first } else { inside.len() };
                (inside, count)
            }
            Windows::Adaptive => {
                let window = at * input / output..((at + 1) * input).div_ceil(output);
                (window.clone(), window.len())
            }
        }
    }
}

simd! {
    fn forward_pixel(s: &AvgShape, x: &[f32], to: &mut [f32], rows: Range<usize>, columns: Range<usize>, factor: f32) {
        let c = s.channels;
        to.fill(0.0);
        for y in rows {
            let line = &x[(y * s.input[1] + columns.start) * c..(y * s.input[1] + columns.end) * c];
            for pixel in line.chunks_exact(c) {
                for (t, &v) in to.iter_mut().zip(pixel) {
                    *t += v;
                }
            }
        }
        for t in to {
            *t *= factor;
        }
    }
}

simd! {
    fn backward_pixel(s: &AvgShape, dx: &mut [f32], from: &[f32], rows: Range<usize>, columns: Range<usize>, factor: f32) {
        let c = s.channels;
        for y in rows {
            let line = &mut dx[(y * s.input[1] + columns.start) * c..(y * s.input[1] + columns.end) * c];
            for pixel in line.chunks_exact_mut(c) {
                for (t, &v) in pixel.iter_mut().zip(from) {
                    *t = v.mul_add(factor, *t);
                }
            }
        }
    }
}

/// Calls `f(output pixel, rows, columns, 1 / count)` for each output of an image.
pub(super) fn windows(s: &AvgShape, mut f: impl FnMut(usize, Range<usize>, Range<usize>, f32)) {
    for oy in 0..s.output[0] {
        let (rows, high) = s.window(0, oy);
        for ox in 0..s.output[1] {
            let (columns, wide) = s.window(1, ox);
            let factor = 1.0 / (high * wide) as f32;
            f(oy * s.output[1] + ox, rows.clone(), columns, factor);
        }
    }
}

/// The mean of each window.
pub fn forward(threads: &ThreadPool, s: &AvgShape, x: &[f32], y: &mut [f32]) {
    let c = s.channels;
    let (il, ol) = (s.input[0] * s.input[1] * c, s.output[0] * s.output[1] * c);
    threads.split(y, ol, |at, y| {
        let i = at / ol;
        let x = &x[i * il..(i + 1) * il];
        windows(s, |o, rows, columns, factor| {
            forward_pixel(s, x, &mut y[o * c..(o + 1) * c], rows, columns, factor);
        });
    });
}

/// `dx`: each output's gradient spread over its window.
pub fn backward(threads: &ThreadPool, s: &AvgShape, dy: &[f32], dx: &mut [f32]) {
    let c = s.channels;
    let (il, ol) = (s.input[0] * s.input[1] * c, s.output[0] * s.output[1] * c);
    threads.split(dx, il, |at, dx| {
        let i = at / il;
        let dy = &dy[i * ol..(i + 1) * ol];
        dx.fill(0.0);
        windows(s, |o, rows, columns, factor| {
            backward_pixel(s, dx, &dy[o * c..(o + 1) * c], rows, columns, factor);
        });
    });
}
