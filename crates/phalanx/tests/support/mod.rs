//! What all tests share that start processes.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::net::TcpListener;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// What happens at once is over by then, also on a busy machine. What does not
/// happen at once is made to take longer than this.
pub const SOON: Duration = Duration::from_secs(30);

/// Children see each signal as a terminal's would, whatever our own parent
/// ignored (`nohup` SIGHUP; `sh -c 'x &'` SIGINT and SIGQUIT): what is ignored
/// stays so over an exec, what has a handler becomes the default again.
pub fn heed_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
        let ignored = ignored.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            if ignored.unwrap_or(0) >> (signal - 1) & 1 == 1 {
                let noted = std::sync::Arc::new(AtomicBool::new(false));
                signal_hook::flag::register(signal, noted).unwrap();
            }
        }
    });
}

/// A free port outside the range from which the system picks: other tests'
/// stores come from there.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 1000).unwrap() * 16;
    loop {
        let port = 12_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Looks until it holds.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < 2 * SOON, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
