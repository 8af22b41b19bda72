//! Attention with several heads. Saves queries, keys and values; backward computes the mask of dropout again.

use std::ops::Range;

use super::dropout::{check_rate, next_mask};
use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::{Result, Tensor, refuse};
use phalanx_kernels::attention::{Dropped, Sizes, backward, forward};
use phalanx_kernels::dropout::{MaskKey, Rate};

pub(crate) struct Attention {
    sizes: Sizes,
    mask: Option<(MaskKey, Rate)>,
}

/// Elements of a sample whose masks are drawn before the generator's counter begins again.
const MOST_DRAWN: u64 = 1 << 34;

impl<'s> Tensor<'s> {
    /// Scaled dot-product attention of queries (N, L, E) to keys and values (N, S, E), whose width E is divided among
    /// `heads`: `softmax(q kᵀ / sqrt(E / heads)) v` of each head. With `causal` the queries are the last L of the S
    /// positions, and each sees itself and those before it. `dropout` is the probability of dropping an attention weight in training; the mask is that of
    /// [`dropout`](Tensor::dropout) on the weights (N, heads, L, S). With `None` the operation does not count among the
    /// step's random operations. PyTorch: `scaled_dot_product_attention`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, the steps differ, or a sample has more than 2^34 weights with dropout; and as
    /// [`dropout`](Tensor::dropout).
    pub fn attention(
        self,
        key: Tensor<'s>,
        value: Tensor<'s>,
        heads: usize,
        causal: bool,
        dropout: Option<f64>,
    ) -> Result<Tensor<'s>> {
        let step = self.step();
        let (dq, dk, dv) = (self.dims(), key.dims(), value.dims());
        let (&[samples, queries, width], &[of, keys, wide]) = (&*dq, &*dk) else {
            refuse!("attention needs (N, L, E) and (N, S, E), got shapes {dq:?} and {dk:?}");
        };
        let same = std::ptr::eq(step, key.step()) && std::ptr::eq(step, value.step());
        let fits = same && *dk == *dv && of == samples && wide == width;
        if !fits || causal && keys < queries {
            refuse!(
                "attention of shapes {dq:?}, {dk:?} and {dv:?} (causal: {causal}) does not fit, or the steps differ"
            );
        }
        if heads == 0 || !width.is_multiple_of(heads) {
            refuse!("{heads} heads do not divide a width of {width}");
        }
        let sizes = Sizes {
            samples,
            queries,
            keys,
            heads,
            each: width / heads,
            causal,
        };
        let mask = match dropout {
            Some(p) => {
                check_rate(p)?;
                let weights = heads.saturating_mul(queries).saturating_mul(keys);
                if weights as u64 > MOST_DRAWN {
                    refuse!(
                        "attention with dropout has {weights} weights a sample (heads x queries x keys); at most {MOST_DRAWN} are possible"
                    );
                }
                next_mask(step, p, samples)?
            }
            None => None,
        };
        let slots = [self.slot(), key.slot(), value.slot()];
        step.apply(slots, dq, Attention { sizes, mask })
    }
}

impl Attention {
    /// The weights that are dropped, by the ids of `samples`.
    fn drop<'a>(&self, samples: impl FnOnce(Range<usize>) -> &'a [u64]) -> Option<Dropped<'a>> {
        self.mask.map(|(key, rate)| Dropped {
            key,
            rate,
            samples: samples(0..self.sizes.samples),
        })
    }
}

impl Operation<3> for Attention {
    fn saves(&self) -> [bool; 3] {
        [true; 3]
    }

    fn flops(&self) -> u64 {
        2 * self.sizes.product_flops()
    }

    fn backward_flops(&self, [q, k, v]: [bool; 3], _: bool) -> u64 {
        // The gradients of queries and keys need that of the weights.
        let products = [q || k, q, k, v].into_iter().filter(|needed| *needed);
        products.count() as u64 * self.sizes.product_flops()
    }

    fn forward(&self, c: &mut Compute<'_>, x: [SlotId; 3]) -> Result<(Buf, Option<Buf>)> {
        let mut y = c.state.pool.get(c.state.shape(x[0]).numel());
        let values = x.map(|x| c.state.value(x));
        let drop = self.drop(|rows| c.state.samples(rows));
        forward(c.threads, self.sizes, values, drop, y.slice_mut());
        Ok((y, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, slots: &Slots<3>, dy: Buf) -> Result<()> {
        let wanted = slots.x.map(|x| (ctx.wants(x), ctx.value(x).len()));
        let mut grads = wanted.map(|(wants, len)| wants.then(|| ctx.pool().get(len)));
        let to = grads
            .each_mut()
            .map(|grad| grad.as_mut().map(Buf::slice_mut));
        let values = slots.x.map(|x| ctx.value(x));
        let drop = self.drop(|rows| ctx.samples(rows));
        backward(ctx.threads, self.sizes, values, drop, dy.slice(), to);
        for (x, grad) in slots.x.into_iter().zip(grads) {
            if let Some(grad) = grad {
                ctx.give(x, grad);
            }
        }
        ctx.pool().put(dy);
        Ok(())
    }
}
