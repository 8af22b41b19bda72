//! Scaled dot-product attention with several heads.

use super::{Act, Linear};
use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Error, Result, Value};

/// PyTorch's `MultiheadAttention` with `batch_first`, equal widths of query, key
/// and value, and no dropout: `in_proj_weight` `[3 E, E]`, `in_proj_bias`,
/// `out_proj.weight`, `out_proj.bias`, and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadAttention {
    /// Weights of query, key and value, concatenated in this order.
    pub in_weight: ParamId,
    /// Their biases, if there are some.
    pub in_bias: Option<ParamId>,
    /// The output projection.
    pub out: Linear,
    width: usize,
    heads: usize,
}

impl MultiHeadAttention {
    /// `heads` divides `width`.
    pub fn new(scope: Scope, width: usize, heads: usize) -> Self {
        Self::with(scope, width, heads, true)
    }

    /// As [`new`](Self::new), without biases.
    pub fn without_bias(scope: Scope, width: usize, heads: usize) -> Self {
        Self::with(scope, width, heads, false)
    }

    fn with(mut scope: Scope, width: usize, heads: usize, bias: bool) -> Self {
        let (same, zero) = (Layout::Same, Init::Constant(0.0));
        let in_weight = scope.param("in_proj_weight", &[3 * width, width], same, zero);
        let in_bias = bias.then(|| scope.param("in_proj_bias", &[3 * width], same, zero));
        let out = match bias {
            true => Linear::new(scope.enter("out_proj"), width, width),
            false => Linear::without_bias(scope.enter("out_proj"), width, width),
        };
        // PyTorch draws the output projection first, also a bias that it then discards.
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

    /// Every position of `x` (N, L, E) attends to all positions, or with `causal` to
    /// itself and those before it.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward<'s, V: Value<'s>>(&self, x: V, causal: bool) -> Result<V> {
        let mask = if causal {
            Mask::Causal(None)
        } else {
            Mask::Open
        };
        let all = x.linear(self.in_weight, self.in_bias, Act::None)?;
        let part = |i: usize| all.share().slice(2, i * self.width..(i + 1) * self.width);
        let y = attend(self.heads, [part(0)?, part(1)?, part(2)?], mask, None)?;
        self.out.forward(y)
    }

    /// Positions of `query` (N, L, E) attend to those of `key` (N, S, E) with the
    /// values of `value` (N, S, E). `mask` is added to the scores (N, heads, L, S);
    /// sizes of 1 are broadcast.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit.
    pub fn forward_cross<'s, V: Value<'s>>(
        &self,
        query: V,
        key: V,
        value: V,
        mask: Option<V>,
    ) -> Result<V> {
        // All three projections of each are computed, and one is used.
        let part = |x: V, i: usize| {
            x.linear(self.in_weight, self.in_bias, Act::None)?
                .slice(2, i * self.width..(i + 1) * self.width)
        };
        let parts = [part(query, 0)?, part(key, 1)?, part(value, 2)?];
        let mask = mask.map_or(Mask::Open, Mask::Added);
        self.out.forward(attend(self.heads, parts, mask, None)?)
    }
}

/// The mask added to scores (.., length, length) so that each position attends to itself
/// and those before it.
pub(crate) fn causal_mask<'s, V: Value<'s>>(of: &V, length: usize) -> Result<V> {
    let above = |i: usize| i % length > i / length;
    let closed = |i| if above(i) { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..length * length).map(closed).collect();
    of.constant(&mask, &[length, length])
}

/// Which keys a query sees.
pub(crate) enum Mask<V> {
    /// All.
    Open,
    /// Its own position's and those before it; with [`causal_mask`], if that is made already.
    Causal(Option<V>),
    /// This is added to the scores.
    Added(V),
}

/// Scaled dot-product attention of projected values (N, L, E), by heads; `dropout` zeroes
/// weights.
pub(crate) fn attend<'s, V: Value<'s>>(
    heads: usize,
    [q, k, v]: [V; 3],
    mask: Mask<V>,
    dropout: Option<f64>,
) -> Result<V> {
    match mask {
        Mask::Open if V::ATTENDS_AT_ONCE => q.attention(k, v, heads, false, dropout),
        Mask::Causal(_) if V::ATTENDS_AT_ONCE => q.attention(k, v, heads, true, dropout),
        _ => attend_stepwise(heads, [q, k, v], mask, dropout),
    }
}

/// As [`attend`], with an operation for each step.
pub(crate) fn attend_stepwise<'s, V: Value<'s>>(
    heads: usize,
    [q, k, v]: [V; 3],
    mask: Mask<V>,
    dropout: Option<f64>,
) -> Result<V> {
    let shape = q.shape();
    let &[n, l, width] = &*shape else {
        return Err(Error::usage(format!(
            "attention needs (N, L, E), got shape {shape:?}"
        )));
    };
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(Error::usage(format!(
            "{heads} heads do not divide a width of {width}"
        )));
    }
    let each = width / heads;
    let mask = match mask {
        Mask::Open => None,
        Mask::Causal(None) => Some(causal_mask(&q, l)?),
        Mask::Causal(Some(mask)) | Mask::Added(mask) => Some(mask),
    };
    // (N, L, E) to (N, heads, L, E / heads).
    let apart = |x: V| {
        let l = x.shape()[1];
        x.reshape(&[n, l, heads, each])?.permute(&[0, 2, 1, 3])
    };
    let q = apart(q)?.scale(1.0 / (each as f32).sqrt())?;
    let mut scores = q.bmm_transposed(apart(k)?)?;
    if let Some(mask) = mask {
        scores = scores.add(mask)?;
    }
    let mut weights = scores.softmax(3)?;
    if let Some(p) = dropout {
        weights = weights.dropout(p)?;
    }
    let y = weights.bmm(apart(v)?)?.permute(&[0, 2, 1, 3])?;
    y.reshape(&[n, l, width])
}
