//! Being asked to stop, by a signal that a training answers with a checkpoint.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use signal_hook::consts::SIGTERM;
use signal_hook::consts::SIGUSR1;

use crate::error::{Error, ErrorKind, Result};

/// The signal that came, or 0.
static ASKED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// SIGTERM only leaves word.
static LISTENING: AtomicBool = AtomicBool::new(false);

/// SIGUSR1 does.
static REQUESTABLE: AtomicBool = AtomicBool::new(false);

static EXPECTED: AtomicBool = AtomicBool::new(false);

/// From SIGTERM to SIGKILL where ranks may have a checkpoint to save.
pub const GRACE: Duration = Duration::from_secs(30);

/// Says that the ranks which this process starts, or is, will [`listen`].
pub fn expect() {
    EXPECTED.store(true, Ordering::Relaxed);
}

/// How long ranks may take to end, if longer than usual.
pub fn grace() -> Option<Duration> {
    EXPECTED.load(Ordering::Relaxed).then_some(GRACE)
}

/// From now on SIGTERM and SIGUSR1 only leave word ([`asked`]) in this process.
///
/// # Errors
///
/// When the system refuses.
pub fn listen() -> Result<()> {
    register(SIGUSR1, &REQUESTABLE)?;
    register(SIGTERM, &LISTENING)
}

/// From now on SIGUSR1 only leaves word, where ranks are [expected](expect) to listen: for
/// before there is anything to save, when SIGTERM still ends the process at once.
///
/// # Errors
///
/// When the system refuses.
pub fn listen_early() -> Result<()> {
    match EXPECTED.load(Ordering::Relaxed) {
        true => register(SIGUSR1, &REQUESTABLE),
        false => Ok(()),
    }
}

fn register(signal: i32, done: &AtomicBool) -> Result<()> {
    if done.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    signal_hook::flag::register_usize(signal, ASKED.clone(), signal as usize)
        .map(drop)
        .map_err(|e| Error::new(ErrorKind::System, "cannot listen for signals").caused_by(e))
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
