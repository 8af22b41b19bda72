//! `DistributedDataParallel`: the reducer as gradient sink of an engine model.

use std::ops::Range;
use std::sync::Arc;

#[cfg(doc)]
use phalanx_comm::Algorithm;
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::{GradSink, GradView, Layout, ParamId, Params, Tape};

use super::route::{Routes, Selection, Unused};
use super::shards::Shards;
use super::sync_norm::SyncBatchNorm;
use super::tree::ShardTree;
use crate::average::{self, Average, GlobalBatch, Uneven};
use crate::bucket::{BucketCaps, BucketPlan};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::hooks::GradientHook;
use crate::parameters::{ParamSpec, broadcast_parameters};
use crate::reducer::{Exchange, Reducer, ReducerOptions};
use crate::trace::StepTimes;
use crate::vote::Commit;

/// Settings of [`DistributedDataParallel`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DdpOptions {
    /// Bucket caps; `None` takes [`BucketCaps::ONE_HOST`] or
    /// [`BucketCaps::ACROSS_HOSTS`], whichever applies.
    pub caps: Option<BucketCaps>,
    /// Keep the first layout instead of rebuilding it in observed order.
    pub keep_layout: bool,
    /// What the mean of gradients is taken over, in steps that
    /// [`begin`](DistributedDataParallel::begin) starts.
    pub average: Average,
    /// How reproducible results are.
    pub deterministic: Deterministic,
    /// Whether a rank may have no data while another has.
    pub uneven: Uneven,
    /// How to handle parameters that a loss does not depend on.
    pub unused: Unused,
    /// How and when buffers (running statistics) are made equal over the ranks by
    /// [`sync_buffers`](DistributedDataParallel::sync_buffers). With
    /// [`Deterministic::Shards`] they are the mean over shards after every step, and this is ignored.
    pub buffers: Buffers,
    /// Parameters by name that each rank trains for itself: their gradients
    /// are neither averaged nor clipped, and rank 0's values are not broadcast.
    pub ignored: Vec<String>,
    /// Parameters by name that are not trained: they are in no bucket, and optimizers
    /// skip them.
    pub frozen: Vec<String>,
    /// How gradients are synchronized: every rank gets all of them, or a part for a
    /// sharded optimizer.
    pub exchange: Exchange,
    /// Do not check gradients for infinities and NaNs, for callers that check them and
    /// [veto](DistributedDataParallel::veto) (not with [`Deterministic::Shards`], which always checks). It saves one
    /// pass over the gradients, less than 1 % of a step.
    pub unchecked: bool,
    /// Further facts that must be equal on all ranks (hyperparameters, data
    /// set): compared with the model at construction.
    pub must_agree: Vec<String>,
}

/// What the bits of a step depend on, everything else being equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Deterministic {
    /// Only the number of ranks: gradients are added in the order of the ranks.
    #[default]
    Ranks,
    /// Not even the number of ranks: the global batch is split into this many logical
    /// shards, one micro-batch each, whose gradients and buffers are added in one fixed
    /// tree ([`ShardTree`]). Steps are started with [`DistributedDataParallel::begin`].
    Shards(ShardTree),
    /// Bits are the same on all ranks, but not guaranteed between runs: if it is predicted to be faster
    /// ([`Algorithm::Fastest`]; between hosts only), gradients are added in another order. The order
    /// depends on bucket sizes, hosts and the measured network, so the last bits may differ in another
    /// run, and with other buckets. An algorithm set for the group takes precedence.
    Off,
}

/// When and how buffers are made equal over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffers {
    /// Never: each rank keeps its own (PyTorch: `broadcast_buffers=False`).
    /// [`verify_equal`](crate::verify_equal) then reports a difference.
    Never,
    /// All ranks take rank 0's (PyTorch: `broadcast_buffers=True`, its default and, every step, ours).
    RankZero(Every),
    /// All ranks take the mean.
    Mean(Every),
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers::RankZero(Every::Step)
    }
}

/// How often buffers are made equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Every {
    /// In [`DistributedDataParallel::sync_buffers`], called once a step.
    Step,
    /// In [`DistributedDataParallel::end_epoch`] only.
    Epoch,
}

/// Keeps the models of all ranks equal: the same parameters at the start, averaged
/// gradients in every step.
///
/// Pass it to `backward` as gradient sink, call [`finish`](Self::finish), then pass it to the optimizer:
///
/// ```no_run
/// # use phalanx_nn::{layers::Linear, optim::Sgd, Scope, Seed, StepKey, Tape, Threads};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = phalanx_comm::ProcessGroup::threads(1, Default::default()).remove(0);
/// # let mut scope = Scope::new(Seed(0));
/// # let net = Linear::new(scope.enter("head"), 2, 1);
/// # let mut params = scope.build()?;
/// # let mut optimizer = Sgd::new(&params, 0.1);
/// # let mut tape = Tape::new(Threads(1));
/// # let (x, y) = ([1.0, 2.0], [3.0]);
/// let mut ddp = phalanx_ddp::DistributedDataParallel::new(group, &mut params, Default::default())?;
/// for i in 0..10 {
///     let step = tape.step(&params, StepKey::new(0, i));
///     let loss = net.forward(step.input(&x, &[1, 2])?)?.mse_loss(&y, phalanx_nn::Reduction::Mean)?;
///     loss.backward(&mut ddp)?;          // all-reduces start inside
///     drop(step);
///     if ddp.finish()?.is_yes() {         // and end here; all ranks have voted
///         optimizer.step(&mut params, &ddp)?;
///     }
///     ddp.update_buffers(&mut tape, &mut params)?; // running statistics, if the model has any
///     ddp.sync_buffers(&mut params)?;              // rank 0's buffers on all ranks
/// }
/// # Ok(()) }
/// ```
///
/// [`begin`](Self::begin) starts steps with several micro-batches, with uneven ranks,
/// and with ranks that have run out of data.
pub struct DistributedDataParallel {
    pub(super) reducer: Reducer,
    /// Replaces the reducer when gradients are folded over shards.
    shards: Option<Box<Shards>>,
    routes: Routes,
    /// Parameters that are reduced, by their number in the reducer.
    reduced: Vec<ParamId>,
    options: DdpOptions,
    /// Whether every rank takes part in every batch normalisation.
    joins_batches: bool,
}

/// Calls a method of the shards, or of the reducer where gradients are not folded over shards.
macro_rules! folding {
    ($self:ident, $borrowed:ident, $method:ident($($argument:expr),*)) => {
        match $self.shards.$borrowed() {
            Some(shards) => shards.$method($($argument),*),
            None => $self.reducer.$method($($argument),*),
        }
    };
}

impl DistributedDataParallel {
    /// Compares names, shapes and options over the ranks, then gives every
    /// rank the parameters and buffers of rank 0.
    ///
    /// *Blocks* until all ranks of the group construct it.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming the first difference; `Comm` when a peer is lost or
    /// late.
    pub fn new(
        group: ProcessGroup,
        params: &mut Params,
        options: DdpOptions,
    ) -> Result<DistributedDataParallel> {
        let routes = Routes::new(params, &options.ignored, &options.frozen, options.unused)?;
        if options.exchange.is_scattered() {
            check_scattered(&options)?;
        }
        // First of all, the ranks must agree on everything that follows.
        fingerprint(&group, params, &options).compare(&group)?;
        let caps = match options.caps {
            Some(caps) => caps,
            // Several buckets would not start earlier.
            None if options.exchange == Exchange::AtStep => BucketCaps::uniform(usize::MAX),
            None => BucketCaps::of_group(&group)?,
        };
        let reducer_options = ReducerOptions {
            caps,
            rebuild: !options.keep_layout,
            exchange: options.exchange,
            any_order: options.deterministic == Deterministic::Off,
            unchecked: options.unchecked,
        };
        let own = routes.ignored_values(params);
        broadcast_parameters(&group, params, 0)?;
        routes.restore(params, own);
        let is_reduced = |id: &ParamId| matches!(routes.of(*id), Selection::Reduced(_));
        let reduced: Vec<ParamId> = params.ids().filter(is_reduced).collect();
        let specs = reduced.iter().map(|id| spec(params, *id)).collect();
        let (specs, shards) = match options.deterministic {
            Deterministic::Ranks | Deterministic::Off => (specs, None),
            Deterministic::Shards(tree) => {
                let buffers = params.buffers_flat().len();
                let own = routes.ignored_names();
                let shards = Shards::new(group.clone(), tree, specs, buffers, own)?;
                (Vec::new(), Some(Box::new(shards)))
            }
        };
        let mut reducer = Reducer::new(group, specs, reducer_options);
        reducer.own = routes.ignored_names();
        Ok(DistributedDataParallel {
            reducer,
            shards,
            routes,
            reduced,
            options,
            joins_batches: false,
        })
    }

    /// The sizes of a step over all ranks. *Blocks* until all ranks ask for them.
    pub(super) fn exchange_sizes(&self, sizes: &[usize]) -> Result<GlobalBatch> {
        average::exchange(
            self.reducer.group(),
            sizes,
            self.options.uneven,
            self.joins_batches,
        )
    }

    /// Begins a step with these sizes.
    pub(super) fn plan_step(&mut self, sizes: &[usize], global: GlobalBatch) -> Result<()> {
        self.check_begin(sizes, global)?;
        let weights = match &mut self.shards {
            Some(shards) => shards.plan_step(self.options.average, sizes, global.samples)?,
            None => self
                .reducer
                .plan_sizes(self.options.average, sizes, global)?,
        };
        match global.samples {
            0 => self.routes.finish(),
            _ => self.routes.plan_step(&weights),
        }
        Ok(())
    }

    /// Checks that a step may begin with these sizes.
    fn check_begin(&self, sizes: &[usize], global: GlobalBatch) -> Result<()> {
        let group = self.reducer.group();
        let world = group.world_size();
        if self.options.uneven == Uneven::Refuse && (1..world).contains(&global.active_ranks) {
            return Err(Error::mismatch(format!(
                "{} of {world} ranks have no data left while others still have some; cut the data evenly, or allow it \
                 (Uneven::Join)",
                world - global.active_ranks
            )));
        }
        if self.joins_batches && sizes.is_empty() && global.samples > 0 {
            let error = Error::usage(format!(
                "rank {} has no micro-batch in a step in which others have, but batch normalisations join the batches of all \
                 ranks; begin it with one of no samples (&[0]) and run the model on it",
                group.rank()
            ));
            // The other ranks wait for this one in the first normalisation.
            group.abort(&error.to_string());
            return Err(error);
        }
        Ok(())
    }

    /// Micro-batch `index` of a declared step of `of` begins.
    pub(crate) fn next_micro_batch(&mut self, index: usize, of: usize) -> Result<()> {
        if let Some(shards) = &mut self.shards {
            shards.next_micro_batch()?;
        } else if index > 0 || of == 0 {
            self.reducer.next_micro_batch()?;
        }
        self.routes.start_micro_batch(index);
        Ok(())
    }

    /// The gradient of a parameter that is not reduced is final.
    fn own_ready(&mut self, param: ParamId) {
        if let Some(own) = self.routes.ready(param) {
            folding!(self, as_mut, own_not_finite(own))
        }
    }

    /// Leaves it to the caller to weigh micro-batch `index`; returns the weight.
    pub(crate) fn weigh_at_loss(&mut self, index: usize) -> f32 {
        self.routes.at_loss = true;
        folding!(self, as_mut, weigh_at_loss(index))
    }

    /// Calls [`Tape::update_buffers`](phalanx_nn::Tape::update_buffers) for the
    /// wrapper: with [`Deterministic::Shards`] every shard starts from the buffers at
    /// the beginning of the step. Call it after the backward of each micro-batch, and
    /// [`sync_buffers`](Self::sync_buffers) at the end of the step.
    ///
    /// # Errors
    ///
    /// `Usage` when `params` belong to another model or no micro-batch has run.
    pub fn update_buffers(&mut self, tape: &mut Tape, params: &mut Params) -> Result<()> {
        let before = match &self.shards {
            Some(_) => params.buffers_flat().to_vec(),
            None => Vec::new(),
        };
        tape.update_buffers(params)
            .map_err(|e| Error::usage(e.to_string()))?;
        match &mut self.shards {
            Some(shards) => shards.keep_buffers(params, &before),
            None => Ok(()),
        }
    }

    /// Lets `hook` average gradients from the next step on ([`GradientHook`]); `None`
    /// returns to float32 all-reduces that start inside backward.
    ///
    /// *Blocks* until all ranks of the group call it, to compare names.
    ///
    /// # Errors
    ///
    /// `Mismatch` when ranks set different hooks; `Usage` within a step and
    /// with [`Deterministic::Shards`]; `Comm` when a peer is lost or late.
    pub fn set_hook(&mut self, hook: Option<Box<dyn GradientHook>>) -> Result<()> {
        if self.shards.is_some() {
            return Err(Error::usage(
                "gradients folded over shards travel as they are; leave out the gradient hook",
            ));
        }
        let mut print = Fingerprint::new();
        let name = hook.as_ref().map_or("none".to_owned(), |h| h.name());
        print.line(format!("gradient hook {name}"));
        print.compare(self.reducer.group())?;
        self.reducer.set_hook(hook)
    }

    /// The hook that was set, for its state in checkpoints
    /// ([`GradientHook::gather_state`]).
    pub fn hook_mut(&mut self) -> Option<&mut (dyn GradientHook + 'static)> {
        self.reducer.hook_mut()
    }

    /// Sets the number of steps skipped by vote so far, of a wrapper that takes another one's place or of a training that
    /// is resumed. It must be the same on all ranks.
    pub fn set_skipped_steps(&mut self, steps: u64) {
        folding!(self, as_mut, set_skipped_steps(steps))
    }

    /// The parameters and elements whose gradients `rank` gets, with
    /// [`Exchange::ReduceScatter`] and [`Exchange::AtStep`].
    pub(crate) fn scattered(&self, rank: usize) -> Vec<(ParamId, Range<usize>)> {
        let pieces = self
            .plan()
            .scattered(self.group().world_size(), rank)
            .into_iter();
        pieces.map(|(p, elems)| (self.reduced[p], elems)).collect()
    }

    /// This rank's gradient of some of those elements.
    pub(crate) fn scattered_piece(&self, param: ParamId, elems: Range<usize>) -> &[f32] {
        match self.routes.of(param) {
            Selection::Reduced(index) => self.reducer.piece(index, elems),
            _ => &[],
        }
    }

    /// [`Reducer::visit_pieces`].
    pub(crate) fn visit_pieces(
        &mut self,
        mut visit: impl FnMut(ParamId, Range<usize>, &[f32]),
    ) -> Result<()> {
        let reduced = &self.reduced;
        self.reducer
            .visit_pieces(|p, elems, gradient| visit(reduced[p], elems, gradient))
    }

    /// Gathers the updated pieces of all ranks into `params`, of which each rank has updated its own.
    pub(crate) fn gather_pieces(&mut self, params: &mut Params) -> Result<()> {
        let start = |id: &ParamId| params.infos()[id.index()].offset;
        let starts: Vec<usize> = self.reduced.iter().map(start).collect();
        self.reducer.gather_pieces(params.flat_mut(), &starts)
    }

    /// How gradients are synchronized.
    pub fn exchange(&self) -> Exchange {
        self.options.exchange
    }

    pub(crate) fn is_scattered(&self) -> bool {
        self.options.exchange.is_scattered()
    }

    /// Makes every batch normalisation of the model use the batch of all ranks,
    /// from the next training step of `tape` on ([`SyncBatchNorm`]; PyTorch:
    /// `convert_sync_batchnorm`). This forms another group from the wrapper's, which ends with it. All ranks must then
    /// [begin](Self::begin) the same number of micro-batches: a rank without data takes one of no samples (`&[0]`),
    /// and runs the model on it.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `Usage` with [`Deterministic::Shards`], whose batch statistics are each shard's; `Comm` when a peer is lost or late.
    pub fn sync_batch_norm(&mut self, tape: &mut Tape) -> Result<()> {
        if self.shards.is_some() {
            return Err(Error::usage(
                "sync_batch_norm does not work with Deterministic::Shards, which takes batch statistics of each shard; \
                 use Deterministic::Ranks, or leave out sync_batch_norm",
            ));
        }
        let group = self.reducer.group();
        let ranks: Vec<usize> = (0..group.world_size()).collect();
        let own = group
            .new_group(&ranks)
            .map_err(|e| Error::comm_while("no group for batch statistics could be formed", e))?;
        if let Some(own) = &own {
            own.end_with(group);
        }
        self.joins_batches = group.world_size() > 1;
        tape.join_statistics(own.map(|group| Arc::new(SyncBatchNorm::new(group)) as _));
        Ok(())
    }

    /// Makes buffers equal, if the options ask for it every step; with [`Deterministic::Shards`] puts the mean
    /// over shards into the model. Call it once per step, after [`finish`](Self::finish) and
    /// [`update_buffers`](Self::update_buffers). PyTorch broadcasts rank 0's buffers before each forward, which
    /// gives the same values.
    ///
    /// *Blocks* until all ranks call it, if there is anything to do.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn sync_buffers(&self, params: &mut Params) -> Result<()> {
        self.equal_buffers(params, Every::Step)
    }

    /// Makes buffers equal unless the option is [`Buffers::Never`], also when that is
    /// done every step.
    ///
    /// *Blocks* until all ranks call it, if there is anything to do.
    ///
    /// # Errors
    ///
    /// `Comm` when a peer is lost or late.
    pub fn end_epoch(&self, params: &mut Params) -> Result<()> {
        self.equal_buffers(params, Every::Epoch)
    }

    fn equal_buffers(&self, params: &mut Params, now: Every) -> Result<()> {
        if let Some(shards) = &self.shards {
            if now == Every::Step {
                shards.put_buffers(params);
            }
            return Ok(());
        }
        let due = |every| every == Every::Step || now == Every::Epoch;
        let group = self.reducer.group();
        if group.world_size() == 1 || params.buffers_flat().is_empty() {
            return Ok(());
        }
        let values = params.buffers_flat_mut();
        let done = match self.options.buffers {
            Buffers::RankZero(every) if due(every) => group.broadcast(values, 0),
            Buffers::Mean(every) if due(every) => group.all_reduce(values, ReduceOp::Mean),
            _ => return Ok(()),
        };
        done.map_err(|e| Error::comm_while("buffers could not be made equal", e))
    }

    /// Waits until all gradients of this step are averaged, and returns whether the
    /// optimizer may apply them ([`Reducer::finish`]).
    ///
    /// # Errors
    ///
    /// As [`Reducer::finish`].
    pub fn finish(&mut self) -> Result<Commit> {
        if let Err(error) = self.routes.check_unused(self.reducer.group().rank()) {
            self.reducer.group().abort(&error.to_string());
            return Err(error);
        }
        let commit = folding!(self, as_mut, finish())?;
        self.routes.finish();
        Ok(commit)
    }

    /// Votes against the running step, or between steps against the next one ([`Reducer::veto`]).
    pub fn veto(&mut self) {
        folding!(self, as_mut, veto())
    }

    /// What all ranks gave by [`GlobalStep::carry`](crate::GlobalStep::carry) in the last finished step ([`Reducer::carried`]); `None` with
    /// [`Deterministic::Shards`].
    pub fn carried(&self) -> Option<f64> {
        match &self.shards {
            Some(_) => None,
            None => self.reducer.carried(),
        }
    }

    /// Number of steps skipped by vote so far.
    pub fn skipped_steps(&self) -> u64 {
        folding!(self, as_ref, skipped_steps())
    }

    /// The bucket layout in use; no bucket with [`Deterministic::Shards`].
    pub fn plan(&self) -> &BucketPlan {
        self.reducer.plan()
    }

    /// The process group.
    pub fn group(&self) -> &ProcessGroup {
        self.reducer.group()
    }

    /// A gradient is final; `finite`: the caller has checked that all of it is finite.
    fn used(&mut self, param: ParamId, finite: bool) -> Result<()> {
        self.routes.used(param);
        match (self.routes.of(param), &mut self.shards) {
            (Selection::Reduced(index), Some(shards)) => shards.ready(index, true),
            (Selection::Reduced(index), None) if finite => self.reducer.ready_finite(index),
            (Selection::Reduced(index), None) => self.reducer.ready(index),
            (Selection::Unknown, _) => Err(self.routes.unknown(param)),
            _ => {
                self.own_ready(param);
                Ok(())
            }
        }
    }

    /// When things happened in the last finished step.
    pub fn times(&self) -> &StepTimes {
        folding!(self, as_ref, times())
    }
}

impl GradSink for DistributedDataParallel {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        match self.routes.of(param) {
            Selection::Reduced(index) => folding!(self, as_mut, slot(index)),
            _ => self.routes.slot(param),
        }
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        Ok(self.used(param, false)?)
    }

    fn ready_finite(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        Ok(self.used(param, true)?)
    }

    fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        match self.routes.of(param) {
            Selection::Reduced(index) => {
                match &mut self.shards {
                    Some(shards) => {
                        shards.slot(index).fill(0.0);
                        shards.ready(index, false)?;
                    }
                    None => self.reducer.unused(index)?,
                }
                Ok(())
            }
            Selection::Frozen => Ok(()),
            Selection::Unknown => Err(self.routes.unknown(param).into()),
            Selection::Ignored => {
                self.routes.slot(param).fill(0.0);
                self.own_ready(param);
                Ok(())
            }
        }
    }
}

impl GradView for DistributedDataParallel {
    fn grad(&self, param: ParamId) -> &[f32] {
        match self.routes.of(param) {
            Selection::Reduced(index) => folding!(self, as_ref, grad(index)),
            _ => self.routes.grad(param),
        }
    }

    fn untouched(&self, param: ParamId) -> bool {
        match self.routes.of(param) {
            Selection::Reduced(index) => folding!(self, as_ref, is_untouched(index)),
            _ => self.routes.untouched(param),
        }
    }

    fn is_local(&self, param: ParamId) -> bool {
        self.routes.of(param) == Selection::Ignored
    }
}

/// Checks the options for scattered gradients.
fn check_scattered(options: &DdpOptions) -> Result<()> {
    if matches!(options.deterministic, Deterministic::Shards(_)) {
        return Err(Error::usage(
            "gradients folded over shards are given to all ranks; leave out Exchange::ReduceScatter or AtStep (the \
             sharded optimizer works without)",
        ));
    }
    if let Some(name) = options.ignored.first() {
        return Err(Error::usage(format!(
            "{name} is ignored, so each rank trains it for itself, but with Exchange::{:?} no rank's \
             optimizer has it; leave out one of both",
            options.exchange
        )));
    }
    Ok(())
}

/// The reducer's description of a parameter. A convolution's first dimension is innermost in memory, so its
/// matrix is the transpose.
fn spec(params: &Params, id: ParamId) -> ParamSpec {
    let info = &params.infos()[id.index()];
    let mut spec = ParamSpec::of(params, id.index());
    if info.layout != Layout::Same
        && let [first, _, ..] = info.shape.as_slice()
    {
        spec.columns = (*first).max(1);
    }
    spec
}

fn fingerprint(group: &ProcessGroup, params: &Params, options: &DdpOptions) -> Fingerprint {
    let mut print = Fingerprint::of_wrapper(group, &options.must_agree, options.caps);
    print.line(format!("buckets rebuilt: {}", !options.keep_layout));
    print.line(format!("gradients averaged over {:?}", options.average));
    print.line(match options.deterministic {
        Deterministic::Shards(tree) => format!("deterministic: {} shards", tree.shards()),
        other => format!("deterministic: {other:?}"),
    });
    print.line(format!("gradients exchanged by {:?}", options.exchange));
    print.line(format!("gradients unchecked: {}", options.unchecked));
    print.line(format!("uneven data: {:?}", options.uneven));
    print.line(format!("unused parameters: {:?}", options.unused));
    let every = |every| match every {
        Every::Step => "every step",
        Every::Epoch => "every epoch",
    };
    let buffers = match options.buffers {
        Buffers::Never => "never".to_owned(),
        Buffers::RankZero(when) => format!("those of rank 0, {}", every(when)),
        Buffers::Mean(when) => format!("means, {}", every(when)),
    };
    print.line(format!("buffers made equal: {buffers}"));
    print.line(format!("parameters ignored: {:?}", options.ignored));
    print.line(format!("parameters frozen: {:?}", options.frozen));
    print.parameters(params);
    print
}
