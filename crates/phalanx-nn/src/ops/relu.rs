//! ReLU, in place where nobody else needs the operand. Saves its output.

use crate::kernels::elementwise;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Result, Tensor};

pub(crate) struct Relu {
    x: SlotId,
    out: SlotId,
}

impl<'s> Tensor<'s> {
    /// `max(0, x)`; the derivative at 0 is 0.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn relu(self) -> Result<Tensor<'s>> {
        let (step, x) = (self.step(), self.slot());
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), x);
            let (shape, wants) = (st.shape(x), st.wants_grad(x));
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Relu { x, out });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, x: SlotId) -> Buf {
    let mut buf = c.state.take_for_writing(x);
    elementwise::relu(c.team, buf.slice_mut());
    buf
}

impl Recorded for Relu {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
        f(Visit::Saved(self.out));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        elementwise::relu_backward(pass.team, pass.value(self.out), dy.slice_mut());
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x))
    }
}
