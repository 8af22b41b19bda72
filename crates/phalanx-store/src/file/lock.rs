//! File locks with a deadline.
//!
//! They belong to the open file, not to the process, so several members
//! within one process exclude each other too, and they vanish with the
//! process.

use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, Result};

/// First pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Locks against everyone.
pub(super) fn exclusive(file: &File, place: &str, within: Duration) -> Result<()> {
    retry(place, within, || file.try_lock())
}

/// Locks against [`exclusive`].
pub(super) fn shared(file: &File, place: &str, within: Duration) -> Result<()> {
    retry(place, within, || file.try_lock_shared())
}

/// Locks against everyone if nobody holds a lock now; says whether it did.
pub(super) fn try_exclusive(file: &File, place: &str) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(Error::io(format_args!("locking {place}"), e)),
    }
}

/// Lets go.
pub(super) fn release(file: &File, place: &str) -> Result<()> {
    file.unlock()
        .map_err(|e| Error::io(format_args!("unlocking {place}"), e))
}

fn retry(
    place: &str,
    within: Duration,
    attempt: impl Fn() -> Result<(), TryLockError>,
) -> Result<()> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if start.elapsed() < within => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(
                    ErrorKind::NoAnswer,
                    format!(
                        "{place} has been locked by another process for {within:.1?}: is that process stopped?"
                    ),
                ));
            }
            Err(TryLockError::Error(e)) => {
                return Err(Error::io(format_args!("locking {place}"), e));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_held_is_no_answer() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let (a, b) = (path.reopen().unwrap(), path.reopen().unwrap());
        exclusive(&a, "the file", Duration::ZERO).unwrap();
        assert!(!try_exclusive(&b, "the file").unwrap());
        let limit = Duration::from_millis(30);
        let start = Instant::now();
        for attempt in [exclusive, shared] {
            let error = attempt(&b, "the file", limit).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoAnswer);
            assert!(error.to_string().contains("another process"), "{error}");
        }
        assert!(start.elapsed() >= limit * 2);
        release(&a, "the file").unwrap();
        assert!(try_exclusive(&b, "the file").unwrap());
    }
}
