//! One training a folder: two that write into the same one would leave broken
//! metrics and one's results less.

use std::fs::File;
use std::io::{Read, Write};
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

/// The hold on a folder; it ends with this, or with the process.
#[derive(Debug)]
pub struct Lock {
    dir: Dir,
    _file: File,
}

impl Lock {
    /// Holds `dir`. *Blocks* up to ten seconds while somebody else
    /// does. Where the file system knows no locks, nobody is kept out.
    ///
    /// # Errors
    ///
    /// Usage, when another training has it, naming its process; system, naming the file.
    pub fn take(dir: &Dir) -> Result<Lock> {
        Lock::take_within(dir, PATIENCE)
    }

    /// The same without waiting.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn take_now(dir: &Dir) -> Result<Lock> {
        Lock::take_within(dir, Duration::ZERO)
    }

    fn take_within(dir: &Dir, patience: Duration) -> Result<Lock> {
        let other = |error: Error| error.note("try", "another folder with --output-dir");
        let path = dir.path().join(LOCK_FILE);
        let failed = |e: std::io::Error| {
            let what = format!("cannot lock {}", path.display());
            other(Error::new(ErrorKind::System, what).caused_by(e))
        };
        let (began, mut told) = (Instant::now(), false);
        loop {
            let mut file = dir.open_private(LOCK_FILE).map_err(&other)?;
            if try_lock(&file) {
                // Whoever had it took the file away with it.
                if !dir.is_at(&file, LOCK_FILE) && began.elapsed() < PATIENCE {
                    continue;
                }
                let name = serde_json::to_string(&ProcessName::own()).unwrap_or_default();
                file.set_len(0)
                    .and_then(|()| file.write_all(format!("{name}\n").as_bytes()))
                    .map_err(failed)?;
                return Ok(Lock {
                    dir: dir.clone(),
                    _file: file,
                });
            }
            let who = holder(&mut file);
            let what = format!("another training{who} writes into {}", dir.path().display());
            if began.elapsed() >= patience {
                let error = other(Error::usage(what));
                return Err(error.note(
                    "or",
                    format!("end that process; it locks {}", path.display()),
                ));
            }
            if !std::mem::replace(&mut told, true) {
                say::note(format_args!("waiting: {what}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Lock {
    /// While it is held: nobody else's goes.
    fn drop(&mut self) {
        let _ = self.dir.remove(LOCK_FILE);
    }
}

/// ` (process 123)`, as the system says it, or else the file.
fn holder(file: &mut File) -> String {
    let by_system = lock_holder(file);
    if !by_system.is_empty() {
        return by_system;
    }
    match serde_json::from_reader::<_, ProcessName>(file.take(4096)) {
        Ok(name) => format!(" (process {} on {})", name.pid, name.host),
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_held_by_one_and_free_after_it() {
        let dir = tempfile::tempdir().expect("folder");
        let dir = Dir::create(&dir.path().join("a/b")).expect("made");
        let held = Lock::take(&dir).expect("held");
        let error = Lock::take_within(&dir, Duration::ZERO).expect_err("held by another");
        assert_eq!(error.kind(), ErrorKind::Usage);
        let who = format!("(process {})", std::process::id());
        assert!(error.chain().contains(&who), "{}", error.chain());
        // Whoever is about to let go is waited for.
        let release = std::thread::spawn(move || drop(held));
        let held = Lock::take_within(&dir, Duration::from_secs(60)).expect("held");
        release.join().expect("no panic");
        assert!(dir.has(LOCK_FILE));
        drop(held);
        assert!(!dir.has(LOCK_FILE));
    }
}
