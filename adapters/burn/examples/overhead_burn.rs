//! What `DistributedDataParallel` costs: the CNN of `mnist_burn` is trained without averaging, with gradients averaged by hand
//! in one slice, and by `DistributedDataParallel`, a few steps of each in turn. Prints the medians of a step and
//! of the averaging in it, copies included.
//!
//! ```text
//! cargo run --release -p phalanx-burn --example overhead_burn -- --nproc-per-node 2
//! ```

use std::process::ExitCode;
use std::time::Instant;

use burn::module::{Module as _, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Tensor, TensorData};
use phalanx_burn::comm::{ProcessGroup, ReduceOp};
use phalanx_burn::{
    DeviceChoice, DistributedDataParallel, Error, ErrorKind, RankContext, ReplicaOptions, Result,
    clap,
};
use phalanx_data::mnist;

#[allow(dead_code, reason = "the model and the reader of another example")]
#[path = "mnist_burn.rs"]
mod mnist_burn;
use mnist_burn::{Cnn, read};

/// Measures the cost of averaging.
#[derive(clap::Args)]
struct Args {
    /// Folder with MNIST's files, or synthetic
    #[arg(long, default_value = "synthetic")]
    data: String,
    /// Samples of a rank in a step
    #[arg(long, default_value_t = 32)]
    batch_size: u64,
    /// Rounds; each trains some steps in each way
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Steps of a round in each way
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// auto, cpu, wgpu, vulkan or cuda; a card by its number, as in cuda:0; a software device as wgpu:cpu
    #[arg(long, default_value_t)]
    device: DeviceChoice,
}

const WAYS: [&str; 3] = ["no averaging", "one slice", "DistributedDataParallel"];

/// Copies gradients into one list, or back.
struct Copier<'a> {
    gradients: &'a mut GradientsParams,
    all: Vec<f32>,
    /// Position in `all` while copying back.
    at: Option<usize>,
}

impl ModuleVisitor for Copier<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return;
        };
        match &mut self.at {
            None => self
                .all
                .extend(gradient.into_data().as_slice::<f32>().expect("f32")),
            Some(at) => {
                let (dims, device) = (gradient.dims(), gradient.device());
                let end = *at + dims.iter().product::<usize>();
                let data = TensorData::new(self.all[*at..end].to_vec(), dims);
                self.gradients.remove::<D>(param.id);
                self.gradients
                    .register(param.id, Tensor::<D>::from_data(data, &device));
                *at = end;
            }
        }
    }
}

/// Averages the gradients as a program does that has only a process group.
fn by_hand(
    group: &ProcessGroup,
    model: &Cnn,
    mut gradients: GradientsParams,
) -> Result<GradientsParams> {
    let mut copier = Copier {
        gradients: &mut gradients,
        all: Vec::new(),
        at: None,
    };
    model.visit(&mut copier);
    group.all_reduce(&mut copier.all, ReduceOp::Mean)?;
    copier.at = Some(0);
    model.visit(&mut copier);
    Ok(gradients)
}

fn measure(rank: &RankContext, args: &Args) -> Result<()> {
    let (train, _) = mnist::open(&args.data, 0)?;
    let mut options = ReplicaOptions::default();
    let device = args.device.open(rank, &mut options)?.autodiff();
    // Backward and the optimizer only queue work on a card.
    let wait = || {
        let waited = device.sync();
        waited.map_err(|e| Error::new(ErrorKind::Failed, format!("the device failed: {e}")))
    };
    let group = rank.group();
    let model = Cnn::new(&device, 0.3);
    let (mut ddp, mut model) = DistributedDataParallel::new(&group, model, options)?;
    let mut optimizer = AdamWConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let first = rank.rank() as u64 * args.batch_size;
    let indices: Vec<u64> = (first..first + args.batch_size).collect();
    let (images, labels) = read(&train, 0, &indices, &device)?;
    let mut seconds = [const { Vec::new() }; 3];
    for _ in 0..args.rounds {
        for (way, seconds) in seconds.iter_mut().enumerate() {
            for _ in 0..args.steps {
                group.barrier()?;
                let start = Instant::now();
                let loss = cross_entropy.forward(model.forward(images.clone()), labels.clone());
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                wait()?;
                let averaging = Instant::now();
                let gradients = match way {
                    0 => gradients,
                    1 => by_hand(&group, &model, gradients)?,
                    _ => ddp.average(&model, gradients)?,
                };
                wait()?;
                let averaged = averaging.elapsed().as_secs_f64();
                model = optimizer.step(1e-3, model, gradients);
                wait()?;
                group.barrier()?;
                seconds.push((start.elapsed().as_secs_f64(), averaged));
            }
        }
    }
    for (way, seconds) in WAYS.iter().zip(seconds) {
        let (mut steps, mut averages): (Vec<f64>, Vec<f64>) = seconds.into_iter().unzip();
        steps.sort_by(f64::total_cmp);
        averages.sort_by(f64::total_cmp);
        let [step, averaging] = [steps, averages].map(|all| 1e3 * all[all.len() / 2]);
        if rank.is_main() {
            rank.line(&format!(
                "{way:24}{step:.3} ms a step, {averaging:.3} ms of it averaging ({:.1} %)",
                100.0 * averaging / step
            ))?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    phalanx_burn::main_with(measure)
}
