//! Drawing of strokes.

use super::glyphs::Stroke;
use super::{PIXELS, SIDE};
use crate::words::Words;

/// Height of an upright digit of mean size in pixels, as in MNIST.
const HEIGHT_PX: f32 = 19.0;
/// Width of a digit's box in pixels.
const WIDTH_PX: f32 = 17.0;
/// Maximum displacement of a control point, in units of the digit's box.
const SHAKE: f32 = 0.09;
/// Tangent of half the maximum rotation: 0.16 is 18 degrees.
const HALF_TURN: f32 = 0.16;
const MAX_SHEAR: f32 = 0.3;
const MAX_SHIFT_PX: f32 = 3.0;
/// Number of line segments between two points of a curve.
const PIECES: usize = 4;
/// Maximum number of points of a stroke.
const MAX_POINTS: usize = 16;
/// Squared distance of a pixel far from all strokes.
const FAR: f32 = 1e6;

/// Parameters of one sample: an affine map, width and intensity of the pen.
pub(super) struct Hand {
    /// Pixel = matrix · (point − centre of the box) + shift.
    matrix: [[f32; 2]; 2],
    shift: [f32; 2],
    /// Half the width of the pen in pixels.
    radius: f32,
    ink: f32,
}

impl Hand {
    pub(super) fn random(words: &mut Words) -> Self {
        // Cosine and sine without a library function, whose last bits differ between
        // platforms.
        let t = words.around(HALF_TURN);
        let norm = 1.0 + t * t;
        let (cos, sin) = ((1.0 - t * t) / norm, 2.0 * t / norm);
        let shear = words.around(MAX_SHEAR);
        let width = WIDTH_PX * words.between(0.65, 1.15);
        let height = HEIGHT_PX * words.between(0.75, 1.1);
        let centre = SIDE as f32 / 2.0;
        Self {
            matrix: [
                [cos * width, (cos * shear - sin) * height],
                [sin * width, (sin * shear + cos) * height],
            ],
            shift: [
                centre + words.around(MAX_SHIFT_PX),
                centre + words.around(MAX_SHIFT_PX),
            ],
            radius: words.between(0.55, 1.7),
            ink: words.between(0.55, 1.0),
        }
    }

    fn place(&self, [x, y]: [f32; 2]) -> [f32; 2] {
        let (x, y) = (x - 0.5, y - 0.5);
        let [row0, row1] = self.matrix;
        [
            row0[0] * x + row0[1] * y + self.shift[0],
            row1[0] * x + row1[1] * y + self.shift[1],
        ]
    }
}

/// For every pixel, the squared distance to the nearest stroke.
pub(super) struct Canvas {
    nearest: [f32; PIXELS],
}

/// Maximum distance of ink from the center line in pixels: the largest radius and the soft
/// edge.
const REACH_PX: f32 = 2.3;

impl Canvas {
    pub(super) fn new() -> Self {
        Self {
            nearest: [FAR; PIXELS],
        }
    }

    /// Draws one stroke with displaced control points.
    pub(super) fn stroke(&mut self, stroke: &Stroke, hand: &Hand, words: &mut Words) {
        let mut points = [[0.0; 2]; MAX_POINTS];
        let (of_stroke, _) = stroke.points.as_chunks::<2>();
        let count = of_stroke.len().min(MAX_POINTS);
        for (placed, &[x, y]) in points.iter_mut().zip(of_stroke) {
            let shaken = [x + words.around(SHAKE), y + words.around(SHAKE)];
            *placed = hand.place(shaken);
        }
        let points = &points[..count];
        if stroke.smooth {
            self.curve(points);
        } else {
            for pair in points.windows(2) {
                self.segment(pair[0], pair[1]);
            }
        }
    }

    /// Draws a stroke that belongs to no digit.
    pub(super) fn stray(&mut self, words: &mut Words) {
        let side = SIDE as f32;
        let from = [words.between(0.0, side), words.between(0.0, side)];
        let to = [from[0] + words.around(8.0), from[1] + words.around(8.0)];
        self.segment(from, to);
    }

    /// A Catmull-Rom curve through the points.
    fn curve(&mut self, points: &[[f32; 2]]) {
        let last = points.len().saturating_sub(1);
        for i in 0..last {
            let around = [
                points[i.saturating_sub(1)],
                points[i],
                points[i + 1],
                points[(i + 2).min(last)],
            ];
            let mut from = points[i];
            for piece in 1..=PIECES {
                let to = catmull_rom(around, piece as f32 / PIECES as f32);
                self.segment(from, to);
                from = to;
            }
        }
    }

    /// Updates every pixel near a line segment.
    fn segment(&mut self, a: [f32; 2], b: [f32; 2]) {
        let direction = [b[0] - a[0], b[1] - a[1]];
        let length2 = direction[0] * direction[0] + direction[1] * direction[1];
        let per_length2 = if length2 > 0.0 { 1.0 / length2 } else { 0.0 };
        let (left, right) = span(a[0], b[0]);
        let (top, bottom) = span(a[1], b[1]);
        for row in top..bottom {
            let y = row as f32 + 0.5 - a[1];
            let pixels = &mut self.nearest[row * SIDE + left..row * SIDE + right];
            for (i, nearest) in pixels.iter_mut().enumerate() {
                let x = (left + i) as f32 + 0.5 - a[0];
                // The nearest point of the segment.
                let along = (x * direction[0] + y * direction[1]) * per_length2;
                let along = along.clamp(0.0, 1.0);
                let dx = x - along * direction[0];
                let dy = y - along * direction[1];
                *nearest = nearest.min(dx * dx + dy * dy);
            }
        }
    }

    /// Converts distances to ink over noise, one byte per pixel.
    pub(super) fn develop(&self, hand: &Hand, noise: f32, words: &mut Words, pixels: &mut [u8]) {
        // A pixel half a pixel beyond the radius is half covered.
        let edge = hand.radius + 0.5;
        let noise = noise / 128.0;
        for (four, distances) in pixels.chunks_exact_mut(4).zip(self.nearest.chunks_exact(4)) {
            let dirt = words.word().to_le_bytes();
            for ((pixel, &distance), dirt) in four.iter_mut().zip(distances).zip(dirt) {
                let ink = if distance < edge * edge {
                    hand.ink * (edge - distance.sqrt()).min(1.0)
                } else {
                    0.0
                };
                let value = ink + noise * (f32::from(dirt) - 128.0);
                *pixel = (value.clamp(0.0, 1.0) * 255.0 + 0.5) as u8;
            }
        }
    }
}

/// Pixels near the interval between `a` and `b`, limited to the image.
fn span(a: f32, b: f32) -> (usize, usize) {
    let low = (a.min(b) - REACH_PX).clamp(0.0, SIDE as f32);
    let high = (a.max(b) + REACH_PX).clamp(0.0, SIDE as f32);
    (low as usize, high.ceil() as usize)
}

/// The curve between the two middle points, at `t` in 0 ..= 1.
fn catmull_rom(p: [[f32; 2]; 4], t: f32) -> [f32; 2] {
    let coordinate = |k: usize| {
        let [a, b, c, d] = [p[0][k], p[1][k], p[2][k], p[3][k]];
        let cubic = 3.0 * (b - c) + d - a;
        let square = 2.0 * a - 5.0 * b + 4.0 * c - d;
        0.5 * (2.0 * b + t * (c - a + t * (square + t * cubic)))
    };
    [coordinate(0), coordinate(1)]
}
