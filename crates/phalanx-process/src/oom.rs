//! Whether the kernel's out-of-memory killer ended a rank, from the counts of its cgroup.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

use phalanx_base::format;

/// What is said of a rank that was killed where the kernel shows no counts.
const UNKNOWN: &str =
    "the sender is unknown; often it is the kernel's out-of-memory killer (see dmesg)";

/// The counts of kills before the ranks started.
pub struct OomWatch {
    /// That of our memory cgroup.
    group: Option<(PathBuf, u64)>,
    /// That of the host.
    host: Option<u64>,
}

/// Where the kernel counts the kills on this host.
const OF_HOST: &str = "/proc/vmstat";

impl OomWatch {
    /// Notes the counts of the host and of our memory cgroup (version 2 or 1).
    pub fn start() -> Self {
        OomWatch {
            group: count_of(&read("/proc/self/cgroup")),
            host: kills(&read(OF_HOST)),
        }
    }

    /// A sentence about SIGKILL for the rank `pid`, one of `ranks` here, which has ended but
    /// was not waited for; `None` when the kernel has killed no process for its memory since.
    pub fn hint(&self, pid: Pid, ranks: usize) -> Option<String> {
        let theirs = count_of(&read(&format!("/proc/{}/cgroup", pid.as_raw_nonzero())));
        let ours = self.group.as_ref();
        if let Some((file, before)) = ours
            && let Some(more) = risen(file, *before)
        {
            let ranks = format::plural(ranks, "rank");
            let limit = limit_above(file).map_or(String::new(), |bytes| {
                format!("; the limit is {} for {ranks} here", shown(bytes))
            });
            return Some(format!(
                "the kernel's out-of-memory killer: the cgroup shows oom_kill {more}{limit}"
            ));
        }
        // The rank was put into a group of its own, whose count may be older than the rank. What
        // has ended is in the root group by version 1, which has no limit.
        let own = theirs.filter(|(file, _)| ours.is_none_or(|(other, _)| other != file));
        let host = match self.host {
            None => None,
            Some(before) => Some(risen(OF_HOST.as_ref(), before)?),
        };
        if let Some((file, count @ 1..)) = own
            && let Some(bytes) = limit_above(&file)
        {
            return Some(format!(
                "the kernel's out-of-memory killer: the rank's own cgroup {} shows oom_kill {count}; its limit is {}",
                file.parent().unwrap_or(&file).display(),
                shown(bytes)
            ));
        }
        Some(match host {
            None => UNKNOWN.to_owned(),
            Some(more) => {
                let plural = if more == 1 { "" } else { "es" };
                format!(
                    "the kernel's out-of-memory killer: it ended {more} process{plural} on this host meanwhile; dmesg names them, and the limit that they met"
                )
            }
        })
    }
}

fn shown(bytes: u64) -> String {
    format::bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The file with the count of kills of the memory cgroup in `groups`, as `/proc/PID/cgroup`
/// has it, and the count.
fn count_of(groups: &str) -> Option<(PathBuf, u64)> {
    candidates(groups).into_iter().find_map(|file| {
        let count = kills(&fs::read_to_string(&file).ok()?)?;
        Some((file, count))
    })
}

/// By how much the count in `file` has risen, if it has.
fn risen(file: &Path, before: u64) -> Option<u64> {
    let now = kills(&fs::read_to_string(file).ok()?)?;
    now.checked_sub(before).filter(|more| *more > 0)
}

/// The least limit of the group that has `file`, and of those that it is in.
fn limit_above(file: &Path) -> Option<u64> {
    file.ancestors().skip(1).filter_map(limit_bytes).min()
}

/// The least limit of the memory cgroups that we know to be in.
pub fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = candidates(&groups);
    files.iter().filter_map(|file| limit_above(file)).min()
}

/// The files that may hold the count, best first, from `/proc/self/cgroup`.
/// Inside a container the path is often that of the host and the group is
/// mounted at the root, so the root is tried as well.
pub fn candidates(groups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let path = path.trim_start_matches('/');
        let (root, file) = if controllers.is_empty() {
            ("/sys/fs/cgroup", "memory.events")
        } else if controllers.split(',').any(|c| c == "memory") {
            ("/sys/fs/cgroup/memory", "memory.oom_control")
        } else {
            continue;
        };
        files.push(Path::new(root).join(path).join(file));
        files.push(Path::new(root).join(file));
    }
    files
}

/// `oom_kill N` in `memory.events` or `memory.oom_control`.
pub fn kills(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The group's limit, unless there is none.
fn limit_bytes(group: &Path) -> Option<u64> {
    ["memory.max", "memory.limit_in_bytes"]
        .iter()
        .find_map(|file| {
            fs::read_to_string(group.join(file))
                .ok()?
                .trim()
                .parse()
                .ok()
        })
        // Version 1 says "no limit" with a number near 2^63.
        .filter(|bytes| *bytes < 1 << 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions() {
        let files = candidates("9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n");
        let want = [
            "/sys/fs/cgroup/memory/job/7/memory.oom_control",
            "/sys/fs/cgroup/memory/memory.oom_control",
            "/sys/fs/cgroup/memory.events",
            "/sys/fs/cgroup/memory.events",
        ];
        assert_eq!(files, want.map(PathBuf::from));
        assert_eq!(
            kills("low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
            Some(2)
        );
        assert_eq!(
            kills("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
            Some(5)
        );
        assert_eq!(kills("low 0\n"), None);
    }

    #[test]
    fn a_rise_of_the_count_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("job/memory.events");
        fs::create_dir(dir.path().join("job")).unwrap();
        fs::write(&file, "oom_kill 4\n").unwrap();
        let mut watch = OomWatch {
            group: Some((file.clone(), 4)),
            host: kills(&read(OF_HOST)),
        };
        let me = rustix::process::getpid();
        let hint = |watch: &OomWatch, ranks| watch.hint(me, ranks);
        // The kernel shows the host's count since 4.13; in these tests it kills no process.
        if watch.host.is_some() {
            assert_eq!(hint(&watch, 2), None);
        }
        watch.host = None;
        assert_eq!(hint(&watch, 2).as_deref(), Some(UNKNOWN));
        fs::write(&file, "oom_kill 5\n").unwrap();
        fs::write(dir.path().join("job/memory.max"), "max\n").unwrap();
        // That of the group above holds, too.
        fs::write(dir.path().join("memory.max"), "4294967296\n").unwrap();
        assert_eq!(
            hint(&watch, 3).unwrap(),
            "the kernel's out-of-memory killer: the cgroup shows oom_kill 1; the limit is 4 GiB for 3 ranks here"
        );
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        assert!(hint(&watch, 3).unwrap().ends_with("oom_kill 1"));
    }
}
