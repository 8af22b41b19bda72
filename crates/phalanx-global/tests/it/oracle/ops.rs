//! The operations under test, on one rank's tensors and on global ones alike.

use std::ops::Range;

use phalanx_global::{Global, GlobalStep, Indices};
use phalanx_nn::layers::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use phalanx_nn::losses::CrossEntropyOptions;
use phalanx_nn::{ParamId, Reduction, Result, Step, Tensor, Value, ValueStep};

/// One operation with its settings. Operands and parameters are given when it runs.
#[derive(Clone, Debug)]
pub enum Op {
    Function(Activation),
    /// The provided methods of the trait, by name.
    Named(&'static str),
    Add,
    Sub,
    Mul,
    Div,
    Scale(f32),
    Softmax(usize),
    LogSoftmax(usize),
    Cumsum(usize),
    Rotary,
    Matmul,
    Linear(Act),
    Bmm,
    BmmTransposed,
    Reshape(Vec<usize>),
    Flatten,
    Permute(Vec<usize>),
    Transpose(usize, usize),
    Sum(Vec<usize>, bool),
    Mean(Vec<usize>, bool),
    Max(Vec<usize>, bool),
    Slice(usize, Range<usize>),
    Concat(usize),
    Dropout,
    Dropout2d,
    LayerNorm(Vec<usize>),
    RmsNorm,
    GroupNorm(usize),
    BatchNorm(Act),
    Conv1d(Conv2dOptions, Act),
    Conv2d(Conv2dOptions, Act),
    ConvTranspose2d(Conv2dOptions, [usize; 2]),
    MaxPool(MaxPool2dOptions),
    AvgPool(AvgPool2dOptions),
    AdaptiveAvg(usize, usize),
    AdaptiveMax(usize, usize),
    GlobalAvg,
    Recompute,
    Evaluate,
    Embedding(Option<u32>),
    Nll(Reduction),
    CrossEntropy(Reduction),
    /// With smoothing and weights of classes.
    CrossEntropyWith(Reduction),
    Mse(Reduction),
    L1(Reduction),
    Bce(Reduction),
    Shares(Reduction),
}

/// What a test of both kinds of tensors needs beside [`Value`].
pub trait Backend<'s>: Copy {
    type V: Value<'s>;
    type Ix;
    fn rows(self, table: ParamId, of: &Self::Ix, padding: Option<u32>) -> Result<Self::V>;
    fn over_classes(self, op: &Op, x: Self::V, labels: &Self::Ix) -> Result<Self::V>;
    fn over_elements(self, op: &Op, x: Self::V, target: &Self::V) -> Result<Self::V>;
}

const CLASS_WEIGHTS: [f32; 4] = [0.5, 2.0, 1.0, 0.25];

fn smoothed(reduction: Reduction) -> CrossEntropyOptions<'static> {
    CrossEntropyOptions {
        label_smoothing: 0.125,
        class_weights: Some(&CLASS_WEIGHTS),
        reduction,
    }
}

/// Numbers and their shape.
pub type Numbers = (Vec<u32>, Vec<usize>);

impl<'s, 'a: 's> Backend<'s> for &'s Step<'a> {
    type V = Tensor<'s>;
    type Ix = Numbers;

    fn rows(self, table: ParamId, of: &Numbers, padding: Option<u32>) -> Result<Tensor<'s>> {
        ValueStep::embedding(self, table, &of.0, &of.1, padding)
    }

    fn over_classes(self, op: &Op, x: Tensor<'s>, labels: &Numbers) -> Result<Tensor<'s>> {
        match op {
            Op::Nll(r) => x.nll_loss(&labels.0, *r),
            Op::CrossEntropy(r) => x.cross_entropy(&labels.0, *r),
            Op::CrossEntropyWith(r) => x.cross_entropy_with(&labels.0, smoothed(*r)),
            other => unreachable!("{other:?}"),
        }
    }

    fn over_elements(self, op: &Op, x: Tensor<'s>, target: &Tensor<'s>) -> Result<Tensor<'s>> {
        match op {
            Op::Mse(r) => x.mse_loss(target.data(), *r),
            Op::L1(r) => x.l1_loss(target.data(), *r),
            Op::Bce(r) => {
                let weights = positive(x.shape().last());
                let weights = Some(&*weights).filter(|w| !w.is_empty());
                x.bce_with_logits(target.data(), weights, *r)
            }
            Op::Shares(r) => x.cross_entropy_shares(target.data(), shares(*r)),
            other => unreachable!("{other:?}"),
        }
    }
}

fn shares(reduction: Reduction) -> CrossEntropyOptions<'static> {
    CrossEntropyOptions {
        class_weights: None,
        ..smoothed(reduction)
    }
}

/// Weights of the elements of the last axis.
fn positive(wide: Option<&usize>) -> Vec<f32> {
    let wide = wide.copied().unwrap_or(1);
    (0..wide).map(|i| 0.5 + i as f32 / 4.0).collect()
}

impl<'s, 'a: 's> Backend<'s> for &'s GlobalStep<'a> {
    type V = Global<'s>;
    type Ix = Indices;

    fn rows(self, table: ParamId, of: &Indices, padding: Option<u32>) -> Result<Global<'s>> {
        ValueStep::embedding(self, table, of, of.layout().shape(), padding)
    }

    fn over_classes(self, op: &Op, x: Global<'s>, labels: &Indices) -> Result<Global<'s>> {
        match op {
            Op::Nll(r) => x.nll_loss(labels, *r),
            Op::CrossEntropy(r) => x.cross_entropy(labels, *r),
            Op::CrossEntropyWith(r) => x.cross_entropy_with(labels, smoothed(*r)),
            other => unreachable!("{other:?}"),
        }
    }

    fn over_elements(self, op: &Op, x: Global<'s>, target: &Global<'s>) -> Result<Global<'s>> {
        match op {
            Op::Mse(r) => x.mse_loss(target, *r),
            Op::L1(r) => x.l1_loss(target, *r),
            Op::Bce(r) => {
                let weights = positive(Value::shape(&x).last());
                x.bce_with_logits(target, Some(&weights), *r)
            }
            Op::Shares(r) => x.cross_entropy_shares(target, shares(*r)),
            other => unreachable!("{other:?}"),
        }
    }
}

impl Op {
    /// Runs it on operands, numbers (if it takes any) and parameters.
    pub fn run<'s, B: Backend<'s>>(
        &self,
        backend: B,
        operands: Vec<B::V>,
        numbers: Option<&B::Ix>,
        ids: &[ParamId],
    ) -> Result<B::V> {
        let (w, b) = (ids.first().copied(), ids.get(1).copied());
        if let Op::Embedding(padding) = self {
            return backend.rows(ids[0], numbers.unwrap(), *padding);
        }
        if let Op::Concat(dim) = self {
            return B::V::concat(operands, *dim);
        }
        let mut all = operands.into_iter();
        let x = all.next().unwrap();
        let mut other = || all.next().unwrap();
        match self {
            Op::Function(f) => x.activation(*f),
            Op::Named(name) => match *name {
                "relu" => x.relu(),
                "relu6" => x.relu6(),
                "gelu" => x.gelu(),
                "gelu_tanh" => x.gelu_tanh(),
                "silu" => x.silu(),
                "hardswish" => x.hardswish(),
                "hardsigmoid" => x.hardsigmoid(),
                "sigmoid" => x.sigmoid(),
                "tanh" => x.tanh(),
                "exp" => x.exp(),
                "leaky_relu" => x.leaky_relu(0.25),
                "log_softmax" => x.log_softmax(),
                "share" => Ok(x.share()),
                name => unreachable!("{name}"),
            },
            Op::Add => x.add(other()),
            Op::Sub => x.sub(other()),
            Op::Mul => x.mul(other()),
            Op::Div => x.div(other()),
            Op::Scale(f) => x.scale(*f),
            Op::Softmax(d) => x.softmax(*d),
            Op::LogSoftmax(d) => x.log_softmax_dim(*d),
            Op::Cumsum(d) => x.cumsum(*d),
            Op::Rotary => x.rotary(2, 10.0, 3),
            Op::Matmul => x.matmul(ids[0]),
            Op::Linear(act) => x.linear(ids[0], b, *act),
            Op::Bmm => x.bmm(other()),
            Op::BmmTransposed => x.bmm_transposed(other()),
            Op::Reshape(shape) => x.reshape(shape),
            Op::Flatten => x.flatten(),
            Op::Permute(order) => x.permute(order),
            Op::Transpose(a, b) => x.transpose(*a, *b),
            Op::Sum(dims, keep) => x.sum(dims, *keep),
            Op::Mean(dims, keep) => x.mean(dims, *keep),
            Op::Max(dims, keep) => x.max(dims, *keep),
            Op::Slice(dim, range) => x.slice(*dim, range.clone()),
            Op::Dropout => x.dropout(0.5),
            Op::Dropout2d => x.dropout2d(0.5),
            Op::LayerNorm(shape) => x.layer_norm(shape, (w, b), 1e-3),
            Op::RmsNorm => x.rms_norm(w, 1e-3),
            Op::GroupNorm(groups) => x.group_norm(*groups, (w, b), 1e-3),
            Op::BatchNorm(act) => {
                let residual = all.next();
                let options = BatchNormOptions {
                    weight: w,
                    bias: b,
                    running: None,
                    momentum: None,
                    eps: 1e-3,
                };
                x.batch_norm(&options, residual, *act)
            }
            Op::Conv1d(o, act) => x.conv1d(ids[0], b, *o, *act),
            Op::Conv2d(o, act) => x.conv2d(ids[0], b, *o, *act),
            Op::ConvTranspose2d(o, extra) => x.conv_transpose2d(ids[0], b, *o, *extra),
            Op::MaxPool(o) => x.max_pool2d(*o),
            Op::AvgPool(o) => x.avg_pool2d(*o),
            Op::AdaptiveAvg(h, w) => x.adaptive_avg_pool2d(*h, *w),
            Op::AdaptiveMax(h, w) => x.adaptive_max_pool2d(*h, *w),
            Op::GlobalAvg => x.global_avg_pool(),
            Op::Recompute => x.recompute(|x| x.share().tanh()?.mul(x)),
            Op::Evaluate => x.evaluate(|x| {
                assert!(!x.is_training());
                x.share().dropout(0.5)?.tanh()?.mul(x)
            }),
            Op::Nll(_) | Op::CrossEntropy(_) | Op::CrossEntropyWith(_) => {
                backend.over_classes(self, x, numbers.unwrap())
            }
            Op::Mse(_) | Op::L1(_) | Op::Bce(_) | Op::Shares(_) => {
                backend.over_elements(self, x, &other())
            }
            Op::Embedding(_) | Op::Concat(_) => unreachable!("above"),
        }
    }
}
