//! Optimizer state sharded over the ranks (ZeRO stage 1: Rajbhandari et al., "ZeRO:
//! Memory Optimizations Toward Training Trillion Parameter Models", 2020).
//!
//! A rank's optimizer has only pieces of the parameters, split inside tensors if
//! needed; after its step the pieces are gathered. Since optimizers treat each element
//! by itself, weights have the same bits as without sharding. There are two ways to
//! split:
//!
//! * [`ShardedOptimizer::new`]: the flat region of all parameters, one run of 64-byte
//!   lines per rank. Every rank has all averaged gradients
//!   ([`ShardedOptimizer::step`]).
//! * [`ShardedOptimizer::for_wrapper`]: a part of each bucket, as a reduce-scatter leaves it
//!   ([`Exchange::ReduceScatter`](crate::Exchange::ReduceScatter)). A step moves as much as an
//!   all-reduce, gradients one way and parameters the other, and the parameters are gathered in place
//!   ([`ShardedOptimizer::step_scattered`]).

use std::ops::Range;

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::optim::{Optimizer, Run, clip_factor, grad_norm};
use phalanx_nn::{GradView, Init, Layout, ParamId, Params, Scope, Seed};

use super::ddp::DistributedDataParallel;
use crate::error::{Error, Result};

const LINE_ELEMS: usize = 16;

/// An optimizer's buffers by name.
type Buffers = Vec<(&'static str, Vec<f32>)>;

/// An optimizer whose state is sharded over the ranks. The optimizer must treat every
/// element by itself (SGD, Adam; not LARS or LAMB).
pub struct ShardedOptimizer<O> {
    group: ProcessGroup,
    optimizer: O,
    /// The parameters given to the optimizer: this rank's pieces, with the names of the whole parameters. The
    /// elements themselves are the model's.
    own: Params,
    /// Every rank's pieces.
    cut: Vec<Vec<Piece>>,
    /// Elements of the flat region of all parameters.
    total: usize,
    /// Elements that each rank contributes when parts are gathered.
    lengths: Vec<usize>,
    /// Whether the pieces are those of a wrapper.
    scattered: bool,
    /// This rank's piece of each parameter, if it has one.
    piece_of: Vec<Option<usize>>,
}

/// A parameter, or the part of it that one rank has.
#[derive(Debug, Clone)]
struct Piece {
    param: ParamId,
    elems: Range<usize>,
    /// Where it begins among the rank's own pieces.
    at: usize,
    /// Where it begins in the flat region of all parameters.
    flat: usize,
}

impl Piece {
    fn own(&self) -> Range<usize> {
        self.at..self.at + self.elems.len()
    }

    fn whole(&self) -> Range<usize> {
        self.flat..self.flat + self.elems.len()
    }
}

/// Places pieces one behind the other, each starting on a cache line.
fn lay_out(params: &Params, pieces: Vec<(ParamId, Range<usize>)>) -> Vec<Piece> {
    let mut next = 0;
    let piece = |(param, elems): (ParamId, Range<usize>)| {
        let at = next;
        next = (at + elems.len()).next_multiple_of(LINE_ELEMS);
        Piece {
            param,
            flat: params.infos()[param.index()].offset + elems.start,
            elems,
            at,
        }
    };
    pieces.into_iter().map(piece).collect()
}

fn len_of(pieces: &[Piece]) -> usize {
    pieces
        .last()
        .map_or(0, |p| p.own().end.next_multiple_of(LINE_ELEMS))
}

impl<O: Optimizer> ShardedOptimizer<O> {
    /// Splits `params`, and calls `make` to make the optimizer of this rank's part.
    /// Does not communicate. Params and group must be the same everywhere.
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
        let part = lines.div_ceil(world) * LINE_ELEMS;
        let border = |r: usize| (r * part).min(elems);
        let lengths = (0..world).map(|r| border(r + 1) - border(r)).collect();
        let pieces = |rank: usize| {
            let mut pieces = Vec::new();
            for (param, info) in params.ids().zip(params.infos()) {
                let from = info.offset.max(border(rank));
                let to = (info.offset + info.len).min(border(rank + 1));
                if from < to {
                    pieces.push((param, from - info.offset..to - info.offset));
                }
            }
            lay_out(params, pieces)
        };
        let cut: Vec<Vec<Piece>> = (0..world).map(pieces).collect();
        let as_in_flat =
            |(r, pieces): (usize, &Vec<Piece>)| pieces.iter().all(|p| p.flat == border(r) + p.at);
        if !cut.iter().enumerate().all(as_in_flat) {
            return Err(not_in_lines());
        }
        Self::build(group, params, cut, lengths, make)
    }

    /// Splits `params` as `wrapper` scatters their gradients, and calls `make` to make
    /// the optimizer of this rank's part. Does not communicate. Frozen parameters
    /// belong to no rank.
    ///
    /// # Errors
    ///
    /// `Usage` unless the wrapper was made with
    /// [`Exchange::ReduceScatter`](crate::Exchange::ReduceScatter) or [`AtStep`](crate::Exchange::AtStep).
    pub fn for_wrapper(
        wrapper: &DistributedDataParallel,
        params: &Params,
        make: impl FnOnce(&Params) -> O,
    ) -> Result<ShardedOptimizer<O>> {
        if !wrapper.is_scattered() {
            return Err(Error::usage(
                "the wrapper gives all gradients to all ranks; make it with Exchange::ReduceScatter or AtStep, or \
                 the optimizer with ShardedOptimizer::new",
            ));
        }
        let group = wrapper.group().clone();
        let pieces = |rank| lay_out(params, wrapper.scattered(rank));
        let cut: Vec<Vec<Piece>> = (0..group.world_size()).map(pieces).collect();
        let lengths = cut.iter().map(|pieces| len_of(pieces)).collect();
        let mut optimizer = Self::build(group, params, cut, lengths, make)?;
        optimizer.scattered = true;
        Ok(optimizer)
    }

    fn build(
        group: ProcessGroup,
        params: &Params,
        cut: Vec<Vec<Piece>>,
        lengths: Vec<usize>,
        make: impl FnOnce(&Params) -> O,
    ) -> Result<ShardedOptimizer<O>> {
        let mut scope = Scope::new(Seed(0));
        let pieces = &cut[group.rank()];
        for piece in pieces {
            let name = &params.infos()[piece.param.index()].name;
            let shape = [piece.elems.len()];
            scope.param(name, &shape, Layout::Same, Init::Constant(0.0));
        }
        let own = scope
            .build()
            .map_err(|e| Error::usage(format!("this rank's part cannot be built: {e}")))?;
        let mut places = own.infos().iter().zip(pieces);
        if own.flat().len() > len_of(pieces) || places.any(|(info, p)| info.offset != p.at) {
            return Err(not_in_lines());
        }
        let mut piece_of = vec![None; params.len()];
        for (at, piece) in pieces.iter().enumerate() {
            piece_of[piece.param.index()] = Some(at);
        }
        Ok(ShardedOptimizer {
            optimizer: make(&own),
            piece_of,
            group,
            own,
            cut,
            lengths,
            total: params.flat().len(),
            scattered: false,
        })
    }

    fn pieces(&self) -> &[Piece] {
        &self.cut[self.group.rank()]
    }

    /// Updates this rank's part of `params` from the averaged `grads`, then
    /// gathers the parts of all ranks.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` when `params` or `grads` have another layout, or naming a parameter that is
    /// [ignored](crate::DdpOptions::ignored); `Comm` when a peer
    /// is lost or late. `params` is undefined then.
    pub fn step(&mut self, params: &mut Params, grads: &dyn GradView) -> Result<()> {
        self.step_with(params, grads, 1.0)
    }

    /// [`step`](Self::step) with gradients scaled down to a norm of at most `limit`;
    /// returns the norm before ([`grad_norm`]). The bits are those of
    /// [`step_clipped`](phalanx_nn::optim::step_clipped) on the optimizer as a whole.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn step_clipped(
        &mut self,
        params: &mut Params,
        grads: &dyn GradView,
        limit: f64,
    ) -> Result<f64> {
        let norm = grad_norm(params, grads);
        self.step_with(params, grads, clip_factor(norm, limit))?;
        Ok(norm)
    }

    fn step_with(&mut self, params: &mut Params, grads: &dyn GradView, factor: f32) -> Result<()> {
        self.check(params)?;
        for (id, info) in params.ids().zip(params.infos()) {
            if grads.is_local(id) {
                return Err(Error::usage(format!(
                    "{} is ignored by the wrapper, so each rank trains it for itself, but a sharded optimizer gives \
                     every rank the same; leave out one of both",
                    info.name
                )));
            }
            if grads.grad(id).len() != info.len && !grads.untouched(id) {
                return Err(Error::usage(format!(
                    "the gradient of {} has {} elements, the parameter {}",
                    info.name,
                    grads.grad(id).len(),
                    info.len
                )));
            }
        }
        self.optimizer.begin_step().map_err(refused)?;
        for piece in &self.cut[self.group.rank()] {
            if grads.untouched(piece.param) {
                continue;
            }
            let run = Run {
                at: piece.at,
                values: &mut params.flat_mut()[piece.whole()],
                grads: &grads.grad(piece.param)[piece.elems.clone()],
            };
            self.optimizer.step_run(run, factor).map_err(refused)?;
        }
        self.group
            .all_gather_in_place(params.flat_mut(), self.lengths[0])
            .map_err(|e| Error::comm_while("updated parameters could not be gathered", e))
    }

    /// Updates this rank's part of `params` from its part of the gradients in
    /// `wrapper`, then gathers the parts of all ranks.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` when `params` have another layout, `wrapper` is another one, or has no
    /// gradients; `Comm` when a peer is lost or late. `params` is undefined then.
    pub fn step_scattered(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
    ) -> Result<()> {
        self.step_scattered_with(params, wrapper, 1.0)
    }

    /// [`step_scattered`](Self::step_scattered) with gradients scaled down to a norm of at most
    /// `limit`, the norm of the joined gradient of all ranks; returns the norm before.
    /// Squares are added in another order than in [`grad_norm`], in f64: the norm
    /// differs from it in the last digits, the float32 factor computed from it almost
    /// never.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// As [`step_scattered`](Self::step_scattered).
    pub fn step_scattered_clipped(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
        limit: f64,
    ) -> Result<f64> {
        self.check_wrapper(wrapper)?;
        // The factor needs all gradients.
        wrapper.exchange_late()?;
        let view = Pieces {
            pieces: self.pieces(),
            source: wrapper,
        };
        let norm = grad_norm(&self.own, &view);
        let mut squares = [norm * norm];
        if self.group.world_size() > 1 {
            self.group
                .all_reduce(&mut squares, ReduceOp::Sum)
                .map_err(|e| Error::comm_while("the gradients' norm could not be joined", e))?;
        }
        let norm = squares[0].sqrt();
        self.step_scattered_with(params, wrapper, clip_factor(norm, limit))?;
        Ok(norm)
    }

    fn step_scattered_with(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
        factor: f32,
    ) -> Result<()> {
        self.check(params)?;
        self.check_wrapper(wrapper)?;
        // Before the optimizer counts the step.
        wrapper.check_pieces()?;
        self.optimizer.begin_step().map_err(refused)?;
        let (pieces, piece_of) = (&self.cut[self.group.rank()], &self.piece_of);
        let (optimizer, mut done) = (&mut self.optimizer, Ok(()));
        wrapper.visit_pieces(|param, elems, grads| {
            // A rank gets exactly its own pieces; others are ignored.
            let Some(piece) = piece_of[param.index()].map(|at| &pieces[at]) else {
                return;
            };
            let run = Run {
                at: piece.at + elems.start - piece.elems.start,
                values: &mut params.get_mut(param)[elems],
                grads,
            };
            let step = optimizer.step_run(run, factor);
            if done.is_ok() {
                done = step;
            }
        })?;
        done.map_err(refused)?;
        wrapper.gather_pieces(params)
    }

    fn check_wrapper(&self, wrapper: &DistributedDataParallel) -> Result<()> {
        let fits = self.scattered && {
            let theirs = wrapper.scattered(self.group.rank());
            let mine = self.pieces().iter().map(|p| (p.param, p.elems.clone()));
            wrapper.is_scattered() && mine.eq(theirs)
        };
        if fits {
            return Ok(());
        }
        Err(Error::usage(
            "the sharded optimizer was made for another DistributedDataParallel",
        ))
    }

    fn check(&self, params: &Params) -> Result<()> {
        if params.flat().len() == self.total {
            return Ok(());
        }
        Err(Error::usage(format!(
            "the sharded optimizer was made for {} parameter elements, not {}",
            self.total,
            params.flat().len()
        )))
    }

    /// The optimizer of this rank's part.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// The optimizer of this rank's part, for its learning rate.
    pub fn optimizer_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Bytes of optimizer state on this rank.
    pub fn state_bytes(&self) -> usize {
        let state = self.optimizer.state();
        state.iter().map(|(_, v)| size_of_val(*v)).sum()
    }

    /// Steps that updated each parameter, as the unsharded optimizer counts them for a
    /// checkpoint. It is 0 for a frozen parameter of a wrapper, which belongs to no rank.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn gather_updates(&self) -> Result<Vec<u64>> {
        // Ranks with pieces of the same parameter have the same count.
        let mut updates = vec![0i64; self.piece_of.len()];
        for (piece, count) in self.pieces().iter().zip(self.optimizer.updates()) {
            updates[piece.param.index()] = count.cast_signed();
        }
        if self.group.world_size() > 1 {
            self.group
                .all_reduce(&mut updates, ReduceOp::Max)
                .map_err(|e| Error::comm_while("optimizer state could not be gathered", e))?;
        }
        Ok(updates.into_iter().map(i64::cast_unsigned).collect())
    }

    /// The whole state on rank 0, as the unsharded optimizer would give it to a checkpoint; nothing on other ranks, which
    /// send it piece by piece. Buffers are made in `memory`, as far as there is any.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn gather_state(&self, memory: Vec<Vec<f32>>) -> Result<Option<Buffers>> {
        let failed = |e| Error::comm_while("optimizer state could not be gathered", e);
        let own = self.optimizer.state();
        if self.group.rank() != 0 {
            for (_, values) in own {
                for piece in self.pieces() {
                    self.group.send(&values[piece.own()], 0).map_err(failed)?;
                }
            }
            return Ok(None);
        }
        let (mut all, mut memory) = (Vec::new(), memory.into_iter());
        for (name, values) in own {
            let mut whole = memory.next().unwrap_or_default();
            whole.clear();
            whole.resize(self.total, 0.0);
            for (rank, pieces) in self.cut.iter().enumerate() {
                for piece in pieces {
                    let to = &mut whole[piece.whole()];
                    match rank {
                        0 => to.copy_from_slice(&values[piece.own()]),
                        _ => self.group.recv(to, rank).map_err(failed)?,
                    }
                }
            }
            all.push((name, whole));
        }
        Ok(Some(all))
    }

    /// Elements of each of this rank's buffers.
    pub fn part_len(&self) -> usize {
        self.own.flat().len()
    }

    /// Copies this rank's piece of a parameter's state, `values` in the engine's order, into its `part` of a buffer.
    pub fn copy_part(&self, param: ParamId, values: &[f32], part: &mut [f32]) {
        if let Some(piece) = self.piece_of[param.index()].map(|at| &self.pieces()[at]) {
            part[piece.own()].copy_from_slice(&values[piece.elems.clone()]);
        }
    }

    /// Puts back [`steps`](Self::steps), [`gather_updates`](Self::gather_updates) and this rank's part of each buffer
    /// ([`copy_part`](Self::copy_part)), at any number of ranks. Local.
    ///
    /// # Errors
    ///
    /// `Usage` for state of another optimizer or model.
    pub fn restore(&mut self, steps: u64, updates: &[u64], parts: &[(&str, &[f32])]) -> Result<()> {
        if updates.len() != self.piece_of.len() {
            return Err(Error::usage(format!(
                "saved optimizer state counts the updates of {} parameters, expected {}",
                updates.len(),
                self.piece_of.len()
            )));
        }
        let own_updates = self.pieces().iter().map(|p| updates[p.param.index()]);
        let own_updates: Vec<u64> = own_updates.collect();
        self.optimizer
            .restore(steps, &own_updates, parts)
            .map_err(|e| Error::usage(e.to_string()))
    }
}

fn refused(cause: phalanx_nn::Error) -> Error {
    Error::usage(format!("the optimizer refused its part: {cause}"))
}

fn not_in_lines() -> Error {
    Error::usage("parameters are not 64-byte aligned, so their optimizer state cannot be split")
}

/// A wrapper's gradients of pieces.
struct Pieces<'a> {
    pieces: &'a [Piece],
    source: &'a DistributedDataParallel,
}

impl GradView for Pieces<'_> {
    fn grad(&self, param: ParamId) -> &[f32] {
        let piece = self.pieces.get(param.index());
        piece.map_or(&[], |p| {
            self.source.scattered_piece(p.param, p.elems.clone())
        })
    }
}
