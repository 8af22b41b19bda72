//! Normalisation of single rows, and of groups of channels of single images.
//!
//! A row of [`rows`] is one group; an image (pixels, channels) is cut into groups
//! of neighbouring channels. Both are one body: a row is an image of one pixel.
//!
//! *Order*: a group's sums belong to one thread: pixels in order for each
//! channel, channels in order, in f64. Sums over images are the caller's.

use crate::par::{Disjoint, Team};

/// Sizes of images whose channels are normalised in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub images: usize,
    pub pixels: usize,
    pub channels: usize,
    pub groups: usize,
}

impl Groups {
    fn image_len(self) -> usize {
        self.pixels * self.channels
    }

    fn width(self) -> usize {
        self.channels / self.groups
    }
}

const LANES: usize = 16;

/// The sum of `term(i)` for every i, in sixteen lanes.
#[inline(always)]
fn lanes(len: usize, term: impl Fn(usize) -> f64) -> f64 {
    let mut sums = [0.0f64; LANES];
    let whole = len / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        for (i, s) in sums.iter_mut().enumerate() {
            *s += term(at + i);
        }
    }
    for (i, s) in (whole..len).zip(&mut sums) {
        *s += term(i);
    }
    sums.iter().sum()
}

simd! {
    /// One group: channels `from ..` of `width` in rows of `channels`. Gives mean and inverse deviation.
    fn normalise(
        x: &[f32], y: &mut [f32], channels: usize, from: usize, width: usize,
        weight: &[f32], bias: &[f32], eps: f64,
    ) -> (f32, f32) {
        let n = (x.len() / channels * width) as f64;
        let mut mean = 0.0;
        for row in x.chunks_exact(channels) {
            let row = &row[from..from + width];
            mean += lanes(width, |i| f64::from(row[i]));
        }
        mean /= n;
        let mut square = 0.0;
        for row in x.chunks_exact(channels) {
            let row = &row[from..from + width];
            square += lanes(width, |i| (f64::from(row[i]) - mean) * (f64::from(row[i]) - mean));
        }
        let inverse = (1.0 / (square / n + eps).sqrt()) as f32;
        let mean = mean as f32;
        for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
            let (x, y) = (&x[from..from + width], &mut y[from..from + width]);
            for i in 0..width {
                y[i] = (x[i] - mean) * inverse;
            }
            if !weight.is_empty() {
                let w = &weight[from..from + width];
                y.iter_mut().zip(w).for_each(|(y, w)| *y *= w);
            }
            if !bias.is_empty() {
                let b = &bias[from..from + width];
                y.iter_mut().zip(b).for_each(|(y, b)| *y += b);
            }
        }
        (mean, inverse)
    }
}

/// Normalises every group; `stats` gets mean and inverse deviation of each. An
/// empty weight is 1, an empty bias 0.
pub(crate) fn forward(
    team: &Team,
    g: Groups,
    x: &[f32],
    (weight, bias, eps): (&[f32], &[f32], f64),
    y: &mut [f32],
    stats: &mut [f32],
) {
    let (len, width) = (g.image_len(), g.width());
    let stats = Disjoint::new(stats);
    team.split(y, len * per_chunk(g), |at, y| {
        for (i, y) in y.chunks_exact_mut(len).enumerate() {
            let image = at / len + i;
            let x = &x[image * len..][..len];
            for group in 0..g.groups {
                let from = group * width;
                let (mean, inverse) = normalise(x, y, g.channels, from, width, weight, bias, eps);
                let place = 2 * (image * g.groups + group);
                // SAFETY: this chunk alone touches its images' groups.
                let to = unsafe { stats.range(place..place + 2) };
                to.copy_from_slice(&[mean, inverse]);
            }
        }
    });
}

/// Images of a chunk: about 64 KiB.
fn per_chunk(g: Groups) -> usize {
    (crate::par::PIECE / g.image_len().max(1)).max(1)
}

/// Partial weight gradients at most.
const PARTS: usize = 16;

/// Images of a chunk of the backward pass: by shape alone.
fn backward_chunk(g: Groups) -> usize {
    g.images.div_ceil(PARTS).max(1)
}

/// Elements of the partial weight and bias gradients.
pub(crate) fn partials_len(g: Groups) -> usize {
    g.images.div_ceil(backward_chunk(g)) * 2 * g.channels
}

simd! {
    /// One group: `dy` becomes the gradient of `x`; `dw` and `db` are added to.
    fn differentiate(
        x: &[f32], dy: &mut [f32], channels: usize, from: usize, stats: (f32, f32),
        weight: &[f32], dw: &mut [f32], db: &mut [f32],
    ) {
        let width = dw.len();
        let (mean, inverse) = stats;
        let n = (x.len() / channels * width) as f64;
        let (mut s1, mut s2) = (0.0, 0.0);
        for (x, d) in x.chunks_exact(channels).zip(dy.chunks_exact_mut(channels)) {
            let (x, d) = (&x[from..from + width], &mut d[from..from + width]);
            for i in 0..width {
                dw[i] = ((x[i] - mean) * inverse).mul_add(d[i], dw[i]);
                db[i] += d[i];
            }
            if !weight.is_empty() {
                let w = &weight[from..from + width];
                d.iter_mut().zip(w).for_each(|(d, w)| *d *= w);
            }
            let d = &*d;
            s1 += lanes(width, |i| f64::from(d[i]));
            s2 += lanes(width, |i| f64::from(d[i]) * f64::from((x[i] - mean) * inverse));
        }
        let (m1, m2) = ((s1 / n) as f32, (s2 / n) as f32);
        for (x, d) in x.chunks_exact(channels).zip(dy.chunks_exact_mut(channels)) {
            let (x, d) = (&x[from..from + width], &mut d[from..from + width]);
            for i in 0..width {
                let h = (x[i] - mean) * inverse;
                d[i] = inverse * (-h).mul_add(m2, d[i] - m1);
            }
        }
    }
}

/// `dy` becomes the gradient of `x`; `parts` the partial gradients of weight and
/// bias, [`partials_len`] elements: to be folded in order.
pub(crate) fn backward(
    team: &Team,
    g: Groups,
    (x, stats): (&[f32], &[f32]),
    weight: &[f32],
    dy: &mut [f32],
    parts: &mut [f32],
) {
    let (len, width, c) = (g.image_len(), g.width(), g.channels);
    let per = backward_chunk(g);
    let dy = Disjoint::new(dy);
    team.split(&mut parts[..partials_len(g)], 2 * c, |at, part| {
        part.fill(0.0);
        let (dw, db) = part.split_at_mut(c);
        let chunk = at / (2 * c);
        for image in chunk * per..((chunk + 1) * per).min(g.images) {
            let range = image * len..(image + 1) * len;
            // SAFETY: this chunk alone touches its images.
            let dy = unsafe { dy.range(range.clone()) };
            for group in 0..g.groups {
                let own = group * width..(group + 1) * width;
                let place = 2 * (image * g.groups + group);
                let stats = (stats[place], stats[place + 1]);
                let (dw, db) = (&mut dw[own.clone()], &mut db[own.clone()]);
                differentiate(&x[range.clone()], dy, c, own.start, stats, weight, dw, db);
            }
        }
    });
}
