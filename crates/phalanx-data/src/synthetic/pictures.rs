//! Generated pictures: a replacement for CIFAR-10 that can be learned and needs no
//! download.
//!
//! Ten classes: five shapes, plain or striped, with random colors, position and size over a
//! noisy gradient, so that neither a pixel nor a color reveals the class. As for the
//! generated digits, sample i depends on (seed, i) alone, and only additions,
//! multiplications, divisions and square roots are used.

use crate::cifar10::{CHANNELS, CLASSES, SIDE};
use crate::words::Words;

/// Separates these random numbers from those of the digits.
const SEED_MIX: u64 = 0x7069_6374_7572_6573;

/// Draws one picture and returns its class: the shape, plus five if striped.
pub(super) fn draw(seed: u64, sample: u64, pixels: &mut [u8]) -> u32 {
    let mut words = Words::new(seed ^ SEED_MIX, sample);
    let label = words.below(CLASSES as u32);
    let (shape, striped) = (label % 5, label >= 5);
    let ground = colour(&mut words);
    let ink = apart(colour(&mut words), ground);
    let second = apart(colour(&mut words), ink);
    let slope = [words.around(2.0), words.around(2.0)];
    let size = words.between(6.0, 11.0);
    let place = words.between(0.0, SIDE as f32 - 2.0 * size);
    let centre_x = size + place;
    let centre_y = size + words.between(0.0, SIDE as f32 - 2.0 * size);
    let noise = words.between(4.0, 24.0);
    for y in 0..SIDE {
        for x in 0..SIDE {
            let (dx, dy) = (x as f32 - centre_x, y as f32 - centre_y);
            let inside = match shape {
                // A disk, a square, a triangle, a ring, a cross.
                0 => dx * dx + dy * dy < size * size,
                1 => dx.abs() < 0.85 * size && dy.abs() < 0.85 * size,
                2 => dy < 0.8 * size && dy > -size && 2.0 * dx.abs() < dy + size,
                3 => {
                    let r = dx * dx + dy * dy;
                    r < size * size && r > 0.3 * size * size
                }
                _ => dx.abs().min(dy.abs()) < 0.3 * size && dx.abs().max(dy.abs()) < size,
            };
            let stripe = striped && (y / 2).is_multiple_of(2);
            for c in 0..CHANNELS {
                let value = match (inside, stripe) {
                    (false, _) => {
                        ground[c] + slope[0] * (x as f32 - 16.0) + slope[1] * (y as f32 - 16.0)
                    }
                    (true, false) => ink[c],
                    (true, true) => second[c],
                };
                let value = value + words.around(noise);
                pixels[(y * SIDE + x) * CHANNELS + c] = value.clamp(0.0, 255.0) as u8;
            }
        }
    }
    label
}

fn colour(words: &mut Words) -> [f32; CHANNELS] {
    std::array::from_fn(|_| words.between(20.0, 235.0))
}

/// `colour`, moved to the other side of the range if it is too similar to `other`.
fn apart(colour: [f32; CHANNELS], other: [f32; CHANNELS]) -> [f32; CHANNELS] {
    let distance: f32 = colour.iter().zip(&other).map(|(a, b)| (a - b).abs()).sum();
    if distance > 120.0 {
        return colour;
    }
    std::array::from_fn(|c| if other[c] < 128.0 { 230.0 } else { 25.0 })
}
