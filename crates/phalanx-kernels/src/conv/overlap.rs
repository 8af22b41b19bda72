//! Stride 1 without copying windows. The `kw * in` inputs that one kernel row
//! sees are contiguous, and the next pixel's start `in` elements later: a
//! matrix whose rows overlap. Taken over the whole image (rows of pixels end to
//! end), a kernel row is one product in each of the three passes. Pixels at row
//! ends, where windows would wrap around, are computed and not used.

use super::ConvShape;
use crate::Mode;
use crate::bias::{copy_finished, finish};
use crate::par::scratch;
use crate::product::{Mat, product};

/// The padded image, in pixels.
#[derive(Clone, Copy)]
struct Padded {
    rows: usize,
    width: usize,
}

impl Padded {
    fn of(s: &ConvShape) -> Self {
        Padded {
            rows: s.input[0] + 2 * s.padding[0],
            width: s.input[1] + 2 * s.padding[1],
        }
    }

    /// From the first to the last output pixel, at the padded image's row pitch.
    fn span(self, s: &ConvShape) -> usize {
        (s.output[0] - 1) * self.width + s.output[1]
    }
}

/// Lends the image with its zero border (itself where there is none).
fn with_border<R>(s: &ConvShape, x: &[f32], f: impl FnOnce(&[f32]) -> R) -> R {
    if s.padding == [0, 0] {
        return f(x);
    }
    let Padded { rows, width } = Padded::of(s);
    let line = width * s.inp;
    scratch(rows * line, |to| {
        let (top, edge) = (s.padding[0] * line, s.padding[1] * s.inp);
        let inner = s.input[1] * s.inp;
        to[..top].fill(0.0);
        to[(rows - s.padding[0]) * line..].fill(0.0);
        for (row, out) in x.chunks_exact(inner).zip(to[top..].chunks_exact_mut(line)) {
            out[..edge].fill(0.0);
            out[edge..edge + inner].copy_from_slice(row);
            out[edge + inner..].fill(0.0);
        }
        f(to)
    })
}

/// Lends the output gradient at the padded image's row pitch, zeros in the
/// gaps: `kw - 1` pixels after each row, which are also the border on the left
/// of the next one. `lead` zero pixels come first, `tail` last.
fn spread<R>(
    s: &ConvShape,
    dy: &[f32],
    lead: usize,
    tail: usize,
    f: impl FnOnce(&[f32]) -> R,
) -> R {
    let (width, c) = (Padded::of(s).width, s.out);
    let (line, inner) = (width * c, s.output[1] * c);
    scratch(lead * c + s.output[0] * line + tail * c, |to| {
        let (head, rest) = to.split_at_mut(lead * c);
        let (body, end) = rest.split_at_mut(s.output[0] * line);
        head.fill(0.0);
        end.fill(0.0);
        for (row, out) in dy.chunks_exact(inner).zip(body.chunks_exact_mut(line)) {
            out[..inner].copy_from_slice(row);
            out[inner..].fill(0.0);
        }
        f(to)
    })
}

/// `y[p] = sum over kernel rows ky of window(p + ky * width) * w[ky]` for
/// `pixels` consecutive pixels of `c` channels.
fn correlate(
    x: &[f32],
    (pixels, width, c): (usize, usize, usize),
    [kh, kw]: [usize; 2],
    w: &[f32],
    y: &mut [f32],
) {
    let k = kw * c;
    let out = y.len() / pixels;
    for ky in 0..kh {
        let windows = Mat::rows(&x[ky * width * c..], pixels, k, c);
        let weights = Mat::rows(&w[ky * k * out..], k, out, out);
        let mode = if ky == 0 { Mode::Write } else { Mode::Add };
        product(y, out, windows, weights, mode);
    }
}

/// One image forward, bias and ReLU included.
pub(super) fn forward(
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    bias: &[f32],
    relu: bool,
    y: &mut [f32],
) {
    let padded = Padded::of(s);
    let span = padded.span(s);
    with_border(s, x, |x| {
        let size = (span, padded.width, s.inp);
        if padded.width == s.output[1] {
            correlate(x, size, s.kernel, w, y);
            return finish(y, bias, relu);
        }
        scratch(span * s.out, |flat| {
            correlate(x, size, s.kernel, w, flat);
            let line = s.output[1] * s.out;
            let rows = flat.chunks(padded.width * s.out);
            for (to, from) in y.chunks_exact_mut(line).zip(rows) {
                copy_finished(&from[..line], to, bias, relu);
            }
        });
    });
}

/// The weights for the input gradient: kernel rotated by 180 degrees, inputs
/// and outputs exchanged.
pub(super) fn rotate180(s: &ConvShape, w: &[f32], rotated: &mut [f32]) {
    let (taps, block) = (s.kernel[0] * s.kernel[1], s.inp * s.out);
    for (t, to) in rotated.chunks_exact_mut(block).enumerate() {
        let from = &w[(taps - 1 - t) * block..][..block];
        crate::transpose::transpose(from, to, s.inp, s.out);
    }
}

/// One image's input gradient, from these weights.
pub(super) fn input_gradient(s: &ConvShape, rotated: &[f32], dy: &[f32], dx: &mut [f32]) {
    let padded = Padded::of(s);
    let tail = (s.kernel[0] - 1) * padded.width;
    spread(s, dy, tail + s.kernel[1] - 1, tail, |dy| {
        if s.padding == [0, 0] {
            let size = (padded.rows * padded.width, padded.width, s.out);
            return correlate(dy, size, s.kernel, rotated, dx);
        }
        // The border's gradient is of no use: leave out its rows, cut off its columns.
        let size = (s.input[0] * padded.width, padded.width, s.out);
        scratch(size.0 * s.inp, |flat| {
            correlate(
                &dy[s.padding[0] * padded.width * s.out..],
                size,
                s.kernel,
                rotated,
                flat,
            );
            let (line, edge) = (s.input[1] * s.inp, s.padding[1] * s.inp);
            for (to, from) in dx
                .chunks_exact_mut(line)
                .zip(flat.chunks_exact(padded.width * s.inp))
            {
                to.copy_from_slice(&from[edge..edge + line]);
            }
        });
    });
}

/// Adds one image's part to the weight gradient.
pub(super) fn weight_gradient(s: &ConvShape, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    let padded = Padded::of(s);
    let (span, k) = (padded.span(s), s.kernel[1] * s.inp);
    with_border(s, x, |x| {
        spread(s, dy, 0, 0, |dy| {
            let d = Mat::rows(dy, span, s.out, s.out);
            for ky in 0..s.kernel[0] {
                let windows = Mat::rows(&x[ky * padded.width * s.inp..], span, k, s.inp);
                let dw = &mut dw[ky * k * s.out..(ky + 1) * k * s.out];
                product(dw, s.out, windows.t(), d, Mode::Add);
            }
        });
    });
}
