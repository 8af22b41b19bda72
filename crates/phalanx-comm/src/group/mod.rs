//! Process groups.

mod address_file;
mod buffer;
mod collectives;
mod describe;
mod detached;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod join;
mod launch;
mod messages;
mod monitored;
mod objects;
mod options;
mod parts;
mod phase;
mod probe;
mod queue;
mod registry;
mod subgroup;
mod token;
mod uneven;
mod work;

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_base::format::rank_runs;
use phalanx_store::{MemStore, Store};

pub use self::buffer::{Buffer, Input};
pub use self::detached::{Detached, Formation};
pub use self::messages::{P2POp, Peer};
pub use self::objects::MAX_OBJECT_BYTES;
pub use self::options::{Call, GroupOptions, InitOptions};
pub use self::phase::PhaseGuard;
pub use self::token::read_token;
pub use self::work::{OpTimes, Work};
pub use crate::transport::Transport;
pub use monitored::format_ranks;

use self::join::{Processes, WORLD_GROUP};
use self::launch::check_rank;
use self::queue::Queue;
use self::registry::Registry;
use crate::backend::{Native, Runner};
use crate::memory::{Arena, Registered};
use crate::messages::{Common, Messages};
use crate::operation::Limits;
use crate::plan::Hosts;
use crate::recorder::{Failure, Flight, Place, Recorder, Watched};
use crate::select::{Algorithm, Costs, Rules, Selector};
use crate::shm::{CollectiveBytes, Counters};
use crate::stall::{Counts, StallReports, Users};
use crate::transport::{AbortHandle, GroupKeys, Mesh, Poison, TransportKind, thread_mesh_with};
use crate::wait::{Budgets, Callers, Topology};
use crate::{Bucket, Element, Error, Result};

/// One rank's membership in a group of ranks that communicate.
///
/// A handle is cheap to clone and may be used from several threads; operations
/// are then served one at a time in the order in which they were issued, except sends
/// and receives, which run at the same time as the others. All ranks must issue the same operations
/// in the same order. When they do not,
/// the first rank to notice gets an error that names both sides
/// ([`ErrorKind::Desync`](crate::ErrorKind::Desync)).
///
/// *Deadlines.* Every operation has one; see [`InitOptions`] and [`Call`]. A rank in a declared
/// [`phase`](ProcessGroup::phase) is waited for longer.
///
/// *Failure.* After any failure but a usage error the group is poisoned: all
/// ranks leave their operations with
/// [`ErrorKind::Aborted`](crate::ErrorKind::Aborted) naming the rank that
/// failed first and why, and later operations are refused. Contents of buffers
/// given to a failed operation are undefined. A poisoned group never recovers;
/// the ranks that are left can form another one ([`ProcessGroup::reconfigure`]).
///
/// *End.* [`ProcessGroup::shutdown`] on all ranks is the orderly end. Dropping the last
/// handle finishes the issued operations and leaves the group; ranks that still wait
/// for this one then get a `PeerLost` error. A drop during a panic aborts the group.
///
/// ```
/// use phalanx_comm::{GroupOptions, ProcessGroup, ReduceOp};
///
/// let groups = ProcessGroup::threads(3, GroupOptions::default());
/// std::thread::scope(|scope| {
///     for group in &groups {
///         scope.spawn(move || {
///             let mut data = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
///             assert_eq!(data, [3.0, 3.0]);
///         });
///     }
/// });
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    core: Arc<Core>,
    defaults: Call,
}

/// Fields are dropped in this order: first messages and the queue finish and leave the
/// group, then the store is closed.
struct Core {
    messages: Arc<Messages>,
    queue: Queue,
    /// Connections of messages end after those of collectives, which say why.
    _message_links: Arc<dyn Any + Send + Sync>,
    rank: usize,
    world: usize,
    id: u32,
    generation: u32,
    recorder: Arc<Recorder>,
    identity: Identity,
    abort: AbortHandle,
    transports: Vec<(usize, TransportKind)>,
    /// Where this rank's registered buckets come from.
    arena: Option<Arc<Arena>>,
    counters: Arc<Counters>,
    bytes_sent: Arc<[AtomicU64]>,
    algorithm: Algorithm,
    selector: Selector,
    limits: Limits,
    callers: Callers,
    /// How this rank waits, and which ranks share its cores.
    budgets: Budgets,
    /// Subgroups made so far; part of their identity.
    subgroups: AtomicU64,
    /// Those that their members have made without the others, by members.
    among: Mutex<BTreeMap<Vec<usize>, u64>>,
    /// Monitored barriers so far; part of their keys.
    monitored: AtomicU64,
    keys: Arc<GroupKeys>,
    origin: Arc<Origin>,
}

impl Drop for Core {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = format!("rank {} panicked", self.rank);
            self.recorder
                .failed((self.generation, self.id), &reason, Failure::Panicked);
        }
    }
}

/// Where subgroups get their links from.
enum Origin {
    Threads {
        registry: Arc<Registry>,
        /// Where later generations meet.
        store: Arc<dyn Store>,
    },
    Processes(Box<Processes>),
}

/// The identity of a rank over all generations of a job, in which its number may change.
#[derive(Clone, Debug)]
struct Identity {
    /// Its rank in the first generation.
    global_rank: usize,
    /// The first ranks of this generation's members, by rank.
    roster: Arc<[usize]>,
    /// Distinguishes the job from others that used the same store.
    job: u64,
}

impl ProcessGroup {
    /// Forms the group of all ranks of a job.
    ///
    /// *Blocks until* all ranks have joined, at most [`InitOptions::timeout`].
    ///
    /// # Errors
    ///
    /// `Usage` when settings are missing or contradict each other (also
    /// between ranks), `Timeout` naming the ranks that did not come.
    pub fn init(options: InitOptions) -> Result<Self> {
        let (launch, mesh, processes) = join::meet(options)?;
        Self::assemble(launch.rank, launch.world, mesh, processes, &Place::Launcher)
    }

    /// Forms a group through a store that the caller has opened. `rank` and
    /// `world` stand in for those in `options`, which must have a token unless
    /// `world` is 1; its `init_method` is not used.
    ///
    /// If the variables `RANK` and `WORLD_SIZE` are set, the launcher's flight recorder (`phalanx inspect`) shows the first
    /// group of the process that has this rank and world size. Only the recorders of that group and of the first group of
    /// the process are written to `PHALANX_FLIGHT_DIR`.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::init`].
    pub fn from_store(
        store: Arc<dyn Store>,
        rank: usize,
        world: usize,
        options: InitOptions,
    ) -> Result<Self> {
        check_rank(rank, world)?;
        let token = match &options.token {
            Some(token) => token.clone(),
            None if world == 1 => join::mint()?,
            None => return Err(launch::no_token().with_rank(rank)),
        };
        let processes = Processes::within(store, token, options);
        let mesh = processes.form(WORLD_GROUP, rank, world, processes.options.timeout)?;
        let place = Place::of_group(rank, world, launch::environment);
        Self::assemble(rank, world, mesh, processes, &place)
    }

    /// A group of `world` ranks that are threads of this process; hand one
    /// handle to each.
    ///
    /// # Panics
    ///
    /// When the system refuses the memory, `world` is larger than [`MAX_LOCAL_RANKS`](crate::MAX_LOCAL_RANKS), or
    /// `options.ranks_per_host` does not add up to it.
    pub fn threads(world: usize, options: GroupOptions) -> Vec<Self> {
        let ring_bytes = options.ring_bytes.unwrap_or(0);
        let origin = Arc::new(Origin::Threads {
            registry: Arc::new(Registry::new(ring_bytes, options.arena_bytes)),
            store: Arc::new(MemStore::new()),
        });
        let threads = launch::compute_threads(options.compute_threads, launch::environment)
            .unwrap_or_else(|e| {
                tracing::warn!("{}; assuming one compute thread", e.message());
                1
            });
        let topology = Topology::of_threads(world, threads);
        let hosts = match &options.ranks_per_host[..] {
            [] => Hosts::one(world),
            sizes => Hosts::of_sizes(sizes),
        };
        assert_eq!(
            hosts.world(),
            world,
            "the ranks of all hosts must be those of the group"
        );
        let asked = Rules::from_env().unwrap_or_else(|e| {
            tracing::warn!("{}; ignored", e.message());
            Rules::default()
        });
        let rules = options.rules.clone().then(asked);
        let selector = Selector::new(hosts, Costs::default(), rules);
        thread_mesh_with(world, ring_bytes, options.arena_bytes)
            .into_iter()
            .enumerate()
            .map(|(rank, mut mesh)| {
                mesh.share_cores(topology);
                let recorder = match Recorder::new(rank, world, &Place::Private) {
                    Ok(recorder) => recorder,
                    Err(e) => panic!("cannot map the flight recorder of rank {rank}: {e}"),
                };
                mesh.set_hosts(selector.hosts().clone());
                let group = Self::from_mesh(
                    Member {
                        rank,
                        world,
                        id: WORLD_GROUP,
                        generation: 0,
                        limits: options.limits(),
                        algorithm: options.algorithm,
                        identity: None,
                    },
                    mesh,
                    selector.clone(),
                    Arc::clone(&origin),
                    Arc::new(recorder),
                    false,
                );
                group.unwrap_or_else(|e| unreachable!("nothing was measured: {e}"))
            })
            .collect()
    }

    fn assemble(
        rank: usize,
        world: usize,
        mesh: Mesh,
        processes: Processes,
        place: &Place,
    ) -> Result<Self> {
        let recorder = Recorder::new(rank, world, place)
            .map_err(|e| Error::io("mapping the flight recorder", e).with_rank(rank))?;
        let rules = processes.options.rules.clone().then(Rules::from_env()?);
        let selector = Selector::new(mesh.hosts().clone(), Costs::default(), rules);
        let probe = processes.options.probe && probe::is_allowed();
        let member = Member {
            rank,
            world,
            id: WORLD_GROUP,
            generation: processes.generation,
            limits: processes.options.limits(),
            algorithm: processes.options.algorithm,
            identity: None,
        };
        Self::from_mesh(
            member,
            mesh,
            selector,
            Arc::new(Origin::Processes(Box::new(processes))),
            Arc::new(recorder),
            probe,
        )
    }

    /// `probe`: measure the wire, if there are several hosts.
    fn from_mesh(
        member: Member,
        mut mesh: Mesh,
        mut selector: Selector,
        origin: Arc<Origin>,
        recorder: Arc<Recorder>,
        probe: bool,
    ) -> Result<Self> {
        let abort = mesh.abort_handle();
        let transports = mesh.describe();
        let (budgets, callers) = (mesh.budgets(), mesh.callers());
        let identity = member.identity.unwrap_or_else(|| Identity {
            global_rank: member.rank,
            roster: (0..member.world).collect(),
            job: mesh.instance(),
        });
        let which = (member.generation, member.id, identity.job);
        let keys = Arc::new(GroupKeys::new(origin.store(), which, abort.clone()));
        let asked = match &*origin {
            Origin::Threads { .. } => None,
            Origin::Processes(_) => Some(Arc::clone(&keys)),
        };
        let watched = Watched::new(
            Arc::clone(&recorder),
            (member.generation, member.id),
            member.rank,
            mesh.cells(),
            asked,
        );
        let kinds = transports.iter().fold(0, |sum, (_, kind)| sum | kind.bit());
        recorder.set_job(identity.job);
        let flight = Flight::new(watched, kinds, &identity.roster);
        let board = || {
            let ranks = (member.rank, &identity.roster[..]);
            (member.world > 1).then(|| StallReports::new(Arc::clone(&keys), ranks, abort.clone()))
        };
        let counts = Arc::new(Counts::new(member.world));
        let users = Arc::new(Users::new(callers.clone()));
        let message_flight = flight.messages();
        let message_links = mesh
            .take_messages()
            .ok_or_else(|| Error::internal("the links of messages are taken"))?;
        let native = Native::new(mesh, member.generation, member.id, &member.limits);
        let (arena, counters) = (native.arena(), native.counters());
        let bytes_sent = native.bytes_sent();
        let beside = (Arc::clone(&counts), Arc::clone(&users));
        let mut runner = Runner::new(native, flight, member.rank, member.limits, board(), beside);
        if probe && selector.hosts().count() > 1 {
            selector.set_costs(probe::measure(&mut runner, selector.hosts())?);
        }
        let runner_messages = runner.messages();
        let caller_users = Arc::clone(&users);
        let queue = Queue::new(
            member.rank,
            abort.clone(),
            runner,
            callers.clone(),
            caller_users,
        );
        let messages = Arc::new(Messages::new(
            message_links,
            (member.generation, member.id),
            Common {
                flight: message_flight,
                board: board(),
                counts,
                users,
                bytes_sent: Arc::clone(&bytes_sent),
                limits: member.limits,
            },
            queue.collectives(),
        ));
        // Nothing else sets it.
        let _ = runner_messages.set(Arc::downgrade(&messages));
        tracing::debug!(
            rank = member.rank,
            world = member.world,
            group = member.id,
            generation = member.generation,
            wait = %budgets,
            hosts = selector.hosts().count(),
            costs = ?selector.costs(),
            rules = %selector.rules(),
            "joined"
        );
        Ok(ProcessGroup {
            core: Arc::new(Core {
                _message_links: messages.links(),
                messages,
                queue,
                rank: member.rank,
                world: member.world,
                id: member.id,
                generation: member.generation,
                recorder,
                identity,
                abort,
                transports,
                arena,
                counters,
                bytes_sent,
                algorithm: member.algorithm,
                selector,
                limits: member.limits,
                callers,
                budgets,
                subgroups: AtomicU64::new(0),
                among: Mutex::default(),
                monitored: AtomicU64::new(0),
                keys,
                origin,
            }),
            defaults: Call::default(),
        })
    }

    /// Chooses the plan of an operation, by hosts, agreed costs and rules.
    pub fn selector(&self) -> &Selector {
        &self.core.selector
    }

    /// This process's (or thread's) rank in the group.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.core.world
    }

    /// The number of this rank's process among all that the job has started: its rank in the first generation. A
    /// [group that is formed later](Self::detach) numbers ranks anew.
    pub fn global_rank(&self) -> usize {
        self.core.identity.global_rank
    }

    /// The same numbers of all ranks of the group, by rank.
    pub fn global_ranks(&self) -> &[usize] {
        &self.core.identity.roster
    }

    /// The store through which the group met; for ranks that are threads, one in memory.
    pub fn store(&self) -> Arc<dyn Store> {
        self.core.origin.store()
    }

    /// The algorithm of all-reduces whose [`Call`] sets none.
    pub fn algorithm(&self) -> Algorithm {
        match self.defaults.algorithm {
            Algorithm::Auto => self.core.algorithm,
            own => own,
        }
    }

    /// How each other rank is reached.
    pub fn transports(&self) -> Vec<(usize, TransportKind)> {
        self.core.transports.clone()
    }

    /// Payload bytes sent to each rank so far, indexed by rank.
    pub fn bytes_sent_to(&self) -> Vec<u64> {
        let sent = self.core.bytes_sent.iter();
        sent.map(|n| n.load(Ordering::Relaxed)).collect()
    }

    /// A handle to the same group whose operations use `call` by default. What `call` leaves open is as in this handle.
    ///
    /// ```
    /// use phalanx_comm::{Call, GroupOptions, ProcessGroup};
    /// use std::time::Duration;
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let hasty = group.with_call(Call { timeout: Some(Duration::from_secs(1)), ..Call::default() });
    /// hasty.barrier().unwrap();
    /// ```
    #[must_use]
    pub fn with_call(&self, call: Call) -> Self {
        ProcessGroup {
            core: Arc::clone(&self.core),
            defaults: Call {
                algorithm: match call.algorithm {
                    Algorithm::Auto => self.defaults.algorithm,
                    own => own,
                },
                label: call.label.or_else(|| self.defaults.label.clone()),
                timeout: call.timeout.or(self.defaults.timeout),
            },
        }
    }

    /// A zeroed bucket for operations of this group. Where all ranks share memory it is
    /// *registered*: the others can read and write it in place, so that collectives on
    /// it need not copy ([`Bucket::is_registered`]). It keeps that memory alive, and
    /// may be used with any group.
    ///
    /// # Panics
    ///
    /// As [`Bucket::zeroed`].
    pub fn bucket<T: Element>(&self, len_elems: usize) -> Bucket<T> {
        Bucket::in_arena(self.core.arena.as_ref(), len_elems)
    }

    /// Registers memory of another library: replaces the pages at `start` by pages that the other ranks of the group map,
    /// with the same contents and at the same address. Collectives on its [buckets](Registered::bucket) copy nothing when
    /// the data of all ranks is registered. Returns `None`, and leaves the pages, if the ranks are threads or on several
    /// hosts, if `start` is not the start of a page, or if there is no memory. Does not communicate.
    ///
    /// # Safety
    ///
    /// At `start` begins a mapping of `bytes`, rounded up to whole pages, which no other process uses, nor this one before
    /// this returns. These pages are not used after the [`Registered`] and its last bucket are dropped. After an
    /// operation on them has failed, other ranks may still write to them.
    pub unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Option<Registered> {
        // SAFETY: as this function's.
        unsafe { Registered::new(self.core.arena.as_ref(), start, bytes) }
    }

    /// What this rank's collectives in shared memory have moved so far.
    pub fn counters(&self) -> CollectiveBytes {
        self.core.counters.read()
    }

    /// Ends the group for all ranks, at once and from any thread: operations
    /// in flight fail with `Aborted`, naming this rank and `cause` (of which
    /// 400 bytes are kept). The first cause wins.
    pub fn abort(&self, cause: &str) {
        let core = &*self.core;
        core.recorder
            .failed((core.generation, core.id), cause, Failure::Aborted);
        core.abort.poison(&Poison::new(core.rank, cause));
    }

    /// Ties this [subgroup](Self::new_group) to its `parent`: when `parent` ends by [`abort`](Self::abort) or by an error
    /// of any rank, this group ends for all its ranks too, with the same cause, as soon as this rank waits in either
    /// group. So ranks that wait in one group notice a failure of the other. Does not communicate.
    pub fn end_with(&self, parent: &ProcessGroup) {
        self.core.abort.follow(&parent.core.abort);
    }

    /// Checks for an abort and for lost peers. For code that waits for something other than an operation of this group.
    /// Does not wait for other ranks. While operations are in flight, also those of other threads, it checks for an abort
    /// only; those operations notice lost peers.
    ///
    /// # Errors
    ///
    /// `Aborted` naming the rank whose failure came first; `PeerLost`.
    pub fn check(&self) -> Result<()> {
        if let Some(poison) = self.core.abort.poisoned() {
            return Err(poison.to_error().with_rank(self.core.rank));
        }
        let checked = self.core.queue.run_if_idle(|runner| runner.check());
        checked.unwrap_or(Ok(()))
    }

    /// Sets what this rank is doing from now on (`backward`, `optimizer`), of which 24 bytes are shown. Other ranks
    /// report it when this rank is late or dies. It extends no deadline: see [`phase`](Self::phase).
    ///
    /// *Cost:* tens of nanoseconds.
    pub fn set_phase(&self, name: &str) {
        self.core.recorder.set_phase(name);
    }

    /// Declares that this rank works alone in a phase `name` (`loading data`, `evaluating`, `saving`, of which 24 bytes
    /// are shown), for at most `limit`, until the guard is dropped. Other ranks wait for it meanwhile.
    ///
    /// *Deadlines.* The deadline of an operation, also one of a [`Call`] or of the first operation, counts from when the
    /// operation began, or from the last moment at which another rank of the group was in such a phase, whichever is
    /// later. So a phase may take longer than the deadline, while a rank in no phase is reported within it:
    ///
    /// | a rank in a phase | the others' operations end |
    /// |---|---|
    /// | leaves it and joins the operation | successfully |
    /// | leaves it and does not join | after the deadline, counted from the end of the phase |
    /// | is still in it at `limit` | after the deadline, counted from `limit` |
    /// | is stopped (SIGSTOP), or its host hangs | after the deadline, counted from its last heartbeat |
    /// | dies | at once |
    ///
    /// A thread of the process sends the heartbeats: through memory on one host, twice a second; through the store where
    /// ranks share no memory, as often in small groups and every five seconds in large ones. Deadlines below ten seconds
    /// are too short for the latter, and below three seconds count as three while ranks are in phases.
    ///
    /// A rank has one phase at a time: a nested phase replaces the outer one until it ends. A phase does not count while
    /// its rank is in an operation. [`monitored_barrier`](Self::monitored_barrier) and the forming of groups keep their
    /// own limits.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use std::time::Duration;
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// {
    ///     let _evaluating = group.phase("evaluating", Duration::from_secs(1800));
    ///     // … what this rank does alone …
    /// }
    /// group.barrier().unwrap();
    /// ```
    ///
    /// *Cost:* less than a microsecond.
    pub fn phase(&self, name: &str, limit: Duration) -> PhaseGuard {
        PhaseGuard::begin(&self.core.recorder, name, limit)
    }

    /// Whether this rank is in a declared [`phase`](Self::phase) whose limit is not over.
    pub fn in_phase(&self) -> bool {
        self.core.recorder.is_busy()
    }

    /// Asks the launcher for the time `grace` between SIGTERM and SIGKILL when the job is interrupted, to save a
    /// checkpoint. `phalanx launch` and `phalanx train` use the longest time that a rank asks for, unless
    /// `--stop-grace-s` is given. Other launchers (torchrun, Slurm) ignore it.
    pub fn set_stop_grace(&self, grace: Duration) {
        self.core.recorder.set_stop_grace(grace);
    }

    /// Sets this rank's position in the training; both are counted from 1.
    pub fn set_position(&self, epoch: u64, step: u64) {
        self.core.recorder.set_position(epoch, step);
    }

    /// Sets the directory to which this rank writes its flight recorder when it fails,
    /// as `rank-N.json`, unless `PHALANX_FLIGHT_DIR` or an earlier call has set it.
    /// Under a launcher that reads the recorders itself, nothing is written here.
    pub fn set_flight_dir(&self, dir: &std::path::Path) {
        self.core.recorder.set_dir(dir);
    }

    /// The contents of this rank's flight recorder: its last 4096 operations in all
    /// groups. *Cost:* a few milliseconds.
    pub fn flight(&self) -> crate::recorder::Dump {
        self.core.recorder.dump()
    }

    /// Ends the group in order: finishes the issued operations, waits for all ranks to
    /// do the same, and leaves. Other handles to this group accept no more operations;
    /// this one is consumed:
    ///
    /// ```compile_fail,E0382
    /// fn end(group: phalanx_comm::ProcessGroup) {
    ///     group.shutdown().unwrap();
    ///     group.barrier().unwrap();
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As any operation; the rank leaves the group nevertheless.
    pub fn shutdown(self) -> Result<()> {
        let result = self.core.messages.close().and_then(|()| self.goodbye());
        self.core.queue.close();
        result
    }

    /// A mistake found before anything was sent.
    fn usage(&self, name: &str, message: String) -> Error {
        Error::usage(message)
            .with_rank(self.core.rank)
            .with_operation(name)
    }
}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.core.rank)
            .field("world", &self.core.world)
            .field("id", &self.core.id)
            .finish_non_exhaustive()
    }
}

/// A rank's membership in a group, and the limits of its operations.
#[derive(Clone)]
struct Member {
    rank: usize,
    world: usize,
    id: u32,
    generation: u32,
    limits: Limits,
    algorithm: Algorithm,
    /// `None`: this is its first group.
    identity: Option<Identity>,
}

/// FNV-1a, to compare values that should be equal on all ranks.
fn fnv(words: impl Iterator<Item = u64>) -> u64 {
    words
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

/// A short hash of lengths, never 0; see `Signature::lengths`.
fn lengths_hash(lengths: impl Iterator<Item = usize>) -> u16 {
    let hash = fnv(lengths.map(|len| len as u64));
    let folded = hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48);
    (folded as u16).max(1)
}

/// Ranks as text: `0, 2-4, 7`.
fn rank_list(ranks: &[usize]) -> String {
    rank_runs(ranks).join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn ranks_are_listed_in_runs() {
        let list = super::rank_list;
        assert_eq!(list(&[]), "");
        assert_eq!(list(&[3]), "3");
        assert_eq!(list(&[0, 1]), "0, 1");
        assert_eq!(list(&[0, 2, 3, 4, 7, 8]), "0, 2-4, 7, 8");
    }
}
