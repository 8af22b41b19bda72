//! The folder of one run: each rank's error file and, with `--log-dir`, its output.
//!
//! Layout as under torchrun: `FOLDER/attempt_N/LOCAL_RANK/`. The folder's name ends in random digits and the
//! folder is created by this launcher, so neither an earlier run nor another node has written into it.
//!
//! Without `--log-dir` the folder is private (mode 0700) and is removed when the launcher ends. The guard
//! removes it when the launcher was killed. Where both were killed the next launcher does: it finds the folder unlocked.

use std::fs::{DirBuilder, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_base::error::system;
use phalanx_base::{Error, ErrorKind, Result};

use crate::guard::{Guard, remove};

/// Where the folder is made when the folder for temporary files cannot be written.
const IN_MEMORY: &str = "/dev/shm";

/// How the name of a private folder begins.
const PRIVATE: &str = "phalanx-run-";

/// Prefix of the name of a folder for logs, if the user gave none.
const LOGS: &str = "phalanx-logs-";

/// A launcher has locked its private folder long before the folder is this old.
const LOCKED_BY: Duration = Duration::from_secs(60);

/// The folder of one run.
pub struct RunFolder {
    path: PathBuf,
    made: bool,
    /// Of a private one: locked until this launcher ends.
    lock: Option<File>,
    /// It is removed at the end.
    is_private: bool,
}

impl RunFolder {
    /// `path`, from [`for_logs`], which stays.
    pub fn kept(path: &Path) -> RunFolder {
        RunFolder {
            // Ranks may change their folder.
            path: absolute(path),
            made: false,
            lock: None,
            is_private: false,
        }
    }

    /// A private folder, removed when this is dropped.
    pub fn private() -> Result<RunFolder> {
        Ok(RunFolder {
            path: absolute(&std::env::temp_dir()).join(format!("{PRIVATE}{}", random_id()?)),
            made: false,
            lock: None,
            is_private: true,
        })
    }

    /// Makes the folder, unless that was done before. A private one is named to `guard` first.
    ///
    /// # Errors
    /// `Usage`, naming the folder.
    pub fn make(&mut self, guard: &Guard) -> Result<()> {
        if self.is_private {
            guard.folder(&self.path);
        }
        if self.made {
            return Ok(());
        }
        if !self.is_private {
            let parent = self.path.parent().unwrap_or(Path::new("/"));
            let is_named = !is_called(parent, LOGS);
            let made = DirBuilder::new()
                .recursive(true)
                .mode(if is_named { 0o777 } else { 0o700 })
                .create(parent)
                .and_then(|()| std::fs::create_dir(&self.path))
                .map_err(|error| cannot_make(&self.path, error));
            self.made = made.is_ok();
            return made.map_err(|error| match is_named {
                true => error,
                false => error.note(
                    "fix",
                    "give --log-dir, or set TMPDIR to a folder that can be written",
                ),
            });
        }
        let private = |path: &Path| DirBuilder::new().mode(0o700).create(path);
        if let Err(error) = private(&self.path) {
            let elsewhere = self
                .path
                .file_name()
                .map(|name| Path::new(IN_MEMORY).join(name));
            let first = std::mem::replace(&mut self.path, elsewhere.unwrap_or_default());
            guard.folder(&self.path);
            private(&self.path).map_err(|_| {
                cannot_make(&first, error).note("fix", "set TMPDIR to a folder that can be written")
            })?;
        }
        self.made = true;
        self.lock = File::open(&self.path)
            .ok()
            .filter(|folder| folder.try_lock().is_ok());
        remove_abandoned(self.path.parent().unwrap_or(Path::new("/")));
        Ok(())
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes and gives the folder of one rank in one attempt.
    ///
    /// # Errors
    /// `Usage`, naming the folder.
    pub fn of_rank(&self, restarts: u32, local_rank: usize) -> Result<PathBuf> {
        let path = self.path.join(format!("attempt_{restarts}/{local_rank}"));
        match std::fs::create_dir_all(&path) {
            Ok(()) => Ok(path),
            Err(error) => Err(cannot_make(&path, error)),
        }
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.made && self.is_private {
            remove(&self.path);
        }
    }
}

fn cannot_make(path: &Path, error: std::io::Error) -> Error {
    Error::new(
        ErrorKind::Usage,
        format!("cannot make the folder {}", path.display()),
    )
    .caused_by(error)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether the folder's name begins so.
fn is_called(path: &Path, begin: &str) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_bytes().starts_with(begin.as_bytes())
}

/// Removes the private folders in `parent` of launchers that were killed together with their guards.
fn remove_abandoned(parent: &Path) {
    let me = rustix::process::geteuid().as_raw();
    let is_ours = |about: Metadata| {
        let age = about.modified().ok().and_then(|at| at.elapsed().ok());
        about.is_dir() && about.uid() == me && age > Some(LOCKED_BY)
    };
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if is_called(&path, PRIVATE)
            && entry.metadata().is_ok_and(is_ours)
            && File::open(&path).is_ok_and(|folder| folder.try_lock().is_ok())
        {
            remove(&path);
        }
    }
}

/// A folder for logs below the folder for temporary files, which is made with the logs. It stays, and only this user
/// can read it.
pub fn temporary() -> Result<PathBuf> {
    Ok(std::env::temp_dir().join(format!("{LOGS}{}", random_id()?)))
}

/// `DIR/RUN_ID_xxxxxxxx`, a name that no other run has; with several nodes `DIR/RUN_ID_NODE_xxxxxxxx`.
pub fn for_logs(dir: &Path, run_id: &str, node: Option<&str>) -> Result<PathBuf> {
    // A run's name is any text: it must stay one name in `dir`.
    let plain = |c: char| match c {
        '/' | '\0'..='\x1f' | '\x7f' => '_',
        other => other,
    };
    let run_id: String = run_id.chars().map(plain).collect();
    let node = node.map_or(String::new(), |node| format!("_{node}"));
    let random = random_id()?;
    let random = random.split('-').next().unwrap_or_default();
    Ok(dir.join(format!("{run_id}{node}_{random}")))
}

/// A name that no other job has, in the form of a UUID.
pub fn random_id() -> Result<String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(system("no random numbers"))?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = hex::encode(bytes);
    Ok(format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs_stay_one_name_and_differ() {
        let dir = Path::new("/logs");
        for (run_id, begins) in [
            ("none", "none_"),
            ("../x/y", ".._x_y_"),
            ("a\nb", "a_b_"),
            ("..", ".._"),
        ] {
            let path = for_logs(dir, run_id, None).unwrap();
            assert_eq!(path.parent(), Some(dir), "{run_id}");
            let name = path.file_name().unwrap().to_str().unwrap();
            assert_eq!(name.strip_prefix(begins).map(str::len), Some(8), "{name}");
            assert_ne!(for_logs(dir, run_id, None).unwrap(), path);
        }
        let path = for_logs(dir, "none", Some("node1")).unwrap();
        assert!(path.to_str().unwrap().starts_with("/logs/none_node1_"));
    }

    #[test]
    fn random_ids_look_like_uuids_and_differ() {
        let (a, b) = (random_id().unwrap(), random_id().unwrap());
        assert_ne!(a, b);
        assert_eq!(a.len(), 36);
        assert_eq!(a.as_bytes()[14], b'4');
    }
}
