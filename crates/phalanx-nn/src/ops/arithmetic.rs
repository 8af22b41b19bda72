//! `+ - * /` of two tensors with broadcasting. Sums and differences save nothing;
//! products and quotients save what their gradients need.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor, refuse};
use phalanx_kernels::broadcast::{Arithmetic, Stretch, arithmetic};
use phalanx_kernels::elementwise;
use phalanx_kernels::reduce::{Fold, RANK, reduce};

/// Sum of two tensors of one shape, in place.
pub(crate) struct Add;

pub(crate) struct Binary {
    op: Arithmetic,
    stretch: Stretch,
    /// Which values the gradients need.
    saves: [bool; 2],
}

impl<'s> Tensor<'s> {
    /// `self + other`; sizes of 1 are broadcast, shapes are aligned at the last dimension.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit or the steps differ.
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn add(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Add)
    }

    /// `self - other`; sizes of 1 are broadcast, shapes are aligned at the last dimension.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit or the steps differ.
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn sub(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Sub)
    }

    /// `self * other`, element by element; broadcast as in [`sub`](Tensor::sub).
    ///
    /// # Errors
    /// As [`sub`](Tensor::sub).
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn mul(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Mul)
    }

    /// `self / other`, element by element; broadcast as in [`sub`](Tensor::sub).
    ///
    /// # Errors
    /// As [`sub`](Tensor::sub).
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn div(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Div)
    }

    fn binary(self, other: Tensor<'s>, op: Arithmetic) -> Result<Tensor<'s>> {
        let (step, a, b) = (self.step(), self.slot(), other.slot());
        let name = match op {
            Arithmetic::Add => "add",
            Arithmetic::Sub => "sub",
            Arithmetic::Mul => "mul",
            Arithmetic::Div => "div",
        };
        if !std::ptr::eq(step, other.step()) {
            refuse!("{name}: the tensors belong to different steps");
        }
        let (da, db) = (self.dims(), other.dims());
        let Some(stretch) = Stretch::of(&da, &db) else {
            refuse!(
                "{name}: shapes {da:?} and {db:?} differ and cannot be stretched to each other"
            );
        };
        let shape = Shape::new(stretch.dims())?;
        if op == Arithmetic::Add && da == db {
            return step.apply([a, b], shape, Add);
        }
        let saves = {
            let st = step.state();
            match op {
                Arithmetic::Add | Arithmetic::Sub => [false; 2],
                Arithmetic::Mul => [st.wants_grad(b), st.wants_grad(a)],
                Arithmetic::Div => [st.wants_grad(b), true],
            }
        };
        step.apply([a, b], shape, Binary { op, stretch, saves })
    }
}

/// Adds `grad`, of the broadcast `shape`, to an operand's gradient: summed where the operand was repeated.
fn give_back(ctx: &mut BackwardContext<'_>, to: SlotId, shape: &[usize], grad: Buf) {
    let own = ctx.shape(to);
    if *own == *shape {
        return ctx.give(to, grad);
    }
    let mut over = [true; RANK];
    for (i, &n) in own.iter().enumerate() {
        over[shape.len() - own.len() + i] = n == 1;
    }
    let mut sum = ctx.pool().get(own.numel());
    let (fold, into) = ((Fold::Sum, 1.0), sum.slice_mut());
    reduce(ctx.threads, fold, grad.slice(), shape, &over, into);
    ctx.pool().put(grad);
    ctx.give(to, sum);
}

impl Binary {
    /// `x op y` into a buffer of the output's shape; the first has that shape.
    fn combine(
        ctx: &mut BackwardContext<'_>,
        op: Arithmetic,
        shape: &[usize],
        x: &[f32],
        (y, y_shape): (&[f32], Shape),
    ) -> Result<Buf> {
        let s = Stretch::of(shape, &y_shape)
            .ok_or_else(|| Error::internal("an operand no longer fits its result"))?;
        let mut to = ctx.pool().get(x.len());
        arithmetic(ctx.threads, op, &s, x, y, to.slice_mut());
        Ok(to)
    }
}

/// A copy of a gradient.
fn copy_of(ctx: &mut BackwardContext<'_>, dy: &Buf) -> Buf {
    let mut copy = ctx.pool().get(dy.slice().len());
    copy.slice_mut().copy_from_slice(dy.slice());
    copy
}

impl Operation<2> for Add {
    fn forward(&self, c: &mut Compute<'_>, [a, b]: [SlotId; 2]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(a);
        elementwise::add(c.threads, buf.slice_mut(), c.state.value(b));
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<2>, dy: Buf) -> Result<()> {
        let [a, b] = slots.x;
        if ctx.wants(a) && ctx.wants(b) {
            let copy = copy_of(ctx, &dy);
            ctx.give(b, copy);
            ctx.give(a, dy);
        } else {
            ctx.give(if ctx.wants(a) { a } else { b }, dy);
        }
        Ok(())
    }
}

impl Operation<2> for Binary {
    fn name(&self) -> Option<&'static str> {
        Some(match self.op {
            Arithmetic::Add => "Add",
            Arithmetic::Sub => "Sub",
            Arithmetic::Mul => "Mul",
            Arithmetic::Div => "Div",
        })
    }

    fn saves(&self) -> [bool; 2] {
        self.saves
    }

    fn forward(&self, c: &mut Compute<'_>, [a, b]: [SlotId; 2]) -> Result<(Buf, Option<Buf>)> {
        let s = &self.stretch;
        let mut buf = c.state.pool.get(s.dims().iter().product());
        let (a, b) = (c.state.value(a), c.state.value(b));
        arithmetic(c.threads, self.op, s, a, b, buf.slice_mut());
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<2>, mut dy: Buf) -> Result<()> {
        let [a, b] = slots.x;
        let threads = ctx.threads;
        let shape = ctx.shape(slots.out);
        let wants = [ctx.wants(a), ctx.wants(b)];
        let other = |ctx: &BackwardContext<'_>, id| (ctx.value(id), ctx.shape(id));
        let (for_a, for_b) = match self.op {
            Arithmetic::Add | Arithmetic::Sub => {
                let second = wants[1].then(|| {
                    let mut copy = copy_of(ctx, &dy);
                    if self.op == Arithmetic::Sub {
                        elementwise::scale(threads, copy.slice_mut(), -1.0);
                    }
                    copy
                });
                (wants[0].then_some(dy), second)
            }
            op => {
                // d(ab) = b da + a db; d(a/b) = da / b - (a / b) db / b.
                let mut first = None;
                if wants[0] || op == Arithmetic::Div {
                    let b = other(ctx, b);
                    first = Some(Self::combine(ctx, op, &shape, dy.slice(), b)?);
                }
                let mut second = None;
                if wants[1] {
                    let a = other(ctx, a);
                    let from = match (&first, op) {
                        (Some(f), Arithmetic::Div) => f.slice(),
                        _ => dy.slice(),
                    };
                    let mut g = Self::combine(ctx, Arithmetic::Mul, &shape, from, a)?;
                    if op == Arithmetic::Div {
                        let b = other(ctx, b);
                        let q = Self::combine(ctx, Arithmetic::Div, &shape, g.slice(), b)?;
                        ctx.pool().put(std::mem::replace(&mut g, q));
                        elementwise::scale(threads, g.slice_mut(), -1.0);
                    }
                    second = Some(g);
                }
                std::mem::swap(&mut dy, first.get_or_insert_with(|| ctx.pool().get(0)));
                if let Some(spent) = first {
                    ctx.pool().put(spent);
                }
                if wants[0] {
                    (Some(dy), second)
                } else {
                    ctx.pool().put(dy);
                    (None, second)
                }
            }
        };
        if let Some(g) = for_b {
            give_back(ctx, b, &shape, g);
        }
        if let Some(g) = for_a {
            give_back(ctx, a, &shape, g);
        }
        Ok(())
    }
}
