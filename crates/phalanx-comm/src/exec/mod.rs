//! The executor: runs one rank's plan over its mesh.
//!
//! All transfers that may run progress at the same time: the executor loops over the
//! lanes, moves what each link takes or gives without blocking, runs the local steps
//! that are ready, and sleeps in the mesh when nothing could move. Rounds overlap as
//! far as the plan's memory allows (`plan::order`), so that the wire is busy while a
//! rank folds. One deadline covers the whole operation.

mod cache;
mod flow;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use phalanx_wire::frame::MAX_FRAME_BYTES;

pub(crate) use self::transfer::{Context as FrameContext, Frame, Sender};

use self::cache::{PlanCache, Prepared};
use self::flow::{Flow, Framing, LaneFrame, Schedule};
use self::transfer::Context;
use crate::context::RunContext;
use crate::deadline::{echo, missed};
use crate::memory::Scratch;
use crate::operation::{Buffers, Operation, Signature};
use crate::plan::order::Step;
use crate::plan::{Buf, Local, Part, RankPlan, Spec};
use crate::recorder::Flight;
use crate::stall::Awaited;
use crate::transport::{AbortHandle, Interest, Mesh};
use crate::{DType, Error, Result};
use phalanx_fold::Source;

/// Iterations with progress after which a rank checks the clock and whether the group
/// has failed, although nothing was idle.
const LOOPS_PER_CLOCK: u32 = 64;

/// Base addresses of a plan's buffers.
#[derive(Clone, Copy)]
struct Memory {
    input: *const u8,
    output: *mut u8,
    scratch: *mut u8,
    elem_bytes: usize,
}

impl Memory {
    /// Where a part begins, for reading.
    ///
    /// # Safety
    ///
    /// The part lies within its buffer.
    unsafe fn read_at(&self, part: &Part) -> *const u8 {
        let base = match part.buf {
            Buf::Input => self.input,
            Buf::Output => self.output.cast_const(),
            Buf::Scratch => self.scratch.cast_const(),
        };
        // SAFETY: within the buffer, says the caller. An empty part may have
        // a null base, then the offset is zero.
        unsafe { base.add(part.start * self.elem_bytes) }
    }

    /// Where a part begins, for writing.
    ///
    /// # Safety
    ///
    /// The part lies within its buffer, which is not the input.
    unsafe fn write_at(&self, part: &Part) -> *mut u8 {
        let base = match part.buf {
            Buf::Input | Buf::Output => self.output,
            Buf::Scratch => self.scratch,
        };
        // SAFETY: as above.
        unsafe { base.add(part.start * self.elem_bytes) }
    }

    fn bytes(&self, part: &Part) -> usize {
        part.len * self.elem_bytes
    }
}

/// Runs plans over the links of one rank in one group, one after another.
pub(crate) struct Executor {
    generation: u32,
    group: u32,
    rank: usize,
    world: usize,
    segment_bytes: usize,
    abort: AbortHandle,
    plans: PlanCache,
    scratch: Scratch,
    flow: Flow,
    /// By rank.
    want: Vec<Interest>,
    sources: Sources,
    bytes_sent: Arc<[AtomicU64]>,
}

/// What one plan is run with.
struct Links<'a, 'b> {
    mesh: &'a mut Mesh,
    context: RunContext<'b>,
}

/// Room for the addresses of a fold's sources, kept to allocate it once.
struct Sources(Vec<Source>);

// SAFETY: addresses are in it only while a fold runs, which borrows the executor, so it
// cannot move to another thread meanwhile. What a panic leaves behind is cleared before
// it is used.
unsafe impl Send for Sources {}

impl Executor {
    pub(crate) fn new(mesh: &Mesh, generation: u32, group: u32, segment_bytes: usize) -> Self {
        let world = mesh.world();
        Executor {
            generation,
            group,
            rank: mesh.rank(),
            world,
            segment_bytes: segment_bytes.clamp(1, MAX_FRAME_BYTES as usize),
            abort: mesh.abort_handle(),
            plans: PlanCache::new(mesh.rank(), mesh.hosts().clone()),
            scratch: Scratch::new(),
            flow: Flow::default(),
            want: vec![Interest::default(); world],
            sources: Sources(Vec::with_capacity(world)),
            bytes_sent: (0..world).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Payload bytes sent to each rank so far, readable from any thread.
    pub(crate) fn bytes_sent(&self) -> Arc<[AtomicU64]> {
        Arc::clone(&self.bytes_sent)
    }

    /// Whether to check the clock after this number of iterations with progress. If so,
    /// this checks whether the group has failed. Idle iterations check both by
    /// themselves.
    fn check_clock(&self, loops: u32) -> Result<bool> {
        if !loops.is_multiple_of(LOOPS_PER_CLOCK) {
            return Ok(false);
        }
        match self.abort.poisoned() {
            Some(poison) => Err(poison.to_error()),
            None => Ok(true),
        }
    }

    /// Runs the operation's own plan, or that of its method.
    ///
    /// # Safety
    ///
    /// As [`Native::run`](crate::backend::Native::run).
    pub(crate) unsafe fn run(
        &mut self,
        mesh: &mut Mesh,
        context: RunContext<'_>,
        buffers: Buffers,
    ) -> Result<()> {
        let RunContext {
            operation,
            signature,
            ..
        } = context;
        let elem_bytes = operation.dtype.map_or(1, DType::size_bytes);
        let cut = Framing {
            segment_bytes: self.segment_bytes,
            elem_bytes,
        };
        let prepare = |plan: &RankPlan| Schedule::new(plan, cut);
        let prepared = match (&operation.plan, operation.method) {
            (Some(plan), _) => Arc::new(Prepared::new((**plan).clone(), signature, prepare)?),
            (None, Some(method)) => self.plans.get(
                &Spec {
                    method,
                    world: self.world,
                    count: operation.count,
                    elem_bytes,
                    root: operation.root,
                    short_segments: operation.short_segments,
                },
                prepare,
            )?,
            (None, None) => return Err(Error::internal("an operation without a plan")),
        };
        let (scratch, _) = self
            .scratch
            .reserve(prepared.plan.scratch_elems * elem_bytes);
        let memory = Memory {
            input: buffers.input,
            output: buffers.output,
            scratch,
            elem_bytes,
        };
        let links = Links { mesh, context };
        // SAFETY: the plan passed `check_local`: its parts lie within the
        // buffers the caller vouches for and the scratch just reserved.
        unsafe { self.carry_out(&prepared, &memory, links) }
    }

    /// What all frames of an operation have in common.
    fn frames<'a>(&self, signature: &'a Signature) -> Context<'a> {
        Context {
            signature,
            generation: self.generation,
            group: self.group,
            rank: self.rank,
        }
    }

    /// Runs a prepared plan to its end.
    ///
    /// # Safety
    ///
    /// The plan passed `check_local`, and its buffers are those of `memory`.
    unsafe fn carry_out(
        &mut self,
        prepared: &Prepared,
        memory: &Memory,
        links: Links<'_, '_>,
    ) -> Result<()> {
        let Links { mesh, mut context } = links;
        let (operation, deadline) = (context.operation, context.deadline);
        let frames = self.frames(context.signature);
        let Prepared { plan, schedule } = prepared;
        let order = &schedule.order;
        self.flow.begin(schedule);
        let (mut spins, mut loops) = (0u32, 0u32);
        let mut still_since = None;
        while !self.flow.is_done() {
            // SAFETY: handed on from the caller.
            let mut moved = unsafe { self.move_frames(mesh, schedule, memory, &frames)? };
            // One at a time: more frames may have arrived meanwhile.
            if let Some(at) = self.flow.next_local() {
                if let (round, Step::Local(i)) = order.steps[at as usize] {
                    let step = &plan.rounds[round as usize].local[i];
                    // SAFETY: everything that writes what it reads, or touches
                    // what it writes, is complete or waits for it.
                    unsafe { self.compute(step, memory, operation, context.flight) };
                }
                self.flow.complete(order, at);
                moved = true;
            }
            if moved {
                context.flight.progress();
                spins = 0;
                still_since = None;
                loops += 1;
                if self.check_clock(loops)?
                    && !self.flow.is_done()
                    && deadline.has_passed(Instant::now(), self.flow.base, || {
                        context.flight.others_busy()
                    })
                {
                    return Err(self.timeout(schedule, &mut context));
                }
            } else {
                // Only after an iteration without progress: a rank that was stopped
                // beyond its deadline must not blame peers whose data has arrived.
                let now = Instant::now();
                if deadline.has_passed(now, self.flow.base, || context.flight.others_busy()) {
                    return Err(self.timeout(schedule, &mut context));
                }
                let until = deadline.at(self.flow.base);
                if context.flight.notes_wait(spins) {
                    // Only the first unfinished round: ranks awaited for later ones may
                    // themselves be waiting.
                    let base = self.flow.base;
                    self.note_wanted(schedule, |_, piece| piece.frame.step as usize == base);
                    context.flight.waiting(&self.want);
                }
                self.note_wanted(schedule, |flow, piece| flow.may_run(piece));
                let since = *still_since.get_or_insert(now);
                context.report_stall(awaited(&self.want), (since, now));
                if !self.want.iter().any(|want| want.any()) {
                    return Err(Error::internal("the plan waits for itself"));
                }
                mesh.idle(&self.want, spins, until)?;
                spins = spins.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Serves every lane once, at most one frame each; true if a byte moved.
    ///
    /// # Safety
    ///
    /// As [`Executor::carry_out`].
    unsafe fn move_frames(
        &mut self,
        mesh: &mut Mesh,
        schedule: &Schedule,
        memory: &Memory,
        context: &Context<'_>,
    ) -> Result<bool> {
        let mut moved = false;
        for (i, lane) in schedule.tx.iter().enumerate() {
            let Some(piece) = lane.pieces.get(self.flow.tx[i].0) else {
                continue;
            };
            if !self.flow.may_run(piece) {
                continue;
            }
            let length = piece.frame.length as usize;
            // SAFETY: within the part, which is readable and initialised, and
            // whatever would overwrite it waits for this transfer. The slice
            // lives for one call, and no `&mut` to these bytes is made
            // meanwhile.
            let payload = unsafe {
                let start = memory.read_at(&piece.part).add(piece.frame.offset as usize);
                std::slice::from_raw_parts(non_null(start), length)
            };
            let (next, sender) = &mut self.flow.tx[i];
            let link = mesh.link(lane.peer);
            let progress = sender.step(link, &piece.frame, payload, context)?;
            moved |= progress.moved;
            if progress.done {
                *next += 1;
                self.bytes_sent[lane.peer].fetch_add(length as u64, Ordering::Relaxed);
                self.flow.complete(&schedule.order, piece.step);
            }
        }
        for (i, lane) in schedule.rx.iter().enumerate() {
            let Some(piece) = lane.pieces.get(self.flow.rx[i].0) else {
                continue;
            };
            if !self.flow.may_run(piece) {
                continue;
            }
            // SAFETY: within the part, which is writable, and everything else
            // that touches it is complete or waits for this transfer, so this
            // is the only reference to these bytes.
            let place = unsafe {
                let start = memory
                    .write_at(&piece.part)
                    .add(piece.frame.offset as usize);
                std::slice::from_raw_parts_mut(
                    non_null(start).cast_mut(),
                    piece.frame.length as usize,
                )
            };
            let (next, receiver) = &mut self.flow.rx[i];
            let link = mesh.link(lane.peer);
            let progress = receiver.step(link, lane.peer, &piece.frame, place, context)?;
            moved |= progress.moved;
            if progress.done {
                *next += 1;
                self.flow.complete(&schedule.order, piece.step);
            }
        }
        Ok(moved)
    }

    /// Writes to `want` the lanes whose next piece is `wanted`.
    fn note_wanted(&mut self, schedule: &Schedule, wanted: impl Fn(&Flow, &LaneFrame) -> bool) {
        self.want.fill(Interest::default());
        for (lane, (next, _)) in schedule.tx.iter().zip(&self.flow.tx) {
            let piece = lane.pieces.get(*next);
            self.want[lane.peer].send = piece.is_some_and(|piece| wanted(&self.flow, piece));
        }
        for (lane, (next, receiver)) in schedule.rx.iter().zip(&self.flow.rx) {
            let Some(piece) = lane.pieces.get(*next) else {
                continue;
            };
            let want = &mut self.want[lane.peer];
            want.recv = wanted(&self.flow, piece);
            want.coming_bytes = receiver.coming_bytes(&piece.frame);
        }
    }

    /// Names exactly the ranks whose transfers of the first unfinished round
    /// are unfinished. Blames a single rank only in the very first round: later it may
    /// itself be waiting for another.
    fn timeout(&mut self, schedule: &Schedule, context: &mut RunContext<'_>) -> Error {
        let base = self.flow.base;
        self.note_wanted(schedule, |_, piece| piece.frame.step as usize == base);
        context.flight.waiting(&self.want);
        let (late, only) = self.late(context, echo(base));
        missed(late, only, base)
    }

    /// The message with the awaited ranks and what is awaited from each; and the rank, if there is only one.
    fn late(&self, context: &RunContext<'_>, echo: &str) -> (String, Option<usize>) {
        let wanted = self.want.iter().enumerate();
        let missing: Vec<(usize, &str)> = wanted
            .filter_map(|(peer, want)| match (want.send, want.recv) {
                (false, false) => None,
                (true, false) => Some((peer, "to take data")),
                (_, true) => Some((peer, "to send data")),
            })
            .collect();
        let ranks: Vec<usize> = missing.iter().map(|(peer, _)| *peer).collect();
        let blame = context.flight.blame(&ranks, context.signature);
        context.deadline.late(&missing, echo, blame)
    }

    /// Runs a local step.
    ///
    /// # Safety
    ///
    /// Its parts lie within `memory`; no other code writes them or, where the step
    /// writes, reads them; folds overlap their sources exactly or not at all, copies
    /// not at all.
    unsafe fn compute(
        &mut self,
        step: &Local,
        memory: &Memory,
        operation: &Operation,
        flight: &mut Flight,
    ) {
        match step {
            Local::Copy { from, into } => {
                // SAFETY: both lie within their buffers and are disjoint.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        memory.read_at(from),
                        memory.write_at(into),
                        memory.bytes(into),
                    );
                }
            }
            Local::Fold {
                into,
                sources,
                finish,
            } => {
                let (Some(dtype), Some(op)) = (operation.dtype, operation.op) else {
                    // Plans that fold belong to collectives that reduce,
                    // which always have both.
                    unreachable!("a fold in {}", operation.collective.name())
                };
                let began = flight.ticks();
                let addresses = &mut self.sources.0;
                addresses.clear();
                // SAFETY: the parts lie within their buffers.
                addresses.extend(sources.iter().map(|part| unsafe { memory.read_at(part) }));
                // SAFETY: lengths are equal and within the buffers, the
                // destination equals a source or is disjoint from it, no
                // transfer touches them now, the op supports the type (checked
                // when the operation was asked for).
                unsafe {
                    phalanx_fold::fold(
                        dtype,
                        op,
                        memory.write_at(into),
                        addresses,
                        into.len,
                        finish.then_some(self.world),
                    );
                }
                addresses.clear();
                flight.folded(began);
            }
        }
    }
}

/// The ranks that `want` waits for in one operation.
fn awaited(want: &[Interest]) -> impl Iterator<Item = Awaited> {
    let wanted = want.iter().enumerate().filter(|(_, want)| want.any());
    wanted.map(|(peer, want)| Awaited {
        peer,
        data: want.recv,
        takes: None,
    })
}

/// Slices of zero length still need a non-null address.
fn non_null(address: *const u8) -> *const u8 {
    if address.is_null() {
        std::ptr::NonNull::<u8>::dangling().as_ptr().cast_const()
    } else {
        address
    }
}
