//! An attempt of a task: its processes, and when they are to end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_process::reap::reap_group;
use phalanx_process::{Guard, own_program, tied_command};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde_json::{Map, Value as Json};

use crate::call::Call;
use crate::child::{ProcessLimits, Start, inputs_dir, log_file, outputs_dir};
use crate::objects::{Objects, cannot};
use crate::resources::{Grant, end_group};
use crate::secrets::Secrets;
use crate::spec::{Action, Placeholder, Task};
use crate::store::Item;

/// From SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// How long the copy of an attempt's output may take once its processes have ended; another process may have its output open.
const COPY_LIMIT: Duration = Duration::from_secs(1);

/// Why the engine ends an attempt.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Why {
    Timeout(Duration),
    Stopped,
    /// An input was changed by it, or by another task that runs.
    InputChanged,
}

impl Why {
    pub(super) fn text(self) -> String {
        match self {
            Why::Timeout(limit) => {
                format!("timeout after {}", humantime::format_duration(limit))
            }
            Why::Stopped => "stopped".to_owned(),
            Why::InputChanged => {
                "an input was changed while it and another task ran; it runs again alone".to_owned()
            }
        }
    }
}

/// The processes of an attempt.
pub(super) struct Processes {
    child: Child,
    pub group: Pid,
    cgroup: Option<PathBuf>,
    is_reaped: bool,
    /// The copy of its output, if that is copied.
    copied: Option<Receiver<()>>,
}

/// An attempt that runs, or whose outputs are read.
pub(super) struct Live {
    /// `None` once its main process has ended.
    pub processes: Option<Processes>,
    /// All have ended.
    pub is_over: Arc<AtomicBool>,
    pub dir: PathBuf,
    pub grant: Grant,
    pub started: Instant,
    /// When it is asked to end, and when it is killed.
    pub term_at: Option<Instant>,
    pub kill_at: Option<Instant>,
    pub why: Option<Why>,
}

impl Live {
    /// Starts the process of an attempt of `task`; `args` are those of [`child::prepare`]. `ended` is called at its end.
    pub(super) fn start(
        task: &Task,
        start: Start,
        args: [OsString; 2],
        grant: Grant,
        guard: &Guard,
        secrets: &Secrets,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Live> {
        let log = log_file(&start.dir);
        let log = fs::File::create(&log).map_err(|error| cannot("create", &log, error))?;
        let failed = |error| {
            let what = format!("cannot start a process for task {:?}", task.name);
            Error::new(ErrorKind::System, what).caused_by(error)
        };
        let spawn = |mut command: Command| {
            let command = command.arg(own_program()).args(args).stdin(Stdio::null());
            // Tasks without GPUs must not use those of others.
            let command = command.env("CUDA_VISIBLE_DEVICES", grant.gpus.join(","));
            let copied = secrets.give(task, command, log)?;
            command.spawn().map(|child| (child, copied))
        };
        let (child, copied) = tied_command(guard, None).and_then(spawn).map_err(failed)?;
        // Numbers of processes are positive.
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let group = pid.ok_or_else(|| failed(std::io::Error::other("no process number")))?;
        let started = Instant::now();
        let live = Live {
            processes: Some(Processes {
                child,
                group,
                cgroup: start.limits.cgroup,
                is_reaped: false,
                copied,
            }),
            is_over: Arc::default(),
            dir: start.dir,
            started,
            term_at: task.timeout.and_then(|limit| started.checked_add(limit)),
            kill_at: None,
            why: None,
            grant,
        };
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        let waiting = thread.spawn(move || {
            // Not reaped here: until then no other process gets its number. Without a deadline: the main thread has those.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(group), options), Err(Errno::INTR)) {}
            ended();
        });
        waiting.map_err(failed)?;
        Ok(live)
    }

    pub(super) fn signal(&self, signal: Signal) {
        if let Some(processes) = &self.processes {
            processes.signal(signal);
        }
    }

    pub(super) fn end(&mut self, why: Why) {
        if self.why.is_none() {
            self.why = Some(why);
            self.term_at = None;
            self.kill_at = Some(Instant::now() + GRACE);
            self.signal(Signal::TERM);
        }
    }
}

impl Processes {
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }

    /// Ends and reaps all; whether the memory limit was exceeded.
    pub(super) fn finish(&mut self) -> (std::io::Result<ExitStatus>, bool) {
        self.signal(Signal::KILL);
        let status = self.child.wait();
        self.is_reaped = true;
        reap_group(self.group);
        if let Some(copied) = self.copied.take() {
            let _ = copied.recv_timeout(COPY_LIMIT);
        }
        let too_large = self.cgroup.take().is_some_and(|group| end_group(&group));
        (status, too_large)
    }
}

impl Drop for Processes {
    /// No attempt outlives its engine.
    fn drop(&mut self) {
        if !self.is_reaped {
            let _ = self.finish();
        }
    }
}

/// The process for `call`, in the folder `dir` of an attempt of the run `id`.
pub(super) fn start_of(
    call: &Call,
    objects: &Objects,
    dir: &Path,
    [id, number]: [&str; 2],
    limits: ProcessLimits,
) -> Result<Start> {
    let task = &call.task;
    let mut values = Map::new();
    for (name, item) in &call.inputs {
        let value = match item {
            Item::Value(value) => value.clone(),
            Item::Object(object) => {
                let link = inputs_dir(dir).join(name);
                std::os::unix::fs::symlink(objects.path(object), &link)
                    .map_err(|error| cannot("create", &link, error))?;
                Json::from(link.to_string_lossy())
            }
        };
        values.insert(name.clone(), value);
    }
    let text = |name: &str| match values.get(name) {
        Some(Json::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    };
    let output = |name: &str| outputs_dir(dir).join(name).to_string_lossy().into_owned();
    let folder = call.folder.to_string_lossy();
    let fill = |template: &str| {
        Task::fill(template, &mut |placeholder| match placeholder {
            Placeholder::Input(name) => text(name),
            Placeholder::Output(name) => output(name),
            Placeholder::Folder => folder.to_string(),
        })
    };
    let mut env = BTreeMap::from([
        ("FLOW_RUN".to_owned(), id.to_owned()),
        ("FLOW_TASK".to_owned(), task.name.clone()),
        ("FLOW_ATTEMPT".to_owned(), number.to_owned()),
        ("FLOW_FOLDER".to_owned(), folder.to_string()),
    ]);
    env.extend(path_with_us().map(|path| ("PATH".to_owned(), path)));
    let inputs = task.inputs.keys();
    env.extend(inputs.map(|name| (Task::input_variable(name), text(name))));
    let outputs = task.outputs.keys();
    env.extend(outputs.map(|name| (Task::output_variable(name), output(name))));
    let own = task.env.iter();
    env.extend(own.map(|(name, value)| (name.clone(), fill(value))));
    let argv = match &task.action {
        Action::Command(argv) => Some(argv.iter().map(|word| fill(word)).collect()),
        _ => task.argv(),
    };
    Ok(Start {
        argv,
        task: task.name.clone(),
        env,
        inputs: values,
        dir: dir.to_owned(),
        limits,
    })
}

/// `PATH`, and at its end the folder of this program: commands find `phalanx`.
fn path_with_us() -> Option<String> {
    let exe = std::env::current_exe().ok()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([exe.parent()?.to_owned()]);
    std::env::join_paths(folders).ok()?.into_string().ok()
}
