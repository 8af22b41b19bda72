//! Facts about the running process.

/// Peak resident memory of this process in bytes (`VmHWM`); `None` if it is not known.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    parse_peak_rss(&status)
}

fn parse_peak_rss(status: &str) -> Option<u64> {
    proc_bytes(status, "VmHWM:")
}

/// The value of the line that begins with `name` (`VmRSS:`) in the text of a file of `/proc`, which
/// is in kB, as bytes; `None` if there is no such line or number.
pub fn proc_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_line_is_read_in_bytes() {
        let status = "Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n";
        assert_eq!(parse_peak_rss(status), Some(1234 * 1024));
        assert_eq!(parse_peak_rss("Name:\tx\n"), None);
        assert_eq!(parse_peak_rss("VmHWM:\tmany kB\n"), None);
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
