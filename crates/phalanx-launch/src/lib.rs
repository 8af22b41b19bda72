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
//! * one thread waits for signals; with several nodes, up to three for the others, and
//!   where they may start again one for the end of the attempt; on node 0 one decides what follows;
//! * a **guard** process ends what is left when the launcher is killed.
//!
//! Each run has a folder of its own (`folder.rs`) for the ranks' error files: under
//! `--log-dir`, or a private one that is removed at the end. The token and the
//! flight recorders are memory files of the launcher, which ranks and all that
//! they start open by the launcher's `/proc/PID/fd`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
pub mod config;
mod context;
mod contract;
mod ending;
mod engine;
mod evict;
mod flags;
mod flight;
mod folder;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod guard;
pub mod inspect;
mod job;
pub mod log;
mod machine;
mod nodes;
mod numa;
mod oom;
mod place;
mod plan;
mod port;
mod proc_stat;
mod program;
mod pump;
mod rank_args;
mod ranks;
mod reap;
mod report;
mod same_host;
mod shim;
mod signals;
mod start;
mod streams;
mod threads;
mod token;
mod torchrun;
pub mod words;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use context::{Elastic, RankContext};
pub use flags::{LaunchCli, RankArgs, TransportArg};
pub use guard::Guard;
pub use oom::memory_limit;
pub use phalanx_base::env::{number, real_env};
pub use phalanx_live::Address;
pub use place::{Process, rank_place};
pub use rank_args::{PrintingRanks, check_local_ranks, run as run_ranks, start};
pub use reap::{adopt_orphans, reap_group};
pub use report::rank_list;
pub use start::{NoArgs, main, main_of, main_with};
pub use threads::{Cores, Threads};
pub use token::write_token;

use phalanx_base::{error, format, say, stop};
use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};

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
    /// This launcher got this signal at this time.
    Signal(i32, Instant),
    /// Ctrl-Z.
    Suspend,
    /// SIGUSR1, to be forwarded to the ranks, which may save and end.
    Checkpoint,
    /// Another node wrote a verdict.
    Abort(Box<JobFailure>),
    /// This attempt has ended, and another one may follow.
    Over(u32, Box<JobFailure>),
    /// The connection to the store has ended; the headline.
    StoreLost(String),
    /// Nothing comes from this node any more.
    NodeLost(usize),
    /// The other nodes have lost this one, and go on.
    WasLost,
    /// The store is at another launcher now.
    StoreMoved(Moved),
    /// This launcher reaches too few of the others to go on.
    Parted,
    /// On node 0: the last launcher of the attempt joins it.
    Admit(Box<Attempt>),
    /// SIGUSR2: write the flight recorders.
    Dump,
}

/// `phalanx launch`.
pub fn run(cli: &LaunchCli) -> Result<()> {
    let env = real_env();
    let args = LaunchArgs::resolve(cli, &env, cores())?;
    job::run(&LaunchPlan::prepare(args, &env)?)
}

/// Locks `mutex`; a thread that panicked leaves nothing half written in ours.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(system("cannot start a thread"))
}

/// Makes the error with `message` of what a call of the system or a library gave.
fn system<E>(message: impl Into<String>) -> impl FnOnce(E) -> Error
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let message = message.into();
    move |cause| Error::new(ErrorKind::System, message).caused_by(cause)
}

/// The number of ranks for `auto`: the cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// This binary, even when its file was replaced by a newer build meanwhile.
fn own_program() -> OsString {
    "/proc/self/exe".into()
}

/// Tells builds of the program apart that runs as this process.
pub fn program_digest() -> String {
    let program = std::fs::read(own_program()).unwrap_or_default();
    format!("SHA-256 {}…", hex::encode(&Sha256::digest(program)[..6]))
}

/// A command that runs this program again with `args`, in a session and process group of its
/// own. The kernel kills it when the calling thread ends, and `guard` its group when this process
/// does. Its standard input is empty. This program's `main` calls [`run_helper`] first.
///
/// # Errors
///
/// When the guard cannot be reached.
pub fn tied_command(
    guard: &Guard,
    args: impl IntoIterator<Item = OsString>,
) -> std::io::Result<std::process::Command> {
    use std::os::unix::process::CommandExt;
    let mut command = std::process::Command::new(own_program());
    command
        .arg0(HELPER_NAME)
        .args([EXEC_RANK, &std::process::id().to_string()])
        .arg(guard.pipe_for_rank()?)
        .arg("-")
        .arg(own_program())
        .args(args)
        .stdin(std::process::Stdio::null());
    Ok(command)
}

/// The exit code of a command that ended so. An error is left to the launcher of this process, if
/// it has one (which prints it once, with what else it knows), or printed here.
pub fn exit_code(outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    let text = error.render();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    let text = Some(text).filter(|_| !error.is_told());
    if !report::hand_over(text, error.exit_code()) {
        error.print();
    }
    tell_other_nodes(&error);
    ExitCode::from(error.exit_code())
}

/// Tells the other nodes of the job why this one, whose command line is wrong, does not start; once `error` has been
/// printed. *Blocks* for up to 10 s, if this is the launcher of one of several nodes which have not met.
pub fn tell_other_nodes(error: &error::Error) {
    nodes::tell(error);
}

/// Where the launcher has started this program as one of its helper processes: does that
/// helper's work and returns its outcome. Every program that starts ranks calls this first.
pub fn run_helper() -> Option<Result<()>> {
    let mut args = std::env::args_os();
    if args.next()? != HELPER_NAME {
        return None;
    }
    match args.next()?.to_str()? {
        GUARD => Some(guard::guard()),
        EXEC_RANK => Some(shim::exec_rank(args)),
        MPI_BROADCAST => Some(engine::helper(args)),
        _ => None,
    }
}

/// The name of helper processes (their first argument), and their commands.
const HELPER_NAME: &str = "phalanx";
const GUARD: &str = "guard";
const EXEC_RANK: &str = "exec-rank";
const MPI_BROADCAST: &str = "mpi-broadcast";
