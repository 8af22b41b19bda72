//! Resumable state: all that a training needs to go on as if it had never
//! stopped, at any number of ranks.
//!
//! | what | where |
//! |---|---|
//! | parameters, running statistics, the optimizer's buffers | `step-000000300.safetensors`, PyTorch's names and order of elements |
//! | place in the sampler's order, steps, settings that must agree, what was measured | `step-000000300.json`, the manifest |
//! | random numbers | nowhere: every one is a function of seed, epoch, step and sample |
//!
//! A checkpoint is its manifest. It names its data file with length and
//! SHA-256, appears only after the data is on the disk, and disappears before
//! the data does; both files are written without a name first. Whenever a
//! process is killed, the newest complete checkpoint is therefore whole, and
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

pub use background::Background;
pub use folder::Folder;
#[cfg(any(test, fuzzing))]
pub(crate) use fuzzing::{fuzz, fuzz_seeds};
pub use load::State;
pub use manifest::{Manifest, Place};
pub use optimizer::OptimizerState;
pub(crate) use snapshot::MODEL;
pub use snapshot::Snapshot;
