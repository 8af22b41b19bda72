//! Operations, one file each: shape checks, forward, what is saved, backward.
//! `tape/README.md` has the table of what each one saves.

pub(crate) mod adaptive_max_pool2d;
pub(crate) mod arithmetic;
pub(crate) mod attention;
pub(crate) mod avg_pool2d;
pub(crate) mod batch_norm;
pub(crate) mod bmm;
pub(crate) mod cast;
pub(crate) mod conv2d;
pub(crate) mod conv_transpose2d;
pub(crate) mod cross_entropy;
pub(crate) mod cumsum;
pub(crate) mod custom;
pub(crate) mod dropout;
pub(crate) mod element_loss;
pub(crate) mod embedding;
pub(crate) mod interpolate;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod max_pool2d;
pub(crate) mod nll;
pub(crate) mod parameter;
pub(crate) mod permute;
pub(crate) mod reduction;
pub(crate) mod rotary;
pub(crate) mod select;
pub(crate) mod slice;
pub(crate) mod softmax;
pub(crate) mod unary;
pub(crate) mod weight;

use phalanx_kernels::elementwise::Clip;

pub use avg_pool2d::AvgPool2dOptions;
pub use batch_norm::{BatchNormOptions, BatchStatistics, JoinStatistics, RunningStats};
pub use conv2d::Conv2dOptions;
pub use interpolate::Interpolation;
pub use max_pool2d::MaxPool2dOptions;
pub use phalanx_kernels::activation::Activation;
pub use weight::Weight;

/// A function fused to the end of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// Nothing.
    #[default]
    None,
    /// max(0, x); its derivative at 0 is 0.
    Relu,
    /// min(max(0, x), 6); its derivative at 0 and at 6 is 0.
    Relu6,
}

impl Act {
    /// Its bounds; NaN where there is none (comparisons with it are false).
    pub(crate) fn clip(self) -> Clip {
        let (low, high) = match self {
            Act::None => (f32::NAN, f32::NAN),
            Act::Relu => (0.0, f32::NAN),
            Act::Relu6 => (0.0, 6.0),
        };
        Clip { low, high }
    }
}

/// `a kernel of 3 x 3 with stride 1 x 1, padding 0 x 0`, for messages.
fn window(what: &str, size: [usize; 2], others: &[(&str, [usize; 2])]) -> String {
    let others = others
        .iter()
        .map(|(name, [h, w])| format!("{name} {h} x {w}"));
    let others: Vec<String> = others.collect();
    let [h, w] = size;
    format!("a {what} of {h} x {w} with {}", others.join(", "))
}
