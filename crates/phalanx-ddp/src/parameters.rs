//! A model as this crate sees it, independent of the engine.

use phalanx_comm::ProcessGroup;

use crate::error::{Error, Result};

/// Names, shapes and values of a model's tensors. Parameters come first, then buffers (state without gradients,
/// such as running statistics). All values are `f32`.
///
/// Every rank has the same tensors in the same order; [`Fingerprint::parameters`](crate::Fingerprint::parameters)
/// checks that. Each `index` is below [`tensors`](Self::tensors), and a parameter has the same index in
/// the [`Reducer`](crate::Reducer) if all parameters are given to it. `phalanx_nn::Params` implements
/// this with feature `nn`.
pub trait Parameters {
    /// Number of parameters and buffers.
    fn tensors(&self) -> usize;

    /// Whether tensor `index` is a buffer.
    fn is_buffer(&self, _index: usize) -> bool {
        false
    }

    /// Name for messages and comparison, for example `fc1.weight`.
    fn name(&self, index: usize) -> &str;

    /// Dimensions; their product is the number of values.
    fn shape(&self, index: usize) -> &[usize];

    /// The values, in any order in memory that is the same on all ranks.
    fn values(&self, index: usize) -> &[f32];

    /// The values for writing.
    fn values_mut(&mut self, index: usize) -> &mut [f32];

    /// Calls `f` with the memory of all values, one tensor after the other, until it fails. If several tensors share
    /// one allocation, an implementation may pass it as a whole (gaps included, the same on all ranks): it is then
    /// sent as one message.
    ///
    /// # Errors
    ///
    /// The error of `f`.
    fn try_for_each_mut(&mut self, f: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        (0..self.tensors()).try_for_each(|index| f(self.values_mut(index)))
    }
}

/// Name and size of one parameter, as the [`Reducer`](crate::Reducer) needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Dotted name, for messages.
    pub name: String,
    /// Number of elements.
    pub len: usize,
    /// Length of a row if it is a matrix in memory, else 1; for hooks that compress
    /// matrices.
    pub columns: usize,
}

impl ParamSpec {
    /// The spec of tensor `index` of a model whose values are stored row by row: a matrix of its first dimension
    /// by all others.
    pub fn of(params: &dyn Parameters, index: usize) -> ParamSpec {
        let len = params.values(index).len();
        ParamSpec {
            name: params.name(index).to_owned(),
            len,
            columns: match params.shape(index) {
                [] | [_] => 1,
                [first, ..] => (len / first.max(&1)).max(1),
            },
        }
    }
}

/// Gives every rank the parameters and buffers of `root`.
///
/// *Blocks* until all ranks of the group call it.
///
/// # Errors
///
/// `Comm` when a peer is lost or late, when a rank has another number of values (they are undefined then), or when
/// `root` is not a rank of the group.
pub fn broadcast_parameters(
    group: &ProcessGroup,
    params: &mut dyn Parameters,
    root: usize,
) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    params.try_for_each_mut(&mut |values| {
        group.broadcast(values, root).map_err(|e| {
            Error::comm_while(
                format!("rank {root}'s parameters could not be broadcast"),
                e,
            )
        })
    })
}
