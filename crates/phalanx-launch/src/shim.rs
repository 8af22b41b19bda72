//! The process that becomes a rank's program.
//!
//! A parent-death signal can only be set by the child itself, after the fork
//! and without unsafe code in the launcher: so the launcher starts itself as
//! `phalanx exec-rank PID PROGRAM ARGS...`, which ties its life to the launcher's
//! (process PID) and then execs the program. The kernel keeps the tie over the exec.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Signal, getppid, set_parent_process_death_signal, setsid};

use super::contract::ERRORS_VARIABLE;
use super::guard;
use crate::error::{Error, ErrorKind, Result};

/// Binds this process to the launcher and becomes the program, both as `args` say. Returns
/// only if that fails.
///
/// Order matters. First an own session, hence an own process group: from
/// then on whoever ends the group ends all that the program may start. Then
/// the guard gets to know the group. Then the death signal. Then the look
/// whether the launcher is still there: if it died before the signal was set,
/// the kernel would never send it, but our parent is another process now.
///
/// Until the exec, stdin is a writing end of the guard's pipe; that way it
/// needs no descriptor that could leak into the program.
pub fn exec_rank(mut args: impl Iterator<Item = OsString>) -> Result<()> {
    let parent = args
        .next()
        .and_then(|pid| pid.to_str()?.parse::<i32>().ok());
    let (Some(parent), Some(program)) = (parent, args.next()) else {
        return Err(Error::usage("exec-rank needs a process id and a program"));
    };
    let failed = |what: &str, error: rustix::io::Errno| {
        Error::new(ErrorKind::System, what.to_owned()).caused_by(std::io::Error::from(error))
    };
    setsid().map_err(|error| failed("cannot start a session for the rank", error))?;
    guard::announce(std::io::stdin());
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| failed("cannot tie the rank to its launcher", error))?;
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return Err(Error::new(
            ErrorKind::PeerLost,
            "the launcher is gone, so the rank does not start",
        ));
    }
    let mut command = Command::new(&program);
    command.args(args).stdin(Stdio::null());
    // Only the rank itself: what it starts may fail without consequence.
    command.env(ERRORS_VARIABLE, std::process::id().to_string());
    let error = command.exec();
    Err(Error::usage(format!("cannot start {}", program.display())).caused_by(error))
}
