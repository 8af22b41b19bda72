//! The primitives of the wait protocol and the rings: atomics and the futex. The loom
//! tests (`tests/loom`) compile the same protocol code over a model of this module; see
//! `wait/README.md`, "checked by loom".

use std::time::Duration;

use rustix::thread::futex;

pub(crate) use phalanx_base::lock;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Which threads share a futex word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FutexKind {
    /// Threads of this process.
    Private,
    /// Several processes that map the same memory.
    Shared,
}

impl FutexKind {
    fn flags(self) -> futex::Flags {
        match self {
            FutexKind::Private => futex::Flags::PRIVATE,
            FutexKind::Shared => futex::Flags::empty(),
        }
    }
}

/// Sleeps while `word` is `expected`, until woken or `timeout`; false if the timeout
/// ended it. The comparison and the queueing are one step with respect to
/// [`futex_wake`].
pub(crate) fn futex_wait(
    word: &AtomicU32,
    kind: FutexKind,
    expected: u32,
    timeout: Duration,
) -> bool {
    let timeout = futex::Timespec::try_from(timeout).ok();
    let result = futex::wait(word, kind.flags(), expected, timeout.as_ref());
    result != Err(rustix::io::Errno::TIMEDOUT)
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn futex_wake(word: &AtomicU32, kind: FutexKind) {
    // Cannot fail on a mapped word; and every sleep is limited anyway.
    let _ = futex::wake(word, kind.flags(), i32::MAX as u32);
}
