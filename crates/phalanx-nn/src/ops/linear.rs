//! Products with a parameter: `y = act(x W + b)`. Saves its input, and its
//! output when an activation is fused.

use super::Act;
use crate::kernels::bias::{column_sums, finish};
use crate::kernels::conv::ConvShape;
use crate::kernels::element::{Values, ValuesMut};
use crate::kernels::elementwise;
use crate::kernels::product::{Mat, product_threaded};
use crate::kernels::{Mode, bf16};
use crate::par::ThreadPool;
use crate::param::{Layout, ParamId, ParamInfo};
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Error, Precision, Result, Tensor};

pub(crate) struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    act: Act,
    rows: usize,
    sizes: Sizes,
    precision: Precision,
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

/// Products in bf16: those of a 1x1 convolution whose weights lie as these do. PyTorch's
/// order is that of the convolution back, from `out` channels to `inp`.
impl Sizes {
    /// That convolution, if products are made in bf16.
    fn rounded(self, rows: usize, precision: Precision) -> Option<ConvShape> {
        let (inp, out) = self.sides(self.inp, self.out);
        let s = ConvShape {
            images: 1,
            input: [1, rows],
            output: [1, rows],
            inp,
            out,
            kernel: [1, 1],
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
            precision,
        };
        (precision == Precision::Bf16 && rows > 0 && bf16::fits(&s)).then_some(s)
    }

    /// What is on the convolution's input side, then on its output side, of the
    /// layer's two sides.
    fn sides<T>(self, inp: T, out: T) -> (T, T) {
        match self.order {
            Order::InOut => (inp, out),
            Order::OutIn => (out, inp),
        }
    }

    fn forward(
        self,
        threads: &ThreadPool,
        s: &ConvShape,
        x: &[f32],
        w: &[f32],
        work: &mut [f32],
        y: &mut [f32],
    ) {
        let (x, y) = (Values::F32(x), ValuesMut::F32(y));
        match self.order {
            Order::InOut => bf16::forward(threads, s, x, w, (&[], false), work, y),
            Order::OutIn => bf16::input_gradient(threads, s, w, x, work, y, Mode::Write),
        }
    }

    fn backward(
        self,
        threads: &ThreadPool,
        s: &ConvShape,
        dy: &[f32],
        w: &[f32],
        work: &mut [f32],
        dx: &mut [f32],
    ) {
        let (dy, dx) = (Values::F32(dy), ValuesMut::F32(dx));
        match self.order {
            Order::InOut => bf16::input_gradient(threads, s, w, dy, work, dx, Mode::Write),
            Order::OutIn => bf16::forward(threads, s, dy, w, (&[], false), work, dx),
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
        let (step, dims) = (self.step(), self.dims());
        let info = step.info(weight)?;
        let Some((_, outer)) = dims.split_last().filter(|(l, _)| **l == sizes.inp) else {
            return Err(Error::usage(format!(
                "{} takes {} inputs, the tensor has shape {dims:?}",
                info.name, sizes.inp
            )));
        };
        if let Some(b) = bias
            && step.info(b)?.len != sizes.out
        {
            return Err(Error::usage(format!(
                "{} has {} values for {} outputs",
                step.info(b)?.name,
                step.info(b)?.len,
                sizes.out
            )));
        }
        let rows: usize = outer.iter().product();
        let shape = dims.with(outer.len(), sizes.out)?;
        let precision = step.state().precision;
        let op = Linear {
            weight,
            bias,
            act,
            rows,
            sizes,
            precision,
        };
        step.apply([self.slot()], shape, op)
    }
}

impl Operation for Linear {
    fn params(&self) -> [Option<ParamId>; 2] {
        [Some(self.weight), self.bias]
    }

    fn saves(&self) -> [bool; 1] {
        [true]
    }

    fn saves_output(&self) -> bool {
        self.act != Act::None
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (threads, sizes, st) = (c.threads, self.sizes, &mut *c.state);
        let mut buf = st.pool.get(self.rows * sizes.out);
        let y = buf.slice_mut();
        let w = c.params.get(self.weight);
        match sizes.rounded(self.rows, self.precision) {
            Some(s) => {
                let mut work = st.pool.get(bf16::work_len(&s));
                sizes.forward(threads, &s, st.value(x), w, work.slice_mut(), y);
                st.pool.put(work);
            }
            None => {
                let x = Mat::rows(st.value(x), self.rows, sizes.inp, sizes.inp);
                product_threaded(threads, y, x, sizes.matrix(w), Mode::Write);
            }
        }
        let bias = self.bias.map_or(&[][..], |b| c.params.get(b));
        finish(y, bias, self.act == Act::Relu);
        if self.act == Act::Relu6 {
            elementwise::clip(threads, y, self.act.clip());
        }
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (p, threads) = (self, ctx.threads);
        let sizes = p.sizes;
        let Sizes { inp, out, order } = sizes;
        if p.act != Act::None {
            let clip = p.act.clip();
            elementwise::clip_backward(threads, ctx.value(slots.out), dy.slice_mut(), clip);
        }
        // PyTorch's order within a linear layer: bias, then weight.
        if let Some(b) = p.bias {
            let d = dy.slice();
            ctx.param(b, |db, mode| match mode {
                Mode::Write => column_sums(d, db),
                Mode::Add => crate::par::scratch(out, |sums| {
                    column_sums(d, sums);
                    elementwise::add(threads, db, sums);
                }),
            })?;
        }
        if let Some(s) = sizes.rounded(p.rows, p.precision) {
            let mut work = ctx.pool().get(bf16::work_len(&s));
            let (x, d) = (ctx.value(slots.x[0]), dy.slice());
            ctx.param(p.weight, |dw, mode| {
                let (a, b) = sizes.sides(Values::F32(x), Values::F32(d));
                bf16::weight_gradient(threads, &s, a, b, work.slice_mut(), dw, mode);
            })?;
            if ctx.wants(slots.x[0]) {
                let mut dx = ctx.pool().get(p.rows * inp);
                let w = ctx.params.get(p.weight);
                sizes.backward(threads, &s, d, w, work.slice_mut(), dx.slice_mut());
                ctx.give(slots.x[0], dx);
            }
            ctx.pool().put(work);
            ctx.pool().put(dy);
            return Ok(());
        }
        let d = Mat::rows(dy.slice(), p.rows, out, out);
        let x = Mat::rows(ctx.value(slots.x[0]), p.rows, inp, inp);
        ctx.param_checked(p.weight, |dw, mode| match order {
            Order::InOut => product_threaded(threads, dw, x.t(), d, mode),
            Order::OutIn => product_threaded(threads, dw, d.t(), x, mode),
        })?;
        if ctx.wants(slots.x[0]) {
            let mut dx = ctx.pool().get(p.rows * inp);
            let w = sizes.matrix(ctx.params.get(p.weight));
            product_threaded(threads, dx.slice_mut(), d, w.t(), Mode::Write);
            ctx.give(slots.x[0], dx);
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
