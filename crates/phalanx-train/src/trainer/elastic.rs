//! An elastic training (`--elastic`): it continues when ranks are lost or join.
//!
//! All work that ranks do together is divided into *units*: a step, an evaluation, a vote on saving. A unit ends with a
//! collective that no rank leaves before all have entered it. So if one rank has completed a unit, all have begun it, and
//! ranks are never more than one unit apart. When a rank is lost, the others form a new group and compare how many units
//! they have completed. Ranks that are one unit behind take over its result, and the state of the training, from a rank
//! that is not; no completed unit is repeated. Then all ranks repeat the unit that none has completed, with its samples
//! divided among the remaining ranks.
//!
//! On a mesh the parameters are not whole on a rank, and with `--exchange reduce-scatter` the optimizer's state is not. Ranks that
//! are one step behind complete it with the gradients that they have averaged before that last collective. On a mesh, ranks
//! whose model replica has lost a rank leave. Otherwise two ranks have each part of the state, and update it in the unit;
//! after it all ranks gather the parameters. When a rank is lost then, the others gather them in the new group, and divide
//! the state again.
//!
//! A process that joins does so between two steps. It takes over the same state and what the training has measured, as if
//! it were resumed from a checkpoint. A rank that is asked to leave does so there too, and all ranks wait there while they
//! are too few.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use phalanx_comm::ReduceOp;
use phalanx_data::Dataset;
use phalanx_data::sampler::SamplerConfig;
use phalanx_member::{Event, Requests};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Trainer;
use super::handover::{Averaged, Handover};
use super::joining::not_json;
use super::takeover::Change;
use crate::batch::{StepBatch, StepContext};
use crate::error::{Error, ErrorKind, Result};
use crate::say;
use crate::split::BatchSplit;
use crate::strategy::{Gradients, Strategy};

/// What an elastic training keeps on each rank.
#[derive(Default)]
pub(super) struct Elasticity {
    /// Units that this rank has completed.
    pub completed: u64,
    /// The result of the last one, as JSON.
    pub result: String,
    /// On rank 0, the thread that watches for requests.
    pub requests: Option<Requests>,
    /// Ranks are to join, leave or wait; all ranks know it from the last step.
    pub wanted: bool,
    /// Epoch and step of the current batch of the program, or of the last one.
    pub batch: Option<(usize, usize)>,
    /// This rank has yet to take over the state of the others.
    pub joining: bool,
    /// It has joined them, and has taken no step yet.
    pub is_candidate: bool,
    /// Settings that must be the same on all ranks, one a line.
    pub facts: Vec<String>,
    /// A step that this rank can complete if another one has.
    pub averaged: Option<Averaged>,
    /// Changes to report when the next step is taken.
    pub changes: Vec<Change>,
    /// The state is lost: no group is formed any more.
    pub is_lost: bool,
    /// The last records of metrics.
    pub records: VecDeque<Value>,
}

impl Elasticity {
    pub(super) fn new(facts: Vec<String>) -> Elasticity {
        Elasticity {
            facts,
            ..Elasticity::default()
        }
    }
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

    /// Forms a new group after `error`, if that is the loss of a rank. Returns whether another rank has completed the unit
    /// that failed here.
    pub(super) fn recover(&mut self, mut error: Error) -> Result<bool> {
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

    /// Leaves the training if this rank is one of the `broken`, whose model replica has lost a rank.
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

    /// The error by which this rank leaves; the others continue.
    pub(super) fn leave_by(&self, why: &str) -> Result<Error> {
        say::note(why);
        self.ctx.lose(self.ctx.number(), why)?;
        Ok(Error::new(ErrorKind::PeerLost, why))
    }

    /// The error that ends the training on all ranks: a part of the state that no rank has cannot be restored.
    fn end(&mut self, what: &str) -> Result<Error> {
        self.elastic.is_lost = true;
        self.ctx.append(|_| Some(Event::NotElastic))?;
        self.ctx.note(what);
        let error = Error::new(ErrorKind::PeerLost, what);
        Ok(error.note("fix", "start the training again, from its last checkpoint"))
    }

    pub(super) fn changed(&mut self, before: usize, noticed: Instant, agreed: Instant) {
        let state = Instant::now();
        self.elastic.changes.push(Change {
            before,
            after: self.ctx.world(),
            noticed,
            agreed,
            state,
        });
    }

    /// Compares with the other ranks of a new group, takes over from them what this rank lacks, and prepares to continue.
    pub(super) fn take_up(&mut self) -> Result<()> {
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
        let (drop_last, order) = (self.sources.drop_last, self.sources.order.as_ref());
        let split = &self.sources.split;
        self.sources.samplers = self.settings.samplers(split, config, drop_last, order)?;
        Ok(())
    }

    /// Makes the losses of a step those of all ranks, and gives whether ranks are to join, leave or wait: the end of a step's unit.
    /// `buffers` are the model's before it.
    pub(super) fn share_losses(
        &mut self,
        group: usize,
        at: &Rc<StepContext>,
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
        let wanted = asked.is_some_and(Requests::any);
        all.push(f64::from(u8::from(wanted)));
        let shared = self.ctx.group().all_reduce(&mut all, ReduceOp::Sum);
        let shared = shared.map_err(Error::from);
        #[cfg(test)]
        let shared = shared.and_then(|()| tests::lose_result());
        shared.inspect_err(|_| {
            let after = self.strategy.params().buffers_flat().to_vec();
            self.elastic.averaged = self.strategy.is_sharded().then(|| Averaged {
                group,
                step: Rc::clone(at),
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
        gradients.mean = total / at.global.samples.max(1) as f64;
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::Duration;

    use clap::Parser as _;
    use phalanx_comm::{GroupOptions, ProcessGroup};
    use phalanx_global::Parallel;
    use phalanx_member::{Elastic, RankContext};
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
        let typed = "test --lr 0.1 --epochs 2 --global-batch-size 4";
        let folder = ["--output-dir", &dir];
        let settings =
            Cli::parse_from(typed.split(' ').chain(folder).chain(more.iter().copied())).settings;
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
            let groups = groups.into_iter();
            let all: Vec<_> = groups.map(|group| scope.spawn(|| rank(group))).collect();
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
                        down.forward(x)?.mean(&[], false)
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
                        down.forward(x)?.mean(&[], false)
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
