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

use crate::layers::{Act, BatchNorm, Conv2d, Conv2dOptions};
use crate::param::Scope;
use crate::{Result, Value};

/// A bias-free convolution and its normalisation.
#[derive(Clone, Copy, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    /// Names in PyTorch's order of construction.
    fn new(
        scope: &mut Scope,
        [conv, norm]: [&str; 2],
        [inputs, outputs]: [usize; 2],
        options: Conv2dOptions,
    ) -> Self {
        ConvNorm {
            conv: Conv2d::new(scope.enter(conv), inputs, outputs, options.no_bias()),
            norm: BatchNorm::new(scope.enter(norm), outputs),
        }
    }

    fn forward<'s, V: Value<'s>>(&self, x: V, act: Act) -> Result<V> {
        self.norm.forward_act(self.conv.forward(x)?, act)
    }
}

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
