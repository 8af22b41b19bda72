//! Tensor handles and shapes.

mod handle;
mod shape;

pub use handle::Tensor;
pub(crate) use shape::Shape;
