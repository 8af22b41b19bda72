//! The bell of one rank: futex word and sleeper count in one.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use rustix::thread::futex;

/// The waiter runs; nobody needs to wake it.
const AWAKE: u32 = 0;
/// The waiter sleeps or is about to: whoever publishes must wake it.
const ASLEEP: u32 = 1;

/// Room of one bell: two 64-byte lines, because x86 prefetches them in pairs.
/// A guess on other machines; wrong, it costs speed only.
pub(crate) const BELL_BYTES: usize = 128;

/// Who shares the futex word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FutexKind {
    /// Threads of this process.
    Private,
    /// Several processes that map the same memory.
    Shared,
}

/// A view of one rank's bell.
#[derive(Clone, Copy)]
pub(crate) struct Bell<'a> {
    word: &'a AtomicU32,
    kind: FutexKind,
}

impl<'a> Bell<'a> {
    pub(crate) fn new(word: &'a AtomicU32, kind: FutexKind) -> Self {
        Bell { word, kind }
    }

    fn flags(&self) -> futex::Flags {
        match self.kind {
            FutexKind::Private => futex::Flags::PRIVATE,
            FutexKind::Shared => futex::Flags::empty(),
        }
    }

    /// Wakes the owner if it sleeps. The publication must have been made with
    /// a sequentially consistent store before (README.md, "protocol to
    /// publish").
    #[inline]
    pub(crate) fn ring(self) {
        if self.word.load(SeqCst) != AWAKE {
            self.wake();
        }
    }

    #[cold]
    fn wake(self) {
        #[cfg(test)]
        super::jitter::step();
        if self.word.swap(AWAKE, SeqCst) != AWAKE {
            #[cfg(test)]
            super::jitter::step();
            // Cannot fail on a mapped word; and the sleeper's slice ends anyway.
            let _ = futex::wake(self.word, self.flags(), i32::MAX as u32);
        }
    }

    /// Says that the owner is about to sleep (step W1). Conditions must be
    /// read again afterwards.
    pub(crate) fn announce(self) -> Announced<'a> {
        self.word.store(ASLEEP, SeqCst);
        Announced { bell: self }
    }
}

/// Proof that the bell says `ASLEEP`; takes it back when dropped.
pub(crate) struct Announced<'a> {
    bell: Bell<'a>,
}

impl Announced<'_> {
    /// Sleeps until rung or `timeout`; true if not the timeout ended it.
    pub(crate) fn sleep(self, timeout: Duration) -> bool {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        #[cfg(test)]
        super::jitter::step();
        let result = futex::wait(self.bell.word, self.bell.flags(), ASLEEP, Some(&timeout));
        result != Err(rustix::io::Errno::TIMEDOUT)
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.bell.word.store(AWAKE, SeqCst);
    }
}
