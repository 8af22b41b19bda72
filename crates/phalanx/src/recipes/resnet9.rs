//! `train resnet9`: the small network of the public CIFAR-10 speed records,
//! with their way of training it.

use phalanx_data::augment::Augmentation;
use phalanx_data::cifar10::{self, Scaling};
use phalanx_nn::models::ResNet9;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope, Tensor};
use phalanx_train::{Defaults, Files, Reporter};

use super::cifar::{self, CifarArgs, Preparation};
use super::modelarts::ModelArts;
use super::prepare::Fetch;
use super::program::{Data, ImageArgs, Loss, Net, Program, Testers};
use super::whiten;
use crate::error::{Error, Result};

/// Arguments of `train resnet9`.
#[derive(Debug, Clone, clap::Args)]
pub struct Resnet9Args {
    #[command(flatten)]
    pub cifar: CifarArgs,
    /// Nesterov momentum of SGD
    #[arg(long, default_value_t = 0.85)]
    pub momentum: f64,
    /// Weight decay
    #[arg(long, default_value_t = 0.00133)]
    pub weight_decay: f64,
    /// Label smoothing
    #[arg(long, default_value_t = 0.2)]
    pub label_smoothing: f64,
    /// Cutout: side of the square erased from each training image (0: none)
    #[arg(long, default_value_t = 0, value_name = "PIXELS")]
    pub cutout: usize,
    #[command(flatten)]
    pub images: ImageArgs,
}

impl Net for ResNet9 {
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>> {
        ResNet9::forward(self, x)
    }
}

impl Program for Resnet9Args {
    type Net = ResNet9;

    fn name(&self) -> &'static str {
        "resnet9"
    }

    fn title(&self) -> &'static str {
        "CIFAR ResNet-9"
    }

    fn images(&self) -> &ImageArgs {
        &self.images
    }

    fn images_mut(&mut self) -> &mut ImageArgs {
        &mut self.images
    }

    /// What holds where nothing was typed: 80 % within minutes.
    fn defaults(&self) -> Defaults {
        Defaults {
            epochs: 3,
            batch_size: 128,
            lr: 0.4,
        }
    }

    fn validate(&self, _world: usize) -> Result<()> {
        for (flag, value) in [
            ("--momentum", self.momentum),
            ("--label-smoothing", self.label_smoothing),
            ("--weight-decay", self.weight_decay),
        ] {
            if !(0.0..1.0).contains(&value) {
                return Err(Error::usage(format!(
                    "{flag} must lie in 0..1 (1 excluded)"
                )));
            }
        }
        self.cifar.validate(&self.images)
    }

    fn files(&self) -> Files {
        Files {
            model: "resnet9".into(),
            about: vec![("pixels", "normalised".into()), ("mirrored", "true".into())],
            weights: Some("resnet9.safetensors".into()),
            ..Files::default()
        }
    }

    fn data_name(&self) -> String {
        self.cifar.name()
    }

    fn must_agree(&self) -> Vec<String> {
        let mut facts = self.cifar.must_agree();
        facts.push(format!("--momentum {}", self.momentum));
        facts.push(format!("--weight-decay {}", self.weight_decay));
        facts.push(format!("--label-smoothing {}", self.label_smoothing));
        facts.push(format!("--cutout {}", self.cutout));
        facts
    }

    fn fetch(&self) -> Option<Fetch> {
        self.cifar.fetch()
    }

    fn data(&self) -> Result<Data> {
        let augmentation = Augmentation {
            cutout: self.cutout,
            ..Augmentation::fast()
        };
        let preparation = Preparation {
            scaling: Scaling::Normalised,
            augmentation: Some(augmentation),
        };
        self.cifar.load(&self.images, preparation)
    }

    fn net(&self, scope: &mut Scope) -> ResNet9 {
        ResNet9::new(scope, cifar10::CLASSES)
    }

    fn prepare(&self, params: &mut Params, data: &Data) -> Result<()> {
        let directions = whiten::directions(data.train.as_ref())?;
        Ok(ResNet9::initialise(params, &directions)?)
    }

    fn frozen(&self) -> Vec<String> {
        vec!["whiten.weight".to_owned()]
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
        format!(
            "SGD one cycle to lr {lr}, Nesterov momentum {}, decay {}",
            self.momentum, self.weight_decay
        )
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        cifar::one_cycle(lr, steps, 0.23, 0.2, 0.05).map(Some)
    }

    fn loss(&self) -> Loss {
        Loss::CrossEntropy {
            smoothing: self.label_smoothing,
        }
    }

    fn tests_mirrored(&self) -> bool {
        true
    }

    fn drops_last(&self) -> bool {
        true
    }

    fn testers(&self) -> Testers {
        Testers::Everybody
    }

    fn reporter(&self) -> Box<dyn Reporter> {
        Box::new(ModelArts { everybody: false })
    }
}
