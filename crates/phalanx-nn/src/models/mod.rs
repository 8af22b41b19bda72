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
