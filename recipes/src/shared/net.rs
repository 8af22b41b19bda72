//! Networks from images to scores, and what commands other than `train` know of them.

use phalanx::data::ImageDataset;
use phalanx::data::cifar10::Scaling;
use phalanx::nn::losses::CrossEntropyOptions;
use phalanx::nn::{Reduction, Result, Scope, Tensor};
use phalanx::train::{Files, choice_name};

use super::views::Views;

/// A network: images (N, H, W, C) to scores (N, classes).
pub type Net = Box<dyn for<'s> Fn(Tensor<'s>) -> Result<Tensor<'s>>>;

/// A recipe's network.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// As `predict --model` and a checkpoint's metadata have it.
    pub model: &'static str,
    /// For people.
    pub title: &'static str,
    /// Height, width, channels.
    pub image: [usize; 3],
    /// Classes, where the data are not one's own.
    pub classes: usize,
    /// Whether it takes images of other sizes, and any number of classes.
    pub any_size: bool,
    /// Registers its parameters, for so many classes. With `true`, blocks recompute their activations in backward.
    pub build: fn(&mut Scope, bool, usize) -> Net,
    /// What it is trained with by default.
    pub pixels: Pixels,
    /// What training minimizes.
    pub loss: Loss,
    /// Whether it has blocks that can recompute.
    pub has_blocks: bool,
    /// Whether it can be trained with other pixels than by default.
    pub other_pixels: bool,
    /// The views of an image that it is tested on after training.
    pub views: Views,
    /// Its line in `bench train --help`, where that times it.
    pub timed: Option<&'static str>,
}

impl Network {
    /// One without blocks, always trained with these pixels, not timed.
    pub const fn new(
        model: &'static str,
        title: &'static str,
        image: [usize; 3],
        pixels: Pixels,
        loss: Loss,
        build: fn(&mut Scope, bool, usize) -> Net,
    ) -> Network {
        Network {
            model,
            title,
            image,
            classes: 10,
            any_size: false,
            build,
            pixels,
            loss,
            has_blocks: false,
            other_pixels: false,
            views: Views::One,
            timed: None,
        }
    }

    /// Checks that it takes the images of `set`, which are its `kind` ("test images").
    ///
    /// # Errors
    ///
    /// Usage, with both sizes.
    pub fn check_images(&self, set: &dyn ImageDataset, kind: &str) -> phalanx::Result<()> {
        let shown = |shape: [usize; 3]| shape.map(|n| n.to_string()).join(" x ");
        let [.., channels] = set.image_shape();
        let fits = self.any_size && channels == self.image[2];
        match fits || set.image_shape() == self.image {
            true => Ok(()),
            false => Err(phalanx::Error::usage(format!(
                "{} has {kind} of {}, the network {} takes {} (height, width, channels)",
                set.name(),
                shown(set.image_shape()),
                self.model,
                shown(self.image)
            ))),
        }
    }

    /// The files of its training, which say what `phalanx predict` must know of the weights: the pixels, the views of an image that it
    /// was tested on, and what is known of the user's `own` images.
    pub fn files(&self, pixels: Pixels, views: Views, own: Vec<(&'static str, String)>) -> Files {
        let mut files = Files {
            model: self.model.to_owned(),
            weights: Some(format!("{}.safetensors", self.model)),
            ..Files::default()
        };
        if self.image[2] > 1 {
            files.about.push(("pixels", choice_name(&pixels)));
            if views != Views::One {
                files.about.push(("views", choice_name(&views)));
            }
            files.about.extend(own);
        }
        files
    }
}

/// What a byte of a colour image becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Pixels {
    /// 0 to 1
    Unit,
    /// Normalized with the training set's mean and standard deviation
    Normalised,
}

impl Pixels {
    /// The same for the data set.
    pub fn scaling(self) -> Scaling {
        match self {
            Pixels::Unit => Scaling::Unit,
            Pixels::Normalised => Scaling::Normalised,
        }
    }
}

/// What training minimizes. Validation takes the same without smoothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Of scores that are log-probabilities.
    Nll,
    /// Of scores as they are.
    CrossEntropy {
        /// The share of the target that is spread over all classes.
        smoothing: f64,
    },
}

impl Loss {
    /// The loss of scores (N, classes), divided by `divisor`.
    ///
    /// # Errors
    ///
    /// `Usage` when labels do not fit.
    pub fn of<'s>(self, scores: Tensor<'s>, labels: &[u32], divisor: f32) -> Result<Tensor<'s>> {
        match self {
            Loss::Nll => scores.nll_loss(labels, divisor),
            Loss::CrossEntropy { smoothing: 0.0 } => scores.cross_entropy(labels, divisor),
            Loss::CrossEntropy { smoothing } => {
                let options = CrossEntropyOptions {
                    label_smoothing: smoothing,
                    reduction: Reduction::Sum,
                    ..CrossEntropyOptions::default()
                };
                scores
                    .cross_entropy_with(labels, options)?
                    .scale(1.0 / divisor)
            }
        }
    }

    /// The same without smoothing.
    pub fn plain(self) -> Loss {
        match self {
            Loss::Nll => Loss::Nll,
            Loss::CrossEntropy { .. } => Loss::CrossEntropy { smoothing: 0.0 },
        }
    }
}
