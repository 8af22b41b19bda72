//! File locks with a deadline.
//!
//! A lock belongs to the open file, so several members in one process exclude each
//! other too. The system releases it when the process ends.

use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, Result};

/// First pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Takes the exclusive lock.
pub(super) fn exclusive(file: &File, location: &str, within: Duration) -> Result<()> {
    retry(location, within, || file.try_lock())
}

/// Takes the shared lock.
pub(super) fn shared(file: &File, location: &str, within: Duration) -> Result<()> {
    retry(location, within, || file.try_lock_shared())
}

/// Takes the exclusive lock if no lock is held. Returns whether it did.
pub(super) fn try_exclusive(file: &File, location: &str) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(Error::io(format_args!("locking {location}"), e)),
    }
}

/// Releases the lock.
pub(super) fn release(file: &File, location: &str) -> Result<()> {
    file.unlock()
        .map_err(|e| Error::io(format_args!("unlocking {location}"), e))
}

fn retry(
    location: &str,
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
                        "{location} has been locked by another process for {within:.1?}; is that process stopped?"
                    ),
                ));
            }
            Err(TryLockError::Error(e)) => {
                return Err(Error::io(format_args!("locking {location}"), e));
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
