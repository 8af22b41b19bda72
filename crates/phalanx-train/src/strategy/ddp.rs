//! Data parallel training: every rank has the model, batches are split, and gradients are averaged.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_checkpoint::digest::optimizer_sha256;
use phalanx_checkpoint::state::Place;
use phalanx_checkpoint::{self as checkpoint, Outline, Values, full_values};
use phalanx_comm::ProcessGroup;
use phalanx_data::{Dataset, ImageBatch};
use phalanx_ddp::{
    Buffers, DdpOptions, DistributedDataParallel, ErrorKind, Exchange, take_state, verify_equal,
};
use phalanx_member::RankContext;
use phalanx_nn::{Params, Step, Tape, Tensor};
use serde_json::{Map, json};

use super::gather::Peers;
use super::{Description, Gradients, Group, Parts, Report, State, StepTools, Strategy};
use crate::args::{Determinism, ExchangeArg, Settings};
use crate::batch::{Engine, LoadedMicroBatches, MicroBatchOf, Randomness};
use crate::error::{Result, refuse};
use crate::evaluation::Measure;
use crate::format::{bytes, plural};
use crate::param_group::{self, ParamGroup, joined_state};
use crate::saving::{CheckpointSource, History, Resumed, SaveAction, Saving};
use crate::split::BatchSplit;
use crate::update::Update;
use crate::{choice_name, different_arguments};

/// Data parallel training with [`DistributedDataParallel`]: every rank has the whole model.
pub struct Ddp {
    group: ProcessGroup,
    params: Params,
    /// The first has the optimizer that the trainer was made with.
    groups: Vec<ParamGroup>,
    /// What the wrapper of each group is made with.
    options: Vec<DdpOptions>,
    /// All ranks run as many micro-batches, since batch norms join them.
    joins_batches: bool,
}

/// Samples that a model is given together, of a training with [`Ddp`] unless `S` says otherwise; [`MicroBatchOf`] has its
/// methods.
pub type MicroBatch<'s, B, S = Ddp> = MicroBatchOf<'s, B, S>;

impl<'s, B> MicroBatch<'s, B> {
    /// `values` as a tensor of `shape` that needs no gradient.
    ///
    /// # Errors
    ///
    /// `Usage`, when there are not as many values as the shape has.
    pub fn input(&self, values: &[f32], shape: &[usize]) -> phalanx_nn::Result<Tensor<'s>> {
        self.step().input(values, shape)
    }

    /// Standard normal random numbers (`torch.randn`): a tensor of `shape` for each sample. They
    /// follow from `--seed`, epoch, step and sample, so neither the number of ranks nor a resume
    /// changes them; in an evaluation from seed and sample. Each call in a step gives others.
    ///
    /// # Errors
    ///
    /// `Usage`, when the engine has no tensors of such a shape.
    pub fn normal(&self, shape: &[usize]) -> phalanx_nn::Result<Tensor<'s>> {
        let (randomness, call) = self.randomness();
        let len: usize = shape.iter().product();
        let mut values = vec![0.0; self.samples() * len];
        for (values, sample) in values.chunks_exact_mut(len.max(1)).zip(self.indices()) {
            randomness.fill_normal(*sample, call, values);
        }
        self.input(&values, &[&[self.samples()], shape].concat())
    }

    /// The rows of `x`, one for each sample of the micro-batch, from all ranks, as a contrastive loss needs them, and where this
    /// rank's rows are among them. Rows are in the order of the global batch, which does not depend on the number of ranks.
    /// Gradients go back to the rank that a row came from: they are those of the mean loss over the samples of all ranks.
    /// With `--accumulate`, the micro-batches that ranks take at the same time are gathered.
    ///
    /// ```
    /// # use phalanx_nn::{Tensor, layers::Linear};
    /// # use phalanx_train::{MicroBatch, Result};
    /// /// Each image is told from all others of the batch, as in CLIP.
    /// fn loss<'s>(text: &Linear, image: &Linear, batch: MicroBatch<'s, (Vec<f32>, Vec<f32>)>) -> Result<Tensor<'s>> {
    ///     let n = batch.samples();
    ///     let text = text.forward(batch.input(&batch.0, &[n, 8])?)?;
    ///     let image = image.forward(batch.input(&batch.1, &[n, 8])?)?;
    ///     let (images, own) = batch.all_gather(image)?;
    ///     text.bmm_transposed(images)?.cross_entropy(&own, n)
    /// }
    /// ```
    ///
    /// *Blocks* until all ranks call it. *Order*: gradients of a row are added in the order of the ranks.
    ///
    /// # Errors
    ///
    /// `Usage`, when `x` has another number of rows, a rank has no sample in the micro-batch (`--drop-last` leaves out the last
    /// batch of an epoch), in an evaluation, and under `--deterministic shards`; peers that are lost.
    pub fn all_gather(&self, x: Tensor<'s>) -> Result<(Tensor<'s>, Vec<u32>)> {
        match self.peers {
            Some(peers) => peers.all_gather(self.step(), x, self.samples()),
            None => refuse!(
                "all_gather is for training steps; for an evaluation, Trainer::predict gives the rows of all samples"
            ),
        }
    }
}

impl<'s> MicroBatch<'s, ImageBatch> {
    /// The images as a tensor: number, height, width, channels.
    ///
    /// # Errors
    ///
    /// None for batches of the loader.
    pub fn images(&self) -> phalanx_nn::Result<Tensor<'s>> {
        self.input(&self.data().images, &self.data().shape())
    }
}

impl Engine for Ddp {
    type Tensor<'s> = Tensor<'s>;
    type Step<'s> = Step<'s>;
    type Peers = Peers;
}

impl Strategy for Ddp {
    type Setup = ();

    fn plan((): &(), settings: &Settings, world: usize) -> Result<(usize, Vec<String>)> {
        settings.validate(world)?;
        Ok((world, Vec::new()))
    }

    fn build((): (), parts: Parts<'_, '_>) -> Result<Self> {
        let (ctx, settings, choices) = (parts.ctx, parts.settings, parts.choices);
        let (mut params, tape, lr) = (parts.params, parts.tape, choices.lr);
        if let Some((resumed, shaping)) = parts.resumed {
            resumed.params(&mut params, shaping)?;
        }
        // The first that needs whole parameters; it matters only where ranks could divide them.
        let whole = match settings.exchange {
            ExchangeArg::AllReduce => None,
            _ => choices.optimizers.iter().find_map(|(_, make)| {
                let optimizer = make(&params, lr);
                match optimizer.averages() {
                    Some(_) => Some("Ema"),
                    None => (!optimizer.is_elementwise()).then(|| optimizer.name()),
                }
            }),
        };
        let exchange = settings.exchange.choose_for(ctx, settings, whole)?;
        let names: Vec<&str> = choices
            .optimizers
            .iter()
            .skip(1)
            .map(|(n, _)| &n[..])
            .collect();
        let split = param_group::split(&params, &names)?;
        let (mut groups, mut all_options) = (Vec::new(), Vec::new());
        for ((name, make), own) in choices.optimizers.into_iter().zip(split) {
            let mut frozen = choices.frozen.clone();
            let others = params.ids().zip(params.infos());
            let others =
                others.filter(|(id, info)| !own.contains(id) && !frozen.contains(&info.name));
            let others: Vec<String> = others.map(|(_, info)| info.name.clone()).collect();
            frozen.extend(others);
            let mut options = settings.ddp_options(exchange, parts.facts.to_vec(), frozen)?;
            if choices.sync_batch_norm {
                // Those of all ranks are equal already.
                options.buffers = Buffers::Never;
            }
            all_options.push(options.clone());
            let ddp = DistributedDataParallel::new(ctx.group(), &mut params, options);
            let mut ddp = ddp.map_err(different_arguments)?;
            if let Some(hook) = settings.gradient_type.hook() {
                ddp.set_hook(Some(hook))?;
            }
            let update = Update::new(&ddp, &params, ctx.elastic.is_some(), |params| {
                let mut optimizer = make(params, lr);
                optimizer.set_thread_pool(tape.thread_pool());
                optimizer
            })?;
            let lr = update.optimizer().lr();
            groups.push(ParamGroup {
                name,
                params: own,
                ddp,
                update,
                lr,
                norm: None,
            });
        }
        if choices.sync_batch_norm {
            groups[0].ddp.sync_batch_norm(tape)?;
        }
        Ok(Ddp {
            group: ctx.group(),
            params,
            groups,
            options: all_options,
            joins_batches: choices.sync_batch_norm,
        })
    }

    const CAN_GROW: bool = true;

    fn is_sharded(&self) -> bool {
        matches!(self.groups[0].update, Update::Part(_))
    }

    fn may_leave(&self, leaving: &[usize]) -> Vec<usize> {
        match &self.groups[0].update {
            Update::Part(optimizer) => optimizer.may_leave(leaving),
            Update::Whole(_) => leaving.to_vec(),
        }
    }

    fn check_elastic((): &()) -> Result<()> {
        Ok(())
    }

    fn take_state(&mut self, group: &ProcessGroup, donor: usize) -> Result<()> {
        if self.is_sharded() {
            let mut buffers = self.params.buffers_flat().to_vec();
            group.broadcast(&mut buffers, donor)?;
            self.params.buffers_flat_mut().copy_from_slice(&buffers);
            return Ok(());
        }
        let mut state = self.state();
        Ok(take_state(
            group,
            donor,
            state.params,
            &mut state.optimizers,
        )?)
    }

    fn reform(
        &mut self,
        ctx: &RankContext,
        settings: &Settings,
        tape: &mut Tape,
    ) -> Result<Option<String>> {
        let skipped: Vec<u64> = self.groups.iter().map(|g| g.ddp.skipped_steps()).collect();
        let buffers = self.params.buffers_flat().to_vec();
        self.group = ctx.group();
        for (group, options) in self.groups.iter_mut().zip(&self.options) {
            let params = &mut self.params;
            let mut ddp = DistributedDataParallel::new(ctx.group(), params, options.clone())?;
            if let Some(hook) = settings.gradient_type.hook() {
                ddp.set_hook(Some(hook))?;
            }
            if let Some(optimizer) = group.update.with_copies() {
                match optimizer.recut(params, &mut ddp) {
                    Err(error) if error.kind() == ErrorKind::StateLost => {
                        return Ok(Some(error.to_string()));
                    }
                    divided => divided?,
                }
            }
            group.ddp = ddp;
        }
        self.params.buffers_flat_mut().copy_from_slice(&buffers);
        self.set_skipped_steps(&skipped);
        if self.joins_batches {
            self.groups[0].ddp.sync_batch_norm(tape)?;
        }
        Ok(None)
    }

    fn set_skipped_steps(&mut self, skipped: &[u64]) {
        for (group, skipped) in self.groups.iter_mut().zip(skipped) {
            group.ddp.set_skipped_steps(*skipped);
        }
    }

    fn batch_group(&self) -> &ProcessGroup {
        &self.group
    }

    fn params(&self) -> &Params {
        &self.params
    }

    fn groups(&self) -> Vec<Group<'_>> {
        let groups = self.groups.iter().map(|group| Group {
            name: &group.name,
            optimizer: group.update.optimizer(),
            lr: group.lr,
            norm: group.norm,
            times: Some(group.ddp.times()),
            gradients: (!group.ddp.exchange().is_scattered()).then_some(&group.ddp as _),
            skipped: group.ddp.skipped_steps(),
        });
        groups.collect()
    }

    fn state(&mut self) -> State<'_> {
        let optimizers = self.groups.iter_mut().map(|g| g.update.optimizer_mut());
        State {
            params: &mut self.params,
            optimizers: optimizers.collect(),
        }
    }

    fn restore(
        &mut self,
        ctx: &RankContext,
        resumed: &Resumed,
        shaping: &BTreeMap<String, String>,
    ) -> Result<()> {
        resumed.groups(ctx, &self.params, &mut self.groups, shaping)
    }

    fn describe(&self, ctx: &RankContext, settings: &Settings) -> Result<Description> {
        let plans = self.groups.iter().map(|group| group.ddp.plan());
        let sizes: Vec<String> = plans
            .flat_map(|plan| (0..plan.buckets().len()).map(|b| bytes(plan.bucket_bytes(b))))
            .collect();
        let exchange = self.groups[0].ddp.exchange();
        let model = match settings.split.determinism() {
            _ if exchange == Exchange::AtStep => {
                format!("{} averaged in the optimizer's step", sizes.join(" and "))
            }
            Determinism::Ranks | Determinism::Off => {
                format!("{} ({})", plural(sizes.len(), "bucket"), sizes.join(", "))
            }
            Determinism::Shards => format!("added over {} shards", settings.split.shards()),
        };
        let (world, global) = (ctx.world(), settings.global_batch(ctx.world()));
        let mut batch = match global.is_multiple_of(world) {
            true => format!("{global} = {world} x {}", global / world),
            false => format!("{global} over {world} ranks"),
        };
        if settings.split.accumulate > 1 {
            batch.push_str(&format!(" in {} micro-batches", settings.split.accumulate));
        }
        let mut last = Vec::new();
        if settings.watch > 0 && exchange.is_scattered() {
            last.push("watch    parameters only: each rank has a part of the gradients; --exchange all-reduce watches both".to_owned());
        }
        Ok(Description {
            model: format!(", {model}"),
            lines: Vec::new(),
            batch,
            last,
        })
    }

    fn gradients<M, D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        tools: StepTools<'_>,
        model: &M,
        batches: &mut LoadedMicroBatches<'_, '_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, Self>) -> Result<Tensor<'s>>,
    ) -> Result<Gradients> {
        let (ctx, tape, step, randomness) = (tools.ctx, tools.tape, tools.step, tools.randomness);
        let (mut log, mut sums) = (tools.log, vec![0.0; tools.split.parts()]);
        let mut forward_ended = Instant::now();
        // Of joined batches, those that are empty on some ranks only as well.
        let count = match self.joins_batches {
            true => step.sizes.len().min(step.global.samples),
            false => step.sizes.iter().filter(|n| **n > 0).count(),
        };
        // The mean is taken over all samples, however unevenly they are split.
        let ddp = &mut self.groups[group].ddp;
        let mut micro_batches = ddp.begin_known(&step.sizes[..count], step.global)?;
        let mut index = 0;
        while let Some((part, loaded)) = batches.next()? {
            let indices = loaded.indices();
            if index < count {
                ctx.group().set_phase("forward");
                let taped = tape.step(&self.params, randomness.key(indices));
                let calls = Cell::new(0);
                let peers = Peers::new(&ctx.group(), tools.split, index, step.global.samples);
                let mut micro = MicroBatch::new(&taped, &*loaded, indices, randomness, &calls);
                micro.peers = Some(&peers);
                let loss = loss(model, micro)?;
                if let Some(log) = &mut log {
                    log.graph(|| taped.graph());
                }
                if !indices.is_empty() {
                    sums[part] = f64::from(loss.item()?) * f64::from(indices.len() as f32);
                }
                micro_batches.carry(sums.iter().sum());
                forward_ended = Instant::now();
                match self.joins_batches {
                    true => {
                        let (weight, sink) = micro_batches.weighed_micro_batch()?;
                        loss.backward_with(&weight, sink)?;
                    }
                    false => loss.backward(micro_batches.micro_batch()?)?,
                }
                drop(taped);
                micro_batches.update_buffers(tape, &mut self.params)?;
            }
            index += 1;
            batches.keep(loaded);
        }
        let samples: usize = step.sizes.iter().sum();
        let commit = micro_batches.finish()?;
        ctx.group().set_phase("optimizer");
        let group = &mut self.groups[group];
        if commit.is_yes() {
            group.norm = group
                .update
                .prepare(&self.params, &mut group.ddp, tools.clip)?;
        }
        let mean = sums.iter().sum::<f64>() / samples.max(1) as f64;
        let carried = group.ddp.carried();
        Ok(Gradients {
            commit,
            mean,
            mean_of_all: carried.map_or(mean, |sum| sum / step.global.samples.max(1) as f64),
            sums,
            forward_ended,
        })
    }

    fn update(&mut self, group: usize, clip: Option<f64>) -> Result<()> {
        let (params, group) = (&mut self.params, &mut self.groups[group]);
        group.ddp.sync_buffers(params)?;
        let (ddp, norm) = (&mut group.ddp, group.norm);
        group.update.step(params, ddp, norm, clip)
    }

    fn gather_updated(&mut self, group: usize) -> Result<()> {
        let (params, group) = (&mut self.params, &mut self.groups[group]);
        match group.update.with_copies() {
            Some(optimizer) => Ok(optimizer.gather(params, &mut group.ddp)?),
            None => Ok(()),
        }
    }

    fn has_own_buffers(&self, ctx: &RankContext, split: &BatchSplit) -> bool {
        let are_joint = split.tree().is_some() || self.joins_batches || ctx.world() == 1;
        !are_joint && !self.params.buffers_flat().is_empty()
    }

    fn end_epoch(&mut self, ctx: &RankContext) -> Result<Option<String>> {
        self.groups[0].ddp.end_epoch(&mut self.params)?;
        let digest = checkpoint::weights_digest(&self.params);
        verify_equal(&ctx.group(), &self.params, digest)?;
        Ok(Some(hex::encode(digest)))
    }

    fn gather_weights<R>(
        &self,
        ctx: &RankContext,
        write: impl FnOnce(&Outline, &mut Values<'_>) -> Result<R>,
    ) -> Result<Option<R>> {
        let values = &mut |tensor| Ok(full_values(&self.params, tensor));
        let write = || write(&Outline::of(&self.params), values);
        ctx.is_main().then(write).transpose()
    }

    fn measure<M, B>(
        &self,
        tape: &mut Tape,
        model: &M,
        (data, indices): (&B, &[u64]),
        randomness: Randomness,
        measure: &mut impl for<'s> FnMut(&M, MicroBatch<'s, B, Self>) -> Result<Measure>,
    ) -> Result<Option<Measure>> {
        if indices.is_empty() {
            return Ok(None);
        }
        let step = tape.inference(&self.params);
        let calls = Cell::new(0);
        let micro = MicroBatch::new(&step, data, indices, randomness, &calls);
        measure(model, micro).map(Some)
    }

    fn prepare_saving(&self, saving: &mut Saving<'_>) -> Result<()> {
        saving.prepare(&self.params, &self.groups[0].update)
    }

    fn save(
        &mut self,
        _: &RankContext,
        saving: &mut Saving<'_>,
        action: SaveAction,
        buffers: Option<&[f32]>,
        place: Place,
        history: History,
    ) -> Result<()> {
        let (main, more) = (&self.groups[0], &self.groups[1..]);
        let source = CheckpointSource {
            params: &self.params,
            buffers,
            update: &main.update,
            ddp: &main.ddp,
        };
        saving.save(action, &source, more, place, history)
    }

    fn optimizer_sha256(&self) -> Result<Option<String>> {
        let (main, more) = (&self.groups[0].update, &self.groups[1..]);
        let joined = joined_state(main, more, &self.params, Vec::new())?;
        Ok(joined.map(|(state, _)| optimizer_sha256(state)))
    }

    fn report(&self, settings: &Settings) -> Report {
        let gradient_type = json!(choice_name(&settings.gradient_type));
        Report {
            infos: self.params.infos().to_vec(),
            sent_bytes: self.group.bytes_sent_to().iter().sum(),
            summary: Map::from_iter([("gradient_type".to_owned(), gradient_type)]),
            equal_weights: self.group.world_size() > 1,
        }
    }
}
