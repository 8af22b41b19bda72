//! `train resnet18`: the ResNet-18 for CIFAR-10, trained as the ModelArts document does or in a modern way.

use phalanx::Subcommand;
use phalanx::data::augment::Augmentation;
use phalanx::nn::models::CifarResNet;
use phalanx::prelude::*;
use phalanx::train::choice_name;

use crate::format::number;
use crate::modelarts::{DocumentArgs, ModelArts};
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{ImageArgs, Testers, Tests};
use crate::{Engine, EngineArgs, Loss, Network, Pixels, Views};

pub const NETWORK: Network = Network {
    any_size: true,
    has_blocks: true,
    other_pixels: true,
    timed: Some("The CIFAR ResNet-18 of the distributed-training guide"),
    ..Network::new(
        "resnet18",
        "CIFAR ResNet-18",
        cifar::IMAGE,
        Pixels::Unit,
        cifar::LOSS,
        |scope, recompute, classes| {
            let net = CifarResNet::resnet18(scope, classes).recompute(recompute);
            Box::new(move |images| net.forward(images))
        },
    )
};

pub fn program<E: EngineArgs>() -> Subcommand {
    Program::new()
        .name("resnet18")
        .about("The ModelArts document's ResNet-18 on CIFAR-10; --recipe fast for few epochs")
        .defaults(Defaults::new(100, 128, 0.01))
        .defaults_with(
            "--recipe fast",
            Defaults::new(6, 64, 0.1),
            Resnet18::<E>::is_fast,
        )
        .output_dir("output_dir")
        .check(Resnet18::<E>::check)
        .printing(|args| args.images.printing())
        .subcommand(train)
}

/// How the network is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Recipe {
    /// Adam at a constant rate on unnormalized images, 100 epochs
    Document,
    /// Adam on normalized images with random crops (padding 4) and flips
    Standard,
    /// One-cycle SGD with Nesterov momentum, label smoothing, crops and flips; for few epochs
    Fast,
}

/// Flags of `train resnet18`.
#[derive(Debug, Clone, clap::Args)]
struct Resnet18<E: EngineArgs> {
    #[command(flatten)]
    cifar: CifarArgs,
    /// Optimizer, schedule and augmentation
    #[arg(long, value_enum, default_value_t = Recipe::Document)]
    recipe: Recipe,
    #[command(flatten)]
    document: DocumentArgs,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    #[command(flatten)]
    images: ImageArgs<E>,
}

fn train<E: EngineArgs>(job: &Job<'_>, args: &Resnet18<E>) -> Result<()> {
    let augmentation = match args.recipe {
        Recipe::Document => None,
        Recipe::Standard => Some(Augmentation::standard(cifar::black())),
        Recipe::Fast => Some(Augmentation::fast()),
    };
    let pixels = augmentation.map_or(Pixels::Unit, |_| Pixels::Normalised);
    let (is_fast, recompute, decay) = (args.is_fast(), args.recompute, 5e-4);
    let (views, smoothing) = [(Views::One, 0.0), (Views::Mirrored, 0.1)][usize::from(is_fast)];
    args.cifar.warn_of_random(job.context());
    let data = args.cifar.load(job, pixels, augmentation)?;
    let (settings, classes) = (job.settings(), data.train.classes());
    let lr = args.document.lr(settings, job.world_size())?;
    let engine = (args.images.engine).open(job.context(), args.document.enable_gpu)?;
    let net = engine.on(|scope| CifarResNet::resnet18(scope, classes).recompute(recompute));
    let optimizer = |params: &Params, lr| -> Box<dyn Optimizer> {
        let sgd = || Sgd::new(params, lr).momentum(0.9).nesterov(true);
        match is_fast {
            true => Box::new(sgd().weight_decay(decay)),
            false => Box::new(Adam::new(params, lr)),
        }
    };
    let title = match (is_fast, number(lr)) {
        (true, lr) => format!("SGD one cycle to lr {lr}, Nesterov momentum 0.9, decay {decay}"),
        (false, lr) => format!("Adam lr {lr}"),
    };
    let cycle = |lr, steps| cifar::one_cycle(lr, steps, 0.25, 0.1, 0.02);
    let builder = job.trainer(&data.train, net, optimizer);
    let mut trainer = (args.images.describe(builder, (&NETWORK, &engine), &data)?)
        .sync_batch_norm(args.cifar.sync_batch_norm)
        .lr(lr)
        .optimizer_title(&title)
        .try_schedule(|lr, steps| is_fast.then(|| cycle(lr, steps)).transpose())
        .drop_last(true)
        .hyperparameters([args.cifar.shaping(), args.shaping(settings)].concat())
        .files(Files {
            weights: None,
            each_epoch: true,
            ..NETWORK.files(pixels, views, data.about_own())
        })
        .reporter(Box::new(ModelArts(args.images.document)))
        .start()?;
    let loss = Loss::CrossEntropy { smoothing };
    let mut tests = Tests::of(&mut trainer, &args.images, &data, loss)?;
    (tests.views, tests.testers) = (views, Testers::Everybody);
    tests.train(&mut trainer)?;
    trainer.finish().map(drop)
}

impl<E: EngineArgs> Resnet18<E> {
    fn is_fast(&self) -> bool {
        self.recipe == Recipe::Fast
    }

    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        self.images.check(settings, world)?;
        self.document.check(settings)?;
        self.cifar.check(settings)
    }

    /// The flags that shape the training, a flag and its value a line.
    fn shaping(&self, settings: &Settings) -> Vec<String> {
        let scaling = self.document.must_agree(settings.split.determinism());
        vec![format!("--recipe {}", choice_name(&self.recipe)), scaling]
    }
}
