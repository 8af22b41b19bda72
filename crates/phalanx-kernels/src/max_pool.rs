//! Max-pooling, channels-last. The first maximum in row-major window order
//! takes the gradient; of several NaN the last wins; padding never wins.

use std::ops::Range;

use super::element::Element;
use crate::par::{Disjoint, ThreadPool};

/// Shape of one pooling: sizes are (height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Images of the batch.
    pub images: usize,
    /// Channels.
    pub channels: usize,
    /// Size of the input.
    pub input: [usize; 2],
    /// Size of the output.
    pub output: [usize; 2],
    /// Size of a window.
    pub kernel: [usize; 2],
    /// Distance between two windows.
    pub stride: [usize; 2],
    /// Places around the input, which never win.
    pub padding: [usize; 2],
    /// Distance between two taps of a window.
    pub dilation: [usize; 2],
}

impl PoolShape {
    fn in_len(&self) -> usize {
        self.input[0] * self.input[1] * self.channels
    }

    fn out_len(&self) -> usize {
        self.output[0] * self.output[1] * self.channels
    }

    /// Whether every input pixel belongs to exactly one window.
    fn tiles(&self) -> bool {
        (0..2).all(|d| {
            self.padding[d] == 0
                && self.dilation[d] == 1
                && self.stride[d] == self.kernel[d]
                && self.input[d] == self.output[d] * self.kernel[d]
        })
    }

    /// Whether no two windows share a pixel, so that a gradient's elements are not sums.
    pub fn is_disjoint(&self) -> bool {
        (0..2).all(|d| self.stride[d] > (self.kernel[d] - 1) * self.dilation[d])
    }

    /// The taps along dimension `d` of output position `at` that lie inside
    /// the image: their numbers, and the input position of tap 0 plus padding.
    #[inline(always)]
    fn taps(&self, d: usize, at: usize) -> (Range<usize>, usize) {
        let first = at * self.stride[d];
        // Number of taps that start before position `end` (in padded terms).
        let before = |end: usize| {
            end.saturating_sub(first)
                .div_ceil(self.dilation[d])
                .min(self.kernel[d])
        };
        (
            before(self.padding[d])..before(self.padding[d] + self.input[d]),
            first,
        )
    }
}

/// Channels handled at a time, in registers.
const LANES: usize = 16;

simd! {
    fn forward_image<T: Element>(s: &PoolShape, x: &[T], y: &mut [T], at: &mut [u8]) {
        let c = s.channels;
        for oy in 0..s.output[0] {
            let (kys, y0) = s.taps(0, oy);
            for ox in 0..s.output[1] {
                let (kxs, x0) = s.taps(1, ox);
                let o = (oy * s.output[1] + ox) * c;
                for c0 in (0..c).step_by(LANES) {
                    let n = LANES.min(c - c0);
                    let mut best = [f32::NEG_INFINITY; LANES];
                    // Until something wins, the first tap inside the image does.
                    let mut place = [u32::MAX; LANES];
                    for ky in kys.clone() {
                        let row = (y0 + ky * s.dilation[0] - s.padding[0]) * s.input[1];
                        for kx in kxs.clone() {
                            let pixel = row + x0 + kx * s.dilation[1] - s.padding[1];
                            let t = (ky * s.kernel[1] + kx) as u32;
                            let mut v = [f32::NEG_INFINITY; LANES];
                            let from = &x[pixel * c + c0..][..n];
                            if let Ok(full) = <&[T; LANES]>::try_from(from) {
                                for i in 0..LANES {
                                    v[i] = full[i].wide();
                                }
                            } else {
                                v.iter_mut().zip(from).for_each(|(v, f)| *v = f.wide());
                            }
                            for i in 0..LANES {
                                let wins = v[i] > best[i] || v[i].is_nan() || place[i] == u32::MAX;
                                best[i] = if wins { v[i] } else { best[i] };
                                place[i] = if wins { t } else { place[i] };
                            }
                        }
                    }
                    let bytes = place.map(|p| p as u8);
                    let to = y[o + c0..o + c0 + n].iter_mut();
                    to.zip(&best).for_each(|(y, b)| *y = T::of(*b));
                    at[o + c0..o + c0 + n].copy_from_slice(&bytes[..n]);
                }
            }
        }
    }
}

simd! {
    fn backward_image<T: Element>(s: &PoolShape, dy: &[T], at: &[u8], dx: &mut [T]) {
        let c = s.channels;
        let once = s.tiles();
        if !once {
            dx.fill(T::default());
        }
        for oy in 0..s.output[0] {
            let (kys, y0) = s.taps(0, oy);
            for ox in 0..s.output[1] {
                let (kxs, x0) = s.taps(1, ox);
                let o = (oy * s.output[1] + ox) * c;
                let (d, a) = (&dy[o..o + c], &at[o..o + c]);
                for ky in kys.clone() {
                    let row = (y0 + ky * s.dilation[0] - s.padding[0]) * s.input[1];
                    for kx in kxs.clone() {
                        let pixel = row + x0 + kx * s.dilation[1] - s.padding[1];
                        let t = (ky * s.kernel[1] + kx) as u8;
                        let taps = dx[pixel * c..][..c].iter_mut().zip(d).zip(a);
                        if once {
                            taps.for_each(|((g, &d), &a)| *g = if a == t { d } else { T::default() });
                        } else {
                            taps.for_each(|((g, &d), &a)| {
                                let d = if a == t { d.wide() } else { 0.0 };
                                *g = T::of(g.wide() + d);
                            });
                        }
                    }
                }
            }
        }
    }
}

/// `y` and, per output element, the winning window position.
#[inline(never)]
pub fn forward<T: Element>(
    threads: &ThreadPool,
    s: &PoolShape,
    x: &[T],
    y: &mut [T],
    at: &mut [u8],
) {
    let (il, ol) = (s.in_len(), s.out_len());
    let (y, at) = (Disjoint::new(y), Disjoint::new(at));
    threads.run(s.images, |i| {
        let own = i * ol..(i + 1) * ol;
        // SAFETY: chunk i alone touches image i of both outputs.
        let (y, at) = unsafe { (y.range(own.clone()), at.range(own)) };
        forward_image(s, &x[i * il..(i + 1) * il], y, at);
    });
}

/// `dx`: each output's gradient goes to its winner.
#[inline(never)]
pub fn backward<T: Element>(
    threads: &ThreadPool,
    s: &PoolShape,
    dy: &[T],
    at: &[u8],
    dx: &mut [T],
) {
    let (il, ol) = (s.in_len(), s.out_len());
    let dx = Disjoint::new(dx);
    threads.run(s.images, |i| {
        // SAFETY: chunk i alone touches image i.
        let dx = unsafe { dx.range(i * il..(i + 1) * il) };
        backward_image(s, &dy[i * ol..(i + 1) * ol], &at[i * ol..(i + 1) * ol], dx);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Bf16;
    use crate::isa::on_each_isa;
    use crate::par::Threads;
    use crate::scalar::noise;

    #[test]
    fn bf16_is_the_rounded_f32() {
        let threads = ThreadPool::new(Threads(2));
        // Windows that cover the image, leave its edge out, and lie apart.
        for (input, output, kernel, stride) in [(8, 4, 2, 2), (7, 3, 2, 2), (9, 3, 2, 3)] {
            let s = PoolShape {
                images: 3,
                channels: 21,
                input: [input; 2],
                output: [output; 2],
                kernel: [kernel; 2],
                stride: [stride; 2],
                padding: [0, 0],
                dilation: [1, 1],
            };
            assert!(s.is_disjoint());
            let narrow = |len: usize, seed| -> Vec<Bf16> {
                noise(len, seed).iter().map(|v| Bf16::of(*v)).collect()
            };
            let wide = |v: &[Bf16]| v.iter().map(|v| v.wide()).collect::<Vec<f32>>();
            let (len, to) = (3 * s.in_len(), 3 * s.out_len());
            let (x, dy) = (narrow(len, 1), narrow(to, 2));
            on_each_isa(|isa| {
                let (mut y, mut at) = (vec![Bf16::default(); to], vec![9; to]);
                forward(&threads, &s, &x, &mut y, &mut at);
                let (mut want, mut places) = (vec![0.0; to], vec![9; to]);
                forward(&threads, &s, &wide(&x), &mut want, &mut places);
                assert_eq!((wide(&y), &at), (want, &places), "{isa:?}");
                let mut dx = vec![Bf16::of(5.0); len];
                backward(&threads, &s, &dy, &at, &mut dx);
                let mut want = vec![5.0; len];
                backward(&threads, &s, &wide(&dy), &at, &mut want);
                assert_eq!(wide(&dx), want, "{isa:?}");
            });
        }
    }

    #[test]
    fn last_nan_wins_and_all_minus_infinity_has_a_place() {
        let s = PoolShape {
            images: 1,
            channels: 1,
            input: [2, 2],
            output: [1, 1],
            kernel: [2, 2],
            stride: [2, 2],
            padding: [0, 0],
            dilation: [1, 1],
        };
        let run = |x: [f32; 4]| {
            let (mut y, mut at) = ([0.0], [9]);
            forward(&ThreadPool::new(Threads(1)), &s, &x, &mut y, &mut at);
            (y[0], at[0])
        };
        let (v, at) = run([1.0, f32::NAN, f32::NAN, 3.0]);
        assert!(v.is_nan() && at == 2);
        assert_eq!(run([f32::NEG_INFINITY; 4]), (f32::NEG_INFINITY, 0));
        assert_eq!(run([1.0, 2.0, 2.0, 0.0]), (2.0, 1));
    }
}
