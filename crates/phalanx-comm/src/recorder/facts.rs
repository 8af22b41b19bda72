//! What is known about another rank that is late, and how it is reported.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::dump::{Entry, position};
use crate::status::words::printable;
use crate::status::{Elsewhere, Status, pid_space};

/// Longest record that is read from the store; ours have about 300 bytes.
pub(super) const MAX_RECORD_BYTES: usize = 2048;
/// A record older than this does not say what its rank is doing now.
const STALE: Duration = Duration::from_secs(12);

/// `entry` as seen by the other groups of its rank.
pub(super) fn elsewhere(entry: &Entry) -> Option<Elsewhere> {
    Some(Elsewhere {
        op: entry.op.clone(),
        group: entry.group,
        seq: entry.seq?,
        awaited: entry.awaited.clone(),
    })
}

/// What a rank publishes through the store for the ranks that share no memory with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) host: String,
    /// The kernel that knows the pid.
    pub(super) kernel: String,
    pub(super) status: Status,
    /// When this was written.
    pub(super) unix_ms: u64,
}

impl Record {
    /// Nothing in it is trusted.
    pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
        let bytes = bytes.get(..bytes.len().min(MAX_RECORD_BYTES))?;
        let mut record: Record = serde_json::from_slice(bytes).ok()?;
        let status = &mut record.status;
        let phase = status.phase.iter_mut().map(|(name, _)| name);
        let elsewhere = status.elsewhere.iter_mut().map(|other| &mut other.op);
        for text in phase.chain(elsewhere).chain([&mut record.host]) {
            *text = printable(text);
        }
        Some(record)
    }
}

/// Identifies this kernel since it booted.
pub(super) fn kernel() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot.trim().to_owned()
}

/// What is known about one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fact {
    pub(crate) rank: usize,
    pub(crate) host: Option<String>,
    /// Whether `/proc` knows its process.
    pub(crate) is_local: bool,
    pub(crate) status: Status,
}

impl Fact {
    pub(super) fn of_cell(rank: usize, status: Status) -> Fact {
        Fact {
            rank,
            host: None,
            is_local: status.pid_space == pid_space(),
            status,
        }
    }

    pub(super) fn of_record(rank: usize, record: Record, own_kernel: &str, now_ms: u64) -> Fact {
        let age = Duration::from_millis(now_ms.saturating_sub(record.unix_ms));
        let mut status = record.status;
        let is_local = record.kernel == own_kernel && status.pid_space == pid_space();
        if age >= STALE {
            status = Status {
                pid: status.pid,
                ..Status::default()
            };
        }
        if let Some((_, lasted)) = &mut status.phase {
            *lasted = lasted.saturating_add(age);
        }
        Fact {
            rank,
            host: Some(record.host),
            is_local,
            status,
        }
    }

    /// `rank 2 (pid 4712, host node-b)`.
    pub(super) fn name(&self) -> String {
        match &self.host {
            Some(host) if !self.is_local => {
                format!("rank {} (pid {}, host {host})", self.rank, self.status.pid)
            }
            _ => format!("rank {} (pid {})", self.rank, self.status.pid),
        }
    }

    /// Whether it is in collective `seq` now.
    pub(super) fn is_in(&self, seq: u64) -> bool {
        self.status.entered == Some(seq) && self.status.done != Some(seq)
    }

    /// Whether, according to the kernel, it is stopped or dead.
    pub(super) fn is_halted(&self) -> bool {
        self.is_local
            && matches!(
                Process::of(self.status.pid),
                Process::Stopped | Process::Dead
            )
    }

    /// What it is doing instead of joining operation `seq`, without its name.
    pub(super) fn doing(&self, seq: Option<u64>) -> String {
        let process = if self.is_local {
            Process::of(self.status.pid)
        } else {
            Process::Unknown
        };
        let mut parts = Vec::new();
        let waits = seq.is_some_and(|seq| self.is_in(seq));
        let within = if waits { " in the middle of it" } else { "" };
        match process {
            Process::Stopped => parts.push(format!("is stopped (SIGSTOP or a debugger){within}")),
            Process::Dead => parts.push(format!("is dead{within}")),
            Process::Unknown | Process::Alive if waits => {
                parts.push("has come but does not continue".to_owned());
            }
            Process::Unknown | Process::Alive => {}
        }
        if let Some(done) = self.status.done.filter(|_| !waits) {
            parts.push(format!("last completed seq {done}"));
        }
        if let Some(elsewhere) = self.status.elsewhere.as_ref().filter(|_| !waits) {
            parts.push(format!("is in {}", elsewhere.text()));
        }
        if let Some((name, since)) = self.status.phase.as_ref().filter(|_| !waits) {
            let verb = match process {
                Process::Stopped | Process::Dead => "was",
                _ => "is",
            };
            let mut text = format!(
                "{verb} in {name} for {}",
                phalanx_base::format::duration(*since)
            );
            if let Some(at) = position(self.status.position) {
                text.push_str(&format!(" (epoch {} step {})", at.epoch, at.step));
            }
            parts.push(text);
        }
        if parts.is_empty() {
            parts.push("has not said what it is doing".to_owned());
        }
        parts.join(" and ")
    }
}

/// The ranks to blame when the `missing` ranks do not reach rank `me`: those that are
/// stopped or dead, otherwise those that do not wait themselves. A rank about which
/// nothing is known counts as not waiting. When all wait for each other, or for `me`,
/// these are the missing ones.
pub(super) fn culprits(facts: &[Fact], me: usize, missing: &[usize]) -> Vec<usize> {
    let mut seen = BTreeSet::from([me]);
    let mut next: Vec<usize> = missing.to_vec();
    let (mut halted, mut idle) = (Vec::new(), Vec::new());
    while let Some(rank) = next.pop() {
        if !seen.insert(rank) {
            continue;
        }
        match facts.iter().find(|fact| fact.rank == rank) {
            Some(fact) if fact.is_halted() => halted.push(rank),
            Some(fact) if !fact.status.awaited.is_empty() => {
                next.extend(fact.status.awaited.iter().map(|rank| *rank as usize));
            }
            _ => idle.push(rank),
        }
    }
    let mut found = if halted.is_empty() { idle } else { halted };
    if found.is_empty() {
        found = missing.to_vec();
    }
    found.sort_unstable();
    found
}

/// The state of a process according to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Process {
    Unknown,
    Alive,
    Stopped,
    Dead,
}

impl Process {
    fn of(pid: u32) -> Process {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Process::Dead,
            Err(_) => return Process::Unknown,
        };
        // The state follows the name, which is in parentheses and may contain parentheses.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        match state {
            Some('T' | 't') => Process::Stopped,
            Some('Z' | 'X' | 'x') => Process::Dead,
            Some(_) => Process::Alive,
            None => Process::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact() -> Fact {
        Fact {
            rank: 2,
            host: Some("node-b".into()),
            is_local: false,
            status: Status {
                pid: 4712,
                phase: Some(("loading data".into(), Duration::from_secs(58))),
                position: (1 << 40 | 212) + 1,
                entered: Some(811),
                done: Some(811),
                ..Status::default()
            },
        }
    }

    #[test]
    fn who_only_waits_is_no_culprit() {
        let rank = |rank, awaited: &[u32]| {
            let mut fact = Fact { rank, ..fact() };
            fact.status.awaited = awaited.to_vec();
            fact
        };
        // 3 waits for 2, which waits for 0, about which nothing is known.
        let facts = [rank(1, &[]), rank(2, &[0, 3])];
        assert_eq!(culprits(&facts, 3, &[2]), [0]);
        assert_eq!(culprits(&facts, 3, &[2, 1]), [0, 1]);
        // In a cycle: the missing ranks.
        let facts = [rank(1, &[2]), rank(2, &[3, 1])];
        assert_eq!(culprits(&facts, 3, &[2]), [2]);
        assert_eq!(culprits(&facts, 3, &[]), [0; 0]);
        // The kernel's state takes precedence.
        let mut dead = Fact {
            is_local: true,
            ..rank(0, &[1])
        };
        dead.status.pid = u32::MAX;
        assert_eq!(culprits(&[dead, rank(1, &[])], 3, &[0, 1, 2]), [0]);
    }

    #[test]
    fn a_late_rank_is_described() {
        let mut fact = fact();
        assert_eq!(fact.name(), "rank 2 (pid 4712, host node-b)");
        assert_eq!(
            fact.doing(Some(812)),
            "last completed seq 811 and is in loading data for 58 s (epoch 1 step 212)"
        );
        fact.status.entered = Some(812);
        assert_eq!(fact.doing(Some(812)), "has come but does not continue");
    }

    #[test]
    fn the_kernel_knows_who_is_dead_or_stopped() {
        let own = std::process::id();
        assert_eq!(Process::of(own), Process::Alive);
        assert_eq!(Process::of(u32::MAX), Process::Dead);
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let mut fact = fact();
        fact.is_local = true;
        (fact.status.pid, fact.status.phase) = (child.id(), None);
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while Process::of(child.id()) != Process::Stopped {
            assert!(std::time::Instant::now() < until);
            std::thread::yield_now();
        }
        assert_eq!(
            fact.doing(Some(812)),
            "is stopped (SIGSTOP or a debugger) and last completed seq 811"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(fact.doing(None).starts_with("is dead"));
    }

    #[test]
    fn old_records_name_only_the_process() {
        let record = Record {
            host: "node\x1b[2J".into(),
            kernel: "m".into(),
            status: Status {
                pid: 7,
                pid_space: pid_space(),
                phase: Some(("backward".into(), Duration::from_secs(2))),
                position: 1,
                entered: Some(3),
                done: Some(3),
                awaited: Vec::new(),
                elsewhere: Some(Elsewhere {
                    op: "all_reduce\n".into(),
                    group: 0x2f,
                    seq: 4,
                    awaited: vec![0, 1],
                }),
            },
            unix_ms: 100_000,
        };
        let bytes = serde_json::to_vec(&record).unwrap();
        let record = Record::decode(&bytes).unwrap();
        assert_eq!(record.host, "node?[2J");
        let fresh = Fact::of_record(1, record.clone(), "m", 103_000);
        assert!(fresh.is_local);
        assert_eq!(
            fresh.status.phase,
            Some(("backward".to_owned(), Duration::from_secs(5)))
        );
        let text = fresh.doing(Some(9));
        let elsewhere = "is in all_reduce? seq 4 of group 0x2f, where it waits for ranks 0, 1";
        assert!(text.contains(elsewhere), "{text}");
        let stale = Fact::of_record(1, record, "other", 900_000);
        let known = Status {
            pid: 7,
            ..Status::default()
        };
        assert_eq!((stale.is_local, stale.status), (false, known));
        for end in 0..bytes.len() {
            assert_eq!(Record::decode(&bytes[..end]), None);
        }
    }
}
