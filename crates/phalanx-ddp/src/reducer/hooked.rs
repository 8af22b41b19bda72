//! The part of a gradient hook in a step.

use std::time::Instant;

use phalanx_comm::{OpTimes, ReduceOp};

use super::Reducer;
use super::memory::Memory;
use crate::bucket::{GradBucket, GradTensor};
use crate::error::{Error, Result};
use crate::hooks::GradientHook;
use crate::trace::BucketTimes;

/// A part of a hook's work on one bucket.
#[derive(Clone, Copy)]
pub(super) enum Stage {
    Launch,
    Advance,
    Average,
}

impl Reducer {
    /// The hook also runs with a single rank: it can resume from the state of several, and they from its
    /// state.
    pub(super) fn has_hook_to_run(&self) -> bool {
        self.hook.is_some()
    }

    /// Runs a stage of the hook on a launched bucket; returns when its communication ran, if the hook set it.
    pub(super) fn run_stage(&mut self, bucket: usize, stage: Stage) -> Result<Option<OpTimes>> {
        let (Some(hook), Memory::Reduced(memory)) =
            (self.hook.as_deref_mut(), &mut self.memory[bucket])
        else {
            return Ok(None);
        };
        let tensor = |&param: &usize| GradTensor {
            param,
            name: &self.params[param].name,
            range: self.plan.place(param).1,
            columns: self.params[param].columns,
        };
        let tensors: Vec<GradTensor<'_>> = self.plan.buckets()[bucket].iter().map(tensor).collect();
        let mut view = GradBucket {
            index: bucket,
            gradients: &mut memory[..self.plan.bucket_elems(bucket)],
            tensors: &tensors,
            label: &self.labels[bucket],
            scale: self.micro.scale,
            ran: None,
        };
        match stage {
            Stage::Launch => hook.launch(&self.group, &mut view),
            Stage::Advance => hook.advance(&self.group, &mut view),
            Stage::Average => hook.average(&self.group, &mut view),
        }?;
        Ok(view.ran)
    }

    /// Lets the hook average every bucket, then the ranks vote: on the hook's result,
    /// if no rank has a reason of its own.
    pub(super) fn run_hook(&mut self) -> Result<()> {
        let mut first = Vec::with_capacity(self.memory.len());
        for bucket in 0..self.memory.len() {
            first.push(self.run_stage(bucket, Stage::Advance)?);
        }
        for (bucket, first) in first.into_iter().enumerate() {
            let began = Instant::now();
            let second = self.run_stage(bucket, Stage::Average)?;
            let started = first.or(second).map_or(began, |ran| ran.started);
            let finished = second
                .or(first)
                .map_or_else(Instant::now, |ran| ran.finished);
            self.times.buckets.push(BucketTimes {
                bucket,
                bytes: self.plan.bucket_bytes(bucket),
                label: self.labels[bucket].clone(),
                launched: self.launched_at[bucket],
                started,
                finished,
            });
            let Memory::Reduced(memory) = &mut self.memory[bucket] else {
                continue;
            };
            for &param in &self.plan.buckets()[bucket] {
                let (_, range) = self.plan.place(param);
                if !self.options.unchecked && !phalanx_comm::all_finite(&memory[range]) {
                    self.ballot.mean_not_finite(param);
                }
            }
        }
        let Some(Memory::Reduced(last)) = self.memory.last_mut() else {
            return Ok(());
        };
        let tail = &mut last[self.plan.bucket_elems(self.plan.buckets().len() - 1)..];
        self.ballot
            .cast(&mut tail[..self.group.world_size()], self.group.rank());
        self.group
            .all_reduce(tail, ReduceOp::Mean)
            .map_err(|e| Error::comm_while("the ranks could not vote on the step", e))
    }

    /// Lets `hook` average the buckets of the following steps; `None` returns to
    /// all-reduces. Must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// `Usage` when the backward of a step has begun already.
    pub fn set_hook(&mut self, hook: Option<Box<dyn GradientHook>>) -> Result<()> {
        self.check_usable()?;
        if self.in_backward {
            return Err(Error::usage(
                "a gradient hook must be set between steps; the backward of this one has begun",
            ));
        }
        if hook.is_some() && self.is_scattered() {
            return Err(Error::usage(
                "a gradient hook gives every rank whole gradients; leave it out, or Exchange::ReduceScatter and AtStep",
            ));
        }
        self.hook = hook;
        Ok(())
    }

    /// The hook that is set.
    pub fn hook(&self) -> Option<&(dyn GradientHook + 'static)> {
        self.hook.as_deref()
    }

    /// The hook, for its state.
    pub fn hook_mut(&mut self) -> Option<&mut (dyn GradientHook + 'static)> {
        self.hook.as_deref_mut()
    }
}
