//! The operations of global tensors: the rules of each, and what runs on a part.

mod embedding;
mod max;
mod product;
mod value;

use std::rc::Rc;

use phalanx_nn::{ParamId, Result, Tensor, Weight};

use crate::error::refuse;
use crate::layout::{Cuts, Layout};
use crate::rules::{self, Decision, Rule};
use crate::sbp::Sbp;
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
        let automatic = self.step().is_automatic();
        let price = |from: &Layout, to: &Layout| self.step().price(from, to);
        Ok(rules::decide(
            operation, operands, rules, shape, automatic, &price,
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
        let local = step.part([x.to_local()], |[x]| run(x, &own, &decision))?;
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
            return refuse(format!(
                "{operation}: the tensors belong to different steps"
            ));
        }
        let operands = [self.layout(), other.layout()];
        let decision = self.decide(operation, &operands, rules, shape)?;
        let a = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let b = other.converted(&decision.takes[1], operation, || "operand 1".to_owned())?;
        let made = decision.result(a.mesh(), shape)?;
        let step = a.step();
        let local = step.part([a.to_local(), b.to_local()], |[a, b]| run(a, b))?;
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
                    return refuse(format!(
                        "{operation}: shapes {a:?} and {b:?} differ and cannot be stretched to each other"
                    ));
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
        step.check_parameters(operation)?;
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
            run(x, other.map(Global::to_local), weights, &decision)
        };
        // What was gathered is freed after its use, and gathered again in backward.
        let local = match gathered && step.local().training() {
            true => x.to_local().recompute(all)?,
            false => all(x.to_local())?,
        };
        Ok(Global::new(step, local, Rc::new(made)))
    }

    fn pooled(
        self,
        operation: &str,
        is_linear: bool,
        run: impl Fn(Tensor<'s>) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let [images, high, wide, channels] = self.image(operation)?;
        // The result's shape is that of no images.
        let none = self.step().local().input(&[], &[0, high, wide, 1])?;
        let mut shape = run(none)?.shape();
        let out = shape.len() - 1;
        (shape[0], shape[out]) = (images, channels);
        let mut rules = vec![Rule::whole(1)];
        rules.push(Rule::split(0, &[Some(0)], Sbp::Split(0)));
        rules.push(Rule::split(3, &[Some(3)], Sbp::Split(out)));
        if is_linear {
            rules.push(Rule::partial(1, 0, &[]));
        }
        self.alone(operation, &rules, &shape, &same, |x, _, _| run(x))
    }

    fn image(&self, operation: &str) -> Result<[usize; 4]> {
        let dims = self.dims();
        let image = <[usize; 4]>::try_from(dims);
        image.or_else(|_| {
            refuse(format!(
                "{operation} needs images (N, H, W, C), got shape {dims:?}"
            ))
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
                return refuse(format!(
                    "{operation} over dimensions {dims:?} of shape {shape:?}: {d} is not there or named twice"
                ));
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
            return refuse(format!(
                "bmm of shapes {a:?} and {b:?} (second transposed: {transposed}) does not fit"
            ));
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
