//! Distributed data-parallel training of Burn modules: what `torchrun` and `DistributedDataParallel` are to PyTorch.
//!
//! [`DistributedDataParallel`] gives every rank the same weights and averages [`GradientsParams`](burn::optim::GradientsParams)
//! over the ranks, bucket by bucket. Any module, device with autodiff and optimizer of Burn works as it is.
//!
//! [`DeviceChoice`] is the flag `--device` of a program: it opens the CPU, or the card of a rank.
//!
//! With the feature `train`, [`DataParallel`] runs Burn's `Learner` on all ranks.
//!
//! With the feature `nn`, [`OnDevice`] runs models of phalanx-nn on a device of Burn.
//!
//! A program is started by [`main`] or [`main_with`], which take `--nproc-per-node` and the other flags about ranks, or forms
//! its process group by hand ([`comm::ProcessGroup::init`]). The guide is `docs/guide/burn.md`; `examples/mnist_burn.rs` trains a
//! CNN on MNIST.
#![forbid(unsafe_code)]

mod ddp;
mod device;
#[cfg(feature = "train")]
mod learner;
#[cfg(feature = "nn")]
mod nn;
mod tensors;

use std::process::ExitCode;

pub use clap;
pub use ddp::{DistributedDataParallel, Step};
pub use device::DeviceChoice;
#[cfg(feature = "train")]
pub use learner::DataParallel;
#[cfg(feature = "nn")]
pub use nn::{DeviceStep, DeviceTensor, OnDevice};
pub use phalanx_base::{Error, ErrorKind, Result};
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
/// use phalanx_burn::comm::ReduceOp;
///
/// fn main() -> ExitCode {
///     phalanx_burn::main(|rank| {
///         let mut sum = [rank.rank() as f32];
///         rank.group().all_reduce(&mut sum, ReduceOp::Sum)?;
///         rank.line(&format!("{} ranks: {sum:?}", rank.world()))
///     })
/// }
/// ```
pub fn main(train: impl Fn(&RankContext) -> Result<()> + Sync) -> ExitCode {
    phalanx_launch::main(train)
}

/// As [`main`], of a program that has flags of its own, which clap reads into `A`.
pub fn main_with<A: clap::Args + Send + Sync>(
    train: impl Fn(&RankContext, &A) -> Result<()> + Sync,
) -> ExitCode {
    phalanx_launch::main_with(train)
}
