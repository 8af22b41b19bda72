//! A decoder-only transformer as GPT-2 (A. Radford et al., "Language models are
//! unsupervised multitask learners", 2019) and nanoGPT (A. Karpathy, 2022) build it, with
//! separate projections for query, key and value.

use crate::layers::{Act, Dropout, Embedding, KvCache, LayerNorm, Linear, attend, causal_mask};
use crate::param::{Init, ParamId, Scope};
use crate::value::Mask;
use crate::{Result, Value, ValueStep, refuse};

/// Sizes of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocab: usize,
    /// Longest sequence.
    pub context: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Heads of each attention; they divide `width`.
    pub heads: usize,
    /// Size of the vector of a token.
    pub width: usize,
    /// Probability with which elements are zeroed in training: after the embeddings, of the
    /// attention weights, and after the last layer of attention and MLP.
    pub dropout: f64,
}

/// Standard deviation of initial weights.
const STD: f64 = 0.02;

/// The projections to query, key and value.
#[derive(Clone, Debug)]
enum Projections {
    Separate([Linear; 3]),
    /// In one layer, one behind the other.
    Joined(Linear),
}

impl Projections {
    fn linears(&self) -> &[Linear] {
        match self {
            Projections::Separate(all) => all,
            Projections::Joined(all) => std::slice::from_ref(all),
        }
    }

    fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<[V; 3]> {
        match self {
            Projections::Separate([q, k, v]) => {
                Ok([q.forward(x.share())?, k.forward(x.share())?, v.forward(x)?])
            }
            Projections::Joined(all) => {
                let all = all.forward(x)?;
                let width = all.shape().last().map_or(0, |n| n / 3);
                let part = |i: usize| all.share().slice(2, i * width..(i + 1) * width);
                Ok([part(0)?, part(1)?, part(2)?])
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    qkv: Projections,
    attn_proj: Linear,
    ln_2: LayerNorm,
    fc: Linear,
    mlp_proj: Linear,
    heads: usize,
    dropout: Dropout,
}

impl Block {
    /// With `is_gpt2` under the names of Hugging Face's GPT-2, and with its joined projections.
    fn new(mut scope: Scope, config: &GptConfig, dropout: Dropout, is_gpt2: bool) -> Self {
        let width = config.width;
        type Make = fn(Scope, usize, usize) -> Linear;
        let (linear, [fc, proj]): (Make, _) = match is_gpt2 {
            true => (Linear::transposed, ["c_fc", "c_proj"]),
            false => (Linear::new, ["fc", "proj"]),
        };
        let ln_1 = LayerNorm::new(scope.enter("ln_1"), &[width]);
        let mut attn = scope.enter("attn");
        let qkv = match is_gpt2 {
            true => Projections::Joined(linear(attn.enter("c_attn"), width, 3 * width)),
            false => {
                let each = |name| linear(attn.enter(name), width, width);
                Projections::Separate(["q", "k", "v"].map(each))
            }
        };
        let attn_proj = linear(attn.enter(proj), width, width);
        let ln_2 = LayerNorm::new(scope.enter("ln_2"), &[width]);
        let mut mlp = scope.enter("mlp");
        Block {
            ln_1,
            qkv,
            attn_proj,
            ln_2,
            fc: linear(mlp.enter(fc), width, 4 * width),
            mlp_proj: linear(mlp.enter(proj), 4 * width, width),
            heads: config.heads,
            dropout,
        }
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let others = [&self.attn_proj, &self.fc, &self.mlp_proj];
        self.qkv.linears().iter().chain(others)
    }

    fn forward<'s, V: Value<'s>>(
        &self,
        x: V,
        mask: Option<V>,
        cache: Option<&mut KvCache<V>>,
    ) -> Result<V> {
        let y = self.ln_1.forward(x.share())?;
        let [q, k, v] = self.qkv.forward(y)?;
        let [k, v] = match cache {
            Some(cache) => cache.append([k, v])?,
            None => [k, v],
        };
        let y = attend(
            self.heads,
            [q, k, v],
            Mask::Causal(mask),
            Some(self.dropout.p()),
        )?;
        let x = x.add(self.dropout.forward(self.attn_proj.forward(y)?)?)?;
        let y = self
            .fc
            .forward(self.ln_2.forward(x.share())?)?
            .gelu_tanh()?;
        x.add(self.dropout.forward(self.mlp_proj.forward(y)?)?)
    }
}

/// GPT-2: learned positions, layer norms before attention and MLP, GELU in its tanh form, and an
/// output layer `lm_head` with its own weight. Names are nanoGPT's (`transformer.wte.weight`,
/// `transformer.h.0.ln_1.weight`, `transformer.ln_f.bias`), with `attn.q`, `attn.k`, `attn.v` and
/// `attn.proj` for its `attn.c_attn` and `attn.c_proj`, `mlp.fc` and `mlp.proj` for its
/// `mlp.c_fc` and `mlp.c_proj`.
#[derive(Clone, Debug)]
pub struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    /// Absent where its weight is that of `wte`.
    lm_head: Option<Linear>,
    context: usize,
    dropout: Dropout,
    recomputes: bool,
}

impl Gpt {
    /// With nanoGPT's initial weights, drawn in its order: normal with standard deviation
    /// 0.02, that of `attn.proj` and `mlp.proj` divided by the square root of 2 x layers; biases 0.
    pub fn new(scope: &mut Scope, config: &GptConfig) -> Self {
        Self::with(scope, config, false)
    }

    /// GPT-2 as Hugging Face's `GPT2LMHeadModel` has it: names and shapes are its (`transformer.h.0.attn.c_attn.weight` of
    /// `[width, 3 width]`), and the output layer has the weight of `transformer.wte`. Initial values are drawn from the same
    /// distributions, in another order.
    pub fn gpt2(scope: &mut Scope, config: &GptConfig) -> Self {
        Self::with(scope, config, true)
    }

    fn with(scope: &mut Scope, config: &GptConfig, is_gpt2: bool) -> Self {
        let width = config.width;
        let dropout = Dropout::new(config.dropout);
        let mut transformer = scope.enter("transformer");
        let wte = Embedding::new(transformer.enter("wte"), config.vocab, width);
        let wpe = Embedding::new(transformer.enter("wpe"), config.context, width);
        let mut all = transformer.enter("h");
        let block = |i: usize| Block::new(all.enter(&i.to_string()), config, dropout, is_gpt2);
        let blocks: Vec<Block> = (0..config.layers).map(block).collect();
        let ln_f = LayerNorm::new(transformer.enter("ln_f"), &[width]);
        let head = || Linear::without_bias(scope.enter("lm_head"), width, config.vocab);
        let lm_head = (!is_gpt2).then(head);
        let gpt = Gpt {
            wte,
            wpe,
            blocks,
            ln_f,
            lm_head,
            context: config.context,
            dropout,
            recomputes: false,
        };
        gpt.draw(scope);
        gpt
    }

    fn draw(&self, scope: &mut Scope) {
        let normal = |scope: &mut Scope, weight: ParamId, std: f64| {
            scope.redraw(weight, Init::Normal { mean: 0.0, std });
        };
        for weight in [self.wte.weight, self.wpe.weight] {
            normal(scope, weight, STD);
        }
        let inner = self.blocks.iter().flat_map(Block::linears);
        for linear in inner.chain(&self.lm_head) {
            normal(scope, linear.weight, STD);
            if let Some(bias) = linear.bias {
                scope.redraw(bias, Init::Constant(0.0));
            }
        }
        // Each adds to the residual sum over all blocks.
        let std = STD / ((2 * self.blocks.len()) as f64).sqrt();
        for block in &self.blocks {
            normal(scope, block.attn_proj.weight, std);
            normal(scope, block.mlp_proj.weight, std);
        }
    }

    /// Sets whether backward recomputes each block's activations (less memory, more time;
    /// [`Value::recompute`]); no bit changes.
    #[must_use]
    pub fn recompute(mut self, on: bool) -> Self {
        self.recomputes = on;
        self
    }

    /// Sequences of tokens, one after the other, to the logits of the next token at each
    /// place: (batch, length, vocab).
    ///
    /// # Errors
    /// `Usage` when `tokens` are not `batch` x `length` numbers below the size of the
    /// vocabulary, the length exceeds the context, or the heads do not divide the width.
    pub fn forward<'s, S: ValueStep<'s>>(
        &self,
        step: S,
        tokens: &S::Tokens,
        (batch, length): (usize, usize),
    ) -> Result<S::Value> {
        let x = self.embed(step, tokens, (batch, length), 0)?;
        let mask = match S::Value::ATTENDS_AT_ONCE {
            true => None,
            false => Some(causal_mask(&x, length)?),
        };
        let x = super::through(&self.blocks, self.recomputes, x, |block, x| {
            block.forward(x, mask.as_ref().map(Value::share), None)
        })?;
        self.scores(x)
    }

    /// The logits (batch, length, vocab) of the next tokens of sequences whose tokens so far `caches` have seen: those
    /// that [`forward`](Self::forward) of the whole sequences has there. `caches` has an element for each block; begin
    /// with an empty vector, and use it in one step ([`KvCache`]).
    ///
    /// # Errors
    /// As [`forward`](Self::forward), of the length with the tokens so far; and `Usage` when the caches are of another
    /// model, step or batch size. Do not use the caches after an error.
    pub fn forward_cached<'s, S: ValueStep<'s>>(
        &self,
        step: S,
        tokens: &S::Tokens,
        sizes: (usize, usize),
        caches: &mut Vec<KvCache<S::Value>>,
    ) -> Result<S::Value> {
        let first = caches.first().map_or(0, KvCache::len);
        if first == 0 {
            caches.resize_with(self.blocks.len(), KvCache::new);
        } else if caches.len() != self.blocks.len() {
            refuse!(
                "{} caches for a model of {} blocks",
                caches.len(),
                self.blocks.len()
            );
        }
        let mut x = self.embed(step, tokens, sizes, first)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(x, None, Some(cache))?;
        }
        self.scores(x)
    }

    /// The logits of the last block's output.
    fn scores<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let x = self.ln_f.forward(x)?;
        match &self.lm_head {
            Some(head) => head.forward(x),
            None => x.linear(self.wte.weight, None, Act::None),
        }
    }

    /// The sum of the vectors of tokens and of their positions, which count from `first`.
    fn embed<'s, S: ValueStep<'s>>(
        &self,
        step: S,
        tokens: &S::Tokens,
        (batch, length): (usize, usize),
        first: usize,
    ) -> Result<S::Value> {
        let end = first.saturating_add(length);
        if end > self.context {
            refuse!(
                "a sequence of {end} tokens exceeds the model's context of {}",
                self.context
            );
        }
        let positions: Vec<u32> = (first as u32..end as u32).collect();
        let positions = step.constant_embedding(self.wpe.weight, &positions, &[length])?;
        let x = self.wte.forward(step, tokens, &[batch, length])?;
        self.dropout.forward(x.add(positions)?)
    }
}
