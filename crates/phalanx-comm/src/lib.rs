//! Process groups and collectives over threads, shared memory and TCP.
//!
//! A [`ProcessGroup`] is one rank's membership in a group of ranks, which are
//! processes (on one host or many) or threads of one process. Together they
//! broadcast, reduce, gather, scatter and exchange plain slices of numbers, in
//! the caller's thread or in the background ([`Work`], [`Bucket`]).
//!
//! What sets it apart:
//!
//! * *Determinism.* Reductions are left folds in ascending rank order, with one
//!   rounding at the end: the same bits on all ranks, in all runs, over all
//!   transports and for all bucket layouts ([`ReduceOp`]). The ring and rails add in
//!   another order and must be requested ([`Algorithm`]).
//! * *No hangs.* Every operation has a deadline, and its error names the ranks waited for; ranks in a declared phase are
//!   waited for longer ([`ProcessGroup::phase`]). Every frame names its operation, so ranks in different operations find
//!   out at once. The first failure ends the operations of all ranks, and all report *that* failure.
//! * *Plans as data.* What each rank sends, receives and adds is a value
//!   ([`plan`]), checked for every world size up to 64 without any I/O.
//!
//! # Example
//!
//! ```
//! use phalanx_comm::{Bucket, Call, GroupOptions, ProcessGroup, ReduceOp};
//!
//! let groups = ProcessGroup::threads(2, GroupOptions::default());
//! std::thread::scope(|scope| {
//!     for group in groups {
//!         scope.spawn(move || {
//!             let gradients = Bucket::from_slice(&[group.rank() as f32; 1000]);
//!             let work = group.all_reduce_async(gradients, ReduceOp::Mean, Call::default());
//!             // … the rest of the backward pass runs here …
//!             let gradients = work.wait()?;
//!             assert!(gradients.iter().all(|g| *g == 0.5));
//!             group.shutdown()
//!         });
//!     }
//! });
//! ```
//!
//! # Layers
//!
//! Each module imports from those below it only; `crates/phalanx-cli/tests/it/layers.rs` checks that.
//!
//! | layer | does |
//! |---|---|
//! | `group` | [`ProcessGroup`]: checks arguments, queues operations |
//! | `backend` | numbers operations, enforces deadlines, ends a group that failed; other libraries could move the data below it |
//! | `messages` | sends and receives, matched by sender and tag |
//! | `exec`, `shm` | run a plan over links; collectives in memory that all ranks share |
//! | `stall`, [`recorder`] | find late ranks, and ranks in different operations |
//! | `select` | chooses the method, by predicted cost |
//! | `memory` | buckets and their memory |
//! | [`transport`] | thread, shared-memory and TCP links; how groups form |
//! | `status` | what each rank is doing, readable by the ranks of its host |
//! | `operation` | an operation, and what ranks compare of it |
//! | [`plan`] | what each rank sends, receives and folds, as data |
//! | `wait`, `region` | sleeping and waking; mapped memory |
//! | `phalanx-fold` | element types, reductions and their arithmetic |

mod backend;
mod context;
mod deadline;
mod dtype;
mod error;
mod exec;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod inherited;
mod limits;
mod lost;
mod memory;
mod messages;
mod notice;
mod operation;
pub mod plan;
pub mod recorder;
mod region;
mod select;
mod shm;
mod stall;
mod status;
mod sync;
pub mod transport;
mod wait;

pub use dtype::Element;
pub use error::{Error, ErrorKind, Result};
pub use group::{
    Buffer, Call, Detached, Formation, GroupOptions, InitOptions, Input, MAX_OBJECT_BYTES, OpTimes,
    P2POp, Peer, PhaseGuard, ProcessGroup, Transport, Work, format_ranks, read_token,
};
pub use inherited::{inherited_socket, open as open_inherited};
pub use limits::raise_open_files;
pub use lost::report_lost;
pub use memory::{Bucket, Registered};
pub use notice::{NoticeListener, set_notice_listener};
pub use phalanx_fold::{DType, ReduceOp, all_finite, largest};
pub use select::{Algorithm, Costs, Rules, Selector};
pub use shm::CollectiveBytes;
pub use transport::{MAX_LOCAL_RANKS, PortRange, TransportKind};
