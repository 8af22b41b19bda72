//! Transposed two-dimensional convolution: a convolution's input gradient as a forward pass,
//! and vice versa. Saves its input, and a weight that is not a parameter.

use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};
use phalanx_kernels::Mode;
use phalanx_kernels::bias::finish;
use phalanx_kernels::conv::{self, ConvShape};
use phalanx_kernels::element::{Values, ValuesMut};

use super::weight::{Known, known_vector};
use super::{Conv2dOptions, Weight};

pub(crate) struct ConvTranspose2d {
    weight: Operand,
    bias: Option<Operand>,
    /// The convolution from this layer's output to its input.
    shape: ConvShape,
}

impl<'s> Tensor<'s> {
    /// The transposed convolution of images (N, H, W, C), plus `b`, for a weight of
    /// PyTorch's shape (in, out / groups, kh, kw) registered with [`Layout::Conv`](crate::Layout::Conv).
    /// `extra` rows and columns are added to the end (PyTorch's `output_padding`).
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn conv_transpose2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Tensor<'s>> {
        self.conv_transpose2d_with(weight, bias.map(Weight::Param), options, extra)
    }

    /// As [`conv_transpose2d`](Tensor::conv_transpose2d), for weights that may be tensors:
    /// (kh, kw, out / groups, in) and `out` values.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn conv_transpose2d_with(
        self,
        weight: impl Into<Weight<'s>>,
        bias: Option<Weight<'s>>,
        options: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Tensor<'s>> {
        let (step, weight) = (self.step(), weight.into());
        let w = weight.known(step)?;
        let s = self.transposed_shape(&w, options, extra)?;
        let b = known_vector(bias.as_ref(), step, (s.inp, "outputs"))?;
        let shape = Shape::new(&[s.images, s.input[0], s.input[1], s.inp])?;
        let op = ConvTranspose2d {
            weight: w.operand,
            bias: b,
            shape: s,
        };
        step.apply([self.slot()], shape, op)
    }

    fn transposed_shape(
        &self,
        weight: &Known<'_>,
        o: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<ConvShape> {
        let dims = self.dims();
        let name = weight.name();
        let wrong = |what: String| {
            Err(Error::usage(format!(
                "transposed convolution {name}: {what}"
            )))
        };
        let &[images, h, w, inp] = &*dims else {
            return wrong(format!("needs images (N, H, W, C), got shape {dims:?}"));
        };
        let kernel = weight.kernel().filter(|_| weight.shape().len() == 4);
        let fits = |k: &[usize; 4]| k[0] == inp && k[2..] == o.kernel;
        let Some([_, group_out, _, _]) = kernel.filter(fits) else {
            return wrong(format!(
                "weight of shape {:?} does not fit {inp} inputs and {o}",
                weight.shape()
            ));
        };
        if o.groups == 0 || !inp.is_multiple_of(o.groups) || group_out == 0 || inp == 0 {
            return wrong(format!("{inp} inputs and {} groups do not fit", o.groups));
        }
        let out = group_out * o.groups;
        let size = |d: usize, n: usize| o.transposed_size(d, n, extra[d]);
        let (Some(oh), Some(ow)) = (size(0, h), size(1, w)) else {
            return wrong(format!(
                "{o} and {extra:?} more rows and columns does not fit images of {h} x {w}"
            ));
        };
        let precision = self.step().state().precision;
        Ok(o.shape(images, ([oh, ow], out), ([h, w], inp), precision))
    }
}

impl Operation for ConvTranspose2d {
    fn operands(&self) -> [Option<Operand>; 2] {
        [Some(self.weight), self.bias]
    }

    fn saves_operands(&self) -> [bool; 2] {
        [true, false]
    }

    fn saves(&self) -> [bool; 1] {
        [true]
    }

    fn flops(&self) -> u64 {
        self.shape.flops()
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let s = &self.shape;
        let mut buf = c.state.pool.get(s.images * s.in_len());
        let mut work = c.state.pool.get(conv::work_len(s));
        let w = c.operand(self.weight);
        let memory = (work.slice_mut(), ValuesMut::F32(buf.slice_mut()));
        let value = Values::F32(c.state.value(x));
        conv::input_gradient(c.threads, s, w, value, memory, Mode::Write);
        if let Some(b) = self.bias {
            let (b, piece) = (c.operand(b), s.in_len().max(1));
            c.threads
                .split(buf.slice_mut(), piece, |_, y| finish(y, b, false));
        }
        c.state.pool.put(work);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<1>, dy: Buf) -> Result<()> {
        let (threads, s) = (ctx.threads, &self.shape);
        let (x, d) = (ctx.value(slots.x[0]), dy.slice());
        let mut work = ctx.pool().get(conv::work_len(s).max(8 * s.inp));
        ctx.operand_grad(self.weight, |dw, mode| {
            let (d, x) = (Values::F32(d), Values::F32(x));
            conv::weight_gradient(threads, s, d, x, work.slice_mut(), dw, mode);
        })?;
        if let Some(b) = self.bias {
            // The sum over pixels of this layer's output, whose channels are the convolution's inputs.
            let back = ConvShape {
                out: s.inp,
                output: s.input,
                ..*s
            };
            ctx.operand_grad(b, |db, mode| {
                conv::bias_gradient(threads, &back, d, work.slice_mut(), db, mode)
            })?;
        }
        if ctx.wants(slots.x[0]) {
            let mut dx = ctx.pool().get(x.len());
            let w = ctx.operand(self.weight);
            let (memory, y) = (work.slice_mut(), ValuesMut::F32(dx.slice_mut()));
            conv::forward(threads, s, Values::F32(d), w, (None, false), memory, y);
            ctx.give(slots.x[0], dx);
        }
        ctx.pool().put(work);
        ctx.pool().put(dy);
        Ok(())
    }
}
