//! The model of `crate::sync`: loom's atomics, and a futex made of loom's lock
//! and condition variable.
//!
//! * loom takes `SeqCst` accesses for `AcqRel` (tokio-rs/loom#180) but knows
//!   `SeqCst` fences, so a `SeqCst` store is followed by such a fence and a
//!   load preceded by one: what compilers emit for machines without such
//!   instructions. It is a little stronger than the language (a fence also orders
//!   weaker accesses around it), so only accesses that ask for `SeqCst` get it.
//! * The kernel compares and queues a sleeper under the lock of the word's
//!   bucket, and a waker looks for sleepers under the same lock. So does this.
//!   There are no timeouts and no spurious returns: who is not woken, sleeps for
//!   ever.
//!
//! A [`Flaw`] breaks the machine in one place, to show that the tests would
//! notice if the protocol relied on less.

use std::cell::Cell;
use std::time::Duration;

use loom::sync::{Condvar, Mutex};

pub(crate) use std::sync::atomic::Ordering;

/// One thing that this machine does worse than it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// `SeqCst` orders no more than acquire and release do.
    SeqCstIsAcqRel,
    /// `SeqCst` orders nothing.
    SeqCstIsRelaxed,
    /// A futex sleeps without comparing its word.
    WaitsBlindly,
    /// A wake-up reaches nobody.
    WakesNobody,
}

thread_local! {
    // All threads of a model run in one thread of the system.
    static FLAW: Cell<Flaw> = const { Cell::new(Flaw::None) };
}

/// From now on the machine of this test has this flaw.
pub(crate) fn set_flaw(flaw: Flaw) {
    FLAW.set(flaw);
}

fn weakened(order: Ordering, without_fence: Ordering) -> Ordering {
    match (order, FLAW.get()) {
        (Ordering::SeqCst, Flaw::SeqCstIsRelaxed) => Ordering::Relaxed,
        (Ordering::SeqCst, _) => without_fence,
        (order, _) => order,
    }
}

fn fence_for(order: Ordering) {
    let flawed = matches!(FLAW.get(), Flaw::SeqCstIsAcqRel | Flaw::SeqCstIsRelaxed);
    if order == Ordering::SeqCst && !flawed {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

macro_rules! atomic {
    ($name:ident, $word:ty) => {
        impl $name {
            pub(crate) fn load(&self, order: Ordering) -> $word {
                fence_for(order);
                self.word.load(weakened(order, Ordering::Acquire))
            }

            pub(crate) fn store(&self, value: $word, order: Ordering) {
                // A destructor during the panic that ends the model; loom
                // would panic again.
                if std::thread::panicking() {
                    return;
                }
                self.word.store(value, weakened(order, Ordering::Release));
                fence_for(order);
            }

            pub(crate) fn swap(&self, value: $word, order: Ordering) -> $word {
                fence_for(order);
                let before = self.word.swap(value, weakened(order, Ordering::AcqRel));
                fence_for(order);
                before
            }
        }
    };
}

/// A word, and whoever the kernel has queued on it.
#[derive(Debug)]
pub(crate) struct AtomicU32 {
    word: loom::sync::atomic::AtomicU32,
    /// The bucket's lock; counts wake-ups.
    bucket: Mutex<u32>,
    queue: Condvar,
}

impl AtomicU32 {
    pub(crate) fn new(value: u32) -> Self {
        AtomicU32 {
            word: loom::sync::atomic::AtomicU32::new(value),
            bucket: Mutex::new(0),
            queue: Condvar::new(),
        }
    }
}
atomic!(AtomicU32, u32);

#[derive(Debug)]
pub(crate) struct AtomicU64 {
    word: loom::sync::atomic::AtomicU64,
}

impl AtomicU64 {
    pub(crate) fn new(value: u64) -> Self {
        AtomicU64 {
            word: loom::sync::atomic::AtomicU64::new(value),
        }
    }
}
atomic!(AtomicU64, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FutexKind {
    Private,
    Shared,
}

pub(crate) fn futex_wait(word: &AtomicU32, _: FutexKind, expected: u32, _: Duration) -> bool {
    let mut wakes = word.bucket.lock().unwrap();
    // Relaxed: whatever order there is comes from the bucket's lock.
    if FLAW.get() != Flaw::WaitsBlindly && word.word.load(Ordering::Relaxed) != expected {
        return true;
    }
    let queued_at = *wakes;
    while *wakes == queued_at {
        wakes = word.queue.wait(wakes).unwrap();
    }
    true
}

pub(crate) fn futex_wake(word: &AtomicU32, _: FutexKind) {
    if FLAW.get() == Flaw::WakesNobody {
        return;
    }
    let mut wakes = word.bucket.lock().unwrap();
    *wakes += 1;
    drop(wakes);
    word.queue.notify_all();
}
