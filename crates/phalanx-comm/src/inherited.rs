//! Files without a name that a launcher hands to its ranks.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Opens `path` with `open`. A launcher names its memory files as `/proc/PID/fd/N`, which processes in another
/// user or process namespace cannot open, such as a rank in a container. They have inherited the file under the
/// same number, unless a process between has closed it: then another file may have the number, and the error is
/// that of the first attempt.
pub(crate) fn open<T, E>(path: &Path, open: impl Fn(&Path) -> Result<T, E>) -> Result<T, E> {
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

/// Whether it is a regular file that no folder has: a memory file, or a deleted one.
fn is_unnamed(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.nlink() == 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
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
}
