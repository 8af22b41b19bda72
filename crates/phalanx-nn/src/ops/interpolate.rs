//! Images in another size, by the nearest pixel or bilinear. Saves nothing.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::PIECE;

/// How [`Tensor::interpolate`] makes a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// The pixel at the place, rounded down.
    Nearest,
    /// Of the four pixels around the place (`align_corners=False`).
    Bilinear,
}

/// A row or column of the output: two of the input, and the share of the second.
type Tap = (usize, usize, f32);

pub(crate) struct Interpolate {
    /// Height and width of the input, and the channels.
    from: [usize; 3],
    rows: Vec<Tap>,
    columns: Vec<Tap>,
}

impl<'s> Tensor<'s> {
    /// Images (N, H, W, C) in another size. PyTorch: `F.interpolate` with `size`, `Upsample`. ([`Value`](crate::Value) does not
    /// have it.)
    ///
    /// *Order*: gradients of a pixel are added in the order of the output.
    ///
    /// # Errors
    /// `Usage` when this is no batch of images, or a size is 0.
    pub fn interpolate(
        self,
        height: usize,
        width: usize,
        mode: Interpolation,
    ) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let &[n, h, w, channels] = &*dims else {
            refuse!("interpolate needs images (N, H, W, C), got shape {dims:?}");
        };
        if [h, w, height, width].contains(&0) {
            refuse!("interpolate from {h} x {w} to {height} x {width} pixels");
        }
        let op = Interpolate {
            from: [h, w, channels],
            rows: taps(mode, h, height),
            columns: taps(mode, w, width),
        };
        let shape = Shape::new(&[n, height, width, channels])?;
        self.step().apply([self.slot()], shape, op)
    }
}

/// Those of `to` pixels of `from`, computed as PyTorch does, in f32.
fn taps(mode: Interpolation, from: usize, to: usize) -> Vec<Tap> {
    let (scale, last) = (from as f32 / to as f32, from - 1);
    let tap = |i: usize| match mode {
        Interpolation::Nearest => {
            let at = ((i as f32 * scale) as usize).min(last);
            (at, at, 0.0)
        }
        Interpolation::Bilinear => {
            let place = ((i as f32 + 0.5) * scale - 0.5).max(0.0);
            let at = (place as usize).min(last);
            (at, (at + 1).min(last), place - at as f32)
        }
    };
    (0..to).map(tap).collect()
}

impl Interpolate {
    /// Calls `each` for the pixels of output row `y` with the four places in an image, and their shares.
    fn row(&self, y: usize, mut each: impl FnMut(usize, [(usize, f32); 4])) {
        let [_, w, channels] = self.from;
        let (top, bottom, down) = self.rows[y];
        for (x, &(left, right, along)) in self.columns.iter().enumerate() {
            let place = |y: usize, x: usize| (y * w + x) * channels;
            each(
                x * channels,
                [
                    (place(top, left), (1.0 - down) * (1.0 - along)),
                    (place(top, right), (1.0 - down) * along),
                    (place(bottom, left), down * (1.0 - along)),
                    (place(bottom, right), down * along),
                ],
            );
        }
    }
}

impl Operation for Interpolate {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let ([h, w, channels], rows) = (self.from, self.rows.len());
        let wide = (self.columns.len() * channels).max(1);
        let image = h * w * channels;
        let n = c.state.shape(x)[0];
        let mut buf = c
            .state
            .pool
            .get(n * rows * wide.min(self.columns.len() * channels));
        let x = c.state.value(x);
        c.threads
            .split(buf.slice_mut(), (PIECE / wide).max(1) * wide, |at, y| {
                for (row, y) in (at / wide..).zip(y.chunks_exact_mut(wide)) {
                    let x = &x[row / rows * image..][..image];
                    self.row(row % rows, |to, taps| {
                        let y = &mut y[to..to + channels];
                        y.fill(0.0);
                        for (from, share) in taps.into_iter().filter(|tap| tap.1 != 0.0) {
                            for (y, x) in y.iter_mut().zip(&x[from..]) {
                                *y += share * x;
                            }
                        }
                    });
                }
            });
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let [h, w, channels] = self.from;
        let (image, wide) = ((h * w * channels).max(1), self.columns.len() * channels);
        let rows = self.rows.len();
        let threads = ctx.threads;
        ctx.give_made(s.x[0], dy, |dy, dx| {
            threads.split(dx, image, |at, dx| {
                for (n, dx) in (at / image..).zip(dx.chunks_exact_mut(image)) {
                    dx.fill(0.0);
                    for y in 0..rows {
                        let dy = &dy[(n * rows + y) * wide..][..wide];
                        self.row(y, |from, taps| {
                            for (to, share) in taps.into_iter().filter(|tap| tap.1 != 0.0) {
                                let dy = &dy[from..from + channels];
                                for (dx, dy) in dx[to..].iter_mut().zip(dy) {
                                    *dx += share * dy;
                                }
                            }
                        });
                    }
                }
            });
        });
        Ok(())
    }
}
