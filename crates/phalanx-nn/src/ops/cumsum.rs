//! Running sums along a dimension, in place if no other operation needs the operand. Save nothing.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::par::{PIECE, ThreadPool};

/// Along `n` of an array of (outer, n, inner).
pub(crate) struct Cumsum {
    n: usize,
    inner: usize,
}

impl<'s> Tensor<'s> {
    /// The sum of the elements along dimension `dim` (0 is the outermost) up to and with each. PyTorch: `cumsum`.
    ///
    /// *Order*: along the dimension, in f64, each sum rounded once; of gradients, from its end.
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist.
    pub fn cumsum(self, dim: usize) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let Some(&n) = dims.get(dim) else {
            refuse!("cumsum along dimension {dim} of shape {dims:?}");
        };
        let inner = dims[dim + 1..].iter().product();
        self.step().apply([self.slot()], dims, Cumsum { n, inner })
    }
}

impl Cumsum {
    fn run(&self, threads: &ThreadPool, x: &mut [f32], from_end: bool) {
        let (n, inner) = (self.n, self.inner);
        let block = (n * inner).max(1);
        threads.split(x, (PIECE / block).max(1) * block, |_, x| {
            for x in x.chunks_exact_mut(block) {
                for column in 0..inner {
                    let mut sum = 0.0;
                    for i in 0..n {
                        let row = if from_end { n - 1 - i } else { i };
                        let v = &mut x[row * inner + column];
                        sum += f64::from(*v);
                        *v = sum as f32;
                    }
                }
            }
        });
    }
}

impl Operation for Cumsum {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        self.run(c.threads, buf.slice_mut(), false);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        self.run(ctx.threads, dy.slice_mut(), true);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
