//! The bell of one rank: futex word and sleeper count in one.

use std::time::Duration;

use crate::sync::Ordering::SeqCst;
use crate::sync::{AtomicU32, FutexKind, futex_wait, futex_wake};

/// The waiter runs; no wake-up is needed.
const AWAKE: u32 = 0;
/// The waiter sleeps or is about to: a thread that publishes must wake it.
const ASLEEP: u32 = 1;

/// Size of one bell: two 64-byte lines, because x86 prefetches them in pairs. A guess
/// on other machines; a wrong guess costs speed only.
pub(crate) const BELL_BYTES: usize = 128;

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

    /// Wakes the owner if it sleeps. The publication must have been made with
    /// a sequentially consistent store before (README.md, "protocol to
    /// publish").
    #[inline]
    pub(crate) fn ring(self) {
        if self.word.load(SeqCst) != AWAKE {
            self.wake();
        }
    }

    /// Whether the owner sleeps or is about to; a hint, not a guarantee.
    #[inline]
    pub(crate) fn is_asleep(self) -> bool {
        self.word.load(SeqCst) != AWAKE
    }

    #[cold]
    fn wake(self) {
        #[cfg(test)]
        super::jitter::step();
        if self.word.swap(AWAKE, SeqCst) != AWAKE {
            #[cfg(test)]
            super::jitter::step();
            futex_wake(self.word, self.kind);
        }
    }

    /// Announces that the owner is about to sleep (step W1). Conditions must be read
    /// again afterwards.
    pub(crate) fn announce(self) -> Announced<'a> {
        self.word.store(ASLEEP, SeqCst);
        Announced { bell: self }
    }
}

/// Proof that the bell is `ASLEEP`; resets it when dropped.
pub(crate) struct Announced<'a> {
    bell: Bell<'a>,
}

impl Announced<'_> {
    /// Sleeps until rung or `timeout`; false if the timeout ended it.
    pub(crate) fn sleep(self, timeout: Duration) -> bool {
        #[cfg(test)]
        super::jitter::step();
        futex_wait(self.bell.word, self.bell.kind, ASLEEP, timeout)
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.bell.word.store(AWAKE, SeqCst);
    }
}
