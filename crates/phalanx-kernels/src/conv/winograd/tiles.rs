//! Images cut into tiles, and the passes between images and the transformed
//! domain, where position p of all tiles is one matrix: `[channels / 16][tiles][16]`.

use super::phase::{Side, has};
use super::transform::{self, POSITIONS, SIDE, STEP};
use super::weights::Rows;
use crate::element::Element;
use crate::vector::{LANES, Vector};

/// A convolution's tiles: 4x4 outputs each, over 6x6 inputs (of each phase).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub images: usize,
    pub input: [usize; 2],
    pub output: [usize; 2],
    pub padding: usize,
    pub inp: Side,
    pub out: Side,
}

impl Grid {
    fn down(&self) -> usize {
        self.output[0].div_ceil(self.out.stride * STEP)
    }

    fn across(&self) -> usize {
        self.output[1].div_ceil(self.out.stride * STEP)
    }

    /// Number of tiles.
    pub(super) fn tiles(&self) -> usize {
        self.images * self.down() * self.across()
    }

    /// Image, and first output row and column of a tile.
    #[inline(always)]
    fn place(&self, tile: usize) -> (usize, usize, usize) {
        let (row, column) = (tile / self.across(), tile % self.across());
        (row / self.down(), row % self.down() * STEP, column * STEP)
    }

    /// Where the tiles' pixels lie in images of `size`, to prefetch them: whole rows of tiles, and
    /// of tiles behind the last one, its row.
    pub(super) fn rows<T: Element>(
        &self,
        s: Span,
        images: *const T,
        size: [usize; 2],
        side: Side,
    ) -> Rows {
        let step = STEP * side.stride;
        let line = |tile: usize| {
            let (image, y, _) = self.place(tile);
            (image * size[0] + y * side.stride).min((self.images * size[0]).saturating_sub(step))
        };
        let last = (s.first + s.count).min(self.tiles()) - 1;
        let (from, to) = (line(s.first.min(last)), line(last) + step);
        let row = size[1] * side.channels;
        let floats = (to - from) * row * size_of::<T>() / size_of::<f32>();
        Rows::run(images.wrapping_add(from * row).cast(), floats)
    }
}

/// The transformed domain of some tiles.
#[derive(Clone, Copy)]
pub(super) struct Domain {
    pub data: *mut f32,
    /// Floats from one position to the next.
    pub plane: usize,
    /// Tiles that a panel has room for.
    pub rows: usize,
    /// The first of all channels that it has, and how many.
    pub first: usize,
    pub channels: usize,
}

impl Domain {
    /// Floats of one position: a line more than it holds, because positions a multiple
    /// of 4 KiB apart would share the same cache sets.
    pub(super) const fn plane(rows: usize, channels: usize) -> usize {
        rows * channels + LANES
    }

    /// Floats of all positions.
    pub(super) const fn len(rows: usize, channels: usize) -> usize {
        POSITIONS * Self::plane(rows, channels)
    }

    pub(super) fn new(data: &mut [f32], rows: usize, channels: usize) -> Self {
        assert!(data.len() >= Self::len(rows, channels));
        Domain {
            data: data.as_mut_ptr(),
            plane: Self::plane(rows, channels),
            rows,
            first: 0,
            channels,
        }
    }

    /// Where channel `channel` of position `p` starts.
    ///
    /// # Safety
    /// The domain has both; the channel is the first of a panel.
    pub(super) unsafe fn channel(&self, p: usize, channel: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe {
            self.data
                .add(p * self.plane + (channel - self.first) * self.rows)
        }
    }

    /// Sixteen channels of one tile at position (i, j).
    #[inline(always)]
    unsafe fn at(&self, i: usize, j: usize, panel: usize, row: usize) -> *mut f32 {
        // SAFETY: the caller stays inside.
        unsafe {
            self.data
                .add((i * SIDE + j) * self.plane + (panel * self.rows + row) * LANES)
        }
    }
}

/// Which tiles a pass is about, and where the first lies in the domain.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub first: usize,
    pub count: usize,
    pub row: usize,
}

impl Span {
    /// As many tiles, behind these.
    pub(super) fn next(self) -> Self {
        Span {
            first: self.first + self.count,
            ..self
        }
    }
}

/// Pixels of a square with its corner at (top, left); those outside the image
/// read `zeros`.
#[inline(always)]
unsafe fn pixels<S: Element, const N: usize>(
    image: *const S,
    size: [usize; 2],
    side: Side,
    (top, left): (isize, isize),
    zeros: *const S,
) -> [[*const S; N]; N] {
    let (stride, channels) = (side.stride as isize, side.channels);
    let mut p = [[zeros; N]; N];
    for (i, row) in p.iter_mut().enumerate() {
        let y = top + i as isize * stride;
        if y < 0 || y >= size[0] as isize {
            continue;
        }
        for (j, p) in row.iter_mut().enumerate() {
            let x = left + j as isize * stride;
            if x >= 0 && x < size[1] as isize {
                // SAFETY: inside the image.
                *p = unsafe { image.add((y as usize * size[1] + x as usize) * channels) };
            }
        }
    }
    p
}

#[inline(always)]
unsafe fn input_phase<V: Vector, S: Element>(
    g: &Grid,
    x: *const S,
    zeros: *const S,
    s: Span,
    to: Domain,
    (phase, first): (usize, usize),
) {
    let c = g.inp.channels;
    let (start, stride) = (g.inp.start(phase), g.inp.stride as isize);
    let corner =
        |at: usize, d: usize| (at as isize - g.padding as isize) * stride - start[d] as isize;
    for n in 0..s.count {
        let (image, y, left) = g.place(s.first + n);
        // SAFETY: the tile lies in the images, its row in the domain.
        unsafe {
            let image = x.add(image * g.input[0] * g.input[1] * c);
            let corner = (corner(y, 0), corner(left, 1));
            let from = pixels::<S, SIDE>(image, g.input, g.inp, corner, zeros);
            for panel in 0..c / LANES {
                transform::input_tile::<V>(
                    |i, j| V::load_from(from[i][j].add(panel * LANES)),
                    |i, j, v| {
                        if has(phase, i, j) {
                            v.store(to.at(i, j, first / LANES + panel, s.row + n));
                        }
                    },
                );
            }
        }
    }
}

#[inline(always)]
unsafe fn input_body<V: Vector, S: Element>(
    g: &Grid,
    x: *const S,
    zeros: *const S,
    s: Span,
    to: Domain,
) {
    for first in (0..to.channels).step_by(g.inp.channels) {
        // SAFETY: the caller's promise.
        unsafe { input_phase::<V, S>(g, x, zeros, s, to, (g.inp.place(first).0, first)) };
    }
}

vectorised! {
    /// Transforms the tiles' inputs. `zeros` holds a pixel of zeros.
    ///
    /// # Safety
    /// `x` holds the grid's input images; the span lies in grid and domain.
    pub(super) unsafe fn input<S: Element>(g: &Grid, x: *const S, zeros: *const S, s: Span, to: Domain) = input_body
}

#[inline(always)]
unsafe fn gradient_body<V: Vector, S: Element>(
    g: &Grid,
    dy: *const S,
    zeros: *const S,
    s: Span,
    to: Domain,
) {
    let (c, phase) = (to.channels, g.out.place(0).0);
    for n in 0..s.count {
        let (image, y, left) = g.place(s.first + n);
        // SAFETY: the tile lies in the images, its row in the domain.
        unsafe {
            let image = dy.add(image * g.output[0] * g.output[1] * c);
            let corner = (y as isize, left as isize);
            let from = pixels::<S, STEP>(image, g.output, g.out, corner, zeros);
            for panel in 0..c / LANES {
                transform::gradient_tile::<V>(
                    |i, j| V::load_from(from[i][j].add(panel * LANES)),
                    |i, j, v| {
                        if has(phase, i, j) {
                            v.store(to.at(i, j, panel, s.row + n));
                        }
                    },
                );
            }
        }
    }
}

vectorised! {
    /// Transforms the tiles' output gradients.
    ///
    /// # Safety
    /// As [`input`], for the grid's output images.
    pub(super) unsafe fn gradient<S: Element>(g: &Grid, dy: *const S, zeros: *const S, s: Span, to: Domain) = gradient_body
}

/// What happens to an output before it is stored.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    /// Empty or one value a channel.
    pub bias: &'a [f32],
    pub relu: bool,
    /// Adds to what is there.
    pub add: bool,
}

#[inline(always)]
unsafe fn output_phase<V: Vector, S: Element>(
    g: &Grid,
    from: Domain,
    s: Span,
    y: *mut S,
    finish: Finish<'_>,
) {
    let (phase, channel) = g.out.place(from.first);
    let (stride, pixel, start) = (g.out.stride, g.out.channels, g.out.start(phase));
    for n in 0..s.count {
        let (image, top, left) = g.place(s.first + n);
        let (top, left) = (top * stride + start[0], left * stride + start[1]);
        let (high, wide) = (
            g.output[0].saturating_sub(top),
            g.output[1].saturating_sub(left),
        );
        let corner = (image * g.output[0] + top) * g.output[1] + left;
        for panel in 0..from.channels / LANES {
            // SAFETY: only pixels inside the image are touched.
            unsafe {
                let to = y.wrapping_add(corner * pixel + channel + panel * LANES);
                transform::output_tile::<V>(
                    |i, j| match has(phase, i, j) {
                        true => V::load(from.at(i, j, panel, s.row + n)),
                        false => V::splat(0.0),
                    },
                    |i, j, v| {
                        if i * stride < high && j * stride < wide {
                            let to = to.add((i * g.output[1] + j) * stride * pixel);
                            let mut v = v;
                            if finish.add {
                                v = V::load_from(to).add(v);
                            }
                            if !finish.bias.is_empty() {
                                let bias = finish.bias.as_ptr().add(channel + panel * LANES);
                                v = v.add(V::load(bias));
                            }
                            if finish.relu {
                                v = v.relu();
                            }
                            v.store_to(to);
                        }
                    },
                );
            }
        }
    }
}

#[inline(always)]
unsafe fn output_body<V: Vector, S: Element>(
    g: &Grid,
    from: Domain,
    s: Span,
    y: *mut S,
    finish: Finish<'_>,
) {
    let (mut first, end) = (from.first, from.first + from.channels);
    while first < end {
        let channels = (g.out.channels - g.out.place(first).1).min(end - first);
        // SAFETY: the caller's promise.
        unsafe {
            let part = Domain {
                data: from.channel(0, first),
                first,
                channels,
                ..from
            };
            output_phase::<V, S>(g, part, s, y, finish);
        }
        first += channels;
    }
}

vectorised! {
    /// Transforms products back into output pixels. The domain may hold part of the channels.
    ///
    /// # Safety
    /// `y` holds the grid's output images and no other code touches these tiles' channels.
    pub(super) unsafe fn output<S: Element>(
        g: &Grid, from: Domain, s: Span, y: *mut S, finish: Finish<'_>,
    ) = output_body
}
