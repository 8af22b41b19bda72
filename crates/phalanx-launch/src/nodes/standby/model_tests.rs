//! The protocol of this module as a state machine, whose states are explored in all orders of events: writes, messages,
//! crashes, and launchers that take another one for lost at any time, rightly or not, which stands for broken networks
//! and stopped processes. It decides by [`may_continue`] and [`may_drop`], as the protocol does.
//!
//! What is not in it: more than three launchers, launchers that have no server, and time. It finds what must not happen, and not
//! whether something happens at last.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::{Id, Member, may_continue, may_drop};

/// Most terms after the first one.
const TERMS: u8 = 3;
/// How many values clients write.
const WRITES: u8 = 1;

/// A set of launchers, or of writes: a bit each.
type Set = u8;

/// An entry of the store, in the order in which the copies get them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Entry {
    /// What a client wrote.
    Write(u8),
    /// This launcher is a member from now on.
    Joined(usize),
    /// This launcher was dropped, or had the store before.
    Dropped(usize),
    /// Number and host.
    Term(u8, usize),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Role {
    /// Has the store.
    Host {
        /// Launchers whose copies responses wait for, and how many entries each has acknowledged.
        registered: Set,
        acknowledged: Vec<usize>,
        /// How many entries all copies must have before anything is answered.
        least: usize,
        /// Those that it refuses.
        dropped: Set,
        /// Those of them that are counted no more, since all others know.
        out: Set,
        ended: Set,
        /// The members when it was elected.
        voters: Set,
    },
    /// No member yet.
    Outside,
    /// A member that does not follow yet.
    Joining {
        host: usize,
    },
    Follower {
        host: usize,
    },
    /// Has lost the host.
    Elector {
        lost: usize,
        ended: Set,
        /// The host has ended, and had not dropped this launcher: it was not silent before.
        saw_end: bool,
        has_copy: bool,
        is_candidate: bool,
        /// Who follows this candidate, or did.
        registered: Set,
        /// The candidate or host that it follows.
        leader: Option<usize>,
    },
    Ended {
        /// Whom it followed then.
        host: Option<usize>,
        /// Who followed it then, if it was a host.
        followers: Set,
        /// It has announced to its host that it would.
        has_retired: bool,
    },
}

impl Role {
    fn has_ended(&self) -> bool {
        matches!(self, Role::Ended { .. })
    }

    /// This role, when its launcher ends.
    fn end(&self, has_retired: bool) -> Role {
        let host = match self {
            Role::Follower { host } => Some(*host),
            _ => None,
        };
        let followers = match self {
            Role::Host { registered, .. } => *registered,
            _ => 0,
        };
        Role::Ended {
            host,
            followers,
            has_retired,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Launcher {
    role: Role,
    /// The entries of its copy, or of its store.
    log: Vec<Entry>,
}

impl Launcher {
    /// This host continues without `other`.
    fn drop(&mut self, other: usize, rules: Rules) {
        self.log.push(Entry::Dropped(other));
        if let Role::Host {
            registered,
            least,
            dropped,
            ..
        } = &mut self.role
        {
            *registered &= !(1 << other);
            *dropped |= 1 << other;
            if rules.tells_first {
                *least = self.log.len();
            }
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    launchers: Vec<Launcher>,
    writes: u8,
    /// The writes that a client has an answer to, and the launchers that must keep each.
    answered: Set,
    keepers: [Set; WRITES as usize],
}

/// What the protocol does; a model without one of these finds what it is for.
#[derive(Clone, Copy)]
struct Rules {
    /// Nothing is answered before all copies know of a dropped launcher, or of the new host.
    tells_first: bool,
    /// A launcher without a copy follows no candidate.
    votes_with_copy: bool,
    /// An election counts ended launchers only after the host was seen to end.
    minds_silence: bool,
    /// Only launchers that follow, and were not dropped, are those that are left.
    asks_followers: bool,
}

const PROTOCOL: Rules = Rules {
    tells_first: true,
    votes_with_copy: true,
    minds_silence: true,
    asks_followers: true,
};

fn each(set: Set) -> impl Iterator<Item = usize> {
    (0..8).filter(move |i| set >> i & 1 == 1)
}

fn ids(set: Set) -> BTreeSet<Id> {
    each(set).collect()
}

fn term_of(log: &[Entry]) -> (u8, usize) {
    let terms = log.iter().rev().filter_map(|entry| match entry {
        Entry::Term(number, host) => Some((*number, *host)),
        _ => None,
    });
    terms.into_iter().next().unwrap_or((0, 0))
}

fn dropped_in(log: &[Entry]) -> Set {
    log.iter().fold(0, |set, entry| match entry {
        Entry::Dropped(id) => set | 1 << id,
        _ => set,
    })
}

fn joined_in(log: &[Entry]) -> Set {
    log.iter().fold(0, |set, entry| match entry {
        Entry::Joined(id) => set | 1 << id,
        _ => set,
    })
}

fn writes_in(log: &[Entry]) -> Set {
    log.iter().fold(0, |set, entry| match entry {
        Entry::Write(n) => set | 1 << n,
        _ => set,
    })
}

struct Model {
    rules: Rules,
    /// The ranks of each launcher.
    ranks: Vec<usize>,
    /// The launchers that come later.
    outside: Set,
}

type Steps = Vec<(String, State)>;

impl Model {
    fn all(&self) -> Set {
        (1 << self.ranks.len()) - 1
    }

    fn members(&self, set: Set) -> Vec<Member> {
        let members = each(set).map(|id| Member {
            id,
            name: String::new(),
            ranks: self.ranks[id],
            at: None,
        });
        members.collect()
    }

    /// Those that are members by `log`.
    fn living(&self, log: &[Entry]) -> Set {
        (self.all() & !self.outside | joined_in(log)) & !dropped_in(log)
    }

    fn first(&self) -> State {
        let count = self.ranks.len();
        let host = Role::Host {
            registered: 0,
            acknowledged: vec![0; count],
            least: 0,
            dropped: 0,
            out: 0,
            ended: 0,
            voters: 0,
        };
        let roles = (0..count).map(|id| match id {
            0 => host.clone(),
            _ if self.outside >> id & 1 == 1 => Role::Outside,
            _ => Role::Joining { host: 0 },
        });
        State {
            launchers: roles
                .map(|role| Launcher {
                    role,
                    log: Vec::new(),
                })
                .collect(),
            writes: 0,
            answered: 0,
            keepers: [0; WRITES as usize],
        }
    }

    /// All that may happen in `state`; what must not, as an error.
    fn steps(&self, state: &State) -> Result<Steps, String> {
        let mut steps = Vec::new();
        for (id, launcher) in state.launchers.iter().enumerate() {
            match &launcher.role {
                Role::Ended { .. } | Role::Outside => continue,
                Role::Host { .. } => self.host(state, id, &mut steps)?,
                Role::Joining { host } => {
                    self.begin_to_follow(state, id, *host, &mut steps);
                    steps.push(lose_host(state, id, *host, [false, false]));
                }
                Role::Follower { host } => {
                    steps.push(lose_host(state, id, *host, [true, false]));
                    let role = &state.launchers[*host].role;
                    if matches!(role, Role::Ended { followers, .. } if followers >> id & 1 == 1) {
                        steps.push(lose_host(state, id, *host, [true, true]));
                    }
                    let mut next = state.clone();
                    next.launchers[id].role = launcher.role.end(true);
                    steps.push((format!("{id} retires"), next));
                }
                Role::Elector { .. } => self.elector(state, id, &mut steps)?,
            }
            let mut next = state.clone();
            next.launchers[id].role = launcher.role.end(false);
            steps.push((format!("{id} ends"), next));
        }
        Ok(steps)
    }

    fn begin_to_follow(&self, state: &State, id: usize, host: usize, steps: &mut Steps) {
        let mut next = state.clone();
        let Launcher { role, log } = &mut next.launchers[host];
        if let Role::Host {
            registered,
            acknowledged,
            dropped,
            ..
        } = role
            && *dropped >> id & 1 == 0
        {
            *registered |= 1 << id;
            acknowledged[id] = log.len();
            let log = log.clone();
            next.launchers[id] = Launcher {
                role: Role::Follower { host },
                log,
            };
            steps.push((format!("{id} begins to follow {host}"), next));
        }
    }

    fn host(&self, state: &State, id: usize, steps: &mut Steps) -> Result<(), String> {
        let Launcher { role, log } = &state.launchers[id];
        let Role::Host {
            registered,
            acknowledged,
            least,
            out,
            ended,
            voters,
            dropped,
        } = role
        else {
            return Ok(());
        };
        for other in each(self.outside & !joined_in(log)) {
            let mut next = state.clone();
            next.launchers[id].log.push(Entry::Joined(other));
            steps.push((format!("{id} admits {other}"), next));
        }
        if state.writes < WRITES {
            let mut next = state.clone();
            next.launchers[id].log.push(Entry::Write(state.writes));
            next.writes += 1;
            steps.push((format!("{} is written at {id}", state.writes), next));
        }
        for other in each(*registered) {
            let Some(entry) = log.get(acknowledged[other]) else {
                continue;
            };
            let mut next = state.clone();
            if let Role::Host { acknowledged, .. } = &mut next.launchers[id].role {
                acknowledged[other] += 1;
            }
            let follower = &mut next.launchers[other];
            match &follower.role {
                Role::Follower { host } if *host == id => follower.log.push(*entry),
                Role::Elector { leader, .. } if *leader == Some(id) => {
                    if matches!(entry, Entry::Term(_, host) if *host == id) {
                        follower.log = log[..=acknowledged[other]].to_vec();
                        follower.role = Role::Follower { host: id };
                    }
                }
                _ => continue,
            }
            steps.push((format!("{other} gets {entry:?} from {id}"), next));
        }
        let by_all = each(*registered).map(|other| acknowledged[other]).min();
        let by_all = by_all.unwrap_or(log.len());
        if by_all >= *least {
            for other in each(joined_in(&log[..by_all])) {
                if state.launchers[other].role == Role::Outside {
                    let mut next = state.clone();
                    // It asks which launcher has the store.
                    let term = log.iter().rev().find(|e| matches!(e, Entry::Term(..)));
                    next.launchers[other] = Launcher {
                        role: Role::Joining { host: id },
                        log: term.copied().into_iter().collect(),
                    };
                    steps.push((
                        format!("{other} learns from {id} that it is a member"),
                        next,
                    ));
                }
            }
            let known = dropped_in(&log[..by_all]);
            if known & !out != 0 {
                let mut next = state.clone();
                if let Role::Host { out, .. } = &mut next.launchers[id].role {
                    *out |= known;
                }
                steps.push((format!("all followers of {id} know who was dropped"), next));
            }
            let answer = each(writes_in(&log[..by_all]) & !state.answered);
            for write in answer {
                let lacks = |launcher: &Launcher| {
                    let is_newer = term_of(&launcher.log).0 > term_of(log).0;
                    let is_host = matches!(launcher.role, Role::Host { .. });
                    is_host && is_newer && writes_in(&launcher.log) >> write & 1 == 0
                };
                if let Some(newer) = state.launchers.iter().position(lacks) {
                    return Err(format!(
                        "{id} answers write {write}, which {newer} continues without"
                    ));
                }
                let mut next = state.clone();
                next.answered |= 1 << write;
                next.keepers[write] = registered | 1 << id;
                steps.push((format!("{id} answers write {write}"), next));
            }
        }
        for other in each(*registered) {
            let role = &state.launchers[other].role;
            if matches!(role, Role::Ended { host, has_retired: true, .. } if *host == Some(id)) {
                let mut next = state.clone();
                next.launchers[id].drop(other, self.rules);
                steps.push((format!("{id} hears that {other} has retired"), next));
            }
        }
        let living = (self.all() & !self.outside | joined_in(log)) & !out;
        for other in each((living | registered) & !dropped & !(1 << id)) {
            // What the others are silent of is up to the network.
            for silent in 0..=self.all() {
                let role = &state.launchers[other].role;
                let follows = matches!(role, Role::Ended { host, .. } if *host == Some(id));
                let has_ended = follows && silent == 0;
                if silent >> id & 1 == 1 || (silent >> other & 1 == 0 && !has_ended) {
                    continue;
                }
                let ended = ended | Set::from(has_ended) << other;
                let followers = match self.rules.asks_followers {
                    true => *registered,
                    false => living,
                };
                let sets = [followers, voters | dropped, silent, ended].map(ids);
                let goes_on = may_drop(
                    (id, other),
                    &self.members(living),
                    [&sets[0], &sets[1], &sets[2], &sets[3]],
                );
                // One that has ended has followed no other host before.
                if !goes_on && !has_ended {
                    continue;
                }
                let mut next = state.clone();
                if let Role::Host { ended: known, .. } = &mut next.launchers[id].role {
                    *known = ended;
                }
                next.launchers[id].drop(other, self.rules);
                steps.push((format!("{id} drops {other}, {silent:b} are silent"), next));
            }
        }
        Ok(())
    }

    fn elector(&self, state: &State, id: usize, steps: &mut Steps) -> Result<(), String> {
        let Launcher { role, log } = &state.launchers[id];
        let Role::Elector {
            lost,
            ended,
            saw_end,
            has_copy,
            is_candidate,
            registered,
            leader,
        } = role
        else {
            return Ok(());
        };
        if let Some(leader) = leader {
            let mut next = state.clone();
            follow(&mut next, id, None);
            steps.push((format!("{id} follows {leader} no more"), next));
            return Ok(());
        }
        let living = self.living(log);
        for other in each(living & !ended & !(1 << id)) {
            let their = &state.launchers[other];
            let is_refused = match &their.role {
                Role::Host { dropped, .. } => dropped >> id & 1 == 1,
                _ => dropped_in(&their.log) >> id & 1 == 1,
            };
            let mut next = state.clone();
            match &their.role {
                Role::Ended { .. } => {
                    if let Role::Elector { ended, .. } = &mut next.launchers[id].role {
                        *ended |= 1 << other;
                    }
                    steps.push((format!("{id} sees that {other} has ended"), next));
                    continue;
                }
                Role::Host { .. } => {}
                Role::Elector {
                    is_candidate: true, ..
                } if other < id && (*has_copy || !self.rules.votes_with_copy) => {}
                _ => continue,
            }
            let (number, host) = term_of(&their.log);
            if is_refused || other == *lost || number < term_of(log).0 {
                continue;
            }
            // A candidate that follows another one lets its own followers go.
            for follower in 0..self.ranks.len() {
                let role = &next.launchers[follower].role;
                if matches!(role, Role::Elector { leader, .. } if *leader == Some(id)) {
                    follow(&mut next, follower, None);
                }
            }
            if let Role::Elector {
                is_candidate,
                registered,
                ..
            } = &mut next.launchers[id].role
            {
                (*is_candidate, *registered) = (false, 0);
            }
            match &mut next.launchers[other].role {
                Role::Host {
                    registered,
                    acknowledged,
                    ..
                } => {
                    *registered |= 1 << id;
                    acknowledged[id] = their.log.len();
                }
                Role::Elector { registered, .. } => *registered |= 1 << id,
                _ => {}
            }
            if host == other && number > term_of(log).0 {
                next.launchers[id].log.clone_from(&their.log);
                next.launchers[id].role = Role::Follower { host };
            } else {
                follow(&mut next, id, Some(other));
            }
            steps.push((format!("{id} follows {other}"), next));
        }
        if !has_copy {
            return Ok(());
        }
        if !is_candidate {
            let mut next = state.clone();
            if let Role::Elector { is_candidate, .. } = &mut next.launchers[id].role {
                *is_candidate = true;
            }
            steps.push((format!("{id} is a candidate"), next));
            return Ok(());
        }
        let follows = |other: &usize| {
            let role = &state.launchers[*other].role;
            matches!(role, Role::Elector { leader, .. } if *leader == Some(id))
        };
        let group = each(*registered).filter(follows);
        let group = group.fold(1 << id, |group: Set, other| group | 1 << other);
        let term = term_of(log).0 + 1;
        let ended = match *saw_end || !self.rules.minds_silence {
            true => *ended,
            false => 0,
        };
        let counted = self.members(living);
        if term > TERMS || !may_continue(&counted, &ids(ended), &ids(group)) {
            return Ok(());
        }
        for write in each(state.answered & !writes_in(log)) {
            let is_alive = |other: &usize| !state.launchers[*other].role.has_ended();
            if let Some(keeper) = each(state.keepers[write]).find(is_alive) {
                return Err(format!(
                    "{id} continues without write {write}, which {keeper} has"
                ));
            }
        }
        let mut next = state.clone();
        let new = &mut next.launchers[id];
        new.log.push(Entry::Dropped(*lost));
        let copied = new.log.len();
        new.log.push(Entry::Term(term, id));
        new.role = Role::Host {
            registered: *registered,
            acknowledged: vec![copied; self.ranks.len()],
            least: if self.rules.tells_first {
                copied + 1
            } else {
                0
            },
            dropped: dropped_in(&new.log),
            out: dropped_in(log),
            ended,
            voters: living,
        };
        steps.push((format!("{id} opens with {group:b}"), next));
        Ok(())
    }

    /// Explores all states. Returns how many of them have a host of each term that has answered everything; or the events that
    /// lead to what must not be.
    fn explore(&self) -> Explored {
        let mut found = HashMap::from([(self.first(), 0)]);
        let mut from = vec![(usize::MAX, String::new())];
        let mut hosts = [0; TERMS as usize + 1];
        let mut next = VecDeque::from([(0, self.first())]);
        while let Some((number, state)) = next.pop_front() {
            for launcher in &state.launchers {
                if matches!(launcher.role, Role::Host { .. }) && state.answered == (1 << WRITES) - 1
                {
                    hosts[usize::from(term_of(&launcher.log).0)] += 1;
                }
            }
            let steps = self.steps(&state).map_err(|what| {
                let (mut events, mut at) = (vec![what], number);
                while at != 0 {
                    let (before, event) = &from[at];
                    events.push(event.clone());
                    at = *before;
                }
                events.reverse();
                events.join("\n")
            })?;
            for (event, new) in steps {
                let count = found.len();
                if !found.contains_key(&new) {
                    found.insert(new.clone(), count);
                    from.push((number, event));
                    next.push_back((count, new));
                }
            }
        }
        Ok(hosts)
    }
}

/// Launcher `id` has lost its host.
fn lose_host(
    state: &State,
    id: usize,
    host: usize,
    [has_copy, saw_end]: [bool; 2],
) -> (String, State) {
    let mut next = state.clone();
    next.launchers[id].role = Role::Elector {
        lost: host,
        ended: 0,
        saw_end,
        has_copy,
        is_candidate: false,
        registered: 0,
        leader: None,
    };
    let how = if saw_end {
        "sees the end of"
    } else {
        "takes for lost"
    };
    (format!("{id} {how} {host}"), next)
}

fn follow(state: &mut State, id: usize, whom: Option<usize>) {
    if let Role::Elector { leader, .. } = &mut state.launchers[id].role {
        *leader = whom;
    }
}

/// Ranks of three launchers: equal, and the most at each of them, with and without a majority of its own.
const RANKS: [[usize; 3]; 6] = [
    [1, 1, 1],
    [2, 1, 1],
    [1, 2, 1],
    [1, 1, 2],
    [1, 3, 1],
    [1, 1, 3],
];

type Explored = Result<[usize; TERMS as usize + 1], String>;

/// The last `later` launchers are no members at first.
fn explore(rules: Rules, ranks: &[usize], later: usize) -> Explored {
    let ranks = ranks.to_vec();
    let first = (1 << (ranks.len() - later)) - 1;
    let outside = ((1 << ranks.len()) - 1) & !first;
    Model {
        rules,
        ranks,
        outside,
    }
    .explore()
}

/// No answer that a client got is lost while one of those launchers is alive that had it when it was given, and a host
/// with a newer term lacks nothing that an older one answers.
#[test]
fn no_order_of_events_loses_an_answer_or_makes_two_stores() {
    for (ranks, later) in RANKS.iter().flat_map(|ranks| [(ranks, 0), (ranks, 1)]) {
        let explored = explore(PROTOCOL, ranks, later);
        let hosts = explored.unwrap_or_else(|events| panic!("{ranks:?}\n{events}"));
        assert!(
            hosts[..3].iter().all(|count| *count > 0),
            "{ranks:?}: {hosts:?}"
        );
    }
}

/// Each rule is needed.
#[test]
fn without_one_of_its_rules_the_model_fails() {
    let broken: [fn(&mut Rules); 4] = [
        |rules| rules.tells_first = false,
        |rules| rules.votes_with_copy = false,
        |rules| rules.minds_silence = false,
        |rules| rules.asks_followers = false,
    ];
    for (rule, breaks) in broken.into_iter().enumerate() {
        let mut rules = PROTOCOL;
        breaks(&mut rules);
        let cases = RANKS.iter().flat_map(|ranks| [(ranks, 0), (ranks, 1)]);
        let fails = cases.map(|(ranks, later)| explore(rules, ranks, later).is_err());
        assert!(fails.into_iter().any(|fails| fails), "rule {rule}");
    }
}
