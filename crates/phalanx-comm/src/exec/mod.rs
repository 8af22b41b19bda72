//! The executor: runs one rank's plan over its mesh.
//!
//! All transfers that may run progress at the same time: the executor goes
//! round the lanes, moves what each link takes or gives without blocking, runs
//! the local steps that have come free, and sleeps in the mesh when nothing
//! could move. Rounds overlap as far as the plan's memory allows
//! (`plan::order`), so that the wire is busy while a rank folds. One deadline
//! covers the whole operation.
//!
//! On any failure the group is poisoned before the error is returned, so that
//! the other ranks leave too, with the first cause; afterwards every operation
//! is refused.

mod cache;
mod elsewhere;
mod flow;
mod messages;
mod signature;
mod stall;
mod transfer;

use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use phalanx_wire::frame::MAX_FRAME_BYTES;

pub(crate) use self::messages::{Data, Message};

use self::cache::{PlanCache, Prepared};
use self::elsewhere::{Elsewhere, LOOK};
use self::flow::{Cut, Flow, Piece, Schedule};
pub(crate) use self::signature::{Signature, Told, desync};
pub(crate) use self::stall::Board;
#[cfg(any(test, fuzzing))]
pub(crate) use self::stall::fuzzing;
use self::stall::{Awaited, Begun, is_circle_with};
use self::transfer::Context;
use crate::host::{Arena, Buffers, Counters, Host, With};
use crate::kernel::{self, Source};
use crate::memory::Scratch;
use crate::plan::order::Step;
use crate::plan::{Buf, Collective, Local, Method, Part, RankPlan, Spec};
use crate::recorder::Flight;
use crate::transport::{Interest, Mesh, Poison};
use crate::wait::deadline_in;
use crate::{DType, Error, ErrorKind, ReduceOp, Result};

/// Turns with progress after which a rank looks at the clock, and whether the
/// group has failed, although nothing was idle.
const TURNS_PER_CLOCK: u32 = 64;

/// Limits of time and size, the same for all operations of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For the first operation: ranks may have started and compiled unevenly.
    pub(crate) first_op_timeout: Duration,
    pub(crate) op_timeout: Duration,
    pub(crate) segment_bytes: usize,
    pub(crate) single_copy_min_bytes: Option<usize>,
}

/// One operation as the caller asked for it, but for its memory.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) collective: Collective,
    pub(crate) method: Method,
    /// Whether the method may be replaced by shared memory: nobody asked for
    /// this one.
    pub(crate) automatic: bool,
    pub(crate) dtype: Option<DType>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root: usize,
    pub(crate) target: usize,
    pub(crate) count: usize,
    /// Elements that the last parts lack, where the parts that are gathered do not all have `count`
    /// (in shared memory only).
    pub(crate) lacking: usize,
    /// How the elements are made up, where that is not by the world size
    /// alone; see [`Signature::lengths`].
    pub(crate) lengths: u16,
    /// The plan, where the method does not say everything.
    pub(crate) plan: Option<Arc<RankPlan>>,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) timeout: Option<Duration>,
}

/// Is told of each piece of a result: its first element, and how many it has.
pub(crate) type Visit<'a> = dyn FnMut(usize, usize) + 'a;

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

/// Runs the operations of one rank in one group, one after another.
pub(crate) struct Executor {
    mesh: Mesh,
    flight: Flight,
    epoch: u32,
    group: u32,
    limits: Limits,
    /// Of collectives; point-to-point messages are counted per peer, because
    /// only two ranks take part in each.
    seq: u64,
    sent_to: Vec<u64>,
    received_from: Vec<u64>,
    operations: u64,
    /// Present when all ranks share this host's memory.
    host: Option<Host>,
    failed: Option<Error>,
    plans: PlanCache,
    scratch: Scratch,
    flow: Flow,
    /// Per lane of the mesh.
    want: Vec<Interest>,
    sources: Sources,
    bytes_sent: Arc<[AtomicU64]>,
    /// Absent in a group of one.
    board: Option<Board>,
}

/// Room for the addresses of a fold's sources, kept to allocate it once.
struct Sources(Vec<Source>);

// SAFETY: addresses are in it only while a fold runs, which borrows the
// executor, so that it cannot go to another thread meanwhile. What a panic
// leaves behind is cleared before it is used.
unsafe impl Send for Sources {}

impl Executor {
    pub(crate) fn new(mesh: Mesh, flight: Flight, epoch: u32, group: u32, limits: Limits) -> Self {
        let world = mesh.world();
        let host = Host::new(&mesh, &limits);
        let limits = Limits {
            segment_bytes: limits.segment_bytes.clamp(1, MAX_FRAME_BYTES as usize),
            ..limits
        };
        Executor {
            flight,
            epoch,
            group,
            limits,
            seq: 0,
            sent_to: vec![0; world],
            received_from: vec![0; world],
            operations: 0,
            host,
            failed: None,
            plans: PlanCache::new(mesh.rank(), mesh.hosts().clone()),
            scratch: Scratch::new(),
            flow: Flow::default(),
            want: vec![Interest::default(); mesh.lanes()],
            sources: Sources(Vec::with_capacity(world)),
            bytes_sent: (0..world).map(|_| AtomicU64::new(0)).collect(),
            board: None,
            mesh,
        }
    }

    /// Looks at `board` for ranks in other operations when nothing moves.
    pub(crate) fn compare_on(&mut self, board: Board) {
        self.board = Some(board);
    }

    /// Payload bytes sent to each rank so far, readable from any thread.
    pub(crate) fn bytes_sent(&self) -> Arc<[AtomicU64]> {
        Arc::clone(&self.bytes_sent)
    }

    /// Says which thread runs the next operations: the communication thread
    /// (`beside` compute) or a caller's.
    pub(crate) fn run_beside(&mut self, beside: bool) {
        self.mesh.run_beside(beside);
    }

    /// The next operation was noted in the flight recorder when it was issued.
    pub(crate) fn adopt(&mut self, ticket: u64) {
        self.flight.adopt(ticket);
    }

    /// Where this rank's registered buckets come from.
    pub(crate) fn arena(&self) -> Option<Arc<Arena>> {
        self.host.as_ref().and_then(Host::arena)
    }

    /// What collectives in shared memory move, readable from any thread.
    pub(crate) fn counters(&self) -> Arc<Counters> {
        self.host.as_ref().map(Host::counters).unwrap_or_default()
    }

    /// Counts bytes, and the first operation, from here on. Sequence numbers
    /// go on: others may still be one behind.
    pub(crate) fn forget_past(&mut self) {
        self.operations = 0;
        for sent in &*self.bytes_sent {
            sent.store(0, Ordering::Relaxed);
        }
    }

    /// Runs one operation to its end.
    ///
    /// # Safety
    ///
    /// `operation.op` supports the type. Input and output are valid, for
    /// reading and for writing, for as many elements of `dtype` as [`Spec::input_elems`] and
    /// [`Spec::output_elems`] (or the operation's own plan) say, aligned, initialised and disjoint; and
    /// nobody else writes the input or touches the output until this returns.
    /// When they are exposed, nobody refers to them until this returns, and
    /// after an error nobody does ever again: a peer that does not know yet
    /// may still be at them.
    pub(crate) unsafe fn run(&mut self, operation: &Operation, buffers: Buffers) -> Result<()> {
        // SAFETY: handed on from the caller.
        unsafe { self.run_visited(operation, buffers, None) }
    }

    /// [`Executor::run`] that shows `visit` the results of a reduce-scatter piece by piece, as they come, where it
    /// is carried out in shared memory and nothing has to be staged: each piece is left at the output's start, and
    /// written over by the next. Where it is not called, the output has all of them.
    ///
    /// # Safety
    ///
    /// As [`Executor::run`]; `visit` touches neither input nor anything of the output but the piece.
    pub(crate) unsafe fn run_visited(
        &mut self,
        operation: &Operation,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        let rank = self.mesh.rank();
        let in_memory = self.is_in_memory(operation);
        let signature = Signature {
            collective: operation.collective,
            method: operation.method,
            dtype: operation.dtype,
            op: operation.op,
            root: operation.root,
            count: operation.count,
            lengths: operation.lengths,
            seq: self.next_seq(operation),
            in_memory,
        };
        let named = |error: Error| {
            let mut name = signature.to_string();
            if let Some(label) = &operation.label {
                let _ = write!(name, " of {label}");
            }
            error.with_rank(rank).with_operation(name)
        };
        if let Some(error) = self.refusal() {
            self.flight.refuse();
            return Err(named(self.heard(error)));
        }
        self.flight.begin(operation, &signature);
        // SAFETY: handed on from the caller.
        let result = unsafe { self.run_checked(operation, &signature, buffers, visit) };
        self.flight.end(&signature, result.is_ok());
        self.operations += 1;
        result.map_err(|error| {
            let cause = format!("{} in {signature}", error.message());
            self.fail(error, cause, named)
        })
    }

    /// Whether an operation is carried out in shared memory; the same on all ranks.
    pub(crate) fn is_in_memory(&self, operation: &Operation) -> bool {
        self.host.as_ref().is_some_and(|host| host.takes(operation))
    }

    /// Ends the group over an error: the other ranks hear `cause`, the flight
    /// recorder what this rank reports. That is returned, and is the first
    /// cause where another rank was earlier.
    pub(crate) fn fail(
        &mut self,
        error: Error,
        cause: String,
        named: impl FnOnce(Error) -> Error,
    ) -> Error {
        let error = named(self.poison_over(error, cause));
        self.failed = Some(error.clone());
        self.flight.failed(&error);
        error
    }

    /// The group has ended while this rank was in none of its operations: for the
    /// flight recorder that is when it failed here.
    fn heard(&mut self, error: Error) -> Error {
        if self.failed.is_none() {
            self.flight.failed(&error);
            self.failed = Some(error.clone());
        }
        error
    }

    /// Poisons the group over an error; returns what to report.
    fn poison_over(&self, error: Error, cause: String) -> Error {
        // Poison first, then look: of several ranks that fail at the same
        // time one is the first, and all others report its failure.
        let cause = match error.kind() {
            // Names both operations already, and both must fit.
            ErrorKind::Desync => error.message().to_owned(),
            _ => cause,
        };
        let first = self.mesh.poison(&Poison::new(self.mesh.rank(), cause));
        let found = self.board.as_ref().is_some_and(Board::found);
        match self.mesh.abort_handle().poisoned() {
            Some(p)
                if found && p.origin_rank == self.mesh.rank()
                    || is_circle_with(&p.cause, self.mesh.rank()) =>
            {
                Error::new(ErrorKind::Desync, p.cause).with_source(error)
            }
            Some(p) if !first => Error::aborted(p.origin_rank, p.cause).with_source(error),
            _ => error,
        }
    }

    /// How long the next operation may take.
    fn limit(&self, asked: Option<Duration>) -> Duration {
        asked.unwrap_or(if self.operations == 0 {
            self.limits.first_op_timeout
        } else {
            self.limits.op_timeout
        })
    }

    /// Looks whether the group is poisoned or a peer is gone; for operations
    /// that wait for something else than their links.
    pub(crate) fn look(&mut self) -> Result<()> {
        if let Some(error) = self.refusal() {
            return Err(error.with_rank(self.mesh.rank()));
        }
        self.want.fill(Interest::default());
        let looked = self.mesh.idle(&self.want, 1, Instant::now());
        looked.map_err(|error| {
            let (cause, rank) = (error.message().to_owned(), self.mesh.rank());
            self.fail(error, cause, |error| error.with_rank(rank))
        })
    }

    /// Whether so many turns in which something moved are enough to look up: at
    /// the clock, and (here) whether the group has failed meanwhile. Only idle
    /// turns look by themselves.
    fn looks_up(&self, turns: u32) -> Result<bool> {
        if !turns.is_multiple_of(TURNS_PER_CLOCK) {
            return Ok(false);
        }
        match self.mesh.abort_handle().poisoned() {
            Some(poison) => Err(poison.to_error()),
            None => Ok(true),
        }
    }

    /// Why this group takes no more operations, if it does not.
    fn refusal(&self) -> Option<Error> {
        if let Some(p) = self.mesh.abort_handle().poisoned() {
            return Some(Error::aborted(p.origin_rank, p.cause));
        }
        let first = self.failed.as_ref()?;
        Some(Error::aborted(self.mesh.rank(), first.message()).with_source(first.clone()))
    }

    fn next_seq(&mut self, operation: &Operation) -> u64 {
        let counter = if operation.collective != Collective::SendRecv {
            &mut self.seq
        } else if operation.root == self.mesh.rank() {
            &mut self.sent_to[operation.target]
        } else {
            &mut self.received_from[operation.root]
        };
        let seq = *counter;
        *counter += 1;
        seq
    }

    /// # Safety
    ///
    /// As [`Executor::run`].
    unsafe fn run_checked(
        &mut self,
        operation: &Operation,
        signature: &Signature,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        let limit = self.limit(operation.timeout);
        self.flight.set_limit(limit);
        let deadline = Deadline::in_(limit);
        if let Some(host) = &mut self.host {
            let with = With {
                mesh: &mut self.mesh,
                flight: &mut self.flight,
                operation,
                signature,
                deadline: &deadline,
            };
            if signature.in_memory {
                // SAFETY: handed on from the caller.
                return unsafe { host.run(with, buffers, visit) };
            }
            if operation.collective != Collective::SendRecv {
                host.announce(with)?;
            }
        }
        let elem_bytes = operation.dtype.map_or(1, DType::size_bytes);
        let cut = Cut {
            segment_bytes: self.limits.segment_bytes,
            elem_bytes,
        };
        let mesh = &self.mesh;
        let prepare = |plan: &RankPlan| Schedule::new(plan, cut, |peer| mesh.streams(peer));
        let prepared = match &operation.plan {
            Some(plan) => Arc::new(Prepared::new((**plan).clone(), signature, prepare)?),
            None => self.plans.get(
                &Spec {
                    method: operation.method,
                    world: mesh.world(),
                    count: operation.count,
                    elem_bytes,
                    root: operation.root,
                    target: operation.target,
                },
                prepare,
            )?,
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
        let context = Context {
            signature,
            epoch: self.epoch,
            group: self.group,
            rank: self.mesh.rank(),
        };
        // SAFETY: the plan passed `check_local`: its parts lie within the
        // buffers the caller vouches for and the scratch just reserved.
        unsafe { self.carry_out(&prepared, &memory, operation, &context, &deadline) }
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
        operation: &Operation,
        context: &Context<'_>,
        deadline: &Deadline,
    ) -> Result<()> {
        let Prepared { plan, schedule } = prepared;
        let order = &schedule.order;
        self.flow.begin(schedule);
        let (mut spins, mut turns) = (0u32, 0u32);
        let mut still_since = None;
        let mut elsewhere = Elsewhere::default();
        while !self.flow.is_done() {
            // SAFETY: handed on from the caller.
            let mut moved = unsafe { self.move_frames(schedule, memory, context)? };
            // One at a time: the next frames may have come meanwhile.
            if let Some(at) = self.flow.next_local() {
                if let (round, Step::Local(i)) = order.steps[at as usize] {
                    let step = &plan.rounds[round as usize].local[i];
                    // SAFETY: everything that writes what it reads, or touches
                    // what it writes, is complete or waits for it.
                    unsafe { self.compute(step, memory, operation, plan.world) };
                }
                self.flow.complete(order, at);
                moved = true;
            }
            if moved {
                self.flight.progress();
                spins = 0;
                still_since = None;
                elsewhere.forget();
                turns += 1;
                if self.looks_up(turns)?
                    && !self.flow.is_done()
                    && deadline.has_passed(Instant::now(), self.flow.base, &self.flight)
                {
                    return Err(self.timeout(schedule, deadline, context));
                }
            } else {
                // Only after a fruitless turn: a rank that was stopped beyond
                // its deadline must not blame peers whose data lies there.
                let now = Instant::now();
                if deadline.has_passed(now, self.flow.base, &self.flight) {
                    return Err(self.timeout(schedule, deadline, context));
                }
                let until = deadline.at(self.flow.base);
                if self.flight.notes_wait(spins) {
                    // Of later rounds ranks may be waited for that wait themselves.
                    let base = self.flow.base;
                    self.note_wanted(schedule, |_, piece| piece.frame.step as usize == base);
                    self.flight.waiting(&self.want, self.mesh.world());
                }
                self.note_wanted(schedule, |flow, piece| flow.may_run(piece));
                let since = *still_since.get_or_insert(now);
                let want = std::mem::take(&mut self.want);
                let awaits = awaited(&want, self.mesh.world(), context);
                self.compare_if_stalled(context.signature, awaits, (since, now));
                self.want = want;
                if !self.want.iter().any(|want| want.any()) {
                    return Err(Error::internal("the plan waits for itself"));
                }
                let mut until = until;
                if operation.collective == Collective::SendRecv {
                    let me = (context.rank, context.signature);
                    if elsewhere.look(self.host.as_ref(), &self.want, me)? {
                        continue;
                    }
                    until = until.min(now + LOOK);
                }
                self.mesh.idle(&self.want, spins, until)?;
                spins = spins.saturating_add(1);
            }
        }
        Ok(())
    }

    /// Nothing has moved since the first of the `times`, and `awaits` says for
    /// whom we wait.
    fn compare_if_stalled(
        &mut self,
        signature: &Signature,
        awaits: impl Iterator<Item = Awaited>,
        times: (Instant, Instant),
    ) {
        let (epoch, group) = (self.epoch, self.group);
        let Some(board) = &mut self.board else {
            return;
        };
        let begun = Begun {
            collectives: self.seq,
            sent: &self.sent_to,
            received: &self.received_from,
        };
        board.stalled(
            signature,
            || signature.header(epoch, group),
            &begun,
            awaits,
            times,
        );
    }

    /// Goes round the lanes once, at most a frame each; true if a byte moved.
    ///
    /// # Safety
    ///
    /// As [`Executor::carry_out`].
    unsafe fn move_frames(
        &mut self,
        schedule: &Schedule,
        memory: &Memory,
        context: &Context<'_>,
    ) -> Result<bool> {
        let mut moved = false;
        let world = self.mesh.world();
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
            let link = self.mesh.link(lane.stream * world + lane.peer);
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
            let link = self.mesh.link(lane.stream * world + lane.peer);
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
    fn note_wanted(&mut self, schedule: &Schedule, wanted: impl Fn(&Flow, &Piece) -> bool) {
        let world = self.mesh.world();
        self.want.fill(Interest::default());
        for (lane, (next, _)) in schedule.tx.iter().zip(&self.flow.tx) {
            let piece = lane.pieces.get(*next);
            self.want[lane.stream * world + lane.peer].send =
                piece.is_some_and(|piece| wanted(&self.flow, piece));
        }
        for (lane, (next, receiver)) in schedule.rx.iter().zip(&self.flow.rx) {
            let Some(piece) = lane.pieces.get(*next) else {
                continue;
            };
            let want = &mut self.want[lane.stream * world + lane.peer];
            want.recv = wanted(&self.flow, piece);
            want.coming_bytes = receiver.coming_bytes(&piece.frame);
        }
    }

    /// Names exactly the ranks whose transfers of the first unfinished round
    /// are unfinished. Blames one only in the very first round: later it may be
    /// waiting for somebody else.
    fn timeout(
        &mut self,
        schedule: &Schedule,
        deadline: &Deadline,
        context: &Context<'_>,
    ) -> Error {
        let base = self.flow.base;
        self.note_wanted(schedule, |_, piece| piece.frame.step as usize == base);
        self.flight.waiting(&self.want, self.mesh.world());
        let (late, only) = self.late(deadline, echo(base), context.signature);
        missed(late, only, base)
    }

    /// Says who is wanted and what of, and who it is if that is only one.
    fn late(
        &self,
        deadline: &Deadline,
        echo: &str,
        signature: &Signature,
    ) -> (String, Option<usize>) {
        let world = self.mesh.world();
        let missing: Vec<(usize, &str)> = (0..world)
            .filter_map(|peer| {
                let lanes = self.want.iter().skip(peer).step_by(world);
                let (send, recv) = lanes.fold((false, false), |(send, recv), want| {
                    (send || want.send, recv || want.recv)
                });
                let what = match (send, recv) {
                    (false, false) => return None,
                    (true, false) => "to take data",
                    (_, true) => "to send data",
                };
                Some((peer, what))
            })
            .collect();
        let ranks: Vec<usize> = missing.iter().map(|(peer, _)| *peer).collect();
        deadline.late(&missing, echo, self.flight.blame(&ranks, signature))
    }

    /// Runs a local step.
    ///
    /// # Safety
    ///
    /// Its parts lie within `memory` and nobody else writes or, where it
    /// writes, reads them; folds overlap their sources exactly or not at all,
    /// copies not at all.
    unsafe fn compute(
        &mut self,
        step: &Local,
        memory: &Memory,
        operation: &Operation,
        world: usize,
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
                let began = self.flight.fold_begins();
                let addresses = &mut self.sources.0;
                addresses.clear();
                // SAFETY: the parts lie within their buffers.
                addresses.extend(sources.iter().map(|part| unsafe { memory.read_at(part) }));
                // SAFETY: lengths are equal and within the buffers, the
                // destination equals a source or is disjoint from it, no
                // transfer touches them now, the op supports the type (checked
                // when the operation was asked for).
                unsafe {
                    kernel::fold(
                        dtype,
                        op,
                        memory.write_at(into),
                        addresses,
                        into.len,
                        finish.then_some(world),
                    );
                }
                addresses.clear();
                self.flight.folded(began);
            }
        }
    }
}

/// For whom `want` waits in one operation.
fn awaited<'a>(
    want: &'a [Interest],
    world: usize,
    context: &Context<'_>,
) -> impl Iterator<Item = Awaited> + use<'a> {
    let signature = context.signature;
    let message = (signature.collective == Collective::SendRecv).then_some(signature.seq);
    (0..world).filter_map(move |peer| {
        let lanes = || want.iter().skip(peer).step_by(world);
        let data = lanes().any(|want| want.recv);
        let room = lanes().any(|want| want.send);
        (data || room).then_some(Awaited {
            peer,
            data,
            gives: message.filter(|_| room),
            takes: message.filter(|_| data),
        })
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

/// One limit for one whole operation, on the monotonic clock. It counts from when the operation began, or from the last
/// moment at which another rank of the group was in a declared phase: alive, and busy for as long as it said.
pub(crate) struct Deadline {
    started: Instant,
    limit: Duration,
    /// In the first round.
    at: Cell<Instant>,
    /// How much later it is in later rounds; see [`Deadline::in_`].
    grace: Duration,
    /// Whether a phase has moved it.
    is_put_off: Cell<bool>,
}

/// Ranks in a phase say so once or twice a second: a limit shorter than this cannot tell one that is silent from one that
/// has just not spoken.
const SILENCE: Duration = Duration::from_secs(3);

impl Deadline {
    /// In the first round every rank sends without waiting for anybody, so
    /// who is waited for then is the culprit. Later a peer may only be
    /// waiting itself. Hence ranks in later rounds are a little more patient:
    /// if another rank knows better, its error comes first.
    fn in_(limit: Duration) -> Self {
        let grace = (limit / 16).min(Duration::from_secs(1));
        // One look at the clock: more would show in operations of 0.6 µs.
        let started = Instant::now();
        let at = started
            .checked_add(limit)
            .unwrap_or_else(|| deadline_in(limit));
        Deadline {
            started,
            limit,
            at: Cell::new(at),
            grace,
            is_put_off: Cell::new(false),
        }
    }

    pub(crate) fn at(&self, round: usize) -> Instant {
        let at = self.at.get();
        if round == 0 {
            at
        } else {
            at.checked_add(self.grace).unwrap_or(at)
        }
    }

    /// Whether it has passed in a round. It is put off while another rank is in a declared phase.
    pub(crate) fn has_passed(&self, now: Instant, round: usize, flight: &Flight) -> bool {
        if now < self.at(round) {
            return false;
        }
        let later = flight
            .others_busy()
            .and_then(|busy| busy.checked_add(self.limit.max(SILENCE)));
        if let Some(at) = later.filter(|at| *at > self.at.get()) {
            self.at.set(at);
            // Not worth a word where the phase ended as the operation began.
            let by = at.duration_since(self.started).saturating_sub(self.limit);
            self.is_put_off.set(by > Duration::from_secs(1));
        }
        now >= self.at(round)
    }

    /// Says that it has passed, names who is to `blame` and what the `missing`
    /// ranks are waited for, and who it is if that is only one.
    fn late(
        &self,
        missing: &[(usize, &'static str)],
        echo: &str,
        (culprits, excuse): (Vec<usize>, Option<String>),
    ) -> (String, Option<usize>) {
        let what = |rank: usize| {
            let found = missing.iter().find(|(peer, _)| *peer == rank);
            found.map_or("to send data", |(_, what)| *what)
        };
        let names: Vec<String> = culprits
            .iter()
            .map(|rank| format!("rank {rank} {}", what(*rank)))
            .collect();
        let others: Vec<String> = missing
            .iter()
            .filter(|(peer, _)| !culprits.contains(peer))
            .map(|(peer, _)| peer.to_string())
            .collect();
        let others = match &others[..] {
            [] => String::new(),
            [one] => format!("; rank {one} seems to wait as well"),
            many => format!("; ranks {} seem to wait as well", many.join(", ")),
        };
        // First of all who is to blame, and why.
        let excuse = excuse.map_or(String::new(), |excuse| format!("{excuse}; "));
        let late = format!(
            "{excuse}timed out after {:.2} s (limit {:.2} s{}) waiting for {}{echo}{others}",
            self.started.elapsed().as_secs_f64(),
            self.limit.as_secs_f64(),
            match self.is_put_off.get() {
                true => " since a rank was last in a phase of its own",
                false => "",
            },
            names.join(", "),
        );
        let only = match culprits[..] {
            [one] => Some(one),
            _ => None,
        };
        (late, only)
    }

    /// The error when it has passed in a round: `missing` ranks have not sent
    /// what is due; `blame` says who is to blame.
    pub(crate) fn missed(
        &self,
        missing: impl Iterator<Item = usize>,
        round: usize,
        blame: impl FnOnce(&[usize]) -> (Vec<usize>, Option<String>),
    ) -> Error {
        let missing: Vec<(usize, &str)> = missing.map(|rank| (rank, "to send data")).collect();
        let ranks: Vec<usize> = missing.iter().map(|(rank, _)| *rank).collect();
        let (late, only) = self.late(&missing, echo(round), blame(&ranks));
        missed(late, only, round)
    }
}

/// Who is waited for in a later round may be waiting for somebody else.
fn echo(round: usize) -> &'static str {
    match round {
        0 => "",
        _ => " (or for whom they wait)",
    }
}

/// Blames a rank only in the first round.
fn missed(late: String, only: Option<usize>, round: usize) -> Error {
    match only {
        Some(peer) if round == 0 => Error::timeout(late).with_peer(peer),
        _ => Error::timeout(late),
    }
}
