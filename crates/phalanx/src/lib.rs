//! The phalanx binary and facade library: train, launch, bench.
//!
//! The program lives in `main.rs`; this library gathers the crates that
//! programs build on under one name.
#![forbid(unsafe_code)]

pub use phalanx_comm as comm;
pub use phalanx_ddp as ddp;
pub use phalanx_nn as nn;
pub use phalanx_store as store;
pub use phalanx_train as train;
pub use phalanx_wire as wire;
