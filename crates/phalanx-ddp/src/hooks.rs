//! Gradient hooks: other ways to average gradients than float32 all-reduces.
//!
//! A hook averages each bucket over the ranks in its own way. It is called in
//! three stages, each bucket by bucket in index order, so that all ranks issue
//! the same collectives: [`launch`](GradientHook::launch) inside backward, the moment a bucket is
//! full; [`advance`](GradientHook::advance) and [`average`](GradientHook::average) when backward has ended.
//! Communication that a hook starts in `launch` overlaps with backward, as the default all-reduces do. The votes of a
//! step are sent separately, uncompressed. `examples/power_sgd/hook.rs` is a hook with two collectives and with state.

use half::{bf16, f16};
use phalanx_comm::{ProcessGroup, ReduceOp};

use crate::bucket::GradBucket;
use crate::error::{Error, Result};
use crate::messages::Messages;
use crate::vote::Commit;

/// State of a hook for resuming a training, the same on all ranks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HookState {
    /// Steps that the hook has averaged.
    pub steps: u64,
    /// Tensors by name.
    pub tensors: Vec<(String, Vec<f32>)>,
}

/// Averages the gradients of one bucket over the ranks.
pub trait GradientHook: Send {
    /// Its name in messages and fingerprints, settings included; must be the same on
    /// all ranks.
    fn name(&self) -> String;

    /// Starts the work on a bucket that is full, inside backward. It must not
    /// wait for other ranks, and leaves `gradients` finite where they are.
    ///
    /// # Errors
    ///
    /// `Comm` when a collective could not be issued.
    fn launch(&mut self, _group: &ProcessGroup, _bucket: &mut GradBucket<'_>) -> Result<()> {
        Ok(())
    }

    /// Continues with a bucket, after backward and before the first
    /// [`average`](Self::average) of the step. For hooks with two collectives, so that
    /// the second collectives of all buckets overlap.
    ///
    /// # Errors
    ///
    /// `Comm` when a collective failed.
    fn advance(&mut self, _group: &ProcessGroup, _bucket: &mut GradBucket<'_>) -> Result<()> {
        Ok(())
    }

    /// Replaces `bucket.gradients`, this rank's own, by the gradients for the
    /// optimizer. They must have the same bits on all ranks if the ranks' weights are
    /// to stay equal.
    ///
    /// # Errors
    ///
    /// `Comm` when a collective failed.
    fn average(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()>;

    /// The ranks have voted on the step: the hook keeps the changes to its state, or drops them
    /// with the gradients. `untouched` is true for each parameter that no rank used: optimizers
    /// skip those, so what a hook sent for them has no effect.
    fn decided(&mut self, _commit: &Commit, _untouched: &[bool]) {}

    /// State for a checkpoint, valid at any number of ranks. *Blocks* until
    /// all ranks call it, if there is any. Call it by [`Reducer::hook`](crate::Reducer::hook) or
    /// [`DistributedDataParallel::hook_mut`](crate::DistributedDataParallel::hook_mut).
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    fn gather_state(&self, _group: &ProcessGroup) -> Result<HookState> {
        Ok(HookState::default())
    }

    /// Restores the state from [`gather_state`](Self::gather_state), before the first step.
    /// Does not communicate.
    ///
    /// # Errors
    ///
    /// `Usage` for state that is not this hook's.
    fn restore_state(&mut self, state: &HookState) -> Result<()> {
        if *state == HookState::default() {
            return Ok(());
        }
        Err(Error::usage(format!(
            "saved state of a gradient hook was given to the hook {}, which has none",
            self.name()
        )))
    }
}

/// Sends gradients as bfloat16: half the bytes, 8 bits of precision, the range of
/// float32. The mean is folded in rank order and rounded to bfloat16.
#[derive(Debug, Default)]
pub struct Bf16Gradients {
    wire: Messages<bf16>,
}

impl GradientHook for Bf16Gradients {
    fn name(&self) -> String {
        "bf16".to_owned()
    }

    fn launch(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let len = bucket.gradients.len();
        let wire = self.wire.prepare(group, bucket.index, len);
        let pairs = wire.iter_mut().zip(&*bucket.gradients);
        pairs.for_each(|(w, g)| *w = bf16::from_f32(*g));
        self.wire.launch(group, bucket, ReduceOp::Mean);
        Ok(())
    }

    fn average(&mut self, _: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let wire = self.wire.wait(bucket, "bfloat16 gradients")?;
        let pairs = bucket.gradients.iter_mut().zip(wire);
        pairs.for_each(|(g, w)| *g = w.to_f32());
        Ok(())
    }
}

/// Sends gradients as float16: half the bytes, 11 bits of precision. They are divided by the
/// number of ranks first, so that their sum does not overflow if none of them does. A
/// gradient beyond 65,504 times the number of ranks makes the vote on the step a no.
#[derive(Debug, Default)]
pub struct F16Gradients {
    wire: Messages<f16>,
}

impl GradientHook for F16Gradients {
    fn name(&self) -> String {
        "f16".to_owned()
    }

    fn launch(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let share = 1.0 / group.world_size() as f32;
        let len = bucket.gradients.len();
        let wire = self.wire.prepare(group, bucket.index, len);
        let pairs = wire.iter_mut().zip(&*bucket.gradients);
        pairs.for_each(|(w, g)| *w = f16::from_f32(*g * share));
        self.wire.launch(group, bucket, ReduceOp::Sum);
        Ok(())
    }

    fn average(&mut self, _: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let wire = self.wire.wait(bucket, "float16 gradients")?;
        let pairs = bucket.gradients.iter_mut().zip(wire);
        pairs.for_each(|(g, w)| *g = w.to_f32());
        Ok(())
    }
}

/// Sends no gradients: for measuring the cost of communication, and for local SGD
/// (`examples/local_sgd.rs`). The ranks' weights diverge.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalGradients;

impl GradientHook for LocalGradients {
    fn name(&self) -> String {
        "local".to_owned()
    }

    fn average(&mut self, _: &ProcessGroup, _: &mut GradBucket<'_>) -> Result<()> {
        Ok(())
    }
}
