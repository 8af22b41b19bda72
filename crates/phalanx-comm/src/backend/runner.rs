//! Runs the operations of one rank in one group, one after another.
//!
//! On any failure the group is poisoned before the error is returned, so that the other
//! ranks fail too, with the first cause. Afterwards every operation is refused.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::Native;
use crate::context::RunContext;
use crate::deadline::Deadline;
use crate::messages::Messages;
use crate::operation::{Buffers, Limits, Operation, Signature, Visit};
use crate::recorder::Flight;
use crate::stall::{Counts, StallReports, Users, end_group};
use crate::transport::AbortHandle;
use crate::{Error, Result};

/// See the module.
pub(crate) struct Runner {
    native: Native,
    abort: AbortHandle,
    rank: usize,
    flight: Flight,
    limits: Limits,
    /// Sequence number of collectives.
    seq: u64,
    counts: Arc<Counts>,
    users: Arc<Users>,
    /// Operations run on the communication thread.
    beside: bool,
    messages: Arc<OnceLock<Weak<Messages>>>,
    operations: u64,
    failed: Option<Error>,
    /// Absent in a group of one.
    board: Option<StallReports>,
    bytes_sent: Arc<[AtomicU64]>,
}

impl Runner {
    /// Runs operations of `rank` on `native`.
    pub(crate) fn new(
        native: Native,
        flight: Flight,
        rank: usize,
        limits: Limits,
        board: Option<StallReports>,
        (counts, users): (Arc<Counts>, Arc<Users>),
    ) -> Runner {
        Runner {
            abort: native.abort_handle(),
            bytes_sent: native.bytes_sent(),
            native,
            rank,
            flight,
            limits,
            seq: 0,
            counts,
            users,
            beside: false,
            messages: Arc::default(),
            operations: 0,
            failed: None,
            board,
        }
    }

    /// As [`Native::run_beside`].
    pub(crate) fn run_beside(&mut self, beside: bool) {
        self.beside = beside;
        self.native.run_beside(beside);
    }

    /// The next operation was noted in the flight recorder when it was issued.
    pub(crate) fn adopt(&mut self, ticket: u64) {
        self.flight.adopt(ticket);
    }

    /// Where the group's messages are to be set once.
    pub(crate) fn messages(&self) -> Arc<OnceLock<Weak<Messages>>> {
        Arc::clone(&self.messages)
    }

    /// Takes in messages that others send to this rank, which waits for something else.
    pub(crate) fn listen(&self) {
        listen(&self.messages);
    }

    /// As [`Native::is_in_memory`].
    pub(crate) fn is_in_memory(&self, operation: &Operation) -> bool {
        self.native.is_in_memory(operation)
    }

    /// Sets the byte counts to zero; the next operation has the deadline of the
    /// first again. Operations keep their numbers: other ranks may still be one
    /// behind.
    pub(crate) fn reset_counters(&mut self) {
        self.operations = 0;
        for sent in &*self.bytes_sent {
            sent.store(0, Ordering::Relaxed);
        }
    }

    /// Runs one operation to its end; `visit` as in [`Native::run`].
    ///
    /// # Safety
    ///
    /// As [`Native::run`].
    pub(crate) unsafe fn run(
        &mut self,
        operation: &Operation,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        let in_memory = self.native.is_in_memory(operation);
        let signature = Signature {
            collective: operation.collective,
            method: operation.method.filter(|_| !in_memory),
            dtype: operation.dtype,
            op: operation.op,
            root: operation.root,
            count: operation.count,
            lengths: operation.lengths,
            seq: self.next_seq(),
        };
        let rank = self.rank;
        let named = |error: Error| {
            let mut name = signature.to_string();
            if let Some(label) = &operation.label {
                let _ = write!(name, " of {label}");
            }
            error.with_rank(rank).with_operation(name)
        };
        if let Some(error) = self.refusal() {
            self.flight.refuse();
            return Err(named(self.note_abort(error)));
        }
        self.observed(operation, &signature, |native, context| {
            // SAFETY: handed on from the caller.
            unsafe { native.run(context, buffers, visit) }
        })
        .map_err(|error| {
            let cause = format!("{} in {signature}", error.message());
            self.fail(error, cause, named)
        })
    }

    /// Runs one operation, recorded by the flight recorder, within its deadline.
    fn observed(
        &mut self,
        operation: &Operation,
        signature: &Signature,
        run: impl FnOnce(&mut Native, RunContext<'_>) -> Result<()>,
    ) -> Result<()> {
        self.flight.begin(operation, signature);
        let limit = operation.timeout.unwrap_or(match self.operations {
            0 => self.limits.first_op_timeout,
            _ => self.limits.op_timeout,
        });
        self.flight.set_limit(limit);
        let (users, beside) = (&*self.users, self.beside);
        let is_blocked = || users.wait_for_collective(beside);
        let context = RunContext {
            operation,
            signature,
            deadline: &Deadline::in_(limit),
            flight: &mut self.flight,
            board: self.board.as_mut(),
            begun: self.counts.begun(&is_blocked),
            listen: &|| listen(&self.messages),
        };
        let result = run(&mut self.native, context);
        self.flight.end(signature, result.is_ok());
        self.operations += 1;
        result
    }

    fn next_seq(&mut self) -> u64 {
        let seq = self.seq;
        self.seq += 1;
        self.counts.set_collectives(self.seq);
        seq
    }

    /// Checks whether the group is poisoned or a peer is lost; for operations that wait
    /// for something other than their links.
    pub(crate) fn check(&mut self) -> Result<()> {
        let rank = self.rank;
        if let Some(error) = self.refusal() {
            return Err(error.with_rank(rank));
        }
        self.native.check().map_err(|error| {
            let cause = error.message().to_owned();
            self.fail(error, cause, |error| error.with_rank(rank))
        })
    }

    /// Ends the group over an error: the other ranks get `cause`, the flight recorder
    /// the error that this rank reports. Returns that error: the first cause, if
    /// another rank failed earlier.
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

    /// The group has ended while this rank was in none of its operations. The flight
    /// recorder counts this as the time of the failure here.
    fn note_abort(&mut self, error: Error) -> Error {
        if self.failed.is_none() {
            self.flight.failed(&error);
            self.failed = Some(error.clone());
        }
        error
    }

    /// Poisons the group over an error; returns the error to report.
    fn poison_over(&self, error: Error, cause: String) -> Error {
        let found = self.board.as_ref().and_then(StallReports::found);
        end_group(&self.abort, self.rank, found, error, cause)
    }

    /// Why this group takes no more operations, if it does not.
    fn refusal(&self) -> Option<Error> {
        if let Some(p) = self.abort.poisoned() {
            return Some(Error::aborted(p.origin_rank, p.cause));
        }
        let first = self.failed.as_ref()?;
        Some(Error::aborted(self.rank, first.message()).with_source(first.clone()))
    }
}

fn listen(messages: &OnceLock<Weak<Messages>>) {
    if let Some(messages) = messages.get().and_then(Weak::upgrade) {
        messages.listen();
    }
}
