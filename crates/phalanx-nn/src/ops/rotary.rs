//! Rotary positions (J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021), in place if
//! no other operation needs the operand. Save the cosines and sines.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::{PIECE, ThreadPool};
use phalanx_kernels::rotary::rotate;

pub(crate) struct Rotary {
    /// Positions of a sample.
    length: usize,
    width: usize,
    /// Width of a head.
    each: usize,
    base: f64,
    first: usize,
}

impl<'s> Tensor<'s> {
    /// Rotates queries or keys (…, L, E) by their positions: row l, at position `first` + l, holds `heads` vectors one after
    /// the other, of D = E / `heads` elements each. Elements i and i + D / 2 of a vector, for i below D / 2, are a point
    /// in the plane that rotates by position x `base`^(-2 i / D) radians. These pairs of halves are those of LLaMA in
    /// Hugging Face's transformers (the paper's are neighbours); LLaMA's base is 10000. Of (N, heads, L, D), `heads` is 1.
    ///
    /// Angles, their cosines and sines are f64, rounded once to f32, and so closer than Hugging Face's at large positions.
    ///
    /// # Errors
    /// `Usage` when there are fewer than two dimensions, `heads` does not divide E into vectors of even size, or `base` is not a
    /// positive number.
    pub fn rotary(self, heads: usize, base: f64, first: usize) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let &[.., length, width] = &*dims else {
            refuse!("rotary needs (…, L, E), got shape {dims:?}");
        };
        if heads == 0 || !width.is_multiple_of(2 * heads) {
            refuse!(
                "rotary: {heads} heads do not divide a width of {width} into vectors of even size"
            );
        }
        if !(base > 0.0 && base.is_finite()) {
            refuse!("rotary: base is {base}; it must be a positive number");
        }
        let op = Rotary {
            length,
            width,
            each: width / heads,
            base,
            first,
        };
        self.step().apply([self.slot()], dims, op)
    }
}

impl Rotary {
    /// Cosines, then sines, of each position.
    fn table(&self, threads: &ThreadPool, table: &mut [f32]) {
        let half = self.each / 2;
        threads.split(table, self.each, |at, row| {
            let position = (self.first + at / self.each) as f64;
            let (cosines, sines) = row.split_at_mut(half);
            for (i, (c, s)) in cosines.iter_mut().zip(sines).enumerate() {
                let angle = position * self.base.powf(-(i as f64) / half as f64);
                (*c, *s) = (angle.cos() as f32, angle.sin() as f32);
            }
        });
    }

    fn run(&self, threads: &ThreadPool, x: &mut [f32], table: &[f32], sign: f32) {
        let width = self.width.max(1);
        threads.split(x, (PIECE / width).max(1) * width, |at, x| {
            for (row, x) in (at / width..).zip(x.chunks_exact_mut(width)) {
                let angles = &table[row % self.length * self.each..][..self.each];
                let (cosines, sines) = angles.split_at(self.each / 2);
                rotate(x, cosines, sines, sign);
            }
        });
    }
}

impl Operation for Rotary {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut table = c.state.pool.get(self.length * self.each);
        self.table(c.threads, table.slice_mut());
        let mut buf = c.state.take_for_writing(x);
        self.run(c.threads, buf.slice_mut(), table.slice(), 1.0);
        Ok((buf, Some(table)))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let table = ctx.value(s.aux()?);
        self.run(ctx.threads, dy.slice_mut(), table, -1.0);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
