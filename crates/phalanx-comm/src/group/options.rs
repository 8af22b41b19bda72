//! Options of groups and calls.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use phalanx_wire::Token;

use crate::PortRange;
use crate::operation::Limits;
use crate::select::{Algorithm, Rules};
use crate::transport::Transport;

/// Time for all ranks to join (docs/design/collectives.md §9).
const FORMING: Duration = Duration::from_secs(300);
/// Time for the first operation of a group: ranks load and compile unevenly.
const FIRST_OPERATION: Duration = Duration::from_secs(600);
/// Time for every later operation: PyTorch's default for CPU groups is 30 minutes, for NCCL 10. A
/// late rank is named after 10 s in any case.
const OPERATION: Duration = Duration::from_secs(600);
/// One frame: large enough that headers cost nothing, small enough that a
/// second one is in flight while the first is being read (docs/design/collectives.md §4).
const SEGMENT_BYTES: usize = 512 << 10;

/// How a group of processes is formed, and the limits of its operations.
#[derive(Clone, Debug)]
pub struct InitOptions {
    /// Where the ranks meet: `env://` (the variables `MASTER_ADDR` and
    /// `MASTER_PORT`), `tcp://host:port`, or `file:///path`: rank 0 writes
    /// the address of the store into this file, and removes the file when all ranks have joined.
    pub init_method: String,
    /// This process's rank; default: the variable `RANK`. Without a rank and a number of ranks, and where no launcher or
    /// cluster engine has started this process, it is the only rank.
    pub rank: Option<usize>,
    /// Number of ranks; default: the variable `WORLD_SIZE`.
    pub world_size: Option<usize>,
    /// The job's secret; default: the file named by `PHALANX_TOKEN_FILE`,
    /// then the variable `PHALANX_TOKEN`. With `file://` rank 0 makes one and
    /// writes it into the file.
    pub token: Option<Token>,
    /// How many times the job has been re-formed; default: the variables
    /// `PHALANX_EPOCH`, then `TORCHELASTIC_RESTART_COUNT`, then 0. Ranks of different
    /// generations do not meet.
    pub generation: Option<u32>,
    /// Deadline for all ranks to join; 300 s.
    pub timeout: Duration,
    /// Deadline of an operation; 600 s.
    pub op_timeout: Duration,
    /// Deadline of the first operation; 600 s.
    pub first_op_timeout: Duration,
    /// Which transport to use.
    pub transport: Transport,
    /// The address on which this rank listens for its peers; default: loopback
    /// when the ranks meet there, otherwise the address from which the meeting
    /// point is reached. Never all interfaces.
    pub bind: Option<IpAddr>,
    /// The ports on which this rank listens for ranks of other hosts, for firewalls; default: the variable
    /// `PHALANX_PORT_RANGE`, then any free port. The port of `init_method` must be one of them.
    pub port_range: Option<PortRange>,
    /// Most payload bytes in one frame; 512 KiB.
    pub segment_bytes: usize,
    /// Capacity of one shared-memory ring; default: chosen by the world size.
    pub ring_bytes: Option<usize>,
    /// Address space for the registered buckets of each rank, where ranks
    /// share memory; default: 16 GiB, or what the system grants. 0 turns
    /// registration off. Memory is used when it is touched; buckets that do not fit are
    /// on the heap. The lowest rank of a host decides.
    pub arena_bytes: Option<usize>,
    /// Least size of a rank's input for the other ranks of its host to read it in
    /// place, registered or not (broadcast, all-gather, gather, scatter, all-to-all;
    /// `process_vm_readv`), instead of from a stage, which saves one copy. Default:
    /// chosen by measurement. Never used with `PHALANX_SINGLE_COPY=0` and on systems
    /// that forbid it.
    pub single_copy_min_bytes: Option<usize>,
    /// The algorithm of all-reduces whose [`Call`] sets none.
    pub algorithm: Algorithm,
    /// Methods by operation and size, where neither the call nor `algorithm` sets one;
    /// those of the variable `PHALANX_ALGORITHM` take precedence. The same on all
    /// ranks.
    pub rules: Rules,
    /// Whether the network between hosts is measured while the group forms (a few
    /// milliseconds; not on one host); the variable `PHALANX_PROBE=0` turns it off. The
    /// same on all ranks.
    pub probe: bool,
    /// Threads with which this rank computes; default: the variables
    /// `PHALANX_THREADS`, then `OMP_NUM_THREADS`, then 1. Together with those of the
    /// other ranks of the host it decides whether a waiting rank may poll or must leave
    /// its core to a compute thread.
    pub compute_threads: Option<usize>,
}

impl Default for InitOptions {
    fn default() -> Self {
        InitOptions {
            init_method: "env://".into(),
            rank: None,
            world_size: None,
            token: None,
            generation: None,
            timeout: FORMING,
            op_timeout: OPERATION,
            first_op_timeout: FIRST_OPERATION,
            transport: Transport::Auto,
            bind: None,
            port_range: None,
            segment_bytes: SEGMENT_BYTES,
            ring_bytes: None,
            arena_bytes: None,
            single_copy_min_bytes: None,
            algorithm: Algorithm::Auto,
            rules: Rules::default(),
            probe: true,
            compute_threads: None,
        }
    }
}

impl InitOptions {
    pub(super) fn limits(&self) -> Limits {
        Limits {
            first_op_timeout: self.first_op_timeout,
            op_timeout: self.op_timeout,
            segment_bytes: self.segment_bytes,
            single_copy_min_bytes: self.single_copy_min_bytes,
        }
    }
}

/// Options of a group of threads.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// Deadline of an operation; 600 s.
    pub op_timeout: Duration,
    /// Deadline of the first operation; 600 s.
    pub first_op_timeout: Duration,
    /// Most payload bytes in one frame; 512 KiB.
    pub segment_bytes: usize,
    /// Capacity of the ring between two ranks; default: chosen by the world
    /// size.
    pub ring_bytes: Option<usize>,
    /// Address space for the registered buckets of each rank, where ranks
    /// share memory; default: 16 GiB, or what the system grants. 0 turns
    /// registration off. Memory is used when it is touched; buckets that do not fit are
    /// on the heap. The lowest rank of a host decides.
    pub arena_bytes: Option<usize>,
    /// Least size of a rank's input for the other ranks of its host to read it in
    /// place, registered or not (broadcast, all-gather, gather, scatter, all-to-all;
    /// `process_vm_readv`), instead of from a stage, which saves one copy. Default:
    /// chosen by measurement. Never used with `PHALANX_SINGLE_COPY=0` and on systems
    /// that forbid it.
    pub single_copy_min_bytes: Option<usize>,
    /// The algorithm of all-reduces whose [`Call`] sets none.
    pub algorithm: Algorithm,
    /// Methods by operation and size, where neither the call nor `algorithm` sets one.
    pub rules: Rules,
    /// Ranks per host, to try out plans for several hosts in one process; empty: all
    /// ranks are on one host. It changes neither memory nor waiting.
    pub ranks_per_host: Vec<usize>,
    /// Threads with which each rank computes; see
    /// [`InitOptions::compute_threads`].
    pub compute_threads: Option<usize>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions {
            op_timeout: OPERATION,
            first_op_timeout: FIRST_OPERATION,
            segment_bytes: SEGMENT_BYTES,
            ring_bytes: None,
            arena_bytes: None,
            single_copy_min_bytes: None,
            algorithm: Algorithm::Auto,
            rules: Rules::default(),
            ranks_per_host: Vec::new(),
            compute_threads: None,
        }
    }
}

impl GroupOptions {
    pub(super) fn limits(&self) -> Limits {
        Limits {
            first_op_timeout: self.first_op_timeout,
            op_timeout: self.op_timeout,
            segment_bytes: self.segment_bytes,
            single_copy_min_bytes: self.single_copy_min_bytes,
        }
    }
}

/// Options of one call. The group has the defaults.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// How an all-reduce is carried out; other collectives ignore it. All
    /// ranks must choose alike.
    pub algorithm: Algorithm,
    /// The name of this operation in errors, e.g. the bucket and its parameters.
    pub label: Option<Arc<str>>,
    /// Deadline of this operation, counted from when it starts to run. An error may
    /// come up to a sixteenth (at most a second) later, so that ranks that know the
    /// culprit report it first.
    pub timeout: Option<Duration>,
}
