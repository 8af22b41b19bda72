//! What a training program usually needs: `use phalanx::prelude::*`.

pub use std::process::ExitCode;
pub use std::sync::Arc;

pub use phalanx_comm::{ProcessGroup, ReduceOp};
pub use phalanx_data::{
    Dataset, ImageBatch, ImageDataset, Subset, TextBatch, TextDataset, Weighted, augment, cifar10,
    mnist, random_split, synthetic,
};
pub use phalanx_global::{
    Global, GlobalGrads, GlobalParams, GlobalStep, Indices, Parallel, Placement, Sbp,
};
pub use phalanx_nn::layers::*;
pub use phalanx_nn::losses::CrossEntropyOptions;
pub use phalanx_nn::models::{Gpt, GptConfig, MnistCnn};
pub use phalanx_nn::optim::schedule::{OneCycle, Plateau, Schedule};
pub use phalanx_nn::optim::{Adam, Ema, Lamb, Lion, Muon, Optimizer, ParamGroup, Rmsprop, Sgd};
pub use phalanx_nn::{
    CustomOp, Init, ParamId, Params, Reduction, Scope, Step, Tensor, Value, ValueStep, Weight,
};
pub use phalanx_train::{
    Defaults, EarlyStopping, EpochLines, Error, ErrorKind, Evaluation, Files, Job, Measure, Mesh,
    MeshArgs, MicroBatch, OnMesh, RankContext, Reporter, Result, Settings, StepBatch, StepInfo,
    Trainer, TrainerBuilder,
};

pub use crate::{Program, clap};
