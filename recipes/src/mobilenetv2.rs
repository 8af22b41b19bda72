//! `train mobilenetv2`: torchvision's MobileNetV2 on CIFAR-10 with plain SGD.

use phalanx_data::cifar10;
use phalanx_nn::models::MobileNetV2;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope};
use phalanx_train::{Defaults, RankContext};

use crate::error::Result;
use crate::format::number;
use crate::oneflow::{self, OneFlow};
use crate::shared::cifar::{self, CifarArgs};
use crate::shared::image::{self, ImageArgs, Lines, Program, Source, Spec, fields};
use crate::{Network, Pixels, Recipe};

pub const RECIPE: Recipe =
    Recipe::of::<MobileNet>("The OneFlow document's MobileNetV2 on CIFAR-10", &[]);

/// Arguments of `train mobilenetv2`.
#[derive(Debug, Clone, clap::Args)]
struct MobileNet {
    #[command(flatten)]
    cifar: CifarArgs,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    recompute: bool,
    /// Data parallel training by DistributedDataParallel, or on global tensors, as the document's first program: batch normalization then sees the batches of all ranks
    #[arg(long, value_enum, default_value_t = Parallel::Ddp)]
    parallel: Parallel,
    #[command(flatten)]
    images: ImageArgs,
}

/// How the ranks share the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Parallel {
    /// The model whole on all ranks (SBP `B`), batches split over them (`S(0)`)
    Sbp,
    /// DistributedDataParallel: each rank has a model and a part of the batch
    Ddp,
}

impl Program for MobileNet {
    type Net = MobileNetV2;
    const NAME: &'static str = "mobilenetv2";
    const NETWORK: Network = Network {
        has_blocks: true,
        timed: Some("torchvision's MobileNetV2 on 32 x 32 images"),
        ..Network::new(
            "mobilenetv2",
            "MobileNetV2",
            cifar::IMAGE,
            Pixels::Unit,
            cifar::LOSS,
            |scope, recompute| {
                Box::new(MobileNetV2::new(scope, cifar10::CLASSES).recompute(recompute))
            },
        )
    };
    const DEFAULTS: Defaults = Defaults::new(1, 64, 1e-3);

    fields!(cifar);

    fn spec(&self) -> Spec {
        Spec::new(&Self::NETWORK)
    }

    fn validate(&self) -> Result<()> {
        match self.parallel {
            Parallel::Sbp => oneflow::check_sbp(&self.images),
            Parallel::Ddp => Ok(()),
        }
    }

    fn train(&self, ctx: &RankContext) -> Result<()> {
        match self.parallel {
            Parallel::Sbp => oneflow::train_by_sbp(ctx, self),
            Parallel::Ddp => image::run(ctx, self),
        }
    }

    /// With a head for ten classes.
    fn net(&self, scope: &mut Scope) -> MobileNetV2 {
        MobileNetV2::new(scope, cifar10::CLASSES).recompute(self.recompute)
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        Box::new(Sgd::new(params, lr))
    }

    fn optimizer_title(&self, lr: f64) -> String {
        format!("SGD lr {}", number(lr))
    }

    fn lines(&self) -> Box<dyn Lines> {
        Box::new(OneFlow {
            batch: self.images.settings.batch_size(),
        })
    }
}
