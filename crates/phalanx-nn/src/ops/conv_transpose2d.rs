//! Transposed two-dimensional convolution: a convolution's input gradient as a
//! forward pass, and the other way round. Saves its input.

use crate::kernels::Mode;
use crate::kernels::bias::finish;
use crate::kernels::conv::{self, ConvShape};
use crate::kernels::element::{Values, ValuesMut};
use crate::param::{Layout, ParamId};
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

use super::Conv2dOptions;

pub(crate) struct ConvTranspose2d {
    x: SlotId,
    out: SlotId,
    weight: ParamId,
    bias: Option<ParamId>,
    /// The convolution from this layer's output to its input.
    shape: ConvShape,
}

impl<'s> Tensor<'s> {
    /// The transposed convolution of images (N, H, W, C), plus `b`, for a weight of
    /// PyTorch's shape (in, out / groups, kh, kw) registered with [`Layout::Conv`].
    /// `extra` rows and columns are added to the end (PyTorch's `output_padding`).
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn conv_transpose2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Tensor<'s>> {
        let (step, x) = (self.step(), self.slot());
        let s = self.transposed_shape(weight, bias, options, extra)?;
        let shape = Shape::new(&[s.images, s.input[0], s.input[1], s.inp])?;
        let out = {
            let mut st = step.state();
            let mut buf = st.pool.get(shape.numel());
            let mut work = st.pool.get(conv::work_len(&s));
            let w = step.params().get(weight);
            let memory = (work.slice_mut(), ValuesMut::F32(buf.slice_mut()));
            let value = Values::F32(st.value(x));
            conv::input_gradient(step.team(), &s, w, value, memory, Mode::Write);
            if let Some(b) = bias {
                let b = step.params().get(b);
                let piece = s.in_len().max(1);
                step.team()
                    .split(buf.slice_mut(), piece, |_, y| finish(y, b, false));
            }
            st.pool.put(work);
            let training = st.training;
            let out = st.add_output(shape, buf, training);
            if training {
                st.record(ConvTranspose2d {
                    x,
                    out,
                    weight,
                    bias,
                    shape: s,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }

    fn transposed_shape(
        &self,
        weight: ParamId,
        bias: Option<ParamId>,
        o: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<ConvShape> {
        let (info, dims) = (self.step().info(weight)?, self.dims());
        let wrong = |what: String| {
            Err(Error::usage(format!(
                "transposed convolution {}: {what}",
                info.name
            )))
        };
        let (&[images, h, w, inp], &[weight_in, group_out, kh, kw]) = (&*dims, &*info.shape) else {
            return wrong(format!("needs images (N, H, W, C), got shape {dims:?}"));
        };
        if info.layout != Layout::Conv || [kh, kw] != o.kernel || weight_in != inp {
            return wrong(format!(
                "weight of shape {:?} does not fit {inp} inputs and a kernel of {:?}",
                info.shape, o.kernel
            ));
        }
        if o.groups == 0 || !inp.is_multiple_of(o.groups) || group_out == 0 || inp == 0 {
            return wrong(format!("{inp} inputs and {} groups do not fit", o.groups));
        }
        let out = group_out * o.groups;
        if let Some(b) = bias
            && self.step().info(b)?.len != out
        {
            return wrong(format!(
                "bias of {} values for {out} outputs",
                self.step().info(b)?.len
            ));
        }
        let size = |d: usize, n: usize| {
            let reach = o.dilation[d].checked_mul(o.kernel[d].checked_sub(1)?)?;
            let span = n.checked_sub(1)?.checked_mul(o.stride[d])?;
            let size = span.checked_add(reach)?.checked_add(1)?;
            let size = size.checked_add(extra[d])?;
            let size = size.checked_sub(o.padding[d].checked_mul(2)?)?;
            // The convolution back must give this layer's input.
            let back =
                ConvShape::out_size(size, o.kernel[d], o.stride[d], o.padding[d], o.dilation[d]);
            (back == Some(n)).then_some(size)
        };
        let (Some(oh), Some(ow)) = (size(0, h), size(1, w)) else {
            return wrong(format!(
                "{o:?} with {extra:?} rows and columns more does not fit images of {h} x {w}"
            ));
        };
        Ok(ConvShape {
            images,
            input: [oh, ow],
            output: [h, w],
            inp: out,
            out: inp,
            kernel: o.kernel,
            stride: o.stride,
            padding: o.padding,
            dilation: o.dilation,
            groups: o.groups,
            precision: self.step().state().precision,
        })
    }
}

impl Recorded for ConvTranspose2d {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Param(self.weight));
        self.bias.map(Visit::Param).into_iter().for_each(&mut *f);
        f(Visit::Saved(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let (team, s) = (pass.team, &self.shape);
        let (x, d) = (pass.value(self.x), dy.slice());
        let mut work = pass.pool().get(conv::work_len(s).max(8 * s.inp));
        pass.param(self.weight, |dw, mode| {
            let (d, x) = (Values::F32(d), Values::F32(x));
            conv::weight_gradient(team, s, d, x, work.slice_mut(), dw, mode);
        })?;
        if let Some(b) = self.bias {
            // The sum over pixels of this layer's output, whose channels are the convolution's inputs.
            let turned = ConvShape {
                out: s.inp,
                output: s.input,
                ..*s
            };
            pass.param(b, |db, mode| {
                conv::bias_gradient(team, &turned, d, work.slice_mut(), db, mode)
            })?;
        }
        if pass.wants(self.x) {
            let mut dx = pass.pool().get(x.len());
            let w = pass.params.get(self.weight);
            let (memory, y) = (work.slice_mut(), ValuesMut::F32(dx.slice_mut()));
            conv::forward(team, s, Values::F32(d), w, (None, false), memory, y);
            pass.give(self.x, dx);
        }
        pass.pool().put(work);
        pass.pool().put(dy);
        Ok(())
    }
}
