//! The engine against finite differences, serial folds and PyTorch's numbers.

mod anomaly;
mod common;
mod edges;
mod flops;
mod gpt;
mod gradients;
mod groups;
mod isa_bits;
mod layer_fixtures;
mod losses;
mod mobilenet;
mod more_layers;
mod more_optim;
mod operations;
mod optim_torch;
mod precision;
mod profile;
mod recompute;
mod resnet;
mod rng_philox;
mod rng_torch;
mod schedules;
mod selections;
mod training;
mod value;
mod weights;
