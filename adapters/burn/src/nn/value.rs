//! The operations of models, by Burn's.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
use std::iter;
use std::mem::replace;
use std::ops::Range;

use burn::tensor::Tensor as Burn;
use burn::tensor::activation::{log_softmax, relu, sigmoid, softmax};
use burn::tensor::module;
use burn::tensor::ops::{AvgPoolOptions, ConvOptions, ConvTransposeOptions, MaxPoolOptions};
use phalanx_base::refuse;
use phalanx_nn::layers::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use phalanx_nn::{Layout, ParamId, ParamInfo, Result, Value};

use super::{Batch, DeviceStep, RANK, ensure, sizes};

/// On the device, images (N, H, W, C) are (1, 1, N, C, H, W): the place of each dimension.
const IMAGE: [usize; 4] = [2, 4, 5, 3];

/// A value of a [`DeviceStep`], on the device.
pub struct DeviceTensor<'s> {
    pub(super) step: DeviceStep<'s>,
    pub(super) values: Burn<RANK>,
    /// The last dimensions on the device are this tensor's, the others are 1.
    pub(super) rank: usize,
    /// Whether the dimensions are in the order of images.
    pub(super) is_image: bool,
}

/// min(max(0, x), 6), with derivative 0 at 0 and at 6.
fn relu6(x: Burn<RANK>) -> Burn<RANK> {
    let low = x.clone().lower_equal_scalar(0.0);
    let high = x.clone().greater_equal_scalar(6.0);
    x.mask_fill(low, 0.0).mask_fill(high, 6.0)
}

fn activated(x: Burn<RANK>, function: Activation) -> Result<Burn<RANK>> {
    Ok(match function {
        Activation::Relu => relu(x),
        Activation::Relu6 => relu6(x),
        Activation::LeakyRelu(slope) => {
            let low = x.clone().lower_equal_scalar(0.0);
            x.clone().mask_where(low, x.mul_scalar(slope))
        }
        // Burn's derivative of gelu is that of gelu_tanh.
        Activation::Gelu => {
            let erf = x.clone().mul_scalar(FRAC_1_SQRT_2).erf();
            x * erf.add_scalar(1.0).mul_scalar(0.5)
        }
        Activation::GeluTanh => {
            let cube = x.clone() * x.clone() * x.clone();
            let inner = cube.mul_scalar(0.044_715) + x.clone();
            x * sigmoid(inner.mul_scalar(2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2))
        }
        Activation::Silu => x.clone() * sigmoid(x),
        Activation::Hardswish => x.clone() * relu6(x.add_scalar(3.0)).div_scalar(6.0),
        Activation::Hardsigmoid => relu6(x.add_scalar(3.0)).div_scalar(6.0),
        Activation::Sigmoid => sigmoid(x),
        Activation::Tanh => x.tanh(),
        Activation::Exp => x.exp(),
        Activation::Log => x.log(),
        Activation::Sqrt => x.sqrt(),
        Activation::Abs => x.abs(),
        Activation::Pow(exponent) => x.powf_scalar(exponent),
        Activation::Clamp(low, high) => {
            let below = x.clone().lower_scalar(low);
            let x = x.mask_fill(below, low);
            let above = x.clone().greater_scalar(high);
            x.mask_fill(above, high)
        }
        other => refuse!("{} does not run on a device", other.name()),
    })
}

/// (x - mean) / sqrt(variance + eps) over the last dimension; with a mean of 0 unless `is_centred`.
fn normalised(x: Burn<3>, eps: f64, is_centred: bool) -> Burn<3> {
    let x = match is_centred {
        true => x.clone() - x.mean_dim(2),
        false => x,
    };
    let var = (x.clone() * x.clone()).mean_dim(2);
    x / var.add_scalar(eps).sqrt()
}

/// Factor and offset of each channel.
type Affine = (Option<Burn<1>>, Option<Burn<1>>);

/// x w + b; the weights get a shape that is 1 in all but one dimension.
fn scaled<const D: usize>(mut x: Burn<D>, (w, b): Affine, shape: [usize; D]) -> Burn<D> {
    if let Some(w) = w {
        x = x * w.reshape(shape);
    }
    if let Some(b) = b {
        x = x + b.reshape(shape);
    }
    x
}

/// PyTorch's (out, in / groups, kh, kw) of a convolution's weight. The height of a one-dimensional one is 1.
fn kernel(info: &ParamInfo) -> Option<[usize; 4]> {
    match (info.layout, &*info.shape) {
        (Layout::Conv, &[out, inp, h, w]) => Some([out, inp, h, w]),
        (Layout::Conv1d, &[out, inp, w]) => Some([out, inp, 1, w]),
        _ => None,
    }
}

impl<'s> DeviceTensor<'s> {
    /// The values row by row in the shape of this tensor, for code that uses Burn itself.
    ///
    /// # Errors
    ///
    /// `Usage` when it does not have `D` dimensions.
    pub fn into_burn<const D: usize>(self) -> Result<Burn<D>> {
        match <[usize; D]>::try_from(self.shape()) {
            Ok(shape) => Ok(self.to(shape)),
            Err(shape) => refuse!("a tensor of shape {shape:?} does not have {D} dimensions"),
        }
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.values.shape().num_elements()
    }

    /// Where a dimension is on the device.
    fn place(&self, dim: usize) -> usize {
        match self.is_image {
            true => IMAGE[IMAGE.len() - self.rank + dim],
            false => RANK - self.rank + dim,
        }
    }

    /// As [`place`](Self::place), of a dimension that may not exist.
    fn find(&self, dim: usize, what: &str) -> Result<usize> {
        let shape = self.shape();
        ensure!(
            dim < self.rank,
            "{what} along dimension {dim} of shape {shape:?}"
        );
        Ok(self.place(dim))
    }

    /// Size of the last dimension.
    fn last(&self, what: &str) -> Result<usize> {
        ensure!(self.rank > 0, "{what} of a tensor without dimensions");
        Ok(self.values.dims()[self.place(self.rank - 1)])
    }

    /// N, H, W and C.
    fn image_sizes(&self, what: &str) -> Result<[usize; 4]> {
        match <[usize; 4]>::try_from(self.shape()) {
            Ok(sizes) => Ok(sizes),
            Err(shape) => refuse!("{what} needs images (N, H, W, C), got shape {shape:?}"),
        }
    }

    fn map(self, op: impl FnOnce(Burn<RANK>) -> Burn<RANK>) -> Self {
        DeviceTensor {
            values: op(self.values),
            ..self
        }
    }

    /// Dimensions in the order of this tensor.
    fn by_row(self) -> Self {
        match self.is_image {
            true => DeviceTensor {
                is_image: false,
                ..self.map(|x| x.permute([0, 1, 2, 4, 5, 3]))
            },
            false => self,
        }
    }

    /// Dimensions in the order of images; of a tensor of at most 4.
    fn by_channel(self) -> Self {
        match self.is_image {
            true => self,
            false => DeviceTensor {
                is_image: true,
                ..self.map(|x| x.permute([0, 1, 2, 5, 3, 4]))
            },
        }
    }

    /// The values row by row in another shape, of as many elements.
    pub(super) fn to<const D: usize>(self, shape: [usize; D]) -> Burn<D> {
        self.by_row().values.reshape(shape)
    }

    /// Images in Burn's order (N, C, H, W).
    fn planes(self) -> Burn<4> {
        let values = self.by_channel().values;
        let [_, _, n, c, h, w] = values.dims();
        values.reshape([n, c, h, w])
    }

    fn on_planes(self, op: impl FnOnce(Burn<4>) -> Burn<4>) -> Self {
        let step = self.step;
        step.images(op(self.planes()))
    }

    /// `op` of this tensor as (`n`, channels, pixels); images are N, as they are.
    fn on_channels(self, n: usize, op: impl FnOnce(Burn<3>) -> Burn<3>) -> Self {
        let (step, shape) = (self.step, self.shape());
        if let [n, h, w, c] = *shape {
            return self.on_planes(|x| op(x.reshape([n, c, h * w])).reshape([n, c, h, w]));
        }
        let c = shape.last().copied().unwrap_or(1);
        let pixels = self.len() / n / c;
        let y = op(self.to([n, pixels, c]).swap_dims(1, 2));
        step.rows(y.swap_dims(1, 2), &shape)
    }

    fn affine(&self, ids: (Option<ParamId>, Option<ParamId>), n: usize) -> Result<Affine> {
        let vector = |id| self.step.vector(id, (n, "channels"));
        Ok((vector(ids.0)?, vector(ids.1)?))
    }

    fn is_with(&self, other: &Self) -> bool {
        std::ptr::eq(self.step.run, other.step.run)
    }

    fn binary(
        self,
        other: Self,
        name: &str,
        op: fn(Burn<RANK>, Burn<RANK>) -> Burn<RANK>,
    ) -> Result<Self> {
        let (shape, other_shape) = (self.shape(), other.shape());
        let by_channel = (self.is_image || other.is_image) && self.rank.max(other.rank) <= 4;
        let (a, b) = match by_channel {
            true => (self.by_channel(), other.by_channel()),
            false => (self.by_row(), other.by_row()),
        };
        let pairs = || iter::zip(a.values.dims(), b.values.dims());
        ensure!(
            a.is_with(&b) && pairs().all(|(a, b)| a == b || a == 1 || b == 1),
            "{name}: shapes {shape:?} and {other_shape:?} differ and cannot be stretched to each other, or the steps differ"
        );
        Ok(DeviceTensor {
            rank: a.rank.max(b.rank),
            ..a.map(|a| op(a, b.values))
        })
    }

    /// `op` over these dimensions, or all; its second argument has their places on the device.
    fn reduced(
        self,
        dims: &[usize],
        keep: bool,
        op: impl FnOnce(Burn<RANK>, &[usize]) -> Burn<RANK>,
    ) -> Result<Self> {
        let mut kept = self.shape();
        let mut over = vec![dims.is_empty(); kept.len()];
        for &dim in dims {
            let is_new = dim < over.len() && !replace(&mut over[dim], true);
            ensure!(
                is_new,
                "reduction over dimensions {dims:?} of shape {kept:?}: {dim} is not there or named twice"
            );
        }
        let reduced = (0..kept.len()).filter(|dim| over[*dim]);
        let places: Vec<usize> = reduced.map(|dim| self.place(dim)).collect();
        let y = self.map(|x| op(x, &places));
        if keep {
            return Ok(y);
        }
        let mut over = over.into_iter();
        kept.retain(|_| over.next() == Some(false));
        y.reshape(&kept)
    }

    /// x W + b, where the parameter is W or, if `is_linear`, its transpose.
    fn times(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        act: Act,
        is_linear: bool,
    ) -> Result<Self> {
        let (step, mut shape) = (self.step, self.shape());
        let info = step.run.step.params().info(weight)?;
        let w = step.parameter::<2>(weight)?;
        // That layout is a transpose already.
        let w = match is_linear == (info.layout == Layout::Transposed) {
            true => w,
            false => w.transpose(),
        };
        let ([inputs, outputs], name) = (w.dims(), &info.name);
        let last = shape.last_mut().filter(|last| **last == inputs);
        let Some(last) = last else {
            refuse!(
                "{name} takes {inputs} inputs, the tensor has shape {:?}",
                self.shape()
            );
        };
        *last = outputs;
        let bias = step.vector(bias, (outputs, "outputs"))?;
        let rows = self.len() / inputs;
        let y = self.to([rows, inputs]).matmul(w);
        let y = scaled(y, (None, bias), [1, outputs]);
        step.rows(y, &shape).clipped(act)
    }

    fn product(self, other: Self, is_transposed: bool) -> Result<Self> {
        let (a, b) = (self.shape(), other.shape());
        let (rank, is_with) = (a.len(), self.is_with(&other));
        let fits = is_with && rank >= 2 && b.len() == rank && a[..rank - 2] == b[..rank - 2];
        let inner = |shape: &[usize]| shape[if is_transposed { rank - 1 } else { rank - 2 }];
        ensure!(
            fits && a[rank - 1] == inner(&b),
            "bmm of shapes {a:?} and {b:?} (second transposed: {is_transposed}) does not fit, or the steps differ"
        );
        let other = match is_transposed {
            true => other.by_row().values.transpose(),
            false => other.by_row().values,
        };
        Ok(self.by_row().map(|x| x.matmul(other)))
    }

    fn dropped(self, p: f64, by_channel: bool) -> Result<Self> {
        let (step, shape) = (self.step, self.shape());
        match step.run.step.dropout_mask(p, &shape, by_channel)? {
            Some(mask) => self.mul(step.input_of(mask, &shape)?),
            None => Ok(self),
        }
    }

    fn clipped(self, act: Act) -> Result<Self> {
        match act {
            Act::None => Ok(self),
            Act::Relu => self.relu(),
            Act::Relu6 => self.relu6(),
            _ => refuse!("{act:?} does not run on a device"),
        }
    }

    /// Whether the convolution `o` with a weight of PyTorch's shape `kernel` runs from `c` channels and these sizes.
    fn fits(o: Conv2dOptions, kernel: [usize; 4], sizes: [usize; 2], c: usize) -> bool {
        let [out, inputs, kh, kw] = kernel;
        [kh, kw] == o.kernel
            && inputs.checked_mul(o.groups) == Some(c)
            && out > 0
            && out.is_multiple_of(o.groups)
            && (0..2).all(|d| o.out_size(d, sizes[d]).is_some())
    }

    /// The largest of each of `to` windows along an axis of `n` pixels.
    fn windows(x: Burn<4>, axis: usize, n: usize, to: usize) -> Burn<4> {
        let window = |i: usize| {
            let range = i * n / to..((i + 1) * n).div_ceil(to);
            x.clone().slice_dim(axis, range).max_dim(axis)
        };
        Burn::cat((0..to).map(window).collect(), axis)
    }
}

impl<'s> Value<'s> for DeviceTensor<'s> {
    fn share(&self) -> Self {
        DeviceTensor {
            values: self.values.clone(),
            ..*self
        }
    }

    fn shape(&self) -> Vec<usize> {
        let dims = self.values.dims();
        (0..self.rank).map(|dim| dims[self.place(dim)]).collect()
    }

    fn is_training(&self) -> bool {
        self.step.run.step.learns()
    }

    fn constant(&self, data: &[f32], shape: &[usize]) -> Result<Self> {
        self.step.input(data, shape)
    }

    fn concat(values: Vec<Self>, dim: usize) -> Result<Self> {
        let Some(first) = values.first().map(Self::share) else {
            refuse!("concat of no tensors");
        };
        let (shape, place) = (first.shape(), first.find(dim, "concat")?);
        let mut parts = Vec::with_capacity(values.len());
        for value in values {
            let own = value.shape();
            let is_same = |i: usize| i == dim || own[i] == shape[i];
            let fits = value.is_with(&first) && own.len() == shape.len();
            ensure!(
                fits && (0..own.len()).all(is_same),
                "concat along dimension {dim}: {own:?} does not fit {shape:?}, or belongs to another step"
            );
            parts.push(match first.is_image {
                true => value.by_channel().values,
                false => value.by_row().values,
            });
        }
        Ok(first.map(|_| Burn::cat(parts, place)))
    }

    fn recompute<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        part(self)
    }

    fn evaluate<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        let step = self.step.run.step;
        step.evaluate(|| part(self))
    }

    fn activation(self, function: Activation) -> Result<Self> {
        Ok(DeviceTensor {
            values: activated(self.values, function)?,
            ..self
        })
    }

    fn add(self, other: Self) -> Result<Self> {
        self.binary(other, "add", |a, b| a.add(b))
    }

    fn sub(self, other: Self) -> Result<Self> {
        self.binary(other, "sub", |a, b| a.sub(b))
    }

    fn mul(self, other: Self) -> Result<Self> {
        self.binary(other, "mul", |a, b| a.mul(b))
    }

    fn div(self, other: Self) -> Result<Self> {
        self.binary(other, "div", |a, b| a.div(b))
    }

    fn scale(self, factor: f32) -> Result<Self> {
        Ok(self.map(|x| x.mul_scalar(factor)))
    }

    fn softmax(self, dim: usize) -> Result<Self> {
        let place = self.find(dim, "softmax")?;
        Ok(self.map(|x| softmax(x, place)))
    }

    fn log_softmax_dim(self, dim: usize) -> Result<Self> {
        let place = self.find(dim, "softmax")?;
        Ok(self.map(|x| log_softmax(x, place)))
    }

    fn cumsum(self, dim: usize) -> Result<Self> {
        let place = self.find(dim, "cumsum")?;
        Ok(self.map(|x| x.cumsum(place)))
    }

    fn matmul(self, weight: ParamId) -> Result<Self> {
        self.times(weight, None, Act::None, false)
    }

    fn linear(self, weight: ParamId, bias: Option<ParamId>, act: Act) -> Result<Self> {
        self.times(weight, bias, act, true)
    }

    fn bmm(self, other: Self) -> Result<Self> {
        self.product(other, false)
    }

    fn bmm_transposed(self, other: Self) -> Result<Self> {
        self.product(other, true)
    }

    fn reshape(self, shape: &[usize]) -> Result<Self> {
        let (step, from) = (self.step, self.shape());
        let to: usize = sizes(shape)?.iter().product();
        ensure!(to == self.len(), "cannot reshape {from:?} to {shape:?}");
        Ok(step.rows(self.by_row().values, shape))
    }

    fn flatten(self) -> Result<Self> {
        let (step, shape) = (self.step, self.shape());
        match *shape {
            [] => refuse!("flatten of a tensor without dimensions"),
            // Channels come first, as in PyTorch.
            [n, h, w, c] => Ok(step.rows(self.planes(), &[n, c * h * w])),
            [n, ..] => self.reshape(&[n, shape[1..].iter().product()]),
        }
    }

    fn permute(self, order: &[usize]) -> Result<Self> {
        let (shape, mut sorted) = (self.shape(), order.to_vec());
        sorted.sort_unstable();
        ensure!(
            sorted.into_iter().eq(0..shape.len()),
            "permute of shape {shape:?} by {order:?}: every dimension must be named once"
        );
        let first = RANK - order.len();
        let mut axes = [0, 1, 2, 3, 4, 5];
        iter::zip(&mut axes[first..], order).for_each(|(axis, dim)| *axis = first + dim);
        Ok(self.by_row().map(|x| x.permute(axes)))
    }

    fn sum(self, dims: &[usize], keep: bool) -> Result<Self> {
        self.reduced(dims, keep, |x, places| x.sum_dims(places))
    }

    fn mean(self, dims: &[usize], keep: bool) -> Result<Self> {
        self.reduced(dims, keep, |x, places| x.mean_dims(places))
    }

    fn max(self, dims: &[usize], keep: bool) -> Result<Self> {
        self.reduced(dims, keep, |x, places| {
            // Equal largest elements share the gradient.
            let most = x.clone().detach().max_dims(places).expand(x.dims());
            let others = x.clone().not_equal(most);
            let count = others.clone().bool_not().float().sum_dims(places);
            x.mask_fill(others, 0.0).sum_dims(places) / count
        })
    }

    fn slice(self, dim: usize, range: Range<usize>) -> Result<Self> {
        let (shape, place) = (self.shape(), self.find(dim, "slice")?);
        ensure!(
            !range.is_empty() && range.end <= shape[dim],
            "slice {range:?} of dimension {dim} of shape {shape:?}"
        );
        Ok(self.map(|x| x.slice_dim(place, range)))
    }

    fn rotary(self, heads: usize, base: f64, first: usize) -> Result<Self> {
        let (step, shape) = (self.step, self.shape());
        let &[.., length, width] = &*shape else {
            refuse!("rotary needs (…, L, E), got shape {shape:?}");
        };
        ensure!(
            heads > 0 && width.is_multiple_of(heads.saturating_mul(2)),
            "rotary: {heads} heads do not divide a width of {width} into vectors of even size"
        );
        let is_positive = base > 0.0 && base.is_finite();
        ensure!(
            is_positive,
            "rotary: base is {base}; it must be a positive number"
        );
        let half = width / heads / 2;
        let table = |function: fn(f64) -> f64| {
            let at = |i: usize| {
                let (position, pair) = ((first + i / half) as f64, (i % half) as f64);
                function(position * base.powf(-pair / half as f64)) as f32
            };
            let table = (0..length * half).map(at).collect();
            step.made(table, [1, length, 1, 1, half])
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let outer = self.len() / (length * width);
        let x = self.to([outer, length, heads, 2, half]);
        let (a, b) = (x.clone().slice_dim(3, 0..1), x.slice_dim(3, 1..2));
        let first_half = a.clone() * cos.clone() - b.clone() * sin.clone();
        let rotated = Burn::cat(vec![first_half, b * cos + a * sin], 3);
        Ok(step.rows(rotated, &shape))
    }

    fn detach(self) -> Result<Self> {
        Ok(self.map(Burn::detach))
    }

    fn dropout(self, p: f64) -> Result<Self> {
        self.last("dropout")?;
        self.dropped(p, false)
    }

    fn dropout2d(self, p: f64) -> Result<Self> {
        self.image_sizes("dropout2d")?;
        self.dropped(p, true)
    }

    fn layer_norm(
        self,
        over: &[usize],
        affine: (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Self> {
        let (step, shape, n) = (self.step, self.shape(), over.iter().product());
        let fits = shape.ends_with(over);
        ensure!(fits, "layer_norm over {over:?} of shape {shape:?}");
        let (affine, rows) = (self.affine(affine, n)?, self.len() / n);
        let y = normalised(self.to([rows, 1, n]), eps, true);
        Ok(step.rows(scaled(y, affine, [1, 1, n]), &shape))
    }

    fn rms_norm(self, weight: Option<ParamId>, eps: f64) -> Result<Self> {
        let (step, shape, n) = (self.step, self.shape(), self.last("rms_norm")?);
        let (affine, rows) = (self.affine((weight, None), n)?, self.len() / n);
        let y = normalised(self.to([rows, 1, n]), eps, false);
        Ok(step.rows(scaled(y, affine, [1, 1, n]), &shape))
    }

    fn group_norm(
        self,
        groups: usize,
        affine: (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Self> {
        let (shape, c) = (self.shape(), self.last("group_norm")?);
        ensure!(
            shape.len() >= 2 && groups > 0 && c.is_multiple_of(groups),
            "group_norm: {groups} groups do not divide the channels of shape {shape:?}"
        );
        let affine = self.affine(affine, c)?;
        Ok(self.on_channels(shape[0], |x| {
            let [n, c, pixels] = x.dims();
            let y = normalised(x.reshape([n, groups, c / groups * pixels]), eps, true);
            scaled(y.reshape([n, c, pixels]), affine, [1, c, 1])
        }))
    }

    fn batch_norm(
        self,
        options: &BatchNormOptions,
        residual: Option<Self>,
        act: Act,
    ) -> Result<Self> {
        let (step, shape, c) = (self.step, self.shape(), self.last("batch_norm")?);
        let (weight, bias) = self.affine((options.weight, options.bias), c)?;
        let weight = weight.unwrap_or_else(|| step.made(vec![1.0; c], [c]));
        let bias = bias.unwrap_or_else(|| step.made(vec![0.0; c], [c]));
        let running = options
            .running
            .map(|r| [(r.mean, c), (r.var, c), (r.batches, 1)]);
        for (id, len) in running.into_iter().flatten() {
            let info = step.run.step.params().buffer_info(id)?;
            let (name, own) = (&info.name, info.len);
            ensure!(
                own == len,
                "batch_norm: {name} has {own} values for {c} channels"
            );
        }
        let other = residual.as_ref().map_or_else(|| shape.clone(), Self::shape);
        ensure!(
            other == shape,
            "batch_norm: residual of shape {other:?} for {shape:?}"
        );
        let (rows, learns) = (self.len() / c, self.is_training());
        ensure!(
            !learns || rows > 1,
            "batch_norm: expected more than one value per channel when training, got shape {shape:?}; use larger batches, or fewer micro-batches"
        );
        let y = self.on_channels(rows, |x| match options.running {
            Some(running) if !learns => {
                let (mean, var) = (step.buffer(running.mean), step.buffer(running.var));
                module::batch_norm(x, weight, bias, mean, var, options.eps)
            }
            running => {
                let made = module::batch_norm_train(x, weight, bias, options.eps);
                step.run
                    .batches
                    .borrow_mut()
                    .extend(running.map(|running| Batch {
                        running,
                        momentum: options.momentum,
                        rows,
                        mean: made.mean,
                        var: made.variance,
                    }));
                made.output
            }
        });
        match residual {
            Some(residual) => y.add(residual)?.clipped(act),
            None => y.clipped(act),
        }
    }

    fn conv1d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Self> {
        let [n, l, c] = *self.shape() else {
            refuse!(
                "conv1d needs sequences (N, L, C), got shape {:?}",
                self.shape()
            );
        };
        let y = self.reshape(&[n, 1, l, c])?;
        let y = y.conv2d(weight, bias, options.of_row(), act)?;
        let shape = y.shape();
        y.reshape(&[n, shape[2], shape[3]])
    }

    fn conv2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        o: Conv2dOptions,
        act: Act,
    ) -> Result<Self> {
        let (step, [_, h, w, c]) = (self.step, self.image_sizes("a convolution")?);
        let info = step.run.step.params().info(weight)?;
        let fits = |kernel: &[usize; 4]| Self::fits(o, *kernel, [h, w], c);
        let Some(kernel) = kernel(info).filter(fits) else {
            refuse!(
                "convolution {} of shape {:?}: {o} and {} groups do not fit images of {h} x {w} x {c}",
                info.name,
                info.shape,
                o.groups
            );
        };
        let bias = step.vector(bias, (kernel[0], "outputs"))?;
        let weight = step.leaf(weight)?.reshape(kernel);
        let options = ConvOptions::new(o.stride, o.padding, o.dilation, o.groups);
        let y = self.on_planes(|x| module::conv2d(x, weight, bias, options));
        y.clipped(act)
    }

    fn conv_transpose2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        o: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Self> {
        let (step, [_, h, w, c]) = (self.step, self.image_sizes("a transposed convolution")?);
        let info = step.run.step.params().info(weight)?;
        let size = |d: usize| o.transposed_size(d, [h, w][d], extra[d]);
        let found = kernel(info).filter(|_| info.layout == Layout::Conv);
        let fits = |kernel: &[usize; 4]| {
            let (out, sizes) = (kernel[1].checked_mul(o.groups), size(0).zip(size(1)));
            let (Some(out), Some((h, w))) = (out, sizes) else {
                return false;
            };
            out > 0 && kernel[0] == c && Self::fits(o, *kernel, [h, w], out)
        };
        let Some(kernel) = found.filter(fits) else {
            refuse!(
                "transposed convolution {} of shape {:?}: {o}, {} groups and {extra:?} more rows and columns do not fit images of {h} x {w} x {c}",
                info.name,
                info.shape,
                o.groups
            );
        };
        let bias = step.vector(bias, (kernel[1] * o.groups, "outputs"))?;
        let weight = step.leaf(weight)?.reshape(kernel);
        let options = ConvTransposeOptions::new(o.stride, o.padding, extra, o.dilation, o.groups);
        Ok(self.on_planes(|x| module::conv_transpose2d(x, weight, bias, options)))
    }

    fn max_pool2d(self, options: impl Into<MaxPool2dOptions>) -> Result<Self> {
        let (o, [_, h, w, _]) = (options.into(), self.image_sizes("max_pool2d")?);
        let fits = o.out_size(0, h).is_some() && o.out_size(1, w).is_some();
        ensure!(fits, "max_pool2d: {o:?} does not fit images of {h} x {w}");
        let options = MaxPoolOptions::new(o.kernel)
            .with_stride(o.stride)
            .with_padding(o.padding)
            .with_dilation(o.dilation)
            .with_ceil_mode(o.ceil);
        Ok(self.on_planes(|x| module::max_pool2d(x, options)))
    }

    fn avg_pool2d(self, options: impl Into<AvgPool2dOptions>) -> Result<Self> {
        let (o, [_, h, w, _]) = (options.into(), self.image_sizes("avg_pool2d")?);
        let fits = o.out_size(h).is_some() && o.out_size(w).is_some();
        ensure!(fits, "avg_pool2d: {o:?} does not fit images of {h} x {w}");
        let options = AvgPoolOptions::new([o.kernel; 2])
            .with_stride([o.stride; 2])
            .with_padding([o.padding; 2])
            .with_count_include_pad(o.counted)
            .with_ceil_mode(o.ceil);
        Ok(self.on_planes(|x| module::avg_pool2d(x, options)))
    }

    fn adaptive_avg_pool2d(self, height: usize, width: usize) -> Result<Self> {
        self.image_sizes("adaptive_avg_pool2d")?;
        let to = [height, width];
        ensure!(
            !to.contains(&0),
            "adaptive_avg_pool2d: cannot make {height} x {width}"
        );
        Ok(self.on_planes(|x| module::adaptive_avg_pool2d(x, to)))
    }

    fn adaptive_max_pool2d(self, height: usize, width: usize) -> Result<Self> {
        let ([_, h, w, _], to) = (self.image_sizes("adaptive_max_pool2d")?, [height, width]);
        ensure!(
            !to.contains(&0),
            "adaptive_max_pool2d: cannot make {height} x {width}"
        );
        // Columns first: then the first maximum in row-major order takes the gradient.
        Ok(self.on_planes(|x| Self::windows(Self::windows(x, 3, w, width), 2, h, height)))
    }

    fn global_avg_pool(self) -> Result<Self> {
        self.image_sizes("global_avg_pool")?;
        self.mean(&[1, 2], false)
    }
}
