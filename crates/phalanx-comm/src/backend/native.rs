//! Carries out operations: shared memory where all ranks have it, and plans over links.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use crate::Result;
use crate::context::RunContext;
use crate::exec::Executor;
use crate::memory::Arena;
use crate::operation::{Buffers, Limits, Operation, Visit};
use crate::shm::{Counters, Shm};
use crate::transport::{AbortHandle, Interest, Mesh};

/// One rank's links and, where all ranks share this host's memory, its part in that.
pub(crate) struct Native {
    mesh: Mesh,
    shm: Option<Shm>,
    executor: Executor,
}

impl Native {
    pub(crate) fn new(mesh: Mesh, generation: u32, group: u32, limits: &Limits) -> Native {
        Native {
            shm: Shm::new(&mesh, limits),
            executor: Executor::new(&mesh, generation, group, limits.segment_bytes),
            mesh,
        }
    }

    /// Whether an operation is carried out in shared memory rather than by the
    /// plan of its method; the same on all ranks.
    pub(crate) fn is_in_memory(&self, operation: &Operation) -> bool {
        self.shm.as_ref().is_some_and(|shm| shm.takes(operation))
    }

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
    pub(crate) unsafe fn run(
        &mut self,
        mut context: RunContext<'_>,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        if let Some(shm) = &mut self.shm {
            if context.signature.method.is_none() {
                // SAFETY: handed on from the caller.
                return unsafe { shm.run(&mut self.mesh, context, buffers, visit) };
            }
            shm.announce(&mut self.mesh, &mut context)?;
        }
        // SAFETY: handed on from the caller.
        unsafe { self.executor.run(&mut self.mesh, context, buffers) }
    }

    /// Checks for poison and for lost peers, without waiting.
    pub(crate) fn check(&mut self) -> Result<()> {
        let nothing = vec![Interest::default(); self.mesh.world()];
        self.mesh.idle(&nothing, 1, Instant::now())
    }

    /// Sets which thread runs the next operations: the communication thread (`beside`
    /// compute threads) or the caller's.
    pub(crate) fn run_beside(&mut self, beside: bool) {
        self.mesh.run_beside(beside);
    }

    /// Ends the group from any thread.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.mesh.abort_handle()
    }

    /// Where this rank's registered buckets come from, if there is such memory.
    pub(crate) fn arena(&self) -> Option<Arc<Arena>> {
        self.shm.as_ref().and_then(Shm::arena)
    }

    /// What collectives in shared memory move, readable from any thread.
    pub(crate) fn counters(&self) -> Arc<Counters> {
        self.shm.as_ref().map(Shm::counters).unwrap_or_default()
    }

    /// Payload bytes sent to each rank so far, readable from any thread.
    pub(crate) fn bytes_sent(&self) -> Arc<[AtomicU64]> {
        self.executor.bytes_sent()
    }
}
