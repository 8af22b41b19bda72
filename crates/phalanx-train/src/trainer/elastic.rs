//! An elastic training (`--elastic`): ranks go on without those that are lost, and with those that join.
//!
//! All that ranks do together is cut into *units*: a step, an evaluation, a vote on saving. The last thing in a unit is a
//! collective that no rank leaves before all have entered it. So if one rank has completed a unit, all have begun it, and
//! ranks are never more than one unit apart. When a rank is lost, the others form a new group and compare how many units
//! they have completed. Those that are one behind take over the result of the unit, and the state of the training, from
//! one that is not; nothing that a rank has completed is done again. Then all go on with the unit that none has completed,
//! its samples divided among the ranks that are left.
//!
//! On a mesh the parameters are not whole on a rank, and with `--exchange reduce-scatter` the optimizer's state is not. Those that
//! are one step behind complete it with the gradients that they have averaged before that last collective. On a mesh, ranks
//! whose copy of the model has lost a part leave. Otherwise two ranks have each part of the state, and update it in the unit;
//! after it all ranks gather the parameters. When a rank is lost then, the others gather them in the new group, in which they
//! also divide the state anew.
//!
//! A process that joins does so between two steps. It takes over the same state and what the training has measured, as if
//! it were resumed from a checkpoint. A rank that is asked to leave does so there too, and all ranks wait there while they
//! are too few.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use phalanx_base::env::real_env;
use phalanx_base::process::ProcessName;
use phalanx_checkpoint::state::Place;
use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::SamplerConfig;
use phalanx_ddp::{Commit, Fingerprint};
use phalanx_member::{Event, Log, RequestedChange};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Purpose, Trainer};
use crate::batch::{BatchPosition, StepBatch, StepContext};
use crate::deliveries::Deliveries;
use crate::error::{Error, ErrorKind, Result};
use crate::evaluation::Evaluation;
use crate::folder::Output;
use crate::format::plural;
use crate::saving::{History, SaveAction};
use crate::say;
use crate::split::BatchSplit;
use crate::stop;
use crate::strategy::{Gradients, Strategy, skipped_steps};
use crate::timing::Timing;

/// Where rank 0 writes its process and what must be the same on all ranks, for processes that want to join and for the
/// rank 0 after it.
const AGREED: &str = "train/agreed";

/// How often rank 0 asks who is to join or to leave.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How often ranks that wait agree that they still do.
const WAIT_EVERY: Duration = Duration::from_secs(5);

/// Records of `metrics.jsonl` that each rank keeps, in case rank 0 was lost before it wrote them.
const KEPT_RECORDS: usize = 8;

/// What an elastic training keeps on each rank.
#[derive(Default)]
pub(super) struct Elasticity {
    /// Units that this rank has completed.
    completed: u64,
    /// The result of the last one, as JSON.
    result: String,
    /// On rank 0.
    requests: Option<Requests>,
    /// Ranks are to join, leave or wait, as all know from the last step.
    wanted: bool,
    /// Epoch and step of the batch with which the program is, or was last.
    batch: Option<(usize, usize)>,
    /// This rank has yet to take over the state of the others.
    joining: bool,
    /// It has joined them, and has taken no step yet.
    is_candidate: bool,
    /// What must be the same on all ranks, a fact a line.
    facts: Vec<String>,
    /// A step that this rank can complete if another one has.
    averaged: Option<Averaged>,
    /// What is reported when the next step is taken.
    changes: Vec<Change>,
    /// The state is lost: no group is formed any more.
    is_lost: bool,
    /// The last records of metrics.
    records: VecDeque<Value>,
}

impl Elasticity {
    pub(super) fn new(facts: Vec<String>) -> Elasticity {
        Elasticity {
            facts,
            ..Elasticity::default()
        }
    }
}

/// A change of the ranks.
struct Change {
    before: usize,
    after: usize,
    noticed: Instant,
    agreed: Instant,
    state: Instant,
}

/// A step whose gradients are averaged.
struct Averaged {
    group: usize,
    turn: Rc<StepContext>,
    commit: Commit,
    /// The model's buffers before the step and after it.
    buffers: [Vec<f32>; 2],
}

/// Asks the store in a thread of its own, until it is dropped.
struct Requests {
    any: Arc<AtomicBool>,
    _stop: Sender<()>,
}

impl Requests {
    fn watch(mut log: Log, members: Vec<usize>) -> Requests {
        let any = Arc::new(AtomicBool::new(false));
        let (stop, stopped) = channel::<()>();
        let found = Arc::clone(&any);
        let watching = std::thread::Builder::new().name("phalanx-joins".to_owned());
        // Without the thread nobody joins.
        let _ = watching.spawn(move || {
            while stopped.recv_timeout(ASK_EVERY) == Err(RecvTimeoutError::Timeout) {
                let state = log.read();
                let asked = state.is_ok_and(|state| !state.requested(&members).is_none());
                found.store(asked, Relaxed);
            }
        });
        Requests { any, _stop: stop }
    }
}

/// What a rank that is behind, or joins, takes over besides the model and the optimizers.
#[derive(Serialize, Deserialize)]
struct Handover {
    completed: u64,
    result: String,
    place: Place,
    history: History,
    /// Of each group of parameters.
    skipped: Vec<u64>,
    initial: Option<String>,
    weights: String,
    /// Steps since the run was started or resumed.
    saved_steps: u64,
    /// The training's folder.
    folder: PathBuf,
    /// Since the command was started.
    elapsed: Duration,
    timing: Timing,
}

/// What all ranks know before they act.
#[derive(Serialize, Deserialize)]
struct Agreed {
    asked: RequestedChange,
    /// They did not wait before.
    begins_to_wait: bool,
    /// A signal asks one of them to stop.
    is_stop: bool,
}

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Runs `work` on rank 0, and gives its result to all ranks, as JSON, which rounds some floats and has no NaN. In an elastic
    /// training another rank does it again where rank 0 is lost meanwhile. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of `work`, on rank 0; peers that are lost.
    pub fn on_rank_0<R: Serialize + DeserializeOwned>(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<R>,
    ) -> Result<R> {
        self.admit()?;
        self.together(|trainer| {
            let ctx = trainer.ctx;
            let is_phase = ctx.is_main() && ctx.elastic.is_some();
            let phase = is_phase.then(|| ctx.phase("working alone"));
            let own = ctx.is_main().then(|| work(trainer)).transpose()?;
            drop(phase);
            let result = ctx.group().broadcast_object(own.as_ref(), 0)?;
            if ctx.elastic.is_some() {
                ctx.group().barrier()?;
            }
            Ok(result)
        })
    }

    /// Runs `work`, in which all ranks take part: a unit. When a rank is lost it is done again by the others, unless one of
    /// them has completed it, whose result all take over then.
    pub(super) fn together<R: Serialize + DeserializeOwned>(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<R>,
    ) -> Result<R> {
        if self.ctx.elastic.is_none() {
            return work(self);
        }
        loop {
            self.elastic.averaged = None;
            let error = match work(self) {
                Ok(result) => {
                    self.elastic.completed += 1;
                    self.elastic.result = serde_json::to_string(&result).map_err(not_json)?;
                    return Ok(result);
                }
                Err(error) => error,
            };
            if self.recover(error)? {
                return serde_json::from_str(&self.elastic.result).map_err(not_json);
            }
        }
    }

    /// Forms a new group after `error`, if that is the loss of a rank. Gives whether the unit that failed here was completed by
    /// another rank.
    fn recover(&mut self, mut error: Error) -> Result<bool> {
        let (before, noticed) = (self.ctx.world(), Instant::now());
        let completed = self.elastic.completed;
        loop {
            if error.kind() != ErrorKind::PeerLost || self.elastic.is_lost {
                return Err(error);
            }
            if let Err(why) = self.ctx.shrink() {
                return Err(why.note("since", error.chain()));
            }
            let broken = self.strategy.broken_copies(&self.ctx.group());
            if !broken.is_empty() {
                self.leave(&broken)?;
                continue;
            }
            let agreed = Instant::now();
            match self.take_up() {
                Ok(()) => {
                    self.changed(before, noticed, agreed);
                    return Ok(self.elastic.completed != completed);
                }
                Err(again) => error = again,
            }
        }
    }

    /// Leaves the training if this rank is one of the `broken`, whose copy of the model has lost a part.
    fn leave(&mut self, broken: &[usize]) -> Result<()> {
        let group = self.ctx.group();
        if self.is_over() {
            return Err(Error::new(ErrorKind::PeerLost, "the training has ended"));
        }
        if broken.len() == group.world_size() {
            return Err(self.end("every model replica has lost a rank")?);
        }
        if broken.contains(&group.rank()) {
            // If this was rank 0, another one writes the run's files from now on.
            self.hand_over_reports()?;
            let what = "this rank leaves the training: another rank of its model replica failed; the other replicas continue";
            return Err(self.leave_by(what)?);
        }
        Ok(())
    }

    /// The error by which this rank leaves, and the others go on.
    fn leave_by(&self, why: &str) -> Result<Error> {
        say::note(why);
        self.ctx.lose(self.ctx.number(), why)?;
        Ok(Error::new(ErrorKind::PeerLost, why))
    }

    /// The error that ends the training on all ranks, since what none of them has cannot be restored.
    fn end(&mut self, what: &str) -> Result<Error> {
        self.elastic.is_lost = true;
        self.ctx.tell(|_| Some(Event::NotElastic))?;
        self.ctx.note(what);
        let error = Error::new(ErrorKind::PeerLost, what);
        Ok(error.note("fix", "start the training again, from its last checkpoint"))
    }

    fn changed(&mut self, before: usize, noticed: Instant, agreed: Instant) {
        let state = Instant::now();
        self.elastic.changes.push(Change {
            before,
            after: self.ctx.world(),
            noticed,
            agreed,
            state,
        });
    }

    /// Compares with the other ranks of a new group, takes over from them what this rank lacks, and prepares to go on.
    fn take_up(&mut self) -> Result<()> {
        let group = self.ctx.group();
        let mut all = vec![0i64; group.world_size()];
        let own = self.elastic.completed;
        group.all_gather(&[own.cast_signed()], &mut all)?;
        let most = all.iter().copied().max().unwrap_or(0);
        let donor = all.iter().position(|units| *units == most).unwrap_or(0);
        if most == 0 && self.elastic.joining {
            self.elastic.joining = false;
            let what = "all ranks with the training state failed before this rank joined";
            return Err(Error::new(ErrorKind::Failed, what));
        }
        if all.iter().any(|units| *units != most) {
            let given = (group.rank() == donor).then(|| self.handover());
            let taken: Handover = group.broadcast_object(given.as_ref(), donor)?;
            self.strategy.take_state(&group, donor)?;
            // From here on this rank can give it to others.
            if taken.completed != own {
                self.adopt(taken)?;
            }
        }
        let (ctx, settings) = (self.ctx, self.settings);
        if let Some(what) = self.strategy.reform(ctx, settings, &mut self.model.tape)? {
            return Err(self.end(&what)?);
        }
        self.divide()?;
        let parts = self.sources.split.parts();
        if let Some(running) = &mut self.course.running {
            running.losses.divide(parts);
        }
        self.take_over_reports()?;
        self.reports.log.set_members(ctx);
        self.watch_requests();
        Ok(())
    }

    /// Asks from now on who is to join or to leave, on rank 0. None joins a mesh.
    fn watch_requests(&mut self) {
        let asks = self.ctx.elastic.is_some() && self.ctx.is_main() && S::TAKES_OTHERS;
        let members = || self.ctx.group().global_ranks().to_vec();
        self.elastic.requests = asks.then(|| Requests::watch(self.ctx.log(), members()));
    }

    fn handover(&self) -> Handover {
        let (sums, count) = match &self.course.running {
            Some(running) => running.losses.full(),
            None => (Vec::new(), 0),
        };
        let results = &self.course.results;
        Handover {
            completed: self.elastic.completed,
            result: self.elastic.result.clone(),
            place: self.course.place,
            history: self.measured(&sums, count),
            skipped: skipped_steps(&self.strategy),
            initial: results.initial.clone(),
            weights: results.weights.clone(),
            saved_steps: self.saving.steps,
            folder: self.reports.output.dir().to_owned(),
            elapsed: self.ctx.started().elapsed(),
            timing: results.timing.clone(),
        }
    }

    /// Takes over the result of the unit that another rank has completed, and where this one joins, what the training has
    /// measured until then.
    fn adopt(&mut self, handover: Handover) -> Result<()> {
        let own = std::mem::replace(&mut self.elastic.completed, handover.completed);
        self.elastic.result = handover.result;
        self.strategy.set_skipped_steps(&handover.skipped);
        if !std::mem::take(&mut self.elastic.joining) {
            if handover.completed != own + 1 {
                return Err(Error::internal(format!(
                    "this rank has completed {own} units of the training and another {}",
                    handover.completed
                )));
            }
            return match self.elastic.averaged.take() {
                Some(averaged) => self.complete(averaged),
                None => Ok(()),
            };
        }
        self.course.place = handover.place;
        let history = handover.history;
        if let Some(schedule) = &mut self.course.schedule {
            history.replay(schedule, handover.place.step);
        }
        self.course.take_program(&history);
        let results = &mut self.course.results;
        results.accuracies = history.accuracies();
        results.metrics = history.metrics().unwrap_or_default();
        results.last = history.last().unwrap_or_else(Evaluation::nothing);
        results.last_step = history.last_step();
        results.best.go_on(history.best(), &history.judged);
        (results.initial, results.weights) = (handover.initial, handover.weights);
        self.saving.steps = handover.saved_steps;
        self.reports.output.set_dir(handover.folder);
        // Should this rank write the run's files, its times go on from there.
        self.ctx.runs_since(handover.elapsed);
        // The peak is this rank's own.
        let own = std::mem::replace(&mut results.timing, handover.timing);
        results.timing.peak_flops_per_s = own.peak_flops_per_s;
        self.course.history = history;
        self.update_loop();
        Ok(())
    }

    /// Completes the step that another rank has completed.
    fn complete(&mut self, averaged: Averaged) -> Result<()> {
        let [before, after] = averaged.buffers;
        // Where parameters are whole, those of the other rank were taken over.
        if !S::TAKES_OTHERS {
            self.set_buffers(&after);
        }
        self.update(averaged.group, &averaged.turn, &averaged.commit, &before)
    }

    /// Divides the batches among the ranks that there are. No rank computes with more samples at a time than at first.
    fn divide(&mut self) -> Result<()> {
        let group = self.strategy.batch_group();
        let (world, rank) = (group.world_size(), group.rank());
        let first = self.sources.config.world;
        let args = self.settings.split.divided(first, world);
        self.sources.split = BatchSplit::new(&args, world, rank)?;
        let config = SamplerConfig {
            rank,
            ..self.sources.config
        };
        self.sources.samplers =
            self.settings
                .samplers(&self.sources.split, config, self.sources.drop_last)?;
        Ok(())
    }

    /// Has the new rank 0 write the run's files, if the one before was lost. Where it cannot, nothing is written until the end.
    fn take_over_reports(&mut self) -> Result<()> {
        let opened = match self.open_reports() {
            Err(error) if !is_of_peer(&error) => {
                let (dir, why) = (self.reports.output.dir().display(), error.chain());
                say::note(format_args!(
                    "warning: nothing is written into {dir} from now on, and no checkpoint is saved: {why}"
                ));
                false
            }
            opened => opened.map(|()| true)?,
        };
        // Saving is the work of all ranks.
        let mut off = [u8::from(!opened)];
        self.ctx.group().all_reduce(&mut off, ReduceOp::Max)?;
        self.saving.is_off = off != [0];
        Ok(())
    }

    /// Begins to write the run's files on rank 0, if it could not before: now something must be saved. If it still cannot, it
    /// leaves, and another rank does it.
    pub(super) fn must_open_reports(&mut self) -> Result<()> {
        match self.open_reports() {
            Err(error) if self.ctx.world() > 1 && !is_of_peer(&error) => {
                self.elastic.is_lost = true;
                Err(self.leave_by(&format!(
                    "this rank leaves the training, as it cannot save its result: {}",
                    error.chain()
                ))?)
            }
            opened => opened,
        }
    }

    /// Begins to write the run's files on rank 0, as the one that was lost has done.
    fn open_reports(&mut self) -> Result<()> {
        let (ctx, settings) = (self.ctx, self.settings);
        if !ctx.is_main() || self.reports.output.is_opened() || self.purpose != Purpose::Train {
            return Ok(());
        }
        let lost = self.agreed()?.map(|(writer, _)| writer);
        let _phase = self.ctx.phase("reporting");
        let dir = self.reports.output.dir().to_owned();
        let files = self.reports.files.clone();
        let output = Output::open(ctx, dir, files, &settings.saving, lost.as_ref())?;
        let records = self.elastic.records.make_contiguous();
        let log = output.log_of_lost(ctx, self.course.place, &self.reports.info, records)?;
        self.elastic.records.clear();
        let mut trackers = std::mem::take(&mut self.reports.trackers);
        match settings.track.trackers(&real_env()) {
            Ok(own) => trackers.extend(own),
            // What the host of the lost rank 0 had need not be here.
            Err(error) => say::note(format_args!(
                "warning: trackers get nothing from now on: {}",
                error.chain()
            )),
        }
        self.saving
            .take_over(output.checkpoints(settings.saving.keep()));
        let mut progress = Progress::for_rank(ctx.rank()).with_unit(self.sources.unit.0);
        if let Some(running) = &self.course.running {
            let epochs = self.course.extent.epochs() as u64;
            let end = self.course.extent.epoch_end(self.course.place);
            progress.begin(running.epoch as u64, epochs, end);
            progress.skip(self.course.place.step_in_epoch as usize);
        }
        let reports = &mut self.reports;
        reports.log = log;
        reports.deliveries = Deliveries::start(output.dir(), trackers);
        reports.output = output;
        reports.progress = progress;
        self.set_agreed()
    }

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
            let takes_others = S::TAKES_OTHERS;
            // All ranks write it, each perhaps as the last one that is left.
            self.ctx
                .tell(|state| (!state.is_elastic()).then_some(Event::Elastic { takes_others }))?;
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

    /// This rank has the state of the others. `took_part`: and has taken a step.
    fn announce_joined(&self, took_part: bool) -> Result<()> {
        let number = self.ctx.number();
        self.ctx.tell(|_| Some(Event::Joined { number, took_part }))
    }

    /// What must be the same on all ranks.
    fn facts(&self) -> Fingerprint {
        let mut facts = Fingerprint::new();
        for fact in &self.elastic.facts {
            facts.line(fact.as_str());
        }
        facts.parameters(self.strategy.params());
        facts
    }

    fn set_agreed(&self) -> Result<()> {
        let agreed = (ProcessName::own(), self.facts().text().to_owned());
        let agreed = serde_json::to_vec(&agreed).map_err(not_json)?;
        let set = self.ctx.store().set(AGREED, &agreed);
        Ok(set.map_err(phalanx_comm::Error::from)?)
    }

    /// The process that writes the run's files, and what must be the same on all ranks.
    fn agreed(&self) -> Result<Option<(ProcessName, String)>> {
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
            let members = group.global_ranks();
            let mut log = ctx.log();
            let began = Instant::now();
            let asked = ctx.is_main().then(|| {
                loop {
                    let asked = match log.read().map(|state| state.requested(members)) {
                        // It may answer later.
                        Err(error) if error.kind() == phalanx_store::ErrorKind::NoAnswer => {
                            RequestedChange {
                                hold: waits.then(|| "the store does not answer".to_owned()),
                                ..RequestedChange::default()
                            }
                        }
                        asked => asked.map_err(phalanx_comm::Error::from)?,
                    };
                    let is_new = !asked.joining.is_empty() || !asked.leaving.is_empty();
                    let is_same = asked.hold.is_some() && !is_new && stop::asked().is_none();
                    if !(waits && is_same) || began.elapsed() >= WAIT_EVERY {
                        return Ok::<_, Error>((asked, !waits));
                    }
                    std::thread::sleep(ASK_EVERY);
                }
            });
            let (asked, begins_to_wait) = group.broadcast_object(asked.transpose()?.as_ref(), 0)?;
            // No rank acts before all know.
            let mut stops = [u8::from(stop::asked().is_some())];
            group.all_reduce(&mut stops, ReduceOp::Max)?;
            Ok(Agreed {
                asked,
                begins_to_wait,
                is_stop: stops[0] > 0,
            })
        })
    }

    /// Takes in the ranks that join, and goes on without those that leave; on these, ends the program. Changes nothing if a
    /// rank is lost before.
    fn change_ranks(&mut self, asked: &RequestedChange) -> Result<()> {
        let (before, noticed) = (self.ctx.world(), Instant::now());
        let (generation, all_leave, leaving) = self.together(|trainer| {
            // The others leave next.
            let leaving = trainer.strategy.may_leave(&asked.leaving);
            let is_leaving = leaving.contains(&trainer.ctx.number());
            let group = trainer.ctx.group();
            let all_leave = group
                .global_ranks()
                .iter()
                .all(|rank| asked.leaving.contains(rank));
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

    /// The loss of those that have `joined`, with whom the ranks could not go on because of `error`.
    fn blame(&self, error: Error, joined: &[usize]) -> Result<Error> {
        let is_theirs = error.kind() != ErrorKind::PeerLost && !joined.is_empty();
        if !is_theirs || self.elastic.is_lost {
            return Ok(error);
        }
        for number in joined {
            self.ctx.lose(*number, &error.chain())?;
        }
        self.ctx.note(&format!(
            "elastic  going on without the ranks that join: {}",
            error.chain()
        ));
        Ok(Error::new(ErrorKind::PeerLost, error.chain()))
    }

    /// Completes the run's files as far as they are, for the rank that becomes rank 0.
    fn hand_over_reports(&mut self) -> Result<()> {
        self.saving.finish()?;
        let reports = &mut self.reports;
        reports.progress.end();
        reports.log.stop();
        reports.deliveries.finish();
        reports.output = Output::nowhere(reports.output.dir().to_owned());
        Ok(())
    }

    /// Makes the losses of a step those of all ranks, and gives whether ranks are to join, leave or wait: the end of a step's unit.
    /// `buffers` are the model's before it.
    pub(super) fn share_losses(
        &mut self,
        group: usize,
        turn: &Rc<StepContext>,
        gradients: &mut Gradients,
        buffers: &[f32],
    ) -> Result<bool> {
        let (world, rank) = (self.ctx.world(), self.ctx.rank());
        let mut all = gradients.sums.clone();
        // The other ranks of a part of the batch have the same.
        if !rank.is_multiple_of(world / self.strategy.batch_group().world_size()) {
            all.fill(0.0);
        }
        let asked = self.elastic.requests.as_ref();
        let wanted = asked.is_some_and(|requests| requests.any.load(Relaxed));
        all.push(f64::from(u8::from(wanted)));
        let shared = self.ctx.group().all_reduce(&mut all, ReduceOp::Sum);
        let shared = shared.map_err(Error::from);
        #[cfg(test)]
        let shared = shared.and_then(|()| tests::lose_result());
        shared.inspect_err(|_| {
            let after = self.strategy.params().buffers_flat().to_vec();
            self.elastic.averaged = self.strategy.is_sharded().then(|| Averaged {
                group,
                turn: Rc::clone(turn),
                commit: gradients.commit.clone(),
                buffers: [buffers.to_vec(), after],
            });
        })?;
        let wanted = all.pop().is_some_and(|wanted| wanted > 0.0);
        let total = match self.sources.split.tree() {
            Some(tree) => tree.sum(&all),
            None => all.iter().sum(),
        };
        gradients.sums = all;
        gradients.mean = total / turn.global.samples.max(1) as f64;
        gradients.mean_of_all = gradients.mean;
        Ok(wanted)
    }

    /// `digest` of rank 0, on all ranks of an elastic training whose ranks have parts of the model: the end of a unit.
    pub(super) fn share_digest(&self, digest: Option<String>) -> Result<Option<String>> {
        let group = self.ctx.group();
        let digest = match (self.ctx.elastic, self.strategy.is_sharded()) {
            (None, _) => return Ok(digest),
            (Some(_), true) => Some(group.broadcast_object(digest.as_ref(), 0)?),
            (Some(_), false) => digest,
        };
        group.barrier()?;
        Ok(digest)
    }

    /// Gives all ranks what each has updated in the unit before, a step of the group number `group`. When a rank is lost they get
    /// it in the new group.
    pub(super) fn gather_updated(&mut self, group: usize) -> Result<()> {
        let gathered = self.strategy.gather_updated(group);
        #[cfg(test)]
        let gathered = gathered.and_then(|()| tests::lose_gathered(self));
        match gathered {
            Err(error) if self.ctx.elastic.is_some() => self.recover(error).map(drop),
            gathered => gathered,
        }
    }

    /// Whether ranks are to join, leave or wait, as all agreed in the step that was taken.
    pub(super) fn set_wanted(&mut self, wanted: bool) {
        self.elastic.wanted = wanted;
    }

    /// Runs `work`, by which rank 0 writes files, on all ranks. In an elastic training another rank does it again where rank 0
    /// is lost before it has ended.
    pub(super) fn by_rank_0(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if self.ctx.elastic.is_none() {
            return work(self);
        }
        let mut done_as_main = None;
        self.together(|trainer| {
            let is_main = trainer.ctx.is_main();
            // All ranks may take part in the work of rank 0.
            let mut is_left = [i32::from(done_as_main != Some(is_main))];
            (trainer.ctx.group()).all_reduce(&mut is_left, ReduceOp::Max)?;
            if is_left != [0] {
                work(trainer)?;
                done_as_main = Some(is_main);
            }
            Ok(trainer.ctx.group().barrier()?)
        })
    }

    /// Divides `batch` anew, if ranks were lost or joined since it was made.
    pub(super) fn renew<D: Dataset + ?Sized>(&mut self, batch: &StepBatch<'_, D>) -> Result<()> {
        let generation = self.ctx.group().generation();
        match batch.renew(generation, &self.sources.split, &self.sources.samplers)? {
            Some((index, cursor)) => self.strategy.begin_epoch(index, cursor),
            None => Ok(()),
        }
    }

    /// Keeps a record of metrics, in case rank 0 is lost before it writes it.
    pub(super) fn keep_record(&mut self, record: &Value) {
        if self.ctx.elastic.is_some() && !self.ctx.is_main() {
            let records = &mut self.elastic.records;
            if records.len() == KEPT_RECORDS {
                records.pop_front();
            }
            records.push_back(record.clone());
        }
    }

    /// After a step: reports a change of the ranks before it.
    pub(super) fn report_change(&mut self, turn: &StepContext) -> Result<()> {
        if std::mem::take(&mut self.elastic.is_candidate) {
            self.announce_joined(true)?;
        }
        let changes = std::mem::take(&mut self.elastic.changes);
        (changes.iter()).for_each(|change| self.report_one(turn, change));
        Ok(())
    }

    fn report_one(&mut self, turn: &StepContext, change: &Change) {
        let ctx = self.ctx;
        let redone = Instant::now();
        let ms =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let at = |time: Instant| time.saturating_duration_since(ctx.started()).as_secs_f64();
        let world = change.after;
        let text = format!(
            "elastic  {}: world size {} -> {world} (regroup {:.0} ms, state {:.0} ms, step {:.0} ms)",
            turn.name(),
            change.before,
            ms(change.noticed, change.agreed),
            ms(change.noticed, change.state),
            ms(change.noticed, redone),
        );
        let reports = &mut self.reports;
        reports.progress.suspend(|| ctx.note(&text));
        let step = ((turn.epoch - 1) * self.sources.steps + turn.index) as u64;
        reports.log.notice(step, &text);
        let change = json!({
            "before": change.before, "after": world, "noticed_s": at(change.noticed), "agreed_s": at(change.agreed),
            "state_s": at(change.state), "redone_s": at(redone),
        });
        reports.log.rank_change(step, change);
    }

    /// The training has ended: processes that want to join need not wait any longer.
    pub(super) fn end_joining(&self) {
        if self.ctx.elastic.is_some() {
            // Otherwise they end with the launcher.
            let _ = self.ctx.log().end("the training has ended");
        }
    }

    /// Whether another rank has ended the training.
    pub(super) fn is_over(&self) -> bool {
        let is_over = || self.ctx.ask(|state| state.over().is_some());
        self.ctx.elastic.is_some() && is_over().unwrap_or(false)
    }
}

/// Whether another process is the cause, and not this rank's folder.
fn is_of_peer(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Timeout)
}

fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "the result of a unit is not JSON").caused_by(error)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use clap::Parser as _;
    use phalanx_comm::{GroupOptions, ProcessGroup};
    use phalanx_global::Parallel;
    use phalanx_launch::{Elastic, RankContext};
    use phalanx_nn::Value as _;
    use phalanx_nn::layers::{Act, Linear};
    use phalanx_nn::optim::Adam;

    use super::*;
    use crate::{Job, Mesh, Settings};

    thread_local! {
        static LOSES_RESULT: Cell<bool> = const { Cell::new(false) };
        static LOSES_GATHERED: Cell<bool> = const { Cell::new(false) };
    }

    /// As if a peer had been lost in a rank's last collective of a step, which the other ranks have completed.
    pub(super) fn lose_result() -> Result<()> {
        match LOSES_RESULT.replace(false) {
            true => Err(Error::new(ErrorKind::PeerLost, "it is a test")),
            false => Ok(()),
        }
    }

    /// As if a peer had been lost while this rank gathered the parameters.
    pub(super) fn lose_gathered<M, S: Strategy>(trainer: &mut Trainer<'_, M, S>) -> Result<()> {
        if !LOSES_GATHERED.replace(false) {
            return Ok(());
        }
        let params = trainer.strategy.state().params;
        for id in params.ids().collect::<Vec<_>>() {
            params.get_mut(id).fill(f32::NAN);
        }
        Err(Error::new(ErrorKind::PeerLost, "it is a test"))
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        settings: Settings,
    }

    /// What `rank` gives on each of four ranks.
    fn on_ranks(
        more: &[&str],
        rank: impl Fn(&Job<'_>) -> Result<Vec<u32>> + Sync,
    ) -> Vec<Vec<u32>> {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path().display().to_string();
        let typed = [
            "test",
            "--lr",
            "0.1",
            "--epochs",
            "2",
            "--global-batch-size",
            "4",
        ];
        let folder = ["--output-dir", &dir];
        let settings = Cli::parse_from(typed.iter().chain(&folder).chain(more)).settings;
        let rank = |group: ProcessGroup| {
            let mut ctx = RankContext::new(group, 1);
            ctx.elastic = Some(Elastic {
                first_world: 4,
                patience: Duration::from_secs(120),
            });
            rank(&Job::new("test", &ctx, &settings))
        };
        std::thread::scope(|scope| {
            let groups = ProcessGroup::threads(4, GroupOptions::default());
            let all: Vec<_> = groups
                .into_iter()
                .map(|group| scope.spawn(|| rank(group)))
                .collect();
            let all = all.into_iter().map(|rank| rank.join().expect("no panic"));
            all.collect::<Result<_>>().expect("it ends")
        })
    }

    fn data() -> Arc<Vec<f32>> {
        Arc::new((0..12).map(|i| i as f32 / 12.0).collect())
    }

    fn bits<M, S: Strategy>(trainer: &Trainer<'_, M, S>) -> Vec<u32> {
        let weights = trainer.params().flat().iter();
        weights.map(|w| w.to_bits()).collect()
    }

    /// The bits of each rank's parts of the weights after a training in which a rank of `losers` loses the result of a step.
    fn train_on_mesh(losers: &[usize]) -> Vec<Vec<u32>> {
        on_ranks(&[], |job| {
            let number = job.context().rank();
            let data = data();
            let layers = |scope: &mut phalanx_nn::Scope<'_>| {
                let up = Linear::new(scope.enter("up"), 1, 4);
                (up, Linear::new(scope.enter("down"), 4, 1))
            };
            let mesh = Mesh {
                tensor: 2,
                ..Mesh::data_parallel(2)
            };
            let split = Parallel::new()
                .column("tensor", &["up"])
                .row("tensor", &["down"]);
            let builder = job.trainer(&data, layers, Adam::new).on(mesh, split);
            let mut trainer = builder.start()?;
            for epoch in trainer.epochs() {
                for batch in trainer.batches(&data)? {
                    let loses = epoch == 1 && batch.index() == 1 && losers.contains(&number);
                    LOSES_RESULT.set(loses);
                    trainer.step(&batch, |(up, down), batch| {
                        let x = batch.input(batch.data(), &[batch.samples(), 1])?;
                        let x = x.linear(up.weight, up.bias, Act::Relu)?;
                        Ok(down.forward(x)?.mean(&[], false)?)
                    })?;
                }
                trainer.check_weights()?;
            }
            let bits = bits(&trainer);
            trainer.finish()?;
            Ok(bits)
        })
    }

    /// The weights of all ranks after a training in which a rank of `losers` loses the result of a step, and one of
    /// `gatherers` the parameters that it gathers after it.
    fn train_with_parts(exchange: &str, [losers, gatherers]: [&[usize]; 2]) -> Vec<Vec<u32>> {
        on_ranks(&["--exchange", exchange], |job| {
            let number = job.context().rank();
            let data = data();
            let layers = |scope: &mut phalanx_nn::Scope<'_>| {
                let up = Linear::new(scope.enter("up"), 1, 40);
                (up, Linear::new(scope.enter("down"), 40, 1))
            };
            let builder = job.trainer(&data, layers, Adam::new);
            let mut trainer = builder.clip_grad_norm(0.5).start()?;
            for epoch in trainer.epochs() {
                for batch in trainer.batches(&data)? {
                    let is_here = epoch == 1 && batch.index() == 1;
                    LOSES_RESULT.set(is_here && losers.contains(&number));
                    LOSES_GATHERED.set(is_here && gatherers.contains(&number));
                    trainer.step(&batch, |(up, down), batch| {
                        let x = batch.input(batch.data(), &[batch.samples(), 1])?;
                        let x = up.forward_act(x, Act::Relu)?;
                        Ok(down.forward(x)?.mean(&[], false)?)
                    })?;
                }
                trainer.check_weights()?;
            }
            let bits = bits(&trainer);
            trainer.finish()?;
            Ok(bits)
        })
    }

    #[test]
    fn a_rank_of_a_mesh_completes_the_step_that_others_have_completed() {
        let want = train_on_mesh(&[]);
        for losers in [&[1][..], &[0, 1], &[0, 2, 3]] {
            assert_eq!(train_on_mesh(losers), want, "{losers:?}");
        }
    }

    #[test]
    fn a_rank_with_parts_completes_the_step_that_others_have_completed() {
        let want = train_with_parts("all-reduce", [&[], &[]]);
        for exchange in ["reduce-scatter", "at-step"] {
            for [losers, gatherers] in [
                [&[][..], &[]],
                [&[1], &[]],
                [&[0, 1], &[]],
                [&[0, 2, 3], &[]],
                [&[], &[0]],
                [&[], &[1, 2]],
                [&[], &[0, 1, 2, 3]],
                [&[0], &[3]],
            ] {
                let got = train_with_parts(exchange, [losers, gatherers]);
                assert!(got == want, "{exchange}: {losers:?}, {gatherers:?}");
            }
        }
    }
}
