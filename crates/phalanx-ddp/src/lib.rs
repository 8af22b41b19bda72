//! Gradient reducer and `DistributedDataParallel`.
//!
//! Three layers, each usable without the one above it:
//!
//! * [`BucketPlan`]: assigns gradients to buckets. Pure.
//! * [`Reducer`]: owns the bucket memory, returns the slice in which a gradient is to
//!   be produced, starts a bucket's all-reduce the moment its last gradient is final,
//!   and returns the averaged gradients. It uses parameter indices and plain slices, so
//!   any engine can drive it.
//! * [`DistributedDataParallel`]: the reducer as gradient sink and gradient view
//!   of a `phalanx-nn` model; compares the ranks' models and broadcasts rank
//!   0's parameters and buffers when it is built.
//!
//! # Without the engine
//!
//! Feature `nn`, on by default, adds everything that needs `phalanx-nn`: [`DistributedDataParallel`] and its steps,
//! [`ShardedOptimizer`] and [`SyncBatchNorm`]. Without it, [`Replica`] is the wrapper for a model of another
//! engine whose gradients are there when its backward has ended (`adapters/candle` and `adapters/burn` stand on it). With
//! the parts below it, a model is any type that implements [`Parameters`] (names, shapes and slices), and the training
//! loop does the wrapper's work while backward runs; `examples/plain.rs` is an example:
//!
//! 1. [`Fingerprint`] compares the ranks' models and options.
//! 2. [`broadcast_parameters`] gives every rank the values of rank 0.
//! 3. Each backward writes into [`Reducer::slot`] and calls [`Reducer::ready`]; [`Reducer::finish`] ends the step.
//! 4. [`verify_equal`] checks that the ranks still have the same weights.
//!
//! Micro-batches ([`Reducer::plan_step`]), votes, hooks ([`GradientHook`]) and scattered gradients ([`Exchange`]) are
//! available as well.
//!
//! # Order
//!
//! The process group averages over ranks: with its default (canonical) algorithms a
//! left fold in ascending rank order, followed by one multiplication by `1 / world`. It
//! depends on neither bucket layout nor timing, so training on P ranks equals
//! accumulating P micro-batches in one process, bit for bit, and
//! `tests/it/nn/accumulation.rs` proves it.
//!
//! With [`Deterministic::Shards`] it does not depend on the number of ranks
//! either: gradients are added over logical shards of the global batch in one
//! fixed tree (`nn/tree.rs`, `nn/shards.rs`).
//!
//! # Steps
//!
//! `backward(&mut ddp)` and `finish` are a step of one micro-batch, with the plain mean
//! over ranks. [`DistributedDataParallel::begin`] starts a step of several, weighted by
//! samples (`nn/step.rs` has the rule).
//!
//! # Blocking
//!
//! Producing gradients never blocks on a peer; [`Reducer::finish`] and the
//! construction of [`DistributedDataParallel`] and `begin` do, each under the process group's
//! deadlines.
#![forbid(unsafe_code)]
// Links to items that need the engine.
#![cfg_attr(not(feature = "nn"), allow(rustdoc::broken_intra_doc_links))]

mod average;
mod bucket;
mod equal;
mod error;
mod fingerprint;
mod hooks;
mod messages;
#[cfg(feature = "nn")]
mod nn;
mod parameters;
mod reducer;
mod replica;
mod trace;
mod vote;

pub use average::{Average, GlobalBatch, Uneven};
pub use bucket::{BucketCaps, BucketPlan, GradBucket, GradTensor, all_share_memory};
pub use equal::{digest, verify_equal};
pub use error::{Error, ErrorKind, Result};
pub use fingerprint::Fingerprint;
pub use hooks::{Bf16Gradients, F16Gradients, GradientHook, HookState, LocalGradients};
#[cfg(feature = "nn")]
pub use nn::*;
pub use parameters::{ParamSpec, Parameters, broadcast_parameters};
pub use reducer::{Exchange, Reducer, ReducerOptions};
pub use replica::{HostTensor, HostTensors, Replica, ReplicaOptions};
pub use trace::{BucketTimes, StepTimes};
pub use vote::{Commit, Veto};
