//! Files that are whole or absent.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat};
use rustix::io::Errno;

use crate::{Error, Result};

/// Bytes gathered before they go to the system.
const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// Writes `bytes` to `path` so that a reader, or the machine after a power
/// cut, sees the old file or the new one, never a part.
///
/// # Errors
///
/// As [`atomic_write_with`].
pub fn atomic_write(path: &Path, bytes: &[u8]) -> Result<()> {
    atomic_write_with(path, |out| out.write_all(bytes))
}

/// As [`atomic_write`], with content that `fill` writes piece by piece.
///
/// A file without a name, fsync, a name, fsync of the folder: a writer that is
/// killed half way leaves nothing behind. Where the file system has no such
/// files: a temporary file in the same folder, fsync, rename over `path`. On
/// any error `path` is as it was.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the path; `Usage` when `path` names no file.
pub fn atomic_write_with(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let failed = |source| Error::io("cannot write", path, source);
    let Some(name) = path.file_name() else {
        return Err(Error::usage(format!(
            "{} does not name a file",
            path.display()
        )));
    };
    let folder = folder_of(path);
    let filled = |mut file: &File| {
        let mut out = BufWriter::with_capacity(WRITE_BUFFER_BYTES, &mut file);
        fill(&mut out)?;
        out.flush()?;
        drop(out);
        file.sync_all()
    };
    if let Some(file) = nameless(&folder) {
        filled(&file).map_err(failed)?;
        give_name(&file, path, name).map_err(failed)?;
    } else {
        let temporary = tempfile::Builder::new()
            .prefix(&format!(".{}.", name.to_string_lossy()))
            .suffix(".tmp")
            // The default of 0600 is for secrets; the umask decides here.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(&folder)
            .map_err(failed)?;
        filled(temporary.as_file()).map_err(failed)?;
        temporary.persist(path).map_err(|e| failed(e.error))?;
    }
    // Without this the name itself may be lost.
    File::open(&folder)
        .and_then(|f| f.sync_all())
        .map_err(|source| Error::io("cannot sync folder", &folder, source))
}

/// A file in `folder` that no folder knows yet; `None` where the file system
/// (or a missing `/proc`) makes that impossible.
fn nameless(folder: &Path) -> Option<File> {
    if !Path::new("/proc/self/fd").is_dir() {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)).ok()?;
    Some(File::from(file))
}

/// Puts `file` at `path`, over what is there.
fn give_name(file: &File, path: &Path, name: &OsStr) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    let link = |at: &Path| linkat(CWD, &itself, CWD, at, AtFlags::SYMLINK_FOLLOW);
    match link(path) {
        Ok(()) => return Ok(()),
        // A link replaces nothing, a rename does.
        Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(
        ".{}.{}-{count}.tmp",
        name.to_string_lossy(),
        std::process::id()
    ));
    // Left by a process of our number that was killed in between.
    let _ = fs::remove_file(&temporary);
    link(&temporary)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Creates a folder and its parents; it is fine if it exists.
///
/// # Errors
///
/// `Usage` when there is a file of that name; `DiskFull` or `Io`, naming the
/// folder.
pub fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|source| {
        if path.is_file() {
            Error::usage(format!("{} is a file, not a folder", path.display())).with_source(source)
        } else {
            Error::io("cannot create folder", path, source)
        }
    })
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}
