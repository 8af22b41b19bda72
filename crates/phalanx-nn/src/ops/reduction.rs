//! Sums, means and maxima over dimensions. Sums and means save nothing, maxima
//! their input and output.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor, refuse};
use phalanx_kernels::broadcast::{Arithmetic, Stretch, arithmetic};
use phalanx_kernels::elementwise;
use phalanx_kernels::reduce::{Fold, RANK, reduce};

pub(crate) struct Reduction {
    fold: Fold,
    factor: f64,
    over: [bool; RANK],
    /// The output's shape.
    to: Shape,
}

impl<'s> Tensor<'s> {
    /// The sum over dimensions `dims` (0 is the outermost; an empty list means all).
    /// With `keep` they are kept with size 1.
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist or is named twice.
    pub fn sum(self, dims: &[usize], keep: bool) -> Result<Tensor<'s>> {
        self.reduction(Fold::Sum, false, dims, keep)
    }

    /// The mean over dimensions, as [`sum`](Tensor::sum).
    ///
    /// # Errors
    /// As [`sum`](Tensor::sum).
    pub fn mean(self, dims: &[usize], keep: bool) -> Result<Tensor<'s>> {
        self.reduction(Fold::Sum, true, dims, keep)
    }

    /// The largest element over dimensions; NaN if there is one. Equal largest
    /// elements share the gradient, as in PyTorch's `amax`.
    ///
    /// # Errors
    /// As [`sum`](Tensor::sum), and when there are no elements.
    pub fn max(self, dims: &[usize], keep: bool) -> Result<Tensor<'s>> {
        self.reduction(Fold::Max, false, dims, keep)
    }

    fn reduction(self, fold: Fold, mean: bool, dims: &[usize], keep: bool) -> Result<Tensor<'s>> {
        let shape = self.dims();
        let mut over = [dims.is_empty(); RANK];
        for &d in dims {
            if d >= shape.len() || std::mem::replace(&mut over[d], true) {
                refuse!(
                    "reduction over dimensions {dims:?} of shape {shape:?}: {d} is not there or named twice"
                );
            }
        }
        let (mut kept, mut rank, mut count) = ([0; RANK], 0, 1);
        for (i, &n) in shape.iter().enumerate() {
            if over[i] {
                count *= n;
            }
            if !over[i] || keep {
                kept[rank] = if over[i] { 1 } else { n };
                rank += 1;
            }
        }
        if fold == Fold::Max && count == 0 {
            refuse!("max over dimensions {dims:?} of shape {shape:?}, which hold nothing");
        }
        let factor = if mean { 1.0 / count as f64 } else { 1.0 };
        let to = Shape::new(&kept[..rank])?;
        let op = Reduction {
            fold,
            factor,
            over,
            to,
        };
        self.step().apply([self.slot()], to, op)
    }
}

impl Reduction {
    /// Repeats `from`, of the reduced shape, over the input's, and combines it.
    fn spread(
        &self,
        ctx: &mut BackwardContext<'_>,
        shape: Shape,
        op: Arithmetic,
        x: &[f32],
        from: &[f32],
    ) -> Result<Buf> {
        let mut kept = [1; RANK];
        for (i, &n) in shape.iter().enumerate() {
            kept[i] = if self.over[i] { 1 } else { n };
        }
        let s = Stretch::of(&shape, &kept[..shape.len()])
            .ok_or_else(|| Error::internal("a reduction no longer fits its input"))?;
        let mut to = ctx.pool().get(shape.numel());
        arithmetic(ctx.threads, op, &s, x, from, to.slice_mut());
        Ok(to)
    }
}

impl Operation for Reduction {
    fn saves(&self) -> [bool; 1] {
        [self.fold == Fold::Max]
    }

    fn saves_output(&self) -> bool {
        self.fold == Fold::Max
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (fold, shape) = ((self.fold, self.factor), c.state.shape(x));
        let mut buf = c.state.pool.get(self.to.numel());
        let (x, y) = (c.state.value(x), buf.slice_mut());
        reduce(c.threads, fold, x, &shape, &self.over, y);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (threads, shape) = (ctx.threads, ctx.shape(s.x[0]));
        if self.fold == Fold::Sum {
            elementwise::scale(threads, dy.slice_mut(), self.factor as f32);
            let zeros = ctx.pool().get_zeroed(shape.numel());
            let dx = self.spread(ctx, shape, Arithmetic::Add, zeros.slice(), dy.slice())?;
            ctx.pool().put(zeros);
            ctx.pool().put(dy);
            ctx.give(s.x[0], dx);
            return Ok(());
        }
        // One where an element is the largest, then shared among the equal ones.
        let (x, most) = (ctx.value(s.x[0]), ctx.value(s.out));
        let mut hits = self.spread(ctx, shape, Arithmetic::Sub, x, most)?;
        for v in hits.slice_mut() {
            // Infinity minus infinity is NaN, and a hit.
            *v = if *v == 0.0 || v.is_nan() { 1.0 } else { 0.0 };
        }
        let mut count = ctx.pool().get(dy.slice().len());
        let fold = (Fold::Sum, 1.0);
        reduce(
            threads,
            fold,
            hits.slice(),
            &shape,
            &self.over,
            count.slice_mut(),
        );
        let groups = count.slice().iter().zip(most);
        for (d, (n, most)) in dy.slice_mut().iter_mut().zip(groups) {
            // If the maximum is NaN, so is its gradient.
            *d = if most.is_nan() { f32::NAN } else { *d / n };
        }
        let dx = self.spread(ctx, shape, Arithmetic::Mul, hits.slice(), dy.slice())?;
        ctx.pool().put(count);
        ctx.pool().put(hits);
        ctx.pool().put(dy);
        ctx.give(s.x[0], dx);
        Ok(())
    }
}
