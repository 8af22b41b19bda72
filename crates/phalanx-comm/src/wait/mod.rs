//! How a rank waits for its peers: poll, yield, sleep. The reasoning,
//! protocol and proof are in `README.md` beside this file.

mod doorbell;
#[cfg(test)]
mod jitter;

pub(crate) use doorbell::{BELL_BYTES, Bell, FutexKind};

use std::time::{Duration, Instant};

/// Longest sleep without looking at poison, liveness and deadline again.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Longest polling phase. A 256 KiB chunk takes about this long to copy; a
/// shorter budget slept in the middle of chunks and cost 2–2.5x
/// (collectives.md §2), a longer one only burns a core.
const PAUSE: Duration = Duration::from_micros(50);

/// Polls between two yields (and looks at the clock) of the polling phase.
/// About 2 µs: longer than the answer of a peer that runs, short against the
/// time slice that a peer without a core would otherwise wait for.
const POLLS_PER_YIELD: u32 = 64;

/// Yields before sleeping.
const YIELDS: u32 = 10;

/// Environment variable that overrides the wait policy.
const POLICY_VARIABLE: &str = "PHALANX_WAIT";

/// The wait policy a user may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Derived from cores and ranks.
    Auto,
    /// Poll only; for dedicated hosts. Falls back to `Yield` without enough cores.
    Spin,
    /// Yield only.
    Yield,
    /// Sleep at once.
    Block,
}

impl Policy {
    /// Parses a value of `PHALANX_WAIT`; the error is a message for the user.
    pub(crate) fn parse(text: &str) -> Result<Policy, String> {
        match text {
            "" | "auto" => Ok(Policy::Auto),
            "spin" => Ok(Policy::Spin),
            "yield" => Ok(Policy::Yield),
            "block" => Ok(Policy::Block),
            other => Err(format!(
                "{POLICY_VARIABLE}={other:?} is not a wait policy: use spin, yield, block or auto"
            )),
        }
    }

    /// What the environment asks for.
    pub(crate) fn from_env() -> Result<Policy, String> {
        match std::env::var(POLICY_VARIABLE) {
            Ok(text) => Policy::parse(text.trim()),
            Err(std::env::VarError::NotPresent) => Ok(Policy::Auto),
            Err(e) => Err(format!("{POLICY_VARIABLE}: {e}")),
        }
    }
}

/// The moment at which `limit` has passed; one beyond what the clock can
/// express is as good as never.
pub(crate) fn deadline_in(limit: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + NEVER)
}

/// Cores this process may use: the smaller of affinity mask and cgroup quota.
pub(crate) fn usable_cores() -> usize {
    // The standard library reads both (sched_getaffinity; cpu.max and its
    // version 1 counterpart, over all ancestors).
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How much a waiter may do before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Polling phase.
    pause: Duration,
    /// Yields after the polling phase.
    yields: u32,
}

impl Budget {
    /// The budget of one of `local_ranks` ranks that share `cores` cores.
    pub(crate) fn new(policy: Policy, local_ranks: usize, cores: usize) -> Budget {
        let fits = local_ranks <= cores;
        match policy {
            Policy::Auto if fits => Budget {
                pause: PAUSE,
                yields: YIELDS,
            },
            Policy::Auto => Budget {
                pause: Duration::ZERO,
                yields: YIELDS,
            },
            Policy::Spin if fits => Budget {
                pause: Duration::MAX,
                yields: 0,
            },
            Policy::Spin | Policy::Yield => Budget {
                pause: Duration::ZERO,
                yields: u32::MAX,
            },
            Policy::Block => Budget {
                pause: Duration::ZERO,
                yields: 0,
            },
        }
    }

    /// Whether polling makes sense at all, i.e. every local rank has a core.
    pub(crate) fn polls(&self) -> bool {
        !self.pause.is_zero()
    }

    /// Waits on `bell` until `ready` (checked with sequentially consistent
    /// loads), somebody rang, or `timeout` passed. `fresh` is false when the
    /// caller has already spent its budget on this wait.
    ///
    /// Guaranteed: returns within `timeout` plus scheduling delay, and a
    /// publication after which the bell was rung is never slept through. Not
    /// guaranteed: that `ready` holds on return.
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
        let unlimited = self.pause == Duration::MAX || self.yields == u32::MAX;
        let start = Instant::now();
        if fresh || unlimited {
            let pause = self.pause.min(timeout);
            while !pause.is_zero() && start.elapsed() < pause {
                for _ in 0..POLLS_PER_YIELD {
                    std::hint::spin_loop();
                    if ready() {
                        return Wake::Ready;
                    }
                }
                // "Enough cores" is a guess: somebody else may use them.
                std::thread::yield_now();
            }
            for _ in 0..self.yields {
                std::thread::yield_now();
                if ready() {
                    return Wake::Ready;
                }
                if self.yields == u32::MAX && start.elapsed() >= timeout {
                    return Wake::Elapsed;
                }
            }
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Wake::Elapsed;
        }
        // README.md, "protocol to sleep".
        #[cfg(test)]
        jitter::step();
        let announced = bell.announce();
        #[cfg(test)]
        jitter::step();
        if ready() {
            return Wake::Ready;
        }
        if announced.sleep(left) {
            Wake::Rung
        } else {
            Wake::Elapsed
        }
    }
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The condition holds.
    Ready,
    /// Somebody rang the bell (or the kernel woke us for its own reasons).
    Rung,
    /// The timeout passed.
    Elapsed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

    #[test]
    fn policies_parse_and_strangers_are_named() {
        assert_eq!(Policy::parse("auto"), Ok(Policy::Auto));
        assert_eq!(Policy::parse("spin"), Ok(Policy::Spin));
        assert_eq!(Policy::parse("yield"), Ok(Policy::Yield));
        assert_eq!(Policy::parse("block"), Ok(Policy::Block));
        assert!(Policy::parse("nap").unwrap_err().contains("nap"));
    }

    #[test]
    fn never_pure_spin_when_ranks_outnumber_cores() {
        for policy in [Policy::Auto, Policy::Spin, Policy::Yield, Policy::Block] {
            assert!(!Budget::new(policy, 3, 2).polls(), "{policy:?}");
        }
        assert!(Budget::new(Policy::Auto, 2, 2).polls());
        assert!(Budget::new(Policy::Spin, 2, 2).polls());
    }

    #[test]
    fn timeout_is_kept_by_every_policy() {
        for policy in [Policy::Auto, Policy::Spin, Policy::Yield, Policy::Block] {
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

    /// Two threads hand a counter back and forth, with random delays between
    /// all steps; every hand-over may be slept through if the protocol has a
    /// hole. A lost wake-up shows as a wait that ran into the (long) timeout
    /// although the condition holds.
    #[test]
    fn no_lost_wakeup() {
        const ROUNDS: u64 = 30_000;
        const LONG: Duration = Duration::from_secs(20);
        for policy in [Policy::Block, Policy::Auto] {
            let turn = AtomicU64::new(0);
            let words = [AtomicU32::new(0), AtomicU32::new(0)];
            let slow = AtomicBool::new(false);
            let player = |me: u64| {
                let budget = Budget::new(policy, 2, 1);
                let mine = Bell::new(&words[me as usize], FutexKind::Private);
                let other = Bell::new(&words[1 - me as usize], FutexKind::Private);
                jitter::start(0x9e37_79b9_7f4a_7c15 ^ me);
                for round in 0..ROUNDS {
                    let awaited = 2 * round + me;
                    while turn.load(Ordering::SeqCst) != awaited {
                        let wake = budget
                            .wait(mine, true, LONG, || turn.load(Ordering::SeqCst) == awaited);
                        if wake == Wake::Elapsed {
                            slow.store(true, Ordering::SeqCst);
                            return;
                        }
                    }
                    jitter::step();
                    turn.store(awaited + 1, Ordering::SeqCst);
                    jitter::step();
                    other.ring();
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| player(0));
                scope.spawn(|| player(1));
            });
            assert!(
                !slow.load(Ordering::SeqCst),
                "a wake-up was lost ({policy:?})"
            );
            assert_eq!(turn.load(Ordering::SeqCst), 2 * ROUNDS, "{policy:?}");
        }
    }
}
