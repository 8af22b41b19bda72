//! One operation of one rank: its memory, what it has published, and the ranks it waits
//! for.

use std::time::{Duration, Instant};

use super::cell::{Cell, PAYLOAD_BYTES, Place};
use super::direct::{Mark, Sign};
use super::{SEGMENT_MIN_BYTES, SEGMENTS_MIN, Shm};
use crate::context::RunContext;
use crate::operation::{Buffers, Operation, PeerOperation};
use crate::plan::{Chunks, Spec, line_elems};
use crate::region::ALIGN_BYTES;
use crate::stall::{AFTER, Awaited};
use crate::transport::Mesh;
use crate::wait::Bell;
use crate::{DType, Error, Result};

/// How often a sleeper checks which ranks are still missing while the wait doubles.
const CHECKS_PER_WAIT: f64 = 8.0;
/// Shortest time between two such checks.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// An operation in progress.
pub(super) struct Run<'a, 'b> {
    pub(super) shm: &'a mut Shm,
    pub(super) mesh: &'a mut Mesh,
    pub(super) operation: &'b Operation,
    pub(super) buffers: Buffers,
    pub(super) elem_bytes: usize,
    pub(super) context: &'a mut RunContext<'b>,
    /// Which of the two cells is used.
    which: usize,
    /// Synchronisations done.
    step: usize,
}

impl<'a, 'b> Run<'a, 'b> {
    pub(super) fn begin(
        shm: &'a mut Shm,
        mesh: &'a mut Mesh,
        context: &'a mut RunContext<'b>,
        buffers: Buffers,
    ) -> Run<'a, 'b> {
        let which = (shm.operations % 2) as usize;
        shm.operations += 1;
        shm.places.fill(Place::Staged);
        Run {
            shm,
            mesh,
            operation: context.operation,
            buffers,
            elem_bytes: context.operation.dtype.map_or(1, DType::size_bytes),
            context,
            which,
            step: 0,
        }
    }

    /// Before the first operation: how large a stage is, and whether all can
    /// read each other's memory.
    pub(super) fn agree(&mut self) -> Result<()> {
        if self.shm.agreed {
            return Ok(());
        }
        let sign = self.shm.mark.as_ref().map(Mark::sign);
        self.cell(self.shm.me).show(sign.unwrap_or_default());
        // This publishes no data yet, but a faster rank may already do so.
        self.meet(Place::Staged)?;
        self.step = 0;
        let least = (0..self.shm.world)
            .map(|rank| self.cell(rank).wish())
            .min()
            .unwrap_or(0);
        // Every rank has a cache line in it, and no peer can make us write beyond it.
        let line = |bytes: usize| bytes / ALIGN_BYTES * ALIGN_BYTES;
        self.shm.stage_bytes = line(least)
            .max(ALIGN_BYTES * self.shm.world)
            .min(line(self.shm.segment.stage_capacity()));
        let others = (0..self.shm.world).filter(|&rank| rank != self.shm.me);
        let signs: Vec<Sign> = (0..self.shm.world)
            .map(|rank| self.cell(rank).shown())
            .collect();
        self.shm.reads = sign.is_some() && { others }.all(|rank| signs[rank].is_readable());
        self.shm.processes = signs.iter().map(|sign| sign.process).collect();
        // The signs are overwritten by the results of the tests.
        self.meet(Place::Staged)?;
        self.step = 0;
        self.shm.all_read = (0..self.shm.world).all(|rank| self.cell(rank).reads());
        self.shm.agreed = true;
        Ok(())
    }

    fn cell(&self, rank: usize) -> Cell<'_> {
        Cell::new(&self.shm.segment, rank, self.which)
    }

    fn bell(&self, rank: usize) -> Bell<'_> {
        self.shm.segment.bell(rank)
    }

    /// Writes this rank's operation and the place of its data.
    pub(super) fn describe(&self, place: Place) {
        let words = self.context.signature.words();
        let core = (!self.mesh.polls()).then(rustix::thread::sched_getcpu);
        let wish = (self.shm.stage_bytes, core.unwrap_or(0), self.shm.reads);
        self.cell(self.shm.me).describe(words, place, wish);
    }

    /// Publishes that everything up to here is done. True if all others are there.
    pub(super) fn publish(&mut self) -> bool {
        self.shm.phase += 1;
        let phase = self.shm.phase;
        self.cell(self.shm.me).publish(phase);
        // All ranks wait for the same: that all have reached this phase. Of several
        // that publish at the same time, the last in the order of sequential
        // consistency sees all others, so one of them wakes the sleepers.
        let all = self.all_there();
        if all {
            let others = (0..self.shm.world).filter(|&rank| rank != self.shm.me);
            // Not worth a write to a shared line while all are awake.
            if others.clone().any(|rank| self.bell(rank).is_asleep()) {
                self.cell(self.shm.me).was_last(phase);
                others.for_each(|rank| self.bell(rank).ring());
            }
        }
        all
    }

    fn is_there(&self, rank: usize) -> bool {
        self.cell(rank).phase() >= self.shm.phase
    }

    /// The ranks that have not reached this step.
    fn missing(&self) -> impl Iterator<Item = usize> {
        (0..self.shm.world).filter(|&rank| !self.is_there(rank))
    }

    fn all_there(&self) -> bool {
        self.missing().next().is_none()
    }

    /// Whether one of the missing ranks was last on our core; `None` when none is missing.
    fn awaits_own_core(&self) -> Option<bool> {
        let core = |rank| self.cell(rank).core();
        let is_here = |rank| core(rank) == core(self.shm.me);
        let mut missing = self.missing();
        Some(is_here(missing.next()?) || missing.any(is_here))
    }

    /// Publishes this rank's operation, waits until all have come, and compares.
    pub(super) fn enter(&mut self, place: Place) -> Result<()> {
        self.meet(place)?;
        self.learn_places()
    }

    /// [`Run::enter`] without reading the places of the others' data.
    fn meet(&mut self, place: Place) -> Result<()> {
        self.describe(place);
        self.step()?;
        self.compare()
    }

    /// Publishes that this rank has reached this step, and waits for the others.
    pub(super) fn step(&mut self) -> Result<()> {
        if !self.publish()
            && let Some(fresh) = self.mesh.budget().look(|| self.awaits_own_core())
        {
            self.wait(!fresh)?;
        }
        self.step += 1;
        Ok(())
    }

    /// `late` when the budget of the wait is spent already.
    fn wait(&mut self, late: bool) -> Result<()> {
        let began = Instant::now();
        for spins in u32::from(late).. {
            if self.all_there() {
                break;
            }
            if self.step == 0 {
                // A rank that is there with another operation will not join this one.
                self.compare()?;
            }
            let now = Instant::now();
            let others_busy = || self.context.flight.others_busy();
            if (self.context.deadline).has_passed(now, self.step, others_busy) {
                return Err(self.timeout());
            }
            if self.context.flight.notes_wait(spins) {
                self.note_missing();
            }
            self.report_stall((began, now));
            let (segment, which, phase) = (&self.shm.segment, self.which, self.shm.phase);
            let me = self.shm.me;
            // Only the last rank to come wakes us: without checks in between, the
            // recorder would also blame ranks that came long before.
            let pause = (now - began).div_f64(CHECKS_PER_WAIT).max(PAUSE_MIN);
            let until = self.context.deadline.at(self.step).min(now + pause);
            self.mesh.idle_for(spins, until, |rank| {
                rank != me && Cell::new(segment, rank, which).phase() < phase
            })?;
        }
        // No rank is woken before the last has come, so a rank that was missing when we
        // fell asleep may have come long before.
        let last = |rank: &usize| self.cell(*rank).last() == self.shm.phase;
        if let Some(rank) = (0..self.shm.world).find(last) {
            self.context.flight.last_to_come(rank);
        }
        self.context.flight.progress();
        Ok(())
    }

    /// Publishes the operation when a rank has been missing for a while: that rank may be waiting for a message of ours.
    fn report_stall(&mut self, times: (Instant, Instant)) {
        if times.1.duration_since(times.0) < AFTER {
            return;
        }
        let missing: Vec<usize> = self.missing().collect();
        let awaits = missing.into_iter().map(|peer| Awaited {
            peer,
            data: true,
            takes: None,
        });
        self.context.report_stall(awaits, times);
    }

    /// Records the awaited ranks in the flight recorder.
    fn note_missing(&mut self) {
        for rank in 0..self.shm.world {
            self.shm.want[rank].recv = !self.is_there(rank);
        }
        self.context.flight.waiting(&self.shm.want);
    }

    /// The error that names exactly the ranks that have not reached this step.
    fn timeout(&mut self) -> Error {
        self.note_missing();
        let missing = (0..self.shm.world).filter(|&rank| self.shm.want[rank].recv);
        let (flight, signature) = (&*self.context.flight, self.context.signature);
        let blame = |missing: &[usize]| flight.blame(missing, signature);
        self.context.deadline.missed(missing, self.step, blame)
    }

    /// Compares our operation with those of the ranks that are there.
    fn compare(&self) -> Result<()> {
        for rank in 0..self.shm.world {
            if rank == self.shm.me || !self.is_there(rank) {
                continue;
            }
            let theirs = PeerOperation(self.cell(rank).signature());
            self.context.signature.compare(self.shm.me, rank, &theirs)?;
        }
        Ok(())
    }

    /// Reads the places of the others' data and checks them, once, against the size of
    /// their data, which follows from the operation.
    fn learn_places(&mut self) -> Result<()> {
        for rank in 0..self.shm.world {
            let place = self.cell(rank).place();
            let bytes = self.exposed_bytes(rank);
            let at = |offset| self.shm.arenas.as_ref()?.at(rank, offset, bytes);
            let fits = match place {
                Place::Staged => true,
                Place::Arena(offset) => {
                    offset.is_multiple_of(ALIGN_BYTES as u64) && at(offset).is_some()
                }
                // The kernel will check it.
                Place::Address(_) => self.reads_memory(),
            };
            if !fits {
                let place = match place {
                    Place::Arena(offset) => format!("at {offset} of its shared memory"),
                    _ => "in memory of its own".to_owned(),
                };
                return Err(Error::protocol(
                    rank,
                    format!(
                        "rank {rank} cannot be trusted: it says that {bytes} bytes lie {place}"
                    ),
                ));
            }
            self.shm.places[rank] = place;
        }
        Ok(())
    }

    /// Whether ranks may read each other's data in place, registered or not, in this
    /// operation. The same on all ranks.
    pub(super) fn reads_memory(&self) -> bool {
        self.shm.all_read && self.operation.collective.moves()
    }

    /// Bytes of the buffer of `rank` that others access.
    fn exposed_bytes(&self, rank: usize) -> usize {
        let Some(method) = self.operation.method else {
            return 0;
        };
        let spec = Spec {
            method,
            world: self.shm.world,
            count: self.operation.count,
            elem_bytes: self.elem_bytes,
            root: self.operation.root,
            short_segments: false,
        };
        let elems = if self.operation.collective.in_place() {
            spec.output_elems(rank)
        } else {
            spec.input_elems(rank)
        };
        elems * self.elem_bytes
    }

    /// Bytes of one segment of `total` that all go through one stage.
    pub(super) fn segment_bytes(&self, total: usize) -> usize {
        let stage = self.shm.stage_bytes;
        if self.shm.is_oversubscribed() {
            return stage;
        }
        (total / SEGMENTS_MIN)
            .next_multiple_of(ALIGN_BYTES)
            .max(SEGMENT_MIN_BYTES.max(ALIGN_BYTES * self.shm.world))
            .min(stage)
    }

    /// How `count` elements are divided among the owners.
    pub(super) fn chunks(&self, count: usize) -> Chunks {
        Chunks::new(count, self.shm.world, line_elems(self.elem_bytes))
    }

    /// The place of the `bytes` at `start` in our arena, if others may access them
    /// there.
    pub(super) fn place_of(&self, start: *const u8, bytes: usize) -> Place {
        let offset = || {
            let arenas = self.shm.arenas.as_ref()?;
            let base = arenas.at(self.shm.me, 0, 0)?.addr();
            let offset = start.addr().checked_sub(base)? as u64;
            arenas.at(self.shm.me, offset, bytes).map(|_| offset)
        };
        match self.buffers.exposed.then(offset).flatten() {
            Some(offset) => Place::Arena(offset),
            None => Place::Staged,
        }
    }

    /// The data of `rank`, if it is registered.
    pub(super) fn registered(&self, rank: usize) -> Option<*mut u8> {
        let Place::Arena(offset) = self.shm.places[rank] else {
            return None;
        };
        let arenas = self.shm.arenas.as_ref()?;
        arenas.at(rank, offset, self.exposed_bytes(rank))
    }

    /// Whether the data of all ranks is registered.
    pub(super) fn all_registered(&self) -> bool {
        (0..self.shm.world).all(|rank| self.registered(rank).is_some())
    }

    /// Stage `index` of `rank`, or for tiny data its cell.
    pub(super) fn stage(&self, rank: usize, index: usize, total_bytes: usize) -> *mut u8 {
        if total_bytes <= PAYLOAD_BYTES {
            self.cell(rank).payload()
        } else {
            self.shm.segment.stage(rank, index % 2)
        }
    }

    /// Copies into or out of memory that others access.
    ///
    /// # Safety
    ///
    /// `bytes` at `from` are readable, as many at `into` writable, disjoint, and no
    /// other code touches them meanwhile.
    pub(super) unsafe fn copy_staged(&self, from: *const u8, into: *mut u8, bytes: usize) {
        if bytes > 0 {
            // SAFETY: handed on from the caller.
            unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
            self.shm.counters.staged(bytes);
        }
    }
}
