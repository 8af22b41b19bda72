//! Runs the operations of one rank in one group, one after another.
//!
//! On any failure the group is poisoned before the error is returned, so that the other
//! ranks fail too, with the first cause. Afterwards every operation is refused.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Backend;
use crate::context::RunContext;
use crate::deadline::Deadline;
use crate::exec::{Data, Message};
use crate::memory::Arena;
use crate::operation::{Buffers, Limits, Operation, Signature, Visit};
use crate::plan::{Collective, Method};
use crate::recorder::Flight;
use crate::shm::Counters;
use crate::stall::{Begun, Board, Found, is_circle_with};
use crate::transport::{AbortHandle, Poison};
use crate::{Error, ErrorKind, Result};

/// See the module.
pub(crate) struct Runner {
    backend: Box<dyn Backend>,
    abort: AbortHandle,
    rank: usize,
    flight: Flight,
    limits: Limits,
    /// Sequence number of collectives. Point-to-point messages are counted per peer,
    /// because only two ranks take part in each.
    seq: u64,
    sent_to: Vec<u64>,
    received_from: Vec<u64>,
    operations: u64,
    failed: Option<Error>,
    /// Absent in a group of one.
    board: Option<Board>,
    bytes_sent: Arc<[AtomicU64]>,
}

impl Runner {
    /// Runs operations of `rank` in a group of `world` on `backend`.
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        flight: Flight,
        (rank, world): (usize, usize),
        limits: Limits,
        board: Option<Board>,
    ) -> Runner {
        Runner {
            abort: backend.abort_handle(),
            bytes_sent: backend.bytes_sent(),
            backend,
            rank,
            flight,
            limits,
            seq: 0,
            sent_to: vec![0; world],
            received_from: vec![0; world],
            operations: 0,
            failed: None,
            board,
        }
    }

    /// As [`Backend::bytes_sent`].
    pub(crate) fn bytes_sent(&self) -> Arc<[AtomicU64]> {
        Arc::clone(&self.bytes_sent)
    }

    /// As [`Backend::run_beside`].
    pub(crate) fn run_beside(&mut self, beside: bool) {
        self.backend.run_beside(beside);
    }

    /// The next operation was noted in the flight recorder when it was issued.
    pub(crate) fn adopt(&mut self, ticket: u64) {
        self.flight.adopt(ticket);
    }

    /// As [`Backend::arena`].
    pub(crate) fn arena(&self) -> Option<Arc<Arena>> {
        self.backend.arena()
    }

    /// As [`Backend::counters`].
    pub(crate) fn counters(&self) -> Arc<Counters> {
        self.backend.counters()
    }

    /// As [`Backend::is_in_memory`].
    pub(crate) fn is_in_memory(&self, operation: &Operation) -> bool {
        self.backend.is_in_memory(operation)
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

    /// Runs one operation to its end; `visit` as in [`Backend::run`].
    ///
    /// # Safety
    ///
    /// As [`Backend::run`].
    pub(crate) unsafe fn run(
        &mut self,
        operation: &Operation,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        let signature = Signature {
            collective: operation.collective,
            method: operation.method,
            dtype: operation.dtype,
            op: operation.op,
            root: operation.root,
            count: operation.count,
            lengths: operation.lengths,
            seq: self.next_seq(operation),
            in_memory: self.backend.is_in_memory(operation),
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
            return Err(named(self.heard(error)));
        }
        self.observed(operation, &signature, |backend, context| {
            // SAFETY: handed on from the caller.
            unsafe { backend.run(context, buffers, visit) }
        })
        .map_err(|error| {
            let cause = format!("{} in {signature}", error.message());
            self.fail(error, cause, named)
        })
    }

    /// Carries out all messages, as one operation with one deadline.
    pub(crate) fn exchange(
        &mut self,
        name: &Arc<str>,
        messages: &mut [Message<'_>],
        timeout: Option<Duration>,
    ) -> Result<()> {
        let rank = self.rank;
        let named = |error: Error| error.with_rank(rank).with_operation(&**name);
        if let Some(error) = self.refusal() {
            return Err(named(self.heard(error)));
        }
        let signatures: Vec<Signature> = messages.iter().map(|m| self.sign(m)).collect();
        let Some(first) = signatures.first() else {
            return Ok(());
        };
        // One entry for all in the flight recorder, under the batch's name.
        let batch = Operation {
            collective: first.collective,
            method: first.method,
            short_segments: false,
            automatic: false,
            dtype: first.dtype,
            op: None,
            root: first.root,
            target: match messages[0].data {
                Data::Send(_) => messages[0].peer,
                Data::Recv(_) => rank,
            },
            count: signatures.iter().map(|signature| signature.count).sum(),
            tail_padding: 0,
            lengths: 0,
            plan: None,
            label: Some(Arc::clone(name)),
            timeout,
        };
        self.observed(&batch, first, |backend, context| {
            backend.exchange(context, messages, &signatures)
        })
        .map_err(|error| {
            let cause = format!("{} in {name}", error.message());
            self.fail(error, cause, named)
        })
    }

    /// Runs one operation, recorded by the flight recorder, within its deadline.
    fn observed(
        &mut self,
        operation: &Operation,
        signature: &Signature,
        run: impl FnOnce(&mut dyn Backend, RunContext<'_>) -> Result<()>,
    ) -> Result<()> {
        self.flight.begin(operation, signature);
        let limit = operation.timeout.unwrap_or(match self.operations {
            0 => self.limits.first_op_timeout,
            _ => self.limits.op_timeout,
        });
        self.flight.set_limit(limit);
        let context = RunContext {
            operation,
            signature,
            deadline: &Deadline::in_(limit),
            flight: &mut self.flight,
            board: self.board.as_mut(),
            begun: Begun {
                collectives: self.seq,
                sent: &self.sent_to,
                received: &self.received_from,
            },
        };
        let result = run(&mut *self.backend, context);
        self.flight.end(signature, result.is_ok());
        self.operations += 1;
        result
    }

    /// The signature of a lone send or receive.
    fn sign(&mut self, message: &Message<'_>) -> Signature {
        let (root, counter) = match message.data {
            Data::Send(_) => (self.rank, &mut self.sent_to[message.peer]),
            Data::Recv(_) => (message.peer, &mut self.received_from[message.peer]),
        };
        let seq = *counter;
        *counter += 1;
        Signature {
            collective: Collective::SendRecv,
            method: Method::PointToPoint,
            dtype: Some(message.dtype),
            op: None,
            root,
            count: message.bytes() / message.dtype.size_bytes(),
            lengths: 0,
            seq,
            in_memory: false,
        }
    }

    fn next_seq(&mut self, operation: &Operation) -> u64 {
        let counter = if operation.collective != Collective::SendRecv {
            &mut self.seq
        } else if operation.root == self.rank {
            &mut self.sent_to[operation.target]
        } else {
            &mut self.received_from[operation.root]
        };
        let seq = *counter;
        *counter += 1;
        seq
    }

    /// Checks whether the group is poisoned or a peer is lost; for operations that wait
    /// for something other than their links.
    pub(crate) fn look(&mut self) -> Result<()> {
        let rank = self.rank;
        if let Some(error) = self.refusal() {
            return Err(error.with_rank(rank));
        }
        self.backend.look().map_err(|error| {
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
    fn heard(&mut self, error: Error) -> Error {
        if self.failed.is_none() {
            self.flight.failed(&error);
            self.failed = Some(error.clone());
        }
        error
    }

    /// Poisons the group over an error; returns the error to report.
    fn poison_over(&self, error: Error, cause: String) -> Error {
        // Poison first, then check: of several ranks that fail at the same time one is
        // the first, and all others report its failure.
        let cause = match error.kind() {
            // Names both operations already, and both must fit.
            ErrorKind::Desync => error.message().to_owned(),
            _ => cause,
        };
        let is_first = self.abort.poison(&Poison::new(self.rank, cause));
        let Some(p) = self.abort.poisoned() else {
            return error;
        };
        let found = self.board.as_ref().and_then(Board::found);
        match found.filter(|(_, own)| *own == p).map(|(found, _)| found) {
            Some(Found::Lost(peer)) => Error::peer_lost(*peer, p.cause).with_source(error),
            Some(Found::Desync) => Error::new(ErrorKind::Desync, p.cause).with_source(error),
            None if is_circle_with(&p.cause, self.rank) => {
                Error::new(ErrorKind::Desync, p.cause).with_source(error)
            }
            None if is_first => error,
            None => Error::aborted(p.origin_rank, p.cause).with_source(error),
        }
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
