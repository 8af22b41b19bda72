//! Facts about the running process, and about others.

use std::fs;

use serde::{Deserialize, Serialize};

/// Peak resident memory of this process in bytes (`VmHWM`); `None` if it is not known.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    proc_bytes(&status, "VmHWM:")
}

/// The value of the line that begins with `name` (`VmRSS:`) in the text of a file of `/proc`, which
/// is in kB, as bytes; `None` if there is no such line or number.
pub fn proc_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A process as it names itself in a file that others read, also on other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessName {
    /// The host's name.
    pub host: String,
    /// The kernel since its start, and the space of process numbers.
    pub machine: String,
    /// The process's number.
    pub pid: u32,
    /// When the process started, in the kernel's unit.
    pub started: u64,
}

impl ProcessName {
    /// This process.
    pub fn own() -> ProcessName {
        ProcessName::of(std::process::id())
    }

    /// The process number `pid` of this machine.
    pub fn of(pid: u32) -> ProcessName {
        ProcessName {
            host: crate::host_name(),
            machine: machine(),
            pid,
            started: started(pid).unwrap_or(0),
        }
    }

    /// Whether it runs; `None` where that cannot be seen, as on another host or in another container.
    pub fn is_running(&self) -> Option<bool> {
        let is_here = !self.machine.is_empty() && self.machine == machine();
        is_here.then(|| started(self.pid) == Some(self.started))
    }
}

fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let space = fs::read_link("/proc/self/ns/pid");
    match (boot, space) {
        (Ok(boot), Ok(space)) => format!("{}/{}", boot.trim(), space.display()),
        _ => String::new(),
    }
}

/// When a process started; `None` if there is none, or it has ended.
fn started(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before is in parentheses, and may hold any characters.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let is_alive = !matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| is_alive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_by_machine_number_and_start() {
        let own = ProcessName::own();
        assert_eq!(own.is_running(), Some(true));
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<ProcessName>(&text).unwrap(), own);
        // Another process had the number before.
        let mut earlier = own.clone();
        earlier.started -= 1;
        assert_eq!(earlier.is_running(), Some(false));
        for machine in ["another kernel", ""] {
            let mut other = own.clone();
            machine.clone_into(&mut other.machine);
            assert_eq!(other.is_running(), None);
        }
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let name = ProcessName::of(child.id());
        child.wait().unwrap();
        assert_eq!(name.is_running(), Some(false));
    }

    #[test]
    fn the_peak_line_is_read_in_bytes() {
        let status = "Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n";
        assert_eq!(proc_bytes(status, "VmHWM:"), Some(1234 * 1024));
        assert_eq!(proc_bytes("Name:\tx\n", "VmHWM:"), None);
        assert_eq!(proc_bytes("VmHWM:\tmany kB\n", "VmHWM:"), None);
    }

    #[test]
    fn a_touched_allocation_raises_the_peak() {
        let before = peak_rss_bytes().unwrap();
        assert!(before > 64 * 1024);
        let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(peak_rss_bytes().unwrap() >= 64 << 20);
        drop(touched);
    }
}
