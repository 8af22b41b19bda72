//! `train resnet50`: torchvision's ResNet-50 on a folder of images, as a rule from the weights that `--init` names.

use phalanx::Subcommand;
use phalanx::data::augment::Augmentation;
use phalanx::nn::models::ResNet;
use phalanx::prelude::*;

use crate::format::number;
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{ImageArgs, Tests};
use crate::{Engine, EngineArgs, Network, Pixels};

/// Side of the images that torchvision's weights were trained on.
const SIDE: usize = 224;

pub const NETWORK: Network = Network {
    any_size: true,
    has_blocks: true,
    ..Network::new(
        "resnet50",
        "ResNet-50",
        [SIDE, SIDE, 3],
        Pixels::Normalised,
        cifar::LOSS,
        |scope, recompute, classes| {
            let net = ResNet::resnet50(scope, classes).recompute(recompute);
            Box::new(move |images| net.forward(images))
        },
    )
};

pub fn program<E: EngineArgs>() -> Subcommand {
    Program::new()
        .name("resnet50")
        .about("torchvision's ResNet-50 on a folder of images; --init resnet50.pth --init-skip 'fc.*' fine-tunes it")
        .defaults(Defaults::new(10, 32, 0.01))
        .help("image_size", "Side in pixels to which the images of a folder of classes are resized and cropped [default: 224]")
        .check(|args: &ResNet50<E>, settings, world| {
            args.images.check(settings, world)?;
            args.cifar.check(settings)
        })
        .subcommand(train)
}

/// Flags of `train resnet50`.
#[derive(Debug, Clone, clap::Args)]
struct ResNet50<E: EngineArgs> {
    #[command(flatten)]
    cifar: CifarArgs,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    #[command(flatten)]
    images: ImageArgs<E>,
}

/// torchvision's weight decay and momentum.
const DECAY: f64 = 1e-4;
const MOMENTUM: f64 = 0.9;

fn train<E: EngineArgs>(job: &Job<'_>, args: &ResNet50<E>) -> Result<()> {
    let cifar = args.cifar.clone().with_image_size(SIDE);
    let augmentation = Augmentation::standard(cifar::black());
    let data = cifar.load(job, NETWORK.pixels, Some(augmentation))?;
    let (recompute, classes) = (args.recompute, data.train.classes());
    let engine = args.images.engine.open(job.context(), true)?;
    let net = engine.on(|scope| ResNet::resnet50(scope, classes).recompute(recompute));
    let sgd = |params: &Params, lr| {
        let sgd = Sgd::new(params, lr).momentum(MOMENTUM);
        sgd.weight_decay(DECAY)
    };
    let lr = number(job.settings().lr());
    let builder = job.trainer(&data.train, net, sgd);
    let mut trainer = (args.images.describe(builder, (&NETWORK, &engine), &data)?)
        .sync_batch_norm(cifar.sync_batch_norm)
        .optimizer_title(&format!(
            "SGD lr {lr}, falling along a cosine, momentum {MOMENTUM}, decay {DECAY}"
        ))
        .schedule(|lr, steps| Schedule::cosine(lr, steps, 0.0))
        .files(NETWORK.files(NETWORK.pixels, NETWORK.views, data.about_own()))
        .hyperparameters(cifar.shaping())
        .start()?;
    let (images, loss) = (&args.images, NETWORK.loss);
    let mut tests = Tests::of(&mut trainer, images, &data, loss)?;
    tests.train(&mut trainer)?;
    trainer.finish().map(drop)
}
