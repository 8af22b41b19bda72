//! `phalanx launch`: N ranks of any program, started, watched, ended together.
//!
//! ```text
//! LaunchCli ─resolve─▶ LaunchArgs ─prepare─▶ LaunchPlan ─run─▶ ranks
//!   (typed)   pure      (meant)    files      (will be)   store, nodes,
//!              args, cluster, streams   plan, token         guard, ranks
//! ```
//!
//! Who does what while ranks run:
//!
//! * the **main thread** starts the ranks (the kernel's parent-death signal
//!   goes by thread, so it must be one that lives as long as the launcher),
//!   then takes events one by one and asks [`machine`] what to do;
//! * a thread for each rank waits for its end, two more pump its output;
//! * one thread waits for signals; with several nodes, one for the others;
//! * a **guard** process ends what is left when the launcher is killed.
//!
//! Each run has a folder of its own (`folder.rs`) for the ranks' error files: under
//! `--log-dir`, or a private one that is removed at the end. The token and the
//! flight recorders are memory files of the launcher, which ranks and all that
//! they start open by the launcher's `/proc/PID/fd`.

mod alone;
mod args;
mod cluster;
mod contract;
mod flight;
mod folder;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod guard;
mod job;
mod machine;
mod nodes;
mod oom;
mod plan;
mod pump;
mod ranks;
mod reap;
mod report;
mod same_host;
mod shim;
mod signals;
mod streams;
mod token;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub(crate) use alone::{Asking, alone_by_mistake};
pub(crate) use args::{LaunchCli, count_of_ranks, untyped_ranks};
pub(crate) use cluster::{RankPlace, half_a_rank, number, rank_place, real_env};
pub(crate) use guard::guard;
pub(crate) use oom::memory_limit;
pub(crate) use ranks::Prefix;
pub(crate) use report::{hand_over, rank_list, signal_name};
pub(crate) use same_host::store_file;
pub(crate) use shim::{ShimCli, exec_rank};
pub(crate) use signals::{end_on_signals, ignored as is_ignored};
pub(crate) use token::{given as given_token, write_token};

use crate::error::Result;
use crate::say;
use args::LaunchArgs;
use machine::End;
use plan::LaunchPlan;
use report::Verdict;

/// torchrun's port, for jobs on several nodes.
pub(crate) const DEFAULT_PORT: u16 = 29500;

/// From SIGTERM to SIGKILL: long enough to say goodbye, short enough that
/// everything is gone within two seconds.
pub(crate) const STOP_GRACE: Duration = Duration::from_millis(1500);

/// What the main thread hears of.
enum Event {
    /// A local rank ended then.
    Ended(usize, End, Instant),
    /// A rank was reaped, and its group is gone.
    Reaped,
    /// We got this signal then.
    Signal(i32, Instant),
    /// Ctrl-Z.
    Suspend,
    /// SIGUSR1: for the ranks, which may save and end.
    Checkpoint,
    /// Another node wrote a verdict.
    Abort(Box<Verdict>),
    /// The store does not answer any more.
    StoreLost(String),
    /// Somebody wants to see the flight recorders.
    Dump,
}

/// Whether a launcher of ours has started this process, or one above it.
pub(crate) fn is_under_a_launcher_of_ours() -> bool {
    std::env::var_os(contract::STORE_VARIABLE).is_some()
}

/// `phalanx launch`.
pub(crate) fn run(cli: &LaunchCli) -> Result<()> {
    let env = cluster::real_env();
    let args = LaunchArgs::resolve(cli, &env, cores())?;
    job::run(&LaunchPlan::prepare(args, &env)?)
}

/// How many ranks `auto` means: the cores that we may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Ranks on this host that a command starts for itself.
#[derive(Clone, Debug)]
pub(crate) struct LocalRun {
    /// How many.
    pub(crate) ranks: usize,
    /// The program; this very binary if not set otherwise.
    pub(crate) program: OsString,
    /// Its arguments.
    pub(crate) args: Vec<OsString>,
    /// Variables in addition to the launcher's contract.
    pub(crate) variables: Vec<(OsString, OsString)>,
    /// Whose lines get a prefix.
    pub(crate) prefix: Prefix,
    /// Rank 0 writes to our stderr itself, so that its progress bar sees the
    /// terminal. Its last lines are then not known to the report.
    pub(crate) rank0_owns_stderr: bool,
    /// From SIGTERM to SIGKILL.
    pub(crate) stop_grace: Duration,
    /// Where the ranks' flight recorders are written when the run fails.
    pub(crate) flight_dir: Option<PathBuf>,
}

impl LocalRun {
    /// `ranks` times this binary with `args`. Rank 0 speaks for the job: its
    /// lines are not prefixed, and on a terminal it draws on it directly.
    pub(crate) fn new(ranks: usize, args: Vec<OsString>) -> Self {
        use std::io::IsTerminal;
        LocalRun {
            ranks,
            program: std::env::current_exe()
                .map_or_else(|_| own_program(), PathBuf::into_os_string),
            args,
            variables: Vec::new(),
            prefix: Prefix::AllButRank0,
            rank0_owns_stderr: std::io::stderr().is_terminal(),
            stop_grace: STOP_GRACE,
            flight_dir: None,
        }
    }
}

/// Starts the ranks on this host and stays until all have ended; the store
/// is hosted on a free loopback port. Whatever the environment says about
/// nodes is not asked.
///
/// Must be called on a thread that lives as long as the process, best the
/// main one.
///
/// # Errors
/// The root cause; its [`exit_code`](crate::error::Error::exit_code) is the
/// job's, printing it is the caller's.
pub(crate) fn run_local(local: LocalRun) -> Result<()> {
    let env = cluster::real_env();
    let plan = LaunchPlan {
        meeting: None,
        meeting_timeout: Duration::ZERO,
        master_port: None,
        bind: None,
        local_ranks: local.ranks,
        run_id: plan::random_id()?,
        max_restarts: 0,
        logs: None,
        token: token::mint()?,
        stop_grace: local.stop_grace,
        handler_grace: local.stop_grace,
        grace_is_typed: false,
        ranks_tell: true,
        flight_dir: local.flight_dir,
        role: "default".to_owned(),
        prefix: local.prefix,
        rank0_owns_stderr: local.rank0_owns_stderr,
        program: local.program,
        args: local.args,
        variables: local.variables,
        threads_set: env.contains_key("OMP_NUM_THREADS"),
    };
    let result = job::run(&plan);
    if result.is_err() && plan.rank0_owns_stderr {
        // Rank 0's progress bar may have left the cursor inside a line.
        say::note("");
    }
    result
}

/// This very binary, even when the file was replaced by a newer build while
/// we run.
fn own_program() -> OsString {
    "/proc/self/exe".into()
}
