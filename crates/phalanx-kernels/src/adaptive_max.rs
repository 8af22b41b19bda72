//! Adaptive max pooling, channels-last: the windows of adaptive averages, and where
//! each one's first maximum lies.

use super::avg_pool::{AvgShape, windows};
use crate::par::{Disjoint, ThreadPool};

/// The largest value of each window (a NaN if there is one), and in `at` the bits of
/// the number of the pixel of the image that has it.
pub fn forward(threads: &ThreadPool, s: &AvgShape, x: &[f32], y: &mut [f32], at: &mut [f32]) {
    let c = s.channels;
    let (il, ol) = (s.input[0] * s.input[1] * c, s.output[0] * s.output[1] * c);
    let places = Disjoint::new(at);
    threads.split(y, ol, |first, y| {
        let x = &x[first / ol * il..][..il];
        // SAFETY: an image's places belong to its chunk.
        let at = unsafe { places.range(first..first + ol) };
        windows(s, |o, rows, columns, _| {
            let (y, at) = (&mut y[o * c..][..c], &mut at[o * c..][..c]);
            let corner = rows.start * s.input[1] + columns.start;
            y.fill(f32::NEG_INFINITY);
            at.fill(f32::from_bits(corner as u32));
            for row in rows {
                for pixel in row * s.input[1] + columns.start..row * s.input[1] + columns.end {
                    let from = &x[pixel * c..][..c];
                    for ((y, at), &v) in y.iter_mut().zip(at.iter_mut()).zip(from) {
                        if v > *y || v.is_nan() {
                            (*y, *at) = (v, f32::from_bits(pixel as u32));
                        }
                    }
                }
            }
        });
    });
}

/// `dx`: each output's gradient goes to the pixel that [`forward`] found.
pub fn backward(threads: &ThreadPool, s: &AvgShape, dy: &[f32], at: &[f32], dx: &mut [f32]) {
    let c = s.channels;
    let (il, ol) = (s.input[0] * s.input[1] * c, s.output[0] * s.output[1] * c);
    threads.split(dx, il, |first, dx| {
        dx.fill(0.0);
        let own = first / il * ol..(first / il + 1) * ol;
        for (i, (&d, &at)) in dy[own.clone()].iter().zip(&at[own]).enumerate() {
            dx[at.to_bits() as usize * c + i % c] += d;
        }
    });
}
