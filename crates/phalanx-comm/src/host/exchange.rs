//! The collectives that only move data: broadcast, all-gather, gather,
//! scatter, all-to-all.
//!
//! All have one shape: some ranks *give* an input of one part (which everyone
//! who takes gets) or of one part per rank, and some ranks *take* a part from
//! each giver. They differ in who gives, who takes, and where a part goes.
//!
//! | inputs | steps | bytes copied per rank |
//! |---|---|---|
//! | all registered | 2: takers copy from where inputs lie | what it takes |
//! | otherwise | S for S segments (+ 1 if some are registered): givers stage segment i, takers copy i − 1 | what it gives and takes |

use super::run::Run;
use crate::Result;
use crate::memory::ALIGN_BYTES;
use crate::plan::Collective;

/// Which collective it is, as this file sees it.
#[derive(Clone, Copy)]
struct Shape {
    /// Whether a part for each rank is given, rather than one for all.
    parts: bool,
    /// Who gives; everyone if absent.
    giver: Option<usize>,
    /// Who takes; everyone if absent.
    taker: Option<usize>,
    /// Whether a giver takes its own part, too.
    own: bool,
}

impl Shape {
    fn of(collective: Collective, root: usize) -> Shape {
        let (giver, taker) = match collective {
            Collective::Broadcast | Collective::Scatter => (Some(root), None),
            Collective::Gather => (None, Some(root)),
            _ => (None, None),
        };
        Shape {
            parts: matches!(collective, Collective::Scatter | Collective::AllToAll),
            giver,
            taker,
            own: collective != Collective::Broadcast,
        }
    }

    fn gives(&self, rank: usize) -> bool {
        self.giver.is_none_or(|giver| giver == rank)
    }

    fn takes(&self, rank: usize) -> bool {
        self.taker.is_none_or(|taker| taker == rank)
    }

    /// Which part of the input of a giver goes to `rank`.
    fn part_for(&self, rank: usize) -> usize {
        if self.parts { rank } else { 0 }
    }

    /// Where in its output a taker puts what comes from `rank`.
    fn place_of(&self, rank: usize) -> usize {
        if self.giver.is_some() { 0 } else { rank }
    }
}

impl Run<'_> {
    /// # Safety
    ///
    /// As [`Executor::run`](crate::exec::Executor::run).
    pub(super) unsafe fn exchange(&mut self) -> Result<()> {
        let shape = Shape::of(self.operation.collective, self.operation.root);
        let (me, world) = (self.host.me, self.host.world);
        let part = self.operation.count * self.elem_bytes;
        let parts = if shape.parts { world } else { 1 };
        let total = part * parts;
        if self.operation.collective.in_place() {
            self.buffers.input = self.buffers.output;
        }
        let gives = shape.gives(me);
        // What only this rank takes need not be shown to others.
        let shows = gives && shape.taker != Some(me);
        let offset = shows
            .then(|| self.offset_of(self.buffers.input, total))
            .flatten();
        let slot = self.segment_bytes(total) / parts / ALIGN_BYTES * ALIGN_BYTES;
        let segments = part.div_ceil(slot);
        let piece = |i: usize| i * slot..part.min((i + 1) * slot);
        // Tiny data is packed into the cell.
        let stride = if segments == 1 { part } else { slot };
        let stages = shows && offset.is_none();
        if stages && part > 0 {
            // SAFETY: our next stage has been read by everyone.
            unsafe { self.stage_given(shape, piece(0), stride, 0, total) };
        }
        self.enter(offset)?;
        if part == 0 {
            return Ok(());
        }
        if gives && shape.own && shape.takes(me) {
            let (from, to) = (shape.part_for(me) * part, shape.place_of(me) * part);
            // SAFETY: the part lies inside both buffers, which are disjoint.
            unsafe {
                let (from, to) = (self.buffers.input.add(from), self.buffers.output.add(to));
                std::ptr::copy_nonoverlapping(from, to, part);
            }
            self.host.counters.moved(part);
        }
        let shown = |rank: usize| shape.gives(rank) && shape.taker != Some(rank);
        let registered = |run: &Self, rank: usize| run.host.offsets[rank].is_some();
        let some = (0..world).any(|rank| shown(rank) && registered(self, rank));
        let all = (0..world).all(|rank| !shown(rank) || registered(self, rank));
        let rounds = if all { 1 } else { segments };
        for i in 1..=rounds {
            let range = if all { 0..part } else { piece(i - 1) };
            // SAFETY: what is staged and what is taken are different segments
            // in different stages; all givers have published what is taken.
            unsafe {
                if i < rounds && stages {
                    self.stage_given(shape, piece(i), stride, i, total);
                }
                if shape.takes(me) {
                    self.take_from_all(shape, range, stride, i - 1, total);
                }
            }
            // Registered inputs are read until here.
            if i < rounds || some {
                self.step()?;
            }
        }
        if !all {
            self.host.turn += segments;
        }
        Ok(())
    }

    /// Copies the bytes `piece` of what others take to our stage number `turn`
    /// of this operation.
    ///
    /// # Safety
    ///
    /// The input is the caller's, and nobody reads that stage.
    unsafe fn stage_given(
        &mut self,
        shape: Shape,
        piece: std::ops::Range<usize>,
        stride: usize,
        turn: usize,
        total: usize,
    ) {
        let part = self.operation.count * self.elem_bytes;
        let stage = self.stage(self.host.me, self.host.turn + turn, total);
        let parts = if shape.parts { self.host.world } else { 1 };
        for index in (0..parts).filter(|&index| !shape.parts || index != self.host.me) {
            // SAFETY: the piece lies inside every part, and as many strides
            // inside the stage.
            unsafe {
                self.copy_staged(
                    self.buffers.input.add(index * part + piece.start),
                    stage.add(index * stride),
                    piece.len(),
                );
            }
        }
    }

    /// Copies the bytes `range` of our part of every other giver to our output.
    ///
    /// # Safety
    ///
    /// They are staged as number `turn`, or registered.
    unsafe fn take_from_all(
        &mut self,
        shape: Shape,
        range: std::ops::Range<usize>,
        stride: usize,
        turn: usize,
        total: usize,
    ) {
        let (me, world) = (self.host.me, self.host.world);
        let part = self.operation.count * self.elem_bytes;
        // Not all from the same rank at the same time.
        for rank in (1..world).map(|k| (me + k) % world) {
            if !shape.gives(rank) {
                continue;
            }
            let index = shape.part_for(me);
            // SAFETY: the range lies inside the part, the part inside the
            // input, the stride inside the stage and the place inside the
            // output.
            unsafe {
                let into = self
                    .buffers
                    .output
                    .add(shape.place_of(rank) * part + range.start);
                match self.registered(rank) {
                    Some(input) => {
                        let from = input.add(index * part + range.start);
                        std::ptr::copy_nonoverlapping(from, into, range.len());
                        self.host.counters.moved(range.len());
                    }
                    None => {
                        let stage = self.stage(rank, self.host.turn + turn, total);
                        self.copy_staged(stage.add(index * stride), into, range.len());
                    }
                }
            }
        }
    }
}
