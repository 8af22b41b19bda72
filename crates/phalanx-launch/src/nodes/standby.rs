//! The store moves when the launcher that hosts it is lost, if ranks continue in place (`--elastic`).
//!
//! Every other launcher keeps a copy of the store, and has a closed server. The store sends a response only after each copy
//! has the writes that it depends on. When the host of the store is lost, the remaining launchers elect another one: the
//! lowest that can be reached asks the others to follow it, and opens its server once it [may](may_continue). A launcher
//! follows another candidate only after it has lost the host, and one at a time.
//!
//! | file or key    | value                                            | written by        |
//! |----------------|--------------------------------------------------|-------------------|
//! | `launch/store` | how often the store has moved, and the number of the launcher that hosts it | it, once it does  |
//! | `launch/dropped/ID` | the store does not wait for launcher ID any more, and its copy must not become the store | the host of the store |
//! | `launch/moved` | in a new store of node 0: the address of the job's | the host of the store |
//! | a file of each launcher | the address of the store, for its ranks and itself | its launcher |
//!
//! A launcher that leaves announces it. The host of the store drops a lost launcher only if those that follow it may continue.
//! Before the store answers anything else, all followers know which launcher was dropped, and which is the new host.
//! `model_tests.rs` tries all orders of events.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use phalanx_comm::PortRange;
use phalanx_member::Replayed;
use phalanx_store::{Follower, ServerState, Store, TcpServer, TcpStore};
use phalanx_wire::Token;

use super::membership::{Attempt, Id, Launchers};
use super::pulse::{BEATEN, GONE, Heartbeats, raise_priority};
use super::silence::{BEAT, LOOK};
use super::verdict_of_lost;
use crate::report::JobFailure;
use crate::{Event, lock, say};

/// Says which launcher hosts the store, where it is not node 0.
pub(super) const HOST_KEY: &str = "launch/store";
/// See the table above.
const DROPPED: &str = "launch/dropped/";
/// In the store of a restarted launcher of node 0: the address of the job's store, which it is to join.
pub(super) const MOVED_KEY: &str = "launch/moved";
/// How often the host of the store checks whether there is such a store.
const LOOK_BACK: Duration = Duration::from_millis(500);
/// How long one attempt to reach another launcher takes.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long an election takes, beyond twice the time after which a silent launcher is lost.
const ELECTION: Duration = Duration::from_secs(4);

/// A launcher that may host the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) id: Id,
    /// The node, for messages.
    name: String,
    /// How many ranks it has started.
    pub(super) ranks: usize,
    /// Its server; `None`: it has none.
    pub(super) at: Option<String>,
}

/// Whether `group` may continue without the rest of `members`, which may be alive elsewhere: it has more than half of the
/// ranks, or half of them and the lowest, or all others have `ended`. Two groups without a common living member never may
/// both.
///
/// Ranks of launchers that have ended still count, because these may have been part of another group before.
pub(super) fn may_continue(members: &[Member], ended: &BTreeSet<Id>, group: &BTreeSet<Id>) -> bool {
    let all: usize = members.iter().map(|member| member.ranks).sum();
    let own = members.iter().filter(|member| group.contains(&member.id));
    let own: usize = own.map(|member| member.ranks).sum();
    let lowest = members.iter().map(|member| member.id).min();
    2 * own > all
        || (2 * own == all && lowest.is_some_and(|lowest| group.contains(&lowest)))
        || (members.iter()).all(|member| group.contains(&member.id) || ended.contains(&member.id))
}

/// Whether the host of the store, `me`, may drop launcher `id`: if its `followers` that are not `silent` and have not `ended`
/// may continue. Of the `living`, followers and those that `had_copy` count: they may have a copy.
fn may_drop(
    (me, id): (Id, Id),
    living: &[Member],
    [followers, had_copy, silent, ended]: [&BTreeSet<Id>; 4],
) -> bool {
    let has_copy =
        |other: &Id| *other == me || followers.contains(other) || had_copy.contains(other);
    let counted = living.iter().filter(|member| has_copy(&member.id));
    let counted: Vec<Member> = counted.cloned().collect();
    let is_left = |other: &Id| *other != id && !silent.contains(other) && !ended.contains(other);
    let left = followers.iter().copied().chain([me]).filter(is_left);
    may_continue(&counted, ended, &left.collect())
}

fn dropped_key(id: Id) -> String {
    format!("{DROPPED}{id}")
}

/// The launchers that are lost or dropped in `entries` of the store.
fn dropped_in(entries: &[(String, Vec<u8>)]) -> Vec<u64> {
    let ids = entries.iter();
    let ids = ids.filter_map(|(key, _)| key.strip_prefix(DROPPED)?.parse().ok());
    let get = |key: &str| entries.iter().find(|(other, _)| other == key);
    let lost = launchers_in(|key| get(key).map(|(_, value)| value.as_slice()));
    let lost = lost.state().lost().into_iter();
    ids.chain(lost.map(|id| id as u64)).collect()
}

/// The state of the launchers after the events that `get` has.
fn launchers_in<'a>(get: impl Fn(&str) -> Option<&'a [u8]>) -> Replayed<Launchers> {
    let mut all = Replayed::default();
    // Reading ends at an event that cannot be parsed.
    let _ = all.read(get);
    all
}

/// How long an election takes where a silent launcher is lost after `lost_after`.
pub(super) fn longest_election(lost_after: Duration) -> Duration {
    2 * lost_after + ELECTION
}

/// The closed server of a launcher, in `ports`; `None`: no port is free.
pub(super) fn bind(ip: IpAddr, ports: Option<PortRange>, token: &Token) -> Option<TcpServer> {
    let bind = |port| TcpServer::bind_closed((ip, port).into(), token.clone()).ok();
    let server = match ports {
        None => bind(0),
        Some(ports) => (ports.first()..=ports.last()).rev().find_map(bind),
    };
    server.inspect(leave_out_beats)
}

/// Heartbeats are not copied: they begin again where the store has moved, and must not wait for copies.
pub(super) fn leave_out_beats(server: &TcpServer) {
    server.leave_out(BEATEN);
    server.leave_out(GONE);
}

/// The launchers of the attempt that runs.
#[derive(Debug, Default)]
pub(super) struct Roster {
    /// The address of node 0.
    first: String,
    pub(super) members: Vec<Member>,
    /// The launcher that hosts the store, and how often the store had moved when this launcher asked.
    pub(super) host: Id,
    term: u64,
    /// Launchers that are lost according to the store.
    pub(super) lost: BTreeSet<Id>,
    /// Launchers that were dropped according to the copy; on the host, those of which all followers know it.
    pub(super) dropped: BTreeSet<Id>,
    /// On the host, the launchers that it has dropped.
    drops: BTreeSet<Id>,
    /// On an elected host, the launchers that were living at the election.
    voters: BTreeSet<Id>,
    /// On the host, the launchers that are known to have ended.
    ended: BTreeSet<Id>,
}

impl Roster {
    /// An empty roster; node 0 is reached at `first`.
    pub(super) fn new(first: &str) -> Roster {
        Roster {
            first: first.to_owned(),
            ..Roster::default()
        }
    }

    /// Takes the launchers of `attempt`.
    pub(super) fn enter(&mut self, attempt: &Attempt) {
        let members = attempt.launchers().map(|(id, info)| Member {
            id,
            name: attempt.name_of(id),
            ranks: info.local_ranks,
            at: match id {
                0 => Some(self.first.clone()),
                _ => info.standby.map(|at| at.to_string()),
            },
        });
        self.members = members.collect();
    }

    /// Takes what the copy of the store has.
    fn read(&mut self, all: &Launchers, copy: &Follower) {
        if let Some(attempt) = all.attempt() {
            self.enter(attempt);
        }
        self.lost = all.lost();
        let members = self.members.iter().map(|member| member.id);
        let is_dropped = |id: &Id| copy.get(&dropped_key(*id)).is_some();
        self.dropped = members.filter(is_dropped).collect();
    }

    /// Takes the host of the store from the value of [`HOST_KEY`].
    pub(super) fn note_host(&mut self, stored: Option<Vec<u8>>) {
        let term = Term::stored(stored.as_deref());
        (self.host, self.term) = (term.host, term.number);
    }

    /// The verdict of launcher `me` that launcher `id` is lost after this silence.
    fn verdict_of_lost(&self, me: Id, id: Id, silent: Duration) -> JobFailure {
        let node = |id| self.members.iter().position(|member| member.id == id);
        let name = node(id).map(|node| self.members[node].name.clone());
        let name = name.unwrap_or_else(|| "another node".to_owned());
        verdict_of_lost(&name, node(me).unwrap_or(0), silent)
    }

    pub(super) fn address_of(&self, id: Id) -> Option<String> {
        let member = self.members.iter().find(|member| member.id == id)?;
        member.at.clone()
    }

    /// The launchers that are not lost or dropped, and have a server.
    fn living(&self) -> Vec<Member> {
        let all = self.members.iter().filter(|member| member.at.is_some());
        let is_out = |id| self.lost.contains(id) || self.dropped.contains(id);
        all.filter(|member| !is_out(&member.id)).cloned().collect()
    }
}

/// On the host of the store: decides which launchers may be dropped.
pub(super) struct Quorum {
    pub(super) server: Arc<TcpServer>,
    pub(super) roster: Arc<Mutex<Roster>>,
    pub(super) token: Token,
    pub(super) id: Id,
}

impl Quorum {
    /// Notes which launchers were dropped, if all followers know.
    pub(super) fn note_dropped(&self) {
        let keys = self.server.known_keys(DROPPED).into_iter().flatten();
        let ids = keys.filter_map(|key| key.strip_prefix(DROPPED)?.parse::<Id>().ok());
        lock(&self.roster).dropped.extend(ids);
    }

    /// Drops the launchers whose hosts report that they have ended, and returns them. They did not follow another host of the
    /// store before, so no vote is needed.
    pub(super) fn drop_ended(&self) -> Vec<Id> {
        let broken = self.server.broken_followers().into_iter();
        let ended = broken.map(|id| id as Id).filter(|id| {
            let at = lock(&self.roster).address_of(*id);
            let state = |at: String| TcpStore::state_of(&at, self.token.clone(), ATTEMPT);
            at.is_some_and(|at| state(at) == ServerState::Ended)
        });
        let ended: Vec<Id> = ended.collect();
        for id in &ended {
            let mut roster = lock(&self.roster);
            roster.ended.insert(*id);
            roster.drops.insert(*id);
            self.server.drop_follower(*id as u64, &dropped_key(*id));
        }
        ended
    }

    /// Drops launcher `id`, if the followers may continue without it and all that are `silent`.
    pub(super) fn drop(&self, id: Id, silent: &BTreeSet<Id>) -> bool {
        self.note_dropped();
        // Held until `id` is dropped: two threads must not each count the launcher that the other one drops.
        let mut roster = lock(&self.roster);
        if roster.drops.contains(&id) {
            return true;
        }
        let followers = self.server.registered_followers().into_iter();
        let followers: BTreeSet<Id> = followers.map(|id| id as Id).collect();
        let had_copy = roster.voters.union(&roster.drops).copied().collect();
        let sets = [&followers, &had_copy, silent, &roster.ended];
        let may = may_drop((self.id, id), &roster.living(), sets);
        if may {
            self.server.drop_follower(id as u64, &dropped_key(id));
            roster.drops.insert(id);
        }
        may
    }
}

/// The store has moved to another launcher.
#[derive(Debug)]
pub struct Moved {
    /// Its number.
    pub host: Id,
    /// The others that have ended.
    pub ended: Vec<Id>,
}

/// On another launcher: follows the host of the store. When the host is lost, takes its place or follows the next one.
pub(super) struct Standby {
    pub(super) server: Arc<TcpServer>,
    pub(super) token: Token,
    pub(super) id: Id,
    pub(super) roster: Arc<Mutex<Roster>>,
    /// The silence of the host.
    pub(super) beats: Arc<Heartbeats>,
    /// Read by the ranks of this launcher, and by its own client of the store.
    pub(super) file: PathBuf,
    pub(super) stop: Arc<AtomicBool>,
}

/// The launcher that hosts the store, as the store has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Term {
    /// How often the store has moved.
    number: u64,
    host: Id,
}

impl Term {
    fn stored(value: Option<&[u8]>) -> Term {
        let text = value.and_then(|text| std::str::from_utf8(text).ok());
        let parts = text.and_then(|text| text.split_once(' '));
        let term = parts.and_then(|(number, host)| {
            let (number, host) = (number.parse().ok()?, host.parse().ok()?);
            Some(Term { number, host })
        });
        term.unwrap_or_default()
    }

    fn of(copy: &Follower) -> Term {
        Term::stored(copy.get(HOST_KEY))
    }
}

/// An election, as one launcher takes part in it.
struct Election {
    /// The host that is lost, and the number of its server.
    lost: Id,
    instance: Option<u16>,
    /// The content of the copy; without it, this launcher cannot be the host.
    entries: Option<Vec<(String, Vec<u8>)>>,
    term: u64,
    ended: BTreeSet<Id>,
    /// The host was seen to end. Otherwise it may have dropped this launcher and accepted others before it ended. Then more
    /// launchers may live than this one knows, so that the end of those that it knows means nothing.
    saw_end: bool,
    until: Instant,
}

impl Election {
    /// The ended launchers that count.
    fn counted(&self) -> &BTreeSet<Id> {
        static NONE: BTreeSet<Id> = BTreeSet::new();
        if self.saw_end { &self.ended } else { &NONE }
    }
}

impl Standby {
    /// Follows until the end of the job, and calls `send` each time the store has moved. Returns when this launcher hosts the
    /// store, or cannot continue.
    pub(super) fn run(&self, send: impl Fn(Event)) {
        raise_priority();
        if let Some(copy) = self.follow_all(send) {
            copy.retire(&dropped_key(self.id));
        }
    }

    /// As [`run`](Self::run). Returns the copy at the end of the job.
    fn follow_all(&self, send: impl Fn(Event)) -> Option<Follower> {
        let mut copy: Option<Follower> = None;
        let mut launchers = Replayed::<Launchers>::default();
        let (mut instance, mut is_new) = (None, true);
        while !self.stop.load(Ordering::Relaxed) {
            let host = lock(&self.roster).host;
            let address = || lock(&self.roster).address_of(host);
            let is_there = match &mut copy {
                Some(copy) => {
                    let arrived = copy.follow(LOOK);
                    // After an error the copy may have changed, too.
                    is_new |= !matches!(arrived, Ok(false));
                    arrived.is_ok()
                }
                None => false,
            };
            if let Some(copy) = &copy {
                if std::mem::take(&mut is_new) {
                    let _ = launchers.read(|key| copy.get(key));
                    lock(&self.roster).read(launchers.state(), copy);
                }
                // The end of the job is decided: the store moves no more.
                if launchers.state().is_decided() {
                    if !is_there {
                        sleep(LOOK);
                    }
                    continue;
                }
            }
            if !is_there {
                let again = address().and_then(|at| self.follow(&at).ok());
                // Another server at its address is that of another launcher.
                let is_same = |new: &Follower| instance.is_none_or(|known| known == new.instance());
                if let Some(again) = again.filter(is_same) {
                    instance = Some(again.instance());
                    // This copy may lack events that the last one had.
                    launchers = Replayed::default();
                    (copy, is_new) = (Some(again), true);
                } else {
                    sleep(2 * LOOK);
                }
            }
            let ended = || address().is_some_and(|at| has_ended(self.state_of(&at), instance));
            let is_silent = self.beats.update(0, false);
            if !is_silent && (is_there || !ended()) {
                continue;
            }
            let silent = self.beats.silent(0);
            let known = lock(&self.roster).term;
            let term = copy.as_ref().map_or(known, |copy| Term::of(copy).number);
            let entries = copy.as_ref().map(|copy| {
                let mut entries = copy.entries();
                let mut known = launchers_in(|key| copy.get(key));
                let verdict = lock(&self.roster).verdict_of_lost(self.id, host, silent);
                // Spare launchers join the next host under new numbers. The loss of this host is part of the copy, because as a
                // later write it might be lost with the next host.
                for id in known
                    .state()
                    .waiting()
                    .chain([host])
                    .collect::<BTreeSet<Id>>()
                {
                    let event = known.state().lost_for(id, &verdict);
                    if let Some(entry) = event.and_then(|event| known.entry(&event).ok()) {
                        let _ = known.apply(&entry.1);
                        entries.push(entry);
                    }
                }
                entries
            });
            // If the host was only suspended, it must not take the closed connection for the end of this launcher.
            copy.take().into_iter().for_each(Follower::leave);
            let mut election = Election {
                lost: host,
                instance,
                entries,
                term,
                ended: BTreeSet::new(),
                // So recently the host has not dropped this launcher, whose heartbeats it had.
                saw_end: !is_silent && silent + BEAT < self.beats.limit(),
                until: Instant::now() + longest_election(self.beats.limit()),
            };
            let Some((new, follower)) = self.elect(&mut election) else {
                if !self.stop.load(Ordering::Relaxed) {
                    send(Event::Parted);
                }
                return None;
            };
            instance = follower.as_ref().map(Follower::instance);
            (copy, is_new) = (follower, true);
            launchers = Replayed::default();
            let at = {
                let mut roster = lock(&self.roster);
                roster.host = new;
                roster.address_of(new).unwrap_or_default()
            };
            self.beats.watch_again(1);
            if let Err(error) = write_address(&self.file, &at) {
                let file = self.file.display();
                say::note(format_args!(
                    "warning: cannot write {file}, by which the ranks of this node find the store: {error}"
                ));
            }
            let ended = election.ended.into_iter().filter(|id| *id != host);
            send(Event::StoreMoved(Moved {
                host: new,
                ended: ended.collect(),
            }));
            if new == self.id {
                return None;
            }
        }
        copy
    }

    fn state_of(&self, at: &str) -> ServerState {
        TcpStore::state_of(at, self.token.clone(), ATTEMPT)
    }

    fn follow(&self, at: &str) -> phalanx_store::Result<Follower> {
        Follower::connect(at, self.token.clone(), self.id as u64, ATTEMPT)
    }

    /// The new host of the store, and the copy that follows it unless this launcher is the host. `None`: no host was elected.
    fn elect(&self, election: &mut Election) -> Option<(Id, Option<Follower>)> {
        let mut is_candidate = false;
        while Instant::now() < election.until && !self.stop.load(Ordering::Relaxed) {
            let living = lock(&self.roster).living();
            let others = living.iter().filter(|member| member.id != self.id);
            let others = others.filter(|member| !election.ended.contains(&member.id));
            for (id, at, state) in self.states_of(others) {
                if is_candidate && self.may_open(&living, election) {
                    return self.open(election).then_some((self.id, None));
                }
                let is_lost = id == election.lost;
                if has_ended(state, election.instance.filter(|_| is_lost)) {
                    election.ended.insert(id);
                    continue;
                }
                // Two candidates must not follow each other.
                let may_lead = match state {
                    ServerState::Open(_) => !is_lost,
                    // A silent launcher would make the others wait.
                    ServerState::Unknown => false,
                    // Without a copy it has no vote.
                    _ => id < self.id && !is_lost && election.entries.is_some(),
                };
                let copy = may_lead.then(|| self.follow(at).ok());
                let Some(mut copy) = copy.flatten() else {
                    continue;
                };
                // Its copy is older.
                if Term::of(&copy).number < election.term {
                    copy.leave();
                    continue;
                }
                if std::mem::take(&mut is_candidate) {
                    self.server.close();
                }
                if self.is_host(id, &mut copy, election) {
                    return Some((id, Some(copy)));
                }
            }
            if let Some(entries) = election.entries.as_ref().filter(|_| !is_candidate) {
                let dropped = dropped_in(entries);
                self.server.admit_followers(entries.clone(), dropped);
                is_candidate = true;
            }
            if is_candidate && self.may_open(&living, election) {
                return self.open(election).then_some((self.id, None));
            }
            sleep(LOOK);
        }
        if is_candidate {
            self.server.close();
        }
        None
    }

    /// The state of each of `members` that has a server, with its address. All are asked at once, because each may be silent.
    fn states_of<'a>(
        &self,
        members: impl Iterator<Item = &'a Member>,
    ) -> Vec<(Id, &'a str, ServerState)> {
        std::thread::scope(|scope| {
            let asked = members.filter_map(|member| {
                let at = member.at.as_deref()?;
                let ask = Builder::new().spawn_scoped(scope, || self.state_of(at));
                Some((member.id, at, ask.ok()))
            });
            let asked: Vec<_> = asked.collect();
            let answers = asked.into_iter().map(|(id, at, asked)| {
                let state = asked.and_then(|asked| asked.join().ok());
                (id, at, state.unwrap_or(ServerState::Unknown))
            });
            answers.collect()
        })
    }

    /// Whether those of the `living` that follow this candidate may continue with it.
    fn may_open(&self, living: &[Member], election: &Election) -> bool {
        let mut group: BTreeSet<Id> = BTreeSet::from([self.id]);
        group.extend(self.server.followers().iter().map(|id| *id as Id));
        may_continue(living, election.counted(), &group)
    }

    /// Whether the candidate `id`, which `copy` follows, becomes the host.
    fn is_host(&self, id: Id, copy: &mut Follower, election: &Election) -> bool {
        loop {
            let term = Term::of(copy);
            if term.host == id && term.number > election.term {
                return true;
            }
            let is_over = Instant::now() >= election.until || self.stop.load(Ordering::Relaxed);
            if is_over || copy.follow(LOOK).is_err() {
                return false;
            }
        }
    }

    /// Opens the server of this launcher, and waits until its followers know; false: one of them does not know in time.
    fn open(&self, election: &Election) -> bool {
        let term = format!("{} {}", election.term + 1, self.id);
        self.server.open(HOST_KEY, term.as_bytes());
        let quorum = Quorum {
            server: self.server.clone(),
            roster: self.roster.clone(),
            token: self.token.clone(),
            id: self.id,
        };
        let at = self.server.local_addr().to_string();
        let Ok(store) = TcpStore::connect(&at, self.token.clone(), ATTEMPT * 4) else {
            return false;
        };
        store.set_response_timeout(ATTEMPT);
        {
            let mut roster = lock(&self.roster);
            roster.ended.extend(election.counted());
            roster.voters = roster.living().iter().map(|member| member.id).collect();
        }
        let began = Instant::now();
        while Instant::now() < election.until {
            if store.try_get(HOST_KEY).is_ok() {
                return true;
            }
            quorum.drop_ended();
            if began.elapsed() > self.beats.limit() {
                let behind = self.server.followers_behind().into_iter();
                let silent = behind.map(|id| id as Id).chain([election.lost]);
                let silent: BTreeSet<Id> = silent.collect();
                for id in &silent {
                    quorum.drop(*id, &silent);
                }
            }
        }
        false
    }
}

/// Whether `state`, which was seen at the address of a launcher, shows that the launcher has ended. If the number of its
/// server is known, another server there shows it too.
fn has_ended(state: ServerState, instance: Option<u16>) -> bool {
    match state {
        ServerState::Ended => true,
        ServerState::Open(other) => instance.is_some_and(|known| known != other),
        _ => false,
    }
}

/// Redirects launchers that come to the address of node 0, `first`, to the store of the job at `here`, until the end.
pub(super) fn point_here(first: &str, token: &Token, here: &str, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let state = TcpStore::state_of(first, token.clone(), ATTEMPT);
        if matches!(state, ServerState::Open(_))
            && let Ok(store) = TcpStore::connect(first, token.clone(), ATTEMPT)
        {
            store.set_response_timeout(ATTEMPT);
            let _ = store.set(MOVED_KEY, here.as_bytes());
        }
        sleep(LOOK_BACK);
    }
}

/// Writes `address` into `file`, whole at all times.
fn write_address(file: &Path, address: &str) -> std::io::Result<()> {
    let new = file.with_extension("new");
    std::fs::write(&new, address)?;
    std::fs::rename(new, file)
}

#[cfg(test)]
mod model_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// All jobs of up to five launchers with one to three ranks: of two groups without a common member at most one may
    /// continue, and all launchers together may.
    #[test]
    fn two_halves_never_continue() {
        for count in 1..=5_u32 {
            for code in 0..3_usize.pow(count) {
                let members: Vec<Member> = (0..count)
                    .map(|n| Member {
                        id: 2 * n as usize + 1,
                        name: String::new(),
                        ranks: code / 3_usize.pow(n) % 3 + 1,
                        at: None,
                    })
                    .collect();
                let group = |bits: u32| -> BTreeSet<Id> {
                    let of = (0..count).filter(|n| bits >> n & 1 == 1);
                    of.map(|n| members[n as usize].id).collect()
                };
                let continues: Vec<u32> = (0..1 << count)
                    .filter(|bits| may_continue(&members, &BTreeSet::new(), &group(*bits)))
                    .collect();
                assert!(continues.contains(&((1 << count) - 1)));
                for (a, b) in continues
                    .iter()
                    .flat_map(|a| continues.iter().map(move |b| (a, b)))
                {
                    assert!(a & b != 0, "{members:?}: {a:b} and {b:b}");
                }
                // One of two parts continues.
                for bits in 0..1 << count {
                    let rest = !bits & ((1 << count) - 1);
                    assert!(
                        continues.contains(&bits) != continues.contains(&rest),
                        "{bits:b}"
                    );
                }
            }
        }
    }
}
