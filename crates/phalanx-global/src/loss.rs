//! Losses of global tensors. If rows are split, the loss is a sum over ranks; a mean divides by the number of rows of
//! the whole tensor.

use std::rc::Rc;

use phalanx_comm::ReduceOp;
use phalanx_nn::losses::{CrossEntropyOptions, IGNORE_LABEL};
use phalanx_nn::{Reduction, Result, Tensor, Value};

use crate::error::{Error, refuse};
use crate::indices::Indices;
use crate::layout::Layout;
use crate::rules::{Decision, Rule};
use crate::sbp::Sbp;
use crate::tensor::Global;

impl<'s> Global<'s> {
    /// [`log_softmax`](Value::log_softmax), then [`nll_loss`](Self::nll_loss).
    ///
    /// # Errors
    /// As [`nll_loss`](Self::nll_loss).
    pub fn cross_entropy(self, labels: &Indices, reduction: impl Into<Reduction>) -> Result<Self> {
        self.log_softmax()?.nll_loss(labels, reduction)
    }

    /// `-x[row][label]` of each row of log-probabilities, classes last, reduced as
    /// [`Tensor::nll_loss`]. A mean is over all rows of the whole tensor that are not ignored.
    ///
    /// *Blocks until* all ranks of the mesh call it, if a mean of split rows is asked for.
    ///
    /// # Errors
    /// As [`Tensor::nll_loss`], and when the labels' shape is not that of the rows.
    pub fn nll_loss(self, labels: &Indices, reduction: impl Into<Reduction>) -> Result<Self> {
        let counted = |labels: &[u32]| labels.iter().filter(|l| **l != IGNORE_LABEL).count() as f64;
        self.of_rows(
            "nll_loss",
            labels,
            reduction.into(),
            counted,
            |x, labels, reduction| x.nll_loss(labels, reduction),
        )
    }

    /// [`Tensor::cross_entropy_with`] of the whole tensor.
    ///
    /// *Blocks until* all ranks of the mesh call it, if a mean of split rows is asked for.
    ///
    /// # Errors
    /// As [`Tensor::cross_entropy_with`], and when the labels' shape is not that of the rows.
    pub fn cross_entropy_with(
        self,
        labels: &Indices,
        options: CrossEntropyOptions<'_>,
    ) -> Result<Self> {
        let weight = |l: &u32| {
            let weights = options.class_weights;
            weights.map_or(1.0, |w| w.get(*l as usize).copied().map_or(0.0, f64::from))
        };
        let counted = |labels: &[u32]| {
            let all = labels.iter().filter(|l| **l != IGNORE_LABEL);
            all.map(weight).sum()
        };
        let reduction = options.reduction;
        self.of_rows(
            "cross_entropy_with",
            labels,
            reduction,
            counted,
            |x, labels, reduction| {
                x.cross_entropy_with(
                    labels,
                    CrossEntropyOptions {
                        reduction,
                        ..options
                    },
                )
            },
        )
    }

    /// A loss of each row, of which `run` makes the part's.
    fn of_rows(
        self,
        operation: &str,
        labels: &Indices,
        reduction: Reduction,
        counted: impl Fn(&[u32]) -> f64,
        run: impl FnOnce(Tensor<'s>, &[u32], Reduction) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let Some((_, outer)) = self.dims().split_last() else {
            return refuse("a loss over classes needs a dimension of classes");
        };
        if labels.layout().shape() != outer {
            return refuse(format!(
                "{operation}: labels of shape {:?} for scores of shape {:?}",
                labels.layout().shape(),
                self.dims()
            ));
        }
        let (each, shape) = each_or_one(reduction, outer);
        let rules = rules_of(outer.len(), 2, each);
        let operands = [self.layout(), labels.layout()];
        let decision = self.decide(operation, &operands, &rules, &shape)?;
        let labels = labels.to(&decision.takes[1])?;
        let x = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let reduction = match reduction {
            Reduction::Mean => x.over_all(&decision, counted(labels.local()))?,
            other => other,
        };
        let made = decision.result(x.layout().mesh(), &shape)?;
        let step = x.step();
        let local = step.part([x.to_local()], |[x]| run(x, labels.local(), reduction))?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    /// `(x - target)^2`, reduced as [`Tensor::mse_loss`]. The target gets no gradient.
    ///
    /// # Errors
    /// `Usage` when the shapes differ.
    pub fn mse_loss(self, target: &Self, reduction: impl Into<Reduction>) -> Result<Self> {
        self.of_elements("mse_loss", target, 0, reduction.into(), |x, t, r, _| {
            x.mse_loss(t, r)
        })
    }

    /// `|x - target|`, reduced as [`Tensor::l1_loss`]. The target gets no gradient.
    ///
    /// # Errors
    /// `Usage` when the shapes differ.
    pub fn l1_loss(self, target: &Self, reduction: impl Into<Reduction>) -> Result<Self> {
        self.of_elements("l1_loss", target, 0, reduction.into(), |x, t, r, _| {
            x.l1_loss(t, r)
        })
    }

    /// [`Tensor::bce_with_logits`]; `positive` holds a weight of each element of the last dimension. The target gets
    /// no gradient.
    ///
    /// # Errors
    /// `Usage` when the shapes differ, or `positive` does not fit.
    pub fn bce_with_logits(
        self,
        target: &Self,
        positive: Option<&[f32]>,
        reduction: impl Into<Reduction>,
    ) -> Result<Self> {
        let last = self.dims().len().saturating_sub(1);
        let wide = self.dims().last().copied().unwrap_or(1);
        if let Some(p) = positive.filter(|p| p.len() != wide) {
            return refuse(format!(
                "bce_with_logits: {} positive weights for shape {:?}",
                p.len(),
                self.dims()
            ));
        }
        let rank = self.step().placement().rank();
        self.of_elements(
            "bce_with_logits",
            target,
            0,
            reduction.into(),
            |x, t, r, takes| {
                let own = takes.block(rank).get(last).cloned();
                // A part of no elements needs none.
                let positive = positive.map(|p| own.map_or(p, |own| &p[own]));
                let positive = positive.filter(|p| !p.is_empty());
                x.bce_with_logits(t, positive, r)
            },
        )
    }

    /// [`Tensor::cross_entropy_shares`] of the whole tensor: `shares` has the share of each class in a row's target.
    /// It gets no gradient.
    ///
    /// # Errors
    /// As [`Tensor::cross_entropy_shares`], and when the shapes differ.
    pub fn cross_entropy_shares(
        self,
        shares: &Self,
        options: CrossEntropyOptions<'_>,
    ) -> Result<Self> {
        let reduction = options.reduction;
        self.of_elements(
            "cross_entropy_shares",
            shares,
            1,
            reduction,
            |x, t, reduction, _| {
                x.cross_entropy_shares(
                    t,
                    CrossEntropyOptions {
                        reduction,
                        ..options
                    },
                )
            },
        )
    }

    /// A loss of each element, or of each run of the last `inner` axes, which stay whole.
    fn of_elements(
        self,
        operation: &str,
        target: &Self,
        inner: usize,
        reduction: Reduction,
        run: impl FnOnce(Tensor<'s>, &[f32], Reduction, &Layout) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        if self.dims() != target.dims() {
            return refuse(format!(
                "{operation}: a target of shape {:?} for shape {:?}",
                target.dims(),
                self.dims()
            ));
        }
        let outer = &self.dims()[..self.dims().len().saturating_sub(inner)];
        let count: usize = outer.iter().product();
        let (each, shape) = each_or_one(reduction, outer);
        let rules = rules_of(outer.len(), 2, each);
        let operands = [self.layout(), target.layout()];
        let decision = self.decide(operation, &operands, &rules, &shape)?;
        let target = target
            .share()
            .converted(&decision.takes[1], operation, || "the target".to_owned())?;
        let x = self.converted(&decision.takes[0], operation, || "operand 0".to_owned())?;
        let reduction = match reduction {
            Reduction::Mean => Reduction::Over(count as f32),
            other => other,
        };
        let made = decision.result(x.layout().mesh(), &shape)?;
        let step = x.step();
        let (target, takes) = (target.local().data(), &decision.takes[0]);
        let local = step.part([x.to_local()], |[x]| run(x, target, reduction, takes))?;
        Ok(Global::new(step, local, Rc::new(made)))
    }

    /// The mean's divisor: the sum of what the ranks with different rows count.
    fn over_all(&self, decision: &Decision, own: f64) -> Result<Reduction> {
        let mut sum = [own];
        let sbp = decision.takes[1].sbp();
        for dim in (0..sbp.len()).rev() {
            let group = self.step().placement().line(dim);
            if matches!(sbp[dim], Sbp::Split(_)) && group.world_size() > 1 {
                group
                    .all_reduce(&mut sum, ReduceOp::Sum)
                    .map_err(|e| Error::comm_while("the number of rows of a loss is needed", e))?;
            }
        }
        Ok(Reduction::Over(sum[0] as f32))
    }
}

fn each_or_one(reduction: Reduction, outer: &[usize]) -> (bool, Vec<usize>) {
    match reduction {
        Reduction::None => (true, outer.to_vec()),
        _ => (false, Vec::new()),
    }
}

/// All operands split along one of the first axes; the sum of a split axis is a sum over ranks.
fn rules_of(axes: usize, operands: usize, each: bool) -> Vec<Rule> {
    let mut rules = vec![Rule::whole(operands)];
    for axis in 0..axes {
        let makes = if each {
            Sbp::Split(axis)
        } else {
            Sbp::partial_sum()
        };
        rules.push(Rule::split(axis, &vec![Some(axis); operands], makes));
    }
    rules
}
