//! Was it the kernel's out-of-memory killer? The cgroup knows.

use std::fs;
use std::path::{Path, PathBuf};

/// The count of kills before the ranks started.
pub(crate) struct OomWatch {
    file: Option<PathBuf>,
    before: u64,
}

impl OomWatch {
    /// Finds our memory cgroup (version 2 or 1) and notes its count.
    pub(crate) fn start() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let found = candidates(&groups)
            .into_iter()
            .find_map(|file| Some((kills(&fs::read_to_string(&file).ok()?)?, file)));
        match found {
            Some((before, file)) => OomWatch {
                file: Some(file),
                before,
            },
            None => OomWatch {
                file: None,
                before: 0,
            },
        }
    }

    /// A sentence if the kernel has killed in our cgroup since.
    pub(crate) fn hint(&self, ranks: usize) -> Option<String> {
        let file = self.file.as_ref()?;
        let now = kills(&fs::read_to_string(file).ok()?)?;
        let more = now.checked_sub(self.before).filter(|more| *more > 0)?;
        let limit = file
            .parent()
            .and_then(limit_bytes)
            .map_or(String::new(), |bytes| {
                let gib = bytes as f64 / (1u64 << 30) as f64;
                let plural = if ranks == 1 { "" } else { "s" };
                format!("; the limit is {gib:.1} GiB for {ranks} rank{plural} here")
            });
        Some(format!(
            "the kernel's out-of-memory killer: the cgroup shows oom_kill {more}{limit}"
        ))
    }
}

/// The least limit of the memory cgroups that we know to be in.
pub(crate) fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = candidates(&groups);
    files
        .iter()
        .filter_map(|file| limit_bytes(file.parent()?))
        .min()
}

/// The files that may hold the count, best first, from `/proc/self/cgroup`.
/// Inside a container the path is often that of the host and the group is
/// mounted at the root, so the root is tried as well.
pub(super) fn candidates(groups: &str) -> Vec<PathBuf> {
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
pub(super) fn kills(text: &str) -> Option<u64> {
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
    fn a_rise_of_the_count_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.events");
        fs::write(&file, "oom_kill 4\n").unwrap();
        let watch = OomWatch {
            file: Some(file.clone()),
            before: 4,
        };
        assert_eq!(watch.hint(2), None);
        fs::write(&file, "oom_kill 5\n").unwrap();
        fs::write(dir.path().join("memory.max"), "4294967296\n").unwrap();
        assert_eq!(
            watch.hint(3).unwrap(),
            "the kernel's out-of-memory killer: the cgroup shows oom_kill 1; the limit is 4.0 GiB for 3 ranks here"
        );
        fs::write(dir.path().join("memory.max"), "max\n").unwrap();
        assert!(watch.hint(3).unwrap().ends_with("oom_kill 1"));
    }
}
