//! Operations that users bring. Save inputs and output.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Recorded, SlotId, Step, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

/// A user's operation, run through [`Step::custom`].
pub trait CustomOp: Send {
    /// Fills `output` from the inputs.
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]);

    /// Fills `d_inputs[i]`, the gradient of input i, from the gradient of the
    /// output. Every element must be written; the contents before are arbitrary.
    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    );
}

pub(crate) struct Custom {
    op: Box<dyn CustomOp>,
    inputs: Vec<SlotId>,
    out: SlotId,
}

impl Step<'_> {
    /// Runs and records a user's operation whose output has `shape`.
    ///
    /// # Errors
    /// `Usage` when an input belongs to another step.
    pub fn custom<'s>(
        &'s self,
        op: Box<dyn CustomOp>,
        inputs: Vec<Tensor<'s>>,
        shape: &[usize],
    ) -> Result<Tensor<'s>> {
        let shape = Shape::new(shape)?;
        if !inputs.iter().all(|t| std::ptr::eq(t.step(), self)) {
            return Err(Error::usage(
                "custom operation: an input belongs to another step",
            ));
        }
        let slots: Vec<SlotId> = inputs.iter().map(Tensor::slot).collect();
        let out = {
            let mut st = self.state();
            let mut buf = st.pool.get(shape.numel());
            {
                let values: Vec<&[f32]> = slots.iter().map(|&s| st.value(s)).collect();
                op.forward(&values, buf.slice_mut());
            }
            let wants = slots.iter().any(|&s| st.wants_grad(s));
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Custom {
                    op,
                    inputs: slots,
                    out,
                });
            }
            out
        };
        Ok(Tensor::new(self, out))
    }
}

impl Recorded for Custom {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        for &i in &self.inputs {
            f(Visit::Input(i));
            f(Visit::Saved(i));
        }
        f(Visit::Saved(self.out));
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        let values: Vec<&[f32]> = self.inputs.iter().map(|&i| ctx.value(i)).collect();
        let mut grads: Vec<Buf> = values.iter().map(|v| ctx.pool().get(v.len())).collect();
        let mut slices: Vec<&mut [f32]> = grads.iter_mut().map(Buf::slice_mut).collect();
        self.op
            .backward(&values, ctx.value(self.out), dy.slice(), &mut slices);
        for (&i, g) in self.inputs.iter().zip(grads) {
            ctx.give(i, g);
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
