//! How a rank waits for its peers: poll, yield, sleep. The reasoning, protocol and
//! proof are in `README.md` in this directory.

mod budget;
mod doorbell;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod jitter;
mod sleep;
mod slices;
mod topology;

pub(crate) use crate::sync::FutexKind;
pub(crate) use budget::{Budget, Budgets, Callers};
pub(crate) use doorbell::{BELL_BYTES, Bell};
pub(crate) use sleep::Wake;
pub(crate) use slices::take_short_slices;
pub(crate) use topology::{Share, Topology};

use std::time::{Duration, Instant};

/// Longest sleep before checking poison, liveness and deadline again.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Environment variable that overrides the wait policy.
const POLICY_VARIABLE: &str = "PHALANX_WAIT";

/// The wait policy a user may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Derived from cores, ranks and threads.
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

    /// The policy that the environment sets.
    pub(crate) fn from_env() -> Result<Policy, String> {
        match std::env::var(POLICY_VARIABLE) {
            Ok(text) => Policy::parse(text.trim()),
            Err(std::env::VarError::NotPresent) => Ok(Policy::Auto),
            Err(e) => Err(format!("{POLICY_VARIABLE}: {e}")),
        }
    }
}

/// The moment at which `limit` has passed; if the clock cannot represent that, a moment
/// far in the future.
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

    /// Two threads pass a counter back and forth, with random delays between all steps;
    /// if the protocol has a hole, any wake-up may be lost. A lost wake-up shows as a
    /// wait that ran into the (long) timeout although the condition holds.
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
