//! Activations as layers, for lists of layers and settings.

use crate::{Result, Tensor};

/// A function applied to every element.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// [`Tensor::relu`]
    Relu,
    /// [`Tensor::relu6`]
    Relu6,
    /// [`Tensor::leaky_relu`] with this slope
    LeakyRelu(f32),
    /// [`Tensor::gelu`]
    Gelu,
    /// [`Tensor::gelu_tanh`]
    GeluTanh,
    /// [`Tensor::silu`]
    Silu,
    /// [`Tensor::hardswish`]
    Hardswish,
    /// [`Tensor::hardsigmoid`]
    Hardsigmoid,
    /// [`Tensor::sigmoid`]
    Sigmoid,
    /// [`Tensor::tanh`]
    Tanh,
}

impl Activation {
    /// # Errors
    /// None at present; layers share one signature.
    pub fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        match *self {
            Activation::Relu => x.relu(),
            Activation::Relu6 => x.relu6(),
            Activation::LeakyRelu(slope) => x.leaky_relu(slope),
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::Hardswish => x.hardswish(),
            Activation::Hardsigmoid => x.hardsigmoid(),
            Activation::Sigmoid => x.sigmoid(),
            Activation::Tanh => x.tanh(),
        }
    }
}
