//! The phalanx binary and facade library: train, launch, bench.
//!
//! The program lives in `main.rs`; this library gathers the crates that
//! programs build on under one name.
#![forbid(unsafe_code)]

// The program's own modules, for the fuzz targets only: a binary cannot be
// linked into another.
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod bench;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod cli;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod compare;
#[cfg(fuzzing)]
mod convert;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod download;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod error;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod export;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod inspect;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod launch;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod log;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod plan;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod predict;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod ranks;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod say;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod stop;
#[cfg(fuzzing)]
#[allow(dead_code, reason = "main.rs uses the rest")]
mod train;

mod spawn;

pub use phalanx_comm as comm;
pub use phalanx_ddp as ddp;
pub use phalanx_nn as nn;
pub use phalanx_store as store;
#[cfg(not(fuzzing))]
pub use phalanx_train as train;
pub use phalanx_wire as wire;
pub use spawn::{Cause, SpawnError, Spawned, spawn};
