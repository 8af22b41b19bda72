//! Resumable checkpoints: everything needed to continue a training with the same results,
//! on any number of ranks.
//!
//! | what | where |
//! |---|---|
//! | parameters, running statistics, the optimizer's buffers | `step-000000300.safetensors`, PyTorch's names and order of elements |
//! | position in the sampler's order, steps, settings that must agree, metrics | `step-000000300.json`, the manifest |
//! | random numbers | nowhere: each is a function of seed, epoch, step and sample |
//!
//! A checkpoint exists when its manifest exists. The manifest has the length and SHA-256 of
//! the data file; it is written after the data is on the disk and removed before the data.
//! So whenever a process is killed, the newest checkpoint is complete, and
//! [`Folder::newest`] finds it.

mod background;
mod folder;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod load;
mod manifest;
mod optimizer;
mod pace;
mod snapshot;
mod streamed;

pub use background::Background;
pub use folder::{Folder, SavedCheckpoint, manifest_name};
#[cfg(any(test, fuzzing))]
pub(crate) use fuzzing::{fuzz, fuzz_seeds};
pub(crate) use load::MAX_MANIFEST_BYTES;
pub use load::State;
pub use manifest::{Manifest, Place};
pub use optimizer::OptimizerState;
pub use snapshot::Snapshot;
pub(crate) use streamed::MODEL;
pub use streamed::Streamed;
