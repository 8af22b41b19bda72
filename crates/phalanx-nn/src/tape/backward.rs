//! The backward walk.

use std::ops::Range;
use std::sync::Arc;

use std::time::Instant;

use super::anomaly;
use super::node::{Operand, Visit};
use super::segment;
use super::state::{SlotId, State};
use crate::Precision;
use crate::error::{Error, Result, outside, refuse};
use crate::ops::batch_norm::JoinStatistics;
use crate::param::{GradSink, ParamId, Params};
use crate::pool::{Buf, Pool};
use crate::tensor::Shape;
use phalanx_kernels::element::{Bf16, Element, Values, elements, elements_mut};
use phalanx_kernels::par::ThreadPool;
use phalanx_kernels::{Mode, elementwise};

/// Context of a node's backward.
pub(crate) struct BackwardContext<'p> {
    pub(crate) threads: &'p ThreadPool,
    pub(crate) params: &'p Params,
    pub(super) state: &'p mut State,
    sink: &'p mut dyn GradSink,
    accumulates: bool,
    /// Name of the current operation, in anomaly mode.
    checked: Option<&'static str>,
}

impl BackwardContext<'_> {
    pub(crate) fn pool(&mut self) -> &mut Pool {
        &mut self.state.pool
    }

    pub(crate) fn shape(&self, id: SlotId) -> Shape {
        self.state.shape(id)
    }

    /// A value of f32 that the current node has saved.
    pub(crate) fn value<'v>(&self, id: SlotId) -> &'v [f32] {
        self.elements(id)
    }

    /// Data type of the elements of a slot and of its gradient.
    pub(crate) fn precision_of(&self, id: SlotId) -> Precision {
        self.state.precision_of(id)
    }

    /// A value that the current node has saved.
    pub(crate) fn values<'v>(&self, id: SlotId) -> Values<'v> {
        match self.precision_of(id) {
            Precision::F32 => Values::F32(self.elements(id)),
            Precision::Bf16 => Values::Bf16(self.elements(id)),
        }
    }

    /// The same, of a slot known to have such elements.
    pub(crate) fn elements<'v, T: Element>(&self, id: SlotId) -> &'v [T] {
        let v = self.state.elements::<T>(id);
        // SAFETY: the node's save count keeps the slot's memory from being
        // given back, moved or written until the node has been processed
        // (`run` lowers it afterwards), and no node keeps what it reads here.
        unsafe { std::slice::from_raw_parts(v.as_ptr(), v.len()) }
    }

    /// The same for memory that holds bytes.
    pub(crate) fn bytes<'v>(&self, id: SlotId, len: usize) -> &'v [u8] {
        let v = self.value(id);
        assert!(len <= size_of_val(v));
        // SAFETY: as in `value`; every byte of an `f32` is an initialised byte.
        unsafe { std::slice::from_raw_parts(v.as_ptr().cast(), len) }
    }

    /// The hook that joins batch statistics, if there is one.
    pub(crate) fn join(&self) -> Option<Arc<dyn JoinStatistics>> {
        self.state.join.clone()
    }

    pub(crate) fn labels(&self, range: (usize, usize)) -> &[u32] {
        self.state.labels(range)
    }

    pub(crate) fn samples(&self, rows: Range<usize>) -> &[u64] {
        self.state.samples(rows)
    }

    /// Whether the gradient of this slot is needed.
    pub(crate) fn wants(&self, id: SlotId) -> bool {
        self.state.wants_grad(id)
    }

    /// Elements of a weight that the current node has saved.
    pub(crate) fn operand(&self, operand: Operand) -> &[f32] {
        match operand {
            Operand::Param(id) => self.params.get(id),
            Operand::Slot(id) => self.value(id),
        }
    }

    /// Lets `write` put one use's gradient of a weight into the memory of its gradient (a
    /// parameter's is the sink's); not called where that is not wanted. Reports a parameter when
    /// this was its last use.
    pub(crate) fn operand_grad(
        &mut self,
        operand: Operand,
        write: impl FnOnce(&mut [f32], Mode),
    ) -> Result<()> {
        self.operand_grad_checked(operand, |slot, mode| {
            write(slot, mode);
            false
        })
    }

    /// As [`operand_grad`](Self::operand_grad); `write` returns true if it has checked that
    /// every value of the gradient is finite.
    pub(crate) fn operand_grad_checked(
        &mut self,
        operand: Operand,
        write: impl FnOnce(&mut [f32], Mode) -> bool,
    ) -> Result<()> {
        match operand {
            Operand::Param(id) => return self.param(id, write),
            Operand::Slot(id) if self.wants(id) => {
                let (mut grad, mode) = match self.take(id) {
                    Some(sum) => (sum, Mode::Add),
                    None => (self.state.pool.get(self.shape(id).numel()), Mode::Write),
                };
                write(grad.slice_mut(), mode);
                self.restore(id, grad);
            }
            Operand::Slot(_) => {}
        }
        Ok(())
    }

    fn param(
        &mut self,
        param: ParamId,
        write: impl FnOnce(&mut [f32], Mode) -> bool,
    ) -> Result<()> {
        let i = param.index();
        if self.state.frozen[i] {
            return Ok(());
        }
        let first = !std::mem::replace(&mut self.state.written[i], true);
        let mode = if first && !self.accumulates {
            Mode::Write
        } else {
            Mode::Add
        };
        let slot = slot_of(self.sink, self.params, param)?;
        let finite = write(slot, mode);
        if let Some(operation) = self.checked {
            anomaly::check_param_gradient(operation, &self.params.infos()[i], slot)?;
        }
        self.state.uses[i] -= 1;
        match self.state.uses[i] {
            0 if finite => accepted(self.sink.ready_finite(param), self.params, param),
            0 => accepted(self.sink.ready(param), self.params, param),
            _ => Ok(()),
        }
    }

    /// The gradient that a slot has so far, for an operation that adds to it as
    /// it goes; to be put back with [`restore`](Self::restore).
    pub(crate) fn take(&mut self, id: SlotId) -> Option<Buf> {
        self.state.slots[id.index()].grad.take()
    }

    /// Puts a slot's gradient back.
    pub(crate) fn restore(&mut self, id: SlotId, grad: Buf) {
        self.state.slots[id.index()].grad = Some(grad);
    }

    /// Adds what `make` writes, given the output's gradient `dy`, to a slot's gradient.
    pub(crate) fn give_made(&mut self, id: SlotId, dy: Buf, make: impl FnOnce(&[f32], &mut [f32])) {
        let numel = self.shape(id).numel();
        let mut dx = self.pool().get(numel);
        make(dy.slice(), dx.slice_mut());
        self.pool().put(dy);
        self.give(id, dx);
    }

    /// Adds `grad`, of the slot's precision, to its gradient.
    pub(crate) fn give(&mut self, id: SlotId, grad: Buf) {
        let slot = &mut self.state.slots[id.index()];
        if !slot.wants_grad {
            self.state.pool.put(grad);
        } else if let Some(sum) = &mut slot.grad {
            let len = slot.shape.numel();
            match slot.precision {
                Precision::F32 => elementwise::add(self.threads, sum.slice_mut(), grad.slice()),
                Precision::Bf16 => {
                    let sum = elements_mut::<Bf16>(sum.slice_mut(), len);
                    elementwise::add(self.threads, sum, elements::<Bf16>(grad.slice(), len));
                }
            }
            self.state.pool.put(grad);
        } else {
            slot.grad = Some(grad);
        }
    }
}

fn slot_of<'s>(
    sink: &'s mut dyn GradSink,
    params: &Params,
    param: ParamId,
) -> Result<&'s mut [f32]> {
    let info = &params.infos()[param.index()];
    let slot = sink.slot(param);
    if slot.len() == info.len {
        return Ok(slot);
    }
    refuse!(
        "the gradient sink gave {} elements for {}, which has {}",
        slot.len(),
        info.name,
        info.len
    )
}

fn accepted(answer: phalanx_base::Result<()>, params: &Params, param: ParamId) -> Result<()> {
    answer.map_err(|e| {
        let name = &params.infos()[param.index()].name;
        outside(format!("the gradient of {name} was not accepted: {e}"), e)
    })
}

/// Walks the recorded nodes from `loss` with the given gradient of it.
pub(super) fn run(
    state: &mut State,
    threads: &ThreadPool,
    params: &Params,
    loss: SlotId,
    gradient: &[f32],
    sink: &mut dyn GradSink,
) -> Result<()> {
    check(state, loss, gradient)?;
    state.walked = true;
    let mut nodes = std::mem::take(&mut state.nodes);

    state.reached.clear();
    state.reached.resize(state.slots.len(), false);
    state.reached[loss.index()] = true;
    state.uses.clear();
    state.uses.resize(params.len(), 0);
    state.written.clear();
    state.written.resize(params.len(), false);
    for node in nodes.iter().rev() {
        let mut on = false;
        node.visit(&mut |v| match v {
            Visit::Output(s) => on = state.reached[s.index()],
            Visit::Input(s) | Visit::Once(s) if on => state.reached[s.index()] = true,
            Visit::Param(p) if on && !state.frozen[p.index()] => state.uses[p.index()] += 1,
            _ => {}
        });
    }

    let mut seed = state.pool.get(gradient.len());
    seed.slice_mut().copy_from_slice(gradient);
    state.slots[loss.index()].grad = Some(seed);
    if state.anomaly {
        state.check_seed(loss)?;
    }

    let accumulates = sink.accumulates();
    for id in params.ids().filter(|id| state.uses[id.index()] == 0) {
        if !accumulates && !state.frozen[id.index()] {
            slot_of(sink, params, id)?; // of another model, perhaps
        }
        accepted(sink.unused(id), params, id)?;
    }

    let mut ctx = BackwardContext {
        threads,
        params,
        state,
        sink,
        accumulates,
        checked: None,
    };
    while let Some(node) = nodes.last() {
        let out = node.output();
        let slot = out.ok_or_else(|| Error::internal("a recorded node has no output"))?;
        if ctx.state.reached[slot.index()] {
            segment::restore(&mut ctx, &nodes, node)?;
            let grad = ctx.state.slots[slot.index()].grad.take();
            let grad = grad.ok_or_else(|| Error::internal("a gradient is missing in backward"))?;
            ctx.checked = ctx.state.anomaly.then(|| node.name());
            let began = ctx.state.clock.as_ref().map(|_| Instant::now());
            node.backward(&mut ctx, grad)?;
            if let (Some(clock), Some(began)) = (&mut ctx.state.clock, began) {
                clock.backward(node.name(), node.param(), began);
            }
            if ctx.checked.is_some() {
                ctx.state.check_gradients(params, node)?;
            }
        }
        ctx.state.processed(node, nodes.len() - 1);
        nodes.pop();
    }
    state.nodes = nodes; // empty; keeps its capacity
    Ok(())
}

fn check(state: &State, loss: SlotId, gradient: &[f32]) -> Result<()> {
    if state.walked {
        refuse!("this step already ran its backward pass; start a new step");
    }
    if !state.training {
        refuse!("an inference step records nothing and has no backward pass");
    }
    let numel = state.shape(loss).numel();
    if numel != gradient.len() {
        refuse!(
            "backward got a gradient of {} elements for a tensor of {numel}",
            gradient.len()
        );
    }
    if !state.wants_grad(loss) {
        refuse!("this tensor depends on no parameter and no variable");
    }
    Ok(())
}
