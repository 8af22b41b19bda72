//! Being asked to stop, by a signal that a training answers with a checkpoint.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

pub use signal_hook::consts::SIGTERM;
use signal_hook::consts::{SIGHUP, SIGINT, SIGUSR1};

use rustix::process::Signal;

use crate::error::{Error, ErrorKind, Result};

/// The signal that came, or 0.
static ASKED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// The signal that came last, whatever word it leaves; or 0.
static RECEIVED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// [`RECEIVED`] when the ranks agreed to stop.
static CAUSE: AtomicUsize = AtomicUsize::new(0);

/// Whether a further SIGINT ends the process as if nobody listened.
static IMPATIENT: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// A file that grows beyond `ulimit -f` is an error of whoever writes it, not the end of this process without a
/// word (`SIGXFSZ`). Programs that this one starts are ended by it as ever.
pub fn tell_limits() {
    // Where the system refuses, it stays as it was.
    let _ = signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::default());
}

/// Somebody else in this process answers SIGINT and SIGHUP.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// SIGTERM only leaves word.
static LISTENING: AtomicBool = AtomicBool::new(false);

/// SIGUSR1 does.
static REQUESTABLE: AtomicBool = AtomicBool::new(false);

static EXPECTED: OnceLock<Duration> = OnceLock::new();

/// From SIGTERM to SIGKILL where ranks may have a checkpoint to save, and do not ask for more.
pub const GRACE: Duration = Duration::from_secs(30);

/// Says that the ranks which this process starts, or is, will [`listen`], and may take `grace` to end.
pub fn expect(grace: Duration) {
    let _ = EXPECTED.set(grace);
}

/// How long ranks may take to end, if longer than usual.
pub fn grace() -> Option<Duration> {
    EXPECTED.get().copied()
}

/// From now on SIGTERM and SIGUSR1 only leave word ([`asked`]) in this process. So do SIGINT, which torchrun
/// ends ranks with after a Ctrl-C, and SIGHUP unless it is ignored (`nohup`): as a SIGTERM.
///
/// # Errors
///
/// When the system refuses.
pub fn listen() -> Result<()> {
    register(SIGUSR1, SIGUSR1, &REQUESTABLE)?;
    if LISTENING.load(Ordering::SeqCst) {
        return Ok(());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let heeded = |signal: &i32| !WATCHED.load(Ordering::SeqCst) && !is_ignored(&status, *signal);
    for signal in [SIGINT, SIGHUP].into_iter().filter(heeded) {
        // Before the word is left, so that the first is never taken for a second.
        signal_hook::flag::register_conditional_default(signal, IMPATIENT.clone())
            .map_err(not_heard)?;
        register(signal, SIGTERM, &AtomicBool::new(false))?;
    }
    register(SIGTERM, SIGTERM, &LISTENING)
}

/// The ranks have agreed to stop. Whoever presses Ctrl-C again from now on does not wait for the checkpoint; a twin
/// of the first signal, sent to the process and to its group, is not meant.
pub fn heard() {
    CAUSE.store(RECEIVED.load(Ordering::SeqCst), Ordering::SeqCst);
    std::thread::spawn(|| {
        std::thread::sleep(TWINS);
        IMPATIENT.store(true, Ordering::SeqCst);
    });
}

/// How long twins of a signal may come.
const TWINS: Duration = Duration::from_secs(1);

/// From now on SIGUSR1 only leaves word, where ranks are [expected](expect) to listen: for
/// before there is anything to save, when SIGTERM still ends the process at once.
///
/// # Errors
///
/// When the system refuses.
pub fn listen_early() -> Result<()> {
    match grace() {
        Some(_) => register(SIGUSR1, SIGUSR1, &REQUESTABLE),
        None => Ok(()),
    }
}

fn register(signal: i32, word: i32, done: &AtomicBool) -> Result<()> {
    if done.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    // Received first: who sees the word sees the signal.
    for (place, value) in [(&*RECEIVED, signal), (&*ASKED, word)] {
        signal_hook::flag::register_usize(signal, place.clone(), value as usize)
            .map_err(not_heard)?;
    }
    Ok(())
}

/// The signal that this process had received when the ranks agreed to stop: that a launcher sends to the others
/// afterwards is not the cause.
pub fn cause() -> Option<i32> {
    match CAUSE.load(Ordering::SeqCst) {
        0 => None,
        signal => i32::try_from(signal).ok(),
    }
}

fn not_heard(error: std::io::Error) -> Error {
    Error::new(ErrorKind::System, "cannot listen for signals").caused_by(error)
}

/// Says that somebody else in this process answers SIGINT and SIGHUP, and [asks](ask).
pub fn is_watched() {
    WATCHED.store(true, Ordering::SeqCst);
}

/// Leaves word as a SIGTERM does, for other signals that somebody ends programs with.
pub fn ask() {
    ASKED.store(SIGTERM as usize, Ordering::Relaxed);
}

/// Whether this process answers the first SIGTERM itself.
pub fn is_listening() -> bool {
    LISTENING.load(Ordering::SeqCst)
}

/// The signal that asked this process to stop, if one has.
pub fn asked() -> Option<i32> {
    match ASKED.load(Ordering::Relaxed) {
        0 => None,
        signal => i32::try_from(signal).ok(),
    }
}

/// `SIGTERM`; `signal 34` for a signal without a name.
pub fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal)
        .map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// Whether `/proc/self/status` says that `signal` is ignored.
pub fn is_ignored(status: &str, signal: i32) -> bool {
    in_mask(status, "SigIgn:", signal)
}

/// Whether `/proc/PID/status` says that the process has a handler for `signal`.
pub fn is_caught(status: &str, signal: i32) -> bool {
    in_mask(status, "SigCgt:", signal)
}

fn in_mask(status: &str, name: &str, signal: i32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert!(is_ignored(status, SIGHUP));
        assert!(!is_ignored(status, SIGINT));
        assert!(is_ignored(status, 13));
        assert!(!is_ignored("", SIGHUP));
        let status = "SigIgn:\t0\nSigCgt:\t0000000000004200\n";
        assert!(is_caught(status, SIGTERM) && is_caught(status, SIGUSR1));
        assert!(!is_caught(status, SIGHUP) && !is_ignored(status, SIGTERM));
    }
}
