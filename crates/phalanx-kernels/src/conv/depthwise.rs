//! Depthwise convolution: every channel has its own kernel. Sixteen channels are a
//! vector; any kernel (up to 49 taps), stride, padding and dilation.
//!
//! Rows of pixels whose windows lie inside the image keep a 3x3 kernel (in the
//! weight gradient: its sums) in registers; pixels at a border go through lists
//! of the taps that count. The input gradient at stride 1 is a forward pass with
//! the kernel rotated by 180 degrees.
//!
//! *Order*: an output element is one chain of fused multiply-adds over its taps,
//! ascending. A weight's sum over an image goes row by row: pixels at
//! borders first, then the inner ones; images of a chunk follow one another.

use super::ConvShape;
use crate::Mode;
use crate::bias::finish;
use crate::par::{Disjoint, ThreadPool};
use crate::vector::{LANES, Vector};
use std::ops::Range;

/// Kernel taps at most: lists of them lie on the stack.
const MAX_TAPS: usize = 49;
/// Output elements of a chunk: several rows of pixels, and less than an L2 cache.
const CHUNK_ELEMS: usize = 64 * 1024;

/// Whether this method computes the layer.
pub(super) fn fits(s: &ConvShape) -> bool {
    s.groups == s.inp && s.out == s.inp && s.kernel[0] * s.kernel[1] <= MAX_TAPS
}

/// The taps of one output pixel: where each reads, and its weights.
struct Taps {
    x: [*const f32; MAX_TAPS],
    w: [*const f32; MAX_TAPS],
    count: usize,
}

impl Taps {
    fn new() -> Self {
        Taps {
            x: [std::ptr::null(); MAX_TAPS],
            w: [std::ptr::null(); MAX_TAPS],
            count: 0,
        }
    }

    fn push(&mut self, x: &[f32], w: &[f32]) {
        self.x[self.count] = x.as_ptr();
        self.w[self.count] = w.as_ptr();
        self.count += 1;
    }
}

/// `N` vectors of channels of one pixel.
#[inline(always)]
unsafe fn pixel_block<V: Vector, const N: usize>(t: &Taps, c: usize, to: *mut f32, add: bool) {
    // SAFETY: the caller's pointers hold `c + 16 N` floats.
    unsafe {
        let mut sums = [V::splat(0.0); N];
        for (x, w) in t.x[..t.count].iter().zip(&t.w[..t.count]) {
            for (n, s) in sums.iter_mut().enumerate() {
                let at = c + n * LANES;
                *s = V::load(x.add(at)).fma(V::load(w.add(at)), *s);
            }
        }
        for (n, s) in sums.into_iter().enumerate() {
            let to = to.add(c + n * LANES);
            let s = if add { V::load(to).add(s) } else { s };
            s.store(to);
        }
    }
}

#[inline(always)]
unsafe fn pixel_body<V: Vector>(t: &Taps, channels: usize, to: *mut f32, add: bool) {
    let mut c = 0;
    // SAFETY: blocks end at the last channel.
    unsafe {
        while c + 4 * LANES <= channels {
            pixel_block::<V, 4>(t, c, to, add);
            c += 4 * LANES;
        }
        while c + LANES <= channels {
            pixel_block::<V, 1>(t, c, to, add);
            c += LANES;
        }
        while c < channels {
            let taps = t.x[..t.count].iter().zip(&t.w[..t.count]);
            let sum = taps.fold(0.0f32, |s, (x, w)| (*x.add(c)).mul_add(*w.add(c), s));
            let to = to.add(c);
            *to = if add { *to + sum } else { sum };
            c += 1;
        }
    }
}

vectorised! {
    /// `to (+)= sum over taps of x * w`, channel by channel.
    unsafe fn pixel(t: &Taps, channels: usize, to: *mut f32, add: bool) = pixel_body
}

/// A run of pixels of one row under the full width of a 3 x 3 kernel.
#[derive(Clone, Copy)]
struct Run {
    /// First channel of the first tap of the first pixel.
    x: *const f32,
    /// Floats from a kernel row's pixels to the next row's.
    row: usize,
    /// Floats from a tap to the next in a kernel row.
    tap: usize,
    /// Floats between the windows of neighbouring pixels.
    step: usize,
    /// Weights (or their sums) of the first kernel row that counts.
    w: *mut f32,
    /// Outputs (or their gradients), `channels` apart.
    y: *mut f32,
    count: usize,
    channels: usize,
    add: bool,
}

/// A kernel of `R` rows x 3.
#[inline(always)]
unsafe fn inner_rows<V: Vector, const R: usize>(r: &Run) {
    let c = r.channels;
    for at in (0..c / LANES * LANES).step_by(LANES) {
        // SAFETY: the run's windows lie in the image, channels `at .. at + 16` in a pixel.
        unsafe {
            let mut w = [[V::splat(0.0); 3]; R];
            for (ky, w) in w.iter_mut().enumerate() {
                for (kx, w) in w.iter_mut().enumerate() {
                    *w = V::load(r.w.add((ky * 3 + kx) * c + at));
                }
            }
            let (mut x, mut y) = (r.x.add(at), r.y.add(at));
            for _ in 0..r.count {
                let mut sum = V::splat(0.0);
                for (ky, w) in w.iter().enumerate() {
                    for (kx, w) in w.iter().enumerate() {
                        sum = V::load(x.add(ky * r.row + kx * r.tap)).fma(*w, sum);
                    }
                }
                let s = if r.add { V::load(y).add(sum) } else { sum };
                s.store(y);
                x = x.wrapping_add(r.step);
                y = y.wrapping_add(c);
            }
        }
    }
}

#[inline(always)]
unsafe fn inner_body<V: Vector>(r: &Run, rows: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => inner_rows::<V, 1>(r),
            2 => inner_rows::<V, 2>(r),
            _ => inner_rows::<V, 3>(r),
        }
    }
}

vectorised! {
    unsafe fn inner(r: &Run, rows: usize) = inner_body
}

/// The weight gradient of `R` kernel rows over a run of pixels.
#[inline(always)]
unsafe fn sums_rows<V: Vector, const R: usize>(r: &Run) {
    let c = r.channels;
    for at in (0..c / LANES * LANES).step_by(LANES) {
        // SAFETY: as in `inner_rows`.
        unsafe {
            let mut sums = [[V::splat(0.0); 3]; R];
            for (ky, s) in sums.iter_mut().enumerate() {
                for (kx, s) in s.iter_mut().enumerate() {
                    *s = V::load(r.w.add((ky * 3 + kx) * c + at));
                }
            }
            let (mut x, mut y) = (r.x.add(at), r.y.add(at).cast_const());
            for _ in 0..r.count {
                let d = V::load(y);
                for (ky, s) in sums.iter_mut().enumerate() {
                    for (kx, s) in s.iter_mut().enumerate() {
                        *s = V::load(x.add(ky * r.row + kx * r.tap)).fma(d, *s);
                    }
                }
                x = x.wrapping_add(r.step);
                y = y.wrapping_add(c);
            }
            for (ky, s) in sums.iter().enumerate() {
                for (kx, s) in s.iter().enumerate() {
                    s.store(r.w.add((ky * 3 + kx) * c + at));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn sums_body<V: Vector>(r: &Run, rows: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => sums_rows::<V, 1>(r),
            2 => sums_rows::<V, 2>(r),
            _ => sums_rows::<V, 3>(r),
        }
    }
}

vectorised! {
    unsafe fn sums(r: &Run, rows: usize) = sums_body
}

simd! {
    /// `sums += x * d`, channel by channel.
    fn accumulate(sums: &mut [f32], x: &[f32], d: &[f32]) {
        for ((s, &x), &d) in sums.iter_mut().zip(x).zip(d) {
            *s = x.mul_add(d, *s);
        }
    }
}

/// Taps of dimension `d` that lie inside the image for output `at`.
fn inside(s: &ConvShape, d: usize, at: usize) -> Range<usize> {
    let first = (at * s.stride[d]) as isize - s.padding[d] as isize;
    let dilation = s.dilation[d] as isize;
    // The first tap at or after 0, and the first at or after the end.
    let tap = |limit: isize| {
        let t = (limit - first + dilation - 1).div_euclid(dilation);
        t.clamp(0, s.kernel[d] as isize) as usize
    };
    let (from, to) = (tap(0), tap(s.input[d] as isize));
    from..to.max(from)
}

/// Input position of tap `tap` of output `at`; only for taps [`inside`].
fn position(s: &ConvShape, d: usize, at: usize, tap: usize) -> usize {
    at * s.stride[d] + tap * s.dilation[d] - s.padding[d]
}

/// Outputs of a row whose windows are inside the image from side to side.
fn inner_columns(s: &ConvShape) -> Range<usize> {
    let full = |ox: &usize| inside(s, 1, *ox).len() == s.kernel[1];
    let from = (0..s.output[1]).find(full).unwrap_or(s.output[1]);
    let to = (from..s.output[1])
        .find(|ox| !full(ox))
        .unwrap_or(s.output[1]);
    from..to
}

/// Whether runs of pixels can keep the kernel in registers.
fn by_runs(s: &ConvShape) -> bool {
    s.kernel == [3, 3] && s.inp.is_multiple_of(LANES)
}

/// The run of the inner pixels of output row `oy`, whose kernel rows `ky` count.
fn run_of(s: &ConvShape, x: &[f32], oy: usize, ky: &Range<usize>, columns: &Range<usize>) -> Run {
    let c = s.inp;
    let iy = position(s, 0, oy, ky.start);
    let ix = position(s, 1, columns.start, 0);
    let last = position(s, 0, oy, ky.end - 1) * s.input[1] + position(s, 1, columns.end - 1, 2);
    assert!((last + 1) * c <= x.len());
    Run {
        x: x[(iy * s.input[1] + ix) * c..].as_ptr(),
        row: s.dilation[0] * s.input[1] * c,
        tap: s.dilation[1] * c,
        step: s.stride[1] * c,
        w: std::ptr::null_mut(),
        y: std::ptr::null_mut(),
        count: columns.len(),
        channels: c,
        add: false,
    }
}

/// One row of outputs. `x` is the image, `y` the row.
fn forward_row(
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    oy: usize,
    columns: &Range<usize>,
    y: &mut [f32],
    add: bool,
) {
    let c = s.inp;
    let ky = inside(s, 0, oy);
    if ky.is_empty() {
        if !add {
            y.fill(0.0);
        }
        return;
    }
    let runs = by_runs(s) && !columns.is_empty();
    if runs {
        let run = Run {
            w: w[ky.start * 3 * c..].as_ptr().cast_mut(),
            y: y[columns.start * c..columns.end * c].as_mut_ptr(),
            add,
            ..run_of(s, x, oy, &ky, columns)
        };
        // SAFETY: windows of inner columns and of kernel rows inside the image
        // are in `x` (checked in `run_of`); `w` is only read and holds the
        // kernel; `y` holds the columns (sliced above).
        unsafe { inner(&run, ky.len()) };
    }
    for (ox, to) in y.chunks_exact_mut(c).enumerate() {
        if runs && columns.contains(&ox) {
            continue;
        }
        let mut taps = Taps::new();
        let kx = inside(s, 1, ox);
        for ky in ky.clone() {
            let row = position(s, 0, oy, ky) * s.input[1];
            for kx in kx.clone() {
                let at = (row + position(s, 1, ox, kx)) * c;
                let tap = (ky * s.kernel[1] + kx) * c;
                taps.push(&x[at..at + c], &w[tap..tap + c]);
            }
        }
        // SAFETY: every tap has `c` floats (sliced above), and so has `to`.
        unsafe { pixel(&taps, c, to.as_mut_ptr(), add) };
    }
}

/// `y = act(conv(x, w) + bias)`; adds to `y` instead with [`Mode::Add`].
pub(super) fn forward(
    threads: &ThreadPool,
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    (bias, relu): (&[f32], bool),
    y: &mut [f32],
    mode: Mode,
) {
    assert!(x.len() == s.images * s.in_len() && y.len() == s.images * s.out_len());
    assert!(w.len() == s.weight_len());
    let row = s.output[1] * s.out;
    let columns = inner_columns(s);
    let piece = (CHUNK_ELEMS / row.max(1)).max(1) * row;
    threads.split(y, piece, |at, y| {
        for (i, y) in y.chunks_exact_mut(row).enumerate() {
            let n = at / row + i;
            let image = &x[n / s.output[0] * s.in_len()..][..s.in_len()];
            forward_row(s, image, w, n % s.output[0], &columns, y, mode == Mode::Add);
        }
        finish(y, bias, relu);
    });
}

/// `dw` becomes the weight gradient of these images.
pub(super) fn weight_gradient(s: &ConvShape, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    assert!(dw.len() == s.weight_len());
    let (c, row) = (s.inp, s.output[1] * s.out);
    let columns = inner_columns(s);
    let runs = by_runs(s) && !columns.is_empty();
    dw.fill(0.0);
    for (n, dy) in dy.chunks_exact(row.max(1)).enumerate() {
        let x = &x[n / s.output[0] * s.in_len()..][..s.in_len()];
        let oy = n % s.output[0];
        let ky = inside(s, 0, oy);
        if ky.is_empty() {
            continue;
        }
        for (ox, d) in dy.chunks_exact(c).enumerate() {
            if runs && columns.contains(&ox) {
                continue;
            }
            for ky in ky.clone() {
                for kx in inside(s, 1, ox) {
                    let at = (position(s, 0, oy, ky) * s.input[1] + position(s, 1, ox, kx)) * c;
                    let tap = (ky * s.kernel[1] + kx) * c;
                    accumulate(&mut dw[tap..tap + c], &x[at..at + c], d);
                }
            }
        }
        if runs {
            let run = Run {
                w: dw[ky.start * 3 * c..ky.end * 3 * c].as_mut_ptr(),
                y: dy[columns.start * c..columns.end * c].as_ptr().cast_mut(),
                ..run_of(s, x, oy, &ky, &columns)
            };
            // SAFETY: as in `forward_row`; here `y` is only read, and `w` holds
            // the sums of the kernel rows (sliced above).
            unsafe { sums(&run, ky.len()) };
        }
    }
}

/// `dx (+)=` the input gradient. `rotated` holds the weights' length.
pub(super) fn input_gradient(
    threads: &ThreadPool,
    s: &ConvShape,
    w: &[f32],
    dy: &[f32],
    rotated: &mut [f32],
    dx: &mut [f32],
    mode: Mode,
) {
    assert!(dx.len() == s.images * s.in_len() && dy.len() == s.images * s.out_len());
    if let Some(t) = rotated_shape(s) {
        let taps = w.chunks_exact(s.inp).rev();
        for (to, from) in rotated.chunks_exact_mut(s.inp).zip(taps) {
            to.copy_from_slice(from);
        }
        let rotated = &rotated[..w.len()];
        return forward(threads, &t, dy, rotated, (&[], false), dx, mode);
    }
    let (c, row) = (s.inp, s.input[1] * s.inp);
    let out = Disjoint::new(dx);
    threads.run(s.images * s.input[0], |n| {
        // SAFETY: this chunk alone touches this row of pixels.
        let to = unsafe { out.range(n * row..(n + 1) * row) };
        let dy = &dy[n / s.input[0] * s.out_len()..][..s.out_len()];
        let reach = |d: usize, at: usize, tap: usize| {
            let o = (at + s.padding[d]).checked_sub(tap * s.dilation[d])?;
            (o % s.stride[d] == 0 && o / s.stride[d] < s.output[d]).then(|| o / s.stride[d])
        };
        for (ix, to) in to.chunks_exact_mut(c).enumerate() {
            let mut taps = Taps::new();
            for ky in 0..s.kernel[0] {
                let Some(oy) = reach(0, n % s.input[0], ky) else {
                    continue;
                };
                for kx in 0..s.kernel[1] {
                    if let Some(ox) = reach(1, ix, kx) {
                        let at = (oy * s.output[1] + ox) * c;
                        let tap = (ky * s.kernel[1] + kx) * c;
                        taps.push(&dy[at..at + c], &w[tap..tap + c]);
                    }
                }
            }
            // SAFETY: every tap has `c` floats (sliced above), and so has `to`.
            unsafe { pixel(&taps, c, to.as_mut_ptr(), mode == Mode::Add) };
        }
    });
}

/// The forward pass over output gradients that gives input gradients, at stride
/// 1 and with no more padding than the kernel reaches.
fn rotated_shape(s: &ConvShape) -> Option<ConvShape> {
    let padding = |d: usize| (s.dilation[d] * (s.kernel[d] - 1)).checked_sub(s.padding[d]);
    (s.stride == [1, 1]).then_some(())?;
    Some(ConvShape {
        input: s.output,
        output: s.input,
        padding: [padding(0)?, padding(1)?],
        ..*s
    })
}
