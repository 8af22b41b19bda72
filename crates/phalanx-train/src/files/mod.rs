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
/// any error `path` is as it was. A symbolic link stays one: what it points to
/// is written. What is no regular file (a device, a named pipe) is opened and
/// written as it is, which *blocks* until somebody reads the pipe.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the path; `Usage` when `path` names no file.
pub fn atomic_write_with(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let target = target(path).map_err(|source| Error::io("cannot write", path, source))?;
    let path = &*target;
    let failed = |source| Error::io("cannot write", path, source);
    if fs::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        let mut file = File::options().write(true).open(path).map_err(failed)?;
        let mut out = BufWriter::with_capacity(WRITE_BUFFER_BYTES, &mut file);
        return fill(&mut out).and_then(|()| out.flush()).map_err(failed);
    }
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
    match nameless(&folder) {
        Ok(file) => {
            filled(&file).map_err(failed)?;
            give_name(&file, path, name).map_err(failed)?;
        }
        Err(why) => {
            let temporary = tempfile::Builder::new()
                .prefix(&format!(".{}.", name.to_string_lossy()))
                .suffix(".tmp")
                // The default of 0600 is for secrets; the umask decides here.
                .permissions(Permissions::from_mode(0o666))
                .tempfile_in(&folder)
                .map_err(|error| failed(refusal(why, &error)))?;
            filled(temporary.as_file()).map_err(failed)?;
            temporary.persist(path).map_err(|e| failed(e.error))?;
        }
    }
    // Without this the name itself may be lost.
    File::open(&folder)
        .and_then(|f| f.sync_all())
        .map_err(|source| Error::io("cannot sync folder", &folder, source))
}

/// Why a folder takes no file: what the system said to a nameless one, unless it only knows none;
/// `tempfile` adds a name that nobody has typed.
fn refusal(to_nameless: Errno, to_temporary: &std::io::Error) -> std::io::Error {
    match to_nameless {
        Errno::OPNOTSUPP | Errno::ISDIR => to_temporary.kind().into(),
        why => why.into(),
    }
}

/// Where symbolic links at `path` lead, whether or not there is anything.
fn target(path: &Path) -> std::io::Result<PathBuf> {
    let mut at = path.to_owned();
    // As many as the system follows.
    for _ in 0..40 {
        // Not what a descriptor's link in `/proc` says: that may be no path.
        if fs::metadata(&at).is_ok_and(|there| !there.is_file()) {
            return Ok(at);
        }
        match fs::read_link(&at) {
            Ok(next) => at = folder_of(&at).join(next),
            Err(_) => return Ok(at),
        }
    }
    Err(Errno::LOOP.into())
}

/// A file in `folder` that no folder knows yet; `OPNOTSUPP` where the file system
/// (or a missing `/proc`) makes that impossible.
fn nameless(folder: &Path) -> std::result::Result<File, Errno> {
    if !Path::new("/proc/self/fd").is_dir() {
        return Err(Errno::OPNOTSUPP);
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666))?;
    Ok(File::from(file))
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
/// `Usage` when it, or a parent, is a file; `DiskFull` or `Io`, naming the
/// folder.
pub fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|source| {
        let nearest = path.ancestors().find(|at| at.exists());
        match nearest.filter(|at| !at.is_dir()) {
            Some(file) => Error::usage(format!("{} is a file, not a folder", file.display()))
                .with_source(source),
            None => Error::io("cannot create folder", path, source),
        }
    })
}

/// Sees to it that files can be made in the folder at `path`, and leaves none.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the folder.
pub fn check_writable(path: &Path) -> Result<()> {
    let Err(why) = nameless(path) else {
        return Ok(());
    };
    match tempfile::NamedTempFile::new_in(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io("cannot write into", path, refusal(why, &error))),
    }
}

/// `path` as a shell takes it for one word: for commands that a message suggests.
pub fn as_typed(path: &Path) -> String {
    let text = path.to_string_lossy();
    // It refuses what no path can hold.
    shlex::try_quote(&text).map_or_else(|_| text.to_string(), Into::into)
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_links_and_what_they_point_to_is_written() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("far")).expect("folder");
        symlink("far/second", at("first")).expect("link");
        symlink("file", at("far/second")).expect("link");
        // Nothing is there yet, then the old file.
        for text in ["one", "two"] {
            atomic_write(&at("first"), text.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(at("far/file")).expect("text"), text);
        }
        for link in ["first", "far/second"] {
            assert!(at(link).is_symlink(), "{link}");
        }
        symlink("ring", at("ring")).expect("link");
        atomic_write(&at("ring"), b"x").expect_err("a circle of links");
        assert!(at("ring").is_symlink());
        let names = fs::read_dir(dir.path()).expect("folder").count();
        assert_eq!(names, 3, "nothing else is left");
    }

    #[test]
    fn what_is_in_the_way_is_named_and_no_file_that_nobody_typed() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").expect("written");
        for inside in ["file", "file/x", "file/x/y"] {
            let error = create_folder(&at(inside)).expect_err("a file");
            assert_eq!(error.kind(), crate::ErrorKind::Usage, "{inside}");
            let said = format!("{} is a file, not a folder", at("file").display());
            assert_eq!(error.to_string(), said, "{inside}");
        }
        let error = create_folder(Path::new("/dev/null")).expect_err("a device");
        assert_eq!(error.kind(), crate::ErrorKind::Usage);
        let error = atomic_write(&at("none/x"), b"").expect_err("no folder");
        let said = format!(
            "cannot write {}: No such file or directory (os error 2)",
            at("none/x").display()
        );
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn suggested_commands_are_one_word_a_path() {
        for (path, typed) in [
            ("data/mnist", "data/mnist"),
            ("my data", "'my data'"),
            ("it's; rm", "\"it's; rm\""),
            ("", "''"),
        ] {
            assert_eq!(as_typed(Path::new(path)), typed);
            // A shell's word.
            let echo = format!("printf %s {}", as_typed(Path::new(path)));
            let out = std::process::Command::new("sh")
                .args(["-c", &echo])
                .output();
            assert_eq!(out.expect("sh").stdout, path.as_bytes(), "{typed}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_written_and_stays() {
        let dir = tempfile::tempdir().expect("folder");
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo").success());
        let reader = {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs::read_to_string(pipe))
        };
        atomic_write(&pipe, b"text").expect("written");
        let read = reader.join().expect("no panic").expect("read");
        assert_eq!(read, "text");
        atomic_write(Path::new("/dev/null"), b"text").expect("written");
        let full = atomic_write(Path::new("/dev/full"), b"text").expect_err("a full disk");
        assert_eq!(full.kind(), crate::ErrorKind::DiskFull);
        for there in [&pipe, Path::new("/dev/null"), Path::new("/dev/full")] {
            let kind = fs::symlink_metadata(there).expect("there").file_type();
            assert!(!kind.is_file(), "{}", there.display());
        }
    }
}
