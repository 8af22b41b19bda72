//! One rank as a child process: started, signalled, waited for, reaped.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use phalanx_base::env::{RUN_POINTER_VARIABLE, TOKEN_VARIABLE};
use phalanx_comm::recorder::Dump;
use phalanx_process::error_file::{ERRORS_VARIABLE, LAUNCHER, error_file_text, reported_code};
use phalanx_process::folder::RunFolder;
use phalanx_process::proc_stat::{path_of, stat};
use phalanx_process::pump::{self, Log, OpenPipes, Route, Sink, Tail, WriteError};
use phalanx_process::reap::reap_group;
use phalanx_process::{Guard, tied_command};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};
use rustix::termios::tcgetpgrp;

use super::job_files::JobFiles;
use super::machine::ExitStatus;
use super::plan::LaunchPlan;
use super::streams::StreamChoice;
use super::torchrun::fill_in;
use super::{Event, report};
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::stop::is_caught;

/// How long after a rank's end the output of processes that it left behind is read
/// before they are killed.
const LINGER: Duration = Duration::from_secs(1);

/// How often processes that a dead rank left behind are checked, while they may still save
/// something.
pub const POLL: Duration = Duration::from_millis(20);

/// The state in `/proc` of a process that a signal has stopped.
const STOPPED: char = 'T';

/// A rank of this launcher, for the places where its output goes.
#[derive(Clone, Copy)]
struct Local {
    /// On this node.
    number: usize,
    /// Of all.
    rank: usize,
}

/// The settings for starting ranks of this launcher.
pub struct RankSpawner<'a> {
    /// The settings.
    pub plan: &'a LaunchPlan,
    /// Our stdout.
    pub out: &'a Arc<Sink>,
    /// Our stderr.
    pub err: &'a Arc<Sink>,
    /// Records output that cannot be written.
    pub unwritten: &'a WriteError,
    /// The token's file.
    pub token: BorrowedFd<'a>,
    /// Where error files and logs go.
    pub folder: &'a RunFolder,
    /// The processors of each local rank, where they are bound.
    pub processors: Option<&'a [Vec<usize>]>,
    /// Of a job that is shown.
    pub files: Option<&'a JobFiles>,
    /// The guard to register with.
    pub guard: &'a Arc<Guard>,
    /// Receives the ranks' ends.
    pub events: &'a Sender<Event>,
}

/// A started rank.
pub struct Rank {
    /// Global rank.
    pub rank: usize,
    /// Its number among all processes that were started: the rank, unless it takes the place of a lost one.
    pub number: usize,
    /// The number of the lost process whose place it takes.
    pub instead_of: Option<usize>,
    /// The job has gone on without it.
    pub is_lost: bool,
    /// Process id, also that of its group.
    pub pid: Pid,
    /// The pid while it is ours to signal: until the process is reaped.
    alive: Arc<Mutex<Option<Pid>>>,
    /// See [`spare_group_until`](Self::spare_group_until).
    patience: Arc<Mutex<Option<Instant>>>,
    tail: Arc<Mutex<Tail>>,
    open: OpenPipes,
    /// Where it may write why it failed.
    error_file: PathBuf,
    /// The log of its stderr.
    err_log: Option<PathBuf>,
    /// The memory of its flight recorder, if its program uses one.
    flight: OwnedFd,
}

impl RankSpawner<'_> {
    /// Starts one rank. Must be called on the thread that lives as long as
    /// the launcher: the kernel's parent-death signal goes by thread.
    ///
    /// `variables` is given the path of the error file.
    pub fn start(
        &self,
        local: usize,
        rank: usize,
        restarts: u32,
        variables: impl FnOnce(OsString) -> Vec<(OsString, OsString)>,
    ) -> Result<Rank> {
        let failed = |what: &str, error: std::io::Error| {
            Error::new(ErrorKind::System, format!("cannot {what} for rank {rank}")).caused_by(error)
        };
        let folder = self.folder.of_rank(restarts, local)?;
        let error_file = folder.join("error.json");
        // That of a lost rank whose place this one takes; mostly there is none.
        let _ = std::fs::remove_file(&error_file);

        // Readable here even when the rank was killed or stopped.
        let flight = phalanx_comm::recorder::create_memory()
            .map_err(|error| failed("make a flight recorder", error))?;

        // Everything that can fail comes before the process.
        let tail = Arc::new(Mutex::new(Tail::default()));
        let of = Local {
            number: local,
            rank,
        };
        let mut out = self.route(of, true, &folder, None)?;
        let mut err = self.route(of, false, &folder, Some(&tail))?;
        if let Some(files) = self.files {
            for (route, is_err) in [(&mut out, false), (&mut err, true)] {
                let tail = files.tail(rank);
                route.copy = Some(Box::new(move |bytes| tail.push(is_err, bytes)));
            }
        }
        let err_log = err.log.as_ref().map(|log| log.path.clone());

        let mut command = self
            .command(of)
            .map_err(|error| failed("reach the guard", error))?;
        command
            .envs(variables(error_file.clone().into_os_string()))
            .env(ERRORS_VARIABLE, LAUNCHER)
            .env(phalanx_comm::recorder::FILE_VARIABLE, path_of(&flight));
        // Inherited by ranks in namespaces of their own, which cannot open them by our process id. Only
        // this thread starts processes, so no other one inherits them.
        let set = |flags: FdFlags| {
            let arguments = self.plan.arguments.as_ref().map(AsFd::as_fd);
            let mut files = [self.token, flight.as_fd()].into_iter().chain(arguments);
            files.try_for_each(|file| fcntl_setfd(file, flags))
        };
        let spawned = match set(FdFlags::empty()) {
            Ok(()) => command.spawn(),
            Err(error) => Err(error.into()),
        };
        set(FdFlags::CLOEXEC).map_err(|error| failed("close descriptors", error.into()))?;
        let mut child = spawned.map_err(|error| failed("start a process", error))?;
        let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
            return Err(Error::new(ErrorKind::System, "a process has no number"));
        };

        let open = OpenPipes::default();
        let mut pumped = Ok(());
        if let Some(pipe) = child.stdout.take() {
            pumped = pumped.and(pump::start(pipe, out, &open));
        }
        if let Some(pipe) = child.stderr.take() {
            pumped = pumped.and(pump::start(pipe, err, &open));
        }
        let rank = Rank {
            rank,
            number: rank,
            instead_of: None,
            is_lost: false,
            pid,
            alive: Arc::new(Mutex::new(Some(pid))),
            patience: Arc::default(),
            tail,
            open,
            error_file,
            err_log,
            flight,
        };
        if let Err(error) = pumped.and(self.watch(child, local, &rank)) {
            rank.signal(Signal::KILL);
            return Err(failed("start a thread", error));
        }
        Ok(rank)
    }

    /// Waits for the rank on a thread of its own.
    ///
    /// The rank's end is reported at once, but the process stays a zombie until its
    /// output was read and its group was killed: until then no other process can get its
    /// number, so the group can be killed safely.
    fn watch(&self, mut child: Child, local: usize, rank: &Rank) -> std::io::Result<()> {
        let (guard, events) = (self.guard.clone(), self.events.clone());
        let (pid, open) = (rank.pid, rank.open.clone());
        let (alive, patience) = (rank.alive.clone(), rank.patience.clone());
        let run = move || {
            let end = wait_end(pid);
            let _ = events.send(Event::Ended(local, end, Instant::now()));
            let patience = *lock(&patience);
            while patience.is_some_and(|until| Instant::now() < until)
                && group_answers(pid, Signal::TERM)
            {
                thread::sleep(POLL);
            }
            open.wait_closed(Instant::now() + LINGER);
            {
                let mut alive = lock(&alive);
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = child.wait();
                *alive = None;
            }
            reap_group(pid);
            guard.ended(pid);
            // Dropped first: after the last `Reaped` the guard may be ended.
            drop(guard);
            let _ = events.send(Event::Reaped);
        };
        let thread = thread::Builder::new().name("rank".into());
        thread.stack_size(64 << 10).spawn(run).map(drop)
    }

    /// This launcher as the process that becomes the rank's program.
    fn command(&self, local: Local) -> std::io::Result<Command> {
        let plan = self.plan;
        let inherit = plan.rank0_owns_stderr && local.rank == 0;
        let stream = |inherit| match inherit {
            true => Stdio::inherit(),
            false => Stdio::piped(),
        };
        let processors = self.processors.and_then(|all| all.get(local.number));
        let mut command = tied_command(self.guard, processors)?;
        command
            .arg(&plan.args.run.program)
            .args(&plan.args.run.args)
            .stdin(match is_anothers(std::io::stdin()) {
                true => Stdio::null(),
                false => Stdio::inherit(),
            })
            // On one terminal a pipe would delay lines of results until the
            // progress bar is drawn again, over them.
            .stdout(stream(inherit && !plan.prefix.is_for(local.rank)))
            .stderr(stream(inherit))
            .env_remove(TOKEN_VARIABLE)
            // An outer launcher may have set it for its own network.
            .env_remove(super::contract::BIND_VARIABLE)
            .env_remove(super::contract::ARGUMENTS_FILE_VARIABLE)
            .env_remove(RUN_POINTER_VARIABLE);
        Ok(command)
    }

    /// What begins the rank's lines.
    fn line_prefix(&self, local: Local) -> Option<pump::Prefix> {
        if !self.plan.prefix.is_for(local.rank) {
            return None;
        }
        let text = match &self.plan.args.torchrun.prefix_template {
            None => format!("[rank {}] ", local.rank),
            Some(template) => fill_in(template, |name| match name {
                "rank" => Some(local.rank.to_string()),
                "local_rank" => Some(local.number.to_string()),
                "role_name" => Some(self.plan.args.role.clone()),
                "hostname" => Some(phalanx_base::host_name()),
                _ => None,
            }),
        };
        Some(pump::Prefix {
            rank: local.rank,
            text,
        })
    }

    fn route(
        &self,
        local: Local,
        out: bool,
        folder: &Path,
        tail: Option<&Arc<Mutex<Tail>>>,
    ) -> Result<Route> {
        let pick = |choice: &StreamChoice| {
            let streams = choice.of(local.number);
            if out { streams.out } else { streams.err }
        };
        let open = |path: PathBuf| -> Result<Log> {
            let create = File::options().append(true).create(true).open(&path);
            let file = create.map_err(|error| {
                Error::usage(format!("cannot create {}", path.display())).caused_by(error)
            })?;
            Ok(Log {
                file,
                path,
                unwritten: self.unwritten.clone(),
            })
        };
        let (hide, keep) = match &self.plan.logs {
            None => (false, false),
            Some(logs) => (
                pick(&logs.redirects),
                pick(&logs.redirects) || pick(&logs.tee),
            ),
        };
        let log = match keep {
            false => None,
            true => {
                let name = if out { "stdout.log" } else { "stderr.log" };
                Some(open(folder.join(name))?)
            }
        };
        let (texts, name) = match out {
            true => (&self.plan.args.torchrun.out_filters, "filtered_stdout.log"),
            false => (&self.plan.args.torchrun.err_filters, "filtered_stderr.log"),
        };
        // Next to the folders of the attempt's ranks.
        let filtered = match folder.parent() {
            Some(attempt) if !texts.is_empty() => Some((texts.clone(), open(attempt.join(name))?)),
            _ => None,
        };
        let hide = hide || !self.plan.args.torchrun.shows(local.number);
        let sink = if out { self.out } else { self.err };
        Ok(Route {
            rank: local.rank,
            is_shared: self.plan.args.node.local_ranks > 1,
            sink: (!hide).then(|| sink.clone()),
            prefix: self.line_prefix(local),
            log,
            filtered,
            tail: tail.cloned(),
            copy: None,
        })
    }
}

impl Rank {
    /// Sends `signal` to the rank and all that it started in its group.
    pub fn signal(&self, signal: Signal) {
        let alive = lock(&self.alive);
        if let Some(pid) = *alive
            && kill_process_group(pid, signal) == Err(Errno::SRCH)
        {
            // It has not got as far as its own group yet.
            let _ = kill_process(pid, signal);
        }
    }

    /// Sends `signal` to the rank alone, if it has a handler for it (without one it would be
    /// killed). Returns whether it was sent.
    pub fn notify(&self, signal: Signal) -> bool {
        let alive = lock(&self.alive);
        match *alive {
            Some(pid) if catches(pid, signal) => kill_process(pid, signal).is_ok(),
            _ => false,
        }
    }

    /// Whether a process of the rank's group has a handler for `signal`.
    pub fn answers(&self, signal: Signal) -> bool {
        let alive = lock(&self.alive);
        alive.is_some_and(|group| group_answers(group, signal))
    }

    /// Until `until`, processes of the rank's group that handle SIGTERM survive the rank's own
    /// end: a shell dies at once, and the training that it started may have something to save.
    pub fn spare_group_until(&self, until: Instant) {
        let mut patience = lock(&self.patience);
        *patience = Some(until);
    }

    /// Whether the process is stopped (state T in `/proc`).
    pub fn is_stopped(&self) -> bool {
        self.state_is(&[STOPPED, 't'])
    }

    /// Kills the process, not what it has started, if it [is stopped by a signal](Self::is_stopped_by_signal).
    pub fn kill_if_stopped(&self) {
        let alive = lock(&self.alive);
        if let Some(pid) = *alive
            && stat(pid.as_raw_nonzero()).is_some_and(|stat| stat.state == STOPPED)
        {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// As [`is_stopped`](Self::is_stopped), but not by a debugger.
    pub fn is_stopped_by_signal(&self) -> bool {
        self.state_is(&[STOPPED])
    }

    fn state_is(&self, states: &[char]) -> bool {
        let alive = lock(&self.alive);
        let Some(pid) = *alive else { return false };
        stat(pid.as_raw_nonzero()).is_some_and(|stat| states.contains(&stat.state))
    }

    /// Waits until its output has been read, at most until `until`.
    pub fn output_ended(&self, until: Instant) -> bool {
        self.open.wait_closed(until)
    }

    /// The last lines of its stderr.
    pub fn last_lines(&self) -> Vec<String> {
        lock(&self.tail).lines()
    }

    /// What its flight recorder holds, if it has one.
    pub fn flight(&self) -> Option<Dump> {
        let dump = Dump::from_memory(&self.flight).ok()?;
        Some(Dump {
            instead_of: self.instead_of,
            is_lost: self.is_lost,
            ..dump
        })
    }

    /// Whether it is a Phalanx program that has reported this exit code.
    pub fn reported(&self, end: ExitStatus) -> bool {
        let code = self.error_json().as_deref().and_then(reported_code);
        code.is_some_and(|code| end == ExitStatus::Code(code))
    }

    /// Writes its last error into the log of its stderr, as a Phalanx program leaves printing it
    /// to the launcher. To be called when it has ended.
    pub fn log_last_error(&self) {
        if let (Some(path), Some(json)) = (&self.err_log, self.error_json())
            && reported_code(&json).is_some()
            && let Some(text) = report::error_file_message(&json)
            && let Ok(mut log) = File::options().append(true).open(path)
        {
            // The file next to it has the text too.
            let _ = log.write_all(format!("error: {text}\n").as_bytes());
        }
    }

    /// What it wrote to its error file, if anything.
    pub fn error_json(&self) -> Option<String> {
        error_file_text(&self.error_file)
    }
}

/// Whether `input` is a terminal at which another program is in the foreground. The kernel stops programs of the terminal's
/// session that read it then, but not ranks, which have sessions of their own: they would take what is typed for others.
fn is_anothers(input: impl AsFd + IsTerminal) -> bool {
    // Not what `tcgetpgrp` says: both numbers are to be those of one namespace.
    input.is_terminal()
        && tcgetpgrp(input) != Err(Errno::NOTTY)
        && stat("self").is_some_and(|own| own.foreground != own.group.cast_signed())
}

/// Whether a living process of the group has a handler for `signal`.
fn group_answers(group: Pid, signal: Signal) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .any(|pid| {
            let stat = stat(pid.as_raw_nonzero());
            stat.is_some_and(|stat| stat.group == group.as_raw_nonzero().get().unsigned_abs())
                && catches(pid, signal)
        })
}

/// Whether the process lives and has a handler for `signal`.
pub fn catches(pid: Pid, signal: Signal) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = std::fs::read_to_string(path).unwrap_or_default();
    // A zombie still shows its handlers.
    let dead = status.lines().any(|line| line.starts_with("State:\tZ"));
    !dead && is_caught(&status, signal.as_raw())
}

/// Blocks until the process has ended, without reaping it. No deadline: a rank that
/// must end gets a signal.
fn wait_end(pid: Pid) -> ExitStatus {
    loop {
        match waitid(
            WaitId::Pid(pid),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        ) {
            Ok(Some(status)) => {
                return match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => ExitStatus::Code(code),
                    (None, Some(signal)) => ExitStatus::Signal(signal),
                    (None, None) => continue,
                };
            }
            Ok(None) | Err(Errno::INTR) => {}
            // Impossible, as it is our child; do not loop.
            Err(_) => return ExitStatus::Code(255),
        }
    }
}
