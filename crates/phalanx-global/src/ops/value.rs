//! The operations as methods of [`Value`].

use std::ops::Range;
use std::rc::Rc;

use phalanx_nn::layers::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use phalanx_nn::{ParamId, Result, Tensor, Value};

use super::max::MaxOver;
use super::{along, same};
use crate::error::refuse;
use crate::layout::{Cuts, Layout};
use crate::rules::Rule;
use crate::sbp::Sbp;
use crate::tensor::Global;

/// The axes of a tensor whose elements another shape takes from the same run of memory: from which
/// axes to which, outermost first. Sizes of 1 belong to none.
fn groups(from: &[usize], to: &[usize]) -> Vec<(Vec<usize>, Vec<usize>)> {
    let axes = |s: &[usize]| (0..s.len()).filter(|i| s[*i] != 1).collect::<Vec<_>>();
    let (mut left, mut right) = (
        axes(from).into_iter().peekable(),
        axes(to).into_iter().peekable(),
    );
    let mut all = Vec::new();
    while left.peek().is_some() && right.peek().is_some() {
        let (mut a, mut b, mut na, mut nb) = (Vec::new(), Vec::new(), 1, 1);
        while na != nb || a.is_empty() {
            let next = if na <= nb { left.next() } else { right.next() };
            match next {
                Some(i) if na <= nb => {
                    na *= from[i];
                    a.push(i);
                }
                Some(i) => {
                    nb *= to[i];
                    b.push(i);
                }
                None => return all,
            }
        }
        all.push((a, b));
    }
    all
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Rules of an operation on a tensor and two weights that treats its rows, over the first `axes` dimensions, one by one.
fn rows_split(axes: usize) -> Vec<Rule> {
    let split = |axis| Rule::split(axis, &[Some(axis), None, None], Sbp::Split(axis));
    let rules = (0..axes).map(split);
    std::iter::once(Rule::whole(3)).chain(rules).collect()
}

impl<'s> Value<'s> for Global<'s> {
    fn share(&self) -> Self {
        Global::share(self)
    }

    fn shape(&self) -> Vec<usize> {
        self.dims().to_vec()
    }

    fn is_training(&self) -> bool {
        self.local().is_training()
    }

    fn constant(&self, data: &[f32], shape: &[usize]) -> Result<Self> {
        let whole = vec![Sbp::Broadcast; self.mesh().len()];
        self.step().input(data, shape, &whole)
    }

    fn concat(values: Vec<Self>, dim: usize) -> Result<Self> {
        let Some(first) = values.first() else {
            return refuse("concat of no tensors");
        };
        let mut shape = first.dims().to_vec();
        let mut total = 0;
        for value in &values {
            let own = value.dims();
            let fits = dim < shape.len()
                && own.len() == shape.len()
                && (0..own.len()).all(|i| i == dim || own[i] == shape[i])
                && std::ptr::eq(value.step(), first.step());
            if !fits {
                return refuse(format!(
                    "concat along dimension {dim}: {own:?} does not fit {shape:?}, or belongs to another step"
                ));
            }
            total += own[dim];
        }
        let n = values.len();
        let mut rules = vec![Rule::whole(n)];
        for axis in (0..shape.len()).filter(|axis| *axis != dim) {
            rules.push(Rule::split(axis, &vec![Some(axis); n], Sbp::Split(axis)));
        }
        let others: Vec<usize> = (1..n).collect();
        rules.push(Rule::partial(n, 0, &others));
        shape[dim] = total;
        let layouts: Vec<&Layout> = values.iter().map(Global::layout).collect();
        let decision = first.decide("concat", &layouts, &rules, &shape)?;
        let made = decision.result(first.mesh(), &shape)?;
        let step = first.step();
        let mut parts = Vec::with_capacity(n);
        for (i, (value, takes)) in values.into_iter().zip(&decision.takes).enumerate() {
            let value = value.converted(takes, "concat", || format!("operand {i}"))?;
            parts.push(value.to_local());
        }
        let local = step.part(parts, |parts| step.local().concat(parts, dim))?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    fn recompute<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        let (step, layout) = (self.step(), Rc::clone(self.shared_layout()));
        self.to_local()
            .recompute(|local| part(Global::new(step, local, layout)))
    }

    fn evaluate<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        let (step, layout) = (self.step(), Rc::clone(self.shared_layout()));
        self.to_local()
            .evaluate(|local| part(Global::new(step, local, layout)))
    }

    fn activation(self, function: Activation) -> Result<Self> {
        self.each("activation", false, |x| x.activation(function))
    }

    fn add(self, other: Self) -> Result<Self> {
        let rule = Rule::partial(2, 0, &[1]);
        self.binary(other, "add", &[rule], |a, b| a.add(b))
    }

    fn sub(self, other: Self) -> Result<Self> {
        let rule = Rule::partial(2, 0, &[1]);
        self.binary(other, "sub", &[rule], |a, b| a.sub(b))
    }

    fn mul(self, other: Self) -> Result<Self> {
        let rules = [Rule::partial(2, 0, &[]), Rule::partial(2, 1, &[])];
        self.binary(other, "mul", &rules, |a, b| a.mul(b))
    }

    fn div(self, other: Self) -> Result<Self> {
        self.binary(other, "div", &[Rule::partial(2, 0, &[])], |a, b| a.div(b))
    }

    fn scale(self, factor: f32) -> Result<Self> {
        self.each("scale", true, |x| x.scale(factor))
    }

    fn softmax(self, dim: usize) -> Result<Self> {
        self.softmaxed("softmax", dim, |x| x.softmax(dim))
    }

    fn log_softmax_dim(self, dim: usize) -> Result<Self> {
        self.softmaxed("log_softmax", dim, |x| x.log_softmax_dim(dim))
    }

    fn cumsum(self, dim: usize) -> Result<Self> {
        self.softmaxed("cumsum", dim, |x| x.cumsum(dim))
    }

    fn rotary(self, heads: usize, base: f64, first: usize) -> Result<Self> {
        let shape = self.dims().to_vec();
        // A part of the positions or of a vector would be turned by other angles.
        let rules = along(shape.len(), |axis| axis + 2 < shape.len());
        self.alone("rotary", &rules, &shape, &same, |x, _, _| {
            x.rotary(heads, base, first)
        })
    }

    fn detach(self) -> Result<Self> {
        self.each("detach", true, Tensor::detach)
    }

    fn matmul(self, weight: ParamId) -> Result<Self> {
        let what = ("matmul", weight, None);
        self.times(what, (0, 1), Act::None, |x, w, _, _| {
            x.matmul_with(w, None, Act::None)
        })
    }

    fn linear(self, weight: ParamId, bias: Option<ParamId>, act: Act) -> Result<Self> {
        let what = ("linear", weight, bias);
        self.times(what, (1, 0), act, |x, w, b, act| x.linear_with(w, b, act))
    }

    fn bmm(self, other: Self) -> Result<Self> {
        self.multiplied(other, false)
    }

    fn bmm_transposed(self, other: Self) -> Result<Self> {
        self.multiplied(other, true)
    }

    fn reshape(self, shape: &[usize]) -> Result<Self> {
        let from = self.dims().to_vec();
        if from.iter().product::<usize>() != shape.iter().product::<usize>() {
            return refuse(format!("cannot reshape {from:?} to {shape:?}"));
        }
        let mut rules = vec![Rule::whole(1)];
        // What one range of the first axis becomes: factors by axis of the result.
        let mut factors = vec![(1, 1); shape.len()];
        let same_shape = from == shape;
        let found = match from.contains(&0) {
            // Nothing says which axes belong together.
            true if same_shape => (0..from.len()).map(|i| (vec![i], vec![i])).collect(),
            true => Vec::new(),
            false => groups(&from, shape),
        };
        for (a, b) in found {
            let (Some(&first), Some(&to)) = (a.first(), b.first()) else {
                continue;
            };
            let inner =
                |s: &[usize], axes: &[usize]| axes[1..].iter().map(|i| s[*i]).product::<usize>();
            let (below, below_to) = (inner(&from, &a), inner(shape, &b));
            factors[to] = (below, below_to);
            // Ranges must begin where both shapes have an index of the outer axis.
            let unit = below_to / gcd(below, below_to);
            // Even ranges, of other mesh dimensions too, need not.
            let cuts = match self.layout().cuts(first) {
                _ if unit == 1 => None,
                None => continue,
                Some(own) => Some(own.iter().map(|c| c / unit * unit).collect()),
            };
            rules.push(Rule::split(first, &[Some(first)], Sbp::Split(to)).cut(cuts));
        }
        rules.push(Rule::partial(1, 0, &[]));
        let change = |axis: usize, cuts: Cuts| -> Cuts {
            let (below, below_to) = factors[axis];
            cuts.iter().map(|c| c * below / below_to).collect()
        };
        self.alone("reshape", &rules, shape, &change, |x, own, _| {
            x.reshape(own)
        })
    }

    fn flatten(self) -> Result<Self> {
        let Ok([n, h, w, c]) = <[usize; 4]>::try_from(self.dims()) else {
            let Some((&n, rest)) = self.dims().split_first() else {
                return refuse("flatten of a tensor without dimensions");
            };
            let shape = [n, rest.iter().product()];
            return self.reshape(&shape);
        };
        let rules = [
            Rule::whole(1),
            Rule::split(0, &[Some(0)], Sbp::Split(0)),
            // Channels come first in PyTorch's order.
            Rule::split(3, &[Some(3)], Sbp::Split(1)),
            Rule::partial(1, 0, &[]),
        ];
        let change = |axis: usize, cuts: Cuts| -> Cuts {
            let factor = if axis == 1 { h * w } else { 1 };
            cuts.iter().map(|c| c * factor).collect()
        };
        self.alone("flatten", &rules, &[n, h * w * c], &change, |x, _, _| {
            x.flatten()
        })
    }

    fn permute(self, order: &[usize]) -> Result<Self> {
        let from = self.dims();
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..from.len()) {
            return refuse(format!("permute {order:?} of shape {from:?}"));
        }
        let shape: Vec<usize> = order.iter().map(|o| from[*o]).collect();
        let mut rules = vec![Rule::whole(1)];
        for (to, &axis) in order.iter().enumerate() {
            rules.push(Rule::split(axis, &[Some(axis)], Sbp::Split(to)));
        }
        rules.push(Rule::partial(1, 0, &[]));
        self.alone("permute", &rules, &shape, &same, |x, _, _| x.permute(order))
    }

    fn sum(self, dims: &[usize], keep: bool) -> Result<Self> {
        self.reduction("sum", dims, keep, Sbp::partial_sum(), |x, _, _, _| {
            x.sum(dims, keep)
        })
    }

    fn mean(self, dims: &[usize], keep: bool) -> Result<Self> {
        self.reduction(
            "mean",
            dims,
            keep,
            Sbp::partial_sum(),
            |x, _, count, cut| {
                match cut.is_empty() {
                    true => x.mean(dims, keep),
                    // Of the whole, not of the part.
                    false => x.sum(dims, keep)?.scale(1.0 / count),
                }
            },
        )
    }

    fn max(self, dims: &[usize], keep: bool) -> Result<Self> {
        let (over, _) = self.reduced("max", dims, keep)?;
        if (0..over.len()).any(|i| over[i] && self.dims()[i] == 0) {
            return refuse(format!(
                "max over dimensions {dims:?} of shape {:?}, which hold nothing",
                self.dims()
            ));
        }
        let (placement, step) = (self.step().placement().clone(), self.step());
        self.reduction("max", dims, keep, Sbp::Broadcast, |x, own, _, cut| {
            if cut.is_empty() {
                return x.max(dims, keep);
            }
            let op = MaxOver {
                placement,
                mesh_dims: cut.to_vec(),
                shape: x.shape(),
                over,
            };
            step.local().custom(Box::new(op), vec![x], own)
        })
    }

    fn slice(self, dim: usize, range: Range<usize>) -> Result<Self> {
        let mut shape = self.dims().to_vec();
        if dim >= shape.len() || range.start > range.end || range.end > shape[dim] {
            return refuse(format!(
                "slice {range:?} of dimension {dim} of shape {shape:?}"
            ));
        }
        shape[dim] = range.len();
        let mut rules = along(shape.len(), |_| true);
        rules.push(Rule::partial(1, 0, &[]));
        let rank = self.rank();
        let clipped = |c: usize| c.clamp(range.start, range.end) - range.start;
        let change = |axis: usize, cuts: Cuts| -> Cuts {
            match axis == dim {
                true => cuts.iter().map(|c| clipped(*c)).collect(),
                false => cuts,
            }
        };
        self.alone("slice", &rules, &shape, &change, |x, own, decision| {
            let block = &decision.takes[0].block(rank)[dim];
            let first = range.start.clamp(block.start, block.end) - block.start;
            x.slice(dim, first..first + own[dim])
        })
    }

    fn dropout(self, p: f64) -> Result<Self> {
        self.dropped("dropout", p, false)
    }

    fn dropout2d(self, p: f64) -> Result<Self> {
        self.image("dropout2d")?;
        self.dropped("dropout2d", p, true)
    }

    fn layer_norm(
        self,
        shape: &[usize],
        (weight, bias): (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Self> {
        let dims = self.dims().to_vec();
        if !dims.ends_with(shape) {
            return refuse(format!("layer_norm over {shape:?} of shape {dims:?}"));
        }
        let rules = rows_split(dims.len() - shape.len());
        self.with_weights(
            "layer_norm",
            [weight, bias],
            &rules,
            &dims,
            |x, [w, b], _| x.layer_norm_with(shape, (w, b), eps),
        )
    }

    fn rms_norm(self, weight: Option<ParamId>, eps: f64) -> Result<Self> {
        let dims = self.dims().to_vec();
        let rules = rows_split(dims.len().saturating_sub(1));
        self.with_weights("rms_norm", [weight, None], &rules, &dims, |x, [w, _], _| {
            x.rms_norm_with(w, eps)
        })
    }

    fn group_norm(
        self,
        groups: usize,
        (weight, bias): (Option<ParamId>, Option<ParamId>),
        eps: f64,
    ) -> Result<Self> {
        let dims = self.dims().to_vec();
        let rules = [
            Rule::whole(3),
            Rule::split(0, &[Some(0), None, None], Sbp::Split(0)),
        ];
        self.with_weights(
            "group_norm",
            [weight, bias],
            &rules,
            &dims,
            |x, [w, b], _| x.group_norm_with(groups, (w, b), eps),
        )
    }

    fn batch_norm(
        self,
        options: &BatchNormOptions,
        residual: Option<Self>,
        act: Act,
    ) -> Result<Self> {
        let dims = self.dims().to_vec();
        // A residual lies as the tensor does.
        let tensors = 1 + usize::from(residual.is_some());
        let mut rules = vec![Rule::whole(tensors + 2)];
        for axis in 0..dims.len().saturating_sub(1) {
            let mut takes = vec![Some(axis); tensors];
            takes.resize(tensors + 2, None);
            rules.push(Rule::split(axis, &takes, Sbp::Split(axis)));
        }
        let (step, placement) = (self.step(), self.step().placement());
        let ids = [options.weight, options.bias];
        self.with_other_and_weights(
            "batch_norm",
            residual,
            ids,
            &rules,
            &dims,
            |x, residual, [w, b], decision| {
                if step.local().training() {
                    let own = decision.takes[0].sbp();
                    let split = (0..own.len()).filter(|d| matches!(own[*d], Sbp::Split(_)));
                    step.joined().set(placement, split.collect())?;
                }
                x.batch_norm_with(options, (w, b), residual, act)
            },
        )
    }

    fn conv1d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Self> {
        if self.dims().len() != 3 {
            return refuse(format!(
                "conv1d needs (N, L, C), got shape {:?}",
                self.dims()
            ));
        }
        let what = ("conv1d", weight, bias);
        self.convolved(what, Some(1), act, |x, w, b, act| {
            x.conv1d_with(w, b, options, act)
        })
    }

    fn conv2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Self> {
        self.image("conv2d")?;
        let what = ("conv2d", weight, bias);
        self.convolved(what, Some(2), act, |x, w, b, act| {
            x.conv2d_with(w, b, options, act)
        })
    }

    fn conv_transpose2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Self> {
        self.image("conv_transpose2d")?;
        let what = ("conv_transpose2d", weight, bias);
        self.convolved(what, None, Act::None, |x, w, b, _| {
            x.conv_transpose2d_with(w, b, options, extra)
        })
    }

    fn max_pool2d(self, options: impl Into<MaxPool2dOptions>) -> Result<Self> {
        let options = options.into();
        self.pooled("max_pool2d", false, |x| x.max_pool2d(options))
    }

    fn avg_pool2d(self, options: impl Into<AvgPool2dOptions>) -> Result<Self> {
        let options = options.into();
        self.pooled("avg_pool2d", true, |x| x.avg_pool2d(options))
    }

    fn adaptive_avg_pool2d(self, height: usize, width: usize) -> Result<Self> {
        self.pooled("adaptive_avg_pool2d", true, |x| {
            x.adaptive_avg_pool2d(height, width)
        })
    }

    fn adaptive_max_pool2d(self, height: usize, width: usize) -> Result<Self> {
        self.pooled("adaptive_max_pool2d", false, |x| {
            x.adaptive_max_pool2d(height, width)
        })
    }

    fn global_avg_pool(self) -> Result<Self> {
        self.pooled("global_avg_pool", true, Tensor::global_avg_pool)
    }
}
