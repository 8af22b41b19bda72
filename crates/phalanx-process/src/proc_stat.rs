//! What `/proc/PID/stat` says of a process, and its files in `/proc/PID/fd`.
//!
//! Not `getpgid` and `getsid` of rustix: the group of a kernel thread, and the group or session whose leader is in
//! another PID namespace, is 0, and its `Pid` is a number that cannot be.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A process.
pub struct Stat {
    /// `R`, `S`, `Z`, …
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// The group in the foreground of its terminal; -1 without one.
    pub foreground: i32,
    /// When it started, in clock ticks since the host did.
    pub started: u64,
}

/// Reads that of `pid`, which is a number or `self`; `None` if there is no such process.
pub fn stat(pid: impl std::fmt::Display) -> Option<Stat> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(text: &str) -> Option<Stat> {
    // The name is in parentheses and may have any characters.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    let mut number = || fields.next()?.parse().ok();
    let (parent, group, session) = (number()?, number()?, number()?);
    let foreground = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(13)?.parse().ok()?;
    Some(Stat {
        state,
        parent,
        group,
        session,
        foreground,
        started,
    })
}

/// The process that started this one as one of several, and its number: the first process above this one whose
/// environment has other values of `variables`, which differ between the processes. A shell or `numactl` between the two has
/// the same values. `None`: the process has ended, or `/proc` cannot be read.
pub fn starter(variables: &[&str]) -> Option<(u32, Stat)> {
    let pair = |name: &&str| {
        let value = std::env::var_os(name)?;
        Some([name.as_bytes(), b"=", value.as_bytes()].concat())
    };
    let own: Vec<Vec<u8>> = variables.iter().filter_map(pair).collect();
    let mut pid = stat("self")?.parent;
    loop {
        let above = stat(pid)?;
        // Another user's cannot be read.
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let has = |pair: &Vec<u8>| environ.split(|byte| *byte == 0).any(|other| other == pair);
        if own.is_empty() || !own.iter().all(has) {
            return Some((pid, above));
        }
        pid = above.parent;
    }
}

/// The path by which this user's processes open a descriptor of the launcher while it lives. An
/// inherited descriptor would not do: Python's `subprocess`, for example, closes it in children, and
/// another file could get its number.
pub fn path_of(fd: &impl AsFd) -> OsString {
    // Not `getpid`: `/proc` may count as another namespace does.
    let me = std::fs::read_link("/proc/self")
        .unwrap_or_else(|_| PathBuf::from(std::process::id().to_string()));
    format!("/proc/{}/fd/{}", me.display(), fd.as_fd().as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell is between this process and the one that starts it again.
    #[test]
    fn a_shell_above_is_not_the_starter() {
        const RANK: &str = "PHALANX_TEST_STARTED_BY";
        let parent = std::os::unix::process::parent_id();
        if let Ok(started_by) = std::env::var(RANK) {
            assert_eq!(starter(&[]).unwrap().0, parent);
            let (pid, found) = starter(&[RANK, "PHALANX_TEST_UNSET"]).unwrap();
            assert_eq!(format!("{pid} {}", found.started), started_by);
            assert_ne!(pid, parent);
            return;
        }
        let own = format!("{} {}", std::process::id(), stat("self").unwrap().started);
        let test = "proc_stat::tests::a_shell_above_is_not_the_starter";
        let status = std::process::Command::new("sh")
            .args(["-c", "\"$0\" --exact \"$1\"; exit $?"])
            .arg(std::env::current_exe().unwrap())
            .arg(test)
            .env(RANK, own)
            .status();
        assert!(status.unwrap().success());
    }

    #[test]
    fn this_process_and_a_kernel_thread_are_read() {
        let own = stat("self").unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(own.started > 0);
        let text = "2 (k (x) y) S 0 0 0 0 -1 2129984 0 0 0 0 0 1 0 0 20 0 1 0 7 0 0";
        let kernel = parse(text).unwrap();
        assert_eq!((kernel.state, kernel.group, kernel.session), ('S', 0, 0));
        assert_eq!(kernel.started, 7);
        assert!(stat(u32::MAX).is_none());
    }
}
