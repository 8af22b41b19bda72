//! What all crates of Phalanx share: the error with its exit code, output, signals that request a stop, environment
//! variables, safe files, text. It depends on no other crate of Phalanx.

#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod address;
pub mod env;
pub mod error;
pub mod files;
pub mod format;
pub mod job_files;
pub mod process;
pub mod say;
pub mod stop;
pub mod text;

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use error::{Error, ErrorKind, Result};

/// Locks `mutex`, also after a thread has panicked with it: for values that no such thread leaves half written.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a panic said, as `catch_unwind` and `join` give it.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

/// The number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The time since 1970, UTC.
pub fn unix_time() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// Milliseconds since 1970, UTC.
pub fn unix_ms() -> u64 {
    u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)
}

/// Name of this host, as the system knows it.
pub fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
