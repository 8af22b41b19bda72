//! `train resnet9`: the small network of the public CIFAR-10 speed records,
//! trained as there: 80 % within minutes.

use phalanx_data::augment::Augmentation;
use phalanx_data::cifar10;
use phalanx_nn::models::ResNet9;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope};
use phalanx_train::Defaults;

use crate::error::Result;
use crate::format::number;
use crate::modelarts::ModelArts;
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{
    Data, ImageArgs, Lines, Program, Source, Spec, Testers, check_share, fields,
};
use crate::shared::whiten;
use crate::{Loss, Network, Pixels, Recipe};

pub const RECIPE: Recipe = Recipe::of::<Resnet9>(
    "ResNet-9 on CIFAR-10, as in the training-speed records: 80 % accuracy within minutes",
    &[(
        "lr",
        "Highest learning rate, for a global batch of 256 [default: 0.4]",
    )],
);

/// Arguments of `train resnet9`.
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

impl Program for Resnet9 {
    type Net = ResNet9;
    const NAME: &'static str = "resnet9";
    const NETWORK: Network = Network {
        mirrored: true,
        ..Network::new(
            "resnet9",
            "CIFAR ResNet-9",
            cifar::IMAGE,
            Pixels::Normalised,
            cifar::LOSS,
            |scope, _| Box::new(ResNet9::new(scope, cifar10::CLASSES)),
        )
    };
    const DEFAULTS: Defaults = Defaults::new(3, 128, 0.4);

    fields!(cifar);

    fn spec(&self) -> Spec {
        let mut spec = Spec::new(&Self::NETWORK);
        spec.preparation.augmentation = Some(Augmentation {
            cutout: self.cutout,
            ..Augmentation::fast()
        });
        spec.loss = Loss::CrossEntropy {
            smoothing: self.label_smoothing,
        };
        spec.frozen = vec!["whiten.weight".to_owned()];
        spec.drops_last = true;
        spec.testers = Testers::Everybody;
        spec
    }

    fn validate(&self) -> Result<()> {
        check_share("--momentum", self.momentum)?;
        check_share("--label-smoothing", self.label_smoothing)?;
        check_share("--weight-decay", self.weight_decay)
    }

    fn must_agree(&self) -> Vec<String> {
        vec![
            format!("--momentum {}", self.momentum),
            format!("--weight-decay {}", self.weight_decay),
            format!("--label-smoothing {}", self.label_smoothing),
            format!("--cutout {}", self.cutout),
        ]
    }

    fn net(&self, scope: &mut Scope) -> ResNet9 {
        ResNet9::new(scope, cifar10::CLASSES)
    }

    fn initialise(&self, params: &mut Params, data: &Data) -> Result<()> {
        let directions = whiten::directions(data.train.as_ref())?;
        Ok(ResNet9::initialise(params, &directions)?)
    }

    /// The highest rate: as the mean of a larger batch is as long a step for more samples, it grows with it.
    fn lr(&self, world: usize) -> f64 {
        let settings = &self.images.settings;
        settings.lr() * settings.global_batch(world) as f64 / 256.0
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        let sgd = Sgd::new(params, lr)
            .momentum(self.momentum)
            .nesterov(self.momentum > 0.0)
            .weight_decay(self.weight_decay);
        Box::new(sgd)
    }

    fn optimizer_title(&self, lr: f64) -> String {
        let Resnet9 {
            momentum,
            weight_decay,
            ..
        } = self;
        let lr = number(lr);
        format!("SGD one cycle to lr {lr}, Nesterov momentum {momentum}, decay {weight_decay}")
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        cifar::one_cycle(lr, steps, 0.23, 0.2, 0.05).map(Some)
    }

    fn lines(&self) -> Box<dyn Lines> {
        Box::new(ModelArts::default())
    }
}
