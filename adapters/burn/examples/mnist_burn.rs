//! A CNN on MNIST with Burn, on any number of ranks. The lines that data-parallel training needs end in `// ranks`.
//!
//! ```text
//! cargo run --release -p phalanx-burn --example mnist_burn -- --nproc-per-node 2
//! cargo run --release -p phalanx-burn --features wgpu --example mnist_burn -- --nproc-per-node 2 --device wgpu
//! ```

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use phalanx_burn::comm::ReduceOp;
use phalanx_burn::{
    DeviceChoice, DistributedDataParallel, RankContext, ReplicaOptions, Result, clap,
};
use phalanx_data::sampler::{Sampler, SamplerConfig};
use phalanx_data::{Dataset as _, ImageBatch, ImageDataset, mnist};

/// Trains a CNN on MNIST.
#[derive(clap::Args)]
struct Args {
    /// Folder with MNIST's files, or synthetic
    #[arg(long, default_value = "synthetic")]
    data: String,
    /// Number of epochs
    #[arg(long, default_value_t = 3)]
    epochs: u64,
    /// Samples a step, over all ranks
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// Micro-batches into which each rank divides its samples of a step
    #[arg(long, value_name = "N", default_value = "1")]
    micro_batches: NonZeroUsize,
    /// Share of the values that dropout sets to 0
    #[arg(long, default_value_t = 0.3)]
    dropout: f64,
    /// Train and test on the first N samples only
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    samples: usize,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// auto, cpu, wgpu, vulkan or cuda; a card by its number, as in cuda:0; a software device as wgpu:cpu
    #[arg(long, default_value_t)]
    device: DeviceChoice,
    /// Seed of the first weights, the shuffling and dropout
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    norm: BatchNorm,
    conv2: Conv2d,
    pool: MaxPool2d,
    fc1: Linear,
    dropout: Dropout,
    fc2: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device, dropout: f64) -> Cnn {
        Cnn {
            conv1: Conv2dConfig::new([1, 8], [5, 5]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            conv2: Conv2dConfig::new([8, 16], [5, 5]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            fc1: LinearConfig::new(256, 64).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            fc2: LinearConfig::new(64, 10).init(device),
        }
    }

    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.norm.forward(self.conv1.forward(images));
        let x = self.pool.forward(relu(x));
        let x = self.pool.forward(relu(self.conv2.forward(x)));
        let x = relu(self.fc1.forward(x.flatten::<2>(1, 3)));
        self.fc2.forward(self.dropout.forward(x))
    }
}

/// Images (number, channels, height, width) and labels of these samples.
pub(crate) fn read(
    set: &Arc<dyn ImageDataset>,
    epoch: u64,
    indices: &[u64],
    device: &Device,
) -> Result<(Tensor<4>, Tensor<1, Int>)> {
    let mut batch = ImageBatch::default();
    set.read_batch(epoch, indices, &mut batch)?;
    let labels: Vec<i64> = batch.labels.iter().map(|label| i64::from(*label)).collect();
    let labels = TensorData::new(labels, [batch.len()]);
    let images = TensorData::new(batch.images.clone(), batch.shape());
    let images = Tensor::<4>::from_data(images, device);
    Ok((
        images.permute([0, 3, 1, 2]),
        Tensor::from_data(labels, device),
    ))
}

/// Divides `indices` into micro-batches: index i belongs to micro-batch i modulo `parts`.
fn divided(indices: &[u64], parts: usize) -> Vec<Vec<u64>> {
    let part = |first| indices.iter().copied().skip(first).step_by(parts);
    (0..parts).map(|first| part(first).collect()).collect()
}

fn train(rank: &RankContext, args: &Args) -> Result<()> {
    let (train, test) = mnist::open(&args.data, args.seed)?;
    let mut options = ReplicaOptions::default(); // ranks
    let device = args.device.open(rank, &mut options)?.autodiff(); // ranks
    device.seed(args.seed.wrapping_add(rank.rank() as u64)); // ranks
    let model = Cnn::new(&device, args.dropout);
    let (mut ddp, mut model) = DistributedDataParallel::new(&rank.group(), model, options)?; // ranks
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let sampler = |samples, shuffle| {
        let config = SamplerConfig {
            samples,
            shuffle,
            seed: args.seed,
            rank: rank.rank(),   // ranks
            world: rank.world(), // ranks
        };
        Sampler::exact(config, args.batch_size)
    };
    let train_order = sampler(train.len().min(args.samples), true)?;
    let test_order = sampler(test.len().min(args.samples), false)?;
    for epoch in 0..args.epochs {
        let mut totals = [0f64; 4]; // loss and samples in training; right answers and samples in the test
        for part in train_order.epoch(epoch).iter() {
            let micro_batches = divided(&part.indices, args.micro_batches.get());
            let sizes: Vec<usize> = micro_batches.iter().map(Vec::len).collect();
            // The last batch may be smaller on some ranks, or empty.
            let mut step = ddp.begin(&sizes)?; // ranks
            for indices in micro_batches.iter().filter(|indices| !indices.is_empty()) {
                let (images, labels) = read(&train, epoch, indices, &device)?;
                let loss = cross_entropy.forward(model.forward(images), labels);
                step.add(&model, GradientsParams::from_grads(loss.backward(), &model))?; // ranks
                totals[0] += f64::from(loss.into_scalar::<f32>()) * indices.len() as f64;
                totals[1] += indices.len() as f64;
            }
            let gradients = step.finish(&model)?; // ranks
            model = optimizer.step(args.lr, model, gradients);
        }
        model = ddp.sync_statistics(model)?; // ranks
        let valid = model.valid();
        for part in test_order
            .epoch(0)
            .iter()
            .filter(|part| !part.indices.is_empty())
        {
            let (images, labels) = read(&test, 0, &part.indices, &device.clone().inner())?;
            let guess = valid.forward(images).argmax(1).flatten::<1>(0, 1);
            let right = guess.equal(labels).int().sum().into_scalar::<i64>();
            totals[2] += right as f64;
            totals[3] += part.indices.len() as f64;
        }
        rank.group().all_reduce(&mut totals, ReduceOp::Sum)?; // ranks
        if rank.is_main() {
            // ranks
            rank.line(&format!(
                "epoch {}  loss {:.4}  accuracy {:.2} %  weights {}",
                epoch + 1,
                totals[0] / totals[1],
                100.0 * totals[2] / totals[3],
                &ddp.digest(&model)?[..16]
            ))?;
        }
    }
    ddp.verify_equal(&model) // ranks
}

fn main() -> ExitCode {
    phalanx_burn::main_with(train) // ranks
}
