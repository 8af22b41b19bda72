//! The recorder's clock: readable in a few nanoseconds, and the same in all processes
//! of a host, so that one can read the times of another.

use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

/// The unit of a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// A nanosecond of the kernel's monotonic clock: about 25 ns a reading.
    Monotonic,
    /// The processor's time stamp counter: about 8 ns a reading.
    Counter,
}

/// The same moment on three clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) ticks: u64,
    pub(crate) monotonic_ns: u64,
    pub(crate) wall_ns: u64,
}

impl Clock {
    /// The counter, if the kernel itself uses it as its clock source: then it runs
    /// evenly and the same on all cores.
    pub(crate) fn best() -> Clock {
        static BEST: OnceLock<Clock> = OnceLock::new();
        *BEST.get_or_init(|| {
            const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
            let by_counter = cfg!(target_arch = "x86_64")
                && std::fs::read_to_string(SOURCE).is_ok_and(|name| name.trim() == "tsc");
            if by_counter {
                Clock::Counter
            } else {
                Clock::Monotonic
            }
        })
    }

    pub(crate) fn code(self) -> u64 {
        match self {
            Clock::Monotonic => 1,
            Clock::Counter => 2,
        }
    }

    pub(crate) fn from_code(code: u64) -> Option<Clock> {
        [Clock::Monotonic, Clock::Counter]
            .into_iter()
            .find(|clock| clock.code() == code)
    }

    #[inline]
    pub(crate) fn ticks(self) -> u64 {
        match self {
            Clock::Monotonic => monotonic_ns(),
            Clock::Counter => counter(),
        }
    }

    pub(crate) fn anchor(self) -> Anchor {
        Anchor {
            ticks: self.ticks(),
            monotonic_ns: monotonic_ns(),
            wall_ns: u64::try_from(phalanx_base::unix_time().as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction; it reads a register.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    monotonic_ns()
}

pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Since boot: positive, and below 2⁶⁴ for five centuries.
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Converts ticks by two anchors of one clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    from: Anchor,
    ns_per_tick: f64,
}

impl Scale {
    /// `from` is the earlier one; neither is trusted.
    pub(crate) fn new(from: Anchor, to: Anchor) -> Scale {
        let ticks = to.ticks.saturating_sub(from.ticks);
        let ns = to.monotonic_ns.saturating_sub(from.monotonic_ns);
        Scale {
            from,
            ns_per_tick: if ticks == 0 {
                1.0
            } else {
                ns as f64 / ticks as f64
            },
        }
    }

    /// A moment, on the monotonic clock.
    pub(crate) fn moment(&self, ticks: u64) -> u64 {
        if ticks >= self.from.ticks {
            let later = self.span(ticks - self.from.ticks);
            self.from.monotonic_ns.saturating_add(later)
        } else {
            let earlier = self.span(self.from.ticks - ticks);
            self.from.monotonic_ns.saturating_sub(earlier)
        }
    }

    /// A duration in nanoseconds.
    pub(crate) fn span(&self, ticks: u64) -> u64 {
        (ticks as f64 * self.ns_per_tick) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn ticks_convert_to_the_monotonic_clock() {
        for clock in [Clock::best(), Clock::Monotonic] {
            let from = clock.anchor();
            std::thread::sleep(Duration::from_millis(20));
            let (ticks, before) = (clock.ticks(), monotonic_ns());
            std::thread::sleep(Duration::from_millis(20));
            let scale = Scale::new(from, clock.anchor());
            let error = scale.moment(ticks).abs_diff(before);
            assert!(error < 2_000_000, "{clock:?} is off by {error} ns");
            assert_eq!(Clock::from_code(clock.code()), Some(clock));
        }
    }

    #[test]
    fn impossible_anchors_do_no_harm() {
        let zero = Anchor {
            ticks: u64::MAX,
            monotonic_ns: 5,
            wall_ns: 0,
        };
        let scale = Scale::new(zero, zero);
        assert_eq!(scale.moment(0), 0);
        assert_eq!(scale.moment(u64::MAX), 5);
    }

    #[test]
    fn a_reading_costs_nanoseconds() {
        let clock = Clock::best();
        let mut last = 0;
        // The fastest of many tries: tests run unoptimised, at the same time as compilers.
        let fastest = (0..100).map(|_| {
            let started = Instant::now();
            for _ in 0..1000 {
                last = clock.ticks().max(last);
            }
            started.elapsed()
        });
        assert!(fastest.min() < Some(Duration::from_millis(5)));
        assert!(last > 0);
    }
}
