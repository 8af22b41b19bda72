//! Gradient reducer and `DistributedDataParallel`.
//!
//! Three layers, each usable without the one above it:
//!
//! * [`BucketPlan`]: which parameter's gradient lies in which bucket. Pure.
//! * [`Reducer`]: owns the bucket memory, hands out the slice in which a
//!   gradient is to be produced, starts a bucket's all-reduce the moment its
//!   last gradient is final, and gives the averaged gradients back. It speaks
//!   parameter indices and plain slices, so any engine can drive it.
//! * [`DistributedDataParallel`]: the reducer as gradient sink and gradient view
//!   of a `phalanx-nn` model; compares the ranks' models and broadcasts rank
//!   0's parameters and buffers when it is built.
//!
//! # Order
//!
//! The average over ranks is the process group's: with its default (canonical)
//! algorithms a left fold in ascending rank order followed by one
//! multiplication by `1 / world`. It depends on neither bucket layout nor timing,
//! so training on P ranks equals accumulating P micro-batches in one process,
//! bit for bit, and `tests/accumulation.rs` proves it.
//!
//! With [`Deterministic::Shards`] it does not depend on the number of ranks
//! either: gradients are added over logical shards of the global batch in one
//! fixed tree (`tree.rs`, `shards.rs`).
//!
//! # Steps
//!
//! `backward(&mut ddp)` and `finish` are a step of one micro-batch, averaged
//! plainly over ranks. [`DistributedDataParallel::begin`] starts one of
//! several, weighted by samples (`step.rs` has the rule).
//!
//! # Blocking
//!
//! Producing gradients never blocks on a peer; [`Reducer::finish`] and the
//! construction of [`DistributedDataParallel`] and `begin` do, each under the process group's
//! deadlines.
#![forbid(unsafe_code)]

mod bucket;
mod data_parallel;
mod ddp;
mod equal;
mod error;
mod fingerprint;
mod hooks;
mod joined;
mod low_rank;
mod meeting;
mod messages;
mod own_grads;
mod power_sgd;
mod reducer;
mod route;
mod shards;
mod stages;
mod state;
mod step;
mod sync_norm;
mod trace;
mod tree;
mod typed;
mod vote;
mod zero;

pub use bucket::{BucketCaps, BucketPlan};
pub use data_parallel::{DataParallel, Replica, Traffic};
pub use ddp::{
    Buffers, DdpOptions, DdpState, Deterministic, DistributedDataParallel, Every, Unused,
    all_share_memory,
};
pub use equal::verify_equal;
pub use error::{Error, ErrorKind, Result};
pub use fingerprint::Fingerprint;
pub use hooks::{
    Bf16Gradients, F16Gradients, GradBucket, GradTensor, GradientHook, HookState, LocalGradients,
    LocalSgd,
};
pub use joined::{JoinedShard, JoinedShards};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use reducer::{Exchange, ParamSpec, Reducer, ReducerOptions};
pub use stages::{Received, Sent, receive_activation, send_activation};
pub use state::agree_on_state;
pub use step::{Average, GlobalBatch, GlobalStep, Uneven};
pub use sync_norm::SyncBatchNorm;
pub use trace::{BucketTimes, StepTimes};
pub use tree::ShardTree;
pub use typed::{GradType, Gradient};
pub use vote::{Commit, Veto};
pub use zero::ShardedOptimizer;
