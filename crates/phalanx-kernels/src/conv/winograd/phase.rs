//! Stride 2 by the same transforms. Pixels of even and of odd rows and columns are four images,
//! the phases, whose channels lie one phase after another. A row or column of the kernel has tap 1
//! for even pixels, and taps 0 and 2 for odd ones. The other weights of its tile are zeros, and so
//! are whole positions of the transform: 81 products are left for 16 outputs where the plain sum
//! takes 144.

use std::ops::Range;

use super::transform::SIDE;
use crate::vector::LANES;

/// 1 where a phase has the odd rows, or columns. In this order the phases that a position has
/// follow one another.
const ODD: [[usize; 2]; 4] = [[0, 0], [1, 0], [1, 1], [0, 1]];
/// The phase that has the positions of all others. The side without phases has the same.
const WIDEST: usize = 2;
/// Stride 1: one image, all positions, all taps.
const WHOLE: usize = ODD.len();

/// Whether a phase has position (i, j) of the transform. The others are always zero.
#[inline(always)]
pub(super) fn has(phase: usize, i: usize, j: usize) -> bool {
    phase == WHOLE || (i > 0 && j > 0 && i < 5 + ODD[phase][0] && j < 5 + ODD[phase][1])
}

/// The layer's tap at (y, x) of a phase's kernel; `None` where that has a zero.
#[inline(always)]
pub(super) fn tap(phase: usize, y: usize, x: usize) -> Option<usize> {
    if phase == WHOLE {
        return Some(y * 3 + x);
    }
    let [a, b] = ODD[phase];
    match y > 0 && x > 0 && y < 2 + a && x < 2 + b {
        true => Some((2 * y - 1 - a) * 3 + 2 * x - 1 - b),
        false => None,
    }
}

/// Channels of one side of a layer (its inputs or its outputs), in all their phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    /// Channels of a pixel.
    pub channels: usize,
    /// The layer's stride where this side has its phases, 1 on the other.
    pub stride: usize,
    /// The layer's stride.
    of: usize,
}

impl Side {
    /// The sides of a layer of this stride: the one with its phases, and the other.
    pub(super) fn both(stride: usize, [larger, smaller]: [usize; 2]) -> [Self; 2] {
        [(larger, stride), (smaller, 1)].map(|(channels, side)| Side {
            channels,
            stride: side,
            of: stride,
        })
    }

    fn phases(self) -> Range<usize> {
        match (self.stride, self.of) {
            (2, _) => 0..WHOLE,
            (_, 2) => WIDEST..WIDEST + 1,
            _ => WHOLE..WHOLE + 1,
        }
    }

    /// Channels of all phases.
    pub(super) fn all(self) -> usize {
        self.channels * self.phases().len()
    }

    /// The phase of one of all channels, and which of a pixel's channels it is.
    #[inline(always)]
    pub(super) fn place(self, channel: usize) -> (usize, usize) {
        let phase = self.phases().start + channel / self.channels;
        (phase, channel % self.channels)
    }

    /// First row and column of a phase.
    #[inline(always)]
    pub(super) fn start(self, phase: usize) -> [usize; 2] {
        if self.stride == 2 { ODD[phase] } else { [0, 0] }
    }

    /// The channels from `first` on, `count` of them, that position `p` has.
    pub(super) fn at(self, p: usize, first: usize, count: usize) -> Range<usize> {
        let has = |&phase: &usize| has(phase, p / SIDE, p % SIDE);
        let before = self.phases().take_while(|p| !has(p)).count() * self.channels;
        let here = self.phases().filter(has).count() * self.channels;
        let from = before.max(first);
        from..(before + here).min(first + count).max(from)
    }

    /// As [`at`](Self::at), in panels of sixteen.
    pub(super) fn panels_at(self, p: usize, first: usize, count: usize) -> Range<usize> {
        let channels = self.at(p, first * LANES, count * LANES);
        channels.start / LANES..channels.end / LANES
    }
}
