//! The operations of global tensors: the rules of each, and what runs on a part.

use std::ops::Range;
use std::rc::Rc;

use phalanx_comm::ReduceOp;
use phalanx_nn::layers::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use phalanx_nn::{CustomOp, ParamId, Result, Tensor, Value, ValueStep, Weight};

use crate::error::Error;
use crate::indices::Indices;
use crate::layout::{Cuts, Layout};
use crate::placement::Placement;
use crate::rules::{self, Decision, Rule};
use crate::sbp::{Fold, Sbp};
use crate::step::GlobalStep;
use crate::tensor::{Global, is_gathered, weight};

/// Names of axes that are not one of the first operand's.
const OUTPUTS: usize = 100;
const INPUTS: usize = 101;

type Change<'f> = &'f dyn Fn(usize, Cuts) -> Cuts;

fn same(_: usize, cuts: Cuts) -> Cuts {
    cuts
}

impl<'s> Global<'s> {
    fn mesh(&self) -> &[usize] {
        self.layout().mesh()
    }

    fn rank(&self) -> usize {
        self.step().placement().rank()
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.layout().shape()
    }

    /// Which layouts the operands get. `shape` is the result's.
    pub(crate) fn decide(
        &self,
        operation: &str,
        operands: &[&Layout],
        rules: &[Rule],
        shape: &[usize],
    ) -> Result<Decision> {
        let (step, plans) = (self.step(), self.step().params().plans());
        let automatic = step.is_automatic();
        Ok(rules::decide(
            operation, operands, rules, shape, automatic, plans,
        )?)
    }

    /// An operation on this tensor alone. `run` gets this rank's part and the shape of its part of the
    /// result.
    fn alone(
        self,
        operation: &str,
        rules: &[Rule],
        shape: &[usize],
        change: Change<'_>,
        run: impl FnOnce(Tensor<'s>, &[usize], &Decision) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let decision = self.decide(operation, &[self.layout()], rules, shape)?;
        let x = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let made = decision.result_with(x.mesh(), shape, change)?;
        let (step, own) = (x.step(), made.shape_of(x.rank()));
        let local = run(x.into_local(), &own, &decision)?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    /// A function of each element.
    fn each(
        self,
        operation: &str,
        is_linear: bool,
        run: impl FnOnce(Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let shape = self.dims().to_vec();
        let mut rules = along(shape.len(), |_| true);
        if is_linear {
            rules.push(Rule::partial(1, 0, &[]));
        }
        self.alone(operation, &rules, &shape, &same, |x, _, _| run(x))
    }

    fn with_other(
        self,
        other: Self,
        operation: &str,
        rules: &[Rule],
        shape: &[usize],
        run: impl FnOnce(Tensor<'s>, Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        if !std::ptr::eq(self.step(), other.step()) {
            return Err(Error::usage(format!(
                "{operation}: the tensors belong to different steps"
            ))
            .into());
        }
        let operands = [self.layout(), other.layout()];
        let decision = self.decide(operation, &operands, rules, shape)?;
        let a = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let b = other.converted(&decision.takes[1], operation, || "operand 1".to_owned())?;
        let made = decision.result(a.mesh(), shape)?;
        let step = a.step();
        let local = run(a.into_local(), b.into_local())?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    fn binary(
        self,
        other: Self,
        operation: &str,
        rules_of_sums: &[Rule],
        run: impl FnOnce(Tensor<'s>, Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let (a, b) = (self.dims(), other.dims());
        let rank = a.len().max(b.len());
        let size = |s: &[usize], axis: usize| (axis + s.len()).checked_sub(rank).map(|i| s[i]);
        let mut shape = Vec::with_capacity(rank);
        let mut rules = vec![Rule::whole(2)];
        for axis in 0..rank {
            let (na, nb) = (size(a, axis), size(b, axis));
            let n = match (na.unwrap_or(1), nb.unwrap_or(1)) {
                (1, n) | (n, 1) => n,
                (n, m) if n == m => n,
                _ => {
                    return Err(Error::usage(format!(
                        "{operation}: shapes {a:?} and {b:?} differ and cannot be stretched to each other"
                    ))
                    .into());
                }
            };
            shape.push(n);
            // A size of 1 that repeats stays whole.
            let own = |s: &[usize], m: Option<usize>| (m == Some(n)).then(|| axis + s.len() - rank);
            let takes = [own(a, na), own(b, nb)];
            rules.push(Rule::split(axis, &takes, Sbp::Split(axis)));
        }
        rules.extend_from_slice(rules_of_sums);
        self.with_other(other, operation, &rules, &shape, run)
    }

    /// An operation with parameters. `rules` are for this tensor and all of `ids`, present or
    /// not.
    fn with_weights<const N: usize>(
        self,
        operation: &str,
        ids: [Option<ParamId>; N],
        rules: &[Rule],
        shape: &[usize],
        run: impl FnOnce(Tensor<'s>, [Option<Weight<'s>>; N], &Decision) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let run =
            |x, _: Option<Tensor<'s>>, weights, decision: &Decision| run(x, weights, decision);
        self.with_other_and_weights(operation, None, ids, rules, shape, run)
    }

    /// The same with a second tensor, if there is one, which `rules` have after this one.
    fn with_other_and_weights<const N: usize>(
        self,
        operation: &str,
        other: Option<Self>,
        ids: [Option<ParamId>; N],
        rules: &[Rule],
        shape: &[usize],
        run: impl FnOnce(
            Tensor<'s>,
            Option<Tensor<'s>>,
            [Option<Weight<'s>>; N],
            &Decision,
        ) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let step = self.step();
        let first = 1 + usize::from(other.is_some());
        let mut layouts = Vec::new();
        for id in ids.into_iter().flatten() {
            layouts.push(step.params().used_layout(id)?);
        }
        let is_there = |i: usize| i < first || ids[i - first].is_some();
        let mut kept: Vec<Rule> = Vec::new();
        for rule in rules {
            let mut rule = rule.clone();
            let mut i = 0;
            rule.takes.retain(|_| {
                i += 1;
                is_there(i - 1)
            });
            kept.push(rule);
        }
        let mut operands = vec![self.layout()];
        operands.extend(other.as_ref().map(Global::layout));
        operands.extend(layouts.iter().map(|l| &***l));
        let decision = self.decide(operation, &operands, &kept, shape)?;
        let other = match other {
            None => None,
            Some(o) => Some(o.converted(&decision.takes[1], operation, || "operand 1".to_owned())?),
        };
        let x = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let made = decision.result(x.mesh(), shape)?;
        let mut gathered = false;
        for (id, layout) in ids.into_iter().flatten().zip(&decision.takes[first..]) {
            gathered |= is_gathered(step, id, layout)?;
        }
        let all = |x: Tensor<'s>| {
            let mut layouts = decision.takes[first..].iter();
            let mut weights = [const { None }; N];
            for (to, id) in weights.iter_mut().zip(ids) {
                if let (Some(id), Some(layout)) = (id, id.and_then(|_| layouts.next())) {
                    *to = Some(weight(step, id, layout, operation)?);
                }
            }
            run(x, other.map(Global::into_local), weights, &decision)
        };
        // What was gathered is freed after its use, and gathered again in backward.
        let local = match gathered && step.local().training() {
            true => x.into_local().recompute(all)?,
            false => all(x.into_local())?,
        };
        Ok(Global::new(step, local, Rc::new(made)))
    }

    /// A product with a weight whose axes of inputs and outputs are these, over the last dimension or the
    /// channels of this tensor.
    fn product(
        self,
        (operation, weight, bias): (&str, ParamId, Option<ParamId>),
        (inputs, outputs): (Option<usize>, Option<usize>),
        outer: &[usize],
        shape: &[usize],
        act: Act,
        run: impl FnOnce(Tensor<'s>, Weight<'s>, Option<Weight<'s>>, Act) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let last = self.dims().len() - 1;
        let mut rules = vec![Rule::whole(3)];
        for &axis in outer {
            rules.push(Rule::split(
                axis,
                &[Some(axis), None, None],
                Sbp::Split(axis),
            ));
        }
        if let Some(outputs) = outputs {
            let takes = [None, Some(outputs), Some(0)];
            rules.push(Rule::split(OUTPUTS, &takes, Sbp::Split(last)));
        }
        if let Some(inputs) = inputs {
            let takes = [Some(last), Some(inputs), None];
            rules.push(Rule::split(INPUTS, &takes, Sbp::partial_sum()).adding(2));
        }
        rules.push(Rule::partial(3, 0, &[2]));
        let (step, rank) = (self.step(), self.rank());
        // A function must see whole sums.
        let mut after = Act::None;
        let made = self.with_weights(
            operation,
            [Some(weight), bias],
            &rules,
            shape,
            |x, [w, b], d| {
                // The engine has no convolutions of no channels, nor products of nothing in bf16. A
                // function that is fused saves its output, so that backward may gather the bias
                // again: with no rank, if one of them has nothing.
                let weights = &d.takes[1];
                let has_empty = weights.numel() > 0
                    && (0..weights.ranks()).any(|rank| weights.numel_of(rank) == 0);
                let apart = has_empty || d.makes.iter().any(|s| s.is_partial());
                if apart {
                    after = act;
                }
                let Some(w) = w else {
                    return Err(Error::usage(format!("{operation} needs a weight")).into());
                };
                if has_empty && weights.numel_of(rank) == 0 {
                    let own = d.result(d.takes[0].mesh(), shape)?.shape_of(rank);
                    let b = b.map(|b| tensor(step, b)).transpose()?;
                    // A product saves its weight: where that is gathered, backward gathers again.
                    let w = tensor(step, w)?;
                    let none = zeros_of(step, &own, vec![x, w.share().mul(w)?])?;
                    return match b {
                        Some(b) => none.add(b),
                        None => Ok(none),
                    };
                }
                run(x, w, b, if apart { Act::None } else { act })
            },
        )?;
        let made = made.summed(operation, weight)?;
        match after {
            Act::Relu => made.relu(),
            Act::Relu6 => made.relu6(),
            _ => Ok(made),
        }
    }

    /// A result of that weight, whole over the mesh dimensions that [`Parallel`](crate::Parallel) says.
    fn summed(self, operation: &str, weight: ParamId) -> Result<Self> {
        let dims = self.step().params().sums_of(weight);
        if dims.is_empty() {
            return Ok(self);
        }
        let mut sbp = self.layout().sbp().to_vec();
        for &dim in dims {
            if sbp[dim].is_partial() {
                sbp[dim] = Sbp::Broadcast;
            }
        }
        let layout = self.layout().with_sbp(&sbp)?;
        self.converted(&layout, operation, || "the result".to_owned())
    }

    fn pooled(
        self,
        operation: &str,
        is_linear: bool,
        shape: &[usize],
        run: impl FnOnce(Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let last = self.dims().len().saturating_sub(1);
        let out = shape.len() - 1;
        let mut rules = vec![Rule::whole(1)];
        rules.push(Rule::split(0, &[Some(0)], Sbp::Split(0)));
        rules.push(Rule::split(last, &[Some(last)], Sbp::Split(out)));
        if is_linear {
            rules.push(Rule::partial(1, 0, &[]));
        }
        self.alone(operation, &rules, shape, &same, |x, _, _| run(x))
    }

    fn image(&self, operation: &str) -> Result<[usize; 4]> {
        <[usize; 4]>::try_from(self.dims()).map_err(|_| {
            Error::usage(format!(
                "{operation} needs images (N, H, W, C), got shape {:?}",
                self.dims()
            ))
            .into()
        })
    }

    fn reduced(
        &self,
        operation: &str,
        dims: &[usize],
        keep: bool,
    ) -> Result<(Vec<bool>, Vec<usize>)> {
        let shape = self.dims();
        let mut over = vec![dims.is_empty(); shape.len()];
        for &d in dims {
            if d >= shape.len() || std::mem::replace(&mut over[d], true) {
                return Err(Error::usage(format!(
                    "{operation} over dimensions {dims:?} of shape {shape:?}: {d} is not there or named twice"
                ))
                .into());
            }
        }
        let to = (0..shape.len()).filter(|i| keep || !over[*i]);
        let to = to.map(|i| if over[i] { 1 } else { shape[i] }).collect();
        Ok((over, to))
    }

    fn reduction(
        self,
        operation: &'static str,
        dims: &[usize],
        keep: bool,
        of_split: Sbp,
        run: impl FnOnce(Tensor<'s>, &[usize], f32, &[usize]) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let (over, shape) = self.reduced(operation, dims, keep)?;
        let mut rules = vec![Rule::whole(1)];
        let mut place = 0;
        for (axis, over) in over.iter().enumerate() {
            let makes = if *over { of_split } else { Sbp::Split(place) };
            rules.push(Rule::split(axis, &[Some(axis)], makes));
            place += usize::from(keep || !over);
        }
        if of_split.is_partial() {
            rules.push(Rule::partial(1, 0, &[]));
        }
        let reduced = (0..over.len()).filter(|i| over[*i]);
        let count: usize = reduced.map(|i| self.dims()[i]).product();
        let cut = |d: &Decision| -> Vec<usize> {
            (0..d.takes[0].mesh().len())
                .filter(|m| matches!(d.takes[0].sbp()[*m], Sbp::Split(axis) if over[axis]))
                .collect()
        };
        self.alone(operation, &rules, &shape, &same, |x, own, decision| {
            run(x, own, count as f32, &cut(decision))
        })
    }

    fn dropped(self, operation: &str, p: f64, whole_channels: bool) -> Result<Self> {
        if !self.step().local().training() {
            // The engine checks p.
            return self.each(operation, true, |x| x.dropout(p));
        }
        let shape = self.dims().to_vec();
        let mut rules = along(shape.len(), |_| true);
        rules.push(Rule::partial(1, 0, &[]));
        let rank = self.rank();
        self.alone(operation, &rules, &shape, &same, |x, _, decision| {
            let block = decision.takes[0].block(rank);
            let start: Vec<usize> = block.iter().map(|r| r.start).collect();
            match whole_channels {
                true => x.dropout2d_block(p, &shape, &start),
                false => x.dropout_block(p, &shape, &start),
            }
        })
    }

    fn softmaxed(
        self,
        operation: &str,
        dim: usize,
        run: impl FnOnce(Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let shape = self.dims().to_vec();
        let rules = along(shape.len(), |axis| axis != dim);
        self.alone(operation, &rules, &shape, &same, |x, _, _| run(x))
    }

    fn multiplied(self, other: Self, transposed: bool) -> Result<Self> {
        let (a, b) = (self.dims(), other.dims());
        let rank = a.len();
        let (k, n) = match transposed {
            true => (rank.wrapping_sub(1), rank.wrapping_sub(2)),
            false => (rank.wrapping_sub(2), rank.wrapping_sub(1)),
        };
        let fits =
            rank >= 2 && b.len() == rank && a[..rank - 2] == b[..rank - 2] && a[rank - 1] == b[k];
        if !fits {
            return Err(Error::usage(format!(
                "bmm of shapes {a:?} and {b:?} (second transposed: {transposed}) does not fit"
            ))
            .into());
        }
        let mut shape = a.to_vec();
        shape[rank - 1] = b[n];
        let mut rules = vec![Rule::whole(2)];
        for axis in 0..rank - 2 {
            rules.push(Rule::split(
                axis,
                &[Some(axis), Some(axis)],
                Sbp::Split(axis),
            ));
        }
        rules.push(Rule::split(
            rank - 2,
            &[Some(rank - 2), None],
            Sbp::Split(rank - 2),
        ));
        rules.push(Rule::split(OUTPUTS, &[None, Some(n)], Sbp::Split(rank - 1)));
        rules.push(Rule::split(
            INPUTS,
            &[Some(rank - 1), Some(k)],
            Sbp::partial_sum(),
        ));
        rules.push(Rule::partial(2, 0, &[]));
        rules.push(Rule::partial(2, 1, &[]));
        self.with_other(other, "bmm", &rules, &shape, |a, b| match transposed {
            true => a.bmm_transposed(b),
            false => a.bmm(b),
        })
    }
}

/// Rules of an operation on one tensor that keeps its shape and may be split along some axes.
fn along(rank: usize, may: impl Fn(usize) -> bool) -> Vec<Rule> {
    let mut rules = vec![Rule::whole(1)];
    let axes = (0..rank).filter(|axis| may(*axis));
    rules.extend(axes.map(|axis| Rule::split(axis, &[Some(axis)], Sbp::Split(axis))));
    rules
}

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
            return Err(Error::usage("concat of no tensors").into());
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
                return Err(Error::usage(format!(
                    "concat along dimension {dim}: {own:?} does not fit {shape:?}, or belongs to another step"
                ))
                .into());
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
            parts.push(value.into_local());
        }
        let local = step.local().concat(parts, dim)?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    fn recompute<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        let (step, layout) = (self.step(), Rc::clone(self.shared_layout()));
        self.into_local()
            .recompute(|local| part(Global::new(step, local, layout)))
    }

    fn evaluate<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        let (step, layout) = (self.step(), Rc::clone(self.shared_layout()));
        self.into_local()
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
        let w = Rc::clone(self.step().params().used_layout(weight)?);
        let (outer, shape) = self.times("matmul", w.shape(), (0, 1))?;
        let axes = (Some(0), Some(1));
        self.product(
            ("matmul", weight, None),
            axes,
            &outer,
            &shape,
            Act::None,
            |x, w, _, _| x.matmul_with(w, None, Act::None),
        )
    }

    fn linear(self, weight: ParamId, bias: Option<ParamId>, act: Act) -> Result<Self> {
        let w = Rc::clone(self.step().params().used_layout(weight)?);
        let (outer, shape) = self.times("linear", w.shape(), (1, 0))?;
        let axes = (Some(1), Some(0));
        self.product(
            ("linear", weight, bias),
            axes,
            &outer,
            &shape,
            act,
            |x, w, b, act| x.linear_with(w, b, act),
        )
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
            return Err(Error::usage(format!("cannot reshape {from:?} to {shape:?}")).into());
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
                return Err(Error::usage("flatten of a tensor without dimensions").into());
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
            return Err(Error::usage(format!("permute {order:?} of shape {from:?}")).into());
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
            return Err(Error::usage(format!(
                "max over dimensions {dims:?} of shape {:?}, which hold nothing",
                self.dims()
            ))
            .into());
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
            return Err(Error::usage(format!(
                "slice {range:?} of dimension {dim} of shape {shape:?}"
            ))
            .into());
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
            return Err(
                Error::usage(format!("layer_norm over {shape:?} of shape {dims:?}")).into(),
            );
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
        let [n, l, c] = <[usize; 3]>::try_from(self.dims()).map_err(|_| {
            Error::usage(format!(
                "conv1d needs (N, L, C), got shape {:?}",
                self.dims()
            ))
        })?;
        let probe = self.probe(
            &[0, l, c],
            |x, w| x.conv1d_with(w, None, options, Act::None),
            weight,
        )?;
        let shape = [n, probe[1], probe[2]];
        let axes = in_and_out(1, self.step().params().used_layout(weight)?.shape(), c);
        self.product(
            ("conv1d", weight, bias),
            axes,
            &[0],
            &shape,
            act,
            |x, w, b, act| x.conv1d_with(w, b, options, act),
        )
    }

    fn conv2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        act: Act,
    ) -> Result<Self> {
        let [n, h, w, c] = self.image("conv2d")?;
        let probe = self.probe(
            &[0, h, w, c],
            |x, w| x.conv2d_with(w, None, options, Act::None),
            weight,
        )?;
        let shape = [n, probe[1], probe[2], probe[3]];
        let axes = in_and_out(2, self.step().params().used_layout(weight)?.shape(), c);
        self.product(
            ("conv2d", weight, bias),
            axes,
            &[0],
            &shape,
            act,
            |x, w, b, act| x.conv2d_with(w, b, options, act),
        )
    }

    fn conv_transpose2d(
        self,
        weight: ParamId,
        bias: Option<ParamId>,
        options: Conv2dOptions,
        extra: [usize; 2],
    ) -> Result<Self> {
        let [n, h, w, c] = self.image("conv_transpose2d")?;
        let probe = self.probe(
            &[0, h, w, c],
            |x, w| x.conv_transpose2d_with(w, None, options, extra),
            weight,
        )?;
        let shape = [n, probe[1], probe[2], probe[3]];
        self.product(
            ("conv_transpose2d", weight, bias),
            (None, None),
            &[0],
            &shape,
            Act::None,
            |x, w, b, _| x.conv_transpose2d_with(w, b, options, extra),
        )
    }

    fn max_pool2d(self, options: impl Into<MaxPool2dOptions>) -> Result<Self> {
        let options = options.into();
        let [n, h, w, c] = self.image("max_pool2d")?;
        let to = self.empty(&[0, h, w, 1])?.max_pool2d(options)?.shape();
        self.pooled("max_pool2d", false, &[n, to[1], to[2], c], |x| {
            x.max_pool2d(options)
        })
    }

    fn avg_pool2d(self, options: impl Into<AvgPool2dOptions>) -> Result<Self> {
        let options = options.into();
        let [n, h, w, c] = self.image("avg_pool2d")?;
        let to = self.empty(&[0, h, w, 1])?.avg_pool2d(options)?.shape();
        self.pooled("avg_pool2d", true, &[n, to[1], to[2], c], |x| {
            x.avg_pool2d(options)
        })
    }

    fn adaptive_avg_pool2d(self, height: usize, width: usize) -> Result<Self> {
        let [n, _, _, c] = self.image("adaptive_avg_pool2d")?;
        let shape = [n, height, width, c];
        self.pooled("adaptive_avg_pool2d", true, &shape, |x| {
            x.adaptive_avg_pool2d(height, width)
        })
    }

    fn adaptive_max_pool2d(self, height: usize, width: usize) -> Result<Self> {
        let [n, _, _, c] = self.image("adaptive_max_pool2d")?;
        let shape = [n, height, width, c];
        self.pooled("adaptive_max_pool2d", false, &shape, |x| {
            x.adaptive_max_pool2d(height, width)
        })
    }

    fn global_avg_pool(self) -> Result<Self> {
        let [n, _, _, c] = self.image("global_avg_pool")?;
        self.pooled("global_avg_pool", true, &[n, c], |x| x.global_avg_pool())
    }
}

/// Axes of inputs and outputs of a convolution's weight, in the engine's order; none with groups.
fn in_and_out(taps: usize, weight: &[usize], channels: usize) -> (Option<usize>, Option<usize>) {
    match weight.get(taps) == Some(&channels) {
        true => (Some(taps), Some(taps + 1)),
        false => (None, None),
    }
}

impl<'s> Global<'s> {
    fn empty(&self, shape: &[usize]) -> Result<Tensor<'s>> {
        self.step().local().input(&[], shape)
    }

    /// The shape that an operation gives, tried on an empty batch with a weight of the whole's shape.
    fn probe(
        &self,
        shape: &[usize],
        run: impl FnOnce(Tensor<'s>, Weight<'s>) -> Result<Tensor<'s>>,
        weight: ParamId,
    ) -> Result<Vec<usize>> {
        let layout = self.step().params().used_layout(weight)?;
        let zeros = vec![0.0; layout.numel()];
        let weight = self.step().local().input(&zeros, layout.shape())?;
        Ok(run(self.empty(shape)?, weight.into())?.shape())
    }

    /// Outer axes and result's shape of a product over the last dimension.
    fn times(
        &self,
        operation: &str,
        weight: &[usize],
        (inputs, outputs): (usize, usize),
    ) -> Result<(Vec<usize>, Vec<usize>)> {
        let dims = self.dims();
        match (dims.split_last(), weight) {
            (Some((last, outer)), &[_, _]) if *last == weight[inputs] => {
                let mut shape = outer.to_vec();
                shape.push(weight[outputs]);
                Ok(((0..outer.len()).collect(), shape))
            }
            _ => Err(Error::usage(format!(
                "{operation}: a weight of shape {weight:?} does not fit a tensor of shape {dims:?}"
            ))
            .into()),
        }
    }
}

/// The largest element over axes that are split: each rank's own, then over the ranks. Equal largest elements
/// share the gradient, on whatever ranks they are.
struct MaxOver {
    placement: Placement,
    /// The mesh dimensions that split the axes.
    mesh_dims: Vec<usize>,
    /// Of the part, and which axes are reduced.
    shape: Vec<usize>,
    over: Vec<bool>,
}

impl MaxOver {
    /// Calls `f` with the place of each element and that of its result.
    fn each(&self, mut f: impl FnMut(usize, usize)) {
        let numel: usize = self.shape.iter().product();
        for at in 0..numel {
            let (mut rest, mut place, mut step) = (at, 0, 1);
            for (n, over) in self.shape.iter().zip(&self.over).rev() {
                if !over {
                    place += rest % n * step;
                    step *= n;
                }
                rest /= n;
            }
            f(at, place);
        }
    }

    fn over_ranks(&self, values: &mut [f32], op: ReduceOp) -> phalanx_base::Result<()> {
        for dim in self.mesh_dims.iter().rev() {
            let group = self.placement.line(*dim);
            group
                .all_reduce(values, op)
                .map_err(|e| Error::comm_while("a maximum over ranks is needed", e))?;
        }
        Ok(())
    }
}

fn is_hit(x: f32, most: f32) -> bool {
    x == most || x.is_nan()
}

impl CustomOp for MaxOver {
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> phalanx_base::Result<()> {
        output.fill(Fold::Max.identity());
        self.each(|at, to| {
            let x = inputs[0][at];
            if x > output[to] || x.is_nan() {
                output[to] = x;
            }
        });
        self.over_ranks(output, ReduceOp::Max)
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()> {
        // The whole gradient, and the number of elements that share it.
        let mut sums = d_output.to_vec();
        sums.resize(2 * output.len(), 0.0);
        let (_, counts) = sums.split_at_mut(output.len());
        self.each(|at, to| {
            if is_hit(inputs[0][at], output[to]) {
                counts[to] += 1.0;
            }
        });
        self.over_ranks(&mut sums, ReduceOp::Sum)?;
        let (d, counts) = sums.split_at(output.len());
        self.each(|at, to| {
            let share = match (output[to].is_nan(), is_hit(inputs[0][at], output[to])) {
                (true, _) => f32::NAN,
                (_, true) => d[to] / counts[to],
                _ => 0.0,
            };
            d_inputs[0][at] = share;
        });
        Ok(())
    }

    fn name(&self) -> &'static str {
        "MaxOverRanks"
    }
}

impl<'s, 'a: 's> ValueStep<'s> for &'s GlobalStep<'a> {
    type Value = Global<'s>;
    type Tokens = Indices;

    fn embedding(
        self,
        weight: ParamId,
        tokens: &Indices,
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Global<'s>> {
        if tokens.layout().shape() != shape {
            return Err(Error::usage(format!(
                "embedding: numbers of shape {:?} for shape {shape:?}",
                tokens.layout().shape()
            ))
            .into());
        }
        rows_of(self, weight, tokens, padding)
    }

    fn constant_embedding(
        self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<Global<'s>> {
        let whole = vec![Sbp::Broadcast; self.placement().sizes().len()];
        let indices = self.indices(indices, shape, &whole)?;
        rows_of(self, weight, &indices, None)
    }
}

fn tensor<'s>(step: &'s GlobalStep<'s>, weight: Weight<'s>) -> Result<Tensor<'s>> {
    match weight {
        Weight::Param(id) => step.local().parameter(id),
        Weight::Tensor(tensor) => Ok(tensor),
    }
}

/// What a rank with an empty part computes: zeros, whose backward pass runs the same collectives as
/// other ranks' does. Of `from` one is empty, or the result is.
fn zeros_of<'s>(
    step: &'s GlobalStep<'s>,
    shape: &[usize],
    from: Vec<Tensor<'s>>,
) -> Result<Tensor<'s>> {
    let zeros = vec![0.0; shape.iter().product()];
    let mut all = step.local().input(&zeros, shape)?;
    for one in from {
        all = all.add(one.sum(&[], false)?)?;
    }
    Ok(all)
}

/// Rows of a table. Tokens may be split (each rank looks up its own), the width (each rank has a range of every row), or the
/// rows: then each rank contributes those that it has, and the result is a sum.
fn rows_of<'s>(
    step: &'s GlobalStep<'s>,
    id: ParamId,
    tokens: &Indices,
    padding: Option<u32>,
) -> Result<Global<'s>> {
    let table = Rc::clone(step.params().used_layout(id)?);
    let &[rows, width] = table.shape() else {
        return Err(
            Error::usage(format!("embedding of a table of shape {:?}", table.shape())).into(),
        );
    };
    let own = tokens.layout().shape();
    if let Some(token) = tokens.local().iter().find(|t| **t as usize >= rows) {
        return Err(
            Error::usage(format!("embedding: there is no row {token}, it has {rows}")).into(),
        );
    }
    let mut shape = own.to_vec();
    shape.push(width);
    let mut rules = vec![Rule::whole(2)];
    for axis in 0..own.len() {
        rules.push(Rule::split(axis, &[Some(axis), None], Sbp::Split(axis)));
    }
    rules.push(Rule::split(
        OUTPUTS,
        &[None, Some(1)],
        Sbp::Split(own.len()),
    ));
    rules.push(Rule::split(INPUTS, &[None, Some(0)], Sbp::partial_sum()));
    let operands = [tokens.layout(), &*table];
    let (automatic, plans) = (step.is_automatic(), step.params().plans());
    let decision = rules::decide("embedding", &operands, &rules, &shape, automatic, plans)?;
    let made = decision.result(table.mesh(), &shape)?;
    let tokens = tokens.to(&decision.takes[0])?;
    let rank = step.placement().rank();
    let local_shape = tokens.layout().shape_of(rank);
    let block = decision.takes[1].block(rank);
    let gathered = is_gathered(step, id, &decision.takes[1])?;
    let part = || -> Result<Tensor<'s>> {
        let table = weight(step, id, &decision.takes[1], "embedding")?;
        if block[0].len() == rows {
            return step
                .local()
                .embedding(table, tokens.local(), &local_shape, padding);
        }
        // Rows of other ranks count as zeros.
        let mut part_shape = local_shape.clone();
        if block[0].is_empty() {
            part_shape.push(block[1].len());
            return zeros_of(step, &part_shape, vec![tensor(step, table)?]);
        }
        let is_own = |t: &u32| block[0].contains(&(*t as usize));
        let first = block[0].start as u32;
        let chosen: Vec<u32> = tokens
            .local()
            .iter()
            .map(|t| if is_own(t) { t - first } else { 0 })
            .collect();
        let mask: Vec<f32> = (tokens.local().iter())
            .map(|t| f32::from(u8::from(is_own(t))))
            .collect();
        // The padding row's gradient is left out where it lies.
        let padding = padding.filter(is_own).map(|p| p - first);
        let found = step
            .local()
            .embedding(table, &chosen, &local_shape, padding)?;
        part_shape.push(1);
        found.mul(step.local().input(&mask, &part_shape)?)
    };
    let local = match gathered && step.local().training() {
        // The segment begins with a tensor that is not used.
        true => step.local().input(&[], &[0])?.recompute(|_| part())?,
        false => part()?,
    };
    Global::new(step, local, Rc::new(made)).summed("embedding", id)
}
