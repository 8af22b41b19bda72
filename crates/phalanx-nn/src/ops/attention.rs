//! Attention with several heads. Saves queries, keys and values.

use crate::kernels::attention::{Sizes, backward, forward};
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Error, Result, Tensor};

pub(crate) struct Attention(Sizes);

impl<'s> Tensor<'s> {
    /// Scaled dot-product attention of queries (N, L, E) to keys and values (N, S, E), whose width E is divided among
    /// `heads`: `softmax(q kᵀ / sqrt(E / heads)) v` of each head. With `causal` each position sees itself and those before
    /// it, and L is S. PyTorch: `scaled_dot_product_attention`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit or the steps differ.
    pub fn attention(
        self,
        key: Tensor<'s>,
        value: Tensor<'s>,
        heads: usize,
        causal: bool,
    ) -> Result<Tensor<'s>> {
        let step = self.step();
        let (dq, dk, dv) = (self.dims(), key.dims(), value.dims());
        let (&[samples, queries, width], &[of, keys, wide]) = (&*dq, &*dk) else {
            return Err(Error::usage(format!(
                "attention needs (N, L, E) and (N, S, E), got shapes {dq:?} and {dk:?}"
            )));
        };
        let same = std::ptr::eq(step, key.step()) && std::ptr::eq(step, value.step());
        let fits = same && *dk == *dv && of == samples && wide == width;
        if !fits || causal && keys != queries {
            return Err(Error::usage(format!(
                "attention of shapes {dq:?}, {dk:?} and {dv:?} (causal: {causal}) does not fit, or the steps differ"
            )));
        }
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(Error::usage(format!(
                "{heads} heads do not divide a width of {width}"
            )));
        }
        let sizes = Sizes {
            samples,
            queries,
            keys,
            heads,
            each: width / heads,
            causal,
        };
        let slots = [self.slot(), key.slot(), value.slot()];
        step.apply(slots, dq, Attention(sizes))
    }
}

impl Operation<3> for Attention {
    fn saves(&self) -> [bool; 3] {
        [true; 3]
    }

    fn forward(&self, c: &mut Compute<'_>, x: [SlotId; 3]) -> Result<(Buf, Option<Buf>)> {
        let mut y = c.state.pool.get(c.state.shape(x[0]).numel());
        let values = x.map(|x| c.state.value(x));
        forward(c.threads, self.0, values, y.slice_mut());
        Ok((y, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<3>, dy: Buf) -> Result<()> {
        let wanted = slots.x.map(|x| (ctx.wants(x), ctx.value(x).len()));
        let mut grads = wanted.map(|(wants, len)| wants.then(|| ctx.pool().get(len)));
        let to = grads
            .each_mut()
            .map(|grad| grad.as_mut().map(Buf::slice_mut));
        let values = slots.x.map(|x| ctx.value(x));
        backward(ctx.threads, self.0, values, dy.slice(), to);
        for (x, grad) in slots.x.into_iter().zip(grads) {
            if let Some(grad) = grad {
                ctx.give(x, grad);
            }
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
