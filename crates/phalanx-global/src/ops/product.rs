//! Products with a weight: matrix products and convolutions.

use std::ops::Range;
use std::rc::Rc;

use phalanx_nn::layers::Act;
use phalanx_nn::{ParamId, Result, Tensor, Value as _, Weight};

use super::{INPUTS, OUTPUTS};
use crate::error::refuse;
use crate::rules::Rule;
use crate::sbp::Sbp;
use crate::step::GlobalStep;
use crate::tensor::Global;

/// The operation's name, its weight and its bias.
type What<'a> = (&'a str, ParamId, Option<ParamId>);

impl<'s> Global<'s> {
    /// A product with a weight whose axes of inputs and outputs are these, over the last dimension or the
    /// channels of this tensor.
    pub(super) fn product(
        self,
        (operation, weight, bias): What<'_>,
        (inputs, outputs): (Option<usize>, Option<usize>),
        outer: Range<usize>,
        shape: &[usize],
        act: Act,
        run: impl FnOnce(Tensor<'s>, Weight<'s>, Option<Weight<'s>>, Act) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let last = self.dims().len() - 1;
        let mut rules = vec![Rule::whole(3)];
        for axis in outer {
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
                    return refuse(format!("{operation} needs a weight"));
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
    pub(super) fn summed(self, operation: &str, weight: ParamId) -> Result<Self> {
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

    /// A product of the last dimension. `inputs` and `outputs` are dimensions of the weight.
    pub(super) fn times(
        self,
        what: What<'_>,
        (inputs, outputs): (usize, usize),
        act: Act,
        run: impl FnOnce(Tensor<'s>, Weight<'s>, Option<Weight<'s>>, Act) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let weight = Rc::clone(self.step().params().used_layout(what.1)?);
        let (dims, weight) = (self.dims(), weight.shape());
        let (outer, shape) = match dims.split_last() {
            Some((last, outer)) if weight.len() == 2 && *last == weight[inputs] => {
                (0..outer.len(), [outer, &[weight[outputs]]].concat())
            }
            _ => {
                return refuse(format!(
                    "{}: a weight of shape {weight:?} does not fit a tensor of shape {dims:?}",
                    what.0
                ));
            }
        };
        self.product(what, (Some(inputs), Some(outputs)), outer, &shape, act, run)
    }

    /// A convolution. `taps` is the number of the kernel's dimensions, which come first in the weight; without it the weight
    /// stays whole, as it does where the channels are in groups.
    pub(super) fn convolved(
        self,
        what: What<'_>,
        taps: Option<usize>,
        act: Act,
        run: impl Fn(Tensor<'s>, Weight<'s>, Option<Weight<'s>>, Act) -> Result<Tensor<'s>>,
    ) -> Result<Self> {
        let weight = Rc::clone(self.step().params().used_layout(what.1)?);
        let mut shape = self.dims().to_vec();
        let (images, channels) = (shape[0], shape[shape.len() - 1]);
        // The result's shape is that of no images.
        shape[0] = 0;
        let zeros = vec![0.0; weight.numel()];
        let probe = self.step().local().input(&zeros, weight.shape())?;
        let none = self.step().local().input(&[], &shape)?;
        let mut shape = run(none, probe.into(), None, Act::None)?.shape();
        shape[0] = images;
        let taps = taps.filter(|taps| weight.shape().get(*taps) == Some(&channels));
        let axes = (taps, taps.map(|taps| taps + 1));
        self.product(what, axes, 0..1, &shape, act, run)
    }
}

pub(super) fn tensor<'s>(step: &'s GlobalStep<'s>, weight: Weight<'s>) -> Result<Tensor<'s>> {
    match weight {
        Weight::Param(id) => step.local().parameter(id),
        Weight::Tensor(tensor) => Ok(tensor),
    }
}

/// What a rank with an empty part computes: zeros, whose backward pass runs the same collectives as
/// other ranks' does. Of `from` one is empty, or the result is.
pub(super) fn zeros_of<'s>(
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
