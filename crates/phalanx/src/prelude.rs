//! What a training program usually needs: `use phalanx::prelude::*`.

pub use std::process::ExitCode;
pub use std::sync::Arc;

pub use phalanx_comm::{ProcessGroup, ReduceOp};
pub use phalanx_data::{Dataset, ImageBatch, ImageDataset, cifar10, mnist, synthetic};
pub use phalanx_nn::layers::{
    Act, BatchNorm2d, Conv2d, Dropout, Embedding, LayerNorm, Linear, MaxPool2d, MultiHeadAttention,
};
pub use phalanx_nn::models::MnistCnn;
pub use phalanx_nn::optim::schedule::Schedule;
pub use phalanx_nn::optim::{Adam, Sgd};
pub use phalanx_nn::{Params, Reduction, Scope, Tensor};
pub use phalanx_train::{
    Defaults, Error, ErrorKind, Evaluation, Job, Measure, MicroBatch, Result, Trainer,
};

pub use crate::{Program, clap};
