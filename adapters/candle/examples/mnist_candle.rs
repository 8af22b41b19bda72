//! A CNN on MNIST with candle, on any number of ranks. The lines that data-parallel training needs end in `// ranks`.
//!
//! ```text
//! cargo run --release -p phalanx-candle --example mnist_candle -- --nproc-per-node 2
//! ```

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{
    Conv2d, Dropout, Linear, Module as _, Optimizer as _, ParamsAdamW, VarBuilder, VarMap,
};
use candle_nn::{conv2d, linear, loss, ops};
use phalanx_candle::comm::ReduceOp;
use phalanx_candle::{AdamW, DistributedDataParallel, RankContext, Result, clap};
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
    #[arg(long, default_value_t = 0.5)]
    dropout: f32,
    /// Train on the first N samples only
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    samples: usize,
    /// Learning rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// File from which the training continues, and into which it is saved after each epoch
    #[arg(long)]
    checkpoint: Option<PathBuf>,
}

pub(crate) struct Cnn {
    convs: [Conv2d; 2],
    linears: [Linear; 2],
    dropout: Dropout,
}

impl Cnn {
    pub(crate) fn new(vb: VarBuilder, dropout: f32) -> candle_core::Result<Cnn> {
        Ok(Cnn {
            convs: [
                conv2d(1, 32, 5, Default::default(), vb.pp("conv1"))?,
                conv2d(32, 64, 5, Default::default(), vb.pp("conv2"))?,
            ],
            linears: [
                linear(1024, 128, vb.pp("fc1"))?,
                linear(128, 10, vb.pp("fc2"))?,
            ],
            dropout: Dropout::new(dropout),
        })
    }

    pub(crate) fn forward(&self, images: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let mut x = images.clone();
        for conv in &self.convs {
            x = conv.forward(&x)?.max_pool2d(2)?;
        }
        let x = self.linears[0].forward(&x.flatten_from(1)?)?.relu()?;
        let scores = self.linears[1].forward(&self.dropout.forward(&x, train)?)?;
        ops::log_softmax(&scores, D::Minus1)
    }
}

/// Images (number, channels, height, width) and labels of these samples.
pub(crate) fn read(
    set: &Arc<dyn ImageDataset>,
    epoch: u64,
    indices: &[u64],
) -> Result<(Tensor, Tensor)> {
    let mut batch = ImageBatch::default();
    set.read_batch(epoch, indices, &mut batch)?;
    let [n, h, w, c] = batch.shape();
    let images = Tensor::from_vec(batch.images, (n, h, w, c), &Device::Cpu)?;
    let labels = Tensor::from_vec(batch.labels, n, &Device::Cpu)?;
    Ok((images.permute((0, 3, 1, 2))?.contiguous()?, labels))
}

/// Divides `indices` into micro-batches: index i belongs to micro-batch i modulo `parts`.
fn divided(indices: &[u64], parts: usize) -> Vec<Vec<u64>> {
    let part = |first| indices.iter().copied().skip(first).step_by(parts);
    (0..parts).map(|first| part(first).collect()).collect()
}

fn train(rank: &RankContext, args: &Args) -> Result<()> {
    let (train, test) = mnist::open(&args.data, 0)?;
    let varmap = VarMap::new();
    let model = Cnn::new(
        VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu),
        args.dropout,
    )?;
    let mut ddp = DistributedDataParallel::new(&rank.group(), &varmap, Default::default())?; // ranks
    let params = ParamsAdamW {
        lr: args.lr,
        ..ParamsAdamW::default()
    };
    let mut optimizer = AdamW::new(varmap.all_vars(), params)?;
    let sampler = |samples, shuffle| {
        let config = SamplerConfig {
            samples,
            shuffle,
            seed: 0,
            rank: rank.rank(),   // ranks
            world: rank.world(), // ranks
        };
        Sampler::exact(config, args.batch_size)
    };
    let (train_order, test_order) = (
        sampler(train.len().min(args.samples), true)?,
        sampler(test.len(), false)?,
    );
    let mut first = 0;
    if let Some(path) = &args.checkpoint {
        first = ddp.load(path, &mut optimizer)?.unwrap_or(0);
    }
    for epoch in first..args.epochs {
        let mut totals = [0f64; 4]; // loss and samples in training; right answers and samples in the test
        for part in train_order.epoch(epoch).iter() {
            let micro_batches = divided(&part.indices, args.micro_batches.get());
            let sizes: Vec<usize> = micro_batches.iter().map(Vec::len).collect();
            // The last batch may be smaller on some ranks, or empty.
            let mut step = ddp.begin(&sizes)?; // ranks
            for indices in micro_batches.iter().filter(|indices| !indices.is_empty()) {
                let (images, labels) = read(&train, epoch, indices)?;
                let loss = loss::nll(&model.forward(&images, true)?, &labels)?;
                step.backward(&loss)?; // ranks
                totals[0] += f64::from(loss.to_scalar::<f32>()?) * indices.len() as f64;
                totals[1] += indices.len() as f64;
            }
            optimizer.step(&step.finish()?)?; // ranks
        }
        for part in test_order.epoch(0).iter() {
            if part.indices.is_empty() {
                continue;
            }
            let (images, labels) = read(&test, 0, &part.indices)?;
            let guess = model.forward(&images, false)?.argmax(D::Minus1)?;
            let right = guess.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?;
            totals[2] += f64::from(right.to_scalar::<f32>()?);
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
                &ddp.digest()?[..16]
            ))?;
        }
        if let Some(path) = &args.checkpoint {
            ddp.save(path, &optimizer, &(epoch + 1))?;
        }
    }
    ddp.verify_equal() // ranks
}

fn main() -> ExitCode {
    phalanx_candle::main_with(train) // ranks
}
