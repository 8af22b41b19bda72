//! Data, checkpoints, resumable state and PyTorch's files.

mod checkpoint;
mod damage;
mod loader;
mod metrics;
mod mnist_files;
mod progress;
mod pth_common;
mod pth_hostile;
mod pth_read;
mod pth_write;
mod sampler_exact;
mod sampler_torch;
mod state;
mod synthetic;
