//! Two-dimensional convolution: `y = act(conv(x, W) + b)`. Saves its input, a weight that is
//! not a parameter, and its output when an activation is fused.
//!
//! Where bf16 is asked for, an output without bias and activation is stored as bf16
//! ([`conv::stores_bf16`]): a normalisation follows such a convolution.

use super::weight::{Known, known_vector};
use super::{Act, Weight, window};
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Error, Precision, Result, Tensor};
use phalanx_kernels::conv::{self, ConvShape};
use phalanx_kernels::element::{Values, ValuesMut};
use phalanx_kernels::{Mode, elementwise};

/// Kernel, stride, padding, dilation (height, width each) and groups of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Size of the kernel.
    pub kernel: [usize; 2],
    /// Stride.
    pub stride: [usize; 2],
    /// Zeros on each side.
    pub padding: [usize; 2],
    /// Distance between kernel taps.
    pub dilation: [usize; 2],
    /// Number of groups.
    pub groups: usize,
    /// Whether the layer has a bias.
    pub bias: bool,
}

/// For messages; a weight's shape says the rest.
impl std::fmt::Display for Conv2dOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let others = [
            ("stride", self.stride),
            ("padding", self.padding),
            ("dilation", self.dilation),
        ];
        f.write_str(&window("kernel", self.kernel, &others))
    }
}

impl Conv2dOptions {
    /// A square kernel, stride 1, no padding, with bias.
    pub fn new(kernel: usize) -> Self {
        Self::rect(kernel, kernel)
    }

    /// A kernel of `height` x `width`, stride 1, no padding, with bias.
    pub fn rect(height: usize, width: usize) -> Self {
        Conv2dOptions {
            kernel: [height, width],
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
            bias: true,
        }
    }

    /// Sets the stride of both directions.
    #[must_use]
    pub fn stride(self, stride: usize) -> Self {
        self.stride_rect(stride, stride)
    }

    /// Sets the stride of each direction.
    #[must_use]
    pub fn stride_rect(mut self, height: usize, width: usize) -> Self {
        self.stride = [height, width];
        self
    }

    /// Sets the zero padding of both directions.
    #[must_use]
    pub fn padding(self, padding: usize) -> Self {
        self.padding_rect(padding, padding)
    }

    /// Sets the zero padding of each direction.
    #[must_use]
    pub fn padding_rect(mut self, height: usize, width: usize) -> Self {
        self.padding = [height, width];
        self
    }

    /// Sets the distance between kernel taps, each direction.
    #[must_use]
    pub fn dilation_rect(mut self, height: usize, width: usize) -> Self {
        self.dilation = [height, width];
        self
    }

    /// Sets the number of groups, which divides both channel counts.
    #[must_use]
    pub fn groups(self, groups: usize) -> Self {
        Conv2dOptions { groups, ..self }
    }

    /// Leaves the bias out.
    #[must_use]
    pub fn no_bias(mut self) -> Self {
        self.bias = false;
        self
    }

    /// Those of a convolution of images of one row, which is the same as this one-dimensional one.
    #[must_use]
    pub fn of_row(self) -> Self {
        Conv2dOptions {
            kernel: [1, self.kernel[1]],
            stride: [1, self.stride[1]],
            padding: [0, self.padding[1]],
            dilation: [1, self.dilation[1]],
            ..self
        }
    }

    /// Outputs of the transposed convolution along dimension `d` of `input` inputs, with `extra` more at the end; `None` if
    /// the convolution back from these does not give `input`.
    pub fn transposed_size(self, d: usize, input: usize, extra: usize) -> Option<usize> {
        let reach = self.dilation[d].checked_mul(self.kernel[d].checked_sub(1)?)?;
        let span = input.checked_sub(1)?.checked_mul(self.stride[d])?;
        let size = span
            .checked_add(reach)?
            .checked_add(1)?
            .checked_add(extra)?;
        let size = size.checked_sub(self.padding[d].checked_mul(2)?)?;
        (self.out_size(d, size) == Some(input)).then_some(size)
    }

    /// Outputs along dimension `d` (0 is the height) of `input` inputs; `None` if the kernel does not fit.
    pub fn out_size(self, d: usize, input: usize) -> Option<usize> {
        let (stride, padding) = (self.stride[d], self.padding[d]);
        ConvShape::out_size(input, self.kernel[d], stride, padding, self.dilation[d])
    }

    /// The convolution of `images` from these sizes and channels to those.
    pub(super) fn shape(
        self,
        images: usize,
        (input, inp): ([usize; 2], usize),
        (output, out): ([usize; 2], usize),
        precision: Precision,
    ) -> ConvShape {
        ConvShape {
            images,
            input,
            output,
            inp,
            out,
            kernel: self.kernel,
            stride: self.stride,
            padding: self.padding,
            dilation: self.dilation,
            groups: self.groups,
            precision,
        }
    }
}

/// A square kernel of this size.
impl From<usize> for Conv2dOptions {
    fn from(kernel: usize) -> Self {
        Self::new(kernel)
    }
}

pub(crate) struct Conv2d {
    weight: Operand,
    bias: Option<Operand>,
    act: Act,
    shape: ConvShape,
}

impl<'s> Tensor<'s> {
    /// `act(conv(x, W) + b)` of images (N, H, W, C), for a weight of PyTorch's
    /// shape (out, in / groups, kh, kw) registered with [`Layout::Conv`](crate::Layout::Conv).
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn conv2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Tensor<'s>> {
        self.conv2d_with(weight, bias.map(Weight::Param), options, act)
    }

    /// As [`conv2d`](Tensor::conv2d), for weights that may be tensors: (kh, kw, in / groups, out)
    /// and `out` values.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn conv2d_with(
        self,
        weight: impl Into<Weight<'s>>,
        bias: Option<Weight<'s>>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Tensor<'s>> {
        let (step, weight) = (self.step(), weight.into());
        let w = weight.known(step)?;
        let s = self.conv_shape(&w, options)?;
        let b = known_vector(bias.as_ref(), step, (s.out, "outputs"))?;
        let x = match conv::may_be_bf16(&s) {
            true => self.own_slot(),
            false => self.slot(),
        };
        let shape = Shape::new(&[s.images, s.output[0], s.output[1], s.out])?;
        let op = Conv2d {
            weight: w.operand,
            bias: b,
            act,
            shape: s,
        };
        let mut st = step.state();
        let made = op.forward(&mut step.compute(&mut st), [x])?;
        let precision = op.output_precision();
        step.emit(&mut st, [x], (shape, precision), made, op)
    }

    /// `act(conv(x, W) + b)` of sequences (N, L, C), for a weight of PyTorch's
    /// shape (out, in / groups, k) registered with [`Layout::Conv1d`](crate::Layout::Conv1d). Of
    /// `options` the second dimension is used.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn conv1d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Tensor<'s>> {
        self.conv1d_with(weight, bias.map(Weight::Param), options, act)
    }

    /// As [`conv1d`](Tensor::conv1d), for weights that may be tensors: (k, in / groups, out)
    /// and `out` values.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn conv1d_with(
        self,
        weight: impl Into<Weight<'s>>,
        bias: Option<Weight<'s>>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let &[n, l, c] = &*dims else {
            return Err(Error::usage(format!(
                "conv1d needs sequences (N, L, C), got shape {dims:?}"
            )));
        };
        let y = self.reshape(&[n, 1, l, c])?;
        let y = y.conv2d_with(weight, bias, options.of_row(), act)?;
        let dims = y.dims();
        y.reshape(&[n, dims[2], dims[3]])
    }

    fn conv_shape(&self, weight: &Known<'_>, o: Conv2dOptions) -> Result<ConvShape> {
        let (shape, dims) = (weight.shape(), self.dims());
        let name = weight.name();
        let wrong = |what: String| Err(Error::usage(format!("convolution {name}: {what}")));
        let Some([out, group_in, kh, kw]) = weight.kernel() else {
            return wrong(format!("{shape:?} is not a convolution's weight"));
        };
        let &[images, h, w, inp] = &*dims else {
            return wrong(format!("needs images (N, H, W, C), got shape {dims:?}"));
        };
        if [kh, kw] != o.kernel {
            return wrong(format!("weight of shape {shape:?} does not fit {o}"));
        }
        if o.groups == 0
            || group_in == 0
            || out == 0
            || group_in.checked_mul(o.groups) != Some(inp)
            || out % o.groups != 0
        {
            return wrong(format!(
                "{inp} input channels, {out} outputs and {} groups do not fit weight shape {shape:?}",
                o.groups
            ));
        }
        let (Some(oh), Some(ow)) = (o.out_size(0, h), o.out_size(1, w)) else {
            return wrong(format!("{o} does not fit images of {h} x {w}"));
        };
        let precision = self.step().state().precision;
        Ok(o.shape(images, ([h, w], inp), ([oh, ow], out), precision))
    }
}

impl Conv2d {
    /// Precision of the output's elements.
    fn output_precision(&self) -> Precision {
        if conv::stores_bf16(&self.shape) && self.bias.is_none() && self.act == Act::None {
            Precision::Bf16
        } else {
            Precision::F32
        }
    }
}

impl Operation for Conv2d {
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
        self.shape.flops()
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (s, act) = (&self.shape, self.act);
        let (len, precision) = (s.images * s.out_len(), self.output_precision());
        let mut buf = c.state.pool.get(precision.memory_len(len));
        let mut work = c.state.pool.get(conv::work_len(s));
        let w = c.operand(self.weight);
        let constants = (self.bias.map(|b| c.operand(b)), act == Act::Relu);
        let y = ValuesMut::of(buf.slice_mut(), precision, len);
        let memory = work.slice_mut();
        conv::forward(c.threads, s, c.state.values(x), w, constants, memory, y);
        c.state.pool.put(work);
        if act == Act::Relu6 {
            elementwise::clip(c.threads, buf.slice_mut(), act.clip());
        }
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (threads, s) = (ctx.threads, &self.shape);
        if self.act != Act::None {
            let clip = self.act.clip();
            elementwise::clip_backward(threads, ctx.value(slots.out), dy.slice_mut(), clip);
        }
        // PyTorch's order within a convolution: weight, then bias; both before
        // the input gradient, so that their reduction can start meanwhile.
        let mut work = ctx.pool().get(conv::work_len(s));
        let x = ctx.values(slots.x[0]);
        let precision = ctx.precision_of(slots.out);
        let d = Values::of(dy.slice(), precision, s.images * s.out_len());
        ctx.operand_grad(self.weight, |dw, mode| {
            conv::weight_gradient(threads, s, x, d, work.slice_mut(), dw, mode);
        })?;
        if let Some(b) = self.bias {
            ctx.operand_grad(b, |db, mode| {
                conv::bias_gradient(threads, s, d.f32(), work.slice_mut(), db, mode)
            })?;
        }
        if ctx.wants(slots.x[0]) {
            // The gradient of a residual connection is added to in place.
            let (len, precision) = (s.images * s.in_len(), ctx.precision_of(slots.x[0]));
            let (mut dx, mode) = match ctx.take(slots.x[0]) {
                Some(sum) => (sum, Mode::Add),
                None => (ctx.pool().get(precision.memory_len(len)), Mode::Write),
            };
            let to = ValuesMut::of(dx.slice_mut(), precision, len);
            let w = ctx.operand(self.weight);
            conv::input_gradient(threads, s, w, d, (work.slice_mut(), to), mode);
            ctx.restore(slots.x[0], dx);
        }
        ctx.pool().put(work);
        ctx.pool().put(dy);
        Ok(())
    }
}
