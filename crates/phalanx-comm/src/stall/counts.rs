//! What a rank has begun so far, and which threads use its group.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::wait::Callers;

/// The operations that one rank has begun in one group.
pub(crate) struct Counts {
    collectives: AtomicU64,
    /// Messages, by peer.
    sent: Vec<AtomicU64>,
    /// Messages of which the first frame has come.
    received: Vec<AtomicU64>,
}

impl Counts {
    pub(crate) fn new(world: usize) -> Counts {
        let zeros = || (0..world).map(|_| AtomicU64::new(0)).collect();
        Counts {
            collectives: AtomicU64::new(0),
            sent: zeros(),
            received: zeros(),
        }
    }

    pub(crate) fn set_collectives(&self, begun: u64) {
        self.collectives.store(begun, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, to: usize) -> u64 {
        self.sent[to].load(Ordering::Relaxed)
    }

    pub(crate) fn add_sent(&self, to: usize) {
        self.sent[to].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, from: usize) -> u64 {
        self.received[from].load(Ordering::Relaxed)
    }

    pub(crate) fn add_received(&self, from: usize) {
        self.received[from].fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn of(collectives: u64, messages: &[(u64, u64)]) -> Counts {
        let counts = Counts::new(messages.len());
        counts.set_collectives(collectives);
        for (peer, (sent, received)) in messages.iter().enumerate() {
            counts.sent[peer].store(*sent, Ordering::Relaxed);
            counts.received[peer].store(*received, Ordering::Relaxed);
        }
        counts
    }

    /// For a report; `is_blocked`: whether the rank does nothing else in the group before it leaves the reported wait.
    pub(crate) fn begun<'a>(&'a self, is_blocked: &'a dyn Fn() -> bool) -> Begun<'a> {
        Begun {
            counts: self,
            is_blocked,
        }
    }
}

/// What a rank has begun, as it reports a wait.
#[derive(Clone, Copy)]
pub(crate) struct Begun<'a> {
    counts: &'a Counts,
    pub(super) is_blocked: &'a dyn Fn() -> bool,
}

impl Begun<'_> {
    pub(super) fn collectives(&self) -> u64 {
        self.counts.collectives.load(Ordering::Relaxed)
    }

    /// Messages sent to each rank.
    pub(super) fn sent(&self) -> impl Iterator<Item = u64> {
        let sent = self.counts.sent.iter();
        sent.map(|count| count.load(Ordering::Relaxed))
    }
}

/// The threads that call a group's operations.
pub(crate) struct Users {
    first: AtomicUsize,
    many: AtomicBool,
    /// Threads that wait for the communication thread.
    callers: Callers,
}

impl Users {
    pub(crate) fn new(callers: Callers) -> Users {
        Users {
            first: AtomicUsize::new(0),
            many: AtomicBool::new(false),
            callers,
        }
    }

    /// The current thread calls an operation.
    pub(crate) fn note(&self) {
        let me = this_thread();
        let first = self.first.load(Ordering::Relaxed);
        if first == me {
            return;
        }
        let known = self
            .first
            .compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed);
        if known.is_err_and(|other| other != me) {
            self.many.store(true, Ordering::Relaxed);
        }
    }

    /// Whether only one thread has called operations. While it waits, the rank does nothing else, unless another one
    /// calls its first: so circles of messages count only after a while.
    pub(crate) fn is_one(&self) -> bool {
        !self.many.load(Ordering::Relaxed)
    }

    /// Whether the rank does nothing besides the collective that runs, on the communication thread if `beside`.
    pub(crate) fn wait_for_collective(&self, beside: bool) -> bool {
        self.is_one() && (!beside || self.callers.some())
    }
}

/// Identifies the current thread among those alive, at almost no cost.
pub(crate) fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}
