//! A small process that ends the children of a supervisor that was killed with SIGKILL.
//!
//! The kernel kills each child when its supervisor dies (`shim.rs`), but not
//! what the child has started: a shell script's program, a loader's workers.
//! The guard reads a pipe. Every child writes its process group to it before
//! it becomes its program, hence before it can have children; the supervisor
//! writes which groups have ended. The pipe ends when the supervisor has ended
//! and no child is just being started. Then the guard kills the groups that
//! are left and, without a `done`, removes the supervisor's private folder and
//! does what the supervisor's program does in this case, for which it gets the notes.
//!
//! | line            | meaning                                            |
//! |-----------------|----------------------------------------------------|
//! | `+PID`          | the process group PID lives (from the child itself) |
//! | `-PID`          | it has ended and its number may belong to another  |
//! | `folder "PATH"` | the supervisor's private folder (a JSON string)    |
//! | `NAME TEXT`     | a note with another name; the last of a name counts |
//! | `done`          | the supervisor ends by itself                      |

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, ErrorKind as IoKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx_base::env::TOKEN_VARIABLE;
use phalanx_base::error::system;
use phalanx_base::{Error, ErrorKind, Result, lock};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::proc_stat::path_of;
use crate::{GUARD, helper_command, own_program};

/// How long the supervisor waits for the guard's end before it kills it.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The name of the note with the private folder.
const FOLDER: &str = "folder";

/// The supervisor's end.
pub struct Guard {
    child: Child,
    pipe: Mutex<Option<ChildStdin>>,
}

impl Guard {
    /// Starts the guard.
    pub fn start() -> Result<Guard> {
        // For its output and the ranks' input.
        let null = File::options().read(true).write(true).open("/dev/null");
        null.map_err(system("cannot open /dev/null, which every rank needs"))
            .map_err(|error| error.note("fix", "mknod -m 666 /dev/null c 1 3"))?;
        let mut child = helper_command(GUARD)
            .env_remove(TOKEN_VARIABLE)
            .stdin(Stdio::piped())
            // A reader of our stdout must see its end when we end.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C at the terminal is not for the guard.
            .process_group(0)
            .spawn()
            .map_err(|error| {
                let program = own_program();
                let message = format!("cannot start a guard process ({})", program.display());
                let is_there = Path::new("/proc/self").exists();
                let error = Error::new(ErrorKind::System, message).caused_by(error);
                match is_there {
                    true => error,
                    false => error.note("fix", "mount -t proc proc /proc"),
                }
            })?;
        let pipe = Mutex::new(child.stdin.take());
        Ok(Guard { child, pipe })
    }

    /// The guard's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where a child that is being started opens the pipe.
    pub fn pipe_for_child(&self) -> std::io::Result<OsString> {
        let pipe = lock(&self.pipe);
        match pipe.as_ref() {
            Some(pipe) => Ok(path_of(pipe)),
            None => Err(std::io::Error::other("the guard's pipe is closed")),
        }
    }

    /// The group has ended.
    pub fn ended(&self, group: Pid) {
        self.say(&format!("-{}", group.as_raw_nonzero()));
    }

    /// Sets the folder to remove when this process is killed.
    pub fn folder(&self, path: &Path) {
        // JSON keeps it on one line. A path that is not UTF-8 is not removed.
        if let Ok(text) = serde_json::to_string(path) {
            self.note(FOLDER, &text);
        }
    }

    /// Sets the note `name`, one line, for [`run_helper`](crate::run_helper)'s function when this process is killed.
    pub fn note(&self, name: &str, text: &str) {
        self.say(&format!("{name} {text}"));
    }

    fn say(&self, line: &str) {
        // A guard that died is not an error: the kernel kills the children too.
        if let Some(pipe) = lock(&self.pipe).as_mut() {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.say("done");
        drop(lock(&self.pipe).take());
        // It ends soon after its pipe, unless it is stopped (SIGSTOP).
        let until = Instant::now() + END_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= until {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Registers this process, a child, at the guard that reads `pipe`, and returns an end of that.
pub(crate) fn announce(pipe: &OsStr) -> std::io::Result<File> {
    // Also for reading: a guard that died is not an error, nor waited for.
    let mut end = File::options().read(true).write(true).open(pipe)?;
    // Shorter than PIPE_BUF, so it arrives in one piece.
    let _ = end.write_all(format!("+{}\n", std::process::id()).as_bytes());
    Ok(end)
}

/// The notes of a supervisor, by name.
pub type Notes = BTreeMap<String, String>;

/// The contents of the pipe so far.
#[derive(Default)]
struct Messages {
    groups: BTreeSet<i32>,
    notes: Notes,
    done: bool,
}

impl Messages {
    fn line(&mut self, line: &str) {
        if let Some(pid) = line.strip_prefix('+') {
            // 0 and 1 would mean our own group and everybody's.
            self.groups
                .extend(pid.parse::<i32>().ok().filter(|pid| *pid > 1));
        } else if let Some(pid) = line.strip_prefix('-') {
            if let Ok(pid) = pid.parse::<i32>() {
                self.groups.remove(&pid);
            }
        } else if line == "done" {
            self.done = true;
        } else if let Some((name, text)) = line.split_once(' ') {
            self.notes.insert(name.to_owned(), text.to_owned());
        }
    }

    fn folder(&self) -> Option<PathBuf> {
        serde_json::from_str(self.notes.get(FOLDER)?).ok()
    }
}

/// The guard process itself. See [`run_helper`](crate::run_helper) for `killed`.
pub(crate) fn guard<F: FnOnce()>(killed: impl FnOnce(Notes) -> F) -> Result<()> {
    // Signals to all processes of a name or session must not end the guard.
    let ignored = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
        signal_hook::consts::SIGQUIT,
    ] {
        let _ = signal_hook::flag::register(signal, ignored.clone());
    }
    let mut messages = Messages::default();
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock();
    // Without a deadline: the guard lives as long as its supervisor, whose end is
    // the end of this pipe.
    loop {
        line.clear();
        match input.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == IoKind::Interrupted => continue,
            Err(_) => break,
        }
        // A line without its end was cut off by the supervisor's death.
        if let Some(b'\n') = line.last()
            && let Ok(text) = std::str::from_utf8(&line[..line.len() - 1])
        {
            messages.line(text);
        }
    }
    for group in &messages.groups {
        if let Some(group) = Pid::from_raw(*group) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    if messages.done {
        return Ok(());
    }
    let folder = messages.folder();
    let last = killed(messages.notes);
    if let Some(folder) = &folder {
        remove(folder);
    }
    last();
    Ok(())
}

/// Removes a private folder. A child that was killed a moment ago may still make a last file in it.
pub(crate) fn remove(path: &Path) {
    for _ in 0..20 {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != IoKind::NotFound => {
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_living_groups_are_remembered() {
        let mut messages = Messages::default();
        for line in [
            "+10",
            "+11",
            "-10",
            "+0",
            "+1",
            "+-5",
            "+x",
            "rubbish",
            "",
            "key k/0",
            "key k/1",
            "verdict {\"a b\":1}",
            "folder \"/tmp/a\\nb\"",
        ] {
            messages.line(line);
        }
        assert_eq!(messages.groups, BTreeSet::from([11]));
        let notes = [
            ("folder", "\"/tmp/a\\nb\""),
            ("key", "k/1"),
            ("verdict", "{\"a b\":1}"),
        ];
        assert_eq!(
            messages.notes,
            notes.map(|(name, text)| (name.into(), text.into())).into()
        );
        assert_eq!(messages.folder(), Some("/tmp/a\nb".into()));
        assert!(!messages.done);
        messages.line("done");
        assert!(messages.done);
    }
}
