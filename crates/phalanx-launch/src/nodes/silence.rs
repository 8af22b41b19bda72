//! Decides from the arrivals of heartbeats when a node is lost. It has no clock and no sockets: times count from any fixed
//! moment.
//!
//! A node is lost when it has been silent for longer than `--lost-after`.
//!
//! Time in which the watcher itself did not run (it was stopped, its host suspended, or the processors busy) does not count:
//! of the time between two checks that are further apart than [`LATE`], only [`LOOK`] counts.

use std::time::Duration;

/// Interval of heartbeats.
pub(super) const BEAT: Duration = Duration::from_millis(200);
/// Interval of checks for heartbeats.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// The longest interval between two checks that counts in full.
const LATE: Duration = Duration::from_millis(250);
/// The least limit before the first heartbeat of a node: its launcher is still starting.
const FIRST: Duration = Duration::from_secs(10);

/// How long each node of a job has been silent.
#[derive(Debug)]
pub(super) struct Silence {
    limit: Duration,
    /// The last check.
    seen: Duration,
    nodes: Vec<Arrivals>,
}

#[derive(Clone, Debug)]
struct Arrivals {
    /// The last arrival, or the start; moved on by the time that does not count.
    last: Duration,
    has_beaten: bool,
}

impl Silence {
    /// Watches this many nodes from `now` on.
    pub(super) fn new(nodes: usize, limit: Duration, now: Duration) -> Silence {
        let mut silence = Silence {
            limit,
            seen: now,
            nodes: Vec::new(),
        };
        silence.extend(nodes, now);
        silence
    }

    /// Watches this many nodes, the new ones from `now` on.
    pub(super) fn extend(&mut self, nodes: usize, now: Duration) {
        let arrivals = Arrivals {
            last: now,
            has_beaten: false,
        };
        self.nodes.resize(nodes.max(self.nodes.len()), arrivals);
    }

    /// How long a node may be silent before it is lost.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Checks at `now`: the watcher has seen all heartbeats that arrived before.
    pub(super) fn advance(&mut self, now: Duration) {
        let since = now.saturating_sub(self.seen);
        self.seen = now;
        if since > LATE {
            for node in &mut self.nodes {
                node.last += since - LOOK;
            }
        }
    }

    /// A heartbeat of `node` has arrived.
    pub(super) fn beat(&mut self, node: usize, now: Duration) {
        self.advance(now);
        if let Some(node) = self.nodes.get_mut(node) {
            node.has_beaten = true;
            node.last = now;
        }
    }

    /// How long `node` had been silent at the last check.
    pub(super) fn of(&self, node: usize) -> Duration {
        let node = self.nodes.get(node);
        node.map_or(Duration::ZERO, |node| self.seen.saturating_sub(node.last))
    }

    /// Whether `node` was lost at the last check.
    pub(super) fn is_lost(&self, node: usize) -> bool {
        let has_beaten = self.nodes.get(node).is_some_and(|node| node.has_beaten);
        self.of(node)
            > match has_beaten {
                true => self.limit,
                false => self.limit.max(FIRST),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::LOST_AFTER;

    const WIDE: Duration = Duration::from_secs(20);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A stream of numbers below 1, the same in every run.
    struct Noise(u64);

    impl Noise {
        fn next(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        }
    }

    /// Two nodes, one of which watches the other.
    struct Simulation {
        silence: Silence,
        now: Duration,
        /// When the next heartbeat arrives.
        next: Duration,
    }

    impl Simulation {
        fn new(limit: Duration) -> Simulation {
            Simulation {
                silence: Silence::new(2, limit, Duration::ZERO),
                now: Duration::ZERO,
                next: Duration::ZERO,
            }
        }

        /// Checks once, after `pause`, and returns whether the node is lost; `interval` is the time between heartbeats.
        fn step(&mut self, pause: Duration, interval: impl FnOnce() -> Duration) -> bool {
            self.now += pause;
            self.silence.advance(self.now);
            let is_lost = self.silence.is_lost(1);
            if self.next <= self.now {
                self.silence.beat(1, self.now);
                self.next = self.now + interval();
            }
            is_lost
        }

        /// Runs for `time`, and fails at an alarm.
        fn runs(&mut self, time: Duration, mut interval: impl FnMut() -> Duration) {
            let end = self.now + time;
            while self.now < end {
                let is_lost = self.step(LOOK, &mut interval);
                assert!(!is_lost, "at {:?}: {:?}", self.now, self.silence.of(1));
            }
        }

        /// How long after the last arrival the node is lost, if nothing comes any more.
        fn lost_after(mut self) -> Duration {
            let cut = self.now;
            self.next = Duration::MAX;
            while !self.step(LOOK, || unreachable!()) {
                assert!(self.now < cut + ms(60_000), "never lost");
            }
            self.now - cut
        }
    }

    #[test]
    fn a_silent_node_is_lost_after_two_seconds() {
        for beats in [1, 3, 15, 16, 17, 100, 1000] {
            let mut simulation = Simulation::new(LOST_AFTER);
            simulation.runs(BEAT * beats, || BEAT);
            let after = simulation.lost_after();
            assert!(after > ms(1750) && after <= ms(2100), "{beats}: {after:?}");
        }
    }

    /// Twelve hours of jitter, lost and late heartbeats, and pauses of up to 1.5 s of either side.
    #[test]
    fn noise_is_no_alarm() {
        let mut noise = Noise(3);
        let mut simulation = Simulation::new(LOST_AFTER);
        let end = ms(12 * 3_600_000);
        let (mut pauses, mut stops) = (0, 0);
        while simulation.now < end {
            let chance = noise.next();
            // The watcher: late by up to 100 ms, rarely stopped for up to a minute.
            let pause = match chance {
                c if c < 0.000_2 => {
                    stops += 1;
                    Duration::from_secs_f64(60.0 * noise.next())
                }
                c if c < 0.1 => LOOK + Duration::from_secs_f64(0.1 * noise.next()),
                _ => LOOK,
            };
            let mut interval = || {
                let jitter = Duration::from_secs_f64(0.02 * noise.next().powi(4));
                match noise.next() {
                    c if c < 0.002 => {
                        pauses += 1;
                        ms(200) + Duration::from_secs_f64(1.3 * noise.next())
                    }
                    c if c < 0.01 => 2 * BEAT + jitter,
                    _ => BEAT + jitter,
                }
            };
            let is_lost = simulation.step(pause, &mut interval);
            assert!(!is_lost, "at {:?}", simulation.now);
        }
        assert!(pauses > 300 && stops > 100, "{pauses} {stops}");
        assert!(simulation.lost_after() <= ms(2100));
    }

    #[test]
    fn time_in_which_the_watcher_did_not_run_is_no_silence() {
        // The node is silent since 1 s when the watcher stops for an hour, and stays so.
        let mut simulation = Simulation::new(LOST_AFTER);
        simulation.runs(ms(60_000), || BEAT);
        simulation.next = Duration::MAX;
        for _ in 0..20 {
            simulation.step(LOOK, || unreachable!());
        }
        let before = simulation.silence.of(1);
        simulation.step(ms(3_600_000), || unreachable!());
        assert_eq!(simulation.silence.of(1), before + LOOK);
        let after = simulation.lost_after();
        assert!(after < ms(1100) && after > ms(600), "{after:?}");
        // The heartbeat that arrived meanwhile comes before the check, or after it.
        for beats_first in [true, false] {
            let mut silence = Silence::new(2, WIDE, Duration::ZERO);
            silence.beat(1, ms(100));
            let wake = ms(900_000);
            if !beats_first {
                silence.advance(wake);
            }
            silence.beat(1, wake);
            silence.advance(wake);
            assert_eq!(silence.of(1), Duration::ZERO);
            for n in 1..=11 {
                silence.advance(wake + n * LOOK);
            }
            assert_eq!(silence.of(1), 11 * LOOK, "it is not blind afterwards");
        }
    }

    /// One that never runs in time still notices, later.
    #[test]
    fn a_starved_watcher_notices() {
        let mut simulation = Simulation::new(LOST_AFTER);
        simulation.runs(ms(10_000), || BEAT);
        simulation.next = Duration::MAX;
        let cut = simulation.now;
        while !simulation.step(ms(400), || unreachable!()) {}
        assert!(
            simulation.now - cut < ms(17_000),
            "{:?}",
            simulation.now - cut
        );
    }

    /// What arrives at once after a stall makes no alarm.
    #[test]
    fn a_burst_after_a_stall_changes_nothing() {
        let mut simulation = Simulation::new(LOST_AFTER);
        simulation.runs(ms(60_000), || BEAT);
        simulation.next = simulation.now + ms(1500);
        simulation.runs(ms(1500), || BEAT);
        for _ in 0..8 {
            simulation.silence.beat(1, simulation.now);
        }
        simulation.runs(ms(10_000), || BEAT);
        assert!(simulation.lost_after() <= ms(2100));
    }

    #[test]
    fn a_node_that_has_not_beaten_yet_has_longer() {
        let simulation = Simulation::new(LOST_AFTER);
        let after = simulation.lost_after();
        assert!(after > FIRST && after < FIRST + ms(100), "{after:?}");
        // Others are not affected, and unknown ones neither.
        let mut silence = Silence::new(3, LOST_AFTER, Duration::ZERO);
        for n in 1..=60 {
            silence.beat(2, n * LOOK);
            silence.beat(7, n * LOOK);
        }
        assert_eq!((silence.of(1), silence.of(2)), (ms(3000), Duration::ZERO));
        assert!(!silence.is_lost(1) && !silence.is_lost(2) && !silence.is_lost(7));
    }
}
