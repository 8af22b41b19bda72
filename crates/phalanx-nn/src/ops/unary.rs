//! Element-wise functions. f32 operands are changed in place if no other operation needs them. Save their
//! input, or (relu, sigmoid, tanh, exp, sqrt) their output; a factor saves nothing.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Precision, Result, Tensor};
use phalanx_kernels::activation::{self, Activation};
use phalanx_kernels::element::{Values, elements_mut};
use phalanx_kernels::elementwise;

pub(crate) struct Unary(Activation);

pub(crate) struct Scale(f32);

macro_rules! functions {
    ($($(#[$meta:meta])* $name:ident = $function:expr;)*) => {
        impl<'s> Tensor<'s> {
            $($(#[$meta])*
            ///
            /// # Errors
            /// None at present; operations share one signature.
            pub fn $name(self) -> Result<Tensor<'s>> {
                self.unary($function)
            })*
        }
    };
}

functions! {
    /// `max(0, x)`; the derivative at 0 is 0.
    relu = Activation::Relu;
    /// `min(max(0, x), 6)`; the derivative at 0 and at 6 is 0.
    relu6 = Activation::Relu6;
    /// `x * P(normal <= x)`, by the error function.
    gelu = Activation::Gelu;
    /// The approximation of [`gelu`](Tensor::gelu) by a hyperbolic tangent.
    gelu_tanh = Activation::GeluTanh;
    /// `x * sigmoid(x)`.
    silu = Activation::Silu;
    /// `x * min(max(0, x + 3), 6) / 6`; derivative 0 at -3 and 1 at 3.
    hardswish = Activation::Hardswish;
    /// `min(max(0, x + 3), 6) / 6`; derivative 0 at both ends.
    hardsigmoid = Activation::Hardsigmoid;
    /// `1 / (1 + exp(-x))`.
    sigmoid = Activation::Sigmoid;
    /// The hyperbolic tangent.
    tanh = Activation::Tanh;
    /// The exponential.
    exp = Activation::Exp;
    /// The natural logarithm.
    log = Activation::Log;
    /// The square root.
    sqrt = Activation::Sqrt;
    /// The absolute value; the derivative at 0 is 0.
    abs = Activation::Abs;
}

impl<'s> Tensor<'s> {
    /// `x` where positive, `slope * x` elsewhere; the derivative at 0 is `slope`.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn leaky_relu(self, slope: f32) -> Result<Tensor<'s>> {
        self.unary(Activation::LeakyRelu(slope))
    }

    /// `x` to the power of `exponent`; as PyTorch's, NaN for negative `x` and an exponent that is no whole number.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn pow(self, exponent: f32) -> Result<Tensor<'s>> {
        self.unary(Activation::Pow(exponent))
    }

    /// `min(max(low, x), high)`; the derivative at both bounds is 1.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn clamp(self, low: f32, high: f32) -> Result<Tensor<'s>> {
        self.unary(Activation::Clamp(low, high))
    }

    /// `x * factor`.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn scale(self, factor: f32) -> Result<Tensor<'s>> {
        self.step().apply([self.slot()], self.dims(), Scale(factor))
    }

    pub(crate) fn unary(self, function: Activation) -> Result<Tensor<'s>> {
        let x = match function.keeps_bf16() {
            true => self.own_slot(),
            false => self.slot(),
        };
        let precision = self.step().state().precision_of(x);
        let kind = (self.dims(), precision);
        self.step().apply_as([x], kind, Unary(function))
    }
}

impl Operation for Unary {
    fn name(&self) -> Option<&'static str> {
        Some(self.0.name())
    }

    fn saves(&self) -> [bool; 1] {
        [!self.0.by_output()]
    }

    fn saves_output(&self) -> bool {
        self.0.by_output()
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        if c.state.precision_of(x) == Precision::Bf16 {
            let len = c.state.shape(x).numel();
            let mut buf = c.state.pool.get(Precision::Bf16.memory_len(len));
            let y = elements_mut(buf.slice_mut(), len);
            activation::forward_of_bf16(c.threads, self.0, c.state.elements(x), y);
            return Ok((buf, None));
        }
        if self.0.by_output() || !c.state.wants_grad(x) {
            let mut buf = c.state.take_for_writing(x);
            activation::forward(c.threads, self.0, buf.slice_mut());
            return Ok((buf, None));
        }
        let mut buf = c.state.pool.get(c.state.shape(x).numel());
        activation::forward_of(c.threads, self.0, c.state.value(x), buf.slice_mut());
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let saved = if self.0.by_output() { s.out } else { s.x[0] };
        match ctx.values(saved) {
            Values::F32(v) => activation::backward(ctx.threads, self.0, v, dy.slice_mut()),
            Values::Bf16(v) => {
                let dy = elements_mut(dy.slice_mut(), v.len());
                activation::backward_bf16(ctx.threads, self.0, v, dy);
            }
        }
        ctx.give(s.x[0], dy);
        Ok(())
    }
}

impl Operation for Scale {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        elementwise::scale(c.threads, buf.slice_mut(), self.0);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        elementwise::scale(ctx.threads, dy.slice_mut(), self.0);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
