//! Forms the next group of a job: of the ranks that are left, and of processes that join, without new processes for those
//! that were in the last one.
//!
//! A failed group never recovers. Its processes leave it ([`ProcessGroup::detach`]) and form another one under the next
//! generation ([`Detached::form`]), in which each is named by its number: its rank in the first generation, or the number that
//! a newcomer was started with. Which processes these are is decided elsewhere (`phalanx-member`).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store};
use serde::{Deserialize, Serialize};

use super::join::{Processes, WORLD_GROUP, open};
use super::launch::{Launch, environment, no_token};
use super::options::{Call, InitOptions};
use super::{Identity, Member, Origin, ProcessGroup};
use crate::lost::LostRanks;
use crate::operation::Limits;
use crate::recorder::{Place, Recorder};
use crate::select::{Algorithm, Costs, Rules, Selector};
use crate::sync::lock;
use crate::transport::{Mesh, Poison, machine, remove_generation};
use crate::{Error, Result};

/// A group that processes form. All of them must be given the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Formation {
    /// Distinguishes the job from others that use the same store.
    pub job: u64,
    /// Greater than that of each group before it.
    pub generation: u32,
    /// The numbers of the processes, by rank.
    pub members: Vec<usize>,
    /// What was measured when the first group was formed.
    pub costs: Costs,
}

/// A process of a job that is in no group of all ranks: it has left one, or is to join one.
pub struct Detached {
    number: usize,
    origin: Arc<Origin>,
    limits: Limits,
    algorithm: Algorithm,
    rules: Rules,
    defaults: Call,
    recorder: Option<Arc<Recorder>>,
    /// The generation of the group that it was in.
    left: Option<u32>,
    /// The group that it was in, or has tried to form since.
    last: Option<Formation>,
}

impl ProcessGroup {
    /// Leaves the group to form the next one. This handle is consumed; other handles to the group refuse operations.
    /// `is_failed`: the group is aborted if it was not, so that no rank stays in it. Otherwise no operation may be in flight
    /// on any rank, and *blocks* until the other ranks have left too, or a moment.
    ///
    /// # Errors
    ///
    /// `Usage` for a subgroup.
    pub fn detach(self, is_failed: bool) -> Result<Detached> {
        let core = &self.core;
        if core.id != WORLD_GROUP {
            return Err(self.usage(
                "detach",
                "only the group of all ranks can be formed again; make its subgroups again then"
                    .to_owned(),
            ));
        }
        if is_failed {
            let cause = format!(
                "rank {} leaves generation {} to form the next",
                core.rank, core.generation
            );
            // Not a failure of this rank: the recorder does not record one.
            core.abort.poison(&Poison::new(core.rank, cause));
        } else {
            // A rank may still wait for the last operation. If one was lost, the next group finds out.
            let left = self.goodbye();
            tracing::debug!(?left, "leaving the group to form the next");
        }
        core.queue.close();
        Ok(Detached {
            number: core.identity.global_rank,
            origin: Arc::clone(&core.origin),
            limits: core.limits,
            algorithm: core.algorithm,
            rules: core.selector.rules().clone(),
            defaults: self.defaults.clone(),
            recorder: Some(Arc::clone(&core.recorder)),
            left: Some(core.generation),
            last: Some(Formation {
                job: core.identity.job,
                generation: core.generation,
                members: core.identity.roster.to_vec(),
                costs: *core.selector.costs(),
            }),
        })
    }

    /// Forms the group `generation` of the processes with the numbers `members`, in this order, all of which call this or are
    /// newcomers ([`Detached::form`]). The last group is aborted if it was not.
    ///
    /// *Blocks until* all have come, at most `timeout`.
    ///
    /// # Errors
    ///
    /// Those of [`detach`](Self::detach) and [`Detached::form`].
    pub fn reconfigure(
        self,
        generation: u32,
        members: &[usize],
        timeout: Duration,
    ) -> Result<ProcessGroup> {
        let rank = self.core.rank;
        let mut process = self.detach(true)?;
        let next = process.next(generation, members);
        let next = next.ok_or_else(|| Error::internal("it was in a group"));
        let formed = next.and_then(|next| process.form(next, timeout));
        formed.map_err(|e| e.with_rank(rank).with_operation("forming the next group"))
    }
}

impl Detached {
    /// A process that was in no group yet: opens the store of the job, as [`ProcessGroup::init`] does. No other process
    /// of the job has, or had, its `number`.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::init`].
    pub fn new(number: usize, options: InitOptions) -> Result<Detached> {
        let started = Instant::now();
        let options = InitOptions {
            rank: Some(number),
            world_size: Some(number + 1),
            ..options
        };
        let launch = Launch::resolve(&options, environment)?;
        let processes = open(&launch, options, started)?;
        Detached::within(number, processes)
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
    ) -> Result<Detached> {
        let token = options.token.clone().ok_or_else(no_token)?;
        Detached::within(number, Processes::within(store, token, options))
    }

    fn within(number: usize, processes: Processes) -> Result<Detached> {
        let options = &processes.options;
        Ok(Detached {
            number,
            limits: options.limits(),
            algorithm: options.algorithm,
            rules: options.rules.clone().then(Rules::from_env()?),
            defaults: Call::default(),
            recorder: None,
            left: None,
            last: None,
            origin: Arc::new(Origin::Processes(Box::new(processes))),
        })
    }

    /// This process's number among all that the job has started.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The store of the job; of ranks that are threads, one in memory.
    pub fn store(&self) -> Arc<dyn Store> {
        self.origin.store()
    }

    /// The group that it was in, or has tried to form since; `None` for one that was in no group yet.
    pub fn last(&self) -> Option<&Formation> {
        self.last.as_ref()
    }

    /// The generation of the group that it was in, if it was in one.
    pub fn left(&self) -> Option<u32> {
        self.left
    }

    /// The group `generation` of the processes `members`, after [`last`](Self::last).
    pub fn next(&self, generation: u32, members: &[usize]) -> Option<Formation> {
        Some(Formation {
            generation,
            members: members.to_vec(),
            ..self.last.clone()?
        })
    }

    /// Equal for processes that share a kernel and a network name space. Empty when unknown.
    pub fn host(&self) -> String {
        machine()
    }

    /// Forms the group `next`, which this process is a member of. After an error it may form one of a later generation.
    ///
    /// *Blocks until* all members have come, at most `timeout`; fails as soon as one is [reported lost](crate::report_lost).
    ///
    /// # Errors
    ///
    /// `Usage` when this process is not a member, or one is twice; `Timeout` naming ranks that did not come; `PeerLost`.
    pub fn form(&mut self, next: Formation, timeout: Duration) -> Result<ProcessGroup> {
        let mut once = next.members.clone();
        once.sort_unstable();
        once.dedup();
        let rank = next
            .members
            .iter()
            .position(|number| *number == self.number);
        let Some(rank) = rank.filter(|_| once.len() == next.members.len()) else {
            return Err(Error::usage(format!(
                "process {} forms a group of the processes {:?}: each member must be named once",
                self.number, next.members
            )));
        };
        let member = Member {
            rank,
            world: next.members.len(),
            id: WORLD_GROUP,
            generation: next.generation,
            limits: self.limits,
            algorithm: self.algorithm,
            identity: Some(Identity {
                global_rank: self.number,
                roster: next.members.as_slice().into(),
                job: next.job,
            }),
        };
        // The network is the one that was measured before.
        let (costs, job) = (next.costs, next.job);
        self.last = Some(next);
        let (mesh, origin) = self.connect(&member, timeout)?;
        if rank == 0 {
            // The keys of the ranks that were lost, in subgroups too.
            (self.left.unwrap_or(member.generation)..member.generation)
                .for_each(|over| remove_generation(&*origin.store(), over, job));
        }
        let recorder = match &self.recorder {
            Some(recorder) => Arc::clone(recorder),
            None => {
                let recorder = Recorder::new(self.number, member.world, &Place::Launcher);
                Arc::new(recorder.map_err(|e| Error::io("mapping the flight recorder", e))?)
            }
        };
        let selector = Selector::new(mesh.hosts().clone(), costs, self.rules.clone());
        let group = ProcessGroup::from_mesh(member, mesh, selector, origin, recorder, false)?;
        Ok(ProcessGroup {
            defaults: self.defaults.clone(),
            ..group
        })
    }

    fn connect(&self, member: &Member, timeout: Duration) -> Result<(Mesh, Arc<Origin>)> {
        match &*self.origin {
            Origin::Threads { registry, .. } => {
                // Even: the ids of subgroups are odd.
                let id = member.generation << 1;
                let mesh = registry
                    .take(id, member.rank, member.world)
                    .ok_or_else(|| Error::internal("two generations have the same id"))?;
                Ok((mesh, Arc::clone(&self.origin)))
            }
            Origin::Processes(processes) => {
                let mut processes = processes.clone();
                processes.generation = member.generation;
                let numbers = member.identity.iter().flat_map(|id| id.roster.to_vec());
                let store = Arc::clone(&processes.store);
                // A member that is lost before it has come leaves nothing there.
                let ranks = Mutex::new(LostRanks::of(&numbers.collect::<Vec<_>>()));
                let find_lost = || -> phalanx_store::Result<Option<(usize, String)>> {
                    let mut ranks = lock(&ranks);
                    let lost = ranks.read(&*store)?.first();
                    Ok(lost.map(|lost| (lost.rank, lost.why.clone())))
                };
                let lost = || match find_lost() {
                    Err(e) if e.kind() == StoreKind::NoAnswer => Ok(None),
                    found => Ok(found?),
                };
                let (rank, world) = (member.rank, member.world);
                let mesh = processes.form_unless(WORLD_GROUP, rank, world, timeout, &lost)?;
                Ok((mesh, Arc::new(Origin::Processes(processes))))
            }
        }
    }
}

impl std::fmt::Debug for Detached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Detached")
            .field("number", &self.number)
            .field("last", &self.last)
            .finish_non_exhaustive()
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
