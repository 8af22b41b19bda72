//! All orders in which the processes of a small job fail, gather, form groups, join and leave: there is one group of a
//! generation, and without further failures all living processes end up in one group.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use phalanx_comm::{Costs, Formation};
use phalanx_store::MemStore;

use crate::log::Log;
use crate::state::{Event, Expected, Next, Seat, State};

/// How many failures, processes that join and requests to leave there are.
#[derive(Clone, Copy)]
struct Faults {
    ends: usize,
    breaks: usize,
    joins: usize,
    leaves: usize,
}

/// Where a process is.
#[derive(Clone, Debug, PartialEq)]
enum At {
    /// It asks to join, as the process with this tag.
    Asks,
    /// It is in the group, between two operations.
    Idle(Formation),
    Gathers(Seat),
    /// It is about to write that these members form the next group, after it has seen this expectation.
    Proposes(Seat, Vec<usize>, Expected),
    /// It connects to the other members of the group after its last one.
    Forms(Formation, Option<u32>),
    /// It was asked to leave, and has left.
    Left,
}

#[derive(Clone, Debug)]
struct World {
    state: State,
    processes: BTreeMap<usize, At>,
    /// Processes that have ended, but whose launchers have not written it yet.
    ended: BTreeSet<usize>,
    /// The processes that are present, by the generation of the next group.
    here: BTreeSet<(u32, usize)>,
    /// The processes that have begun to form a group, by generation.
    connects: BTreeSet<(u32, usize)>,
    /// The generations whose members have agreed, between two operations, to form the next group, and which of them leave.
    agreed: BTreeMap<u32, Vec<usize>>,
    /// The members of each group that a process was in.
    groups: BTreeMap<u32, Vec<usize>>,
    ends: usize,
    breaks: usize,
    started: usize,
    leaves: usize,
}

const FIRST: usize = 3;

fn formation(generation: u32, members: Vec<usize>) -> Formation {
    Formation {
        job: 1,
        generation,
        members,
        costs: Costs::default(),
    }
}

impl World {
    fn new() -> World {
        let first = formation(0, (0..FIRST).collect());
        World {
            state: State::default(),
            processes: (0..FIRST)
                .map(|number| (number, At::Idle(first.clone())))
                .collect(),
            ended: BTreeSet::new(),
            here: BTreeSet::new(),
            connects: BTreeSet::new(),
            agreed: BTreeMap::new(),
            groups: BTreeMap::from([(0, first.members)]),
            ends: 0,
            breaks: 0,
            started: FIRST,
            leaves: 0,
        }
    }

    fn write(&mut self, event: Option<Event>) {
        event.into_iter().for_each(|event| self.state.apply(event));
    }

    fn gathers(&mut self, number: usize, last: Formation, was_in: Option<u32>, is_planned: bool) {
        let seat = Seat {
            number,
            has_formed: was_in == Some(last.generation),
            is_planned,
            last,
        };
        self.here.insert((seat.last.generation + 1, number));
        self.write(seat.gather(&self.state));
        self.processes.insert(number, At::Gathers(seat));
    }

    /// All worlds after one event.
    fn next(&self, faults: Faults) -> Vec<World> {
        let mut next = Vec::new();
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        if self.started < FIRST + faults.joins {
            add(&|w| {
                w.processes.insert(w.started, At::Asks);
                w.started += 1;
            });
        }
        // A launcher writes that its process has ended.
        for number in self.ended.iter().copied() {
            add(&|w| {
                w.ended.remove(&number);
                let why = String::new();
                w.write(Some(Event::Lost { number, why }));
            });
        }
        for (number, at) in &self.processes {
            let number = *number;
            if self.ends < faults.ends && self.processes.len() > 1 && *at != At::Left {
                add(&|w| {
                    w.ends += 1;
                    w.processes.remove(&number);
                    w.ended.insert(number);
                });
            }
            match at {
                At::Asks => self.joins(number, &mut add),
                At::Idle(group) => self.idle(number, group, faults, &mut add),
                At::Gathers(seat) => self.meets(number, seat, &mut add),
                // What has happened meanwhile is in the state.
                At::Proposes(seat, members, expected) => add(&|w| {
                    w.write(seat.form(&w.state, members, expected));
                    w.processes.insert(number, At::Gathers(seat.clone()));
                }),
                At::Forms(group, was_in) => self.forms(number, (group, *was_in), faults, &mut add),
                At::Left => {}
            }
        }
        next
    }

    fn joins(&self, number: usize, add: &mut impl FnMut(&dyn Fn(&mut World))) {
        let group = self.state.group(1);
        let met = |generation: u32| self.here.contains(&(generation, number));
        match group.map(|group| &group.formation) {
            Some(group) if group.members.contains(&number) && met(group.generation) => {
                add(&|w| w.connect(number, group.clone(), None));
            }
            _ if self.state.tag(number).is_none() => {
                assert!(!self.state.is_used(number), "{number} {self:?}");
                add(&|w| w.write(Some(Event::Asks { number, tag: 7 })));
            }
            Some(last) if group.is_some_and(|group| group.gathers) && !met(last.generation + 1) => {
                add(&|w| {
                    w.here.insert((last.generation + 1, number));
                });
            }
            _ => {}
        }
    }

    fn idle(
        &self,
        number: usize,
        group: &Formation,
        faults: Faults,
        add: &mut impl FnMut(&dyn Fn(&mut World)),
    ) {
        let generation = group.generation;
        let is_in = |at: &At| *at == At::Idle(group.clone());
        let in_group = |n: &usize| self.processes.get(n).is_some_and(is_in);
        let all_in = group.members.iter().all(in_group);
        let asked = self.state.requested(&group.members);
        if all_in && !asked.is_none() && !self.agreed.contains_key(&generation) {
            add(&|w| drop(w.agreed.insert(generation, asked.leaving.clone())));
        }
        if let Some(leaving) = self.agreed.get(&generation) {
            add(&|w| {
                // Those that stay write it as well.
                for number in leaving.iter().copied() {
                    let why = String::new();
                    w.write(Some(Event::Lost { number, why }));
                }
                match leaving.contains(&number) {
                    true => drop(w.processes.insert(number, At::Left)),
                    false => w.gathers(number, group.clone(), Some(generation), true),
                }
            });
        }
        // Another member has ended or left, or a link breaks.
        let is_broken = self.is_broken(group);
        if is_broken || self.breaks < faults.breaks {
            add(&|w| {
                w.breaks += usize::from(!is_broken);
                w.gathers(number, group.clone(), Some(generation), false);
            });
        }
        if self.leaves < faults.leaves && number > 0 && !self.state.is_leaving(number) {
            add(&|w| {
                w.leaves += 1;
                w.write(Some(Event::Leave { number }));
            });
        }
    }

    fn meets(&self, number: usize, seat: &Seat, add: &mut impl FnMut(&dyn Fn(&mut World))) {
        match seat.next(&self.state) {
            Next::In(group) => {
                let was_in = seat.has_formed.then_some(seat.last.generation);
                return add(&|w| w.connect(number, group.clone(), was_in));
            }
            Next::Without(_) => {
                assert!(number >= FIRST, "{number} is left out: {self:?}");
                // One that has formed the group before others gave up ends.
                let at = if seat.has_formed { At::Left } else { At::Asks };
                return add(&|w| drop(w.processes.insert(number, at.clone())));
            }
            Next::Lost(_) => {
                let is_leaving = self.state.is_leaving(number);
                assert!(is_leaving, "{number} lives: {self:?}");
                return add(&|w| drop(w.processes.insert(number, At::Left)));
            }
            Next::Open => {}
        }
        let expected = seat.expected(&self.state);
        let is_here = |n: &&usize| self.here.contains(&(seat.last.generation + 1, **n));
        if expected.members.iter().filter(is_here).count() < expected.members.len() {
            return;
        }
        // With the newcomers that have come by now: with all, or with those that came in time.
        let new = expected.newcomers.iter().filter(is_here);
        let members: Vec<usize> = expected.members.iter().chain(new).copied().collect();
        add(&|w| {
            let proposes = At::Proposes(seat.clone(), members.clone(), expected.clone());
            w.processes.insert(number, proposes);
        });
    }

    fn connect(&mut self, number: usize, group: Formation, was_in: Option<u32>) {
        self.connects.insert((group.generation, number));
        self.processes.insert(number, At::Forms(group, was_in));
    }

    fn forms(
        &self,
        number: usize,
        (group, was_in): (&Formation, Option<u32>),
        faults: Faults,
        add: &mut impl FnMut(&dyn Fn(&mut World)),
    ) {
        let generation = group.generation;
        let connects = |n: &usize| self.connects.contains(&(generation, *n));
        if group.members.iter().all(connects) {
            add(&|w| {
                let known = w.groups.insert(generation, group.members.clone());
                assert!(known.is_none_or(|known| known == group.members), "{w:?}");
                w.processes.insert(number, At::Idle(group.clone()));
            });
        }
        let is_broken = self.is_broken(group);
        if is_broken || self.breaks < faults.breaks {
            add(&|w| {
                w.breaks += usize::from(!is_broken);
                w.gathers(number, group.clone(), was_in, false);
            });
        }
    }

    /// Whether a member of `group` has ended, has left or is on its way to a later one.
    fn is_broken(&self, group: &Formation) -> bool {
        let generation = group.generation;
        let has_gone = |number: &usize| match self.processes.get(number) {
            None | Some(At::Left) => true,
            Some(At::Gathers(seat) | At::Proposes(seat, ..)) => seat.last.generation >= generation,
            Some(At::Forms(other, _) | At::Idle(other)) => other.generation > generation,
            Some(At::Asks) => false,
        };
        group.members.iter().any(has_gone)
    }

    /// Without further failures all that live come into one group, and those that are to leave have left.
    fn comes_to_rest(&self) {
        let faults = Faults {
            ends: self.ends,
            breaks: self.breaks,
            joins: self.started - FIRST,
            leaves: self.leaves,
        };
        let mut world = self.clone();
        for _ in 0..200 {
            let next = world.next(faults);
            let Some(last) = next.last().cloned() else {
                let mut groups = world.processes.values().filter_map(|at| match at {
                    At::Left => None,
                    At::Idle(group) => Some(group.clone()),
                    other => panic!("{other:?} waits: {world:?}\n\nfrom {self:?}"),
                });
                let first = groups.next();
                assert!(
                    groups.all(|group| Some(&group) == first.as_ref()),
                    "{world:?}"
                );
                let living = world.processes.iter().filter(|(_, at)| **at != At::Left);
                let living: Vec<usize> = living.map(|(number, _)| *number).collect();
                let mut members = first.map_or(Vec::new(), |group| group.members);
                members.sort_unstable();
                assert_eq!(members, living, "{world:?}");
                return;
            };
            world = last;
        }
        panic!("it never comes to rest: {self:?}");
    }
}

#[test]
fn there_is_one_group_whatever_comes_first() {
    let mut count = 0;
    for (ends, breaks, joins, leaves, length) in [
        (2, 0, 0, 0, 40),
        (1, 1, 0, 0, 40),
        (0, 1, 1, 0, 16),
        (1, 0, 1, 0, 14),
        (0, 0, 2, 0, 12),
        (0, 0, 1, 1, 14),
        (1, 0, 0, 1, 40),
        (2, 0, 1, 0, 11),
        (1, 1, 1, 1, 8),
    ] {
        let faults = Faults {
            ends,
            breaks,
            joins,
            leaves,
        };
        let mut states = vec![World::new()];
        let mut seen = HashSet::new();
        for _ in 0..length {
            let mut next = Vec::new();
            for world in states.iter().flat_map(|world| world.next(faults)) {
                if seen.insert(format!("{world:?}")) {
                    world.comes_to_rest();
                    next.push(world);
                }
            }
            states = next;
        }
        eprintln!("{ends} {breaks} {joins} {leaves}: {}", seen.len());
        count += seen.len();
    }
    assert!(count > 10_000, "{count}");
}

/// The log is never shortened. Its size after 1,000 losses whose ranks were replaced, as `docs/design/elastic.md` has it, and
/// the requests of a process that reads it from the start.
#[test]
fn the_log_of_a_thousand_losses_is_small() {
    for (ranks, kilobytes) in [(8, 1_250), (128, 2_670)] {
        let store = Arc::new(MemStore::new());
        let mut log = Log::new(store.clone());
        let mut events = 0;
        let mut bytes = 0;
        let mut write = |event: Event| {
            let text = serde_json::to_vec(&event).unwrap();
            bytes += text.len() + format!("job/log/{events}").len();
            events += 1;
            log.append(|_| Some(event.clone())).unwrap();
        };
        let measured = Costs {
            sync_s: 5.123_456_789e-6,
            core_bytes_per_s: 10_123_456_789.123,
            wire_latency_s: 30.123_456_789e-6,
            wire_message_s: 3.123_456_789e-6,
            wire_bytes_per_s: 1_250_123_456.789,
        };
        let group = |generation, members: &Vec<usize>| Formation {
            job: u64::MAX - 1,
            costs: measured,
            ..formation(generation, members.clone())
        };
        let mut members: Vec<usize> = (0..ranks).collect();
        write(Event::Elastic { can_grow: true });
        for n in 0..1_000 {
            let lost = members.remove(n % ranks);
            let why =
                format!("rank {lost} (node 1, pid 123456, host worker-17) was killed by SIGKILL");
            let number = ranks + n;
            let generation = 2 * n as u32;
            write(Event::Lost { number: lost, why });
            write(Event::Started {
                launcher: 1,
                ranks: 1,
            });
            let next = group(generation + 1, &members);
            let is_planned = false;
            write(Event::Formed {
                group: next.clone(),
                is_planned,
            });
            write(Event::Asks {
                number,
                tag: u64::MAX,
            });
            write(Event::Gather { group: next });
            members.push(number);
            let (group, is_planned) = (group(generation + 2, &members), true);
            write(Event::Formed { group, is_planned });
            for took_part in [false, true] {
                write(Event::Joined { number, took_part });
            }
        }
        assert_eq!(events, 8_001);
        assert!(
            (kilobytes - 60..=kilobytes).contains(&(bytes / 1_000)),
            "{bytes}"
        );
        let mut reader = Log::new(store);
        let state = reader.read().unwrap();
        assert_eq!(state.numbers(ranks), 0..ranks + 1_000);
        assert_eq!(state, log.state());
    }
}
