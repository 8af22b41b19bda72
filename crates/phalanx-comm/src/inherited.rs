//! Files without a name, and sockets, that a launcher hands to its ranks.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Opens `path` with `open`. A launcher names its memory files as `/proc/PID/fd/N`, which processes in another
/// user or process namespace cannot open, such as a rank in a container. They have inherited the file under the
/// same number, unless a process between has closed it: then another file may have the number, and the error is
/// that of the first attempt.
///
/// # Errors
///
/// Those of `open`.
pub fn open<T, E>(path: &Path, open: impl Fn(&Path) -> Result<T, E>) -> Result<T, E> {
    open(path).or_else(
        |error| match same_number(path).filter(|own| is_unnamed(own)) {
            Some(own) => open(&own),
            None => Err(error),
        },
    )
}

fn same_number(path: &Path) -> Option<PathBuf> {
    let (pid, fd) = path.to_str()?.strip_prefix("/proc/")?.split_once("/fd/")?;
    let (_, fd): (u32, u32) = (pid.parse().ok()?, fd.parse().ok()?);
    Some(format!("/proc/self/fd/{fd}").into())
}

/// Whether it is a regular file without a directory entry: a memory file, or a deleted one.
fn is_unnamed(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.nlink() == 0)
}

/// Duplicates the connected socket that this process inherited as descriptor `number`. Child processes do not
/// inherit the duplicate.
///
/// # Errors
///
/// `InvalidInput` if the descriptor is not a socket or not open.
pub fn inherited_socket(number: RawFd) -> io::Result<UnixStream> {
    let about = std::fs::metadata(format!("/proc/self/fd/{number}"));
    if number < 0 || !about.is_ok_and(|about| about.file_type().is_socket()) {
        let message = format!("descriptor {number} is no open socket");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // SAFETY: the descriptor is not -1. If another thread closes it meanwhile, the copy fails or is one of another
    // file, which is read and written as any file.
    let theirs = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(theirs.try_clone_to_owned()?.into())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_file_without_a_name_is_found_by_its_number() {
        // No process has this number.
        let of = |file: &File| PathBuf::from(format!("/proc/4194305/fd/{}", file.as_raw_fd()));
        let found = |path: &Path| open(path, |path| File::open(path));
        let dir = tempfile::tempdir().unwrap();
        let named = dir.path().join("named");
        let file = File::create(&named).unwrap();
        assert!(found(&of(&file)).is_err(), "it is somebody else's");
        std::fs::remove_file(&named).unwrap();
        assert!(found(&of(&file)).is_ok());
        let pipe = std::io::pipe().unwrap();
        let number = pipe.0.as_raw_fd();
        assert!(found(Path::new(&format!("/proc/4194305/fd/{number}"))).is_err());
        for path in ["/proc/x/fd/0", "/no/such", "/proc/4194305/fd/99999"] {
            assert!(found(Path::new(path)).is_err(), "{path}");
        }
    }
    #[test]
    fn a_socket_is_taken_over_by_its_number() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut taken = inherited_socket(ours.as_raw_fd()).unwrap();
        drop(ours);
        theirs.write_all(b"hello").unwrap();
        let mut read = [0; 5];
        taken.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"hello");
        let pipe = std::io::pipe().unwrap();
        for number in [-1, i32::MAX, pipe.0.as_raw_fd()] {
            let error = inherited_socket(number).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{number}");
        }
    }
}
