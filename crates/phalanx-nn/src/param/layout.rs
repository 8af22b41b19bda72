//! Memory order of a parameter compared with PyTorch's tensor of the same name.

use phalanx_kernels::order;

/// Memory order of a parameter inside the engine. PyTorch's order is used only by
/// [`Params::export`](crate::Params::export) and
/// [`Params::import`](crate::Params::import).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Row-major in PyTorch's shape.
    Same,
    /// PyTorch's `[out, in, kh, kw]`, kept as `(kh, kw, in, out)`.
    Conv,
    /// PyTorch's `[out, in, k]`, kept as `(k, in, out)`.
    Conv1d,
    /// A matrix of PyTorch's shape `[in, out]`, kept as `(out, in)`: the weight of Hugging Face's `Conv1D`.
    Transposed,
}

/// For messages.
impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Layout::Same => "of any tensor",
            Layout::Conv => "of a convolution (4 dimensions)",
            Layout::Transposed => "of a matrix (2 dimensions)",
            Layout::Conv1d => "of a one-dimensional convolution (3 dimensions)",
        })
    }
}

impl Layout {
    /// Writes `from`, values in PyTorch's row-major order, in the order of the engine's memory.
    pub(crate) fn import(self, shape: &[usize], from: &[f32], into: &mut [f32]) {
        match self.sizes(shape) {
            Some(sizes) => order::import(sizes, from, into),
            None => into[..from.len()].copy_from_slice(from),
        }
    }

    /// Writes `from`, values in the order of the engine's memory, in PyTorch's row-major order.
    pub(crate) fn export(self, shape: &[usize], from: &[f32], into: &mut [f32]) {
        match self.sizes(shape) {
            Some(sizes) => order::export(sizes, from, into),
            None => into.copy_from_slice(from),
        }
    }

    /// Outputs, inputs and taps of a weight whose order in memory is not PyTorch's.
    fn sizes(self, shape: &[usize]) -> Option<[usize; 3]> {
        match (self, shape) {
            (Layout::Conv, &[out, inp, _, _]) | (Layout::Conv1d, &[out, inp, _]) => {
                Some([out, inp, shape[2..].iter().product()])
            }
            (Layout::Transposed, &[inp, out]) => Some([inp, out, 1]),
            // `Scope` admits the layouts above only with their dimensions.
            _ => None,
        }
    }

    /// For each dimension in memory, PyTorch's; empty where they are the same.
    pub(crate) fn order(self) -> &'static [usize] {
        match self {
            Layout::Same => &[],
            Layout::Conv => &[2, 3, 1, 0],
            Layout::Conv1d => &[2, 1, 0],
            Layout::Transposed => &[1, 0],
        }
    }

    /// Number of dimensions this layout requires, if it requires any.
    pub(crate) fn rank(self) -> Option<usize> {
        let rank = self.order().len();
        (rank > 0).then_some(rank)
    }
}
