//! `train resnet9`: the small network of the public CIFAR-10 speed records,
//! trained as there: 80 % within minutes.

use phalanx::Subcommand;
use phalanx::data::augment::Augmentation;
use phalanx::nn::models::ResNet9;
use phalanx::prelude::*;

use crate::format::number;
use crate::modelarts::ModelArts;
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{ImageArgs, Tests, check_share};
use crate::shared::whiten;
use crate::{Loss, Network, Pixels};

pub const NETWORK: Network = Network {
    mirrored: true,
    ..Network::new(
        "resnet9",
        "CIFAR ResNet-9",
        cifar::IMAGE,
        Pixels::Normalised,
        cifar::LOSS,
        |scope, _| {
            let net = ResNet9::new(scope, cifar10::CLASSES);
            Box::new(move |images| net.forward(images))
        },
    )
};

pub fn program() -> Subcommand {
    Program::new()
        .name("resnet9")
        .about(
            "ResNet-9 on CIFAR-10, as in the training-speed records: 80 % accuracy within minutes",
        )
        .defaults(Defaults::new(3, 128, 0.4))
        .help(
            "lr",
            "Highest learning rate, for a global batch of 256 [default: 0.4]",
        )
        .check(Resnet9::check)
        .subcommand(train)
}

/// Flags of `train resnet9`.
#[derive(Debug, Clone, clap::Args)]
struct Resnet9 {
    #[command(flatten)]
    cifar: CifarArgs,
    /// Nesterov momentum of SGD
    #[arg(long, default_value_t = 0.85)]
    momentum: f64,
    /// Weight decay
    #[arg(long, default_value_t = 0.00133)]
    weight_decay: f64,
    /// Label smoothing
    #[arg(long, default_value_t = 0.2)]
    label_smoothing: f64,
    /// Cutout: side of the square erased from each training image (0: none)
    #[arg(long, default_value_t = 0, value_name = "PIXELS")]
    cutout: usize,
    #[command(flatten)]
    images: ImageArgs,
}

fn train(job: &Job<'_>, args: &Resnet9) -> Result<()> {
    let (settings, decay, momentum) = (job.settings(), args.weight_decay, args.momentum);
    let augmentation = Augmentation {
        cutout: args.cutout,
        ..Augmentation::fast()
    };
    let data = args.cifar.load(job, NETWORK.pixels, Some(augmentation))?;
    // The highest rate: as the mean of a larger batch is as long a step for more samples, it grows with it.
    let lr = settings.lr() * settings.global_batch(job.world_size()) as f64 / 256.0;
    let net = |scope: &mut Scope| ResNet9::new(scope, cifar10::CLASSES);
    let sgd = |params: &Params, lr| {
        let sgd = Sgd::new(params, lr).momentum(momentum);
        sgd.nesterov(momentum > 0.0).weight_decay(decay)
    };
    let directions = || whiten::directions(data.train.as_ref());
    let builder = job.trainer(&data.train, net, sgd);
    let mut trainer = (args.images.describe(builder, &NETWORK, &data))
        .init(|params| Ok(ResNet9::initialise(params, &directions()?)?))
        .frozen(vec!["whiten.weight".to_owned()])
        .sync_batch_norm(args.cifar.sync_batch_norm)
        .lr(lr)
        .optimizer_title(&format!(
            "SGD one cycle to lr {}, Nesterov momentum {momentum}, decay {decay}",
            number(lr)
        ))
        .try_schedule(|lr, steps| cifar::one_cycle(lr, steps, 0.23, 0.2, 0.05).map(Some))
        .drop_last(true)
        .hyperparameters([args.cifar.shaping(), args.shaping()].concat())
        .files(NETWORK.files(NETWORK.pixels, NETWORK.mirrored))
        .reporter(Box::new(ModelArts::default()))
        .start()?;
    let smoothing = args.label_smoothing;
    let (images, loss) = (&args.images, Loss::CrossEntropy { smoothing });
    let tests = Tests::of(&mut trainer, images, &data, loss, |net, x| net.forward(x))?;
    let mut tests = tests.mirrored(NETWORK.mirrored).on_every_rank();
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&data.train)? {
            trainer.step(&batch, |net, batch| {
                let scores = net.forward(batch.images()?)?;
                Ok(loss.of(scores, batch.labels(), batch.samples() as f32)?)
            })?;
        }
        tests.run(&mut trainer, epoch)?;
    }
    trainer.finish().map(drop)
}

impl Resnet9 {
    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        self.images.check(settings, world)?;
        check_share("--momentum", self.momentum)?;
        check_share("--label-smoothing", self.label_smoothing)?;
        check_share("--weight-decay", self.weight_decay)?;
        self.cifar.check(settings)
    }

    /// The flags that shape the training, a flag and its value a line.
    fn shaping(&self) -> Vec<String> {
        vec![
            format!("--momentum {}", self.momentum),
            format!("--weight-decay {}", self.weight_decay),
            format!("--label-smoothing {}", self.label_smoothing),
            format!("--cutout {}", self.cutout),
        ]
    }
}
