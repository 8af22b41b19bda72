//! The same values in the other precision. Saves nothing.

use crate::Tensor;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, OpNode, Operation, SlotId, Slots};
use crate::{Precision, Result};
use phalanx_kernels::element::{Bf16, Values, convert, elements_mut};
use phalanx_kernels::par::ThreadPool;

pub(crate) struct Cast;

impl Tensor<'_> {
    /// The value's slot with elements of `precision`. If the value has others, this
    /// handle refers to the converted one from now on.
    pub(crate) fn slot_as(&self, precision: Precision) -> SlotId {
        let (step, x) = (self.step(), self.own_slot());
        let out = {
            let mut st = step.state();
            if st.precision_of(x) == precision {
                return x;
            }
            let buf = converted(&mut step.compute(&mut st), x);
            let (shape, wants) = (st.shape(x), st.wants_grad(x));
            let out = st.add_output_as((shape, precision), buf, wants);
            st.note_converted(x, out);
            if wants {
                st.record(OpNode::new([x], out, Cast));
            }
            out
        };
        self.move_to(out);
        out
    }
}

/// The elements in the precision that they do not have.
fn converted(c: &mut Compute<'_>, x: SlotId) -> Buf {
    let (len, from) = (c.state.shape(x).numel(), c.state.precision_of(x));
    let mut buf = c.state.pool.get(other(from).memory_len(len));
    convert_to(c.threads, c.state.values(x), &mut buf);
    buf
}

/// Writes `from` to `buf` in the other precision.
fn convert_to(threads: &ThreadPool, from: Values<'_>, buf: &mut Buf) {
    match from {
        Values::F32(v) => convert(threads, v, elements_mut::<Bf16>(buf.slice_mut(), v.len())),
        Values::Bf16(v) => convert(threads, v, buf.slice_mut()),
    }
}

fn other(precision: Precision) -> Precision {
    match precision {
        Precision::F32 => Precision::Bf16,
        Precision::Bf16 => Precision::F32,
    }
}

impl Operation for Cast {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        Ok((converted(c, x), None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, dy: Buf) -> Result<()> {
        let [x] = s.x;
        let (len, to) = (ctx.shape(x).numel(), ctx.precision_of(x));
        let mut dx = ctx.pool().get(to.memory_len(len));
        let from = Values::of(dy.slice(), other(to), len);
        convert_to(ctx.threads, from, &mut dx);
        ctx.pool().put(dy);
        ctx.give(x, dx);
        Ok(())
    }
}
