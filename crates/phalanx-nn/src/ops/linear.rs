//! Products with a weight: `y = act(x W + b)`. Saves its input, a weight that is not a
//! parameter, and its output when an activation is fused.

use super::weight::{Known, known_vector};
use super::{Act, Weight};
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Operation, SlotId, Slots};
use crate::{Error, Precision, Result, Tensor};
use phalanx_kernels::Mode;
use phalanx_kernels::bias::{column_sums, finish};
use phalanx_kernels::conv::{self, ConvShape};
use phalanx_kernels::element::{Values, ValuesMut};
use phalanx_kernels::elementwise;
use phalanx_kernels::par::{PIECE, ThreadPool};
use phalanx_kernels::product::{Mat, product_biased, product_threaded};

pub(crate) struct Linear {
    weight: Operand,
    bias: Option<Operand>,
    act: Act,
    rows: usize,
    sizes: Sizes,
    precision: Precision,
}

/// The weight's memory layout.
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
    fn of(weight: &Known<'_>, order: Order) -> Result<Self> {
        let [a, b] = weight.matrix()?;
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
    /// That convolution, if this processor multiplies bf16.
    fn rounded(self, rows: usize, precision: Precision) -> Option<ConvShape> {
        let (inp, out) = self.sides(self.inp, self.out);
        let s = ConvShape::product(rows, [inp, out], precision);
        (rows > 0 && conv::multiplies_bf16(&s)).then_some(s)
    }

    /// What is on the convolution's input side, then on its output side, of the
    /// layer's two sides.
    fn sides<T>(self, inp: T, out: T) -> (T, T) {
        match self.order {
            Order::InOut => (inp, out),
            Order::OutIn => (out, inp),
        }
    }
}

/// `y` becomes `x` times the weight, as the convolution or, if `is_back`, as its input gradient.
fn rounded_product(
    threads: &ThreadPool,
    (s, is_back): (&ConvShape, bool),
    (x, w): (&[f32], &[f32]),
    work: &mut [f32],
    y: &mut [f32],
) {
    let (x, y) = (Values::F32(x), ValuesMut::F32(y));
    match is_back {
        false => conv::forward(threads, s, x, w, (None, false), work, y),
        true => conv::input_gradient(threads, s, w, x, (work, y), Mode::Write),
    }
}

impl<'s> Tensor<'s> {
    /// `x W` over the last dimension, for a weight of shape `[in, out]`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn matmul(self, weight: ParamId) -> Result<Tensor<'s>> {
        self.times(&weight.into(), None, Act::None, Order::InOut)
    }

    /// `act(x W + b)` over the last dimension, for a weight of shape `[in, out]` and a bias of
    /// `out` values.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn matmul_with(
        self,
        weight: impl Into<Weight<'s>>,
        bias: Option<Weight<'s>>,
        act: Act,
    ) -> Result<Tensor<'s>> {
        self.times(&weight.into(), bias.as_ref(), act, Order::InOut)
    }

    /// `act(x Wᵀ + b)` over the last dimension, for a weight of PyTorch's shape
    /// `[out, in]`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn linear(self, weight: ParamId, bias: Option<ParamId>, act: Act) -> Result<Tensor<'s>> {
        let bias = bias.map(Weight::Param);
        self.times(&weight.into(), bias.as_ref(), act, Order::OutIn)
    }

    /// As [`linear`](Tensor::linear), for weights that may be tensors: `[out, in]` and
    /// `out` values.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn linear_with(
        self,
        weight: impl Into<Weight<'s>>,
        bias: Option<Weight<'s>>,
        act: Act,
    ) -> Result<Tensor<'s>> {
        self.times(&weight.into(), bias.as_ref(), act, Order::OutIn)
    }

    fn times(
        self,
        weight: &Weight<'s>,
        bias: Option<&Weight<'s>>,
        act: Act,
        order: Order,
    ) -> Result<Tensor<'s>> {
        let (step, dims) = (self.step(), self.dims());
        let weight = weight.known(step)?;
        let sizes = Sizes::of(&weight, order)?;
        let Some((_, outer)) = dims.split_last().filter(|(l, _)| **l == sizes.inp) else {
            return Err(Error::usage(format!(
                "{} takes {} inputs, the tensor has shape {dims:?}",
                weight.name(),
                sizes.inp
            )));
        };
        let bias = known_vector(bias, step, (sizes.out, "outputs"))?;
        let rows: usize = outer.iter().product();
        let shape = dims.with(outer.len(), sizes.out)?;
        let precision = step.state().precision;
        let op = Linear {
            weight: weight.operand,
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
    fn operands(&self) -> [Option<Operand>; 2] {
        [Some(self.weight), self.bias]
    }

    fn saves_operands(&self) -> [bool; 2] {
        [true, false]
    }

    fn saves(&self) -> [bool; 1] {
        [true]
    }

    fn saves_output(&self) -> bool {
        self.act != Act::None
    }

    fn flops(&self) -> u64 {
        2 * (self.rows * self.sizes.inp * self.sizes.out) as u64
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (threads, sizes) = (c.threads, self.sizes);
        let mut buf = c.state.pool.get(self.rows * sizes.out);
        let y = buf.slice_mut();
        let bias = match sizes.rounded(self.rows, self.precision) {
            Some(s) => {
                let mut work = c.state.pool.get(conv::work_len(&s));
                let (x, w) = (c.state.value(x), c.operand(self.weight));
                let is_back = sizes.order == Order::OutIn;
                rounded_product(threads, (&s, is_back), (x, w), work.slice_mut(), y);
                c.state.pool.put(work);
                self.bias.map_or(&[][..], |b| c.operand(b))
            }
            None => {
                let x = Mat::rows(c.state.value(x), self.rows, sizes.inp, sizes.inp);
                let w = sizes.matrix(c.operand(self.weight));
                let bias = self.bias.map_or(&[][..], |b| c.operand(b));
                product_biased(threads, y, (x, w), bias);
                &[][..]
            }
        };
        let relu = self.act == Act::Relu;
        if relu || !bias.is_empty() {
            let rows = (PIECE / sizes.out.max(1)).max(1);
            threads.split(y, rows * sizes.out, |_, y| finish(y, bias, relu));
        }
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
            ctx.operand_grad(b, |db, mode| match mode {
                Mode::Write => column_sums(threads, d, db),
                Mode::Add => phalanx_kernels::par::scratch(out, |sums| {
                    column_sums(threads, d, sums);
                    elementwise::add(threads, db, sums);
                }),
            })?;
        }
        if let Some(s) = sizes.rounded(p.rows, p.precision) {
            let mut work = ctx.pool().get(conv::work_len(&s));
            let (x, d) = (ctx.value(slots.x[0]), dy.slice());
            ctx.operand_grad(p.weight, |dw, mode| {
                let (a, b) = sizes.sides(Values::F32(x), Values::F32(d));
                conv::weight_gradient(threads, &s, a, b, work.slice_mut(), dw, mode);
            })?;
            if ctx.wants(slots.x[0]) {
                let mut dx = ctx.pool().get(p.rows * inp);
                let w = ctx.operand(p.weight);
                let (is_back, work) = (order == Order::InOut, work.slice_mut());
                rounded_product(threads, (&s, is_back), (d, w), work, dx.slice_mut());
                ctx.give(slots.x[0], dx);
            }
            ctx.pool().put(work);
            ctx.pool().put(dy);
            return Ok(());
        }
        let d = Mat::rows(dy.slice(), p.rows, out, out);
        let x = Mat::rows(ctx.value(slots.x[0]), p.rows, inp, inp);
        ctx.operand_grad_checked(p.weight, |dw, mode| match order {
            Order::InOut => product_threaded(threads, dw, x.t(), d, mode),
            Order::OutIn => product_threaded(threads, dw, d.t(), x, mode),
        })?;
        if ctx.wants(slots.x[0]) {
            let mut dx = ctx.pool().get(p.rows * inp);
            let w = sizes.matrix(ctx.operand(p.weight));
            product_threaded(threads, dx.slice_mut(), d, w.t(), Mode::Write);
            ctx.give(slots.x[0], dx);
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
