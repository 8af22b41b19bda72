//! How the processes of a job form the next group.
//!
//! | key                          | value    | written by                       |
//! |------------------------------|----------|----------------------------------|
//! | `job/here/JOB/GENERATION/N`  | its host | process N, when it takes part    |
//!
//! Each process of the last group writes its key for the next generation. When all processes that are not lost have written
//! theirs, or enough of them and no more during the wait for stragglers, one of them writes [`Event::Formed`] with the
//! processes that are present. The log has one next event, so there is one group. Where a majority is required, at most one
//! side of a split has enough processes. A process that is not in the group gets an error. When forming the links fails
//! (another rank died meanwhile), the members try the generation after it.
//!
//! Members of the last group keep their order, and a newcomer comes after those of its host: ranks that are numbered host by
//! host stay so.
//!
//! *The store must live.* `phalanx launch` hosts it, outside of all ranks. When rank 0 hosts it (`tcp://` without a
//! launcher), the death of rank 0 ends the job, and the error says so.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_comm::{Detached, Error, ErrorKind, Formation, InitOptions, ProcessGroup, Result};
use phalanx_store::{ErrorKind as StoreKind, Store};

use crate::log::{Log, insist};
use crate::state::{Event, Next, Seat};

/// How the next group is formed. All ranks must give the same options.
#[derive(Clone, Debug)]
pub struct ShrinkOptions {
    /// Least size of the new group. Default: more than half of the last group, so
    /// that two parts of it can never both continue; 1 if all ranks that do not come
    /// were [reported lost](Log::lose).
    pub min_world: Option<usize>,
    /// How long to wait for more ranks once there are enough; 1 s. Ranks that were reported
    /// lost are not waited for. Ranks that come later get [`ErrorKind::Excluded`].
    pub straggler_wait: Duration,
    /// Deadline for forming the group; 60 s.
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

/// Interval at which to check which processes have come.
const LOOK: Duration = Duration::from_millis(5);
/// How long the store usually takes at most to return the host of a process.
const ASK: Duration = Duration::from_millis(2);
/// How long a newcomer waits for an event before it checks again.
const LISTEN: Duration = Duration::from_millis(200);
/// How long members of a group wait for a newcomer that has asked to join, but does not come or cannot be connected.
const NEWCOMER_WAIT: Duration = Duration::from_secs(5);
/// Shortest deadline for forming the links; after a failure the next generation is tried.
const FORMING_MIN: Duration = Duration::from_secs(1);

/// Forms a new group of the remaining ranks, without new processes, after a rank was lost or after any other failure of
/// `group`. All ranks that want to continue must call it. The ranks keep their order and are numbered from 0; the new group
/// has the next [`generation`](ProcessGroup::generation). Subgroups must be created again.
///
/// This handle is consumed. Other handles to the old group refuse operations; the old group is aborted if it was not, so
/// that no rank stays in it.
///
/// *Blocks until* all ranks of the old group that were not [reported lost](Log::lose) have come, or at least
/// [`ShrinkOptions::min_world`] and no other for [`ShrinkOptions::straggler_wait`]; at most [`ShrinkOptions::timeout`].
///
/// # Errors
///
/// `Timeout` naming the ranks that did not come when too few did; `Excluded` when the others continued without this rank;
/// `PeerLost` when the store is gone (rank 0 hosted it and died); `Aborted` when the job [ends](Log::end); `Usage` for a
/// subgroup.
pub fn shrink(group: ProcessGroup, options: &ShrinkOptions) -> Result<ProcessGroup> {
    Log::new(group.store()).shrink(group, options)
}

/// Forms a new group of all ranks of `group` and of the processes that ask to join ([`Newcomer::join`]). All ranks must call
/// it while no operation is in flight. A newcomer gets the rank after the last one of its host, or where it is the first
/// there, after all; the ranks behind it move on. Otherwise as [`shrink`]: a rank that is lost meanwhile, old or new, is left
/// out.
///
/// # Errors
///
/// As [`shrink`].
pub fn grow(group: ProcessGroup, options: &ShrinkOptions) -> Result<ProcessGroup> {
    Log::new(group.store()).grow(group, options)
}

impl Log {
    /// As [`shrink`], with a log that was read before.
    ///
    /// # Errors
    ///
    /// As [`shrink`].
    pub fn shrink(&mut self, group: ProcessGroup, options: &ShrinkOptions) -> Result<ProcessGroup> {
        self.form_next(group, options, false)
    }

    /// As [`grow`], with a log that was read before.
    ///
    /// # Errors
    ///
    /// As [`grow`].
    pub fn grow(&mut self, group: ProcessGroup, options: &ShrinkOptions) -> Result<ProcessGroup> {
        self.form_next(group, options, true)
    }

    fn form_next(
        &mut self,
        group: ProcessGroup,
        options: &ShrinkOptions,
        is_planned: bool,
    ) -> Result<ProcessGroup> {
        let rank = group.rank();
        let formed = group.detach(!is_planned).and_then(|mut process| {
            let meeting = Meeting {
                log: self,
                process: &mut process,
                options,
                until: Instant::now().checked_add(options.timeout),
                is_planned,
            };
            meeting.form()
        });
        formed.map_err(|e| e.with_rank(rank).with_operation("forming the next group"))
    }
}

/// A process that joins a group which other processes have formed.
pub struct Newcomer {
    process: Detached,
    log: Log,
}

impl Newcomer {
    /// Opens the store of the job, as [`ProcessGroup::init`] does. `number` is this process's among all that the job has
    /// started, which no other process has or had.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::init`].
    pub fn new(number: usize, options: InitOptions) -> Result<Newcomer> {
        Ok(Newcomer::of(Detached::new(number, options)?))
    }

    /// As [`new`](Self::new), through a store that the caller has opened; `options` must have a token.
    ///
    /// # Errors
    ///
    /// `Usage` when they have none.
    pub fn from_store(
        store: Arc<dyn Store>,
        number: usize,
        options: InitOptions,
    ) -> Result<Newcomer> {
        Ok(Newcomer::of(Detached::from_store(store, number, options)?))
    }

    fn of(process: Detached) -> Newcomer {
        let log = Log::new(process.store());
        Newcomer { process, log }
    }

    /// The log of the job.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// This process's number among all that the job has started.
    pub fn number(&self) -> usize {
        self.process.number()
    }

    /// Waits for the members to call [`grow`], and joins; `None` when the job ends before, or this process is asked to leave.
    ///
    /// *Blocks* as long as the job runs.
    ///
    /// # Errors
    ///
    /// `Usage` when another process has, or had, this number; `Excluded` when this one was reported lost; `PeerLost` when
    /// the store is gone; those of forming links.
    pub fn join(mut self, options: &ShrinkOptions) -> Result<Option<ProcessGroup>> {
        let joined = self.ask(options);
        joined.map_err(|e| e.with_operation("joining the group"))
    }

    fn ask(&mut self, options: &ShrinkOptions) -> Result<Option<ProcessGroup>> {
        let number = self.number();
        let tag = RandomState::new().build_hasher().finish();
        let mut has_asked = false;
        // The group that this process has come to join: its job and generation.
        let mut met: Option<(u64, u32)> = None;
        loop {
            let limit = if has_asked { LISTEN } else { Duration::ZERO };
            if answered(self.log.wait(limit).map(drop))?.is_none() {
                continue;
            }
            let state = self.log.state();
            if state.over().is_some() || state.is_leaving(number) {
                return Ok(None);
            }
            if let Some(why) = state.why_lost(number).filter(|_| has_asked) {
                let what = format!("the others continue without process {number}: {why}");
                return Err(Error::new(ErrorKind::Excluded, what));
            }
            let next = met.and_then(|(job, last)| {
                let next = &state.group(job)?.formation;
                let is_in = next.generation > last && next.members.contains(&number);
                is_in.then(|| next.clone())
            });
            if let Some(next) = next {
                let mut meeting = Meeting {
                    log: &mut self.log,
                    process: &mut self.process,
                    options,
                    until: Instant::now().checked_add(options.timeout),
                    is_planned: false,
                };
                let formed = meeting.connect(next).unwrap_or_else(|| meeting.form());
                match formed {
                    // They continue without this process, which asks again.
                    Err(e) if e.kind() == ErrorKind::Excluded => met = None,
                    formed => return formed.map(Some),
                }
            } else if state.tag(number) == Some(tag) {
                has_asked = true;
                let gathers = state.groups().find(|group| group.gathers);
                let last = gathers.map(|group| &group.formation);
                if let Some((job, generation)) = last.map(|last| (last.job, last.generation))
                    && met != Some((job, generation))
                {
                    let key = here_key(job, generation + 1, number);
                    let host = self.process.host();
                    let set = self.process.store().set(&key, host.as_bytes());
                    met = answered(set)?.map(|()| (job, generation));
                }
            } else if state.is_used(number) {
                return Err(Error::usage(format!(
                    "process number {number} is already used; a process that joins needs a number that no other process has \
                     or had"
                )));
            } else {
                answered(self.log.append(|state| {
                    (!state.is_used(number)).then_some(Event::Asks { number, tag })
                }))?;
            }
        }
    }
}

/// `None` where the store has not answered.
fn answered<T>(result: phalanx_store::Result<T>) -> Result<Option<T>> {
    match result {
        Err(e) if e.kind() == StoreKind::NoAnswer => Ok(None),
        result => Ok(Some(result?)),
    }
}

impl std::fmt::Debug for Newcomer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Newcomer")
            .field("number", &self.number())
            .finish_non_exhaustive()
    }
}

fn here_key(job: u64, generation: u32, number: usize) -> String {
    format!("job/here/{job:016x}/{generation}/{number}")
}

/// One process's part in forming the next group.
struct Meeting<'a> {
    log: &'a mut Log,
    process: &'a mut Detached,
    options: &'a ShrinkOptions,
    until: Option<Instant>,
    /// The ranks have agreed on it between two operations: newcomers may join.
    is_planned: bool,
}

impl Meeting<'_> {
    fn left(&self) -> Duration {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        self.until.map_or(Duration::MAX, left)
    }

    /// Tries one generation after the other, until a group has formed.
    fn form(mut self) -> Result<ProcessGroup> {
        loop {
            let next = self.meet()?;
            if let Some(formed) = self.connect(next) {
                return formed;
            }
        }
    }

    /// Connects to the members of `next`; `None`: it failed, and the next generation can be tried.
    fn connect(&mut self, next: Formation) -> Option<Result<ProcessGroup>> {
        let (generation, left) = (next.generation, self.left());
        let limit = (left / 2).max(FORMING_MIN).min(left);
        let group = self.log.state().group(next.job);
        let limit = match group.is_some_and(|group| group.new.is_empty()) {
            true => limit,
            false => limit.min(2 * NEWCOMER_WAIT),
        };
        let formed = self.process.form(next, limit);
        self.is_planned = false;
        match formed {
            Err(e) if !self.left().is_zero() && e.kind() != ErrorKind::Usage => {
                tracing::warn!("forming generation {generation} failed, retrying: {e}");
                None
            }
            formed => Some(formed),
        }
    }

    /// Asks the store again while it does not answer, until the deadline.
    fn insist<T>(
        &mut self,
        mut ask: impl FnMut(&mut Log) -> phalanx_store::Result<T>,
    ) -> Result<T> {
        let until = self.until;
        let is_time = || until.is_none_or(|until| Instant::now() < until);
        insist(is_time, || ask(self.log)).map_err(cannot_meet)
    }

    /// Waits for the others. Returns the next group, if this process is a member of it.
    fn meet(&mut self) -> Result<Formation> {
        let last = self.process.last().cloned();
        let last = last.ok_or_else(|| Error::internal("it was in no group"))?;
        let seat = Seat {
            number: self.process.number(),
            has_formed: self.process.left() == Some(last.generation),
            is_planned: self.is_planned,
            last,
        };
        let (job, last) = (seat.last.job, seat.last.generation);
        let generation = last.checked_add(1);
        let generation = generation.ok_or_else(|| Error::usage("there are no more generations"))?;
        let here = |number: usize| here_key(job, generation, number);
        let (store, host) = (self.process.store(), self.process.host());
        self.insist(|_| store.set(&here(seat.number), host.as_bytes()))?;
        self.insist(|log| log.append(|state| seat.gather(state)))?;
        let mut enough_since: Option<Instant> = None;
        loop {
            self.insist(|log| log.read().map(drop))?;
            let state = self.log.state();
            match seat.next(state) {
                Next::In(group) => return Ok(group),
                Next::Without(group) => return Err(self.excluded(seat.number, &group)),
                Next::Lost(why) => {
                    let number = seat.number;
                    let what = format!(
                        "process {number} was reported lost ({why}), and the others continue"
                    );
                    return Err(Error::new(ErrorKind::Excluded, what));
                }
                Next::Open => {}
            }
            let expected = seat.expected(state);
            let newcomers = &expected.newcomers;
            let all = [&expected.members[..], newcomers].concat();
            let keys: Vec<String> = all.iter().map(|number| here(*number)).collect();
            let names: Vec<&str> = keys.iter().map(String::as_str).collect();
            let missing = match store.wait(&names, LOOK.min(self.left())) {
                Ok(()) => Vec::new(),
                Err(e) if e.kind() == StoreKind::Timeout => e.missing_keys().to_vec(),
                // This says nothing about the other ranks, and the store may still answer in time.
                Err(e) if e.kind() == StoreKind::NoAnswer && !self.left().is_zero() => continue,
                Err(e) => return Err(cannot_meet(e)),
            };
            let comes = |number: &usize| !missing.contains(&here(*number));
            let (present, absent): (Vec<usize>, Vec<usize>) = all.iter().partition(|n| comes(n));
            // A newcomer has nothing that the others need.
            let is_late = |number: &&usize| newcomers.contains(number);
            let late = absent.iter().filter(is_late).count();
            let unexplained = absent.len() - late;
            if present.len() >= self.min_world(&seat, unexplained) {
                let since = *enough_since.get_or_insert_with(Instant::now);
                let waited = match (unexplained, late) {
                    (0, 0) => Duration::ZERO,
                    (0, _) => self.options.straggler_wait.min(NEWCOMER_WAIT),
                    _ => self.options.straggler_wait,
                };
                let joins = present.last().is_some_and(|last| newcomers.contains(last));
                // The first process asks for their hosts; if it is lost, the others do.
                let patience = match joins && present.first() != Some(&seat.number) {
                    true => 4 * LOOK + ASK * present.len() as u32,
                    false => Duration::ZERO,
                };
                if since.elapsed() >= waited.saturating_add(patience) {
                    let host_of = |number: usize| store.try_get(&here(number));
                    let members = self.insist(|_| place(&present, newcomers, host_of))?;
                    self.insist(|log| log.append(|state| seat.form(state, &members, &expected)))?;
                    continue;
                }
                if since.elapsed() >= waited {
                    // Waits for the decision of another process.
                    let limit = LOOK.min(self.left());
                    self.insist(|log| log.wait(limit).map(drop))?;
                }
            }
            if let Some(why) = self.log.state().over() {
                let what = format!("the job ends: {why}");
                return Err(Error::new(ErrorKind::Aborted, what));
            }
            if self.left().is_zero() {
                return Err(self.too_few(&seat, present.len(), &absent));
            }
        }
    }

    /// Least size of the new group, if `unexplained` processes do not come and are not known to be lost.
    fn min_world(&self, seat: &Seat, unexplained: usize) -> usize {
        let least = match unexplained {
            0 => 1,
            _ => seat.world(self.log.state()) / 2 + 1,
        };
        self.options.min_world.unwrap_or(least).max(1)
    }

    fn excluded(&self, number: usize, group: &Formation) -> Error {
        Error::new(
            ErrorKind::Excluded,
            format!(
                "process {number} was excluded from generation {} (members: {}), which waited {:.1} s for it; start it again to \
                 take part in a later run",
                group.generation,
                list(&group.members),
                self.options.straggler_wait.as_secs_f64(),
            ),
        )
    }

    fn too_few(&self, seat: &Seat, present: usize, absent: &[usize]) -> Error {
        let majority = match self.options.min_world {
            None => ", more than half",
            Some(_) => "",
        };
        Error::timeout(format!(
            "{present} of {} ranks came within {:.1} s, {} are needed{majority}; processes that did not come: {}",
            seat.world(self.log.state()),
            self.options.timeout.as_secs_f64(),
            self.min_world(seat, absent.len()),
            list(absent),
        ))
    }
}

fn cannot_meet(e: phalanx_store::Error) -> Error {
    let hint = match e.kind() {
        StoreKind::PeerLost => {
            "; a job whose rank 0 hosts the store ends with it: `phalanx launch` hosts it apart"
        }
        _ => "",
    };
    let of_store = Error::from(e);
    let what = format!("the ranks cannot meet again: {}{hint}", of_store.message());
    Error::new(of_store.kind(), what).with_source(of_store)
}

fn list(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    numbers.join(", ")
}

/// `present` by their new ranks: each of the `newcomers` follows the last one of its host.
fn place<H: PartialEq>(
    present: &[usize],
    newcomers: &[usize],
    host_of: impl Fn(usize) -> phalanx_store::Result<H>,
) -> phalanx_store::Result<Vec<usize>> {
    let is_new = |number: &usize| newcomers.contains(number);
    let (new, mut placed): (Vec<usize>, Vec<usize>) = present.iter().partition(|n| is_new(n));
    if new.is_empty() {
        return Ok(placed);
    }
    let hosts = placed.iter().map(|number| host_of(*number));
    let mut hosts: Vec<H> = hosts.collect::<Result<_, _>>()?;
    for number in new {
        let host = host_of(number)?;
        let last = hosts.iter().rposition(|known| *known == host);
        let at = last.map_or(placed.len(), |last| last + 1);
        placed.insert(at, number);
        hosts.insert(at, host);
    }
    Ok(placed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_follows_the_ranks_of_its_host() {
        let placed = |present: &[usize], newcomers: &[usize], hosts: &[(usize, &str)]| {
            let host_of = |number: usize| {
                let host = hosts.iter().find(|(known, _)| *known == number);
                Ok(host.map_or("", |(_, host)| *host))
            };
            place(present, newcomers, host_of).unwrap()
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
        // Without newcomers no host is needed.
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
}
