//! Scaled dot-product attention with several heads.

use super::{Act, Linear};
use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Error, Result, Tensor};

/// PyTorch's `MultiheadAttention` with `batch_first`, equal widths of query, key
/// and value, and no dropout: `in_proj_weight` `[3 E, E]`, `in_proj_bias`,
/// `out_proj.weight`, `out_proj.bias`, and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadAttention {
    /// Weight of query, key and value, one below the other.
    pub in_weight: ParamId,
    /// Their biases.
    pub in_bias: ParamId,
    /// What mixes the heads at the end.
    pub out: Linear,
    width: usize,
    heads: usize,
}

impl MultiHeadAttention {
    /// `heads` divides `width`.
    pub fn new(scope: Scope, width: usize, heads: usize) -> Self {
        let mut scope = scope;
        let (same, zero) = (Layout::Same, Init::Constant(0.0));
        let in_weight = scope.param("in_proj_weight", &[3 * width, width], same, zero);
        let in_bias = scope.param("in_proj_bias", &[3 * width], same, zero);
        let out = Linear::new(scope.enter("out_proj"), width, width);
        // PyTorch draws the last layer first, its bias for nothing.
        if let Some(bias) = out.bias {
            scope.redraw(bias, zero);
        }
        // Xavier: 3 E outputs of E inputs.
        let bound = 3f64.sqrt() * (2.0 / (4 * width).max(1) as f64).sqrt();
        let (low, high) = (-bound, bound);
        scope.redraw(in_weight, Init::Uniform { low, high });
        MultiHeadAttention {
            in_weight,
            in_bias,
            out,
            width,
            heads,
        }
    }

    /// Every position of `x` (N, L, E) looks at all of them, or with `causal` at
    /// itself and those before it.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s>(&self, x: Tensor<'s>, causal: bool) -> Result<Tensor<'s>> {
        let mask = match (causal, &*x.shape()) {
            (true, &[_, l, _]) => {
                let above = |i: usize| i % l > i / l;
                let closed = |i| if above(i) { f32::NEG_INFINITY } else { 0.0 };
                let mask: Vec<f32> = (0..l * l).map(closed).collect();
                Some(x.step().input(&mask, &[l, l])?)
            }
            _ => None,
        };
        let all = x.linear(self.in_weight, Some(self.in_bias), Act::None)?;
        let part = |i: usize| all.share().slice(2, i * self.width..(i + 1) * self.width);
        self.attend([part(0)?, part(1)?, part(2)?], mask)
    }

    /// Positions of `query` (N, L, E) look at those of `key` (N, S, E) and take
    /// from `value` (N, S, E). `mask` is added to the scores (N, heads, L, S);
    /// sizes of 1 repeat.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward_cross<'s>(
        &self,
        query: Tensor<'s>,
        key: Tensor<'s>,
        value: Tensor<'s>,
        mask: Option<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        // All three projections of each are made, and one is taken.
        let part = |x: Tensor<'s>, i: usize| {
            x.linear(self.in_weight, Some(self.in_bias), Act::None)?
                .slice(2, i * self.width..(i + 1) * self.width)
        };
        self.attend([part(query, 0)?, part(key, 1)?, part(value, 2)?], mask)
    }

    fn attend<'s>(
        &self,
        [q, k, v]: [Tensor<'s>; 3],
        mask: Option<Tensor<'s>>,
    ) -> Result<Tensor<'s>> {
        let shape = q.shape();
        let &[n, l, _] = &*shape else {
            return Err(Error::usage(format!(
                "attention needs (N, L, E), got shape {shape:?}"
            )));
        };
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            return Err(Error::usage(format!(
                "{} heads do not divide a width of {}",
                self.heads, self.width
            )));
        }
        let each = self.width / self.heads;
        // (N, L, E) to (N, heads, L, E / heads).
        let apart = |x: Tensor<'s>| {
            let l = x.shape()[1];
            x.reshape(&[n, l, self.heads, each])?.permute(&[0, 2, 1, 3])
        };
        let q = apart(q)?.scale(1.0 / (each as f32).sqrt())?;
        let mut scores = q.bmm_transposed(apart(k)?)?;
        if let Some(mask) = mask {
            scores = scores.add(mask)?;
        }
        let y = scores.softmax(3)?.bmm(apart(v)?)?.permute(&[0, 2, 1, 3])?;
        self.out.forward(y.reshape(&[n, l, self.width])?)
    }
}
