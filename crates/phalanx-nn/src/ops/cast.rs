//! The same values in the other precision. Saves nothing.

use crate::Tensor;
use crate::kernels::element::{Bf16, Values, convert, elements_mut};
use crate::par::Team;
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
    turn(c.team, c.state.values(x), &mut buf);
    buf
}

/// Writes `from` to `buf` in the other precision.
fn turn(team: &Team, from: Values<'_>, buf: &mut Buf) {
    match from {
        Values::F32(v) => convert(team, v, elements_mut::<Bf16>(buf.slice_mut(), v.len())),
        Values::Bf16(v) => convert(team, v, buf.slice_mut()),
    }
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
        let from = Values::of(dy.slice(), other(to), len);
        turn(pass.team, from, &mut dx);
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
