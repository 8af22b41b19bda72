//! Scaled dot-product attention with several heads.

use super::Linear;
use crate::param::{Init, Layout, Lora, ParamId, Scope};
use crate::value::{Mask, attend_stepwise, last_causal_mask};
use crate::{Result, Value};

/// PyTorch's `MultiheadAttention` with `batch_first`, equal widths of query, key
/// and value: `in_proj_weight` `[3 E, E]`, `in_proj_bias`,
/// `out_proj.weight`, `out_proj.bias`, and its initial values.
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadAttention {
    /// Weights of query, key and value, concatenated in this order.
    pub in_weight: ParamId,
    /// Their biases, if there are some.
    pub in_bias: Option<ParamId>,
    /// The output projection.
    pub out: Linear,
    lora: Option<Lora>,
    width: usize,
    heads: usize,
    rotary: Option<f64>,
    dropout: Option<f64>,
}

/// Keys and values of the positions that an attention ([`MultiHeadAttention`], or one of a [`Gpt`](crate::models::Gpt)) has seen, for text that is made token by token.
///
/// It holds values of one step: make one for each attention of a model after `tape.inference(..)`, and use the step for
/// the whole text. Each call copies what is there, as much memory as the attention then reads.
#[derive(Debug)]
pub struct KvCache<V> {
    pair: Option<[V; 2]>,
}

impl<V> Default for KvCache<V> {
    fn default() -> Self {
        KvCache { pair: None }
    }
}

impl<'s, V: Value<'s>> KvCache<V> {
    /// Of no positions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of positions so far: the position of the next token.
    pub fn len(&self) -> usize {
        let shape = self.pair.as_ref().map(|[keys, _]| keys.shape());
        shape.map_or(0, |shape| shape[1])
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends keys and values (N, L, E); returns all (N, S, E).
    pub(crate) fn append(&mut self, new: [V; 2]) -> Result<[V; 2]> {
        let all = match &self.pair {
            Some(old) => {
                let [k, v] = new;
                let [old_k, old_v] = old.each_ref().map(Value::share);
                [V::concat(vec![old_k, k], 1)?, V::concat(vec![old_v, v], 1)?]
            }
            None => new,
        };
        self.pair = Some(all.each_ref().map(Value::share));
        Ok(all)
    }
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
        let lora = scope.adapter(width, 3 * width, false);
        let has = (bias, lora.is_some());
        let out = Linear::with(scope.enter("out_proj"), [width, width], has, same);
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
            lora,
            width,
            heads,
            rotary: None,
            dropout: None,
        }
    }

    /// Zeroes attention weights with probability `p` in training, and scales the others by `1 / (1 - p)`.
    #[must_use]
    pub fn dropout(mut self, p: f64) -> Self {
        self.dropout = Some(p);
        self
    }

    /// Rotates queries and keys by their positions, counted from 0, with this base (LLaMA's is 10000), as
    /// [`Value::rotary`]. The width of a head must be even.
    #[must_use]
    pub fn rotary(mut self, base: f64) -> Self {
        self.rotary = Some(base);
        self
    }

    /// The three projections of `x`, one behind the other.
    fn in_projection<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let (weight, bias, lora) = (self.in_weight, self.in_bias, self.lora);
        Linear { weight, bias, lora }.forward(x)
    }

    /// Query, key and value of `x`, whose positions count from `first`.
    fn project<'s, V: Value<'s>>(&self, x: V, first: usize) -> Result<[V; 3]> {
        let all = self.in_projection(x)?;
        let part = |all: &V, i: usize| all.share().slice(2, i * self.width..(i + 1) * self.width);
        let Some(base) = self.rotary else {
            return Ok([part(&all, 0)?, part(&all, 1)?, part(&all, 2)?]);
        };
        let turned = all.share().slice(2, 0..2 * self.width)?;
        let turned = turned.rotary(2 * self.heads, base, first)?;
        Ok([part(&turned, 0)?, part(&turned, 1)?, part(&all, 2)?])
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
        let y = attend(self.heads, self.project(x, 0)?, mask, self.dropout)?;
        self.out.forward(y)
    }

    /// The next L positions `x` (N, L, E) attend to themselves and to those before them, whose keys and values `cache` has;
    /// theirs are appended to it. The results are those of a causal [`forward`](Self::forward) of all positions at once.
    ///
    /// # Errors
    /// `Usage` when the sizes do not fit, or the cache is of another step or batch size; it is then as before.
    pub fn forward_cached<'s, V: Value<'s>>(&self, x: V, cache: &mut KvCache<V>) -> Result<V> {
        let [q, k, v] = self.project(x, cache.len())?;
        let [k, v] = cache.append([k, v])?;
        let y = attend(self.heads, [q, k, v], Mask::Causal(None), self.dropout)?;
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
            self.in_projection(x)?
                .slice(2, i * self.width..(i + 1) * self.width)
        };
        let mut parts = [part(query, 0)?, part(key, 1)?, part(value, 2)?];
        if let Some(base) = self.rotary {
            let [q, k, v] = parts;
            let rotate = |x: V| x.rotary(self.heads, base, 0);
            parts = [rotate(q)?, rotate(k)?, v];
        }
        let mask = mask.map_or(Mask::Open, Mask::Added);
        self.out
            .forward(attend(self.heads, parts, mask, self.dropout)?)
    }
}

/// The mask added to scores (.., length, length) so that each position attends to itself
/// and those before it.
pub(crate) fn causal_mask<'s, V: Value<'s>>(of: &V, length: usize) -> Result<V> {
    last_causal_mask(of, length, length)
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
