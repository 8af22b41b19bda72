//! User-defined operations, which choose what they save and whether they can be run again, and the results of other engines.

use std::cell::RefCell;

use super::batch_norm::BatchStatistics;
use crate::error::outside;
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Recorded, SlotId, State, Step, Visit};
use crate::tensor::Shape;
use crate::{Error, Precision, Result, Tensor, refuse};
use phalanx_kernels::{Mode, elementwise};

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
            refuse!("custom operation: an input belongs to another step");
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

/// A result of another engine, and how it gives the gradients: see [`Step::computed`].
pub struct Computed {
    /// The result, row by row.
    pub values: Vec<f32>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The parameters that it was computed with, each once.
    pub params: Vec<ParamId>,
    /// Those of the batch normalisations of a training step, in the order of the model.
    pub statistics: Vec<BatchStatistics>,
    /// The backward pass. An evaluation does not call it.
    pub backward: Box<dyn ComputedBackward>,
}

/// Takes the gradient of a parameter.
pub type TakeGradient<'a> = dyn FnMut(ParamId, Option<&[f32]>) -> Result<()> + 'a;

/// The backward pass of another engine's [result](Computed).
pub trait ComputedBackward: Send {
    /// Gives `gradient` each parameter of [`Computed::params`] once, in an order that does not depend on the rank, with its
    /// gradient row by row in PyTorch's shape, or `None` if the result does not depend on it. `output` is the gradient of the
    /// result. A gradient may be averaged over ranks while the next one is on its way.
    ///
    /// # Errors
    /// Those of `gradient`, and of the engine.
    fn backward(
        &mut self,
        output: &[f32],
        gradient: &mut TakeGradient<'_>,
    ) -> phalanx_base::Result<()>;
}

pub(crate) struct Foreign {
    out: SlotId,
    params: Vec<ParamId>,
    backward: RefCell<Box<dyn ComputedBackward>>,
}

impl Step<'_> {
    /// A tensor that another engine has computed from [this step's parameters](Self::params) and inputs without gradients. Its
    /// backward pass gives the parameters' gradients, which go where this engine's go: to the optimizer, and with
    /// data-parallel training to the other ranks.
    ///
    /// # Errors
    /// `Usage` when sizes do not fit, a parameter belongs to another model, or the step computes in
    /// [bf16](crate::Tape::set_precision) or [joins statistics](crate::Tape::join_statistics), which other engines do not.
    pub fn computed<'s>(&'s self, computed: Computed) -> Result<Tensor<'s>> {
        let shape = Shape::new(&computed.shape)?;
        let len = computed.values.len();
        if shape.numel() != len {
            refuse!("another engine's result of shape {shape:?} has {len} values");
        }
        for id in &computed.params {
            self.info(*id)?;
        }
        let out = {
            let mut st = self.state();
            if st.precision != Precision::F32 {
                refuse!("another engine does not compute in bf16: train in fp32");
            }
            if st.join.is_some() && st.learns() && !computed.statistics.is_empty() {
                refuse!(
                    "another engine's batch norms cannot take the samples of all ranks: leave out synchronized batch norms"
                );
            }
            for batch in &computed.statistics {
                st.statistics.add(self.params(), batch)?;
            }
            let wants = |id: &ParamId| st.wants_grad_of(Operand::Param(*id));
            let wants = computed.params.iter().any(wants);
            let mut buf = st.pool.get(len);
            buf.slice_mut().copy_from_slice(&computed.values);
            let out = st.add_output(shape, buf, wants);
            let node = Foreign {
                out,
                params: computed.params,
                backward: RefCell::new(computed.backward),
            };
            st.made(self.params(), node, wants)?;
            out
        };
        Ok(Tensor::new(self, out))
    }
}

impl Recorded for Foreign {
    fn name(&self) -> Option<&'static str> {
        Some("Computed")
    }

    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        self.params.iter().for_each(|id| f(Visit::Param(*id)));
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        let (params, threads) = (ctx.params, ctx.threads);
        let mut missing = self.params.clone();
        let mut gradient = |id: ParamId, values: Option<&[f32]>| {
            let info = params.info(id)?;
            let wrong = |what| Error::usage(format!("another engine gave {what} {}", info.name));
            let Some(at) = missing.iter().position(|other| *other == id) else {
                return Err(wrong("a second gradient of"));
            };
            missing.swap_remove(at);
            if values.is_some_and(|values| values.len() != info.len) {
                return Err(wrong("a gradient of another size than"));
            }
            ctx.operand_grad(Operand::Param(id), |slot, mode| match (mode, values) {
                (Mode::Write, Some(values)) => info.layout.import(&info.shape, values, slot),
                (Mode::Write, None) => slot.fill(0.0),
                (Mode::Add, Some(values)) => {
                    let mut own = vec![0.0; info.len];
                    info.layout.import(&info.shape, values, &mut own);
                    elementwise::add(threads, slot, &own);
                }
                (Mode::Add, None) => {}
            })
        };
        let done = self
            .backward
            .borrow_mut()
            .backward(dy.slice(), &mut gradient);
        done.map_err(|e| outside(format!("another engine's backward pass failed: {e}"), e))?;
        if let Some(id) = missing.first() {
            let name = &params.info(*id)?.name;
            refuse!("another engine gave no gradient of {name}");
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
