//! Products with a parameter: `y = act(x W + b)`. Saves its input, and its
//! output when an activation is fused.

use super::Act;
use crate::kernels::Mode;
use crate::kernels::bias::{column_sums, finish};
use crate::kernels::elementwise;
use crate::kernels::product::{Mat, product_team};
use crate::param::{Layout, ParamId, ParamInfo};
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Linear {
    x: SlotId,
    out: SlotId,
    weight: ParamId,
    bias: Option<ParamId>,
    act: Act,
    rows: usize,
    sizes: Sizes,
}

/// How the weight lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// `[in][out]`, as a matrix is written.
    InOut,
    /// `[out][in]`, as PyTorch's linear layer has it.
    OutIn,
}

#[derive(Clone, Copy)]
struct Sizes {
    inp: usize,
    out: usize,
    order: Order,
}

impl Sizes {
    fn of(info: &ParamInfo, order: Order) -> Result<Self> {
        let (&[a, b], Layout::Same) = (&*info.shape, info.layout) else {
            return Err(Error::usage(format!(
                "{} of shape {:?} is not a matrix",
                info.name, info.shape
            )));
        };
        let (inp, out) = if order == Order::InOut {
            (a, b)
        } else {
            (b, a)
        };
        Ok(Sizes { inp, out, order })
    }

    /// The weight as a matrix of `inp` x `out`.
    fn matrix(self, w: &[f32]) -> Mat<'_> {
        match self.order {
            Order::InOut => Mat::rows(w, self.inp, self.out, self.out),
            Order::OutIn => Mat::rows(w, self.out, self.inp, self.inp).t(),
        }
    }
}

impl<'s> Tensor<'s> {
    /// `x W` over the last dimension, for a weight of shape `[in, out]`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn matmul(self, weight: ParamId) -> Result<Tensor<'s>> {
        let sizes = Sizes::of(self.step().info(weight)?, Order::InOut)?;
        self.times(weight, None, Act::None, sizes)
    }

    /// `act(x Wᵀ + b)` over the last dimension, for a weight of PyTorch's shape
    /// `[out, in]`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn linear(self, weight: ParamId, bias: Option<ParamId>, act: Act) -> Result<Tensor<'s>> {
        let sizes = Sizes::of(self.step().info(weight)?, Order::OutIn)?;
        self.times(weight, bias, act, sizes)
    }

    fn times(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        act: Act,
        sizes: Sizes,
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let info = step.info(weight)?;
        let Some((&last, outer)) = dims.split_last().filter(|(l, _)| **l == sizes.inp) else {
            return Err(Error::usage(format!(
                "{} takes {} inputs, the tensor has shape {dims:?}",
                info.name, sizes.inp
            )));
        };
        let bias_values = match bias {
            Some(b) if step.info(b)?.len != sizes.out => {
                return Err(Error::usage(format!(
                    "{} has {} values for {} outputs",
                    step.info(b)?.name,
                    step.info(b)?.len,
                    sizes.out
                )));
            }
            Some(b) => Some(step.params().get(b)),
            None => None,
        };
        let rows: usize = outer.iter().product();
        let mut out_dims = [0; 6];
        out_dims[..outer.len()].copy_from_slice(outer);
        out_dims[outer.len()] = sizes.out;
        let shape = Shape::new(&out_dims[..dims.len()])?;
        let out = {
            let mut st = step.state();
            let mut buf = st.pool.get(rows * sizes.out);
            let y = buf.slice_mut();
            let xm = Mat::rows(st.value(x), rows, last, last);
            let wm = sizes.matrix(step.params().get(weight));
            product_team(step.team(), y, xm, wm, Mode::Write);
            finish(y, bias_values.unwrap_or(&[]), act == Act::Relu);
            if act == Act::Relu6 {
                elementwise::clip(step.team(), buf.slice_mut(), act.clip());
            }
            let training = st.training;
            let out = st.add_output(shape, buf, training);
            if training {
                st.record(Linear {
                    x,
                    out,
                    weight,
                    bias,
                    act,
                    rows,
                    sizes,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for Linear {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Param(self.weight));
        self.bias.map(Visit::Param).into_iter().for_each(&mut *f);
        f(Visit::Saved(self.x));
        if self.act != Act::None {
            f(Visit::Saved(self.out));
        }
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let (team, sizes) = (pass.team, self.sizes);
        let Sizes { inp, out, order } = sizes;
        if self.act != Act::None {
            let clip = self.act.clip();
            elementwise::clip_backward(team, pass.value(self.out), dy.slice_mut(), clip);
        }
        // PyTorch's order within a linear layer: bias, then weight.
        if let Some(b) = self.bias {
            let d = dy.slice();
            pass.param(b, |db, mode| match mode {
                Mode::Write => column_sums(d, db),
                Mode::Add => crate::par::scratch(out, |sums| {
                    column_sums(d, sums);
                    elementwise::add(team, db, sums);
                }),
            })?;
        }
        let d = Mat::rows(dy.slice(), self.rows, out, out);
        let x = Mat::rows(pass.value(self.x), self.rows, inp, inp);
        pass.param(self.weight, |dw, mode| match order {
            Order::InOut => product_team(team, dw, x.t(), d, mode),
            Order::OutIn => product_team(team, dw, d.t(), x, mode),
        })?;
        if pass.wants(self.x) {
            let mut dx = pass.pool().get(self.rows * inp);
            let w = sizes.matrix(pass.params.get(self.weight));
            product_team(team, dx.slice_mut(), d, w.t(), Mode::Write);
            pass.give(self.x, dx);
        }
        pass.pool().put(dy);
        Ok(())
    }
}
