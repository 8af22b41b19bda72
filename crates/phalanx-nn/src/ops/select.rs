//! Elements chosen by a mask or by indices, which belong to the step. Save nothing else.

use std::cmp::Ordering;

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::{PIECE, ThreadPool};

/// On one tensor, `value` where the mask is set; on two, the second where it is not.
pub(crate) struct Masked {
    /// The mask's bits among the step's labels.
    bits: (usize, usize),
    /// Elements of the mask, which repeats.
    wide: usize,
    value: f32,
}

pub(crate) struct Gather {
    index: (usize, usize),
    dim: usize,
    to: Shape,
}

impl<'s> Tensor<'s> {
    /// `value` where `mask` is true, this tensor's elements elsewhere, which alone get a gradient. The mask is
    /// row-major and of this tensor's shape, or of its last dimensions: it then repeats over the others. PyTorch:
    /// `masked_fill`. ([`Value`](crate::Value) does not have it.)
    ///
    /// # Errors
    /// `Usage` when the mask's length fits no number of last dimensions.
    pub fn masked_fill(self, mask: &[bool], value: f32) -> Result<Tensor<'s>> {
        let op = self.masked("masked_fill", mask, value)?;
        self.step().apply([self.slot()], self.dims(), op)
    }

    /// This tensor's elements where `mask` is true, those of `other`, of the same shape, elsewhere. The mask is as in
    /// [`masked_fill`](Tensor::masked_fill). PyTorch: `torch.where(mask, self, other)`.
    ///
    /// # Errors
    /// `Usage` when the mask or the other shape does not fit, or the steps differ.
    pub fn select_where(self, mask: &[bool], other: Tensor<'s>) -> Result<Tensor<'s>> {
        let (step, dims) = (self.step(), self.dims());
        if !std::ptr::eq(step, other.step()) || dims != other.dims() {
            refuse!(
                "select_where: other has shape {:?}, this tensor {dims:?}, or the steps differ",
                other.dims()
            );
        }
        let op = self.masked("select_where", mask, 0.0)?;
        step.apply([self.slot(), other.slot()], dims, op)
    }

    /// The `k` greatest elements along dimension `dim`, the greatest first, and the index of each. Of equal ones the first comes
    /// first; NaN counts as the greatest. PyTorch: `topk`. ([`Value`](crate::Value) does not have it.)
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist or has fewer elements.
    pub fn topk(self, k: usize, dim: usize) -> Result<(Tensor<'s>, Vec<u32>)> {
        let dims = self.dims();
        let Some(&n) = dims.get(dim).filter(|n| **n >= k) else {
            refuse!("topk of {k} along dimension {dim} of shape {dims:?}");
        };
        let inner: usize = dims[dim + 1..].iter().product();
        let mut shape = dims.to_vec();
        shape[dim] = k;
        let mut index = vec![0; shape.iter().product()];
        let mut order: Vec<u32> = Vec::with_capacity(n);
        for (block, x) in self.data().chunks_exact((n * inner).max(1)).enumerate() {
            for column in 0..inner {
                let value = |i: u32| x[i as usize * inner + column];
                order.clear();
                order.extend(0..n as u32);
                // -0 and 0 are equal.
                order.sort_by(|&a, &b| match (value(a), value(b)) {
                    (a, b) if a.is_nan() || b.is_nan() => b.is_nan().cmp(&a.is_nan()),
                    (a, b) => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
                });
                for (place, &i) in order[..k].iter().enumerate() {
                    index[(block * k + place) * inner + column] = i;
                }
            }
        }
        Ok((self.gather(dim, &index, &shape)?, index))
    }

    fn masked(&self, name: &str, mask: &[bool], value: f32) -> Result<Masked> {
        let dims = self.dims();
        if !(0..=dims.len()).any(|i| dims[i..].iter().product::<usize>() == mask.len()) {
            refuse!(
                "{name}: a mask of {} elements for shape {dims:?}",
                mask.len()
            );
        }
        let word = |part: &[bool]| {
            let set = part.iter().enumerate().map(|(i, &m)| u32::from(m) << i);
            set.fold(0, |word, bit| word | bit)
        };
        let bits: Vec<u32> = mask.chunks(32).map(word).collect();
        Ok(Masked {
            bits: self.step().state().add_labels(&bits),
            wide: mask.len(),
            value,
        })
    }

    /// An element for each of `index`, which is row-major and of `shape`: at the same place, but for dimension `dim`,
    /// where the index says which. `shape` has as many dimensions as this tensor, and none but `dim` is larger. PyTorch:
    /// `gather`. ([`Value`](crate::Value) does not have it.)
    ///
    /// *Order*: gradients of an element that is chosen several times are added in the order of the indices.
    ///
    /// # Errors
    /// `Usage` when the shape does not fit or the index has another length or names an element that is not there.
    pub fn gather(self, dim: usize, index: &[u32], shape: &[usize]) -> Result<Tensor<'s>> {
        let (dims, to) = (self.dims(), Shape::new(shape)?);
        let fits = dim < dims.len()
            && to.len() == dims.len()
            && (0..dims.len()).all(|d| d == dim || to[d] <= dims[d])
            && to.numel() == index.len();
        if !fits {
            refuse!(
                "gather along dimension {dim} of shape {dims:?}: {} indices of shape {to:?} do not fit",
                index.len()
            );
        }
        if let Some(i) = index.iter().find(|i| **i as usize >= dims[dim]) {
            refuse!(
                "gather: index {i} is not below {}, the size of dimension {dim}",
                dims[dim]
            );
        }
        let index = self.step().state().add_labels(index);
        self.step()
            .apply([self.slot()], to, Gather { index, dim, to })
    }
}

impl Masked {
    pub(crate) fn fills_infinity(&self) -> bool {
        self.value.is_infinite()
    }

    /// `to[i]` becomes `value(i)` where the mask is `set`.
    fn fill(
        &self,
        threads: &ThreadPool,
        (bits, set): (&[u32], bool),
        to: &mut [f32],
        value: impl Fn(usize) -> f32 + Sync,
    ) {
        threads.split(to, PIECE, |at, to| {
            for (i, to) in (at..).zip(to) {
                let place = i % self.wide;
                if (bits[place / 32] >> (place % 32) & 1 == 1) == set {
                    *to = value(i);
                }
            }
        });
    }
}

impl Operation for Masked {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        let bits = (c.state.labels(self.bits), true);
        self.fill(c.threads, bits, buf.slice_mut(), |_| self.value);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let bits = (ctx.labels(self.bits), true);
        self.fill(ctx.threads, bits, dy.slice_mut(), |_| 0.0);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}

impl Operation<2> for Masked {
    fn forward(&self, c: &mut Compute<'_>, [a, b]: [SlotId; 2]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(a);
        let (bits, other) = ((c.state.labels(self.bits), false), c.state.value(b));
        self.fill(c.threads, bits, buf.slice_mut(), |i| other[i]);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<2>, dy: Buf) -> Result<()> {
        for (x, set) in s.x.into_iter().zip([false, true]) {
            if ctx.wants(x) {
                let mut dx = ctx.pool().get(dy.slice().len());
                dx.slice_mut().copy_from_slice(dy.slice());
                let bits = (ctx.labels(self.bits), set);
                self.fill(ctx.threads, bits, dx.slice_mut(), |_| 0.0);
                ctx.give(x, dx);
            }
        }
        ctx.pool().put(dy);
        Ok(())
    }
}

impl Gather {
    /// Which element of a tensor of `shape` output `i` is.
    fn source(&self, i: usize, index: &[u32], shape: &[usize]) -> usize {
        let (mut rest, mut at, mut step) = (i, 0, 1);
        for (d, (&to, &from)) in self.to.iter().zip(shape).enumerate().rev() {
            let place = if d == self.dim {
                index[i] as usize
            } else {
                rest % to
            };
            at += place * step;
            step *= from;
            rest /= to;
        }
        at
    }
}

impl Operation for Gather {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.pool.get(self.to.numel());
        let (index, shape) = (c.state.labels(self.index), c.state.shape(x));
        let x = c.state.value(x);
        c.threads.split(buf.slice_mut(), PIECE, |at, to| {
            for (i, to) in (at..).zip(to) {
                *to = x[self.source(i, index, &shape)];
            }
        });
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let shape = ctx.shape(s.x[0]);
        let mut dx = ctx.pool().get_zeroed(shape.numel());
        let (index, to) = (ctx.labels(self.index), dx.slice_mut());
        for (i, d) in dy.slice().iter().enumerate() {
            to[self.source(i, index, &shape)] += d;
        }
        ctx.pool().put(dy);
        ctx.give(s.x[0], dx);
        Ok(())
    }
}
