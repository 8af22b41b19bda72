//! Anomaly mode: finds the operation that makes the first value or gradient of a step that is
//! not finite.

use super::node::{Node, Visit};
use super::state::{Slot, SlotId, State};
use crate::error::{Error, Result, anomaly};
use crate::param::{ParamInfo, Params};
use phalanx_kernels::element::{Element, Values};

/// Value and indices of the first element, in memory of this shape, that is NaN, or infinite unless
/// `infinite`.
fn first(values: Values<'_>, shape: &[usize], infinite: bool) -> Option<(f32, Vec<usize>)> {
    fn position<T: Element>(values: &[T], infinite: bool) -> Option<(f32, usize)> {
        let wrong = |v: f32| if infinite { v.is_nan() } else { !v.is_finite() };
        let at = values.iter().position(|v| wrong(v.wide()))?;
        Some((values[at].wide(), at))
    }
    let (value, mut rest) = match values {
        Values::F32(v) => position(v, infinite),
        Values::Bf16(v) => position(v, infinite),
    }?;
    let mut indices = vec![0; shape.len()];
    for (index, size) in indices.iter_mut().zip(shape).rev() {
        (*index, rest) = (rest % size, rest / size);
    }
    Some((value, indices))
}

/// The error for `what`, if one of the values is wrong.
fn check(
    (values, shape, infinite): (Values<'_>, &[usize], bool),
    what: impl FnOnce() -> String,
) -> Result<()> {
    match first(values, shape, infinite) {
        Some((value, at)) => Err(anomaly(format!("{} has {value} at {at:?}", what()))),
        None => Ok(()),
    }
}

/// The same of a parameter, or of its gradient; the indices are PyTorch's.
fn check_param(values: &[f32], info: &ParamInfo, what: impl FnOnce() -> String) -> Result<()> {
    let Some((value, mut at)) = first(Values::F32(values), &info.engine_shape(), false) else {
        return Ok(());
    };
    let inside = at.clone();
    for (&outside, index) in info.layout.order().iter().zip(inside) {
        at[outside] = index;
    }
    Err(anomaly(format!("{} has {value} at {at:?}", what())))
}

/// Checks the gradient that an operation has written to a parameter's memory, or added there.
pub(super) fn check_param_gradient(name: &str, info: &ParamInfo, values: &[f32]) -> Result<()> {
    check_param(values, info, || {
        let (param, shape) = (&info.name, &info.shape);
        format!("the gradient of {name} for the parameter {param} of shape {shape:?}")
    })
}

/// `Linear with fc1.weight`.
fn name_of(node: &Node, params: &Params) -> String {
    let param = node.param().map(|p| &params.infos()[p.index()].name);
    match param {
        Some(param) => format!("{} with {param}", node.name()),
        None => node.name().to_owned(),
    }
}

impl Slot {
    /// Checks its gradient, if it has one.
    fn check_gradient(&self, what: impl FnOnce() -> String) -> Result<()> {
        let Some(grad) = &self.grad else {
            return Ok(());
        };
        let values = Values::of(grad.slice(), self.precision, self.shape.numel());
        check((values, &self.shape, false), what)
    }
}

impl State {
    /// Checks an input of the step, and notes whether it has an infinity.
    pub(super) fn check_leaf(&mut self, leaf: SlotId) -> Result<()> {
        self.check_value(leaf, true, |shape| format!("an input of shape {shape:?}"))
    }

    /// Checks what an operation has used and made, and notes whether its result has an infinity.
    #[cold]
    pub(super) fn check_result(&mut self, params: &Params, node: &Node) -> Result<()> {
        let out = node.output();
        let out = out.ok_or_else(|| Error::internal("an operation has no output"))?;
        let (mut infinite, mut used) = (node.fills_infinity(), Ok(()));
        node.visit(&mut |v| match v {
            Visit::Input(s) | Visit::Once(s) => infinite |= self.slots[s.index()].infinite,
            Visit::Param(p) if used.is_ok() => {
                let info = &params.infos()[p.index()];
                used = check_param(params.get(p), info, || {
                    format!("the parameter {} of shape {:?}", info.name, info.shape)
                });
            }
            _ => {}
        });
        used?;
        self.check_value(out, infinite, |shape| {
            let name = name_of(node, params);
            format!("the result of {name}, of shape {shape:?}, whose inputs are sound,")
        })
    }

    fn check_value(
        &mut self,
        id: SlotId,
        infinite: bool,
        what: impl FnOnce(&[usize]) -> String,
    ) -> Result<()> {
        let (values, shape) = (self.values(id), self.shape(id));
        check((values, &shape, infinite), || what(&shape))?;
        // It has no NaN.
        let infinite = infinite && first(values, &shape, false).is_some();
        self.slots[id.index()].infinite = infinite;
        Ok(())
    }

    /// Checks the gradient that backward begins with.
    pub(super) fn check_seed(&self, loss: SlotId) -> Result<()> {
        let slot = &self.slots[loss.index()];
        slot.check_gradient(|| {
            format!("the gradient given to backward, of shape {:?},", slot.shape)
        })
    }

    /// Checks the gradients of an operation's inputs, to which its backward has just added.
    pub(super) fn check_gradients(&self, params: &Params, node: &Node) -> Result<()> {
        let (mut result, mut number) = (Ok(()), 0);
        node.visit(&mut |v| {
            if let (Visit::Input(s) | Visit::Once(s), Ok(())) = (v, &result) {
                let slot = &self.slots[s.index()];
                result = slot.check_gradient(|| {
                    let (name, shape) = (name_of(node, params), &slot.shape);
                    format!("the gradient of {name} for its input {number}, of shape {shape:?},")
                });
                number += 1;
            }
        });
        result
    }

    /// A conversion has written the values of `from`, which have been checked, to `to`.
    pub(crate) fn note_converted(&mut self, from: SlotId, to: SlotId) {
        self.slots[to.index()].infinite = self.slots[from.index()].infinite;
    }
}
