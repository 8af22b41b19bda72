//! Normalisation of single rows, and of groups of channels of single images.
//!
//! A row of [`Groups::rows`] is one group; an image (pixels, channels) is cut into groups
//! of neighbouring channels. Both are one body: a row is an image of one pixel.
//!
//! *Order*: a group's sums belong to one thread: pixels in order, the channels of a pixel in sixteen lanes that are
//! added in pairs, in f64. The gradients of weight and bias are sums over the pixels of all
//! images: at most `MAX_ROWS` terms in order in f32, then the parts, which are cut by shape alone, in
//! order in f64, as batch normalisation does it.

use super::batch_norm::{MAX_ROWS, add_parts};
use super::math::{sum_of, sum_of_pairs};
use crate::par::{Disjoint, ThreadPool, scratch};

/// Sizes of images whose channels are normalised in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Images of the batch.
    pub images: usize,
    /// Pixels of an image.
    pub pixels: usize,
    /// Channels of a pixel.
    pub channels: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Whether the mean is subtracted.
    pub centred: bool,
}

impl Groups {
    /// Rows of `channels` elements, `numel` in all, each of them a group.
    pub fn rows(numel: usize, channels: usize, centred: bool) -> Self {
        Groups {
            images: numel / channels,
            pixels: 1,
            channels,
            groups: 1,
            centred,
        }
    }

    fn image_len(self) -> usize {
        self.pixels * self.channels
    }

    fn width(self) -> usize {
        self.channels / self.groups
    }
}

simd! {
    /// One group: channels `from ..` of `width` in rows of `channels`. Gives mean and inverse deviation.
    fn normalise(
        x: &[f32], y: &mut [f32], g: Groups, from: usize,
        weight: &[f32], bias: &[f32], eps: f64,
    ) -> (f32, f32) {
        let (channels, width) = (g.channels, g.width());
        let n = (x.len() / channels * width) as f64;
        let rows = || x.chunks_exact(channels).map(|row| &row[from..from + width]);
        let mut mean = 0.0;
        if g.centred {
            for row in rows() {
                mean += sum_of(row, f64::from);
            }
            mean /= n;
        }
        let mut square = 0.0;
        for row in rows() {
            square += sum_of(row, |v| (f64::from(v) - mean) * (f64::from(v) - mean));
        }
        let inverse = (1.0 / (square / n + eps).sqrt()) as f32;
        let mean = mean as f32;
        for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
            let (x, y) = (&x[from..from + width], &mut y[from..from + width]);
            let (w, b) = (&weight[from..from + width], &bias[from..from + width]);
            for i in 0..width {
                y[i] = (x[i] - mean) * inverse * w[i] + b[i];
            }
        }
        (mean, inverse)
    }
}

/// Normalises every group; `stats` gets mean and inverse deviation of each. An
/// empty weight is 1, an empty bias 0.
pub fn forward(
    threads: &ThreadPool,
    g: Groups,
    x: &[f32],
    (weight, bias, eps): (&[f32], &[f32], f64),
    y: &mut [f32],
    stats: &mut [f32],
) {
    let (len, width) = (g.image_len(), g.width());
    let stats = Disjoint::new(stats);
    scratch(2 * g.channels, |own| {
        let (ones, zeros) = own.split_at_mut(g.channels);
        let weight = some(weight, 1.0, ones);
        let bias = some(bias, 0.0, zeros);
        threads.split(y, len * per_chunk(g), |at, y| {
            for (i, y) in y.chunks_exact_mut(len).enumerate() {
                let image = at / len + i;
                let x = &x[image * len..][..len];
                for group in 0..g.groups {
                    let from = group * width;
                    let (mean, inverse) = normalise(x, y, g, from, weight, bias, eps);
                    let place = 2 * (image * g.groups + group);
                    // SAFETY: this chunk alone touches its images' groups.
                    let to = unsafe { stats.range(place..place + 2) };
                    to.copy_from_slice(&[mean, inverse]);
                }
            }
        });
    });
}

/// `own` filled with `value` where there are no values.
fn some<'a>(values: &'a [f32], value: f32, own: &'a mut [f32]) -> &'a [f32] {
    if !values.is_empty() {
        return values;
    }
    own.fill(value);
    own
}

/// Images of a chunk: about 64 KiB.
fn per_chunk(g: Groups) -> usize {
    (crate::par::PIECE / g.image_len().max(1)).max(1)
}

/// Chunks of whole images of the backward pass at most, unless their sums would be too long.
const CHUNKS: usize = 16;

/// How the backward pass is cut, by shape alone: each chunk is several small images, or one image in
/// blocks of pixels. A chunk has a part of the weight gradients for each of its blocks.
#[derive(Clone, Copy)]
struct NormChunks {
    /// Images of a chunk, the last one's fewer.
    images: usize,
    /// Blocks of an image, [`MAX_ROWS`] pixels each, the last one's fewer.
    blocks: usize,
}

impl NormChunks {
    fn of(g: Groups) -> Self {
        let most = (MAX_ROWS / g.pixels.max(1)).max(1);
        NormChunks {
            images: g.images.div_ceil(CHUNKS).clamp(1, most),
            blocks: g.pixels.div_ceil(MAX_ROWS).max(1),
        }
    }
}

/// Elements of the partial weight and bias gradients.
pub fn partials_len(g: Groups) -> usize {
    let cut = NormChunks::of(g);
    g.images.div_ceil(cut.images) * cut.blocks * 2 * g.channels
}

simd! {
    /// One group: channels `from ..` of `width`. `dy` becomes the gradient of `x`; each block of pixels adds its
    /// weight and bias gradients to its own of `parts`.
    fn differentiate(
        x: &[f32], dy: &mut [f32], g: Groups, from: usize, stats: (f32, f32),
        weight: &[f32], parts: &mut [f32],
    ) {
        let (channels, width) = (g.channels, g.width());
        let (mean, inverse) = stats;
        let n = (x.len() / channels * width) as f64;
        let (mut s1, mut s2) = (0.0, 0.0);
        let blocks = x.chunks(MAX_ROWS * channels).zip(dy.chunks_mut(MAX_ROWS * channels));
        for ((x, dy), part) in blocks.zip(parts.chunks_exact_mut(2 * channels)) {
            let (dw, db) = part.split_at_mut(channels);
            let (dw, db) = (&mut dw[from..from + width], &mut db[from..from + width]);
            for (x, d) in x.chunks_exact(channels).zip(dy.chunks_exact_mut(channels)) {
                let (x, d) = (&x[from..from + width], &mut d[from..from + width]);
                let w = &weight[from..from + width];
                for i in 0..width {
                    dw[i] = ((x[i] - mean) * inverse).mul_add(d[i], dw[i]);
                    db[i] += d[i];
                    d[i] *= w[i];
                }
                s1 += sum_of(d, f64::from);
                s2 += sum_of_pairs(x, d, |x, d| (x - mean) * inverse * d);
            }
        }
        let m1 = if g.centred { (s1 / n) as f32 } else { 0.0 };
        let m2 = (s2 / n) as f32;
        for (x, d) in x.chunks_exact(channels).zip(dy.chunks_exact_mut(channels)) {
            let (x, d) = (&x[from..from + width], &mut d[from..from + width]);
            for i in 0..width {
                let h = (x[i] - mean) * inverse;
                d[i] = inverse * (-h).mul_add(m2, d[i] - m1);
            }
        }
    }
}

/// `dy` becomes the gradient of `x`, `dw` and `db` those of weight and bias. `work` holds
/// [`partials_len`] elements.
pub fn backward(
    threads: &ThreadPool,
    g: Groups,
    (x, stats): (&[f32], &[f32]),
    weight: &[f32],
    dy: &mut [f32],
    work: &mut [f32],
    (dw, db): (&mut [f64], &mut [f64]),
) {
    let (len, width, c) = (g.image_len(), g.width(), g.channels);
    if dy.is_empty() {
        return add_parts(&[], dw, db);
    }
    let cut = NormChunks::of(g);
    let dy = Disjoint::new(dy);
    let work = &mut work[..partials_len(g)];
    let piece = cut.blocks * 2 * c;
    scratch(c, |ones| {
        let weight = some(weight, 1.0, ones);
        threads.split(&mut *work, piece, |at, parts| {
            parts.fill(0.0);
            let first = at / piece * cut.images;
            for image in first..(first + cut.images).min(g.images) {
                let range = image * len..(image + 1) * len;
                // SAFETY: this chunk alone touches its images.
                let dy = unsafe { dy.range(range.clone()) };
                for group in 0..g.groups {
                    let place = 2 * (image * g.groups + group);
                    let stats = (stats[place], stats[place + 1]);
                    let x = &x[range.clone()];
                    differentiate(x, dy, g, group * width, stats, weight, parts);
                }
            }
        });
    });
    add_parts(work, dw, db);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::on_each_isa;
    use crate::par::Threads;
    use crate::scalar::noise;

    #[test]
    fn weight_gradients_of_many_pixels_keep_their_digits_and_are_equal_everywhere() {
        for (images, pixels, channels, groups) in [
            (2, 300 * 300, 4, 2),
            (50, 30, 6, 3),
            (40_000, 1, 5, 1),
            (3, 1025, 2, 1),
            (3, 1024, 2, 1),
        ] {
            let g = Groups {
                images,
                pixels,
                channels,
                groups,
                centred: true,
            };
            let x = noise(images * pixels * channels, 1);
            // Terms of one sign, so that a long chain of additions loses digits.
            let dy: Vec<f32> = x.iter().map(|&x| if x > 0.0 { 0.1 } else { 0.0 }).collect();
            let stats = [0.0, 1.0].repeat(images * groups);
            let mut first: Option<(Vec<f64>, Vec<f64>, Vec<f32>)> = None;
            on_each_isa(|isa| {
                for threads in [1, 3] {
                    let threads = ThreadPool::new(Threads(threads));
                    let mut dx = dy.clone();
                    let mut work = vec![f32::NAN; partials_len(g)];
                    let (mut dw, mut db) = (vec![f64::NAN; channels], vec![f64::NAN; channels]);
                    let sums = (&mut dw[..], &mut db[..]);
                    backward(&threads, g, (&x, &stats), &[], &mut dx, &mut work, sums);
                    for c in 0..channels {
                        let terms = || x.iter().zip(&dy).skip(c).step_by(channels);
                        let bias: f64 = terms().map(|(_, &d)| f64::from(d)).sum();
                        let weight: f64 = terms().map(|(&x, &d)| f64::from(x) * f64::from(d)).sum();
                        assert!(
                            (db[c] - bias).abs() < 1e-5 * bias,
                            "{g:?}: {} {bias}",
                            db[c]
                        );
                        assert!(
                            (dw[c] - weight).abs() < 1e-5 * weight,
                            "{g:?}: {} {weight}",
                            dw[c]
                        );
                    }
                    let now = (dw, db, dx);
                    assert_eq!(first.get_or_insert_with(|| now.clone()), &now, "{isa:?}");
                }
            });
        }
    }
}
