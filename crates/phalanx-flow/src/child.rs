//! The process of an attempt: this program, started again, which limits itself and then becomes
//! the task's command or calls the task's function.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::read_regular;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

/// The hidden argument of this process; its own is the file with [`Start`].
const ATTEMPT: &str = "flow-attempt";

/// The file that every process of an attempt has open.
const ALIVE: &str = "alive";

/// From SIGTERM to SIGKILL for processes that a task has left.
const GRACE: Duration = Duration::from_secs(2);

/// How long killed processes may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(10);

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

/// The attempt's folders, which go once it is done, and its log, which stays.
pub(crate) fn folders(attempt: &Path) -> [PathBuf; 3] {
    [inputs_dir(attempt), work_dir(attempt), outputs_dir(attempt)]
}
pub(crate) fn inputs_dir(attempt: &Path) -> PathBuf {
    attempt.join("inputs")
}
pub(crate) fn work_dir(attempt: &Path) -> PathBuf {
    attempt.join("work")
}
pub(crate) fn outputs_dir(attempt: &Path) -> PathBuf {
    attempt.join("outputs")
}
pub(crate) fn log_file(attempt: &Path) -> PathBuf {
    attempt.join("log.txt")
}

/// The last `count` lines of the attempt's log.
pub(crate) fn last_lines(attempt: &Path, count: usize) -> Vec<String> {
    let read = || {
        let mut file = fs::File::open(log_file(attempt))?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(16 << 10)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(count)..].iter();
    last.map(|line| (*line).to_owned()).collect()
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

/// Ends all processes that still belong to the attempt in `dir` (SIGTERM, after [`GRACE`]
/// SIGKILL), and waits until they are gone.
pub(crate) fn end_all(dir: &Path) -> Result<()> {
    end_within(dir, GRACE)
}

fn end_within(dir: &Path, grace: Duration) -> Result<()> {
    let Ok(file) = fs::File::open(dir.join(ALIVE)) else {
        return Ok(());
    };
    let start = Instant::now();
    let mut asked = BTreeSet::new();
    while !phalanx_base::files::try_lock(&file) {
        let pids = holders(&file)
            .map_err(|error| crate::objects::cannot("look for processes of", dir, error))?;
        let is_late = start.elapsed() > grace;
        for pid in pids.iter().copied().filter_map(Pid::from_raw) {
            if is_late {
                let _ = kill_process(pid, Signal::KILL);
            } else if asked.insert(pid.as_raw_nonzero()) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        if start.elapsed() > grace + KILL_LIMIT {
            let which = match &pids[..] {
                [] => "they are hidden from this user".to_owned(),
                pids => pids
                    .iter()
                    .map(i32::to_string)
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            return Err(Error::new(
                ErrorKind::System,
                format!("processes of {} do not end: {which}", dir.display()),
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Other processes that have `file` open, by whatever path. A copy of this process that is about to become another program,
/// of another attempt, has it until then.
fn holders(file: &fs::File) -> std::io::Result<Vec<i32>> {
    let inode = |found: fs::Metadata| (found.dev(), found.ino());
    let wanted = inode(file.metadata()?);
    let is_it = |link: &Path| {
        // Only what has its name is looked at: that may be a file of a server that does not answer.
        fs::read_link(link).is_ok_and(|path| path.ends_with(ALIVE))
            && fs::metadata(link).is_ok_and(|found| inode(found) == wanted)
    };
    let is_kept = |process: &Path, link: &fs::DirEntry| {
        let text = fs::read_to_string(process.join("fdinfo").join(link.file_name()));
        let text = text.unwrap_or_default();
        let mut flags = text.lines().filter_map(|line| line.strip_prefix("flags:"));
        let flags = flags
            .next()
            .map(|flags| u32::from_str_radix(flags.trim(), 8));
        !matches!(flags, Some(Ok(flags)) if flags & OFlags::CLOEXEC.bits() != 0)
    };
    let has_it = |process: &Path| {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten();
        { files }
            .flatten()
            .any(|link| is_it(&link.path()) && is_kept(process, &link))
    };
    let processes = fs::read_dir("/proc")?.flatten().filter_map(|process| {
        let pid: i32 = process.file_name().to_str()?.parse().ok()?;
        let is_other = u32::try_from(pid) != Ok(std::process::id());
        (is_other && has_it(&process.path())).then_some(pid)
    });
    Ok(processes.collect())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Stdio};

    use super::*;

    /// A process of the attempt in `dir` with this script, once it has written a line.
    fn process(dir: &Path, script: &str) -> Child {
        fs::write(dir.join(ALIVE), "").unwrap();
        let alive = fs::File::open(dir.join(ALIVE)).unwrap();
        flock(&alive, FlockOperation::LockShared).unwrap();
        let mut child = Command::new("sh")
            .args(["-c", script])
            .current_dir(dir)
            .stdin(alive)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        child
    }

    #[test]
    fn processes_are_found_by_another_path_and_may_end_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        let real = dir.path().join("real");
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let script = "trap 'echo bye > said; exit 7' TERM; echo; while :; do sleep 0.01; done";
        let mut child = process(&real, script);
        // They are not killed within the time of this test.
        end_within(&link, Duration::from_secs(600)).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert_eq!(fs::read_to_string(real.join("said")).unwrap(), "bye\n");
        let mut child = process(&real, "trap '' TERM; echo; while :; do sleep 0.01; done");
        end_within(&link, Duration::from_millis(20)).unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }

    /// The shell keeps its standard input aside, to be closed when it becomes another program.
    #[test]
    fn who_has_the_file_only_until_it_is_another_program_is_not_of_the_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let waits = "{ echo; while :; do sleep 0.01; done; }";
        for (script, is_found) in [(waits, true), (&format!("{waits} </dev/null"), false)] {
            let mut child = process(dir.path(), script);
            let file = fs::File::open(dir.path().join(ALIVE)).unwrap();
            let found = holders(&file).unwrap();
            assert_eq!(
                found.contains(&child.id().cast_signed()),
                is_found,
                "{script}"
            );
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
