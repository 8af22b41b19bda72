//! Ctrl-C and its relatives, as events.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use phalanx_base::error::system;
use phalanx_base::{Error, ErrorKind, Result, say, stop};

use crate::proc_stat::stat;

const CANNOT_WATCH: &str = "cannot watch for signals";

/// A signal that this process got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caught {
    /// One of those that end the job, at this time.
    End(i32, Instant),
    /// Ctrl-Z (SIGTSTP).
    Suspend,
    /// SIGUSR1.
    Checkpoint,
    /// SIGUSR2.
    Dump,
}

/// While it lives, the signals that end the job arrive as [`Caught::End`] instead of ending
/// the process, and SIGUSR2 as [`Caught::Dump`].
pub struct SignalWatch(Handle);

impl SignalWatch {
    /// Starts watching for the signals in `ends`, and for `others`: a Ctrl-Z (SIGTSTP) is [`Caught::Suspend`], SIGUSR1
    /// [`Caught::Checkpoint`]. Each goes to `events` as `event` makes it. SIGHUP is left alone where it is ignored: that is what `nohup` asks for.
    pub fn start<E: Send + 'static>(
        events: Sender<E>,
        event: fn(Caught) -> E,
        ends: &[i32],
        others: &[i32],
    ) -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mut watched: Vec<i32> = ends.iter().chain(others).copied().collect();
        watched.retain(|signal| *signal != SIGHUP || !stop::is_ignored(&status, SIGHUP));
        let mut signals = Signals::new(watched).map_err(system(CANNOT_WATCH))?;
        let ends = ends.to_vec();
        let handle = signals.handle();
        thread::Builder::new()
            .name("signals".into())
            .stack_size(64 << 10)
            .spawn(move || {
                // Without a deadline: signals may never come. It ends with the handle.
                for signal in signals.forever() {
                    let caught = match signal {
                        signal if ends.contains(&signal) => Caught::End(signal, Instant::now()),
                        SIGTSTP => Caught::Suspend,
                        SIGUSR1 => Caught::Checkpoint,
                        _ => Caught::Dump,
                    };
                    if events.send(event(caught)).is_err() {
                        break;
                    }
                }
            })
            .map_err(system(CANNOT_WATCH))?;
        Ok(SignalWatch(handle))
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Stops this process, as a Ctrl-Z would have without a handler;
/// returns when it is continued. Where no process could continue it, it does not stop.
pub fn suspend_self() {
    if can_be_continued() {
        let _ = kill_process(getpid(), Signal::STOP);
    }
}

/// Whether a shell could continue this process after a Ctrl-Z: somebody in its session but outside its process
/// group, and above both. Without one (`ssh -t host phalanx ...`, the first process of a container) the
/// group is an orphan, which the kernel does not stop at a Ctrl-Z either (POSIX, "orphaned process group").
pub fn can_be_continued() -> bool {
    let Some(own) = stat("self") else {
        return false;
    };
    let mut above = own.parent;
    // Each is the child of the next: as many as there are processes, at most.
    while let Some(process) = stat(above) {
        if process.session != own.session {
            return false;
        }
        if process.group != own.group {
            return true;
        }
        above = process.parent;
    }
    false
}

/// A stop that takes longer is reported.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The error of a process that `signal` ended.
pub fn interrupted(signal: i32) -> Error {
    Error::new(
        ErrorKind::Interrupted,
        format!("interrupted by {}", stop::signal_name(signal)),
    )
}

/// From now on the same signals end this process with the contract's exit
/// code, as they do where a launcher watches the ranks.
///
/// # Errors
///
/// When the system refuses a thread.
pub fn end_on_signals() -> Result<()> {
    let (sender, events) = channel();
    let ends = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];
    let watch = SignalWatch::start(sender, |caught| caught, &ends, &[SIGUSR2])?;
    stop::is_watched();
    thread::Builder::new()
        .name("end on signal".into())
        .stack_size(128 << 10)
        .spawn(move || {
            let _watch = watch;
            // Without a deadline: until a signal comes or the process ends.
            let mut asked = false;
            let mut patience = Duration::MAX;
            let signal = loop {
                match events.recv_timeout(patience) {
                    // The training saves and ends; a second signal does not wait.
                    Ok(Caught::End(signal, _))
                        if stop::is_listening() && !std::mem::replace(&mut asked, true) =>
                    {
                        stop::ask(signal);
                        patience = AT_ONCE;
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        patience = Duration::MAX;
                        say::note("stopping after the current step; a second signal ends the program at once");
                    }
                    Ok(Caught::End(signal, _)) => break signal,
                    Ok(Caught::Dump) => say::note(
                        "warning: SIGUSR2 has no effect here: a training in one process writes its flight \
                         recorder when it fails; a launcher shows those of living ranks",
                    ),
                    Ok(_) => {}
                    Err(_) => return,
                }
            };
            // A progress bar may have left the cursor inside a line.
            if std::io::stderr().is_terminal() {
                say::note("");
            }
            let error = interrupted(signal);
            error.print();
            std::process::exit(i32::from(error.exit_code()));
        })
        .map(drop)
        .map_err(system(CANNOT_WATCH))
}
