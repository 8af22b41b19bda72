//! Requests to stop, by signals that a training answers with a checkpoint.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

pub use signal_hook::consts::SIGTERM;
use signal_hook::consts::{SIGHUP, SIGINT, SIGUSR1};

use rustix::process::Signal;

use crate::error::{Error, ErrorKind, Result};

/// The signal that requests a stop (SIGTERM or SIGUSR1), or 0.
static ASKED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// The signal that was received last, or 0.
static RECEIVED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// [`RECEIVED`] when the ranks agreed to stop.
static CAUSE: AtomicUsize = AtomicUsize::new(0);

/// Whether a further SIGINT or SIGHUP ends the process at once.
static IMPATIENT: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Makes a file that grows beyond `ulimit -f` an error of the write, instead of a silent end of this
/// process by `SIGXFSZ`. Programs that this one starts are not affected.
pub fn tell_limits() {
    // If the system refuses, the signal keeps its default action.
    let _ = signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::default());
}

/// Whether another part of this process handles SIGINT and SIGHUP.
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Whether SIGTERM requests a stop instead of ending the process.
static LISTENING: AtomicBool = AtomicBool::new(false);

/// The same for SIGUSR1.
static REQUESTABLE: AtomicBool = AtomicBool::new(false);

static EXPECTED: OnceLock<Duration> = OnceLock::new();

/// From SIGTERM to SIGKILL where ranks may have a checkpoint to save, and do not ask for more.
pub const GRACE: Duration = Duration::from_secs(30);

/// Declares that the ranks which this process starts, or is, will [`listen`] and may take `grace` to end.
pub fn expect(grace: Duration) {
    let _ = EXPECTED.set(grace);
}

/// How long ranks may take to end, if longer than usual.
pub fn grace() -> Option<Duration> {
    EXPECTED.get().copied()
}

/// From now on SIGTERM and SIGUSR1 request a stop ([`asked`]) instead of ending this process. So do SIGINT, which
/// torchrun sends to ranks after a Ctrl-C, and SIGHUP unless it is ignored (`nohup`); both count as SIGTERM.
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
        // Registered first, so that the first signal is never taken for a second.
        signal_hook::flag::register_conditional_default(signal, IMPATIENT.clone())
            .map_err(not_listening)?;
        register(signal, SIGTERM, &AtomicBool::new(false))?;
    }
    register(SIGTERM, SIGTERM, &LISTENING)
}

/// Called when the ranks have agreed to stop. Soon after, another Ctrl-C ends the process without waiting for the
/// checkpoint; the delay ignores a first signal that was sent both to the process and to its group.
pub fn agreed() {
    CAUSE.store(RECEIVED.load(Ordering::SeqCst), Ordering::SeqCst);
    std::thread::spawn(|| {
        std::thread::sleep(TWINS);
        IMPATIENT.store(true, Ordering::SeqCst);
    });
}

/// How long duplicates of a signal may arrive.
const TWINS: Duration = Duration::from_secs(1);

/// From now on SIGUSR1 requests a stop, where ranks are [expected](expect) to listen. For the time
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
    // RECEIVED first: it is set wherever ASKED is seen.
    for (place, value) in [(&*RECEIVED, signal), (&*ASKED, word)] {
        signal_hook::flag::register_usize(signal, place.clone(), value as usize)
            .map_err(not_listening)?;
    }
    Ok(())
}

/// The signal that this process had received when the ranks agreed to stop. A signal that a launcher sends to the
/// other ranks afterwards is not the cause.
pub fn cause() -> Option<i32> {
    signal(CAUSE.load(Ordering::SeqCst))
}

/// The signal of this number; 0 is none.
fn signal(number: usize) -> Option<i32> {
    i32::try_from(number).ok().filter(|signal| *signal != 0)
}

fn not_listening(error: std::io::Error) -> Error {
    Error::new(ErrorKind::System, "cannot listen for signals").caused_by(error)
}

/// Declares that another part of this process handles SIGINT and SIGHUP, and calls [`ask`].
pub fn is_watched() {
    WATCHED.store(true, Ordering::SeqCst);
}

/// Whether another part of this process handles SIGINT and SIGHUP: no launcher does.
pub fn is_watched_here() -> bool {
    WATCHED.load(Ordering::SeqCst)
}

/// Requests a stop as SIGTERM does, because `signal` was received.
pub fn ask(signal: i32) {
    RECEIVED.store(usize::try_from(signal).unwrap_or(0), Ordering::SeqCst);
    ASKED.store(SIGTERM as usize, Ordering::Relaxed);
}

/// Whether this process handles SIGTERM as a request to stop.
pub fn is_listening() -> bool {
    LISTENING.load(Ordering::SeqCst)
}

/// The signal that was received last, if any.
pub fn received() -> Option<i32> {
    signal(RECEIVED.load(Ordering::SeqCst))
}

/// The signal that requested a stop, if any.
pub fn asked() -> Option<i32> {
    signal(ASKED.load(Ordering::Relaxed))
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
