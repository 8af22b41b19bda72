//! Training on a mesh of ranks: batches are split over one dimension, layers and weights over others, as global tensors.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_checkpoint::digest::optimizer_sha256_with;
use phalanx_checkpoint::state::Place;
use phalanx_checkpoint::{self as checkpoint, Outline, Values};
use phalanx_comm::ProcessGroup;
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig};
use phalanx_data::{Dataset, ImageBatch, ShardOrder};
use phalanx_ddp::{Fingerprint, broadcast_parameters, verify_equal};
use phalanx_global::{
    Global, GlobalGrads, GlobalParams, GlobalStep, Indices, Parallel, Placement, Sbp,
};
use phalanx_member::RankContext;
use phalanx_nn::optim::{Optimizer, clip_factor};
use phalanx_nn::{Params, Tape, Tensor, Value as _};
use serde_json::{Map, json};

use super::{
    Description, Gradients, Group, Parts, Report, State, StepTools, Strategy, explain,
    weights_sha256,
};
use crate::args::{Mesh, Settings, restarts_ranks};
use crate::batch::{Engine, LoadedMicroBatches, MicroBatchOf, Randomness};
use crate::different_arguments;
use crate::error::{Error, Result, refuse};
use crate::evaluation::Measure;
use crate::format::{bytes, thousands};
use crate::saving::{History, Resumed, SaveAction, Saving};
use crate::split::BatchSplit;

/// Training on a [`Mesh`]: the model computes with [`Global`] tensors, and each rank has its parts of the parameters.
/// [`TrainerBuilder::on`](crate::TrainerBuilder::on) chooses it.
pub struct OnMesh {
    mesh: Mesh,
    weights: GlobalParams,
    grads: GlobalGrads,
    optimizer: Box<dyn Optimizer>,
    lr: f64,
    /// Of the gradients, for the next update.
    factor: f32,
    /// Of the gradients of the last step, if they are clipped.
    norm: Option<f64>,
    /// The parts that the ranks of `data` have of each batch, all on one rank.
    all: (BatchSplit, Vec<Sampler>),
    /// That rank, of as many as `data` had at first.
    config: SamplerConfig,
    drop_last: bool,
    order: Option<ShardOrder>,
    /// The samples of the running epoch over all ranks, and the step with which they begin.
    plan: Option<(EpochPlan, usize)>,
}

impl<'s, B> MicroBatchOf<'s, B, OnMesh> {
    /// The rows of all ranks as a global tensor; `values` are this rank's, of `shape`, which begins with
    /// [`samples`](Self::samples).
    ///
    /// # Errors
    ///
    /// `Usage`, when there are fewer values than the shape has; peers that are lost.
    pub fn input(&self, values: &[f32], shape: &[usize]) -> Result<Global<'s>> {
        let values = &values[..shape.iter().product::<usize>().min(values.len())];
        let local = self.step().local().input(values, shape)?;
        self.step().to_global(local, &rows(self.step().placement()))
    }

    /// The same of numbers that choose rows or classes.
    ///
    /// # Errors
    ///
    /// As [`input`](Self::input).
    pub fn indices_of(&self, values: &[u32], shape: &[usize]) -> Result<Indices> {
        let values = &values[..shape.iter().product::<usize>().min(values.len())];
        let placement = self.step().placement();
        Ok(Indices::from_local(
            placement,
            values,
            shape,
            &rows(placement),
        )?)
    }

    /// This rank's rows of a tensor that has a row for each sample; none if this rank has no sample. *Blocks* until all
    /// ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn own_rows(&self, all: Global<'s>) -> Result<Option<Tensor<'s>>> {
        let own = all.to_global(&rows(self.step().placement()))?.to_local();
        Ok((self.samples() > 0).then_some(own))
    }
}

impl<'s> MicroBatchOf<'s, ImageBatch, OnMesh> {
    /// The images of all ranks: number, height, width, channels.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn images(&self) -> Result<Global<'s>> {
        let [high, wide, channels] = self.data().image_shape;
        let shape = [self.samples(), high, wide, channels];
        self.input(&self.data().images, &shape)
    }
}

/// How batches lie: split over `data`, whole over the other dimensions.
fn rows(placement: &Placement) -> Vec<Sbp> {
    let sbp = |name: &String| match name.as_str() {
        "data" => Sbp::split(0),
        _ => Sbp::Broadcast,
    };
    placement.names().iter().map(sbp).collect()
}

impl OnMesh {
    fn placement(&self) -> &Placement {
        self.weights.placement()
    }

    /// One logical rank that takes the parts of all `data` ranks that there are now.
    fn all_parts(
        data: usize,
        settings: &Settings,
        config: SamplerConfig,
        drop_last: bool,
        order: Option<&ShardOrder>,
    ) -> Result<(BatchSplit, Vec<Sampler>)> {
        let mut args = settings.split.divided(config.world, data);
        args.accumulate *= data;
        let all = BatchSplit::new(&args, 1, 0)?;
        let samplers = settings.samplers(&all, config, drop_last, order)?;
        Ok((all, samplers))
    }

    /// The samples of all ranks in micro-batch `index` of the step.
    fn samples(&self, step: usize, index: usize) -> Vec<u64> {
        let Some((plan, first)) = &self.plan else {
            return Vec::new();
        };
        let parts = self.all.0.parts();
        let each = parts / self.mesh.data;
        let begin = (step - first) * parts + index;
        let slices = (0..self.mesh.data).filter_map(|rank| plan.slice(begin + rank * each));
        slices.flat_map(|(ids, _)| ids.iter().copied()).collect()
    }

    /// Compares what several ranks have of the parameters, over each dimension of the mesh.
    fn check_copies(&self) -> Result<()> {
        let (weights, placement) = (&self.weights, self.placement());
        for dim in 0..placement.sizes().len() {
            let mut ids = weights.local().ids();
            let copies = weights.local().map(|info, own| {
                let sbp = ids.next().map(|id| weights.layout(id).sbp()[dim]);
                Ok(match sbp {
                    Some(Sbp::Broadcast) => (info.shape.clone(), own),
                    _ => (vec![0; info.shape.len()], Vec::new()),
                })
            })?;
            let digest = checkpoint::weights_digest(&copies);
            verify_equal(placement.line(dim), &copies, digest)?;
        }
        Ok(())
    }
}

impl Engine for OnMesh {
    type Tensor<'s> = Global<'s>;
    type Step<'s> = GlobalStep<'s>;
    type Peers = ();
}

impl Strategy for OnMesh {
    type Setup = (Mesh, Parallel);

    fn plan(
        (mesh, _): &Self::Setup,
        settings: &Settings,
        _: usize,
    ) -> Result<(usize, Vec<String>)> {
        settings.validate(mesh.data)?;
        mesh.refuse(settings, "a mesh")?;
        Ok((mesh.data, mesh.shaping()))
    }

    fn build((mesh, mut parallel): Self::Setup, parts: Parts<'_, '_>) -> Result<Self> {
        let (ctx, settings, choices) = (parts.ctx, parts.settings, parts.choices);
        let (mut params, sampler, drop_last) = (parts.params, choices.sampler, choices.drop_last);
        let order = choices.order;
        if !choices.frozen.is_empty() {
            refuse!("a mesh trains all parameters: leave out frozen(...)");
        }
        let mut optimizers = choices.optimizers.into_iter();
        let (Some((_, make)), None) = (optimizers.next(), optimizers.next()) else {
            refuse!("a mesh has one optimizer: leave out optimizer_of(...)");
        };
        let mut fingerprint = Fingerprint::new();
        for fact in parts.facts {
            fingerprint.line(fact.as_str());
        }
        let compared = fingerprint.parameters(&params).compare(&ctx.group());
        compared.map_err(different_arguments)?;
        if parts.resumed.is_none() {
            broadcast_parameters(&ctx.group(), &mut params, 0)?;
        }
        let placement = mesh.placement(&ctx.group())?;
        if mesh.tensor == 1 {
            parallel = parallel.without("tensor");
        }
        if mesh.fully_sharded {
            parallel = parallel.fully_sharded("data");
        }
        let weights = parallel.build(&placement, &params)?;
        let mut optimizer = make(weights.local(), choices.lr);
        optimizer.set_thread_pool(parts.tape.thread_pool());
        let lr = optimizer.lr();
        let is_split = |id| {
            weights
                .layout(id)
                .sbp()
                .iter()
                .any(|sbp| *sbp != Sbp::Broadcast)
        };
        let mut ids = weights.local().ids().zip(weights.local().infos());
        let split = ids.find(|(id, info)| info.shape.len() > 1 && is_split(*id));
        if let (false, Some((_, info))) = (optimizer.is_elementwise(), split) {
            refuse!(
                "{} needs whole matrices, and the mesh divides {}; use another optimizer or mesh",
                optimizer.name(),
                info.name
            );
        }
        let whole = |id| weights.layout(id).sbp()[0] == Sbp::Broadcast;
        let mut ids = weights.local().ids().zip(weights.local().infos());
        if let (Some(_), Some((_, info))) = (ctx.elastic, ids.find(|(id, _)| !whole(*id))) {
            refuse!(
                "--elastic needs each part of the model on all ranks of data, and {} is split over them",
                info.name
            );
        }
        Ok(OnMesh {
            mesh,
            grads: weights.grads(),
            weights,
            optimizer,
            lr,
            factor: 1.0,
            norm: None,
            all: Self::all_parts(mesh.data, settings, sampler, drop_last, order.as_ref())?,
            order,
            config: sampler,
            drop_last,
            plan: None,
        })
    }

    const CAN_GROW: bool = false;

    fn is_sharded(&self) -> bool {
        true
    }

    fn check_elastic((mesh, _): &Self::Setup) -> Result<()> {
        let why = match mesh.fully_sharded {
            true => "needs each part of the model on all ranks of data; leave out --fully-sharded",
            false if restarts_ranks() => {
                "starts no rank of a mesh again: the others continue without it; leave out --max-restarts"
            }
            false => return Ok(()),
        };
        Err(Error::usage(format!("--elastic {why}")))
    }

    fn broken_copies(&self, group: &ProcessGroup) -> Vec<usize> {
        let (numbers, each) = (group.global_ranks(), self.mesh.tensor);
        let is_broken = |number: usize| {
            let first = number / each * each;
            (first..first + each).any(|peer| !numbers.contains(&peer))
        };
        let ranks = numbers.iter().enumerate();
        let broken = ranks.filter(|(_, number)| is_broken(**number));
        broken.map(|(rank, _)| rank).collect()
    }

    fn reform(
        &mut self,
        ctx: &RankContext,
        settings: &Settings,
        _: &mut Tape,
    ) -> Result<Option<String>> {
        let (group, skipped) = (ctx.group(), self.grads.skipped_steps());
        self.mesh.data = group.world_size() / self.mesh.tensor;
        let placement = self.mesh.placement(&group)?;
        self.weights.move_to(&placement)?;
        self.grads = self.weights.grads();
        self.grads.set_skipped_steps(skipped);
        let (drop_last, order) = (self.drop_last, self.order.as_ref());
        self.all = Self::all_parts(self.mesh.data, settings, self.config, drop_last, order)?;
        self.plan = None;
        Ok(None)
    }

    fn set_skipped_steps(&mut self, skipped: &[u64]) {
        self.grads.set_skipped_steps(skipped.iter().sum());
    }

    fn batch_group(&self) -> &ProcessGroup {
        self.placement().line(0)
    }

    fn params(&self) -> &Params {
        self.weights.local()
    }

    fn groups(&self) -> Vec<Group<'_>> {
        vec![Group {
            name: "",
            optimizer: &*self.optimizer,
            lr: self.lr,
            norm: self.norm,
            times: None,
            gradients: Some(&self.grads),
            skipped: self.grads.skipped_steps(),
        }]
    }

    fn state(&mut self) -> State<'_> {
        State {
            params: self.weights.local_mut(),
            optimizers: vec![&mut *self.optimizer],
        }
    }

    fn restore(
        &mut self,
        _: &RankContext,
        resumed: &Resumed,
        shaping: &BTreeMap<String, String>,
    ) -> Result<()> {
        resumed.mesh(&mut self.weights, &mut *self.optimizer, shaping)?;
        self.grads
            .set_skipped_steps(resumed.history()?.skipped_steps);
        Ok(())
    }

    fn describe(&self, ctx: &RankContext, settings: &Settings) -> Result<Description> {
        let (mesh, own) = (&self.mesh, self.weights.local().numel());
        let count = Mesh::range(ctx, own, thousands)?;
        let size = Mesh::range(ctx, size_of::<f32>() * own, bytes)?;
        let mut batch = format!(
            "{} over data={}",
            settings.global_batch(mesh.data),
            mesh.data
        );
        if settings.split.accumulate > 1 {
            batch.push_str(&format!(" in {} micro-batches", settings.split.accumulate));
        }
        let layouts = mesh.explain.then(|| explain::layouts(&self.weights));
        Ok(Description {
            model: String::new(),
            lines: vec![
                format!("mesh     {}", mesh.describe()),
                format!(
                    "         {count} parameters on each rank ({size}, and as much for gradients and each optimizer state)"
                ),
            ],
            batch,
            last: layouts.into_iter().collect(),
        })
    }

    fn begin_epoch(&mut self, step_in_epoch: usize, cursor: Cursor) -> Result<()> {
        let (split, samplers) = &self.all;
        self.plan = Some((split.rest(samplers, cursor)?, step_in_epoch));
        Ok(())
    }

    fn gradients<M, D: Dataset + ?Sized>(
        &mut self,
        _: usize,
        tools: StepTools<'_>,
        model: &M,
        batches: &mut LoadedMicroBatches<'_, '_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatchOf<'s, D::Batch, Self>) -> Result<Global<'s>>,
    ) -> Result<Gradients> {
        let (ctx, tape, split, randomness) = (tools.ctx, tools.tape, tools.split, tools.randomness);
        let (mut log, index_of_step) = (tools.log, tools.step.index);
        let all = tools.step.global.samples.max(1) as f64;
        let accumulates = split.mine().len() > 1 && !self.samples(index_of_step, 1).is_empty();
        self.grads.set_accumulate(accumulates);
        if accumulates {
            self.grads.zero();
        }
        let (mut total, mut forward_ended) = (0.0, Instant::now());
        let explains = std::mem::take(&mut self.mesh.explain);
        let mut index = 0;
        while let Some((_, loaded)) = batches.next()? {
            let ids = self.samples(index_of_step, index);
            if ids.is_empty() {
                break;
            }
            ctx.group().set_phase("forward");
            let step = self.weights.step(tape, randomness.key(&ids));
            let explained = explains && index == 0;
            if explained {
                step.keep_conversions();
            }
            // All ranks take part, also one that has no row.
            let calls = Cell::new(0);
            let micro = MicroBatchOf::new(&step, &*loaded, loaded.indices(), randomness, &calls);
            let loss = loss(model, micro)?;
            // The same on all ranks.
            total += f64::from(loss.item()?) * ids.len() as f64;
            forward_ended = Instant::now();
            if let Some(log) = &mut log {
                log.graph(|| step.local().graph());
            }
            if explained {
                let text = explain::conversions(&step.explain());
                tools.progress.suspend(|| ctx.note(&text));
            }
            ctx.group().set_phase("backward");
            // The mean over the step's samples.
            match ids.len() as f64 / all {
                1.0 => loss.backward(&mut self.grads)?,
                share => loss.scale(share as f32)?.backward(&mut self.grads)?,
            }
            drop(step);
            tape.update_buffers(self.weights.local_mut())?;
            batches.keep(loaded);
            index += 1;
        }
        ctx.group().set_phase("optimizer");
        if accumulates {
            self.grads.sum(&self.weights)?;
        }
        let (commit, factor) = match tools.clip {
            Some(limit) => {
                let (commit, norm) = self.grads.commit_with_norm(&self.weights)?;
                self.norm = Some(norm);
                (commit, clip_factor(norm, limit))
            }
            None => (self.grads.commit(&self.weights)?, 1.0),
        };
        self.factor = factor;
        let mut sums = vec![0.0; split.parts()];
        if self.batch_group().rank() == 0 {
            sums[0] = total;
        }
        Ok(Gradients {
            commit,
            sums,
            mean: total / all,
            mean_of_all: total / all,
            forward_ended,
        })
    }

    fn update(&mut self, _: usize, _: Option<f64>) -> Result<()> {
        let local = self.weights.local_mut();
        self.optimizer
            .step_scaled(local, &self.grads, self.factor)?;
        Ok(())
    }

    fn end_epoch(&mut self, ctx: &RankContext) -> Result<Option<String>> {
        self.check_copies()?;
        weights_sha256(self, ctx)
    }

    fn gather_weights<R>(
        &self,
        _: &RankContext,
        write: impl FnOnce(&Outline, &mut Values<'_>) -> Result<R>,
    ) -> Result<Option<R>> {
        Ok(self.weights.gather_each(None, write)?)
    }

    fn measure<M, B>(
        &self,
        tape: &mut Tape,
        model: &M,
        (data, indices): (&B, &[u64]),
        randomness: Randomness,
        measure: &mut impl for<'s> FnMut(&M, MicroBatchOf<'s, B, Self>) -> Result<Measure>,
    ) -> Result<Option<Measure>> {
        let step = self.weights.inference(tape);
        let calls = Cell::new(0);
        let micro = MicroBatchOf::new(&step, data, indices, randomness, &calls);
        // All ranks take part in the model, also one that has no row.
        let measured = measure(model, micro)?;
        Ok((!indices.is_empty()).then_some(measured))
    }

    fn save(
        &mut self,
        _: &RankContext,
        saving: &mut Saving<'_>,
        action: SaveAction,
        _: Option<&[f32]>,
        place: Place,
        mut history: History,
    ) -> Result<()> {
        history.skipped_steps = self.grads.skipped_steps();
        saving.save_streamed(action, place, &history, |folder, info| {
            self.weights.save(folder, &*self.optimizer, info)
        })
    }

    fn optimizer_sha256(&self) -> Result<Option<String>> {
        let (weights, optimizer) = (&self.weights, &*self.optimizer);
        let digest = weights.gather_each(Some(optimizer), |_, values| {
            optimizer_sha256_with(&optimizer.into(), &weights.full_infos(), values)
        })?;
        Ok(digest)
    }

    fn report(&self, _: &Settings) -> Report {
        let placement = self.placement();
        let lines = (0..placement.sizes().len()).map(|dim| placement.line(dim));
        let groups = match placement.sizes() {
            // The line is the group itself.
            [_] => vec![placement.group()],
            _ => lines.chain([placement.group()]).collect(),
        };
        let sent = groups.iter().flat_map(|group| group.bytes_sent_to());
        Report {
            infos: self.weights.full_infos(),
            sent_bytes: sent.sum(),
            summary: Map::from_iter([
                ("mesh".to_owned(), json!(placement.to_string())),
                ("fully_sharded".to_owned(), json!(self.mesh.fully_sharded)),
            ]),
            equal_weights: false,
        }
    }
}
