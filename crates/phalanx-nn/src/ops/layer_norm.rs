//! Layer and group normalisation: `y = (x - mean) / sqrt(var + eps) * w + b` over
//! the last dimensions, or over groups of channels of an image; RMS normalisation, with a mean of 0. Save their input, a
//! weight that is not a parameter, and two numbers per group.

use super::Weight;
use super::batch_norm::one_gradient;
use super::weight::known_vector;
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::layer_norm::{self, Groups};

pub(crate) struct LayerNorm {
    weight: Option<Operand>,
    bias: Option<Operand>,
    groups: Groups,
    eps: f64,
}

impl<'s> Tensor<'s> {
    /// Normalises over the last dimensions, whose sizes are `shape`; weight and
    /// bias have that shape.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn layer_norm(
        self,
        shape: &[usize],
        (weight, bias): (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let weights = (weight.map(Weight::Param), bias.map(Weight::Param));
        self.layer_norm_with(shape, weights, eps)
    }

    /// As [`layer_norm`](Tensor::layer_norm), for weights that may be tensors.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn layer_norm_with(
        self,
        shape: &[usize],
        weights: (Option<Weight<'s>>, Option<Weight<'s>>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let channels: usize = shape.iter().product();
        if !dims.ends_with(shape) || channels == 0 {
            refuse!("layer_norm over {shape:?} of shape {dims:?}");
        }
        let groups = Groups::rows(dims.numel(), channels, true);
        self.normalised(groups, weights, eps)
    }

    /// Divides by the root of the mean square over the last dimension: `x / sqrt(mean(x^2) + eps) * w`.
    ///
    /// # Errors
    /// `Usage` when the weight has another size, or there is no dimension.
    pub fn rms_norm(self, weight: Option<ParamId>, eps: f64) -> Result<Tensor<'s>> {
        self.rms_norm_with(weight.map(Weight::Param), eps)
    }

    /// As [`rms_norm`](Tensor::rms_norm), for a weight that may be a tensor.
    ///
    /// # Errors
    /// As [`rms_norm`](Tensor::rms_norm), and `Usage` when the weight belongs to another step or model.
    pub fn rms_norm_with(self, weight: Option<Weight<'s>>, eps: f64) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let Some(&channels) = dims.last().filter(|&&c| c > 0) else {
            refuse!("rms_norm needs a last dimension, got shape {dims:?}");
        };
        let groups = Groups::rows(dims.numel(), channels, false);
        self.normalised(groups, (weight, None), eps)
    }

    /// Normalises `groups` groups of neighbouring channels of images (N, …, C),
    /// each over all pixels of an image.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn group_norm(
        self,
        groups: usize,
        (weight, bias): (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let weights = (weight.map(Weight::Param), bias.map(Weight::Param));
        self.group_norm_with(groups, weights, eps)
    }

    /// As [`group_norm`](Tensor::group_norm), for weights that may be tensors; each has a
    /// value for every channel.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or a weight belongs to another step or model.
    pub fn group_norm_with(
        self,
        groups: usize,
        weights: (Option<Weight<'s>>, Option<Weight<'s>>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let (Some(&images), Some(&channels)) = (dims.first(), dims.last()) else {
            refuse!("group_norm of a tensor without dimensions");
        };
        let fits = dims.len() >= 2 && groups > 0 && channels > 0;
        if !fits || !channels.is_multiple_of(groups) {
            refuse!("group_norm: {groups} groups do not divide the channels of shape {dims:?}");
        }
        let groups = Groups {
            images,
            pixels: dims[1..dims.len() - 1].iter().product(),
            channels,
            groups,
            centred: true,
        };
        self.normalised(groups, weights, eps)
    }

    fn normalised(
        self,
        groups: Groups,
        (weight, bias): (Option<Weight<'s>>, Option<Weight<'s>>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let step = self.step();
        let known =
            |w: &Option<Weight<'s>>| known_vector(w.as_ref(), step, (groups.channels, "channels"));
        let op = LayerNorm {
            weight: known(&weight)?,
            bias: known(&bias)?,
            groups,
            eps,
        };
        step.apply([self.slot()], self.dims(), op)
    }
}

impl Operation for LayerNorm {
    fn operands(&self) -> [Option<Operand>; 2] {
        [self.weight, self.bias]
    }

    fn saves_operands(&self) -> [bool; 2] {
        [true, false]
    }

    fn saves(&self) -> [bool; 1] {
        [true]
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (g, numel) = (self.groups, c.state.shape(x).numel());
        let mut buf = c.state.pool.get(numel);
        let mut stats = c.state.pool.get(2 * g.images * g.groups);
        let value = |w: Option<Operand>| w.map_or(&[][..], |w| c.operand(w));
        let constants = (value(self.weight), value(self.bias), self.eps);
        if numel > 0 {
            let (y, s) = (buf.slice_mut(), stats.slice_mut());
            layer_norm::forward(c.threads, g, c.state.value(x), constants, y, s);
        }
        Ok((buf, Some(stats)))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (threads, g, c) = (ctx.threads, self.groups, self.groups.channels);
        let mut work = ctx.pool().get(layer_norm::partials_len(g));
        // Of f64s.
        let mut sums = ctx.pool().get(4 * c);
        let saved = (ctx.value(s.x[0]), ctx.value(s.aux()?));
        let weight = self.weight.map_or(&[][..], |w| ctx.operand(w));
        let (dw, db) = sums.f64_mut().split_at_mut(c);
        let (d, work_memory) = (dy.slice_mut(), work.slice_mut());
        layer_norm::backward(threads, g, saved, weight, d, work_memory, (dw, db));
        one_gradient(ctx, self.weight, dw.iter().copied())?;
        one_gradient(ctx, self.bias, db.iter().copied())?;
        ctx.pool().put(sums);
        ctx.pool().put(work);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
