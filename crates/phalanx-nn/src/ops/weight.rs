//! Weights of operations: parameters, or tensors that other operations made.

use crate::param::{Layout, ParamId, ParamInfo};
use crate::tape::{Operand, Step};
use crate::tensor::Shape;
use crate::{Result, Tensor, refuse};

/// A weight or bias of an operation: a parameter, or a tensor of the same step.
///
/// A tensor has the parameter's shape in the engine's memory order
/// ([`ParamInfo::engine_shape`]). Its values and gradients have the same bits as those of
/// a parameter with the same values. If it needs no gradient, none is computed.
#[derive(Debug)]
pub enum Weight<'s> {
    /// A parameter of the step's model.
    Param(ParamId),
    /// A tensor of the step.
    Tensor(Tensor<'s>),
}

impl From<ParamId> for Weight<'_> {
    fn from(id: ParamId) -> Self {
        Weight::Param(id)
    }
}

impl<'s> From<Tensor<'s>> for Weight<'s> {
    fn from(tensor: Tensor<'s>) -> Self {
        Weight::Tensor(tensor)
    }
}

/// A weight as the checks of operations see it. The [`Weight`] must live until the
/// operation has been recorded.
pub(crate) struct Known<'w> {
    pub(crate) operand: Operand,
    /// Number of values.
    pub(crate) len: usize,
    source: Source<'w>,
}

enum Source<'w> {
    Param(&'w ParamInfo),
    Tensor(Shape),
}

impl Weight<'_> {
    /// # Errors
    /// `Usage` when it belongs to another model or step.
    pub(crate) fn known<'w>(&self, step: &Step<'w>) -> Result<Known<'w>> {
        match self {
            Weight::Param(id) => {
                let info = step.info(*id)?;
                Ok(Known {
                    operand: Operand::Param(*id),
                    len: info.len,
                    source: Source::Param(info),
                })
            }
            Weight::Tensor(t) => {
                if !std::ptr::eq(t.step(), step) {
                    refuse!(
                        "a weight tensor of shape {:?} belongs to another step",
                        t.dims()
                    );
                }
                let shape = t.dims();
                Ok(Known {
                    operand: Operand::Slot(t.slot()),
                    len: shape.numel(),
                    source: Source::Tensor(shape),
                })
            }
        }
    }
}

/// What is [known](Weight::known) of a bias or a norm's weight, which has `len` values
/// for `what`.
pub(crate) fn known_vector<'w>(
    weight: Option<&Weight<'_>>,
    step: &Step<'w>,
    (len, what): (usize, &str),
) -> Result<Option<Operand>> {
    let Some(weight) = weight else {
        return Ok(None);
    };
    let known = weight.known(step)?;
    if known.len == len {
        return Ok(Some(known.operand));
    }
    refuse!("{} has {} values for {len} {what}", known.name(), known.len)
}

impl<'w> Known<'w> {
    /// Its name in messages.
    pub(crate) fn name(&self) -> &'w str {
        match self.source {
            Source::Param(info) => &info.name,
            Source::Tensor(_) => "weight tensor",
        }
    }

    /// The shape as the user gave it.
    pub(crate) fn shape(&self) -> &[usize] {
        match &self.source {
            Source::Param(info) => &info.shape,
            Source::Tensor(shape) => shape,
        }
    }

    /// Rows and columns in memory, if it is a matrix.
    pub(crate) fn matrix(&self) -> Result<[usize; 2]> {
        match (self.shape(), &self.source) {
            (&[inp, out], Source::Param(i)) if i.layout == Layout::Transposed => Ok([out, inp]),
            (&[a, b], _) => Ok([a, b]),
            _ => refuse!(
                "{} of shape {:?} is not a matrix",
                self.name(),
                self.shape()
            ),
        }
    }

    /// PyTorch's (out, in / groups, kh, kw), if it is a convolution's weight. The height of
    /// a one-dimensional convolution is 1.
    pub(crate) fn kernel(&self) -> Option<[usize; 4]> {
        match (&self.source, self.shape()) {
            (Source::Param(i), &[out, inp, h, w]) if i.layout == Layout::Conv => {
                Some([out, inp, h, w])
            }
            (Source::Param(i), &[out, inp, w]) if i.layout == Layout::Conv1d => {
                Some([out, inp, 1, w])
            }
            (Source::Tensor(_), &[h, w, inp, out]) => Some([out, inp, h, w]),
            (Source::Tensor(_), &[w, inp, out]) => Some([out, inp, 1, w]),
            _ => None,
        }
    }
}
