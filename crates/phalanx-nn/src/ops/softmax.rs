//! Softmax and its logarithm along any dimension, in place if no other operation needs the
//! operand. Save their output.

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::softmax_dim;

/// Along `n` of an array of (outer, n, inner).
pub(crate) struct Softmax {
    n: usize,
    inner: usize,
    log: bool,
}

impl<'s> Tensor<'s> {
    /// `exp(x) / sum(exp(x))` along dimension `dim` (0 is the outermost).
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist.
    pub fn softmax(self, dim: usize) -> Result<Tensor<'s>> {
        self.softmax_of(dim, false)
    }

    /// `x - log(sum(exp(x)))` over the last dimension.
    ///
    /// # Errors
    /// `Usage` for a tensor without dimensions.
    pub fn log_softmax(self) -> Result<Tensor<'s>> {
        let Some(last) = self.dims().len().checked_sub(1) else {
            refuse!("log_softmax of a tensor without dimensions");
        };
        self.softmax_of(last, true)
    }

    /// [`log_softmax`](Tensor::log_softmax) along dimension `dim` (0 is the outermost).
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist.
    pub fn log_softmax_dim(self, dim: usize) -> Result<Tensor<'s>> {
        self.softmax_of(dim, true)
    }

    fn softmax_of(self, dim: usize, log: bool) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let Some(&n) = dims.get(dim) else {
            refuse!("softmax along dimension {dim} of shape {dims:?}");
        };
        let inner = dims[dim + 1..].iter().product();
        let op = Softmax { n, inner, log };
        self.step().apply([self.slot()], dims, op)
    }
}

impl Operation for Softmax {
    fn name(&self) -> Option<&'static str> {
        self.log.then_some("LogSoftmax")
    }

    fn saves_output(&self) -> bool {
        true
    }

    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        let (n, y) = (self.n, buf.slice_mut());
        softmax_dim::forward(c.threads, y, n, self.inner, self.log);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let (n, y, d) = (self.n, ctx.value(s.out), dy.slice_mut());
        softmax_dim::backward(ctx.threads, y, d, (n, self.inner), self.log);
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
