//! `train mnist`: PyTorch's basic MNIST CNN with SGD.

use phalanx_data::augment::{Augmentation, Edge, Flip};
use phalanx_data::{mnist, synthetic};
use phalanx_nn::models::MnistCnn;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Params, Scope};
use phalanx_train::{Defaults, Files};

use crate::error::{Error, Result};
use crate::flyte::Flyte;
use crate::format::{number, on_or_off};
use crate::shared::digits::DigitArgs;
use crate::shared::image::{ImageArgs, Lines, Program, Source, Spec, check_share, fields};
use crate::{Loss, Network, Pixels, Recipe};

pub const RECIPE: Recipe = Recipe::of::<Mnist>(
    "PyTorch's basic MNIST CNN on MNIST, Fashion-MNIST or synthetic digits",
    &[],
);

/// Arguments of `train mnist`.
#[derive(Debug, Clone, clap::Args)]
struct Mnist {
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
    flyte: Flyte,
    #[command(flatten)]
    images: ImageArgs,
}

impl Program for Mnist {
    type Net = MnistCnn;
    const NAME: &'static str = "mnist";
    const NETWORK: Network = Network {
        timed: Some("PyTorch's basic MNIST CNN"),
        ..Network::new(
            "mnist_cnn",
            "MNIST CNN",
            [28, 28, 1],
            Pixels::Normalised,
            Loss::Nll,
            |scope, _| Box::new(MnistCnn::new(scope)),
        )
    };
    const DEFAULTS: Defaults = Defaults::new(3, 64, 0.05);

    fields!(data);

    fn files(&self) -> Files {
        Files {
            weights: Some("mnist_cnn.safetensors".into()),
            accuracies: Some("mnist_cnn_accuracies.json".into()),
            ..Files::default()
        }
    }

    fn spec(&self) -> Spec {
        let mut spec = Spec::new(&Self::NETWORK);
        spec.preparation.augmentation = (self.shift > 0).then_some(Augmentation {
            shift: self.shift,
            edge: Edge::Constant([mnist::normalised()[0]; 3]),
            flip: Flip::Never,
            cutout: 0,
        });
        spec
    }

    fn validate(&self) -> Result<()> {
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
        Ok(())
    }

    fn must_agree(&self) -> Vec<String> {
        let dropout: Vec<String> = self.dropout.iter().map(f64::to_string).collect();
        vec![
            format!("--momentum {}", self.momentum),
            format!("--dropout {}", dropout.join(",")),
            format!("--cosine {}", on_or_off(self.cosine)),
            format!("--shift {}", self.shift),
        ]
    }

    fn net(&self, scope: &mut Scope) -> MnistCnn {
        // `validate` has counted them.
        let share = |i: usize| self.dropout.get(i).copied().unwrap_or_default();
        MnistCnn::with_dropout(scope, share(0), share(1))
    }

    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer> {
        Box::new(Sgd::new(params, lr).momentum(self.momentum))
    }

    fn optimizer_title(&self, lr: f64) -> String {
        let falling = if self.cosine {
            ", falling along a cosine"
        } else {
            ""
        };
        let lr = number(lr);
        format!("SGD lr {lr} momentum {}{falling}", self.momentum)
    }

    fn schedule(&self, lr: f64, steps: u64) -> Result<Option<Schedule>> {
        match self.cosine {
            true => Ok(Some(Schedule::cosine(lr, steps, 0.0)?)),
            false => Ok(None),
        }
    }

    fn lines(&self) -> Box<dyn Lines> {
        Box::new(self.flyte.clone())
    }
}
