//! Functions of one number, element by element: activations and the
//! exponential. Save their input, or (sigmoid, tanh, exp) their output.

use crate::kernels::activation::{self, Function};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Result, Tensor};

pub(crate) struct Unary {
    x: SlotId,
    out: SlotId,
    function: Function,
}

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
    /// `min(max(0, x), 6)`; the derivative at 0 and at 6 is 0.
    relu6 = Function::Relu6;
    /// `x * P(normal <= x)`, by the error function.
    gelu = Function::Gelu;
    /// The approximation of [`gelu`](Tensor::gelu) by a hyperbolic tangent.
    gelu_tanh = Function::GeluTanh;
    /// `x * sigmoid(x)`.
    silu = Function::Silu;
    /// `x * min(max(0, x + 3), 6) / 6`; derivative 0 at -3 and 1 at 3.
    hardswish = Function::Hardswish;
    /// `min(max(0, x + 3), 6) / 6`; derivative 0 at both ends.
    hardsigmoid = Function::Hardsigmoid;
    /// `1 / (1 + exp(-x))`.
    sigmoid = Function::Sigmoid;
    /// The hyperbolic tangent.
    tanh = Function::Tanh;
    /// The exponential.
    exp = Function::Exp;
}

impl<'s> Tensor<'s> {
    /// `x` where positive, `slope * x` elsewhere; the derivative at 0 is `slope`.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn leaky_relu(self, slope: f32) -> Result<Tensor<'s>> {
        self.unary(Function::LeakyRelu(slope))
    }

    fn unary(self, function: Function) -> Result<Tensor<'s>> {
        let (step, x) = (self.step(), self.slot());
        let out = {
            let mut st = step.state();
            let (shape, wants) = (st.shape(x), st.wants_grad(x));
            let keeps = wants && !function.by_output();
            let buf = compute(&mut step.compute(&mut st), x, function, keeps);
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Unary { x, out, function });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

/// The function of every element; `keeps`: the operand is left as it is.
fn compute(c: &mut Compute<'_>, x: SlotId, function: Function, keeps: bool) -> Buf {
    let mut buf = if keeps {
        let mut own = c.state.pool.get(c.state.shape(x).numel());
        own.slice_mut().copy_from_slice(c.state.value(x));
        own
    } else {
        c.state.take_for_writing(x)
    };
    activation::forward(c.team, function, buf.slice_mut());
    buf
}

impl Unary {
    fn saved(&self) -> SlotId {
        if self.function.by_output() {
            self.out
        } else {
            self.x
        }
    }
}

impl Recorded for Unary {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.saved()));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let saved = pass.value(self.saved());
        activation::backward(pass.team, self.function, saved, dy.slice_mut());
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x, self.function, true))
    }
}
