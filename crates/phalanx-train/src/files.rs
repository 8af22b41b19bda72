//! Files that are whole or absent.

use std::fs::{self, File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

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
/// Temporary file in the same folder, fsync, rename over `path`, fsync of the
/// folder. On any error the temporary file is removed and `path` is as it was.
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
    let mut temporary = tempfile::Builder::new()
        .prefix(&format!(".{}.", name.to_string_lossy()))
        .suffix(".tmp")
        // The default of 0600 is for secrets; the umask decides here.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(&folder)
        .map_err(failed)?;
    let mut out = BufWriter::with_capacity(WRITE_BUFFER_BYTES, temporary.as_file_mut());
    fill(&mut out).and_then(|()| out.flush()).map_err(failed)?;
    drop(out);
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(path).map_err(|e| failed(e.error))?;
    // Without this the rename itself may be lost.
    File::open(&folder)
        .and_then(|f| f.sync_all())
        .map_err(|source| Error::io("cannot sync folder", &folder, source))
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
