//! `train mobilenetv2`: the OneFlow document's program in its DDP form.

use phalanx_data::cifar10::{self, Scaling};
use phalanx_nn::models::MobileNetV2;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope, Tensor};
use phalanx_train::{Defaults, Evaluation, Files, RankContext, Reporter, StepFacts};

use super::cifar::{CifarArgs, Preparation};
use super::prepare::Fetch;
use super::program::{Data, ImageArgs, Loss, Net, Program, Testers};
use crate::error::Result;

/// Arguments of `train mobilenetv2`.
#[derive(Debug, Clone, clap::Args)]
pub struct MobilenetArgs {
    #[command(flatten)]
    pub cifar: CifarArgs,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    pub recompute: bool,
    #[command(flatten)]
    pub images: ImageArgs,
}

impl Net for MobileNetV2 {
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>> {
        MobileNetV2::forward(self, x)
    }
}

impl Program for MobilenetArgs {
    type Net = MobileNetV2;

    fn name(&self) -> &'static str {
        "mobilenetv2"
    }

    fn title(&self) -> &'static str {
        "MobileNetV2"
    }

    fn images(&self) -> &ImageArgs {
        &self.images
    }

    fn images_mut(&mut self) -> &mut ImageArgs {
        &mut self.images
    }

    /// The document's.
    fn defaults(&self) -> Defaults {
        Defaults {
            epochs: 1,
            batch_size: 64,
            lr: 1e-3,
        }
    }

    fn validate(&self, _world: usize) -> Result<()> {
        self.cifar.validate(&self.images)
    }

    fn files(&self) -> Files {
        Files {
            model: "mobilenetv2".into(),
            about: vec![("pixels", "unit".into())],
            weights: Some("mobilenetv2.safetensors".into()),
            ..Files::default()
        }
    }

    fn data_name(&self) -> String {
        self.cifar.name()
    }

    fn must_agree(&self) -> Vec<String> {
        self.cifar.must_agree()
    }

    fn fetch(&self) -> Option<Fetch> {
        self.cifar.fetch()
    }

    fn data(&self) -> Result<Data> {
        let preparation = Preparation {
            scaling: Scaling::Unit,
            augmentation: None,
        };
        self.cifar.load(&self.images, preparation)
    }

    /// With the head for ten classes that the document's `model.classifer` (so
    /// spelled) never puts in its place.
    fn net(&self, scope: &mut Scope) -> MobileNetV2 {
        MobileNetV2::new(scope, cifar10::CLASSES).recompute(self.recompute)
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        Box::new(Sgd::new(params, lr))
    }

    fn optimizer_title(&self, lr: f64) -> String {
        format!("SGD lr {lr}")
    }

    fn loss(&self) -> Loss {
        Loss::CrossEntropy { smoothing: 0.0 }
    }

    fn testers(&self) -> Testers {
        Testers::Rank0
    }

    fn started(&self, ctx: &RankContext) -> Result<()> {
        match ctx.is_main() {
            true => ctx.line("Using cpu device"),
            false => Ok(()),
        }
    }

    fn reporter(&self) -> Box<dyn Reporter> {
        Box::new(OneFlow {
            batch: self.images.settings.batch_size(),
        })
    }
}

/// A loss line every so many steps, as in the document.
const PRINT_EVERY: usize = 5;

/// The lines of the OneFlow document. It tests nothing; its ending is ours.
struct OneFlow {
    /// Samples of a step, as it counts them.
    batch: usize,
}

impl Reporter for OneFlow {
    fn epoch(&mut self, ctx: &RankContext, epoch: usize) -> Result<()> {
        if ctx.is_main() {
            ctx.line(&format!("Epoch {epoch}\n-------------------------------"))?;
        }
        Ok(())
    }

    fn step(&mut self, ctx: &RankContext, facts: &StepFacts) -> Option<String> {
        if !ctx.is_main() || !facts.index.is_multiple_of(PRINT_EVERY) {
            return None;
        }
        let current = facts.index * self.batch;
        Some(format!(
            "loss: {:>7.6} [{current:>5}/{:>5}]",
            facts.loss, facts.samples
        ))
    }

    fn evaluated(&mut self, ctx: &RankContext, _epoch: usize, tested: &Evaluation) -> Result<()> {
        ctx.note(&format!(
            "test loss {:.4}, accuracy {:.2} %",
            tested.loss,
            100.0 * tested.accuracy
        ));
        Ok(())
    }
}
