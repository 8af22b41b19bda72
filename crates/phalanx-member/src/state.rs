//! Which processes belong to a job: a state machine without sockets and clocks.
//!
//! The state follows from all [events](Event) of the job's log, in their order, so every process that reads the log has the
//! same state. A decision is one more event: [`Event::Formed`] says which processes form the next group. Events that do not fit
//! the state, for instance a group with a process that was lost before, change nothing.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_comm::Formation;
use serde::{Deserialize, Serialize};

/// Something that has happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the text of each event names its fields")]
pub enum Event {
    /// The ranks continue when some are lost. `can_grow`: processes may also join, and be asked to leave.
    Elastic { can_grow: bool },
    /// The ranks do not continue any more when some are lost.
    NotElastic,
    /// `launcher` starts `ranks` processes that join the others.
    Started { launcher: usize, ranks: usize },
    /// The process `number` has ended, or is out of reach.
    Lost { number: usize, why: String },
    /// The process `number` asks to join. The `tag` distinguishes it from another with its number.
    Asks { number: usize, tag: u64 },
    /// The process `number` has joined, and has the state of the others. `took_part`: it has also taken a step with them.
    Joined { number: usize, took_part: bool },
    /// The process `number` is to leave.
    Leave { number: usize },
    /// The ranks are to wait between two steps, for the reason `why`; `None`: they continue.
    Hold { why: Option<String> },
    /// The members of this group are about to form the next one, with the processes that ask to join.
    Gather { group: Formation },
    /// These processes form the next group. `is_planned`: after a [`Gather`](Event::Gather), between two operations.
    Formed { group: Formation, is_planned: bool },
    /// The job ends.
    Over { why: String },
}

/// The last group of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Its generation and members.
    pub formation: Formation,
    /// Members that were in no group before it.
    pub new: Vec<usize>,
    /// [`Event::Gather`] was written: processes that ask may join the next group.
    pub gathers: bool,
}

/// The changes that the ranks of a group are asked for. They must agree on them before they act.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedChange {
    /// The numbers of the processes that ask to join, in ascending order.
    pub joining: Vec<usize>,
    /// The numbers of the ranks that are to leave.
    pub leaving: Vec<usize>,
    /// Why the ranks are to wait.
    pub hold: Option<String>,
}

impl RequestedChange {
    /// Whether nothing is asked.
    pub fn is_none(&self) -> bool {
        *self == RequestedChange::default()
    }
}

/// The processes of a job. A process is named by its number: its rank in the first group, or the number with which it was
/// started to join the others. No number is given twice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    can_grow: Option<bool>,
    over: Option<String>,
    hold: Option<String>,
    /// The launcher of each process that was started to join the others.
    started: Vec<usize>,
    lost: BTreeMap<usize, String>,
    /// The processes that ask to join, with their tags.
    asking: BTreeMap<usize, u64>,
    /// The processes that have joined; whether each has taken a step with the others.
    joined: BTreeMap<usize, bool>,
    leaving: BTreeSet<usize>,
    /// The last group of each job.
    groups: BTreeMap<u64, Group>,
}

impl State {
    /// Changes the state by the next event of the log.
    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Elastic { can_grow } => self.can_grow = Some(can_grow),
            Event::NotElastic => self.can_grow = None,
            Event::Started { launcher, ranks } => {
                self.started.extend(std::iter::repeat_n(launcher, ranks));
            }
            Event::Lost { number, why } => {
                self.asking.remove(&number);
                self.lost.entry(number).or_insert(why);
            }
            Event::Asks { number, tag } if !self.is_used(number) => {
                self.asking.insert(number, tag);
            }
            Event::Asks { .. } => {}
            Event::Joined { number, took_part } => {
                self.joined.insert(number, took_part);
            }
            Event::Leave { number } => {
                self.leaving.insert(number);
            }
            Event::Hold { why } => self.hold = why,
            Event::Over { why } => self.over = Some(why),
            Event::Gather { group } => self.gather(group),
            Event::Formed { group, is_planned } => self.formed(group, is_planned),
        }
    }

    fn gather(&mut self, formation: Formation) {
        self.asking
            .retain(|number, _| !formation.members.contains(number));
        let generation = formation.generation;
        let group = self.groups.entry(formation.job).or_insert(Group {
            formation,
            new: Vec::new(),
            gathers: false,
        });
        group.gathers |= group.formation.generation == generation;
    }

    fn formed(&mut self, formation: Formation, is_planned: bool) {
        let last = self.groups.get(&formation.job);
        let members = || formation.members.iter();
        let is_later = last.is_none_or(|last| {
            let is_known = |number| {
                last.formation.members.contains(number) || self.asking.contains_key(number)
            };
            last.formation.generation < formation.generation && members().all(is_known)
        });
        if !is_later || members().any(|number| self.lost.contains_key(number)) {
            return;
        }
        let new = |number: &&usize| match (last, is_planned) {
            (None, _) => false,
            (Some(last), true) => !last.formation.members.contains(number),
            (Some(last), false) => last.new.contains(number),
        };
        let group = Group {
            new: members().filter(new).copied().collect(),
            formation: formation.clone(),
            gathers: false,
        };
        if is_planned {
            // Processes that did not come ask again.
            self.asking.clear();
        }
        self.groups.insert(formation.job, group);
    }

    /// Why the job ends, if it does.
    pub fn over(&self) -> Option<&str> {
        self.over.as_deref()
    }

    /// Why the process `number` was lost, if it was.
    pub fn why_lost(&self, number: usize) -> Option<&str> {
        self.lost.get(&number).map(String::as_str)
    }

    /// The tag of the process `number` that asks to join.
    pub fn tag(&self, number: usize) -> Option<u64> {
        self.asking.get(&number).copied()
    }

    /// The processes that ask to join, in ascending order.
    pub fn asking(&self) -> Vec<usize> {
        self.asking.keys().copied().collect()
    }

    /// Whether another process has, or had, this number.
    pub fn is_used(&self, number: usize) -> bool {
        self.lost.contains_key(&number)
            || self.asking.contains_key(&number)
            || self.joined.contains_key(&number)
            || (self.groups.values()).any(|group| group.formation.members.contains(&number))
    }

    /// Whether the process `number` was asked to leave.
    pub fn is_leaving(&self, number: usize) -> bool {
        self.leaving.contains(&number)
    }

    /// The last group of `job`.
    pub fn group(&self, job: u64) -> Option<&Group> {
        self.groups.get(&job)
    }

    /// The last group of each job.
    pub fn groups(&self) -> impl Iterator<Item = &Group> {
        self.groups.values()
    }

    /// The changes that the ranks with the numbers `members` are asked for.
    pub fn requested(&self, members: &[usize]) -> RequestedChange {
        let leaving = self.leaving.iter().copied();
        let is_there = |number: &usize| members.contains(number) && !self.lost.contains_key(number);
        RequestedChange {
            joining: self.asking(),
            leaving: leaving.filter(is_there).collect(),
            hold: self.hold.clone(),
        }
    }

    /// Whether the ranks continue when some are lost.
    pub fn is_elastic(&self) -> bool {
        self.can_grow.is_some()
    }

    /// Whether processes may join, and be asked to leave.
    pub fn can_grow(&self) -> bool {
        self.can_grow == Some(true)
    }

    /// Whether the job can continue with those of the processes `numbers` that are not lost: one of them must have the state of
    /// the training. The `first` processes and those that have joined have it.
    pub fn continues_with(&self, first: usize, numbers: impl IntoIterator<Item = usize>) -> bool {
        let has_state = |number: &usize| *number < first || self.joined.contains_key(number);
        let mut numbers = numbers.into_iter().filter(has_state);
        self.can_grow.is_some() && numbers.any(|number| !self.lost.contains_key(&number))
    }

    /// Whether the process `number` was started after the `first` ones and has taken no step yet: its failure does not affect
    /// the others.
    pub fn is_candidate(&self, first: usize, number: usize) -> bool {
        number >= first && self.joined.get(&number) != Some(&true)
    }

    /// The numbers of all processes that were started, of which `first` were in the first group.
    pub fn numbers(&self, first: usize) -> std::ops::Range<usize> {
        0..first + self.started.len()
    }

    /// The numbers of the processes that `launcher` has started to join the `first` ones.
    pub fn started_by(&self, first: usize, launcher: usize) -> impl Iterator<Item = usize> {
        let all = self.started.iter().enumerate();
        let own = all.filter(move |(_, other)| **other == launcher);
        own.map(move |(index, _)| first + index)
    }
}

/// A process that is to be in the next group, after the group `last`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seat {
    pub(crate) number: usize,
    pub(crate) last: Formation,
    /// This process was a member of that group after it had formed; it did not only try to form it.
    pub(crate) has_formed: bool,
    /// The ranks have agreed on it between two operations: newcomers may join.
    pub(crate) is_planned: bool,
}

/// The processes that are waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The members of the last group that are not lost, by rank.
    pub(crate) members: Vec<usize>,
    /// The newcomers, which have nothing that the others need.
    pub(crate) newcomers: Vec<usize>,
}

/// The result for a [`Seat`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Next {
    /// The next group is not decided yet.
    Open,
    /// The process is in this group.
    In(Formation),
    /// The others have formed this group without it.
    Without(Formation),
    /// The process was reported lost, and why.
    Lost(String),
}

impl Seat {
    /// The result so far.
    pub(crate) fn next(&self, state: &State) -> Next {
        if let Some(why) = state.why_lost(self.number) {
            return Next::Lost(why.to_owned());
        }
        match state.group(self.last.job).map(|group| &group.formation) {
            Some(next) if next.generation <= self.last.generation => Next::Open,
            None => Next::Open,
            Some(next) if next.members.contains(&self.number) => Next::In(next.clone()),
            Some(next) => Next::Without(next.clone()),
        }
    }

    /// The last group as the log has it, unless the log has a later one.
    fn group<'a>(&self, state: &'a State) -> Option<&'a Group> {
        let group = state.group(self.last.job)?;
        (group.formation.generation == self.last.generation).then_some(group)
    }

    /// Whether the member `number` of the last group was in no group before it, nor in this one.
    fn is_new(&self, state: &State, number: usize) -> bool {
        let group = self.group(state).filter(|_| !self.has_formed);
        group.is_some_and(|group| group.new.contains(&number))
    }

    /// The size of the last group, without newcomers.
    pub(crate) fn world(&self, state: &State) -> usize {
        let members = self.last.members.iter();
        members
            .filter(|number| !self.is_new(state, **number))
            .count()
    }

    /// The processes that are waited for.
    pub(crate) fn expected(&self, state: &State) -> Expected {
        let living = self.last.members.iter().copied();
        let living = living.filter(|number| state.why_lost(*number).is_none());
        let (mut newcomers, members): (Vec<usize>, Vec<usize>) =
            living.partition(|number| self.is_new(state, *number));
        if self.is_planned && self.group(state).is_some_and(|group| group.gathers) {
            newcomers.extend(state.asking());
        }
        Expected { members, newcomers }
    }

    /// The event that calls the processes that ask to join, if there are any. A process that asks later joins a later group.
    pub(crate) fn gather(&self, state: &State) -> Option<Event> {
        let known = state.group(self.last.job);
        let is_open = known.is_none_or(|known| {
            !known.gathers && known.formation.generation == self.last.generation
        });
        let group = self.last.clone();
        let calls = self.is_planned && is_open && !state.asking.is_empty();
        calls.then_some(Event::Gather { group })
    }

    /// The event that forms the next group of `members`, if the processes that are waited for are still those of `expected`.
    pub(crate) fn form(
        &self,
        state: &State,
        members: &[usize],
        expected: &Expected,
    ) -> Option<Event> {
        let is_open = self.next(state) == Next::Open && self.expected(state) == *expected;
        let group = Formation {
            generation: self.last.generation.checked_add(1)?,
            members: members.to_vec(),
            ..self.last.clone()
        };
        let is_planned = self.is_planned;
        is_open.then_some(Event::Formed { group, is_planned })
    }
}
