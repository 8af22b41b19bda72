//! Collectives directly in the memory that the ranks of one host share.
//!
//! No frames, no rings: each rank publishes its operation and its progress in its
//! *cell*, and the others read its data in place. The owner of a chunk folds it from
//! all ranks and writes the result to all of them. `README.md` in this directory has
//! the algorithms, the protocol, the reason why no byte is overwritten too early, and
//! the measurements.
//!
//! | file | does |
//! |---|---|
//! | `cell` | what a rank publishes, and how others read it |
//! | `run` | one operation: publish, wait, compare, time out |
//! | `reduce` | all-reduce, reduce, reduce-scatter |
//! | `exchange` | broadcast, all-gather, gather, scatter, all-to-all |
//! | `direct` | reading unregistered memory through the kernel |

mod cell;
mod counters;
mod direct;
mod exchange;
mod reduce;
mod run;
#[cfg(test)]
mod tests;

pub use counters::CollectiveBytes;

pub(crate) use counters::Counters;

use std::sync::Arc;

use self::cell::Place;
use self::direct::Mark;
use self::run::Run;
use crate::Result;
use crate::context::RunContext;
use crate::memory::Arena;
use crate::operation::{Buffers, Limits, Operation, Visit};
use crate::plan::Collective;
use crate::transport::{Arenas, Interest, Mesh, Segment};
use phalanx_fold::Source;

/// Most bytes of one stage when every rank has a core: two stages of two ranks fit the
/// second-level caches in use.
const STAGE_BYTES: usize = 256 << 10;
/// Least bytes of a segment then: about 2 µs of copying, for a
/// synchronisation of 0.2 µs.
const SEGMENT_MIN_BYTES: usize = 16 << 10;
/// Least number of segments, so that one rank copies in while another copies out.
const SEGMENTS_MIN: usize = 4;
/// Most data that every rank folds as a whole, registered or not, when every rank has a
/// core: saving one synchronisation is worth a copy.
const ONE_ROUND_MAX_BYTES: usize = 2 << 10;
/// Most bytes of a result that is visited at a time: it fits the second-level caches in use together with
/// the visitor's own data, and is long enough for a fold to prefetch its sources.
const VISITED_BYTES: usize = 256 << 10;
/// The same when ranks share cores: a synchronisation costs several switches
/// then, so there should be few.
const OVERSUBSCRIBED_STAGE_BYTES: usize = 1 << 20;

/// One rank's part in the collectives in shared memory.
pub(crate) struct Shm {
    segment: Arc<Segment>,
    arenas: Option<Arc<Arenas>>,
    /// Ours among them.
    arena: Option<Arc<Arena>>,
    me: usize,
    world: usize,
    /// How many times this rank has published; the same on all ranks at the same point
    /// of an operation.
    phase: u64,
    /// Collectives begun; their parity selects the cell.
    operations: u64,
    /// Stages filled; the parity selects the next one.
    staged: usize,
    /// Bytes of a stage: our preference, then the size that all agreed on.
    stage_bytes: usize,
    agreed: bool,
    /// The number that the others read to test whether they can.
    mark: Option<Mark>,
    /// Least size of our input for the others to read it in place, if the user sets it.
    read_min_bytes: Option<usize>,
    /// Whether this rank can read the memory of all others.
    reads: bool,
    /// Whether all ranks can.
    all_read: bool,
    /// Process ids of the ranks, if they can.
    processes: Vec<u64>,
    /// The checked places of the peers' data in the current operation.
    places: Vec<Place>,
    lists: Lists,
    /// The awaited ranks, for the flight recorder.
    want: Vec<Interest>,
    counters: Arc<Counters>,
}

/// Room for the addresses of a fold, kept to allocate it once.
#[derive(Default)]
struct Lists {
    sources: Vec<Source>,
    intos: Vec<*mut u8>,
}

// SAFETY: addresses are in it only while a fold runs, which borrows the host, so it
// cannot move to another thread meanwhile. What a panic leaves behind is cleared before
// it is used.
unsafe impl Send for Lists {}

/// After a failure or a panic a peer may still write to what was in flight:
/// none of that memory is used again, unless the quarantine is lifted.
struct Quarantine(Option<Arc<Arena>>);

impl Quarantine {
    fn lift(mut self) {
        self.0 = None;
    }
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        if let Some(arena) = &self.0 {
            arena.close();
        }
    }
}

impl Shm {
    /// `None` unless all ranks of the group share this host's memory.
    /// `segment_bytes` limits the stages; ranks may prefer different sizes.
    pub(crate) fn new(mesh: &Mesh, limits: &Limits) -> Option<Shm> {
        let memory = mesh.memory()?;
        let (me, world) = (mesh.rank(), mesh.world());
        let most = if mesh.polls() {
            STAGE_BYTES
        } else {
            OVERSUBSCRIBED_STAGE_BYTES
        };
        Some(Shm {
            arena: memory
                .arenas
                .as_ref()
                .map(|arenas| Arena::new(Arc::clone(arenas), me)),
            arenas: memory.arenas,
            me,
            world,
            phase: 0,
            operations: 0,
            staged: 0,
            stage_bytes: limits
                .segment_bytes
                .min(most)
                .min(memory.segment.stage_capacity()),
            segment: memory.segment,
            agreed: false,
            mark: Mark::new(),
            read_min_bytes: limits.single_copy_min_bytes,
            reads: false,
            all_read: false,
            processes: Vec::new(),
            places: vec![Place::Staged; world],
            lists: Lists::default(),
            want: vec![Interest::default(); world],
            counters: Arc::new(Counters::default()),
        })
    }

    /// Where this rank's registered buckets come from.
    pub(crate) fn arena(&self) -> Option<Arc<Arena>> {
        self.arena.clone()
    }

    /// Counts that can be read from any thread.
    pub(crate) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Whether the ranks share cores, as all have agreed.
    fn is_oversubscribed(&self) -> bool {
        self.stage_bytes > STAGE_BYTES
    }

    /// Whether `operation` is carried out here.
    pub(crate) fn takes(&self, operation: &Operation) -> bool {
        operation.automatic && operation.plan.is_none() && operation.method.is_some()
    }

    /// Runs one operation to its end.
    ///
    /// # Safety
    ///
    /// As [`Native::run`](crate::backend::Native::run).
    pub(crate) unsafe fn run(
        &mut self,
        mesh: &mut Mesh,
        mut context: RunContext<'_>,
        buffers: Buffers,
        visit: Option<&mut Visit<'_>>,
    ) -> Result<()> {
        let quarantine = Quarantine(self.arena.clone());
        let collective = context.operation.collective;
        let mut run = Run::begin(self, mesh, &mut context, buffers);
        run.agree()?;
        // SAFETY: handed on from the caller.
        let result = unsafe {
            match collective {
                Collective::AllReduce | Collective::Reduce => run.reduce(),
                Collective::ReduceScatter => run.reduce_scatter(visit),
                _ if collective.moves() => run.exchange(),
                // A barrier: only enter.
                _ => run.enter(Place::Staged),
            }
        };
        if result.is_ok() {
            quarantine.lift();
        }
        result
    }

    /// Publishes that this rank runs an operation by its plan, so that peers that wait
    /// here in another one notice. An all-reduce of data needs no waiting: its plans
    /// end on no rank before all have begun, so cells are not overwritten unread.
    pub(crate) fn announce(&mut self, mesh: &mut Mesh, context: &mut RunContext<'_>) -> Result<()> {
        let operation = context.operation;
        let mut run = Run::begin(self, mesh, context, Buffers::none());
        if operation.collective == Collective::AllReduce && operation.count > 0 {
            run.describe(Place::Staged);
            run.publish();
            return Ok(());
        }
        run.enter(Place::Staged)
    }
}
