//! The optimizer, whether each rank has all of its state or a part.

use std::borrow::Cow;

use phalanx_checkpoint::state::OptimizerState;
use phalanx_ddp::{DistributedDataParallel, ShardedOptimizer};
use phalanx_nn::optim::{Optimizer, clip_factor, grad_norm};
use phalanx_nn::{ParamId, Params};

use crate::error::Result;

/// Updates the parameters from the gradients that the wrapper has left on this rank. The results are the same bits.
pub enum Update {
    /// Of all parameters, on every rank.
    Whole(Box<dyn Optimizer>),
    /// Of this rank's part; then the parts of all ranks are gathered.
    Part(Box<ShardedOptimizer<Box<dyn Optimizer>>>),
}

impl Update {
    /// By the optimizer that `make` makes of parameters, as `ddp` exchanges gradients; `is_elastic`: each part of its state is on
    /// two ranks. Local.
    ///
    /// # Errors
    ///
    /// Usage, when it cannot be cut.
    pub fn new(
        ddp: &DistributedDataParallel,
        params: &Params,
        is_elastic: bool,
        make: impl FnOnce(&Params) -> Box<dyn Optimizer>,
    ) -> Result<Update> {
        if !ddp.exchange().is_scattered() {
            return Ok(Update::Whole(make(params)));
        }
        let part = ShardedOptimizer::for_wrapper(ddp, params, make)?;
        Ok(Update::Part(Box::new(match is_elastic {
            true => part.with_copies(params)?,
            false => part,
        })))
    }

    /// The optimizer of a part, of which another rank has a copy.
    pub(crate) fn with_copies(&mut self) -> Option<&mut ShardedOptimizer<Box<dyn Optimizer>>> {
        match self {
            Update::Part(optimizer) if optimizer.has_copies() => Some(optimizer),
            _ => None,
        }
    }

    /// Prepares the step that `ddp` has gradients for: with `clip` gives their norm, and how they are scaled to be below it. Where
    /// each rank has a part, it *blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost; nothing was changed then.
    pub fn prepare(
        &mut self,
        params: &Params,
        ddp: &mut DistributedDataParallel,
        clip: Option<f64>,
    ) -> Result<Option<f64>> {
        Ok(match self {
            Update::Whole(optimizer) => {
                clip.map(|_| grad_norm(params, ddp, &optimizer.thread_pool()))
            }
            Update::Part(part) if clip.is_some() || part.has_copies() => {
                part.prepare_step(ddp, clip)?
            }
            Update::Part(_) => None,
        })
    }

    /// Takes the [prepared](Self::prepare) step, of gradients with the norm `norm`. Where each rank has a part, it *blocks*
    /// until all ranks take it, unless there are copies: the parameters are gathered later then.
    ///
    /// # Errors
    ///
    /// Impossible settings; peers that are lost.
    pub fn step(
        &mut self,
        params: &mut Params,
        ddp: &mut DistributedDataParallel,
        norm: Option<f64>,
        clip: Option<f64>,
    ) -> Result<()> {
        let clipped = norm.zip(clip);
        match self {
            Update::Whole(optimizer) => {
                let factor = clipped.map_or(1.0, |(norm, limit)| clip_factor(norm, limit));
                optimizer.step_scaled(params, ddp, factor)?;
            }
            Update::Part(part) if part.has_copies() => part.step_prepared(params, ddp)?,
            Update::Part(part) if clipped.is_some() => {
                part.step_prepared(params, ddp)?;
                part.gather(params, ddp)?;
            }
            Update::Part(part) => part.step_scattered(params, ddp)?,
        }
        Ok(())
    }

    /// The optimizer, of all parameters or of this rank's part.
    pub fn optimizer(&self) -> &dyn Optimizer {
        match self {
            Update::Whole(optimizer) => optimizer,
            Update::Part(optimizer) => optimizer.optimizer(),
        }
    }

    /// The same, to change its settings.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        match self {
            Update::Whole(optimizer) => optimizer,
            Update::Part(optimizer) => optimizer.optimizer_mut(),
        }
    }

    /// The state as one rank alone would have it. Where each rank has a part, only rank 0 gets it, and it *blocks* until
    /// all ranks call it; it is put into `memory`, as far as there is any.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn state(&self, memory: Vec<Vec<f32>>) -> Result<Option<OptimizerState<'_>>> {
        Ok(match self {
            Update::Whole(optimizer) => Some(optimizer.as_ref().into()),
            Update::Part(optimizer) => {
                let updates = optimizer.gather_updates()?;
                optimizer.gather_state(memory)?.map(|state| OptimizerState {
                    steps: optimizer.steps(),
                    updates: Cow::Owned(updates),
                    buffers: (state.into_iter())
                        .map(|(name, v)| (name, Cow::Owned(v)))
                        .collect(),
                })
            }
        })
    }

    /// Elements of a buffer of this rank's state, where `params` are all parameters.
    pub(crate) fn part_len(&self, params: &Params) -> usize {
        match self {
            Update::Whole(_) => params.flat().len(),
            Update::Part(optimizer) => optimizer.part_len(),
        }
    }

    /// Copies what this rank needs of the state of parameter `id`, `values` in the engine's order, into its `part` of a
    /// buffer.
    pub(crate) fn copy_part(&self, params: &Params, id: ParamId, values: &[f32], part: &mut [f32]) {
        match self {
            Update::Whole(_) => {
                let info = &params.infos()[id.index()];
                part[info.offset..][..info.len].copy_from_slice(&values[..info.len]);
            }
            Update::Part(optimizer) => optimizer.copy_part(id, values, part),
        }
    }

    /// Puts a state back, at any number of ranks; `parts` are this rank's parts of the buffers. Local.
    ///
    /// # Errors
    ///
    /// Usage, when it is another optimizer's.
    pub(crate) fn restore(
        &mut self,
        steps: u64,
        updates: &[u64],
        parts: &[(&str, &[f32])],
    ) -> Result<()> {
        match self {
            Update::Whole(optimizer) => optimizer.restore(steps, updates, parts)?,
            Update::Part(optimizer) => optimizer.restore(steps, updates, parts)?,
        }
        Ok(())
    }
}
