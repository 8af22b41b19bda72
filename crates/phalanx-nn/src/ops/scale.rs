//! Multiplication by a number. Saves nothing.

use crate::kernels::elementwise;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Result, Tensor};

pub(crate) struct Scale {
    x: SlotId,
    out: SlotId,
    factor: f32,
}

impl<'s> Tensor<'s> {
    /// `x * factor`.
    ///
    /// # Errors
    /// None at present; operations share one signature.
    pub fn scale(self, factor: f32) -> Result<Tensor<'s>> {
        let (step, x) = (self.step(), self.slot());
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), x, factor);
            let (shape, wants) = (st.shape(x), st.wants_grad(x));
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Scale { x, out, factor });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, x: SlotId, factor: f32) -> Buf {
    let mut buf = c.state.take_for_writing(x);
    elementwise::scale(c.team, buf.slice_mut(), factor);
    buf
}

impl Recorded for Scale {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, mut dy: Buf) -> Result<()> {
        elementwise::scale(pass.team, dy.slice_mut(), self.factor);
        pass.give(self.x, dy);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x, self.factor))
    }
}
