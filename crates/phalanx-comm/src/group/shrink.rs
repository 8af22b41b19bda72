//! Forms a new group of the remaining ranks, in the same processes.
//!
//! A poisoned group never recovers; a new one is formed under the next generation.
//! The ranks meet in the store through which the job was formed:
//!
//! | key                           | value              | written by                     |
//! |-------------------------------|--------------------|--------------------------------|
//! | `shrink/JOB/GENERATION/here/F`     | `1`                | every rank that wants to continue |
//! | `shrink/JOB/GENERATION/members`    | `F F F …`, by rank | one of them, by compare-and-set |
//!
//! `F` is a rank's number in the first generation, which never changes; the new
//! ranks are the indices in the list, in the old order.
//!
//! *Who decides.* A rank that sees all ranks of the old group, or enough of them and no
//! more during the wait for stragglers, proposes the ranks present. The first proposal
//! is the decision: one store, one list, hence one group. Where a majority is required,
//! at most one side of a split has enough ranks. A rank that is not in the list gets an
//! error. When forming the links fails (another rank died meanwhile), the remaining
//! ranks try the next generation.
//!
//! *The store must live.* `phalanx launch` hosts it, apart from all ranks. When rank 0
//! hosts it (`tcp://` without a launcher) its death ends the job, and the error says
//! so; a `file://` store outlives all ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store};

use super::join::{WORLD_GROUP, lone_mesh};
use super::{Identity, Member, Origin, ProcessGroup};
use crate::select::Selector;
use crate::transport::{Mesh, Poison, remove_generation};
use crate::wait::deadline_in;
use crate::{Error, ErrorKind, Result};

/// How a group is re-formed. All ranks must give the same options.
#[derive(Clone, Debug)]
pub struct ShrinkOptions {
    /// Least size of the new group; default: more than half of the group that ended, so
    /// that two parts of it can never both continue.
    pub min_world: Option<usize>,
    /// How long to wait for more ranks once there are enough; 1 s. Ranks that come
    /// later get [`ErrorKind::Excluded`].
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
const LOOK: Duration = Duration::from_millis(20);
/// Shortest deadline for forming the links; after a failure the next generation is tried.
const FORMING_MIN: Duration = Duration::from_secs(1);

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
    /// *Blocks until* all ranks of the old group have come, or at least
    /// [`ShrinkOptions::min_world`] and no other for
    /// [`ShrinkOptions::straggler_wait`]; at most [`ShrinkOptions::timeout`].
    ///
    /// # Errors
    ///
    /// `Timeout` naming the ranks that did not come when too few did;
    /// `Excluded` when the others continued without this rank; `PeerLost` when the
    /// store is gone (rank 0 hosted it and died); `Usage` for a subgroup.
    pub fn shrink(self, options: ShrinkOptions) -> Result<ProcessGroup> {
        let (rank, old) = (self.core.rank, self.core.generation);
        let named = |e: Error| e.with_rank(rank).with_operation("forming the group anew");
        if self.core.id != WORLD_GROUP {
            return Err(named(Error::usage(
                "only the group of all ranks can be formed anew; make its subgroups again then",
            )));
        }
        let global_rank = self.core.identity.global_rank;
        // Not a failure of this rank: the recorder does not record one.
        let cause = format!("rank {rank} leaves generation {old} to form the next");
        self.core.abort.poison(&Poison::new(rank, cause));
        self.core.queue.close();
        let meeting = Reform {
            identity: self.core.identity.clone(),
            world: self.core.world,
            min_world: options.min_world.unwrap_or(self.core.world / 2 + 1).max(1),
            options: &options,
            deadline: deadline_in(options.timeout),
        };
        let origin = Arc::clone(&self.core.origin);
        let (limits, algorithm) = (self.core.limits, self.core.algorithm);
        let (defaults, recorder) = (self.defaults.clone(), Arc::clone(&self.core.recorder));
        let chosen_by = self.core.selector.clone();
        // The old links are closed before new ones are made.
        drop(self);
        let mut generation = old;
        loop {
            generation = generation
                .checked_add(1)
                .ok_or_else(|| named(Error::usage("there are no more generations")))?;
            let members = meeting.meet(&origin, generation).map_err(named)?;
            let Some(rank) = members.iter().position(|f| *f == global_rank) else {
                return Err(named(meeting.excluded(generation, &members)));
            };
            let member = Member {
                rank,
                world: members.len(),
                id: WORLD_GROUP,
                generation,
                limits,
                algorithm,
                identity: Some(Identity {
                    roster: members.as_slice().into(),
                    ..meeting.identity.clone()
                }),
            };
            match meeting.connect(&origin, &member) {
                Ok((mesh, origin)) => {
                    tracing::info!(generation, rank, ?members, "formed the group anew");
                    if rank == 0 {
                        // The keys of the lost ranks, in subgroups too.
                        let job = meeting.identity.job;
                        (old..generation)
                            .for_each(|over| remove_generation(&*origin.store(), over, job));
                    }
                    // The network is the one that was measured before.
                    let selector = Selector::new(
                        mesh.hosts().clone(),
                        *chosen_by.costs(),
                        chosen_by.rules().clone(),
                    );
                    let group = Self::from_mesh(member, mesh, selector, origin, recorder, false)?;
                    return Ok(ProcessGroup { defaults, ..group });
                }
                Err(e) if meeting.left().is_zero() || e.kind() == ErrorKind::Usage => {
                    return Err(named(e));
                }
                Err(e) => {
                    tracing::warn!("generation {generation} could not be formed, going on: {e}")
                }
            }
        }
    }
}

/// One rank's view of the meeting.
struct Reform<'a> {
    identity: Identity,
    /// Size of the group that ended.
    world: usize,
    min_world: usize,
    options: &'a ShrinkOptions,
    deadline: Instant,
}

impl Reform<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn prefix(&self, generation: u32) -> String {
        format!("shrink/{:016x}/{generation}", self.identity.job)
    }

    /// Joins the meeting of `generation` and returns its members, by first rank.
    fn meet(&self, origin: &Origin, generation: u32) -> Result<Vec<usize>> {
        let store = origin.store();
        let prefix = self.prefix(generation);
        let decision = format!("{prefix}/members");
        let lost = |e: phalanx_store::Error| {
            let hint = match e.kind() {
                StoreKind::PeerLost => {
                    "; a job whose rank 0 hosts the store ends with it: `phalanx launch` \
                     hosts it apart, and a file:// store outlives all ranks"
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
        store
            .set(&here(self.identity.global_rank), b"1")
            .map_err(lost)?;
        let keys: Vec<String> = self.identity.roster.iter().map(|f| here(*f)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut enough_since: Option<Instant> = None;
        loop {
            if let Some(list) = store.try_get(&decision).map_err(lost)? {
                return decode(&list);
            }
            let missing = match store.wait(&names, LOOK.min(self.left())) {
                Ok(()) => Vec::new(),
                Err(e) if e.kind() == StoreKind::Timeout => e.missing_keys().to_vec(),
                // This says nothing about the other ranks, and the store may still answer in time.
                Err(e) if e.kind() == StoreKind::NoAnswer && !self.left().is_zero() => continue,
                Err(e) => return Err(lost(e)),
            };
            let is_missing = |f: &&usize| missing.contains(&here(**f));
            let (absent, present): (Vec<usize>, Vec<usize>) =
                self.identity.roster.iter().partition(|f| is_missing(f));
            if present.len() >= self.min_world {
                let since = *enough_since.get_or_insert_with(Instant::now);
                if absent.is_empty() || since.elapsed() >= self.options.straggler_wait {
                    let list = encode(&present);
                    let decided = store
                        .compare_set(&decision, None, list.as_bytes())
                        .map_err(lost)?;
                    return decode(&decided);
                }
            }
            if self.left().is_zero() {
                return Err(self.too_few(&present, &absent));
            }
        }
    }

    /// Connects the members of the new generation.
    fn connect(&self, origin: &Arc<Origin>, member: &Member) -> Result<(Mesh, Arc<Origin>)> {
        let limit = (self.left() / 2).max(FORMING_MIN).min(self.left());
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
                let mesh = if member.world == 1 {
                    lone_mesh()?
                } else {
                    processes.form(WORLD_GROUP, member.rank, member.world, limit)?
                };
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
            self.min_world,
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

fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    names.join(", ")
}

pub(super) fn encode(members: &[usize]) -> String {
    let names: Vec<String> = members.iter().map(usize::to_string).collect();
    names.join(" ")
}

/// Parses the decision; a list that is not ascending is not ours.
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<usize>> {
    let text = String::from_utf8_lossy(bytes);
    let members: Option<Vec<usize>> = text.split(' ').map(|f| f.parse().ok()).collect();
    members
        .filter(|m| m.is_sorted_by(|a, b| a < b))
        .ok_or_else(|| {
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
    fn lists_round_trip_and_garbage_is_refused() {
        for members in [vec![0], vec![0, 2, 5], vec![7]] {
            assert_eq!(decode(encode(&members).as_bytes()).unwrap(), members);
        }
        for garbage in ["", "0 0", "2 1", "0,1", "0  1", "-1", "x"] {
            let error = decode(garbage.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{garbage:?}");
        }
    }
}
