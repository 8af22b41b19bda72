//! Ranks of an elastic job that are lost, leave, or are started again.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_base::env::RUN_POINTER_VARIABLE;
use phalanx_base::format::rank_list;
use phalanx_base::job_files::RUN_POINTER;
use phalanx_member::{Event as Change, Log};
use phalanx_process::Guard;
use phalanx_process::proc_stat::path_of;
use phalanx_store::{Store, TcpStore};
use rustix::process::Signal;

use super::{Job, Leaving, Supervision};
use crate::contract::{self, RankVariables};
use crate::error::{Error, ErrorKind, Result};
use crate::evict::Seen;
use crate::machine::TWIN;
use crate::nodes::{self, Nodes};
use crate::ranks::{Rank, RankSpawner};
use crate::report::{self, JobFailure};
use crate::{flight, stop, system};

/// How long a local store takes to answer.
const LOCAL_STORE: Duration = Duration::from_secs(10);

impl Job<'_> {
    /// Starts the local rank `local_rank`; in place of a lost one with the number `joins_as`.
    pub(super) fn start_rank(
        &self,
        local_rank: usize,
        restarts: u32,
        joins_as: Option<usize>,
        guard: &Arc<Guard>,
    ) -> Result<Rank> {
        let token_file = path_of(&self.token_fd);
        let starter = RankSpawner {
            plan: self.plan,
            token: self.token_fd.as_fd(),
            folder: &self.folder,
            out: &self.out,
            err: &self.err,
            unwritten: &self.unwritten,
            processors: self.processors.as_deref(),
            files: self.files.as_ref(),
            guard,
            events: &self.sender,
        };
        let pointer = self.folder.path().join(RUN_POINTER).into_os_string();
        let pointer = (RUN_POINTER_VARIABLE.into(), pointer);
        let devices = self.plan.args.torchrun.devices.as_ref();
        let rank = self.shared.first_rank + local_rank;
        let started = starter.start(local_rank, rank, restarts, |error_file| {
            let own = RankVariables {
                local_rank,
                restarts,
                error_file,
                token_file: token_file.clone(),
                joins_as,
            };
            contract::variables(&self.shared, &own)
                .into_iter()
                .map(|(name, value)| (name.into(), value))
                .chain(self.plan.variables.iter().cloned())
                .chain(devices.map_or(Vec::new(), |d| d.variables(local_rank)))
                .chain([pointer.clone()])
                .collect()
        });
        started.map(|mut rank| {
            rank.number = joins_as.unwrap_or(rank.number);
            rank
        })
    }

    /// Asks the ranks of this node to leave the others after a step, if the job continues without them; false: it does not.
    pub(super) fn leave(&self, watch: &mut Supervision<'_>, signal: i32, at: Instant) -> bool {
        let nodes = self.nodes.as_ref().filter(|n| n.continues_in_place());
        // Ctrl-C on the node with the store ends the job.
        let ends = |nodes: &Nodes| nodes.hosts_store() && signal != Signal::TERM.as_raw();
        if nodes.is_none_or(|nodes| ends(nodes) || !nodes.may_go()) || watch.machine.why().is_some()
        {
            return false;
        }
        if let Some(leaving) = watch.leaving {
            if at >= leaving.asked + TWIN {
                watch.kill();
            }
            return true;
        }
        let world = self.shared.world;
        let own: Vec<usize> = watch.running().map(|rank| rank.number).collect();
        let asked = self.log_of(watch).and_then(|log| {
            let failed = || system("cannot leave the other nodes");
            let state = log.read().map_err(failed())?;
            let others = state.numbers(world).filter(|number| !own.contains(number));
            let continues = state.can_grow() && state.continues_with(world, others);
            for number in own.iter().filter(|_| continues) {
                let leave = Change::Leave { number: *number };
                let left = log.append(|state| (!state.is_leaving(*number)).then(|| leave.clone()));
                left.map_err(failed())?;
            }
            Ok(continues)
        });
        if !asked.unwrap_or(false) {
            return false;
        }
        let grace = watch.handler_grace();
        watch.leaving = Some(Leaving {
            signal,
            asked: at,
            until: Instant::now() + grace,
        });
        let name = stop::signal_name(signal);
        let ranks = rank_list(&own);
        let verb = if own.len() == 1 { "leaves" } else { "leave" };
        self.note(format!(
            "{name}: {ranks} {verb} after a step, and the others continue"
        ));
        true
    }

    /// The log of an elastic job's processes, which its ranks read too.
    pub(super) fn log_of<'w>(&self, watch: &'w mut Supervision<'_>) -> Result<&'w mut Log> {
        if watch.log.is_none() {
            let failed = "cannot reach the store";
            let store: Arc<dyn Store> = match &self.nodes {
                // Its silence ends the wait for an answer.
                Some(nodes) => nodes.store(),
                None => {
                    let token = self.plan.token.clone();
                    let store = TcpStore::connect(&self.at.dial, token, LOCAL_STORE);
                    Arc::new(store.map_err(system(failed))?)
                }
            };
            watch.log = Some(Log::new(store));
        }
        let log = watch.log.as_mut();
        log.ok_or_else(|| Error::new(ErrorKind::Failed, "no store"))
    }

    /// The others need not wait for the local rank `local` of an elastic job, which has succeeded.
    pub(super) fn is_done(&self, watch: &mut Supervision<'_>, local: usize) {
        let number = watch.ranks[local].number;
        // Ranks that do not learn of it wait for a deadline.
        let log = self.log_of(watch);
        let _ = log.map(|log| log.lose(number, "it has succeeded"));
    }

    /// Whether the local rank `local`, which has failed, was a newcomer that the others do not need.
    pub(super) fn judge(&self, watch: &mut Supervision<'_>, local: usize) {
        let (number, world) = (watch.ranks[local].number, self.shared.world);
        // The store may have ended with the job: it is asked only where it matters.
        let mut log = (number >= world).then(|| self.log_of(watch));
        let state = log.as_mut().and_then(|log| log.as_mut().ok()?.read().ok());
        let is_candidate = state.is_some_and(|state| state.is_candidate(world, number));
        watch.machine.set_candidate(local, is_candidate);
    }

    /// The job continues without the local rank `local`, or with another process in its place.
    pub(super) fn lose(&self, watch: &mut Supervision<'_>, local: usize) {
        let (number, pid) = (watch.ranks[local].number, watch.ranks[local].pid);
        let (in_place, world) = (self.continues_in_place(), self.shared.world);
        let alive: Vec<usize> = watch.machine.alive().collect();
        let alive = alive.iter().map(|local| watch.ranks[*local].number);
        let alive: Vec<usize> = alive.collect();
        let continues = self.log_of(watch).and_then(|log| {
            let failed = || system("cannot report a lost rank");
            let state = log.read().map_err(failed())?;
            let others = match in_place {
                true => state.numbers(world).collect(),
                false => alive,
            };
            let others = others.into_iter().filter(|other| *other != number);
            let continues = state.continues_with(world, others);
            if continues {
                let why = format!("pid {} has ended", pid.as_raw_nonzero());
                log.lose(number, &why).map_err(failed())?;
            } else if !log.state().is_elastic() {
                self.note(
                    "--elastic does not keep this job running: its training has not begun or has lost a part of its state, or the \
                     program uses neither a Trainer nor phalanx.torch.elastic"
                        .to_owned(),
                );
            }
            Ok(continues)
        });
        if let Ok(false) = continues {
            let action = watch.machine.fail(local, Instant::now());
            return watch.act(action);
        }
        if continues.is_err() && in_place && watch.machine.why().is_none() {
            // The network to node 0 is down, for a moment or longer.
            return watch.unreported.push(local);
        }
        if self.nodes.as_ref().is_some_and(Nodes::was_lost) {
            watch.was_lost = true;
            let action = watch.machine.failed_elsewhere(Instant::now());
            return watch.act(action);
        }
        let verdict = self.rank_verdict(watch, local);
        let is_mistake = verdict.mistake;
        if watch.machine.is_candidate(local) {
            watch.refused = Some(verdict.clone());
        }
        let JobFailure { message, notes, .. } = verdict;
        let message = match is_mistake {
            true => format!("{} cannot join: {message}", self.who(&watch.ranks[local])),
            false => message,
        };
        let ended = watch.machine.end(local);
        let ended = ended.map_or(String::new(), |end| report::ended(end, true));
        let (message, why) = match watch.evicted.remove(&local) {
            Some(why) => (
                format!(
                    "{} was killed by --evict-after",
                    self.who(&watch.ranks[local])
                ),
                why,
            ),
            None => (message, ended),
        };
        let hint = notes.iter().find(|(name, _)| name == "perhaps");
        let hint = hint.map_or(String::new(), |(_, hint)| format!(" ({hint})"));
        let most = self.plan.args.max_restarts;
        // Another process would make the same mistake.
        let stays = watch.machine.why().is_none() && watch.leaving.is_none() && !is_mistake;
        let starts = watch.restarts < most && stays;
        let then = match starts {
            true => format!("restart {} of {most}", watch.restarts + 1),
            false => "the others continue without it".to_owned(),
        };
        watch.ranks[local].is_lost = true;
        let dump = watch.ranks[local].flight();
        self.note(format!("{message}{hint}; {then}"));
        let restarted = continues.and_then(|_| match starts {
            true => self.replace(watch, local),
            false => Ok(()),
        });
        if let Err(error) = restarted {
            self.note(format!("warning: {}", error.chain()));
        }
        flight::keep_lost(dump, why + &hint, self.plan.flight_dir.as_deref());
    }

    /// Kills the ranks for which the others have waited for too long (`--evict-after`): they are lost then.
    pub(super) fn evict(&self, watch: &mut Supervision<'_>, now: Instant) {
        let Some(evictions) = &mut watch.evictions else {
            return;
        };
        if now < evictions.next_check(now) || watch.machine.why().is_some() {
            return;
        }
        let ranks = watch.ranks.iter().enumerate();
        let running = ranks.filter(|(local, _)| {
            watch.machine.end(*local).is_none() && !watch.evicted.contains_key(local)
        });
        let seen: Vec<Seen> = running.map(|(local, rank)| Seen::of(local, rank)).collect();
        let late = evictions.check(&seen, now);
        if late.is_empty() {
            return;
        }
        let is_late = |seen: &&Seen| late.iter().any(|(local, _)| *local == seen.local);
        let others = seen
            .iter()
            .filter(|seen| !is_late(seen))
            .map(|seen| seen.number);
        let others: Vec<usize> = others.collect();
        // Not before the training has begun: without the rank the job would end.
        let world = self.shared.world;
        let log = self.log_of(watch);
        if !log.is_ok_and(|log| {
            log.read()
                .is_ok_and(|state| state.continues_with(world, others))
        }) {
            return;
        }
        for (local, why) in late {
            let rank = &watch.ranks[local];
            let after = self.plan.args.evict_after.unwrap_or_default().as_secs_f64();
            let why = format!("{why}: killed (--evict-after {after})");
            self.note(format!("{} {why}", self.who(rank)));
            rank.signal(Signal::KILL);
            watch.evicted.insert(local, why);
        }
    }

    /// Starts another process in place of the lost local rank `local`.
    pub(super) fn replace(&self, watch: &mut Supervision<'_>, local: usize) -> Result<()> {
        let Some(guard) = &self.guard else {
            return Ok(());
        };
        let (id, world) = (self.nodes.as_ref().map_or(0, Nodes::id), self.shared.world);
        let log = self.log_of(watch)?;
        let number = nodes::insist(|| log.start(id, world, 1));
        let number = number.map_err(system("cannot number a rank that is started again"))?;
        watch.restarts += 1;
        // Those of all nodes have the number of the attempt.
        let restarts = match self.nodes {
            None => watch.restarts,
            Some(_) => watch.attempt,
        };
        let mut rank = self.start_rank(local, restarts, Some(number), guard)?;
        rank.instead_of = Some(watch.ranks[local].number);
        watch.children.insert(rank.pid.as_raw_nonzero().get());
        watch.started += 1;
        watch.ranks[local] = rank;
        watch.machine.restarted(local);
        Ok(())
    }
}
