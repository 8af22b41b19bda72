//! Carries out the operations of a group.
//!
//! [`Runner`] is what the group calls: it numbers operations, writes the flight
//! recorder, enforces deadlines, completes errors, and ends the group after a failure.
//! Below it is a [`Backend`], which only moves and folds data. [`Native`] is ours:
//! shared memory on one host, plans over links otherwise.

mod native;
mod runner;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub(crate) use self::native::Native;
pub(crate) use self::runner::Runner;

use crate::Result;
use crate::context::RunContext;
use crate::memory::Arena;
use crate::operation::{Buffers, Operation, Visit};
use crate::shm::Counters;
use crate::transport::AbortHandle;

/// Carries out one operation at a time of one rank in one group.
///
/// An error ends the group: the caller poisons it, so that the other ranks
/// leave their operations too. A backend looks for that poison while it waits.
pub(crate) trait Backend: Send {
    /// Whether an operation is carried out in shared memory rather than by the
    /// plan of its method; the same on all ranks.
    fn is_in_memory(&self, operation: &Operation) -> bool;

    /// Runs one collective to its end, within the deadline of
    /// `context`. `visit` may be shown the results of a reduce-scatter piece by
    /// piece; each is left at the output's start, and written over by the next.
    /// Where it is not called, the output has all of them.
    ///
    /// # Safety
    ///
    /// The operation's reduction supports its type. Input and output are valid, for reading and for writing, for
    /// as many elements as [`Spec::input_elems`](crate::plan::Spec::input_elems) and
    /// [`Spec::output_elems`](crate::plan::Spec::output_elems) (or the operation's own plan) say, aligned,
    /// initialised and disjoint; and no other code writes the input or touches the output until this returns. When
    /// they are exposed, no reference to them exists until this returns, and after an error never again: a peer that
    /// has not noticed the failure yet may still access them. `visit` touches neither the input nor anything of the
    /// output but the piece.
    unsafe fn run(
        &mut self,
        context: RunContext<'_>,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()>;

    /// Checks for poison and for lost peers, without waiting.
    fn look(&mut self) -> Result<()>;

    /// Sets which thread runs the next operations: the communication thread (`beside`
    /// compute threads) or the caller's.
    fn run_beside(&mut self, beside: bool);

    /// Ends the group from any thread.
    fn abort_handle(&self) -> AbortHandle;

    /// Where this rank's registered buckets come from, if there is such memory.
    fn arena(&self) -> Option<Arc<Arena>>;

    /// What collectives in shared memory move, readable from any thread.
    fn counters(&self) -> Arc<Counters>;

    /// Payload bytes sent to each rank so far, readable from any thread.
    fn bytes_sent(&self) -> Arc<[AtomicU64]>;
}
