//! Parameters of a model as global tensors, and their gradients.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use phalanx_comm::{ReduceOp, all_finite};
use phalanx_ddp::{Commit, Veto};
use phalanx_nn::{GradSink, GradView, Grads, ParamId, ParamInfo, Params, StepKey, Tape};

use crate::boxing::{self, Boxing};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::prefetch::Prefetch;
use crate::sbp::Sbp;
use crate::step::GlobalStep;

/// Elements of a line: each parameter begins with one.
const LINE_ELEMS: usize = 16;

/// The parameters of a model as global tensors: this rank's parts, and their layouts.
///
/// Buffers (running statistics) are whole on every rank.
pub struct GlobalParams {
    placement: Placement,
    local: Params,
    /// In PyTorch's order of axes, by parameter.
    layouts: Vec<Layout>,
    /// In the engine's order of axes.
    engine: Vec<Rc<Layout>>,
    /// The layouts that operations see: those of `engine`, but whole over dimensions that are gathered.
    used: Vec<Rc<Layout>>,
    /// The mesh dimensions over which results of products and look-ups are made whole, by parameter.
    sums: Vec<Vec<usize>>,
    plans: Plans,
    prefetch: Prefetch,
}

/// The boxings that were planned so far.
type Plans = RefCell<HashMap<(Placement, Layout, Layout), Arc<Boxing>>>;

impl GlobalParams {
    /// `params`, which every rank has in full and with equal values, as global tensors
    /// (`model.to_global(placement, sbp)`): `sbp` says how each parameter lies, in PyTorch's
    /// order of axes. This rank keeps its parts.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use phalanx_global::{GlobalParams, Placement, Sbp};
    /// use phalanx_nn::{Scope, Seed, layers::Linear};
    ///
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let mut scope = Scope::new(Seed(0));
    /// let layer = Linear::new(scope.enter("up"), 4, 8);
    /// // Column parallel: each rank has some of the outputs.
    /// let params = GlobalParams::new(&Placement::of(&group), &scope.build()?, |_| vec![Sbp::split(0)])?;
    /// assert_eq!(params.layout(layer.weight).to_string(), "[8, 4] (S(0))");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `Usage` when an SBP does not fit the mesh or its parameter, or says that a parameter is partial, and on a rank that is
    /// not on the mesh.
    pub fn new(
        placement: &Placement,
        params: &Params,
        mut sbp: impl FnMut(&ParamInfo) -> Vec<Sbp>,
    ) -> Result<Self> {
        if !placement.is_member() {
            return Err(Error::usage(format!(
                "this rank has no parameters on the mesh {placement}, which it is not on"
            )));
        }
        let mesh = placement.sizes();
        let mut layouts = Vec::with_capacity(params.len());
        let mut engine = Vec::with_capacity(params.len());
        for info in params.infos() {
            let named = |e: Error| Error::usage(format!("parameter {}: {e}", info.name));
            let sbp = sbp(info);
            if sbp.iter().any(|s| s.is_partial()) {
                return Err(Error::usage(format!(
                    "parameter {} cannot be partial; it may be split or whole",
                    info.name
                )));
            }
            let layout = Layout::even(mesh, &info.shape, &sbp).map_err(named)?;
            engine.push(Rc::new(in_engine(info, &layout).map_err(named)?));
            layouts.push(layout);
        }
        let rank = placement.rank();
        let mut of = layouts.iter();
        let local = params.map(|info, values| {
            let Some(layout) = of.next() else {
                return Ok((info.shape.clone(), values));
            };
            let full: Vec<_> = info.shape.iter().map(|n| 0..*n).collect();
            let block = layout.block(rank);
            Ok((layout.shape_of(rank), boxing::slice(&values, &full, &block)))
        })?;
        Ok(GlobalParams {
            placement: placement.clone(),
            local,
            layouts,
            used: engine.clone(),
            sums: vec![Vec::new(); engine.len()],
            engine,
            plans: Plans::default(),
            prefetch: Prefetch::default(),
        })
    }

    /// Gathers parameters that are split over mesh dimension `dim` before each use, and frees them after it
    /// (fully sharded data parallel): operations find them whole there. Their gradients are reduced and
    /// scattered.
    ///
    /// # Errors
    /// `Usage` when there is no such dimension.
    pub fn gather_over(mut self, dim: &str) -> Result<Self> {
        let Some(dim) = self.placement.dim(dim) else {
            return Err(Error::usage(format!(
                "the mesh {} has no dimension {dim:?}",
                self.placement
            )));
        };
        for used in &mut self.used {
            let mut sbp = used.sbp().to_vec();
            sbp[dim] = Sbp::Broadcast;
            *used = Rc::new(used.with_sbp(&sbp)?);
        }
        // Where all ranks share the cores of a host, there is nothing to overlap with.
        let hosts = self.placement.line(dim).selector().hosts();
        self.prefetch.set(hosts.count() > 1);
        Ok(self)
    }

    /// Makes results of products with that parameter, or look-ups in it, whole over a mesh dimension.
    pub(crate) fn sum_over(&mut self, param: usize, dim: usize) {
        if let Some(dims) = self.sums.get_mut(param)
            && !dims.contains(&dim)
        {
            dims.push(dim);
        }
    }

    /// Lets operations find that parameter as a sum over a mesh dimension, which the first rank has: it needs no
    /// conversion to be added to one.
    pub(crate) fn add_once(&mut self, param: usize, dim: usize) -> Result<()> {
        if let Some(used) = self.used.get_mut(param) {
            let mut sbp = used.sbp().to_vec();
            sbp[dim] = Sbp::partial_sum();
            *used = Rc::new(used.with_sbp(&sbp)?);
        }
        Ok(())
    }

    pub(crate) fn sums_of(&self, id: ParamId) -> &[usize] {
        self.sums.get(id.index()).map_or(&[], Vec::as_slice)
    }

    /// Whether the next parameter of those that are gathered before their use is gathered in the background,
    /// from the second step on. By default, if their ranks are on several hosts. The bits are the same.
    pub fn set_prefetch(&self, on: bool) {
        self.prefetch.set(on);
    }

    /// Gathers that began in the background so far.
    pub fn prefetched(&self) -> u64 {
        self.prefetch.begun()
    }

    pub(crate) fn prefetch(&self) -> &Prefetch {
        &self.prefetch
    }

    /// The mesh.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Continues with the same parameters on `placement`, a mesh that has another size where all of them are whole, as when
    /// ranks were lost. This rank keeps its parts, and its coordinates in the other dimensions. Does not communicate.
    ///
    /// # Errors
    /// `Usage` when this rank would have other parts there; nothing has changed then.
    pub fn move_to(&mut self, placement: &Placement) -> Result<()> {
        let (rank, mesh) = (placement.rank(), placement.sizes());
        let on = |layout: &Layout| {
            Layout::cut_by(mesh, layout.shape(), layout.sbp(), |axis| {
                layout.shared_cuts(axis)
            })
        };
        let mut layouts = Vec::with_capacity(self.layouts.len());
        for (layout, info) in self.layouts.iter().zip(self.local.infos()) {
            let moved = on(layout).ok();
            let same = |moved: &Layout| moved.block(rank) == layout.block(self.placement.rank());
            layouts.push(moved.filter(same).ok_or_else(|| {
                Error::usage(format!(
                    "parameter {} lies otherwise on the mesh {placement} than on {}",
                    info.name, self.placement
                ))
            })?);
        }
        let all_on = |of: &[Rc<Layout>]| of.iter().map(|l| on(l).map(Rc::new)).collect();
        let engine: Result<Vec<Rc<Layout>>> = all_on(&self.engine);
        let used: Result<Vec<Rc<Layout>>> = all_on(&self.used);
        (self.engine, self.used) = (engine?, used?);
        self.layouts = layouts;
        self.placement = placement.clone();
        self.plans.get_mut().clear();
        Ok(())
    }

    /// This rank's parts: what an optimizer is made for and updates.
    pub fn local(&self) -> &Params {
        &self.local
    }

    /// This rank's parts for writing.
    pub fn local_mut(&mut self) -> &mut Params {
        &mut self.local
    }

    /// How a parameter lies, in PyTorch's order of axes.
    ///
    /// # Panics
    /// If `id` belongs to another, larger model.
    pub fn layout(&self, id: ParamId) -> &Layout {
        &self.layouts[id.index()]
    }

    /// The parameters in full, as [`Params::infos`] has them on one rank.
    pub fn full_infos(&self) -> Vec<ParamInfo> {
        let mut offset = 0;
        let full = |(info, layout): (&ParamInfo, &Layout)| {
            let mut info = info.clone();
            info.shape = layout.shape().to_vec();
            info.len = layout.numel();
            info.offset = offset;
            offset += info.len.next_multiple_of(LINE_ELEMS);
            info
        };
        self.local
            .infos()
            .iter()
            .zip(&self.layouts)
            .map(full)
            .collect()
    }

    /// Gradients of this rank's parts.
    pub fn grads(&self) -> GlobalGrads {
        GlobalGrads::new(self)
    }

    /// Starts a training step on `tape`.
    pub fn step<'a>(&'a self, tape: &'a mut Tape, key: StepKey<'_>) -> GlobalStep<'a> {
        let joined = crate::step::Joined::default();
        tape.join_statistics(Some(joined.shared()));
        self.prefetch.begin(true);
        GlobalStep::new(self, tape.step(&self.local, key), joined)
    }

    /// Starts an evaluation on `tape`.
    pub fn inference<'a>(&'a self, tape: &'a mut Tape) -> GlobalStep<'a> {
        self.prefetch.begin(false);
        GlobalStep::new(self, tape.inference(&self.local), Default::default())
    }

    /// A parameter in full and in PyTorch's order, on every rank.
    ///
    /// *Blocks until* all ranks of the mesh call it for the same parameter.
    ///
    /// # Errors
    /// `Comm` when a collective fails.
    pub fn full(&self, id: ParamId) -> Result<Vec<f32>> {
        let layout = self.layout(id);
        let whole = layout.with_sbp(&vec![Sbp::Broadcast; layout.mesh().len()])?;
        let boxing = self.plan(&self.placement, layout, &whole)?;
        boxing.run(&self.placement, &self.local.export(id))
    }

    /// The values of `flat`, memory laid out as this rank's parts are (an optimizer's buffer), as
    /// [`full`](Self::full) gives those of a parameter.
    ///
    /// # Errors
    /// As [`full`](Self::full).
    pub fn full_of(&self, id: ParamId, flat: &[f32]) -> Result<Vec<f32>> {
        let layout = self.layout(id);
        let whole = layout.with_sbp(&vec![Sbp::Broadcast; layout.mesh().len()])?;
        let mut part = Vec::new();
        self.local.export_of(id, flat, &mut part);
        let boxing = self.plan(&self.placement, layout, &whole)?;
        boxing.run(&self.placement, &part)
    }

    /// The steps from one layout to another, planned once.
    pub(crate) fn plan(&self, on: &Placement, from: &Layout, to: &Layout) -> Result<Arc<Boxing>> {
        let key = (on.clone(), from.clone(), to.clone());
        if let Some(found) = self.plans.borrow().get(&key) {
            return Ok(Arc::clone(found));
        }
        let made = Arc::new(Boxing::plan(on, from, to)?);
        self.plans.borrow_mut().insert(key, Arc::clone(&made));
        Ok(made)
    }

    pub(crate) fn engine_layout(&self, id: ParamId) -> Result<&Rc<Layout>> {
        self.of(&self.engine, id)
    }

    /// The layout that operations find, in the engine's order of axes.
    pub(crate) fn used_layout(&self, id: ParamId) -> Result<&Rc<Layout>> {
        self.of(&self.used, id)
    }

    fn of<'l>(&self, layouts: &'l [Rc<Layout>], id: ParamId) -> Result<&'l Rc<Layout>> {
        layouts.get(id.index()).ok_or_else(|| {
            Error::usage(format!(
                "parameter {} belongs to another model; this one has {}",
                id.index(),
                self.engine.len()
            ))
        })
    }
}

impl std::fmt::Debug for GlobalParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GlobalParams")
            .field("placement", &self.placement)
            .field("local", &self.local)
            .finish()
    }
}

/// A parameter's layout with its axes in the engine's order.
fn in_engine(info: &ParamInfo, layout: &Layout) -> Result<Layout> {
    let order: Vec<usize> = match info.layout {
        phalanx_nn::Layout::Conv => vec![2, 3, 1, 0],
        phalanx_nn::Layout::Conv1d => vec![2, 1, 0],
        _ => (0..layout.shape().len()).collect(),
    };
    let shape: Vec<usize> = order.iter().map(|a| layout.shape()[*a]).collect();
    let place = |axis: usize| order.iter().position(|a| *a == axis).unwrap_or(axis);
    let sbp: Vec<Sbp> = layout
        .sbp()
        .iter()
        .map(|s| match s {
            Sbp::Split(axis) => Sbp::Split(place(*axis)),
            other => *other,
        })
        .collect();
    Layout::cut_by(layout.mesh(), &shape, &sbp, |axis| {
        layout.shared_cuts(order[axis])
    })
}

/// Gradients of a [`GlobalParams`]: what [`Global::backward`](crate::Global::backward) writes and an optimizer reads.
///
/// *Order of additions*: over each mesh dimension in ascending rank order, the last dimension
/// first. With one dimension these are the bits of
/// [`DistributedDataParallel`](phalanx_ddp::DistributedDataParallel) if the batch is split evenly.
pub struct GlobalGrads {
    local: Grads,
    placement: Placement,
    layouts: Vec<Layout>,
    /// Where the gradients lie.
    places: Vec<std::ops::Range<usize>>,
    /// Whether a backward pass used each parameter.
    used: Vec<bool>,
    /// Whether what backward gives of each parameter comes from this rank alone.
    own: Vec<bool>,
    /// The first parameter, in the order of backward, whose gradient was not finite before it was added to those of
    /// other ranks.
    not_finite: Option<usize>,
    /// Steps that were voted down.
    skipped: u64,
    accumulates: bool,
    /// Sums over ranks that were not taken yet.
    pub(crate) pending: bool,
}

impl GlobalGrads {
    fn new(params: &GlobalParams) -> Self {
        let is_own = |(engine, used): (&Rc<Layout>, &Rc<Layout>)| {
            engine == used
                || params
                    .plan(&params.placement, engine, used)
                    .is_ok_and(|b| b.is_local())
        };
        GlobalGrads {
            own: params.engine.iter().zip(&params.used).map(is_own).collect(),
            not_finite: None,
            skipped: 0,
            local: Grads::like(&params.local),
            placement: params.placement.clone(),
            layouts: params.layouts.clone(),
            places: params.local.infos().iter().map(ParamInfo::range).collect(),
            used: vec![false; params.layouts.len()],
            accumulates: false,
            pending: false,
        }
    }

    /// Whether following backward passes add to the gradients (micro-batches) instead of overwriting
    /// them. Call [`sum`](Self::sum) after the last one: backward passes do not sum over the ranks then.
    pub fn set_accumulate(&mut self, on: bool) {
        self.accumulates = on;
        self.local.set_accumulate(on);
    }

    /// A backward pass begins.
    pub(crate) fn begin(&mut self) {
        if !self.accumulates {
            self.not_finite = None;
        }
    }
    pub(crate) fn is_accumulating(&self) -> bool {
        self.accumulates
    }

    /// Sets every gradient to zero. Needed only before accumulating.
    pub fn zero(&mut self) {
        self.local.zero();
        self.used.fill(false);
        self.not_finite = None;
        self.pending = false;
    }

    /// Sums the gradients of whole parameters over the ranks.
    /// [`Global::backward`](crate::Global::backward) does it, unless gradients are accumulated.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// `Usage` without a backward pass since the last sum; `Comm` when a collective fails.
    pub fn sum(&mut self, params: &GlobalParams) -> Result<()> {
        self.sum_scaled(params, 1.0)
    }

    /// The same, then times `factor`.
    pub(crate) fn sum_scaled(&mut self, params: &GlobalParams, factor: f32) -> Result<()> {
        if !std::mem::take(&mut self.pending) {
            return Err(Error::usage(
                "gradients were added up already; run a backward pass first",
            ));
        }
        let placement = self.placement.clone();
        for dim in (0..placement.sizes().len()).rev() {
            let group = placement.line(dim);
            if group.world_size() == 1 {
                continue;
            }
            let failed = |e| Error::comm_while("gradients could not be added up", e);
            let is_whole = |id: &ParamId| self.layouts[id.index()].sbp()[dim] == Sbp::Broadcast;
            let whole: Vec<ParamId> = params.local.ids().filter(is_whole).collect();
            if whole.len() == self.layouts.len() {
                let flat = self.local.flat_mut();
                group.all_reduce(flat, ReduceOp::Sum).map_err(failed)?;
                continue;
            }
            let mut packed = Vec::new();
            for id in &whole {
                packed.extend_from_slice(self.local.grad(*id));
            }
            group
                .all_reduce(&mut packed, ReduceOp::Sum)
                .map_err(failed)?;
            let mut rest = &packed[..];
            for id in whole {
                let own = self.local.slot(id);
                let (sum, others) = rest.split_at(own.len());
                own.copy_from_slice(sum);
                rest = others;
            }
        }
        if factor != 1.0 {
            self.local.flat_mut().iter_mut().for_each(|g| *g *= factor);
        }
        Ok(())
    }

    /// The Euclidean norm of all gradients together, each element counted once
    /// (for PyTorch's `clip_grad_norm_`, with [`clip_factor`](phalanx_nn::optim::clip_factor) and
    /// [`step_scaled`](phalanx_nn::optim::Optimizer::step_scaled)).
    ///
    /// *Order of additions*: elements of a part in order, then parameters, then ranks; in f64.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// `Comm` when a collective fails.
    pub fn norm(&self) -> Result<f64> {
        let mut sum = [self.squares().0];
        self.add_up(&mut sum, "the norm of the gradients is needed")?;
        Ok(sum[0].sqrt())
    }

    /// The ranks' vote on the step, the same on all of them: the optimizer may take it only if no rank has a gradient
    /// with an infinity or a NaN. A step that is voted down is [counted](Self::skipped_steps). Call it after the sum
    /// over the ranks ([`Global::backward`](crate::Global::backward)) and before the optimizer.
    ///
    /// A reason names the rank whose own gradient is not finite. Gradients of weights that are gathered before their use
    /// are seen only after they were added up: if no rank has another reason, all ranks that hold such a part are named.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// `Comm` when a collective fails. Then no rank may take the step, but some may have seen a yes: they fail at the next
    /// collective, so before a checkpoint.
    pub fn commit(&mut self, params: &GlobalParams) -> Result<Commit> {
        let bad = match all_finite(self.local.flat()) {
            true => None,
            false => (0..self.places.len()).find(|index| !self.is_finite(*index)),
        };
        self.vote(params, bad, &mut Vec::new())
    }

    /// [`commit`](Self::commit) and [`norm`](Self::norm) in one collective.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_with_norm(&mut self, params: &GlobalParams) -> Result<(Commit, f64)> {
        let (sum, bad) = self.squares();
        let mut sums = vec![sum];
        let commit = self.vote(params, bad, &mut sums)?;
        Ok((commit, sums[0].sqrt()))
    }

    /// How many steps were voted down, the same number on all ranks.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Sets the number of steps that were voted down before, for a training that is resumed.
    pub fn set_skipped_steps(&mut self, steps: u64) {
        self.skipped = steps;
    }

    fn is_finite(&self, index: usize) -> bool {
        all_finite(&self.local.flat()[self.places[index].clone()])
    }

    /// This rank's part of the square of the norm, and the first parameter of which it has a part that is not finite.
    fn squares(&self) -> (f64, Option<usize>) {
        let (mut sum, mut bad) = (0.0f64, None);
        for (index, layout) in self.layouts.iter().enumerate() {
            let at = self.placement.coordinates().iter().zip(layout.sbp());
            // One of the ranks that have the same part.
            let counts = at
                .into_iter()
                .all(|(at, s)| *s != Sbp::Broadcast || *at == 0);
            let is_finite = match counts && self.used[index] {
                true => {
                    let values = &self.local.flat()[self.places[index].clone()];
                    let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
                    sum += squares;
                    // A square of an f32 is far from the largest f64.
                    squares.is_finite()
                }
                false => self.is_finite(index),
            };
            if !is_finite && bad.is_none() {
                bad = Some(index);
            }
        }
        (sum, bad)
    }

    /// Adds a lane for each rank to `sums`, and adds all up over the ranks. A lane has the number of the parameter that
    /// the rank votes no for, from 1: negative if the parameter is `bad` only after the sum.
    fn vote(
        &mut self,
        params: &GlobalParams,
        bad: Option<usize>,
        sums: &mut Vec<f64>,
    ) -> Result<Commit> {
        let group = self.placement.group();
        let (first, lane) = (sums.len(), |index: usize| (index + 1) as f64);
        sums.resize(first + group.world_size(), 0.0);
        sums[first + group.rank()] = match (self.not_finite.take(), bad) {
            (Some(own), _) => lane(own),
            (None, Some(bad)) => -lane(bad),
            (None, None) => 0.0,
        };
        self.add_up(sums, "the ranks could not vote on the step")?;
        let lanes = &sums[first..];
        let any_own = lanes.iter().any(|lane| *lane > 0.0);
        let says_no = |lane: f64| lane != 0.0 && (lane > 0.0) == any_own;
        let vetoes = lanes.iter().enumerate().filter(|(_, lane)| says_no(**lane));
        let infos = params.local.infos();
        let vetoes = vetoes.map(|(rank, lane)| {
            let index = (lane.abs() as usize).checked_sub(1);
            let info = index.and_then(|index| infos.get(index));
            Veto {
                rank,
                parameter: info.map(|info| info.name.clone()),
            }
        });
        let vetoes: Vec<Veto> = vetoes.collect();
        if vetoes.is_empty() {
            return Ok(Commit::Yes);
        }
        self.skipped += 1;
        Ok(Commit::No(vetoes))
    }

    fn add_up(&self, sums: &mut [f64], why: &str) -> Result<()> {
        let group = self.placement.group();
        if group.world_size() == 1 {
            return Ok(());
        }
        let summed = group.all_reduce(sums, ReduceOp::Sum);
        summed.map_err(|e| Error::comm_while(why, e))
    }
}

impl GradSink for GlobalGrads {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        if let Some(used) = self.used.get_mut(param.index()) {
            *used = true;
        }
        self.local.slot(param)
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        let index = param.index();
        if self.not_finite.is_none() && self.own.get(index) == Some(&true) && !self.is_finite(index)
        {
            self.not_finite = Some(index);
        }
        self.ready_finite(param)
    }

    fn ready_finite(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.pending = true;
        self.local.ready(param)
    }

    fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.pending = true;
        if !self.accumulates
            && let Some(used) = self.used.get_mut(param.index())
        {
            *used = false;
        }
        self.local.unused(param)
    }

    fn accumulates(&self) -> bool {
        self.accumulates
    }
}

impl GradView for GlobalGrads {
    fn grad(&self, param: ParamId) -> &[f32] {
        self.local.grad(param)
    }

    fn untouched(&self, param: ParamId) -> bool {
        self.used.get(param.index()) == Some(&false)
    }
}

impl std::fmt::Debug for GlobalGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GlobalGrads")
            .field("placement", &self.placement)
            .field("parameters", &self.layouts.len())
            .finish()
    }
}
