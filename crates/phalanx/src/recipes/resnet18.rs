//! `train resnet18`: the ModelArts document's program, and a modern recipe for
//! the same network.

use phalanx_data::augment::Augmentation;
use phalanx_data::cifar10::Scaling;
use phalanx_nn::models::CifarResNet;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{Params, Scope, Tensor};
use phalanx_train::{Defaults, Determinism, Files, RankContext, Reporter};

use super::cifar::{self, CifarArgs, Preparation};
use super::modelarts::ModelArts;
use super::prepare::Fetch;
use super::program::{Data, ImageArgs, Loss, Net, Program, Testers};
use crate::error::{Error, Result};
use crate::format::typed;

/// How the network is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Recipe {
    /// Adam at a constant rate on unnormalized images, 100 epochs
    Document,
    /// Adam on normalized images with random crops (padding 4) and flips
    Standard,
    /// One-cycle SGD with Nesterov momentum, label smoothing, crops and flips; for few epochs
    Fast,
}

/// How the learning rate is scaled. The document has it both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LrScaling {
    /// Not scaled
    None,
    /// Times the ranks of this host (the document's first listing)
    Node,
    /// Times all ranks (the document's complete listing)
    World,
}

/// Arguments of `train resnet18`.
#[derive(Debug, Clone, clap::Args)]
pub struct Resnet18Args {
    /// Accepted for compatibility with the ModelArts document; training runs on the CPU either way
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub enable_gpu: bool,
    #[command(flatten)]
    pub cifar: CifarArgs,
    /// Optimizer, schedule and augmentation
    #[arg(long, value_enum, default_value_t = Recipe::Document)]
    pub recipe: Recipe,
    /// How the learning rate is scaled [default: world; none with --deterministic shards, whose results do not
    /// depend on the number of ranks]
    #[arg(long, value_enum)]
    pub lr_scaling: Option<LrScaling>,
    /// Print the document's lines on every rank, each with its own loss
    #[arg(long)]
    pub document: bool,
    /// Recompute each block's activations in backward: less memory, more time, bit-identical results
    #[arg(long)]
    pub recompute: bool,
    #[command(flatten)]
    pub images: ImageArgs,
}

/// Where the document's program saves.
const OUTPUT_DIR: &str = "output_dir";

/// Weight decay of the fast recipe.
const DECAY: f64 = 5e-4;

impl Resnet18Args {
    fn lr_scaling(&self) -> LrScaling {
        self.lr_scaling
            .unwrap_or(match self.images.settings.split.determinism() {
                Determinism::Shards => LrScaling::None,
                _ => LrScaling::World,
            })
    }
}

impl Net for CifarResNet {
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>> {
        CifarResNet::forward(self, x)
    }
}

impl Program for Resnet18Args {
    type Net = CifarResNet;

    fn name(&self) -> &'static str {
        "resnet18"
    }

    fn title(&self) -> &'static str {
        "CIFAR ResNet-18"
    }

    fn images(&self) -> &ImageArgs {
        &self.images
    }

    fn images_mut(&mut self) -> &mut ImageArgs {
        &mut self.images
    }

    /// The recipe's values of what was not typed.
    fn defaults(&self) -> Defaults {
        match self.recipe {
            Recipe::Document | Recipe::Standard => Defaults {
                epochs: 100,
                batch_size: 128,
                lr: 0.01,
            },
            Recipe::Fast => Defaults {
                epochs: 6,
                batch_size: 64,
                lr: 0.1,
            },
        }
    }

    fn validate(&self, _world: usize) -> Result<()> {
        let shards = self.images.settings.split.determinism() == Determinism::Shards;
        if shards && self.lr_scaling() != LrScaling::None {
            return Err(Error::usage(
                "--lr-scaling makes weights depend on the number of ranks; leave it out with --deterministic shards",
            ));
        }
        self.cifar.validate(&self.images)
    }

    fn prints_on_all(&self) -> bool {
        self.document
    }

    fn default_dir(&self) -> Option<&'static str> {
        Some(OUTPUT_DIR)
    }

    fn started(&self, ctx: &RankContext) -> Result<()> {
        if self.cifar.custom_data {
            // The document's own sentence; its complete listing logs it.
            ctx.note(
                "[warning] you are training on custom random dataset, validation accuracy may range from 0.4 to 0.6.",
            );
        }
        Ok(())
    }

    fn files(&self) -> Files {
        Files {
            model: "resnet18".into(),
            about: match self.recipe {
                Recipe::Document => vec![("pixels", "unit".into())],
                Recipe::Standard => vec![("pixels", "normalised".into())],
                Recipe::Fast => {
                    vec![("pixels", "normalised".into()), ("mirrored", "true".into())]
                }
            },
            each_epoch: true,
            ..Files::default()
        }
    }

    fn data_name(&self) -> String {
        self.cifar.name()
    }

    fn must_agree(&self) -> Vec<String> {
        let mut facts = self.cifar.must_agree();
        facts.push(format!("--recipe {}", typed(&self.recipe)));
        facts.push(format!("--lr-scaling {}", typed(&self.lr_scaling())));
        facts
    }

    fn fetch(&self) -> Option<Fetch> {
        self.cifar.fetch()
    }

    fn data(&self) -> Result<Data> {
        let (scaling, augmentation) = match self.recipe {
            Recipe::Document => (Scaling::Unit, None),
            Recipe::Standard => (
                Scaling::Normalised,
                Some(Augmentation::standard(cifar::black(Scaling::Normalised))),
            ),
            Recipe::Fast => (Scaling::Normalised, Some(Augmentation::fast())),
        };
        let preparation = Preparation {
            scaling,
            augmentation,
        };
        self.cifar.load(&self.images, preparation)
    }

    fn net(&self, scope: &mut Scope) -> CifarResNet {
        CifarResNet::resnet18(scope).recompute(self.recompute)
    }

    /// The rate after scaling, when `world` ranks train.
    fn lr(&self, world: usize) -> f64 {
        let factor = match self.lr_scaling() {
            LrScaling::None => 1,
            LrScaling::Node => self.images.ranks_here.unwrap_or(world),
            LrScaling::World => world,
        };
        self.images.settings.lr() * factor as f64
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        match self.recipe {
            Recipe::Document | Recipe::Standard => Box::new(Adam::new(params, lr)),
            Recipe::Fast => {
                let sgd = Sgd::new(params, lr)
                    .momentum(0.9)
                    .nesterov(true)
                    .weight_decay(DECAY);
                Box::new(sgd)
            }
        }
    }

    fn optimizer_title(&self, lr: f64) -> String {
        match self.recipe {
            Recipe::Document | Recipe::Standard => format!("Adam lr {lr}"),
            Recipe::Fast => {
                format!("SGD one cycle to lr {lr}, Nesterov momentum 0.9, decay {DECAY}")
            }
        }
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        match self.recipe {
            Recipe::Document | Recipe::Standard => Ok(None),
            Recipe::Fast => cifar::one_cycle(lr, steps, 0.25, 0.1, 0.02).map(Some),
        }
    }

    fn loss(&self) -> Loss {
        let smoothing = match self.recipe {
            Recipe::Document | Recipe::Standard => 0.0,
            Recipe::Fast => 0.1,
        };
        Loss::CrossEntropy { smoothing }
    }

    fn tests_mirrored(&self) -> bool {
        self.recipe == Recipe::Fast
    }

    fn drops_last(&self) -> bool {
        true
    }

    fn testers(&self) -> Testers {
        Testers::Everybody
    }

    fn reporter(&self) -> Box<dyn Reporter> {
        Box::new(ModelArts {
            everybody: self.document,
        })
    }
}
