//! The same values in the other precision. Saves nothing.

use crate::Tensor;
use crate::kernels::element::{Bf16, convert, elements, elements_mut};
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::{Precision, Result};

pub(crate) struct Cast {
    x: SlotId,
    out: SlotId,
}

impl Tensor<'_> {
    /// The value's slot with elements of `precision`: of a value that has others, this
    /// handle names the converted one from now on.
    pub(crate) fn slot_as(&self, precision: Precision) -> SlotId {
        let (step, x) = (self.step(), self.own_slot());
        let out = {
            let mut st = step.state();
            if st.precision_of(x) == precision {
                return x;
            }
            let buf = compute(&mut step.compute(&mut st), x);
            let (shape, wants) = (st.shape(x), st.wants_grad(x));
            let out = st.add_output_as((shape, precision), buf, wants);
            if wants {
                st.record(Cast { x, out });
            }
            out
        };
        self.move_to(out);
        out
    }
}

/// The elements in the precision that they do not have.
fn compute(c: &mut Compute<'_>, x: SlotId) -> Buf {
    let (len, from) = (c.state.shape(x).numel(), c.state.precision_of(x));
    let mut buf = c.state.pool.get(other(from).memory_len(len));
    match from {
        Precision::F32 => {
            let to = elements_mut::<Bf16>(buf.slice_mut(), len);
            convert(c.team, c.state.elements::<f32>(x), to);
        }
        Precision::Bf16 => convert(c.team, c.state.elements::<Bf16>(x), buf.slice_mut()),
    }
    buf
}

fn other(precision: Precision) -> Precision {
    match precision {
        Precision::F32 => Precision::Bf16,
        Precision::Bf16 => Precision::F32,
    }
}

impl Recorded for Cast {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let (len, to) = (pass.shape(self.x).numel(), pass.precision_of(self.x));
        let mut dx = pass.pool().get(to.memory_len(len));
        match to {
            Precision::F32 => convert(pass.team, elements::<Bf16>(dy.slice(), len), dx.slice_mut()),
            Precision::Bf16 => {
                let dx = elements_mut::<Bf16>(dx.slice_mut(), len);
                convert(pass.team, dy.slice(), dx);
            }
        }
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x))
    }
}
