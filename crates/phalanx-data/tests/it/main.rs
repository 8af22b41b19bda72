//! Data sets, samplers, the loader, metrics and progress.

mod loader;
mod metrics;
mod mnist_files;
mod progress;
mod sampler_exact;
mod sampler_torch;
mod stream;
mod synthetic;
