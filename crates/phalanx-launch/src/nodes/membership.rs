//! Which launchers make an attempt, and when one begins or the job ends: a state machine without sockets and clocks. Only
//! the launcher that hosts the store has one, so no two memberships of an attempt can differ: that is node 0's, until the
//! store moves (`standby.rs`).
//!
//! | phase    | event                                     | next     | decision    |
//! |----------|-------------------------------------------|----------|-------------|
//! | Forming  | `most` launchers are there                | Running  | start       |
//! | Forming  | the last call is over                     | Running  | start       |
//! | Forming  | the join time-out, fewer than `least`     | Over     | too few     |
//! | Running  | a rank failed                             | Stopping |             |
//! | Running  | a member is lost                          | Stopping | stop        |
//! | Running  | a launcher arrives, and there is room     | Stopping | stop        |
//! | Running  | all members are done                      | Over     | succeed     |
//! | Stopping | all have ended, no restart is left        | Over     | failed      |
//! | Stopping | all have ended, `least` or more are there | Running  | start       |
//! | Stopping | all have ended, fewer are there           | Forming  |             |
//!
//! Where ranks go on in place, an attempt has other launchers in its course:
//!
//! | phase    | event                                     | next     | decision    |
//! |----------|-------------------------------------------|----------|-------------|
//! | Running  | a member is lost                          | Running  | lose        |
//! | Running  | a launcher arrives, and there is room     | Running  | admit       |
//! | Running  | fewer than `least` are left               | Running  | hold        |
//! | Running  | `least` are there again                   | Running  | go on       |
//! | Running  | the join time-out, fewer than `least`     | Over     | too few     |
//! | Running  | no rank that is left has the state        | Stopping | stop        |
//!
//! As under torchrun, the last call begins when `least` launchers are there, and a launcher that arrives does not count
//! as a restart. Other than there, neither does a lost one, and what is left of an attempt starts the next without a
//! last call, as it waits for nobody. A launcher that arrives after ranks of a member have succeeded interrupts nobody.

use std::collections::BTreeMap;
use std::time::Duration;

/// The number of a launcher: node 0 has 0, and no number is given twice.
pub type Id = usize;

/// What a job allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rules {
    /// The fewest launchers of an attempt.
    pub least: usize,
    /// The most.
    pub most: usize,
    /// How long to wait for the fewest.
    pub join: Duration,
    /// How long to wait for more.
    pub last_call: Duration,
    /// How many failures start another attempt.
    pub max_restarts: u32,
    /// Ranks go on without those that are lost, and with others.
    pub in_place: bool,
}

/// What the launcher with the store must do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Begin the attempt with these launchers, by node rank.
    Start(Vec<Id>),
    /// End the ranks of this attempt, for the launchers that have arrived or are lost.
    Stop,
    /// All ranks of all members have succeeded.
    Succeed,
    /// The job ends: a rank failed, and no restart is left.
    Fail,
    /// The job ends: so many launchers are there.
    TooFew(usize),
    /// The ranks go on without those of this launcher.
    Lose(Id),
    /// They go on with those of this launcher.
    Admit(Id),
    /// They wait until more launchers are there than this.
    Hold(usize),
    /// They go on.
    GoOn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Member {
    /// Not in this attempt.
    Waiting,
    Running,
    /// Its ranks have succeeded.
    Done,
    /// Its ranks have ended, as the attempt has.
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Forming {
        since: Duration,
        /// When the last call began.
        quorum: Option<Duration>,
    },
    Running {
        /// The ranks of a member have succeeded.
        ending: bool,
        /// Since when there are too few, in place.
        short: Option<Duration>,
    },
    Stopping {
        failed: bool,
        lost: bool,
        /// [`Decision::Stop`] is still to be taken.
        asked: bool,
    },
    Over,
}

/// A new attempt.
const RUNNING: Phase = Phase::Running {
    ending: false,
    short: None,
};

/// The launchers of a job. Times are since any moment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Membership {
    rules: Rules,
    members: BTreeMap<Id, Member>,
    phase: Phase,
    /// Failures that have started another attempt.
    restarts: u32,
    /// Those for which [`Decision::Lose`] is still to be taken.
    lost: Vec<Id>,
}

impl Membership {
    /// Nobody is there yet.
    pub fn forming(rules: Rules, now: Duration) -> Membership {
        let quorum = None;
        Membership {
            rules,
            members: BTreeMap::new(),
            phase: Phase::Forming { since: now, quorum },
            restarts: 0,
            lost: Vec::new(),
        }
    }

    /// The first attempt of launchers 0 to `most` has begun.
    pub fn running(rules: Rules) -> Membership {
        Membership {
            members: (0..rules.most).map(|id| (id, Member::Running)).collect(),
            phase: RUNNING,
            ..Membership::forming(rules, Duration::ZERO)
        }
    }

    /// The attempt of these launchers runs, after so many failures.
    pub fn resumed(rules: Rules, ids: &[Id], restarts: u32) -> Membership {
        Membership {
            members: ids.iter().map(|id| (*id, Member::Running)).collect(),
            phase: RUNNING,
            restarts,
            ..Membership::forming(rules, Duration::ZERO)
        }
    }

    /// A new launcher is there.
    pub fn arrived(&mut self, id: Id) {
        self.members.entry(id).or_insert(Member::Waiting);
        let is_full = self.of_attempt().len() >= self.rules.most;
        if self.phase == RUNNING && !is_full && !self.rules.in_place {
            self.stop(false, false);
        }
    }

    /// Nothing more will come from a launcher.
    pub fn lost(&mut self, id: Id) {
        match (self.members.remove(&id), &mut self.phase) {
            (Some(Member::Running), Phase::Running { .. }) if self.rules.in_place => {
                self.lost.push(id);
            }
            (Some(Member::Running), Phase::Running { .. }) => self.stop(false, true),
            (Some(state), Phase::Stopping { lost, .. }) if state != Member::Waiting => *lost = true,
            _ => {}
        }
    }

    /// A rank of the attempt has failed: its launcher has ended the attempt.
    pub fn failed(&mut self) {
        match &mut self.phase {
            Phase::Running { .. } => self.stop(true, false),
            // It was first.
            Phase::Stopping { failed, .. } => *failed = true,
            _ => {}
        }
    }

    /// Nothing is decided any more: the job has its verdict.
    pub fn end_now(&mut self) {
        self.phase = Phase::Over;
    }

    /// Ranks that take in no others do not wait for them.
    pub fn never_holds(&mut self) {
        self.rules.least = 1;
    }

    /// No rank that is left has what is needed to go on without the last one that was lost.
    pub fn cannot_go_on(&mut self) {
        if self.is_running() {
            self.stop(false, true);
        }
    }

    /// All ranks of a member have succeeded.
    pub fn done(&mut self, id: Id) {
        if let Some(state @ Member::Running) = self.members.get_mut(&id) {
            *state = Member::Done;
            if let Phase::Running { ending, .. } = &mut self.phase {
                *ending = true;
            }
        }
    }

    /// All ranks of a member have ended, after the attempt has.
    pub fn ended(&mut self, id: Id) {
        if let Some(state @ (Member::Running | Member::Done)) = self.members.get_mut(&id) {
            *state = Member::Ended;
        }
    }

    /// The launchers that are there.
    pub fn ids(&self) -> impl Iterator<Item = Id> {
        self.members.keys().copied()
    }

    /// Failures so far.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Whether the ranks run.
    pub fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// What to do now; `None`: wait for the next event.
    pub fn decide(&mut self, now: Duration) -> Option<Decision> {
        let there = self.members.len();
        match &mut self.phase {
            Phase::Over => None,
            Phase::Running { .. } if !self.lost.is_empty() => {
                Some(Decision::Lose(self.lost.remove(0)))
            }
            Phase::Running { ending, short } => {
                let of_attempt = self.members.values();
                let of_attempt = of_attempt.filter(|state| **state != Member::Waiting);
                let is_done = of_attempt.clone().all(|state| *state == Member::Done);
                let count = of_attempt.count();
                if is_done {
                    return Some(self.end(Decision::Succeed));
                }
                if !self.rules.in_place || *ending {
                    return None;
                }
                let waiting = self.members.iter_mut();
                let mut waiting = waiting.filter(|(_, state)| **state == Member::Waiting);
                if let Some((id, state)) = waiting.next().filter(|_| count < self.rules.most) {
                    *state = Member::Running;
                    return Some(Decision::Admit(*id));
                }
                match (count < self.rules.least, *short) {
                    (true, None) => {
                        *short = Some(now);
                        Some(Decision::Hold(count))
                    }
                    (true, Some(since)) if now >= since + self.rules.join => {
                        Some(self.end(Decision::TooFew(count)))
                    }
                    (false, Some(_)) => {
                        *short = None;
                        Some(Decision::GoOn)
                    }
                    _ => None,
                }
            }
            Phase::Stopping { asked, .. } if *asked => {
                *asked = false;
                Some(Decision::Stop)
            }
            Phase::Stopping { failed, lost, .. } => {
                let counts = *failed && !*lost;
                let members = self.of_attempt();
                if members.iter().any(|(_, state)| *state != Member::Ended) {
                    return None;
                }
                if counts && self.restarts >= self.rules.max_restarts {
                    return Some(self.end(Decision::Fail));
                }
                self.restarts += u32::from(counts);
                if there >= self.rules.least {
                    return Some(self.start());
                }
                let (since, quorum) = (now, None);
                self.phase = Phase::Forming { since, quorum };
                None
            }
            Phase::Forming { quorum, .. } if there >= self.rules.least => {
                let until = *quorum.get_or_insert(now) + self.rules.last_call;
                let is_time = there >= self.rules.most || now >= until;
                is_time.then(|| self.start())
            }
            Phase::Forming { since, quorum } => {
                *quorum = None;
                let is_time = now >= *since + self.rules.join;
                is_time.then(|| self.end(Decision::TooFew(there)))
            }
        }
    }

    /// The launchers of the attempt.
    fn of_attempt(&self) -> Vec<(Id, Member)> {
        let all = self.members.iter().map(|(id, state)| (*id, *state));
        all.filter(|(_, state)| *state != Member::Waiting).collect()
    }

    fn stop(&mut self, failed: bool, lost: bool) {
        let (asked, lost) = (!failed, lost || !self.lost.is_empty());
        self.lost.clear();
        self.phase = Phase::Stopping {
            failed,
            lost,
            asked,
        };
    }

    fn end(&mut self, decision: Decision) -> Decision {
        self.phase = Phase::Over;
        decision
    }

    /// Those of the last attempt go before those that wait, and an earlier arrival before a later one.
    fn start(&mut self) -> Decision {
        let mut chosen: Vec<Id> = self.ids().collect();
        chosen.sort_by_key(|id| self.members.get(id) == Some(&Member::Waiting));
        chosen.truncate(self.rules.most);
        chosen.sort_unstable();
        for id in &chosen {
            self.members.insert(*id, Member::Running);
        }
        self.phase = RUNNING;
        Decision::Start(chosen)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn rules(least: usize, most: usize, max_restarts: u32) -> Rules {
        Rules {
            least,
            most,
            join: 4 * SECOND,
            last_call: 2 * SECOND,
            max_restarts,
            in_place: false,
        }
    }

    /// What the launchers do beside the one with the machine.
    #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        machine: Membership,
        now: Duration,
        /// The attempt of each launcher that lives, and whether its ranks run.
        launchers: BTreeMap<Id, Option<(u32, bool)>>,
        arrivals: usize,
        attempts: u32,
        /// The attempt that runs has ended, as its key in the store says.
        is_over: bool,
        end: Option<&'static str>,
        stopped_by_failure: bool,
        counted: u32,
        lost_in_attempt: bool,
        /// The ranks wait.
        held: bool,
    }

    impl World {
        fn new(rules: Rules) -> World {
            World {
                machine: Membership::forming(rules, Duration::ZERO),
                now: Duration::ZERO,
                launchers: BTreeMap::new(),
                arrivals: 0,
                attempts: 0,
                is_over: false,
                end: None,
                stopped_by_failure: false,
                counted: 0,
                lost_in_attempt: false,
                held: false,
            }
        }

        fn running(&self) -> usize {
            self.launchers.keys().filter(|id| self.runs(**id)).count()
        }

        fn runs(&self, id: Id) -> bool {
            let now = Some(&Some((self.attempts, true)));
            self.attempts > 0 && self.launchers.get(&id) == now
        }

        /// Takes the machine's decisions until it has none, and checks each.
        fn settle(mut self) -> World {
            while let Some(decision) = self.machine.decide(self.now) {
                assert_eq!(self.end, None, "nothing follows the end: {self:?}");
                match decision {
                    Decision::Stop => {
                        assert!(!self.is_over, "{self:?}");
                        self.is_over = true;
                    }
                    Decision::Lose(id) => {
                        assert!(!self.launchers.contains_key(&id), "{self:?}");
                        self.lost_in_attempt = false;
                    }
                    Decision::Admit(id) => {
                        assert!(self.running() < self.machine.rules.most, "{self:?}");
                        let state = self.launchers.insert(id, Some((self.attempts, true)));
                        assert!(!self.is_over && state.is_some(), "{self:?}");
                    }
                    Decision::Hold(count) => {
                        assert!(!self.held && count < self.machine.rules.least, "{self:?}");
                        self.held = true;
                    }
                    Decision::GoOn => {
                        let there = self.running();
                        assert!(self.held && there >= self.machine.rules.least, "{self:?}");
                        self.held = false;
                    }
                    Decision::Succeed => {
                        assert!(!self.is_over, "{self:?}");
                        self.end = Some("done");
                    }
                    Decision::Fail => {
                        assert!(self.stopped_by_failure && !self.lost_in_attempt, "{self:?}");
                        assert_eq!(self.counted, self.machine.rules.max_restarts);
                        self.end = Some("failed");
                    }
                    Decision::TooFew(count) => {
                        assert_eq!(count, self.launchers.len(), "{self:?}");
                        assert!(count < self.machine.rules.least, "{self:?}");
                        self.end = Some("too few");
                    }
                    Decision::Start(members) => {
                        let (least, most) = (self.machine.rules.least, self.machine.rules.most);
                        assert!((least..=most).contains(&members.len()), "{self:?}");
                        assert!(members.is_sorted() && members[0] == 0, "{self:?}");
                        let runs = |launcher: &Option<(u32, bool)>| {
                            *launcher == Some((self.attempts, true))
                        };
                        assert!(
                            !self.launchers.values().any(runs),
                            "ranks of two attempts: {self:?}"
                        );
                        if self.stopped_by_failure && !self.lost_in_attempt {
                            self.counted += 1;
                        }
                        // Nobody that lives is left out while there is room.
                        let all = self.launchers.len().min(most);
                        assert_eq!(members.len(), all, "{self:?}");
                        self.attempts += 1;
                        self.is_over = false;
                        (self.stopped_by_failure, self.lost_in_attempt) = (false, false);
                        self.held = false;
                        for id in members {
                            let launcher = self.launchers.get_mut(&id).expect("a living launcher");
                            *launcher = Some((self.attempts, true));
                        }
                    }
                }
            }
            let Rules {
                least,
                most,
                in_place,
                ..
            } = self.machine.rules;
            if self.machine.is_running() {
                assert_eq!(self.counted, self.machine.restarts(), "{self:?}");
            }
            let is_ending = matches!(self.machine.phase, Phase::Running { ending: true, .. });
            if self.machine.is_running() && in_place && !is_ending {
                let running = self.running();
                assert_eq!(running, self.launchers.len().min(most), "{self:?}");
                assert_eq!(self.held, running < least, "{self:?}");
            }
            self
        }

        /// All states after one event; `faults`: launchers come and go, and ranks fail, too.
        fn next(&self, faults: bool, most_arrivals: usize) -> Vec<World> {
            let mut next = Vec::new();
            if self.end.is_some() {
                return next;
            }
            let mut add = |change: &dyn Fn(&mut World)| {
                let mut world = self.clone();
                change(&mut world);
                next.push(world.settle());
            };
            add(&|w| w.now += SECOND);
            if faults && self.arrivals < most_arrivals {
                add(&|w| {
                    w.launchers.insert(w.arrivals, None);
                    w.machine.arrived(w.arrivals);
                    w.arrivals += 1;
                });
            }
            for id in self.launchers.keys().copied() {
                if faults && id > 0 {
                    add(&|w| {
                        let lost = w.launchers.remove(&id).flatten();
                        w.lost_in_attempt |= lost.is_some_and(|(attempt, runs)| {
                            attempt == w.attempts && (runs || w.is_over)
                        });
                        w.machine.lost(id);
                    });
                }
                if self.runs(id) && self.is_over {
                    add(&|w| {
                        w.launchers.insert(id, Some((w.attempts, false)));
                        w.machine.ended(id);
                    });
                }
                if self.runs(id) {
                    // Perhaps before the launcher knows that the attempt is over.
                    add(&|w| {
                        w.launchers.insert(id, Some((w.attempts, false)));
                        w.machine.done(id);
                    });
                    if faults && !self.is_over {
                        add(&|w| {
                            (w.is_over, w.stopped_by_failure) = (true, true);
                            w.machine.failed();
                        });
                    }
                    if faults && !self.is_over && self.machine.rules.in_place && id > 0 {
                        // With the last rank that has the state.
                        add(&|w| {
                            w.launchers.remove(&id);
                            w.lost_in_attempt = true;
                            w.machine.lost(id);
                            w.machine.cannot_go_on();
                        });
                    }
                }
                // Done before the attempt has ended otherwise.
                let is_done = self.launchers[&id] == Some((self.attempts, false));
                if is_done && self.is_over && self.machine.members[&id] == Member::Done {
                    add(&|w| w.machine.ended(id));
                }
            }
            next
        }

        /// Without more faults the job ends, or all that there is room for run in the newest attempt.
        fn comes_to_rest(&self) {
            let mut world = self.clone();
            for _ in 0..40 {
                let running = world.launchers.keys().filter(|id| world.runs(**id));
                let room = world.machine.rules.most;
                let done = matches!(world.machine.phase, Phase::Running { ending: true, .. });
                if world.end.is_some()
                    || !world.is_over && running.count() == world.launchers.len().min(room)
                    || !world.is_over && done
                {
                    return;
                }
                // The ranks of an attempt that has ended end; time passes.
                let next = world.next(false, 0);
                let ended = |w: &World| w.machine != world.machine && world.is_over;
                world = next.iter().find(|w| ended(w)).unwrap_or(&next[0]).clone();
            }
            panic!("it never comes to rest: {self:?}");
        }
    }

    /// All orders of arrivals, losses, failures, ends and seconds up to this length.
    #[test]
    fn every_attempt_has_one_membership_whatever_comes_first() {
        let mut count = 0;
        for (least, most, restarts, length, in_place) in [
            (1, 1, 1, 12, false),
            (1, 2, 0, 14, false),
            (1, 3, 1, 12, false),
            (2, 2, 1, 14, false),
            (2, 3, 1, 13, false),
            (3, 3, 1, 14, false),
            (1, 1, 1, 12, true),
            (1, 2, 0, 14, true),
            (1, 3, 1, 12, true),
            (2, 2, 1, 14, true),
            (2, 3, 1, 13, true),
            (3, 3, 0, 14, true),
        ] {
            let rules = Rules {
                in_place,
                ..rules(least, most, restarts)
            };
            let mut states = BTreeSet::from([World::new(rules)]);
            let mut seen = BTreeSet::new();
            for _ in 0..length {
                let next = states.iter().flat_map(|world| world.next(true, most + 1));
                states = next.filter(|world| !seen.contains(world)).collect();
                states.iter().for_each(World::comes_to_rest);
                seen.extend(states.iter().cloned());
            }
            count += seen.len();
        }
        assert!(count > 40_000, "{count}");
    }

    #[test]
    fn in_place_the_ranks_of_others_go_on() {
        let mut m = Membership::running(Rules {
            in_place: true,
            ..rules(2, 3, 0)
        });
        m.lost(1);
        assert_eq!(m.decide(SECOND), Some(Decision::Lose(1)));
        assert_eq!(m.decide(SECOND), None);
        m.lost(2);
        assert_eq!(m.decide(SECOND), Some(Decision::Lose(2)));
        assert_eq!(m.decide(SECOND), Some(Decision::Hold(1)));
        m.arrived(3);
        m.arrived(4);
        m.arrived(5);
        assert_eq!(m.decide(2 * SECOND), Some(Decision::Admit(3)));
        assert_eq!(m.decide(2 * SECOND), Some(Decision::Admit(4)));
        assert_eq!(m.decide(2 * SECOND), Some(Decision::GoOn));
        assert_eq!(m.decide(9 * SECOND), None, "there is no room");
        m.lost(3);
        assert_eq!(m.decide(9 * SECOND), Some(Decision::Lose(3)));
        assert_eq!(m.decide(9 * SECOND), Some(Decision::Admit(5)));
        m.lost(4);
        m.lost(5);
        m.decide(9 * SECOND);
        m.decide(9 * SECOND);
        assert_eq!(m.decide(9 * SECOND), Some(Decision::Hold(1)));
        assert_eq!(m.decide(12 * SECOND), None);
        assert_eq!(m.decide(13 * SECOND), Some(Decision::TooFew(1)));
    }

    #[test]
    fn the_last_call_begins_with_enough_launchers_and_ends_with_all() {
        let mut m = Membership::forming(rules(2, 3, 0), Duration::ZERO);
        m.arrived(0);
        assert_eq!(m.decide(3 * SECOND), None);
        m.arrived(1);
        assert_eq!(m.decide(3 * SECOND), None);
        m.lost(1);
        assert_eq!(m.decide(Duration::from_millis(3900)), None);
        m.arrived(2);
        // Beyond the join time-out, which is for the fewest.
        assert_eq!(m.decide(Duration::from_millis(3950)), None);
        assert_eq!(m.decide(5 * SECOND), None, "a call of its own");
        let start = Some(Decision::Start(vec![0, 2]));
        assert_eq!(m.decide(6 * SECOND), start);
        let mut m = Membership::forming(rules(1, 2, 0), Duration::ZERO);
        m.arrived(0);
        m.arrived(1);
        assert_eq!(m.decide(Duration::ZERO), Some(Decision::Start(vec![0, 1])));
    }

    #[test]
    fn failures_count_and_comings_and_goings_do_not() {
        let mut m = Membership::forming(rules(1, 3, 1), Duration::ZERO);
        let restart = |m: &mut Membership, stops: bool| {
            let stop = m.decide(SECOND);
            assert_eq!(stop, stops.then_some(Decision::Stop));
            m.ids()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|id| m.ended(id));
            m.decide(SECOND)
        };
        (0..3).for_each(|id| m.arrived(id));
        m.decide(Duration::ZERO);
        m.lost(1);
        assert_eq!(restart(&mut m, true), Some(Decision::Start(vec![0, 2])));
        m.arrived(3);
        assert_eq!(restart(&mut m, true), Some(Decision::Start(vec![0, 2, 3])));
        // A rank that fails because a node is lost.
        m.failed();
        m.lost(3);
        assert_eq!(restart(&mut m, false), Some(Decision::Start(vec![0, 2])));
        assert_eq!(m.restarts(), 0);
        m.failed();
        assert_eq!(restart(&mut m, false), Some(Decision::Start(vec![0, 2])));
        m.failed();
        assert_eq!(restart(&mut m, false), Some(Decision::Fail));
    }

    #[test]
    fn a_launcher_too_many_waits_and_one_that_is_late_interrupts_nobody() {
        let mut m = Membership::running(rules(1, 2, 0));
        m.arrived(2);
        assert_eq!(m.decide(SECOND), None);
        m.lost(1);
        assert_eq!(m.decide(SECOND), Some(Decision::Stop));
        m.ended(0);
        assert_eq!(m.decide(SECOND), Some(Decision::Start(vec![0, 2])));
        m.done(0);
        m.lost(2);
        assert_eq!(m.decide(SECOND), Some(Decision::Stop));
        let mut m = Membership::running(rules(1, 2, 0));
        m.lost(1);
        m.decide(SECOND);
        m.ended(0);
        m.decide(SECOND);
        m.done(0);
        m.arrived(4);
        assert_eq!(m.decide(SECOND), Some(Decision::Succeed));
    }
}
