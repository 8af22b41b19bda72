//! One optimizer step of several micro-batches, declared before the first
//! backward, so that no flag can be set too late.

use phalanx_nn::{Params, Tape};

use super::ddp::DistributedDataParallel;
use crate::average::GlobalBatch;
use crate::error::{Error, Result};
use crate::vote::Commit;

impl DistributedDataParallel {
    /// Starts a step in which this rank has one micro-batch of each of `sizes`
    /// samples (or tokens). An empty list means that it has run out of data; it takes
    /// part with zeros until [`GlobalStep::is_over`] returns that all have.
    ///
    /// ```no_run
    /// # fn f(ddp: &mut phalanx_ddp::DistributedDataParallel, backward: impl Fn(usize, &mut dyn phalanx_nn::GradSink)) -> phalanx_ddp::Result<()> {
    /// let mut step = ddp.begin(&[64, 64, 17])?;
    /// for i in 0..3 {
    ///     backward(i, step.micro_batch()?);
    /// }
    /// let commit = step.finish()?;
    /// # Ok(()) }
    /// ```
    ///
    /// *Blocks* until all ranks of the group begin it, to compare sizes;
    /// [`begin_known`](Self::begin_known) does not.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming a rank without data under [`Uneven::Refuse`](crate::Uneven::Refuse), or one with fewer
    /// micro-batches than another where [batches are joined](Self::sync_batch_norm); `Usage`
    /// while a step is in progress; `Comm` when a peer is lost or late.
    pub fn begin(&mut self, sizes: &[usize]) -> Result<GlobalStep<'_>> {
        let global = self.exchange_sizes(sizes)?;
        self.begin_known(sizes, global)
    }

    /// [`begin`](Self::begin) without communication, for callers that know the sizes over all ranks;
    /// `global` must be the same on all ranks. Where [batches are joined](Self::sync_batch_norm), the
    /// callers must ensure that all ranks have the same number of micro-batches: ranks that have more wait
    /// for the others until the deadline.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin); `Usage` after a step that failed, and without any
    /// micro-batch where batches are joined.
    pub fn begin_known(&mut self, sizes: &[usize], global: GlobalBatch) -> Result<GlobalStep<'_>> {
        self.plan_step(sizes, global)?;
        Ok(GlobalStep {
            ddp: self,
            micro_batches: sizes.len(),
            given: 0,
            global,
        })
    }
}

/// A step in progress; made by [`DistributedDataParallel::begin`].
#[must_use = "a step that is not finished leaves the other ranks waiting"]
pub struct GlobalStep<'a> {
    ddp: &'a mut DistributedDataParallel,
    micro_batches: usize,
    given: usize,
    global: GlobalBatch,
}

impl GlobalStep<'_> {
    /// Whether no rank has data: the epoch is over for all ranks, and there is nothing
    /// to finish.
    pub fn is_over(&self) -> bool {
        self.global.samples == 0
    }

    /// Sizes of the step over all ranks.
    pub fn global(&self) -> GlobalBatch {
        self.global
    }

    /// The sink for the backward of the next micro-batch, in the declared
    /// order. Its loss is the *mean* over its own samples. All-reduces start
    /// inside the backward of the last.
    ///
    /// # Errors
    ///
    /// `Usage` when all declared micro-batches were used, in a step that [is over](Self::is_over), or
    /// naming the parameters for which the previous micro-batch gave no gradient.
    pub fn micro_batch(&mut self) -> Result<&mut DistributedDataParallel> {
        if self.is_over() {
            return Err(Error::usage(
                "no rank has samples in this step, so it has no micro-batches; stop where GlobalStep::is_over says so",
            ));
        }
        self.ddp.next_micro_batch(self.given, self.micro_batches)?;
        self.given += 1;
        Ok(self.ddp)
    }

    /// [`micro_batch`](Self::micro_batch) for callers that weigh the loss themselves: also returns
    /// the gradient with which to start its backward
    /// ([`Tensor::backward_with`](phalanx_nn::Tensor::backward_with)). Uneven batches under
    /// [`sync_batch_norm`](DistributedDataParallel::sync_batch_norm) need it: there the gradients of
    /// different ranks are combined inside backward, and must be weighed before.
    ///
    /// # Errors
    ///
    /// As [`micro_batch`](Self::micro_batch).
    pub fn weighed_micro_batch(&mut self) -> Result<([f32; 1], &mut DistributedDataParallel)> {
        let index = self.given;
        let ddp = self.micro_batch()?;
        let weight = ddp.weigh_at_loss(index);
        Ok(([weight], ddp))
    }

    /// Gives all ranks `value`, such as the sum of this rank's losses, with the gradients' exchange ([`Reducer::carry`]): no
    /// collective is added. [`DistributedDataParallel::carried`] has the sum after the step. Call it before the backward of the
    /// last micro-batch.
    ///
    /// [`Reducer::carry`]: crate::Reducer::carry
    pub fn carry(&mut self, value: f64) {
        self.ddp.reducer.carry(value);
    }

    /// [`DistributedDataParallel::update_buffers`] within the step.
    ///
    /// # Errors
    ///
    /// As that.
    pub fn update_buffers(&mut self, tape: &mut Tape, params: &mut Params) -> Result<()> {
        self.ddp.update_buffers(tape, params)
    }

    /// Waits until the gradients of all ranks are averaged, and returns whether the
    /// optimizer may apply them ([`DistributedDataParallel::finish`]). A step that [is
    /// over](Self::is_over) returns yes, without gradients.
    ///
    /// # Errors
    ///
    /// As [`Reducer::finish`](crate::Reducer::finish); `Usage` when fewer micro-batches were run
    /// than declared.
    pub fn finish(self) -> Result<Commit> {
        if self.is_over() {
            return Ok(Commit::Yes);
        }
        self.ddp.finish()
    }
}
