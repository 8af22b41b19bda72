//! CPU kernels over plain slices. They know nothing of tensors or the tape.
//!
//! Every loop is compiled for AVX-512, AVX2 and the baseline from one body and
//! uses fused multiply-adds and fixed orders of summation, so all three give
//! the same bits. Convolutions over channels in sixteens have products of their
//! own ([`vector`], [`panel`]); others, and layers, go through [`product`]; [`scalar`] keeps plain references for the tests.

#[macro_use]
pub(crate) mod isa;
#[macro_use]
pub(crate) mod vector;
pub(crate) mod activation;
pub(crate) mod adaptive_max;
pub(crate) mod attention;
pub(crate) mod avg_pool;
pub(crate) mod batch_norm;
pub(crate) mod bf16;
pub(crate) mod bias;
pub(crate) mod broadcast;
pub(crate) mod conv;
pub(crate) mod dropout;
pub(crate) mod element;
pub(crate) mod elementwise;
pub(crate) mod layer_norm;
pub(crate) mod math;
pub(crate) mod max_pool;
pub(crate) mod panel;
pub(crate) mod peak;
pub(crate) mod product;
pub(crate) mod reduce;
#[cfg(test)]
pub(crate) mod scalar;
pub(crate) mod softmax_dim;
pub(crate) mod transpose;

/// Whether a kernel overwrites its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Write,
    Add,
}
