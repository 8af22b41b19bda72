//! Distributed data-parallel training of candle models: what `torchrun` and `DistributedDataParallel` are to PyTorch.
//!
//! [`DistributedDataParallel`] gives every rank the same weights and averages the gradients of a loss over the ranks, bucket
//! by bucket. Any model in a `VarMap` and any of candle's optimizers work as they are; [`AdamW`] and [`Sgd`] have a state
//! that [`save`](DistributedDataParallel::save) keeps.
//!
//! A program is started by [`main`] or [`main_with`], which take `--nproc-per-node` and the other flags about ranks, or forms
//! its process group by hand ([`comm::ProcessGroup::init`]). The guide is `docs/guide/candle.md`; `examples/mnist_candle.rs` trains a
//! CNN on MNIST.
#![forbid(unsafe_code)]

use std::process::ExitCode;

mod checkpoint;
mod ddp;
mod error;
mod optim;
mod tensors;

pub use clap;
pub use ddp::{DistributedDataParallel, Step};
pub use error::{Error, Result};
pub use optim::{AdamW, ParamsSgd, Resumable, Sgd, State};
pub use phalanx_base::ErrorKind;
pub use phalanx_comm as comm;
pub use phalanx_ddp::{Average, BucketCaps, GlobalBatch, ReplicaOptions, Uneven};
pub use phalanx_launch::RankContext;

/// Runs `train` on every rank, as the command line says: the body of a program's `main`.
///
/// `--nproc-per-node N` starts N ranks of the program; under `phalanx launch`, torchrun, Slurm or MPI it is one of theirs;
/// without either it trains alone. Errors are printed, and their kind decides the exit code. `--help` lists the flags.
///
/// ```no_run
/// use std::process::ExitCode;
/// use phalanx_candle::comm::ReduceOp;
///
/// fn main() -> ExitCode {
///     phalanx_candle::main(|rank| {
///         let mut sum = [rank.rank() as f32];
///         rank.group().all_reduce(&mut sum, ReduceOp::Sum)?;
///         Ok(rank.line(&format!("{} ranks: {sum:?}", rank.world()))?)
///     })
/// }
/// ```
pub fn main(train: impl Fn(&RankContext) -> Result<()> + Sync) -> ExitCode {
    phalanx_launch::main(|rank| Ok(train(rank)?))
}

/// As [`main`], of a program that has flags of its own, which clap reads into `A`.
pub fn main_with<A: clap::Args + Send + Sync>(
    train: impl Fn(&RankContext, &A) -> Result<()> + Sync,
) -> ExitCode {
    phalanx_launch::main_with(|rank, args| Ok(train(rank, args)?))
}
