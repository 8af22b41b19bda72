//! Windows of a convolution: which source pixels each output reads under each tap.

use super::DEPTH;
use crate::conv::ConvShape;

/// Kernel taps at most: tables lie on the stack.
pub(super) const MAX_TAPS: usize = 49;

/// Output (j, i) of the grid reads source pixel (j, i) * step + offset under each
/// tap; outside of the source there are zeros.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub images: usize,
    pub source: [usize; 2],
    pub channels: usize,
    pub grid: [usize; 2],
    pub step: [usize; 2],
    pub offsets: [[isize; 2]; MAX_TAPS],
    /// Which tap of the kernel each is.
    pub taps: [u8; MAX_TAPS],
    pub count: usize,
    /// Whether weights enter transposed: `channels` are the layer's outputs.
    pub transposed: bool,
}

/// Channels of a run: the rows of a tile that the taps of a column share stay in the
/// L1 cache from one to the next.
const RUN: usize = 128;
/// Runs of a product at most.
pub(super) const MAX_RUNS: usize = 1024;

/// Where outputs of a grid lie among the pixels of an image.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub size: [usize; 2],
    pub start: [usize; 2],
    pub step: [usize; 2],
}

impl Window {
    /// Outputs of the layer over its inputs.
    pub(super) fn forward(s: &ConvShape) -> Self {
        let mut w = Window {
            images: s.images,
            source: s.input,
            channels: s.inp,
            grid: s.output,
            step: s.stride,
            offsets: [[0; 2]; MAX_TAPS],
            taps: [0; MAX_TAPS],
            count: 0,
            transposed: false,
        };
        let at = |d: usize, k| (k * s.dilation[d]) as isize - s.padding[d] as isize;
        w.fill(s, |ky, kx| Some([at(0, ky), at(1, kx)]));
        w.flattened()
    }

    /// Input gradients over output gradients: one window for each phase of the stride.
    pub(super) fn phases(s: &ConvShape, mut f: impl FnMut(&Window, Place)) {
        for a in 0..s.stride[0].min(s.input[0]) {
            for b in 0..s.stride[1].min(s.input[1]) {
                let start = [a, b];
                let mut w = Window {
                    images: s.images,
                    source: s.output,
                    channels: s.out,
                    grid: [0, 1].map(|d| (s.input[d] - start[d]).div_ceil(s.stride[d])),
                    step: [1, 1],
                    offsets: [[0; 2]; MAX_TAPS],
                    taps: [0; MAX_TAPS],
                    count: 0,
                    transposed: true,
                };
                // Output that input `start` reaches through a tap, if this phase does.
                let at = |d: usize, k: usize| {
                    let far = (start[d] + s.padding[d]) as isize - (k * s.dilation[d]) as isize;
                    let stride = s.stride[d] as isize;
                    (far.rem_euclid(stride) == 0).then_some(far.div_euclid(stride))
                };
                w.fill(s, |ky, kx| Some([at(0, ky)?, at(1, kx)?]));
                let place = Place {
                    size: s.input,
                    start,
                    step: s.stride,
                };
                if s.stride == [1, 1] {
                    w = w.flattened();
                }
                f(&w, place);
            }
        }
    }

    /// Notes the taps that have an offset: row by row where windows are gathered (their
    /// rows are copied whole), else column by column.
    fn fill(&mut self, s: &ConvShape, offset: impl Fn(usize, usize) -> Option<[isize; 2]>) {
        let [rows, columns] = s.kernel;
        for i in 0..rows * columns {
            let (ky, kx) = if self.gathered() {
                (i / columns, i % columns)
            } else {
                (i % rows, i / rows)
            };
            if let Some(offset) = offset(ky, kx) {
                self.offsets[self.count] = offset;
                self.taps[self.count] = (ky * columns + kx) as u8;
                self.count += 1;
            }
        }
    }

    /// Whether channels are too few for slots of their own: a slot holds all taps of an output.
    pub(super) fn gathered(&self) -> bool {
        !self.channels.is_multiple_of(DEPTH)
    }

    /// Channels of a run of the product's inner dimension.
    pub(super) fn run(&self) -> usize {
        let runs = self.count * (self.channels / RUN);
        if self.count > 1 && self.channels.is_multiple_of(RUN) && runs <= MAX_RUNS {
            RUN
        } else {
            self.channels
        }
    }

    /// Tap and first channel of a run: column by column of the kernel, all taps of
    /// a column for some channels, then for the next.
    pub(super) fn run_at(&self, run: usize) -> (usize, usize) {
        let parts = self.channels / self.run();
        let (mut first, mut rest) = (0, run);
        loop {
            let column = self.offsets[first][1];
            let taps = &self.offsets[first..self.count];
            let taps = taps.iter().take_while(|o| o[1] == column).count();
            if rest < taps * parts || first + taps == self.count {
                return (first + rest % taps, rest / taps * self.run());
            }
            rest -= taps * parts;
            first += taps;
        }
    }

    /// A 1x1 kernel that moves nothing: every pixel is an image of its own, so that
    /// chunks can end anywhere.
    fn flattened(self) -> Self {
        let plain = self.count == 1 && self.offsets[0] == [0, 0] && self.step == [1, 1];
        if !plain || self.source != self.grid {
            return self;
        }
        Window {
            images: self.images * self.grid[0] * self.grid[1],
            source: [1, 1],
            grid: [1, 1],
            ..self
        }
    }

    /// Inner dimension of the product: taps times channels.
    pub(super) fn depth(&self) -> usize {
        self.count * self.channels
    }
}
