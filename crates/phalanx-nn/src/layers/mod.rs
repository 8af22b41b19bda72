//! Layers: plain structs that hold parameter ids.

mod conv2d;
mod dropout;
mod linear;
mod max_pool2d;

pub use crate::ops::{Act, Conv2dOptions, MaxPool2dOptions};
pub use conv2d::Conv2d;
pub use dropout::Dropout;
pub use linear::Linear;
pub use max_pool2d::MaxPool2d;
