//! A parameter as a tensor: a copy of its values. Saves nothing.

use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operand, Operation, SlotId, Slots, Step};
use crate::tensor::Shape;
use crate::{Result, Tensor};
use phalanx_kernels::{Mode, elementwise};

pub(crate) struct Parameter {
    id: ParamId,
}

impl Step<'_> {
    /// A parameter as a tensor of this step: a copy in the engine's memory order, of
    /// [`ParamInfo::engine_shape`](crate::ParamInfo::engine_shape). Parts under
    /// [`Tensor::recompute`] free the copy and make it again.
    ///
    /// The gradient goes to the sink as the parameter's own. Each call counts as a use: the
    /// gradients of all uses, by tensor or by id, are added in reverse order of recording.
    ///
    /// # Errors
    /// `Usage` when the parameter belongs to another model or has more than 6 dimensions.
    pub fn parameter<'s>(&'s self, id: ParamId) -> Result<Tensor<'s>> {
        let info = self.info(id)?;
        let mut shape = Shape::new(&info.shape)?;
        for (to, &from) in info.layout.order().iter().enumerate() {
            shape = shape.with(to, info.shape[from])?;
        }
        self.apply([], shape, Parameter { id })
    }
}

impl Operation<0> for Parameter {
    fn operands(&self) -> [Option<Operand>; 2] {
        [Some(Operand::Param(self.id)), None]
    }

    fn forward(&self, c: &mut Compute<'_>, _: [SlotId; 0]) -> Result<(Buf, Option<Buf>)> {
        let values = c.params.get(self.id);
        let mut buf = c.state.pool.get(values.len());
        buf.slice_mut().copy_from_slice(values);
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, _: &Slots<0>, dy: Buf) -> Result<()> {
        let threads = ctx.threads;
        ctx.operand_grad(Operand::Param(self.id), |dw, mode| match mode {
            Mode::Write => dw.copy_from_slice(dy.slice()),
            Mode::Add => elementwise::add(threads, dw, dy.slice()),
        })?;
        ctx.pool().put(dy);
        Ok(())
    }
}
