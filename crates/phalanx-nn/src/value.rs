//! The operations that layers and models need from their values.

use std::ops::Range;

use crate::ops::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use crate::param::ParamId;
use crate::{Result, Step, Tensor, refuse};

/// Provided methods that apply one function to every element.
macro_rules! functions {
    ($($name:ident = $function:ident;)*) => {$(
        #[doc = concat!("As [`Tensor::", stringify!($name), "`].")]
        ///
        /// # Errors
        /// As [`activation`](Value::activation).
        fn $name(self) -> Result<Self> {
            self.activation(Activation::$function)
        }
    )*};
}

/// The operations that a value has itself, as `$each! { ... }`.
macro_rules! operations {
    ($each:ident) => {
        $each! {
            add(other: Self);
            sub(other: Self);
            mul(other: Self);
            div(other: Self);
            scale(factor: f32);
            softmax(dim: usize);
            log_softmax_dim(dim: usize);
            matmul(weight: ParamId);
            linear(weight: ParamId, bias: Option<ParamId>, act: Act);
            bmm(other: Self);
            bmm_transposed(other: Self);
            reshape(shape: &[usize]);
            flatten();
            permute(order: &[usize]);
            sum(dims: &[usize], keep: bool);
            mean(dims: &[usize], keep: bool);
            max(dims: &[usize], keep: bool);
            slice(dim: usize, range: Range<usize>);
            cumsum(dim: usize);
            rotary(heads: usize, base: f64, first: usize);
            detach();
            dropout(p: f64);
            dropout2d(p: f64);
            layer_norm(shape: &[usize], affine: (Option<ParamId>, Option<ParamId>), eps: f64);
            rms_norm(weight: Option<ParamId>, eps: f64);
            group_norm(groups: usize, affine: (Option<ParamId>, Option<ParamId>), eps: f64);
            batch_norm(options: &BatchNormOptions, residual: Option<Self>, act: Act);
            conv1d(weight: ParamId, bias: Option<ParamId>, options: Conv2dOptions, act: Act);
            conv2d(weight: ParamId, bias: Option<ParamId>, options: Conv2dOptions, act: Act);
            conv_transpose2d(weight: ParamId, bias: Option<ParamId>, options: Conv2dOptions, extra: [usize; 2]);
            max_pool2d(options: impl Into<MaxPool2dOptions>);
            avg_pool2d(options: impl Into<AvgPool2dOptions>);
            adaptive_avg_pool2d(height: usize, width: usize);
            adaptive_max_pool2d(height: usize, width: usize);
            global_avg_pool();
        }
    };
}

/// Declares methods that do what [`Tensor`]'s of the same name do.
macro_rules! declare {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        #[doc = concat!("As [`Tensor::", stringify!($name), "`].")]
        ///
        /// # Errors
        /// `Usage` when the sizes do not fit.
        fn $name(self $(, $arg: $type)*) -> Result<Self>;
    )*};
}

/// Defines the methods that [`Tensor`] has itself.
macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        fn $name(self $(, $arg: $type)*) -> Result<Self> {
            Tensor::$name(self $(, $arg)*)
        }
    )*};
}

/// A value of one training step that layers and models can compute with, such as
/// [`Tensor`]. Layers and models are generic over it:
///
/// ```
/// use phalanx_nn::layers::Linear;
/// use phalanx_nn::{Result, Value};
///
/// struct Mlp(Linear, Linear);
///
/// impl Mlp {
///     fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
///         self.1.forward(self.0.forward(x)?.gelu()?)
///     }
/// }
/// ```
///
/// Operations are those of [`Tensor`], with the same shapes and errors. Images are
/// (N, H, W, C).
pub trait Value<'s>: Sized {
    /// Whether [`attention`](Value::attention) is one operation; otherwise it is made of several.
    const ATTENDS_AT_ONCE: bool = false;

    /// A second handle to the same value.
    #[must_use]
    fn share(&self) -> Self;

    /// Sizes, outermost first.
    fn shape(&self) -> Vec<usize>;

    /// Whether dropout drops here: in a step that trains, but for parts under [`evaluate`](Value::evaluate).
    fn is_training(&self) -> bool;

    /// An input of the same step that gets no gradient. `data` is equal on all ranks.
    ///
    /// # Errors
    /// `Usage` when data and shape disagree.
    fn constant(&self, data: &[f32], shape: &[usize]) -> Result<Self>;

    /// Values one after another along dimension `dim`, as [`Step::concat`].
    ///
    /// # Errors
    /// As [`Step::concat`].
    fn concat(values: Vec<Self>, dim: usize) -> Result<Self>;

    /// Values of one shape, one after another along a new dimension `dim`. PyTorch: `stack`.
    ///
    /// # Errors
    /// `Usage` when there is none, shapes or steps differ, or there is no place `dim`.
    fn stack(values: Vec<Self>, dim: usize) -> Result<Self> {
        let mut all = Vec::with_capacity(values.len());
        for value in values {
            let mut shape = value.shape();
            if dim > shape.len() {
                refuse!("stack along dimension {dim} of values of shape {shape:?}");
            }
            shape.insert(dim, 1);
            all.push(value.reshape(&shape)?);
        }
        Self::concat(all, dim)
    }

    /// Parts of these sizes along dimension `dim`. PyTorch: `split`.
    ///
    /// # Errors
    /// `Usage` when the sizes do not add up to the dimension's.
    fn split(self, sizes: &[usize], dim: usize) -> Result<Vec<Self>> {
        let shape = self.shape();
        let total = sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if total.is_none() || total != shape.get(dim).copied() {
            refuse!("split of shape {shape:?} into sizes {sizes:?} along dimension {dim}");
        }
        let mut end = 0;
        let part = |&n: &usize| {
            end += n;
            self.share().slice(dim, end - n..end)
        };
        sizes.iter().map(part).collect()
    }

    /// As many equal parts along dimension `dim`; if they cannot be equal, the last one is smaller, and there may be
    /// fewer. PyTorch: `chunk`.
    ///
    /// # Errors
    /// `Usage` for no parts, or a dimension that does not exist.
    fn chunk(self, parts: usize, dim: usize) -> Result<Vec<Self>> {
        let shape = self.shape();
        let (Some(&n), 1..) = (shape.get(dim), parts) else {
            refuse!("chunk of shape {shape:?} into {parts} parts along dimension {dim}");
        };
        let each = n.div_ceil(parts).max(1);
        let sizes = (0..n.max(1)).step_by(each).map(|at| each.min(n - at));
        self.split(&sizes.collect::<Vec<_>>(), dim)
    }

    /// Runs `part` of a model whose inner values backward recomputes, as
    /// [`Tensor::recompute`].
    ///
    /// # Errors
    /// Those of `part`.
    fn recompute<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R>;

    /// Runs `part` of a model as in an evaluation, as [`Tensor::evaluate`].
    ///
    /// # Errors
    /// Those of `part`.
    fn evaluate<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R>;

    /// `function` of every element.
    ///
    /// # Errors
    /// None for a [`Tensor`] at present; operations share one signature.
    fn activation(self, function: Activation) -> Result<Self>;

    functions! {
        relu = Relu;
        relu6 = Relu6;
        gelu = Gelu;
        gelu_tanh = GeluTanh;
        silu = Silu;
        hardswish = Hardswish;
        hardsigmoid = Hardsigmoid;
        sigmoid = Sigmoid;
        tanh = Tanh;
        exp = Exp;
        log = Log;
        sqrt = Sqrt;
        abs = Abs;
    }

    /// As [`Tensor::leaky_relu`].
    ///
    /// # Errors
    /// As [`activation`](Value::activation).
    fn leaky_relu(self, slope: f32) -> Result<Self> {
        self.activation(Activation::LeakyRelu(slope))
    }

    /// As [`Tensor::pow`].
    ///
    /// # Errors
    /// As [`activation`](Value::activation).
    fn pow(self, exponent: f32) -> Result<Self> {
        self.activation(Activation::Pow(exponent))
    }

    /// As [`Tensor::clamp`].
    ///
    /// # Errors
    /// As [`activation`](Value::activation).
    fn clamp(self, low: f32, high: f32) -> Result<Self> {
        self.activation(Activation::Clamp(low, high))
    }

    operations!(declare);

    /// `x + number`.
    ///
    /// # Errors
    /// Those of [`constant`](Value::constant).
    fn add_scalar(self, number: f32) -> Result<Self> {
        let number = self.constant(&[number], &[1])?;
        self.add(number)
    }

    /// The Euclidean norm over dimension `dim`, which becomes 1 if it is kept. The gradient at 0 is 0. PyTorch: `vector_norm`.
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist.
    fn norm(self, dim: usize, keep: bool) -> Result<Self> {
        let squares = self.share().mul(self)?.sum(&[dim], keep)?;
        // s / sqrt(s), whose gradient is finite at 0.
        let root = squares.share().clamp(f32::MIN_POSITIVE, f32::INFINITY)?;
        squares.div(root.sqrt()?)
    }

    /// `x / max(norm, eps)` with the norm over dimension `dim`. PyTorch: `F.normalize`, where eps is 1e-12.
    ///
    /// # Errors
    /// `Usage` for a dimension that does not exist.
    fn normalize(self, dim: usize, eps: f32) -> Result<Self> {
        let norm = self.share().norm(dim, true)?;
        self.div(norm.clamp(eps, f32::INFINITY)?)
    }

    /// The cosine of the angle between vectors along dimension `dim`, which is dropped; the other sizes are broadcast. Norms
    /// are at least 1e-8. PyTorch: `F.cosine_similarity`.
    ///
    /// # Errors
    /// `Usage` when the shapes do not fit.
    fn cosine_similarity(self, other: Self, dim: usize) -> Result<Self> {
        let other = other.normalize(dim, 1e-8)?;
        self.normalize(dim, 1e-8)?.mul(other)?.sum(&[dim], false)
    }

    /// As [`Tensor::attention`].
    ///
    /// # Errors
    /// As [`Tensor::attention`].
    fn attention(
        self,
        key: Self,
        value: Self,
        heads: usize,
        causal: bool,
        dropout: Option<f64>,
    ) -> Result<Self> {
        let mask = if causal {
            Mask::Causal(None)
        } else {
            Mask::Open
        };
        attend_stepwise(heads, [self, key, value], mask, dropout)
    }

    /// As [`Tensor::log_softmax`]: over the last dimension.
    ///
    /// # Errors
    /// `Usage` for a value without dimensions.
    fn log_softmax(self) -> Result<Self> {
        let Some(last) = self.shape().len().checked_sub(1) else {
            refuse!("log_softmax of a value without dimensions");
        };
        self.log_softmax_dim(last)
    }

    /// As [`Tensor::transpose`]: dimensions `a` and `b` exchanged.
    ///
    /// # Errors
    /// `Usage` when one of them is not there.
    fn transpose(self, a: usize, b: usize) -> Result<Self> {
        let shape = self.shape();
        if a.max(b) >= shape.len() {
            refuse!("transpose of dimensions {a} and {b} of shape {shape:?}");
        }
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.swap(a, b);
        self.permute(&order)
    }
}

impl<'s> Value<'s> for Tensor<'s> {
    const ATTENDS_AT_ONCE: bool = true;

    fn share(&self) -> Self {
        Tensor::share(self)
    }

    fn shape(&self) -> Vec<usize> {
        Tensor::shape(self)
    }

    fn is_training(&self) -> bool {
        self.step().learns()
    }

    fn constant(&self, data: &[f32], shape: &[usize]) -> Result<Self> {
        self.step().input(data, shape)
    }

    fn concat(values: Vec<Self>, dim: usize) -> Result<Self> {
        let Some(first) = values.first() else {
            refuse!("concat of no tensors");
        };
        first.step().concat(values, dim)
    }

    fn recompute<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        Tensor::recompute(self, part)
    }

    fn evaluate<R>(self, part: impl FnOnce(Self) -> Result<R>) -> Result<R> {
        Tensor::evaluate(self, part)
    }

    fn activation(self, function: Activation) -> Result<Self> {
        self.unary(function)
    }

    operations!(forward);
    forward! {
        // Without the allocations of the provided methods.
        log_softmax();
        attention(key: Self, value: Self, heads: usize, causal: bool, dropout: Option<f64>);
        transpose(a: usize, b: usize);
    }
}

/// Which keys a query sees.
pub(crate) enum Mask<V> {
    /// All.
    Open,
    /// Its own position's and those before it; with this [`last_causal_mask`], if it is made already.
    Causal(Option<V>),
    /// This is added to the scores.
    Added(V),
}

/// The mask added to scores (.., queries, keys) so that each of the last `queries` positions attends to itself and those before
/// it.
pub(crate) fn last_causal_mask<'s, V: Value<'s>>(of: &V, queries: usize, keys: usize) -> Result<V> {
    let Some(before) = keys.checked_sub(queries) else {
        refuse!("causal attention of {queries} queries to only {keys} keys");
    };
    let above = |i: usize| i % keys > i / keys + before;
    let closed = |i| if above(i) { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..queries * keys).map(closed).collect();
    of.constant(&mask, &[queries, keys])
}

/// Scaled dot-product attention of projected values (N, L, E), by heads, with an operation for each step; `dropout` zeroes
/// weights.
pub(crate) fn attend_stepwise<'s, V: Value<'s>>(
    heads: usize,
    [q, k, v]: [V; 3],
    mask: Mask<V>,
    dropout: Option<f64>,
) -> Result<V> {
    let shape = q.shape();
    let &[n, l, width] = &*shape else {
        refuse!("attention needs (N, L, E), got shape {shape:?}");
    };
    if heads == 0 || !width.is_multiple_of(heads) {
        refuse!("{heads} heads do not divide a width of {width}");
    }
    let each = width / heads;
    let mask = match mask {
        Mask::Open => None,
        Mask::Causal(None) => Some(last_causal_mask(&q, l, k.shape().get(1).map_or(0, |n| *n))?),
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

/// A step that looks up rows of a parameter, such as `&Step`: embeddings and models of
/// tokens take it in addition to the tokens.
pub trait ValueStep<'s>: Copy {
    /// Result of a look-up.
    type Value: Value<'s>;
    /// The numbers of a batch, such as `[u32]`.
    type Tokens: ?Sized;

    /// Row `tokens[i]` of `weight` (rows, width) for every i, as [`Step::embedding`].
    ///
    /// # Errors
    /// As [`Step::embedding`].
    fn embedding(
        self,
        weight: ParamId,
        tokens: &Self::Tokens,
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Self::Value>;

    /// As [`embedding`](Self::embedding) of indices that are equal on all ranks, such as
    /// positions.
    ///
    /// # Errors
    /// As [`Step::embedding`].
    fn constant_embedding(
        self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<Self::Value>;
}

impl<'s, 'a: 's> ValueStep<'s> for &'s Step<'a> {
    type Value = Tensor<'s>;
    type Tokens = [u32];

    fn embedding(
        self,
        weight: ParamId,
        tokens: &[u32],
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Tensor<'s>> {
        Step::embedding(self, weight, tokens, shape, padding)
    }

    fn constant_embedding(
        self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<Tensor<'s>> {
        Step::embedding(self, weight, indices, shape, None)
    }
}
