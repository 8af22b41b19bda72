//! Decides from the arrivals of heartbeats when a node is lost. It has neither clock nor sockets: times are counted
//! from any fixed moment.
//!
//! A node is lost when nothing has come from it for longer than its limit, which lies within `--lost-after`: the median
//! of its last intervals plus [`FACTOR`] times their root mean square deviation from it. As `FACTOR` is above the root
//! of [`KEPT`], the limit is above every interval that is kept.
//!
//! Time in which the watcher itself did not run (it was stopped, its host suspended, or the processors busy) is nobody's
//! silence: of the time between two looks that are further apart than [`LATE`], only [`LOOK`] counts.

use std::collections::VecDeque;
use std::time::Duration;

use crate::place::LostAfter;

/// Interval of heartbeats.
pub(super) const BEAT: Duration = Duration::from_millis(200);
/// Interval of looks at what has arrived.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// The longest interval between two looks that counts in full.
const LATE: Duration = Duration::from_millis(250);
/// Intervals kept of a node: those of the last 51 s.
const KEPT: usize = 256;
/// See the top of the file; 1.25 times the root of [`KEPT`].
const FACTOR: f64 = 20.0;
/// With fewer intervals the limit is the upper bound.
const ENOUGH: usize = 16;
/// The least limit before the first heartbeat of a node, whose launcher is starting.
const FIRST: Duration = Duration::from_secs(10);

/// How long each node of a job has been silent.
#[derive(Debug)]
pub(super) struct Silence {
    bounds: LostAfter,
    /// The last look.
    looked: Duration,
    nodes: Vec<Arrivals>,
}

#[derive(Clone, Debug)]
struct Arrivals {
    /// The last arrival, or when watching began; later by what does not count since.
    last: Duration,
    has_beaten: bool,
    /// In seconds.
    intervals: VecDeque<f64>,
}

impl Silence {
    /// Of `nodes` nodes, watched from `now` on.
    pub(super) fn new(nodes: usize, bounds: LostAfter, now: Duration) -> Silence {
        let mut silence = Silence {
            bounds,
            looked: now,
            nodes: Vec::new(),
        };
        silence.extend(nodes, now);
        silence
    }

    /// As many nodes as that, the new ones watched from `now` on.
    pub(super) fn extend(&mut self, nodes: usize, now: Duration) {
        let arrivals = Arrivals {
            last: now,
            has_beaten: false,
            intervals: VecDeque::new(),
        };
        self.nodes.resize(nodes.max(self.nodes.len()), arrivals);
    }

    /// Within which the limits of all nodes lie.
    pub(super) fn bounds(&self) -> LostAfter {
        self.bounds
    }

    /// A longer silence is always a loss.
    pub(super) fn most(&self) -> Duration {
        self.bounds.most
    }

    /// The watcher runs, and has seen all that arrived before `now`.
    pub(super) fn look(&mut self, now: Duration) {
        let since = now.saturating_sub(self.looked);
        self.looked = now;
        if since > LATE {
            for node in &mut self.nodes {
                node.last += since - LOOK;
            }
        }
    }

    /// A heartbeat of `node` has arrived.
    pub(super) fn heard(&mut self, node: usize, now: Duration) {
        self.look(now);
        let Some(node) = self.nodes.get_mut(node) else {
            return;
        };
        if std::mem::replace(&mut node.has_beaten, true) {
            if node.intervals.len() == KEPT {
                node.intervals.pop_front();
            }
            let interval = now.saturating_sub(node.last);
            node.intervals.push_back(interval.as_secs_f64());
        }
        node.last = now;
    }

    /// How long nothing had come from `node` at the last look.
    pub(super) fn of(&self, node: usize) -> Duration {
        let node = self.nodes.get(node);
        node.map_or(Duration::ZERO, |node| self.looked.saturating_sub(node.last))
    }

    /// Whether `node` was lost at the last look.
    pub(super) fn is_lost(&self, node: usize) -> bool {
        let silent = self.of(node);
        // Few get beyond the first comparison.
        silent > self.bounds.least && silent > self.limit(node)
    }

    fn limit(&self, node: usize) -> Duration {
        let LostAfter { least, most } = self.bounds;
        let node = &self.nodes[node];
        if !node.has_beaten {
            return most.max(FIRST);
        }
        let count = node.intervals.len();
        if count < ENOUGH {
            return most;
        }
        let mut sorted: Vec<f64> = node.intervals.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let median = sorted[count / 2];
        let squares: f64 = sorted
            .iter()
            .map(|interval| (interval - median).powi(2))
            .sum();
        let limit = median + FACTOR * (squares / count as f64).sqrt();
        Duration::from_secs_f64(limit.clamp(least.as_secs_f64(), most.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: LostAfter = LostAfter {
        least: Duration::from_millis(500),
        most: Duration::from_secs(20),
    };

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
        fn new(bounds: LostAfter) -> Simulation {
            Simulation {
                silence: Silence::new(2, bounds, Duration::ZERO),
                now: Duration::ZERO,
                next: Duration::ZERO,
            }
        }

        /// Looks once, after `pause`, and says whether the node is lost; heartbeats arrive at intervals that `interval`
        /// gives.
        fn step(&mut self, pause: Duration, interval: impl FnOnce() -> Duration) -> bool {
            self.now += pause;
            self.silence.look(self.now);
            let is_lost = self.silence.is_lost(1);
            if self.next <= self.now {
                self.silence.heard(1, self.now);
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
    fn a_silent_node_is_lost_within_two_seconds_of_a_steady_stream() {
        for beats in [1, 3, 15, 16, 17, 100, 1000] {
            let mut simulation = Simulation::new(LostAfter::default());
            simulation.runs(BEAT * beats, || BEAT);
            let after = simulation.lost_after();
            // The upper bound where little is known yet.
            let most = if beats > 20 { ms(2000) } else { ms(2100) };
            assert!(after < most, "{beats}: {after:?}");
            assert!(after > ms(1500), "{beats}: {after:?}");
        }
    }

    /// Whatever the stream was like: never before the lower bound, and never long after the upper one.
    #[test]
    fn the_limit_is_within_the_bounds() {
        let mut noise = Noise(1);
        for jitter in [0.0, 0.1, 1.0, 3.0] {
            for bounds in [LostAfter::default(), WIDE] {
                let mut simulation = Simulation::new(bounds);
                for _ in 0..20_000 {
                    let late = Duration::from_secs_f64(jitter * noise.next());
                    simulation.step(LOOK, || BEAT + late);
                }
                let silent = simulation.silence.of(1);
                let after = simulation.lost_after() + silent;
                assert!(
                    after > bounds.least && after <= bounds.most + 2 * LOOK,
                    "{jitter}: {after:?}"
                );
            }
        }
    }

    #[test]
    fn the_limit_follows_the_jitter() {
        let mut noise = Noise(2);
        let mut after = |jitter: f64| {
            let mut simulation = Simulation::new(WIDE);
            simulation.runs(ms(100_000), || {
                BEAT + Duration::from_secs_f64(jitter * noise.next())
            });
            simulation.lost_after()
        };
        let (steady, some, much) = (after(0.0), after(0.2), after(0.6));
        assert!(steady <= ms(600), "{steady:?}");
        assert!(
            some > 2 * steady && much > 2 * some,
            "{steady:?} {some:?} {much:?}"
        );
        assert!(much < ms(8000), "{much:?}");
    }

    /// A host that swaps: after the first pause, one of the same length is no alarm until the first is forgotten.
    #[test]
    fn a_pause_that_was_seen_before_is_no_alarm() {
        let mut simulation = Simulation::new(LostAfter {
            least: ms(2000),
            ..WIDE
        });
        for pause in [1900, 2300, 2800, 3400, 3400, 3400] {
            simulation.runs(ms(20_000), || BEAT);
            let mut pauses = Some(ms(pause));
            simulation.runs(ms(20_000), || pauses.take().unwrap_or(BEAT));
        }
        // An hour later it is.
        simulation.runs(ms(60_000), || BEAT);
        let after = simulation.lost_after();
        assert!(after < ms(2200), "{after:?}");
    }

    /// Twelve hours of jitter, lost and late heartbeats, and pauses of up to 1.5 s of either side.
    #[test]
    fn noise_is_no_alarm() {
        let mut noise = Noise(3);
        let mut simulation = Simulation::new(LostAfter::default());
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
        let mut simulation = Simulation::new(LostAfter::default());
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
        // The heartbeat that arrived meanwhile is heard first, or the look comes first.
        for hears_first in [true, false] {
            let mut silence = Silence::new(2, WIDE, Duration::ZERO);
            silence.heard(1, ms(100));
            let wake = ms(900_000);
            if !hears_first {
                silence.look(wake);
            }
            silence.heard(1, wake);
            silence.look(wake);
            assert_eq!(silence.of(1), Duration::ZERO);
            assert_eq!(silence.nodes[1].intervals, [LOOK.as_secs_f64()]);
            for n in 1..=11 {
                silence.look(wake + n * LOOK);
            }
            assert_eq!(silence.of(1), 11 * LOOK, "it is not blind afterwards");
        }
    }

    /// One that never runs in time still notices, later.
    #[test]
    fn a_starved_watcher_notices() {
        let mut simulation = Simulation::new(LostAfter::default());
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

    /// What arrives at once after a stall lengthens no limit and makes no alarm.
    #[test]
    fn a_burst_after_a_stall_changes_little() {
        let mut simulation = Simulation::new(LostAfter::default());
        simulation.runs(ms(60_000), || BEAT);
        simulation.next = simulation.now + ms(1500);
        simulation.runs(ms(1500), || BEAT);
        for _ in 0..8 {
            simulation.silence.heard(1, simulation.now);
        }
        simulation.runs(ms(10_000), || BEAT);
        assert!(simulation.lost_after() <= ms(2050));
    }

    #[test]
    fn a_node_that_has_not_beaten_yet_has_longer() {
        let simulation = Simulation::new(LostAfter::default());
        let after = simulation.lost_after();
        assert!(after > FIRST && after < FIRST + ms(100), "{after:?}");
        // Others are not affected, and unknown ones neither.
        let mut silence = Silence::new(3, LostAfter::default(), Duration::ZERO);
        for n in 1..=60 {
            silence.heard(2, n * LOOK);
            silence.heard(7, n * LOOK);
        }
        assert_eq!((silence.of(1), silence.of(2)), (ms(3000), Duration::ZERO));
        assert!(!silence.is_lost(1) && !silence.is_lost(2) && !silence.is_lost(7));
    }
}
