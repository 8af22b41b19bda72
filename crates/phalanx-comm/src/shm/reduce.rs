//! All-reduce, reduce and reduce-scatter.
//!
//! *Order:* canonical; every element is folded once, by one rank, from all
//! ranks' values in ascending order.

use super::cell::Place;
use super::run::Run;
use super::{ONE_ROUND_MAX_BYTES, VISITED_BYTES};
use crate::Result;
use crate::operation::Visit;
use crate::plan::Collective;
use crate::region::ALIGN_BYTES;

impl Run<'_, '_> {
    /// All-reduce and reduce, where data is replaced in place.
    ///
    /// | data | steps | bytes copied per rank |
    /// |---|---|---|
    /// | small, registered or not | 1: copy to own stage; then every rank folds all stages | n |
    /// | all registered | 2: owners fold their chunk in place, and write it to all | 0 |
    /// | otherwise | S + 1 for S segments: fetch segment i − 2, stage i, fold i − 1 in all stages | 2n(1 − 1/P) |
    ///
    /// # Safety
    ///
    /// As [`Native::run`](crate::backend::Native::run).
    pub(super) unsafe fn reduce(&mut self) -> Result<()> {
        let (count, bytes) = (self.operation.count, self.operation.count * self.elem_bytes);
        let data = self.buffers.output;
        let in_one_round = bytes <= self.one_round_bytes();
        let place = match in_one_round {
            true => Place::Staged,
            false => self.place_of(data, bytes),
        };
        let stages = place == Place::Staged;
        let segment = match in_one_round {
            true => count,
            false => self.segment_bytes(bytes) / self.elem_bytes,
        };
        let segments = count.div_ceil(segment.max(1));
        let piece = |i: usize| i * segment..count.min((i + 1) * segment);
        if stages {
            // SAFETY: the data is the caller's; our next stage and cell have been read
            // by all ranks (README.md, "why nothing is overwritten too early").
            unsafe {
                if in_one_round {
                    let stage = self.stage(self.shm.me, self.shm.staged, bytes);
                    self.copy_staged(data, stage, bytes);
                } else {
                    self.copy_others(piece(0), 0, |data, stage| (data, stage));
                }
            }
        }
        self.enter(place)?;
        if in_one_round {
            // SAFETY: handed on from the caller, and every rank has staged all its data.
            unsafe { self.fold_everything(bytes) };
            self.shm.staged += 1;
            return Ok(());
        }
        if self.all_registered() {
            let mine = self.chunks(count).range(self.shm.me);
            // SAFETY: all ranks are here and none touches its own data; only we touch
            // chunk `me` on any rank before the next step.
            unsafe { self.fold_chunk(mine, None, 0) };
            return self.step();
        }
        // Others write the results there.
        let fetches = stages && self.receives(self.shm.me);
        for i in 1..=segments {
            // SAFETY: as README.md explains: segment i is staged where i − 2 was, which
            // is fetched first, and i − 1 is folded in the other stage.
            unsafe {
                if i >= 2 && fetches {
                    self.copy_others(piece(i - 2), i - 2, |data, stage| (stage, data));
                }
                if i < segments && stages {
                    self.copy_others(piece(i), i, |data, stage| (data, stage));
                }
                let (start, len) = (piece(i - 1).start, piece(i - 1).len());
                let mine = self.chunks(len).range(self.shm.me);
                self.fold_chunk(
                    start + mine.start..start + mine.end,
                    Some(mine.start),
                    i - 1,
                );
            }
            self.step()?;
        }
        if fetches {
            // SAFETY: as above; all ranks are done with our stages.
            unsafe {
                self.copy_others(piece(segments - 1), segments - 1, |data, stage| {
                    (stage, data)
                })
            };
        }
        self.shm.staged += segments;
        Ok(())
    }

    /// Up to this size every rank folds everything, which saves one synchronisation.
    fn one_round_bytes(&self) -> usize {
        let most = match self.shm.is_oversubscribed() {
            true => self.shm.stage_bytes,
            false => ONE_ROUND_MAX_BYTES.min(self.shm.stage_bytes),
        };
        crate::select::one_round_max_bytes(self.shm.world).min(most)
    }

    /// Whether `rank` gets the result.
    fn receives(&self, rank: usize) -> bool {
        self.operation.collective != Collective::Reduce || rank == self.operation.root
    }

    /// Folds the data of all ranks, staged as a whole.
    ///
    /// # Safety
    ///
    /// As [`Run::reduce`], and every rank has staged its data.
    unsafe fn fold_everything(&mut self, bytes: usize) {
        let (me, index, data) = (self.shm.me, self.shm.staged, self.buffers.output);
        if bytes == 0 || !self.receives(me) {
            return;
        }
        let mut lists = std::mem::take(&mut self.shm.lists);
        lists.sources.clear();
        let places = (0..self.shm.world).map(|rank| match rank == me {
            true => data.cast_const(),
            false => self.stage(rank, index, bytes).cast_const(),
        });
        lists.sources.extend(places);
        // SAFETY: no rank writes there before it has seen us in the next operation.
        unsafe { self.fold(&[data], &lists.sources, self.operation.count) };
        self.shm.lists = lists;
    }

    /// Folds the elements `range`, which we own, from all ranks, and writes them to all
    /// ranks that get the result: to the place that a rank published, or to its stage
    /// `index`. `in_stage` is where unregistered ranks have staged them; `None` when all
    /// are registered.
    ///
    /// # Safety
    ///
    /// The segment is staged, and no other rank touches our chunk of it.
    unsafe fn fold_chunk(
        &mut self,
        range: std::ops::Range<usize>,
        in_stage: Option<usize>,
        index: usize,
    ) {
        if range.is_empty() {
            return;
        }
        let mut lists = std::mem::take(&mut self.shm.lists);
        lists.sources.clear();
        lists.intos.clear();
        let at = range.start * self.elem_bytes;
        let staged_at = in_stage.unwrap_or(0) * self.elem_bytes;
        for rank in 0..self.shm.world {
            let place = match self.registered(rank) {
                _ if rank == self.shm.me => self.buffers.output.wrapping_add(at),
                Some(data) => data.wrapping_add(at),
                None => {
                    let stage = self.stage(rank, self.shm.staged + index, usize::MAX);
                    stage.wrapping_add(staged_at)
                }
            };
            lists.sources.push(place);
            if self.receives(rank) {
                lists.intos.push(place);
            }
        }
        // SAFETY: handed on from the caller: the range lies inside the data, the chunk inside
        // the stages. Destinations are sources.
        unsafe { self.fold(&lists.intos, &lists.sources, range.len()) };
        self.shm.lists = lists;
    }

    /// # Safety
    ///
    /// As [`phalanx_fold::fold_to_many`], for `count` elements of the operation's type.
    unsafe fn fold(&mut self, intos: &[*mut u8], sources: &[phalanx_fold::Source], count: usize) {
        let (Some(dtype), Some(op)) = (self.operation.dtype, self.operation.op) else {
            // Only collectives that reduce get here; these have both.
            unreachable!("a fold in {}", self.operation.collective.name())
        };
        let began = self.context.flight.ticks();
        // SAFETY: handed on from the caller; that the op supports the type was
        // checked when the operation was requested.
        unsafe {
            phalanx_fold::fold_to_many(dtype, op, intos, sources, count, Some(self.shm.world));
        }
        self.context.flight.folded(began);
        let bytes = count * self.elem_bytes * sources.len();
        self.shm.counters.folded(bytes);
    }

    /// Copies the elements of `piece` that others own between our data and our stage
    /// `index` of this operation; `order` makes source and destination of the two.
    ///
    /// # Safety
    ///
    /// The data is the caller's, and no other rank touches that stage.
    unsafe fn copy_others(
        &mut self,
        piece: std::ops::Range<usize>,
        index: usize,
        order: impl Fn(*mut u8, *mut u8) -> (*mut u8, *mut u8),
    ) {
        let mine = self.chunks(piece.len()).range(self.shm.me);
        let stage = self.stage(self.shm.me, self.shm.staged + index, usize::MAX);
        let bytes = |elems: usize| elems * self.elem_bytes;
        for part in [0..mine.start, mine.end..piece.len()] {
            let data = (self.buffers.output).wrapping_add(bytes(piece.start + part.start));
            let (from, to) = order(data, stage.wrapping_add(bytes(part.start)));
            // SAFETY: the piece is inside the data and no longer than a stage.
            unsafe { self.copy_staged(from, to, bytes(part.len())) };
        }
    }

    /// Reduce-scatter: rank r gets part r of the reduction.
    ///
    /// | inputs | steps | bytes copied per rank |
    /// |---|---|---|
    /// | all registered | 2: fold our part from all inputs in place; visited, piece by piece | 0 |
    /// | otherwise | S for S segments (+ 1 if some are registered): stage segment i of every part, fold i − 1 of ours | n(P − 1) |
    ///
    /// # Safety
    ///
    /// As [`Native::run`](crate::backend::Native::run).
    pub(super) unsafe fn reduce_scatter(&mut self, visit: Option<&mut Visit<'_>>) -> Result<()> {
        let (me, world, count) = (self.shm.me, self.shm.world, self.operation.count);
        let part_bytes = count * self.elem_bytes;
        let total = part_bytes * world;
        let place = self.place_of(self.buffers.input, total);
        let stages = place == Place::Staged;
        // As much of every part as fits, in whole cache lines.
        let slot_bytes = self.segment_bytes(total) / world / ALIGN_BYTES * ALIGN_BYTES;
        let slot = slot_bytes / self.elem_bytes;
        let segments = count.div_ceil(slot);
        let piece = |i: usize| i * slot..count.min((i + 1) * slot);
        // Tiny data is packed into the cell.
        let stride = if segments == 1 {
            part_bytes
        } else {
            slot_bytes
        };
        if stages && count > 0 {
            // SAFETY: our next stage has been read by all ranks.
            unsafe { self.stage_parts(piece(0), stride, 0, total) };
        }
        self.enter(place)?;
        if count == 0 {
            return Ok(());
        }
        let some_registered = (0..world).any(|rank| self.registered(rank).is_some());
        let in_place = self.all_registered();
        if let (true, Some(visit)) = (in_place, visit) {
            let room = self.buffers.output;
            let at_once = VISITED_BYTES / self.elem_bytes;
            for first in (0..count).step_by(at_once) {
                let piece = first..count.min(first + at_once);
                // SAFETY: the piece lies inside our part of all inputs, and no longer than the output.
                unsafe { self.fold_ours(piece.clone(), room, |_, _| room) };
                visit(piece.start, piece.len());
            }
            return self.step();
        }
        let rounds = if in_place { 1 } else { segments };
        for i in 1..=rounds {
            let from = if in_place { 0..count } else { piece(i - 1) };
            // SAFETY: what is staged and what is folded are different segments
            // in different stages; offsets lie inside inputs and stages.
            unsafe {
                if i < rounds && stages {
                    self.stage_parts(piece(i), stride, i, total);
                }
                let into = self.buffers.output.add(from.start * self.elem_bytes);
                let index = self.shm.staged + i - 1;
                self.fold_ours(from, into, |run, rank| {
                    run.stage(rank, index, total).add(me * stride)
                });
            }
            // Registered inputs are read until here.
            if i < rounds || some_registered {
                self.step()?;
            }
        }
        if !in_place {
            self.shm.staged += segments;
        }
        Ok(())
    }

    /// Folds the elements `piece` of our part from all inputs to `into`; `staged` is where ranks that
    /// are not registered have staged them.
    ///
    /// # Safety
    ///
    /// All are inside inputs and stages, and no rank writes them; there is room for them.
    unsafe fn fold_ours(
        &mut self,
        piece: std::ops::Range<usize>,
        into: *mut u8,
        staged: impl Fn(&Self, usize) -> *mut u8,
    ) {
        let mut lists = std::mem::take(&mut self.shm.lists);
        lists.sources.clear();
        lists.intos.clear();
        lists.intos.push(into);
        let part_bytes = self.operation.count * self.elem_bytes;
        let at = self.shm.me * part_bytes + piece.start * self.elem_bytes;
        for rank in 0..self.shm.world {
            let source = match self.registered(rank) {
                // SAFETY: handed on from the caller.
                _ if rank == self.shm.me => unsafe { self.buffers.input.add(at) },
                // SAFETY: as above.
                Some(input) => unsafe { input.add(at) }.cast_const(),
                None => {
                    let stage = staged(self, rank);
                    lists.intos.push(stage);
                    stage.cast_const()
                }
            };
            lists.sources.push(source);
        }
        // SAFETY: handed on from the caller.
        unsafe { self.fold(&lists.intos, &lists.sources, piece.len()) };
        self.shm.lists = lists;
    }

    /// Copies the elements `piece` of every part but ours to our stage number
    /// `index` of this operation.
    ///
    /// # Safety
    ///
    /// The input is the caller's, and no rank reads that stage.
    pub(super) unsafe fn stage_parts(
        &mut self,
        piece: std::ops::Range<usize>,
        stride: usize,
        index: usize,
        total: usize,
    ) {
        let part_bytes = self.operation.count * self.elem_bytes;
        let stage = self.stage(self.shm.me, self.shm.staged + index, total);
        for rank in (0..self.shm.world).filter(|&rank| rank != self.shm.me) {
            // SAFETY: the piece lies inside every part, and `world` strides
            // inside the stage.
            unsafe {
                self.copy_staged(
                    self.buffers
                        .input
                        .add(rank * part_bytes + piece.start * self.elem_bytes),
                    stage.add(rank * stride),
                    piece.len() * self.elem_bytes,
                );
            }
        }
    }
}
