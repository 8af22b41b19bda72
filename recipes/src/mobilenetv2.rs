//! `train mobilenetv2`: torchvision's MobileNetV2 on CIFAR-10 with plain SGD.

use phalanx::Subcommand;
use phalanx::nn::models::MobileNetV2;
use phalanx::prelude::*;

use crate::format::number;
use crate::oneflow::{self, OneFlow};
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{ImageArgs, Tests};
use crate::{Engine, EngineArgs, Network, Pixels};

pub const NETWORK: Network = Network {
    any_size: true,
    has_blocks: true,
    timed: Some("torchvision's MobileNetV2 on 32 x 32 images"),
    ..Network::new(
        "mobilenetv2",
        "MobileNetV2",
        cifar::IMAGE,
        Pixels::Unit,
        cifar::LOSS,
        |scope, recompute, classes| {
            let net = MobileNetV2::new(scope, classes).recompute(recompute);
            Box::new(move |images| net.forward(images))
        },
    )
};

pub fn program<E: EngineArgs>() -> Subcommand {
    Program::new()
        .name("mobilenetv2")
        .about("The OneFlow document's MobileNetV2 on CIFAR-10")
        .defaults(Defaults::new(1, 64, 1e-3))
        .check(MobileNet::<E>::check)
        .subcommand(train)
}

/// Flags of `train mobilenetv2`.
#[derive(Debug, Clone, clap::Args)]
pub struct MobileNet<E: EngineArgs> {
    #[command(flatten)]
    pub cifar: CifarArgs,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    pub recompute: bool,
    /// Data parallel training by DistributedDataParallel, or on global tensors, as the document's first program: batch normalization then sees the batches of all ranks
    #[arg(long, value_enum, default_value_t = Parallel::Ddp)]
    parallel: Parallel,
    #[command(flatten)]
    pub images: ImageArgs<E>,
}

/// How the ranks share the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Parallel {
    /// The model whole on all ranks (SBP `B`), batches split over them (`S(0)`)
    Sbp,
    /// DistributedDataParallel: each rank has a model and a part of the batch
    Ddp,
}

fn train<E: EngineArgs>(job: &Job<'_>, args: &MobileNet<E>) -> Result<()> {
    oneflow::started(job)?;
    let data = args.cifar.load(job, NETWORK.pixels, None)?;
    // With a head for ten classes.
    let recompute = args.recompute;
    let classes = data.train.classes();
    let engine = args.images.engine.open(job.context(), true)?;
    let net = engine.on(|scope| MobileNetV2::new(scope, classes).recompute(recompute));
    let builder = job.trainer(&data.train, net, Sgd::new);
    let builder = (args.images.describe(builder, (&NETWORK, &engine), &data)?)
        .optimizer_title(&format!("SGD lr {}", number(job.settings().lr())))
        .files(NETWORK.files(NETWORK.pixels, NETWORK.views, data.about_own()))
        .reporter(Box::new(OneFlow {
            batch: job.settings().batch_size(),
        }))
        .hyperparameters(args.cifar.shaping());
    if args.parallel == Parallel::Sbp {
        return oneflow::train_by_sbp(job, builder, &data);
    }
    let builder = builder.sync_batch_norm(args.cifar.sync_batch_norm);
    let mut trainer = builder.start()?;
    let (images, loss) = (&args.images, NETWORK.loss);
    let mut tests = Tests::of(&mut trainer, images, &data, loss)?;
    tests.train(&mut trainer)?;
    trainer.finish().map(drop)
}

impl<E: EngineArgs> MobileNet<E> {
    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        self.images.check(settings, world)?;
        if self.parallel == Parallel::Sbp {
            oneflow::check_sbp(&self.images, settings)?;
        }
        self.cifar.check(settings)
    }
}
