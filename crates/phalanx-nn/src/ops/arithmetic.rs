//! `+ - * /` of two tensors whose shapes are stretched to each other. Sums and
//! differences save nothing; products and quotients what their gradients need.

use crate::kernels::broadcast::{Arithmetic, Stretch, arithmetic};
use crate::kernels::elementwise;
use crate::kernels::reduce::{Fold, RANK, reduce};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Binary {
    a: SlotId,
    b: SlotId,
    out: SlotId,
    op: Arithmetic,
    /// Which values the gradients need.
    saves: [bool; 2],
}

impl<'s> Tensor<'s> {
    /// `self - other`; sizes of 1 repeat, shapes are aligned at the last dimension.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit or the steps differ.
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn sub(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Sub)
    }

    /// `self * other`, element by element; stretched as in [`sub`](Tensor::sub).
    ///
    /// # Errors
    /// As [`sub`](Tensor::sub).
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn mul(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Mul)
    }

    /// `self / other`, element by element; stretched as in [`sub`](Tensor::sub).
    ///
    /// # Errors
    /// As [`sub`](Tensor::sub).
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn div(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        self.binary(other, Arithmetic::Div)
    }

    pub(super) fn binary(self, other: Tensor<'s>, op: Arithmetic) -> Result<Tensor<'s>> {
        let (step, a, b) = (self.step(), self.slot(), other.slot());
        let name = match op {
            Arithmetic::Add => "add",
            Arithmetic::Sub => "sub",
            Arithmetic::Mul => "mul",
            Arithmetic::Div => "div",
        };
        if !std::ptr::eq(step, other.step()) {
            return Err(Error::usage(format!(
                "{name}: the tensors belong to different steps"
            )));
        }
        let (da, db) = (self.dims(), other.dims());
        let Some(s) = Stretch::of(&da, &db) else {
            return Err(Error::usage(format!(
                "{name}: shapes {da:?} and {db:?} differ and cannot be stretched to each other"
            )));
        };
        let shape = Shape::new(s.dims())?;
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), op, [a, b], &s, shape.numel());
            let wants = [st.wants_grad(a), st.wants_grad(b)];
            let out = st.add_output(shape, buf, wants[0] || wants[1]);
            if wants[0] || wants[1] {
                let saves = match op {
                    Arithmetic::Add | Arithmetic::Sub => [false; 2],
                    Arithmetic::Mul => [wants[1], wants[0]],
                    Arithmetic::Div => [wants[1], true],
                };
                st.record(Binary {
                    a,
                    b,
                    out,
                    op,
                    saves,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(
    c: &mut Compute<'_>,
    op: Arithmetic,
    [a, b]: [SlotId; 2],
    s: &Stretch,
    numel: usize,
) -> Buf {
    let mut buf = c.state.pool.get(numel);
    let (a, b) = (c.state.value(a), c.state.value(b));
    arithmetic(c.team, op, s, a, b, buf.slice_mut());
    buf
}

/// Gives `grad`, of the stretched `shape`, to an operand: sums where it was repeated.
fn give_back(pass: &mut Pass<'_>, to: SlotId, shape: &[usize], grad: Buf) {
    let own = pass.shape(to);
    if *own == *shape {
        return pass.give(to, grad);
    }
    let mut over = [true; RANK];
    for (i, &n) in own.iter().enumerate() {
        over[shape.len() - own.len() + i] = n == 1;
    }
    let mut sum = pass.pool().get(own.numel());
    let fold = (Fold::Sum, 1.0);
    reduce(pass.team, fold, grad.slice(), shape, &over, sum.slice_mut());
    pass.pool().put(grad);
    pass.give(to, sum);
}

impl Binary {
    /// `x op y` into a buffer of the output's shape; the first has that shape.
    fn combine(
        pass: &mut Pass<'_>,
        op: Arithmetic,
        shape: &[usize],
        x: &[f32],
        (y, y_shape): (&[f32], Shape),
    ) -> Result<Buf> {
        let s = Stretch::of(shape, &y_shape)
            .ok_or_else(|| Error::internal("an operand no longer fits its result"))?;
        let mut to = pass.pool().get(x.len());
        arithmetic(pass.team, op, &s, x, y, to.slice_mut());
        Ok(to)
    }
}

impl Recorded for Binary {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.a));
        f(Visit::Input(self.b));
        if self.saves[0] {
            f(Visit::Saved(self.a));
        }
        if self.saves[1] {
            f(Visit::Saved(self.b));
        }
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let team = pass.team;
        let shape = pass.shape(self.out);
        let wants = [pass.wants(self.a), pass.wants(self.b)];
        let other = |pass: &Pass<'_>, id| (pass.value(id), pass.shape(id));
        let (for_a, for_b) = match self.op {
            Arithmetic::Add | Arithmetic::Sub => {
                let second = if wants[1] {
                    let mut copy = pass.pool().get(dy.slice().len());
                    copy.slice_mut().copy_from_slice(dy.slice());
                    if self.op == Arithmetic::Sub {
                        elementwise::scale(team, copy.slice_mut(), -1.0);
                    }
                    Some(copy)
                } else {
                    None
                };
                (wants[0].then_some(dy), second)
            }
            op => {
                // d(ab) = b da + a db; d(a/b) = da / b - (a / b) db / b.
                let mut first = None;
                if wants[0] || op == Arithmetic::Div {
                    let b = other(pass, self.b);
                    first = Some(Self::combine(pass, op, &shape, dy.slice(), b)?);
                }
                let mut second = None;
                if wants[1] {
                    let a = other(pass, self.a);
                    let from = match (&first, op) {
                        (Some(f), Arithmetic::Div) => f.slice(),
                        _ => dy.slice(),
                    };
                    let mut g = Self::combine(pass, Arithmetic::Mul, &shape, from, a)?;
                    if op == Arithmetic::Div {
                        let b = other(pass, self.b);
                        let q = Self::combine(pass, Arithmetic::Div, &shape, g.slice(), b)?;
                        pass.pool().put(std::mem::replace(&mut g, q));
                        elementwise::scale(team, g.slice_mut(), -1.0);
                    }
                    second = Some(g);
                }
                std::mem::swap(&mut dy, first.get_or_insert_with(|| pass.pool().get(0)));
                if let Some(spent) = first {
                    pass.pool().put(spent);
                }
                if wants[0] {
                    (Some(dy), second)
                } else {
                    pass.pool().put(dy);
                    (None, second)
                }
            }
        };
        if let Some(g) = for_b {
            give_back(pass, self.b, &shape, g);
        }
        if let Some(g) = for_a {
            give_back(pass, self.a, &shape, g);
        }
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let (a, b) = (c.state.shape(self.a), c.state.shape(self.b));
        let s = Stretch::of(&a, &b)
            .ok_or_else(|| Error::internal("operands no longer fit each other"))?;
        let numel = c.state.shape(self.out).numel();
        Ok(compute(c, self.op, [self.a, self.b], &s, numel))
    }
}
