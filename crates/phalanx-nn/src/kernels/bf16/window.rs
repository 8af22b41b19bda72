//! A convolution as outputs see it: which source pixels each tap reads.

use crate::kernels::conv::ConvShape;

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
    pub turned: bool,
}

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
            turned: false,
        };
        for ky in 0..s.kernel[0] {
            for kx in 0..s.kernel[1] {
                let at = |d: usize, k| (k * s.dilation[d]) as isize - s.padding[d] as isize;
                w.push([at(0, ky), at(1, kx)], ky * s.kernel[1] + kx);
            }
        }
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
                    turned: true,
                };
                // Output that input `start` reaches through a tap, if this phase does.
                let at = |d: usize, k: usize| {
                    let far = (start[d] + s.padding[d]) as isize - (k * s.dilation[d]) as isize;
                    let stride = s.stride[d] as isize;
                    (far.rem_euclid(stride) == 0).then_some(far.div_euclid(stride))
                };
                for ky in 0..s.kernel[0] {
                    for kx in 0..s.kernel[1] {
                        if let (Some(y), Some(x)) = (at(0, ky), at(1, kx)) {
                            w.push([y, x], ky * s.kernel[1] + kx);
                        }
                    }
                }
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

    fn push(&mut self, offset: [isize; 2], tap: usize) {
        self.offsets[self.count] = offset;
        self.taps[self.count] = tap as u8;
        self.count += 1;
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
