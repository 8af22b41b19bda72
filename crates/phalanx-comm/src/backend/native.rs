//! Our own backend: shared memory where all ranks have it, and plans over links.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::Backend;
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
}

impl Backend for Native {
    fn is_in_memory(&self, operation: &Operation) -> bool {
        self.shm.as_ref().is_some_and(|shm| shm.takes(operation))
    }

    unsafe fn run(
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

    fn look(&mut self) -> Result<()> {
        let nothing = vec![Interest::default(); self.mesh.world()];
        self.mesh.idle(&nothing, 1, Instant::now())
    }

    fn run_beside(&mut self, beside: bool) {
        self.mesh.run_beside(beside);
    }

    fn abort_handle(&self) -> AbortHandle {
        self.mesh.abort_handle()
    }

    fn arena(&self) -> Option<Arc<Arena>> {
        self.shm.as_ref().and_then(Shm::arena)
    }

    fn counters(&self) -> Arc<Counters> {
        self.shm.as_ref().map(Shm::counters).unwrap_or_default()
    }

    fn bytes_sent(&self) -> Arc<[AtomicU64]> {
        self.executor.bytes_sent()
    }
}
