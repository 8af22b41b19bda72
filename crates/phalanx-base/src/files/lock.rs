//! File locks.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;

/// How many times the system's list of locks is read before a lock counts as not listed: each `read` returns one page, from
/// where the last one ended by number, so a lock between them is left out if an earlier one was released meanwhile.
const READS: u32 = 20;

/// Locks `file` while it is open (`flock`). Returns false if another process has locked it.
/// On a file system without locks it always succeeds.
pub fn try_lock(file: &File) -> bool {
    ask_lock(file) != Some(false)
}

/// As [`try_lock`], but `None` where the file cannot be locked, as on a file system without locks.
pub fn ask_lock(file: &File) -> Option<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Some(true),
        Err(Errno::WOULDBLOCK) => Some(false),
        Err(_) => None,
    }
}

/// The process that has locked `file`, as ` (process 123)`, with its user if that is
/// another one. Empty if it is not known, for example on another host.
pub fn lock_holder(file: &File) -> String {
    let found = file.metadata().ok().and_then(|about| {
        let listed = || {
            let locks = fs::read_to_string("/proc/locks").ok()?;
            locks.lines().find_map(|line| holder_in(line, about.ino()))
        };
        (0..READS).find_map(|_| listed())
    });
    let Some(pid) = found else {
        return String::new();
    };
    let user = fs::metadata(format!("/proc/{pid}")).map(|about| about.uid());
    match user {
        Ok(uid) if uid != geteuid().as_raw() => format!(" (process {pid} of user {uid})"),
        _ => format!(" (process {pid})"),
    }
}

/// The process in a line of `/proc/locks`, if it has an flock on this inode: `1: FLOCK
/// ADVISORY  WRITE 708 fe:01:2233 0 EOF`. The device is not looked at: some file systems
/// (overlay, btrfs) show another one there than in `stat`.
fn holder_in(line: &str, inode: u64) -> Option<u32> {
    let mut words = line.split_whitespace().skip(1);
    // A waiting process has `->` here.
    if words.next()? != "FLOCK" {
        return None;
    }
    let pid = words.nth(2)?.parse().ok()?;
    let theirs: u64 = words.next()?.rsplit(':').next()?.parse().ok()?;
    (theirs == inode && pid > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_locked_is_neither_free_nor_held() {
        let file = tempfile::NamedTempFile::new().expect("file");
        // The system refuses `flock` of such a descriptor.
        let path = rustix::fs::open(file.path(), rustix::fs::OFlags::PATH, 0.into());
        let path = File::from(path.expect("open"));
        assert_eq!(ask_lock(&path), None);
        assert!(try_lock(&path));
        let again = File::open(file.path()).expect("open");
        assert_eq!(ask_lock(file.as_file()), Some(true));
        assert_eq!(ask_lock(&again), Some(false));
    }

    #[test]
    fn whoever_holds_a_lock_is_named() {
        let line = "12: FLOCK  ADVISORY  WRITE 708 fe:01:2233 0 EOF";
        assert_eq!(holder_in(line, 2233), Some(708));
        assert_eq!(holder_in(line, 2234), None);
        for other in [
            "12: -> FLOCK  ADVISORY  WRITE 709 fe:01:2233 0 EOF",
            "13: POSIX  ADVISORY  WRITE 708 fe:01:2233 0 EOF",
            "13: FLOCK  ADVISORY  WRITE -1 fe:01:2233 0 EOF",
            "13: FLOCK",
            "",
        ] {
            assert_eq!(holder_in(other, 2233), None, "{other}");
        }
        let file = tempfile::NamedTempFile::new().expect("file");
        let again = File::open(file.path()).expect("open");
        assert!(try_lock(file.as_file()) && !try_lock(&again));
        let holder = lock_holder(&again);
        let ours = format!(" (process {})", std::process::id());
        // Some sandboxes show no locks.
        assert!(holder == ours || holder.is_empty(), "{holder}");
        drop(file);
        // A process that another test has just started holds the file until its `exec`.
        let is_free = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            try_lock(&again)
        });
        assert!(is_free);
    }
}
