//! CPU kernels of the engine over plain slices, with the threads that they run on: what `phalanx-nn` computes
//! with. They know nothing of tensors or the tape. A crate of its own because its loops are compiled for several instruction
//! sets: that takes longer than all that stands on it.
//!
//! Every loop is compiled for AVX-512, AVX2 and the baseline from one body and
//! uses fused multiply-adds and fixed orders of summation, so all three give
//! the same bits. Convolutions over channels in sixteens have products of their
//! own (`vector`, `panel`); others, and layers, go through [`product`]; `scalar` keeps plain references for the tests.

#[macro_use]
pub mod isa;
#[macro_use]
mod vector;
pub mod activation;
pub mod adaptive_max;
pub mod aligned;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
#[cfg(target_arch = "x86_64")]
mod bf16;
pub mod bias;
pub mod broadcast;
pub mod conv;
pub mod dropout;
pub mod element;
pub mod elementwise;
pub mod layer_norm;
mod math;
pub mod max_pool;
pub mod order;
mod panel;
pub mod par;
pub mod peak;
mod precision;
pub mod product;
pub mod reduce;
pub mod rng;
pub mod rotary;
#[cfg(test)]
mod scalar;
pub mod softmax_dim;
pub mod squares;
pub mod transpose;
pub mod update;

pub use precision::{Family, Precision};

use element::{Bf16, Element};

/// Whether a kernel overwrites its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It overwrites it.
    Write,
    /// It adds to it.
    Add,
}

/// The generic kernels, to have them compiled in this crate: another one, which may be optimised less, calls what is
/// `inline(never)` and compiled here, and compiles its own of all else that is generic.
#[doc(hidden)]
#[inline(never)]
pub fn compiled_here() -> impl Sized {
    fn of<T: Element>() -> [*const (); 7] {
        [
            batch_norm::statistics::<T> as *const (),
            batch_norm::normalise::<T> as *const (),
            batch_norm::backward_sums::<T> as *const (),
            batch_norm::gradient::<T> as *const (),
            elementwise::add::<T, T> as *const (),
            max_pool::forward::<T> as *const (),
            max_pool::backward::<T> as *const (),
        ]
    }
    let conversions = [
        element::convert::<f32, Bf16> as *const (),
        element::convert::<Bf16, f32> as *const (),
    ];
    (of::<f32>(), of::<Bf16>(), conversions)
}
