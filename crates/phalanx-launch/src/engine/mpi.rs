//! Open MPI: `MPI_Bcast` from process 0, by the library that belongs to the `mpirun` which started us.
//!
//! Open MPI's own channel is PMIx, whose protocol is no standard and changes between versions; its C library is. A
//! process of our own that lives for a second calls it: MPI's threads, signal handlers and memory hooks stay
//! out of the training, a library that ends the process or hangs ends or is killed there, and Open MPI 4.1 and
//! 5.0 accept a child in place of the process that they started.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use phalanx_process::helper_command;
use phalanx_process::proc_stat::stat;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::child::{self, ProcessOutput};
use super::{WaitNotice, by_hand};
use crate::error::{Error, ErrorKind, Result, refuse};
use crate::place::{self, Env};
use crate::system;

/// Names of the library. Versions 1.10 to 5 have the first one.
const NAMES: [&str; 2] = ["libmpi.so.40", "libmpi.so"];

/// Libraries of Open MPI's that `mpirun` and its daemons use; MPI's lies next to them or one folder above.
const SIBLINGS: [&str; 5] = ["libopen-", "libprrte", "libpmix", "libmpi", "mca_"];

/// Starts the line with the result, as MPI may print lines of its own.
const MARK: &str = "phalanx-mpi: ";

/// Sends `text` (of process 0, `None` elsewhere) to all.
pub(super) fn broadcast(
    env: &Env,
    processes: usize,
    text: Option<&str>,
    deadline: Instant,
    mut waiting: WaitNotice,
) -> Result<String> {
    let library = library(env);
    let mut command = helper_command(crate::MPI_BROADCAST);
    command
        .args([std::process::id().to_string(), processes.to_string()])
        .arg(&library);
    if let Some(folder) = library.parent().filter(|_| library.is_absolute()) {
        // Where the library finds the others of its version.
        let others = place::text(env, "LD_LIBRARY_PATH");
        let mut path = folder.as_os_str().to_owned();
        if let Some(others) = others {
            path.push(":");
            path.push(others);
        }
        command.env("LD_LIBRARY_PATH", path);
    }
    let tick = || waiting.tick("the other processes of this job in MPI_Init", deadline);
    let ended = child::run(command, text.unwrap_or_default(), deadline, tick);
    let ended = ended.map_err(system("cannot run a process that asks Open MPI"))?;
    let Some(ProcessOutput { status, out, err }) = ended else {
        return Err(by_hand(
            Error::new(
                ErrorKind::Timeout,
                "not all processes of this job have come to Open MPI's MPI_Init",
            )
            .note(
                "perhaps",
                format!(
                    "some ended, or mpirun is of another version than {}",
                    library.display()
                ),
            ),
        ));
    };
    let result = out.lines().find_map(|line| line.strip_prefix(MARK));
    if let (true, Some(result)) = (status.success(), result) {
        return Ok(result.to_owned());
    }
    let err = err.trim().trim_start_matches("error: ");
    let why = match err.is_empty() {
        true => format!("it ended with {status}"),
        // Open MPI prints pages.
        false => err.chars().take(600).collect(),
    };
    let error = Error::usage(format!("Open MPI does not carry the job's token: {why}"));
    Err(by_hand(error.note(
        "or",
        "set LD_LIBRARY_PATH to the folder of Open MPI's libmpi.so.40 (mpirun -x LD_LIBRARY_PATH)",
    )))
}

/// The MPI library: in `OPAL_PREFIX`, which relocated installations set; next to the libraries and the program of
/// the processes that started this one, one of which is `mpirun` or its daemon; else wherever the loader looks.
fn library(env: &Env) -> PathBuf {
    let mut folders = Vec::new();
    if let Some(prefix) = place::text(env, "OPAL_PREFIX") {
        folders.extend(["lib", "lib64"].map(|lib| Path::new(prefix).join(lib)));
    }
    let mut pid = std::process::id();
    while let Some(stat) = stat(pid).filter(|stat| stat.parent > 1) {
        pid = stat.parent;
        folders.extend(next_to(pid));
    }
    folders
        .iter()
        .flat_map(|folder| NAMES.map(|name| folder.join(name)))
        .find(|file| file.is_absolute() && file.is_file())
        .unwrap_or_else(|| PathBuf::from(NAMES[0]))
}

/// Folders in which a process that is Open MPI's has its libraries; none for other processes, and those
/// of other users.
fn next_to(pid: u32) -> Vec<PathBuf> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut folders = Vec::new();
    for line in maps.lines() {
        let Some(path) = line.find('/').map(|at| Path::new(&line[at..])) else {
            continue;
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if SIBLINGS.iter().any(|start| name.starts_with(start)) {
            folders.extend(path.ancestors().skip(1).take(3).map(Path::to_owned));
        }
    }
    let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    if let (false, Some(prefix)) = (folders.is_empty(), exe.ancestors().nth(2)) {
        folders.extend(["lib", "lib64"].map(|lib| prefix.join(lib)));
    }
    folders
}

/// The helper process: `phalanx mpi-broadcast PID PROCESSES LIBRARY`, with the text on standard input.
pub(crate) fn helper(mut args: impl Iterator<Item = OsString>) -> Result<()> {
    let parent: Option<i32> = args.next().and_then(|pid| pid.to_str()?.parse().ok());
    let processes = args.next().and_then(|count| count.to_str()?.parse().ok());
    let (Some(parent), Some(processes), Some(library)) = (parent, processes, args.next()) else {
        refuse!("mpi-broadcast needs a process id, a number of processes and a library");
    };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(std::io::Error::from)
        .map_err(system("cannot tie this process to its parent"))?;
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
        return Err(Error::new(ErrorKind::PeerLost, "the parent is gone"));
    }
    let mut text = String::new();
    std::io::stdin()
        .take(phalanx_mpi::MAX_BYTES as u64 + 1)
        .read_to_string(&mut text)
        .map_err(system("cannot read the text"))?;
    let text = Some(text.as_str()).filter(|text| !text.is_empty());
    let got = phalanx_mpi::broadcast(Path::new(&library), processes, text).map_err(Error::usage)?;
    writeln!(std::io::stdout(), "{MARK}{got}").map_err(system("cannot write the text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_lies_in_the_prefix_or_is_left_to_the_loader() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("lib64");
        std::fs::create_dir(&lib).unwrap();
        let prefix = dir.path().to_str().unwrap().to_owned();
        let env = Env::from([("OPAL_PREFIX".to_owned(), prefix)]);
        // No mpirun has started this test.
        assert_eq!(library(&env), Path::new(NAMES[0]));
        std::fs::write(lib.join("libmpi.so"), "").unwrap();
        assert_eq!(library(&env), lib.join("libmpi.so"));
        std::fs::write(lib.join(NAMES[0]), "").unwrap();
        assert_eq!(library(&env), lib.join(NAMES[0]));
    }

    #[test]
    fn what_is_no_mpi_library_is_an_error_that_names_it() {
        let error = |path: &str| phalanx_mpi::broadcast(Path::new(path), 2, None).unwrap_err();
        let text = error("/no/such/libmpi.so.40");
        assert!(text.contains("cannot load /no/such/libmpi.so.40"), "{text}");
        let text = error("libc.so.6");
        assert!(
            text.contains("libc.so.6 is not Open MPI's library"),
            "{text}"
        );
    }
}
