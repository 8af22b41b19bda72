//! The wrapper, the reducer and sharded optimizers, with ranks as threads.

mod common;
#[cfg(feature = "nn")]
mod nn;
mod plain;
mod reducer;
mod replica;
