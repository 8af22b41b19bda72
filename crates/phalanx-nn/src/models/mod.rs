//! Models of the recipes, with PyTorch's parameter names.

mod gpt;
mod linear_toy;
mod mnist_cnn;
mod mobilenet;
mod resnet;
pub mod resnet9;
mod vit;

pub use gpt::{Gpt, GptConfig};
pub use linear_toy::LinearToy;
pub use mnist_cnn::MnistCnn;
pub use mobilenet::MobileNetV2;
pub use resnet::{CifarResNet, ResNet};
pub use resnet9::ResNet9;
pub use vit::{Vit, VitConfig};

use crate::{Result, Value};

/// Runs the blocks of a model one after another; on request backward recomputes the values
/// inside each.
fn through<'s, B, V: Value<'s>>(
    blocks: &[B],
    recomputes: bool,
    x: V,
    forward: impl Fn(&B, V) -> Result<V>,
) -> Result<V> {
    blocks.iter().try_fold(x, |x, block| match recomputes {
        true => x.recompute(|x| forward(block, x)),
        false => forward(block, x),
    })
}
