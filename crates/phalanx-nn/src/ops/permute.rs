//! Dimensions in another order, as a copy. Saves nothing.

use crate::kernels::reduce::RANK;
use crate::par::{PIECE, Team};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Permute {
    x: SlotId,
    out: SlotId,
    order: [usize; RANK],
}

/// `to[i, j, …] = from` with dimension k of `to` being dimension `order[k]` of `from`.
fn copy(team: &Team, from: &[f32], shape: &[usize], order: &[usize], to: &mut [f32]) {
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
    team.split(to, (PIECE / inner).max(1) * inner, |at, to| {
        for (i, to) in to.chunks_exact_mut(inner).enumerate() {
            let (mut row, mut start) = (at / inner + i, 0);
            for k in (0..last).rev() {
                start += row % size[k] * steps[k];
                row /= size[k];
            }
            if stride == 1 {
                to.copy_from_slice(&from[start..start + inner]);
            } else {
                for (t, f) in to
                    .iter_mut()
                    .zip(from[start..].iter().step_by(stride.max(1)))
                {
                    *t = *f;
                }
            }
        }
    });
}

impl<'s> Tensor<'s> {
    /// Dimension k of the result is dimension `order[k]` of this tensor.
    ///
    /// # Errors
    /// `Usage` when `order` does not name every dimension once.
    pub fn permute(self, order: &[usize]) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let mut to = [0; RANK];
        let mut seen = [false; RANK];
        let complete = order.len() == dims.len()
            && order
                .iter()
                .all(|&o| o < dims.len() && !std::mem::replace(&mut seen[o], true));
        if !complete {
            return Err(Error::usage(format!(
                "permute of shape {dims:?} by {order:?}: every dimension must be named once"
            )));
        }
        to[..order.len()].copy_from_slice(order);
        let mut sizes = [1; RANK];
        for (s, &o) in sizes.iter_mut().zip(order) {
            *s = dims[o];
        }
        let shape = Shape::new(&sizes[..order.len()])?;
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), x, &to);
            let wants = st.wants_grad(x);
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Permute { x, out, order: to });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }

    /// Dimensions `a` and `b` exchanged.
    ///
    /// # Errors
    /// `Usage` when one of them is not there.
    pub fn transpose(self, a: usize, b: usize) -> Result<Tensor<'s>> {
        let rank = self.dims().len();
        let mut order = [0, 1, 2, 3, 4, 5];
        if a.max(b) >= rank {
            return Err(Error::usage(format!(
                "transpose of dimensions {a} and {b} of shape {:?}",
                self.dims()
            )));
        }
        order.swap(a, b);
        self.permute(&order[..rank])
    }
}

fn compute(c: &mut Compute<'_>, x: SlotId, order: &[usize]) -> Buf {
    let shape = c.state.shape(x);
    let mut buf = c.state.pool.get(shape.numel());
    copy(c.team, c.state.value(x), &shape, order, buf.slice_mut());
    buf
}

impl Recorded for Permute {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let shape = pass.shape(self.out);
        let mut back = [0; RANK];
        for (k, &o) in self.order[..shape.len()].iter().enumerate() {
            back[o] = k;
        }
        let mut dx = pass.pool().get(dy.slice().len());
        copy(pass.team, dy.slice(), &shape, &back, dx.slice_mut());
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x, &self.order))
    }
}
