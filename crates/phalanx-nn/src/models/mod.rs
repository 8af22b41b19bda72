//! Models of the recipes, with PyTorch's parameter names.

mod linear_toy;
mod mnist_cnn;
mod mobilenet;
mod resnet;
pub mod resnet9;

pub use linear_toy::LinearToy;
pub use mnist_cnn::MnistCnn;
pub use mobilenet::MobileNetV2;
pub use resnet::{CifarResNet, ResNet};
pub use resnet9::ResNet9;

use crate::{Result, Tensor};

/// Runs a part of a model, whose values backward makes again if so wished.
fn run<'s>(
    recomputes: bool,
    x: Tensor<'s>,
    part: impl FnOnce(Tensor<'s>) -> Result<Tensor<'s>>,
) -> Result<Tensor<'s>> {
    if recomputes {
        x.recompute(part)
    } else {
        part(x)
    }
}
