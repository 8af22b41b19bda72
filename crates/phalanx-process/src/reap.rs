//! A launcher adopts the orphans of its children, instead of init.
//!
//! A child that dies leaves its own children behind. They are in its process
//! group and get our signals, but only their parent can wait for them: so the
//! launcher becomes that parent ("child subreaper"). It then knows when all have ended,
//! and no zombies are left where init does not reap them, as in many containers.

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpgid, waitpid,
};

/// How long to wait for killed processes.
const GROUP_LIMIT: Duration = Duration::from_millis(300);

/// Adopts the orphans of all descendants from now on. Where the kernel refuses they go
/// to init, which is not an error.
pub fn adopt_orphans() {
    let _ = set_child_subreaper(Some(getpid()));
}

/// Whether this process has children already, from the program that it was before an exec:
/// then an orphan need not belong to our children.
pub fn has_children() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    tasks.flatten().any(|task| {
        let children = std::fs::read_to_string(task.path().join("children"));
        children.is_ok_and(|children| !children.trim().is_empty())
    })
}

/// Waits for all processes of a killed group whose leader was reaped already.
pub fn reap_group(group: Pid) {
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

/// Reaps orphans that left their rank's group and have ended, and returns those that live;
/// `ours` are the children that other threads wait for. The numbers of returned ones stay
/// theirs until they are reaped here.
pub fn reap_strangers(ours: &HashSet<i32>) -> Vec<Pid> {
    let me = getpid().as_raw_nonzero();
    // Orphans are given to the main thread. Where the kernel does not list
    // children, they stay until we end.
    let Ok(children) = std::fs::read_to_string(format!("/proc/self/task/{me}/children")) else {
        return Vec::new();
    };
    let lives = |pid: &Pid| matches!(waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None));
    strangers(&children, ours)
        .into_iter()
        .filter(lives)
        .collect()
}

/// Kills all orphans but `ours`, and their own orphans.
pub fn kill_strangers(ours: &HashSet<i32>) {
    let until = Instant::now() + GROUP_LIMIT;
    loop {
        let left = reap_strangers(ours);
        if left.is_empty() || Instant::now() >= until {
            return;
        }
        for pid in left {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(1));
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
