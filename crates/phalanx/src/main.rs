//! The `phalanx` program: the command line and what it starts.
#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod cli;
mod compare;
mod convert;
mod download;
mod error;
mod export;
#[cfg(test)]
mod fuzzing;
mod inspect;
mod launch;
mod log;
mod plan;
mod predict;
mod ranks;
mod say;
mod stop;
mod train;

fn main() -> std::process::ExitCode {
    log::start();
    stop::tell_limits();
    // A launcher has several for each rank.
    phalanx_comm::raise_open_files();
    cli::main()
}
