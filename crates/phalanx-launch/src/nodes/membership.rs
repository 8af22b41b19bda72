//! Which launchers take part in an attempt, and when one begins or the job ends: a state machine without sockets and clocks.
//!
//! Its state follows from the log of the launchers, which all launchers read. The launcher that hosts the store
//! [decides](Launchers::decide), and writes its decision as one more event. If the store moves, its new host continues from there.
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
//! With `--elastic` ranks continue in place: launchers join and leave an attempt while it runs.
//!
//! | phase    | event                                     | next     | decision    |
//! |----------|-------------------------------------------|----------|-------------|
//! | running  | a member is lost                          | running  | lose        |
//! | running  | a launcher arrives, and there is room     | running  | admit       |
//! | running  | fewer than `least` are left               | running  | hold        |
//! | running  | `least` are there again                   | running  | continue    |
//! | running  | the join time-out, fewer than `least`     | decided  | too few     |
//! | running  | no rank that is left has the state        | stopping | stop        |
//!
//! A job of a fixed number of nodes begins when all are there. A launcher that leaves it before is as one that never came, and
//! another one can take its place. Later, without `--elastic`, its loss ends the job.
//!
//! As under torchrun, the last call begins when `least` launchers are there, and a launcher that arrives does not count
//! as a restart. Unlike there, a lost launcher does not count either, and the next attempt begins without a last call. A
//! launcher that arrives after ranks of a member have succeeded interrupts no rank.

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

/// Something that has happened to a launcher, or a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LauncherEvent {
    /// Launcher `id` has joined the job.
    Arrived { id: Id, info: NodeInfo },
    /// Launcher `id` is lost or has left. Written by itself, its guard, its will, or the host of the store.
    Lost { id: Id, why: JobFailure },
    /// The launchers of the attempt start their ranks.
    Began(Attempt),
    /// Launcher `id` joins the attempt that runs; its first rank has the number `first`.
    Admitted { id: Id, first: usize },
    /// The ranks continue without those of launcher `id`, which is lost.
    Continued { id: Id },
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
    /// Their descriptions, in the same order.
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

    /// The number of ranks with which it began.
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
    /// Ranks continue when others are lost or join (`--elastic`).
    pub in_place: bool,
}

/// What the launcher with the store must do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Begin the attempt with these launchers, by node rank, after this many failures.
    Start(Vec<Id>, u32),
    /// End the ranks of this attempt, because launchers have arrived or are lost.
    Stop,
    /// All ranks of all members have succeeded.
    Succeed,
    /// The job ends for this reason: a rank failed, and no restart is left.
    Fail(JobFailure),
    /// The job ends: only this many launchers are present.
    TooFew(usize),
    /// The ranks continue without those of this launcher.
    Lose(Id),
    /// The ranks of this launcher join the others.
    Admit(Id),
    /// The ranks wait: only this many launchers are present.
    Hold(usize),
    /// The ranks do not wait any more.
    Continue,
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
    /// The descriptions of all launchers that have arrived.
    infos: BTreeMap<Id, NodeInfo>,
    lost: BTreeMap<Id, JobFailure>,
    /// The attempt that was begun last, with those that have joined it.
    attempt: Option<Attempt>,
    members: BTreeMap<Id, Member>,
    /// The ranks of a member have succeeded.
    is_ending: bool,
    /// Why the attempt has ended, and whether that counts as a failure: a rank has failed, and no member was lost before its
    /// ranks had ended.
    over: Option<(JobFailure, bool)>,
    abort: Option<JobFailure>,
    /// Why the last launcher has left, before the first attempt.
    pub(super) left: Option<String>,
    /// Messages on launchers that have joined or left, and without which the ranks do not continue.
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
            LauncherEvent::Continued { id } => {
                // Later failures have other causes.
                self.changes.clear();
                self.members.remove(&id);
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
                    let is_cause = || self.members.values().all(|state| *state != Member::Lost);
                    let counts = last.map_or_else(|| by_rank && is_cause(), |(_, counts)| *counts);
                    self.over = Some((why, counts));
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
            LauncherEvent::Abort(why) => self.end(why),
        }
    }
}

/// Whether `why` takes the place of the verdict `last`.
fn is_better(why: &JobFailure, last: Option<&JobFailure>) -> bool {
    last.is_none_or(|last| last.echo && !why.echo)
}

impl Launchers {
    fn enter(&mut self, id: Id) {
        let state = match self.lost.contains_key(&id) {
            true => Member::Lost,
            false => Member::Running,
        };
        self.members.insert(id, state);
    }

    fn end(&mut self, why: JobFailure) {
        if is_better(&why, self.abort()) {
            self.abort = Some(why);
        }
    }

    fn lose(&mut self, id: Id, why: JobFailure) {
        if self.lost.contains_key(&id) {
            return;
        }
        let fixed = self.infos.get(&id).filter(|info| info.least.is_none());
        match (&self.attempt, fixed) {
            // Another launcher can come in its place.
            (None, Some(_)) => {
                self.infos.remove(&id);
                self.left = Some(why.message);
                return;
            }
            (Some(_), Some(info)) if !info.elastic => return self.end(why),
            _ => {}
        }
        if self.infos.contains_key(&id) {
            self.changes.push(why.message.clone());
        }
        self.lost.insert(id, why);
        match self.members.get_mut(&id) {
            // Its ranks have succeeded, so no rank needs it.
            Some(Member::Done) if self.over.is_none() => drop(self.members.remove(&id)),
            Some(state) => {
                if let Some((_, counts)) = self.over.as_mut().filter(|_| *state != Member::Ended) {
                    *counts = false;
                }
                *state = Member::Lost;
            }
            None => {}
        }
    }

    /// The description of launcher `id`.
    pub(super) fn info(&self, id: Id) -> Option<&NodeInfo> {
        self.infos.get(&id)
    }

    /// The launchers that have arrived and are not lost.
    pub(super) fn there(&self) -> impl Iterator<Item = Id> {
        let all = self.infos.keys().copied();
        all.filter(|id| !self.lost.contains_key(id))
    }

    /// The launchers that have arrived, are not lost and are not part of the attempt.
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

    /// The event that ends the job for `why`, unless there is a better verdict.
    pub(super) fn abort_for(&self, why: &JobFailure) -> Option<LauncherEvent> {
        is_better(why, self.abort()).then(|| LauncherEvent::Abort(why.clone()))
    }

    /// The event that ends `attempt` for `why`, unless there is a better verdict.
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

    /// The event that begins `attempt`, unless it has begun.
    pub(super) fn begin_with(&self, attempt: &Attempt) -> Option<LauncherEvent> {
        let last = self.attempt.as_ref();
        let is_new = last.is_none_or(|last| last.number < attempt.number);
        is_new.then(|| LauncherEvent::Began(attempt.clone()))
    }

    /// The event that launcher `id` is lost for `why`, unless the log has it.
    pub(super) fn lost_for(&self, id: Id, why: &JobFailure) -> Option<LauncherEvent> {
        let why = why.clone();
        (!self.lost.contains_key(&id)).then_some(LauncherEvent::Lost { id, why })
    }

    /// What to do at `now`; `None`: wait for the next event. The decision repeats until its event is in the log.
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
                can_grow: host.can_grow,
                ..Host::new(rules)
            };
        }
        if let Some((why, counts)) = &self.over {
            if let Some((restarts, ..)) = host.forming {
                return self.form(host, restarts, now);
            }
            let mut all = self.members.values();
            if all.any(|state| matches!(state, Member::Running | Member::Done)) {
                return None;
            }
            if *counts && attempt.restarts >= rules.max_restarts {
                return Some(Decision::Fail(why.clone()));
            }
            let restarts = attempt.restarts + u32::from(*counts);
            return match self.there().count() >= rules.least {
                true => self.start(host, restarts),
                false => self.form(host, restarts, now),
            };
        }
        let mut members = self.members.iter();
        if let Some((id, _)) = members.find(|(_, state)| **state == Member::Lost) {
            return Some(match rules.in_place {
                true => Decision::Lose(*id),
                false => Decision::Stop,
            });
        }
        let count = self.members.len();
        if self.members.values().all(|state| *state == Member::Done) {
            return Some(Decision::Succeed);
        }
        if self.is_ending {
            return None;
        }
        if let Some(id) = self.waiting().next().filter(|_| count < rules.most) {
            match rules.in_place {
                true if host.can_grow => return Some(Decision::Admit(id)),
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
                Some(Decision::Continue)
            }
            _ => None,
        }
    }

    /// Waits for enough launchers for the next attempt, after this many failures.
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

    /// Launchers of the last attempt come before those that wait, and earlier arrivals before later ones.
    fn start(&self, host: &mut Host, restarts: u32) -> Option<Decision> {
        let mut chosen: Vec<Id> = self.there().collect();
        chosen.sort_by_key(|id| !self.members.contains_key(id));
        chosen.truncate(host.rules.most);
        chosen.sort_unstable();
        let is_new = !std::mem::replace(&mut host.is_starting, true);
        is_new.then_some(Decision::Start(chosen, restarts))
    }

    /// The launchers that have joined or left, and without which the ranks do not continue, as one line.
    pub(super) fn changes(&self) -> String {
        self.changes.join("; ")
    }
}

/// What only the launcher with the store knows. Times count from any fixed moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Host {
    pub(super) rules: Rules,
    /// The ranks accept processes that join.
    pub(super) can_grow: bool,
    /// The attempt that the other fields describe.
    attempt: Option<u32>,
    /// Launchers are waited for: failures so far, since when, and when the last call began.
    forming: Option<(u32, Duration, Option<Duration>)>,
    /// [`Decision::Start`] was taken.
    is_starting: bool,
    /// Since when too few launchers are present, with ranks in place.
    short: Option<Duration>,
}

impl Host {
    pub(super) fn new(rules: Rules) -> Host {
        Host {
            rules,
            ..Host::default()
        }
    }

    /// Ranks that accept no processes do not wait for launchers.
    pub(super) fn never_holds(&mut self) {
        self.rules.least = 1;
    }
}

#[cfg(test)]
mod tests;
