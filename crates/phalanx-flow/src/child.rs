//! The process of an attempt: this program, started again, which limits itself and then becomes
//! the task's command or calls the task's function.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use phalanx_data::files::read_regular;
use phalanx_process::error::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

/// The hidden argument of this process; its own is the file with [`Start`].
const ATTEMPT: &str = "flow-attempt";

/// The file that every process of an attempt has open.
const ALIVE: &str = "alive";

/// What the process shall do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// The command; `None`: the function of `task`.
    pub argv: Option<Vec<String>>,
    pub task: String,
    pub env: BTreeMap<String, String>,
    /// Inputs of a function; a file or folder is its path.
    pub inputs: Map<String, Json>,
    /// The attempt's folder.
    pub dir: PathBuf,
    pub limits: ProcessLimits,
}

/// Limits that the process sets for itself.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessLimits {
    pub cgroup: Option<PathBuf>,
    pub address_space: Option<u64>,
    pub file_size: Option<u64>,
    pub cpus: Vec<usize>,
}

/// The attempt's folders and files.
pub(crate) fn work_dir(attempt: &Path) -> PathBuf {
    attempt.join("work")
}
pub(crate) fn outputs_dir(attempt: &Path) -> PathBuf {
    attempt.join("outputs")
}
pub(crate) fn log_file(attempt: &Path) -> PathBuf {
    attempt.join("log.txt")
}

/// Writes `start` into the attempt's folder; returns the arguments of its process.
pub(crate) fn prepare(start: &Start) -> Result<[OsString; 2]> {
    let path = start.dir.join("start.json");
    fs::write(start.dir.join(ALIVE), "")
        .and_then(|()| fs::write(&path, serde_json::to_vec(start)?))
        .map_err(|error| crate::objects::cannot("write", &path, error))?;
    Ok([ATTEMPT.into(), path.into()])
}

/// A task's function, given its inputs and the folder for its outputs.
pub(crate) type Call<'a> = dyn Fn(&str, Map<String, Json>, &Path) -> Result<()> + 'a;

/// Where this process is that of an attempt: does its work and returns how it ended.
pub(crate) fn run(call: Option<&Call<'_>>) -> Option<Result<()>> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != ATTEMPT {
        return None;
    }
    let path = PathBuf::from(args.next()?);
    Some(attempt(&path, call))
}

fn attempt(path: &Path, call: Option<&Call<'_>>) -> Result<()> {
    let bytes = read_regular(path, 64 << 20)?;
    let start: Start = serde_json::from_slice(&bytes)
        .map_err(|error| Error::usage(format!("cannot read {}: {error}", path.display())))?;
    // Not closed by an exec: all that this process starts has it open too.
    let alive = open(start.dir.join(ALIVE), OFlags::RDWR, Mode::empty())
        .and_then(|file| flock(&file, FlockOperation::LockShared).map(|()| file))
        .map_err(|error| refused("lock the attempt's folder", error))?;
    start.limits.apply()?;
    let work = work_dir(&start.dir);
    std::env::set_current_dir(&work)
        .map_err(|error| crate::objects::cannot("enter", &work, error))?;
    let Some(argv) = &start.argv else {
        let call = call.ok_or_else(|| {
            Error::usage(format!(
                "task {:?} is a function of another program",
                start.task
            ))
        })?;
        let outcome = call(&start.task, start.inputs, &outputs_dir(&start.dir));
        drop(alive);
        return outcome;
    };
    let (program, args) = argv
        .split_first()
        .ok_or_else(|| Error::usage("an empty command"))?;
    let mut command = Command::new(program);
    command.args(args).envs(&start.env);
    // Set by the launcher's helper for ranks.
    command.env_remove("PHALANX_ERRORS");
    std::mem::forget(alive);
    let error = command.exec();
    Err(Error::usage(format!("cannot start {program:?}")).caused_by(error))
}

impl ProcessLimits {
    fn apply(&self) -> Result<()> {
        if let Some(group) = &self.cgroup {
            let file = group.join("cgroup.procs");
            fs::write(&file, std::process::id().to_string())
                .map_err(|error| crate::objects::cannot("join", &file, error))?;
        }
        for (resource, limit) in [
            (Resource::As, self.address_space),
            (Resource::Fsize, self.file_size),
        ] {
            let Some(limit) = limit else { continue };
            let hard = getrlimit(resource)
                .maximum
                .map_or(limit, |hard| hard.min(limit));
            let new = Rlimit {
                current: Some(hard),
                maximum: Some(hard),
            };
            setrlimit(resource, new).map_err(|error| refused("set a limit", error))?;
        }
        if !self.cpus.is_empty() {
            let mut set = CpuSet::new();
            self.cpus.iter().for_each(|cpu| set.set(*cpu));
            sched_setaffinity(None, &set).map_err(|error| refused("choose processors", error))?;
        }
        Ok(())
    }
}

fn refused(action: &str, error: rustix::io::Errno) -> Error {
    let error = std::io::Error::from(error);
    Error::new(ErrorKind::System, format!("cannot {action}")).caused_by(error)
}

/// Kills all processes that still belong to the attempt in `dir`, and waits until they are gone.
pub(crate) fn end_all(dir: &Path) -> Result<()> {
    use rustix::process::{Pid, Signal, kill_process};
    let alive = dir.join(ALIVE);
    let Ok(file) = fs::File::open(&alive) else {
        return Ok(());
    };
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !phalanx_data::files::try_lock(&file) {
        for pid in holders(&alive).filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        if std::time::Instant::now() > until {
            let pids: Vec<String> = holders(&alive).map(|pid| pid.to_string()).collect();
            return Err(Error::new(
                ErrorKind::System,
                format!(
                    "processes of {} do not end: {}",
                    dir.display(),
                    pids.join(", ")
                ),
            ));
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    Ok(())
}

/// Other processes that have `path` open.
fn holders(path: &Path) -> impl Iterator<Item = i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(move |process| {
        let pid: i32 = process.file_name().to_str()?.parse().ok()?;
        let mut files = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let has = files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == path));
        (has && u32::try_from(pid) != Ok(std::process::id())).then_some(pid)
    })
}
