//! Sum of two tensors, in place where their shapes agree. Saves nothing.

use crate::kernels::broadcast::Arithmetic;
use crate::kernels::elementwise;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Error, Result, Tensor};

pub(crate) struct Add {
    a: SlotId,
    b: SlotId,
    out: SlotId,
}

impl<'s> Tensor<'s> {
    /// `self + other`; sizes of 1 repeat, shapes are aligned at the last dimension.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit or the steps differ.
    #[allow(clippy::should_implement_trait)] // it can fail
    pub fn add(self, other: Tensor<'s>) -> Result<Tensor<'s>> {
        let (step, a, b) = (self.step(), self.slot(), other.slot());
        if !std::ptr::eq(step, other.step()) {
            return Err(Error::usage("add: the tensors belong to different steps"));
        }
        if self.dims() != other.dims() {
            return self.binary(other, Arithmetic::Add);
        }
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), a, b);
            let (shape, wants) = (st.shape(a), st.wants_grad(a) || st.wants_grad(b));
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Add { a, b, out });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, a: SlotId, b: SlotId) -> Buf {
    let mut buf = c.state.take_for_writing(a);
    elementwise::add(c.team, buf.slice_mut(), c.state.value(b));
    buf
}

impl Recorded for Add {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.a));
        f(Visit::Input(self.b));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        if pass.wants(self.a) && pass.wants(self.b) {
            let mut copy = pass.pool().get(dy.slice().len());
            copy.slice_mut().copy_from_slice(dy.slice());
            pass.give(self.b, copy);
            pass.give(self.a, dy);
        } else {
            let only = if pass.wants(self.a) { self.a } else { self.b };
            pass.give(only, dy);
        }
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.a, self.b))
    }
}
