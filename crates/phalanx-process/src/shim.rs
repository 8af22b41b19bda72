//! The process that becomes a child's program.
//!
//! A parent-death signal can only be set by the child itself, after the fork
//! and without unsafe code in the supervisor: so the supervisor starts itself as
//! `phalanx exec-child PID GUARD PROCESSORS PROGRAM ARGS...`, which ties its life to the supervisor's
//! (process PID) and its guard's (pipe GUARD), binds itself to the processors (`0,1,2`, or `-` for all)
//! and then execs the program. The kernel keeps both over the exec, and the program gets the standard input of the shim.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getppid, set_parent_process_death_signal, setsid};
use rustix::thread::{CpuSet, sched_setaffinity};

use phalanx_base::error::system;
use phalanx_base::{Error, ErrorKind, Result};

use crate::error_file::ERRORS_VARIABLE;
use crate::guard;

/// The argument that names the processors for the shim.
pub fn processors_word(processors: Option<&Vec<usize>>) -> String {
    let numbers = processors.into_iter().flatten().map(usize::to_string);
    let numbers: Vec<String> = numbers.collect();
    match numbers.is_empty() {
        true => "-".to_owned(),
        false => numbers.join(","),
    }
}

/// Binds this process to the processors of such a word.
fn bind_to(word: &str) -> Result<()> {
    let mut set = CpuSet::new();
    for number in word.split(',').filter_map(|number| number.parse().ok()) {
        if number < CpuSet::MAX_CPU {
            set.set(number);
        }
    }
    let bound = sched_setaffinity(None, &set).map_err(std::io::Error::from);
    bound.map_err(system(format!(
        "cannot bind the process to processors {word}"
    )))
}

/// Binds this process to its supervisor and becomes the program, both as `args` say. Returns
/// only if that fails.
///
/// Order matters. First an own session, hence an own process group: from
/// then on ending the group ends all that the program may start. Then
/// the guard gets to know the group. Then the death signal. Then the look
/// whether the supervisor is still there: if it died before the signal was set,
/// the kernel would never send it, but our parent is another process now.
///
/// The guard's pipe is opened by the supervisor's `/proc/PID/fd`, so that no descriptor of it
/// leaks into the program. That fails when the supervisor is gone; the child does not start then.
pub(crate) fn exec_child(mut args: impl Iterator<Item = OsString>) -> Result<()> {
    let parent = args
        .next()
        .and_then(|pid| pid.to_str()?.parse::<i32>().ok());
    let (Some(parent), Some(guard)) = (parent, args.next()) else {
        return Err(Error::usage("exec-child needs a process id and a pipe"));
    };
    let (Some(processors), Some(program)) = (args.next(), args.next()) else {
        return Err(Error::usage("exec-child needs processors and a program"));
    };
    let session = setsid().map_err(std::io::Error::from);
    session.map_err(system("cannot start a session for the process"))?;
    let announced = guard::announce(&guard);
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(std::io::Error::from)
        .map_err(system("cannot tie the process to its launcher"))?;
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return Err(Error::new(
            ErrorKind::PeerLost,
            "the launcher is gone, so the process does not start",
        ));
    }
    // Held until the exec, which closes it.
    let _guard = announced.map_err(system("cannot reach the guard"))?;
    if let Some(word) = processors.to_str().filter(|word| *word != "-") {
        bind_to(word)?;
    }
    let mut command = Command::new(&program);
    command.args(args);
    // Only the process itself: what it starts may fail without consequence.
    command.env(ERRORS_VARIABLE, std::process::id().to_string());
    let error = command.exec();
    Err(Error::usage(format!("cannot start {}", program.display())).caused_by(error))
}
