//! The tape: recording a step and walking it backwards. `README.md` in this directory
//! has the states of a slot.

mod anomaly;
mod backward;
mod graph;
mod key;
mod node;
mod segment;
mod state;

pub(crate) use backward::BackwardContext;
pub use graph::GraphNode;
pub use key::StepKey;
pub(crate) use node::{OpNode, Operand, Operation, Recorded, Slots, Visit};
pub(crate) use segment::Compute;
pub(crate) use state::{SlotId, State};

use std::cell::{RefCell, RefMut};
use std::sync::Arc;

use crate::Precision;
use crate::error::{Result, refuse};
use crate::ops::batch_norm::JoinStatistics;
use crate::param::{GradSink, ParamId, ParamInfo, Params};
use crate::profile::{Clock, Profile};
use crate::tensor::{Shape, Tensor};
use phalanx_kernels::par::{ThreadPool, Threads};
use phalanx_kernels::peak;

/// Memory and threads of one training loop. Create it once and use it for every step.
pub struct Tape {
    threads: ThreadPool,
    state: RefCell<State>,
}

impl Tape {
    /// A tape whose operations run on `threads` threads. Results do not depend on the
    /// number; if the system refuses threads, fewer are used.
    pub fn new(threads: Threads) -> Self {
        Tape {
            threads: ThreadPool::new(threads),
            state: RefCell::default(),
        }
    }

    /// Sets the data type of the operands of convolutions and linear layers, and of some
    /// stored values, in the following steps (f32 by default): see [`Precision`].
    pub fn set_precision(&mut self, precision: Precision) {
        self.state.get_mut().precision = precision;
    }

    /// Starts (or stops) checking every value and gradient of the following steps, evaluations
    /// included: the first that is not finite ends the step with an error that names the operation,
    /// its parameter, the shape, and the first such element. PyTorch: `set_detect_anomaly`, which
    /// checks gradients for NaN only. No bit changes; steps take longer.
    ///
    /// - NaN is an error wherever it is: in an input of the step, in a parameter when an operation
    ///   uses it, in an operation's result.
    /// - An infinity is an error in a parameter, and in the result of an operation that read
    ///   none. It is none in an input (such as a mask to add), nor as the value of
    ///   [`masked_fill`](Tensor::masked_fill), nor in what operations make of these.
    /// - Both are errors in a gradient: the one that backward begins with, and those that an
    ///   operation's backward pass gives to its inputs and parameters (added to what others gave
    ///   before; of a parameter, before it is reported to the [`GradSink`] as ready).
    ///
    /// The error is of kind [`Failed`](crate::ErrorKind::Failed), and comes from the operation, from
    /// [`Step::input`] or from [`Tensor::backward`].
    pub fn set_anomaly(&mut self, on: bool) {
        self.state.get_mut().anomaly = on;
    }

    /// Starts a training step: operations are recorded, dropout drops.
    pub fn step<'a>(&'a mut self, params: &'a Params, key: StepKey<'_>) -> Step<'a> {
        self.start(params, key, true)
    }

    /// Starts an evaluation: nothing is recorded, dropout does nothing, and
    /// memory returns to the pool as handles drop.
    pub fn inference<'a>(&'a mut self, params: &'a Params) -> Step<'a> {
        self.start(params, StepKey::new(0, 0), false)
    }

    fn start<'a>(&'a mut self, params: &'a Params, key: StepKey<'_>, training: bool) -> Step<'a> {
        let state = self.state.get_mut();
        state.start(&key, params, training);
        if state.pool.promote_to_huge_pages() {
            params.values.join_pages(0, params.values.len());
        }
        Step { tape: self, params }
    }

    /// Merges the batch statistics of the training step that just ended into the
    /// running ones (batch normalisation). Call it after each training step, before the
    /// next one or an evaluation; it does nothing if there are none.
    ///
    /// # Errors
    /// `Usage` when `params` belong to another model.
    pub fn update_buffers(&mut self, params: &mut Params) -> Result<()> {
        self.state.get_mut().statistics.apply(params)
    }

    /// The fewest values a channel that a batch normalisation of the training steps since the last call had, and whether they
    /// were [joined](Self::join_statistics) with those of other ranks.
    pub fn take_fewest_normalised(&mut self) -> Option<(f64, bool)> {
        self.state.get_mut().statistics.fewest.take()
    }

    /// Joins the batch statistics of every batch normalisation in the following
    /// training steps (of the whole model), or with `None` stops doing so.
    pub fn join_statistics(&mut self, join: Option<Arc<dyn JoinStatistics>>) {
        self.state.get_mut().join = join;
    }

    /// Allocations that the pool has made so far. Constant once every shape of the loop
    /// has been seen.
    pub fn allocations(&self) -> u64 {
        self.state.borrow().pool.allocations()
    }

    /// Bytes that the pool holds.
    pub fn pool_bytes(&self) -> u64 {
        self.state.borrow().pool.bytes()
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// The threads that compute, for an optimizer to use between steps
    /// ([`Optimizer::set_thread_pool`](crate::optim::Optimizer::set_thread_pool)).
    pub fn thread_pool(&self) -> ThreadPool {
        self.threads.clone()
    }

    /// Floating-point operations of this tape's steps so far, evaluations included, modulo
    /// 2<sup>64</sup>: two for each multiply-add of matrix products, convolutions and attention. The number
    /// follows from the shapes and from the gradients that are computed. It is the same for every
    /// precision, and for a faster algorithm such as Winograd's; recomputation does not count.
    /// Causal attention counts as attention to all keys. PyTorch: `FlopCounterMode`, which counts
    /// the weight gradient of a convolution with groups as that of one group.
    pub fn flops(&self) -> u64 {
        self.state.borrow().flops
    }

    /// Measures how many floating-point operations per second this tape's threads reach in
    /// products of matrices of this tape's [precision](Self::set_precision): the best of several
    /// products within about 10 ms.
    pub fn peak_flops_per_s(&self) -> f64 {
        peak::measure(&self.threads, self.state.borrow().precision)
    }

    /// Starts (or stops) measuring the time of every operation of training steps, with
    /// two clock readings each. Earlier measurements are dropped.
    pub fn profile(&mut self, on: bool) {
        self.state.get_mut().clock = on.then(Clock::default);
    }

    /// Returns and clears the times measured so far; empty without
    /// [`profile`](Tape::profile). `params` are those of the steps.
    pub fn take_profile(&mut self, params: &Params) -> Profile {
        let clock = self.state.get_mut().clock.as_mut();
        clock.map_or_else(Profile::default, |c| c.take(params))
    }

    /// Fills buffers with NaN when they return to the pool, so that tests detect later
    /// reads.
    pub fn poison(&mut self, on: bool) {
        self.state.get_mut().pool.set_poison(on);
    }
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tape")
            .field("threads", &self.threads())
            .finish()
    }
}

/// One step in progress. It borrows the parameters: they cannot change before
/// it ends. Dropping it returns all memory to the pool.
pub struct Step<'a> {
    tape: &'a Tape,
    params: &'a Params,
}

impl<'a> Step<'a> {
    /// A network input: a copy of `data`, of `shape` (images: N, H, W, C). It
    /// gets no gradient.
    ///
    /// # Errors
    /// `Usage` when data and shape disagree; `Anomaly` for NaN where that is
    /// [checked](Tape::set_anomaly).
    pub fn input<'s>(&'s self, data: &[f32], shape: &[usize]) -> Result<Tensor<'s>> {
        self.leaf(data, shape, false)
    }

    /// An input with a gradient: [`Tensor::grad`] of a shared handle returns it after
    /// the backward pass.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn variable<'s>(&'s self, data: &[f32], shape: &[usize]) -> Result<Tensor<'s>> {
        self.leaf(data, shape, true)
    }

    fn leaf<'s>(&'s self, data: &[f32], shape: &[usize], wants_grad: bool) -> Result<Tensor<'s>> {
        let shape = Shape::new(shape)?;
        if shape.numel() != data.len() {
            refuse!(
                "input of shape {shape:?} needs {} values, got {}",
                shape.numel(),
                data.len()
            );
        }
        let slot = {
            let mut st = self.state();
            let mut buf = st.pool.get(data.len());
            buf.slice_mut().copy_from_slice(data);
            st.add_leaf(shape, buf, wants_grad)?
        };
        Ok(Tensor::new(self, slot))
    }

    /// Whether this step trains (records operations) rather than evaluates.
    pub fn training(&self) -> bool {
        self.state().training
    }

    /// Whether dropout drops, and batch norms use the batch's statistics: in a step that trains, but for parts of the model under
    /// [`evaluate`](Self::evaluate).
    pub fn learns(&self) -> bool {
        self.state().learns()
    }

    /// Runs `part` of a model as [`Tensor::evaluate`] does.
    pub fn evaluate<R>(&self, part: impl FnOnce() -> R) -> R {
        let before = std::mem::replace(&mut self.state().evaluates, true);
        let result = part();
        self.state().evaluates = before;
        result
    }

    /// The parameters of this step.
    pub fn params(&self) -> &'a Params {
        self.params
    }

    pub(crate) fn threads(&self) -> &'a ThreadPool {
        &self.tape.threads
    }

    /// Not to be held across a call that makes or drops a tensor.
    pub(crate) fn state(&self) -> RefMut<'a, State> {
        self.tape.state.borrow_mut()
    }

    /// Context for an operation's computation.
    pub(crate) fn compute<'c>(&self, state: &'c mut State) -> Compute<'c>
    where
        'a: 'c,
    {
        Compute {
            threads: self.threads(),
            params: self.params,
            state,
        }
    }

    /// Place and shape of a parameter, which must be of this step's model.
    pub(crate) fn info(&self, id: ParamId) -> Result<&'a ParamInfo> {
        self.params.info(id)
    }

    pub(crate) fn backward(
        &self,
        slot: SlotId,
        gradient: &[f32],
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        backward::run(
            &mut self.state(),
            self.threads(),
            self.params,
            slot,
            gradient,
            sink,
        )
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.state().finish();
    }
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").finish_non_exhaustive()
    }
}
