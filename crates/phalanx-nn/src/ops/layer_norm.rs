//! Layer and group normalisation: `y = (x - mean) / sqrt(var + eps) * w + b` over
//! the last dimensions, or over groups of channels of an image. Save their
//! input and two numbers a group.

use super::batch_norm::one_gradient;
use crate::kernels::layer_norm::{self, Groups};
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::{Error, Result, Tensor};

pub(crate) struct LayerNorm {
    x: SlotId,
    out: SlotId,
    stats: SlotId,
    weight: Option<ParamId>,
    bias: Option<ParamId>,
    groups: Groups,
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
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        for id in weight.into_iter().chain(bias) {
            let info = step.info(id)?;
            if info.len != groups.channels {
                return Err(Error::usage(format!(
                    "{} has {} values for {} channels",
                    info.name, info.len, groups.channels
                )));
            }
        }
        let out = {
            let mut st = step.state();
            let mut buf = st.pool.get(dims.numel());
            let mut stats = st.pool.get(2 * groups.images * groups.groups);
            let value = |id: Option<ParamId>| id.map_or(&[][..], |id| step.params().get(id));
            let constants = (value(weight), value(bias), eps);
            if dims.numel() > 0 {
                let (y, s) = (buf.slice_mut(), stats.slice_mut());
                layer_norm::forward(step.team(), groups, st.value(x), constants, y, s);
            }
            let training = st.training;
            let out = st.add_output(dims, buf, training);
            if training {
                let stats = st.add_aux(stats)?;
                st.record(LayerNorm {
                    x,
                    out,
                    stats,
                    weight,
                    bias,
                    groups,
                });
            } else {
                st.pool.put(stats);
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for LayerNorm {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        self.weight.map(Visit::Param).into_iter().for_each(&mut *f);
        self.bias.map(Visit::Param).into_iter().for_each(&mut *f);
        f(Visit::Saved(self.x));
        f(Visit::Saved(self.stats));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let (team, g, c) = (pass.team, self.groups, self.groups.channels);
        let mut work = pass.pool().get(layer_norm::partials_len(g));
        // Of f64s.
        let mut sums = pass.pool().get(4 * c);
        let saved = (pass.value(self.x), pass.value(self.stats));
        let weight = self.weight.map_or(&[][..], |w| pass.params.get(w));
        let (dw, db) = sums.f64_mut().split_at_mut(c);
        let (d, work_memory) = (dy.slice_mut(), work.slice_mut());
        layer_norm::backward(team, g, saved, weight, d, work_memory, (dw, db));
        one_gradient(pass, self.weight, dw.iter().copied())?;
        one_gradient(pass, self.bias, db.iter().copied())?;
        pass.pool().put(sums);
        pass.pool().put(work);
        pass.give(self.x, dy);
        Ok(())
    }
}
