//! Orphans of ranks come to the launcher instead of to init.
//!
//! A rank that dies leaves its own children behind. They are in its process
//! group and get our signals, but only their parent can wait for them: so the
//! launcher becomes that parent ("child subreaper"). Then "all have ended" is
//! something it has seen and not something it hopes for, and no zombies stay
//! where init does not do its duty, as in many containers.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpgid, waitpid};

/// How long killed processes may take to go. They hold no lock of ours.
const GROUP_LIMIT: Duration = Duration::from_millis(300);

/// From now on orphans below us are ours. Without it (old kernels) they go
/// to init, which is no reason to fail.
pub(crate) fn adopt_orphans() {
    let _ = set_child_subreaper(Some(getpid()));
}

/// Waits for all processes of a killed group whose leader was reaped already.
pub(crate) fn reap_group(group: Pid) {
    let until = Instant::now() + GROUP_LIMIT;
    loop {
        match waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            // None of ours is left (`ECHILD`), or one hangs in the kernel.
            _ => return,
        }
    }
}

/// Reaps orphans that left their rank's group and have ended since; `ours`
/// are the children that somebody else waits for.
pub(crate) fn reap_strangers(ours: &HashSet<i32>) {
    let me = getpid().as_raw_nonzero();
    // Orphans are given to the main thread. Where the kernel does not list
    // children, they stay until we end.
    let Ok(children) = std::fs::read_to_string(format!("/proc/self/task/{me}/children")) else {
        return;
    };
    for pid in strangers(&children, ours) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

fn strangers(children: &str, ours: &HashSet<i32>) -> Vec<Pid> {
    children
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .filter(|pid| !ours.contains(pid))
        .filter_map(Pid::from_raw)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_children_are_not_strangers() {
        let ours = HashSet::from([12, 14]);
        let found: Vec<i32> = strangers("12 13 14 15 \n", &ours)
            .iter()
            .map(|pid| pid.as_raw_nonzero().get())
            .collect();
        assert_eq!(found, [13, 15]);
        assert!(strangers("", &ours).is_empty());
    }
}
