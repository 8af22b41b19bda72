//! The lock of a store, and what is known of the engine that has it.
//!
//! The first line of `engine.lock` names the engine, and its time of change is when the engine was
//! seen last. Both are for file systems whose locks do not reach other hosts: there, a lock that
//! is free does not say that no engine runs.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::{Dir, create_folder, lock_holder, try_lock};
use phalanx_base::process::ProcessName;
use serde::{Deserialize, Serialize};

use crate::objects::cannot;
use crate::store::Store;

const LOCK: &str = "engine.lock";

/// How often an engine shows itself, and looks whether it is to stop.
const BEAT: Duration = Duration::from_secs(1);

/// An engine of another host that does not show itself for this long has ended.
const QUIET: Duration = Duration::from_secs(4);

/// An engine as it names itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Name {
    #[serde(flatten)]
    process: ProcessName,
    run: Option<String>,
}

impl Name {
    fn own(run: Option<&str>) -> Name {
        Name {
            process: ProcessName::own(),
            run: run.map(str::to_owned),
        }
    }
}

/// The engine of a store.
#[derive(Debug)]
pub(crate) struct Engine {
    /// `None`: it has not written its name yet, or is of an older version, and cannot be asked to stop.
    pub name: Option<Name>,
    seen: Option<SystemTime>,
    /// Who has the lock, from `/proc/locks`.
    holder: String,
    /// Whether it runs; otherwise it was not seen to end, on another host.
    pub is_sure: bool,
}

impl Engine {
    /// Whether it runs `run`.
    pub fn runs(&self, run: &str) -> bool {
        let name = self.name.as_ref();
        name.is_none_or(|name| name.run.as_deref() == Some(run))
    }

    pub fn json(&self) -> serde_json::Value {
        let name = self.name.as_ref();
        serde_json::json!({
            "host": name.map(|name| &name.process.host),
            "pid": name.map(|name| name.process.pid),
            "seen": self.seen.map(time),
        })
    }
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(name) = &self.name else {
            return write!(f, "an engine without a name{}", self.holder);
        };
        write!(f, "process {} on {}", name.process.pid, name.process.host)?;
        if let Some(run) = &name.run {
            write!(f, ", which runs {run}")?;
        }
        self.seen
            .map_or(Ok(()), |seen| write!(f, ", last seen at {}", time(seen)))
    }
}

/// The right to run workflows in a store, while it lives.
#[derive(Debug)]
pub(crate) struct EngineLock {
    file: File,
    path: PathBuf,
    _beat: Beat,
}

impl EngineLock {
    /// Names this engine, and what it runs, to others.
    fn publish(&self, run: Option<&str>) -> Result<()> {
        let name = serde_json::to_string(&Name::own(run)).unwrap_or_default();
        // In one piece: a reader takes the first line, and what was there before was one too.
        let written = self.file.write_all_at(format!("{name}\n").as_bytes(), 0);
        written.map_err(|error| cannot("write", &self.path, error))
    }

    /// Shows others that this engine runs `run`, and calls `stop` once if `flow cancel` asks for
    /// its end, until the result is dropped. Earlier requests do not count.
    pub fn watch(
        &self,
        store: &Store,
        run: &str,
        stop: impl FnOnce() + Send + 'static,
    ) -> Result<Beat> {
        let request = store.cancel_file(run);
        if request.exists() {
            fs::remove_file(&request).map_err(|error| cannot("remove", &request, error))?;
        }
        self.publish(Some(run))?;
        let mut stop = Some(stop);
        beat(move || {
            if request.exists()
                && let Some(stop) = stop.take()
            {
                stop();
            }
        })
    }
}

/// Calls `each` each second, from a thread, until the result is dropped.
fn beat(mut each: impl FnMut() + Send + 'static) -> Result<Beat> {
    let (ends, ended) = channel::<()>();
    let thread = std::thread::Builder::new()
        .name("engine lock".into())
        .stack_size(64 << 10)
        .spawn(move || {
            while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                each();
            }
        });
    let thread = thread
        .map_err(|error| Error::new(ErrorKind::System, "cannot start a thread").caused_by(error))?;
    Ok(Beat {
        ends: Some(ends),
        thread: Some(thread),
    })
}

impl Drop for EngineLock {
    fn drop(&mut self) {
        // The name that stays where it fails is that of a process that has ended.
        let _ = self.file.write_all_at(b"\n", 0);
    }
}

/// The thread of [`beat`].
#[derive(Debug)]
pub(crate) struct Beat {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.ends = None;
        // It may have the lock's file open.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Store {
    /// The file by which the end of `run` is asked for. No task has this name.
    pub fn cancel_file(&self, run: &str) -> PathBuf {
        self.run_dir(run).join(".cancel")
    }

    /// Asks the engine that runs `run` to stop, on whichever host it is.
    pub fn ask_to_cancel(&self, run: &str) -> Result<()> {
        let path = self.cancel_file(run);
        create_folder(path.parent().unwrap_or(&self.dir))?;
        File::create(&path).map_err(|error| cannot("create", &path, error))?;
        Ok(())
    }

    fn lock_file(&self) -> Result<File> {
        Dir::open(&self.dir)?.open_private(LOCK)
    }

    /// The engine that runs in this store, as far as it is known.
    pub fn engine(&self) -> Result<Option<Engine>> {
        let file = self.lock_file()?;
        let is_free = try_lock(&file);
        Ok(self.named(&file, is_free))
    }

    /// The engine that `file` names.
    fn named(&self, file: &File, is_free: bool) -> Option<Engine> {
        let mut bytes = [0; 4096];
        let read = file.read_at(&mut bytes, 0).unwrap_or(0);
        let line = bytes[..read].split(|byte| *byte == b'\n').next();
        let name: Option<Name> = line.and_then(|line| serde_json::from_slice(line).ok());
        let is_sure = match &name {
            _ if !is_free => true,
            None => return None,
            // Some file systems have no locks at all.
            Some(Name { process, .. }) => match process.is_running() {
                Some(false) => return None,
                Some(true) if process.pid == std::process::id() => return None,
                seen => seen == Some(true),
            },
        };
        Some(Engine {
            name,
            seen: file.metadata().and_then(|about| about.modified()).ok(),
            holder: match is_free {
                true => String::new(),
                false => lock_holder(file),
            },
            is_sure,
        })
    }

    /// Becomes the only engine of this store. *Blocks* for four seconds where an engine of
    /// another host was not seen to end.
    ///
    /// # Errors
    ///
    /// Usage, if there is one.
    pub fn lock(&self) -> Result<EngineLock> {
        self.lock_if_quiet(QUIET)
    }

    fn lock_if_quiet(&self, quiet: Duration) -> Result<EngineLock> {
        let file = self.lock_file()?;
        let mut is_free = false;
        // `show` looks whether it is locked by locking it.
        for _ in 0..10 {
            is_free = try_lock(&file);
            if is_free {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let rival = match self.named(&file, is_free) {
            Some(rival) if is_free && !rival.is_sure && self.is_quiet(&rival, quiet)? => None,
            rival => rival,
        };
        let Some(rival) = rival else {
            let shown = file.try_clone()?;
            let lock = EngineLock {
                // Others see an older time if it fails.
                _beat: beat(move || drop(shown.set_modified(SystemTime::now())))?,
                path: self.dir.join(LOCK),
                file,
            };
            lock.publish(None)?;
            return Ok(lock);
        };
        let shown = self.dir.display();
        Err(
            Error::usage(format!("{shown} is in use by another engine: {rival}")).note(
                "try",
                "wait for its end (`phalanx flow list`), or use another --store DIR",
            ),
        )
    }

    /// Whether `engine` does not show itself for that long.
    fn is_quiet(&self, engine: &Engine, quiet: Duration) -> Result<bool> {
        let until = std::time::Instant::now() + quiet;
        while std::time::Instant::now() < until {
            std::thread::sleep(quiet / 20);
            // Opened again, so that a network file system asks its server.
            let seen = self.lock_file()?.metadata()?.modified().ok();
            if seen != engine.seen {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// `engine.lock` as another engine leaves it.
    fn named(store: &Store, name: &Name) {
        let text = serde_json::to_string(name).unwrap();
        fs::write(store.dir.join(LOCK), format!("{text}\n")).unwrap();
    }

    fn elsewhere() -> Name {
        let mut name = Name::own(Some("w-1"));
        name.process = ProcessName {
            host: "node7".to_owned(),
            machine: "another kernel".to_owned(),
            pid: 12,
            ..name.process
        };
        name
    }

    /// A file system whose locks do not reach other hosts.
    #[test]
    fn an_engine_of_another_host_is_seen_without_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        assert!(store.engine().unwrap().is_none());
        named(&store, &elsewhere());
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let file = store.lock_file().unwrap();
                    file.set_modified(SystemTime::now()).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let refused = store.lock_if_quiet(Duration::from_secs(30));
            let engine = store.engine().unwrap().unwrap();
            ends.store(true, Ordering::Relaxed);
            let text = refused.unwrap_err().chain();
            let want =
                "in use by another engine: process 12 on node7, which runs w-1, last seen at 2";
            assert!(text.contains(want), "{text}");
            assert!(!engine.is_sure && engine.runs("w-1") && !engine.runs("w-2"));
        });
        // It does not show itself any more.
        let lock = store.lock_if_quiet(Duration::from_millis(100)).unwrap();
        let engine = store.engine().unwrap().unwrap();
        assert!(engine.is_sure && !engine.runs("w-1"), "{engine}");
        drop(lock);
        assert!(store.engine().unwrap().is_none());
    }

    #[test]
    fn a_process_is_an_engine_by_machine_number_and_start() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let alive = Name {
            process: ProcessName::of(child.id()),
            run: Some("w-1".to_owned()),
        };
        // No lock, as where the file system has none.
        named(&store, &alive);
        assert!(store.engine().unwrap().is_some_and(|engine| engine.is_sure));
        // Another process has had the number.
        let mut earlier = alive.clone();
        earlier.process.started -= 1;
        named(&store, &earlier);
        assert!(store.engine().unwrap().is_none());
        named(&store, &alive);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(store.engine().unwrap().is_none());
    }
}
