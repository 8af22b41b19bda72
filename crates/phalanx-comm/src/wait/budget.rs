//! How much a waiter may do before it sleeps, and the wait itself.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::sleep::sleep_unless;
use super::topology::Topology;
use super::{Bell, Policy, Wake};

/// Longest polling phase. A 256 KiB chunk takes about this long to copy; a
/// shorter budget slept in the middle of chunks and cost 2–2.5x
/// (docs/design/collectives.md §2), a longer one only burns a core.
const PAUSE: Duration = Duration::from_micros(50);

/// Polls between two yields (and clock readings) of the polling phase. About 2 µs:
/// longer than the answer of a running peer takes, and short against the time slice
/// that a peer without a core would otherwise wait for.
const POLLS_PER_YIELD: u32 = 64;

/// Looks at the others at the start of a wait, about 1 µs.
const QUICK_LOOKS: u32 = 64;

/// Waits in a row whose first yield is not timed, because to read the clock takes a twentieth of
/// the time of a barrier. The wait after them is timed.
const UNTIMED_LOOKS: u32 = 7;
/// Waits that are timed from their start after a yield took a [`TIME_SLICE`].
const TIMED_LOOKS: u32 = 5000;

/// Yields before sleeping.
const YIELDS: u32 = 10;

/// How long ranks that share cores only with each other yield before they sleep. A
/// round of yields takes a few microseconds, a wake-up ten times that: once one rank
/// slept, all would sleep in every following operation. A yield that takes longer gave
/// the core to a thread that computes; then it is time to sleep.
const YIELDING: Duration = Duration::from_micros(100);

/// A yield that took this long gave the core to a thread outside of the group,
/// for a time slice of 2 to 4 ms. Ranks that share cores take less: they wait
/// for each other after each piece of a fold.
const TIME_SLICE: Duration = Duration::from_micros(1500);

/// How long a thread sleeps without yielding after a yield took a [`TIME_SLICE`]: the
/// next yield would take as long, but a sleeper runs as soon as it is woken.
const CROWDED: Duration = Duration::from_millis(20);

thread_local! {
    /// Until when this thread sleeps without yielding.
    static CROWDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Counts down with each [`Budget::look`], of which the last [`UNTIMED_LOOKS`] are not timed.
    static LOOKS_LEFT: Cell<u32> = const { Cell::new(0) };
}

/// Yields once, and returns whether it is time to sleep because another thread computed
/// on the core. `spent` is the time since `start`, on entry (without the polls since
/// then) and on return.
fn yields_core(start: Instant, spent: &mut Duration) -> bool {
    let before = *spent;
    std::thread::yield_now();
    *spent = start.elapsed();
    let taken = spent.saturating_sub(before);
    if taken >= TIME_SLICE {
        CROWDED_UNTIL.set(Some(start + *spent + CROWDED));
        LOOKS_LEFT.set(TIMED_LOOKS);
    }
    taken >= YIELDING
}

/// How much a waiter may do before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Polling phase.
    pause: Duration,
    /// Yields after the polling phase.
    yields: u32,
    /// Time of the wait up to which further yields follow.
    yielding: Duration,
}

impl Budget {
    /// For tests: the budget of a thread that shares `cores` cores with others, `threads`
    /// in all.
    #[cfg(test)]
    pub(crate) fn new(policy: Policy, threads: usize, cores: usize) -> Budget {
        Self::chosen(policy, threads <= cores, false)
    }

    /// `fits`: every thread has a core. `beside`: threads outside of the wait compute
    /// meanwhile, so a yield gives a core away.
    fn chosen(policy: Policy, fits: bool, beside: bool) -> Budget {
        let none = Duration::ZERO;
        let (pause, yields, yielding) = match policy {
            Policy::Auto if fits => (PAUSE, YIELDS, none),
            Policy::Auto if beside => (none, YIELDS, none),
            Policy::Auto => (none, 0, YIELDING),
            Policy::Spin if fits => (Duration::MAX, 0, none),
            Policy::Spin | Policy::Yield => (none, 0, Duration::MAX),
            Policy::Block => (none, 0, none),
        };
        Budget {
            pause,
            yields,
            yielding,
        }
    }

    /// Whether polling makes sense at all, i.e. every thread has a core.
    pub(crate) fn polls(&self) -> bool {
        !self.pause.is_zero()
    }

    /// The first part of a wait, in which nothing but the awaited threads is looked at: mostly
    /// they come within microseconds. `missing` is `None` when all have come, and otherwise
    /// whether one of those awaited was last seen on the core of this thread: then only a yield
    /// lets it come. While all of them are on other cores a yield would give the core to a
    /// thread that waits for the same.
    ///
    /// `None` when all have come, otherwise whether the [`Budget::wait`] that must follow is fresh.
    pub(crate) fn look(&self, missing: impl Fn() -> Option<bool>) -> Option<bool> {
        let shares = !self.yielding.is_zero();
        let left = LOOKS_LEFT.get();
        LOOKS_LEFT.set(left.checked_sub(1).unwrap_or(UNTIMED_LOOKS));
        let timed = shares && !(1..=UNTIMED_LOOKS).contains(&left);
        let mut start = timed.then(Instant::now);
        if !shares && !self.polls() || timed && CROWDED_UNTIL.get() > start {
            return Some(true);
        }
        let (mut looks, mut spent) = (0, Duration::ZERO);
        loop {
            let is_here = missing()?;
            if looks < QUICK_LOOKS && !(shares && is_here) {
                std::hint::spin_loop();
                looks += 1;
            } else if let Some(start) = start {
                if yields_core(start, &mut spent) || spent >= YIELDING {
                    return Some(false);
                }
            } else if shares {
                std::thread::yield_now();
                start = Some(Instant::now());
            } else {
                return Some(true);
            }
        }
    }

    /// Waits on `bell` until `ready` (checked with sequentially consistent loads), a
    /// ring, or `timeout`. `fresh` is false when the caller has already spent its
    /// budget on this wait.
    ///
    /// Guaranteed: returns within `timeout` plus scheduling delay, and never sleeps
    /// through a publication after which the bell was rung. Not guaranteed: that
    /// `ready` holds on return.
    pub(crate) fn wait(
        &self,
        bell: Bell<'_>,
        fresh: bool,
        timeout: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Wake {
        if ready() {
            return Wake::Ready;
        }
        if timeout.is_zero() {
            return Wake::Elapsed;
        }
        let unlimited = self.pause.max(self.yielding) == Duration::MAX;
        let start = Instant::now();
        if unlimited || fresh && CROWDED_UNTIL.get() <= Some(start) {
            let pause = self.pause.min(timeout);
            let yielding = self.yielding.min(timeout);
            let (mut spent, mut yields, mut sleepy) = (Duration::ZERO, 0, false);
            while spent < pause && !sleepy {
                for _ in 0..POLLS_PER_YIELD {
                    std::hint::spin_loop();
                    if ready() {
                        return Wake::Ready;
                    }
                }
                // "Enough cores" is a guess: other processes may use them.
                sleepy = yields_core(start, &mut spent) && !unlimited;
            }
            while (yields < self.yields || spent < yielding) && !sleepy {
                sleepy = yields_core(start, &mut spent) && !unlimited;
                if ready() {
                    return Wake::Ready;
                }
                yields += 1;
            }
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Wake::Elapsed;
        }
        sleep_unless(bell, left, ready)
    }
}

/// `spin 50 us, 10 yields, futex`
impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pause == Duration::MAX {
            return f.write_str("spin");
        }
        if self.yielding == Duration::MAX {
            return f.write_str("yields");
        }
        if !self.pause.is_zero() {
            write!(f, "spin {} us, ", self.pause.as_micros())?;
        }
        if self.yields > 0 {
            write!(f, "{} yields, ", self.yields)?;
        }
        if !self.yielding.is_zero() {
            write!(f, "yield {} us, ", self.yielding.as_micros())?;
        }
        f.write_str("futex")
    }
}

/// The budgets of one rank, by the thread that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budgets {
    policy: Policy,
    topology: Topology,
    /// For a caller that has nothing else to do.
    alone: Budget,
    /// For the communication thread while its caller computes.
    beside: Budget,
}

impl Budgets {
    pub(crate) fn new(policy: Policy, topology: Topology) -> Budgets {
        Budgets {
            policy,
            topology,
            alone: Budget::chosen(policy, topology.fits(false), false),
            beside: Budget::chosen(policy, topology.fits(true), true),
        }
    }

    /// The same ranks are also part of `other`, e.g. of a larger group.
    pub(crate) fn within(self, other: Topology) -> Budgets {
        Budgets::new(self.policy, self.topology.tighter(other))
    }

    pub(crate) fn topology(&self) -> Topology {
        self.topology
    }

    /// The budget of a wait that starts now.
    #[inline]
    pub(crate) fn at(&self, beside: bool) -> Budget {
        if beside { self.beside } else { self.alone }
    }
}

/// `2 ranks x 1 thread on 2 cores: spin 50 us, 10 yields, futex`, and the differences
/// while others compute.
impl fmt::Display for Budgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.topology, self.alone)?;
        if self.beside != self.alone {
            write!(f, "; beside compute: {}", self.beside)?;
        }
        Ok(())
    }
}

/// Counts the threads of one rank that wait for an operation of the communication
/// thread: while there is one, the communication thread can use its core.
#[derive(Clone, Debug, Default)]
pub(crate) struct Callers {
    waiting: Arc<AtomicUsize>,
}

impl Callers {
    /// Counts the calling thread as waiting until the guard is dropped.
    pub(crate) fn wait(&self) -> impl Drop + use<> {
        struct Waiting(Arc<AtomicUsize>);
        impl Drop for Waiting {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(Arc::clone(&self.waiting))
    }

    /// Whether any thread waits. A hint: it decides how long to poll.
    #[inline]
    pub(crate) fn some(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::FutexKind;
    use std::sync::atomic::AtomicU32;

    const POLICIES: [Policy; 4] = [Policy::Auto, Policy::Spin, Policy::Yield, Policy::Block];

    #[test]
    fn never_pure_spin_when_threads_outnumber_cores() {
        for policy in POLICIES {
            assert!(!Budget::new(policy, 3, 2).polls(), "{policy:?}");
        }
        assert!(Budget::new(Policy::Auto, 2, 2).polls());
        assert!(Budget::new(Policy::Spin, 2, 2).polls());
    }

    #[test]
    fn timeout_is_kept_by_every_policy() {
        for policy in POLICIES {
            let word = AtomicU32::new(0);
            let bell = Bell::new(&word, FutexKind::Private);
            let start = Instant::now();
            let wake =
                Budget::new(policy, 1, 2).wait(bell, true, Duration::from_millis(20), || false);
            assert_eq!(wake, Wake::Elapsed, "{policy:?}");
            assert!(start.elapsed() >= Duration::from_millis(20), "{policy:?}");
            assert!(start.elapsed() < Duration::from_secs(5), "{policy:?}");
        }
    }

    #[test]
    fn a_thread_without_its_core_sleeps_at_once() {
        for policy in [Policy::Auto, Policy::Spin] {
            for threads in [2, 3] {
                let word = AtomicU32::new(0);
                let bell = Bell::new(&word, FutexKind::Private);
                let mut looks = 0;
                CROWDED_UNTIL.set(Some(Instant::now() + Duration::from_secs(3600)));
                let budget = Budget::new(policy, threads, 2);
                budget.wait(bell, true, Duration::from_millis(20), || {
                    looks += 1;
                    false
                });
                // Before the wait, and before the sleep.
                let sleeps = looks == 2;
                assert_eq!(sleeps, policy == Policy::Auto, "{policy:?}: {looks} looks");
            }
        }
    }

    #[test]
    fn budgets_say_what_they_do() {
        let texts: Vec<String> = POLICIES
            .iter()
            .flat_map(|&policy| [Budget::new(policy, 2, 2), Budget::new(policy, 3, 2)])
            .map(|budget| budget.to_string())
            .collect();
        assert_eq!(
            texts,
            [
                "spin 50 us, 10 yields, futex",
                "yield 100 us, futex",
                "spin",
                "yields",
                "yields",
                "yields",
                "futex",
                "futex",
            ]
        );
    }

    #[test]
    fn a_waiting_caller_frees_a_core() {
        let callers = Callers::default();
        assert!(!callers.some());
        let waiting = callers.wait();
        assert!(callers.some());
        drop(waiting);
        assert!(!callers.some());
    }
}
