//! Log-softmax over the last dimension, in place where nobody else needs the
//! operand. Saves its output.

use crate::kernels::softmax;
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Visit};
use crate::{Error, Result, Tensor};

pub(crate) struct LogSoftmax {
    x: SlotId,
    out: SlotId,
    classes: usize,
}

impl<'s> Tensor<'s> {
    /// `x - log(sum(exp(x)))` over the last dimension.
    ///
    /// # Errors
    /// `Usage` for a tensor without dimensions.
    pub fn log_softmax(self) -> Result<Tensor<'s>> {
        let (step, x, dims) = (self.step(), self.slot(), self.dims());
        let Some(&classes) = dims.last() else {
            return Err(Error::usage("log_softmax of a tensor without dimensions"));
        };
        let out = {
            let mut st = step.state();
            let mut buf = st.take_for_writing(x);
            step.team()
                .split(buf.slice_mut(), softmax::piece(classes), |_, p| {
                    softmax::log_softmax(p, classes)
                });
            let wants = st.wants_grad(x);
            let out = st.add_output(dims, buf, wants);
            if wants {
                st.record(LogSoftmax { x, out, classes });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for LogSoftmax {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.out));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        let y = pass.value(self.out);
        pass.team
            .split(dy.slice_mut(), softmax::piece(self.classes), |at, p| {
                softmax::log_softmax_backward(&y[at..at + p.len()], p, self.classes);
            });
        pass.give(self.x, dy);
        Ok(())
    }
}
