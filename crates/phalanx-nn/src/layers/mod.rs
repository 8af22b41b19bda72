//! Layers: plain structs that hold parameter ids.

mod avg_pool2d;
mod batch_norm;
mod conv2d;
mod dropout;
mod linear;
mod max_pool2d;

pub use crate::ops::{
    Act, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, JoinStatistics, MaxPool2dOptions,
    RunningStats,
};
pub use avg_pool2d::AvgPool2d;
pub use batch_norm::{BatchNorm, BatchNorm1d, BatchNorm2d};
pub use conv2d::Conv2d;
pub use dropout::Dropout;
pub use linear::Linear;
pub use max_pool2d::MaxPool2d;
