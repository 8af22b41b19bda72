//! Softmax along any dimension, and its logarithm along any but the last
//! (which `log_softmax` has), in place where nobody else needs the operand. Saves its output.

use crate::kernels::softmax_dim;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Error, Result, Tensor};

pub(crate) struct Softmax {
    x: SlotId,
    out: SlotId,
    n: usize,
    inner: usize,
    log: bool,
}

impl<'s> Tensor<'s> {
    /// `exp(x) / sum(exp(x))` along dimension `dim` (0 is the outermost).
    ///
    /// # Errors
    /// `Usage` for a dimension that is not there.
    pub fn softmax(self, dim: usize) -> Result<Tensor<'s>> {
        self.along(dim, false)
    }

    /// [`log_softmax`](Tensor::log_softmax) along dimension `dim` (0 is the outermost).
    ///
    /// # Errors
    /// `Usage` for a dimension that is not there.
    pub fn log_softmax_dim(self, dim: usize) -> Result<Tensor<'s>> {
        if dim + 1 == self.dims().len() {
            return self.log_softmax();
        }
        self.along(dim, true)
    }

    fn along(self, dim: usize, log: bool) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let Some(&n) = dims.get(dim) else {
            return Err(Error::usage(format!(
                "softmax along dimension {dim} of shape {dims:?}"
            )));
        };
        let inner = dims[dim + 1..].iter().product();
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), x, (n, inner), log);
            let wants = st.wants_grad(x);
            let out = st.add_output(dims, buf, wants);
            if wants {
                st.record(Softmax {
                    x,
                    out,
                    n,
                    inner,
                    log,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, x: SlotId, (n, inner): (usize, usize), log: bool) -> Buf {
    let mut buf = c.state.take_for_writing(x);
    softmax_dim::forward(c.team, buf.slice_mut(), n, inner, log);
    buf
}

impl Recorded for Softmax {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.out));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let (y, sizes) = (pass.value(self.out), (self.n, self.inner));
        softmax_dim::backward(pass.team, y, dy.slice_mut(), sizes, self.log);
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x, (self.n, self.inner), self.log))
    }
}
