//! `train resnet18`: the ResNet-18 for CIFAR-10, trained as the ModelArts document does or in a modern way.

use phalanx_data::augment::Augmentation;
use phalanx_nn::models::CifarResNet;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{Params, Scope};
use phalanx_train::{Defaults, Files};

use crate::error::Result;
use crate::format::number;
use crate::modelarts::DocumentArgs;
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{ImageArgs, Lines, Program, Source, Spec, Testers, fields};
use crate::{Loss, Network, Pixels, Recipe as Registered};
use phalanx_train::choice_name;

pub const RECIPE: Registered = Registered::of::<Resnet18>(
    "The ModelArts document's ResNet-18 on CIFAR-10; --recipe fast for few epochs",
    &[],
);

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

/// Arguments of `train resnet18`.
#[derive(Debug, Clone, clap::Args)]
struct Resnet18 {
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
    images: ImageArgs,
}

/// Epochs, batch size and learning rate of the fast recipe.
const FAST: Defaults = Defaults::new(6, 64, 0.1);

/// Weight decay of the fast recipe.
const DECAY: f64 = 5e-4;

impl Program for Resnet18 {
    type Net = CifarResNet;
    const NAME: &'static str = "resnet18";
    const NETWORK: Network = Network {
        has_blocks: true,
        other_pixels: true,
        timed: Some("The CIFAR ResNet-18 of the distributed-training guide"),
        ..Network::new(
            "resnet18",
            "CIFAR ResNet-18",
            cifar::IMAGE,
            Pixels::Unit,
            cifar::LOSS,
            |scope, recompute| Box::new(CifarResNet::resnet18(scope).recompute(recompute)),
        )
    };
    const DEFAULTS: Defaults = Defaults::new(100, 128, 0.01);
    const OTHER_DEFAULTS: Option<(&'static str, Defaults)> = Some(("--recipe fast", FAST));
    const DEFAULT_DIR: Option<&'static str> = Some("output_dir");

    fields!(cifar);

    fn files(&self) -> Files {
        Files {
            each_epoch: true,
            ..Files::default()
        }
    }

    fn spec(&self) -> Spec {
        let mut spec = Spec::new(&Self::NETWORK);
        spec.drops_last = true;
        spec.testers = Testers::Everybody;
        let (augmentation, smoothing) = match self.recipe {
            Recipe::Document => return spec,
            Recipe::Standard => (Augmentation::standard(cifar::black()), 0.0),
            Recipe::Fast => (Augmentation::fast(), 0.1),
        };
        spec.preparation.pixels = Pixels::Normalised;
        spec.preparation.augmentation = Some(augmentation);
        spec.loss = Loss::CrossEntropy { smoothing };
        spec.tests_mirrored = self.recipe == Recipe::Fast;
        spec
    }

    fn defaults(&self) -> Defaults {
        match self.recipe {
            Recipe::Document | Recipe::Standard => Self::DEFAULTS,
            Recipe::Fast => FAST,
        }
    }

    fn validate(&self) -> Result<()> {
        self.document.validate(self.images.determinism())
    }

    fn must_agree(&self) -> Vec<String> {
        let scaling = self.document.must_agree(self.images.determinism());
        vec![format!("--recipe {}", choice_name(&self.recipe)), scaling]
    }

    fn net(&self, scope: &mut Scope) -> CifarResNet {
        CifarResNet::resnet18(scope).recompute(self.recompute)
    }

    fn lr(&self, world: usize) -> f64 {
        self.document.lr(&self.images.settings, world)
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        if self.recipe != Recipe::Fast {
            return Box::new(Adam::new(params, lr));
        }
        let sgd = Sgd::new(params, lr).momentum(0.9).nesterov(true);
        Box::new(sgd.weight_decay(DECAY))
    }

    fn optimizer_title(&self, lr: f64) -> String {
        let lr = number(lr);
        if self.recipe != Recipe::Fast {
            return format!("Adam lr {lr}");
        }
        format!("SGD one cycle to lr {lr}, Nesterov momentum 0.9, decay {DECAY}")
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        let cycle = || cifar::one_cycle(lr, steps, 0.25, 0.1, 0.02);
        (self.recipe == Recipe::Fast).then(cycle).transpose()
    }

    fn lines(&self) -> Box<dyn Lines> {
        Box::new(self.document.lines(self.cifar.custom_data))
    }
}
