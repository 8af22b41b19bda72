//! Optimizer state sharded over the ranks (ZeRO stage 1: Rajbhandari et al., "ZeRO:
//! Memory Optimizations Toward Training Trillion Parameter Models", 2020).
//!
//! A rank's optimizer has only pieces of the parameters, split inside tensors if
//! needed; after its step the pieces are gathered. Since their optimizers treat each
//! element by itself, weights have the same bits as without sharding. There are two ways to
//! split:
//!
//! * [`ShardedOptimizer::new`]: the flat region of all parameters, one run of 64-byte
//!   lines per rank. Every rank has all averaged gradients
//!   ([`ShardedOptimizer::step`]).
//! * [`ShardedOptimizer::for_wrapper`]: a part of each bucket, as a reduce-scatter leaves it
//!   ([`Exchange::ReduceScatter`](crate::Exchange::ReduceScatter)). A step moves as much as an
//!   all-reduce, gradients one way and parameters the other, and the parameters are gathered in place
//!   ([`ShardedOptimizer::step_scattered`]).
//!
//! [`ShardedOptimizer::with_copies`] gives each part to a second rank as well (`recut.rs`), so that the others have all parts
//! when a rank is lost. A step has three phases then: [`prepare_step`](ShardedOptimizer::prepare_step) gives both ranks the
//! part's gradients, [`step_prepared`](ShardedOptimizer::step_prepared) updates both parts of a rank without communication, and
//! [`gather`](ShardedOptimizer::gather) gathers the parameters.

use std::ops::Range;

use phalanx_comm::{P2POp, ProcessGroup, ReduceOp};
use phalanx_nn::optim::{Optimizer, Run, clip_factor, grad_norm};
use phalanx_nn::{GradView, Layout, ParamId, Params, Scope, Seed};

use super::ddp::DistributedDataParallel;
use crate::error::{Error, Result};

const LINE_ELEMS: usize = 16;

/// An optimizer's buffers by name.
type Buffers = Vec<(&'static str, Vec<f32>)>;

/// An optimizer whose state is sharded over the ranks. The optimizer must treat every
/// element by itself ([`Optimizer::is_elementwise`]: SGD and Adam, not Muon).
pub struct ShardedOptimizer<O> {
    pub(super) optimizer: O,
    pub(super) cut: Partition,
    /// Elements of the flat region of all parameters.
    total: usize,
    /// Whether the pieces are those of a wrapper.
    scattered: bool,
    /// Whether each part has a copy, if there are several ranks.
    pub(super) has_copies: bool,
    /// Of the gradients of a step that is prepared.
    prepared: Option<f32>,
    /// Whether other ranks lack the parameters that this one has updated.
    pub(super) ungathered: bool,
    /// A cut that all ranks may have changed to, of which this one does not know it yet.
    pub(super) next: Option<Box<Recut>>,
}

/// A cut that this rank can change to.
pub(super) struct Recut {
    pub(super) cut: Partition,
    pub(super) steps: u64,
    pub(super) updates: Vec<u64>,
    pub(super) state: Vec<(String, Vec<f32>)>,
}

/// Which rank has which pieces.
pub(super) struct Partition {
    pub(super) group: ProcessGroup,
    /// Every rank's own pieces.
    pub(super) parts: Vec<Vec<ParamSlice>>,
    /// The copy of a part is on the rank this many further; 0: there are none.
    pub(super) shift: usize,
    /// This rank's pieces: its own, then those of which it has the copy.
    pub(super) held: Vec<ParamSlice>,
    /// The parameters given to the optimizer: these pieces, with the names of the whole parameters. The elements
    /// themselves are the model's; where there are copies, here are those that this rank has updated last.
    pub(super) own: Params,
    /// Of each parameter, this rank's own piece and the one of which it has the copy.
    pub(super) piece_of: Vec<[Option<usize>; 2]>,
}

/// A parameter, or the slice of it that one rank has.
#[derive(Debug, Clone)]
pub(super) struct ParamSlice {
    pub(super) param: ParamId,
    pub(super) elems: Range<usize>,
    /// Where it begins among the rank's pieces.
    pub(super) at: usize,
    /// Where it begins in the flat region of all parameters.
    pub(super) flat: usize,
}

impl ParamSlice {
    pub(super) fn own(&self) -> Range<usize> {
        self.at..self.at + self.elems.len()
    }

    pub(super) fn whole(&self) -> Range<usize> {
        self.flat..self.flat + self.elems.len()
    }
}

/// Places pieces one behind the other, each starting on a cache line.
pub(super) fn lay_out(params: &Params, pieces: Vec<(ParamId, Range<usize>)>) -> Vec<ParamSlice> {
    let mut next = 0;
    let piece = |(param, elems): (ParamId, Range<usize>)| {
        let at = next;
        next = (at + elems.len()).next_multiple_of(LINE_ELEMS);
        ParamSlice {
            param,
            flat: params.infos()[param.index()].offset + elems.start,
            elems,
            at,
        }
    };
    pieces.into_iter().map(piece).collect()
}

pub(super) fn len_of(pieces: &[ParamSlice]) -> usize {
    pieces
        .last()
        .map_or(0, |p| p.own().end.next_multiple_of(LINE_ELEMS))
}

impl Partition {
    pub(super) fn new(
        group: ProcessGroup,
        params: &Params,
        parts: Vec<Vec<ParamSlice>>,
        shift: usize,
    ) -> Result<Partition> {
        let rank = group.rank();
        let held = held(&parts, shift, rank);
        let mut piece_of = vec![[None; 2]; params.len()];
        let mut scope = Scope::new(Seed(0));
        for (at, piece) in held.iter().enumerate() {
            let info = &params.infos()[piece.param.index()];
            let (which, name) = match at < parts[rank].len() {
                true => (0, info.name.clone()),
                false => (1, format!("copy of {}", info.name)),
            };
            piece_of[piece.param.index()][which] = Some(at);
            let shape = [piece.elems.len()];
            let whole = (info.whole_name(), info.whole_shape());
            scope.shard(&name, &shape, Layout::Same, whole);
        }
        let own = scope
            .build()
            .map_err(|e| Error::usage(format!("this rank's part cannot be built: {e}")))?;
        let mut places = own.infos().iter().zip(&held);
        if own.flat().len() > len_of(&held) || places.any(|(info, p)| info.offset != p.at) {
            return Err(not_in_lines());
        }
        Ok(Partition {
            group,
            parts,
            shift,
            held,
            own,
            piece_of,
        })
    }

    fn mine(&self) -> &[ParamSlice] {
        &self.parts[self.group.rank()]
    }
}

/// The pieces that `rank` has: its own, then the copy of those of another rank.
pub(super) fn held(parts: &[Vec<ParamSlice>], shift: usize, rank: usize) -> Vec<ParamSlice> {
    let mut held = parts[rank].clone();
    if shift > 0 {
        let begin = len_of(&held);
        let of = (rank + parts.len() - shift) % parts.len();
        held.extend(parts[of].iter().map(|piece| ParamSlice {
            at: begin + piece.at,
            ..piece.clone()
        }));
    }
    held
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
        let cut: Vec<Vec<ParamSlice>> = (0..world).map(pieces).collect();
        let mut all = cut.iter().enumerate();
        if !all.all(|(r, own)| own.iter().all(|p| p.flat == border(r) + p.at)) {
            return Err(not_in_lines());
        }
        Self::build(group, params, cut, make)
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
        let parts = parts_of(wrapper, params);
        let mut optimizer = Self::build(group, params, parts, make)?;
        optimizer.scattered = true;
        Ok(optimizer)
    }

    fn build(
        group: ProcessGroup,
        params: &Params,
        parts: Vec<Vec<ParamSlice>>,
        make: impl FnOnce(&Params) -> O,
    ) -> Result<ShardedOptimizer<O>> {
        let cut = Partition::new(group, params, parts, 0)?;
        let optimizer = make(&cut.own);
        if !optimizer.is_elementwise() {
            return Err(Error::usage(format!(
                "{} needs whole parameters, so its state cannot be divided among ranks",
                optimizer.name()
            )));
        }
        Ok(ShardedOptimizer {
            optimizer,
            cut,
            total: params.flat().len(),
            scattered: false,
            has_copies: false,
            prepared: None,
            ungathered: false,
            next: None,
        })
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
        let norm = grad_norm(params, grads, &self.optimizer.thread_pool());
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
        for piece in self.cut.mine() {
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
        (self.cut.group)
            .all_gather_in_place(params.flat_mut(), len_of(&self.cut.parts[0]))
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
        if self.has_copies {
            return Err(Error::usage(
                "with_copies requires ShardedOptimizer::step_prepared in place of step",
            ));
        }
        self.update(params, wrapper, 1.0)?;
        wrapper.gather_pieces(params)
    }

    /// The norm of the exchanged gradients of all ranks.
    fn joined_norm(&self, wrapper: &DistributedDataParallel) -> Result<f64> {
        let view = Pieces {
            pieces: self.cut.mine(),
            source: wrapper,
        };
        let norm = grad_norm(&self.cut.own, &view, &self.optimizer.thread_pool());
        let (mut squares, group) = ([norm * norm], &self.cut.group);
        if group.world_size() > 1 {
            group
                .all_reduce(&mut squares, ReduceOp::Sum)
                .map_err(|e| Error::comm_while("the gradients' norm could not be joined", e))?;
        }
        Ok(squares[0].sqrt())
    }

    /// Prepares a step for which `wrapper` has gradients, of an optimizer with [copies](Self::with_copies) or one whose gradients'
    /// norm is wanted before it: exchanges them, and passes each part on to the rank with its copy. With a `limit` the step
    /// scales the gradients down to a norm of at most that, and this gives their norm, that of the joined gradient of all
    /// ranks. Squares are added in another order than in [`grad_norm`], in f64: the norm differs from it in the last digits,
    /// the float32 factor computed from it almost never. A prepared step may be left out: preparing the next
    /// one replaces it.
    ///
    /// *Blocks* until all ranks of the group call it. *Cost:* what a reduce-scatter of the gradients takes, and 1/world of
    /// the gradients sent and received.
    ///
    /// # Errors
    ///
    /// As [`step_scattered`](Self::step_scattered). Nothing was changed then.
    pub fn prepare_step(
        &mut self,
        wrapper: &mut DistributedDataParallel,
        limit: Option<f64>,
    ) -> Result<Option<f64>> {
        self.check_wrapper(wrapper)?;
        // The factor needs all gradients.
        wrapper.reducer.exchange_late()?;
        wrapper.reducer.check_pieces()?;
        let (rank, world) = (self.cut.group.rank(), self.cut.parts.len());
        if self.cut.shift > 0 {
            let [to, from] = [self.cut.shift, world - self.cut.shift];
            wrapper
                .reducer
                .pass_copies((rank + to) % world, (rank + from) % world)?;
        }
        let norm = limit.map(|_| self.joined_norm(wrapper)).transpose()?;
        let factor = norm
            .zip(limit)
            .map(|(norm, limit)| clip_factor(norm, limit));
        self.prepared = Some(factor.unwrap_or(1.0));
        Ok(norm)
    }

    /// Takes the [prepared](Self::prepare_step) step with the part of this rank and the copy that it has, if there are copies. Local: call it when
    /// all ranks have prepared the step. Then call [`gather`](Self::gather).
    ///
    /// # Errors
    ///
    /// `Usage` when no step is prepared, `params` have another layout, or `wrapper` is another one or has no gradients.
    pub fn step_prepared(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
    ) -> Result<()> {
        let Some(factor) = self.prepared.take() else {
            return Err(Error::usage(
                "a step is prepared with ShardedOptimizer::prepare_step first",
            ));
        };
        self.update(params, wrapper, factor)?;
        self.ungathered = true;
        Ok(())
    }

    /// Gathers the parts of all ranks into `params`, if [`step_prepared`](Self::step_prepared) has changed them since.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late. `params` is undefined then, until [`recut`](Self::recut).
    pub fn gather(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
    ) -> Result<()> {
        if std::mem::take(&mut self.ungathered) {
            wrapper.gather_pieces(params)?;
        }
        Ok(())
    }

    /// Updates the pieces that this rank has.
    fn update(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
        factor: f32,
    ) -> Result<()> {
        self.check(params)?;
        self.check_wrapper(wrapper)?;
        // Before the optimizer counts the step.
        wrapper.reducer.check_pieces()?;
        self.optimizer.begin_step().map_err(refused)?;
        let (held, piece_of) = (&self.cut.held, &self.cut.piece_of);
        let kept = self.has_copies.then(|| self.cut.own.flat_mut());
        let (optimizer, mut kept, mut done) = (&mut self.optimizer, kept, Ok(()));
        wrapper.visit_pieces(|param, elems, grads| {
            // A rank gets exactly the pieces that it has; others are ignored.
            let mut pieces = piece_of[param.index()].iter().flatten();
            let Some(at) = pieces.find(|at| held[**at].elems.contains(&elems.start)) else {
                return;
            };
            let at = held[*at].at + elems.start - held[*at].elems.start;
            let values = &mut params.get_mut(param)[elems];
            let run = Run {
                at,
                values: &mut *values,
                grads,
            };
            let step = optimizer.step_run(run, factor);
            if let Some(kept) = &mut kept {
                kept[at..at + values.len()].copy_from_slice(values);
            }
            if done.is_ok() {
                done = step;
            }
        })?;
        done.map_err(refused)
    }

    pub(super) fn is_scattered(&self) -> bool {
        self.scattered
    }

    fn check_wrapper(&self, wrapper: &DistributedDataParallel) -> Result<()> {
        let fits = self.scattered && {
            let theirs = wrapper.scattered(self.cut.group.rank());
            let mine = self.cut.mine().iter().map(|p| (p.param, p.elems.clone()));
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
        self.gather_updates_in(&self.cut.group)
    }

    /// The same over the ranks of `group`, which may have other parts now.
    pub(super) fn gather_updates_in(&self, group: &ProcessGroup) -> Result<Vec<u64>> {
        let mut updates = vec![0i64; self.cut.piece_of.len()];
        for (piece, count) in self.cut.held.iter().zip(self.optimizer.updates()) {
            updates[piece.param.index()] = count.cast_signed();
        }
        if group.world_size() > 1 {
            group
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
        let (own, group) = (self.optimizer.state(), &self.cut.group);
        let ranks = self.cut.parts.iter().enumerate();
        let mut parts: Vec<(usize, &ParamSlice)> = ranks
            .flat_map(|(rank, pieces)| pieces.iter().map(move |piece| (rank, piece)))
            .collect();
        parts.sort_by_key(|(_, piece)| piece.flat);
        // A rank sends when rank 0 waits for its pieces: those that come earlier would be kept until rank 0 receives them.
        let mut ready = [0u8];
        if group.rank() != 0 {
            for (_, values) in own {
                group.recv(&mut ready, 0).map_err(failed)?;
                for (_, piece) in parts.iter().filter(|(rank, _)| *rank == group.rank()) {
                    group.send(&values[piece.own()], 0).map_err(failed)?;
                }
            }
            return Ok(None);
        }
        let (mut all, mut memory) = (Vec::new(), memory.into_iter());
        for (name, values) in own {
            let mut whole = memory.next().unwrap_or_default();
            whole.clear();
            whole.resize(self.total, 0.0);
            let (mut rest, mut at) = (&mut whole[..], 0);
            let mut messages = Vec::new();
            for (rank, piece) in &parts {
                let (to, after) = rest[piece.flat - at..].split_at_mut(piece.elems.len());
                (rest, at) = (after, piece.whole().end);
                match rank {
                    0 => to.copy_from_slice(&values[piece.own()]),
                    _ => messages.push(P2POp::recv(to, *rank)),
                }
            }
            messages.extend((1..group.world_size()).map(|rank| P2POp::send(&ready, rank)));
            group.batch_send_recv(messages).map_err(failed)?;
            all.push((name, whole));
        }
        Ok(Some(all))
    }

    /// Elements of each of this rank's buffers.
    pub fn part_len(&self) -> usize {
        self.cut.own.flat().len()
    }

    /// Copies this rank's pieces of a parameter's state, `values` in the engine's order, into its `part` of a buffer.
    pub fn copy_part(&self, param: ParamId, values: &[f32], part: &mut [f32]) {
        for at in self.cut.piece_of[param.index()].iter().flatten() {
            let piece = &self.cut.held[*at];
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
        if updates.len() != self.cut.piece_of.len() {
            return Err(Error::usage(format!(
                "saved optimizer state counts the updates of {} parameters, expected {}",
                updates.len(),
                self.cut.piece_of.len()
            )));
        }
        let own_updates = self.cut.held.iter().map(|p| updates[p.param.index()]);
        let own_updates: Vec<u64> = own_updates.collect();
        self.optimizer
            .restore(steps, &own_updates, parts)
            .map_err(|e| Error::usage(e.to_string()))
    }
}

/// The pieces of each rank, as `wrapper` scatters gradients.
pub(super) fn parts_of(wrapper: &DistributedDataParallel, params: &Params) -> Vec<Vec<ParamSlice>> {
    let pieces = |rank| lay_out(params, wrapper.scattered(rank));
    (0..wrapper.group().world_size()).map(pieces).collect()
}

pub(super) fn refused(cause: phalanx_nn::Error) -> Error {
    Error::usage(format!("the optimizer refused its part: {cause}"))
}

fn not_in_lines() -> Error {
    Error::usage("parameters are not 64-byte aligned, so their optimizer state cannot be split")
}

/// A wrapper's gradients of pieces.
struct Pieces<'a> {
    pieces: &'a [ParamSlice],
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
