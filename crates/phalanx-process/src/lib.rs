//! Starts, watches and ends processes: children that end with the process that has started them, what they print, why
//! they were killed, signals.
//!
//! * `shim`: the process that ties itself to its supervisor and then becomes the child's program;
//! * `guard`: a process that ends what is left when the supervisor is killed;
//! * `reap`: waiting for orphans; `pump`: copying output; `oom`: whether the kernel's out-of-memory killer ended a child;
//! * `signals`: signals as events; `folder`: the private folder of a run; `error_file`: the error that a child ends with.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod error_file;
pub mod folder;
mod guard;
pub mod oom;
pub mod proc_stat;
pub mod pump;
pub mod reap;
mod shim;
pub mod signals;

use std::env::ArgsOs;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use phalanx_base::Result;

pub use guard::{Guard, Notes};

/// The name of helper processes (their first argument), and their commands.
const HELPER_NAME: &str = "phalanx";
const GUARD: &str = "guard";
const EXEC_CHILD: &str = "exec-child";

/// This binary, even when its file was replaced by a newer build meanwhile.
pub fn own_program() -> OsString {
    "/proc/self/exe".into()
}

/// A command that runs this program as its helper `name`.
pub fn helper_command(name: &str) -> Command {
    let mut command = Command::new(own_program());
    command.arg0(HELPER_NAME).arg(name);
    command
}

/// A command that becomes the program and the arguments that are added to it, in a session and process group of its
/// own, on these processors (`None`: on all of this process). The kernel kills it when the calling thread ends, and `guard`
/// its group when this process does. This program's `main` calls [`run_helper`] first.
///
/// # Errors
///
/// When the guard cannot be reached.
pub fn tied_command(guard: &Guard, processors: Option<&Vec<usize>>) -> std::io::Result<Command> {
    let mut command = helper_command(EXEC_CHILD);
    command
        .arg(std::process::id().to_string())
        .arg(guard.pipe_for_child()?)
        .arg(shim::processors_word(processors));
    Ok(command)
}

/// The name and the arguments of the helper that this program has been started as, if it has.
pub fn helper() -> Option<(String, ArgsOs)> {
    let mut args = std::env::args_os();
    if args.next()? != HELPER_NAME {
        return None;
    }
    Some((args.next()?.into_string().ok()?, args))
}

/// Where this program has been started as one of the helper processes of this crate: does that helper's work and returns its
/// outcome. Every program that starts children calls this first. A guard whose supervisor was killed calls `killed` with the
/// supervisor's notes, and what that returns once the private folder is removed.
pub fn run_helper<F: FnOnce()>(killed: impl FnOnce(Notes) -> F) -> Option<Result<()>> {
    let (name, args) = helper()?;
    match &name[..] {
        GUARD => Some(guard::guard(killed)),
        EXEC_CHILD => Some(shim::exec_child(args)),
        _ => None,
    }
}
