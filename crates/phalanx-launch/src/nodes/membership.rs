//! Which launchers make an attempt, and when one begins or the job ends: a state machine without sockets and clocks.
//!
//! Its state follows from the log of the launchers, which each of them reads. The launcher that hosts the store
//! [decides](Launchers::decide), and writes its decision as one more event, so another one that gets the store decides on.
//!
//! | key            | value                       | written by                                                      |
//! |----------------|-----------------------------|-----------------------------------------------------------------|
//! | `launch/log/K` | a [`LauncherEvent`] as JSON | launchers, by compare-and-set; their guards; the store (a will) |
//!
//! | phase    | event                                     | next     | decision    |
//! |----------|-------------------------------------------|----------|-------------|
//! | forming  | `most` launchers are there                | running  | start       |
//! | forming  | the last call is over                     | running  | start       |
//! | forming  | the join time-out, fewer than `least`     | decided  | too few     |
//! | running  | a rank failed                             | stopping |             |
//! | running  | a member is lost                          | stopping | stop        |
//! | running  | a launcher arrives, and there is room     | stopping | stop        |
//! | running  | all members are done                      | decided  | succeed     |
//! | stopping | all have ended, no restart is left        | decided  | fail        |
//! | stopping | all have ended, `least` or more are there | running  | start       |
//! | stopping | all have ended, fewer are there           | forming  |             |
//!
//! Where ranks go on in place, an attempt has other launchers in its course:
//!
//! | phase    | event                                     | next     | decision    |
//! |----------|-------------------------------------------|----------|-------------|
//! | running  | a member is lost                          | running  | lose        |
//! | running  | a launcher arrives, and there is room     | running  | admit       |
//! | running  | fewer than `least` are left               | running  | hold        |
//! | running  | `least` are there again                   | running  | go on       |
//! | running  | the join time-out, fewer than `least`     | decided  | too few     |
//! | running  | no rank that is left has the state        | stopping | stop        |
//!
//! As under torchrun, the last call begins when `least` launchers are there, and a launcher that arrives does not count
//! as a restart. Unlike there, a lost one does not count either, and what is left of an attempt starts the next without a
//! last call. A launcher that arrives after ranks of a member have succeeded interrupts no rank.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use phalanx_member::{EventLog, Replay};
use serde::{Deserialize, Serialize};

use super::info::{NodeInfo, name_of, ranks_of};
use crate::report::JobFailure;

/// The number of a launcher: node 0 has 0, and no number is given twice.
pub type Id = usize;

/// The log of a job's launchers.
pub type LauncherLog = EventLog<Launchers>;

/// Something that has happened to a launcher, or that was decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LauncherEvent {
    /// Launcher `id` has joined the job.
    Arrived { id: Id, info: NodeInfo },
    /// Nothing more comes from launcher `id`. Written by itself, its guard, its will, or the host of the store.
    Lost { id: Id, why: JobFailure },
    /// The launchers of the attempt start their ranks.
    Began(Attempt),
    /// Launcher `id` joins the attempt that runs; its first rank has the number `first`.
    Admitted { id: Id, first: usize },
    /// All ranks of launcher `id` have succeeded.
    Done { id: Id, attempt: u32 },
    /// The attempt ends; code 0: all its ranks have succeeded. `by_rank`: a rank has failed.
    Over {
        attempt: u32,
        why: JobFailure,
        by_rank: bool,
    },
    /// All ranks of launcher `id` have ended after the attempt has.
    Ended { id: Id, attempt: u32 },
    /// The job ends, and no attempt follows.
    Abort(JobFailure),
}

/// One attempt, as all its launchers know it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// Its number, from 0.
    pub number: u32,
    /// Why it begins, in one line; empty for the first.
    pub why: String,
    /// Its launchers, by node rank. The list only grows.
    pub(super) ids: Vec<Id>,
    /// What they have said of themselves.
    #[serde(skip)]
    pub(super) infos: Vec<NodeInfo>,
    /// The ranks' `MASTER_PORT` on node 0.
    pub master_port: u16,
    /// Failures before it.
    pub(super) restarts: u32,
}

impl Attempt {
    /// The number and description of each of its launchers.
    pub(super) fn launchers(&self) -> impl Iterator<Item = (Id, &NodeInfo)> {
        self.ids.iter().copied().zip(&self.infos)
    }

    /// The node of launcher `id`.
    pub(super) fn node_of(&self, id: Id) -> Option<usize> {
        self.ids.iter().position(|other| *other == id)
    }

    /// The node of launcher `id`, with its host and ranks.
    pub(super) fn name_of(&self, id: Id) -> String {
        let node = self.node_of(id);
        node.map_or_else(
            || "another node".to_owned(),
            |node| name_of(&self.infos, node),
        )
    }

    /// The first numbers of the ranks of launcher `id`.
    pub(super) fn ranks_of(&self, id: Id) -> std::ops::Range<usize> {
        let node = self.node_of(id);
        node.map_or(0..0, |node| ranks_of(&self.infos, node))
    }

    /// With how many ranks it began.
    pub(super) fn world(&self) -> usize {
        let first = self.infos.iter().filter(|info| info.joins_as.is_none());
        first.map(|info| info.local_ranks).sum()
    }
}

/// What a job allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
pub(super) enum Decision {
    /// Begin the attempt with these launchers, by node rank, after this many failures.
    Start(Vec<Id>, u32),
    /// End the ranks of this attempt, for the launchers that have arrived or are lost.
    Stop,
    /// All ranks of all members have succeeded.
    Succeed,
    /// The job ends for this reason: a rank failed, and no restart is left.
    Fail(JobFailure),
    /// The job ends: this many launchers are there.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Member {
    Running,
    /// Its ranks have succeeded.
    Done,
    /// Its ranks have ended, as the attempt has.
    Ended,
    Lost,
}

/// The launchers of a job, after the events of their log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Launchers {
    /// Of all that have arrived.
    infos: BTreeMap<Id, NodeInfo>,
    lost: BTreeMap<Id, JobFailure>,
    /// The attempt that was begun last, with those that have joined it.
    attempt: Option<Attempt>,
    members: BTreeMap<Id, Member>,
    /// The ranks of a member have succeeded.
    is_ending: bool,
    /// Why the attempt has ended, and whether a rank has failed.
    over: Option<(JobFailure, bool)>,
    abort: Option<JobFailure>,
    /// Who has come and gone since the last attempt began.
    changes: Vec<String>,
}

impl Replay for Launchers {
    type Event = LauncherEvent;

    const PREFIX: &'static str = "launch/log/";

    fn apply(&mut self, event: LauncherEvent) {
        let number = self.attempt.as_ref().map(|attempt| attempt.number);
        match event {
            LauncherEvent::Arrived { id, info } => {
                if !self.infos.contains_key(&id) && !self.lost.contains_key(&id) {
                    let (host, pid) = (&info.host, info.pid);
                    self.changes
                        .push(format!("a node has joined (host {host}, pid {pid})"));
                    self.infos.insert(id, info);
                }
            }
            LauncherEvent::Lost { id, why } => self.lose(id, why),
            LauncherEvent::Began(mut attempt) => {
                let infos = attempt.ids.iter().filter_map(|id| self.infos.get(id));
                attempt.infos = infos.cloned().collect();
                self.members = BTreeMap::new();
                self.changes.clear();
                (self.is_ending, self.over) = (false, None);
                attempt.ids.iter().for_each(|id| self.enter(*id));
                self.attempt = Some(attempt);
            }
            LauncherEvent::Admitted { id, first } => {
                if let (Some(attempt), Some(info)) = (&mut self.attempt, self.infos.get(&id)) {
                    attempt.ids.push(id);
                    attempt.infos.push(NodeInfo {
                        joins_as: Some(first),
                        ..info.clone()
                    });
                    self.changes.clear();
                    self.enter(id);
                }
            }
            LauncherEvent::Done { id, attempt } => {
                let member = self.members.get_mut(&id);
                if let Some(state @ Member::Running) = member.filter(|_| number == Some(attempt)) {
                    *state = Member::Done;
                    self.is_ending |= self.over.is_none();
                }
            }
            LauncherEvent::Over {
                attempt,
                why,
                by_rank,
            } => {
                let last = self.over.as_ref();
                if number == Some(attempt) && is_better(&why, last.map(|(why, _)| why)) {
                    let by_rank = last.map_or(by_rank, |(_, by_rank)| *by_rank);
                    self.over = Some((why, by_rank));
                }
            }
            LauncherEvent::Ended { id, attempt } => {
                let member = self.members.get_mut(&id);
                if let Some(state @ (Member::Running | Member::Done)) =
                    member.filter(|_| number == Some(attempt))
                {
                    *state = Member::Ended;
                }
            }
            LauncherEvent::Abort(why) => {
                if is_better(&why, self.abort.as_ref()) {
                    self.abort = Some(why);
                }
            }
        }
    }
}

/// Whether `why` takes the place of the verdict `last`.
fn is_better(why: &JobFailure, last: Option<&JobFailure>) -> bool {
    last.is_none_or(|last| last.echo && !why.echo)
}

impl Launchers {
    fn enter(&mut self, id: Id) {
        let is_lost = self.lost.contains_key(&id);
        let state = if is_lost {
            Member::Lost
        } else {
            Member::Running
        };
        self.members.insert(id, state);
    }

    fn lose(&mut self, id: Id, why: JobFailure) {
        if self.lost.contains_key(&id) {
            return;
        }
        if self.infos.contains_key(&id) {
            self.changes.push(why.message.clone());
        }
        self.lost.insert(id, why);
        match self.members.get_mut(&id) {
            // No rank misses it.
            Some(Member::Done) if self.over.is_none() => drop(self.members.remove(&id)),
            Some(state) => *state = Member::Lost,
            None => {}
        }
    }

    /// What launcher `id` has said of itself.
    pub(super) fn info(&self, id: Id) -> Option<&NodeInfo> {
        self.infos.get(&id)
    }

    /// The launchers that have arrived and are not lost.
    pub(super) fn there(&self) -> impl Iterator<Item = Id> {
        let all = self.infos.keys().copied();
        all.filter(|id| !self.lost.contains_key(id))
    }

    /// Those of them that are not part of the attempt.
    pub(super) fn waiting(&self) -> impl Iterator<Item = Id> {
        let is_member = |id: &Id| self.attempt.as_ref().is_some_and(|a| a.ids.contains(id));
        self.there().filter(move |id| !is_member(id))
    }

    /// The launchers that are lost.
    pub(super) fn lost(&self) -> BTreeSet<Id> {
        self.lost.keys().copied().collect()
    }

    /// Why launcher `id` is lost, if it is.
    pub(super) fn why_lost(&self, id: Id) -> Option<&JobFailure> {
        self.lost.get(&id)
    }

    /// The attempt that was begun last, with those that have joined it.
    pub(super) fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_ref()
    }

    /// Why the attempt has ended, if it has; code 0: all ranks have succeeded.
    pub(super) fn over(&self) -> Option<&JobFailure> {
        self.over.as_ref().map(|(why, _)| why)
    }

    /// Why the job ends, unless all ranks have succeeded.
    pub(super) fn abort(&self) -> Option<&JobFailure> {
        self.abort.as_ref()
    }

    /// Whether the end of the job is decided.
    pub(super) fn is_decided(&self) -> bool {
        self.abort.is_some() || self.over().is_some_and(|why| why.code == 0)
    }

    /// The event with which the job ends for `why`, unless there is a better verdict.
    pub(super) fn abort_for(&self, why: &JobFailure) -> Option<LauncherEvent> {
        is_better(why, self.abort()).then(|| LauncherEvent::Abort(why.clone()))
    }

    /// The event with which `attempt` ends for `why`, unless there is a better verdict.
    pub(super) fn over_for(
        &self,
        attempt: u32,
        why: &JobFailure,
        by_rank: bool,
    ) -> Option<LauncherEvent> {
        self.attempt
            .as_ref()
            .filter(|last| last.number == attempt)?;
        let why = is_better(why, self.over()).then(|| why.clone())?;
        Some(LauncherEvent::Over {
            attempt,
            why,
            by_rank,
        })
    }

    /// The event with which `attempt` begins, unless it has.
    pub(super) fn begin_with(&self, attempt: &Attempt) -> Option<LauncherEvent> {
        let last = self.attempt.as_ref();
        let is_new = last.is_none_or(|last| last.number < attempt.number);
        is_new.then(|| LauncherEvent::Began(attempt.clone()))
    }

    /// The event that launcher `id` is lost for `why`, unless it is known.
    pub(super) fn lost_for(&self, id: Id, why: &JobFailure) -> Option<LauncherEvent> {
        let why = why.clone();
        (!self.lost.contains_key(&id)).then_some(LauncherEvent::Lost { id, why })
    }

    /// What to do at `now`; `None`: wait for the next event. The same again until its event is in the log.
    pub(super) fn decide(&self, host: &mut Host, now: Duration) -> Option<Decision> {
        let Host { rules, .. } = *host;
        if self.is_decided() {
            return None;
        }
        let Some(attempt) = &self.attempt else {
            return self.form(host, 0, now);
        };
        if host.attempt != Some(attempt.number) {
            *host = Host {
                attempt: Some(attempt.number),
                takes_others: host.takes_others,
                ..Host::new(rules)
            };
        }
        let mut lost = self.members.iter();
        let lost = lost.find(|(id, state)| **state == Member::Lost && !host.lost.contains(id));
        let lost = lost.map(|(id, _)| *id);
        if let Some((why, by_rank)) = &self.over {
            if let Some((restarts, ..)) = host.forming {
                return self.form(host, restarts, now);
            }
            let mut all = self.members.values();
            if all.any(|state| matches!(state, Member::Running | Member::Done)) {
                return None;
            }
            let counts = *by_rank && lost.is_none();
            if counts && attempt.restarts >= rules.max_restarts {
                return Some(Decision::Fail(why.clone()));
            }
            let restarts = attempt.restarts + u32::from(counts);
            return match self.there().count() >= rules.least {
                true => self.start(host, restarts),
                false => self.form(host, restarts, now),
            };
        }
        let waiting = self.waiting().next();
        match lost {
            Some(id) if rules.in_place => {
                host.lost.insert(id);
                return Some(Decision::Lose(id));
            }
            Some(_) => return Some(Decision::Stop),
            None => {}
        }
        let members = self.members.values();
        let members = members.filter(|state| **state != Member::Lost);
        let count = members.clone().count();
        if members.clone().all(|state| *state == Member::Done) {
            return Some(Decision::Succeed);
        }
        if self.is_ending {
            return None;
        }
        if let Some(id) = waiting.filter(|_| count < rules.most) {
            match rules.in_place {
                true if host.takes_others => return Some(Decision::Admit(id)),
                true => {}
                false => return Some(Decision::Stop),
            }
        }
        match (rules.in_place && count < rules.least, host.short) {
            (true, None) => {
                host.short = Some(now);
                Some(Decision::Hold(count))
            }
            (true, Some(since)) if now >= since + rules.join => Some(Decision::TooFew(count)),
            (false, Some(_)) => {
                host.short = None;
                Some(Decision::GoOn)
            }
            _ => None,
        }
    }

    /// Waits for launchers, with which an attempt after this many failures begins.
    fn form(&self, host: &mut Host, restarts: u32, now: Duration) -> Option<Decision> {
        let there = self.there().count();
        let rules = host.rules;
        let (_, since, quorum) = host.forming.get_or_insert((restarts, now, None));
        if there < rules.least {
            *quorum = None;
            let is_time = now >= *since + rules.join;
            return is_time.then_some(Decision::TooFew(there));
        }
        let until = *quorum.get_or_insert(now) + rules.last_call;
        let is_time = there >= rules.most || now >= until;
        match is_time {
            true => self.start(host, restarts),
            false => None,
        }
    }

    /// Those of the last attempt go before those that wait, and an earlier arrival before a later one.
    fn start(&self, host: &mut Host, restarts: u32) -> Option<Decision> {
        let mut chosen: Vec<Id> = self.there().collect();
        chosen.sort_by_key(|id| !self.members.contains_key(id));
        chosen.truncate(host.rules.most);
        chosen.sort_unstable();
        let is_new = !std::mem::replace(&mut host.is_starting, true);
        is_new.then_some(Decision::Start(chosen, restarts))
    }

    /// Who has come and gone and has not been dealt with.
    pub(super) fn changes(&self, host: &Host) -> String {
        self.changes.get(host.seen..).unwrap_or_default().join("; ")
    }
}

/// What only the launcher with the store knows. Times are since any moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Host {
    pub(super) rules: Rules,
    /// The ranks take in others.
    pub(super) takes_others: bool,
    /// The attempt of which the rest is said.
    attempt: Option<u32>,
    /// Launchers are waited for: failures so far, since when, and when the last call began.
    forming: Option<(u32, Duration, Option<Duration>)>,
    /// [`Decision::Start`] was taken.
    is_starting: bool,
    /// Since when there are too few, in place.
    short: Option<Duration>,
    /// Those for which [`Decision::Lose`] was taken.
    lost: BTreeSet<Id>,
    /// How many changes have been dealt with.
    seen: usize,
}

impl Host {
    pub(super) fn new(rules: Rules) -> Host {
        Host {
            rules,
            ..Host::default()
        }
    }

    /// The changes so far are no reason for what fails later.
    pub(super) fn see_changes(&mut self, launchers: &Launchers) {
        self.seen = launchers.changes.len();
    }

    /// Ranks that take in no others do not wait for them.
    pub(super) fn never_holds(&mut self) {
        self.rules.least = 1;
    }
}

#[cfg(test)]
mod tests {
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
            machine.host.takes_others = true;
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
            // Messages, and those that are lost and in no attempt, make no difference.
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
                Decision::Lose(_) | Decision::Hold(_) | Decision::GoOn => {}
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
                    Decision::GoOn => {
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
            if faults && self.machine.host.rules.in_place && self.machine.is_running() {
                // The store moves: its new host decides on, and lets ranks that wait go on first.
                add(&|w| {
                    w.machine.host = Machine::new(w.machine.host.rules).host;
                    w.held = false;
                });
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

        /// Without more faults the job ends, or all that there is room for run in the newest attempt.
        fn comes_to_rest(&self) {
            let mut world = self.clone();
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
        let mut m = Machine::new(rules(2, 3, 0));
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
}
