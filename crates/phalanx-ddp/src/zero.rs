//! Optimizer state cut over the ranks (ZeRO stage 1: Rajbhandari et al.,
//! "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020).
//!
//! The flat region of all parameters is cut into one run of 64-byte lines a
//! rank, through tensors where need be. A rank's optimizer knows its run only;
//! after its step the runs are gathered. Since optimizers treat each element
//! by itself, weights have the bits that they would have without.

use std::ops::Range;

use phalanx_comm::ProcessGroup;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{GradView, ParamId, Params, Scope, Seed};
use phalanx_nn::{Init, Layout};

use crate::error::{Error, Result};

const LINE_ELEMS: usize = 16;

/// An optimizer of which each rank holds a part of the state. The optimizer
/// must treat every element by itself (SGD, Adam; not LARS or LAMB).
pub struct ShardedOptimizer<O> {
    group: ProcessGroup,
    optimizer: O,
    /// This rank's run as parameters, named as those that they are pieces of.
    own: Params,
    pieces: Vec<Piece>,
    /// Elements of each rank's run.
    lengths: Vec<usize>,
    /// Where this rank's run lies in the flat region.
    range: Range<usize>,
}

/// A parameter, or the part of it that lies in this rank's run.
struct Piece {
    param: ParamId,
    elems: Range<usize>,
}

impl<O: Optimizer> ShardedOptimizer<O> {
    /// Cuts `params`, and has `make` make the optimizer of this rank's part.
    /// Local: no communication. Params and group must be the same everywhere.
    ///
    /// # Errors
    ///
    /// `Usage` when the parts cannot be laid out.
    pub fn new(
        group: ProcessGroup,
        params: &Params,
        make: impl FnOnce(&Params) -> O,
    ) -> Result<ShardedOptimizer<O>> {
        let (world, elems) = (group.world_size(), params.flat().len());
        let lines = elems.div_ceil(LINE_ELEMS);
        let border = |r: usize| (r * lines / world * LINE_ELEMS).min(elems);
        let lengths: Vec<usize> = (0..world).map(|r| border(r + 1) - border(r)).collect();
        let range = border(group.rank())..border(group.rank() + 1);
        let mut scope = Scope::new(Seed(0));
        let mut pieces = Vec::new();
        for (param, info) in params.ids().zip(params.infos()) {
            let from = info.offset.max(range.start);
            let to = (info.offset + info.len).min(range.end);
            if from < to {
                let elems = from - info.offset..to - info.offset;
                scope.param(
                    &info.name,
                    &[elems.len()],
                    Layout::Same,
                    Init::Constant(0.0),
                );
                pieces.push(Piece { param, elems });
            }
        }
        let own = scope
            .build()
            .map_err(|e| Error::usage(format!("this rank's part cannot be laid out: {e}")))?;
        if own.flat().len() > range.len() {
            return Err(Error::usage(
                "parameters do not lie line by line, so their optimizer state cannot be cut",
            ));
        }
        Ok(ShardedOptimizer {
            optimizer: make(&own),
            group,
            own,
            pieces,
            lengths,
            range,
        })
    }

    /// Updates this rank's part of `params` from the averaged `grads`, then
    /// gathers the parts of all ranks.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` when `params` or `grads` have another layout; `Comm` when a peer
    /// is lost or late. `params` is undefined then.
    pub fn step(&mut self, params: &mut Params, grads: &dyn GradView) -> Result<()> {
        let total: usize = self.lengths.iter().sum();
        if params.flat().len() != total {
            return Err(Error::usage(format!(
                "the sharded optimizer was made for {total} parameter elements, not {}",
                params.flat().len()
            )));
        }
        let len = self.own.flat().len();
        let run = self.range.start..self.range.start + len;
        self.own.flat_mut().copy_from_slice(&params.flat()[run]);
        let view = Pieces {
            pieces: &self.pieces,
            grads,
        };
        self.optimizer
            .step(&mut self.own, &view)
            .map_err(|e| Error::usage(format!("the optimizer refused its part: {e}")))?;
        let own = padded(self.own.flat(), self.range.len());
        if self.group.world_size() == 1 {
            params.flat_mut().copy_from_slice(&own);
            return Ok(());
        }
        self.group
            .all_gather_v(&own, &self.lengths, params.flat_mut())
            .map_err(|e| Error::comm_while("updated parameters could not be gathered", e))
    }

    /// The optimizer of this rank's part, for its learning rate.
    pub fn optimizer_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// Bytes of optimizer state on this rank.
    pub fn state_bytes(&self) -> usize {
        let state = self.optimizer.state();
        state.iter().map(|(_, v)| size_of_val(*v)).sum()
    }

    /// The whole state on every rank, as the unsharded optimizer would give it
    /// to a checkpoint.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn gather_state(&self) -> Result<Vec<(&'static str, Vec<f32>)>> {
        let total = self.lengths.iter().sum();
        let gather = |(name, values): (&'static str, &[f32])| {
            let own = padded(values, self.range.len());
            let mut all = vec![0.0; total];
            if self.group.world_size() == 1 {
                all.copy_from_slice(&own);
            } else {
                self.group
                    .all_gather_v(&own, &self.lengths, &mut all)
                    .map_err(|e| Error::comm_while("optimizer state could not be gathered", e))?;
            }
            Ok((name, all))
        };
        self.optimizer.state().into_iter().map(gather).collect()
    }

    /// Puts back what [`gather_state`](Self::gather_state) gave, at any number of ranks. Local.
    ///
    /// # Errors
    ///
    /// `Usage` for state of another optimizer or model.
    pub fn restore(&mut self, steps: u64, state: &[(&str, &[f32])]) -> Result<()> {
        let total: usize = self.lengths.iter().sum();
        if let Some((name, values)) = state.iter().find(|(_, v)| v.len() != total) {
            return Err(Error::usage(format!(
                "saved optimizer state {name} has {} elements, expected {total}",
                values.len()
            )));
        }
        let run = self.range.start..self.range.start + self.own.flat().len();
        let own: Vec<(&str, &[f32])> = state.iter().map(|(n, v)| (*n, &v[run.clone()])).collect();
        self.optimizer
            .restore(steps, &own)
            .map_err(|e| Error::usage(e.to_string()))
    }
}

/// A run ends where its last piece does, or in a gap, which holds zeros.
fn padded(values: &[f32], len: usize) -> Vec<f32> {
    let mut all = values.to_vec();
    all.resize(len, 0.0);
    all
}

/// Gradients of pieces.
struct Pieces<'a> {
    pieces: &'a [Piece],
    grads: &'a dyn GradView,
}

impl GradView for Pieces<'_> {
    fn grad(&self, param: ParamId) -> &[f32] {
        let piece = self.pieces.get(param.index());
        piece
            .and_then(|p| self.grads.grad(p.param).get(p.elems.clone()))
            .unwrap_or_default()
    }

    fn untouched(&self, param: ParamId) -> bool {
        let piece = self.pieces.get(param.index());
        piece.is_some_and(|p| self.grads.untouched(p.param))
    }
}
