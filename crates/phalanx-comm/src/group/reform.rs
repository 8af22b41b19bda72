//! Forms a new group of the remaining ranks and of newcomers, without new processes for those that remain.
//!
//! A poisoned group never recovers; a new one is formed under the next generation.
//! The ranks meet in the store through which the job was formed:
//!
//! | key                              | value              | written by                     |
//! |----------------------------------|--------------------|--------------------------------|
//! | `reform/JOB/GENERATION/here/F`   | its host           | every rank that takes part     |
//! | `reform/JOB/GENERATION/members`  | `F F F …`, by rank | one of them, by compare-and-set |
//! | `reform/over`                    | why                | the same, when the job ends    |
//! | `reform/elastic`                 | `1`; `0`: without others | all ranks, once they may be lost |
//! | `reform/joined/F`                | `0`; `1`: has taken a step | a newcomer that has the others' state |
//! | `reform/joining`, `reform/joining/N` | a count, F; [`SETTLED`] | a newcomer; when it is in, or does not come |
//! | `reform/taken/F`                 | its N              | the newcomer that has number F |
//! | `reform/refused/N`               | why                | a member                       |
//! | `reform/leaving`, `reform/leaving/N` | a count, F     | whoever wants the rank to leave ([`report_leaving`]) |
//! | `reform/joining/settled`, `reform/leaving/settled` | up to which N nobody needs to look | whoever has looked |
//! | `reform/hold`                    | why                | whoever wants the ranks to wait ([`report_hold`]) |
//! | `reform/invited/F`               | an [`Invitation`]  | all members of the old group   |
//!
//! Keys of ranks that were reported lost are in `lost.rs`.
//!
//! `F` is a rank's number among all that the job has started: its rank in the first
//! generation, or the number that a newcomer was started with. It never changes; the new
//! ranks are the indices in the list. Members of the old group keep their order, and a newcomer
//! follows those of its host: where ranks are numbered host by host, they stay so.
//!
//! *Who decides.* A rank that sees all ranks of the old group which are not reported lost,
//! or enough of them and no more during the wait for stragglers, proposes the ranks
//! present. The first proposal is the decision: one store, one list, hence one group.
//! Where a majority is required, at most one side of a split has enough ranks. A rank that
//! is not in the list gets an error. When forming the links fails (another rank died
//! meanwhile), the remaining ranks try the next generation.
//!
//! *The store must live.* `phalanx launch` hosts it, apart from all ranks. When rank 0
//! hosts it (`tcp://` and `file://` without a launcher) its death ends the job, and the error says
//! so.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store};
use serde::{Deserialize, Serialize};

use super::join::{Processes, WORLD_GROUP, open};
use super::launch::{Launch, environment, no_token};
use super::options::InitOptions;
use super::{Identity, Member, Origin, ProcessGroup};
use crate::lost::{LostRanks, lost_key};
use crate::notice::list;
use crate::recorder::{Place, Recorder};
use crate::select::{Costs, Rules, Selector};
use crate::transport::{Mesh, Poison, machine, remove_generation};
use crate::wait::deadline_in;
use crate::{Error, ErrorKind, Result};

/// How a group is re-formed. All ranks must give the same options.
#[derive(Clone, Debug)]
pub struct ShrinkOptions {
    /// Least size of the new group; default: more than half of the group that ended, so
    /// that two parts of it can never both continue, and 1 where all ranks that do not come
    /// were [reported lost](crate::report_lost).
    pub min_world: Option<usize>,
    /// How long to wait for more ranks once there are enough; 1 s. Ranks that were reported
    /// lost are not waited for. Ranks that come later get [`ErrorKind::Excluded`].
    pub straggler_wait: Duration,
    /// Deadline for the whole; 60 s.
    pub timeout: Duration,
}

impl Default for ShrinkOptions {
    fn default() -> Self {
        ShrinkOptions {
            min_world: None,
            straggler_wait: Duration::from_secs(1),
            timeout: Duration::from_secs(60),
        }
    }
}

/// Interval at which to check which ranks have come.
const LOOK: Duration = Duration::from_millis(5);
/// How long the store takes at most, usually, to say where a rank is.
const ASK: Duration = Duration::from_millis(2);
/// How long members of a group wait for a newcomer that has asked to join, and does not come or cannot be connected.
const NEWCOMER_WAIT: Duration = Duration::from_secs(5);
/// Shortest deadline for forming the links; after a failure the next generation is tried.
const FORMING_MIN: Duration = Duration::from_secs(1);

/// Says in `store` that the job ends, and `why`: ranks that form a new group, and newcomers, do not wait any longer.
///
/// # Errors
///
/// Those of the store.
pub fn report_over(store: &dyn Store, why: &str) -> phalanx_store::Result<()> {
    store.set(OVER, why.as_bytes())
}

/// Says in `store` that the process with the number `rank` is to leave: the ranks learn it from
/// [`membership_requests`](ProcessGroup::membership_requests).
///
/// # Errors
///
/// Those of the store.
pub fn report_leaving(store: &dyn Store, rank: usize) -> phalanx_store::Result<()> {
    ask_for(store, LEAVING, rank)
}

/// Says in `store` that the ranks are to wait between two steps, and `why`; `None`: they are to go on.
///
/// # Errors
///
/// Those of the store.
pub fn report_hold(store: &dyn Store, why: Option<&str>) -> phalanx_store::Result<()> {
    match why {
        Some(why) => store.set(HOLD, why.as_bytes()),
        None => store.delete(HOLD).map(drop),
    }
}

/// Adds `rank` to the list `what`.
fn ask_for(store: &dyn Store, what: &str, rank: usize) -> phalanx_store::Result<()> {
    let index = store.add(what, 1)?;
    store.set(&format!("{what}/{index}"), rank.to_string().as_bytes())
}

/// Whether the ranks that use `store` go on without lost ones ([`ProcessGroup::announce_elastic`]), as far as any of the
/// processes `numbers` that is not [lost](crate::report_lost) has what is needed: it is one of the first, or has
/// [announced](ProcessGroup::announce_joined) it.
///
/// # Errors
///
/// Those of the store.
pub fn goes_on_with(
    store: &dyn Store,
    first_world: usize,
    numbers: impl IntoIterator<Item = usize>,
) -> phalanx_store::Result<bool> {
    if store.try_get(ELASTIC)?.is_none() {
        return Ok(false);
    }
    for number in numbers {
        let has_state = number < first_world || store.try_get(&joined_key(number))?.is_some();
        if has_state && store.try_get(&lost_key(number))?.is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the process `number` is a newcomer that has not [taken part](ProcessGroup::announce_joined) in anything yet: its
/// failure is its own.
///
/// # Errors
///
/// Those of the store.
pub fn is_candidate(
    store: &dyn Store,
    first_world: usize,
    number: usize,
) -> phalanx_store::Result<bool> {
    let joined = || store.try_get(&joined_key(number));
    Ok(number >= first_world && joined()?.is_none_or(|value| value != TAKES_PART))
}

/// Whether the ranks that use `store` have [announced](ProcessGroup::announce_elastic) that they take in others, and let
/// ranks leave.
///
/// # Errors
///
/// Those of the store.
pub fn takes_others(store: &dyn Store) -> phalanx_store::Result<bool> {
    Ok(store
        .try_get(ELASTIC)?
        .is_some_and(|value| value == TAKES_OTHERS))
}

/// Whether the job has been [reported](report_over) to end.
///
/// # Errors
///
/// Those of the store.
pub fn is_over(store: &dyn Store) -> phalanx_store::Result<bool> {
    Ok(store.try_get(OVER)?.is_some())
}

/// The value of [`ELASTIC`] where the ranks take in others.
const TAKES_OTHERS: &[u8] = b"1";
/// The value of a newcomer's key once it has taken part in something.
const TAKES_PART: &[u8] = b"1";
/// The value of a newcomer's request that nobody looks at any more.
const SETTLED: &[u8] = b"settled";
/// Set when the ranks go on without lost ones.
const ELASTIC: &str = "reform/elastic";
/// Set when the job ends.
const OVER: &str = "reform/over";
/// Number of newcomers that have announced themselves.
const JOINING: &str = "reform/joining";
/// Number of ranks that were asked to leave.
const LEAVING: &str = "reform/leaving";
/// Set while the ranks are to wait.
const HOLD: &str = "reform/hold";

fn joined_key(rank: usize) -> String {
    format!("reform/joined/{rank}")
}

fn taken_key(rank: usize) -> String {
    format!("reform/taken/{rank}")
}

fn joining_key(index: i64) -> String {
    format!("{JOINING}/{index}")
}

fn refused_key(index: i64) -> String {
    format!("reform/refused/{index}")
}

fn invited_key(rank: usize) -> String {
    format!("reform/invited/{rank}")
}

/// What a newcomer must know to meet the members of the group that ends.
#[derive(Serialize, Deserialize)]
struct Invitation {
    job: u64,
    /// Of the group that ends.
    generation: u32,
    /// Its members by rank, and all newcomers.
    roster: Vec<usize>,
    /// The size of the group that ends.
    world: usize,
    /// The bits of its measured costs.
    costs: [u64; 5],
}

impl ProcessGroup {
    /// Forms a new group of the remaining ranks, without new processes, after a rank
    /// was lost or after any other failure of this group. All ranks that want to
    /// continue must call it. The ranks keep their order and are numbered from 0; the
    /// new group has the next [`generation`](Self::generation). Subgroups must be made
    /// again.
    ///
    /// This handle is consumed. Other handles to the old group refuse operations; the
    /// old group is aborted if it was not, so that no rank stays in it.
    ///
    /// *Blocks until* all ranks of the old group that were not [reported lost](crate::report_lost)
    /// have come, or at least [`ShrinkOptions::min_world`] and no other for
    /// [`ShrinkOptions::straggler_wait`]; at most [`ShrinkOptions::timeout`].
    ///
    /// # Errors
    ///
    /// `Timeout` naming the ranks that did not come when too few did;
    /// `Excluded` when the others continued without this rank; `PeerLost` when the
    /// store is gone (rank 0 hosted it and died); `Aborted` when the job [ends](report_over);
    /// `Usage` for a subgroup.
    pub fn shrink(self, options: ShrinkOptions) -> Result<ProcessGroup> {
        let cause = format!(
            "rank {} leaves generation {} to form the next",
            self.core.rank, self.core.generation
        );
        // Not a failure of this rank: the recorder does not record one.
        self.core.abort.poison(&Poison::new(self.core.rank, cause));
        self.reform(&[], options)
    }

    /// Forms a new group of all ranks of this one and the `newcomers`, by their numbers, which wait in
    /// [`Newcomer::join`] ([`membership_requests`](Self::membership_requests) lists them). All ranks must call it, with the same newcomers,
    /// while no operation is in flight. A newcomer gets the rank after the last one of its host, or where it is the first there,
    /// after all; the ranks behind it move on. Otherwise as [`shrink`](Self::shrink): a rank that is lost
    /// meanwhile, old or new, is left out.
    ///
    /// # Errors
    ///
    /// As [`shrink`](Self::shrink); `Usage` when a newcomer has the number of a member, or is given twice.
    pub fn grow(self, newcomers: &[usize], options: ShrinkOptions) -> Result<ProcessGroup> {
        for (index, number) in newcomers.iter().enumerate() {
            let what = match newcomers[..index].contains(number) {
                true => "is given twice",
                false if self.global_ranks().contains(number) => "is that of a member",
                false => continue,
            };
            return Err(self.usage("grow", format!("process number {number} {what}")));
        }
        if self.core.id == WORLD_GROUP {
            // A rank may still wait for the last operation. If one was lost, all find out below.
            let left = self.goodbye();
            tracing::debug!(?left, ?newcomers, "leaving the group to grow it");
        }
        self.reform(newcomers, options)
    }

    /// Says in the store that the ranks of this group go on without lost ones from now on: a launcher need not end the job
    /// then. Whether they also act on [`membership_requests`](Self::membership_requests) says `takes_others`.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn announce_elastic(&self, takes_others: bool) -> Result<()> {
        let value = if takes_others { TAKES_OTHERS } else { b"0" };
        Ok(self.store().set(ELASTIC, value)?)
    }

    /// Takes [`announce_elastic`](Self::announce_elastic) back: a launcher ends the job when it loses the next rank.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn withdraw_elastic(&self) -> Result<()> {
        self.store().delete(ELASTIC)?;
        Ok(())
    }

    /// Says in the store that this rank, a [`Newcomer`], has all that it needs to go on if the others are lost, and whether it
    /// has taken part in what they do ([`is_candidate`]).
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn announce_joined(&self, takes_part: bool) -> Result<()> {
        let value = if takes_part { TAKES_PART } else { b"0" };
        Ok(self.store().set(&joined_key(self.global_rank()), value)?)
    }

    /// The processes that ask to be taken in by [`grow`](Self::grow), and the ranks that are to leave or wait. Any thread
    /// may ask; it keeps no link open.
    pub fn membership_requests(&self) -> MembershipRequests {
        MembershipRequests {
            store: self.store(),
            roster: Arc::clone(&self.core.identity.roster),
            asked: Mutex::new([Asked::of(JOINING), Asked::of(LEAVING)]),
        }
    }

    fn reform(self, newcomers: &[usize], options: ShrinkOptions) -> Result<ProcessGroup> {
        let (rank, old) = (self.core.rank, self.core.generation);
        let named = |e: Error| e.with_rank(rank).with_operation("forming the group anew");
        if self.core.id != WORLD_GROUP {
            return Err(named(Error::usage(
                "only the group of all ranks can be formed anew; make its subgroups again then",
            )));
        }
        self.core.queue.close();
        let identity = self.core.identity.clone();
        let mut newcomers = newcomers.to_vec();
        newcomers.sort_unstable();
        let roster = [&identity.roster[..], &newcomers].concat();
        let meeting = Reform {
            identity: Identity {
                roster: roster.into(),
                ..identity
            },
            world: self.core.world,
            options: &options,
            deadline: deadline_in(options.timeout),
        };
        let origin = Arc::clone(&self.core.origin);
        let costs = *self.core.selector.costs();
        if !newcomers.is_empty() {
            let invitation = meeting.invitation(old, costs);
            let text = serde_json::to_vec(&invitation)
                .map_err(|e| named(Error::internal(format!("an invitation is not JSON: {e}"))))?;
            // All members write it: any of them may be lost now.
            for number in &newcomers {
                let (store, key) = (origin.store(), invited_key(*number));
                let invited = meeting.insist(|| store.set(&key, &text));
                invited.map_err(|e| named(e.into()))?;
            }
        }
        let (limits, algorithm) = (self.core.limits, self.core.algorithm);
        let (defaults, recorder) = (self.defaults.clone(), Arc::clone(&self.core.recorder));
        let rules = self.core.selector.rules().clone();
        // The old links are closed before new ones are made.
        drop(self);
        let member = |identity| Member {
            rank: 0,
            world: 0,
            id: WORLD_GROUP,
            generation: old,
            limits,
            algorithm,
            identity: Some(identity),
        };
        let (member, mesh, origin) = meeting.form(&origin, member).map_err(named)?;
        if member.rank == 0 {
            // The keys of the lost ranks, in subgroups too.
            let job = meeting.identity.job;
            (old..member.generation)
                .for_each(|over| remove_generation(&*origin.store(), over, job));
        }
        // The network is the one that was measured before.
        let selector = Selector::new(mesh.hosts().clone(), costs, rules);
        let group = Self::from_mesh(member, mesh, selector, origin, recorder, false)?;
        Ok(ProcessGroup { defaults, ..group })
    }
}

/// Tells who is to join or to leave a group ([`ProcessGroup::membership_requests`]).
pub struct MembershipRequests {
    store: Arc<dyn Store>,
    /// The numbers of the group's members.
    roster: Arc<[usize]>,
    /// Who asks to join, and who is to leave.
    asked: Mutex<[Asked; 2]>,
}

/// What is asked of the ranks of a group, which they must agree on before they act.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedChange {
    /// The numbers of the processes that want to join, in ascending order.
    pub joining: Vec<usize>,
    /// Those of the ranks that are to leave.
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

impl MembershipRequests {
    /// What is asked now. Refuses processes that have the number of a member. *Costs* three requests to the store, two more
    /// the first time, and two for each process that waits to be taken in or is about to leave.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn read(&self) -> Result<RequestedChange> {
        let store = &*self.store;
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let [to_join, to_leave] = &mut *asked;
        let is_member = |number: &usize| self.roster.contains(number);
        let mut joining = to_join.read(store, |index, number| match is_member(&number) {
            true => (store.set(&refused_key(index), b"is that of a member")).map(|()| false),
            false => Ok(true),
        })?;
        let mut leaving = to_leave.read(store, |_, _| Ok(true))?;
        leaving.retain(is_member);
        for numbers in [&mut joining, &mut leaving] {
            numbers.sort_unstable();
            numbers.dedup();
        }
        let hold = store.try_get(HOLD)?;
        Ok(RequestedChange {
            joining,
            leaving,
            hold: hold.map(|why| String::from_utf8_lossy(&why).into_owned()),
        })
    }
}

/// One of the store's lists of processes, and which of its entries need another look.
struct Asked {
    what: &'static str,
    /// Nobody needs to look at the entries up to this one, as the store says; nothing before the first look.
    settled: Option<i64>,
    /// The last entry that was looked at.
    looked: i64,
    /// Those that were not settled then.
    open: Vec<i64>,
}

impl Asked {
    fn of(what: &'static str) -> Asked {
        Asked {
            what,
            settled: None,
            looked: 0,
            open: Vec::new(),
        }
    }

    /// The processes in the list that have not joined, are not lost, and are `wanted`, which is given each with its entry. One
    /// that is not is never looked at again.
    fn read(
        &mut self,
        store: &dyn Store,
        wanted: impl Fn(i64, usize) -> phalanx_store::Result<bool>,
    ) -> phalanx_store::Result<Vec<usize>> {
        fn number<N: FromStr>(bytes: &[u8]) -> Option<N> {
            String::from_utf8_lossy(bytes).parse().ok()
        }
        let number_at = |key: &str| -> phalanx_store::Result<i64> {
            let bytes = store.try_get(key)?;
            Ok(bytes.and_then(|bytes| number(&bytes)).unwrap_or(0))
        };
        let settled_key = format!("{}/settled", self.what);
        let settled = match self.settled {
            Some(settled) => settled,
            None => number_at(&settled_key)?,
        };
        let count = number_at(self.what)?;
        let (mut found, mut open) = (Vec::new(), Vec::new());
        let new = self.looked.max(settled) + 1..=count;
        for index in self.open.iter().copied().chain(new) {
            match store.try_get(&format!("{}/{index}", self.what))? {
                // It is about to be written.
                None => open.push(index),
                Some(bytes) => {
                    if let Some(number) = number(&bytes)
                        && store.try_get(&lost_key(number))?.is_none()
                        && wanted(index, number)?
                    {
                        open.push(index);
                        found.push(number);
                    }
                }
            }
        }
        let now = open.first().map_or(count, |first| first - 1);
        if now > settled {
            store.set(&settled_key, now.to_string().as_bytes())?;
        }
        (self.settled, self.looked, self.open) = (Some(now.max(settled)), count, open);
        Ok(found)
    }
}

/// Asks for the newcomer `number`, whose request was withdrawn, once more. Gives the number of the request.
fn ask_to_join(store: &dyn Store, number: usize) -> phalanx_store::Result<i64> {
    let index = store.add(JOINING, 1)?;
    store.set(&taken_key(number), index.to_string().as_bytes())?;
    store.set(&joining_key(index), number.to_string().as_bytes())?;
    Ok(index)
}

/// Withdraws the request of the newcomer `number`, which does not come: the others do not wait for it again until it asks.
fn leave_out(store: &dyn Store, number: usize) -> phalanx_store::Result<()> {
    let index = store.try_get(&taken_key(number))?.unwrap_or_default();
    match String::from_utf8_lossy(&index).parse() {
        Ok(index) => store.set(&joining_key(index), SETTLED),
        Err(_) => Ok(()),
    }
}

/// A process that joins a group which other processes have formed.
pub struct Newcomer {
    number: usize,
    processes: Processes,
}

impl Newcomer {
    /// Opens the store of the job, as [`ProcessGroup::init`] does. `number` is this process's among all that the job has
    /// started, which no other process has or had.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::init`].
    pub fn new(number: usize, options: InitOptions) -> Result<Newcomer> {
        let started = Instant::now();
        let options = InitOptions {
            rank: Some(number),
            world_size: Some(number + 1),
            ..options
        };
        let launch = Launch::resolve(&options, environment)?;
        let processes = open(&launch, options, started)?;
        Ok(Newcomer { number, processes })
    }

    /// The same through a store that the caller has opened; `options` must have a token.
    ///
    /// # Errors
    ///
    /// `Usage` when they have none.
    pub fn from_store(
        store: Arc<dyn Store>,
        number: usize,
        options: InitOptions,
    ) -> Result<Newcomer> {
        let token = options.token.clone().ok_or_else(no_token)?;
        let processes = Processes::within(store, token, options);
        Ok(Newcomer { number, processes })
    }

    /// The store of the job.
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.processes.store)
    }

    /// This process's number among all that the job has started.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Asks to be taken in. Gives the number of the request; nothing if another process has or had this one's number.
    fn announce(&self) -> Result<Option<i64>> {
        let store = &self.processes.store;
        if store.try_get(&lost_key(self.number))?.is_some() {
            return Ok(None);
        }
        let index = store.add(JOINING, 1)?;
        let own = index.to_string();
        let taken = store.compare_set(&taken_key(self.number), None, own.as_bytes())?;
        if taken != own.as_bytes() {
            return Ok(None);
        }
        store.set(&joining_key(index), self.number.to_string().as_bytes())?;
        Ok(Some(index))
    }

    /// Waits for the members to call [`ProcessGroup::grow`], and joins; `None` when the job ends before.
    ///
    /// *Blocks* as long as the job runs.
    ///
    /// # Errors
    ///
    /// `Usage` when another process has, or had, this number; `PeerLost` when the store is gone; those of forming links.
    pub fn join(self, options: &ShrinkOptions) -> Result<Option<ProcessGroup>> {
        let named = |e: Error| e.with_operation("joining the group");
        let number = self.number;
        let refused = |why: &str| {
            let what = format!(
                "process number {number} {why}; a process that joins needs a number that no other process has or had"
            );
            named(Error::usage(what))
        };
        let store = Arc::clone(&self.processes.store);
        let index = self.announce().map_err(named)?;
        let Some(mut index) = index else {
            return Err(refused(
                "is that of another process that joins, has joined or was lost",
            ));
        };
        let (key, origin) = (
            invited_key(number),
            Arc::new(Origin::Processes(Box::new(self.processes))),
        );
        let mut declined = None;
        let mut to_leave = Asked::of(LEAVING);
        loop {
            let text = loop {
                match store.get(&key, LISTEN) {
                    Ok(text) if Some(&text) == declined.as_ref() => std::thread::sleep(LISTEN),
                    Ok(text) => break text,
                    Err(e) if matches!(e.kind(), StoreKind::Timeout | StoreKind::NoAnswer) => {}
                    Err(e) => return Err(named(e.into())),
                }
                // Of ranks that are in a group, these are to leave.
                let mut leaves = || {
                    let leaving = to_leave.read(&*store, |_, _| Ok(true))?;
                    Ok(leaving.contains(&number))
                };
                let over = store.try_get(OVER).and_then(|over| match over {
                    None => leaves(),
                    Some(_) => Ok(true),
                });
                let asks = || -> phalanx_store::Result<Option<i64>> {
                    match store.try_get(&joining_key(index))?.as_deref() {
                        Some(SETTLED) => ask_to_join(&*store, number).map(Some),
                        _ => Ok(None),
                    }
                };
                match asks() {
                    Ok(again) => index = again.unwrap_or(index),
                    Err(e) if e.kind() == StoreKind::NoAnswer => {}
                    Err(e) => return Err(named(e.into())),
                }
                if let Ok(Some(why)) = store.try_get(&lost_key(number)) {
                    let why = String::from_utf8_lossy(&why);
                    let what = format!("the others go on without process number {number}: {why}");
                    return Err(named(Error::new(ErrorKind::Excluded, what)));
                }
                match (over, store.try_get(&refused_key(index))) {
                    (Ok(false), Ok(None)) => {}
                    (Ok(false), Ok(Some(why))) => {
                        return Err(refused(&String::from_utf8_lossy(&why)));
                    }
                    (Ok(true), _) => return Ok(None),
                    (Err(e), _) | (_, Err(e)) if e.kind() == StoreKind::NoAnswer => {}
                    (Err(e), _) | (_, Err(e)) => return Err(named(e.into())),
                }
            };
            let invitation: Invitation = serde_json::from_slice(&text).map_err(|e| {
                let what = format!("the store holds a garbled invitation: {e}");
                named(Error::new(ErrorKind::Protocol, what))
            })?;
            let meeting = Reform {
                identity: Identity {
                    global_rank: number,
                    roster: invitation.roster.into(),
                    job: invitation.job,
                },
                world: invitation.world,
                options,
                deadline: deadline_in(options.timeout),
            };
            let Origin::Processes(processes) = &*origin else {
                return Err(Error::internal("newcomers are processes"));
            };
            let init = &processes.options;
            let member = |identity| Member {
                rank: 0,
                world: 0,
                id: WORLD_GROUP,
                generation: invitation.generation,
                limits: init.limits(),
                algorithm: init.algorithm,
                identity: Some(identity),
            };
            let (member, mesh, origin) = match meeting.form(&origin, member) {
                Ok(formed) => formed,
                // They have gone on without this rank, and will invite it again.
                Err(e) if e.kind() == ErrorKind::Excluded => {
                    declined = Some(text);
                    continue;
                }
                Err(e) => return Err(named(e)),
            };
            let recorder = Recorder::new(self.number, member.world, &Place::Launcher)
                .map_err(|e| Error::io("mapping the flight recorder", e))?;
            // From now on a request for this number is another process's.
            let own = joining_key(index);
            let settled = meeting.insist(|| store.set(&own, SETTLED));
            settled.map_err(|e| named(e.into()))?;
            let rules = init.rules.clone().then(Rules::from_env()?);
            let costs = costs_of(invitation.costs);
            let selector = Selector::new(mesh.hosts().clone(), costs, rules);
            let recorder = Arc::new(recorder);
            return ProcessGroup::from_mesh(member, mesh, selector, origin, recorder, false)
                .map(Some);
        }
    }
}

impl std::fmt::Debug for Newcomer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Newcomer")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// How long a newcomer waits for an invitation before it looks whether the job is over.
const LISTEN: Duration = Duration::from_millis(200);

fn bits_of(costs: Costs) -> [u64; 5] {
    let Costs {
        sync_s,
        core_bytes_per_s,
        wire_latency_s,
        wire_message_s,
        wire_bytes_per_s,
    } = costs;
    [
        sync_s,
        core_bytes_per_s,
        wire_latency_s,
        wire_message_s,
        wire_bytes_per_s,
    ]
    .map(f64::to_bits)
}

fn costs_of(bits: [u64; 5]) -> Costs {
    let [
        sync_s,
        core_bytes_per_s,
        wire_latency_s,
        wire_message_s,
        wire_bytes_per_s,
    ] = bits.map(f64::from_bits);
    Costs {
        sync_s,
        core_bytes_per_s,
        wire_latency_s,
        wire_message_s,
        wire_bytes_per_s,
    }
}

/// One rank's view of the meeting.
struct Reform<'a> {
    /// Its roster has all that are expected: the members of the group that ended by rank, and newcomers.
    identity: Identity,
    /// Size of the group that ended.
    world: usize,
    options: &'a ShrinkOptions,
    deadline: Instant,
}

impl Reform<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn prefix(&self, generation: u32) -> String {
        format!("reform/{:016x}/{generation}", self.identity.job)
    }

    fn invitation(&self, generation: u32, costs: Costs) -> Invitation {
        Invitation {
            job: self.identity.job,
            generation,
            roster: self.identity.roster.to_vec(),
            world: self.world,
            costs: bits_of(costs),
        }
    }

    /// Meets and connects under the next generations, until one has formed. `member` makes the record of an identity.
    fn form(
        &self,
        origin: &Arc<Origin>,
        member: impl Fn(Identity) -> Member,
    ) -> Result<(Member, Mesh, Arc<Origin>)> {
        let mut generation = member(self.identity.clone()).generation;
        loop {
            generation = generation
                .checked_add(1)
                .ok_or_else(|| Error::usage("there are no more generations"))?;
            let members = self.meet(origin, generation)?;
            let own = self.identity.global_rank;
            let Some(rank) = members.iter().position(|f| *f == own) else {
                return Err(self.excluded(generation, &members));
            };
            let member = Member {
                rank,
                world: members.len(),
                generation,
                ..member(Identity {
                    roster: members.as_slice().into(),
                    ..self.identity.clone()
                })
            };
            match self.connect(origin, &member) {
                Ok((mesh, origin)) => {
                    tracing::info!(generation, rank, ?members, "formed the group anew");
                    return Ok((member, mesh, origin));
                }
                Err(e) if self.left().is_zero() || e.kind() == ErrorKind::Usage => return Err(e),
                Err(e) => {
                    tracing::warn!("generation {generation} could not be formed, going on: {e}")
                }
            }
        }
    }

    fn newcomers(&self) -> &[usize] {
        self.identity.roster.get(self.world..).unwrap_or_default()
    }

    /// Least size of the new group, if `unexplained` ranks do not come and are not known to be lost.
    fn min_world(&self, unexplained: usize) -> usize {
        let least = match unexplained {
            0 => 1,
            _ => self.world / 2 + 1,
        };
        self.options.min_world.unwrap_or(least).max(1)
    }

    /// Asks the store again while it does not answer, until the deadline.
    fn insist<T>(
        &self,
        mut ask: impl FnMut() -> phalanx_store::Result<T>,
    ) -> phalanx_store::Result<T> {
        loop {
            match ask() {
                Err(e) if e.kind() == StoreKind::NoAnswer && !self.left().is_zero() => {}
                answer => return answer,
            }
        }
    }

    /// Joins the meeting of `generation` and returns its members, by rank.
    fn meet(&self, origin: &Origin, generation: u32) -> Result<Vec<usize>> {
        let store = origin.store();
        let prefix = self.prefix(generation);
        let decision = format!("{prefix}/members");
        let lost = |e: phalanx_store::Error| {
            let hint = match e.kind() {
                StoreKind::PeerLost => {
                    "; a job whose rank 0 hosts the store ends with it: `phalanx launch` \
                     hosts it apart"
                }
                _ => "",
            };
            Error::new(
                ErrorKind::of_store(&e),
                format!("the ranks cannot meet again: {e}{hint}"),
            )
            .with_source(e)
        };
        let here = |global_rank: usize| format!("{prefix}/here/{global_rank}");
        let own = here(self.identity.global_rank);
        let host = machine();
        self.insist(|| store.set(&own, host.as_bytes()))
            .map_err(lost)?;
        let keys: Vec<String> = self.identity.roster.iter().map(|f| here(*f)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut enough_since: Option<Instant> = None;
        let mut lost_ranks = LostRanks::of(&self.identity.roster);
        loop {
            if let Some(list) = self.insist(|| store.try_get(&decision)).map_err(lost)? {
                return decode(&list);
            }
            let missing = match store.wait(&names, LOOK.min(self.left())) {
                Ok(()) => Vec::new(),
                Err(e) if e.kind() == StoreKind::Timeout => e.missing_keys().to_vec(),
                // This says nothing about the other ranks, and the store may still answer in time.
                Err(e) if e.kind() == StoreKind::NoAnswer && !self.left().is_zero() => continue,
                Err(e) => return Err(lost(e)),
            };
            // One that was reported lost may live still, and is none of those that go on.
            let gone = self.insist(|| lost_ranks.look(&*store).map(<[_]>::to_vec));
            let gone = gone.map_err(lost)?.into_iter().map(|lost| lost.number);
            let gone: Vec<usize> = gone.collect();
            if gone.contains(&self.identity.global_rank) {
                let what = format!(
                    "this rank (first rank {}) was reported lost, and the others go on without it",
                    self.identity.global_rank
                );
                return Err(Error::new(ErrorKind::Excluded, what));
            }
            let comes = |f: &&usize| !missing.contains(&here(**f)) && !gone.contains(*f);
            let (present, absent): (Vec<usize>, Vec<usize>) =
                self.identity.roster.iter().partition(comes);
            let unexplained = absent.iter().copied().filter(|f| !gone.contains(f));
            // A newcomer has nothing that the others need.
            let (late, unexplained): (Vec<usize>, Vec<usize>) =
                unexplained.partition(|f| self.newcomers().contains(f));
            if present.len() >= self.min_world(unexplained.len()) {
                let since = *enough_since.get_or_insert_with(Instant::now);
                let waited = match (unexplained.is_empty(), late.is_empty()) {
                    (true, true) => Duration::ZERO,
                    (true, false) => self.options.straggler_wait.min(NEWCOMER_WAIT),
                    (false, _) => self.options.straggler_wait,
                };
                let joins = (present.last()).is_some_and(|last| self.newcomers().contains(last));
                // One asks where they are; should it be lost, the others do.
                let is_first = present.first() == Some(&self.identity.global_rank);
                let patience = 4 * LOOK + ASK * present.len() as u32;
                if joins && !is_first && since.elapsed() < waited.saturating_add(patience) {
                    let _ = store.wait(&[&decision], LOOK.min(self.left()));
                } else if since.elapsed() >= waited {
                    for number in late {
                        self.insist(|| leave_out(&*store, number)).map_err(lost)?;
                    }
                    let host_of = |number: usize| {
                        let key = here(number);
                        let host = self.insist(|| store.try_get(&key)).map_err(lost)?;
                        Ok(host.unwrap_or_default())
                    };
                    let list = encode(&place(present, self.newcomers(), host_of)?);
                    let decided =
                        self.insist(|| store.compare_set(&decision, None, list.as_bytes()));
                    let decided = decided.map_err(lost)?;
                    return decode(&decided);
                }
            }
            if let Some(why) = self.insist(|| store.try_get(OVER)).map_err(lost)? {
                let why = String::from_utf8_lossy(&why);
                let what = format!("the job ends: {why}");
                return Err(Error::new(ErrorKind::Aborted, what));
            }
            if self.left().is_zero() {
                return Err(self.too_few(&present, &absent));
            }
        }
    }

    /// Connects the members of the new generation.
    fn connect(&self, origin: &Arc<Origin>, member: &Member) -> Result<(Mesh, Arc<Origin>)> {
        let limit = (self.left() / 2).max(FORMING_MIN).min(self.left());
        let roster = member.identity.as_ref().map(|identity| &*identity.roster);
        let is_new = |number: &usize| self.newcomers().contains(number);
        let limit = match roster.is_some_and(|roster| roster.iter().any(is_new)) {
            true => limit.min(2 * NEWCOMER_WAIT),
            false => limit,
        };
        match &**origin {
            Origin::Threads {
                registry,
                ring_bytes,
                arena_bytes,
                ..
            } => {
                // Even: the ids of subgroups are odd.
                let id = member.generation << 1;
                let mesh = registry
                    .take(id, member.rank, member.world, *ring_bytes, *arena_bytes)
                    .ok_or_else(|| Error::internal("two generations have the same id"))?;
                Ok((mesh, Arc::clone(origin)))
            }
            Origin::Processes(processes) => {
                let mut processes = processes.clone();
                processes.generation = member.generation;
                let numbers = roster.unwrap_or_default();
                let store = Arc::clone(&processes.store);
                // A member that is lost before it has come leaves nothing there.
                let ranks = Mutex::new(LostRanks::of(numbers));
                let find_lost = || -> phalanx_store::Result<Option<(usize, String)>> {
                    let mut ranks = ranks.lock().unwrap_or_else(PoisonError::into_inner);
                    let lost = ranks.look(&*store)?.first();
                    Ok(lost.map(|lost| (lost.rank, lost.why.clone())))
                };
                let lost = || match find_lost() {
                    Err(e) if e.kind() == StoreKind::NoAnswer => Ok(None),
                    found => Ok(found?),
                };
                let (rank, world) = (member.rank, member.world);
                let mesh = processes.form_unless(WORLD_GROUP, rank, world, limit, &lost)?;
                Ok((mesh, Arc::new(Origin::Processes(processes))))
            }
        }
    }

    fn too_few(&self, present: &[usize], absent: &[usize]) -> Error {
        let majority = if self.options.min_world.is_none() {
            ", more than half"
        } else {
            ""
        };
        Error::timeout(format!(
            "{} of {} ranks came within {:.1} s, {} are needed{majority}; first ranks that did not come: {}",
            present.len(),
            self.world,
            self.options.timeout.as_secs_f64(),
            self.min_world(absent.len()),
            list(absent),
        ))
    }

    fn excluded(&self, generation: u32, members: &[usize]) -> Error {
        Error::new(
            ErrorKind::Excluded,
            format!(
                "generation {generation} was formed without this rank (first rank {}): the others (first ranks {}) waited \
                 {:.1} s for it; start it anew to take part in a later run",
                self.identity.global_rank,
                list(members),
                self.options.straggler_wait.as_secs_f64(),
            ),
        )
    }
}

impl Origin {
    /// The store of the group, also of one of threads.
    pub(super) fn store(&self) -> Arc<dyn Store> {
        match self {
            Origin::Threads { store, .. } => Arc::clone(store),
            Origin::Processes(processes) => Arc::clone(&processes.store),
        }
    }
}

pub(super) fn encode(members: &[usize]) -> String {
    let names: Vec<String> = members.iter().map(usize::to_string).collect();
    names.join(" ")
}

/// `present` by their new ranks: each of the `newcomers` follows the last one of its host.
fn place(
    present: Vec<usize>,
    newcomers: &[usize],
    host_of: impl Fn(usize) -> Result<Vec<u8>>,
) -> Result<Vec<usize>> {
    let is_new = |number: &usize| newcomers.contains(number);
    let (new, mut placed): (Vec<usize>, Vec<usize>) = present.into_iter().partition(is_new);
    if new.is_empty() {
        return Ok(placed);
    }
    let hosts = placed.iter().map(|number| host_of(*number));
    let mut hosts: Vec<Vec<u8>> = hosts.collect::<Result<_>>()?;
    for number in new {
        let host = host_of(number)?;
        let last = hosts.iter().rposition(|known| *known == host);
        let at = last.map_or(placed.len(), |last| last + 1);
        placed.insert(at, number);
        hosts.insert(at, host);
    }
    Ok(placed)
}

/// Parses the decision; a list with a number twice is not ours.
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<usize>> {
    let text = String::from_utf8_lossy(bytes);
    let members: Option<Vec<usize>> = text.split(' ').map(|f| f.parse().ok()).collect();
    let is_once = |members: &Vec<usize>| {
        let mut seen = BTreeSet::new();
        members.iter().all(|number| seen.insert(number))
    };
    members.filter(is_once).ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            format!("the store holds a garbled list of members: {text:?}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_follows_the_ranks_of_its_host() {
        let placed = |present: &[usize], newcomers: &[usize], hosts: &[(usize, &str)]| {
            let host_of = |number: usize| {
                let host = hosts.iter().find(|(known, _)| *known == number);
                Ok(host.map_or("", |(_, host)| *host).as_bytes().to_vec())
            };
            place(present.to_vec(), newcomers, host_of).unwrap()
        };
        let hosts = [
            (1, "a"),
            (2, "b"),
            (3, "b"),
            (4, "a"),
            (5, "b"),
            (6, "c"),
            (7, "a"),
        ];
        // Nobody is asked for.
        assert_eq!(placed(&[3, 1, 2], &[9], &[]), [3, 1, 2]);
        assert_eq!(placed(&[1, 2, 3, 4], &[4], &hosts), [1, 4, 2, 3]);
        assert_eq!(
            placed(&[1, 4, 2, 3, 5, 6, 7], &[5, 6, 7], &hosts),
            [1, 4, 7, 2, 3, 5, 6]
        );
        // All of a host were lost.
        assert_eq!(placed(&[2, 3, 4, 7], &[4, 7], &hosts), [2, 3, 4, 7]);
        // Members keep their order.
        assert_eq!(placed(&[1, 2, 4, 7], &[7], &hosts), [1, 2, 4, 7]);
    }

    #[test]
    fn lists_round_trip_and_garbage_is_refused() {
        for members in [vec![0], vec![0, 2, 5], vec![7], vec![2, 1]] {
            assert_eq!(decode(encode(&members).as_bytes()).unwrap(), members);
        }
        for garbage in ["", "0 0", "0 1 0", "0,1", "0  1", "-1", "x"] {
            let error = decode(garbage.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{garbage:?}");
        }
    }
}
