//! A step over global tensors.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_comm::ProcessGroup;
use phalanx_ddp::SyncBatchNorm;
use phalanx_nn::layers::JoinStatistics;
use phalanx_nn::{Result, Step, Tensor};

use crate::boxing::Boxing;
use crate::error::{Error, refuse};
use crate::indices::Indices;
use crate::layout::Layout;
use crate::params::GlobalParams;
use crate::placement::Placement;
use crate::sbp::{self, Sbp};
use crate::tensor::Global;

/// One step in progress over global tensors; made by [`GlobalParams::step`]. All ranks of the mesh
/// must do the same operations in the same order.
pub struct GlobalStep<'a> {
    params: &'a GlobalParams,
    placement: Placement,
    step: Rc<Step<'a>>,
    joined: Joined,
    automatic: Cell<bool>,
    /// Whether there may be gradients of leaves.
    pub(crate) leaves: Cell<bool>,
    /// Conversions of the forward pass, if they are kept.
    log: RefCell<Option<Vec<Conversion>>>,
}

/// A conversion that an operation needed.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The operation, such as `add`, or `to_global`.
    pub operation: String,
    /// What was converted: `operand 0` or a parameter's name.
    pub operand: String,
    /// The steps.
    pub boxing: Arc<Boxing>,
}

impl std::fmt::Display for Conversion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}: {}", self.operation, self.operand, self.boxing)
    }
}

impl<'a> GlobalStep<'a> {
    pub(crate) fn new(params: &'a GlobalParams, step: Step<'a>, joined: Joined) -> Self {
        GlobalStep {
            params,
            placement: params.placement().clone(),
            step: Rc::new(step),
            joined,
            automatic: Cell::new(true),
            leaves: Cell::new(false),
            log: RefCell::default(),
        }
    }

    /// The same step on another placement: tensors that are made of what it gives lie there, and
    /// [`Global::to_placement`] moves tensors from one to the other. All ranks of the group call it, and do the same operations. A rank that
    /// is not on the placement has an empty tensor of the shape `[0]` as its part of every tensor there; for what it
    /// gives to [`to_global`](Self::to_global) it takes one, too. Operations with parameters run on the parameters' placement only.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use phalanx_global::{GlobalParams, Placement, Sbp};
    /// use phalanx_nn::{Scope, Seed, StepKey, Tape, Threads, Value};
    ///
    /// # fn check(group: ProcessGroup) -> Result<(), Box<dyn std::error::Error>> {
    /// let all = Placement::of(&group);
    /// let params = GlobalParams::new(&all, &Scope::new(Seed(0)).build()?, |_| vec![])?;
    /// let pair = Placement::of_ranks(&group, &[("data", 2)], &[0, 2])?;
    /// let mut tape = Tape::new(Threads(1));
    /// let step = params.step(&mut tape, StepKey::new(0, 0));
    /// let there = step.on(&pair);
    /// let x = step.input(&[1.0, 2.0, 3.0], &[3], &[Sbp::split(0)])?;
    /// let y = x.to_placement(&there, &[Sbp::split(0)])?.scale(10.0)?;
    /// assert_eq!(y.share().to_local().shape(), [[2], [0], [1]][group.rank()]);
    /// assert_eq!(y.to_placement(&step, &[Sbp::broadcast()])?.full()?, [10.0, 20.0, 30.0]);
    /// # Ok(()) }
    /// # std::thread::scope(|s| for group in ProcessGroup::threads(3, GroupOptions::default()) { s.spawn(move || check(group).unwrap()); });
    /// ```
    pub fn on(&self, placement: &Placement) -> GlobalStep<'a> {
        GlobalStep {
            params: self.params,
            placement: placement.clone(),
            step: Rc::clone(&self.step),
            joined: self.joined.clone(),
            automatic: self.automatic.clone(),
            leaves: self.leaves.clone(),
            log: RefCell::default(),
        }
    }

    /// The step of this rank's engine.
    pub fn local(&self) -> &Step<'a> {
        &self.step
    }

    /// The mesh.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The parameters.
    pub fn params(&self) -> &'a GlobalParams {
        self.params
    }

    /// Whether operations may convert operands that fit none of their rules (they do at first). Otherwise
    /// they fail, naming the operands and the rules.
    pub fn set_automatic(&self, on: bool) {
        self.automatic.set(on);
    }

    /// The steps from one layout to another.
    pub(crate) fn plan(&self, from: &Layout, to: &Layout) -> crate::Result<Arc<Boxing>> {
        self.params.plan(&self.placement, from, to)
    }

    /// The seconds that a conversion takes.
    pub(crate) fn price(&self, from: &Layout, to: &Layout) -> crate::Result<f64> {
        Ok(self.plan(from, to)?.seconds())
    }

    pub(crate) fn is_automatic(&self) -> bool {
        self.automatic.get()
    }
    /// Refuses an operation with parameters on another placement than theirs.
    pub(crate) fn check_parameters(&self, operation: &str) -> Result<()> {
        let own = self.params.placement();
        match self.placement == *own {
            true => Ok(()),
            false => refuse(format!(
                "{operation} of a tensor on {} needs parameters, which are on {own}; move it there with to_placement",
                self.placement
            )),
        }
    }

    /// This rank's part of a result, which `run` makes of its parts of the operands. A rank that is not on the mesh has nothing of
    /// it; but its gradient leads to the operands.
    pub(crate) fn part<'s, P: Into<Vec<Tensor<'s>>>>(
        &'s self,
        operands: P,
        run: impl FnOnce(P) -> Result<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        match self.placement.is_member() {
            true => run(operands),
            false => self.local().concat(operands.into(), 0),
        }
    }

    /// Starts recording the conversions of operands, for [`explain`](Self::explain).
    pub fn keep_conversions(&self) {
        self.log.borrow_mut().get_or_insert_default();
    }

    /// The conversions since [`keep_conversions`](Self::keep_conversions), in order. The backward pass converts
    /// the gradient of each, from [`Layout::of_gradient`] of its result to that of its operand.
    ///
    /// Collectives that belong to an operation itself are not among them: a maximum over a split axis, the number of
    /// rows of a mean loss, statistics of a batch norm.
    pub fn explain(&self) -> Vec<Conversion> {
        self.log.borrow().clone().unwrap_or_default()
    }

    pub(crate) fn note(
        &self,
        operation: &str,
        operand: impl FnOnce() -> String,
        boxing: &Arc<Boxing>,
    ) {
        if let Some(log) = &mut *self.log.borrow_mut() {
            log.push(Conversion {
                operation: operation.to_owned(),
                operand: operand(),
                boxing: Arc::clone(boxing),
            });
        }
    }

    /// A global tensor of values that every rank has in full: each keeps its part. It gets no gradient.
    ///
    /// A partial sum has the values on the first rank and -0.0 on the others; a partial minimum or maximum has them
    /// on every rank.
    ///
    /// # Errors
    /// `Usage` when data, shape and SBP do not fit.
    pub fn input<'s>(&'s self, data: &[f32], shape: &[usize], sbp: &[Sbp]) -> Result<Global<'s>> {
        self.leaf(data, shape, sbp, false)
    }

    /// An [`input`](Self::input) whose own gradient is wanted: [`Global::grad`] of a shared handle gives it
    /// after the backward pass.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn variable<'s>(
        &'s self,
        data: &[f32],
        shape: &[usize],
        sbp: &[Sbp],
    ) -> Result<Global<'s>> {
        self.leaf(data, shape, sbp, true)
    }

    fn leaf<'s>(
        &'s self,
        data: &[f32],
        shape: &[usize],
        sbp: &[Sbp],
        wants_grad: bool,
    ) -> Result<Global<'s>> {
        let numel: usize = shape.iter().product();
        if data.len() != numel {
            return refuse(format!(
                "a tensor of shape {shape:?} needs {numel} values, got {}",
                data.len()
            ));
        }
        let mesh = self.placement().sizes();
        let whole = Layout::even(mesh, shape, &vec![Sbp::Broadcast; mesh.len()])?;
        let layout = Layout::even(mesh, shape, sbp)?;
        // Local: ranges of what all have.
        let boxing = self.plan(&whole, &layout)?;
        let part = boxing.run(self.placement(), data)?;
        let own = layout.shape_of(self.placement().rank());
        self.leaves.set(self.leaves.get() || wants_grad);
        let local = match wants_grad {
            true => self.local().variable(&part, &own)?,
            false => self.local().input(&part, &own)?,
        };
        Ok(Global::new(self, local, Rc::new(layout)))
    }

    /// A global tensor of this rank's `local` one (`to_global`). Ranges of split axes follow each other
    /// in rank order, whatever their lengths; of a whole tensor, all ranks have equal values.
    ///
    /// *Blocks until* all ranks of the mesh call it: they compare shapes and SBP.
    ///
    /// # Errors
    /// `Mismatch` naming the first difference between the ranks; `Usage` when the SBP does not fit.
    pub fn to_global<'s>(&'s self, local: Tensor<'s>, sbp: &[Sbp]) -> Result<Global<'s>> {
        let layout = joined_layout(self.placement(), &local.shape(), sbp)?;
        self.leaves.set(true);
        Ok(Global::new(self, local, Rc::new(layout)))
    }

    /// Numbers that every rank has in full, such as tokens or labels: each rank keeps its part.
    ///
    /// # Errors
    /// `Usage` when numbers, shape and SBP do not fit, or a partial SBP is named.
    pub fn indices(&self, all: &[u32], shape: &[usize], sbp: &[Sbp]) -> Result<Indices> {
        Ok(Indices::new(self.placement(), all, shape, sbp)?)
    }

    pub(crate) fn joined(&self) -> &Joined {
        &self.joined
    }
}

impl std::fmt::Debug for GlobalStep<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GlobalStep")
            .field("placement", self.placement())
            .finish_non_exhaustive()
    }
}

/// What the ranks compare when local tensors become a global one.
#[derive(serde::Serialize, serde::Deserialize, PartialEq)]
struct Facts {
    shape: Vec<usize>,
    sbp: Vec<Sbp>,
}

/// The layout of the tensor whose parts the ranks have.
pub(crate) fn joined_layout(
    placement: &Placement,
    shape: &[usize],
    sbp: &[Sbp],
) -> crate::Result<Layout> {
    let mesh = placement.sizes();
    // Whether it fits at all, before anything is sent.
    let fits = placement
        .is_member()
        .then(|| Layout::even(mesh, shape, sbp));
    fits.transpose()?;
    let mine = Facts {
        shape: shape.to_vec(),
        sbp: sbp.to_vec(),
    };
    let group = placement.outer();
    let mut all = match group.world_size() {
        1 => vec![mine],
        _ => group
            .all_gather_object(&mine)
            .map_err(|e| Error::comm_while("the ranks could not compare a tensor's parts", e))?,
    };
    let mut rank = 0..;
    all.retain(|_| placement.ranks().contains(&rank.next().unwrap_or(0)));
    let first = &all[0];
    let differ = |rank: usize, what: &str, a: String, b: String| {
        Error::mismatch(format!(
            "to_global: {what} of rank 0 is {a}, and of rank {rank} {b}"
        ))
    };
    for (rank, other) in all.iter().enumerate() {
        if other.sbp != first.sbp {
            let (a, b) = (sbp::list(&first.sbp), sbp::list(&other.sbp));
            return Err(differ(rank, "the SBP", a, b));
        }
        if other.shape.len() != first.shape.len() {
            let (a, b) = (format!("{:?}", first.shape), format!("{:?}", other.shape));
            return Err(differ(rank, "the shape", a, b));
        }
    }
    let mut full = first.shape.clone();
    let mut cuts = Vec::new();
    for (axis, size) in full.iter_mut().enumerate() {
        // The ranks that differ in the coordinates that split this axis, in order.
        let dims: Vec<usize> = (0..sbp.len())
            .filter(|d| sbp[*d] == Sbp::Split(axis))
            .collect();
        let index = |rank: usize| {
            let at = crate::placement::coordinates(mesh, rank);
            dims.iter().fold(0, |n, d| n * mesh[*d] + at[*d])
        };
        let parts: usize = dims.iter().map(|d| mesh[*d]).product();
        let mut lengths = vec![None; parts];
        for (rank, other) in all.iter().enumerate() {
            let length = other.shape[axis];
            let known = *lengths[index(rank)].get_or_insert((rank, length));
            if known.1 != length {
                return Err(Error::mismatch(format!(
                    "to_global: ranks {} and {rank} must have equal sizes of axis {axis} under {}, but have {} and {length}",
                    known.0,
                    sbp::list(sbp),
                    known.1
                )));
            }
        }
        if dims.is_empty() {
            continue;
        }
        let mut all = vec![0];
        for (_, length) in lengths.into_iter().flatten() {
            all.push(all[all.len() - 1] + length);
        }
        *size = all[all.len() - 1];
        cuts.push((axis, all));
    }
    let cuts: Vec<(usize, &[usize])> = cuts.iter().map(|(a, c)| (*a, &c[..])).collect();
    Layout::uneven(mesh, &full, sbp, &cuts)
}

/// Joins the batches of a step's batch normalisations over the ranks that have parts of them.
#[derive(Clone, Default)]
pub(crate) struct Joined(Arc<Mutex<Over>>);

#[derive(Default)]
struct Over {
    /// The mesh dimensions that split batches; known since the first batch normalisation.
    dims: Option<Vec<usize>>,
    /// One after another.
    joins: Vec<SyncBatchNorm>,
}

impl Joined {
    pub(crate) fn shared(&self) -> Arc<dyn JoinStatistics> {
        Arc::new(self.clone())
    }

    /// Sets the mesh dimensions that split the batch that follows.
    pub(crate) fn set(&self, placement: &Placement, dims: Vec<usize>) -> crate::Result<()> {
        let mut over = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &over.dims {
            if *known == dims {
                return Ok(());
            }
            return Err(Error::usage(format!(
                "batch normalisations of one step must be split over the same mesh dimensions, but one is over {known:?} and one over {dims:?}"
            )));
        }
        let groups: Vec<&ProcessGroup> =
            match dims.len() > 1 && dims.len() == placement.sizes().len() {
                true => vec![placement.group()],
                false => dims.iter().rev().map(|d| placement.line(*d)).collect(),
            };
        over.joins = groups
            .into_iter()
            .cloned()
            .map(SyncBatchNorm::new)
            .collect();
        over.dims = Some(dims);
        Ok(())
    }
}

impl JoinStatistics for Joined {
    fn join(&self, rows: f64, mean: &mut [f64], squares: &mut [f64]) -> phalanx_base::Result<f64> {
        let over = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut joins = over.joins.iter();
        joins.try_fold(rows, |rows, join| join.join(rows, mean, squares))
    }

    fn sum(&self, sums: &mut [f64]) -> phalanx_base::Result<()> {
        let over = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        over.joins.iter().try_for_each(|join| join.sum(sums))
    }
}
