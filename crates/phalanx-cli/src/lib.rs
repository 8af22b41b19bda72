//! The command `phalanx`: the command line and what it starts. Programs use the crate `phalanx` instead.
#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod cli;
mod compare;
mod doctor;
mod export;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod live;
mod new;
mod pack;
mod plan;
mod predict;
mod report;
mod training;
mod units;

use phalanx_base::{error, format, say, stop};
use phalanx_launch::{self as launch, inspect};

/// Runs the command line of this process: the body of the program's `main`.
pub fn main() -> std::process::ExitCode {
    let helped = launch::run_helper(phalanx::watch::killed);
    // The processes of tasks. Guards are the launcher's: these know what to do when it was killed.
    #[cfg(feature = "flow")]
    let helped = helped.or_else(phalanx_flow::run_helper);
    if let Some(outcome) = helped {
        return launch::exit_code(outcome);
    }
    launch::log::start();
    stop::tell_limits();
    // A launcher has several for each rank.
    phalanx_comm::raise_open_files();
    cli::main()
}
