//! A range of one dimension, and the inverse: concatenation along one. Save nothing.

use std::ops::Range;

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, Recorded, SlotId, Slots, Step, Visit};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::ThreadPool;

/// An array as `outer` runs of `wide` elements, of which a part starts at `at`
/// and is `len` long.
#[derive(Clone, Copy)]
struct Part {
    wide: usize,
    at: usize,
    len: usize,
}

impl Part {
    fn of(shape: &[usize], dim: usize, range: Range<usize>) -> Self {
        let inner: usize = shape[dim + 1..].iter().product();
        Part {
            wide: shape[dim] * inner,
            at: range.start * inner,
            len: range.len() * inner,
        }
    }

    /// `to` becomes the part of `from`.
    fn take(self, threads: &ThreadPool, from: &[f32], to: &mut [f32]) {
        threads.split(to, self.len, |i, to| {
            // `split` cuts an empty array into nothing.
            let start = i / self.len * self.wide + self.at;
            to.copy_from_slice(&from[start..start + self.len]);
        });
    }

    /// The part of `to` becomes `from`; `rest` is done to the other elements.
    fn put(
        self,
        threads: &ThreadPool,
        from: &[f32],
        to: &mut [f32],
        rest: impl Fn(&mut [f32]) + Sync,
    ) {
        threads.split(to, self.wide, |i, to| {
            let row = i / self.wide * self.len;
            rest(&mut to[..self.at]);
            rest(&mut to[self.at + self.len..]);
            to[self.at..self.at + self.len].copy_from_slice(&from[row..row + self.len]);
        });
    }
}

pub(crate) struct Slice {
    part: Part,
    /// Elements of the output.
    numel: usize,
}

pub(crate) struct Concat {
    inputs: Vec<SlotId>,
    out: SlotId,
    dim: usize,
}

impl<'s> Tensor<'s> {
    /// Elements `range` of dimension `dim`, and all of the other dimensions.
    ///
    /// # Errors
    /// `Usage` when the range does not exist.
    pub fn slice(self, dim: usize, range: Range<usize>) -> Result<Tensor<'s>> {
        let dims = self.dims();
        if dim >= dims.len() || range.start > range.end || range.end > dims[dim] {
            refuse!("slice {range:?} of dimension {dim} of shape {dims:?}");
        }
        let shape = dims.with(dim, range.len())?;
        let part = Part::of(&dims, dim, range);
        let numel = shape.numel();
        self.step()
            .apply([self.slot()], shape, Slice { part, numel })
    }
}

impl Step<'_> {
    /// Concatenates tensors along dimension `dim`; their other sizes must agree.
    /// (Allocates a list of its operands.)
    ///
    /// # Errors
    /// `Usage` when there is none, shapes do not fit, or one belongs to another step.
    pub fn concat<'s>(&'s self, tensors: Vec<Tensor<'s>>, dim: usize) -> Result<Tensor<'s>> {
        let Some(first) = tensors.first() else {
            refuse!("concat of no tensors");
        };
        let dims = first.dims();
        let mut total = 0;
        for t in &tensors {
            let own = t.dims();
            let fits = dim < dims.len()
                && own.len() == dims.len()
                && (0..dims.len()).all(|i| i == dim || own[i] == dims[i]);
            if !fits || !std::ptr::eq(t.step(), self) {
                refuse!(
                    "concat along dimension {dim}: {own:?} does not fit {dims:?}, or belongs to another step"
                );
            }
            total += own[dim];
        }
        let shape = dims.with(dim, total)?;
        let inputs: Vec<SlotId> = tensors.iter().map(Tensor::slot).collect();
        let out = {
            let mut st = self.state();
            let mut buf = st.pool.get(shape.numel());
            let mut at = 0;
            for &x in &inputs {
                let n = st.shape(x)[dim];
                let part = Part::of(&shape, dim, at..at + n);
                part.put(self.threads(), st.value(x), buf.slice_mut(), |_| {});
                at += n;
            }
            let wants = inputs.iter().any(|&x| st.wants_grad(x));
            let out = st.add_output(shape, buf, wants);
            st.made(self.params(), Concat { inputs, out, dim }, wants)?;
            out
        };
        Ok(Tensor::new(self, out))
    }
}

impl Operation for Slice {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.pool.get(self.numel);
        self.part.take(c.threads, c.state.value(x), buf.slice_mut());
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let threads = ctx.threads;
        ctx.give_made(s.x[0], dy, |dy, dx| {
            self.part.put(threads, dy, dx, |rest| rest.fill(0.0));
        });
        Ok(())
    }
}

impl Recorded for Concat {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        self.inputs.iter().for_each(|&x| f(Visit::Input(x)));
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        let (shape, mut at) = (ctx.shape(self.out), 0);
        for &x in &self.inputs {
            let own = ctx.shape(x);
            let part = Part::of(&shape, self.dim, at..at + own[self.dim]);
            at += own[self.dim];
            if ctx.wants(x) {
                let mut dx = ctx.pool().get(own.numel());
                part.take(ctx.threads, dy.slice(), dx.slice_mut());
                ctx.give(x, dx);
            }
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
