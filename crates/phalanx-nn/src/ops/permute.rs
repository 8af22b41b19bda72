//! The same elements under another shape or in another order. Save nothing.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::{PIECE, ThreadPool};
use phalanx_kernels::reduce::RANK;
use phalanx_kernels::transpose::transpose;

/// No copy when the operand's handle is the only one.
pub(crate) struct Reshape;

/// Images to rows in PyTorch's order.
pub(crate) struct Flatten {
    pixels: usize,
    channels: usize,
}

/// Dimensions in another order, as a copy.
pub(crate) struct Permute {
    order: [usize; RANK],
}

/// `to[i, j, …] = from` with dimension k of `to` being dimension `order[k]` of `from`.
fn copy(threads: &ThreadPool, from: &[f32], shape: &[usize], order: &[usize], to: &mut [f32]) {
    let rank = shape.len();
    let (mut steps, mut size, mut step) = ([0; RANK], [1; RANK], 1);
    let mut own = [0; RANK];
    for i in (0..rank).rev() {
        own[i] = step;
        step *= shape[i];
    }
    for (k, &o) in order[..rank].iter().enumerate() {
        (steps[k], size[k]) = (own[o], shape[o]);
    }
    let last = rank.saturating_sub(1);
    let (inner, stride) = (size[last].max(1), steps[last]);
    threads.split(to, (PIECE / inner).max(1) * inner, |at, to| {
        for (i, to) in to.chunks_exact_mut(inner).enumerate() {
            let (mut row, mut start) = (at / inner + i, 0);
            for k in (0..last).rev() {
                start += row % size[k] * steps[k];
                row /= size[k];
            }
            if stride == 1 {
                to.copy_from_slice(&from[start..start + inner]);
            } else {
                let from = from[start..].iter().step_by(stride.max(1));
                to.iter_mut().zip(from).for_each(|(t, f)| *t = *f);
            }
        }
    });
}

impl<'s> Tensor<'s> {
    /// The elements in the same (row-major) order under another shape.
    ///
    /// # Errors
    /// `Usage` when the number of elements would change.
    pub fn reshape(self, shape: &[usize]) -> Result<Tensor<'s>> {
        let shape = Shape::new(shape)?;
        if shape.numel() != self.numel() {
            refuse!("cannot reshape {:?} to {shape:?}", self.dims());
        }
        self.step().apply([self.slot()], shape, Reshape)
    }

    /// One row per sample. An image (N, H, W, C) becomes (N, C·H·W) in
    /// PyTorch's element order (channel, row, column), so that the weights of
    /// a following linear layer are PyTorch's.
    ///
    /// # Errors
    /// `Usage` for a tensor without dimensions.
    pub fn flatten(self) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let &[n, h, w, channels] = &*dims else {
            let Some((&n, rest)) = dims.split_first() else {
                refuse!("flatten of a tensor without dimensions");
            };
            return self.reshape(&[n, rest.iter().product()]);
        };
        let pixels = h * w;
        if pixels <= 1 || channels <= 1 {
            return self.reshape(&[n, pixels * channels]);
        }
        let shape = Shape::new(&[n, pixels * channels])?;
        let op = Flatten { pixels, channels };
        self.step().apply([self.slot()], shape, op)
    }

    /// Dimension k of the result is dimension `order[k]` of this tensor.
    ///
    /// # Errors
    /// `Usage` when `order` does not name every dimension once.
    pub fn permute(self, order: &[usize]) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let mut to = [0; RANK];
        let mut seen = [false; RANK];
        let complete = order.len() == dims.len()
            && order
                .iter()
                .all(|&o| o < dims.len() && !std::mem::replace(&mut seen[o], true));
        if !complete {
            refuse!("permute of shape {dims:?} by {order:?}: every dimension must be named once");
        }
        to[..order.len()].copy_from_slice(order);
        let mut sizes = [1; RANK];
        for (s, &o) in sizes.iter_mut().zip(order) {
            *s = dims[o];
        }
        let shape = Shape::new(&sizes[..order.len()])?;
        self.step()
            .apply([self.slot()], shape, Permute { order: to })
    }

    /// Dimensions `a` and `b` exchanged.
    ///
    /// # Errors
    /// `Usage` when one of them does not exist.
    pub fn transpose(self, a: usize, b: usize) -> Result<Tensor<'s>> {
        let rank = self.dims().len();
        let mut order = [0, 1, 2, 3, 4, 5];
        if a.max(b) >= rank {
            refuse!(
                "transpose of dimensions {a} and {b} of shape {:?}",
                self.dims()
            );
        }
        order.swap(a, b);
        self.permute(&order[..rank])
    }
}

impl Operation for Reshape {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        Ok((c.state.take_for_writing(x), None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        ctx.give(s.x[0], dy);
        Ok(())
    }
}

/// Transposes each matrix of `rows` x `columns`.
fn transpose_each(threads: &ThreadPool, from: &[f32], to: &mut [f32], [rows, columns]: [usize; 2]) {
    threads.split(to, rows * columns, |at, to| {
        transpose(&from[at..at + to.len()], to, rows, columns);
    });
}

impl Operation for Flatten {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.pool.get(c.state.shape(x).numel());
        let size = [self.pixels, self.channels];
        transpose_each(c.threads, c.state.value(x), buf.slice_mut(), size);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let threads = ctx.threads;
        ctx.give_made(s.x[0], dy, |dy, dx| {
            transpose_each(threads, dy, dx, [self.channels, self.pixels]);
        });
        Ok(())
    }
}

impl Operation for Permute {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let shape = c.state.shape(x);
        let mut buf = c.state.pool.get(shape.numel());
        let y = buf.slice_mut();
        copy(c.threads, c.state.value(x), &shape, &self.order, y);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let (threads, shape) = (ctx.threads, ctx.shape(s.out));
        let mut back = [0; RANK];
        for (k, &o) in self.order[..shape.len()].iter().enumerate() {
            back[o] = k;
        }
        ctx.give_made(s.x[0], dy, |dy, dx| copy(threads, dy, &shape, &back, dx));
        Ok(())
    }
}
