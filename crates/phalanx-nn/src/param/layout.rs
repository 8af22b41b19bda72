//! Memory order of a parameter compared with PyTorch's tensor of the same name.

use phalanx_kernels::pool::ALIGN_ELEMS;

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
}

impl Layout {
    /// Calls `f(outside, inside)` for every element, in any order: its index in PyTorch's
    /// row-major order and its index in the engine's memory.
    pub(crate) fn for_each_index(self, shape: &[usize], mut f: impl FnMut(usize, usize)) {
        let len: usize = shape.iter().product();
        match (self, shape) {
            (Layout::Conv, &[out, inp, _, _]) | (Layout::Conv1d, &[out, inp, _]) => {
                let taps: usize = shape[2..].iter().product();
                // A cache line of outputs at a time: both sides are walked in lines.
                for from in (0..out).step_by(ALIGN_ELEMS) {
                    let outputs = from..(from + ALIGN_ELEMS).min(out);
                    for i in 0..inp {
                        for t in 0..taps {
                            for o in outputs.clone() {
                                f((o * inp + i) * taps + t, (t * inp + i) * out + o);
                            }
                        }
                    }
                }
            }
            // `Scope` admits the layouts above only with their dimensions.
            _ => (0..len).for_each(|i| f(i, i)),
        }
    }

    /// For each dimension in memory, PyTorch's; empty where they are the same.
    pub(crate) fn order(self) -> &'static [usize] {
        match self {
            Layout::Same => &[],
            Layout::Conv => &[2, 3, 1, 0],
            Layout::Conv1d => &[2, 1, 0],
        }
    }

    /// Number of dimensions this layout requires, if it requires any.
    pub(crate) fn rank(self) -> Option<usize> {
        let rank = self.order().len();
        (rank > 0).then_some(rank)
    }
}
