//! Weights and resumable state of a training in files: PyTorch's `.pth`, safetensors, and checkpoints from which a training
//! continues bit for bit.
//!
//! Three layers, each on the one before: [`pth`] reads and writes PyTorch's files, the functions of this page save and load the
//! weights of a model, and [`state`] adds the optimizer, the place in the data and the program's own values. All files are
//! written to a temporary name and renamed: a reader finds the old file or the new one.

#![forbid(unsafe_code)]

pub mod digest;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod load;
mod lora;
#[doc(hidden)]
pub mod pickle;
pub mod pth;
pub mod state;
mod weights;

pub use load::{
    LoadOptions, Loaded, load_params, load_params_with, read_each, read_metadata, read_shapes,
    read_tensors,
};
pub use lora::{Adapter, AdapterConfig};
pub use weights::{
    Outline, TensorId, Values, full_values, save_params, save_params_with, save_pth, save_pth_with,
    save_tensors, weights_digest, weights_digest_with, weights_sha256, write_params_with,
    write_pth_with,
};
