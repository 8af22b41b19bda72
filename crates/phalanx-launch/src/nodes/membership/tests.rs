use std::collections::HashSet;

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

fn info(pid: usize) -> NodeInfo {
    NodeInfo {
        pid: pid as u32,
        least: Some(1),
        ..NodeInfo::default()
    }
}

fn why(code: u8) -> JobFailure {
    JobFailure::new(code, 0, "a test")
}

/// The machine, with its log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Machine {
    launchers: Launchers,
    host: Host,
}

impl Machine {
    fn new(rules: Rules) -> Machine {
        let mut machine = Machine {
            launchers: Launchers::default(),
            host: Host::new(rules),
        };
        machine.host.can_grow = true;
        machine
    }

    /// The first attempt of launchers 0 to `most` has begun.
    fn running(rules: Rules) -> Machine {
        let mut machine = Machine::new(rules);
        (0..rules.most).for_each(|id| machine.arrived(id));
        let start = machine.decide(Duration::ZERO);
        assert!(matches!(start, Some(Decision::Start(..))), "{start:?}");
        machine
    }

    fn apply(&mut self, event: LauncherEvent) {
        self.launchers.apply(event);
        // Messages, and lost launchers that are in no attempt, make no difference.
        let all = &mut self.launchers;
        all.changes.clear();
        let gone = |id: &Id| all.lost.contains_key(id) && !all.members.contains_key(id);
        all.infos.retain(|id, _| !gone(id));
        all.lost.retain(|id, _| all.members.contains_key(id));
    }

    fn arrived(&mut self, id: Id) {
        self.apply(LauncherEvent::Arrived { id, info: info(id) });
    }

    fn lost(&mut self, id: Id) {
        let event = self.launchers.lost_for(id, &why(3));
        event.into_iter().for_each(|event| self.apply(event));
    }

    fn over(&mut self, code: u8, by_rank: bool) {
        let number = self.number();
        let event = self.launchers.over_for(number, &why(code), by_rank);
        event.into_iter().for_each(|event| self.apply(event));
    }

    fn failed(&mut self) {
        self.over(1, true);
    }

    fn number(&self) -> u32 {
        self.launchers.attempt().map_or(0, |attempt| attempt.number)
    }

    fn done(&mut self, id: Id) {
        let attempt = self.number();
        self.apply(LauncherEvent::Done { id, attempt });
    }

    fn ended(&mut self, id: Id) {
        let attempt = self.number();
        self.apply(LauncherEvent::Ended { id, attempt });
    }

    fn restarts(&self) -> u32 {
        self.launchers.attempt().map_or(0, |last| last.restarts)
    }

    /// The next decision, as the host of the store writes it into the log.
    fn decide(&mut self, now: Duration) -> Option<Decision> {
        let decision = self.launchers.decide(&mut self.host, now)?;
        match decision.clone() {
            Decision::Start(ids, restarts) => {
                let last = self.launchers.attempt();
                let number = last.map_or(0, |last| last.number + 1);
                let again = self.launchers.decide(&mut self.host, now);
                assert_eq!(again, None, "it is said once");
                self.apply(LauncherEvent::Began(Attempt {
                    number,
                    ids,
                    restarts,
                    ..Attempt::default()
                }));
            }
            Decision::Stop => self.over(3, false),
            Decision::Succeed => self.over(0, false),
            Decision::Fail(why) => self.apply(LauncherEvent::Abort(why)),
            Decision::TooFew(_) => self.apply(LauncherEvent::Abort(why(4))),
            Decision::Admit(id) => self.apply(LauncherEvent::Admitted { id, first: 0 }),
            Decision::Lose(id) => self.apply(LauncherEvent::Continued { id }),
            Decision::Hold(_) | Decision::Continue => {}
        }
        Some(decision)
    }

    fn is_running(&self) -> bool {
        self.launchers.attempt.is_some() && self.launchers.over.is_none()
    }

    fn is_ending(&self) -> bool {
        self.is_running() && self.launchers.is_ending
    }
}

/// What the launchers do, and the machine of the one with the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    machine: Machine,
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
    /// A launcher has the store.
    has_host: bool,
}

impl World {
    fn new(rules: Rules) -> World {
        World {
            machine: Machine::new(rules),
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
            has_host: true,
        }
    }

    /// The store has moved: its new host continues to decide, and lets ranks that wait continue first.
    fn moved(mut self) -> World {
        self.machine.host = Machine::new(self.machine.host.rules).host;
        (self.has_host, self.held) = (true, false);
        self.settle()
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
        if !self.has_host {
            return self;
        }
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
                    assert!(self.running() < self.machine.host.rules.most, "{self:?}");
                    let state = self.launchers.insert(id, Some((self.attempts, true)));
                    assert!(!self.is_over && state.is_some(), "{self:?}");
                }
                Decision::Hold(count) => {
                    assert!(
                        !self.held && count < self.machine.host.rules.least,
                        "{self:?}"
                    );
                    self.held = true;
                }
                Decision::Continue => {
                    let there = self.running();
                    assert!(
                        self.held && there >= self.machine.host.rules.least,
                        "{self:?}"
                    );
                    self.held = false;
                }
                Decision::Succeed => {
                    assert!(!self.is_over, "{self:?}");
                    self.end = Some("done");
                }
                Decision::Fail(_) => {
                    assert!(self.stopped_by_failure && !self.lost_in_attempt, "{self:?}");
                    assert_eq!(self.counted, self.machine.host.rules.max_restarts);
                    self.end = Some("failed");
                }
                Decision::TooFew(count) => {
                    assert_eq!(count, self.launchers.len(), "{self:?}");
                    assert!(count < self.machine.host.rules.least, "{self:?}");
                    self.end = Some("too few");
                }
                Decision::Start(members, _) => {
                    let (least, most) =
                        (self.machine.host.rules.least, self.machine.host.rules.most);
                    assert!((least..=most).contains(&members.len()), "{self:?}");
                    assert!(members.is_sorted() && members[0] == 0, "{self:?}");
                    let runs =
                        |launcher: &Option<(u32, bool)>| *launcher == Some((self.attempts, true));
                    assert!(
                        !self.launchers.values().any(runs),
                        "ranks of two attempts: {self:?}"
                    );
                    if self.stopped_by_failure && !self.lost_in_attempt {
                        self.counted += 1;
                    }
                    // No living launcher is left out while there is room.
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
        } = self.machine.host.rules;
        if self.machine.is_running() {
            assert_eq!(self.counted, self.machine.restarts(), "{self:?}");
        }
        if self.machine.is_running() && in_place && !self.machine.is_ending() {
            let running = self.running();
            assert_eq!(running, self.launchers.len().min(most), "{self:?}");
            assert_eq!(self.held, running < least, "{self:?}");
        }
        self
    }

    /// All states after one event; `faults`: launchers join and leave, and ranks fail, too.
    fn next(&self, faults: bool, most_arrivals: usize) -> Vec<World> {
        let mut next = Vec::new();
        if self.end.is_some() {
            return next;
        }
        if !self.has_host {
            next.push(self.clone().moved());
        }
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world.settle());
        };
        add(&|w| w.now += SECOND);
        if faults && self.machine.host.rules.in_place && self.attempts > 0 {
            // The host of the store is lost, and nothing is decided until there is another one.
            add(&|w| w.has_host = false);
        }
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
                    let is_done = w.machine.launchers.members.get(&id) == Some(&Member::Done);
                    w.lost_in_attempt |= lost.is_some_and(|(attempt, runs)| {
                        attempt == w.attempts && (runs || w.is_over && is_done)
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
                if faults && !self.is_over && self.machine.host.rules.in_place && id > 0 {
                    // With the last rank that has the state.
                    add(&|w| {
                        w.launchers.remove(&id);
                        w.lost_in_attempt = true;
                        w.machine.lost(id);
                        w.machine.over(3, false);
                        w.is_over = true;
                    });
                }
            }
            // Done before the attempt has ended otherwise.
            let is_done = self.launchers[&id] == Some((self.attempts, false));
            if is_done
                && self.is_over
                && self.machine.launchers.members.get(&id) == Some(&Member::Done)
            {
                add(&|w| w.machine.ended(id));
            }
        }
        next
    }

    /// Without more faults the job ends, or as many launchers as there is room for run in the newest attempt.
    fn comes_to_rest(&self) {
        let mut world = match self.has_host {
            true => self.clone(),
            false => self.clone().moved(),
        };
        for _ in 0..40 {
            let running = world.launchers.keys().filter(|id| world.runs(**id));
            let room = world.machine.host.rules.most;
            let done = world.machine.is_ending();
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
        (1, 2, 0, 12, false),
        (1, 3, 1, 10, false),
        (2, 2, 1, 12, false),
        (2, 3, 1, 11, false),
        (3, 3, 1, 12, false),
        (1, 1, 1, 12, true),
        (1, 2, 0, 12, true),
        (1, 3, 1, 10, true),
        (2, 2, 1, 12, true),
        (2, 3, 1, 11, true),
        (3, 3, 0, 12, true),
    ] {
        let rules = Rules {
            in_place,
            ..rules(least, most, restarts)
        };
        let mut states = HashSet::from([World::new(rules)]);
        let mut seen = HashSet::new();
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
    let mut m = Machine::running(Rules {
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
    assert_eq!(m.decide(2 * SECOND), Some(Decision::Continue));
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
    let mut m = Machine::new(rules(2, 3, 0));
    m.arrived(0);
    assert_eq!(m.decide(3 * SECOND), None);
    m.arrived(1);
    assert_eq!(m.decide(3 * SECOND), None);
    m.lost(1);
    assert_eq!(m.decide(Duration::from_millis(3900)), None);
    m.arrived(2);
    // Beyond the join time-out, which is for `least` launchers.
    assert_eq!(m.decide(Duration::from_millis(3950)), None);
    assert_eq!(m.decide(5 * SECOND), None, "a call of its own");
    let start = Some(Decision::Start(vec![0, 2], 0));
    assert_eq!(m.decide(6 * SECOND), start);
    let mut m = Machine::new(rules(1, 2, 0));
    m.arrived(0);
    m.arrived(1);
    assert_eq!(
        m.decide(Duration::ZERO),
        Some(Decision::Start(vec![0, 1], 0))
    );
}

#[test]
fn what_is_left_waits_for_others_and_then_for_more() {
    let mut m = Machine::running(rules(2, 3, 1));
    m.failed();
    m.lost(1);
    m.lost(2);
    m.ended(0);
    assert_eq!(m.decide(SECOND), None);
    m.arrived(3);
    assert_eq!(m.decide(2 * SECOND), None, "the last call");
    let start = Some(Decision::Start(vec![0, 3], 0));
    assert_eq!(m.decide(4 * SECOND), start);
}

/// Each decision before the move and after it, also those of which the new host knows only by the log.
#[test]
fn a_failure_counts_once_whatever_launcher_has_the_store() {
    for moves in 0..1 << 5 {
        let mut m = Machine::running(Rules {
            in_place: true,
            ..rules(1, 3, 1)
        });
        let move_at = |m: &mut Machine, bit: u32| {
            if moves >> bit & 1 == 1 {
                m.host = Machine::new(m.host.rules).host;
            }
        };
        m.lost(1);
        move_at(&mut m, 0);
        assert_eq!(m.decide(SECOND), Some(Decision::Lose(1)));
        move_at(&mut m, 1);
        assert_eq!(m.decide(SECOND), None);
        m.failed();
        m.ended(0);
        move_at(&mut m, 2);
        assert_eq!(m.decide(SECOND), None);
        m.ended(2);
        // It has ended with the others, so it is not the cause.
        m.lost(2);
        move_at(&mut m, 3);
        let start = Some(Decision::Start(vec![0], 1));
        let mut first = m.clone();
        assert_eq!(first.launchers.decide(&mut first.host, SECOND), start);
        move_at(&mut m, 4);
        assert_eq!(m.decide(SECOND), start);
        m.failed();
        m.ended(0);
        assert_eq!(m.decide(SECOND), Some(Decision::Fail(why(1))));
    }
}

/// After the decision, and before it is in the log.
#[test]
fn a_launcher_that_is_lost_before_its_attempt_begins_is_lost_in_it() {
    for (in_place, want) in [(false, Decision::Stop), (true, Decision::Lose(1))] {
        let mut m = Machine::new(Rules {
            in_place,
            ..rules(1, 2, 0)
        });
        m.arrived(0);
        m.arrived(1);
        let start = m.launchers.decide(&mut m.host, SECOND);
        assert_eq!(start, Some(Decision::Start(vec![0, 1], 0)));
        m.launchers
            .apply(LauncherEvent::Lost { id: 1, why: why(3) });
        m.launchers.apply(LauncherEvent::Began(Attempt {
            ids: vec![0, 1],
            ..Attempt::default()
        }));
        assert_eq!(m.decide(SECOND), Some(want));
    }
}

#[test]
fn failures_count_and_comings_and_goings_do_not() {
    let mut m = Machine::new(rules(1, 3, 1));
    let restart = |m: &mut Machine, stops: bool| {
        let stop = m.decide(SECOND);
        assert_eq!(stop, stops.then_some(Decision::Stop));
        let there: Vec<Id> = m.launchers.there().collect();
        there.into_iter().for_each(|id| m.ended(id));
        m.decide(SECOND)
    };
    (0..3).for_each(|id| m.arrived(id));
    m.decide(Duration::ZERO);
    m.lost(1);
    assert_eq!(restart(&mut m, true), Some(Decision::Start(vec![0, 2], 0)));
    m.arrived(3);
    assert_eq!(
        restart(&mut m, true),
        Some(Decision::Start(vec![0, 2, 3], 0))
    );
    // A rank that fails because a node is lost.
    m.failed();
    m.lost(3);
    assert_eq!(restart(&mut m, false), Some(Decision::Start(vec![0, 2], 0)));
    assert_eq!(m.restarts(), 0);
    m.failed();
    assert_eq!(restart(&mut m, false), Some(Decision::Start(vec![0, 2], 1)));
    m.failed();
    assert_eq!(restart(&mut m, false), Some(Decision::Fail(why(1))));
}

#[test]
fn a_launcher_too_many_waits_and_one_that_is_late_interrupts_nobody() {
    let mut m = Machine::running(rules(1, 2, 0));
    m.arrived(2);
    assert_eq!(m.decide(SECOND), None);
    m.lost(1);
    assert_eq!(m.decide(SECOND), Some(Decision::Stop));
    m.ended(0);
    assert_eq!(m.decide(SECOND), Some(Decision::Start(vec![0, 2], 0)));
    m.done(0);
    m.lost(2);
    assert_eq!(m.decide(SECOND), Some(Decision::Stop));
    let mut m = Machine::running(rules(1, 2, 0));
    m.done(0);
    m.lost(0);
    assert_eq!(m.decide(SECOND), None, "no rank misses it");
    let mut m = Machine::running(rules(1, 2, 0));
    m.lost(1);
    m.decide(SECOND);
    m.ended(0);
    m.decide(SECOND);
    m.done(0);
    m.arrived(4);
    assert_eq!(m.decide(SECOND), Some(Decision::Succeed));
}
