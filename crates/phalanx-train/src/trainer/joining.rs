//! How processes join an elastic training, and how ranks leave it when they are asked to.

use std::time::Instant;

use phalanx_base::process::ProcessName;
use phalanx_comm::ReduceOp;
use phalanx_ddp::Fingerprint;
use phalanx_member::{Event, RequestedChange, Requests};
use serde::{Deserialize, Serialize};

use super::{Purpose, Trainer};
use crate::batch::BatchPosition;
use crate::error::{Error, ErrorKind, Result};
use crate::format::plural;
use crate::saving::SaveAction;
use crate::stop;
use crate::strategy::Strategy;

/// Where rank 0 writes its process and what must be the same on all ranks, for processes that want to join and for the
/// rank 0 after it.
const AGREED: &str = "train/agreed";

/// What all ranks agree on before they act.
#[derive(Serialize, Deserialize)]
struct Agreed {
    asked: RequestedChange,
    /// The ranks did not wait before.
    begins_to_wait: bool,
    /// A signal asks one of them to stop.
    is_stop: bool,
}

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Joins the other ranks, if this process was started in place of a lost one.
    pub(super) fn join(&mut self) -> Result<()> {
        if self.ctx.elastic.is_none() || self.purpose != Purpose::Train || self.is_complete() {
            return Ok(());
        }
        if !self.ctx.is_newcomer() {
            // A rank may still be in the last collective of the start when another one is lost in a step.
            self.together(|trainer| Ok(trainer.ctx.group().barrier()?))?;
            if self.ctx.is_main() {
                self.set_agreed()?;
            }
            let can_grow = S::CAN_GROW;
            // All ranks write it, because each may be the only one that remains.
            self.ctx
                .append(|state| (!state.is_elastic()).then_some(Event::Elastic { can_grow }))?;
            self.watch_requests();
            return Ok(());
        }
        self.compare_with_others()?;
        if !self.ctx.join()? {
            self.reports.log.stop();
            return Err(Error::stopped());
        }
        self.elastic.joining = true;
        if let Err(error) = self.take_up() {
            self.recover(error)?;
        }
        self.elastic.changes.clear();
        // As the others do next.
        self.elastic.wanted = true;
        self.elastic.is_candidate = true;
        self.announce_joined(false)
    }

    /// On rank 0, watches from now on whether processes ask to join or ranks are to leave. No process joins a mesh.
    pub(super) fn watch_requests(&mut self) {
        let asks = self.ctx.elastic.is_some() && self.ctx.is_main() && S::CAN_GROW;
        let members = || self.ctx.group().global_ranks().to_vec();
        self.elastic.requests = asks.then(|| Requests::watch(self.ctx.log(), members()));
    }

    /// Writes that this rank has the state of the others. `took_part`: it has also taken a step.
    pub(super) fn announce_joined(&self, took_part: bool) -> Result<()> {
        let (ctx, number) = (self.ctx, self.ctx.number());
        ctx.append(|_| Some(Event::Joined { number, took_part }))
    }

    /// The settings that must be the same on all ranks.
    fn facts(&self) -> Fingerprint {
        let mut facts = Fingerprint::new();
        for fact in &self.elastic.facts {
            facts.line(fact.as_str());
        }
        facts.parameters(self.strategy.params());
        facts
    }

    pub(super) fn set_agreed(&self) -> Result<()> {
        let agreed = (ProcessName::own(), self.facts().text().to_owned());
        let agreed = serde_json::to_vec(&agreed).map_err(not_json)?;
        let set = self.ctx.store().set(AGREED, &agreed);
        Ok(set.map_err(phalanx_comm::Error::from)?)
    }

    /// The process that writes the run's files, and what must be the same on all ranks.
    pub(super) fn agreed(&self) -> Result<Option<(ProcessName, String)>> {
        let agreed = self.ctx.store().try_get(AGREED);
        let agreed = agreed.map_err(phalanx_comm::Error::from)?;
        Ok(agreed.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Compares this process with those that it is to join, before it asks them to take it in.
    fn compare_with_others(&self) -> Result<()> {
        let Some((writer, facts)) = self.agreed()? else {
            return Ok(());
        };
        let them = format!("the job (host {})", writer.host);
        let own = format!("this rank (host {})", phalanx_base::host_name());
        match self.facts().difference(&facts, &them, &own) {
            Some(difference) => Err(Error::usage(difference)),
            None => Ok(()),
        }
    }

    /// Before what ranks do together: takes in the processes that want to join, if the program begins with another batch,
    /// and lets ranks leave. A newcomer begins with that batch too. *Blocks* while the ranks are to wait.
    pub(super) fn admit(&mut self) -> Result<()> {
        let (BatchPosition::At(index), Some(running)) =
            (self.course.position.get(), &self.course.running)
        else {
            return Ok(());
        };
        let batch = (running.epoch, index);
        let is_first = self.elastic.batch.replace(batch) != Some(batch);
        let is_next = self.course.place.step_in_epoch as usize == index;
        if !(is_first && is_next && std::mem::take(&mut self.elastic.wanted)) {
            return Ok(());
        }
        // Those that join have nothing to save.
        self.save_due()?;
        let mut waiting = None;
        loop {
            let agreed = self.agree_on_requests(waiting.is_some())?;
            let asked = agreed.asked;
            if !(asked.joining.is_empty() && asked.leaving.is_empty()) {
                // Those that join agree with the others on what follows.
                self.change_ranks(&asked)?;
                continue;
            }
            let Some(why) = asked.hold.filter(|_| !agreed.is_stop) else {
                break;
            };
            waiting.get_or_insert_with(Instant::now);
            if agreed.begins_to_wait {
                self.say(&format!("waiting: {why}"));
                self.save_between_steps(SaveAction::Save)?;
            }
        }
        if let Some(since) = waiting {
            let ranks = plural(self.ctx.world(), "rank");
            let waited = since.elapsed();
            self.reports.progress.leave_out(waited);
            let waited = waited.as_secs_f64();
            self.say(&format!("going on with {ranks} after {waited:.1} s"));
        }
        Ok(())
    }

    fn say(&self, text: &str) {
        let text = format!("elastic  {text}");
        self.ctx.note(&text);
        self.reports.log.notice(self.course.place.step, &text);
    }

    /// What is asked of the ranks. While they wait already, rank 0 looks for [`WAIT_EVERY`] for something new.
    fn agree_on_requests(&mut self, waits: bool) -> Result<Agreed> {
        self.together(|trainer| {
            let (ctx, group) = (trainer.ctx, trainer.ctx.group());
            let _phase = waits.then(|| ctx.phase("waiting for more nodes"));
            let stops = || stop::asked().is_some();
            let asked = ctx.is_main().then(|| {
                let asked = ctx.requested(waits, stops)?;
                Ok::<_, Error>((asked, !waits))
            });
            let (asked, begins_to_wait) = group.broadcast_object(asked.transpose()?.as_ref(), 0)?;
            // No rank acts before all know.
            let mut stops = [u8::from(stops())];
            group.all_reduce(&mut stops, ReduceOp::Max)?;
            Ok(Agreed {
                asked,
                begins_to_wait,
                is_stop: stops[0] > 0,
            })
        })
    }

    /// Admits the ranks that join, and continues without those that leave; on these, ends the program. Changes nothing if a
    /// rank is lost before.
    fn change_ranks(&mut self, asked: &RequestedChange) -> Result<()> {
        let (before, noticed) = (self.ctx.world(), Instant::now());
        let (generation, all_leave, leaving) = self.together(|trainer| {
            // The others leave next.
            let leaving = trainer.strategy.may_leave(&asked.leaving);
            let is_leaving = leaving.contains(&trainer.ctx.number());
            let group = trainer.ctx.group();
            let mut ranks = group.global_ranks().iter();
            let all_leave = ranks.all(|rank| asked.leaving.contains(rank));
            if is_leaving && group.rank() == 0 && !all_leave {
                trainer.hand_over_reports()?;
            }
            group.barrier()?;
            Ok((group.generation(), all_leave, leaving))
        })?;
        // If a rank was lost since, the others have formed a group without it.
        if self.ctx.group().generation() != generation {
            return Ok(());
        }
        if all_leave {
            self.save_between_steps(SaveAction::Stop)?;
            return Err(self.stopped());
        }
        if leaving.contains(&self.ctx.number()) {
            self.reports.log.stop();
            return Err(Error::stopped());
        }
        let members = self.ctx.group().global_ranks().to_vec();
        self.ctx.change(&leaving)?;
        let mut joined = self.ctx.group().global_ranks().to_vec();
        joined.retain(|number| !members.contains(number));
        let agreed = Instant::now();
        match self.take_up() {
            Ok(()) => self.changed(before, noticed, agreed),
            Err(error) => drop(self.recover(self.blame(error, &joined)?)?),
        }
        Ok(())
    }

    /// The loss of those that have `joined`, with whom the ranks could not continue because of `error`.
    fn blame(&self, error: Error, joined: &[usize]) -> Result<Error> {
        let is_theirs = error.kind() != ErrorKind::PeerLost && !joined.is_empty();
        if !is_theirs || self.elastic.is_lost {
            return Ok(error);
        }
        for number in joined {
            self.ctx.lose(*number, &error.chain())?;
        }
        let why = error.chain();
        (self.ctx).note(&format!(
            "elastic  going on without the ranks that join: {why}"
        ));
        Ok(Error::new(ErrorKind::PeerLost, why))
    }
}

pub(super) fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "the result of a unit is not JSON").caused_by(error)
}
