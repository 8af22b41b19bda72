//! One training a folder: two that write into the same one would leave broken
//! metrics and one's results less.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use phalanx_base::files::{Dir, lock_holder, try_lock};
use phalanx_base::process::ProcessName;

use crate::error::{Error, ErrorKind, Result};
use crate::say;

/// The file that is locked; it names the process.
const LOCK_FILE: &str = ".lock";

/// How long a training that was killed may take to let go of its folder: the
/// system first frees its memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a lost rank of the same training may take, which may be stopped or on a host that is gone.
const LOST_PATIENCE: Duration = Duration::from_secs(1);

/// The hold on a folder; it ends with this, or with the process.
#[derive(Debug)]
pub struct Lock {
    dir: Dir,
    file: File,
}

impl Lock {
    /// Holds `dir`. *Blocks* up to ten seconds while somebody else
    /// does, but for a second only if that is `lost`, a lost rank of the same training, which is replaced then. Where the
    /// file system knows no locks, no process is kept out.
    ///
    /// # Errors
    ///
    /// Usage, when another training has it, naming its process; system, naming the file.
    pub fn take(dir: &Dir, lost: Option<&ProcessName>) -> Result<Lock> {
        Lock::take_within(dir, PATIENCE, lost)
    }

    /// The same without waiting.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn take_now(dir: &Dir) -> Result<Lock> {
        Lock::take_within(dir, Duration::ZERO, None)
    }

    /// The folder. Once another process has replaced the lock, nothing is written through this handle.
    ///
    /// # Errors
    ///
    /// System, naming the file.
    pub fn claimed(&self) -> Result<Dir> {
        self.dir.claimed_by(&self.file, LOCK_FILE)
    }

    fn take_within(dir: &Dir, patience: Duration, lost: Option<&ProcessName>) -> Result<Lock> {
        let other = |error: Error| error.note("try", "another folder with --output-dir");
        let path = dir.path().join(LOCK_FILE);
        let failed = |e: std::io::Error| {
            let what = format!("cannot lock {}", path.display());
            other(Error::new(ErrorKind::System, what).caused_by(e))
        };
        let (began, mut reported) = (Instant::now(), false);
        loop {
            let mut file = dir.open_private(LOCK_FILE).map_err(&other)?;
            if try_lock(&file) {
                // The process that had it removed the file.
                if !dir.is_at(&file, LOCK_FILE) && began.elapsed() < PATIENCE {
                    continue;
                }
                let name = serde_json::to_string(&ProcessName::own()).unwrap_or_default();
                file.set_len(0)
                    .and_then(|()| file.write_all(format!("{name}\n").as_bytes()))
                    .map_err(failed)?;
                return Ok(Lock {
                    dir: dir.clone(),
                    file,
                });
            }
            let by_system = lock_holder(&file);
            let named = serde_json::from_reader(file.take(4096)).ok();
            let is_lost = named.is_some() && named.as_ref() == lost;
            if is_lost && began.elapsed() >= LOST_PATIENCE {
                dir.remove(LOCK_FILE)?;
                phalanx_track::take_over(dir)?;
                continue;
            }
            let who = match named {
                Some(name) if by_system.is_empty() => {
                    format!(" (process {} on {})", name.pid, name.host)
                }
                _ => by_system,
            };
            let what = format!("another training{who} writes into {}", dir.path().display());
            if began.elapsed() >= patience {
                let error = other(Error::usage(what));
                return Err(error.note(
                    "or",
                    format!("end that process; it locks {}", path.display()),
                ));
            }
            if !is_lost && !std::mem::replace(&mut reported, true) {
                say::note(format_args!("waiting: {what}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Lock {
    /// While it is held, no other process's lock file is removed.
    fn drop(&mut self) {
        if self.dir.is_at(&self.file, LOCK_FILE) {
            let _ = self.dir.remove(LOCK_FILE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_held_by_one_and_free_after_it() {
        let dir = tempfile::tempdir().expect("folder");
        let dir = Dir::create(&dir.path().join("a/b")).expect("made");
        let held = Lock::take(&dir, None).expect("held");
        let error = Lock::take_now(&dir).expect_err("held by another");
        assert_eq!(error.kind(), ErrorKind::Usage);
        let who = format!("(process {})", std::process::id());
        assert!(error.chain().contains(&who), "{}", error.chain());
        // A process that is about to release it is waited for.
        let release = std::thread::spawn(move || drop(held));
        let held = Lock::take_within(&dir, Duration::from_secs(60), None).expect("held");
        release.join().expect("no panic");
        assert!(dir.has(LOCK_FILE));
        drop(held);
        assert!(!dir.has(LOCK_FILE));
    }

    #[test]
    fn a_lost_rank_that_is_not_dead_loses_the_folder_and_writes_nothing() {
        let dir = tempfile::tempdir().expect("folder");
        let dir = Dir::open(dir.path()).expect("folder");
        let lost = Lock::take(&dir, None).expect("held");
        let claimed = lost.claimed().expect("claimed");
        let sub = claimed.create_sub("checkpoints").expect("made");
        let put = |dir: &Dir, text: &str| dir.write("a", |out| out.write_all(text.as_bytes()));
        put(&claimed, "before").expect("written");
        put(&sub, "before").expect("written");
        let other = ProcessName {
            pid: 1,
            ..ProcessName::own()
        };
        let began = Instant::now();
        let error = Lock::take_within(&dir, 2 * LOST_PATIENCE, Some(&other));
        error.expect_err("another training's is left alone");
        let taken = Lock::take(&dir, Some(&ProcessName::own())).expect("taken");
        assert!(began.elapsed() < PATIENCE);
        for dir in [&claimed, &sub] {
            let error = put(dir, "after").expect_err("another writes there");
            assert!(
                error
                    .to_string()
                    .contains("another process writes in this folder"),
                "{error}"
            );
            put(&dir.clone(), "after").expect_err("a copy neither");
            dir.remove("a").expect_err("not removed");
            dir.rename("a", "b").expect_err("not renamed");
            dir.link_into("a", dir, "b").expect_err("not linked");
            dir.create_file("a").expect_err("not created");
            dir.append_file("a").expect_err("not opened");
            assert_eq!(dir.read("a", 99).expect("read").expect("there"), b"before");
        }
        drop(lost);
        assert!(dir.has(LOCK_FILE));
        put(&taken.claimed().expect("claimed"), "after").expect("written");
        // Nor when the other one has ended.
        drop(taken);
        put(&claimed, "late").expect_err("not written");
    }
}
