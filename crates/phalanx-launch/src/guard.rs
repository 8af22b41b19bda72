//! A small process that ends the ranks of a launcher that was killed with SIGKILL.
//!
//! The kernel kills each rank when the launcher dies (`shim.rs`), but not
//! what the rank has started: a shell script's program, a loader's workers.
//! The guard reads a pipe. Every rank writes its process group to it before
//! it becomes its program, hence before it can have children; the launcher
//! writes which groups have ended. The pipe ends when the launcher has ended
//! and no rank is just being started. Then the guard kills the groups that
//! are left and, without a `done`, tells the other nodes, if there are any,
//! writes how the training ended and removes the launcher's private folder.
//!
//! | line              | meaning                                            |
//! |-------------------|----------------------------------------------------|
//! | `+PID`            | the process group PID lives (from the rank itself) |
//! | `-PID`            | it has ended and its number may belong to another  |
//! | `store HOST:PORT` | other nodes meet there                             |
//! | `token HEX`       | the job token, needed to talk to them              |
//! | `key KEY`         | under which key there                              |
//! | `verdict TEXT`    | what to tell them (one line of JSON)               |
//! | `folder "PATH"`   | the launcher's private folder (a JSON string)      |
//! | `training {...}`  | a [`Training`] as JSON                             |
//! | `done`            | the launcher ends by itself                        |

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, ErrorKind as IoKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx_store::TcpStore;
use phalanx_wire::Token;
use rustix::process::{Pid, Signal, kill_process_group};

use super::ending::{self, Training};
use super::proc_stat::path_of;
use super::report::JobFailure;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;

/// How long the guard tries to tell the other nodes.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// How long the launcher waits for the guard's end before it kills it.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The launcher's end.
pub struct Guard {
    child: Child,
    pipe: Mutex<Option<ChildStdin>>,
}

impl Guard {
    /// Starts the guard.
    pub fn start() -> Result<Guard> {
        // For its output and the ranks' input.
        let null = File::options().read(true).write(true).open("/dev/null");
        null.map_err(crate::system(
            "cannot open /dev/null, which every rank needs",
        ))
        .map_err(|error| error.note("fix", "mknod -m 666 /dev/null c 1 3"))?;
        let mut child = Command::new(super::own_program())
            .arg0(super::HELPER_NAME)
            .arg(super::GUARD)
            .env_remove(super::token::TOKEN_VARIABLE)
            .stdin(Stdio::piped())
            // A reader of our stdout must see its end when we end.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C at the terminal is not for the guard.
            .process_group(0)
            .spawn()
            .map_err(|error| {
                let program = super::own_program();
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

    /// Where a rank that is being started opens the pipe.
    pub fn pipe_for_rank(&self) -> std::io::Result<OsString> {
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

    /// Sets the store and the verdict to publish there under `key` when this launcher is killed.
    pub fn tell(&self, store: &str, token: &Token, key: &str, verdict: &str) {
        self.say(&format!(
            "store {store}\ntoken {}\nkey {key}\nverdict {verdict}",
            token.to_hex()
        ));
    }

    /// Sets the folder to remove when this launcher is killed.
    pub fn folder(&self, path: &Path) {
        // JSON keeps it on one line. A path that is not UTF-8 is not removed.
        if let Ok(text) = serde_json::to_string(path) {
            self.say(&format!("folder {text}"));
        }
    }

    /// Sets the training whose end is to be written when this launcher is killed.
    pub fn training(&self, training: &Training) {
        if let Ok(text) = serde_json::to_string(training) {
            self.say(&format!("training {text}"));
        }
    }

    fn say(&self, line: &str) {
        // A guard that died is not an error: the kernel kills the ranks too.
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

/// Registers this process, a rank, at the guard that reads `pipe`, and returns an end of that.
pub fn announce(pipe: &OsStr) -> std::io::Result<File> {
    // Also for reading: a guard that died is not an error, nor waited for.
    let mut end = File::options().read(true).write(true).open(pipe)?;
    // Shorter than PIPE_BUF, so it arrives in one piece.
    let _ = end.write_all(format!("+{}\n", std::process::id()).as_bytes());
    Ok(end)
}

/// The contents of the pipe so far.
#[derive(Debug, Default, PartialEq)]
struct Messages {
    groups: BTreeSet<i32>,
    store: Option<String>,
    token: Option<String>,
    key: Option<String>,
    verdict: Option<String>,
    folder: Option<PathBuf>,
    training: Option<Training>,
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
        } else if let Some((what, text)) = line.split_once(' ') {
            match what {
                "store" => self.store = Some(text.to_owned()),
                "key" => self.key = Some(text.to_owned()),
                "token" => self.token = Some(text.to_owned()),
                "verdict" => self.verdict = Some(text.to_owned()),
                "folder" => self.folder = serde_json::from_str(text).ok(),
                "training" => self.training = serde_json::from_str(text).ok(),
                _ => {}
            }
        }
    }
}

/// The guard process itself.
pub fn guard() -> Result<()> {
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
    let mut told = Messages::default();
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock();
    // Without a deadline: the guard lives as long as its launcher, whose end is
    // the end of this pipe.
    loop {
        line.clear();
        match input.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == IoKind::Interrupted => continue,
            Err(_) => break,
        }
        // A line without its end was cut off by the launcher's death.
        if let Some(b'\n') = line.last()
            && let Ok(text) = std::str::from_utf8(&line[..line.len() - 1])
        {
            told.line(text);
        }
    }
    for group in &told.groups {
        if let Some(group) = Pid::from_raw(*group) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    if told.done {
        return Ok(());
    }
    let run = told.training.as_ref().and_then(Training::folder);
    if let Some(folder) = &told.folder {
        remove(folder);
    }
    let verdict = told.verdict.as_ref();
    let verdict = verdict.and_then(|verdict| serde_json::from_str::<JobFailure>(verdict).ok());
    if let (Some(store), Some(token)) = (&told.store, &told.token)
        && let (Some(key), Some(verdict)) = (&told.key, &verdict)
        && let Ok(token) = Token::from_hex(token)
        && let Ok(store) = TcpStore::connect(store, token, TELL_LIMIT)
    {
        let _ = verdict.publish_at(&store, key);
    }
    if let (Some(run), Some(training)) = (&run, &told.training) {
        // Nobody reads what it could say.
        let _ = ending::record(run, training, &killed());
        ending::deliver(run);
    }
    Ok(())
}

/// Removes a private folder. A rank that was killed a moment ago may still make a last file in it.
pub fn remove(path: &Path) {
    for _ in 0..20 {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != IoKind::NotFound => {
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => return,
        }
    }
}

/// What a training failed by whose launcher was killed.
fn killed() -> Error {
    Error::new(
        ErrorKind::PeerLost,
        "the launcher was killed, and its ranks with it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_living_groups_are_remembered() {
        let mut told = Messages::default();
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
            "store a:1",
            "token ff",
            "key k/1",
            "verdict {\"a b\":1}",
            "folder \"/tmp/a\\nb\"",
        ] {
            told.line(line);
        }
        let want = Messages {
            groups: BTreeSet::from([11]),
            store: Some("a:1".into()),
            token: Some("ff".into()),
            key: Some("k/1".into()),
            verdict: Some("{\"a b\":1}".into()),
            folder: Some("/tmp/a\nb".into()),
            training: None,
            done: false,
        };
        assert_eq!(told, want);
        told.line("done");
        assert!(told.done);
    }
}
