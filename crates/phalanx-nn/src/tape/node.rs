//! Recorded operations: an enum in a vector whose capacity is kept, so that
//! recording allocates nothing.

use super::backward::Pass;
use super::segment::Compute;
use super::state::SlotId;
use crate::error::{Error, Result};
use crate::ops;
use crate::param::ParamId;
use crate::pool::Buf;

/// What a node names.
pub(crate) enum Visit {
    /// Its output slot.
    Output(SlotId),
    /// A slot it read, which may want a gradient.
    Input(SlotId),
    /// A slot whose value its backward will read.
    Saved(SlotId),
    /// A parameter whose gradient it contributes to, once.
    Param(ParamId),
}

/// One recorded operation.
pub(crate) trait Recorded {
    /// Names everything the node refers to; the output comes first.
    fn visit(&self, f: &mut dyn FnMut(Visit));

    /// Turns the gradient of the output into gradients of parameters and
    /// inputs. `dy` may be overwritten and passed on.
    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()>;

    /// Whether [`again`](Self::again) can make the output's bits from the inputs.
    /// Where not, a recomputed segment keeps the output.
    fn repeats(&self) -> bool {
        false
    }

    /// The output's elements, made again. The values of all inputs are there.
    fn again(&self, _: &mut Compute<'_>) -> Result<Buf> {
        Err(Error::internal("an operation cannot be run again"))
    }
}

macro_rules! nodes {
    ($($name:ident($ty:ty)),* $(,)?) => {
        /// All kinds of recorded operations.
        pub(crate) enum Node { $($name($ty)),* }

        $(impl From<$ty> for Node {
            fn from(n: $ty) -> Node { Node::$name(n) }
        })*

        impl Node {
            /// What the operation is called.
            pub(crate) fn name(&self) -> &'static str {
                match self { $(Node::$name(_) => stringify!($name)),* }
            }

            /// The first parameter it uses.
            pub(crate) fn param(&self) -> Option<ParamId> {
                let mut first = None;
                self.visit(&mut |v| {
                    if let Visit::Param(p) = v {
                        first = first.or(Some(p));
                    }
                });
                first
            }

            /// The slot it fills.
            pub(crate) fn output(&self) -> Option<SlotId> {
                let mut out = None;
                self.visit(&mut |v| {
                    if let Visit::Output(s) = v {
                        out = Some(s);
                    }
                });
                out
            }
        }

        impl Recorded for Node {
            fn visit(&self, f: &mut dyn FnMut(Visit)) {
                match self { $(Node::$name(n) => n.visit(f)),* }
            }
            fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
                match self { $(Node::$name(n) => n.backward(pass, dy)),* }
            }
            fn repeats(&self) -> bool {
                match self { $(Node::$name(n) => n.repeats()),* }
            }
            fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
                match self { $(Node::$name(n) => n.again(c)),* }
            }
        }
    };
}

nodes! {
    AdaptiveMaxPool2d(ops::adaptive_max_pool2d::AdaptiveMaxPool2d),
    Add(ops::add::Add),
    AvgPool2d(ops::avg_pool2d::AvgPool2d),
    ConvTranspose2d(ops::conv_transpose2d::ConvTranspose2d),
    Embedding(ops::embedding::Embedding),
    LayerNorm(ops::layer_norm::LayerNorm),
    PreparedLoss(ops::cross_entropy::Prepared),
    Binary(ops::arithmetic::Binary),
    Bmm(ops::bmm::Bmm),
    Cast(ops::cast::Cast),
    Concat(ops::slice::Concat),
    Permute(ops::permute::Permute),
    Reduction(ops::reduction::Reduction),
    Slice(ops::slice::Slice),
    Softmax(ops::softmax::Softmax),
    Unary(ops::unary::Unary),
    BatchNorm(ops::batch_norm::BatchNorm),
    Conv2d(ops::conv2d::Conv2d),
    Custom(ops::custom::Custom),
    Dropout(ops::dropout::Dropout),
    Flatten(ops::flatten::Flatten),
    Linear(ops::linear::Linear),
    LogSoftmax(ops::log_softmax::LogSoftmax),
    MaxPool2d(ops::max_pool2d::MaxPool2d),
    Mse(ops::mse::Mse),
    Nll(ops::nll::Nll),
    Relu(ops::relu::Relu),
    Reshape(ops::reshape::Reshape),
    Scale(ops::scale::Scale),
}
