//! The same elements under another shape; no copy when the operand's handle is
//! the only one. Saves nothing.

use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Reshape {
    x: SlotId,
    out: SlotId,
}

impl<'s> Tensor<'s> {
    /// The elements in the same (row-major) order under another shape.
    ///
    /// # Errors
    /// `Usage` when the number of elements would change.
    pub fn reshape(self, shape: &[usize]) -> Result<Tensor<'s>> {
        let (step, x) = (self.step(), self.slot());
        let shape = Shape::new(shape)?;
        if shape.numel() != self.numel() {
            return Err(Error::usage(format!(
                "cannot reshape {:?} to {shape:?}",
                self.dims()
            )));
        }
        let out = {
            let mut st = step.state();
            let buf = st.take_for_writing(x);
            let wants = st.wants_grad(x);
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Reshape { x, out });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

impl Recorded for Reshape {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(c.state.take_for_writing(self.x))
    }
}
