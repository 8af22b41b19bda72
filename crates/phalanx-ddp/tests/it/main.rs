//! The wrapper, the reducer and sharded optimizers, with ranks as threads.

mod common;
mod mixed_types;
#[cfg(feature = "nn")]
mod nn;
mod plain;
mod reducer;
