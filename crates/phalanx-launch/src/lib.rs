//! `phalanx launch` as a library: N ranks of any program, started, watched, ended together.
//!
//! ```text
//! LaunchCli ─resolve─▶ LaunchArgs ─prepare─▶ LaunchPlan ─run─▶ ranks
//!  (flags)    pure     (settings)   files     (checked)   store, nodes,
//!              args, place, streams     plan, token         guard, ranks
//! RankArgs ─place─▶ Place: one rank, or a node ────▶
//! ```
//!
//! Threads and processes while ranks run:
//!
//! * the **main thread** starts the ranks (the kernel's parent-death signal
//!   goes by thread, so it must be one that lives as long as the launcher),
//!   then takes events one by one and asks `machine` what to do;
//! * a thread for each rank waits for its end, two more pump its output;
//! * one thread waits for signals; with several nodes, up to three watch the other launchers, and with restarts one
//!   waits for the end of the attempt; on node 0 one decides what follows;
//! * a **guard** process ends the remaining processes when the launcher is killed.
//!
//! Each run has a folder of its own (`phalanx_process::folder`) for the ranks' error files: under
//! `--log-dir`, or a private one that is removed at the end. The token and the
//! flight recorders are memory files of the launcher, which ranks and all that
//! they start open by the launcher's `/proc/PID/fd`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
pub mod config;
mod contract;
mod ending;
mod engine;
mod evict;
mod flags;
mod flight;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gpus;
pub mod inspect;
mod job;
mod job_files;
pub mod log;
mod machine;
mod nodes;
mod numa;
mod place;
mod plan;
mod port;
mod program;
mod rank_args;
mod ranks;
mod report;
mod start;
mod streams;
mod tail;
mod threads;
mod token;
mod torchrun;
mod unknown;
pub mod words;

use std::time::{Duration, Instant};

pub use ending::{Training, sentence};
pub use flags::{LaunchCli, RankArgs, TransportArg};
pub use gpus::gpus;
pub use job::Launch;
pub use phalanx_base::env::{number, real_env};
pub use phalanx_member::RankContext;
pub use phalanx_process::error_file::exit_code;
pub use place::{Process, rank_place};
pub use rank_args::{PrintingRanks, check_local_ranks, run as run_ranks, start};
pub use start::{NoArgs, main, main_of, main_with};
pub use threads::{Cores, Threads};
pub use token::write_token;

use phalanx_base::error::system;
use phalanx_base::{cores, error, format, lock, say, stop};
use phalanx_process::signals::Caught;

use crate::error::{Error, Result};

use args::LaunchArgs;
use machine::ExitStatus;
use nodes::{Attempt, Moved};
use plan::LaunchPlan;
use report::JobFailure;

/// torchrun's port, for jobs on several nodes.
const DEFAULT_PORT: u16 = 29500;

/// From SIGTERM to SIGKILL: short enough that all processes are gone within two seconds.
const STOP_GRACE: Duration = Duration::from_millis(1500);

/// Events for the main thread.
enum Event {
    /// A local rank ended at this time.
    Ended(usize, ExitStatus, Instant),
    /// A rank was reaped, and its process group is gone.
    Reaped,
    /// This launcher got this signal. SIGUSR1 is forwarded to the ranks, which may save and end; at SIGUSR2 the flight
    /// recorders are written.
    Signal(Caught),
    /// Another node wrote a verdict.
    Abort(Box<JobFailure>),
    /// This attempt has ended, and another one may follow.
    Over(u32, Box<JobFailure>),
    /// The connection to the store has ended; the headline.
    StoreLost(String),
    /// This node is lost: it was silent for too long.
    NodeLost(usize),
    /// The other nodes have lost this one, and continue.
    WasLost,
    /// The store has moved to another launcher.
    StoreMoved(Moved),
    /// This launcher reaches too few of the others to continue.
    Parted,
    /// On node 0: the last launcher of the attempt joins it.
    Admit(Box<Attempt>),
}

/// `phalanx launch`: `run` runs its job.
pub fn run(cli: &LaunchCli, run: RunJob) -> Result<()> {
    let env = real_env();
    let args = LaunchArgs::resolve(cli, &env, cores())?;
    run(Launch::new(LaunchPlan::prepare(args, &env)?)?)
}

/// Runs a job as this process's program does: shows it on a page, for example.
pub type RunJob = fn(Launch) -> Result<()>;

/// Starts a thread.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(system("cannot start a thread"))
}

/// Where the launcher has started this program as one of its helper processes: does that
/// helper's work and returns its outcome. Every program that starts ranks calls this first. `killed` completes a training whose
/// launcher was killed; the error says that.
pub fn run_helper(killed: impl FnOnce(&Training, &Error)) -> Option<Result<()>> {
    match phalanx_process::helper()? {
        (name, args) if name == MPI_BROADCAST => Some(engine::helper(args)),
        _ => phalanx_process::run_helper(|notes| ending::killed(notes, killed)),
    }
}

/// A helper process of an MPI launcher.
const MPI_BROADCAST: &str = "mpi-broadcast";
