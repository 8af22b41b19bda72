//! Layers: plain structs that hold parameter ids.

mod avg_pool2d;
mod batch_norm;
mod conv1d;
mod conv2d;
mod conv_transpose2d;
mod dropout;
mod embedding;
mod group_norm;
mod layer_norm;
mod linear;
mod max_pool2d;
mod multi_head_attention;
mod recurrent;

pub use crate::ops::{
    Act, Activation, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, Interpolation,
    JoinStatistics, MaxPool2dOptions, RunningStats,
};
pub use avg_pool2d::AvgPool2d;
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d};
pub use conv_transpose2d::ConvTranspose2d;
pub use conv1d::Conv1d;
pub use conv2d::Conv2d;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use group_norm::{GroupNorm, InstanceNorm};
pub use layer_norm::{LayerNorm, RmsNorm};
pub use linear::Linear;
pub use max_pool2d::MaxPool2d;
pub use multi_head_attention::{KvCache, MultiHeadAttention};
pub(crate) use multi_head_attention::{attend, causal_mask};
pub use recurrent::{Gru, Lstm, RnnOptions, RnnState};

use crate::param::{Init, Layout, ParamId, Scope};

/// PyTorch's `weight` and, if there is one, `bias` of a layer, with its initial values:
/// uniform, by the number of inputs of each output.
fn weight_and_bias(
    scope: &mut Scope,
    (shape, layout): (&[usize], Layout),
    fan_in: usize,
    outputs: Option<usize>,
) -> (ParamId, Option<ParamId>) {
    let weight = scope.param("weight", shape, layout, Init::KaimingUniform { fan_in });
    let init = Init::FanInUniform { fan_in };
    let bias = outputs.map(|n| scope.param("bias", &[n], Layout::Same, init));
    (weight, bias)
}
