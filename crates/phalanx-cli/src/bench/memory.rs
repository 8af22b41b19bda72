//! Free memory of this host.

use phalanx_base::process::proc_bytes;

/// Bytes available without swapping, or the limit of our cgroup where that is less. `None` if
/// unknown.
pub(crate) fn left_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let left = available(&text)?;
    Some(phalanx_process::oom::memory_limit().map_or(left, |limit| left.min(limit)))
}

/// `MemAvailable` and free swap of `/proc/meminfo`.
fn available(text: &str) -> Option<u64> {
    let swap = proc_bytes(text, "SwapFree:").unwrap_or(0);
    proc_bytes(text, "MemAvailable:")?.checked_add(swap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read_in_bytes() {
        let text = "MemTotal:  9 kB\nMemFree: 1 kB\nMemAvailable:   5 kB\nSwapFree: 2 kB\n";
        assert_eq!(available(text), Some(7 * 1024));
        assert_eq!(available("MemAvailable: 5 kB\n"), Some(5 * 1024));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        assert!(left_bytes().is_none_or(|left| left > 0));
    }
}
