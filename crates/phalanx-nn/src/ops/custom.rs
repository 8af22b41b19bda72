//! User-defined operations. They choose what they save, and whether they can be run again.

use crate::error::outside;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Recorded, SlotId, State, Step, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

/// A user's operation, run through [`Step::custom`].
///
/// `forward` and `backward` must not touch tensors of the step that runs them: that panics.
pub trait CustomOp: Send {
    /// Fills `output` from the inputs. Every element must be written; the contents before are
    /// arbitrary.
    ///
    /// # Errors
    /// Any error stops the training step. The caller gets an [`Error`] of its kind
    /// with it as source.
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> phalanx_base::Result<()>;

    /// Fills `d_inputs[i]`, the gradient of input i, from the gradient of the
    /// output. Every element must be written; the contents before are arbitrary.
    /// `inputs` and `output` hold empty slices for what the operation does not save.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); the backward pass ends at once.
    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()>;

    /// The operation's name in profiles, graphs and errors.
    fn name(&self) -> &'static str {
        "Custom"
    }

    /// Whether `backward` reads the inputs. If not, their memory may be freed before.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Whether `backward` reads the output. If not, its memory may be freed before.
    fn saves_output(&self) -> bool {
        true
    }

    /// Whether `forward` may run a second time during backward, with the same bits. Parts
    /// under [`Tensor::recompute`] free the output of such an operation.
    fn can_recompute(&self) -> bool {
        false
    }
}

pub(crate) struct Custom {
    op: Box<dyn CustomOp>,
    inputs: Vec<SlotId>,
    out: SlotId,
    // Queried once: what is saved must not change while the node is recorded.
    saves_inputs: bool,
    saves_output: bool,
    can_recompute: bool,
}

impl Step<'_> {
    /// Runs and records a user's operation whose output has `shape`.
    ///
    /// # Errors
    /// `Usage` when an input belongs to another step; `Custom` when the operation fails.
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
            let buf = forward(&*op, &slots, shape.numel(), &mut st)?;
            let wants = slots.iter().any(|&s| st.wants_grad(s));
            let out = st.add_output(shape, buf, wants);
            let node = Custom {
                saves_inputs: op.saves_inputs(),
                saves_output: op.saves_output(),
                can_recompute: op.can_recompute(),
                op,
                inputs: slots,
                out,
            };
            st.made(self.params(), node, wants)?;
            out
        };
        Ok(Tensor::new(self, out))
    }
}

/// Runs the operation; returns its output.
fn forward(op: &dyn CustomOp, inputs: &[SlotId], len: usize, st: &mut State) -> Result<Buf> {
    let mut buf = st.pool.get(len);
    let values: Vec<&[f32]> = inputs.iter().map(|&s| st.value(s)).collect();
    match op.forward(&values, buf.slice_mut()) {
        Ok(()) => Ok(buf),
        Err(e) => {
            st.pool.put(buf);
            Err(failed(op, "forward", e))
        }
    }
}

fn failed(op: &dyn CustomOp, pass: &str, e: phalanx_base::Error) -> Error {
    let name = op.name();
    outside(
        format!("operation {name} failed in its {pass} pass: {e}"),
        e,
    )
}

impl Recorded for Custom {
    fn name(&self) -> Option<&'static str> {
        Some(self.op.name())
    }

    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        for &i in &self.inputs {
            f(Visit::Input(i));
            if self.saves_inputs {
                f(Visit::Saved(i));
            }
        }
        if self.saves_output {
            f(Visit::Saved(self.out));
        }
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        let op = &*self.op;
        let saved = |is: bool, i: SlotId| if is { ctx.value(i) } else { &[][..] };
        let inputs = self.inputs.iter().map(|&i| saved(self.saves_inputs, i));
        let inputs: Vec<&[f32]> = inputs.collect();
        let out = saved(self.saves_output, self.out);
        let grads = self.inputs.iter().map(|&i| {
            let len = ctx.shape(i).numel();
            ctx.pool().get(len)
        });
        let mut grads: Vec<Buf> = grads.collect();
        let mut slices: Vec<&mut [f32]> = grads.iter_mut().map(Buf::slice_mut).collect();
        op.backward(&inputs, out, dy.slice(), &mut slices)
            .map_err(|e| failed(op, "backward", e))?;
        for (&i, g) in self.inputs.iter().zip(grads) {
            ctx.give(i, g);
        }
        ctx.pool().put(dy);
        Ok(())
    }

    fn can_recompute(&self) -> bool {
        self.can_recompute
    }

    fn recompute(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let len = c.state.shape(self.out).numel();
        forward(&*self.op, &self.inputs, len, c.state)
    }
}
