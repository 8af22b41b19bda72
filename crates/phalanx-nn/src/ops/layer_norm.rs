//! Layer and group normalisation: `y = (x - mean) / sqrt(var + eps) * w + b` over
//! the last dimensions, or over groups of channels of an image. Save their
//! input and two numbers a group.

use super::batch_norm::one_gradient;
use crate::kernels::layer_norm::{self, Groups};
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Error, Result, Tensor};

pub(crate) struct LayerNorm {
    weight: Option<ParamId>,
    bias: Option<ParamId>,
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
        let dims = self.dims();
        let channels: usize = shape.iter().product();
        if !dims.ends_with(shape) || channels == 0 {
            return Err(Error::usage(format!(
                "layer_norm over {shape:?} of shape {dims:?}"
            )));
        }
        let groups = Groups {
            images: dims.numel() / channels,
            pixels: 1,
            channels,
            groups: 1,
        };
        self.normalised(groups, (weight, bias), eps)
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
        let dims = self.dims();
        let (Some(&images), Some(&channels)) = (dims.first(), dims.last()) else {
            return Err(Error::usage("group_norm of a tensor without dimensions"));
        };
        let fits = dims.len() >= 2 && groups > 0 && channels > 0;
        if !fits || !channels.is_multiple_of(groups) {
            return Err(Error::usage(format!(
                "group_norm: {groups} groups do not divide the channels of shape {dims:?}"
            )));
        }
        let groups = Groups {
            images,
            pixels: dims[1..dims.len() - 1].iter().product(),
            channels,
            groups,
        };
        self.normalised(groups, (weight, bias), eps)
    }

    fn normalised(
        self,
        groups: Groups,
        (weight, bias): (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Tensor<'s>> {
        let step = self.step();
        for id in weight.into_iter().chain(bias) {
            let info = step.info(id)?;
            if info.len != groups.channels {
                return Err(Error::usage(format!(
                    "{} has {} values for {} channels",
                    info.name, info.len, groups.channels
                )));
            }
        }
        let op = LayerNorm {
            weight,
            bias,
            groups,
            eps,
        };
        step.apply([self.slot()], self.dims(), op)
    }
}

impl Operation for LayerNorm {
    fn params(&self) -> [Option<ParamId>; 2] {
        [self.weight, self.bias]
    }

    fn saves(&self) -> [bool; 1] {
        [true]
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let (g, numel) = (self.groups, c.state.shape(x).numel());
        let mut buf = c.state.pool.get(numel);
        let mut stats = c.state.pool.get(2 * g.images * g.groups);
        let value = |id: Option<ParamId>| id.map_or(&[][..], |id| c.params.get(id));
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
        let weight = self.weight.map_or(&[][..], |w| ctx.params.get(w));
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
