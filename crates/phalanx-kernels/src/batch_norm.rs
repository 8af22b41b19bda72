//! Batch normalisation, channels-last: two passes forward (statistics, then
//! scale, shift, residual and ReLU together), two backward (sums, then the
//! gradient).
//!
//! *Order*: rows are cut into chunks by shape alone. Inside a chunk a channel's
//! sums run in row order in f32; chunks are combined in chunk order in f64. A
//! chunk's squares are taken around its own mean while it is in cache, so a
//! large common offset costs no digits.

use super::element::Element;
use super::elementwise::Clip;
use crate::par::{Disjoint, ThreadPool};

/// Elements of one chunk: 64 KiB, which stays in L2 between two sweeps.
const CHUNK_ELEMS: usize = 16 * 1024;
/// Rows of a chunk at most: longer chains of additions lose digits.
pub(super) const MAX_ROWS: usize = 1024;
/// Channels whose running sums stay in registers.
const LANES: usize = 64;

/// How rows are cut.
#[derive(Clone, Copy)]
struct Chunks {
    rows: usize,
    per: usize,
    channels: usize,
}

impl Chunks {
    fn of(len: usize, channels: usize) -> Self {
        let rows = len.checked_div(channels).unwrap_or(0);
        let per = (CHUNK_ELEMS / channels.max(1)).clamp(8, MAX_ROWS);
        Chunks {
            rows,
            per,
            channels,
        }
    }

    fn count(self) -> usize {
        self.rows.div_ceil(self.per)
    }

    fn rows_of(self, chunk: usize) -> usize {
        self.per.min(self.rows - chunk * self.per)
    }

    /// Elements of a chunk, the last one shorter.
    fn elems(self) -> usize {
        self.per * self.channels
    }
}

/// Elements of the partial sums of both passes over `len` elements.
pub fn partials_len(len: usize, channels: usize) -> usize {
    Chunks::of(len, channels).count() * 2 * channels
}

/// Per-channel constants of one normalisation.
#[derive(Clone, Copy)]
pub struct Channels<'a> {
    /// Mean.
    pub mean: &'a [f32],
    /// Weight times inverse deviation.
    pub scale: &'a [f32],
    /// What is added in the end.
    pub shift: &'a [f32],
}

/// Runs the body for all `$count` channels, `W` of them from `at` on: one body for each width, so that sums stay in
/// registers.
macro_rules! by_lanes {
    ($count:expr, |$at:ident, $wide:ident| $body:expr) => {
        let mut $at = 0;
        by_lanes!($count, $at, $wide, $body, LANES);
        by_lanes!($count, $at, $wide, $body, 16);
        by_lanes!($count, $at, $wide, $body, 8);
        by_lanes!($count, $at, $wide, $body, 1);
    };
    ($count:expr, $at:ident, $wide:ident, $body:expr, $lanes:expr) => {{
        const $wide: usize = $lanes;
        while $at + $wide <= $count {
            $body;
            $at += $wide;
        }
    }};
}

simd! {
    /// Mean and sum of squared deviations of one chunk.
    fn chunk_statistics<T: Element>(x: &[T], means: &mut [f32], squares: &mut [f32]) {
        let c = means.len();
        by_lanes!(c, |at, W| statistics_of::<W, T>(x, at, means, squares));
    }
}

/// Statistics of channels `at .. at + W` of the rows `x`.
#[inline(always)]
fn statistics_of<const W: usize, T: Element>(
    x: &[T],
    at: usize,
    means: &mut [f32],
    squares: &mut [f32],
) {
    let c = means.len();
    let n = 1.0 / (x.len() / c) as f32;
    let mut sum = [0.0f32; W];
    for row in x.chunks_exact(c) {
        for (s, &v) in sum.iter_mut().zip(&row[at..at + W]) {
            *s += v.wide();
        }
    }
    let mean = sum.map(|s| s * n);
    let mut square = [0.0f32; W];
    let mut rest = [0.0f32; W];
    for row in x.chunks_exact(c) {
        let row = &row[at..at + W];
        for i in 0..W {
            let d = row[i].wide() - mean[i];
            rest[i] += d;
            square[i] = d.mul_add(d, square[i]);
        }
    }
    for i in 0..W {
        // The rounding error of the mean.
        means[at + i] = rest[i].mul_add(n, mean[i]);
        squares[at + i] = (-rest[i] * n).mul_add(rest[i], square[i]);
    }
}

simd! {
    /// Combines chunks: `mean` and `squares` become those of all rows.
    fn combine(parts: &[f32], counts: &[f64; 2], mean: &mut [f64], squares: &mut [f64]) {
        let c = mean.len();
        let [full, last] = *counts;
        let chunks = parts.len() / (2 * c);
        let weight = |k: usize| if k + 1 == chunks { last } else { full };
        mean.fill(0.0);
        for (k, part) in parts.chunks_exact(2 * c).enumerate() {
            let n = weight(k);
            for (m, &p) in mean.iter_mut().zip(&part[..c]) {
                *m = f64::from(p).mul_add(n, *m);
            }
        }
        let total = full * (chunks - 1) as f64 + last;
        mean.iter_mut().for_each(|m| *m /= total);
        squares.fill(0.0);
        for (k, part) in parts.chunks_exact(2 * c).enumerate() {
            let n = weight(k);
            let (means, own) = part.split_at(c);
            for (((q, &m), &p), &o) in squares.iter_mut().zip(&*mean).zip(means).zip(own) {
                let d = f64::from(p) - m;
                *q = (d * d).mul_add(n, *q) + f64::from(o);
            }
        }
    }
}

/// Mean and sum of squared deviations of every channel of `x`. `work` holds
/// [`partials_len`] elements; there is at least one row.
#[inline(never)]
pub fn statistics<T: Element>(
    threads: &ThreadPool,
    x: &[T],
    work: &mut [f32],
    mean: &mut [f64],
    squares: &mut [f64],
) {
    let c = mean.len();
    let cut = Chunks::of(x.len(), c);
    let work = &mut work[..cut.count() * 2 * c];
    threads.split(work, 2 * c, |at, part| {
        let chunk = at / (2 * c);
        let from = chunk * cut.elems();
        let (means, squares) = part.split_at_mut(c);
        chunk_statistics(&x[from..from + cut.rows_of(chunk) * c], means, squares);
    });
    let last = cut.rows_of(cut.count() - 1) as f64;
    combine(work, &[cut.per as f64, last], mean, squares);
}

/// `(x - mean) * scale + shift`: forward and backward must agree in every bit on the
/// activation's mask.
#[inline(always)]
fn affine(x: f32, mean: f32, scale: f32, shift: f32) -> f32 {
    (x - mean).mul_add(scale, shift)
}

simd! {
    fn normalise_rows<T: Element>(x: &[T], y: &mut [T], c: Channels<'_>, residual: &[T], clip: Clip) {
        let n = c.mean.len();
        let (mean, scale, shift) = (&c.mean[..n], &c.scale[..n], &c.shift[..n]);
        if residual.is_empty() {
            for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
                for i in 0..n {
                    y[i] = T::of(clip.apply(affine(x[i].wide(), mean[i], scale[i], shift[i])));
                }
            }
        } else {
            let rows = x.chunks_exact(n).zip(y.chunks_exact_mut(n));
            for ((x, y), r) in rows.zip(residual.chunks_exact(n)) {
                for i in 0..n {
                    let v = affine(x[i].wide(), mean[i], scale[i], shift[i]) + r[i].wide();
                    y[i] = T::of(clip.apply(v));
                }
            }
        }
    }
}

/// `y = act((x - mean) * scale + shift + residual)`; an empty residual adds nothing.
#[inline(never)]
pub fn normalise<T: Element>(
    threads: &ThreadPool,
    x: &[T],
    y: &mut [T],
    channels: Channels<'_>,
    residual: &[T],
    clip: Clip,
) {
    let piece = Chunks::of(x.len(), channels.mean.len()).elems();
    threads.split(y, piece, |at, y| {
        let r = residual.get(at..at + y.len()).unwrap_or(&[]);
        normalise_rows(&x[at..at + y.len()], y, channels, r, clip);
    });
}

/// The activation between the normalisation and the gradient that arrives.
#[derive(Clone, Copy)]
pub enum Gate<'a, T> {
    /// At most an activation right after it: recomputed from the input.
    Clip(Clip),
    /// An activation after the sum with a residual: this was its output.
    Output(&'a [T], Clip),
}

simd! {
    /// Sums of one chunk: of dz, and of dz times the deviation. `dz` is what
    /// the activation lets through of `dy`; with an output to gate by it is stored.
    fn chunk_sums<T: Element>(
        x: &[T], dy: &mut [T], c: Channels<'_>, gate: Gate<'_, T>, sums: &mut [f32], products: &mut [f32],
    ) {
        let n = sums.len();
        let clip = match gate {
            Gate::Clip(clip) => clip,
            Gate::Output(y, clip) => {
                for (d, &v) in dy.iter_mut().zip(y) {
                    *d = if clip.closed(v.wide()) { T::default() } else { *d };
                }
                Clip { low: f32::NAN, high: f32::NAN }
            }
        };
        by_lanes!(n, |at, W| sums_of::<W, T>(x, dy, c, clip, at, sums, products));
    }
}

/// The sums of channels `at .. at + W`.
#[inline(always)]
fn sums_of<const W: usize, T: Element>(
    x: &[T],
    dy: &[T],
    c: Channels<'_>,
    clip: Clip,
    at: usize,
    sums: &mut [f32],
    products: &mut [f32],
) {
    let n = sums.len();
    let mut s = [0.0f32; W];
    let mut p = [0.0f32; W];
    let lane = |v: &[f32]| -> [f32; W] {
        let mut a = [0.0; W];
        a.copy_from_slice(&v[at..at + W]);
        a
    };
    let (mean, scale, shift) = (lane(c.mean), lane(c.scale), lane(c.shift));
    for (x, d) in x.chunks_exact(n).zip(dy.chunks_exact(n)) {
        let (x, d) = (&x[at..at + W], &d[at..at + W]);
        for i in 0..W {
            let v = x[i].wide() - mean[i];
            // Read in any case: not every instruction set has masked loads of two bytes.
            let d = d[i].wide();
            let closed = clip.closed(v.mul_add(scale[i], shift[i]));
            let z = if closed { 0.0 } else { d };
            s[i] += z;
            p[i] = z.mul_add(v, p[i]);
        }
    }
    sums[at..at + W].copy_from_slice(&s);
    products[at..at + W].copy_from_slice(&p);
}

simd! {
    /// Adds parts in order: each is the sums of all channels, then their products.
    pub(super) fn add_parts(parts: &[f32], sums: &mut [f64], products: &mut [f64]) {
        let c = sums.len();
        sums.fill(0.0);
        products.fill(0.0);
        for part in parts.chunks_exact(2 * c) {
            for ((s, p), (&a, &b)) in
                sums.iter_mut().zip(products.iter_mut()).zip(part[..c].iter().zip(&part[c..]))
            {
                *s += f64::from(a);
                *p += f64::from(b);
            }
        }
    }
}

/// Per channel, over all rows: the sums of `dz` and of `dz * (x - mean)`. With
/// [`Gate::Output`], `dy` becomes `dz`.
#[inline(never)]
pub fn backward_sums<T: Element>(
    threads: &ThreadPool,
    x: &[T],
    dy: &mut [T],
    channels: Channels<'_>,
    gate: Gate<'_, T>,
    work: &mut [f32],
    (sums, products): (&mut [f64], &mut [f64]),
) {
    let c = channels.mean.len();
    let cut = Chunks::of(x.len(), c);
    let work = &mut work[..cut.count() * 2 * c];
    let dy = Disjoint::new(dy);
    threads.split(work, 2 * c, |at, part| {
        let chunk = at / (2 * c);
        let from = chunk * cut.elems();
        let range = from..from + cut.rows_of(chunk) * c;
        // SAFETY: this chunk alone touches these rows.
        let dy = unsafe { dy.range(range.clone()) };
        let gate = match gate {
            Gate::Output(y, clip) => Gate::Output(&y[range.clone()], clip),
            Gate::Clip(clip) => Gate::Clip(clip),
        };
        let (sums, products) = part.split_at_mut(c);
        chunk_sums(&x[range], dy, channels, gate, sums, products);
    });
    add_parts(work, sums, products);
}

/// `dx = dz * scale + (x - mean) * slope + offset`, per channel.
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    /// Those of the forward pass.
    pub channels: Channels<'a>,
    /// Factor of the deviation.
    pub slope: &'a [f32],
    /// What is added in the end.
    pub offset: &'a [f32],
}

simd! {
    fn gradient_rows<T: Element>(x: &[T], from: &[T], dz: &mut [T], b: Backward<'_>, clip: Clip) {
        let n = b.slope.len();
        let c = b.channels;
        let (mean, scale, shift) = (&c.mean[..n], &c.scale[..n], &c.shift[..n]);
        let (slope, offset) = (&b.slope[..n], &b.offset[..n]);
        for (row, (x, d)) in x.chunks_exact(n).zip(dz.chunks_exact_mut(n)).enumerate() {
            if let Some(from) = from.get(row * n..(row + 1) * n) {
                d.copy_from_slice(from);
            }
            for i in 0..n {
                let v = x[i].wide() - mean[i];
                let closed = clip.closed(v.mul_add(scale[i], shift[i]));
                let arriving = d[i].wide();
                let z = if closed { 0.0 } else { arriving };
                d[i] = T::of(z.mul_add(scale[i], v.mul_add(slope[i], offset[i])));
            }
        }
    }
}

/// `dx` becomes the gradient of `x`, from `dy` or, if that is empty, from what `dx` holds; `clip` gates it as
/// [`Gate::Clip`] does.
#[inline(never)]
pub fn gradient<T: Element>(
    threads: &ThreadPool,
    x: &[T],
    (dy, dx): (&[T], &mut [T]),
    b: Backward<'_>,
    clip: Clip,
) {
    let piece = Chunks::of(x.len(), b.slope.len()).elems();
    threads.split(dx, piece, |at, d| {
        let range = at..at + d.len();
        let from = dy.get(range.clone()).unwrap_or(&[]);
        gradient_rows(&x[range], from, d, b, clip);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;
    use crate::par::Threads;
    use crate::scalar::noise;

    #[test]
    fn statistics_are_exact_enough_whatever_the_offset_and_equal_everywhere() {
        for (c, rows, offset) in [
            (1, 5, 0.0),
            (3, 7000, 1e4),
            (64, 700, 100.0),
            (70, 333, 0.0),
        ] {
            let x: Vec<f32> = noise(rows * c, 1).iter().map(|v| v + offset).collect();
            let mut first: Option<(Vec<f64>, Vec<f64>)> = None;
            on_each_isa(|isa| {
                for threads in [1, 3] {
                    // The threads choose chunks themselves, so only the bits can be compared.
                    let threads = ThreadPool::new(Threads(threads));
                    let mut work = vec![f32::NAN; partials_len(x.len(), c)];
                    let (mut mean, mut squares) = (vec![f64::NAN; c], vec![f64::NAN; c]);
                    statistics(&threads, &x, &mut work, &mut mean, &mut squares);
                    for i in 0..c {
                        let column = || x.iter().skip(i).step_by(c).map(|&v| f64::from(v));
                        let m = column().sum::<f64>() / rows as f64;
                        let q: f64 = column().map(|v| (v - m) * (v - m)).sum();
                        assert!((mean[i] - m).abs() < 2e-6 * (1.0 + m.abs()), "{isa:?}");
                        assert!(
                            (squares[i] - q).abs() < 1e-4 * q,
                            "{isa:?} {c}: {} {q}",
                            squares[i]
                        );
                    }
                    let now = (mean, squares);
                    assert_eq!(first.get_or_insert_with(|| now.clone()), &now, "{isa:?}");
                }
            });
        }
    }
}
