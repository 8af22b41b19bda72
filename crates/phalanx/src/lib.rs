//! Distributed data-parallel training: what `torchrun`, `torch.distributed` and
//! `DistributedDataParallel` are to Python.
//!
//! A training program is a `main` that calls [`main()`]:
//!
//! ```no_run
//! use phalanx::prelude::*;
//!
//! fn main() -> ExitCode {
//!     phalanx::main(|job| {
//!         let (train, test) = mnist::open("synthetic", job.settings().seed)?;
//!         let mut trainer = job.trainer(&train, MnistCnn::new, Sgd::new).start()?;
//!         for _epoch in trainer.epochs() {
//!             for batch in trainer.batches(&train)? {
//!                 trainer.step(&batch, |model, batch| {
//!                     let scores = model.forward(batch.images()?)?;
//!                     scores.nll_loss(batch.labels(), batch.samples())
//!                 })?;
//!             }
//!             trainer.evaluate(&test, |model, batch| {
//!                 let scores = model.forward(batch.images()?)?;
//!                 let measure = Measure::of_scores(&scores, batch.labels())?;
//!                 Ok(measure.with_loss(scores.nll_loss(batch.labels(), 1.0)?))
//!             })?;
//!         }
//!         trainer.finish()?;
//!         Ok(())
//!     })
//! }
//! ```
//!
//! The crate re-exports the others; what the trainer uses (tape, reducer, process group) can be used without it. The command `phalanx` is the crate `phalanx-cli`.
//!
//! Features, none of them a default: `flow`, workflows; `images`, `phalanx::image` for PNG and netpbm files; `mlflow`, a
//! program's `--mlflow`, and `https` for servers with TLS; `parquet`, `phalanx::data::parquet` and tables in such files.
#![forbid(unsafe_code)]

pub mod prelude;
mod program;
mod spawn;
mod training;
#[doc(hidden)]
pub mod watch;

#[cfg(feature = "flow")]
pub mod flow {
    //! Workflows: tasks of a program, with retries, time limits and cached results.
    pub use phalanx_flow::*;

    /// As [`phalanx_flow::main`], of a program whose tasks may train on several ranks.
    pub fn main(flow: Flow) -> std::process::ExitCode {
        match phalanx_launch::run_helper(crate::watch::killed) {
            Some(outcome) => phalanx_launch::exit_code(outcome),
            None => phalanx_flow::main(flow),
        }
    }

    /// As [`phalanx_flow::run_helper`], also for the helpers of a launcher.
    pub fn run_helper() -> Option<Result<()>> {
        phalanx_launch::run_helper(crate::watch::killed).or_else(phalanx_flow::run_helper)
    }
}

/// The command-line parser, with which programs declare their own flags ([`main_with`]).
pub use clap;
pub use phalanx_checkpoint as checkpoint;
pub use phalanx_comm as comm;
pub use phalanx_data as data;
pub use phalanx_ddp as ddp;
pub use phalanx_global as global;
pub use phalanx_launch::{NoArgs, PrintingRanks};
pub use phalanx_member as member;
pub use phalanx_nn as nn;
#[cfg(feature = "images")]
pub use phalanx_report::image;
pub use phalanx_store as store;
pub use phalanx_train as train;
pub use phalanx_train::{Error, ErrorKind, Job, Result, Trainer};
pub use phalanx_wire as wire;
pub use program::{Program, main, main_with};
pub use spawn::{Cause, SpawnError, Spawned, spawn};
#[doc(hidden)]
pub use training::{Subcommand, Training};

/// The README and pages of `docs/`, whose Rust blocks are compiled and run as tests.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide/quick-start.md")]
    struct QuickStart;
    #[doc = include_str!("../../../docs/guide/own-model.md")]
    struct OwnModel;
    #[doc = include_str!("../../../docs/guide/training.md")]
    struct TrainingPage;
    #[doc = include_str!("../../../docs/guide/fine-tune.md")]
    struct FineTune;
    #[doc = include_str!("../../../docs/guide/own-data.md")]
    struct OwnData;
    #[doc = include_str!("../../../docs/guide/trackers.md")]
    struct Trackers;
    #[doc = include_str!("../../../docs/guide/several-machines.md")]
    struct SeveralMachines;
    #[doc = include_str!("../../../docs/guide/from-pytorch.md")]
    struct FromPytorch;
    #[doc = include_str!("../../../docs/guide/hang.md")]
    struct Hang;
    #[doc = include_str!("../../../docs/guide/reproducibility.md")]
    struct Reproducibility;
    #[doc = include_str!("../../../docs/guide/global-tensors.md")]
    struct GlobalTensors;
    #[doc = include_str!("../../../docs/guide/faq.md")]
    struct Faq;
    #[doc = include_str!("../../../docs/design/global.md")]
    struct GlobalDesign;
    #[cfg(feature = "flow")]
    #[doc = include_str!("../../../docs/guide/workflows.md")]
    struct Workflows;
}
