//! Slots and recorded nodes of the current step.

use std::ops::Range;
use std::sync::Arc;

use super::key::StepKey;
use super::node::{Node, Operand, Visit};
use super::segment::Segments;
use crate::Precision;
use crate::error::{Error, Result, refuse};
use crate::ops::batch_norm::{JoinStatistics, Statistics};
use crate::param::Params;
use crate::pool::{Buf, Pool};
use crate::profile::Clock;
use crate::tensor::Shape;
use phalanx_kernels::dropout::MaskKey;
use phalanx_kernels::element::{Element, Values, elements};

/// A value of the current step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId(u32);

impl SlotId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

pub(super) struct Slot {
    pub(super) shape: Shape,
    /// Of its elements, and of its gradient's.
    pub(super) precision: Precision,
    pub(super) buf: Option<Buf>,
    pub(super) grad: Option<Buf>,
    /// 64 bits: forgotten handles must not be able to wrap it around to one.
    pub(super) handles: u64,
    pub(super) saved: u32,
    /// Depends on a parameter or a variable.
    pub(super) wants_grad: bool,
    /// Its gradient is kept for the user.
    pub(super) keep_grad: bool,
    /// The node that can recompute the value.
    pub(super) maker: Option<u32>,
    /// The segment that freed the value.
    pub(super) dropped: Option<u32>,
    /// It has an infinity that may be there; known in anomaly mode only.
    pub(super) infinite: bool,
}

/// Everything of a tape but its threads. Vectors keep their capacity.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) pool: Pool,
    pub(super) slots: Vec<Slot>,
    pub(super) nodes: Vec<Node>,
    pub(super) segments: Segments,
    pub(super) walked: bool,
    /// Operations are recorded.
    pub(crate) training: bool,
    /// Of each parameter, whether it is frozen.
    pub(super) frozen: Vec<bool>,
    /// A part of the model runs as in an evaluation.
    pub(crate) evaluates: bool,
    /// Data type of the operands of convolutions and linear layers.
    pub(crate) precision: Precision,
    /// Values and gradients are checked.
    pub(super) anomaly: bool,
    key: Option<MaskKey>,
    samples: Vec<u64>,
    numbered: bool,
    random_ops: u32,
    /// Batch statistics not yet merged into the running ones.
    pub(crate) statistics: Statistics,
    /// Joins batch statistics with those of other ranks.
    pub(crate) join: Option<Arc<dyn JoinStatistics>>,
    /// Labels of the losses, end to end.
    labels: Vec<u32>,
    /// Times of operations, if the step is profiled.
    pub(super) clock: Option<Clock>,
    /// Floating-point operations so far.
    pub(super) flops: u64,
    pub(super) reached: Vec<bool>,
    pub(super) uses: Vec<u32>,
    pub(super) written: Vec<bool>,
}

impl State {
    pub(super) fn start(&mut self, key: &StepKey<'_>, params: &Params, training: bool) {
        // A step that was leaked (`mem::forget`) has not cleaned up.
        self.finish();
        self.training = training;
        self.frozen.clear();
        let infos = params.infos().iter();
        self.frozen.extend(infos.map(|info| info.frozen));
        self.evaluates = false;
        self.walked = false;
        if let Some(clock) = &mut self.clock {
            clock.mark();
        }
        self.random_ops = 0;
        self.statistics.age();
        // The high half of the seed is folded in so that seeds below 2^32 give
        // the plain key (seed, operation).
        self.key = Some(MaskKey {
            key: [key.seed as u32, ((key.seed >> 32) as u32).rotate_left(16)],
            epoch: key.epoch as u32,
            step: key.step as u32,
        });
        self.samples.extend_from_slice(key.samples);
        self.numbered = key.samples.is_empty();
    }

    pub(super) fn finish(&mut self) {
        for slot in self.slots.drain(..) {
            let memory = slot.buf.into_iter().chain(slot.grad);
            memory.for_each(|b| self.pool.put(b));
        }
        self.nodes.clear();
        self.segments.clear();
        self.labels.clear();
        self.samples.clear();
        self.pool.reclaim();
    }

    /// Counts floating-point operations.
    pub(super) fn count(&mut self, flops: u64) {
        self.flops = self.flops.wrapping_add(flops);
    }

    /// Whether dropout drops, and batch norms use and note the batch's statistics.
    pub(crate) fn learns(&self) -> bool {
        self.training && !self.evaluates
    }

    /// Key of the next random operation, and the ids of its samples.
    pub(crate) fn next_mask(&mut self, rows: usize) -> Result<MaskKey> {
        if self.numbered {
            // Only ever longer: backward makes the mask of an earlier
            // operation again, which may have had more rows.
            let known = self.samples.len() as u64;
            self.samples.extend(known..rows as u64);
        } else if self.samples.len() != rows {
            refuse!(
                "the step's key names {} samples, but dropout meets {rows} rows",
                self.samples.len()
            );
        }
        let started = || Error::internal("no step has been started");
        let base = self.key.ok_or_else(started)?;
        let key = MaskKey {
            key: [base.key[0], base.key[1] ^ self.random_ops],
            ..base
        };
        self.random_ops += 1;
        Ok(key)
    }

    /// Ids of these samples (or their places in the batch).
    pub(crate) fn samples(&self, rows: Range<usize>) -> &[u64] {
        &self.samples[rows]
    }

    pub(crate) fn add_labels(&mut self, labels: &[u32]) -> (usize, usize) {
        let first = self.labels.len();
        self.labels.extend_from_slice(labels);
        (first, labels.len())
    }

    pub(crate) fn labels(&self, (first, len): (usize, usize)) -> &[u32] {
        &self.labels[first..first + len]
    }

    fn push(
        &mut self,
        (shape, precision): (Shape, Precision),
        buf: Buf,
        wants_grad: bool,
        keep_grad: bool,
    ) -> SlotId {
        debug_assert_eq!(buf.slice().len(), precision.memory_len(shape.numel()));
        self.slots.push(Slot {
            shape,
            precision,
            buf: Some(buf),
            grad: None,
            handles: 0,
            saved: 0,
            wants_grad,
            keep_grad,
            maker: None,
            dropped: None,
            infinite: false,
        });
        SlotId(self.slots.len() as u32 - 1)
    }

    pub(crate) fn add_leaf(&mut self, shape: Shape, buf: Buf, wants_grad: bool) -> Result<SlotId> {
        let wants = wants_grad && self.training;
        let slot = self.push((shape, Precision::F32), buf, wants, wants);
        if self.anomaly {
            self.check_leaf(slot)?;
        }
        Ok(slot)
    }

    /// A slot for memory that only a node's backward reads (`buf` of any length).
    pub(crate) fn add_aux(&mut self, buf: Buf) -> Result<SlotId> {
        let shape = Shape::new(&[buf.slice().len()])?;
        Ok(self.push((shape, Precision::F32), buf, false, false))
    }

    /// A slot for an operation's output.
    pub(crate) fn add_output(&mut self, shape: Shape, buf: Buf, wants_grad: bool) -> SlotId {
        self.push((shape, Precision::F32), buf, wants_grad, false)
    }

    /// A slot for an output whose elements may be bf16: only what reads
    /// [`values`](Self::values) or [`elements`](Self::elements) may name it.
    pub(crate) fn add_output_as(
        &mut self,
        (shape, precision): (Shape, Precision),
        buf: Buf,
        wants_grad: bool,
    ) -> SlotId {
        self.push((shape, precision), buf, wants_grad, false)
    }

    /// An operation has run and filled its slot: checks the result in anomaly mode, and records
    /// the operation if a gradient is wanted.
    pub(crate) fn made(
        &mut self,
        params: &Params,
        node: impl Into<Node>,
        wants_grad: bool,
    ) -> Result<()> {
        let node = node.into();
        if self.anomaly {
            self.check_result(params, &node)?;
        }
        if wants_grad {
            self.record(node);
        }
        Ok(())
    }

    /// Records `node`. The values it saves stay until backward has used them, and so do the
    /// external inputs of an open segment.
    pub(crate) fn record(&mut self, node: impl Into<Node>) {
        let node = node.into();
        if let Some(clock) = &mut self.clock {
            clock.forward(node.name(), node.param());
        }
        let maker = node.can_recompute().then_some(self.nodes.len() as u32);
        let from = self.segments.open_from();
        node.visit(&mut |v| match v {
            Visit::Output(s) => self.slots[s.index()].maker = maker,
            Visit::Saved(s) => self.slots[s.index()].saved += 1,
            Visit::Input(s) if from.is_some_and(|f| self.is_external_to(s, f)) => {
                self.slots[s.index()].saved += 1;
            }
            _ => {}
        });
        self.nodes.push(node);
        self.segments.note_node();
    }

    /// Backward has processed `node`, the last: values that only it needed go back
    /// to the pool.
    pub(super) fn processed(&mut self, node: &Node, index: usize) {
        let from = self.segments.first_of(index);
        node.visit(&mut |v| match v {
            Visit::Saved(s) => self.unsave(s),
            Visit::Input(s) if from.is_some_and(|f| self.is_external_to(s, f)) => self.unsave(s),
            _ => {}
        });
    }

    /// Whether an operation on this operand must be recorded.
    pub(crate) fn wants_grad(&self, id: SlotId) -> bool {
        self.slots[id.index()].wants_grad
    }

    /// The same of a weight: in training every parameter that is not frozen wants a gradient.
    pub(crate) fn wants_grad_of(&self, operand: Operand) -> bool {
        match operand {
            Operand::Param(id) => self.training && !self.frozen[id.index()],
            Operand::Slot(id) => self.wants_grad(id),
        }
    }

    pub(crate) fn shape(&self, id: SlotId) -> Shape {
        self.slots[id.index()].shape
    }

    /// Data type of the elements of a slot and of its gradient.
    pub(crate) fn precision_of(&self, id: SlotId) -> Precision {
        self.slots[id.index()].precision
    }

    /// Elements of a slot that is held or saved, and f32.
    pub(crate) fn value(&self, id: SlotId) -> &[f32] {
        debug_assert_eq!(self.precision_of(id), Precision::F32);
        self.slots[id.index()].buf.as_ref().map_or(&[], Buf::slice)
    }

    /// Elements of a slot that is held or saved.
    pub(crate) fn values(&self, id: SlotId) -> Values<'_> {
        let slot = &self.slots[id.index()];
        match &slot.buf {
            Some(buf) => Values::of(buf.slice(), slot.precision, slot.shape.numel()),
            None => Values::F32(&[]),
        }
    }

    /// The same, of a slot known to have such elements.
    pub(crate) fn elements<T: Element>(&self, id: SlotId) -> &[T] {
        let slot = &self.slots[id.index()];
        assert_eq!(slot.precision, T::PRECISION);
        slot.buf
            .as_ref()
            .map_or(&[], |buf| elements(buf.slice(), slot.shape.numel()))
    }

    pub(crate) fn kept_grad(&self, id: SlotId) -> Option<&[f32]> {
        let s = &self.slots[id.index()];
        let grad = s.grad.as_ref().filter(|_| s.keep_grad && self.walked);
        grad.map(Buf::slice)
    }

    /// A buffer with this operand's elements, to be overwritten: its own memory
    /// when the operation holds the only handle, no node saved it and no open segment
    /// needs it, else a copy.
    pub(crate) fn take_for_writing(&mut self, id: SlotId) -> Buf {
        let from = self.segments.open_from();
        let needed = from.is_some_and(|f| self.is_external_to(id, f));
        let s = &mut self.slots[id.index()];
        if s.handles == 1
            && s.saved == 0
            && !needed
            && let Some(b) = s.buf.take()
        {
            return b;
        }
        let mut to = self.pool.get(s.shape.numel());
        to.slice_mut().copy_from_slice(self.value(id));
        to
    }

    pub(crate) fn hold(&mut self, id: SlotId) {
        self.slots[id.index()].handles += 1;
    }

    pub(crate) fn let_go(&mut self, id: SlotId) {
        self.slots[id.index()].handles -= 1;
        self.release(id);
    }

    fn unsave(&mut self, id: SlotId) {
        self.slots[id.index()].saved -= 1;
        self.release(id);
    }

    fn release(&mut self, id: SlotId) {
        let s = &mut self.slots[id.index()];
        if s.handles == 0
            && s.saved == 0
            && let Some(b) = s.buf.take()
        {
            self.pool.put(b);
        }
    }
}
