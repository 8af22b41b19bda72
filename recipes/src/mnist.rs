//! `train mnist`: PyTorch's basic MNIST CNN with SGD.

use phalanx::Subcommand;
use phalanx::data::augment::{Augmentation, Edge, Flip};
use phalanx::prelude::*;

use crate::flyte::Flyte;
use crate::format::{number, on_or_off};
use crate::shared::digits::DigitArgs;
use crate::shared::image::{ImageArgs, Tests, check_share};
use crate::{Engine, EngineArgs, Loss, Network, Pixels};

/// For `predict` and `bench train`; the training below has its own dropout.
pub const NETWORK: Network = Network {
    timed: Some("PyTorch's basic MNIST CNN"),
    ..Network::new(
        "mnist_cnn",
        "MNIST CNN",
        [28, 28, 1],
        Pixels::Normalised,
        Loss::Nll,
        |scope, _, _| {
            let net = MnistCnn::new(scope);
            Box::new(move |images| net.forward(images))
        },
    )
};

pub fn program<E: EngineArgs>() -> Subcommand {
    Program::new()
        .name("mnist")
        .about("PyTorch's basic MNIST CNN on MNIST, Fashion-MNIST or synthetic digits")
        .defaults(Defaults::new(3, 64, 0.05))
        .check(Mnist::<E>::check)
        .printing(|args| args.images.printing())
        .subcommand(train)
}

/// Flags of `train mnist`.
#[derive(Debug, Clone, clap::Args)]
struct Mnist<E: EngineArgs> {
    #[command(flatten)]
    data: DigitArgs,
    /// SGD momentum
    #[arg(long, visible_alias = "sgd-momentum", default_value_t = 0.9)]
    momentum: f64,
    /// Cosine schedule: decrease the learning rate from --lr to zero over all steps
    #[arg(long)]
    cosine: bool,
    /// Dropout probabilities before and after the first linear layer
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0.25,0.5",
        value_name = "FIRST,SECOND"
    )]
    dropout: Vec<f64>,
    /// Shift each training image at random by up to this many pixels in each direction, anew in every epoch
    #[arg(long, default_value_t = 0, value_name = "PIXELS")]
    shift: usize,
    #[command(flatten)]
    images: ImageArgs<E>,
}

fn train<E: EngineArgs>(job: &Job<'_>, args: &Mnist<E>) -> Result<()> {
    let document = args.images.document;
    let mut lines = Flyte { document };
    let engine = args.images.engine.open(job.context(), true)?;
    lines.started(job.context(), engine.is_cuda())?;
    let data = args.data.load(job, args.augmentation())?;
    lines.loaded(job.context())?;
    // `check` has made sure that there are two.
    let dropout = |i: usize| args.dropout.get(i).copied().unwrap_or_default();
    let net = engine.on(|scope| MnistCnn::with_dropout(scope, dropout(0), dropout(1)));
    let sgd = |params: &Params, lr| Sgd::new(params, lr).momentum(args.momentum);
    let builder = job.trainer(&data.train, net, sgd);
    let mut trainer = (args.images.describe(builder, (&NETWORK, &engine), &data)?)
        .optimizer_title(&args.optimizer_title(job.settings().lr()))
        .try_schedule(|lr, steps| {
            let cosine = || Schedule::cosine(lr, steps, 0.0);
            args.cosine.then(cosine).transpose()
        })
        .hyperparameters(args.shaping())
        .files(Files {
            accuracies: Some("mnist_cnn_accuracies.json".into()),
            ..NETWORK.files(NETWORK.pixels, NETWORK.views, data.about_own())
        })
        .reporter(Box::new(lines))
        .start()?;
    let (images, loss) = (&args.images, NETWORK.loss);
    let mut tests = Tests::of(&mut trainer, images, &data, loss)?;
    tests.train(&mut trainer)?;
    trainer.finish().map(drop)
}

impl<E: EngineArgs> Mnist<E> {
    fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        self.images.check(settings, world)?;
        check_share("--momentum", self.momentum)?;
        if self.dropout.len() != 2 || !self.dropout.iter().all(|p| (0.0..1.0).contains(p)) {
            return Err(Error::usage(
                "--dropout takes two shares in 0..1 (1 excluded), as in --dropout 0.25,0.5",
            ));
        }
        if self.shift >= synthetic::SIDE {
            return Err(Error::usage(format!(
                "--shift must be less than the {} pixels of a digit's side",
                synthetic::SIDE
            )));
        }
        self.data.check()
    }

    fn augmentation(&self) -> Option<Augmentation> {
        (self.shift > 0).then_some(Augmentation {
            shift: self.shift,
            edge: Edge::Constant([mnist::normalised()[0]; 3]),
            flip: Flip::Never,
            cutout: 0,
        })
    }

    fn optimizer_title(&self, lr: f64) -> String {
        let falling = if self.cosine {
            ", falling along a cosine"
        } else {
            ""
        };
        format!("SGD lr {} momentum {}{falling}", number(lr), self.momentum)
    }

    /// The flags that shape the training, a flag and its value a line.
    fn shaping(&self) -> Vec<String> {
        let dropout: Vec<String> = self.dropout.iter().map(f64::to_string).collect();
        vec![
            format!("--momentum {}", self.momentum),
            format!("--dropout {}", dropout.join(",")),
            format!("--cosine {}", on_or_off(self.cosine)),
            format!("--shift {}", self.shift),
        ]
    }
}
