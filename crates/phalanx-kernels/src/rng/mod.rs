//! Random numbers: a counter-based generator ([`philox`]), and the loops of PyTorch's generator.

pub(crate) mod cephes;
pub mod mt19937;
pub mod numbers;
pub mod philox;
