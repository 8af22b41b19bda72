//! Batch normalisation over all but the last dimension, with a residual and an
//! activation fused to its end: `y = act((x - mean) / sqrt(var + eps) * w + b + r)`.
//!
//! Saves its input and four numbers per channel; its output only when an activation follows a
//! residual (otherwise the backward pass recomputes the activation's mask). Its output, and the
//! residual it adds, are of its input's precision; parameters, statistics and all arithmetic are
//! f32. Running statistics change after the step, in
//! [`Tape::update_buffers`](crate::Tape::update_buffers).

use super::weight::known_vector;
use super::{Act, Weight};
use crate::error::outside;
use crate::param::{BufferId, ParamId};
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Recorded, SlotId, State, Visit};
use crate::{Error, Precision, Result, Tensor, refuse};
use phalanx_kernels::Mode;
use phalanx_kernels::batch_norm::{self, Backward, Channels, Gate};
use phalanx_kernels::element::{Bf16, Element, Values, elements, elements_mut};
use phalanx_kernels::par::ThreadPool;

/// The buffers of a batch normalisation's running statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningStats {
    /// Mean of every channel.
    pub mean: BufferId,
    /// Unbiased variance of every channel.
    pub var: BufferId,
    /// Number of batches so far, one element.
    pub batches: BufferId,
}

/// Parameters, buffers and settings of a batch normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormOptions {
    /// Factor of every channel, if there is one.
    pub weight: Option<ParamId>,
    /// Offset of every channel, if there is one.
    pub bias: Option<ParamId>,
    /// Running statistics for evaluation; without them the batch's own are used.
    pub running: Option<RunningStats>,
    /// Share of a new batch in the running statistics; `None` gives all batches the same weight.
    pub momentum: Option<f64>,
    /// Added to the variance.
    pub eps: f64,
}

/// Mean and variance of the batch that a batch normalisation had, for its running statistics.
pub struct BatchStatistics {
    /// Where the running statistics are.
    pub running: RunningStats,
    /// As in [`BatchNormOptions`].
    pub momentum: Option<f64>,
    /// Values of each channel.
    pub rows: usize,
    /// Mean of each channel.
    pub mean: Vec<f32>,
    /// Unbiased variance of each channel.
    pub var: Vec<f32>,
}

/// Replaces the statistics of a training batch by those of a larger one, of which this
/// batch is a part (synchronised batch normalisation). Not used in evaluation.
pub trait JoinStatistics: Send + Sync {
    /// Takes the mean and the sum of squared deviations from it of every channel, over
    /// `rows` values each (0 for an empty batch); replaces them by those of the joined
    /// batch, and returns its `rows`.
    ///
    /// # Errors
    /// Whatever stops the training step.
    fn join(&self, rows: f64, mean: &mut [f64], squares: &mut [f64]) -> phalanx_base::Result<f64>;

    /// Replaces `sums` by the sums over all parts of the joined batch.
    ///
    /// # Errors
    /// Whatever stops the training step.
    fn sum(&self, sums: &mut [f64]) -> phalanx_base::Result<()>;
}

fn not_joined(e: phalanx_base::Error) -> Error {
    outside(format!("batch statistics were not joined: {e}"), e)
}

pub(crate) struct BatchNorm {
    x: SlotId,
    residual: Option<SlotId>,
    out: SlotId,
    /// Mean, inverse deviation, scale and shift of every channel.
    constants: SlotId,
    weight: Option<Operand>,
    bias: Option<Operand>,
    act: Act,
    channels: usize,
    /// Values per channel of the joined batch, if this one is part of one.
    joined: Option<f64>,
    /// The statistics are the running ones, and do not depend on the input.
    fixed: bool,
}

/// Factor and offset of every channel.
type Affine = (Option<Operand>, Option<Operand>);

/// Mean, inverse deviation, scale, shift.
fn parts(constants: &[f32], c: usize) -> (Channels<'_>, &[f32]) {
    let channels = Channels {
        mean: &constants[..c],
        scale: &constants[2 * c..3 * c],
        shift: &constants[3 * c..4 * c],
    };
    (channels, &constants[c..2 * c])
}

impl<'s> Tensor<'s> {
    /// Normalises every channel (last dimension), adds `residual`, applies `act`.
    ///
    /// A training step uses the batch's mean and biased variance and keeps both for
    /// [`Tape::update_buffers`](crate::Tape::update_buffers); an evaluation, and a part under
    /// [`evaluate`](Tensor::evaluate), uses the running ones.
    ///
    /// # Errors
    /// `Usage` when sizes do not fit, a training batch has only one value per channel,
    /// or [`Tape::update_buffers`](crate::Tape::update_buffers) was not called after
    /// the step before.
    pub fn batch_norm(
        self,
        options: &BatchNormOptions,
        residual: Option<Tensor<'s>>,
        act: Act,
    ) -> Result<Tensor<'s>> {
        let weights = (
            options.weight.map(Weight::Param),
            options.bias.map(Weight::Param),
        );
        self.batch_norm_with(options, weights, residual, act)
    }

    /// As [`batch_norm`](Tensor::batch_norm), for a factor and an offset of every channel that
    /// may be tensors; those that `options` names are not used.
    ///
    /// # Errors
    /// As [`batch_norm`](Tensor::batch_norm), and `Usage` when a weight belongs to another step.
    pub fn batch_norm_with(
        self,
        options: &BatchNormOptions,
        weights: (Option<Weight<'s>>, Option<Weight<'s>>),
        residual: Option<Tensor<'s>>,
        act: Act,
    ) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.own_slot(), self.dims());
        let (c, affine) = self.check(options, &weights, residual.as_ref())?;
        let precision = step.state().precision_of(x);
        let residual_slot = residual.as_ref().map(|r| r.slot_as(precision));
        let out = {
            let mut st = step.state();
            let mut constants = st.pool.get(4 * c);
            let numel = dims.numel();
            let learns = st.learns();
            let batch = learns || options.running.is_none();
            let join = st.join.clone().filter(|_| learns);
            let mut joined = None;
            if (numel > 0 || join.is_some()) && batch {
                let mut sums = st.pool.get(4 * c);
                let mut work = st.pool.get(batch_norm::partials_len(numel, c));
                let (mean, squares) = sums.f64_mut().split_at_mut(c);
                if numel > 0 {
                    let (threads, work) = (step.threads(), work.slice_mut());
                    match st.values(x) {
                        Values::F32(x) => batch_norm::statistics(threads, x, work, mean, squares),
                        Values::Bf16(x) => batch_norm::statistics(threads, x, work, mean, squares),
                    }
                } else {
                    mean.fill(0.0);
                    squares.fill(0.0);
                }
                let mut rows = (numel / c) as f64;
                if let Some(join) = join {
                    rows = join.join(rows, mean, squares).map_err(not_joined)?;
                    joined = Some(rows);
                    if rows == 1.0 {
                        refuse!(
                            "batch_norm: expected more than one value per channel in the joined batch when training; use larger batches, or fewer micro-batches"
                        );
                    }
                }
                for i in 0..c {
                    let var = squares[i] / rows.max(1.0);
                    constants.slice_mut()[i] = mean[i] as f32;
                    constants.slice_mut()[c + i] = (1.0 / (var + options.eps).sqrt()) as f32;
                }
                if learns && rows > 0.0 {
                    st.statistics.count(rows, joined.is_some());
                }
                if learns
                    && rows > 0.0
                    && let Some(running) = options.running
                {
                    let stats = mean.iter().zip(&*squares);
                    let stats = stats.map(|(&m, &q)| (m as f32, (q / (rows - 1.0)) as f32));
                    st.statistics.note(running, options.momentum, stats);
                }
                st.pool.put(work);
                st.pool.put(sums);
            } else if let (false, Some(r)) = (batch, options.running) {
                let params = step.params();
                constants.slice_mut()[..c].copy_from_slice(params.buffer(r.mean));
                for (i, &v) in params.buffer(r.var).iter().enumerate() {
                    constants.slice_mut()[c + i] =
                        (1.0 / (f64::from(v) + options.eps).sqrt()) as f32;
                }
            } else {
                constants.slice_mut().fill(0.0); // an empty batch
            }
            finish_constants(constants.slice_mut(), &step.compute(&mut st), affine);

            let mut y = st.pool.get(precision.memory_len(numel));
            let operands = (x, residual_slot, constants.slice());
            normalise(step.threads(), &st, operands, act, y.slice_mut());
            let slots = [Some(x), residual_slot].map(|slot| slot.map(Operand::Slot));
            let mut all = [affine.0, affine.1].into_iter().chain(slots).flatten();
            let wants = all.any(|operand| st.wants_grad_of(operand));
            let out = st.add_output_as((dims, precision), y, wants);
            let constants = if wants {
                st.add_aux(constants)?
            } else {
                st.pool.put(constants);
                out // no backward reads them
            };
            let node = BatchNorm {
                x,
                residual: residual_slot,
                out,
                constants,
                weight: affine.0,
                bias: affine.1,
                act,
                channels: c,
                joined,
                fixed: !batch,
            };
            st.made(step.params(), node, wants)?;
            out
        };
        Ok(Tensor::new(step, out))
    }

    /// Number of channels and the weights, if everything fits.
    fn check(
        &self,
        o: &BatchNormOptions,
        (weight, bias): &(Option<Weight<'s>>, Option<Weight<'s>>),
        residual: Option<&Tensor<'s>>,
    ) -> Result<(usize, Affine)> {
        let (step, dims) = (self.step(), self.dims());
        let Some(&c) = dims.last().filter(|&&c| c > 0) else {
            refuse!("batch_norm needs channels in the last dimension, got shape {dims:?}");
        };
        let known = |w: &Option<Weight<'s>>| known_vector(w.as_ref(), step, (c, "channels"));
        let affine = (known(weight)?, known(bias)?);
        if let Some(r) = o.running {
            for (id, len) in [(r.mean, c), (r.var, c), (r.batches, 1)] {
                let info = step.params().buffer_info(id)?;
                if info.len != len {
                    refuse!(
                        "batch_norm: {} has {} values for {c} channels",
                        info.name,
                        info.len
                    );
                }
            }
        }
        if let Some(r) = residual {
            if !std::ptr::eq(step, r.step()) {
                refuse!("batch_norm: the residual belongs to another step");
            }
            if r.dims() != dims {
                refuse!("batch_norm: residual of shape {:?} for {dims:?}", r.dims());
            }
        }
        let st = step.state();
        if st.learns() && dims.numel() == c && st.join.is_none() {
            refuse!(
                "batch_norm: expected more than one value per channel when training, got shape {dims:?}; use larger batches, or fewer micro-batches"
            );
        }
        if o.running.is_some() {
            st.statistics.check_applied()?;
        }
        Ok((c, affine))
    }
}

/// Scale and shift from mean and inverse deviation.
fn finish_constants(constants: &mut [f32], compute: &Compute<'_>, (weight, bias): Affine) {
    let c = constants.len() / 4;
    let values = |w: Option<Operand>| w.map(|w| compute.operand(w));
    let (weight, bias) = (values(weight), values(bias));
    for i in 0..c {
        let w = weight.map_or(1.0, |w| w[i]);
        constants[2 * c + i] = constants[c + i] * w;
        constants[3 * c + i] = bias.map_or(0.0, |b| b[i]);
    }
}

/// `act(normalised x + residual)` by the constants of every channel.
fn normalise(
    threads: &ThreadPool,
    st: &State,
    (x, residual, constants): (SlotId, Option<SlotId>, &[f32]),
    act: Act,
    y: &mut [f32],
) {
    match st.precision_of(x) {
        Precision::F32 => normalise_as::<f32>(threads, st, (x, residual, constants), act, y),
        Precision::Bf16 => normalise_as::<Bf16>(threads, st, (x, residual, constants), act, y),
    }
}

fn normalise_as<T: Element>(
    threads: &ThreadPool,
    st: &State,
    (x, residual, constants): (SlotId, Option<SlotId>, &[f32]),
    act: Act,
    y: &mut [f32],
) {
    let (channels, _) = parts(constants, constants.len() / 4);
    let (x, r) = (
        st.elements::<T>(x),
        residual.map_or(&[][..], |r| st.elements(r)),
    );
    let y = elements_mut(y, x.len());
    batch_norm::normalise(threads, x, y, channels, r, act.clip());
}

impl BatchNorm {
    fn gated_by_output(&self) -> bool {
        self.act != Act::None && self.residual.is_some()
    }
}

/// Writes the gradient of a weight, computed in f64.
pub(super) fn one_gradient(
    ctx: &mut BackwardContext<'_>,
    weight: Option<Operand>,
    values: impl Iterator<Item = f64>,
) -> Result<()> {
    let Some(weight) = weight else { return Ok(()) };
    ctx.operand_grad(weight, |g, mode| {
        for (g, v) in g.iter_mut().zip(values) {
            *g = match mode {
                Mode::Write => v as f32,
                Mode::Add => *g + v as f32,
            };
        }
    })
}

impl Recorded for BatchNorm {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        self.residual
            .map(Visit::Input)
            .into_iter()
            .for_each(&mut *f);
        for operand in self.weight.into_iter().chain(self.bias) {
            f(match operand {
                Operand::Param(param) => Visit::Param(param),
                // The constants have its values.
                Operand::Slot(slot) => Visit::Once(slot),
            });
        }
        f(Visit::Saved(self.x));
        f(Visit::Saved(self.constants));
        if self.gated_by_output() {
            f(Visit::Saved(self.out));
        }
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, dy: Buf) -> Result<()> {
        match ctx.precision_of(self.x) {
            Precision::F32 => self.backward_as::<f32>(ctx, dy),
            Precision::Bf16 => self.backward_as::<Bf16>(ctx, dy),
        }
    }

    fn can_recompute(&self) -> bool {
        true
    }

    /// With the statistics of the first time.
    fn recompute(&self, c: &mut Compute<'_>) -> Result<Buf> {
        let (shape, precision) = (c.state.shape(self.x), c.state.precision_of(self.x));
        let mut y = c.state.pool.get(precision.memory_len(shape.numel()));
        let operands = (self.x, self.residual, c.state.value(self.constants));
        normalise(c.threads, c.state, operands, self.act, y.slice_mut());
        Ok(y)
    }
}

impl BatchNorm {
    fn backward_as<T: Element>(&self, ctx: &mut BackwardContext<'_>, mut dy: Buf) -> Result<()> {
        let (threads, c) = (ctx.threads, self.channels);
        let x = ctx.elements::<T>(self.x);
        let (channels, inverse) = parts(ctx.value(self.constants), c);
        let clip = self.act.clip();
        let gate = if self.gated_by_output() {
            Gate::Output(ctx.elements::<T>(self.out), clip)
        } else {
            Gate::Clip(clip)
        };
        let numel = x.len();
        let mut work = ctx.pool().get(batch_norm::partials_len(numel, c));
        let mut sums = ctx.pool().get(4 * c);
        let mut coefficients = ctx.pool().get(2 * c);
        let (total, products) = sums.f64_mut().split_at_mut(c);
        batch_norm::backward_sums(
            threads,
            x,
            elements_mut(dy.slice_mut(), numel),
            channels,
            gate,
            work.slice_mut(),
            (&mut *total, &mut *products),
        );
        let scaled = products
            .iter()
            .zip(inverse)
            .map(|(&p, &i)| p * f64::from(i));
        one_gradient(ctx, self.weight, scaled)?;
        one_gradient(ctx, self.bias, total.iter().copied())?;

        let mut rows = (numel / c).max(1) as f64;
        if let Some((joined, join)) = self.joined.zip(ctx.join()) {
            rows = joined.max(1.0);
            join.sum(sums.f64_mut()).map_err(not_joined)?;
        }
        if self.fixed {
            // The statistics have no gradient.
            sums.f64_mut().fill(0.0);
        }
        let (total, products) = sums.f64_mut().split_at_mut(c);
        let (slope, offset) = coefficients.slice_mut().split_at_mut(c);
        for i in 0..c {
            let (scale, inverse) = (f64::from(channels.scale[i]), f64::from(inverse[i]));
            slope[i] = (-scale * inverse * inverse * products[i] / rows) as f32;
            offset[i] = (-scale * total[i] / rows) as f32;
        }
        let b = Backward {
            channels,
            slope,
            offset,
        };
        match self.residual.filter(|&r| ctx.wants(r)) {
            Some(r) => {
                if ctx.wants(self.x) {
                    let mut dx = ctx.pool().get(T::PRECISION.memory_len(numel));
                    let to = elements_mut(dx.slice_mut(), numel);
                    let from = elements(dy.slice(), numel);
                    batch_norm::gradient(threads, x, (from, to), b, Act::None.clip());
                    ctx.give(self.x, dx);
                }
                ctx.give(r, dy);
            }
            None => {
                let (to, gated) = (elements_mut(dy.slice_mut(), numel), self.gated_by_output());
                let clip = if gated { Act::None.clip() } else { clip };
                batch_norm::gradient(threads, x, (&[], to), b, clip);
                ctx.give(self.x, dy);
            }
        }
        ctx.pool().put(coefficients);
        ctx.pool().put(sums);
        ctx.pool().put(work);
        Ok(())
    }
}

/// Batch statistics of a step, to be merged into the running ones after it. Vectors
/// keep their capacity.
#[derive(Default)]
pub(crate) struct Statistics {
    notes: Vec<Note>,
    /// Means, then unbiased variances, of each note.
    values: Vec<f32>,
    /// The step that recorded them is over.
    old: bool,
    /// The fewest values a channel so far, and whether they were joined with those of other ranks.
    pub(crate) fewest: Option<(f64, bool)>,
}

struct Note {
    running: RunningStats,
    momentum: Option<f64>,
    channels: usize,
}

impl Statistics {
    fn note(
        &mut self,
        running: RunningStats,
        momentum: Option<f64>,
        stats: impl ExactSizeIterator<Item = (f32, f32)> + Clone,
    ) {
        self.notes.push(Note {
            running,
            momentum,
            channels: stats.len(),
        });
        self.values.extend(stats.clone().map(|s| s.0));
        self.values.extend(stats.map(|s| s.1));
    }

    fn count(&mut self, rows: f64, joined: bool) {
        if self.fewest.is_none_or(|(fewest, _)| rows < fewest) {
            self.fewest = Some((rows, joined));
        }
    }

    fn check_applied(&self) -> Result<()> {
        match self.old {
            false => Ok(()),
            true => refuse!(
                "running statistics of the step before were not taken over; call Tape::update_buffers after each training step"
            ),
        }
    }

    /// Notes those of another engine.
    pub(super) fn add(&mut self, params: &crate::Params, batch: &BatchStatistics) -> Result<()> {
        let (mean, var, running) = (&batch.mean, &batch.var, batch.running);
        for id in [running.mean, running.var] {
            let info = params.buffer_info(id)?;
            if info.len != mean.len() || info.len != var.len() {
                refuse!("another engine's statistics do not fit {}", info.name);
            }
        }
        params.buffer_info(running.batches)?;
        self.check_applied()?;
        self.count(batch.rows as f64, false);
        let stats = mean.iter().copied().zip(var.iter().copied());
        self.note(running, batch.momentum, stats);
        Ok(())
    }

    /// A new step starts.
    pub(crate) fn age(&mut self) {
        self.old = !self.notes.is_empty();
    }

    /// Merges every recorded statistic into the running ones, in recording order.
    pub(crate) fn apply(&mut self, params: &mut crate::Params) -> Result<()> {
        // Their lengths were checked when they were recorded.
        for RunningStats { mean, var, batches } in self.notes.iter().map(|n| n.running) {
            for id in [mean, var, batches] {
                params.buffer_info(id)?;
            }
        }
        let mut rest = &*self.values;
        for note in &self.notes {
            let (now, later) = rest.split_at(2 * note.channels);
            rest = later;
            let (mean, var) = now.split_at(note.channels);
            let count = &mut params.buffer_mut(note.running.batches)[0];
            *count += 1.0;
            let m = note.momentum.unwrap_or(1.0 / f64::from(*count));
            for (id, batch) in [(note.running.mean, mean), (note.running.var, var)] {
                for (r, &b) in params.buffer_mut(id).iter_mut().zip(batch) {
                    *r = ((1.0 - m) * f64::from(*r) + m * f64::from(b)) as f32;
                }
            }
        }
        self.notes.clear();
        self.values.clear();
        self.old = false;
        Ok(())
    }
}
