//! The training loop as a library.
//!
//! [`Job`] is what a program gets on each rank, [`Trainer`] the model in training: the loop stays
//! in the program, the trainer does what belongs to it (sharded batches, averaged gradients, the
//! ranks' vote, optimizer and schedule, evaluation over all ranks, checkpoints and resume,
//! metrics and progress). [`Settings`] are the training flags that every program takes.
//!
//! Programs start with `phalanx::main`, which makes the job from the command line. A [`Strategy`] distributes the training over
//! the ranks: [`Ddp`], or [`OnMesh`].

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod advice;
mod args;
mod batch;
mod best;
mod deliveries;
mod evaluation;
mod folder;
mod job;
mod log;
mod lr_finder;
mod param_group;
#[cfg(feature = "images")]
mod predictions;
mod profile;
mod reporter;
mod run;
mod sample_log;
mod saving;
mod split;
mod strategy;
mod timing;
mod trainer;
mod update;

pub use args::{
    Defaults, Determinism, ExchangeArg, FolderArgs, LabelArgs, Mesh, MeshArgs, OF_ONE_RUN,
    PrecisionArg, SamplerKind, SavingArgs, Settings, SplitArgs, Start, TuneArgs, check_folder_of,
};
pub use batch::{Batches, Engine, MicroBatchOf, StepBatch};
pub use best::EarlyStopping;
pub use evaluation::{Evaluation, Measure};
pub use folder::{Files, PreparedRun, RunDir, file_of, prepare_run, weights_of};
pub use job::Job;
pub use phalanx_base::error::{Error, ErrorKind, Result};
pub use phalanx_member::RankContext;
pub use phalanx_track::{TrackArgs, Tracker};
#[cfg(feature = "images")]
pub use predictions::Predictions;
pub use reporter::{EpochLines, Reporter, StepInfo};
pub use run::{About, Run};
pub use strategy::{Ddp, MicroBatch, OnMesh, Strategy};
pub use trainer::{Epochs, PendingUpdate, Trainer, TrainerBuilder};

use phalanx_base::{error, format, say, stop};

use std::path::{Path, PathBuf};

/// Folder for flight recorders, in a run's output folder.
pub const FLIGHT_DIR: &str = "flight";

/// The name of a choice on the command line.
pub fn choice_name(choice: &impl clap::ValueEnum) -> String {
    let value = choice.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The error of a comparison of all ranks at the start. Ranks that differ there were started with different arguments, which
/// is a usage error.
pub(crate) fn different_arguments(error: phalanx_ddp::Error) -> error::Error {
    let is_mismatch = error.kind() == phalanx_ddp::ErrorKind::Mismatch;
    let error = error::Error::from(error);
    if is_mismatch {
        error.into_usage()
    } else {
        error
    }
}

/// `FILE.<rank>.<ending>`, the file of one rank.
fn of_rank(file: &Path, rank: usize, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{rank}.{ending}"));
    name.into()
}
