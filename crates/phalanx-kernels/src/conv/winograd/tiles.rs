//! Images cut into tiles, and the passes between images and the transformed
//! domain, where position p of all tiles is one matrix: `[channels / 16][tiles][16]`.

use super::transform::{self, POSITIONS, SIDE, STEP};
use super::weights::Rows;
use crate::element::Element;
use crate::vector::{LANES, Vector};

/// A convolution's tiles: 4x4 outputs each, over 6x6 inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub images: usize,
    pub input: [usize; 2],
    pub output: [usize; 2],
    pub padding: usize,
}

impl Grid {
    fn down(&self) -> usize {
        self.output[0].div_ceil(STEP)
    }

    fn across(&self) -> usize {
        self.output[1].div_ceil(STEP)
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
        channels: usize,
    ) -> Rows {
        let line = |tile: usize| {
            let (image, y, _) = self.place(tile);
            (image * size[0] + y).min((self.images * size[0]).saturating_sub(STEP))
        };
        let last = (s.first + s.count).min(self.tiles()) - 1;
        let (from, to) = (line(s.first.min(last)), line(last) + STEP);
        let row = size[1] * channels;
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
            channels,
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
    channels: usize,
    (top, left): (isize, isize),
    zeros: *const S,
) -> [[*const S; N]; N] {
    let mut p = [[zeros; N]; N];
    for (i, row) in p.iter_mut().enumerate() {
        let y = top + i as isize;
        if y < 0 || y >= size[0] as isize {
            continue;
        }
        for (j, p) in row.iter_mut().enumerate() {
            let x = left + j as isize;
            if x >= 0 && x < size[1] as isize {
                // SAFETY: inside the image.
                *p = unsafe { image.add((y as usize * size[1] + x as usize) * channels) };
            }
        }
    }
    p
}

#[inline(always)]
unsafe fn input_body<V: Vector, S: Element>(
    g: &Grid,
    x: *const S,
    zeros: *const S,
    s: Span,
    to: Domain,
) {
    let c = to.channels;
    for n in 0..s.count {
        let (image, y, left) = g.place(s.first + n);
        // SAFETY: the tile lies in the images, its row in the domain.
        unsafe {
            let corner = (
                y as isize - g.padding as isize,
                left as isize - g.padding as isize,
            );
            let image = x.add(image * g.input[0] * g.input[1] * c);
            let from = pixels::<S, SIDE>(image, g.input, c, corner, zeros);
            for panel in 0..c / LANES {
                transform::input_tile::<V>(
                    |i, j| V::load_from(from[i][j].add(panel * LANES)),
                    |i, j, v| v.store(to.at(i, j, panel, s.row + n)),
                );
            }
        }
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
    let c = to.channels;
    for n in 0..s.count {
        let (image, y, left) = g.place(s.first + n);
        // SAFETY: the tile lies in the images, its row in the domain.
        unsafe {
            let image = dy.add(image * g.output[0] * g.output[1] * c);
            let corner = (y as isize, left as isize);
            let from = pixels::<S, STEP>(image, g.output, c, corner, zeros);
            for panel in 0..c / LANES {
                transform::gradient_tile::<V>(
                    |i, j| V::load_from(from[i][j].add(panel * LANES)),
                    |i, j, v| v.store(to.at(i, j, panel, s.row + n)),
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
unsafe fn output_body<V: Vector, S: Element>(
    g: &Grid,
    from: Domain,
    s: Span,
    y: *mut S,
    pixel: usize,
    finish: Finish<'_>,
) {
    for n in 0..s.count {
        let (image, top, left) = g.place(s.first + n);
        let (high, wide) = (g.output[0] - top, g.output[1] - left);
        for panel in 0..from.channels / LANES {
            // SAFETY: only pixels inside the image are touched.
            unsafe {
                let corner = (image * g.output[0] + top) * g.output[1] + left;
                let to = y.add(corner * pixel + panel * LANES);
                transform::output_tile::<V>(
                    |i, j| V::load(from.at(i, j, panel, s.row + n)),
                    |i, j, v| {
                        if i < high && j < wide {
                            let to = to.add((i * g.output[1] + j) * pixel);
                            let mut v = v;
                            if finish.add {
                                v = V::load_from(to).add(v);
                            }
                            if !finish.bias.is_empty() {
                                v = v.add(V::load(finish.bias.as_ptr().add(panel * LANES)));
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

vectorised! {
    /// Transforms products back into output pixels, which lie `pixel` elements apart
    /// (the domain may hold part of the channels; `y` points to the first of them,
    /// `finish.bias` starts with theirs).
    ///
    /// # Safety
    /// `y` holds the grid's output images and no other code touches these tiles' channels.
    pub(super) unsafe fn output<S: Element>(
        g: &Grid, from: Domain, s: Span, y: *mut S, pixel: usize, finish: Finish<'_>,
    ) = output_body
}
