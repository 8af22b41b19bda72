//! The collectives that only move data: broadcast, all-gather, gather,
//! scatter, all-to-all.
//!
//! All have one shape: some ranks *give* an input of one part (for all takers) or of
//! one part per rank, and some ranks *take* a part from each giver. They differ in the
//! givers, the takers, and where a part goes.
//!
//! | inputs | steps | bytes copied per rank |
//! |---|---|---|
//! | all registered, or large and readable through the kernel (`direct`) | 2: takers copy from inputs in place | what it takes |
//! | otherwise | S for S segments (+ 1 if some are registered): givers stage segment i, takers copy i − 1 | what it gives and takes |

use std::ops::Range;

use super::cell::Place;
use super::direct;
use super::run::Run;
use crate::plan::Collective;
use crate::region::ALIGN_BYTES;
use crate::{Error, Result};

/// Which collective it is, as this file sees it.
#[derive(Clone, Copy)]
struct Shape {
    /// Whether a part for each rank is given, rather than one for all.
    parts: bool,
    /// The giver; all ranks if absent.
    giver: Option<usize>,
    /// The taker; all ranks if absent.
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

/// The sizes of a rank's input for which the others read it through the kernel: saving
/// one copy must be worth a system call and the work per page. Measured on two cores
/// (README.md, "What was measured").
fn read_bytes(collective: Collective, world: usize, is_oversubscribed: bool) -> Range<usize> {
    match (collective, is_oversubscribed) {
        // All ranks read the same data, which stays in a cache once it is staged.
        (Collective::Broadcast, true) => 0..0,
        (Collective::AllGather, true) => 512 << 10..usize::MAX,
        (_, true) => 128 << 10..usize::MAX,
        (Collective::AllGather | Collective::AllToAll, false) => 16 << 10..usize::MAX,
        // One rank gives or takes: large data is faster if both are busy, one copying
        // in, the other copying out.
        (_, false) if world == 2 => 16 << 10..2 << 20,
        (_, false) => 0..0,
    }
}

impl Run<'_, '_> {
    /// Whether the others read our `total` bytes of input through the kernel if they
    /// are not registered.
    fn is_read(&self, total: usize) -> bool {
        let shm = &self.shm;
        let range = match shm.read_min_bytes {
            Some(min) => min..usize::MAX,
            None => read_bytes(
                self.operation.collective,
                shm.world,
                shm.is_oversubscribed(),
            ),
        };
        self.reads_memory() && range.contains(&total)
    }

    /// # Safety
    ///
    /// As [`Native::run`](crate::backend::Native::run).
    pub(super) unsafe fn exchange(&mut self) -> Result<()> {
        let shape = Shape::of(self.operation.collective, self.operation.root);
        let (me, world) = (self.shm.me, self.shm.world);
        let part = self.operation.count * self.elem_bytes;
        let parts = if shape.parts { world } else { 1 };
        let total = part * parts;
        if self.operation.collective.in_place() {
            self.buffers.input = self.buffers.output;
        }
        let gives = shape.gives(me);
        // Data that only this rank takes need not be published.
        let shows = gives && shape.taker != Some(me);
        let place = match self.place_of(self.buffers.input, total) {
            _ if !shows => Place::Staged,
            Place::Staged if self.is_read(total) => {
                Place::Address(self.buffers.input.addr() as u64)
            }
            place => place,
        };
        let slot = self.segment_bytes(total) / parts / ALIGN_BYTES * ALIGN_BYTES;
        let segments = part.div_ceil(slot);
        let piece = |i: usize| i * slot..part.min((i + 1) * slot);
        // Tiny data is packed into the cell.
        let stride = if segments == 1 { part } else { slot };
        let stages = shows && place == Place::Staged;
        if stages && part > 0 {
            // SAFETY: our next stage has been read by all ranks.
            unsafe { self.stage_given(shape, piece(0), stride, 0, total) };
        }
        self.enter(place)?;
        if part == 0 {
            return Ok(());
        }
        if gives && shape.own && shape.takes(me) {
            let (from, to) = (shape.part_for(me) * part, shape.place_of(me) * part);
            let (from, to) = (
                self.buffers.input.wrapping_add(from),
                self.buffers.output.wrapping_add(to),
            );
            // For a gather in place the part is already there.
            if !std::ptr::eq(from, to) {
                // SAFETY: the part lies inside both buffers, which are disjoint.
                unsafe { std::ptr::copy_nonoverlapping(from, to, part) };
                self.shm.counters.moved(part);
            }
        }
        let shown = |rank: usize| shape.gives(rank) && shape.taker != Some(rank);
        let in_place = |run: &Self, rank: usize| run.shm.places[rank] != Place::Staged;
        let some = (0..world).any(|rank| shown(rank) && in_place(self, rank));
        let all = (0..world).all(|rank| !shown(rank) || in_place(self, rank));
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
                    self.take_from_all(shape, range, stride, i - 1, total)?;
                }
            }
            // Inputs that are read in place are read until here.
            if i < rounds || some {
                self.step()?;
            }
        }
        if !all {
            self.shm.staged += segments;
        }
        Ok(())
    }

    /// Copies the bytes `piece` of what others take to our stage `number`
    /// of this operation.
    ///
    /// # Safety
    ///
    /// The input is the caller's, and no rank reads that stage.
    unsafe fn stage_given(
        &mut self,
        shape: Shape,
        piece: Range<usize>,
        stride: usize,
        number: usize,
        total: usize,
    ) {
        let part = self.operation.count * self.elem_bytes;
        let piece = self.present(self.shm.me, piece);
        if piece.is_empty() {
            return;
        }
        let stage = self.stage(self.shm.me, self.shm.staged + number, total);
        let parts = if shape.parts { self.shm.world } else { 1 };
        for index in (0..parts).filter(|&index| !shape.parts || index != self.shm.me) {
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
    /// They are in stage `number`, or their owners wait until they are read.
    unsafe fn take_from_all(
        &mut self,
        shape: Shape,
        range: Range<usize>,
        stride: usize,
        number: usize,
        total: usize,
    ) -> Result<()> {
        let (me, world) = (self.shm.me, self.shm.world);
        let part = self.operation.count * self.elem_bytes;
        // Not all from the same rank at the same time.
        for rank in (1..world).map(|k| (me + k) % world) {
            if !shape.gives(rank) {
                continue;
            }
            let index = shape.part_for(me);
            let range = self.present(rank, range.clone());
            if range.is_empty() {
                continue;
            }
            // SAFETY: the range lies inside the part, the part inside the
            // input, the stride inside the stage and the place inside the
            // output.
            unsafe {
                let into = self
                    .buffers
                    .output
                    .add(shape.place_of(rank) * part + range.start);
                let at = index * part + range.start;
                match (self.registered(rank), self.shm.places[rank]) {
                    (Some(input), _) => {
                        std::ptr::copy_nonoverlapping(input.add(at), into, range.len());
                        self.shm.counters.moved(range.len());
                    }
                    (None, Place::Address(address)) => {
                        let process = self.shm.processes[rank];
                        let from = address.wrapping_add(at as u64);
                        direct::read(process, from, into, range.len())
                            .map_err(|e| self.unreadable(rank, e))?;
                        self.shm.counters.moved(range.len());
                    }
                    (None, _) => {
                        let stage = self.stage(rank, self.shm.staged + number, total);
                        self.copy_staged(stage.add(index * stride), into, range.len());
                    }
                }
            }
        }
        Ok(())
    }

    /// The bytes of the range `range` of a part that `rank` has.
    fn present(&self, rank: usize, range: Range<usize>) -> Range<usize> {
        let behind = (self.shm.world - 1 - rank) * self.operation.count;
        let lacks = self.operation.tail_padding.saturating_sub(behind);
        let has = self.operation.count.saturating_sub(lacks) * self.elem_bytes;
        range.start.min(has)..range.end.min(has)
    }

    /// Why the memory of `rank` cannot be read any more.
    fn unreadable(&self, rank: usize, e: std::io::Error) -> Error {
        let process = self.shm.processes[rank];
        match e.raw_os_error() {
            Some(libc::ESRCH) => {
                Error::peer_lost(rank, format!("rank {rank} (process {process}) died"))
            }
            _ => Error::protocol(
                rank,
                format!("the data of rank {rank} (process {process}) cannot be read: {e}"),
            )
            .with_source(e),
        }
    }
}
